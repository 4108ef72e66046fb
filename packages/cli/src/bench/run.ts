/** `holdfast bench`: what Holdfast costs on somebody's server, next to what is written by hand, and to doing it wrong. */
import { confirmed, declined } from "../confirm.ts";
import { within } from "../within.ts";
import { Failure, Interrupted, exitCodes, interruptible } from "../failure.ts";
import { OwnDatabase, type OwnKind, dropStatement, leftovers, tidy } from "../own-database.ts";
import { type Server, connect, kindOf } from "../server.ts";
import { columnsOf, folded } from "../patterns/show.ts";
import { note, print, printJson } from "../terminal.ts";
import { unless } from "../unless.ts";
import { given, withoutSecrets } from "../url.ts";
import { type Timing, machine, roundCount, roundTrip } from "./measure.ts";
import { type Place, checkRoom, makePlace, placeKind } from "./place.ts";
import { type BenchResult, type SuiteResult, suiteResult } from "./result.ts";
import { Screen } from "./screen.ts";
import type { Figures, Opened, Suite, Trial } from "./suite.ts";
import { suites } from "./suites.ts";

export interface BenchOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly seconds: number;
  readonly connections: number;
  readonly list?: true;
  readonly yes?: true;
  readonly json?: true;
}

/** Returns the exit code: 0 if all is exact with Holdfast. */
export async function runBench(names: readonly string[], options: BenchOptions): Promise<number> {
  const unknown = names.find((name) => !suites.some((suite) => suite.name === name));
  if (unknown !== undefined)
    throw new Failure(
      `There is no suite ${JSON.stringify(unknown)}. There are ${suites.map(({ name }) => name).join(", ")}.`,
    );
  const wanted = suites.filter(({ name }) => names.length === 0 || names.includes(name));
  if (options.list) {
    list(wanted, options.json);
    return exitCodes.ok;
  }
  using interrupt = interruptible();
  // Whoever read it has gone, as `head` does: clean up and end.
  const unread = new AbortController();
  const onError = (): void => unread.abort(new Interrupted());
  process.stdout.on("error", onError);
  const signal = AbortSignal.any([interrupt.signal, unread.signal]);
  const screen = new Screen(options.json);
  const left: string[] = [];
  let begun = false;
  try {
    const result = await bench(wanted, options, screen, signal, left, () => (begun = true));
    if (!result) {
      declined(options.json);
      return exitCodes.no;
    }
    screen.end({ ...result, left });
    if (left.length > 0) return exitCodes.failed;
    return result.exact ? exitCodes.ok : exitCodes.no;
  } catch (error) {
    screen.clear();
    if (!(error instanceof Interrupted)) throw error;
    note(left.length > 0 || !begun ? "Stopped." : "Stopped; what was made for it is removed.");
    if (unread.signal.aborted) return exitCodes.stopped;
    throw error;
  } finally {
    process.stdout.off("error", onError);
  }
}

function list(wanted: readonly Suite[], json: boolean | undefined): void {
  const on = ["PostgreSQL", "MySQL", "MariaDB"];
  if (json) {
    printJson({
      suites: wanted.map((suite) => ({
        suite: suite.name,
        about: suite.about,
        contestants: suite.contestants,
        on,
        needsDatabase: suite.needsDatabase,
      })),
    });
    return;
  }
  for (const [i, suite] of wanted.entries()) {
    if (i > 0) print();
    for (const line of folded(`${suite.name}: ${suite.about} (${on.join(", ")})`, columnsOf())) print(line);
    const width = Math.max(...Object.keys(suite.contestants).map(({ length }) => length));
    for (const [name, what] of Object.entries(suite.contestants))
      for (const [at, line] of folded(what, columnsOf() - width - 4).entries())
        print(`  ${(at === 0 ? name : "").padEnd(width)}  ${line}`);
  }
}

/** Which of the suites can be run there, and why the others cannot. */
function choose(
  wanted: readonly Suite[],
  server: Server,
  what: OwnKind,
): { readonly chosen: Suite[]; readonly leftOut: { suite: string; why: string }[] } {
  const leftOut: { suite: string; why: string }[] = [];
  const chosen = wanted.filter((suite) => {
    const why =
      suite.needsDatabase && what === "schema"
        ? "it needs a database of its own, because the tables of Holdfast are in a schema of a fixed name, which may be in use in this one; this user may not create one (ALTER ROLE … CREATEDB)."
        : undefined;
    if (why !== undefined) leftOut.push({ suite: suite.name, why });
    return why === undefined;
  });
  if (chosen.length === 0)
    throw new Failure(
      `Nothing can be run on ${server.shown}: ${leftOut.map(({ suite, why }) => `${suite}: ${why}`).join(" ")}`,
    );
  return { chosen, leftOut };
}

/**
 * A short run has two rounds: bringing the data back takes its time too. So has one on a server that is far away, where
 * callers that stand in line take long to end each of them, and nothing drifts as much as the network.
 */
const roundsOf = (seconds: number, roundTripMs: number): number =>
  seconds >= 1 && roundTripMs < 5 ? roundCount : 2;
/** Of a trial. */
const trialMs = (seconds: number): number => Math.min(seconds, 1) * 1000;

/** Measured, half of that for warming up, the trials, and those who stand in line at the end of each. */
function estimate(
  chosen: readonly Suite[],
  { seconds, connections }: Pick<BenchOptions, "seconds" | "connections">,
  roundTripMs: number,
): string {
  const ends = roundsOf(seconds, roundTripMs) + 3;
  const total = chosen.reduce(
    (sum, { measured, contestants, inLine }) =>
      sum +
      measured * seconds * 1.5 +
      (Object.keys(contestants).length * trialMs(seconds)) / 1000 +
      (inLine(connections) * ends * roundTripMs) / 1000 +
      1,
    0,
  );
  return total < 100 ? `${Math.ceil(total)} s` : `${Math.ceil(total / 60)} min`;
}

