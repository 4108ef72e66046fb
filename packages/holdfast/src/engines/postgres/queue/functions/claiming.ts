/** What a worker takes: the next jobs that nobody has, within the limits of their groups. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept, vanished } from "../../hidden.ts";
import { newest } from "../../leases/fences.ts";
import { begun, largest, margin, plans } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/**
 * What is due at a moment goes where it can be claimed. Returns its groups. since: what was due before has been moved, for
 * all we know; with an old snapshot open, it would be walked over at each claim.
 */
export const due = sql`CREATE OR REPLACE FUNCTION ${own("queue_move_due")}(q integer, n integer, since timestamptz, moment timestamptz) RETURNS text[]
${plpgsql} ${plans} AS $function$
DECLARE
  grps text[] := '{}';
  moved boolean;
BEGIN
  -- A moment that is given, and not asked for in the statement, is where the index ends: a million later ones are not looked at.
  IF NOT EXISTS (SELECT FROM ${own("queue_delayed")} t WHERE t.queue = q AND t.run_at > since AND t.run_at <= moment) THEN
    RETURN grps;
  END IF;
  WITH due AS (
    DELETE FROM ${own("queue_delayed")} t WHERE t.ctid = ANY(ARRAY(SELECT x.ctid FROM ${own("queue_delayed")} x
      WHERE x.queue = q AND x.run_at > since AND x.run_at <= moment ORDER BY x.run_at, x.id LIMIT n FOR UPDATE SKIP LOCKED)) RETURNING t.*),
  alone AS (INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
    SELECT q, d.priority, d.attempt, d.id, d.at, d.key, d.payload FROM due d WHERE d.grp IS NULL RETURNING 1),
  grouped AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
    SELECT q, d.priority, d.attempt, d.id, d.at, d.grp, d.key, d.payload FROM due d WHERE d.grp IS NOT NULL RETURNING 1)
  SELECT coalesce(array_agg(DISTINCT d.grp) FILTER (WHERE d.grp IS NOT NULL), '{}'),
    count(*) = (SELECT count(*) FROM alone) + (SELECT count(*) FROM grouped) INTO grps, moved FROM due d;
  IF NOT moved THEN
    ${vanished("queue_ready", "queue_grouped")};
  END IF;
  RETURN grps;
END
$function$`;

/** Milliseconds until the next one is due; NULL: none is. */
export const soon = sql`CREATE OR REPLACE FUNCTION ${own("queue_soon")}(q integer, since timestamptz, moment timestamptz) RETURNS float8
${plpgsql} ${plans} AS $function$
BEGIN
  RETURN (SELECT greatest(0, extract(epoch FROM d.run_at - moment)) * 1000 FROM (
    SELECT t.run_at FROM ${own("queue_delayed")} t WHERE t.queue = q AND t.run_at > since ORDER BY t.run_at LIMIT 1) d);
END
$function$`;

/**
 * Beside the transactions of handlers, which would keep it from others: what is due is moved, groups are made known, and
 * those without jobs are forgotten. soon: milliseconds until more is due; 0: some was.
 */
