/** What becomes of jobs: those that have ended, those that come back, and those of the dead. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept, vanished } from "../../hidden.ts";
import * as protection from "../../../../seam/protections.ts";
import { gone, once, plans } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/** All of these jobs are among those that have failed, now or since an earlier call whose answer was lost. */
export const failed = (queue: string, ids: string) =>
  sql`IF cardinality(${sql.raw(ids)}) > 0 AND EXISTS (SELECT FROM unnest(${sql.raw(ids)}) u (i)
      WHERE NOT EXISTS (SELECT FROM ${own("queue_failed")} t WHERE t.queue = ${sql.raw(queue)} AND t.id = u.i OFFSET 0)) THEN
      ${vanished("queue_failed")};
    END IF;`;

/**
 * The end of jobs. leases: those of which nothing is left; the rest by their lease and place: parts (done), and of those
 * that failed when to run them again (NULL: never) and why. Keys and groups of what has ended. Whatever belongs to a
 * lease that this worker does not have any more changes nothing, and is not among the answers. What was completed in a transaction that
 * was committed has not failed.
 */
export const finish = sql`CREATE OR REPLACE FUNCTION ${own("queue_finish")}(q integer, w bigint, leases bigint[], parts bigint[], places integer[],
  failed bigint[], failed_places integer[], again float8[], errors text[],
  key_leases bigint[], keys text[], key_jobs bigint[], group_leases bigint[], group_places integer[], grps text[], OUT ours bigint[])
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  moment timestamptz := clock_timestamp();
  in_order boolean;
  moved boolean;
  lost bigint[];
  unmarked int[];
BEGIN
  ours := ARRAY(SELECT t.id FROM ${own("queue_lease")} t
    WHERE t.id = ANY(leases || parts || failed || key_leases || group_leases) AND t.worker = w ORDER BY t.id FOR NO KEY UPDATE);
  IF failed IS NOT NULL THEN
    unmarked := ARRAY(SELECT u.i FROM ${own("queue_unmarked")}(failed, failed_places) u (i));
    -- Those that were completed do not run again: their keys are free.
    IF cardinality(unmarked) < cardinality(failed) THEN
      SELECT key_leases || array_agg(j.lease), keys || array_agg(j.job->>4), key_jobs || array_agg((j.job->>0)::bigint) INTO key_leases, keys, key_jobs
        FROM (SELECT f.lease, l.jobs::json->f.place AS job FROM unnest(failed, failed_places) WITH ORDINALITY f (lease, place, i)
          JOIN ${own("queue_lease")} l ON l.id = f.lease WHERE l.id = ANY(ours) AND f.i <> ALL(unmarked)) j
        WHERE j.job->>4 IS NOT NULL;
    END IF;
  END IF;
  IF keys IS NOT NULL THEN
    PERFORM FROM (SELECT DISTINCT x.k COLLATE "C" AS k FROM unnest(keys) x (k) ORDER BY 1) u,
      LATERAL (SELECT FROM ${own("queue_key")} t WHERE t.queue = q AND t.key = u.k FOR UPDATE) t;
    DELETE FROM ${own("queue_key")} t WHERE t.ctid = ANY(ARRAY(SELECT p.ctid FROM unnest(key_leases, keys, key_jobs) u (lease, key, job), LATERAL (
      SELECT x.ctid FROM ${own("queue_key")} x WHERE x.queue = q AND x.key = u.key AND x.job = u.job OFFSET 0) p WHERE u.lease = ANY(ours)));
  END IF;
  IF grps IS NOT NULL THEN
    PERFORM FROM (SELECT DISTINCT x.g COLLATE "C" AS g FROM unnest(grps) x (g) ORDER BY 1) u,
      LATERAL (SELECT FROM ${own("queue_group")} t WHERE t.queue = q AND t.grp = u.g FOR NO KEY UPDATE) t;
  END IF;
  IF failed IS NOT NULL THEN
    SELECT t.ordered INTO in_order FROM ${own("queue")} t WHERE t.id = q;
    WITH jobs AS (SELECT f.again, f.error, l.jobs::json->f.place AS job
      FROM unnest(failed, failed_places, again, errors) WITH ORDINALITY f (lease, place, again, error, i)
      JOIN ${own("queue_lease")} l ON l.id = f.lease
      WHERE l.id = ANY(ours) AND NOT coalesce(f.place = ANY(l.done), false) AND f.i = ANY(unmarked)),
    read AS (SELECT j.again, j.error, (j.job->>0)::bigint AS id, (j.job->>1)::smallint + ${once} AS attempt, (j.job->>2)::smallint AS priority,
      to_timestamp((j.job->>3)::float8 / 1000) AS at, j.job->>4 AS key, j.job->>5 AS grp, (j.job->6)::text AS payload FROM jobs j),
    never AS (INSERT INTO ${own("queue_failed")} (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
      SELECT q, r.id, r.priority, r.attempt, r.at, moment, r.key, r.grp, r.payload, r.error FROM read r WHERE r.again IS NULL
      ON CONFLICT DO NOTHING),
    -- In order: it stays at the head of its group, which waits for it.
    head AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
      SELECT q, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM read r
      WHERE r.again IS NOT NULL AND in_order AND r.grp IS NOT NULL RETURNING 1),
    waits AS (UPDATE ${own("queue_group")} g SET next = moment + r.again * interval '1 millisecond', head = r.id, head_priority = r.priority,
        floor = NULL, floor_priority = NULL
      FROM read r WHERE g.queue = q AND g.grp = ANY(ARRAY(SELECT x.grp FROM read x)) AND g.grp = r.grp AND r.again IS NOT NULL AND in_order),
    later AS (INSERT INTO ${own("queue_delayed")} (queue, priority, attempt, id, at, run_at, key, grp, payload)
      SELECT q, r.priority, r.attempt, r.id, r.at, moment + r.again * interval '1 millisecond', r.key, r.grp, r.payload
      FROM read r WHERE r.again IS NOT NULL AND NOT (in_order AND r.grp IS NOT NULL) RETURNING 1)
    SELECT (SELECT count(*) FROM read r WHERE r.again IS NOT NULL) = (SELECT count(*) FROM head) + (SELECT count(*) FROM later),
      ARRAY(SELECT r.id FROM read r WHERE r.again IS NULL) INTO moved, lost;
    IF NOT moved THEN
      ${vanished("queue_delayed", "queue_grouped")};
    END IF;
    ${failed("q", "lost")}
  END IF;
  -- What is marked as done already was written by the same call, whose answer was lost.
  IF grps IS NOT NULL THEN
    UPDATE ${own("queue_group")} t SET running = greatest(0, t.running - u.n)
      FROM (SELECT x.grp, count(*)::int AS n FROM unnest(group_leases, group_places, grps) x (lease, place, grp)
        JOIN ${own("queue_lease")} l ON l.id = x.lease
        WHERE l.id = ANY(ours) AND NOT coalesce(x.place = ANY(l.done), false) GROUP BY x.grp) u,
        LATERAL (SELECT x.ctid AS place FROM ${own("queue_group")} x WHERE x.queue = q AND x.grp = u.grp OFFSET 0) p
      WHERE t.ctid = p.place;
  END IF;
  IF parts IS NOT NULL THEN
    UPDATE ${own("queue_lease")} l SET done = coalesce(l.done, '{}') || p.places
      FROM (SELECT u.lease, array_agg(DISTINCT u.place) AS places FROM unnest(parts, places) u (lease, place)
        JOIN ${own("queue_lease")} x ON x.id = u.lease WHERE x.id = ANY(ours) AND NOT coalesce(u.place = ANY(x.done), false) GROUP BY u.lease) p
      WHERE l.id = ANY(ours) AND l.id = p.lease AND l.worker = w;
  END IF;
  IF leases IS NOT NULL THEN
    DELETE FROM ${own("queue_mark")} t WHERE t.lease = ANY(leases) AND t.lease = ANY(ours);
    DELETE FROM ${own("queue_lease")} t WHERE t.id = ANY(leases) AND t.worker = w;
  END IF;
END
$function$`;

