/** What DuckDB keeps for the patterns: the generic stores, over its dialect. */
import type { Pattern } from "../../seam/capabilities.ts";
import type { Engine } from "../../seam/database.ts";
import { defaultSchema } from "../../seam/names.ts";
import type { Statement } from "../../seam/sql.ts";
import { auditStore, auditTables } from "../sql/audit.ts";
import { queueStore } from "../sql/queue/index.ts";
import { queueTables } from "../sql/queue/tables.ts";
import { quotaStore } from "../sql/quota/index.ts";
import { quotaTables } from "../sql/quota/tables.ts";
import { scheduleStore, scheduleTables } from "../sql/schedule.ts";
import { stockStore } from "../sql/stock/index.ts";
import { stockTables } from "../sql/stock/tables.ts";
import type { DuckdbConnection } from "./dialect.ts";
import { sequences, storeDialectIn } from "./store-dialect.ts";

const { create } = storeDialectIn(defaultSchema);

export const storeTables: readonly Statement[] = [
  ...sequences,
  ...[...quotaTables, ...stockTables, ...queueTables, ...scheduleTables, ...auditTables].flatMap(create),
];

export function storesIn(schema: string): Pick<Engine<DuckdbConnection>, Pattern> {
  const dialect = storeDialectIn(schema);
  return {
    quotas: quotaStore(dialect),
    stock: stockStore(dialect),
    queues: queueStore(dialect),
    schedules: scheduleStore(dialect),
    audit: auditStore(dialect),
  };
}
