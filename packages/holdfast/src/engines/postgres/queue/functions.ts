/**
 * The functions of queues. Each is one round trip. Whoever waits for rows that others may hold takes them in this order,
 * so that no two wait for each other: leases, then keys by name, then groups by name, each kind once. Jobs and workers
 * are passed over if somebody has them.
 */
import { type Statement, own, sql } from "../../../seam/sql.ts";
import * as protection from "../../../seam/protections.ts";
import { newest } from "../leases/fences.ts";

/** Of the name of its channel. */
export const queueChannel = "queue";

/** A run more. */
const once = sql.raw(protection.attemptsCounted ? "1" : "0");
/** The session of a worker is gone, or it did not say in time that it lives. */
const gone = sql.raw(
  protection.workerDeadFirst
    ? "t.beat < moment - t.ttl * interval '1 millisecond' OR t.lock IS NOT NULL AND pg_try_advisory_xact_lock(t.lock)"
    : "true",
);
/** Of a group that allows so many at a time. */
const begun = sql.raw(protection.groupCounted ? "u.n" : "0");

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
const plans = sql.raw(
  "SET plan_cache_mode = force_generic_plan SET jit = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off",
);

/** Counted up to here, so that it stays cheap. */
const most = sql.raw("100000");

/**
 * How far below what was found last, in ids, a group is looked at: transactions that took theirs earlier may end later. It is written
 * down again after twice as many.
 */
const margin = sql.raw("2000");

/** The number of a queue. settings: what a worker wants of it; NULL: only the number. */
const open = sql`CREATE OR REPLACE FUNCTION ${own("queue_open")}(q text, settings jsonb) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
  s record;
  known ${own("queue")};
BEGIN
  SELECT * INTO s FROM jsonb_to_record(coalesce(settings, '{}')) AS x (attempts smallint, most integer, group_most integer,
    group_rate integer, group_per bigint, ordered boolean);
  SELECT * INTO known FROM ${own("queue")} t WHERE t.name = q;
  IF NOT FOUND THEN
    INSERT INTO ${own("queue")} (name) VALUES (q) ON CONFLICT DO NOTHING;
    SELECT * INTO known FROM ${own("queue")} t WHERE t.name = q;
  END IF;
  IF settings IS NOT NULL AND (known.attempts, known.most, known.group_most, known.group_rate, known.group_per, known.ordered)
    IS DISTINCT FROM (s.attempts, s.most, s.group_most, s.group_rate, s.group_per, s.ordered) THEN
    UPDATE ${own("queue")} t SET attempts = s.attempts, most = s.most, group_most = s.group_most, group_rate = s.group_rate,
      group_per = s.group_per, ordered = s.ordered WHERE t.name = q;
  END IF;
  RETURN known.id;
END
$function$`;

/**
 * Adds jobs. Lists side by side; those that nobody needs are NULL. Of a key that is taken: the job that has it, and
 * added is false; with swap, the job that waits is taken out and this one put in its place.
 */
