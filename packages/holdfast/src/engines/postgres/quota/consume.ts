/** The functions that decide whether something may be used: for any batch, for the usual one, and for a single call. */
import { type Statement, own, sql } from "../../../seam/sql.ts";
import { limitOf, mostUsed } from "./limits.ts";
import * as protection from "../../../seam/protections.ts";

/** The answers of functions that take a batch: lists side by side. */
const answers =
  sql.raw(`OUT missing boolean, OUT at float8, OUT verdicts int[], OUT useds bigint[], OUT helds bigint[],
  OUT credits bigint[], OUT maxes bigint[], OUT versions bigint[], OUT ats float8[], OUT retries bigint[]`);

/** Who counts has the bucket to itself. */
const locked = sql.raw(protection.quotaLocked ? "FOR NO KEY UPDATE" : "");
const kept = (id: string) => sql.raw(protection.quotaIdKept ? id : `${id} || random()`);
const held = (amount: string) => sql.raw(protection.quotaHeldCounted ? amount : "0");

/** The planner takes lists for short and new tables for small: one bucket in ten thousand is found by its index. */
const plans = sql.raw(
  "SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off",
);

/**
 * Of several calls about several buckets. Who waits for somebody's transaction with buckets in hand that it comes to want
 * ends in a deadlock, which may be the transaction's: they part before the server looks for one (deadlock_timeout, 1 s).
 */
const briefly = sql.raw("PERFORM set_config('lock_timeout', '200ms', true)");

/** The buckets, made if they are new, locked in one order, and read. Then it is what time it is. */
const lockBuckets = sql`
  IF make THEN
    INSERT INTO ${own("quota_bucket")} (quota, subject)
      SELECT q, s FROM unnest(bucket_quotas, bucket_subjects) u (q, s) ORDER BY q COLLATE "C", s COLLATE "C" ON CONFLICT DO NOTHING;
  END IF;
  FOR r IN SELECT u.n, t.* FROM unnest(bucket_quotas, bucket_subjects) WITH ORDINALITY u (q, s, n)
    JOIN ${own("quota_bucket")} t ON t.quota = u.q AND t.subject = u.s
    ORDER BY t.quota, t.subject FOR NO KEY UPDATE OF t LOOP
    found := found + 1;
    k := r.n;
    ids[k] := r.id;
    resets[k] := r.reset;
    used[k] := r.used;
    held[k] := r.held;
    credit[k] := r.credit;
    version[k] := r.version;
    since[k] := r.since;
    max[k] := ${limitOf("r", "rules->(bucket_rules[k] - 1)", "bucket_limits[k]")};
    IF r.parts IS NOT NULL THEN
      parts := coalesce(parts, '{}') || jsonb_build_object(k::text, to_jsonb(r.parts));
    END IF;
  END LOOP;
  moment := clock_timestamp();
  at := extract(epoch FROM moment) * 1000;
  IF found < bucket_count THEN
    missing := true;
    RETURN;
  END IF;`;

/** The window of now, of each rule. */
const readRules = sql`
  FOR i IN 1..jsonb_array_length(rules) LOOP
    rule := rules->(i - 1);
    windows[i] := rule->>'window';
    overs[i] := rule->>'over';
    IF windows[i] = 'fixed' THEN
      starts[i] := (SELECT to_timestamp(s::float8 / 1000) FROM jsonb_array_elements_text(rule->'starts') s
        WHERE to_timestamp(s::float8 / 1000) <= moment ORDER BY s::float8 DESC LIMIT 1);
      -- The caller's clock is far from ours: it has to say again which windows there are.
      IF starts[i] IS NULL OR moment >= to_timestamp((rule->'starts'->>-1)::float8 / 1000) THEN
        missing := true;
        RETURN;
      END IF;
    END IF;
  END LOOP;`;

