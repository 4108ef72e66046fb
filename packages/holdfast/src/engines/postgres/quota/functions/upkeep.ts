/** The functions that look after the ledger: whether it adds up to what is counted, and what is old made short. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept, vanished } from "../../hidden.ts";
import { limitOf, mostUsed } from "../limits.ts";
import { isElsewhere } from "./parts.ts";
import { plainSql, plpgsql } from "../../search-path.ts";

/** Of a line: its change of used, what was forgotten before it, and what is left of it in its window. */
const delta = sql.raw("coalesce(l.delta, l.amount)");
const forgotten = sql.raw("coalesce(l.forgotten, 0)");
const left = sql`${delta} - greatest(0, coalesce(l.refunded, 0) - (l.amount - ${delta}))`;

const shown = (moment: string) =>
  sql.raw(`coalesce(to_char(${moment} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'), 'nothing')`);

/**
 * What does not add up, in words, the newest first; and what the bucket should be. Back to the first line, or to the last
 * repair: what was wrong before it has been seen to. It is STABLE, so all of it is of one snapshot. Of the bucket:
 * - used: what the lines add up to, each by its own amount. Where lines are missing, what the next one says.
 * - parts: what is left of the window's uses. Those that are rolled up, and of lines that are missing, are as they are.
 * - held and credit: what its holds and grants come to, for the ledger does not know when they end.
 * - version and since: those of the newest line; last: what was used after it, as it says.
 */
