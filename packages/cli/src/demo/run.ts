/** `holdfast demo`: a database of its own, processes that call at once, and what the tables say afterwards. */
import { randomBytes } from "node:crypto";
import { existsSync } from "node:fs";
import { mkdir, open, rm, writeFile } from "node:fs/promises";
import { dirname, resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import type { DemoOptions } from "./options.ts";
import { describe } from "../describe.ts";
import { startPostgres } from "../embedded.ts";
import { Failure, Interrupted, exitCodes, interruptible } from "../failure.ts";
import { createEmpty } from "../own-database.ts";
import { connect } from "../server.ts";
import { note } from "../terminal.ts";
import { unless } from "../unless.ts";
import { Crew, type CrewResult } from "./crew.ts";
import { page } from "./page.ts";
import { spareConnections } from "./protocol.ts";
import { type Place, type Race, type Way, isOurs, one } from "./race.ts";
import { races } from "./races.ts";
import { type DemoResult, type RaceResult, type WayResult, verdictOf, whatNext } from "./result.ts";
import { Screen } from "./screen.ts";

/** Of the server beyond those of the processes: ours, and those that it keeps for its superuser. */
const spareOfServer = 10;

/** Returns the exit code: 0 if all is exact with Holdfast. */
export async function runDemo(options: DemoOptions): Promise<number> {
  using interrupt = interruptible();
  // Whoever read it has gone, as `head` does: clean up and end.
  const unread = new AbortController();
  const onError = (): void => unread.abort(new Interrupted());
  process.stdout.on("error", onError);
  const signal = AbortSignal.any([interrupt.signal, unread.signal]);
  const screen = new Screen(options);
  try {
    await checkWritable(options.html);
    const result = await play(options, screen, signal);
    screen.result(result, next(result));
    if (options.html !== undefined) {
      await writeFile(resolve(options.html), page(result, next(result)));
      note(`Page: ${options.html}`);
    }
    return result.exact ? exitCodes.ok : exitCodes.no;
  } catch (error) {
    screen.clear();
    if (!(error instanceof Interrupted)) throw error;
    note("Stopped.");
    if (unread.signal.aborted) return exitCodes.stopped;
    throw error;
  } finally {
    process.stdout.off("error", onError);
  }
}

/** Before half a minute is spent on what cannot be kept. */
async function checkWritable(file: string | undefined): Promise<void> {
  if (file === undefined) return;
  try {
    const path = resolve(file);
    await mkdir(dirname(path), { recursive: true });
    const isNew = !existsSync(path);
    await (await open(path, "a")).close();
    // Nothing empty is left if it comes to nothing.
    if (isNew) await rm(path);
  } catch (error) {
    throw new Failure(`Could not write ${file}: ${describe(error)}`, { cause: error });
  }
}

function next({ races: shown }: DemoResult): ReturnType<typeof whatNext> {
  const inCheckout = existsSync(new URL("../../../../docs/choose.md", import.meta.url));
  return whatNext(
    inCheckout,
    shown.map(({ race }) => race),
  );
}

async function play(options: DemoOptions, screen: Screen, signal: AbortSignal): Promise<DemoResult> {
  const since = performance.now();
  await using cleanup = new AsyncDisposableStack();
  const { processes, callers, only } = options;
  const connections = processes * (callers + spareConnections) + spareOfServer;
  const server = await database(options.url, connections, screen, signal, cleanup);

  const pool = new Pool({ connectionString: server.url, application_name: "holdfast demo", max: 2 });
  // A lost connection is reported by the next query.
  pool.on("error", () => {});
  cleanup.defer(() => pool.end());
  const place: Place = { pool, hf: holdfast(fromPg(pool)) };
  const { version } = await unless(
    signal,
    one<{ version: string }>(pool, "SELECT current_setting('server_version') AS version"),
  );
  const chosen = races.filter(({ name }) => !only || only.includes(name));
  await unless(signal, place.hf.migrate());
  for (const race of chosen) await unless(signal, pool.query(race.tables));

  const crew = new Crew(processes, signal);
  cleanup.defer(() => crew.close());
  await crew.setUp({ url: server.url, processes, callers });

  const head = {
    postgres: version,
    ...(server.shown !== undefined && { server: server.shown }),
    processes,
    callers,
  };
  screen.introduce(head, chosen.length);
  const results: RaceResult[] = [];
  for (const [i, race] of chosen.entries()) {
    const { name, title, counts } = race;
    const what = race.what(options);
    screen.begin(i + 1, race, what);
    const ways: WayResult[] = [];
    for (const way of race.ways) {
      screen.start(way, race.total(options), race.does);
      await unless(signal, race.reset(place, way.name, options));
      const ran = await crew.run(race, way.name, (finished) => screen.progress(finished));
      const result = await unless(signal, resultOf(place, race, way, ran, options));
      ways.push(result);
      screen.finish(result);
      // Long enough for what the server and the callers did last not to count for the next one.
      await sleep(100, undefined, { signal }).catch(() => signal.throwIfAborted());
    }
    results.push({ race: name, title, what, counts, ways });
  }
  const ours = results.flatMap(({ ways }) => ways).filter(({ way }) => isOurs(way));
  return {
    exact: ours.every(({ verdict }) => verdict === "exact"),
    ...head,
    seconds: (performance.now() - since) / 1000,
    races: results,
  };
}

interface OwnDatabase {
  readonly url: string;
  /** The server, as it may be shown; undefined: it is ours. */
  readonly shown?: string;
}

/**
 * A new database, and not a schema in one that is there: the tables of Holdfast have a schema of a fixed name, which
 * somebody may use in theirs.
 */
async function database(
  url: string | undefined,
  connections: number,
  screen: Screen,
  signal: AbortSignal,
  cleanup: AsyncDisposableStack,
): Promise<OwnDatabase> {
  if (url === undefined) {
    screen.working("Starting a PostgreSQL of its own …");
    // fsync stays on: each COMMIT waits for the disk, as it does in production.
    const starting = startPostgres({
      settings: { max_connections: String(Math.max(100, connections)) },
    });
    cleanup.defer(async () => (await starting.catch(() => undefined))?.stop());
    return { url: (await unless(signal, starting)).url() };
  }
  screen.working("Connecting …");
  const connecting = connect({
    url,
    kinds: ["postgres"],
    instead: "Name none, and it starts one of its own; `holdfast certify` tries locks on this one.",
    application: "holdfast demo",
    most: 1,
  });
  cleanup.defer(async () => (await connecting.catch(() => undefined))?.[Symbol.asyncDispose]());
  const server = await unless(signal, connecting);
  const [limits] = await server.query(
    `SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
       - (SELECT count(*)::int FROM pg_stat_activity WHERE backend_type = 'client backend') AS free`,
  );
  const free = Number(limits?.["free"]);
  const needed = connections - spareOfServer + 2;
  if (free < needed)
    throw new Failure(
      `${server.shown} has ${free} connections left, and the demo takes ${needed}: use fewer --processes or --callers.`,
    );
  const name = `holdfast_demo_${randomBytes(4).toString("hex")}`;
  try {
    await createEmpty(server, name);
  } catch (error) {
    const may = (error as { code?: unknown }).code !== "42501";
    throw new Failure(
      may
        ? `Could not create a database on ${server.shown}: ${describe(error)}.`
        : `${server.shown}: this user may not create a database. The demo makes one of its own, ${name}, and drops it again: give the user that right (ALTER ROLE … CREATEDB), or leave --url out, and the demo starts a server of its own.`,
      { cause: error },
    );
  }
  cleanup.defer(async () => {
    try {
      // After Ctrl-C the sessions of the callers may take a moment to notice that nobody is there.
      await server.run(`DROP DATABASE IF EXISTS ${name} WITH (FORCE)`);
    } catch (error) {
      note(`Could not drop the database ${name} on ${server.shown}: ${describe(error)}. Drop it by hand.`);
    }
  });
  const own = new URL(url);
  own.pathname = `/${name}`;
  return { url: own.href, shown: server.shown };
}

async function resultOf(
  place: Place,
  race: Race,
  way: Way,
  { tally, latenciesMs, seconds }: CrewResult,
  options: DemoOptions,
): Promise<WayResult> {
  const { took = latenciesMs, ...found } = await race.find(place, way.name, tally, options);
  const sorted = took.toSorted((a, b) => a - b);
  const at = (share: number): number =>
    sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
  return {
    way: way.name,
    verdict: verdictOf(way.name, found),
    code: way.code,
    why: way.why,
    // A timer is one of a process, whatever its callers.
    alone: options.processes * (race.name === "cron" ? 1 : options.callers) === 1,
    ...found,
    granted: tally.granted,
    refused: tally.refused,
    failed: tally.failed,
    seconds,
    ...(race.timed && { opsPerSecond: race.total(options) / seconds }),
    ...(sorted.length > 0 && { p50Ms: at(0.5), p99Ms: at(0.99) }),
  };
}
