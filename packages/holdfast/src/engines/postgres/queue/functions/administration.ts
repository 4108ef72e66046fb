/** What people ask of a queue. */
import { own, sql } from "../../../../seam/sql.ts";
import { vanished } from "../../hidden.ts";
import { most, plans } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/** Waits for claims that are under way, so that nothing is claimed after it. */
export const pause = sql`CREATE OR REPLACE FUNCTION ${own("queue_pause")}(q integer, is_paused boolean) RETURNS void
${plpgsql} AS $function$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended(${own.label("queue_pause ")} || q, 0));
  UPDATE ${own("queue")} t SET paused = is_paused WHERE t.id = q;
END
$function$`;

/**
 * Failed jobs begin anew, a few at a time: those with these ids, or those after an id and up to another. One whose key another
 * job has meanwhile stays where it is, as at most one of a key waits or runs. last: where to go on; NULL: that was all.
 */
export const revive = sql`CREATE OR REPLACE FUNCTION ${own("queue_revive_some")}(q integer, ids bigint[], after bigint, INOUT upto bigint, most integer,
  OUT n bigint, OUT last bigint)
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  wanted bigint[];
  free bigint[];
  grps text[];
  moved boolean;
BEGIN
  IF ids IS NOT NULL THEN
    wanted := ARRAY(SELECT t.id FROM (SELECT DISTINCT x.id FROM unnest(ids) x (id) ORDER BY 1) u,
      LATERAL (SELECT x.id FROM ${own("queue_failed")} x WHERE x.queue = q AND x.id = u.id FOR UPDATE) t);
  ELSE
    -- Those that fail again meanwhile are not begun again and again.
    upto := coalesce(upto, (SELECT t.id FROM ${own("queue_failed")} t WHERE t.queue = q ORDER BY t.id DESC LIMIT 1), 0);
    wanted := ARRAY(SELECT t.id FROM ${own("queue_failed")} t WHERE t.queue = q AND t.id > after AND t.id <= upto
      ORDER BY t.id LIMIT most FOR UPDATE);
    IF cardinality(wanted) = most THEN last := wanted[most]; END IF;
  END IF;
  WITH taken AS (INSERT INTO ${own("queue_key")} (queue, key, job)
    SELECT q, k.key, k.id FROM (SELECT DISTINCT ON (t.key) t.key, t.id FROM ${own("queue_failed")} t
      WHERE t.queue = q AND t.id = ANY(wanted) AND t.key IS NOT NULL ORDER BY t.key, t.id) k
    ORDER BY k.key ON CONFLICT DO NOTHING RETURNING job)
  SELECT coalesce(array_agg(t.job), '{}') INTO free FROM taken t;
  WITH gone AS (DELETE FROM ${own("queue_failed")} t WHERE t.queue = q AND t.id = ANY(wanted) AND (t.key IS NULL OR t.id = ANY(free)) RETURNING t.*),
  alone AS (INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
    SELECT q, g.priority, 0, g.id, g.at, g.key, g.payload FROM gone g WHERE g.grp IS NULL RETURNING 1),
  grouped AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
    SELECT q, g.priority, 0, g.id, g.at, g.grp, g.key, g.payload FROM gone g WHERE g.grp IS NOT NULL RETURNING 1)
  SELECT count(*), array_agg(DISTINCT g.grp) FILTER (WHERE g.grp IS NOT NULL),
    count(*) = (SELECT count(*) FROM alone) + (SELECT count(*) FROM grouped) INTO n, grps, moved FROM gone g;
  IF NOT moved THEN
    ${vanished("queue_ready", "queue_grouped")};
  END IF;
  PERFORM ${own("queue_know_again")}(q, NULL, grps);
END
$function$`;

/** Jobs with these ids that have failed, or wait. One that somebody has in a transaction runs. */
export const discard = sql`CREATE OR REPLACE FUNCTION ${own("queue_discard_some")}(q integer, ids bigint[]) RETURNS bigint
${plpgsql} ${plans} AS $function$
DECLARE
  n bigint;
BEGIN
  WITH RECURSIVE levels AS (
    (SELECT t.priority FROM ${own("queue_ready")} t WHERE t.queue = q ORDER BY t.priority LIMIT 1)
    UNION ALL SELECT (SELECT t.priority FROM ${own("queue_ready")} t WHERE t.queue = q AND t.priority > l.priority ORDER BY t.priority LIMIT 1)
    FROM levels l WHERE l.priority IS NOT NULL),
  failed AS (DELETE FROM ${own("queue_failed")} t WHERE t.queue = q AND t.id = ANY(ids) RETURNING t.id, t.key),
  delayed AS (DELETE FROM ${own("queue_delayed")} t WHERE t.ctid = ANY(ARRAY(SELECT x.ctid FROM ${own("queue_delayed")} x
    WHERE x.id = ANY(ids) AND x.queue = q FOR UPDATE SKIP LOCKED)) RETURNING t.id, t.key),
  -- By the index, of each priority that there is.
  found AS MATERIALIZED (SELECT f.place FROM levels l, LATERAL (SELECT x.ctid AS place FROM ${own("queue_ready")} x
    WHERE x.queue = q AND x.priority = l.priority AND x.id = ANY(ids) FOR UPDATE SKIP LOCKED) f WHERE l.priority IS NOT NULL),
  ready AS (DELETE FROM ${own("queue_ready")} t WHERE t.ctid = ANY(ARRAY(SELECT f.place FROM found f)) RETURNING t.id, t.key),
  grouped AS (DELETE FROM ${own("queue_grouped")} t WHERE t.ctid = ANY(ARRAY(SELECT x.ctid FROM ${own("queue_grouped")} x
    WHERE x.queue = q AND x.id = ANY(ids) FOR UPDATE SKIP LOCKED)) RETURNING t.id, t.key),
  gone AS (SELECT * FROM failed UNION ALL SELECT * FROM delayed UNION ALL SELECT * FROM ready UNION ALL SELECT * FROM grouped),
  held AS (SELECT k.ctid FROM ${own("queue_key")} k JOIN gone g ON k.key = g.key AND k.job = g.id
    WHERE k.queue = q AND k.key = ANY(ARRAY(SELECT x.key FROM gone x))
    ORDER BY k.key FOR UPDATE OF k),
  keys AS (DELETE FROM ${own("queue_key")} k WHERE k.ctid = ANY(ARRAY(SELECT h.ctid FROM held h)))
  SELECT count(*) INTO n FROM gone;
  RETURN n;
END
$function$`;

