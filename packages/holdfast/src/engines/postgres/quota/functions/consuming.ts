/** What most calls come to, in less time: for the usual batch, and for a single call. */
import { own, sql } from "../../../../seam/sql.ts";
import { vanished } from "../../hidden.ts";
import * as protection from "../../../../seam/protections.ts";
import { limitOf, mostUsed } from "../limits.ts";
import { answers, briefly, isElsewhere, plans } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/** Who counts has the bucket to itself. */
const locked = sql.raw(protection.quotaLocked ? "FOR NO KEY UPDATE" : "");

const kept = (id: string) => sql.raw(protection.quotaIdKept ? id : `${id} || random()`);

const held = (amount: string) => sql.raw(protection.quotaHeldCounted ? amount : "0");

/**
 * What most calls come to: uses of one quota that all fit and have new ids. It takes a tenth of the time; whatever else
 * turns out is left to quota_decide, before anything is written. opens and ends: the window of now, as the caller has it.
 * Of each bucket the sum and number of its uses; of each use those up to it. If all are granted, the
 * answers are those of the buckets before, and the caller adds its own.
 */
export const batch = sql`CREATE OR REPLACE FUNCTION ${own("quota_batch")}(
  rules jsonb, opens timestamptz, ends timestamptz, over bigint, make boolean, look boolean,
  q text, bs text[], bm bigint[], bt bigint[], bn bigint[],
  ob int[], oi text[], oa bigint[], op bigint[], nth bigint[], od text[], OUT fast boolean, ${answers})
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  bucket_subjects ALIAS FOR bs;
  bucket_limits ALIAS FOR bm;
  bucket_sums ALIAS FOR bt;
  bucket_uses ALIAS FOR bn;
  use_buckets ALIAS FOR ob;
  use_ids ALIAS FOR oi;
  use_amounts ALIAS FOR oa;
  use_sums ALIAS FOR op;
  use_details ALIAS FOR od;
  use_count int := cardinality(use_buckets);
  bucket_count int := cardinality(bucket_subjects);
  matched bigint;
  fits boolean;
  forward boolean;
  ids bigint[];
  places tid[];
  rolled bigint[];
  after bigint[];
  next bigint[];
  since timestamptz[];
  moment timestamptz;
BEGIN
  IF bucket_count > 1 THEN
    ${briefly};
  END IF;
  IF make THEN
    INSERT INTO ${own("quota_bucket")} (quota, subject)
      SELECT q, u FROM unnest(bucket_subjects) u ORDER BY u COLLATE "C" ON CONFLICT DO NOTHING;
  END IF;
  BEGIN
    SELECT count(*), array_agg(b.id ORDER BY b.n), array_agg(b.place ORDER BY b.n), array_agg(b.before ORDER BY b.n),
      array_agg(nullif(b.used - b.before, 0) ORDER BY b.n), array_agg(b.before + b.a ORDER BY b.n),
      array_agg(b.held ORDER BY b.n), array_agg(b.credit ORDER BY b.n), array_agg(b.version ORDER BY b.n),
      array_agg(b.version + b.c ORDER BY b.n), array_agg(b.max ORDER BY b.n),
      array_agg(coalesce(opens, b.since) ORDER BY b.n), bool_and(b.since IS NULL OR opens IS NULL OR b.since <= opens),
      bool_and(b.plain AND b.before + ${held("b.held")} + b.a <= least(${mostUsed}, b.max + over))
    INTO matched, ids, places, useds, rolled, after, helds, credits, versions, next, maxes, since, forward, fits FROM (
      SELECT u.n, u.a, u.c, t.id, t.ctid AS place, t.used, t.held, t.credit, t.version, t.since,
        CASE WHEN opens IS NULL OR t.since = opens THEN t.used ELSE 0 END AS before, t.parts IS NULL AND NOT ${isElsewhere("t")} AS plain,
        ${limitOf("t", "rules->0", "u.m")} AS max
      FROM (SELECT * FROM unnest(bucket_subjects, bucket_limits, bucket_sums, bucket_uses) WITH ORDINALITY l (s, m, a, c, n) ORDER BY l.s COLLATE "C") u,
      -- Apart, so that it is looked up by both columns: as a join, one plan read the whole quota for each.
      LATERAL (SELECT x.ctid, x.* FROM ${own("quota_bucket")} x WHERE x.quota = q AND x.subject = u.s ${locked}) t) b;
    moment := clock_timestamp();
    IF matched = bucket_count AND fits AND forward AND (opens IS NULL OR moment >= opens AND moment < ends) THEN
      INSERT INTO ${own("quota_line")} (bucket, version, amount, used, at, max, since, forgotten, held, credit, kind, id, details)
        SELECT ids[x.k], versions[x.k] + x.n, x.a, useds[x.k] + x.p, moment, maxes[x.k], since[x.k],
          CASE WHEN x.n = 1 THEN rolled[x.k] END, nullif(helds[x.k], 0), nullif(credits[x.k], 0), 'consume', ${kept("x.i")}, x.d::jsonb
        FROM unnest(use_buckets, use_amounts, use_sums, nth, use_ids, use_details) x (k, a, p, n, i, d);
      GET DIAGNOSTICS matched = ROW_COUNT;
      IF matched <> use_count THEN
        ${vanished("quota_line")};
      END IF;
      -- By their place, which nobody changes while they are locked: looking for them again took a third of the time.
      UPDATE ${own("quota_bucket")} t SET used = x.u, version = x.v, since = x.w
        FROM unnest(places, after, next, since) x (c, u, v, w) WHERE t.ctid = x.c;
      missing := false;
      fast := true;
      at := extract(epoch FROM moment) * 1000;
      RETURN;
    END IF;
  EXCEPTION WHEN unique_violation THEN
    -- An id that was there before.
    NULL;
  END;
  fast := false;
  SELECT d.* INTO missing, at, verdicts, useds, helds, credits, maxes, versions, ats, retries
    FROM ${own("quota_decide")}(rules, make, look, array_fill(q, ARRAY[bucket_count]), bucket_subjects, array_fill(1, ARRAY[bucket_count]), bucket_limits, use_buckets, use_ids, use_amounts,
      ARRAY(SELECT generate_series(1, use_count)), array_fill(NULL::bigint, ARRAY[use_count]), coalesce(use_details, array_fill(NULL::text, ARRAY[use_count])),
      array_fill(0, ARRAY[use_count])) d;
END
$function$`;

