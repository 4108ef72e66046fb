/** Queues by the generic store, where the engine has its own: on the same tables, to be compared with that, and mixed with it. */
import type { Database, SqlConnection } from "../../packages/holdfast/src/seam/database.ts";
import { storeDialect } from "../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { queueStore } from "../../packages/holdfast/src/engines/sql/queue/index.ts";
import { queueTables } from "../../packages/holdfast/src/engines/sql/queue/tables.ts";
import { bareSqlite, dialect, fromBareSqlite } from "./bare-sqlite.ts";

const { exclude: _, ...withoutNames } = storeDialect;

/** `rows`: as an engine that has no locks by name, and locks rows in place of them. */
export function generic<Native>(
  database: Database<Native, SqlConnection>,
  locks: "names" | "rows" = "names",
): Database<Native, SqlConnection> {
  const queues = queueStore(locks === "names" ? storeDialect : withoutNames);
  return { ...database, engine: { ...database.engine, queues } };
}

/** An engine that has nothing else. */
export function bareQueues(file: string): ReturnType<typeof fromBareSqlite> {
  return fromBareSqlite(file, bareSqlite({ queues: queueStore(dialect) }, queueTables));
}