const add = sql`CREATE OR REPLACE FUNCTION ${own("queue_add")}(q integer, payloads text[], priorities smallint[], runs float8[],
  grps text[], keys text[], swaps boolean[], alone boolean, tell text, OUT ids bigint[], OUT added boolean[])
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  moment timestamptz := clock_timestamp();
  n int := cardinality(payloads);
  i int;
  taken bigint;
BEGIN
  SELECT array_agg(b.base + nextval(${own.text("queue_job_id")})) INTO ids FROM ${own("fence_base")}(false) b (base), generate_series(1, n);
  IF keys IS NOT NULL THEN
    added := array_fill(true, ARRAY[n]);
    -- In one order, so that two callers with the same keys do not wait for each other.
    FOR i IN SELECT u.o FROM unnest(keys) WITH ORDINALITY u (k, o) WHERE u.k IS NOT NULL ORDER BY u.k COLLATE "C", u.o LOOP
      INSERT INTO ${own("queue_key")} (queue, key, job) VALUES (q, keys[i], ids[i]) ON CONFLICT DO NOTHING;
      CONTINUE WHEN FOUND;
      SELECT t.job INTO taken FROM ${own("queue_key")} t WHERE t.queue = q AND t.key = keys[i] FOR UPDATE;
      IF NOT FOUND THEN
        -- It has ended meanwhile.
        INSERT INTO ${own("queue_key")} (queue, key, job) VALUES (q, keys[i], ids[i])
          ON CONFLICT (queue, key) DO UPDATE SET job = queue_key.job RETURNING queue_key.job INTO taken;
        CONTINUE WHEN taken = ids[i];
      END IF;
      IF coalesce(swaps[i], false) THEN
        DELETE FROM ${own("queue_delayed")} t WHERE t.ctid = (SELECT x.ctid FROM ${own("queue_delayed")} x
          WHERE x.id = taken FOR UPDATE SKIP LOCKED);
        IF NOT FOUND THEN
          DELETE FROM ${own("queue_ready")} t WHERE t.ctid = (SELECT x.ctid FROM ${own("queue_ready")} x
            WHERE x.queue = q AND x.key = keys[i] AND x.id = taken LIMIT 1 FOR UPDATE SKIP LOCKED);
          IF NOT FOUND THEN
            DELETE FROM ${own("queue_grouped")} t WHERE t.ctid = (SELECT x.ctid FROM ${own("queue_grouped")} x
              WHERE x.queue = q AND x.key = keys[i] AND x.id = taken LIMIT 1 FOR UPDATE SKIP LOCKED);
          END IF;
        END IF;
        -- One that is being worked on goes on, without the key.
        UPDATE ${own("queue_key")} t SET job = ids[i] WHERE t.queue = q AND t.key = keys[i];
        IF taken = ANY(ids) THEN added[array_position(ids, taken)] := false; END IF;
      ELSE
        added[i] := false;
        ids[i] := taken;
      END IF;
    END LOOP;
  END IF;
  IF runs IS NULL AND grps IS NULL AND keys IS NULL THEN
    INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, payload)
      SELECT q, coalesce(u.p, 0), 0, u.i, moment, u.b FROM unnest(ids, priorities, payloads) u (i, p, b);
  ELSE
    INSERT INTO ${own("queue_delayed")} (queue, priority, attempt, id, at, run_at, key, grp, payload)
      SELECT q, coalesce(u.p, 0), 0, u.i, moment, to_timestamp(u.r / 1000), u.k, u.g, u.b
      FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
      WHERE u.a IS NOT false AND to_timestamp(u.r / 1000) > moment;
    INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
      SELECT q, coalesce(u.p, 0), 0, u.i, moment, u.k, u.b
      FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
      WHERE u.a IS NOT false AND u.g IS NULL AND NOT coalesce(to_timestamp(u.r / 1000) > moment, false);
    IF grps IS NOT NULL THEN
      INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
        SELECT q, coalesce(u.p, 0), 0, u.i, moment, u.g, u.k, u.b
        FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
        WHERE u.a IS NOT false AND u.g IS NOT NULL AND NOT coalesce(to_timestamp(u.r / 1000) > moment, false);
      -- In a transaction of the caller's, others who add to the same new group would wait for its end: the next claim does it.
      IF alone THEN PERFORM ${own("queue_know")}(q, grps); END IF;
    END IF;
  END IF;
  IF tell IS NOT NULL THEN PERFORM pg_notify(${own.label(queueChannel)}, tell); END IF;
END
$function$`;

/**
 * Rows for groups that have none. A conflict with a row that is being changed would wait for its end, which is needless:
 * only those that are new to us are inserted.
 */
const know = sql`CREATE OR REPLACE FUNCTION ${own("queue_know")}(q integer, grps text[]) RETURNS void
LANGUAGE plpgsql ${plans} AS $function$
BEGIN
  INSERT INTO ${own("queue_group")} (queue, grp)
    SELECT q, u.g FROM (SELECT DISTINCT x.g COLLATE "C" AS g FROM unnest(grps) x (g) WHERE x.g IS NOT NULL) u
    WHERE NOT EXISTS (SELECT FROM ${own("queue_group")} t WHERE t.queue = q AND t.grp = u.g OFFSET 0)
    ORDER BY u.g ON CONFLICT DO NOTHING;
END
$function$`;

/**
 * Groups that were not known, and groups to which jobs have come back that are older than others: whoever chooses from those
 * looks at all that they have. First all the rows that are new, then those that are there, so that no two wait for each other.
 */