/** What has left the window is not used any more. */
const rollWindows = sql`
  FOR k IN 1..bucket_count LOOP
    first[k] := version[k];
    IF windows[bucket_rules[k]] = 'none' THEN
      NULL;
    ELSIF windows[bucket_rules[k]] = 'fixed' THEN
      IF since[k] IS NULL OR starts[bucket_rules[k]] > since[k] THEN
        forgotten[k] := used[k];
        used[k] := 0;
        since[k] := starts[bucket_rules[k]];
      END IF;
    ELSE
      b := NULL;
      b.id := ids[k];
      b.quota := bucket_quotas[k];
      b.subject := bucket_subjects[k];
      b.used := used[k];
      b.since := since[k];
      b.parts := ARRAY(SELECT p::bigint FROM jsonb_array_elements_text(parts->k::text) WITH ORDINALITY x (p, n) ORDER BY n);
      IF cardinality(b.parts) = 0 THEN b.parts := NULL; END IF;
      b := ${own("quota_roll")}(b, rules->(bucket_rules[k] - 1), max[k], moment);
      forgotten[k] := used[k] - b.used;
      used[k] := b.used;
      since[k] := b.since;
      IF b.parts IS NOT NULL THEN
        parts := coalesce(parts, '{}') || jsonb_build_object(k::text, to_jsonb(b.parts));
      END IF;
    END IF;
    cap[k] := least(${mostUsed}, max[k] + overs[bucket_rules[k]]);
  END LOOP;`;

/** Nothing is decided yet: also the second time. */
const beginAgain = sql`
  used := saved.used;
  held := saved.held;
  credit := saved.credit;
  version := saved.version;
  forgotten := saved.forgotten;
  newest := saved.newest;
  verdicts := array_fill(0, ARRAY[use_count]);
  useds := array_fill(0::bigint, ARRAY[use_count]);
  helds := useds;
  credits := useds;
  maxes := array_fill(NULL::bigint, ARRAY[use_count]);
  versions := useds;
  ats := array_fill(at, ARRAY[use_count]);
  retries := array_fill(NULL::bigint, ARRAY[use_count]);
  eversion := array_fill(NULL::bigint, ARRAY[use_count]);
  edelta := eversion;
  eforgotten := eversion;
  eused := eversion;
  eheld := eversion;
  ecredit := eversion;
  edrains := array_fill(NULL::jsonb, ARRAY[use_count]);
  esince := array_fill(NULL::timestamptz, ARRAY[use_count]);
  prior := array_fill(false, ARRAY[use_count]);
  denied := false;`;

/** What is written down under these ids. */
const findLines = sql`
  IF looked THEN
    pamount := array_fill(NULL::bigint, ARRAY[use_count]);
    pkind := array_fill(NULL::text, ARRAY[use_count]);
    FOR r IN SELECT u.n, e.* FROM unnest(use_buckets, use_ids) WITH ORDINALITY u (k, i, n)
      JOIN ${own("quota_line")} e ON e.bucket = ids[u.k] AND e.id = u.i LOOP
      m := r.n;
      prior[m] := true;
      pamount[m] := r.amount;
      pkind[m] := r.kind;
      useds[m] := r.used;
      helds[m] := coalesce(r.held, 0);
      credits[m] := coalesce(r.credit, 0);
      maxes[m] := r.max;
      versions[m] := r.version;
      ats[m] := extract(epoch FROM r.at) * 1000;
    END LOOP;
  END IF;`;

