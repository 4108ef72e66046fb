/** One process of several that work on a queue, and write the effect of each job together with its end. */
import { type Holdfast, type HoldfastOptions, sql } from "holdfast";
import { queue } from "holdfast/queue";
import { openNamed } from "../harness/sites.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface PatternJobsArg {
  readonly backend: string;
  readonly url: string;
  /** "beside": in a transaction of its own, as people write it who do not know better. */
  readonly how: "complete" | "transactional" | "beside";
  /** The server is away now and then: nothing to be told of. */
  readonly away?: boolean;
  /** Of the instance. */
  readonly isolation?: HoldfastOptions["isolation"];
}

export const errands = (hf: Holdfast<unknown>) => queue<string>(hf, "errands", { retries: 1000 });

export default async function patternJobs(
  { backend, url, how, away, isolation }: PatternJobsArg,
  context: WorkerContext,
): Promise<void> {
  const site = await openNamed(backend, url, isolation && { isolation });
  const { hf } = site;
  const effect = (payload: string) => sql`INSERT INTO effect (job) VALUES (${payload})`;
  const options = {
    concurrency: 4,
    pollMs: 50,
    ttlMs: how === "beside" ? 500 : 3000,
    ...(away && { onTrouble: () => {} }),
  };
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
            if (how === "complete") await job.complete(tx);
          });
          context.send("worked");
        }, options);
  context.send("ready");
  await context.receive("stop");
  await working.stop();
  await site.close();
}
