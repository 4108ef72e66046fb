/**
 * The functions of queues. Each is one round trip. Whoever waits for rows that others may hold takes them in this order,
 * so that no two wait for each other: leases, then keys by name, then groups by name, each kind once. Jobs and workers
 * are passed over if somebody has them.
 */
import { type Statement, sql } from "../../core/sql.ts";

/**
 * The planner takes lists for short and new tables for small: what is wanted here is always found by an index, in its order.
 * With bitmaps it read and sorted all of 5,000 jobs to find the first (2.4 ms in place of 0.3).
 */
const plans = sql.raw(
  "SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off",
);

/** The number of a queue. settings: what a worker wants of it; NULL: only the number. */
const open = sql`CREATE OR REPLACE FUNCTION holdfast.queue_open(q text, settings jsonb) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
  s record;
  known holdfast.queue;
BEGIN
  SELECT * INTO s FROM jsonb_to_record(coalesce(settings, '{}')) AS x (attempts smallint, most integer, group_most integer,
    group_rate integer, group_per bigint, ordered boolean);
  SELECT * INTO known FROM holdfast.queue t WHERE t.name = q;
  IF NOT FOUND THEN
    INSERT INTO holdfast.queue (name) VALUES (q) ON CONFLICT DO NOTHING;
    SELECT * INTO known FROM holdfast.queue t WHERE t.name = q;
  END IF;
  IF settings IS NOT NULL AND (known.attempts, known.most, known.group_most, known.group_rate, known.group_per, known.ordered)
    IS DISTINCT FROM (s.attempts, s.most, s.group_most, s.group_rate, s.group_per, s.ordered) THEN
    UPDATE holdfast.queue t SET attempts = s.attempts, most = s.most, group_most = s.group_most, group_rate = s.group_rate,
      group_per = s.group_per, ordered = s.ordered WHERE t.name = q;
  END IF;
  RETURN known.id;
END
$function$`;

/**
 * Adds jobs. Lists side by side; those that nobody needs are NULL. Of a key that is taken: the job that has it, and
 * added is false; with swap, the job that waits is taken out and this one put in its place.
 */
const add = sql`CREATE OR REPLACE FUNCTION holdfast.queue_add(q integer, payloads text[], priorities smallint[], runs float8[],
  grps text[], keys text[], swaps boolean[], alone boolean, tell text, OUT ids bigint[], OUT added boolean[])
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  moment timestamptz := clock_timestamp();
  n int := cardinality(payloads);
  i int;
  taken bigint;
BEGIN
  SELECT array_agg(nextval('holdfast.queue_job_id')) INTO ids FROM generate_series(1, n);
  IF keys IS NOT NULL THEN
    added := array_fill(true, ARRAY[n]);
    -- In one order, so that two callers with the same keys do not wait for each other.
    FOR i IN SELECT u.o FROM unnest(keys) WITH ORDINALITY u (k, o) WHERE u.k IS NOT NULL ORDER BY u.k COLLATE "C", u.o LOOP
      INSERT INTO holdfast.queue_key (queue, key, job) VALUES (q, keys[i], ids[i]) ON CONFLICT DO NOTHING;
      CONTINUE WHEN FOUND;
      SELECT t.job INTO taken FROM holdfast.queue_key t WHERE t.queue = q AND t.key = keys[i] FOR UPDATE;
      IF NOT FOUND THEN
        -- It has ended meanwhile.
        INSERT INTO holdfast.queue_key (queue, key, job) VALUES (q, keys[i], ids[i])
          ON CONFLICT (queue, key) DO UPDATE SET job = queue_key.job RETURNING queue_key.job INTO taken;
        CONTINUE WHEN taken = ids[i];
      END IF;
      IF coalesce(swaps[i], false) THEN
        DELETE FROM holdfast.queue_delayed t WHERE t.ctid = (SELECT x.ctid FROM holdfast.queue_delayed x
          WHERE x.id = taken FOR UPDATE SKIP LOCKED);
        IF NOT FOUND THEN
          DELETE FROM holdfast.queue_ready t WHERE t.ctid = (SELECT x.ctid FROM holdfast.queue_ready x
            WHERE x.queue = q AND x.key = keys[i] AND x.id = taken LIMIT 1 FOR UPDATE SKIP LOCKED);
          IF NOT FOUND THEN
            DELETE FROM holdfast.queue_grouped t WHERE t.ctid = (SELECT x.ctid FROM holdfast.queue_grouped x
              WHERE x.queue = q AND x.key = keys[i] AND x.id = taken LIMIT 1 FOR UPDATE SKIP LOCKED);
          END IF;
        END IF;
        -- One that is being worked on goes on, without the key.
        UPDATE holdfast.queue_key t SET job = ids[i] WHERE t.queue = q AND t.key = keys[i];
        IF taken = ANY(ids) THEN added[array_position(ids, taken)] := false; END IF;
      ELSE
        added[i] := false;
        ids[i] := taken;
      END IF;
    END LOOP;
  END IF;
  IF runs IS NULL AND grps IS NULL AND keys IS NULL THEN
    INSERT INTO holdfast.queue_ready (queue, priority, attempt, id, at, payload)
      SELECT q, coalesce(u.p, 0), 0, u.i, moment, u.b FROM unnest(ids, priorities, payloads) u (i, p, b);
  ELSE
    INSERT INTO holdfast.queue_delayed (queue, priority, attempt, id, at, run_at, key, grp, payload)
      SELECT q, coalesce(u.p, 0), 0, u.i, moment, to_timestamp(u.r / 1000), u.k, u.g, u.b
      FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
      WHERE u.a IS NOT false AND to_timestamp(u.r / 1000) > moment;
    INSERT INTO holdfast.queue_ready (queue, priority, attempt, id, at, key, payload)
      SELECT q, coalesce(u.p, 0), 0, u.i, moment, u.k, u.b
      FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
      WHERE u.a IS NOT false AND u.g IS NULL AND NOT coalesce(to_timestamp(u.r / 1000) > moment, false);
    IF grps IS NOT NULL THEN
      INSERT INTO holdfast.queue_grouped (queue, priority, attempt, id, at, grp, key, payload)
        SELECT q, coalesce(u.p, 0), 0, u.i, moment, u.g, u.k, u.b
        FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
        WHERE u.a IS NOT false AND u.g IS NOT NULL AND NOT coalesce(to_timestamp(u.r / 1000) > moment, false);
      -- In a transaction of the caller's, others who add to the same new group would wait for its end: the next claim does it.
      IF alone THEN PERFORM holdfast.queue_know(q, grps); END IF;
    END IF;
  END IF;
  IF tell IS NOT NULL THEN PERFORM pg_notify('holdfast_queue', tell); END IF;
END
$function$`;