export const tend = sql`CREATE OR REPLACE FUNCTION ${own("queue_tend")}(q integer, after float8, whole boolean, OUT soon float8, OUT moment float8)
${plpgsql} ${plans} AS $function$
DECLARE
  this timestamptz := clock_timestamp();
  since timestamptz := CASE WHEN whole OR after IS NULL THEN '-infinity' ELSE to_timestamp(after / 1000) END;
  grps text[];
BEGIN
  moment := extract(epoch FROM this) * 1000;
  IF whole THEN
    PERFORM ${own("queue_know_again")}(q, ${own("queue_unknown")}(q), NULL);
  END IF;
  IF EXISTS (SELECT FROM ${own("queue_delayed")} t WHERE t.queue = q AND t.run_at > since AND t.run_at <= this) THEN
    grps := ${own("queue_move_due")}(q, 1000, since, this);
    PERFORM ${own("queue_know_again")}(q, NULL, grps);
    soon := 0;
  ELSE
    soon := ${own("queue_soon")}(q, since, this);
  END IF;
  IF whole THEN
    -- A job that is added at this moment may lose its group by this: the next look gives it a new one.
    DELETE FROM ${own("queue_group")} t WHERE t.queue = q AND t.grp = ANY(ARRAY(SELECT x.grp FROM ${own("queue_group")} x
      WHERE x.queue = q AND x.running = 0 AND x.since IS NULL AND x.next IS NULL
        AND NOT EXISTS (SELECT FROM ${own("queue_grouped")} j WHERE j.queue = q AND j.grp = x.grp OFFSET 0)
      ORDER BY x.grp LIMIT 1000 FOR UPDATE SKIP LOCKED));
  END IF;
END
$function$`;

/**
 * A batch for a worker. Of each priority that the worker knows it looks only above the floor that the worker gives, where
 * it found the last ones: what was deleted below it would be walked over again and again for as long as an old snapshot
 * is open. The same for what is due, after a moment. With whole it looks everywhere. onward: the group that was served last.
 */
