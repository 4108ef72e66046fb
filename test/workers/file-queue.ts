/** One process of several that work on a queue in one SQLite file, and write the effect of each job together with its end. */
import { type Holdfast, holdfast, sql } from "holdfast";
import type { WorkerContext } from "../harness/worker-protocol.ts";
import { errands, openFile, patience } from "./file-patterns.ts";

export interface FileQueueArg {
  readonly backend: string;
  readonly url: string;
  readonly how: "complete" | "transactional";
}

export default async function fileQueue(
  { backend, url, how }: FileQueueArg,
  context: WorkerContext,
): Promise<void> {
  const site = await openFile(backend, url);
  const hf: Holdfast<unknown> = holdfast(site.database, patience);
  const effect = (payload: string) => sql`INSERT INTO effect (job) VALUES (${payload})`;
  const options = { concurrency: 4, pollMs: 50, ttlMs: 3000 };
  const of = errands(hf);
  const working =
    how === "transactional"
      ? of.work(
          async ({ payload }, tx) => {
            await tx.query(effect(payload));
            context.send("worked");
          },
          { ...options, transactional: true },
        )
      : of.work(async (job) => {
          await hf.transaction(async (tx) => {
            await tx.query(effect(job.payload));
            await job.complete(tx);
          });
          context.send("worked");
        }, options);
  context.send("ready");
  await context.receive("stop");
  await working.stop();
  await hf.close();
  await site.close();
}
