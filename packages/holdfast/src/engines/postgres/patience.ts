/** What comes with the call of a function of ours, in the statement that calls it: no round trip more, in any transaction. */
import { type Statement, own, sql } from "../../seam/sql.ts";
import { atPrimary, byPrimary } from "./primary.ts";

const primary = sql.raw(atPrimary);

/** The same as {@link byPrimary}. Fails also if the map of shards is another one by now. */
export function byMap(argument: Statement): Statement {
  return sql`CASE WHEN ${primary} AND ${own.map} THEN ${argument} END`;
}

/**
 * The same, and how long the function may wait for locks. What the transaction's own patience was is kept, for {@link impatient}. (A
 * failure undoes all of it.) "any map": of what is where it is, whatever keys are routed by.
 */
export function patiently(waitMs: number, argument: Statement, map?: "any map"): Statement {
  const checked = map ? byPrimary(argument) : byMap(argument);
  if (!Number.isFinite(waitMs)) return checked;
  return sql`CASE WHEN pg_catalog.set_config('holdfast.patience', pg_catalog.current_setting('lock_timeout'), true) IS NULL THEN NULL
  WHEN pg_catalog.set_config('lock_timeout', ${String(Math.min(Math.ceil(waitMs), 2_147_483_647))}::pg_catalog.text, true) IS NOT NULL THEN ${checked} END`;
}

/** Among what is selected, which is computed after the function has run. */
export function impatient(waitMs: number): Statement {
  if (!Number.isFinite(waitMs)) return sql``;
  return sql`, pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('holdfast.patience'), true) AS patience`;
}