/** Granted before, by another call or by an earlier one of these. Of a group all were granted together, or it is another group. */
const findRepeats = sql`
  -- Granted before, by another call or by an earlier one of these.
  refused := 0;
  found := 0;
  FOR m IN i..j LOOP
    k := same[m];
    WHILE k > 0 AND verdicts[k] NOT IN (1, 2) LOOP k := same[k]; END LOOP;
    IF k > 0 AND NOT prior[m] THEN
      prior[m] := true;
      IF pamount IS NULL THEN
        pamount := array_fill(NULL::bigint, ARRAY[use_count]);
        pkind := array_fill(NULL::text, ARRAY[use_count]);
      END IF;
      pamount[m] := use_amounts[k];
      pkind[m] := CASE WHEN use_holds[k] IS NULL THEN 'consume' ELSE 'hold' END;
      useds[m] := useds[k];
      helds[m] := helds[k];
      credits[m] := credits[k];
      maxes[m] := maxes[k];
      versions[m] := versions[k];
    END IF;
    -- A hold that has not ended is known also after its line was rolled up.
    IF looked AND NOT prior[m] AND use_holds[m] IS NOT NULL THEN
      k := use_buckets[m];
      need := (SELECT h.amount FROM ${own("quota_hold")} h WHERE h.quota = bucket_quotas[k] AND h.subject = bucket_subjects[k] AND h.id = use_ids[m]);
      IF need IS NOT NULL THEN
        prior[m] := true;
        pamount[m] := need;
        pkind[m] := 'hold';
        useds[m] := used[k];
        helds[m] := held[k];
        credits[m] := credit[k];
        maxes[m] := max[k];
        versions[m] := version[k];
      END IF;
    END IF;
    IF prior[m] THEN
      found := found + 1;
      verdicts[m] := CASE WHEN pamount[m] = use_amounts[m]
        AND pkind[m] = CASE WHEN use_holds[m] IS NULL THEN 'consume' ELSE 'hold' END THEN 2 ELSE 3 END;
    END IF;
  END LOOP;
  IF found > 0 THEN
    -- The others of the group may have been granted too, by another call.
    IF found < j - i + 1 AND look AND NOT looked THEN
      RAISE unique_violation;
    END IF;
    -- Of a group all were granted together, or it is another group.
    FOR m IN i..j LOOP
      IF found < j - i + 1 AND NOT prior[m] THEN verdicts[m] := 3; END IF;
    END LOOP;
    i := j + 1;
    CONTINUE;
  END IF;`;

/** Whether all of the group fits: what is over makes room, or is none. */
const findRoom = sql`
  FOR m IN i..j LOOP
    k := use_buckets[m];
    need := used[k] + held[k] + use_amounts[m] - cap[k];
    IF need > credit[k] AND (held[k] > 0 OR credit[k] > 0) OR need > 0 AND credit[k] > 0 THEN
      -- What is over makes room, or is none.
      b := NULL;
      b.id := ids[k];
      b.quota := bucket_quotas[k];
      b.subject := bucket_subjects[k];
      b.used := used[k];
      b.held := held[k];
      b.credit := credit[k];
      b.version := version[k];
      b.since := since[k];
      b := ${own("quota_reap")}(b, moment, forgotten[k]);
      IF b.version > version[k] THEN forgotten[k] := 0; END IF;
      held[k] := b.held;
      credit[k] := b.credit;
      version[k] := b.version;
      need := used[k] + held[k] + use_amounts[m] - cap[k];
    END IF;
    IF need > credit[k] THEN
      refused := m;
      EXIT;
    END IF;
  END LOOP;`;

