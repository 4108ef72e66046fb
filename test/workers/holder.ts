/** A process that takes a lock, writes, tells so, and stays inside until it is told to go on, killed or frozen. */
import { holdfast, key, sql } from "holdfast";
import { backendNamed } from "../backends.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface HolderArg {
  backend: string;
  url: string;
  deadline: number;
}

export default async function holder(
  { backend, url, deadline }: HolderArg,
  context: WorkerContext,
): Promise<string> {
  const site = await backendNamed(backend).open(url);
  const hf = holdfast(site.database);
  try {
    // What is opened at first use is open before the deadline begins: on a busy machine Prisma alone needed a second for it.
    await hf.transaction((tx) => tx.query(sql`SELECT who FROM effect`));
    return await hf.transaction({ lock: key("fault"), deadline, retry: false }, async (tx) => {
      await tx.query(sql`INSERT INTO effect (who) VALUES ('holder')`);
      context.send("holding");
      await context.receive("go on");
      await tx.query(sql`INSERT INTO effect (who) VALUES ('holder, later')`);
      return "committed";
    });
  } catch (error) {
    return (error as Error).name;
  } finally {
    await site.close().catch(() => {});
  }
}
