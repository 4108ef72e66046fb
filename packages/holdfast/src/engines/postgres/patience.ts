/** How long a function of ours may wait for locks, in the statement that calls it: no round trip more, in any transaction. */
import { type Statement, sql } from "../../seam/sql.ts";

/**
 * An argument of the function's: arguments are computed before the function runs. What the transaction's own patience was is
 * kept, for {@link impatient}. (A failure undoes all of it.)
 */
export function patiently(waitMs: number, argument: Statement): Statement {
  if (!Number.isFinite(waitMs)) return argument;
  return sql`CASE WHEN set_config('holdfast.patience', current_setting('lock_timeout'), true) IS NULL THEN NULL
  WHEN set_config('lock_timeout', ${String(Math.min(Math.ceil(waitMs), 2_147_483_647))}::text, true) IS NOT NULL THEN ${argument} END`;
}

/** Among what is selected, which is computed after the function has run. */
export function impatient(waitMs: number): Statement {
  if (!Number.isFinite(waitMs)) return sql``;
  return sql`, set_config('lock_timeout', current_setting('holdfast.patience'), true) AS patience`;
}
