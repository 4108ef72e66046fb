/**
 * Tables and functions of quotas. A call is one statement that calls one function: it locks the buckets in one order,
 * and decides in statements that come after the locks, and so see what the last holder of each wrote. Without it, a
 * duplicate that had to wait for the original would meet a full bucket, and be told that it was refused.
 */
import { type Statement, sql } from "../../core/sql.ts";

/**
 * No index on what changes, and half of each page left free, so that an update stays on its page (HOT).
 * `since`: when what `used` counts began: the window, the last refill, the newest of the `parts`, the last entry.
 */
const tables: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS holdfast.quota_bucket (
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  used bigint NOT NULL DEFAULT 0 CHECK (used >= 0),
  held bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
  credit bigint NOT NULL DEFAULT 0 CHECK (credit >= 0),
  version bigint NOT NULL DEFAULT 0,
  since timestamptz,
  parts bigint[],
  own_limit bigint,
  plan text,
  PRIMARY KEY (quota, subject)
) WITH (fillfactor = 50)`,
  // used = used of the version before - forgotten + delta; held and credit after it.
  sql`CREATE TABLE IF NOT EXISTS holdfast.quota_entry (
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  version bigint NOT NULL,
  amount bigint NOT NULL,
  delta bigint NOT NULL,
  forgotten bigint NOT NULL,
  used bigint NOT NULL,
  held bigint NOT NULL,
  credit bigint NOT NULL,
  refunded bigint NOT NULL DEFAULT 0,
  max bigint,
  since timestamptz,
  at timestamptz NOT NULL,
  kind text NOT NULL,
  id text COLLATE "C" NOT NULL,
  entry text COLLATE "C",
  drains jsonb,
  details jsonb,
  PRIMARY KEY (quota, subject, version),
  UNIQUE (quota, subject, id)
)`,
  sql`CREATE TABLE IF NOT EXISTS holdfast.quota_hold (
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  id text COLLATE "C" NOT NULL,
  amount bigint NOT NULL,
  until timestamptz NOT NULL,
  PRIMARY KEY (quota, subject, id)
)`,
  sql`CREATE TABLE IF NOT EXISTS holdfast.quota_grant (
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  id text COLLATE "C" NOT NULL,
  amount bigint NOT NULL,
  spent bigint NOT NULL DEFAULT 0 CHECK (spent >= 0 AND spent <= amount),
  priority integer NOT NULL,
  until timestamptz NOT NULL DEFAULT 'infinity',
  PRIMARY KEY (quota, subject, id)
)`,
];

/** What is left of a bucket's use now; parts of a sliding window that have passed are gone. */
const roll = sql`CREATE OR REPLACE FUNCTION holdfast.quota_roll(INOUT b holdfast.quota_bucket, rule jsonb, max bigint, moment timestamptz)
LANGUAGE plpgsql AS $function$
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
    IF b.since IS NULL OR elapsed >= per OR max <= 0 THEN
      b.used := CASE WHEN max <= 0 THEN b.used ELSE 0 END;
      b.since := moment;
    ELSE
      units := floor(elapsed::numeric * max / per);
      IF units >= b.used THEN
        b.used := 0;
        b.since := moment;
      ELSE
        b.used := b.used - units;
        -- What is left over of the time counts for the next unit.
        b.since := b.since + ceil(units::numeric * per / max) * interval '1 microsecond';
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
    FOR e IN SELECT q.at, q.delta, q.refunded, q.kind FROM holdfast.quota_entry q
      WHERE q.quota = b.quota AND q.subject = b.subject ORDER BY q.version DESC LOOP
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

/** Holds and grants of a bucket that are over. Its row is locked. */
const reap = sql`CREATE OR REPLACE FUNCTION holdfast.quota_reap(INOUT b holdfast.quota_bucket, moment timestamptz)
LANGUAGE plpgsql AS $function$
DECLARE
  h record;
  g record;
  gone bigint;
BEGIN
  IF b.held > 0 THEN
    FOR h IN DELETE FROM holdfast.quota_hold q WHERE q.quota = b.quota AND q.subject = b.subject AND q.until <= moment
      RETURNING q.* LOOP
      b.held := b.held - h.amount;
      b.version := b.version + 1;
      INSERT INTO holdfast.quota_entry (quota, subject, version, amount, delta, forgotten, used, held, credit, since, at, kind, id, entry)
        VALUES (b.quota, b.subject, b.version, h.amount, 0, 0, b.used, b.held, b.credit, b.since, moment, 'expire',
          'expire:' || b.version || ':' || h.id, h.id);
    END LOOP;
  END IF;
  IF b.credit > 0 THEN
    FOR g IN DELETE FROM holdfast.quota_grant q WHERE q.quota = b.quota AND q.subject = b.subject AND q.until <= moment
      RETURNING q.* LOOP
      b.credit := b.credit - (g.amount - g.spent);
      b.version := b.version + 1;
      INSERT INTO holdfast.quota_entry (quota, subject, version, amount, delta, forgotten, used, held, credit, since, at, kind, id, entry)
        VALUES (b.quota, b.subject, b.version, g.amount - g.spent, 0, 0, b.used, b.held, b.credit, b.since, moment, 'lapse',
          'lapse:' || b.version || ':' || g.id, g.id);
    END LOOP;
  END IF;
END
$function$`;