/**
 * Rows for groups that have none. A conflict with a row that is being changed would wait for its end, which is needless:
 * only those that are new to us are inserted.
 */
const know = sql`CREATE OR REPLACE FUNCTION holdfast.queue_know(q integer, grps text[]) RETURNS void
LANGUAGE plpgsql ${plans} AS $function$
BEGIN
  INSERT INTO holdfast.queue_group (queue, grp)
    SELECT q, u.g FROM (SELECT DISTINCT x.g COLLATE "C" AS g FROM unnest(grps) x (g) WHERE x.g IS NOT NULL) u
    WHERE NOT EXISTS (SELECT FROM holdfast.queue_group t WHERE t.queue = q AND t.grp = u.g)
    ORDER BY u.g ON CONFLICT DO NOTHING;
END
$function$`;

/** What is due goes where it can be claimed. Returns its groups. */
const due = sql`CREATE OR REPLACE FUNCTION holdfast.queue_due(q integer, n integer) RETURNS text[]
LANGUAGE plpgsql ${plans} AS $function$
DECLARE
  grps text[] := '{}';
BEGIN
  IF NOT EXISTS (SELECT FROM holdfast.queue_delayed t WHERE t.queue = q AND t.run_at <= clock_timestamp()) THEN
    RETURN grps;
  END IF;
  WITH due AS (
    DELETE FROM holdfast.queue_delayed t WHERE t.ctid = ANY(ARRAY(SELECT x.ctid FROM holdfast.queue_delayed x
      WHERE x.queue = q AND x.run_at <= clock_timestamp() ORDER BY x.run_at, x.id LIMIT n FOR UPDATE SKIP LOCKED)) RETURNING t.*),
  alone AS (INSERT INTO holdfast.queue_ready (queue, priority, attempt, id, at, key, payload)
    SELECT q, d.priority, d.attempt, d.id, d.at, d.key, d.payload FROM due d WHERE d.grp IS NULL),
  grouped AS (INSERT INTO holdfast.queue_grouped (queue, priority, attempt, id, at, grp, key, payload)
    SELECT q, d.priority, d.attempt, d.id, d.at, d.grp, d.key, d.payload FROM due d WHERE d.grp IS NOT NULL)
  SELECT coalesce(array_agg(DISTINCT d.grp) FILTER (WHERE d.grp IS NOT NULL), '{}') INTO grps FROM due d;
  RETURN grps;
END
$function$`;

/** The same, with rows for their groups, as a transaction of its own. Returns the milliseconds until more is due; 0: some was. */
const dueNow = sql`CREATE OR REPLACE FUNCTION holdfast.queue_due_now(q integer) RETURNS float8
LANGUAGE plpgsql ${plans} AS $function$
BEGIN
  IF EXISTS (SELECT FROM holdfast.queue_delayed t WHERE t.queue = q AND t.run_at <= clock_timestamp()) THEN
    PERFORM holdfast.queue_know(q, holdfast.queue_due(q, 1000));
    RETURN 0;
  END IF;
  RETURN (SELECT greatest(0, extract(epoch FROM d.run_at - clock_timestamp())) * 1000 FROM (
    SELECT t.run_at FROM holdfast.queue_delayed t WHERE t.queue = q ORDER BY t.run_at LIMIT 1) d);
END
$function$`;

/**
 * A batch for a worker. Of each priority that the worker knows it looks only above the floor that the worker gives, where
 * it found the last ones: what was deleted below it would be walked over again and again for as long as an old snapshot
 * is open. With whole, and if that brings nothing, it looks everywhere. grouped: whether there may be groups;
 * onward: the group that was served last.
 */
