/** The function that decides whether something may be used, for any batch, in parts that are read one at a time. */
import { own, sql } from "../../../../seam/sql.ts";
import { vanished } from "../../hidden.ts";
import { limitOf, mostUsed } from "../limits.ts";
import { answers, briefly, isElsewhere, plans } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/** The buckets, made if they are new, locked in one order, and read. Then it is what time it is. */
const lockBuckets = sql`
  IF make THEN
    INSERT INTO ${own("quota_bucket")} (quota, subject)
      SELECT q, s FROM unnest(bucket_quotas, bucket_subjects) u (q, s) ORDER BY q COLLATE "C", s COLLATE "C" ON CONFLICT DO NOTHING;
  END IF;
  FOR r IN SELECT u.n, t.* FROM unnest(bucket_quotas, bucket_subjects) WITH ORDINALITY u (q, s, n)
    JOIN ${own("quota_bucket")} t ON t.quota = u.q AND t.subject = u.s
    ORDER BY t.quota, t.subject FOR NO KEY UPDATE OF t LOOP
    matched := matched + 1;
    away := away OR ${isElsewhere("r")};
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
  IF matched < bucket_count OR away THEN
    IF make AND NOT away THEN
      ${vanished("quota_bucket")};
    END IF;
    missing := true;
    verdicts := CASE WHEN away THEN ARRAY[-1] END;
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
  matched := 0;
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
      matched := matched + 1;
      verdicts[m] := CASE WHEN pamount[m] = use_amounts[m]
        AND pkind[m] = CASE WHEN use_holds[m] IS NULL THEN 'consume' ELSE 'hold' END THEN 2 ELSE 3 END;
    END IF;
  END LOOP;
  IF matched > 0 THEN
    -- The others of the group may have been granted too, by another call.
    IF matched < j - i + 1 AND look AND NOT looked THEN
      RAISE unique_violation;
    END IF;
    -- Of a group all were granted together, or it is another group.
    FOR m IN i..j LOOP
      IF matched < j - i + 1 AND NOT prior[m] THEN verdicts[m] := 3; END IF;
    END LOOP;
    i := j + 1;
    CONTINUE;
  END IF;`;

/** So much of the credits can be used: what is used and held stays an exact number. */
const usableCredit = sql`least(credit[k], ${mostUsed} - cap[k])`;

/** Whether all of the group fits: what is over makes room, or is none. */
const findRoom = sql`
  FOR m IN i..j LOOP
    k := use_buckets[m];
    need := used[k] + held[k] + use_amounts[m] - cap[k];
    IF need > ${usableCredit} AND (held[k] > 0 OR credit[k] > 0) OR need > 0 AND credit[k] > 0 THEN
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
    IF need > ${usableCredit} THEN
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
        need := used[k] + held[k] + use_amounts[m] - cap[k] - ${usableCredit};
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
  GET DIAGNOSTICS matched = ROW_COUNT;
  IF matched <> cardinality(array_remove(eversion, NULL)) THEN
    ${vanished("quota_line")};
  END IF;
  IF holds THEN
    INSERT INTO ${own("quota_hold")} (quota, subject, id, amount, until)
      SELECT bucket_quotas[n.k], bucket_subjects[n.k], n.i, n.a, moment + n.t * interval '1 millisecond'
      FROM unnest(use_buckets, use_ids, use_amounts, use_holds, eversion) AS n (k, i, a, t, v) WHERE n.v IS NOT NULL AND n.t IS NOT NULL;
    GET DIAGNOSTICS matched = ROW_COUNT;
    IF matched <> (SELECT count(*) FROM unnest(use_holds, eversion) AS n (t, v) WHERE n.v IS NOT NULL AND n.t IS NOT NULL) THEN
      ${vanished("quota_hold")};
    END IF;
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
 * Verdicts: 0 refused, 1 granted, 2 granted before, 3 the id was used for something else. A single -1, with missing: some of the
 * buckets count on another of several databases.
 */
export const decide = sql`CREATE OR REPLACE FUNCTION ${own("quota_decide")}(
  rules jsonb, make boolean, look boolean, bq text[], bs text[], br int[], bm bigint[],
  ob int[], oi text[], oa bigint[], og int[], ot bigint[], od text[], same int[], ${answers})
${plpgsql} ${plans} AS $function$
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
  matched int := 0;
  away boolean := false;
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