/** Takes from the grants of a bucket: by priority, then what runs out first, then by id. Its row is locked. */
const drain = sql`CREATE OR REPLACE FUNCTION holdfast.quota_drain(q text, s text, amount bigint, moment timestamptz, OUT drains jsonb)
LANGUAGE plpgsql AS $function$
DECLARE
  g record;
  part bigint;
BEGIN
  drains := '[]';
  FOR g IN SELECT * FROM holdfast.quota_grant t WHERE t.quota = q AND t.subject = s AND t.until > moment AND t.spent < t.amount
    ORDER BY t.priority, t.until, t.id LOOP
    EXIT WHEN amount = 0;
    part := least(amount, g.amount - g.spent);
    UPDATE holdfast.quota_grant t SET spent = t.spent + part WHERE t.quota = q AND t.subject = s AND t.id = g.id;
    drains := drains || jsonb_build_object('id', g.id, 'amount', part);
    amount := amount - part;
  END LOOP;
END
$function$`;

/**
 * Decides about calls in the order in which they came; those of one group are granted all or none. Buckets by their
 * place in bq, bs; each call has its own place (the same as its bucket's), so that lists can be read side by side.
 * Verdicts: 0 refused, 1 granted, 2 granted before, 3 the id was used for something else.
 */
const decide = sql`CREATE OR REPLACE FUNCTION holdfast.quota_decide(
  rules jsonb, make boolean, look boolean,
  bq text[], bs text[], br int[], bm bigint[],
  ob int[], oq text[], os text[], oi text[], oa bigint[], og int[], ot bigint[], od text[], same int[],
  OUT missing boolean, OUT at float8, OUT verdicts int[], OUT useds bigint[], OUT helds bigint[], OUT credits bigint[],
  OUT maxes bigint[], OUT versions bigint[], OUT ats float8[], OUT retries bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $function$
#variable_conflict use_variable
DECLARE
  nb int := cardinality(bq);
  no int := cardinality(ob);
  moment timestamptz;
  r record;
  b holdfast.quota_bucket;
  windows text[];
  overs bigint[];
  starts timestamptz[];
  used bigint[] := array_fill(0::bigint, ARRAY[nb]);
  held bigint[] := array_fill(0::bigint, ARRAY[nb]);
  credit bigint[] := array_fill(0::bigint, ARRAY[nb]);
  version bigint[] := array_fill(0::bigint, ARRAY[nb]);
  first bigint[];
  since timestamptz[] := array_fill(NULL::timestamptz, ARRAY[nb]);
  max bigint[] := array_fill(NULL::bigint, ARRAY[nb]);
  cap bigint[] := array_fill(NULL::bigint, ARRAY[nb]);
  forgotten bigint[] := array_fill(0::bigint, ARRAY[nb]);
  newest bigint[] := array_fill(0::bigint, ARRAY[nb]);
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
  IF make THEN
    INSERT INTO holdfast.quota_bucket (quota, subject)
      SELECT q, s FROM unnest(bq, bs) u (q, s) ORDER BY q COLLATE "C", s COLLATE "C" ON CONFLICT DO NOTHING;
  END IF;
  FOR r IN SELECT u.n, t.* FROM unnest(bq, bs) WITH ORDINALITY u (q, s, n)
    JOIN holdfast.quota_bucket t ON t.quota = u.q AND t.subject = u.s
    ORDER BY t.quota, t.subject FOR NO KEY UPDATE OF t LOOP
    found := found + 1;
    k := r.n;
    used[k] := r.used;
    held[k] := r.held;
    credit[k] := r.credit;
    version[k] := r.version;
    since[k] := r.since;
    max[k] := coalesce(r.own_limit, (rules->(br[k] - 1)->'plans'->>r.plan)::bigint, bm[k]);
    IF r.parts IS NOT NULL THEN
      parts := coalesce(parts, '{}') || jsonb_build_object(k::text, to_jsonb(r.parts));
    END IF;
  END LOOP;
  IF found < nb THEN
    missing := true;
    RETURN;
  END IF;
  moment := clock_timestamp();
  at := extract(epoch FROM moment) * 1000;

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
  END LOOP;
  FOR k IN 1..nb LOOP
    first[k] := version[k];
    IF windows[br[k]] = 'none' THEN
      NULL;
    ELSIF windows[br[k]] = 'fixed' THEN
      IF since[k] IS NULL OR starts[br[k]] > since[k] THEN
        forgotten[k] := used[k];
        used[k] := 0;
        since[k] := starts[br[k]];
      END IF;
    ELSE
      b := NULL;
      b.quota := bq[k];
      b.subject := bs[k];
      b.used := used[k];
      b.since := since[k];
      b.parts := ARRAY(SELECT p::bigint FROM jsonb_array_elements_text(parts->k::text) WITH ORDINALITY x (p, n) ORDER BY n);
      IF cardinality(b.parts) = 0 THEN b.parts := NULL; END IF;
      b := holdfast.quota_roll(b, rules->(br[k] - 1), max[k], moment);
      forgotten[k] := used[k] - b.used;
      used[k] := b.used;
      since[k] := b.since;
      IF b.parts IS NOT NULL THEN
        parts := coalesce(parts, '{}') || jsonb_build_object(k::text, to_jsonb(b.parts));
      END IF;
    END IF;
    cap[k] := least(9007199254740991, coalesce(max[k], 9007199254740991) + coalesce(overs[br[k]], 9007199254740991));
  END LOOP;

  SELECT used, held, credit, version, forgotten, newest INTO saved;
  LOOP
    BEGIN
      used := saved.used;
      held := saved.held;
      credit := saved.credit;
      version := saved.version;
      forgotten := saved.forgotten;
      newest := saved.newest;
      verdicts := array_fill(0, ARRAY[no]);
      useds := array_fill(0::bigint, ARRAY[no]);
      helds := useds;
      credits := useds;
      maxes := array_fill(NULL::bigint, ARRAY[no]);
      versions := useds;
      ats := array_fill(at, ARRAY[no]);
      retries := array_fill(NULL::bigint, ARRAY[no]);
      eversion := array_fill(NULL::bigint, ARRAY[no]);
      edelta := eversion;
      eforgotten := eversion;
      eused := eversion;
      eheld := eversion;
      ecredit := eversion;
      edrains := array_fill(NULL::jsonb, ARRAY[no]);
      esince := array_fill(NULL::timestamptz, ARRAY[no]);
      prior := array_fill(false, ARRAY[no]);
      denied := false;
      IF looked THEN
        pamount := array_fill(NULL::bigint, ARRAY[no]);
        pkind := array_fill(NULL::text, ARRAY[no]);
        FOR r IN SELECT u.n, e.* FROM unnest(oq, os, oi) WITH ORDINALITY u (q, s, i, n)
          JOIN holdfast.quota_entry e ON e.quota = u.q AND e.subject = u.s AND e.id = u.i LOOP
          m := r.n;
          prior[m] := true;
          pamount[m] := r.amount;
          pkind[m] := r.kind;
          useds[m] := r.used;
          helds[m] := r.held;
          credits[m] := r.credit;
          maxes[m] := r.max;
          versions[m] := r.version;
          ats[m] := extract(epoch FROM r.at) * 1000;
        END LOOP;
      END IF;

      i := 1;
      WHILE i <= no LOOP
        j := i;
        WHILE j < no AND og[j + 1] = og[i] LOOP j := j + 1; END LOOP;
        -- Granted before, by another call or by an earlier one of these.
        refused := 0;
        found := 0;
        FOR m IN i..j LOOP
          IF same[m] > 0 AND verdicts[same[m]] IN (1, 2) AND NOT prior[m] THEN
            prior[m] := true;
            IF pamount IS NULL THEN
              pamount := array_fill(NULL::bigint, ARRAY[no]);
              pkind := array_fill(NULL::text, ARRAY[no]);
            END IF;
            pamount[m] := oa[same[m]];
            pkind[m] := CASE WHEN ot[same[m]] IS NULL THEN 'consume' ELSE 'hold' END;
            useds[m] := useds[same[m]];
            helds[m] := helds[same[m]];
            credits[m] := credits[same[m]];
            maxes[m] := maxes[same[m]];
            versions[m] := versions[same[m]];
          END IF;
          IF prior[m] THEN
            found := found + 1;
            verdicts[m] := CASE WHEN pamount[m] = oa[m]
              AND pkind[m] = CASE WHEN ot[m] IS NULL THEN 'consume' ELSE 'hold' END THEN 2 ELSE 3 END;
          END IF;
        END LOOP;
        IF found > 0 THEN
          -- Of a group all were granted together, or it is another group.
          FOR m IN i..j LOOP
            IF found < j - i + 1 AND NOT prior[m] THEN verdicts[m] := 3; END IF;
          END LOOP;
          i := j + 1;
          CONTINUE;
        END IF;
        FOR m IN i..j LOOP
          k := ob[m];
          need := used[k] + held[k] + oa[m] - cap[k];
          IF need > credit[k] AND (held[k] > 0 OR credit[k] > 0) OR need > 0 AND credit[k] > 0 THEN
            -- What is over makes room, or is none.
            b := NULL;
            b.quota := bq[k];
            b.subject := bs[k];
            b.used := used[k];
            b.held := held[k];
            b.credit := credit[k];
            b.version := version[k];
            b.since := since[k];
            b := holdfast.quota_reap(b, moment);
            held[k] := b.held;
            credit[k] := b.credit;
            version[k] := b.version;
            need := used[k] + held[k] + oa[m] - cap[k];
          END IF;
          IF need > credit[k] THEN
            refused := m;
            EXIT;
          END IF;
        END LOOP;
        FOR m IN i..j LOOP
          k := ob[m];
          maxes[m] := max[k];
          IF refused > 0 THEN
            denied := true;
            verdicts[m] := 0;
            useds[m] := used[k];
            helds[m] := held[k];
            credits[m] := credit[k];
            -- Whose refusal it was.
            IF m = refused THEN
              need := used[k] + held[k] + oa[m] - cap[k] - credit[k];
              retries[m] := CASE windows[br[k]]
                WHEN 'refill' THEN CASE WHEN max[k] > 0 AND need <= used[k] THEN
                  ceil(need::numeric * (rules->(br[k] - 1)->>'per')::bigint / max[k])
                  - floor(extract(epoch FROM moment - since[k]) * 1000000) END
                WHEN 'parts' THEN holdfast.quota_room(ARRAY(SELECT p::bigint
                  FROM jsonb_array_elements_text(parts->k::text) WITH ORDINALITY x (p, n) ORDER BY n), newest[k], need)
                  * ((rules->(br[k] - 1)->>'per')::bigint / (rules->(br[k] - 1)->>'parts')::int)
                  - floor(extract(epoch FROM moment - since[k]) * 1000000)
                WHEN 'log' THEN holdfast.quota_leaves(bq[k], bs[k], need, (rules->(br[k] - 1)->>'per')::bigint, moment)
                ELSE -1 END;
              IF retries[m] IS NULL THEN retries[m] := -2; END IF;
            END IF;
            CONTINUE;
          END IF;
          version[k] := version[k] + 1;
          IF ot[m] IS NULL THEN
            base := least(oa[m], greatest(cap[k] - used[k], 0));
            IF base < oa[m] THEN
              edrains[m] := holdfast.quota_drain(bq[k], bs[k], oa[m] - base, moment);
              credit[k] := credit[k] - (oa[m] - base);
            END IF;
          ELSE
            base := 0;
            held[k] := held[k] + oa[m];
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
        END LOOP;
        i := j + 1;
      END LOOP;
      IF denied AND look AND NOT looked THEN
        RAISE unique_violation;
      END IF;

      INSERT INTO holdfast.quota_entry (quota, subject, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, drains, details)
        SELECT n.q, n.s, n.v, n.a, n.d, n.f, n.u, n.h, n.c, n.x, n.w, moment,
          CASE WHEN n.t IS NULL THEN 'consume' ELSE 'hold' END, n.i, n.g, n.e::jsonb
        FROM unnest(oq, os, eversion, oa, edelta, eforgotten, eused, eheld, ecredit, maxes, esince, ot, oi, edrains, od)
          AS n (q, s, v, a, d, f, u, h, c, x, w, t, i, g, e)
        WHERE n.v IS NOT NULL;
      IF holds THEN
        INSERT INTO holdfast.quota_hold (quota, subject, id, amount, until)
          SELECT n.q, n.s, n.i, n.a, moment + n.t * interval '1 millisecond'
          FROM unnest(oq, os, oi, oa, ot, eversion) AS n (q, s, i, a, t, v) WHERE n.v IS NOT NULL AND n.t IS NOT NULL;
      END IF;
      IF parts IS NULL THEN
        UPDATE holdfast.quota_bucket t SET used = n.u, held = n.h, credit = n.c, version = n.v, since = n.w
          FROM unnest(bq, bs, used, held, credit, version, since, first) AS n (q, s, u, h, c, v, w, o)
          WHERE t.quota = n.q AND t.subject = n.s AND n.v > n.o;
      ELSE
        FOR k IN 1..nb LOOP
          CONTINUE WHEN version[k] = first[k];
          b.parts := ARRAY(SELECT p::bigint FROM jsonb_array_elements_text(parts->k::text) WITH ORDINALITY x (p, n) ORDER BY n);
          IF cardinality(b.parts) > 0 THEN b.parts[1] := b.parts[1] + newest[k]; ELSE b.parts := NULL; END IF;
          UPDATE holdfast.quota_bucket t SET used = used[k], held = held[k],
            credit = credit[k], version = version[k], since = since[k], parts = b.parts
            WHERE t.quota = bq[k] AND t.subject = bs[k];
        END LOOP;
      END IF;
      RETURN;
    EXCEPTION WHEN unique_violation THEN
      -- An id that was there before: look for all of them, and decide again.
      IF looked THEN RAISE; END IF;
      looked := true;
    END;
  END LOOP;
END
$function$`;

