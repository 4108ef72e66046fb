import { type Statement, sql } from "../../seam/sql.ts";

/**
 * Milliseconds since 1970 by the clock of the machine, which all processes on the file share. It is read anew by each
 * statement, after any wait for the writer. unixepoch('subsec') would be shorter, but needs SQLite 3.42.
 */
export const clock: Statement = sql.raw("CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)");

export function date(ms: unknown): Date {
  return new Date(Number(ms));
}