export const claim = sql`CREATE OR REPLACE FUNCTION ${own("queue_claim_jobs")}(q integer, w bigint, n integer, priorities smallint[], floors bigint[],
  after float8, whole boolean, onward text,
  OUT lease bigint, OUT jobs text, OUT counted boolean, OUT last text, OUT idle text, OUT soon float8, OUT moment float8)
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  this timestamptz := clock_timestamp();
  since timestamptz := CASE WHEN whole OR after IS NULL THEN '-infinity' ELSE to_timestamp(after / 1000) END;
  s ${own("queue")};
  places tid[] := '{}';
  chosen tid[] := '{}';
  back text[];
  i int;
  room int;
  running bigint;
  size int;
BEGIN
  moment := extract(epoch FROM this) * 1000;
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(${own.label("queue_pause ")} || q, 0));
  SELECT t.* INTO s FROM ${own("queue")} t WHERE t.id = q;
  IF s.paused THEN
    idle := 'paused';
    RETURN;
  END IF;
  counted := s.group_most IS NOT NULL OR s.group_rate IS NOT NULL;
  -- Who has been given up for dead gets nothing more.
  IF NOT EXISTS (SELECT FROM ${own("queue_worker")} t WHERE t.id = w) THEN
    idle := 'lost';
    RETURN;
  END IF;
  IF s.most IS NOT NULL THEN
    -- One claim at a time counts what is under way. By the row, as there are servers whose advisory locks lock nothing.
    PERFORM FROM ${own("queue")} t WHERE t.id = q FOR NO KEY UPDATE;
    SELECT coalesce(sum(l.size - coalesce(cardinality(l.done), 0)), 0) INTO running FROM ${own("queue_lease")} l WHERE l.queue = q;
    n := least(n, s.most - running);
    IF n <= 0 THEN
      idle := 'limit';
      RETURN;
    END IF;
  END IF;
  back := ${own("queue_move_due")}(q, n, since, this);
  IF whole OR cardinality(back) > 0 THEN
    PERFORM ${own("queue_know_again")}(q, CASE WHEN whole THEN ${own("queue_unknown")}(q) END, back);
  END IF;
  IF NOT whole AND cardinality(priorities) > 0 THEN
    FOR i IN 1..cardinality(priorities) LOOP
      places := places || ARRAY(SELECT t.ctid FROM ${own("queue_ready")} t
        WHERE t.queue = q AND t.priority = priorities[i] AND t.id > floors[i]
        ORDER BY t.id LIMIT n - cardinality(places) FOR UPDATE SKIP LOCKED);
      EXIT WHEN cardinality(places) >= n;
    END LOOP;
  END IF;
  IF whole OR cardinality(priorities) = 0 THEN
    places := ARRAY(SELECT t.ctid FROM ${own("queue_ready")} t WHERE t.queue = q
      ORDER BY t.priority, t.id LIMIT n FOR UPDATE SKIP LOCKED);
  END IF;
  -- Half of it is for jobs of groups, and all that is left.
  room := greatest(n - cardinality(places), CASE WHEN n = 1 THEN (random() < 0.5)::int ELSE n / 2 END);
  SELECT p.places, p.last INTO chosen, last FROM ${own("queue_choose")}(s, room, onward, whole) p;
  last := coalesce(last, onward);
  places := places[1:n - cardinality(chosen)];
  IF cardinality(places) + cardinality(chosen) = 0 THEN
    idle := 'empty';
    soon := ${own("queue_soon")}(q, since, this);
    IF EXISTS (SELECT FROM ${own("queue_group")} g WHERE g.queue = q) THEN
      -- Their groups have no room, or are to come next.
      IF NOT whole OR EXISTS (SELECT FROM ${own("queue_grouped")} t WHERE t.queue = q) THEN idle := 'full'; END IF;
      -- When the first of them has room again; or, if it has no jobs, can be forgotten.
      soon := least(soon, (SELECT min(extract(epoch FROM greatest(g.next, g.opens) - this)) * 1000 FROM (
        SELECT t.next, t.since + s.group_per * interval '1 millisecond' AS opens
        FROM ${own("queue_group")} t WHERE t.queue = q ORDER BY t.grp LIMIT 1000) g
        WHERE greatest(g.next, g.opens) > this));
    END IF;
    RETURN;
  END IF;
  IF cardinality(chosen) = 0 THEN
    WITH gone AS (DELETE FROM ${own("queue_ready")} t WHERE t.ctid = ANY(places) RETURNING t.*)
    SELECT count(*), '[' || string_agg('[' || g.id || ',' || g.attempt || ',' || g.priority || ','
        || (extract(epoch FROM g.at) * 1000)::bigint || ',' || coalesce(to_json(g.key)::text, 'null') || ',null,' || g.payload || ']',
        ',' ORDER BY g.priority, g.id) || ']' INTO size, jobs FROM gone g;
  ELSE
    WITH gone AS (DELETE FROM ${own("queue_ready")} t WHERE t.ctid = ANY(places) RETURNING t.priority, t.id, t.attempt, t.at, t.key, t.payload),
    grp AS (DELETE FROM ${own("queue_grouped")} t WHERE t.ctid = ANY(chosen)
      RETURNING t.priority, t.id, t.attempt, t.at, t.key, t.payload, t.grp),
    every AS (SELECT g.priority, g.id, g.attempt, g.at, g.key, g.payload, NULL::text AS grp FROM gone g
      UNION ALL SELECT g.priority, g.id, g.attempt, g.at, g.key, g.payload, g.grp FROM grp g)
    SELECT count(*), '[' || string_agg('[' || g.id || ',' || g.attempt || ',' || g.priority || ','
        || (extract(epoch FROM g.at) * 1000)::bigint || ',' || coalesce(to_json(g.key)::text, 'null') || ','
        || coalesce(to_json(g.grp)::text, 'null') || ',' || g.payload || ']', ',' ORDER BY g.priority, g.id) || ']' INTO size, jobs FROM every g;
  END IF;
  IF octet_length(jobs) > ${largest} AND size > 1 THEN
    RAISE EXCEPTION 'holdfast: % jobs of queue % are % bytes, too many for a batch', size, s.name, octet_length(jobs) USING ERRCODE = 'HF413';
  END IF;
  INSERT INTO ${own("queue_lease")} (id, worker, queue, counted, size, jobs) OVERRIDING SYSTEM VALUE
    VALUES (${newest("queue_lease_id_seq", false)}, w, q, counted, size, jobs)
    RETURNING queue_lease.id INTO lease;
  ${kept("queue_lease")};
END
$function$`;

