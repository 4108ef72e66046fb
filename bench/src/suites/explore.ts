/**
 * How long it takes to try all orders of a check-then-write: two callers with five statements each, all of them, and
 * three callers, all with up to two switches. There is no peer that does it; the ratios are allowed over used seconds.
 */
import { startPostgres } from "@holdfast/cli";
import { fromPg } from "holdfast/pg";
import { type Scenario, explore } from "holdfast/testing";
import { Pool } from "pg";
import { median, percentile } from "../../../packages/cli/src/bench/measure.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";

/** Even a cell that is over in a moment is measured several times. */
const rounds = 5;

interface Cell {
  readonly name: string;
  readonly ratio: string;
  readonly allowedSeconds: number;
  readonly actors: number;
  readonly lock: string;
  readonly options: Pick<Scenario, "preemptions" | "prune">;
}

const cells: readonly Cell[] = [
  {
    name: "2 × 5, all orders",
    ratio: "quota_2x5",
    allowedSeconds: 3,
    actors: 2,
    lock: "",
    options: { preemptions: 99 },
  },
  {
    name: "2 × 5, also those that come to the same",
    ratio: "quota_2x5_unpruned",
    allowedSeconds: 3,
    actors: 2,
    lock: "",
    options: { preemptions: 99, prune: false },
  },
  {
    name: "2 × 5 with FOR UPDATE",
    ratio: "quota_2x5_locked",
    allowedSeconds: 3,
    actors: 2,
    lock: " FOR UPDATE",
    options: { preemptions: 99 },
  },
  {
    name: "3 × 5, up to two switches",
    ratio: "three_actors",
    allowedSeconds: 15,
    actors: 3,
    lock: "",
    options: { preemptions: 2 },
  },
];

/** Reads the quota, reads what is used, writes: as it is written by hand, and nothing is found at fault with it here. */
function upload(pool: Pool, lock: string): () => Promise<void> {
  return async () => {
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      const { rows: quotas } = await client.query(`SELECT bytes FROM quota WHERE user_id = $1${lock}`, ["u"]);
      const { rows } = await client.query(
        "SELECT coalesce(sum(bytes), 0) AS used FROM upload WHERE user_id = $1",
        ["u"],
      );
      if (Number(rows[0].used) + 10 <= quotas[0].bytes)
        await client.query("INSERT INTO upload (user_id, bytes) VALUES ($1, $2)", ["u", 10]);
      await client.query("COMMIT");
    } finally {
      client.release();
    }
  };
}

interface Measured {
  readonly seconds: number;
  readonly runs: number;
  readonly runMs: readonly number[];
}

async function measure(cell: Cell, pool: Pool): Promise<Measured> {
  const act = upload(pool, cell.lock);
  const runMs: number[] = [];
  const started = performance.now();
  let last = started;
  let bounded: Omit<Measured, "runMs"> | undefined;
  const report = await explore(cell.name, {
    db: fromPg(pool),
    reset: () => pool.query("DELETE FROM upload"),
    actors: Object.fromEntries(Array.from({ length: cell.actors }, (_, i) => [`caller ${i + 1}`, act])),
    invariant: () => {},
    maxMs: cell.allowedSeconds * 1000 * 3,
    ...cell.options,
    onProgress({ preemptions, runs }) {
      const now = performance.now();
      if (bounded) throw new Done();
      if (runs > 0) runMs.push(now - last);
      last = now;
      // What comes now is at random: all that was asked for has been tried.
      if (preemptions === undefined) {
        bounded = { seconds: (now - started) / 1000, runs };
        throw new Done();
      }
    },
  }).catch((error: unknown) => {
    if (error instanceof Done) return undefined;
    throw error;
  });
  if (bounded) return { ...bounded, runMs };
  if (report?.coverage !== "exhaustive")
    throw new Error(`${cell.name} was not done in time: ${report?.text}`);
  return { seconds: (performance.now() - started) / 1000, runs: report.runs, runMs };
}

class Done extends Error {}

export async function run({ note }: SuiteOptions): Promise<Report> {
  await using cleanup = new AsyncDisposableStack();
  // As it comes: fsync and synchronous_commit are on.
  const server = await startPostgres();
  cleanup.defer(() => server.stop());
  const pool = new Pool({ connectionString: server.url(), max: 5 });
  cleanup.defer(() => pool.end());
  const { rows: versions } = await pool.query("SELECT current_setting('server_version') AS version");
  await pool.query(`
    CREATE TABLE quota (user_id text PRIMARY KEY, bytes int NOT NULL);
    CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes int NOT NULL);
    INSERT INTO quota VALUES ('u', 100)`);

  const rows: BenchRow[] = [];
  const ratios: Record<string, number> = {};
  for (const cell of cells) {
    note(`${cell.name} …`);
    const measured: Measured[] = [];
    for (let round = 0; round < rounds; round++) measured.push(await measure(cell, pool));
    const seconds = median(measured.map((each) => each.seconds));
    const runMs = measured.flatMap((each) => each.runMs);
    const runs = measured[0]?.runs ?? 0;
    rows.push({
      cell: cell.name,
      contestant: "explore",
      opsPerSecond: runs / seconds,
      p50Ms: percentile(runMs, 0.5),
      p99Ms: percentile(runMs, 0.99),
      runs,
      seconds,
      allowedSeconds: cell.allowedSeconds,
    });
    ratios[cell.ratio] = Number((cell.allowedSeconds / seconds).toFixed(2));
  }
  return {
    suite: "explore",
    machine: machine(versions[0].version),
    rows,
    ratios,
    notes: [
      `An operation is one run of all callers. Medians of ${rounds} rounds; the first one opens the connections.`,
    ],
  };
}