/**
 * Of these jobs, which of them (1 is the first) were not completed in a transaction that was committed. A second mark of the same job
 * waits for the transaction that has written the first, and fails under REPEATABLE READ if that is newer than the snapshot: a look at the
 * marks would take it for a job that was never completed.
 */
export const unmarked = sql`CREATE OR REPLACE FUNCTION ${own("queue_unmarked")}(leases bigint[], places integer[]) RETURNS SETOF integer
${plpgsql} ${plans} AS $function$
DECLARE
  i int;
BEGIN
  FOR i IN 1..cardinality(leases) LOOP
    INSERT INTO ${own("queue_mark")} (lease, place) VALUES (leases[i], places[i]) ON CONFLICT DO NOTHING;
    IF FOUND THEN
      RETURN NEXT i;
      DELETE FROM ${own("queue_mark")} t WHERE t.lease = leases[i] AND t.place = places[i];
    END IF;
  END LOOP;
END
$function$`;

/** Whether a job was completed in a transaction that was committed: one that may still commit is waited for. */
export const settled = sql`CREATE OR REPLACE FUNCTION ${own("queue_settled")}(of_lease bigint, at_place integer) RETURNS boolean
${plpgsql} ${plans} AS $function$
BEGIN
  RETURN NOT EXISTS (SELECT FROM ${own("queue_unmarked")}(ARRAY[of_lease], ARRAY[at_place]));
END
$function$`;