const claim = sql`CREATE OR REPLACE FUNCTION holdfast.queue_claim(q integer, w bigint, n integer, priorities smallint[], floors bigint[],
  whole boolean, grouped boolean, onward text,
  OUT lease bigint, OUT jobs text, OUT counted boolean, OUT last text, OUT idle text, OUT soon float8)
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  s holdfast.queue;
  places tid[] := '{}';
  chosen tid[] := '{}';
  grps text[];
  i int;
  room int;
  running bigint;
BEGIN
  PERFORM pg_advisory_xact_lock_shared(hashtextextended('holdfast_queue_pause ' || q, 0));
  SELECT t.* INTO s FROM holdfast.queue t WHERE t.id = q;
  IF s.paused THEN
    idle := 'paused';
    RETURN;
  END IF;
  counted := s.group_most IS NOT NULL OR s.group_rate IS NOT NULL;
  -- Who has been given up for dead gets nothing more.
  IF NOT EXISTS (SELECT FROM holdfast.queue_worker t WHERE t.id = w) THEN
    idle := 'lost';
    RETURN;
  END IF;
  IF s.most IS NOT NULL THEN
    -- One claim at a time counts what is under way.
    PERFORM pg_advisory_xact_lock(hashtextextended('holdfast_queue ' || q, 0));
    SELECT coalesce(sum(l.size - coalesce(cardinality(l.done), 0)), 0) INTO running FROM holdfast.queue_lease l WHERE l.queue = q;
    n := least(n, s.most - running);
    IF n <= 0 THEN
      idle := 'limit';
      RETURN;
    END IF;
  END IF;
  grps := holdfast.queue_due(q, n);
  IF NOT whole THEN
    FOR i IN 1..cardinality(priorities) LOOP
      places := places || ARRAY(SELECT t.ctid FROM holdfast.queue_ready t
        WHERE t.queue = q AND t.priority = priorities[i] AND t.id > floors[i]
        ORDER BY t.id LIMIT n - cardinality(places) FOR UPDATE SKIP LOCKED);
      EXIT WHEN cardinality(places) >= n;
    END LOOP;
  END IF;
  IF whole OR cardinality(places) = 0 THEN
    places := ARRAY(SELECT t.ctid FROM holdfast.queue_ready t WHERE t.queue = q
      ORDER BY t.priority, t.id LIMIT n FOR UPDATE SKIP LOCKED);
  END IF;
  IF whole THEN grps := grps || holdfast.queue_unknown(q); END IF;
  IF cardinality(grps) > 0 THEN PERFORM holdfast.queue_know(q, grps); END IF;
  IF grouped OR cardinality(grps) > 0 THEN
    -- Half of it is for jobs of groups, and all that is left.
    room := greatest(n - cardinality(places), CASE WHEN n = 1 THEN (random() < 0.5)::int ELSE n / 2 END);
    SELECT p.places, p.last INTO chosen, last FROM holdfast.queue_pick(s, room, onward) p;
    last := coalesce(last, onward);
    places := places[1:n - cardinality(chosen)];
  END IF;
  -- Walks from group to group, 16 ms for 1,000 that are being emptied: only if there is nothing else.
  IF cardinality(places) + cardinality(chosen) + cardinality(grps) = 0 THEN
    grps := holdfast.queue_unknown(q);
    IF cardinality(grps) > 0 THEN
      PERFORM holdfast.queue_know(q, grps);
      SELECT p.places, p.last INTO chosen, last FROM holdfast.queue_pick(s, n, onward) p;
      last := coalesce(last, onward);
    END IF;
  END IF;
  IF cardinality(places) + cardinality(chosen) = 0 THEN
    idle := 'empty';
    soon := (SELECT greatest(0, extract(epoch FROM d.run_at - clock_timestamp())) * 1000 FROM (
      SELECT t.run_at FROM holdfast.queue_delayed t WHERE t.queue = q ORDER BY t.run_at LIMIT 1) d);
    -- Their groups have no room, or are to come next.
    IF EXISTS (SELECT FROM holdfast.queue_grouped t WHERE t.queue = q) THEN idle := 'full'; END IF;
    RETURN;
  END IF;
  IF cardinality(chosen) = 0 THEN
    WITH gone AS (DELETE FROM holdfast.queue_ready t WHERE t.ctid = ANY(places) RETURNING t.*)
    INSERT INTO holdfast.queue_lease (worker, queue, counted, size, jobs)
      SELECT w, q, counted, count(*), '[' || string_agg('[' || g.id || ',' || g.attempt || ',' || g.priority || ','
        || (extract(epoch FROM g.at) * 1000)::bigint || ',' || coalesce(to_json(g.key)::text, 'null') || ',null,' || g.payload || ']',
        ',' ORDER BY g.priority, g.id) || ']' FROM gone g
      RETURNING queue_lease.id, queue_lease.jobs INTO lease, jobs;
  ELSE
    WITH gone AS (DELETE FROM holdfast.queue_ready t WHERE t.ctid = ANY(places) RETURNING t.priority, t.id, t.attempt, t.at, t.key, t.payload),
    grp AS (DELETE FROM holdfast.queue_grouped t WHERE t.ctid = ANY(chosen)
      RETURNING t.priority, t.id, t.attempt, t.at, t.key, t.payload, t.grp),
    every AS (SELECT g.priority, g.id, g.attempt, g.at, g.key, g.payload, NULL::text AS grp FROM gone g
      UNION ALL SELECT g.priority, g.id, g.attempt, g.at, g.key, g.payload, g.grp FROM grp g)
    INSERT INTO holdfast.queue_lease (worker, queue, counted, size, jobs)
      SELECT w, q, counted, count(*), '[' || string_agg('[' || g.id || ',' || g.attempt || ',' || g.priority || ','
        || (extract(epoch FROM g.at) * 1000)::bigint || ',' || coalesce(to_json(g.key)::text, 'null') || ','
        || coalesce(to_json(g.grp)::text, 'null') || ',' || g.payload || ']', ',' ORDER BY g.priority, g.id) || ']' FROM every g
      RETURNING queue_lease.id, queue_lease.jobs INTO lease, jobs;
  END IF;
END
$function$`;