const again = sql`CREATE OR REPLACE FUNCTION ${own("queue_know_again")}(q integer, fresh text[], back text[]) RETURNS void
LANGUAGE plpgsql ${plans} AS $function$
BEGIN
  IF cardinality(fresh) > 0 OR cardinality(back) > 0 THEN PERFORM ${own("queue_know")}(q, fresh || back); END IF;
  IF cardinality(back) > 0 THEN
    UPDATE ${own("queue_group")} t SET floor = NULL, floor_priority = NULL WHERE t.queue = q AND t.grp = ANY(ARRAY(
      SELECT t.grp FROM (SELECT DISTINCT x.g COLLATE "C" AS g FROM unnest(back) x (g) ORDER BY 1) u,
        LATERAL (SELECT x.grp FROM ${own("queue_group")} x WHERE x.queue = q AND x.grp = u.g AND x.floor IS NOT NULL FOR NO KEY UPDATE) t));
  END IF;
END
$function$`;

/**
 * What is due at a moment goes where it can be claimed. Returns its groups. since: what was due before has been moved, for
 * all we know; with an old snapshot open, it would be walked over at each claim.
 */
const due = sql`CREATE OR REPLACE FUNCTION ${own("queue_move_due")}(q integer, n integer, since timestamptz, moment timestamptz) RETURNS text[]
LANGUAGE plpgsql ${plans} AS $function$
DECLARE
  grps text[] := '{}';
BEGIN
  -- A moment that is given, and not asked for in the statement, is where the index ends: a million later ones are not looked at.
  IF NOT EXISTS (SELECT FROM ${own("queue_delayed")} t WHERE t.queue = q AND t.run_at > since AND t.run_at <= moment) THEN
    RETURN grps;
  END IF;
  WITH due AS (
    DELETE FROM ${own("queue_delayed")} t WHERE t.ctid = ANY(ARRAY(SELECT x.ctid FROM ${own("queue_delayed")} x
      WHERE x.queue = q AND x.run_at > since AND x.run_at <= moment ORDER BY x.run_at, x.id LIMIT n FOR UPDATE SKIP LOCKED)) RETURNING t.*),
  alone AS (INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
    SELECT q, d.priority, d.attempt, d.id, d.at, d.key, d.payload FROM due d WHERE d.grp IS NULL),
  grouped AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
    SELECT q, d.priority, d.attempt, d.id, d.at, d.grp, d.key, d.payload FROM due d WHERE d.grp IS NOT NULL)
  SELECT coalesce(array_agg(DISTINCT d.grp) FILTER (WHERE d.grp IS NOT NULL), '{}') INTO grps FROM due d;
  RETURN grps;
END
$function$`;

/** Milliseconds until the next one is due; NULL: none is. */
const soon = sql`CREATE OR REPLACE FUNCTION ${own("queue_soon")}(q integer, since timestamptz, moment timestamptz) RETURNS float8
LANGUAGE plpgsql ${plans} AS $function$
BEGIN
  RETURN (SELECT greatest(0, extract(epoch FROM d.run_at - moment)) * 1000 FROM (
    SELECT t.run_at FROM ${own("queue_delayed")} t WHERE t.queue = q AND t.run_at > since ORDER BY t.run_at LIMIT 1) d);
END
$function$`;

/**
 * Beside the transactions of handlers, which would keep it from others: what is due is moved, groups are made known, and
 * those without jobs are forgotten. soon: milliseconds until more is due; 0: some was.
 */
const tend = sql`CREATE OR REPLACE FUNCTION ${own("queue_tend")}(q integer, after float8, whole boolean, OUT soon float8, OUT moment float8)
LANGUAGE plpgsql ${plans} AS $function$
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

/** More than this, in bytes, is no batch: whoever gets it could not read it. The worker asks for fewer. */
const largest = sql.raw(String(64 * 1024 * 1024));

/**
 * A batch for a worker. Of each priority that the worker knows it looks only above the floor that the worker gives, where
 * it found the last ones: what was deleted below it would be walked over again and again for as long as an old snapshot
 * is open. The same for what is due, after a moment. With whole it looks everywhere. onward: the group that was served last.
 */
const claim = sql`CREATE OR REPLACE FUNCTION ${own("queue_claim_jobs")}(q integer, w bigint, n integer, priorities smallint[], floors bigint[],
  after float8, whole boolean, onward text,
  OUT lease bigint, OUT jobs text, OUT counted boolean, OUT last text, OUT idle text, OUT soon float8, OUT moment float8)
