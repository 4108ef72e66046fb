import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { Client } from "pg";
import type { DemoOptions } from "../commands/demo.ts";
import { startPostgres } from "../embedded.ts";
import { unless } from "../unless.ts";
import { Crew } from "./crew.ts";
import { type Contestant, contestants } from "./protocol.ts";
import { type Row, Screen } from "./screen.ts";

const user = 42;
/** Connections of the server beyond those of the callers: ours, and those it keeps for its superuser. */
const spareConnections = 20;

class Interrupted extends Error {}

/** Returns the exit code: 0 if Holdfast's row is exact. */
export async function runDemo(options: DemoOptions): Promise<number> {
  const screen = new Screen(options);
  const stop = new AbortController();
  const onSignal = (): void => {
    // Asked twice: whoever waits has lost patience, and the server ends with this process anyway.
    if (stop.signal.aborted) process.exit(130);
    stop.abort(new Interrupted());
  };
  process.on("SIGINT", onSignal);
  process.on("SIGTERM", onSignal);
  try {
    const rows = await play(options, screen, stop.signal);
    screen.result(rows);
    return rows.find(({ contestant }) => contestant === "holdfast")?.exact ? 0 : 1;
  } catch (error) {
    screen.clear();
    if (!(error instanceof Interrupted)) throw error;
    screen.say("Stopped.");
    return 130;
  } finally {
    process.off("SIGINT", onSignal);
    process.off("SIGTERM", onSignal);
  }
}

async function play(options: DemoOptions, screen: Screen, signal: AbortSignal): Promise<Row[]> {
  await using cleanup = new AsyncDisposableStack();
  const { processes, callers, calls, limit } = options;
  let { url } = options;
  if (url === undefined) {
    screen.working("Starting a PostgreSQL of its own …");
    // fsync stays on: each COMMIT waits for the disk, as it does in production.
    const starting = startPostgres({
      settings: { max_connections: String(Math.max(100, processes * callers + spareConnections)) },
    });
    cleanup.defer(async () => (await starting.catch(() => undefined))?.stop());
    const server = await unless(signal, starting);
    url = server.url();
  }
  const admin = new Client({ connectionString: url, application_name: "holdfast demo" });
  // A lost connection is reported by the next query.
  admin.on("error", () => {});
  await unless(signal, admin.connect());
  cleanup.defer(() => admin.end());

  const schema = `holdfast_demo_${randomBytes(4).toString("hex")}`;
  const table = `${schema}.upload`;
  await admin.query(`CREATE SCHEMA ${schema}`);
  cleanup.defer(async () => {
    // After Ctrl-C the sessions of the callers may take a moment to notice that nobody is there.
    await admin.query("SET lock_timeout = '10s'");
    await admin.query(`DROP SCHEMA ${schema} CASCADE`);
  });
  await admin.query(
    `CREATE TABLE ${table} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, user_id bigint NOT NULL)`,
  );
  await admin.query(`CREATE INDEX ON ${table} (user_id)`);
  const { rows: versions } = await admin.query<{ version: string }>(
    "SELECT current_setting('server_version') AS version",
  );
  screen.introduce(versions[0]?.version ?? "");

  const crew = new Crew(processes, signal);
  cleanup.defer(() => crew.close());
  await crew.setUp({ url, table, user, limit, callers });

  const rows: Row[] = [];
  for (const contestant of contestants) {
    await admin.query(`TRUNCATE ${table}`);
    screen.progress(contestant, 0);
    const result = await crew.run(contestant, calls, (finished) => screen.progress(contestant, finished));
    // What counts is what the table says, not what the callers believe.
    const { rows: counted } = await admin.query<{ n: number }>(
      `SELECT count(*)::int AS n FROM ${table} WHERE user_id = $1`,
      [user],
    );
    const row = rowOf(contestant, options, counted[0]?.n ?? 0, result);
    rows.push(row);
    screen.finished(row);
    // Long enough for the servers' and the callers' last deeds not to count for the next one.
    await sleep(100);
    signal.throwIfAborted();
  }
  return rows;
}

function rowOf(
  contestant: Contestant,
  { calls, limit }: DemoOptions,
  granted: number,
  { tally, latenciesMs, seconds }: Awaited<ReturnType<Crew["run"]>>,
): Row {
  const sorted = latenciesMs.toSorted((a, b) => a - b);
  const at = (share: number): number =>
    sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
  const failed = Object.values(tally.failed).reduce((sum, n) => sum + n, 0);
  const [mainCode] = Object.entries(tally.failed).toSorted(([, a], [, b]) => b - a)[0] ?? [];
  const due = Math.min(limit, calls);
  return {
    contestant,
    granted,
    leaked: Math.max(0, granted - limit),
    refused: tally.refused,
    failed,
    ...(mainCode !== undefined && { mainCode }),
    opsPerSecond: calls / seconds,
    p50Ms: at(0.5),
    p99Ms: at(0.99),
    // Too few is wrong as well: a caller within the quota got an error.
    exact: granted === due && tally.granted === due && tally.refused === calls - due,
  };
}
