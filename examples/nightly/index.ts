import { fork } from "node:child_process";
import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import { type Holdfast, type Lease, fenced, key, sql } from "holdfast";
import { type Database, open } from "../database.ts";
import { command } from "../support.ts";

/**
 * Five instances have the same cron line, and clocks that differ a little. `hf.tryLock` would keep two of them from
 * running at the same time. But the job is short: an instance that is a second late finds the lock free again, and
 * runs it once more. A lease with `atLeastFor` is not given to anybody else for that long, also after its release:
 * longer than the clocks may differ, and shorter than the time until the next night.
 */
export async function nightly(
  hf: Holdfast<unknown>,
  job: string,
  body: (lease: Lease) => Promise<void>,
): Promise<boolean> {
  await using lease = await hf.lease(key("nightly", job), { wait: "skip", atLeastFor: 600_000 });
  if (!lease) return false;
  await body(lease);
  return true;
}

/** What it writes is written by the holder of the lease, or not at all. */
export async function reconcile({ hf }: Database, instance: string, lease: Lease): Promise<void> {
  await hf.transaction({ signal: lease.signal }, async (tx) => {
    await fenced(tx, lease);
    await tx.query(sql`INSERT INTO holdfast_example_run VALUES (${instance})`);
  });
}

export interface Result {
  readonly ran: number;
  readonly skipped: number;
  /** As the table has it. */
  readonly runs: number;
}

/** Five processes. Three start the job at once, two when it is over already. */
export async function main(url: string): Promise<Result> {
  await using database = await open(url, { holdfast_example_run: "instance varchar(40) NOT NULL" });
  const { hf, query } = database;
  // Holdfast's own tables, which stay: leases are in one of them.
  await hf.migrate();
  // Another name each time: the example is not to wait for ten minutes to be run again.
  const job = `reconciliation-${randomUUID()}`;
  const answers = [
    ...(await Promise.all(["1", "2", "3"].map((name) => instance(url, job, name)))),
    ...(await Promise.all(["4", "5"].map((name) => instance(url, job, name)))),
  ];
  const ran = answers.filter(Boolean).length;
  const [row] = await query<{ runs: number }>(sql`SELECT count(*) AS runs FROM holdfast_example_run`);
  return { ran, skipped: answers.length - ran, runs: Number(row?.runs) };
}

/** Starts a process that does its nightly work, and says whether that included the job. */
async function instance(url: string, job: string, name: string): Promise<boolean> {
  const file = fileURLToPath(new URL("./instance.ts", import.meta.url));
  const child = fork(file, [job, name], { env: { ...process.env, DATABASE_URL: url } });
  const answer = Promise.withResolvers<boolean>();
  child.once("message", (ran: boolean) => answer.resolve(ran));
  child.once("exit", (code) => answer.reject(new Error(`Instance ${name} ended with ${code}`)));
  return answer.promise;
}

await command(
  import.meta.url,
  main,
  ({ ran, skipped, runs }) =>
    `Of 5 instances ${ran} ran the job and ${skipped} skipped it; it ran ${runs} time`,
);