/** Groups that have jobs and no row: added in a transaction, or while the group was taken for empty. */
export const unknown = sql`CREATE OR REPLACE FUNCTION ${own("queue_unknown")}(q integer) RETURNS text[]
${plpgsql} ${plans} AS $function$
BEGIN
  -- From group to group by the index, whatever the number of their jobs.
  RETURN ARRAY(WITH RECURSIVE g AS (
    (SELECT t.grp FROM ${own("queue_grouped")} t WHERE t.queue = q ORDER BY t.grp LIMIT 1)
    UNION ALL SELECT (SELECT t.grp FROM ${own("queue_grouped")} t WHERE t.queue = q AND t.grp > g.grp ORDER BY t.grp LIMIT 1)
    FROM g WHERE g.grp IS NOT NULL)
  SELECT g.grp FROM g
    WHERE g.grp IS NOT NULL AND NOT EXISTS (SELECT FROM ${own("queue_group")} t WHERE t.queue = q AND t.grp = g.grp OFFSET 0));
END
$function$`;

/**
 * Jobs of groups: those after the group that was served last, in turn, each with an equal share. The groups' rows are
 * locked, or passed over if somebody else is choosing from them. First the groups, then their jobs, in statements of
 * their own: what a group had put back before it was locked must be seen. By the chunk, as a statement for each group
 * took 8.5 ms for 500 jobs of 100 groups.
 *
 * A group remembers up to which id it has been emptied, of one priority, so that what was deleted below it is not walked
 * over while an old snapshot is open. It is written down rarely, as rows that are updated leave something behind too; jobs that come
 * back reset it. With whole it does not count: what was committed very late may be below it.
 */