export const check = sql`CREATE OR REPLACE FUNCTION ${own("quota_check")}(rule jsonb, q text, s text,
  OUT findings text[], OUT entries bigint, OUT version bigint, OUT used bigint, OUT held bigint, OUT credit bigint,
  OUT since timestamptz, OUT parts bigint[], OUT last bigint)
${plpgsql} STABLE AS $function$
#variable_conflict use_variable
DECLARE
  b ${own("quota_bucket")};
  line record;
  before record;
  broken boolean := false;
  missing boolean;
  finding text;
  mended bigint;
  anew bigint;
  rolled timestamptz;
  sum_parts bigint;
  n int;
  length bigint;
BEGIN
  findings := '{}';
  entries := 0;
  used := 0;
  SELECT 0::bigint AS version, 0::bigint AS used, 0::bigint AS held, 0::bigint AS credit, NULL::timestamptz AS since INTO before;
  SELECT t.* INTO b FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  -- On another of several databases.
  IF ${isElsewhere("b")} THEN
    entries := -1;
    RETURN;
  END IF;
  mended := (SELECT max(l.version) FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.kind = 'repair');
  -- One by one: lag() and its like take as long, and do not know what the amounts come to once a figure is wrong.
  FOR line IN SELECT l.version, l.kind, l.amount, l.used, ${delta} AS delta, ${forgotten} AS forgotten, coalesce(l.first, l.version) AS first,
      l.since, coalesce(l.held, 0) AS held, coalesce(l.credit, 0) AS credit,
      -- NULL: the line alone does not tell.
      CASE WHEN l.kind = 'hold' THEN l.amount WHEN l.kind IN ('release', 'expire') THEN -l.amount
        WHEN l.kind NOT IN ('settle', 'rollup', 'repair') THEN 0 END AS holds,
      CASE WHEN l.kind = 'grant' THEN l.amount WHEN l.kind IN ('lapse', 'revoke') THEN -l.amount
        WHEN l.kind IN ('consume', 'settle') THEN ${delta} - l.amount
        WHEN l.kind NOT IN ('refund', 'rollup', 'repair') THEN 0 END AS grants
    FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.version >= coalesce(mended, 0) ORDER BY l.version LOOP
    entries := entries + 1;
    -- As nearly all of them are.
    IF broken OR NOT (line.first = before.version + 1 AND line.used = before.used - line.forgotten + line.delta
      AND line.held = coalesce(before.held + line.holds, line.held) AND line.credit = coalesce(before.credit + line.grants, line.credit))
      AND line.version IS DISTINCT FROM mended THEN
      broken := true;
      missing := line.first <> before.version + 1;
      finding := CASE
        WHEN missing THEN format('versions %s to %s are missing', before.version + 1, line.first - 1)
        WHEN line.used <> before.used - line.forgotten + line.delta THEN
          format('%s used before, %s forgotten, %s more, and %s after', before.used, line.forgotten, line.delta, line.used)
        WHEN line.held <> before.held + line.holds THEN
          format('%s held before, and %s after %s of %s', before.held, line.held, line.kind, line.amount)
        WHEN line.credit <> before.credit + line.grants THEN
          format('%s of credit before, and %s after %s of %s', before.credit, line.credit, line.kind, line.amount) END;
      IF finding IS NOT NULL THEN
        findings := CASE WHEN missing THEN finding WHEN line.first = line.version THEN format('version %s: %s', line.version, finding)
          ELSE format('versions %s to %s: %s', line.first, line.version, finding) END || findings;
      END IF;
      -- The figures may be wrong from here on, and the amounts are what counts. Of a window that has begun, nothing was left.
      used := CASE WHEN missing OR line.kind = 'rollup' THEN line.used
        WHEN line.kind = 'reset' THEN 0
        WHEN line.forgotten > 0 AND line.used = line.delta THEN line.delta
        ELSE greatest(0, used - line.forgotten + line.delta) END;
    ELSE
      used := line.used;
    END IF;
    before := line;
  END LOOP;
  version := before.version;
  last := before.used;
  since := before.since;

  parts := b.parts;
  sum_parts := (SELECT sum(p) FROM unnest(b.parts) p);
  n := rule->>'parts';
  IF rule->>'window' = 'log' THEN
    -- It reads its lines each time, so what they say was right whatever the bucket said.
    used := last;
  ELSIF rule->>'window' = 'parts' AND cardinality(b.parts) = n + 1 AND since IS NOT NULL THEN
    length := (rule->>'per')::bigint / n;
    anew := (SELECT max(l.version) FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.kind = 'reset');
    rolled := (SELECT max(l.since) FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.kind = 'rollup');
    SELECT array_agg(CASE WHEN i.place >= round(extract(epoch FROM since - rolled) * 1000000 / length) THEN b.parts[i.place + 1]
      ELSE coalesce(u.amount, 0) END ORDER BY i.place) INTO parts
    FROM generate_series(0, n) i (place) LEFT JOIN (
      SELECT round(extract(epoch FROM since - l.since) * 1000000 / length) AS place, sum(${left}) AS amount
      FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.version > coalesce(anew, 0) AND l.kind IN ('consume', 'settle')
      GROUP BY 1) u ON u.place = i.place;
    used := (SELECT sum(p) FROM unnest(parts) p);
    IF used < last AND (SELECT sum(l.version - coalesce(l.first, l.version) + 1) FROM ${own("quota_line")} l WHERE l.bucket = b.id) < version THEN
      IF b.since = since AND sum_parts = last THEN
        parts := b.parts;
      ELSE
        parts[1] := parts[1] + last - used;
      END IF;
      used := last;
    END IF;
    IF parts <> b.parts THEN
      findings := findings || format('the parts of the window are %s, by the ledger %s', b.parts, parts);
    END IF;
  ELSIF sum_parts <> used THEN
    -- Of a window that is not known here: rather given back too late than too early.
    parts := array_fill(0::bigint, ARRAY[cardinality(b.parts)]);
    parts[1] := used;
  END IF;
  IF b.version <> version THEN
    findings := findings || format('the bucket is at version %s, the ledger at %s', b.version, version);
  END IF;
  IF b.used <> used THEN
    findings := findings || format('the bucket counts %s used, the ledger %s', b.used, used);
  END IF;
  IF version > 0 AND b.since IS DISTINCT FROM since THEN
    findings := findings || format('the bucket counts since %s, the ledger since %s', ${shown("b.since")}, ${shown("since")});
  END IF;
  held := coalesce((SELECT sum(t.amount) FROM ${own("quota_hold")} t WHERE t.quota = q AND t.subject = s), 0);
  IF b.held <> held OR before.held <> held THEN
    findings := findings || format('the bucket has %s held, the ledger %s, and its holds come to %s', b.held, before.held, held);
  END IF;
  credit := coalesce((SELECT sum(t.amount - t.spent) FROM ${own("quota_grant")} t WHERE t.quota = q AND t.subject = s), 0);
  IF b.credit <> credit OR before.credit <> credit THEN
    findings := findings || format('the bucket has %s of credit, the ledger %s, and its grants come to %s', b.credit, before.credit, credit);
  END IF;
END
$function$`;

/**
 * What does not add up. With an id for it (op), what is found is mended at once, while the bucket is locked: nobody can
 * have used anything in between. The same id again has the same answer. late: as of other calls. trust: 'ledger', or
 * 'levels': what the bucket counts as used stays, and the ledger says so. Holds and grants count either way.
 */
