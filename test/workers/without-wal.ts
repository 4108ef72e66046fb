/** One of several processes that read and write through libSQL, on a file without WAL. */
import { createClient } from "@libsql/client";
import { holdfast, key } from "holdfast";
import { fromLibsql } from "holdfast/libsql";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface WithoutWalArg {
  readonly path: string;
  readonly rounds: number;
}

/** Returns what did not complete. */
export default async function withoutWal(
  { path, rounds }: WithoutWalArg,
  context: WorkerContext,
): Promise<string[]> {
  const client = createClient({ url: `file:${path}` });
  const hf = holdfast(fromLibsql(client), { wait: 30_000 });
  const uploads = quota(hf, { name: "uploads", limit: 1_000_000 });
  const errands = queue(hf, "errands");
  const calls: readonly (() => Promise<unknown>)[] = [
    () => uploads.consume("ann"),
    () => uploads.peek("ann"),
    () => errands.enqueue({}),
    () => errands.counts(),
    () => hf.transaction({ readOnly: true }, (tx) => tx.client.execute("SELECT count(*) FROM effect")),
    () => hf.transaction({ lock: key("a") }, (tx) => tx.client.execute("INSERT INTO effect VALUES (1)")),
    async () => (await hf.lease(key("b", process.pid))).release(),
  ];
  const failed: string[] = [];
  for (let i = 0; i < rounds; i++)
    for (const result of await Promise.allSettled(calls.map((call) => call())))
      if (result.status === "rejected") failed.push(String(result.reason));
  // Still there, with what its connections may have kept.
  context.send("idle");
  await context.receive("end");
  await hf.close();
  client.close();
  return failed;
}
