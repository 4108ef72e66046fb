/** A process that takes locks in a transaction, tells so, and stays inside until it is told to go on. */
import { type Database, type SqlConnection, holdfast, key } from "holdfast";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface LockedArg {
  readonly url: string;
  readonly keys: readonly (readonly [string, ...string[]])[];
}

export default async function locked({ url, keys }: LockedArg, context: WorkerContext): Promise<string> {
  const { database, close } = await open(url);
  const hf = holdfast(database);
  const lock = keys.map((parts) => key(...parts));
  try {
    return await hf.transaction({ lock, wait: 60_000, deadline: 120_000, retry: false }, async () => {
      context.send("holding");
      await context.receive("go on");
      return "committed";
    });
  } catch (error) {
    return (error as Error).name;
  } finally {
    await hf.close();
    await close().catch(() => {});
  }
}

async function open(url: string): Promise<{
  database: Database<unknown, SqlConnection>;
  close: () => Promise<void>;
}> {
  if (url.startsWith("postgres")) {
    const [{ Pool }, { fromPg }] = [await import("pg"), await import("holdfast/pg")];
    const pool = new Pool({ connectionString: url, application_name: "shop" });
    return { database: fromPg(pool), close: () => pool.end() };
  }
  const [{ createPool }, { fromMysql2 }] = [await import("mysql2/promise"), await import("holdfast/mysql2")];
  const pool = createPool(url);
  return { database: fromMysql2(pool), close: () => pool.end() };
}