/** In the handler's own transaction: whoever takes the lease away waits for it, or has done so, and then it is false. */
export const complete = sql`CREATE OR REPLACE FUNCTION ${own("queue_complete")}(w bigint, of_lease bigint, at_place integer) RETURNS boolean
${plpgsql} ${plans} AS $function$
BEGIN
  PERFORM FROM ${own("queue_lease")} t WHERE t.id = of_lease AND t.worker = w AND NOT coalesce(at_place = ANY(t.done), false) FOR KEY SHARE;
  IF ${sql.raw(protection.jobStillOurs ? "NOT FOUND" : "false")} THEN RETURN false; END IF;
  INSERT INTO ${own("queue_mark")} (lease, place) VALUES (of_lease, at_place) ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN
    PERFORM FROM ${own("queue_mark")} t WHERE t.lease = of_lease AND t.place = at_place;
    ${kept("queue_mark")};
  END IF;
  RETURN true;
END
$function$`;

/**
 * One less at work in each of these groups, as often as it is named. Makes no rows: whoever inserts one would wait for a
 * claim that has deleted it, while that claim may wait for another row of this call's. queue_unknown finds the rest.
 */
export const free = sql`CREATE OR REPLACE FUNCTION ${own("queue_free")}(queues integer[], grps text[]) RETURNS void
${plpgsql} ${plans} AS $function$
BEGIN
  PERFORM FROM (SELECT DISTINCT x.q, x.g COLLATE "C" AS g FROM unnest(queues, grps) x (q, g) ORDER BY 1, 2) u,
    LATERAL (SELECT FROM ${own("queue_group")} t WHERE t.queue = u.q AND t.grp = u.g FOR NO KEY UPDATE) t;
  -- What comes back is older than what was taken after it.
  UPDATE ${own("queue_group")} t SET running = greatest(0, t.running - u.n), floor = NULL, floor_priority = NULL
    FROM (SELECT x.q, x.g, count(*)::int AS n FROM unnest(queues, grps) x (q, g) GROUP BY x.q, x.g) u,
      LATERAL (SELECT x.ctid AS place FROM ${own("queue_group")} x WHERE x.queue = u.q AND x.grp = u.g OFFSET 0) p
    WHERE t.ctid = p.place;
END
$function$`;

/** Keys of jobs that have ended: all of them at once, in one order, as two who each waited for the other's would be a deadlock. */
export const freeKeys = sql`CREATE OR REPLACE FUNCTION ${own("queue_free_keys")}(queues integer[], keys text[], ids bigint[]) RETURNS void
${plpgsql} ${plans} AS $function$
BEGIN
  IF cardinality(keys) = 0 THEN RETURN; END IF;
  PERFORM FROM (SELECT x.q, x.k COLLATE "C" AS k, x.i FROM unnest(queues, keys, ids) x (q, k, i) ORDER BY 1, 2) u,
    LATERAL (SELECT FROM ${own("queue_key")} t WHERE t.queue = u.q AND t.key = u.k AND t.job = u.i FOR UPDATE) t;
  DELETE FROM ${own("queue_key")} t WHERE t.ctid = ANY(ARRAY(SELECT p.ctid FROM unnest(queues, keys, ids) u (q, k, i), LATERAL (
    SELECT x.ctid FROM ${own("queue_key")} x WHERE x.queue = u.q AND x.key = u.k AND x.job = u.i OFFSET 0) p));
END
$function$`;

/**
 * Workers that are gone: whose session is (its lock is free), or who did not say that they live; and leases of workers
 * that were found to be gone while they claimed, for which it looks at all of them if it is to be thorough. What they had not
 * finished runs again, with one attempt more, or has failed if it has had all of them. Returns the queues that have jobs again.
 */
