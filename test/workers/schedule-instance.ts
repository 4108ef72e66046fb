/**
 * One instance of a service with schedules of every second, which may be killed at any moment: one whose effect is
 * written with `run.complete(tx)`, one that enqueues, and one that only counts how often it was begun.
 */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type ScheduleOptions, schedule } from "holdfast/schedule";
import { Pool, type PoolClient } from "pg";
import type { WorkerContext } from "../harness/worker-protocol.ts";
import { shiftClock } from "./lease-clock.ts";

export interface ScheduleInstanceArg {
  url: string;
  /** How far the application's clock is off. */
  clockMs: number;
  /** As people write it: looks when it ran last, notes that it runs now, and runs. */
  naive?: boolean;
}

export default async function scheduleInstance(
  { url, clockMs, naive }: ScheduleInstanceArg,
  context: WorkerContext,
): Promise<void> {
  shiftClock(clockMs);
  const pool = new Pool({ connectionString: url, max: 3 });
  const hf = holdfast(fromPg(pool));
  const note = (client: Pool | PoolClient, kind: string, tick: Date, attempt: number) =>
    client.query("INSERT INTO effect (kind, tick, attempt) VALUES ($1, $2, $3)", [kind, tick, attempt]);
  if (naive) {
    await pool.query("SELECT 1");
    context.send("started");
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, 1000 - (Date.now() % 1000) + 5));
      const { rows } = await pool.query<{ last: Date; tick: Date }>(
        "SELECT last, date_trunc('second', clock_timestamp()) AS tick FROM naive",
      );
      const { last, tick } = rows[0] as { last: Date; tick: Date };
      if (last < tick) {
        await pool.query("UPDATE naive SET last = $1", [tick]);
        await note(pool, "effect", tick, 1);
      }
    }
  }
  const options = { every: "1 second", catchUp: "all", ttl: 1500, retries: 1000 } satisfies ScheduleOptions;
  const all = [
    schedule(hf, "effect", options, async (run) => {
      // Room to be killed in: before, in the middle of it, and after.
      await new Promise((resolve) => setTimeout(resolve, 250));
      await hf.transaction(async (tx) => {
        await note(tx.client, "effect", run.tick, run.attempt);
        if (run.tick.getTime() % 3000 === 0) await tx.client.query("SELECT pg_sleep(0.3)");
        await run.complete(tx);
      });
      if (run.tick.getTime() % 2000 === 0) await new Promise((resolve) => setTimeout(resolve, 200));
    }),
    schedule(hf, "queued", {
      ...options,
      enqueue: async (tick, tx) => {
        await note(tx.client, "queued", tick, 1);
        if (tick.getTime() % 3000 === 0) await tx.client.query("SELECT pg_sleep(0.2)");
      },
    }),
    schedule(hf, "begun", { ...options, retries: 0 }, async (run) => {
      await note(pool, "begun", run.tick, run.attempt);
    }),
  ];
  await Promise.all(all.map((each) => each.start()));
  context.send("started");
  await context.receive("stop");
  await Promise.all(all.map((each) => each.stop()));
  await hf.close();
  await pool.end();
}
