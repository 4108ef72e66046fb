/** Jobs in the transaction of their handlers. */
import { own, sql } from "../../../../seam/sql.ts";
import { vanished } from "../../hidden.ts";
import { failed } from "./ending.ts";
import { largest, plans } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/**
 * Jobs for the transaction that this runs in, which has their rows locked: if it is rolled back, or leaves some of them
 * alone, they are still there. Floors, whole and onward as in a claim. Groups are served in turn; of the next 32, those whose
 * first job has the smallest priority come first. Their rows are not locked, which would keep others from them until
 * the transaction ends. So many bytes at the most, but always one.
 */
export const take = sql`CREATE OR REPLACE FUNCTION ${own("queue_take_jobs")}(q integer, n integer, priorities smallint[], floors bigint[],
  whole boolean, onward text, OUT jobs text, OUT last text)
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  places tid[] := '{}';
  chosen tid[] := '{}';
  matched tid[];
  names text[];
  name text;
  groups boolean;
  round int;
  turn int;
  room int;
  share int;
  after text;
  seen int := 0;
  i int;
BEGIN
  IF (SELECT t.paused FROM ${own("queue")} t WHERE t.id = q) THEN RETURN; END IF;
  groups := EXISTS (SELECT FROM ${own("queue_group")} t WHERE t.queue = q);
  -- Half of it is for jobs of groups, and what is left on either side for the other.
  share := CASE WHEN NOT groups THEN n WHEN n = 1 THEN (random() < 0.5)::int ELSE n - n / 2 END;
  FOR round IN 1..2 LOOP
    IF whole OR cardinality(priorities) = 0 THEN
      places := places || ARRAY(SELECT t.ctid FROM ${own("queue_ready")} t WHERE t.queue = q AND t.ctid <> ALL(places)
        ORDER BY t.priority, t.id LIMIT share FOR UPDATE SKIP LOCKED);
    ELSE
      FOR i IN 1..cardinality(priorities) LOOP
        EXIT WHEN share <= 0;
        matched := ARRAY(SELECT t.ctid FROM ${own("queue_ready")} t
          WHERE t.queue = q AND t.priority = priorities[i] AND t.id > floors[i] AND t.ctid <> ALL(places)
          ORDER BY t.id LIMIT share FOR UPDATE SKIP LOCKED);
        places := places || matched;
        share := share - cardinality(matched);
      END LOOP;
    END IF;
    EXIT WHEN NOT groups OR round = 2;
    room := n - cardinality(places);
    FOR turn IN 1..2 LOOP
      after := CASE WHEN turn = 1 THEN onward END;
      LOOP
        names := ARRAY(SELECT t.grp FROM ${own("queue_group")} t WHERE t.queue = q AND t.grp > coalesce(after, '') COLLATE "C"
          AND (turn = 1 OR t.grp <= onward COLLATE "C") ORDER BY t.grp LIMIT 32);
        EXIT WHEN cardinality(names) = 0;
        seen := seen + cardinality(names);
        after := names[cardinality(names)];
        share := ceil((room - cardinality(chosen)) / cardinality(names)::float8)::int;
        FOR name IN SELECT h.grp FROM (SELECT u.grp, u.o, (SELECT t.priority FROM ${own("queue_grouped")} t
              WHERE t.queue = q AND t.grp = u.grp ORDER BY t.priority, t.id LIMIT 1) AS priority
            FROM unnest(names) WITH ORDINALITY u (grp, o)) h
          WHERE h.priority IS NOT NULL ORDER BY h.priority, h.o LOOP
          matched := ARRAY(SELECT t.ctid FROM ${own("queue_grouped")} t WHERE t.queue = q AND t.grp = name
            ORDER BY t.priority, t.id LIMIT least(share, room - cardinality(chosen)) FOR UPDATE SKIP LOCKED);
          IF cardinality(matched) > 0 THEN
            chosen := chosen || matched;
            last := name;
          END IF;
          EXIT WHEN cardinality(chosen) >= room;
        END LOOP;
        EXIT WHEN cardinality(chosen) >= room OR seen >= 2000;
      END LOOP;
      EXIT WHEN cardinality(chosen) >= room OR onward IS NULL OR seen >= 2000;
    END LOOP;
    share := room - cardinality(chosen);
    EXIT WHEN share <= 0;
  END LOOP;
  last := coalesce(last, onward);
  jobs := (SELECT '[' || string_agg(r.job, ',' ORDER BY r.priority, r.id) || ']' FROM (
    SELECT x.*, sum(octet_length(x.job)) OVER (ORDER BY x.priority, x.id) - octet_length(x.job) AS before FROM (
      SELECT r.priority, r.id, '[' || r.id || ',' || r.attempt || ',' || r.priority || ',' || (extract(epoch FROM r.at) * 1000)::bigint || ','
        || coalesce(to_json(r.key)::text, 'null') || ',null,' || r.payload || ']' AS job
        FROM ${own("queue_ready")} r WHERE r.ctid = ANY(places)
      UNION ALL SELECT r.priority, r.id, '[' || r.id || ',' || r.attempt || ',' || r.priority || ',' || (extract(epoch FROM r.at) * 1000)::bigint || ','
        || coalesce(to_json(r.key)::text, 'null') || ',' || to_json(r.grp)::text || ',' || r.payload || ']'
        FROM ${own("queue_grouped")} r WHERE r.ctid = ANY(chosen)) x) r WHERE r.before < ${largest});
  -- It may have been paused before they were locked.
  IF (SELECT t.paused FROM ${own("queue")} t WHERE t.id = q) THEN jobs := NULL; END IF;
END
$function$`;