/** Waits for claims that are under way, so that nothing is claimed after it. */
const pause = sql`CREATE OR REPLACE FUNCTION holdfast.queue_pause(q integer, is_paused boolean) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('holdfast_queue_pause ' || q, 0));
  UPDATE holdfast.queue t SET paused = is_paused WHERE t.id = q;
END
$function$`;

/** Groups that have jobs and no row: added in a transaction, or while the group was taken for empty. */
const unknown = sql`CREATE OR REPLACE FUNCTION holdfast.queue_unknown(q integer) RETURNS text[]
LANGUAGE plpgsql ${plans} AS $function$
BEGIN
  -- From group to group by the index, whatever the number of their jobs.
  RETURN ARRAY(WITH RECURSIVE g AS (
    (SELECT t.grp FROM holdfast.queue_grouped t WHERE t.queue = q ORDER BY t.grp LIMIT 1)
    UNION ALL SELECT (SELECT t.grp FROM holdfast.queue_grouped t WHERE t.queue = q AND t.grp > g.grp ORDER BY t.grp LIMIT 1)
    FROM g WHERE g.grp IS NOT NULL)
  SELECT g.grp FROM g
    WHERE g.grp IS NOT NULL AND NOT EXISTS (SELECT FROM holdfast.queue_group t WHERE t.queue = q AND t.grp = g.grp));
END
$function$`;

/**
 * Jobs of groups: those after the group that was served last, in turn, each with an equal share. The groups' rows are
 * locked, or passed over if somebody else is choosing from them. First the groups, then their jobs, in statements of
 * their own: what a group had put back before it was locked must be seen. By the chunk, as a statement for each group
 * took 8.5 ms for 500 jobs of 100 groups.
 */
const pick = sql`CREATE OR REPLACE FUNCTION holdfast.queue_pick(s holdfast.queue, n integer, onward text, OUT places tid[], OUT last text)
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
  found tid[];
BEGIN
  places := '{}';
  IF n <= 0 THEN RETURN; END IF;
  share := greatest(1, least(10, n, s.group_most));
  FOR turn IN 1..2 LOOP
    after := CASE WHEN turn = 1 THEN onward END;
    LOOP
      SELECT array_agg(g.grp), array_agg(least(share, n - cardinality(places) - (g.o - 1) * share, s.group_most - g.running, s.group_rate - g.used)),
        array_agg(g.used), array_agg(g.since) INTO names, rooms, used, sinces
        FROM (SELECT x.grp, x.running, row_number() OVER () AS o,
            CASE WHEN x.since > window_start THEN x.started ELSE 0 END AS used,
            CASE WHEN x.since > window_start THEN x.since ELSE moment END AS since
          FROM (SELECT t.grp, t.running, t.since, t.started FROM holdfast.queue_group t WHERE t.queue = s.id
            AND t.grp > coalesce(after, '') COLLATE "C" AND (turn = 1 OR t.grp <= onward COLLATE "C")
            AND (s.group_most IS NULL OR t.running < s.group_most) AND (t.next IS NULL OR t.next <= moment)
            ORDER BY t.grp LIMIT ceil((n - cardinality(places)) / share::float8)::int FOR NO KEY UPDATE SKIP LOCKED) x) g;
      EXIT WHEN names IS NULL;
      seen := seen + cardinality(names);
      after := names[cardinality(names)];
      last := after;
      WITH f AS MATERIALIZED (SELECT u.o, ARRAY(SELECT t.ctid FROM holdfast.queue_grouped t WHERE t.queue = s.id AND t.grp = u.grp
          ORDER BY t.priority, t.id LIMIT greatest(0, u.room) FOR UPDATE SKIP LOCKED) AS found
        FROM unnest(names, rooms) WITH ORDINALITY u (grp, room, o))
      SELECT ARRAY(SELECT cardinality(f.found) FROM f ORDER BY f.o), ARRAY(SELECT j.place FROM f, unnest(f.found) j (place))
        INTO counts, found;
      places := places || found;
      IF limited AND cardinality(found) > 0 THEN
        UPDATE holdfast.queue_group t SET running = t.running + u.n, since = u.since, started = u.used + u.n, next = NULL
          FROM unnest(names, counts, sinces, used) u (grp, n, since, used) WHERE t.queue = s.id AND t.grp = u.grp AND u.n > 0;
      END IF;
      -- A job that is added at this moment may lose its group by this: a later claim gives it a new one.
      IF 0 = ANY(counts) THEN
        DELETE FROM holdfast.queue_group t USING unnest(names, rooms, counts) u (grp, room, n)
          WHERE t.queue = s.id AND t.grp = u.grp AND u.n = 0 AND u.room > 0 AND t.running = 0
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
const finish = sql`CREATE OR REPLACE FUNCTION holdfast.queue_finish(q integer, w bigint, leases bigint[], parts bigint[], places integer[],
  failed bigint[], failed_places integer[], again float8[], errors text[],
  key_leases bigint[], keys text[], key_jobs bigint[], group_leases bigint[], group_places integer[], grps text[], OUT ours bigint[])
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  moment timestamptz := clock_timestamp();
  in_order boolean;
