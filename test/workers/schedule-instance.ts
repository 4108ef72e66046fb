/**
 * One instance of a service with schedules of every second, which may be killed at any moment: one whose effect is
 * written with `run.complete(tx)`, one that enqueues, and one that only counts how often it was begun.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { type Transaction, sql } from "holdfast";
import { type ScheduleOptions, schedule } from "holdfast/schedule";
import { execute } from "holdfast/testing";
import { openNamed } from "../harness/sites.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";
import { shiftClock } from "./lease-clock.ts";

export interface ScheduleInstanceArg {
  backend: string;
  url: string;
  /** How far the application's clock is off. */
  clockMs: number;
  /** As people write it: looks when it ran last, notes that it runs now, and runs. */
  naive?: boolean;
}

export default async function scheduleInstance(
  { backend, url, clockMs, naive }: ScheduleInstanceArg,
  context: WorkerContext,
): Promise<void> {
  shiftClock(clockMs);
  const site = await openNamed(backend, url);
  const { hf } = site;
  const effect = (kind: string, tick: Date) =>
    sql`INSERT INTO effect (kind, tick) VALUES (${kind}, ${tick.getTime()})`;
  const note = (tx: Transaction<unknown>, kind: string, tick: Date) => tx.query(effect(kind, tick));
  if (naive) {
    await execute(site, sql`SELECT 1`);
    context.send("started");
    for (;;) {
      const now = Date.now() - clockMs;
      await sleep(1000 - (now % 1000) + 5);
      const tick = now - (now % 1000) + 1000;
      const [row] = await execute(site, sql`SELECT last FROM naive`);
      if (Number(row?.["last"]) < tick) {
        await execute(site, sql`UPDATE naive SET last = ${tick}`);
        await execute(site, effect("effect", new Date(tick)));
      }
    }
  }
  const options = { every: "1 second", catchUp: "all", ttl: 1500, retries: 1000 } satisfies ScheduleOptions;
  const all = [
    schedule(hf, "effect", options, async (run) => {
      // Room to be killed in: before, in the middle of it, and after.
      await sleep(250);
      await hf.transaction(async (tx) => {
        await note(tx, "effect", run.tick);
        if (run.tick.getTime() % 3000 === 0) await sleep(300);
        await run.complete(tx);
      });
      if (run.tick.getTime() % 2000 === 0) await sleep(200);
    }),
    schedule(hf, "queued", {
      ...options,
      enqueue: async (tick, tx) => {
        await note(tx, "queued", tick);
        if (tick.getTime() % 3000 === 0) await sleep(200);
      },
    }),
    schedule(hf, "begun", { ...options, retries: 0 }, async (run) => {
      await execute(site, effect("begun", run.tick));
    }),
  ];
  await Promise.all(all.map((each) => each.start()));
  context.send("started");
  await context.receive("stop");
  await Promise.all(all.map((each) => each.stop()));
  await site.close();
}