export const mend = sql`CREATE OR REPLACE FUNCTION ${own("quota_mend")}(rule jsonb, q text, s text, code_max bigint, op text, trust text,
  OUT at float8, OUT late boolean, OUT findings text[], OUT entries bigint, OUT repaired boolean)
${plpgsql} AS $function$
#variable_conflict use_variable
DECLARE
  b ${own("quota_bucket")};
  c record;
  moment timestamptz;
  note jsonb;
BEGIN
  late := false;
  repaired := false;
  findings := '{}';
  entries := 0;
  IF op IS NOT NULL THEN
    SELECT t.* INTO b FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
  END IF;
  moment := clock_timestamp();
  at := extract(epoch FROM moment) * 1000;
  IF op IS NOT NULL THEN
    IF ${own("quota_late")}(rule, moment) THEN
      late := true;
      RETURN;
    END IF;
    SELECT l.details->'metadata' INTO note FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.id = op;
    IF FOUND THEN
      findings := ARRAY(SELECT x FROM jsonb_array_elements_text(note->'findings') WITH ORDINALITY y (x, o) ORDER BY o);
      entries := (note->>'entries')::bigint;
      repaired := true;
      RETURN;
    END IF;
  END IF;
  SELECT k.* INTO c FROM ${own("quota_check")}(rule, q, s) k;
  findings := c.findings;
  -- -1: it counts on another of several databases.
  entries := c.entries;
  IF op IS NULL OR cardinality(findings) = 0 THEN
    RETURN;
  END IF;
  IF trust = 'levels' THEN
    -- Whoever does not know the window asks for it too.
    IF b.parts IS NOT NULL THEN
      RAISE EXCEPTION 'quota % of % has a window that slides, which is what its entries say: trust the ledger', q, s
        USING ERRCODE = 'feature_not_supported';
    END IF;
  ELSE
    b.used := greatest(0, c.used);
    b.since := c.since;
    b.parts := c.parts;
  END IF;
  b.held := c.held;
  b.credit := c.credit;
  -- Of its window: what was used in one that is over is not charged to this one.
  b := ${own("quota_roll")}(b, rule, ${limitOf("b", "rule", "code_max")}, moment);
  b.version := greatest(b.version, c.version) + 1;
  INSERT INTO ${own("quota_line")} (bucket, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, details)
    VALUES (b.id, b.version, b.used, NULL, nullif(c.last, 0), b.used, nullif(b.held, 0), nullif(b.credit, 0), ${limitOf("b", "rule", "code_max")}, b.since, moment,
      'repair', op, jsonb_build_object('metadata', jsonb_build_object('findings', to_jsonb(findings), 'entries', entries)));
  ${kept("quota_line")};
  UPDATE ${own("quota_bucket")} t SET used = b.used, held = b.held, credit = b.credit, version = b.version, since = b.since,
    parts = b.parts WHERE t.quota = q AND t.subject = s;
  repaired := true;
END
$function$`;

/** As releases before quota_mend call it. */
export const reconcile = sql`CREATE OR REPLACE FUNCTION ${own("quota_reconcile")}(rule jsonb, q text, s text, code_max bigint, op text,
  OUT at float8, OUT late boolean, OUT findings text[], OUT entries bigint, OUT repaired boolean)
${plainSql} AS $function$
  SELECT * FROM ${own("quota_mend")}(rule, q, s, code_max, op, 'ledger')
$function$`;

/**
 * Lines before a moment, of the buckets from this subject on, become one line each: its version, and what was used after
 * it, are those of the last; delta and forgotten are sums, so that the chain goes on. The newest line of a bucket stays,
 * and so does what comes after a line that is not that old, should the clock have been set back.
 * A ledger that does not add up is left as it is, and a sum that is larger than what can be counted exactly is not made. next: where to go on, NULL at the end. Only the first one is waited for,
 * with nothing in hand: who uses several in one transaction could wait for the others.
 */
