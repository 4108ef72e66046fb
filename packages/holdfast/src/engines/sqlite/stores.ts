/** What SQLite keeps for the patterns: the generic stores, over its dialect. */
import type { Pattern } from "../../seam/capabilities.ts";
import type { Engine } from "../../seam/database.ts";
import type { Statement } from "../../seam/sql.ts";
import { auditStore, auditTables } from "../sql/audit.ts";
import type { StoreDialect } from "../sql/dialect.ts";
import { queueStore } from "../sql/queue/index.ts";
import { queueTables } from "../sql/queue/tables.ts";
import { quotaStore } from "../sql/quota/index.ts";
import { quotaTables } from "../sql/quota/tables.ts";
import { scheduleStore, scheduleTables } from "../sql/schedule.ts";
import { stockStore } from "../sql/stock/index.ts";
import { stockTables } from "../sql/stock/tables.ts";
import { flushed } from "./begin.ts";
import type { SqliteConnection } from "./dialect.ts";
import { StoreConnection, sequenceTable, storeDialect } from "./store-dialect.ts";

export const storeTables: readonly Statement[] = [
  sequenceTable,
  ...[...quotaTables, ...stockTables, ...queueTables, ...scheduleTables, ...auditTables].flatMap((table) =>
    storeDialect.create(table),
  ),
];

/** A run has a fence, which a power failure must not give a second time. */
const durable: StoreDialect<StoreConnection> = {
  ...storeDialect,
  transaction: (connection, waitMs, work) =>
    flushed(connection.on, () => storeDialect.transaction(connection, waitMs, work)),
};

/** Each call, also of its parts, gets the connection as stores use it. */
function through(store: object): object {
  const members = Object.entries(store).map(([name, member]: [string, unknown]) => {
    if (typeof member !== "function") return [name, through(member as object)] as const;
    const call = (connection: SqliteConnection, ...rest: unknown[]): unknown =>
      member.call(store, new StoreConnection(connection), ...rest);
    return [name, call] as const;
  });
  return Object.fromEntries(members);
}

/** As the engine has them. */
export const stores = through({
  quotas: quotaStore(storeDialect),
  stock: stockStore(storeDialect),
  queues: queueStore(storeDialect),
  schedules: scheduleStore(durable),
  audit: auditStore(storeDialect),
}) as Pick<Engine<SqliteConnection>, Pattern>;