export const sweep = sql`CREATE OR REPLACE FUNCTION ${own("queue_sweep")}(thorough boolean, OUT workers integer, OUT jobs integer, OUT queues text[])
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  dead bigint[];
  theirs bigint[];
  l record;
  moment timestamptz := clock_timestamp();
  count int;
  freed_queues int[] := '{}';
  freed text[] := '{}';
  names text[];
  ended_queues int[] := '{}';
  ended_keys text[] := '{}';
  ended_ids bigint[] := '{}';
  keys text[];
  ids bigint[];
  moved boolean;
  lost bigint[];
  unmarked int[];
BEGIN
  workers := 0;
  jobs := 0;
  queues := '{}';
  dead := ARRAY(SELECT t.id FROM ${own("queue_worker")} t
    WHERE ${gone}
    ORDER BY t.id FOR UPDATE SKIP LOCKED);
  IF cardinality(dead) = 0 AND NOT thorough THEN RETURN; END IF;
  theirs := ARRAY(SELECT t.id FROM ${own("queue_worker")} w, LATERAL (SELECT x.id FROM ${own("queue_lease")} x
    WHERE x.queue = w.queue AND x.worker = w.id OFFSET 0) t WHERE w.id = ANY(dead));
  IF thorough THEN
    -- All of them, but by the index: after a burst, the table itself may be long and empty.
    theirs := theirs || ARRAY(SELECT t.id FROM ${own("queue_lease")} t
      WHERE t.id > 0 AND NOT EXISTS (SELECT FROM ${own("queue_worker")} w WHERE w.id = t.worker OFFSET 0));
  END IF;
  FOR l IN SELECT t.*, s.attempts, s.name, s.ordered FROM ${own("queue_lease")} t,
    LATERAL (SELECT x.attempts, x.name, x.ordered FROM ${own("queue")} x WHERE x.id = t.queue OFFSET 0) s
    WHERE t.id = ANY(theirs) ORDER BY t.id FOR UPDATE OF t SKIP LOCKED LOOP
    BEGIN
      unmarked := ARRAY(SELECT u.i - 1 FROM ${own("queue_unmarked")}(array_fill(l.id, ARRAY[l.size]), ARRAY(SELECT generate_series(0, l.size - 1))) u (i));
      WITH read AS (SELECT o - 1 AS place, (j->>0)::bigint AS id, (j->>1)::smallint + ${once} AS attempt, (j->>2)::smallint AS priority,
          to_timestamp((j->>3)::float8 / 1000) AS at, j->>4 AS key, j->>5 AS grp, (j->6)::text AS payload
        FROM json_array_elements(l.jobs::json) WITH ORDINALITY x (j, o)
        WHERE NOT coalesce((o - 1)::int = ANY(l.done), false)),
      marked AS (SELECT r.* FROM read r WHERE r.place <> ALL(unmarked)),
      rest AS (SELECT r.* FROM read r WHERE r.place = ANY(unmarked)),
      failed AS (INSERT INTO ${own("queue_failed")} (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
        SELECT l.queue, r.id, r.priority, r.attempt, r.at, moment, r.key, r.grp, r.payload,
          'the worker was lost while it had this job' FROM rest r WHERE r.attempt >= l.attempts ON CONFLICT DO NOTHING),
      alone AS (INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
        SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.key, r.payload FROM rest r WHERE r.attempt < l.attempts AND r.grp IS NULL RETURNING 1),
      grouped AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
        SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM rest r WHERE r.attempt < l.attempts AND r.grp IS NOT NULL RETURNING 1),
      ended AS (SELECT m.key, m.id FROM marked m WHERE m.key IS NOT NULL UNION ALL
        SELECT r.key, r.id FROM rest r WHERE r.attempt >= l.attempts AND r.key IS NOT NULL)
      SELECT (SELECT count(*) FROM rest), ARRAY(SELECT r.grp FROM read r WHERE r.grp IS NOT NULL),
        ARRAY(SELECT e.key FROM ended e ORDER BY e.id), ARRAY(SELECT e.id FROM ended e ORDER BY e.id),
        (SELECT count(*) FROM rest r WHERE r.attempt < l.attempts) = (SELECT count(*) FROM alone) + (SELECT count(*) FROM grouped),
        ARRAY(SELECT r.id FROM rest r WHERE r.attempt >= l.attempts)
        INTO count, names, keys, ids, moved, lost;
      IF NOT moved THEN
        ${vanished("queue_ready", "queue_grouped")};
      END IF;
      ${failed("l.queue", "lost")}
      DELETE FROM ${own("queue_mark")} t WHERE t.lease = l.id;
      DELETE FROM ${own("queue_lease")} t WHERE t.id = l.id;
      ended_queues := ended_queues || array_fill(l.queue, ARRAY[cardinality(keys)]);
      ended_keys := ended_keys || keys;
      ended_ids := ended_ids || ids;
      IF l.counted THEN
        freed := freed || names;
        freed_queues := freed_queues || array_fill(l.queue, ARRAY[cardinality(names)]);
      END IF;
      jobs := jobs + count;
      IF NOT l.name = ANY(queues) THEN queues := queues || l.name; END IF;
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
      -- Those of others are not to wait for one that cannot be read.
      RAISE WARNING 'holdfast: the jobs of lease % of queue % cannot be read: %', l.id, l.name, SQLERRM;
    END;
  END LOOP;
  -- One of its leases may be in a transaction that completes a job: another time.
  DELETE FROM ${own("queue_worker")} t WHERE t.id = ANY(dead)
    AND NOT EXISTS (SELECT FROM ${own("queue_lease")} x WHERE x.queue = t.queue AND x.worker = t.id OFFSET 0);
  GET DIAGNOSTICS workers = ROW_COUNT;
  PERFORM ${own("queue_free_keys")}(ended_queues, ended_keys, ended_ids);
  PERFORM ${own("queue_free")}(freed_queues, freed);
END
$function$`;