/** Whether the windows that the caller knows are not those of now. */
const late = sql`CREATE OR REPLACE FUNCTION holdfast.quota_late(rule jsonb, moment timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $function$
  SELECT coalesce(rule->>'window' = 'fixed' AND (moment < to_timestamp((rule->'starts'->>0)::float8 / 1000)
    OR moment >= to_timestamp((rule->'starts'->>-1)::float8 / 1000)), false)
$function$`;

/**
 * What most calls come to: uses of one quota that all fit and have new ids. It takes a tenth of the time; whatever else
 * turns out is left to quota_decide, before anything is written. opens and ends: the window of now, as the caller has it.
 * Plans are kept for any number of values: making one for each call took longer than running it.
 */
const consume = sql`CREATE OR REPLACE FUNCTION holdfast.quota_consume(
  rules jsonb, plain boolean, opens timestamptz, ends timestamptz, over bigint, make boolean, look boolean,
  bq text[], bs text[], br int[], bm bigint[],
  ob int[], oq text[], os text[], oi text[], oa bigint[], og int[], ot bigint[], od text[], same int[],
  OUT missing boolean, OUT at float8, OUT verdicts int[], OUT useds bigint[], OUT helds bigint[], OUT credits bigint[],
  OUT maxes bigint[], OUT versions bigint[], OUT ats float8[], OUT retries bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $function$
#variable_conflict use_variable
DECLARE
  no int := cardinality(ob);
  nb int := cardinality(bq);
  answer record;
  bucket record;
  used bigint[];
  before_ bigint[];
  held bigint[];
  credit bigint[];
  version bigint[];
  max bigint[];
  since timestamptz[];
  moment timestamptz;
BEGIN
  IF plain THEN
    IF make THEN
      INSERT INTO holdfast.quota_bucket (quota, subject)
        SELECT u.q, u.s FROM unnest(bq, bs) u (q, s) ORDER BY u.q COLLATE "C", u.s COLLATE "C" ON CONFLICT DO NOTHING;
    END IF;
    BEGIN
      SELECT count(*) AS n, array_agg(b.used ORDER BY b.n) AS used, array_agg(b.before ORDER BY b.n) AS before,
        array_agg(b.held ORDER BY b.n) AS held, array_agg(b.credit ORDER BY b.n) AS credit,
        array_agg(b.version ORDER BY b.n) AS version, array_agg(b.max ORDER BY b.n) AS max,
        array_agg(coalesce(opens, b.since) ORDER BY b.n) AS since, bool_and(b.since IS NULL OR opens IS NULL OR b.since <= opens) AS forward
      INTO bucket FROM (
        SELECT u.n, t.used, t.held, t.credit, t.version, t.since,
          CASE WHEN opens IS NULL OR t.since = opens THEN t.used ELSE 0 END AS before,
          coalesce(t.own_limit, (rules->0->'plans'->>t.plan)::bigint, u.m) AS max
        FROM unnest(bq, bs, bm) WITH ORDINALITY u (q, s, m, n)
        JOIN holdfast.quota_bucket t ON t.quota = u.q AND t.subject = u.s
        ORDER BY t.quota, t.subject FOR NO KEY UPDATE OF t) b;
      moment := clock_timestamp();
      used := bucket.used;
      before_ := bucket.before;
      held := bucket.held;
      credit := bucket.credit;
      version := bucket.version;
      max := bucket.max;
      since := bucket.since;
      IF bucket.n = nb AND bucket.forward AND (opens IS NULL OR moment >= opens AND moment < ends) THEN
        -- Numbers of the buckets by their place: joining lists of unknown length was quadratic.
        SELECT array_agg(w.total ORDER BY w.n) AS totals, array_agg(w.nth ORDER BY w.n) AS nths,
          bool_and(before_[w.k] + held[w.k] + w.total <= coalesce(max[w.k] + over, 9007199254740991)) AS fits,
          array_agg(before_[w.k] + w.total ORDER BY w.n) AS useds, array_agg(version[w.k] + w.nth ORDER BY w.n) AS versions,
          array_agg(held[w.k] ORDER BY w.n) AS helds, array_agg(credit[w.k] ORDER BY w.n) AS credits,
          array_agg(max[w.k] ORDER BY w.n) AS maxes, array_agg(since[w.k] ORDER BY w.n) AS sinces,
          array_agg(CASE WHEN w.nth = 1 THEN used[w.k] - before_[w.k] ELSE 0 END ORDER BY w.n) AS forgottens
        INTO answer FROM (
          SELECT u.k, u.n, sum(u.a) OVER p AS total, row_number() OVER p AS nth
          FROM unnest(ob, oa) WITH ORDINALITY u (k, a, n) WINDOW p AS (PARTITION BY u.k ORDER BY u.n)) w;
        IF answer.fits THEN
          INSERT INTO holdfast.quota_entry (quota, subject, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, details)
            SELECT x.q, x.s, x.v, x.a, x.a, x.f, x.u, x.h, x.c, x.m, x.w, moment, 'consume', x.i, x.d::jsonb
            FROM unnest(oq, os, answer.versions, oa, answer.forgottens, answer.useds, answer.helds, answer.credits,
              answer.maxes, answer.sinces, oi, od) x (q, s, v, a, f, u, h, c, m, w, i, d);
          UPDATE holdfast.quota_bucket t SET used = x.u, version = x.v, since = x.w
            FROM (SELECT y.k, max(y.u) AS u, max(y.v) AS v FROM unnest(ob, answer.useds, answer.versions) y (k, u, v) GROUP BY y.k) z,
              LATERAL (SELECT bq[z.k] AS q, bs[z.k] AS s, z.u, z.v, since[z.k] AS w) x
            WHERE t.quota = x.q AND t.subject = x.s;
          missing := false;
          at := extract(epoch FROM moment) * 1000;
          verdicts := array_fill(1, ARRAY[no]);
          useds := answer.useds;
          helds := answer.helds;
          credits := answer.credits;
          maxes := answer.maxes;
          versions := answer.versions;
          RETURN;
        END IF;
      END IF;
    EXCEPTION WHEN unique_violation THEN
      -- An id that was there before.
      NULL;
    END;
  END IF;
  SELECT d.* INTO missing, at, verdicts, useds, helds, credits, maxes, versions, ats, retries
    FROM holdfast.quota_decide(rules, make, look, bq, bs, br, bm, ob, oq, os, oi, oa, og, ot, od, same) d;
END
$function$`;