LANGUAGE plpgsql ${plans} AS $function$
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
END
$function$`;

/** Waits for claims that are under way, so that nothing is claimed after it. */
const pause = sql`CREATE OR REPLACE FUNCTION ${own("queue_pause")}(q integer, is_paused boolean) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended(${own.label("queue_pause ")} || q, 0));
  UPDATE ${own("queue")} t SET paused = is_paused WHERE t.id = q;
END
$function$`;

/** Groups that have jobs and no row: added in a transaction, or while the group was taken for empty. */
const unknown = sql`CREATE OR REPLACE FUNCTION ${own("queue_unknown")}(q integer) RETURNS text[]
LANGUAGE plpgsql ${plans} AS $function$
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
const choose = sql`CREATE OR REPLACE FUNCTION ${own("queue_choose")}(s ${own("queue")}, n integer, onward text, whole boolean,
  OUT places tid[], OUT last text)
LANGUAGE plpgsql ${plans} AS $function$
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
  found tid[];
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
      WITH f AS MATERIALIZED (SELECT u.o, u.level, u.floor, CASE WHEN u.floor IS NULL THEN
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
        END AS found
        FROM unnest(names, rooms, levels, floors) WITH ORDINALITY u (grp, room, level, floor, o)),
      -- Where each began: what is below it, of that priority, is gone.
      h AS MATERIALIZED (SELECT f.o, t.priority, t.id FROM f JOIN ${own("queue_grouped")} t ON t.ctid = f.found[1])
      SELECT ARRAY(SELECT cardinality(f.found) FROM f ORDER BY f.o), ARRAY(SELECT j.place FROM f, unnest(f.found) j (place)),
        ARRAY(SELECT h.priority FROM f LEFT JOIN h ON h.o = f.o ORDER BY f.o), ARRAY(SELECT h.id FROM f LEFT JOIN h ON h.o = f.o ORDER BY f.o)
        INTO counts, found, firsts, reached;
      places := places || found;
      IF cardinality(found) > 0 THEN
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
            AND (s.group_rate IS NULL OR t.since IS NULL OR t.since <= window_start);
      END IF;
      -- The next claim goes on from there.
      EXIT WHEN cardinality(places) >= n OR seen >= 2000;
    END LOOP;
    EXIT WHEN cardinality(places) >= n OR onward IS NULL OR seen >= 2000;
  END LOOP;
END
$function$`;

/**
 * The end of jobs. leases: those of which nothing is left; the rest by their lease and place: parts (done), and of those
 * that failed when to run them again (NULL: never) and why. Keys and groups of what has ended. Whatever belongs to a
 * lease that this worker does not have any more changes nothing, and is not among the answers.
 */
const finish = sql`CREATE OR REPLACE FUNCTION ${own("queue_finish")}(q integer, w bigint, leases bigint[], parts bigint[], places integer[],
  failed bigint[], failed_places integer[], again float8[], errors text[],
  key_leases bigint[], keys text[], key_jobs bigint[], group_leases bigint[], group_places integer[], grps text[], OUT ours bigint[])
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  moment timestamptz := clock_timestamp();
  in_order boolean;
BEGIN
  ours := ARRAY(SELECT t.id FROM ${own("queue_lease")} t
    WHERE t.id = ANY(leases || parts || failed || key_leases || group_leases) AND t.worker = w ORDER BY t.id FOR NO KEY UPDATE);
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
    WITH jobs AS (SELECT f.again, f.error, l.jobs::json->f.place AS job FROM unnest(failed, failed_places, again, errors) f (lease, place, again, error)
      JOIN ${own("queue_lease")} l ON l.id = f.lease WHERE l.id = ANY(ours) AND NOT coalesce(f.place = ANY(l.done), false)),
    read AS (SELECT j.again, j.error, (j.job->>0)::bigint AS id, (j.job->>1)::smallint + ${once} AS attempt, (j.job->>2)::smallint AS priority,
      to_timestamp((j.job->>3)::float8 / 1000) AS at, j.job->>4 AS key, j.job->>5 AS grp, (j.job->6)::text AS payload FROM jobs j),
    never AS (INSERT INTO ${own("queue_failed")} (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
      SELECT q, r.id, r.priority, r.attempt, r.at, moment, r.key, r.grp, r.payload, r.error FROM read r WHERE r.again IS NULL
      ON CONFLICT DO NOTHING),
    -- In order: it stays at the head of its group, which waits for it.
    head AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
      SELECT q, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM read r
      WHERE r.again IS NOT NULL AND in_order AND r.grp IS NOT NULL),
    waits AS (UPDATE ${own("queue_group")} g SET next = moment + r.again * interval '1 millisecond', head = r.id, head_priority = r.priority,
        floor = NULL, floor_priority = NULL
      FROM read r WHERE g.queue = q AND g.grp = ANY(ARRAY(SELECT x.grp FROM read x)) AND g.grp = r.grp AND r.again IS NOT NULL AND in_order)
    INSERT INTO ${own("queue_delayed")} (queue, priority, attempt, id, at, run_at, key, grp, payload)
      SELECT q, r.priority, r.attempt, r.id, r.at, moment + r.again * interval '1 millisecond', r.key, r.grp, r.payload
      FROM read r WHERE r.again IS NOT NULL AND NOT (in_order AND r.grp IS NOT NULL);
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

/** In the handler's own transaction: whoever takes the lease away waits for it, or has done so, and then it is false. */
const complete = sql`CREATE OR REPLACE FUNCTION ${own("queue_complete")}(w bigint, of_lease bigint, at_place integer) RETURNS boolean
LANGUAGE plpgsql ${plans} AS $function$
BEGIN
  PERFORM FROM ${own("queue_lease")} t WHERE t.id = of_lease AND t.worker = w AND NOT coalesce(at_place = ANY(t.done), false) FOR KEY SHARE;
  IF ${sql.raw(protection.jobStillOurs ? "NOT FOUND" : "false")} THEN RETURN false; END IF;
  INSERT INTO ${own("queue_mark")} (lease, place) VALUES (of_lease, at_place) ON CONFLICT DO NOTHING;
  RETURN true;
