/** One process that works on a queue, and writes the effect of each job together with its end. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { JobLostError, queue } from "holdfast/queue";
import { Pool } from "pg";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface QueueArg {
  url: string;
  queue: string;
  concurrency: number;
  ttlMs: number;
  /** How long a handler takes. */
  jobMs: number;
  how: "complete" | "transactional" | "naive";
  /** Tells of each job that begins, and waits for the word before it is completed. */
  slow?: boolean;
}

export default async function worker(arg: QueueArg, context: WorkerContext): Promise<void> {
  const pool = new Pool({ connectionString: arg.url, max: arg.concurrency + 4 });
  pool.on("error", () => {});
  // Many wait for each other here, and the machine may be busy.
  const hf = holdfast(fromPg(pool), { wait: 60_000 });
  const jobs = queue<number>(hf, arg.queue, { retries: 1000, backoff: { baseMs: 1, maxMs: 10 } });
  const insert = "INSERT INTO effect (job, pid) VALUES ($1, $2)";
  const options = { concurrency: arg.concurrency, pollMs: 100, ttlMs: arg.ttlMs };
  const pause = () => (arg.jobMs > 0 ? new Promise((resolve) => setTimeout(resolve, arg.jobMs)) : undefined);
  const working =
    arg.how === "transactional"
      ? jobs.work<{ query(text: string, values: unknown[]): Promise<unknown> }>(
          async (job, tx) => {
            await pause();
            await tx.client.query(insert, [job.payload, process.pid]);
          },
          { ...options, transactional: true },
        )
      : jobs.work(async (job) => {
          await pause();
          if (arg.slow) {
            context.send("begun", job.payload);
            await context.receive("go");
          }
          if (arg.how === "naive") {
            await pool.query(insert, [job.payload, process.pid]);
            return;
          }
          try {
            await hf.transaction(async (tx) => {
              await tx.client.query(insert, [job.payload, process.pid]);
              await job.complete(tx);
            });
            if (arg.slow) context.send("ended", { lost: false, aborted: job.signal.aborted });
          } catch (error) {
            if (arg.slow)
              context.send("ended", { lost: error instanceof JobLostError, aborted: job.signal.aborted });
            throw error;
          }
        }, options);
  context.send("ready");
  await context.receive("stop");
  await working.stop();
  await hf.close();
  await pool.end();
}
