import type { Check } from "../check.ts";
import { deadLeases } from "../leases.ts";
import { ownChecks } from "../own.ts";
import { patternChecks } from "../patterns.ts";
import { fileChecks } from "./file.ts";
import type { SqlitePatient } from "./patient.ts";
import { sqliteOwn, tableChecks } from "./tables.ts";

const leases = deadLeases<SqlitePatient>(
  (table) =>
    `SELECT name, holder, fence, unixepoch('subsec') * 1000 - until AS ms FROM ${table} WHERE waiting = 0 AND token <> '' AND until < unixepoch('subsec') * 1000 - 5000`,
);

/** busy_timeout, synchronous and foreign_keys belong to each connection: those of the application cannot be seen from here. */
export const sqliteChecks: readonly Check<SqlitePatient>[] = [
  ...fileChecks,
  ...patternChecks,
  leases,
  ...tableChecks,
  ...ownChecks(sqliteOwn),
];