/** The same for a single call: few and plain values, since parsing the many of a batch took longer than what it does. */
const use = sql`CREATE OR REPLACE FUNCTION holdfast.quota_use(
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
  SELECT t.used, t.held, t.credit, t.version, t.since, coalesce(t.own_limit, (rules->0->'plans'->>t.plan)::bigint, own) AS max
    INTO b FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    INSERT INTO holdfast.quota_bucket (quota, subject) VALUES (q, s) ON CONFLICT DO NOTHING;
    SELECT t.used, t.held, t.credit, t.version, t.since, coalesce(t.own_limit, (rules->0->'plans'->>t.plan)::bigint, own) AS max
      INTO b FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
  END IF;
  IF FOUND THEN
    moment := clock_timestamp();
    before := CASE WHEN opens IS NULL OR b.since = opens THEN b.used ELSE 0 END;
    used := before + amount;
    IF (opens IS NULL OR moment >= opens AND moment < ends AND (b.since IS NULL OR b.since <= opens))
      AND used + b.held <= coalesce(b.max + over, 9007199254740991) THEN
      INSERT INTO holdfast.quota_entry (quota, subject, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, details)
        VALUES (q, s, b.version + 1, amount, amount, b.used - before, used, b.held, b.credit, b.max,
          coalesce(opens, b.since), moment, 'consume', op, note::jsonb)
        ON CONFLICT (quota, subject, id) DO NOTHING;
      IF FOUND THEN
        UPDATE holdfast.quota_bucket t SET used = quota_use.used, version = b.version + 1, since = coalesce(opens, b.since)
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
    FROM holdfast.quota_decide(rules, make, look, ARRAY[q], ARRAY[s], ARRAY[1], ARRAY[own], ARRAY[1], ARRAY[q], ARRAY[s],
      ARRAY[op], ARRAY[amount], ARRAY[1], ARRAY[NULL::bigint], ARRAY[note], ARRAY[0]) d;
END
$function$`;

