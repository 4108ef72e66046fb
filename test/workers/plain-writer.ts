/** A process without Holdfast that writes to a file, once while it keeps everybody out, and once as everybody may. */
import { DatabaseSync } from "node:sqlite";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export default async function plainWriter(path: string, context: WorkerContext): Promise<string> {
  // It waits for nobody.
  const db = new DatabaseSync(path, { timeout: 0 });
  db.exec("CREATE TABLE t (n integer)");
  db.exec("BEGIN EXCLUSIVE");
  context.send("inside");
  await context.receive("go on");
  db.exec("COMMIT");
  context.send("outside");
  await context.receive("write");
  try {
    db.exec("BEGIN IMMEDIATE; INSERT INTO t VALUES (1); COMMIT");
    return "committed";
  } catch (error) {
    return String(error);
  } finally {
    db.close();
  }
}