BEGIN
  ours := ARRAY(SELECT t.id FROM holdfast.queue_lease t
    WHERE t.id = ANY(leases || parts || failed || key_leases || group_leases) AND t.worker = w ORDER BY t.id FOR NO KEY UPDATE);
  IF keys IS NOT NULL THEN
    PERFORM FROM holdfast.queue_key t WHERE t.queue = q AND t.key = ANY(keys) ORDER BY t.key FOR UPDATE;
    DELETE FROM holdfast.queue_key t USING unnest(key_leases, keys, key_jobs) u (lease, key, job)
      WHERE t.queue = q AND t.key = u.key AND t.job = u.job AND u.lease = ANY(ours);
  END IF;
  IF grps IS NOT NULL THEN
    PERFORM FROM holdfast.queue_group t WHERE t.queue = q AND t.grp = ANY(grps) ORDER BY t.grp FOR NO KEY UPDATE;
  END IF;
  IF failed IS NOT NULL THEN
    SELECT t.ordered INTO in_order FROM holdfast.queue t WHERE t.id = q;
    WITH jobs AS (SELECT f.again, f.error, l.jobs::json->f.place AS job FROM unnest(failed, failed_places, again, errors) f (lease, place, again, error)
      JOIN holdfast.queue_lease l ON l.id = f.lease WHERE f.lease = ANY(ours) AND NOT coalesce(f.place = ANY(l.done), false)),
    read AS (SELECT j.again, j.error, (j.job->>0)::bigint AS id, (j.job->>1)::smallint + 1 AS attempt, (j.job->>2)::smallint AS priority,
      to_timestamp((j.job->>3)::float8 / 1000) AS at, j.job->>4 AS key, j.job->>5 AS grp, (j.job->6)::text AS payload FROM jobs j),
    never AS (INSERT INTO holdfast.queue_failed (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
      SELECT q, r.id, r.priority, r.attempt, r.at, moment, r.key, r.grp, r.payload, r.error FROM read r WHERE r.again IS NULL
      ON CONFLICT DO NOTHING),
    -- In order: it stays at the head of its group, which waits for it.
    head AS (INSERT INTO holdfast.queue_grouped (queue, priority, attempt, id, at, grp, key, payload)
      SELECT q, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM read r
      WHERE r.again IS NOT NULL AND in_order AND r.grp IS NOT NULL),
    waits AS (UPDATE holdfast.queue_group g SET next = moment + r.again * interval '1 millisecond'
      FROM read r WHERE g.queue = q AND g.grp = r.grp AND r.again IS NOT NULL AND in_order)
    INSERT INTO holdfast.queue_delayed (queue, priority, attempt, id, at, run_at, key, grp, payload)
      SELECT q, r.priority, r.attempt, r.id, r.at, moment + r.again * interval '1 millisecond', r.key, r.grp, r.payload
      FROM read r WHERE r.again IS NOT NULL AND NOT (in_order AND r.grp IS NOT NULL);
  END IF;
  -- What is marked as done already was written by the same call, whose answer was lost.
  IF grps IS NOT NULL THEN
    UPDATE holdfast.queue_group t SET running = greatest(0, t.running - u.n)
      FROM (SELECT x.grp, count(*)::int AS n FROM unnest(group_leases, group_places, grps) x (lease, place, grp)
        JOIN holdfast.queue_lease l ON l.id = x.lease
        WHERE x.lease = ANY(ours) AND NOT coalesce(x.place = ANY(l.done), false) GROUP BY x.grp) u
      WHERE t.queue = q AND t.grp = u.grp;
  END IF;
  IF parts IS NOT NULL THEN
    UPDATE holdfast.queue_lease l SET done = coalesce(l.done, '{}') || p.places
      FROM (SELECT u.lease, array_agg(DISTINCT u.place) AS places FROM unnest(parts, places) u (lease, place)
        JOIN holdfast.queue_lease x ON x.id = u.lease WHERE NOT coalesce(u.place = ANY(x.done), false) GROUP BY u.lease) p
      WHERE l.id = p.lease AND l.worker = w;
  END IF;
  IF leases IS NOT NULL THEN
    DELETE FROM holdfast.queue_mark t WHERE t.lease = ANY(leases) AND t.lease = ANY(ours);
    DELETE FROM holdfast.queue_lease t WHERE t.id = ANY(leases) AND t.worker = w;
  END IF;
END
$function$`;

/** In the handler's own transaction: whoever takes the lease away waits for it, or has done so, and then it is false. */
const complete = sql`CREATE OR REPLACE FUNCTION holdfast.queue_complete(w bigint, of_lease bigint, at_place integer) RETURNS boolean
LANGUAGE plpgsql AS $function$
BEGIN
  PERFORM FROM holdfast.queue_lease t WHERE t.id = of_lease AND t.worker = w AND NOT coalesce(at_place = ANY(t.done), false) FOR KEY SHARE;
  IF NOT FOUND THEN RETURN false; END IF;
  INSERT INTO holdfast.queue_mark (lease, place) VALUES (of_lease, at_place) ON CONFLICT DO NOTHING;
  RETURN true;
END
$function$`;

/**
 * One less at work in each of these groups, as often as it is named. Makes no rows: whoever inserts one would wait for a
 * claim that has deleted it, while that claim may wait for another row of this call's. queue_unknown finds the rest.
 */
const free = sql`CREATE OR REPLACE FUNCTION holdfast.queue_free(queues integer[], grps text[]) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
  PERFORM FROM holdfast.queue_group t JOIN (SELECT DISTINCT x.q, x.g FROM unnest(queues, grps) x (q, g)) u
    ON t.queue = u.q AND t.grp = u.g ORDER BY t.queue, t.grp FOR NO KEY UPDATE OF t;
  UPDATE holdfast.queue_group t SET running = greatest(0, t.running - u.n)
    FROM (SELECT x.q, x.g, count(*)::int AS n FROM unnest(queues, grps) x (q, g) GROUP BY x.q, x.g) u
    WHERE t.queue = u.q AND t.grp = u.g;
END
$function$`;

/**
 * Workers that are gone: whose session is (its lock is free), or who did not say that they live; and leases of workers
 * that were found to be gone while they claimed. What they had not finished runs again, with one attempt more, or has
 * failed if it has had all of them. Returns the queues that have jobs again.
 */
const recover = sql`CREATE OR REPLACE FUNCTION holdfast.queue_recover(OUT workers integer, OUT jobs integer, OUT queues text[])
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  dead bigint[];
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
  dead := ARRAY(SELECT t.id FROM holdfast.queue_worker t
    WHERE t.beat < moment - t.ttl * interval '1 millisecond' OR t.lock IS NOT NULL AND pg_try_advisory_xact_lock(t.lock)
    ORDER BY t.id FOR UPDATE SKIP LOCKED);
  FOR l IN SELECT t.*, s.attempts, s.name, s.ordered FROM holdfast.queue_lease t JOIN holdfast.queue s ON s.id = t.queue
    WHERE t.worker = ANY(dead) OR NOT EXISTS (SELECT FROM holdfast.queue_worker w WHERE w.id = t.worker)
    ORDER BY t.id FOR UPDATE OF t SKIP LOCKED LOOP
    BEGIN
      WITH read AS (SELECT o - 1 AS place, (j->>0)::bigint AS id, (j->>1)::smallint + 1 AS attempt, (j->>2)::smallint AS priority,
          to_timestamp((j->>3)::float8 / 1000) AS at, j->>4 AS key, j->>5 AS grp, (j->6)::text AS payload
        FROM json_array_elements(l.jobs::json) WITH ORDINALITY x (j, o)
        WHERE NOT coalesce((o - 1)::int = ANY(l.done), false)),
      marked AS (SELECT r.* FROM read r JOIN holdfast.queue_mark m ON m.lease = l.id AND m.place = r.place),
      rest AS (SELECT r.* FROM read r WHERE NOT EXISTS (SELECT FROM marked m WHERE m.place = r.place)),
      failed AS (INSERT INTO holdfast.queue_failed (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
        SELECT l.queue, r.id, r.priority, r.attempt, r.at, moment, r.key, r.grp, r.payload,
          'the worker was lost while it had this job' FROM rest r WHERE r.attempt >= l.attempts ON CONFLICT DO NOTHING),
      alone AS (INSERT INTO holdfast.queue_ready (queue, priority, attempt, id, at, key, payload)
        SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.key, r.payload FROM rest r WHERE r.attempt < l.attempts AND r.grp IS NULL),
      grouped AS (INSERT INTO holdfast.queue_grouped (queue, priority, attempt, id, at, grp, key, payload)
        SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM rest r WHERE r.attempt < l.attempts AND r.grp IS NOT NULL),
      ended AS (SELECT m.key, m.id FROM marked m WHERE m.key IS NOT NULL UNION ALL
        SELECT r.key, r.id FROM rest r WHERE r.attempt >= l.attempts AND r.key IS NOT NULL)
      SELECT (SELECT count(*) FROM rest), ARRAY(SELECT r.grp FROM read r WHERE r.grp IS NOT NULL),
        ARRAY(SELECT e.key FROM ended e ORDER BY e.id), ARRAY(SELECT e.id FROM ended e ORDER BY e.id)
        INTO count, names, keys, ids;
      DELETE FROM holdfast.queue_mark t WHERE t.lease = l.id;
      DELETE FROM holdfast.queue_lease t WHERE t.id = l.id;
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
  DELETE FROM holdfast.queue_worker t WHERE t.id = ANY(dead)
    AND NOT EXISTS (SELECT FROM holdfast.queue_lease x WHERE x.worker = t.id);
  GET DIAGNOSTICS workers = ROW_COUNT;
  -- All of them at the end, in one order: two who each waited for the other's would be a deadlock.
  IF cardinality(ended_keys) > 0 THEN
    PERFORM FROM holdfast.queue_key t JOIN unnest(ended_queues, ended_keys, ended_ids) u (q, k, i)
      ON t.queue = u.q AND t.key = u.k AND t.job = u.i ORDER BY t.queue, t.key FOR UPDATE OF t;
    DELETE FROM holdfast.queue_key t USING unnest(ended_queues, ended_keys, ended_ids) u (q, k, i)
      WHERE t.queue = u.q AND t.key = u.k AND t.job = u.i;
  END IF;
  PERFORM holdfast.queue_free(freed_queues, freed);
END
$function$`;

/** What a worker that ends has not started. */
const giveBack = sql`CREATE OR REPLACE FUNCTION holdfast.queue_give_back(w bigint, leases bigint[], places integer[]) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
  l record;
  names text[];
  freed_queues int[] := '{}';
  freed text[] := '{}';
BEGIN
  FOR l IN SELECT t.*, u.places FROM (SELECT x.lease, array_agg(x.place) AS places FROM unnest(leases, places) x (lease, place) GROUP BY x.lease) u
    JOIN holdfast.queue_lease t ON t.id = u.lease WHERE t.worker = w ORDER BY t.id FOR UPDATE OF t LOOP
    WITH read AS (SELECT (j->>0)::bigint AS id, (j->>1)::smallint AS attempt, (j->>2)::smallint AS priority,
        to_timestamp((j->>3)::float8 / 1000) AS at, j->>4 AS key, j->>5 AS grp, (j->6)::text AS payload
      FROM json_array_elements(l.jobs::json) WITH ORDINALITY x (j, o)
      -- Not again, if the answer was lost.
      WHERE (o - 1)::int = ANY(l.places) AND NOT coalesce((o - 1)::int = ANY(l.done), false)),
    alone AS (INSERT INTO holdfast.queue_ready (queue, priority, attempt, id, at, key, payload)
      SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.key, r.payload FROM read r WHERE r.grp IS NULL),
    grouped AS (INSERT INTO holdfast.queue_grouped (queue, priority, attempt, id, at, grp, key, payload)
      SELECT l.queue, r.priority, r.attempt, r.id, r.at, r.grp, r.key, r.payload FROM read r WHERE r.grp IS NOT NULL)
    SELECT ARRAY(SELECT r.grp FROM read r WHERE r.grp IS NOT NULL) INTO names;
    IF l.counted THEN
      freed := freed || names;
      freed_queues := freed_queues || array_fill(l.queue, ARRAY[cardinality(names)]);
    END IF;
    UPDATE holdfast.queue_lease t SET done = ARRAY(SELECT DISTINCT p.place FROM unnest(t.done || l.places) p (place)) WHERE t.id = l.id;
    DELETE FROM holdfast.queue_lease t WHERE t.id = l.id AND cardinality(t.done) >= t.size;
  END LOOP;
  PERFORM holdfast.queue_free(freed_queues, freed);
END
$function$`;

/**
 * Jobs for the transaction that this runs in, which has their rows locked: if it is rolled back, or leaves some of them
 * alone, they are still there. With a job: only that one.
 */
const take = sql`CREATE OR REPLACE FUNCTION holdfast.queue_take(q integer, n integer, job bigint) RETURNS text
LANGUAGE plpgsql ${plans} AS $function$
DECLARE
  taken text[];
BEGIN
  IF (SELECT t.paused FROM holdfast.queue t WHERE t.id = q) THEN RETURN NULL; END IF;
  taken := ARRAY(SELECT '[' || r.id || ',' || r.attempt || ',' || r.priority || ',' || (extract(epoch FROM r.at) * 1000)::bigint || ','
      || coalesce(to_json(r.key)::text, 'null') || ',null,' || r.payload || ']' FROM (
    SELECT x.* FROM holdfast.queue_ready x WHERE x.queue = q AND (job IS NULL OR x.id = job)
      ORDER BY x.priority, x.id LIMIT n FOR UPDATE SKIP LOCKED) r);
  IF cardinality(taken) < n THEN
    taken := taken || ARRAY(SELECT '[' || r.id || ',' || r.attempt || ',' || r.priority || ',' || (extract(epoch FROM r.at) * 1000)::bigint || ','
        || coalesce(to_json(r.key)::text, 'null') || ',' || to_json(r.grp)::text || ',' || r.payload || ']' FROM (
      SELECT x.* FROM holdfast.queue_grouped x WHERE x.queue = q AND (job IS NULL OR x.id = job)
        ORDER BY x.grp, x.priority, x.id LIMIT n - cardinality(taken) FOR UPDATE SKIP LOCKED) r);
  END IF;
  -- It may have been paused before they were locked.
  IF (SELECT t.paused FROM holdfast.queue t WHERE t.id = q) THEN RETURN NULL; END IF;
  RETURN '[' || array_to_string(taken, ',') || ']';
END
$function$`;

/**
 * The end of jobs that were taken. again: milliseconds until what failed runs again; NULL: it is
 * done or, if there is an error, has failed for good.
 */
const settle = sql`CREATE OR REPLACE FUNCTION holdfast.queue_settle(q integer, ids bigint[], priorities smallint[], grps text[],
  keys text[], again float8, why text) RETURNS void
LANGUAGE plpgsql ${plans} AS $function$
DECLARE
  moment timestamptz := clock_timestamp();
BEGIN
  IF again IS NULL AND keys IS NOT NULL THEN
    PERFORM FROM holdfast.queue_key t WHERE t.queue = q AND t.key = ANY(keys) ORDER BY t.key FOR UPDATE;
    DELETE FROM holdfast.queue_key t USING unnest(keys, ids) u (key, id) WHERE t.queue = q AND t.key = u.key AND t.job = u.id;
  END IF;
  WITH alone AS (DELETE FROM holdfast.queue_ready t USING unnest(ids, priorities, grps) u (id, priority, grp)
      WHERE t.queue = q AND t.priority = u.priority AND t.id = u.id AND u.grp IS NULL
      RETURNING t.id, t.priority, t.attempt + 1 AS attempt, t.at, t.key, NULL::text AS grp, t.payload),
  grouped AS (DELETE FROM holdfast.queue_grouped t USING unnest(ids, priorities, grps) u (id, priority, grp)
      WHERE t.queue = q AND t.grp = u.grp AND t.priority = u.priority AND t.id = u.id
      RETURNING t.id, t.priority, t.attempt + 1 AS attempt, t.at, t.key, t.grp, t.payload),
  gone AS (SELECT * FROM alone UNION ALL SELECT * FROM grouped),
  later AS (INSERT INTO holdfast.queue_delayed (queue, priority, attempt, id, at, run_at, key, grp, payload)
    SELECT q, g.priority, g.attempt, g.id, g.at, moment + again * interval '1 millisecond', g.key, g.grp, g.payload
    FROM gone g WHERE again IS NOT NULL)
  INSERT INTO holdfast.queue_failed (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
    SELECT q, g.id, g.priority, g.attempt, g.at, moment, g.key, g.grp, g.payload, why
    FROM gone g WHERE again IS NULL AND why IS NOT NULL ON CONFLICT DO NOTHING;
END
$function$`;

/** Failed jobs begin anew. A key that another job has meanwhile stays with that. */
const revive = sql`CREATE OR REPLACE FUNCTION holdfast.queue_revive(q integer, ids bigint[]) RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
  n bigint;
  grps text[];
  keys text[];
  jobs bigint[];
BEGIN
  WITH gone AS (DELETE FROM holdfast.queue_failed t WHERE t.queue = q AND (ids IS NULL OR t.id = ANY(ids)) RETURNING t.*),
  alone AS (INSERT INTO holdfast.queue_ready (queue, priority, attempt, id, at, key, payload)
    SELECT q, g.priority, 0, g.id, g.at, g.key, g.payload FROM gone g WHERE g.grp IS NULL),
  grouped AS (INSERT INTO holdfast.queue_grouped (queue, priority, attempt, id, at, grp, key, payload)
    SELECT q, g.priority, 0, g.id, g.at, g.grp, g.key, g.payload FROM gone g WHERE g.grp IS NOT NULL)
  SELECT count(*), array_agg(DISTINCT g.grp), array_agg(g.key ORDER BY g.id) FILTER (WHERE g.key IS NOT NULL),
    array_agg(g.id ORDER BY g.id) FILTER (WHERE g.key IS NOT NULL) INTO n, grps, keys, jobs FROM gone g;
  INSERT INTO holdfast.queue_key (queue, key, job) SELECT q, u.k, u.i FROM unnest(keys, jobs) u (k, i)
    ORDER BY u.k COLLATE "C", u.i ON CONFLICT DO NOTHING;
  PERFORM holdfast.queue_know(q, grps);
  RETURN n;
END
$function$`;

/** Failed jobs, and with ids those that wait. */
const discard = sql`CREATE OR REPLACE FUNCTION holdfast.queue_discard(q integer, ids bigint[], before float8) RETURNS bigint
LANGUAGE sql AS $function$
  WITH failed AS (DELETE FROM holdfast.queue_failed t WHERE t.queue = q AND (ids IS NULL OR t.id = ANY(ids))
    AND (before IS NULL OR t.failed_at < to_timestamp(before / 1000)) RETURNING t.id, t.key),
  delayed AS (DELETE FROM holdfast.queue_delayed t WHERE t.queue = q AND t.id = ANY(ids) RETURNING t.id, t.key),
  ready AS (DELETE FROM holdfast.queue_ready t WHERE t.queue = q AND t.id = ANY(ids) RETURNING t.id, t.key),
  grouped AS (DELETE FROM holdfast.queue_grouped t WHERE t.queue = q AND t.id = ANY(ids) RETURNING t.id, t.key),
  gone AS (SELECT * FROM failed UNION ALL SELECT * FROM delayed UNION ALL SELECT * FROM ready UNION ALL SELECT * FROM grouped),
  held AS (SELECT k.ctid FROM holdfast.queue_key k JOIN gone g ON k.key = g.key AND k.job = g.id WHERE k.queue = q
    ORDER BY k.key FOR UPDATE OF k),
  keys AS (DELETE FROM holdfast.queue_key k WHERE k.ctid = ANY(ARRAY(SELECT h.ctid FROM held h)))
  SELECT count(*) FROM gone
$function$`;

export const queueRoutines: readonly Statement[] = [
  open,
  know,
  add,
  due,
  dueNow,
  unknown,
  pick,
  claim,
  pause,
  finish,
  complete,
  free,
  recover,
  giveBack,
  take,
  settle,
  revive,
  discard,
];