/** The one job, if nobody else has it. */
export const takeOne = sql`CREATE OR REPLACE FUNCTION ${own("queue_take_one")}(q integer, job bigint, of_priority smallint, of_grp text) RETURNS text
${plpgsql} ${plans} AS $function$
BEGIN
  IF of_grp IS NULL THEN
    RETURN (SELECT '[[' || t.id || ',' || t.attempt || ',' || t.priority || ',' || (extract(epoch FROM t.at) * 1000)::bigint || ','
        || coalesce(to_json(t.key)::text, 'null') || ',null,' || t.payload || ']]' FROM ${own("queue_ready")} t
      WHERE t.queue = q AND t.priority = of_priority AND t.id = job FOR UPDATE SKIP LOCKED);
  END IF;
  RETURN (SELECT '[[' || t.id || ',' || t.attempt || ',' || t.priority || ',' || (extract(epoch FROM t.at) * 1000)::bigint || ','
      || coalesce(to_json(t.key)::text, 'null') || ',' || to_json(t.grp)::text || ',' || t.payload || ']]' FROM ${own("queue_grouped")} t
    WHERE t.queue = q AND t.grp = of_grp AND t.priority = of_priority AND t.id = job FOR UPDATE SKIP LOCKED);
END
$function$`;

/**
 * The end of jobs that were taken. Fails if one of them is not there: whoever has its effects must not commit them. again: milliseconds until what failed runs again; NULL: it is
 * done or, if there is an error, has failed for good.
 */
export const settle = sql`CREATE OR REPLACE FUNCTION ${own("queue_settle")}(q integer, ids bigint[], priorities smallint[], grps text[],
  keys text[], again float8, why text) RETURNS void
${plpgsql} ${plans} AS $function$
DECLARE
  moment timestamptz := clock_timestamp();
  moved boolean;
  lost bigint[];
  n int;
BEGIN
  IF again IS NULL AND keys IS NOT NULL THEN
    PERFORM FROM (SELECT DISTINCT x.k COLLATE "C" AS k FROM unnest(keys) x (k) ORDER BY 1) u,
      LATERAL (SELECT FROM ${own("queue_key")} t WHERE t.queue = q AND t.key = u.k FOR UPDATE) t;
    DELETE FROM ${own("queue_key")} t WHERE t.ctid = ANY(ARRAY(SELECT p.ctid FROM unnest(keys, ids) u (key, id), LATERAL (
      SELECT x.ctid FROM ${own("queue_key")} x WHERE x.queue = q AND x.key = u.key AND x.job = u.id OFFSET 0) p));
  END IF;
  WITH alone AS (DELETE FROM ${own("queue_ready")} t WHERE t.ctid = ANY(ARRAY(SELECT p.ctid FROM unnest(ids, priorities, grps) u (id, priority, grp), LATERAL (
        SELECT x.ctid FROM ${own("queue_ready")} x WHERE x.queue = q AND x.priority = u.priority AND x.id = u.id OFFSET 0) p WHERE u.grp IS NULL))
      RETURNING t.id, t.priority, t.attempt + 1 AS attempt, t.at, t.key, NULL::text AS grp, t.payload),
  grouped AS (DELETE FROM ${own("queue_grouped")} t WHERE t.ctid = ANY(ARRAY(SELECT p.ctid FROM unnest(ids, priorities, grps) u (id, priority, grp), LATERAL (
        SELECT x.ctid FROM ${own("queue_grouped")} x WHERE x.queue = q AND x.grp = u.grp AND x.priority = u.priority AND x.id = u.id OFFSET 0) p))
      RETURNING t.id, t.priority, t.attempt + 1 AS attempt, t.at, t.key, t.grp, t.payload),
  gone AS (SELECT * FROM alone UNION ALL SELECT * FROM grouped),
  later AS (INSERT INTO ${own("queue_delayed")} (queue, priority, attempt, id, at, run_at, key, grp, payload)
    SELECT q, g.priority, g.attempt, g.id, g.at, moment + again * interval '1 millisecond', g.key, g.grp, g.payload
    FROM gone g WHERE again IS NOT NULL RETURNING 1),
  never AS (INSERT INTO ${own("queue_failed")} (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
    SELECT q, g.id, g.priority, g.attempt, g.at, moment, g.key, g.grp, g.payload, why
    FROM gone g WHERE again IS NULL AND why IS NOT NULL ON CONFLICT DO NOTHING)
  SELECT (SELECT count(*) FROM gone), again IS NULL OR (SELECT count(*) FROM gone) = (SELECT count(*) FROM later),
    ARRAY(SELECT g.id FROM gone g WHERE again IS NULL AND why IS NOT NULL) INTO n, moved, lost;
  IF n < cardinality(ids) THEN
    RAISE EXCEPTION '% of % jobs that this transaction has taken are not there any more', cardinality(ids) - n, cardinality(ids);
  END IF;
  IF NOT moved THEN
    ${vanished("queue_delayed")};
  END IF;
  ${failed("q", "lost")}
END
$function$`;