/** So many parts must pass until there is room for what is needed. */
const room = sql`CREATE OR REPLACE FUNCTION holdfast.quota_room(parts bigint[], newest bigint, need bigint) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $function$
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

/** So many microseconds until enough has left an exact sliding window. */
const leaves = sql`CREATE OR REPLACE FUNCTION holdfast.quota_leaves(q text, s text, need bigint, per bigint, moment timestamptz) RETURNS bigint
LANGUAGE sql STABLE AS $function$
  SELECT ceil(extract(epoch FROM e.at - moment) * 1000000)::bigint + per FROM (
    SELECT t.at, sum(t.delta - t.refunded) OVER (ORDER BY t.version) AS gone FROM holdfast.quota_entry t
    WHERE t.quota = q AND t.subject = s AND t.at > moment - per * interval '1 microsecond' AND t.kind IN ('consume', 'settle')
      AND t.version > coalesce((SELECT max(z.version) FROM holdfast.quota_entry z WHERE z.quota = q AND z.subject = s AND z.kind = 'reset'), 0)
  ) e WHERE e.gone >= need ORDER BY e.at LIMIT 1
$function$`;

/**
 * One change of one bucket: 'refund' (of an entry), 'settle' and 'release' (of a hold), 'grant', 'limit', 'plan',
 * 'reset', 'repair'. Verdicts as above, and 4: there is no such entry or hold, 5: more than there is.
 */
const amend = sql`CREATE OR REPLACE FUNCTION holdfast.quota_amend(
  rule jsonb, what text, q text, s text, code_max bigint, op text, of_entry text, n bigint, more jsonb, note text,
  OUT verdict int, OUT at float8, OUT used bigint, OUT held bigint, OUT credit bigint, OUT max bigint, OUT version bigint,
  OUT amount bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  b holdfast.quota_bucket;
  before bigint;
  e holdfast.quota_entry;
  h holdfast.quota_hold;
  g record;
  moment timestamptz;
  delta bigint := 0;
  base bigint;
  part bigint;
  drained bigint;
  back bigint;
  cap bigint;
  drains jsonb;
  place int;
BEGIN
  SELECT t.* INTO b FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    INSERT INTO holdfast.quota_bucket (quota, subject) VALUES (q, s) ON CONFLICT DO NOTHING;
    SELECT t.* INTO b FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
  END IF;
  moment := clock_timestamp();
  at := extract(epoch FROM moment) * 1000;
  amount := n;
  IF holdfast.quota_late(rule, moment) THEN
    verdict := -1;
    RETURN;
  END IF;
  SELECT t.* INTO e FROM holdfast.quota_entry t WHERE t.quota = q AND t.subject = s AND t.id = op;
  IF FOUND THEN
    at := extract(epoch FROM e.at) * 1000;
    used := e.used;
    held := e.held;
    credit := e.credit;
    max := e.max;
    version := e.version;
    amount := e.amount;
    verdict := CASE WHEN e.kind = what AND (n IS NULL OR n = e.amount) AND e.entry IS NOT DISTINCT FROM of_entry THEN 2 ELSE 3 END;
    RETURN;
  END IF;
  max := coalesce(b.own_limit, (rule->'plans'->>b.plan)::bigint, code_max);
  before := b.used;
  b := holdfast.quota_roll(b, rule, max, moment);
  before := before - b.used;
  IF b.held > 0 OR b.credit > 0 THEN
    b := holdfast.quota_reap(b, moment);
  END IF;
  verdict := 1;
  cap := least(9007199254740991, coalesce(max, 9007199254740991) + coalesce((rule->>'over')::bigint, 9007199254740991));

  CASE what
  WHEN 'refund' THEN
    SELECT t.* INTO e FROM holdfast.quota_entry t
      WHERE t.quota = q AND t.subject = s AND t.id = of_entry AND t.kind IN ('consume', 'settle');
    IF NOT FOUND THEN
      verdict := 4;
    ELSE
      amount := coalesce(n, e.amount - e.refunded);
      IF amount + e.refunded > e.amount THEN
        verdict := 5;
        amount := e.amount - e.refunded;
      END IF;
    END IF;
    IF verdict = 1 THEN
    -- What came from grants goes back to them first.
    drained := e.amount - e.delta;
    back := least(amount, greatest(0, drained - e.refunded));
    base := amount - back;
    part := e.refunded;
    FOR g IN SELECT x->>'id' AS id, (x->>'amount')::bigint AS amount
      FROM jsonb_array_elements(coalesce(e.drains, '[]')) WITH ORDINALITY y (x, o) ORDER BY o DESC LOOP
      EXIT WHEN back = 0;
      IF part >= g.amount THEN
        part := part - g.amount;
        CONTINUE;
      END IF;
      drained := least(back, g.amount - part);
      part := 0;
      back := back - drained;
      UPDATE holdfast.quota_grant t SET spent = t.spent - drained WHERE t.quota = q AND t.subject = s AND t.id = g.id;
      -- One that ran out is not there any more.
      IF FOUND THEN b.credit := b.credit + drained; END IF;
    END LOOP;
    -- What was used before this window is forgotten already.
    CASE rule->>'window'
    WHEN 'fixed' THEN IF e.since IS DISTINCT FROM b.since THEN base := 0; END IF;
    WHEN 'log' THEN IF e.at <= moment - (rule->>'per')::bigint * interval '1 microsecond' THEN base := 0; END IF;
    WHEN 'parts' THEN
      place := 1 + round(extract(epoch FROM b.since - e.since) * 1000000 / ((rule->>'per')::bigint / (rule->>'parts')::int));
      IF place > cardinality(b.parts) THEN base := 0;
      ELSE
        base := least(base, b.parts[place]);
        b.parts[place] := b.parts[place] - base;
      END IF;
    ELSE NULL;
    END CASE;
    base := least(base, b.used);
    delta := -base;
    UPDATE holdfast.quota_entry t SET refunded = t.refunded + quota_amend.amount
      WHERE t.quota = q AND t.subject = s AND t.version = e.version;
    END IF;
  WHEN 'settle', 'release' THEN
    SELECT t.* INTO h FROM holdfast.quota_hold t WHERE t.quota = q AND t.subject = s AND t.id = of_entry;
    IF NOT FOUND THEN
      verdict := 4;
    ELSE
      IF what = 'release' THEN
        amount := h.amount;
      ELSE
        IF n > h.amount AND b.used + b.held - h.amount + n - cap > b.credit THEN
          verdict := 0;
        ELSE
          base := least(n, greatest(cap - b.used, 0));
          IF base < n THEN
            -- A grant may have run out since: then it is over the limit, and recorded as what it is.
            part := least(n - base, b.credit);
            drains := holdfast.quota_drain(q, s, part, moment);
            b.credit := b.credit - part;
            base := n - part;
          END IF;
          delta := base;
          IF b.parts IS NOT NULL THEN b.parts[1] := b.parts[1] + base; END IF;
        END IF;
      END IF;
      IF verdict = 1 THEN
        b.held := b.held - h.amount;
        DELETE FROM holdfast.quota_hold t WHERE t.quota = q AND t.subject = s AND t.id = of_entry;
      END IF;
    END IF;
  WHEN 'grant' THEN
    INSERT INTO holdfast.quota_grant (quota, subject, id, amount, priority, until)
      VALUES (q, s, op, n, (more->>'priority')::int,
        coalesce(to_timestamp((more->>'until')::float8 / 1000), 'infinity'));
    b.credit := b.credit + n;
  WHEN 'limit' THEN
    b.own_limit := n;
    amount := coalesce(n, 0);
  WHEN 'plan' THEN
    b.plan := more->>'plan';
    amount := 0;
  WHEN 'reset' THEN
    amount := b.used;
    delta := -b.used;
    b.parts := NULL;
    IF rule->>'window' <> 'fixed' THEN b.since := NULL; END IF;
  WHEN 'repair' THEN
    amount := n;
    delta := n - b.used;
    b.held := coalesce((SELECT sum(t.amount) FROM holdfast.quota_hold t WHERE t.quota = q AND t.subject = s), 0);
    b.credit := coalesce((SELECT sum(t.amount - t.spent) FROM holdfast.quota_grant t WHERE t.quota = q AND t.subject = s), 0);
  END CASE;

  IF verdict = 1 THEN
    IF what IN ('limit', 'plan') THEN
      max := coalesce(b.own_limit, (rule->'plans'->>b.plan)::bigint, code_max);
    END IF;
    b.used := b.used + delta;
    b.version := b.version + 1;
    INSERT INTO holdfast.quota_entry (quota, subject, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, entry, drains, details)
      VALUES (q, s, b.version, amount, delta, before, b.used, b.held, b.credit, max, b.since, moment, what, op, of_entry, drains, note::jsonb);
    UPDATE holdfast.quota_bucket t SET used = b.used, held = b.held, credit = b.credit, version = b.version, since = b.since,
      parts = b.parts, own_limit = b.own_limit, plan = b.plan WHERE t.quota = q AND t.subject = s;
  ELSIF b.version > (SELECT t.version FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s) THEN
    -- Only what had run out.
    UPDATE holdfast.quota_bucket t SET held = b.held, credit = b.credit, version = b.version
      WHERE t.quota = q AND t.subject = s;
  END IF;
  used := b.used;
  held := b.held;
  credit := b.credit;
  version := b.version;
END
$function$`;

/** What a call would find now, without locking anything. */
const peek = sql`CREATE OR REPLACE FUNCTION holdfast.quota_peek(rule jsonb, q text, s text, code_max bigint,
  OUT at float8, OUT used bigint, OUT held bigint, OUT credit bigint, OUT max bigint, OUT version bigint, OUT plan text)
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  b holdfast.quota_bucket;
  moment timestamptz := clock_timestamp();
BEGIN
  SELECT t.* INTO b FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s;
  at := extract(epoch FROM moment) * 1000;
  IF holdfast.quota_late(rule, moment) THEN
    version := -1;
    RETURN;
  END IF;
  b.quota := q;
  b.subject := s;
  b.used := coalesce(b.used, 0);
  max := coalesce(b.own_limit, (rule->'plans'->>b.plan)::bigint, code_max);
  b := holdfast.quota_roll(b, rule, max, moment);
  used := b.used;
  held := coalesce((SELECT sum(t.amount) FROM holdfast.quota_hold t WHERE t.quota = q AND t.subject = s AND t.until > moment), 0);
  credit := coalesce((SELECT sum(t.amount - t.spent) FROM holdfast.quota_grant t WHERE t.quota = q AND t.subject = s AND t.until > moment), 0);
  version := coalesce(b.version, 0);
  plan := b.plan;
END
$function$`;

export const quotaTables: readonly Statement[] = [
  ...tables,
  roll,
  reap,
  drain,
  late,
  room,
  leaves,
  decide,
  consume,
  use,
  amend,
  peek,
];
