/** What comes into a queue. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept, mostTurns, vanished } from "../../hidden.ts";
import { plans, queueChannel } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/** The number of a queue. settings: what a worker wants of it; NULL: only the number. */
export const open = sql`CREATE OR REPLACE FUNCTION ${own("queue_open")}(q text, settings jsonb) RETURNS integer
${plpgsql} AS $function$
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
    ${kept("queue")};
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
export const add = sql`CREATE OR REPLACE FUNCTION ${own("queue_add")}(q integer, payloads text[], priorities smallint[], runs float8[],
  grps text[], keys text[], swaps boolean[], alone boolean, tell text, OUT ids bigint[], OUT added boolean[])
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  moment timestamptz := clock_timestamp();
  n int := cardinality(payloads);
  i int;
  taken bigint;
  written int;
  more int;
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
        ${kept("queue_key")};
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
    GET DIAGNOSTICS written = ROW_COUNT;
  ELSE
    INSERT INTO ${own("queue_delayed")} (queue, priority, attempt, id, at, run_at, key, grp, payload)
      SELECT q, coalesce(u.p, 0), 0, u.i, moment, to_timestamp(u.r / 1000), u.k, u.g, u.b
      FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
      WHERE u.a IS NOT false AND to_timestamp(u.r / 1000) > moment;
    GET DIAGNOSTICS written = ROW_COUNT;
    INSERT INTO ${own("queue_ready")} (queue, priority, attempt, id, at, key, payload)
      SELECT q, coalesce(u.p, 0), 0, u.i, moment, u.k, u.b
      FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
      WHERE u.a IS NOT false AND u.g IS NULL AND NOT coalesce(to_timestamp(u.r / 1000) > moment, false);
    GET DIAGNOSTICS more = ROW_COUNT;
    written := written + more;
    IF grps IS NOT NULL THEN
      INSERT INTO ${own("queue_grouped")} (queue, priority, attempt, id, at, grp, key, payload)
        SELECT q, coalesce(u.p, 0), 0, u.i, moment, u.g, u.k, u.b
        FROM unnest(ids, priorities, payloads, runs, grps, keys, added) u (i, p, b, r, g, k, a)
        WHERE u.a IS NOT false AND u.g IS NOT NULL AND NOT coalesce(to_timestamp(u.r / 1000) > moment, false);
      GET DIAGNOSTICS more = ROW_COUNT;
      written := written + more;
      -- In a transaction of the caller's, others who add to the same new group would wait for its end: the next claim does it.
      IF alone THEN PERFORM ${own("queue_know")}(q, grps); END IF;
    END IF;
  END IF;
  IF written <> n - coalesce(cardinality(array_positions(added, false)), 0) THEN
    ${vanished("queue_ready", "queue_delayed", "queue_grouped")};
  END IF;
  IF tell IS NOT NULL THEN PERFORM pg_notify(${own.label(queueChannel)}, tell); END IF;
END
$function$`;

/**
 * Rows for groups that have none. A conflict with a row that is being changed would wait for its end, which is needless:
 * only those that are new to us are inserted.
 */
export const know = sql`CREATE OR REPLACE FUNCTION ${own("queue_know")}(q integer, grps text[]) RETURNS void
${plpgsql} ${plans} AS $function$
DECLARE
  fresh text[];
BEGIN
  FOR turn IN 1..${mostTurns} LOOP
    fresh := ARRAY(SELECT u.g FROM (SELECT DISTINCT x.g COLLATE "C" AS g FROM unnest(grps) x (g) WHERE x.g IS NOT NULL) u
      WHERE NOT EXISTS (SELECT FROM ${own("queue_group")} t WHERE t.queue = q AND t.grp = u.g OFFSET 0) ORDER BY u.g);
    IF cardinality(fresh) = 0 THEN RETURN; END IF;
    INSERT INTO ${own("queue_group")} (queue, grp) SELECT q, u.g FROM unnest(fresh) u (g) ON CONFLICT DO NOTHING;
    IF FOUND THEN RETURN; END IF;
    -- Others have made them at the same time, and perhaps forgotten them again.
  END LOOP;
  ${vanished("queue_group")};
END
$function$`;

/**
 * Groups that were not known, and groups to which jobs have come back that are older than others: whoever chooses from those
 * looks at all that they have. First all the rows that are new, then those that are there, so that no two wait for each other.
 */
export const again = sql`CREATE OR REPLACE FUNCTION ${own("queue_know_again")}(q integer, fresh text[], back text[]) RETURNS void
${plpgsql} ${plans} AS $function$
BEGIN
  IF cardinality(fresh) > 0 OR cardinality(back) > 0 THEN PERFORM ${own("queue_know")}(q, fresh || back); END IF;
  IF cardinality(back) > 0 THEN
    UPDATE ${own("queue_group")} t SET floor = NULL, floor_priority = NULL WHERE t.queue = q AND t.grp = ANY(ARRAY(
      SELECT t.grp FROM (SELECT DISTINCT x.g COLLATE "C" AS g FROM unnest(back) x (g) ORDER BY 1) u,
        LATERAL (SELECT x.grp FROM ${own("queue_group")} x WHERE x.queue = q AND x.grp = u.g AND x.floor IS NOT NULL FOR NO KEY UPDATE) t));
  END IF;
END
$function$`;