export const choose = sql`CREATE OR REPLACE FUNCTION ${own("queue_choose")}(s ${own("queue")}, n integer, onward text, whole boolean,
  OUT places tid[], OUT last text)
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  moment timestamptz := clock_timestamp();
  -- What began before it is over.
  window_start timestamptz := moment - s.group_per * interval '1 millisecond';
  limited boolean := s.group_most IS NOT NULL OR s.group_rate IS NOT NULL;
  share int;
  turn int;
  after text;
  seen int := 0;
  names text[];
  rooms int[];
  used int[];
  counts int[];
  sinces timestamptz[];
  levels smallint[];
  floors bigint[];
  matched tid[];
  firsts smallint[];
  reached bigint[];
BEGIN
  places := '{}';
  IF n <= 0 THEN RETURN; END IF;
  share := greatest(1, least(10, n, s.group_most));
  FOR turn IN 1..2 LOOP
    after := CASE WHEN turn = 1 THEN onward END;
    LOOP
      SELECT array_agg(g.grp), array_agg(least(share, n - cardinality(places) - (g.o - 1) * share, s.group_most - g.running, s.group_rate - g.used)),
        array_agg(g.used), array_agg(g.since), array_agg(g.floor_priority), array_agg(g.floor) INTO names, rooms, used, sinces, levels, floors
        FROM (SELECT x.grp, x.running, row_number() OVER () AS o,
            CASE WHEN x.since > window_start THEN x.started ELSE 0 END AS used,
            CASE WHEN x.since > window_start THEN x.since ELSE moment END AS since,
            CASE WHEN NOT whole THEN x.floor_priority END AS floor_priority, CASE WHEN NOT whole THEN x.floor END AS floor
          FROM (SELECT t.grp, t.running, t.since, t.started, t.floor_priority, t.floor FROM ${own("queue_group")} t WHERE t.queue = s.id
            AND t.grp > coalesce(after, '') COLLATE "C" AND (turn = 1 OR t.grp <= onward COLLATE "C")
            AND (s.group_most IS NULL OR t.running < s.group_most) AND (t.next IS NULL OR t.next <= moment OR
              -- The one that it waits for was thrown away.
              t.head IS NOT NULL AND NOT EXISTS (SELECT FROM ${own("queue_grouped")} h
                WHERE h.queue = s.id AND h.grp = t.grp AND h.priority = t.head_priority AND h.id = t.head OFFSET 0))
            ORDER BY t.grp LIMIT ceil((n - cardinality(places)) / share::float8)::int FOR NO KEY UPDATE SKIP LOCKED) x) g;
      EXIT WHEN names IS NULL;
      seen := seen + cardinality(names);
      after := names[cardinality(names)];
      last := after;
      WITH f AS MATERIALIZED (SELECT u.o, u.level, u.floor, CASE WHEN s.ordered THEN
          -- The first one and no other: if somebody's transaction has it, that may be rolled back, and the next one must not overtake it.
          ARRAY(SELECT x.ctid FROM (SELECT coalesce(
              (SELECT t.ctid FROM ${own("queue_grouped")} t WHERE t.queue = s.id AND t.grp = u.grp AND t.priority < coalesce(u.level, 32767)
                ORDER BY t.priority, t.id LIMIT 1),
              (SELECT t.ctid FROM ${own("queue_grouped")} t WHERE t.queue = s.id AND t.grp = u.grp AND t.priority = coalesce(u.level, 32767)
                AND t.id > coalesce(u.floor, 0) ORDER BY t.id LIMIT 1),
              (SELECT t.ctid FROM ${own("queue_grouped")} t WHERE t.queue = s.id AND t.grp = u.grp AND t.priority > u.level
                ORDER BY t.priority, t.id LIMIT 1)) AS place) h,
            LATERAL (SELECT t.ctid FROM ${own("queue_grouped")} t WHERE t.ctid = h.place FOR UPDATE SKIP LOCKED) x WHERE u.room > 0)
        WHEN u.floor IS NULL THEN
          ARRAY(SELECT t.ctid FROM ${own("queue_grouped")} t WHERE t.queue = s.id AND t.grp = u.grp
            ORDER BY t.priority, t.id LIMIT greatest(0, u.room) FOR UPDATE SKIP LOCKED)
        ELSE (SELECT b.more || ARRAY(SELECT t.ctid FROM ${own("queue_grouped")} t
            WHERE t.queue = s.id AND t.grp = u.grp AND t.priority > u.level
            ORDER BY t.priority, t.id LIMIT greatest(0, u.room - cardinality(b.more)) FOR UPDATE SKIP LOCKED)
          FROM (SELECT a.first || ARRAY(SELECT t.ctid FROM ${own("queue_grouped")} t
              WHERE t.queue = s.id AND t.grp = u.grp AND t.priority = u.level AND t.id > u.floor
              ORDER BY t.id LIMIT greatest(0, u.room - cardinality(a.first)) FOR UPDATE SKIP LOCKED) AS more
            FROM (SELECT ARRAY(SELECT t.ctid FROM ${own("queue_grouped")} t
              WHERE t.queue = s.id AND t.grp = u.grp AND t.priority < u.level
              ORDER BY t.priority, t.id LIMIT greatest(0, u.room) FOR UPDATE SKIP LOCKED) AS first) a) b)
        END AS matched
        FROM unnest(names, rooms, levels, floors) WITH ORDINALITY u (grp, room, level, floor, o)),
      -- Where each began: what is below it, of that priority, is gone.
      h AS MATERIALIZED (SELECT f.o, t.priority, t.id FROM f JOIN ${own("queue_grouped")} t ON t.ctid = f.matched[1])
      SELECT ARRAY(SELECT cardinality(f.matched) FROM f ORDER BY f.o), ARRAY(SELECT j.place FROM f, unnest(f.matched) j (place)),
        ARRAY(SELECT h.priority FROM f LEFT JOIN h ON h.o = f.o ORDER BY f.o), ARRAY(SELECT h.id FROM f LEFT JOIN h ON h.o = f.o ORDER BY f.o)
        INTO counts, matched, firsts, reached;
      places := places || matched;
      IF cardinality(matched) > 0 THEN
        UPDATE ${own("queue_group")} t SET running = t.running + CASE WHEN limited THEN ${begun} ELSE 0 END,
            since = CASE WHEN limited THEN u.since END, started = CASE WHEN limited THEN u.used + u.n ELSE 0 END, next = NULL, head = NULL,
            floor_priority = CASE WHEN u.far THEN u.first ELSE t.floor_priority END,
            floor = CASE WHEN u.far THEN u.reached - ${margin} ELSE t.floor END
          FROM (SELECT x.*, x.n > 0 AND (x.floor IS NULL AND x.reached > ${margin} OR x.first = x.level AND x.reached > x.floor + ${margin} * 2) IS TRUE AS far
            FROM unnest(names, counts, sinces, used, levels, floors, firsts, reached) x (grp, n, since, used, level, floor, first, reached)) u,
            LATERAL (SELECT x.ctid AS place FROM ${own("queue_group")} x WHERE x.queue = s.id AND x.grp = u.grp OFFSET 0) p
          WHERE t.ctid = p.place AND u.n > 0 AND (limited OR u.far);
      END IF;
      -- A job that is added at this moment may lose its group by this: a later claim gives it a new one.
      IF 0 = ANY(counts) THEN
        DELETE FROM ${own("queue_group")} t USING unnest(names, rooms, counts) u (grp, room, n),
            LATERAL (SELECT x.ctid AS place FROM ${own("queue_group")} x WHERE x.queue = s.id AND x.grp = u.grp OFFSET 0) p
          WHERE t.ctid = p.place AND u.n = 0 AND u.room > 0 AND t.running = 0
            AND (s.group_rate IS NULL OR t.since IS NULL OR t.since <= window_start)
            -- Its first job may be in somebody's transaction.
            AND NOT (s.ordered AND EXISTS (SELECT FROM ${own("queue_grouped")} j WHERE j.queue = s.id AND j.grp = u.grp OFFSET 0));
      END IF;
      -- The next claim goes on from there.
      EXIT WHEN cardinality(places) >= n OR seen >= 2000;
    END LOOP;
    EXIT WHEN cardinality(places) >= n OR onward IS NULL OR seen >= 2000;
  END LOOP;
END
$function$`;

