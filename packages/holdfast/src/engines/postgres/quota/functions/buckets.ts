/** What the other functions ask about a bucket, and the ledger as people read it. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept } from "../../hidden.ts";
import { plainSql, plpgsql } from "../../search-path.ts";

/**
 * The ledger as people read it: used = used of the version before - forgotten + delta; held and credit after it. A line
 * of kind 'rollup' stands for those from version first to its own.
 */
export const entries = sql`CREATE OR REPLACE VIEW ${own("quota_entry")} AS
  SELECT b.quota, b.subject, l.version, l.kind, l.id, l.entry, l.amount, coalesce(l.delta, l.amount) AS delta,
    coalesce(l.forgotten, 0) AS forgotten, coalesce(l.refunded, 0) AS refunded, l.used, coalesce(l.held, 0) AS held,
    coalesce(l.credit, 0) AS credit, l.max, l.since, l.at, coalesce(l.first, l.version) AS first, l.drains, l.details
  FROM ${own("quota_line")} l JOIN ${own("quota_bucket")} b ON b.id = l.bucket
  WHERE b.moved_from IS NULL`;

/** What is left of a bucket's use now; parts of a sliding window that have passed are gone. */
export const roll = sql`CREATE OR REPLACE FUNCTION ${own("quota_roll")}(INOUT b ${own("quota_bucket")}, rule jsonb, max bigint, moment timestamptz)
${plpgsql} AS $function$
DECLARE
  per bigint := rule->>'per';
  start timestamptz;
  elapsed bigint;
  units bigint;
  length bigint;
  shift bigint;
  n int;
  e record;
BEGIN
  CASE rule->>'window'
  WHEN 'fixed' THEN
    SELECT to_timestamp(s::float8 / 1000) INTO start FROM jsonb_array_elements_text(rule->'starts') s
      WHERE to_timestamp(s::float8 / 1000) <= moment ORDER BY s::float8 DESC LIMIT 1;
    -- Never back: a caller that was late knows an earlier window only.
    IF b.since IS NULL OR start > b.since THEN
      b.used := 0;
      b.since := start;
    END IF;
  WHEN 'refill' THEN
    elapsed := greatest(0, extract(epoch FROM moment - b.since) * 1000000);
    -- Without a limit, all of it is back at once.
    IF b.since IS NULL OR elapsed >= per OR max <= 0 OR max IS NULL THEN
      b.used := CASE WHEN max <= 0 THEN b.used ELSE 0 END;
      b.since := moment;
    ELSE
      -- div is exact: what is divided first is rounded, and may come to one more.
      units := div(elapsed::numeric * max, per);
      IF units >= b.used THEN
        b.used := 0;
        b.since := moment;
      ELSE
        b.used := b.used - units;
        -- What is left over of the time counts for the next unit.
        b.since := b.since + div(units::numeric * per + max - 1, max) * interval '1 microsecond';
      END IF;
    END IF;
  WHEN 'parts' THEN
    n := rule->>'parts';
    length := per / n;
    start := to_timestamp(0) + floor(extract(epoch FROM moment) * 1000000 / length) * length * interval '1 microsecond';
    b.parts := coalesce(b.parts, array_fill(0::bigint, ARRAY[n + 1]));
    IF b.since IS NULL THEN
      b.since := start;
    ELSIF start > b.since THEN
      shift := least(n + 1, round(extract(epoch FROM start - b.since) * 1000000 / length));
      b.parts := array_fill(0::bigint, ARRAY[shift::int]) || b.parts[1:n + 1 - shift::int];
      b.since := start;
    END IF;
    SELECT coalesce(sum(p), 0) INTO b.used FROM unnest(b.parts) p;
  WHEN 'log' THEN
    b.used := 0;
    -- Backwards until one is too old: what was before it costs nothing.
    -- Of what was given back, credits came first.
    FOR e IN SELECT l.at, coalesce(l.delta, l.amount) AS delta,
      greatest(0, coalesce(l.refunded, 0) - (l.amount - coalesce(l.delta, l.amount))) AS refunded, l.kind
      FROM ${own("quota_line")} l WHERE l.bucket = b.id ORDER BY l.version DESC LOOP
      EXIT WHEN e.at <= moment - per * interval '1 microsecond' OR e.kind = 'reset';
      IF e.kind IN ('consume', 'settle') THEN
        b.used := b.used + e.delta - e.refunded;
      END IF;
    END LOOP;
    b.since := greatest(b.since, moment);
  ELSE
    NULL;
  END CASE;
END
$function$`;