END
$function$`;

/**
 * One less at work in each of these groups, as often as it is named. Makes no rows: whoever inserts one would wait for a
 * claim that has deleted it, while that claim may wait for another row of this call's. queue_unknown finds the rest.
 */
const free = sql`CREATE OR REPLACE FUNCTION ${own("queue_free")}(queues integer[], grps text[]) RETURNS void
LANGUAGE plpgsql ${plans} AS $function$
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

/**
 * Workers that are gone: whose session is (its lock is free), or who did not say that they live; and leases of workers
 * that were found to be gone while they claimed, for which it looks at all of them if it is to be thorough. What they had not
 * finished runs again, with one attempt more, or has failed if it has had all of them. Returns the queues that have jobs again.
 */
const sweep = sql`CREATE OR REPLACE FUNCTION ${own("queue_sweep")}(thorough boolean, OUT workers integer, OUT jobs integer, OUT queues text[])
LANGUAGE plpgsql ${plans} AS $function$
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
      WITH read AS (SELECT o - 1 AS place, (j->>0)::bigint AS id, (j->>1)::smallint + ${once} AS attempt, (j->>2)::smallint AS priority,
          to_timestamp((j->>3)::float8 / 1000) AS at, j->>4 AS key, j->>5 AS grp, (j->6)::text AS payload
        FROM json_array_elements(l.jobs::json) WITH ORDINALITY x (j, o)
        WHERE NOT coalesce((o - 1)::int = ANY(l.done), false)),
      marked AS (SELECT r.* FROM read r JOIN ${own("queue_mark")} m ON m.lease = l.id AND m.place = r.place),
      rest AS (SELECT r.* FROM read r WHERE NOT EXISTS (SELECT FROM marked m WHERE m.place = r.place)),
      failed AS (INSERT INTO ${own("queue_failed")} (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
        SELECT l.queue, r.id, r.priority, r.attempt, r.at, moment, r.key, r.grp, r.payload,
          'the worker was lost while it had this job' FROM rest r WHERE r.attempt >= l.attempts ON CONFLICT DO NOTHING),
      alone AS (INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
        SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.key, r.payload FROM rest r WHERE r.attempt < l.attempts AND r.grp IS NULL),
      grouped AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
        SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM rest r WHERE r.attempt < l.attempts AND r.grp IS NOT NULL),
      ended AS (SELECT m.key, m.id FROM marked m WHERE m.key IS NOT NULL UNION ALL
        SELECT r.key, r.id FROM rest r WHERE r.attempt >= l.attempts AND r.key IS NOT NULL)
      SELECT (SELECT count(*) FROM rest), ARRAY(SELECT r.grp FROM read r WHERE r.grp IS NOT NULL),
        ARRAY(SELECT e.key FROM ended e ORDER BY e.id), ARRAY(SELECT e.id FROM ended e ORDER BY e.id)
        INTO count, names, keys, ids;
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
  -- All of them at the end, in one order: two who each waited for the other's would be a deadlock.
  IF cardinality(ended_keys) > 0 THEN
    PERFORM FROM (SELECT x.q, x.k COLLATE "C" AS k, x.i FROM unnest(ended_queues, ended_keys, ended_ids) x (q, k, i) ORDER BY 1, 2) u,
      LATERAL (SELECT FROM ${own("queue_key")} t WHERE t.queue = u.q AND t.key = u.k AND t.job = u.i FOR UPDATE) t;
    DELETE FROM ${own("queue_key")} t WHERE t.ctid = ANY(ARRAY(SELECT p.ctid FROM unnest(ended_queues, ended_keys, ended_ids) u (q, k, i), LATERAL (
      SELECT x.ctid FROM ${own("queue_key")} x WHERE x.queue = u.q AND x.key = u.k AND x.job = u.i OFFSET 0) p));
  END IF;
  PERFORM ${own("queue_free")}(freed_queues, freed);
END
$function$`;