/**
 * Of the queues whose workers have nothing to do, those that have something: above the floors that are known of them, or
 * with whole anywhere; and what is due after a moment.
 */
export const look = sql`CREATE OR REPLACE FUNCTION ${own("queue_look")}(queues integer[], afters float8[], floored integer[], priorities smallint[],
  floors bigint[], whole boolean) RETURNS integer[]
${plpgsql} ${plans} AS $function$
DECLARE
  this timestamptz := clock_timestamp();
BEGIN
  RETURN ARRAY(SELECT u.q FROM unnest(queues, afters) u (q, after) JOIN ${own("queue")} s ON s.id = u.q WHERE NOT s.paused AND (
    EXISTS (SELECT FROM ${own("queue_delayed")} t WHERE t.queue = u.q AND t.run_at <= this
      AND t.run_at > CASE WHEN whole OR u.after IS NULL THEN '-infinity' ELSE to_timestamp(u.after / 1000) END OFFSET 0)
    OR EXISTS (SELECT FROM unnest(floored, priorities, floors) f (q, priority, floor), LATERAL (
      SELECT FROM ${own("queue_ready")} t WHERE t.queue = f.q AND t.priority = f.priority AND t.id > f.floor OFFSET 0) t WHERE f.q = u.q OFFSET 0)
    OR whole AND EXISTS (SELECT FROM ${own("queue_ready")} t WHERE t.queue = u.q OFFSET 0)
    OR whole AND EXISTS (SELECT FROM ${own("queue_grouped")} t WHERE t.queue = u.q OFFSET 0)));
END
$function$`;
