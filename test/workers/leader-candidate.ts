/** A candidate in a process of its own: tells when it leads, and writes when it is told to, however late that is. */
import { fenced, holdfast, leader, sql } from "holdfast";
import { backendNamed } from "../backends.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface CandidateArg {
  backend: string;
  url: string;
  name: string;
  ttl: number;
  /** Writes without asking whether it still leads. */
  naive?: boolean;
}

export interface Wrote {
  /** What the signal said before anything else was done. */
  aborted: boolean;
  outcome: string;
}

export default async function candidate(
  { backend, url, name, ttl, naive }: CandidateArg,
  context: WorkerContext,
): Promise<void> {
  const site = await backendNamed(backend).open(url);
  const hf = holdfast(site.database);
  const one = leader(
    hf,
    name,
    async ({ signal, fence, lease }) => {
      const ended = new Promise<void>((resolve) =>
        signal.addEventListener("abort", () => resolve(), { once: true }),
      );
      context.send("leads", fence);
      await Promise.race([context.receive("write"), ended]);
      const { aborted } = signal;
      const outcome = await hf
        .transaction({ retry: false }, async (tx) => {
          if (!naive) await fenced(tx, lease);
          await tx.query(sql`INSERT INTO effect (who, fence) VALUES (${"leader"}, ${fence})`);
        })
        .then(
          () => "written",
          (error: { code?: string }) => String(error.code),
        );
      context.send("wrote", { aborted, outcome } satisfies Wrote);
      await ended;
    },
    { ttl },
  );
  await context.receive("stop");
  await one.stop();
  context.send("stopped");
  await hf.close();
  await site.close();
}