/** All of the group, or nothing. */
const grantOrRefuse = sql`
  FOR m IN i..j LOOP
    k := use_buckets[m];
    maxes[m] := max[k];
    IF refused > 0 THEN
      denied := true;
      verdicts[m] := 0;
      useds[m] := used[k];
      helds[m] := held[k];
      credits[m] := credit[k];
      -- Whose refusal it was.
      IF m = refused THEN
        need := used[k] + held[k] + use_amounts[m] - cap[k] - credit[k];
        retries[m] := CASE windows[bucket_rules[k]]
          -- More than can be counted is never.
          WHEN 'refill' THEN CASE WHEN max[k] > 0 AND need <= used[k] THEN
            nullif(least(${mostUsed} + 1, div(need::numeric * (rules->(bucket_rules[k] - 1)->>'per')::bigint + max[k] - 1, max[k])
            - floor(extract(epoch FROM moment - since[k]) * 1000000)), ${mostUsed} + 1) END
          WHEN 'parts' THEN ${own("quota_room")}(ARRAY(SELECT p::bigint
            FROM jsonb_array_elements_text(parts->k::text) WITH ORDINALITY x (p, n) ORDER BY n), newest[k], need)
            * ((rules->(bucket_rules[k] - 1)->>'per')::bigint / (rules->(bucket_rules[k] - 1)->>'parts')::int)
            - floor(extract(epoch FROM moment - since[k]) * 1000000)
          -- What these calls have used leaves last.
          WHEN 'log' THEN CASE WHEN need > used[k] - newest[k] AND need <= used[k] THEN (rules->(bucket_rules[k] - 1)->>'per')::bigint
            ELSE ${own("quota_leaves")}(ids[k], resets[k], need, (rules->(bucket_rules[k] - 1)->>'per')::bigint, moment) END
          ELSE -1 END;
        IF retries[m] IS NULL THEN retries[m] := -2; END IF;
      END IF;
      CONTINUE;
    END IF;
    version[k] := version[k] + 1;
    IF use_holds[m] IS NULL THEN
      base := least(use_amounts[m], greatest(cap[k] - used[k], 0));
      IF base < use_amounts[m] THEN
        edrains[m] := ${own("quota_drain")}(bucket_quotas[k], bucket_subjects[k], use_amounts[m] - base, moment);
        credit[k] := credit[k] - (use_amounts[m] - base);
      END IF;
    ELSE
      base := 0;
      held[k] := held[k] + use_amounts[m];
      holds := true;
    END IF;
    used[k] := used[k] + base;
    newest[k] := newest[k] + base;
    verdicts[m] := 1;
    useds[m] := used[k];
    helds[m] := held[k];
    credits[m] := credit[k];
    versions[m] := version[k];
    eversion[m] := version[k];
    edelta[m] := base;
    eforgotten[m] := forgotten[k];
    forgotten[k] := 0;
    eused[m] := used[k];
    eheld[m] := held[k];
    ecredit[m] := credit[k];
    esince[m] := since[k];
  END LOOP;`;

/** The ledger, the holds, the buckets. */
const writeUses = sql`
  INSERT INTO ${own("quota_line")} (bucket, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, drains, details)
    SELECT ids[n.k], n.v, n.a, nullif(n.d, n.a), nullif(n.f, 0), n.u, nullif(n.h, 0), nullif(n.c, 0), n.x, n.w, moment,
      CASE WHEN n.t IS NULL THEN 'consume' ELSE 'hold' END, n.i, n.g, n.e::jsonb
    FROM unnest(use_buckets, eversion, use_amounts, edelta, eforgotten, eused, eheld, ecredit, maxes, esince, use_holds, use_ids, edrains, use_details)
      AS n (k, v, a, d, f, u, h, c, x, w, t, i, g, e)
    WHERE n.v IS NOT NULL;
  IF holds THEN
    INSERT INTO ${own("quota_hold")} (quota, subject, id, amount, until)
      SELECT bucket_quotas[n.k], bucket_subjects[n.k], n.i, n.a, moment + n.t * interval '1 millisecond'
      FROM unnest(use_buckets, use_ids, use_amounts, use_holds, eversion) AS n (k, i, a, t, v) WHERE n.v IS NOT NULL AND n.t IS NOT NULL;
  END IF;
  IF parts IS NULL THEN
    UPDATE ${own("quota_bucket")} t SET used = n.u, held = n.h, credit = n.c, version = n.v, since = n.w
      FROM unnest(bucket_quotas, bucket_subjects, used, held, credit, version, since, first) AS n (q, s, u, h, c, v, w, o)
      WHERE t.quota = n.q AND t.subject = n.s AND n.v > n.o;
  ELSE
    FOR k IN 1..bucket_count LOOP
      CONTINUE WHEN version[k] = first[k];
      b.parts := ARRAY(SELECT p::bigint FROM jsonb_array_elements_text(parts->k::text) WITH ORDINALITY x (p, n) ORDER BY n);
      IF cardinality(b.parts) > 0 THEN b.parts[1] := b.parts[1] + newest[k]; ELSE b.parts := NULL; END IF;
      UPDATE ${own("quota_bucket")} t SET used = used[k], held = held[k],
        credit = credit[k], version = version[k], since = since[k], parts = b.parts
        WHERE t.quota = bucket_quotas[k] AND t.subject = bucket_subjects[k];
    END LOOP;
  END IF;`;