/** The same for a single call: few and plain values, since parsing the many of a batch took longer than what it does. */
export const use = sql`CREATE OR REPLACE FUNCTION ${own("quota_use")}(
  rules jsonb, opens timestamptz, ends timestamptz, over bigint, make boolean, look boolean,
  q text, s text, own bigint, op text, amount bigint, note text,
  OUT missing boolean, OUT at float8, OUT verdict int, OUT used bigint, OUT held bigint, OUT credit bigint,
  OUT max bigint, OUT version bigint, OUT entered float8, OUT retry bigint)
${plpgsql} AS $function$
#variable_conflict use_variable
DECLARE
  b record;
  moment timestamptz;
  before bigint;
BEGIN
  SELECT t.id, t.used, t.held, t.credit, t.version, t.since, t.parts IS NULL AND NOT ${isElsewhere("t")} AS plain, ${limitOf("t", "rules->0", "own")} AS max
    INTO b FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s ${locked};
  IF NOT FOUND THEN
    INSERT INTO ${own("quota_bucket")} (quota, subject) VALUES (q, s) ON CONFLICT DO NOTHING;
    SELECT t.id, t.used, t.held, t.credit, t.version, t.since, t.parts IS NULL AND NOT ${isElsewhere("t")} AS plain, ${limitOf("t", "rules->0", "own")} AS max
      INTO b FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s ${locked};
  END IF;
  IF FOUND THEN
    moment := clock_timestamp();
    before := CASE WHEN opens IS NULL OR b.since = opens THEN b.used ELSE 0 END;
    used := before + amount;
    IF b.plain AND (opens IS NULL OR moment >= opens AND moment < ends AND (b.since IS NULL OR b.since <= opens))
      AND used + ${held("b.held")} <= least(${mostUsed}, b.max + over) THEN
      INSERT INTO ${own("quota_line")} (bucket, version, amount, used, at, max, since, forgotten, held, credit, kind, id, details)
        VALUES (b.id, b.version + 1, amount, used, moment, b.max, coalesce(opens, b.since), nullif(b.used - before, 0),
          nullif(b.held, 0), nullif(b.credit, 0), 'consume', ${kept("op")}, note::jsonb)
        ON CONFLICT (bucket, id) DO NOTHING;
      IF FOUND THEN
        UPDATE ${own("quota_bucket")} t SET used = quota_use.used, version = b.version + 1, since = coalesce(opens, b.since)
          WHERE t.quota = q AND t.subject = s;
        missing := false;
        at := extract(epoch FROM moment) * 1000;
        verdict := 1;
        held := b.held;
        credit := b.credit;
        max := b.max;
        version := b.version + 1;
        entered := at;
        RETURN;
      END IF;
    END IF;
  END IF;
  SELECT d.missing, d.at, d.verdicts[1], d.useds[1], d.helds[1], d.credits[1], d.maxes[1], d.versions[1], d.ats[1], d.retries[1]
    INTO missing, at, verdict, used, held, credit, max, version, entered, retry
    FROM ${own("quota_decide")}(rules, make, look, ARRAY[q], ARRAY[s], ARRAY[1], ARRAY[own], ARRAY[1],
      ARRAY[op], ARRAY[amount], ARRAY[1], ARRAY[NULL::bigint], ARRAY[note], ARRAY[0]) d;
END
$function$`;