/** Of so many failed jobs after an id, those that failed before a moment. last: where to go on; NULL: that was all. */
export const prune = sql`CREATE OR REPLACE FUNCTION ${own("queue_prune_some")}(q integer, before float8, after bigint, most integer,
  OUT n bigint, OUT last bigint)
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  places tid[];
  old tid[];
BEGIN
  SELECT array_agg(x.ctid), array_agg(x.ctid) FILTER (WHERE x.failed_at < to_timestamp(before / 1000)), max(x.id)
    INTO places, old, last
    FROM (SELECT t.ctid, t.id, t.failed_at FROM ${own("queue_failed")} t WHERE t.queue = q AND t.id > after ORDER BY t.id LIMIT most) x;
  IF coalesce(cardinality(places), 0) < most THEN last := NULL; END IF;
  DELETE FROM ${own("queue_failed")} t WHERE t.ctid = ANY(old) AND t.failed_at < to_timestamp(before / 1000);
  GET DIAGNOSTICS n = ROW_COUNT;
END
$function$`;

/**
 * Of some queues, or all: what is many is counted up to a limit. A worker whose time is over, or whose lock is free, is dead, and
 * what it had waits to be found, also if nobody is there who could find it.
 */
export const count = sql`CREATE OR REPLACE FUNCTION ${own("queue_count")}(numbers integer[], names text[])
RETURNS TABLE (name text, paused boolean, waiting bigint, delayed bigint, running bigint, failed bigint, workers bigint, oldest float8)
${plpgsql} ${plans} AS $function$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  WITH held AS MATERIALIZED (SELECT (k.classid::bigint << 32) | k.objid::bigint AS lock FROM pg_locks k
    WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted
      AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())),
  alive AS MATERIALIZED (SELECT w.id, w.queue FROM ${own("queue_worker")} w
    WHERE w.id > 0 AND w.beat >= clock_timestamp() - w.ttl * interval '1 millisecond'
      AND (w.lock IS NULL OR w.lock IN (SELECT h.lock FROM held h)))
  SELECT q.name, q.paused,
    (SELECT count(*) FROM (SELECT FROM ${own("queue_ready")} t WHERE t.queue = q.id LIMIT ${most}) x)
      + (SELECT count(*) FROM (SELECT FROM ${own("queue_grouped")} t WHERE t.queue = q.id LIMIT ${most}) x) + l.leased - l.running,
    (SELECT count(*) FROM (SELECT FROM ${own("queue_delayed")} t WHERE t.queue = q.id LIMIT ${most}) x),
    l.running,
    (SELECT count(*) FROM (SELECT FROM ${own("queue_failed")} t WHERE t.queue = q.id LIMIT ${most}) x),
    (SELECT count(*) FROM alive a WHERE a.queue = q.id),
    (SELECT (extract(epoch FROM clock_timestamp() - min(o.at)) * 1000)::float8 FROM (
      (SELECT r.at FROM ${own("queue_ready")} r WHERE r.queue = q.id ORDER BY r.priority, r.id LIMIT 1)
      UNION ALL (SELECT g.at FROM ${own("queue_grouped")} g WHERE g.queue = q.id ORDER BY g.grp, g.priority, g.id LIMIT 1)) o)
  FROM ${own("queue")} q, LATERAL (
    SELECT coalesce(sum(l.size - coalesce(cardinality(l.done), 0)), 0) AS leased,
      coalesce(sum(l.size - coalesce(cardinality(l.done), 0)) FILTER (WHERE l.worker IN (SELECT a.id FROM alive a)), 0) AS running
    FROM ${own("queue_lease")} l WHERE l.queue = q.id) l
  WHERE (numbers IS NULL OR q.id = ANY(numbers)) AND (names IS NULL OR q.name = ANY(names)) ORDER BY q.name;
END
$function$`;
