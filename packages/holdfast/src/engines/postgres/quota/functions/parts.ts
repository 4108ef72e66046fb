/** What functions that take a batch of uses share. */
import { sql } from "../../../../seam/sql.ts";

/** The answers of functions that take a batch: lists side by side. */
export const answers =
  sql.raw(`OUT missing boolean, OUT at float8, OUT verdicts int[], OUT useds bigint[], OUT helds bigint[],
  OUT credits bigint[], OUT maxes bigint[], OUT versions bigint[], OUT ats float8[], OUT retries bigint[]`);

/** The planner takes lists for short and new tables for small: one bucket in ten thousand is found by its index. */
export const plans = sql.raw(
  "SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off",
);

/**
 * Of several calls about several buckets. Who waits for somebody's transaction with buckets in hand that it comes to want
 * ends in a deadlock, which may be the transaction's: they part before the server looks for one (deadlock_timeout, 1 s).
 */
export const briefly = sql.raw("PERFORM set_config('lock_timeout', '200ms', true)");

/** It counts on another of several databases, and nothing is decided here. */
export const isElsewhere = (bucket: string) =>
  sql.raw(`(${bucket}.moved_to IS NOT NULL OR ${bucket}.moved_from IS NOT NULL)`);