/** What a worker that ends has not started. */
const giveBack = sql`CREATE OR REPLACE FUNCTION ${own("queue_give_back")}(w bigint, leases bigint[], places integer[]) RETURNS void
LANGUAGE plpgsql ${plans} AS $function$
DECLARE
  l record;
  names text[];
  freed_queues int[] := '{}';
  freed text[] := '{}';
BEGIN
  FOR l IN SELECT t.*, u.places FROM (SELECT x.lease, array_agg(x.place) AS places FROM unnest(leases, places) x (lease, place) GROUP BY x.lease) u
    JOIN ${own("queue_lease")} t ON t.id = u.lease WHERE t.id = ANY(leases) AND t.worker = w ORDER BY t.id FOR UPDATE OF t LOOP
    WITH read AS (SELECT (j->>0)::bigint AS id, (j->>1)::smallint AS attempt, (j->>2)::smallint AS priority,
        to_timestamp((j->>3)::float8 / 1000) AS at, j->>4 AS key, j->>5 AS grp, (j->6)::text AS payload
      FROM json_array_elements(l.jobs::json) WITH ORDINALITY x (j, o)
      -- Not again, if the answer was lost.
      WHERE (o - 1)::int = ANY(l.places) AND NOT coalesce((o - 1)::int = ANY(l.done), false)),
    alone AS (INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
      SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.key, r.payload FROM read r WHERE r.grp IS NULL),
    grouped AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
      SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM read r WHERE r.grp IS NOT NULL)
    SELECT ARRAY(SELECT r.grp FROM read r WHERE r.grp IS NOT NULL) INTO names;
    IF l.counted THEN
      freed := freed || names;
      freed_queues := freed_queues || array_fill(l.queue, ARRAY[cardinality(names)]);
    END IF;
    UPDATE ${own("queue_lease")} t SET done = ARRAY(SELECT DISTINCT p.place FROM unnest(t.done || l.places) p (place)) WHERE t.id = l.id;
    DELETE FROM ${own("queue_lease")} t WHERE t.id = l.id AND cardinality(t.done) >= t.size;
    -- Of those that had been completed in a transaction before.
    IF FOUND THEN DELETE FROM ${own("queue_mark")} t WHERE t.lease = l.id; END IF;
  END LOOP;
  PERFORM ${own("queue_free")}(freed_queues, freed);
END
$function$`;

/**
 * Jobs for the transaction that this runs in, which has their rows locked: if it is rolled back, or leaves some of them
 * alone, they are still there. Floors, whole and onward as in a claim. Groups are served in turn; of the next 32, those whose
 * first job has the smallest priority come first. Their rows are not locked, which would keep others from them until
 * the transaction ends. So many bytes at the most, but always one.
 */