/** Holds and grants of a bucket that are over, those that ended first first, then by id. Its row is locked. */
export const reap = sql`CREATE OR REPLACE FUNCTION ${own("quota_reap")}(INOUT b ${own("quota_bucket")}, moment timestamptz, forgotten bigint)
${plpgsql} AS $function$
DECLARE
  h record;
  g record;
  gone bigint;
BEGIN
  IF b.held > 0 THEN
    FOR h IN WITH gone AS (DELETE FROM ${own("quota_hold")} q WHERE q.quota = b.quota AND q.subject = b.subject AND q.until <= moment
      RETURNING q.*) SELECT * FROM gone ORDER BY gone.until, gone.id LOOP
      b.held := b.held - h.amount;
      b.version := b.version + 1;
      INSERT INTO ${own("quota_line")} (bucket, version, amount, delta, forgotten, used, held, credit, since, at, kind, id, entry)
        VALUES (b.id, b.version, h.amount, nullif(0, h.amount), nullif(forgotten, 0), b.used, nullif(b.held, 0), nullif(b.credit, 0), b.since, moment, 'expire',
          'expire:' || b.version || ':' || h.id, h.id);
      ${kept("quota_line")};
      forgotten := 0;
    END LOOP;
  END IF;
  IF b.credit > 0 THEN
    FOR g IN WITH gone AS (DELETE FROM ${own("quota_grant")} q WHERE q.quota = b.quota AND q.subject = b.subject AND q.until <= moment
      RETURNING q.*) SELECT * FROM gone ORDER BY gone.until, gone.id LOOP
      b.credit := b.credit - (g.amount - g.spent);
      b.version := b.version + 1;
      INSERT INTO ${own("quota_line")} (bucket, version, amount, delta, forgotten, used, held, credit, since, at, kind, id, entry)
        VALUES (b.id, b.version, g.amount - g.spent, nullif(0, g.amount - g.spent), nullif(forgotten, 0), b.used, nullif(b.held, 0), nullif(b.credit, 0), b.since, moment, 'lapse',
          'lapse:' || b.version || ':' || g.id, g.id);
      ${kept("quota_line")};
      forgotten := 0;
    END LOOP;
  END IF;
END
$function$`;

/** Takes from the grants of a bucket: by priority, then what runs out first, then by id. Its row is locked. */
export const drain = sql`CREATE OR REPLACE FUNCTION ${own("quota_drain")}(q text, s text, amount bigint, moment timestamptz, OUT drains jsonb)
${plpgsql} AS $function$
DECLARE
  g record;
  part bigint;
BEGIN
  drains := '[]';
  FOR g IN SELECT * FROM ${own("quota_grant")} t WHERE t.quota = q AND t.subject = s AND t.until > moment AND t.spent < t.amount
    ORDER BY t.priority, t.until, t.id LOOP
    EXIT WHEN amount = 0;
    part := least(amount, g.amount - g.spent);
    UPDATE ${own("quota_grant")} t SET spent = t.spent + part WHERE t.quota = q AND t.subject = s AND t.id = g.id;
    drains := drains || jsonb_build_object('id', g.id, 'amount', part);
    amount := amount - part;
  END LOOP;
END
$function$`;

/** Whether the windows that the caller knows are not those of now. */
export const late = sql`CREATE OR REPLACE FUNCTION ${own("quota_late")}(rule jsonb, moment timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN coalesce(rule->>'window' = 'fixed' AND (moment < to_timestamp((rule->'starts'->>0)::float8 / 1000)
    OR moment >= to_timestamp((rule->'starts'->>-1)::float8 / 1000)), false)`;

/** So many parts must pass until there is room for what is needed. */
export const room = sql`CREATE OR REPLACE FUNCTION ${own("quota_room")}(parts bigint[], newest bigint, need bigint) RETURNS bigint
${plpgsql} IMMUTABLE AS $function$
DECLARE
  n int := cardinality(parts);
BEGIN
  parts[1] := parts[1] + newest;
  FOR i IN 1..n LOOP
    need := need - parts[n + 1 - i];
    IF need <= 0 THEN RETURN i; END IF;
  END LOOP;
  RETURN NULL;
END
$function$`;

/**
 * So many microseconds until enough has left an exact sliding window. It counts the same lines as quota_roll. `reset` is not used
 * any more: a function keeps its parameters, and so it replaces that of version 0.1.
 */
export const leaves = sql`CREATE OR REPLACE FUNCTION ${own("quota_leaves")}(b bigint, reset bigint, need bigint, per bigint, moment timestamptz) RETURNS bigint
${plainSql} STABLE AS $function$
  SELECT ceil(extract(epoch FROM e.at - moment) * 1000000)::bigint + per FROM (
    SELECT t.at, sum(coalesce(t.delta, t.amount)
      - greatest(0, coalesce(t.refunded, 0) - (t.amount - coalesce(t.delta, t.amount)))) OVER (ORDER BY t.version) AS gone
    FROM ${own("quota_line")} t
    WHERE t.bucket = b AND t.kind IN ('consume', 'settle') AND t.version > coalesce((
      SELECT l.version FROM ${own("quota_line")} l
      WHERE l.bucket = b AND (l.at <= moment - per * interval '1 microsecond' OR l.kind = 'reset')
      ORDER BY l.version DESC LIMIT 1), 0)
  ) e WHERE e.gone >= need ORDER BY e.at LIMIT 1
$function$`;
