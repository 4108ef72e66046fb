/** A process that is stopped in the middle of a run, and writes when it is told to go on, however late that is. */
import { holdfast, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Run, schedule } from "holdfast/schedule";
import { Pool } from "pg";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface ScheduleFrozenArg {
  url: string;
  name: string;
  ttl: number;
  /** Writes without asking whether the run still is its own. */
  naive?: boolean;
}

export interface FrozenDone {
  /** What the signal said before anything else was done. */
  aborted: boolean;
  outcome: string;
}

export default async function scheduleFrozen(
  { url, name, ttl, naive }: ScheduleFrozenArg,
  context: WorkerContext,
): Promise<void> {
  const pool = new Pool({ connectionString: url, max: 3 });
  const hf = holdfast(fromPg(pool));
  const held = Promise.withResolvers<Run>();
  const finished = Promise.withResolvers<void>();
  const one = schedule(hf, name, { every: "1 hour", ttl, onError: () => {} }, async (run) => {
    held.resolve(run);
    await finished.promise;
  });
  await one.start();
  const run = await held.promise;
  // As code does that is handed a signal and knows nothing of schedules.
  const { signal } = run;
  context.send("held", { tick: run.tick, fence: run.fence });
  await context.receive("go on");
  const { aborted } = signal;
  const outcome = await hf
    .transaction({ retry: false }, async (tx) => {
      if (!naive) await run.complete(tx);
      await tx.query(sql`INSERT INTO effect (kind, tick) VALUES (${name}, ${run.tick.getTime()})`);
    })
    .then(
      () => "written",
      (error: { code?: string }) => String(error.code),
    );
  context.send("done", { aborted, outcome } satisfies FrozenDone);
  finished.resolve();
  await one.stop({ grace: 0 });
}