/** What a worker that ends has not started. */
export const giveBack = sql`CREATE OR REPLACE FUNCTION ${own("queue_give_back")}(w bigint, leases bigint[], places integer[]) RETURNS void
${plpgsql} ${plans} AS $function$
DECLARE
  l record;
  moved boolean;
  names text[];
  freed_queues int[] := '{}';
  freed text[] := '{}';
  ended_queues int[] := '{}';
  ended_keys text[] := '{}';
  ended_ids bigint[] := '{}';
  keys text[];
  ids bigint[];
  unmarked int[];
BEGIN
  FOR l IN SELECT t.*, u.places FROM (SELECT x.lease, array_agg(x.place) AS places FROM unnest(leases, places) x (lease, place) GROUP BY x.lease) u
    JOIN ${own("queue_lease")} t ON t.id = u.lease WHERE t.id = ANY(leases) AND t.worker = w ORDER BY t.id FOR UPDATE OF t LOOP
    unmarked := ARRAY(SELECT l.places[u.i] FROM ${own("queue_unmarked")}(array_fill(l.id, ARRAY[cardinality(l.places)]), l.places) u (i));
    WITH read AS (SELECT (o - 1)::int AS place, (j->>0)::bigint AS id, (j->>1)::smallint AS attempt, (j->>2)::smallint AS priority,
        to_timestamp((j->>3)::float8 / 1000) AS at, j->>4 AS key, j->>5 AS grp, (j->6)::text AS payload
      FROM json_array_elements(l.jobs::json) WITH ORDINALITY x (j, o)
      -- Not again, if the answer was lost.
      WHERE (o - 1)::int = ANY(l.places) AND NOT coalesce((o - 1)::int = ANY(l.done), false)),
    rest AS (SELECT r.* FROM read r WHERE r.place = ANY(unmarked)),
    ended AS (SELECT r.key, r.id FROM read r WHERE r.place <> ALL(unmarked) AND r.key IS NOT NULL),
    alone AS (INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
      SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.key, r.payload FROM rest r WHERE r.grp IS NULL RETURNING 1),
    grouped AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
      SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM rest r WHERE r.grp IS NOT NULL RETURNING 1)
    SELECT ARRAY(SELECT r.grp FROM read r WHERE r.grp IS NOT NULL),
      ARRAY(SELECT e.key FROM ended e ORDER BY e.id), ARRAY(SELECT e.id FROM ended e ORDER BY e.id),
      (SELECT count(*) FROM rest) = (SELECT count(*) FROM alone) + (SELECT count(*) FROM grouped) INTO names, keys, ids, moved;
    IF NOT moved THEN
      ${vanished("queue_ready", "queue_grouped")};
    END IF;
    ended_queues := ended_queues || array_fill(l.queue, ARRAY[cardinality(keys)]);
    ended_keys := ended_keys || keys;
    ended_ids := ended_ids || ids;
    IF l.counted THEN
      freed := freed || names;
      freed_queues := freed_queues || array_fill(l.queue, ARRAY[cardinality(names)]);
    END IF;
    UPDATE ${own("queue_lease")} t SET done = ARRAY(SELECT DISTINCT p.place FROM unnest(t.done || l.places) p (place)) WHERE t.id = l.id;
    DELETE FROM ${own("queue_lease")} t WHERE t.id = l.id AND cardinality(t.done) >= t.size;
    -- Of those that had been completed in a transaction before.
    IF FOUND THEN DELETE FROM ${own("queue_mark")} t WHERE t.lease = l.id; END IF;
  END LOOP;
  PERFORM ${own("queue_free_keys")}(ended_queues, ended_keys, ended_ids);
  PERFORM ${own("queue_free")}(freed_queues, freed);
END
$function$`;