export const rollUp = sql`CREATE OR REPLACE FUNCTION ${own("quota_roll_up")}(q text, onward text, before timestamptz, most int,
  OUT gone bigint, OUT next text, OUT broken text[])
${plpgsql} AS $function$
#variable_conflict use_variable
DECLARE
  b record;
  lowest bigint;
  top bigint;
  newest bigint;
  mended bigint;
  buckets int := 0;
  locked boolean := false;
BEGIN
  gone := 0;
  broken := '{}';
  FOR b IN SELECT t.id, t.subject, coalesce(t.rolled, 0) AS rolled FROM ${own("quota_bucket")} t
    WHERE t.quota = q AND t.subject >= coalesce(onward, '') COLLATE "C" AND NOT ${isElsewhere("t")} ORDER BY t.subject LOOP
    IF gone >= most OR buckets = 1000 THEN
      next := b.subject;
      RETURN;
    END IF;
    buckets := buckets + 1;
    CONTINUE WHEN NOT EXISTS (SELECT FROM (SELECT l.at, l.kind FROM ${own("quota_line")} l
      WHERE l.bucket = b.id AND l.version >= b.rolled ORDER BY l.version LIMIT 2) o WHERE o.kind <> 'rollup' AND o.at < before);
    IF locked THEN
      SELECT t.version, coalesce(t.rolled, 0) INTO newest, lowest FROM ${own("quota_bucket")} t
        WHERE t.id = b.id AND t.quota = q AND t.subject = b.subject FOR NO KEY UPDATE SKIP LOCKED;
      IF NOT FOUND THEN
        next := b.subject;
        RETURN;
      END IF;
    ELSE
      SELECT t.version, coalesce(t.rolled, 0) INTO newest, lowest FROM ${own("quota_bucket")} t
        WHERE t.id = b.id AND t.quota = q AND t.subject = b.subject FOR NO KEY UPDATE;
      locked := true;
    END IF;
    SELECT max(o.version) FILTER (WHERE o.version < coalesce(o.stop, o.version + 1)) INTO top FROM (
      SELECT s.version, min(s.version) FILTER (WHERE s.at >= before OR s.version >= newest
        OR greatest(s.amounts, s.deltas) > ${mostUsed}) OVER () AS stop FROM (
        SELECT f.version, f.at, sum(f.amount) OVER (ORDER BY f.version) AS amounts, sum(abs(f.delta)) OVER (ORDER BY f.version) AS deltas
        FROM (SELECT l.version, l.at, CASE WHEN l.kind IN ('consume', 'settle', 'rollup') THEN l.amount ELSE 0 END AS amount, ${delta} AS delta
          FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.version >= lowest ORDER BY l.version LIMIT most + 1) f) s) o;
    -- Nothing but the roll-up: there is no progress in it.
    CONTINUE WHEN NOT EXISTS (SELECT FROM ${own("quota_line")} l
      WHERE l.bucket = b.id AND l.version >= lowest AND l.version <= top AND l.kind <> 'rollup');
    -- What was wrong before a repair has been seen to.
    mended := (SELECT max(l.version) FROM ${own("quota_line")} l
      WHERE l.bucket = b.id AND l.version >= lowest AND l.version <= top AND l.kind = 'repair');
    IF NOT (SELECT coalesce(bool_and(o.first = o.version_before + 1 AND o.used = o.used_before - o.forgotten + o.delta)
        FILTER (WHERE o.version > coalesce(mended, 0)), true) FROM (
      SELECT l.version, coalesce(l.first, l.version) AS first, coalesce(lag(l.version) OVER w, 0) AS version_before, l.used,
        coalesce(lag(l.used) OVER w, 0) AS used_before, ${forgotten} AS forgotten, ${delta} AS delta
      FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.version >= greatest(lowest, mended) AND l.version <= top
      WINDOW w AS (ORDER BY l.version)) o) THEN
      broken := broken || b.subject;
      CONTINUE;
    END IF;
    WITH lines AS (DELETE FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.version >= lowest AND l.version <= top RETURNING l.*),
    kinds AS (SELECT k.kind, sum(k.lines) AS lines, sum(k.amount) AS amount FROM (
        SELECT l.kind, 1::numeric AS lines, l.amount::numeric FROM lines l WHERE l.kind <> 'rollup'
        UNION ALL SELECT x.key, (x.value->>'lines')::numeric, (x.value->>'amount')::numeric
        FROM lines l, jsonb_each(l.details->'kinds') x WHERE l.kind = 'rollup') k GROUP BY k.kind),
    made AS (INSERT INTO ${own("quota_line")} (bucket, version, amount, used, at, max, since, delta, forgotten, held, credit, first, kind, id, details)
      SELECT b.id, top, s.amount, l.used, l.at, l.max, l.since, nullif(s.delta, s.amount), nullif(s.delta - l.used, 0), l.held, l.credit, 1, 'rollup', 'rollup:' || top,
        jsonb_build_object('kinds', (SELECT jsonb_object_agg(k.kind, jsonb_build_object('lines', k.lines, 'amount', k.amount)) FROM kinds k))
      FROM lines l, (SELECT coalesce(sum(l.amount) FILTER (WHERE l.kind IN ('consume', 'settle', 'rollup')), 0) AS amount,
          sum(${delta}) AS delta FROM lines l) s
      WHERE l.version = top)
    SELECT gone + count(*) FILTER (WHERE l.kind <> 'rollup') INTO gone FROM lines l;
    IF NOT EXISTS (SELECT FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.version = top) THEN
      ${vanished("quota_line")};
    END IF;
    UPDATE ${own("quota_bucket")} t SET rolled = top WHERE t.id = b.id AND t.quota = q AND t.subject = b.subject;
    IF EXISTS (SELECT FROM (SELECT l.at, l.version FROM ${own("quota_line")} l WHERE l.bucket = b.id AND l.version >= top
      ORDER BY l.version OFFSET 1 LIMIT 1) o WHERE o.at < before AND o.version < newest) THEN
      next := b.subject;
      RETURN;
    END IF;
  END LOOP;
END
$function$`;