/**
 * Decides about calls in the order in which they came; those of one group are granted all or none. Buckets by
 * their place in the lists of quotas and subjects.
 * Verdicts: 0 refused, 1 granted, 2 granted before, 3 the id was used for something else.
 */
const decide = sql`CREATE OR REPLACE FUNCTION ${own("quota_decide")}(
  rules jsonb, make boolean, look boolean, bq text[], bs text[], br int[], bm bigint[],
  ob int[], oi text[], oa bigint[], og int[], ot bigint[], od text[], same int[], ${answers})
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  bucket_quotas ALIAS FOR bq;
  bucket_subjects ALIAS FOR bs;
  bucket_rules ALIAS FOR br;
  bucket_limits ALIAS FOR bm;
  use_buckets ALIAS FOR ob;
  use_ids ALIAS FOR oi;
  use_amounts ALIAS FOR oa;
  use_groups ALIAS FOR og;
  use_holds ALIAS FOR ot;
  use_details ALIAS FOR od;
  bucket_count int := cardinality(bucket_quotas);
  use_count int := cardinality(use_buckets);
  moment timestamptz;
  r record;
  b ${own("quota_bucket")};
  windows text[];
  overs bigint[];
  starts timestamptz[];
  ids bigint[] := array_fill(0::bigint, ARRAY[bucket_count]);
  resets bigint[] := array_fill(0::bigint, ARRAY[bucket_count]);
  used bigint[] := array_fill(0::bigint, ARRAY[bucket_count]);
  held bigint[] := array_fill(0::bigint, ARRAY[bucket_count]);
  credit bigint[] := array_fill(0::bigint, ARRAY[bucket_count]);
  version bigint[] := array_fill(0::bigint, ARRAY[bucket_count]);
  first bigint[];
  since timestamptz[] := array_fill(NULL::timestamptz, ARRAY[bucket_count]);
  max bigint[] := array_fill(NULL::bigint, ARRAY[bucket_count]);
  cap bigint[] := array_fill(NULL::bigint, ARRAY[bucket_count]);
  forgotten bigint[] := array_fill(0::bigint, ARRAY[bucket_count]);
  newest bigint[] := array_fill(0::bigint, ARRAY[bucket_count]);
  parts jsonb;
  saved record;
  found int := 0;
  holds boolean := false;
  looked boolean := false;
  denied boolean;
  prior boolean[];
  pamount bigint[];
  pkind text[];
  i int;
  j int;
  m int;
  k int;
  refused int;
  need bigint;
  base bigint;
  eversion bigint[];
  edelta bigint[];
  eforgotten bigint[];
  eused bigint[];
  eheld bigint[];
  ecredit bigint[];
  edrains jsonb[];
  esince timestamptz[];
  rule jsonb;
BEGIN
  missing := false;
  IF bucket_count > 1 AND use_groups[1] <> use_groups[use_count] THEN
    ${briefly};
  END IF;
  ${lockBuckets}
  ${readRules}
  ${rollWindows}
  SELECT used, held, credit, version, forgotten, newest INTO saved;
  LOOP
    BEGIN
      ${beginAgain}
      ${findLines}
      i := 1;
      WHILE i <= use_count LOOP
        j := i;
        WHILE j < use_count AND use_groups[j + 1] = use_groups[i] LOOP j := j + 1; END LOOP;
        ${findRepeats}
        ${findRoom}
        ${grantOrRefuse}
        i := j + 1;
      END LOOP;
      IF denied AND look AND NOT looked THEN
        RAISE unique_violation;
      END IF;

      ${writeUses}
      RETURN;
    EXCEPTION WHEN unique_violation THEN
      -- An id that was there before: look for all of them, and decide again.
      IF looked THEN RAISE; END IF;
      looked := true;
    END;
  END LOOP;
END
$function$`;