/** Undefined: it was not wanted. */
async function bench(
  wanted: readonly Suite[],
  options: BenchOptions,
  screen: Screen,
  signal: AbortSignal,
  left: string[],
  begun: () => void,
): Promise<BenchResult | undefined> {
  const { connections, seconds, yes, url, schema } = options;
  const named = given(url);
  if (named && kindOf(named) === "sqlite")
    throw new Failure(
      `${withoutSecrets(named.url)} (${named.by}) is SQLite, whose drivers let one statement of a process run at a time: callers in one process are in nobody's way, and there is nothing to compare. What several processes on one file come to is in docs/benchmarks.md; \`npm run bench -- patterns\` in a checkout measures it.`,
    );
  await using cleanup = new AsyncDisposableStack();
  const embedded = named === undefined;
  const connecting = connect({
    url,
    schema,
    embedded: true,
    kinds: ["postgres", "mysql", "mariadb"],
    application: "holdfast bench",
    most: 2,
  });
  cleanup.defer(async () => (await connecting.catch(() => undefined))?.[Symbol.asyncDispose]());
  const server = await unless(signal, connecting);
  const version = await versionOf(server);
  const what = await placeKind(server);
  await checkRoom(server, connections);
  const { chosen, leftOut } = choose(wanted, server, what);
  const roundTripMs = await ping(server, signal);
  if (!embedded) {
    const question = `Run ${chosen.map(({ name }) => name).join(", ")} on ${server.shown} (${version}, a round trip takes ${roundTripMs.toFixed(2)} ms): about ${estimate(chosen, options, roundTripMs)} of full load with ${connections} connections, in a ${what} of its own that is removed afterwards?`;
    if (!(await confirmed(question, yes))) return undefined;
    if (yes) note(question.replace(/^Run/, "Running").replace(/\?$/, "."));
  }
  const removed = await tidy(server, await leftovers(server, "bench"), yes);
  signal.throwIfAborted();

  const own = new OwnDatabase(server, "bench", what, (each, why) => {
    left.push(each.name);
    process.stderr.write(
      `holdfast: the ${each.what} ${each.name} on ${server.shown} could not be removed: ${why}. Run holdfast bench again, which offers to, or: ${dropStatement(each)}\n`,
    );
  });
  begun();
  const place = await makePlace(server, own, connections, cleanup);
  signal.throwIfAborted();
  const head = {
    server: { kind: server.kind, version, ...(!embedded && { address: server.shown }) },
    roundTripMs,
    place: { what: place.what, name: place.name },
    connections,
    seconds,
    machine: machine(),
    leftOut,
    removed,
  };
  screen.head(head);
  const results: SuiteResult[] = [];
  for (const suite of chosen) {
    const rounds = roundsOf(seconds, roundTripMs);
    const result = await run(suite, place, { seconds, rounds, signal }, screen);
    results.push(result);
    screen.suite(result, suite);
  }
  return {
    ...head,
    suites: results,
    exact: results.every(({ trials }) => trials.every(({ own, exact }) => exact || !own)),
    left,
  };
}

async function versionOf(server: Server): Promise<string> {
  if (server.kind === "postgres") {
    const [row] = await server.query("SELECT current_setting('server_version') AS version");
    return `PostgreSQL ${String(row?.["version"])}`;
  }
  const [row] = await server.query("SELECT VERSION() AS version");
  return `${server.kind === "mysql" ? "MySQL" : "MariaDB"} ${String(row?.["version"])}`;
}

async function ping(server: Server, signal: AbortSignal): Promise<number> {
  await using session = await server.session();
  // Awaited here: the session ends with this block.
  return await unless(
    signal,
    roundTrip(() => session.query("SELECT 1"), 200, 1000),
  );
}

/** How long whatever is under way may take to end, before its sessions are ended for it. */
const patienceMs = 3000;

type Timed = Required<Omit<Timing, "onRound">>;

async function run(suite: Suite, place: Place, timing: Timed, screen: Screen): Promise<SuiteResult> {
  const { signal } = timing;
  const opening = place.family === "postgres" ? suite.postgres(place) : suite.mysql(place);
  let opened: Opened | undefined;
  try {
    opened = await unless(signal, opening);
    return await measure(suite, opened, timing, screen);
  } finally {
    const close = async (): Promise<void> =>
      (opened ?? (await opening.catch(() => undefined)))?.[Symbol.asyncDispose]();
    // Whatever is left of it ends with the database.
    await within(patienceMs, close()).catch(() => {});
  }
}

async function measure(
  suite: Suite,
  { cells, trials }: Opened,
  { seconds, rounds, signal }: Timed,
  screen: Screen,
): Promise<SuiteResult> {
  const names = Object.keys(suite.contestants);
  const steps = cells.reduce((sum, { contestants }) => sum + contestants.length * (rounds + 1), 0);
  screen.start(suite.name, steps + names.length);
  const measured: [string, readonly Figures[]][] = [];
  for (const cell of cells) {
    screen.cell(suite.name, cell.name);
    const timing = { seconds, rounds, signal, onRound: () => screen.step() };
    measured.push([cell.name, await unless(signal, cell.measure(timing))]);
  }
  screen.cell(suite.name, "is it exact");
  const tried: [string, Trial][] = [];
  for (const name of names) {
    const trial = trials[name];
    if (!trial) continue;
    tried.push([name, await unless(signal, trial({ ms: trialMs(seconds), signal }))]);
    screen.step();
  }
  return suiteResult(suite, measured, tried);
}