const take = sql`CREATE OR REPLACE FUNCTION ${own("queue_take_jobs")}(q integer, n integer, priorities smallint[], floors bigint[],
  whole boolean, onward text, OUT jobs text, OUT last text)
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  places tid[] := '{}';
  chosen tid[] := '{}';
  found tid[];
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
        found := ARRAY(SELECT t.ctid FROM ${own("queue_ready")} t
          WHERE t.queue = q AND t.priority = priorities[i] AND t.id > floors[i] AND t.ctid <> ALL(places)
          ORDER BY t.id LIMIT share FOR UPDATE SKIP LOCKED);
        places := places || found;
        share := share - cardinality(found);
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
          found := ARRAY(SELECT t.ctid FROM ${own("queue_grouped")} t WHERE t.queue = q AND t.grp = name
            ORDER BY t.priority, t.id LIMIT least(share, room - cardinality(chosen)) FOR UPDATE SKIP LOCKED);
          IF cardinality(found) > 0 THEN
            chosen := chosen || found;
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
const takeOne = sql`CREATE OR REPLACE FUNCTION ${own("queue_take_one")}(q integer, job bigint, of_priority smallint, of_grp text) RETURNS text
LANGUAGE plpgsql ${plans} AS $function$
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
 * The end of jobs that were taken. again: milliseconds until what failed runs again; NULL: it is
 * done or, if there is an error, has failed for good.
 */
const settle = sql`CREATE OR REPLACE FUNCTION ${own("queue_settle")}(q integer, ids bigint[], priorities smallint[], grps text[],
  keys text[], again float8, why text) RETURNS void
LANGUAGE plpgsql ${plans} AS $function$
DECLARE
  moment timestamptz := clock_timestamp();
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
    FROM gone g WHERE again IS NOT NULL)
  INSERT INTO ${own("queue_failed")} (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
    SELECT q, g.id, g.priority, g.attempt, g.at, moment, g.key, g.grp, g.payload, why
    FROM gone g WHERE again IS NULL AND why IS NOT NULL ON CONFLICT DO NOTHING;
END
$function$`;

/**
 * Failed jobs begin anew, a few at a time: those with these ids, or those after an id and up to another. One whose key another
 * job has meanwhile stays where it is, as at most one of a key waits or runs. last: where to go on; NULL: that was all.
 */
const revive = sql`CREATE OR REPLACE FUNCTION ${own("queue_revive_some")}(q integer, ids bigint[], after bigint, INOUT upto bigint, most integer,
  OUT n bigint, OUT last bigint)
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  wanted bigint[];
  free bigint[];
  grps text[];
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
    SELECT q, g.priority, 0, g.id, g.at, g.key, g.payload FROM gone g WHERE g.grp IS NULL),
  grouped AS (INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
    SELECT q, g.priority, 0, g.id, g.at, g.grp, g.key, g.payload FROM gone g WHERE g.grp IS NOT NULL)
  SELECT count(*), array_agg(DISTINCT g.grp) FILTER (WHERE g.grp IS NOT NULL) INTO n, grps FROM gone g;
  PERFORM ${own("queue_know_again")}(q, NULL, grps);
END
$function$`;

/** Jobs with these ids that have failed, or wait. One that somebody has in a transaction runs. */
const discard = sql`CREATE OR REPLACE FUNCTION ${own("queue_discard_some")}(q integer, ids bigint[]) RETURNS bigint
LANGUAGE plpgsql ${plans} AS $function$
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
const prune = sql`CREATE OR REPLACE FUNCTION ${own("queue_prune_some")}(q integer, before float8, after bigint, most integer,
  OUT n bigint, OUT last bigint)
LANGUAGE plpgsql ${plans} AS $function$
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
const count = sql`CREATE OR REPLACE FUNCTION ${own("queue_count")}(numbers integer[], names text[])
RETURNS TABLE (name text, paused boolean, waiting bigint, delayed bigint, running bigint, failed bigint, workers bigint, oldest float8)
LANGUAGE plpgsql ${plans} AS $function$
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

/**
 * Of the queues whose workers have nothing to do, those that have something: above the floors that are known of them, or
 * with whole anywhere; and what is due after a moment.
 */
const look = sql`CREATE OR REPLACE FUNCTION ${own("queue_look")}(queues integer[], afters float8[], floored integer[], priorities smallint[],
  floors bigint[], whole boolean) RETURNS integer[]
LANGUAGE plpgsql ${plans} AS $function$
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

export const queueRoutines: readonly Statement[] = [
  open,
  know,
  add,
  again,
  due,
  soon,
  tend,
  unknown,
  choose,
  claim,
  pause,
  finish,
  complete,
  free,
  sweep,
  giveBack,
  take,
  takeOne,
  settle,
  revive,
  discard,
  prune,
  count,
  look,
];