/**
 * What most calls come to: uses of one quota that all fit and have new ids. It takes a tenth of the time; whatever else
 * turns out is left to quota_decide, before anything is written. opens and ends: the window of now, as the caller has it.
 * Of each bucket the sum and number of its uses; of each use those up to it. If all are granted, the
 * answers are those of the buckets before, and the caller adds its own.
 */
const batch = sql`CREATE OR REPLACE FUNCTION ${own("quota_batch")}(
  rules jsonb, opens timestamptz, ends timestamptz, over bigint, make boolean, look boolean,
  q text, bs text[], bm bigint[], bt bigint[], bn bigint[],
  ob int[], oi text[], oa bigint[], op bigint[], nth bigint[], od text[], OUT fast boolean, ${answers})
LANGUAGE plpgsql ${plans} AS $function$
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
  found bigint;
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
    INTO found, ids, places, useds, rolled, after, helds, credits, versions, next, maxes, since, forward, fits FROM (
      SELECT u.n, u.a, u.c, t.id, t.ctid AS place, t.used, t.held, t.credit, t.version, t.since,
        CASE WHEN opens IS NULL OR t.since = opens THEN t.used ELSE 0 END AS before, t.parts IS NULL AS plain,
        ${limitOf("t", "rules->0", "u.m")} AS max
      FROM (SELECT * FROM unnest(bucket_subjects, bucket_limits, bucket_sums, bucket_uses) WITH ORDINALITY l (s, m, a, c, n) ORDER BY l.s COLLATE "C") u,
      -- Apart, so that it is looked up by both columns: as a join, one plan read the whole quota for each.
      LATERAL (SELECT x.ctid, x.* FROM ${own("quota_bucket")} x WHERE x.quota = q AND x.subject = u.s ${locked}) t) b;
    moment := clock_timestamp();
    IF found = bucket_count AND fits AND forward AND (opens IS NULL OR moment >= opens AND moment < ends) THEN
      INSERT INTO ${own("quota_line")} (bucket, version, amount, used, at, max, since, forgotten, held, credit, kind, id, details)
        SELECT ids[x.k], versions[x.k] + x.n, x.a, useds[x.k] + x.p, moment, maxes[x.k], since[x.k],
          CASE WHEN x.n = 1 THEN rolled[x.k] END, nullif(helds[x.k], 0), nullif(credits[x.k], 0), 'consume', ${kept("x.i")}, x.d::jsonb
        FROM unnest(use_buckets, use_amounts, use_sums, nth, use_ids, use_details) x (k, a, p, n, i, d);
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
const use = sql`CREATE OR REPLACE FUNCTION ${own("quota_use")}(
  rules jsonb, opens timestamptz, ends timestamptz, over bigint, make boolean, look boolean,
  q text, s text, own bigint, op text, amount bigint, note text,
  OUT missing boolean, OUT at float8, OUT verdict int, OUT used bigint, OUT held bigint, OUT credit bigint,
  OUT max bigint, OUT version bigint, OUT entered float8, OUT retry bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  b record;
  moment timestamptz;
  before bigint;
BEGIN
  SELECT t.id, t.used, t.held, t.credit, t.version, t.since, t.parts IS NULL AS plain, ${limitOf("t", "rules->0", "own")} AS max
    INTO b FROM ${own("quota_bucket")} t WHERE t.quota = q AND t.subject = s ${locked};
  IF NOT FOUND THEN
    INSERT INTO ${own("quota_bucket")} (quota, subject) VALUES (q, s) ON CONFLICT DO NOTHING;
    SELECT t.id, t.used, t.held, t.credit, t.version, t.since, t.parts IS NULL AS plain, ${limitOf("t", "rules->0", "own")} AS max
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

export const consuming: readonly Statement[] = [decide, batch, use];
