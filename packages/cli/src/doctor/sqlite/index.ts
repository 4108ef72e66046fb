import type { Check } from "../check.ts";
import { ownChecks } from "../own.ts";
import { fileChecks } from "./file.ts";
import type { SqlitePatient } from "./patient.ts";
import { sqliteOwn, tableChecks } from "./tables.ts";

/** busy_timeout, synchronous and foreign_keys belong to each connection: those of the application cannot be seen from here. */
export const sqliteChecks: readonly Check<SqlitePatient>[] = [
  ...fileChecks,
  ...tableChecks,
  ...ownChecks(sqliteOwn),
];
