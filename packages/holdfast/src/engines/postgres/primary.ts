/**
 * Answers of the primary. Outside of transactions a statement may reach a standby: by a splitter of reads and writes, or by a balancer.
 * A standby shows what was there a while ago, so a statement that reads our tables fails there. That costs no round trip, and less than a
 * microsecond on the primary. docs/decisions/0049-answers-of-the-primary.md
 */
import { type Statement, sql } from "../../seam/sql.ts";

/** True, or it fails with 25006 ("read-only"): of a standby the number of the transaction is not to be had. It is not asked for elsewhere. */
export const atPrimary =
  "CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_current_xact_id() IS NOT NULL ELSE true END";

/** As a condition that is computed once, before the first row is looked for: of no rows a plain one would never be computed. */
export const onPrimary = sql.raw(`(SELECT ${atPrimary})`);

/** As an argument of a function of ours: arguments are computed before the function runs. */
export function byPrimary(argument: Statement): Statement {
  return sql`CASE WHEN ${plain} THEN ${argument} END`;
}

const plain = sql.raw(atPrimary);
