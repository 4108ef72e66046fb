/** What the functions of queues share. */
import { sql } from "../../../../seam/sql.ts";
import * as protection from "../../../../seam/protections.ts";

/** Of the name of its channel. */
export const queueChannel = "queue";

/** A run more. */
export const once = sql.raw(protection.attemptsCounted ? "1" : "0");

/** The session of a worker is gone, or it did not say in time that it lives. */
export const gone = sql.raw(
  protection.workerDeadFirst
    ? "t.beat < moment - t.ttl * interval '1 millisecond' OR t.lock IS NOT NULL AND pg_try_advisory_xact_lock(t.lock)"
    : "true",
);

/** Of a group that allows so many at a time. */
export const begun = sql.raw(protection.groupCounted ? "u.n" : "0");

/**
 * The planner takes lists for short and new tables for small: what is wanted here is always found by an index, in its order.
 * With bitmaps it read and sorted all of 5,000 jobs to find the first (2.4 ms in place of 0.3). What is switched off costs
 * 1e10 if it is used all the same, and a server with JIT would compile such a plan for each call: 460 transactional jobs
 * a second in place of 3,300 on PostgreSQL 15.
 *
 * A table that was vacuumed while an old snapshot kept what is deleted passes for empty: whatever is joined with it would walk all of
 * it instead, 3,400 blocks for each look at an empty queue. So what is looked up for each element of a list is a LATERAL subquery with
 * OFFSET 0, or with its lock, which is not turned into a join, nor hashed; what is changed has been locked before, and is where it was.
 */
export const plans = sql.raw(
  "SET plan_cache_mode = force_generic_plan SET jit = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off",
);

/** Counted up to here, so that it stays cheap. */
export const most = sql.raw("100000");

/**
 * How far below what was found last, in ids, a group is looked at: transactions that took theirs earlier may end later. It is written
 * down again after twice as many.
 */
export const margin = sql.raw("2000");

/** More than this, in bytes, is no batch: whoever gets it could not read it. The worker asks for fewer. */
export const largest = sql.raw(String(64 * 1024 * 1024));
