import { type Holdfast, type Lease, StaleFenceError, fenced, key } from "holdfast";
import type { ClientBase } from "pg";
import { command, open } from "../support.ts";

const source = "holdfast_example_event";
const exported = "holdfast_example_exported";
const batchSize = 100;

/**
 * Many batches, each a transaction of its own, so no lock of a transaction lasts for all of it. The lease does. It is
 * renewed meanwhile, and runs out by the database's clock if this process dies; the next worker goes on where this
 * one stopped.
 */
async function exportEvents(
  hf: Holdfast<ClientBase>,
  onBatch?: (batches: number) => Promise<void>,
): Promise<"skipped" | number> {
  await using lease = await hf.lease(key("export", "events"), { ttl: 10_000, wait: "skip" });
  if (!lease) return "skipped";
  let batches = 0;
  while ((await exportBatch(hf, lease)) > 0) await onBatch?.(++batches);
  return batches;
}

/** The signal ends a batch of a worker that lost its lease. If it was frozen and writes all the same, `fenced` throws. */
async function exportBatch(hf: Holdfast<ClientBase>, lease: Lease): Promise<number> {
  return hf.transaction({ signal: lease.signal }, async (tx) => {
    await fenced(tx, lease);
    const { rowCount } = await tx.client.query(
      `INSERT INTO ${exported} (event_id, fence)
       SELECT id, $2 FROM ${source} WHERE id > (SELECT coalesce(max(event_id), 0) FROM ${exported})
       ORDER BY id LIMIT $1`,
      [batchSize, lease.fence],
    );
    return rowCount ?? 0;
  });
}

export interface Result {
  readonly batches: "skipped" | number;
  /** The worker that came in the middle. */
  readonly second: "skipped" | number;
  /** As the table has it. */
  readonly exported: number;
  readonly twice: number;
  readonly late: Late;
}

/** A thousand events, and a second worker that is started in the middle. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, {
    [source]: "id int PRIMARY KEY",
    [exported]: "event_id int NOT NULL, fence bigint NOT NULL",
  });
  const { pool, hf } = place;
  // Holdfast's own tables, which stay: leases are in one of them.
  await hf.migrate();
  await pool.query(`INSERT INTO ${source} SELECT generate_series(1, 1000)`);
  let second: "skipped" | number = 0;
  const batches = await exportEvents(hf, async (done) => {
    if (done === 5) second = await exportEvents(hf);
  });
  const late = await tooLate(hf);
  const { rows } = await pool.query<{ exported: number; twice: number }>(
    `SELECT count(*)::int AS exported, (count(*) - count(DISTINCT event_id))::int AS twice FROM ${exported}`,
  );
  return { batches, second, exported: rows[0]?.exported ?? 0, twice: rows[0]?.twice ?? 0, late };
}

interface Late {
  readonly signalled: boolean;
  readonly write: string;
}

/** A worker that does not renew its lease, as if it were frozen, wakes up after another one has taken over. */
async function tooLate(hf: Holdfast<ClientBase>): Promise<Late> {
  const frozen = await hf.lease(key("export", "events"), { ttl: 200, renew: false });
  await using _next = await hf.lease(key("export", "events"));
  try {
    // Without the signal, as it would be if the write were under way already.
    await hf.transaction(async (tx) => {
      await fenced(tx, frozen);
      await tx.client.query(`INSERT INTO ${exported} VALUES (1001, $1)`, [frozen.fence]);
    });
  } catch (error) {
    if (!(error instanceof StaleFenceError)) throw error;
    return { signalled: frozen.signal.aborted, write: error.code };
  }
  return { signalled: frozen.signal.aborted, write: "done" };
}

await command(
  import.meta.url,
  main,
  ({ batches, second, exported: count, twice, late }) =>
    `${count} events exported in ${batches} batches, ${twice} of them twice; the second worker ${second}; ` +
    `a write that came too late got ${late.write}`,
);
