/** A process that opens a file to which somebody writes, and waits for it. */
import { DatabaseSync } from "node:sqlite";
import { holdfast, key } from "holdfast";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export default async function fileWaiter(path: string, context: WorkerContext): Promise<string> {
  const hf = holdfast(fromNodeSqlite(() => new DatabaseSync(path)));
  const lock = key("waited for");
  const running = hf.transaction({ lock, wait: 60_000, deadline: 120_000 }, async () => "entered");
  // If it fails at once, that is its result.
  setTimeout(() => context.send("waiting"), 100);
  try {
    return await running;
  } finally {
    await hf.close();
  }
}
