-- holdfast 1: keys
CREATE SCHEMA IF NOT EXISTS holdfast;
CREATE TABLE IF NOT EXISTS holdfast.migration (
  id integer PRIMARY KEY,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
);
CREATE OR REPLACE FUNCTION holdfast.key(VARIADIC parts text[]) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $function$
BEGIN
  IF coalesce(cardinality(parts), 0) = 0 OR array_position(parts, NULL) IS NOT NULL OR array_position(parts, '') IS NOT NULL THEN
    RAISE EXCEPTION 'holdfast.key: a part is missing or empty' USING ERRCODE = 'null_value_not_allowed',
      HINT = 'A missing id would lock everybody out, or lock the wrong thing.';
  END IF;
  RETURN (SELECT ('x' || encode(substring(sha256(convert_to(
    string_agg(octet_length(convert_to(part, 'UTF8'))::text || ':' || part, '' ORDER BY position), 'UTF8')) FROM 1 FOR 8), 'hex'))::bit(64)::bigint
    FROM unnest(parts) WITH ORDINALITY AS p (part, position));
END
$function$;
INSERT INTO holdfast.migration (id, name) VALUES (1, 'keys') ON CONFLICT (id) DO NOTHING;

-- holdfast 2: lock rows
CREATE TABLE IF NOT EXISTS holdfast.lock (
  id text PRIMARY KEY,
  name text NOT NULL,
  turn bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
INSERT INTO holdfast.migration (id, name) VALUES (2, 'lock rows') ON CONFLICT (id) DO NOTHING;

-- holdfast 3: leases
CREATE SEQUENCE IF NOT EXISTS holdfast.fence;
CREATE TABLE IF NOT EXISTS holdfast.origin (id uuid PRIMARY KEY);
INSERT INTO holdfast.origin (id) SELECT gen_random_uuid() WHERE NOT EXISTS (SELECT FROM holdfast.origin);
CREATE OR REPLACE FUNCTION holdfast.lease_origin() RETURNS text
LANGUAGE sql STABLE
AS $function$
  SELECT coalesce(min(o.id::text), '') || '/' || (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
  FROM holdfast.origin o
$function$;
CREATE TABLE IF NOT EXISTS holdfast.resource (
  id text PRIMARY KEY,
  name text NOT NULL,
  given bigint NOT NULL DEFAULT 0,
  seen bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 70);
CREATE TABLE IF NOT EXISTS holdfast.lease (
  resource text NOT NULL,
  fence bigint NOT NULL,
  token text NOT NULL,
  name text NOT NULL,
  holder text NOT NULL,
  mode text NOT NULL,
  weight integer NOT NULL,
  waiting boolean NOT NULL,
  since timestamptz NOT NULL,
  until timestamptz NOT NULL,
  PRIMARY KEY (resource, fence)
) WITH (fillfactor = 70);
CREATE OR REPLACE FUNCTION holdfast.take_lease(
  p_resource text, p_name text, p_mode text, p_token text, p_holder text, p_weight integer, p_capacity integer,
  p_ttl double precision, p_line double precision, p_patience integer,
  OUT o_fence bigint, OUT o_since timestamptz, OUT o_until timestamptz, OUT o_free double precision, OUT o_line boolean)
LANGUAGE plpgsql VOLATILE
AS $function$
DECLARE
  locked boolean := false;
  clock timestamptz;
  gone bigint[];
  mine holdfast.lease%ROWTYPE;
  taken bigint;
  first timestamptz;
  unequal boolean;
BEGIN
  o_line := false;
  LOOP
    IF locked THEN
      -- An expired lease that a fenced transaction has locked is still held: it is skipped here, and counted below.
      gone := ARRAY(SELECT l.fence FROM holdfast.lease l
        WHERE l.resource = p_resource AND l.until <= clock_timestamp() AND l.token <> p_token
        FOR UPDATE SKIP LOCKED);
      DELETE FROM holdfast.lease l WHERE l.resource = p_resource AND l.fence = ANY (gone);
    END IF;
    SELECT * INTO mine FROM holdfast.lease l WHERE l.resource = p_resource AND l.token = p_token;
    clock := clock_timestamp();
    IF locked AND NOT mine.waiting THEN
      -- Granted before, and the answer was lost.
      UPDATE holdfast.lease l SET until = clock_timestamp() + p_ttl * interval '1 millisecond'
        WHERE l.resource = p_resource AND l.fence = mine.fence RETURNING l.fence, l.since, l.until INTO o_fence, o_since, o_until;
      RETURN;
    END IF;
    SELECT coalesce(sum(l.weight), 0), min(l.until), coalesce(bool_or(l.weight <> p_weight), false)
      INTO taken, first, unequal
      FROM holdfast.lease l
      WHERE l.resource = p_resource AND l.token <> p_token AND (locked OR l.until > clock)
        AND (NOT l.waiting OR mine.fence IS NULL OR l.fence < mine.fence);
    o_free := greatest(0, extract(epoch FROM first - clock) * 1000);
    o_line := p_line > 0 AND (unequal OR mine.fence IS NOT NULL) AND taken + p_weight > p_capacity;
    EXIT WHEN locked OR (taken + p_weight > p_capacity AND mine.waiting IS NOT FALSE
      AND (NOT o_line OR mine.until > clock + p_line / 2 * interval '1 millisecond'));
    PERFORM CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END,
    set_config('idle_in_transaction_session_timeout', '5s', true), set_config('lock_timeout', p_patience::text, true);
    LOOP
      PERFORM FROM holdfast.resource r WHERE r.id = p_resource FOR NO KEY UPDATE;
      EXIT WHEN FOUND;
      INSERT INTO holdfast.resource (id, name) VALUES (p_resource, p_name) ON CONFLICT DO NOTHING;
    END LOOP;
    locked := true;
  END LOOP;
  IF taken + p_weight > p_capacity THEN
    IF o_line AND mine.fence IS NULL THEN
      INSERT INTO holdfast.lease (resource, fence, token, name, holder, mode, weight, waiting, since, until)
        VALUES (p_resource, nextval('holdfast.fence'), p_token, p_name, p_holder, p_mode, p_weight, true,
          clock_timestamp(), clock_timestamp() + p_line * interval '1 millisecond');
    ELSIF locked AND o_line THEN
      UPDATE holdfast.lease l SET until = clock_timestamp() + p_line * interval '1 millisecond'
        WHERE l.resource = p_resource AND l.fence = mine.fence;
    END IF;
    RETURN;
  END IF;
  -- A place in line has a number of its own, but a fence is given with the grant: they grow in the order of grants.
  DELETE FROM holdfast.lease l WHERE l.resource = p_resource AND l.fence = mine.fence;
  UPDATE holdfast.resource r SET given = nextval('holdfast.fence') WHERE r.id = p_resource RETURNING r.given INTO o_fence;
  o_since := clock_timestamp();
  o_until := o_since + p_ttl * interval '1 millisecond';
  INSERT INTO holdfast.lease (resource, fence, token, name, holder, mode, weight, waiting, since, until)
    VALUES (p_resource, o_fence, p_token, p_name, p_holder, p_mode, p_weight, false, o_since, o_until);
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.release_lease(p_resource text, p_token text, p_least double precision)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $function$
DECLARE
  gone bigint[];
  given boolean;
BEGIN
  PERFORM CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END,
    set_config('idle_in_transaction_session_timeout', '5s', true);
  UPDATE holdfast.lease l SET token = '', until = l.since + p_least * interval '1 millisecond'
    WHERE l.resource = p_resource AND l.token = p_token AND NOT l.waiting
      AND l.since + p_least * interval '1 millisecond' > clock_timestamp();
  given := FOUND;
  IF NOT given THEN
    gone := ARRAY(SELECT l.fence FROM holdfast.lease l
      WHERE l.resource = p_resource AND l.token = p_token FOR UPDATE SKIP LOCKED);
    DELETE FROM holdfast.lease l WHERE l.resource = p_resource AND l.fence = ANY (gone);
    given := FOUND;
  END IF;
  IF NOT given THEN
    UPDATE holdfast.lease l SET token = '', until = least(l.until, clock_timestamp())
      WHERE l.resource = p_resource AND l.token = p_token;
    given := FOUND;
  END IF;
  IF given THEN
    PERFORM pg_notify('holdfast_lease', p_resource);
  END IF;
  RETURN given;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.check_fence(
  p_resource text, p_name text, p_fence bigint, p_token text, p_origin text, p_exclusive boolean,
  OUT o_newest bigint, OUT o_foreign boolean)
LANGUAGE plpgsql VOLATILE
AS $function$
BEGIN
  o_foreign := false;
  PERFORM FROM holdfast.lease l
    WHERE l.resource = p_resource AND l.fence = p_fence AND l.token = p_token AND NOT l.waiting
    FOR KEY SHARE;
  IF FOUND THEN
    RETURN;
  END IF;
  IF p_origin = holdfast.lease_origin() THEN
    o_newest := greatest(p_fence, (SELECT r.given FROM holdfast.resource r WHERE r.id = p_resource));
    RETURN;
  END IF;
  o_foreign := true;
  IF NOT p_exclusive THEN
    RETURN;
  END IF;
  INSERT INTO holdfast.resource AS r (id, name, seen) VALUES (p_resource, p_name, p_fence)
    ON CONFLICT (id) DO UPDATE SET seen = excluded.seen WHERE r.seen <= excluded.seen;
  IF NOT FOUND THEN
    o_newest := (SELECT r.seen FROM holdfast.resource r WHERE r.id = p_resource);
  END IF;
END
$function$;
INSERT INTO holdfast.migration (id, name) VALUES (3, 'leases') ON CONFLICT (id) DO NOTHING;

-- holdfast 4: once
CREATE TABLE IF NOT EXISTS holdfast.once (
  id text PRIMARY KEY,
  fingerprint text NOT NULL,
  result text NOT NULL,
  at timestamptz NOT NULL,
  until timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS once_until ON holdfast.once (until);
INSERT INTO holdfast.migration (id, name) VALUES (4, 'once') ON CONFLICT (id) DO NOTHING;

-- holdfast 5: quota
CREATE TABLE IF NOT EXISTS holdfast.quota_bucket (
  id bigint GENERATED ALWAYS AS IDENTITY,
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  used bigint NOT NULL DEFAULT 0 CHECK (used >= 0),
  held bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
  credit bigint NOT NULL DEFAULT 0 CHECK (credit >= 0),
  version bigint NOT NULL DEFAULT 0,
  -- The version that began anew: what was used before it is not to be given back.
  reset bigint NOT NULL DEFAULT 0,
  since timestamptz,
  parts bigint[],
  own_limit bigint,
  plan text,
  PRIMARY KEY (quota, subject)
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS holdfast.quota_line (
  bucket bigint NOT NULL,
  version bigint NOT NULL,
  amount bigint NOT NULL,
  used bigint NOT NULL,
  at timestamptz NOT NULL,
  max bigint,
  since timestamptz,
  delta bigint,
  forgotten bigint,
  held bigint,
  credit bigint,
  refunded bigint,
  first bigint,
  kind text NOT NULL,
  id text COLLATE "C" NOT NULL,
  entry text COLLATE "C",
  drains jsonb,
  details jsonb,
  PRIMARY KEY (bucket, version),
  UNIQUE (bucket, id)
);
CREATE OR REPLACE VIEW holdfast.quota_entry AS
  SELECT b.quota, b.subject, l.version, l.kind, l.id, l.entry, l.amount, coalesce(l.delta, l.amount) AS delta,
    coalesce(l.forgotten, 0) AS forgotten, coalesce(l.refunded, 0) AS refunded, l.used, coalesce(l.held, 0) AS held,
    coalesce(l.credit, 0) AS credit, l.max, l.since, l.at, coalesce(l.first, l.version) AS first, l.drains, l.details
  FROM holdfast.quota_line l JOIN holdfast.quota_bucket b ON b.id = l.bucket;
CREATE TABLE IF NOT EXISTS holdfast.quota_hold (
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  id text COLLATE "C" NOT NULL,
  amount bigint NOT NULL,
  until timestamptz NOT NULL,
  PRIMARY KEY (quota, subject, id)
);
CREATE TABLE IF NOT EXISTS holdfast.quota_grant (
  quota text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  id text COLLATE "C" NOT NULL,
  amount bigint NOT NULL,
  spent bigint NOT NULL DEFAULT 0 CHECK (spent >= 0 AND spent <= amount),
  priority integer NOT NULL,
  until timestamptz NOT NULL DEFAULT 'infinity',
  PRIMARY KEY (quota, subject, id)
);
CREATE OR REPLACE FUNCTION holdfast.quota_roll(INOUT b holdfast.quota_bucket, rule jsonb, max bigint, moment timestamptz)
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
    -- Of what was given back, credits came first.
    FOR e IN SELECT l.at, coalesce(l.delta, l.amount) AS delta,
      greatest(0, coalesce(l.refunded, 0) - (l.amount - coalesce(l.delta, l.amount))) AS refunded, l.kind
      FROM holdfast.quota_line l WHERE l.bucket = b.id ORDER BY l.version DESC LOOP
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_reap(INOUT b holdfast.quota_bucket, moment timestamptz, forgotten bigint)
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
      INSERT INTO holdfast.quota_line (bucket, version, amount, delta, forgotten, used, held, credit, since, at, kind, id, entry)
        VALUES (b.id, b.version, h.amount, 0, nullif(forgotten, 0), b.used, b.held, b.credit, b.since, moment, 'expire',
          'expire:' || b.version || ':' || h.id, h.id);
      forgotten := 0;
    END LOOP;
  END IF;
  IF b.credit > 0 THEN
    FOR g IN DELETE FROM holdfast.quota_grant q WHERE q.quota = b.quota AND q.subject = b.subject AND q.until <= moment
      RETURNING q.* LOOP
      b.credit := b.credit - (g.amount - g.spent);
      b.version := b.version + 1;
      INSERT INTO holdfast.quota_line (bucket, version, amount, delta, forgotten, used, held, credit, since, at, kind, id, entry)
        VALUES (b.id, b.version, g.amount - g.spent, 0, nullif(forgotten, 0), b.used, b.held, b.credit, b.since, moment, 'lapse',
          'lapse:' || b.version || ':' || g.id, g.id);
      forgotten := 0;
    END LOOP;
  END IF;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_drain(q text, s text, amount bigint, moment timestamptz, OUT drains jsonb)
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_late(rule jsonb, moment timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $function$
  SELECT coalesce(rule->>'window' = 'fixed' AND (moment < to_timestamp((rule->'starts'->>0)::float8 / 1000)
    OR moment >= to_timestamp((rule->'starts'->>-1)::float8 / 1000)), false)
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_room(parts bigint[], newest bigint, need bigint) RETURNS bigint
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_leaves(b bigint, reset bigint, need bigint, per bigint, moment timestamptz) RETURNS bigint
LANGUAGE sql STABLE AS $function$
  SELECT ceil(extract(epoch FROM e.at - moment) * 1000000)::bigint + per FROM (
    SELECT t.at, sum(coalesce(t.delta, t.amount)
      - greatest(0, coalesce(t.refunded, 0) - (t.amount - coalesce(t.delta, t.amount)))) OVER (ORDER BY t.version) AS gone
    FROM holdfast.quota_line t
    WHERE t.bucket = b AND t.at > moment - per * interval '1 microsecond' AND t.kind IN ('consume', 'settle')
      AND t.version > reset
  ) e WHERE e.gone >= need ORDER BY e.at LIMIT 1
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_decide(
  rules jsonb, make boolean, look boolean, bq text[], bs text[], br int[], bm bigint[],
  ob int[], oi text[], oa bigint[], og int[], ot bigint[], od text[], same int[], OUT missing boolean, OUT at float8, OUT verdicts int[], OUT useds bigint[], OUT helds bigint[],
  OUT credits bigint[], OUT maxes bigint[], OUT versions bigint[], OUT ats float8[], OUT retries bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off AS $function$
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
  ids bigint[] := array_fill(0::bigint, ARRAY[nb]);
  resets bigint[] := array_fill(0::bigint, ARRAY[nb]);
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
  IF nb > 1 AND og[1] <> og[no] THEN
    PERFORM set_config('lock_timeout', '200ms', true);
  END IF;
  IF make THEN
    INSERT INTO holdfast.quota_bucket (quota, subject)
      SELECT q, s FROM unnest(bq, bs) u (q, s) ORDER BY q COLLATE "C", s COLLATE "C" ON CONFLICT DO NOTHING;
  END IF;
  FOR r IN SELECT u.n, t.* FROM unnest(bq, bs) WITH ORDINALITY u (q, s, n)
    JOIN holdfast.quota_bucket t ON t.quota = u.q AND t.subject = u.s
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
      b.id := ids[k];
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
        FOR r IN SELECT u.n, e.* FROM unnest(ob, oi) WITH ORDINALITY u (k, i, n)
          JOIN holdfast.quota_line e ON e.bucket = ids[u.k] AND e.id = u.i LOOP
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
            b.id := ids[k];
            b.quota := bq[k];
            b.subject := bs[k];
            b.used := used[k];
            b.held := held[k];
            b.credit := credit[k];
            b.version := version[k];
            b.since := since[k];
            b := holdfast.quota_reap(b, moment, forgotten[k]);
            IF b.version > version[k] THEN forgotten[k] := 0; END IF;
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
                WHEN 'log' THEN holdfast.quota_leaves(ids[k], resets[k], need, (rules->(br[k] - 1)->>'per')::bigint, moment)
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

      INSERT INTO holdfast.quota_line (bucket, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, drains, details)
        SELECT ids[n.k], n.v, n.a, nullif(n.d, n.a), nullif(n.f, 0), n.u, nullif(n.h, 0), nullif(n.c, 0), n.x, n.w, moment,
          CASE WHEN n.t IS NULL THEN 'consume' ELSE 'hold' END, n.i, n.g, n.e::jsonb
        FROM unnest(ob, eversion, oa, edelta, eforgotten, eused, eheld, ecredit, maxes, esince, ot, oi, edrains, od)
          AS n (k, v, a, d, f, u, h, c, x, w, t, i, g, e)
        WHERE n.v IS NOT NULL;
      IF holds THEN
        INSERT INTO holdfast.quota_hold (quota, subject, id, amount, until)
          SELECT bq[n.k], bs[n.k], n.i, n.a, moment + n.t * interval '1 millisecond'
          FROM unnest(ob, oi, oa, ot, eversion) AS n (k, i, a, t, v) WHERE n.v IS NOT NULL AND n.t IS NOT NULL;
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_batch(
  rules jsonb, opens timestamptz, ends timestamptz, over bigint, make boolean, look boolean,
  q text, bs text[], bm bigint[], bt bigint[], bn bigint[],
  ob int[], oi text[], oa bigint[], op bigint[], nth bigint[], od text[], OUT fast boolean, OUT missing boolean, OUT at float8, OUT verdicts int[], OUT useds bigint[], OUT helds bigint[],
  OUT credits bigint[], OUT maxes bigint[], OUT versions bigint[], OUT ats float8[], OUT retries bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off AS $function$
#variable_conflict use_variable
DECLARE
  no int := cardinality(ob);
  nb int := cardinality(bs);
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
  IF nb > 1 THEN
    PERFORM set_config('lock_timeout', '200ms', true);
  END IF;
  IF make THEN
    INSERT INTO holdfast.quota_bucket (quota, subject)
      SELECT q, u FROM unnest(bs) u ORDER BY u COLLATE "C" ON CONFLICT DO NOTHING;
  END IF;
  BEGIN
    SELECT count(*), array_agg(b.id ORDER BY b.n), array_agg(b.place ORDER BY b.n), array_agg(b.before ORDER BY b.n),
      array_agg(nullif(b.used - b.before, 0) ORDER BY b.n), array_agg(b.before + b.a ORDER BY b.n),
      array_agg(b.held ORDER BY b.n), array_agg(b.credit ORDER BY b.n), array_agg(b.version ORDER BY b.n),
      array_agg(b.version + b.c ORDER BY b.n), array_agg(b.max ORDER BY b.n),
      array_agg(coalesce(opens, b.since) ORDER BY b.n), bool_and(b.since IS NULL OR opens IS NULL OR b.since <= opens),
      bool_and(b.before + b.held + b.a <= coalesce(b.max + over, 9007199254740991))
    INTO found, ids, places, useds, rolled, after, helds, credits, versions, next, maxes, since, forward, fits FROM (
      SELECT u.n, u.a, u.c, t.id, t.ctid AS place, t.used, t.held, t.credit, t.version, t.since,
        CASE WHEN opens IS NULL OR t.since = opens THEN t.used ELSE 0 END AS before,
        coalesce(t.own_limit, (rules->0->'plans'->>t.plan)::bigint, u.m) AS max
      FROM (SELECT * FROM unnest(bs, bm, bt, bn) WITH ORDINALITY l (s, m, a, c, n) ORDER BY l.s COLLATE "C") u,
      -- Apart, so that it is looked up by both columns: as a join, one plan read the whole quota for each.
      LATERAL (SELECT x.ctid, x.* FROM holdfast.quota_bucket x WHERE x.quota = q AND x.subject = u.s FOR NO KEY UPDATE) t) b;
    moment := clock_timestamp();
    IF found = nb AND fits AND forward AND (opens IS NULL OR moment >= opens AND moment < ends) THEN
      INSERT INTO holdfast.quota_line (bucket, version, amount, used, at, max, since, forgotten, held, credit, kind, id, details)
        SELECT ids[x.k], versions[x.k] + x.n, x.a, useds[x.k] + x.p, moment, maxes[x.k], since[x.k],
          CASE WHEN x.n = 1 THEN rolled[x.k] END, nullif(helds[x.k], 0), nullif(credits[x.k], 0), 'consume', x.i, x.d::jsonb
        FROM unnest(ob, oa, op, nth, oi, od) x (k, a, p, n, i, d);
      -- By their place, which nobody changes while they are locked: looking for them again took a third of the time.
      UPDATE holdfast.quota_bucket t SET used = x.u, version = x.v, since = x.w
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
    FROM holdfast.quota_decide(rules, make, look, array_fill(q, ARRAY[nb]), bs, array_fill(1, ARRAY[nb]), bm, ob, oi, oa,
      ARRAY(SELECT generate_series(1, no)), array_fill(NULL::bigint, ARRAY[no]), coalesce(od, array_fill(NULL::text, ARRAY[no])),
      array_fill(0, ARRAY[no])) d;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_use(
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
  SELECT t.id, t.used, t.held, t.credit, t.version, t.since, coalesce(t.own_limit, (rules->0->'plans'->>t.plan)::bigint, own) AS max
    INTO b FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    INSERT INTO holdfast.quota_bucket (quota, subject) VALUES (q, s) ON CONFLICT DO NOTHING;
    SELECT t.id, t.used, t.held, t.credit, t.version, t.since, coalesce(t.own_limit, (rules->0->'plans'->>t.plan)::bigint, own) AS max
      INTO b FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s FOR NO KEY UPDATE;
  END IF;
  IF FOUND THEN
    moment := clock_timestamp();
    before := CASE WHEN opens IS NULL OR b.since = opens THEN b.used ELSE 0 END;
    used := before + amount;
    IF (opens IS NULL OR moment >= opens AND moment < ends AND (b.since IS NULL OR b.since <= opens))
      AND used + b.held <= coalesce(b.max + over, 9007199254740991) THEN
      INSERT INTO holdfast.quota_line (bucket, version, amount, used, at, max, since, forgotten, held, credit, kind, id, details)
        VALUES (b.id, b.version + 1, amount, used, moment, b.max, coalesce(opens, b.since), nullif(b.used - before, 0),
          nullif(b.held, 0), nullif(b.credit, 0), 'consume', op, note::jsonb)
        ON CONFLICT (bucket, id) DO NOTHING;
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
    FROM holdfast.quota_decide(rules, make, look, ARRAY[q], ARRAY[s], ARRAY[1], ARRAY[own], ARRAY[1],
      ARRAY[op], ARRAY[amount], ARRAY[1], ARRAY[NULL::bigint], ARRAY[note], ARRAY[0]) d;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_amend(
  rule jsonb, what text, q text, s text, code_max bigint, op text, of_entry text, n bigint, more jsonb, note text,
  OUT verdict int, OUT at float8, OUT used bigint, OUT held bigint, OUT credit bigint, OUT max bigint, OUT version bigint,
  OUT amount bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  b holdfast.quota_bucket;
  before bigint;
  e holdfast.quota_line;
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
  SELECT t.* INTO e FROM holdfast.quota_line t WHERE t.bucket = b.id AND t.id = op;
  IF FOUND THEN
    at := extract(epoch FROM e.at) * 1000;
    used := e.used;
    held := coalesce(e.held, 0);
    credit := coalesce(e.credit, 0);
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
    version := b.version;
    b := holdfast.quota_reap(b, moment, before);
    IF b.version > version THEN before := 0; END IF;
  END IF;
  verdict := 1;
  cap := least(9007199254740991, coalesce(max, 9007199254740991) + coalesce((rule->>'over')::bigint, 9007199254740991));

  CASE what
  WHEN 'refund' THEN
    SELECT t.* INTO e FROM holdfast.quota_line t
      WHERE t.bucket = b.id AND t.id = of_entry AND t.kind IN ('consume', 'settle');
    IF NOT FOUND THEN
      verdict := 4;
    ELSE
      e.delta := coalesce(e.delta, e.amount);
      e.refunded := coalesce(e.refunded, 0);
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
    IF e.version < b.reset THEN base := 0; END IF;
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
    UPDATE holdfast.quota_line t SET refunded = coalesce(t.refunded, 0) + quota_amend.amount
      WHERE t.bucket = b.id AND t.version = e.version;
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
    b.reset := b.version + 1;
    b.parts := NULL;
    IF rule->>'window' <> 'fixed' THEN b.since := NULL; END IF;
  WHEN 'repair' THEN
    amount := n;
    -- From what the ledger says, not from what was found wrong.
    before := coalesce((SELECT t.used FROM holdfast.quota_line t WHERE t.bucket = b.id AND t.version <= b.version
      ORDER BY t.version DESC LIMIT 1), 0);
    b.used := 0;
    delta := n;
    b.held := coalesce((SELECT sum(t.amount) FROM holdfast.quota_hold t WHERE t.quota = q AND t.subject = s), 0);
    b.credit := coalesce((SELECT sum(t.amount - t.spent) FROM holdfast.quota_grant t WHERE t.quota = q AND t.subject = s), 0);
  END CASE;

  IF verdict = 1 THEN
    IF what IN ('limit', 'plan') THEN
      max := coalesce(b.own_limit, (rule->'plans'->>b.plan)::bigint, code_max);
    END IF;
    b.used := b.used + delta;
    b.version := b.version + 1;
    INSERT INTO holdfast.quota_line (bucket, version, amount, delta, forgotten, used, held, credit, max, since, at, kind, id, entry, drains, details)
      VALUES (b.id, b.version, amount, delta, before, b.used, b.held, b.credit, max, b.since, moment, what, op, of_entry, drains, note::jsonb);
    UPDATE holdfast.quota_bucket t SET used = b.used, held = b.held, credit = b.credit, version = b.version, since = b.since,
      parts = b.parts, own_limit = b.own_limit, plan = b.plan, reset = b.reset WHERE t.quota = q AND t.subject = s;
  ELSIF b.version > (SELECT t.version FROM holdfast.quota_bucket t WHERE t.quota = q AND t.subject = s) THEN
    -- Only what had run out.
    UPDATE holdfast.quota_bucket t SET used = b.used, held = b.held, credit = b.credit, version = b.version,
      since = b.since, parts = b.parts WHERE t.quota = q AND t.subject = s;
  END IF;
  used := b.used;
  held := b.held;
  credit := b.credit;
  version := b.version;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_peek(rule jsonb, q text, s text, code_max bigint,
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.quota_roll_up(q text, onward text, before timestamptz, most int,
  OUT gone bigint, OUT next text, OUT broken text[])
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  b record;
  top bigint;
  newest bigint;
  buckets int := 0;
  locked boolean := false;
BEGIN
  gone := 0;
  broken := '{}';
  FOR b IN SELECT t.id, t.subject FROM holdfast.quota_bucket t
    WHERE t.quota = q AND (onward IS NULL OR t.subject >= onward COLLATE "C") ORDER BY t.subject LOOP
    IF gone >= most OR buckets = 1000 THEN
      next := b.subject;
      RETURN;
    END IF;
    buckets := buckets + 1;
    CONTINUE WHEN NOT EXISTS (SELECT FROM (SELECT l.at, l.kind FROM holdfast.quota_line l WHERE l.bucket = b.id ORDER BY l.version LIMIT 2) o
      WHERE o.kind <> 'rollup' AND o.at < before);
    IF locked THEN
      SELECT t.version INTO newest FROM holdfast.quota_bucket t WHERE t.id = b.id AND t.quota = q AND t.subject = b.subject FOR NO KEY UPDATE SKIP LOCKED;
      IF NOT FOUND THEN
        next := b.subject;
        RETURN;
      END IF;
    ELSE
      SELECT t.version INTO newest FROM holdfast.quota_bucket t WHERE t.id = b.id AND t.quota = q AND t.subject = b.subject FOR NO KEY UPDATE;
      locked := true;
    END IF;
    SELECT coalesce(min(o.version) FILTER (WHERE o.at >= before OR o.version >= newest) - 1, max(o.version)) INTO top FROM (
      SELECT l.version, l.at FROM holdfast.quota_line l WHERE l.bucket = b.id ORDER BY l.version LIMIT most + 1) o;
    CONTINUE WHEN top IS NULL;
    IF NOT (SELECT coalesce(bool_and(o.first = o.version_before + 1 AND o.used = o.used_before - o.forgotten + o.delta), true) FROM (
      SELECT coalesce(l.first, l.version) AS first, coalesce(lag(l.version) OVER w, 0) AS version_before, l.used,
        coalesce(lag(l.used) OVER w, 0) AS used_before, coalesce(l.forgotten, 0) AS forgotten, coalesce(l.delta, l.amount) AS delta
      FROM holdfast.quota_line l WHERE l.bucket = b.id AND l.version <= top WINDOW w AS (ORDER BY l.version)) o) THEN
      broken := broken || b.subject;
      CONTINUE;
    END IF;
    WITH lines AS (DELETE FROM holdfast.quota_line l WHERE l.bucket = b.id AND l.version <= top RETURNING l.*),
    kinds AS (SELECT k.kind, sum(k.lines) AS lines, sum(k.amount) AS amount FROM (
        SELECT l.kind, 1::numeric AS lines, l.amount::numeric FROM lines l WHERE l.kind <> 'rollup'
        UNION ALL SELECT x.key, (x.value->>'lines')::numeric, (x.value->>'amount')::numeric
        FROM lines l, jsonb_each(l.details->'kinds') x WHERE l.kind = 'rollup') k GROUP BY k.kind),
    made AS (INSERT INTO holdfast.quota_line (bucket, version, amount, used, at, max, since, delta, forgotten, held, credit, first, kind, id, details)
      SELECT b.id, top, s.amount, l.used, l.at, l.max, l.since, s.delta, s.forgotten, l.held, l.credit, s.first, 'rollup', 'rollup:' || top,
        jsonb_build_object('kinds', (SELECT jsonb_object_agg(k.kind, jsonb_build_object('lines', k.lines, 'amount', k.amount)) FROM kinds k))
      FROM lines l, (SELECT sum(l.amount) FILTER (WHERE l.kind IN ('consume', 'settle', 'rollup')) AS amount, sum(coalesce(l.delta, l.amount)) AS delta,
          sum(coalesce(l.forgotten, 0)) AS forgotten, min(coalesce(l.first, l.version)) AS first FROM lines l) s
      WHERE l.version = top)
    SELECT gone + count(*) FILTER (WHERE l.kind <> 'rollup') INTO gone FROM lines l;
    IF EXISTS (SELECT FROM (SELECT l.at, l.version FROM holdfast.quota_line l WHERE l.bucket = b.id ORDER BY l.version OFFSET 1 LIMIT 1) o
      WHERE o.at < before AND o.version < newest) THEN
      next := b.subject;
      RETURN;
    END IF;
  END LOOP;
END
$function$;
INSERT INTO holdfast.migration (id, name) VALUES (5, 'quota') ON CONFLICT (id) DO NOTHING;

-- holdfast 6: stock
CREATE TABLE IF NOT EXISTS holdfast.stock_level (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  book text COLLATE "C" NOT NULL,
  sku text COLLATE "C" NOT NULL,
  location text COLLATE "C" NOT NULL,
  on_hand bigint NOT NULL DEFAULT 0 CONSTRAINT stock_level_range CHECK (abs(on_hand) <= 9007199254740991),
  reserved bigint NOT NULL DEFAULT 0 CHECK (reserved >= 0),
  min_level bigint NOT NULL DEFAULT 0,
  version bigint NOT NULL DEFAULT 0,
  elsewhere boolean NOT NULL DEFAULT false,
  UNIQUE (book, sku, location),
  CONSTRAINT stock_level_minimum CHECK (elsewhere OR on_hand - reserved >= min_level)
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS holdfast.stock_movement (
  level bigint NOT NULL,
  version bigint NOT NULL,
  quantity bigint NOT NULL,
  balance bigint NOT NULL,
  at timestamptz NOT NULL,
  line smallint NOT NULL,
  parts smallint NOT NULL,
  kind text NOT NULL,
  source text NOT NULL,
  external_id text COLLATE "C" NOT NULL,
  reference_type text COLLATE "C",
  reference_id text COLLATE "C",
  user_id text,
  note text,
  origin text COLLATE "C",
  PRIMARY KEY (level, version),
  UNIQUE (external_id, level)
);
CREATE INDEX IF NOT EXISTS stock_movement_reference ON holdfast.stock_movement (reference_id) WHERE reference_id IS NOT NULL AND line = 1;
CREATE INDEX IF NOT EXISTS stock_movement_return ON holdfast.stock_movement (origin, level) WHERE origin IS NOT NULL;
CREATE INDEX IF NOT EXISTS stock_movement_at ON holdfast.stock_movement USING brin (at) WITH (autosummarize = on);
CREATE TABLE IF NOT EXISTS holdfast.stock_reservation (
  book text COLLATE "C" NOT NULL,
  id text COLLATE "C" NOT NULL,
  state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'committed', 'released')),
  until timestamptz NOT NULL,
  made_at timestamptz NOT NULL,
  levels bigint[] NOT NULL,
  quantities bigint[] NOT NULL,
  source text NOT NULL,
  reference_type text COLLATE "C",
  reference_id text COLLATE "C",
  user_id text,
  note text,
  PRIMARY KEY (book, id)
);
CREATE TABLE IF NOT EXISTS holdfast.stock_reserved (
  level bigint NOT NULL,
  reservation text COLLATE "C" NOT NULL,
  quantity bigint NOT NULL CHECK (quantity > 0),
  until timestamptz NOT NULL,
  PRIMARY KEY (level, reservation)
);
CREATE OR REPLACE FUNCTION holdfast.stock_level_at(of_level bigint, moment timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE AS $function$
DECLARE
  low bigint := 0;
  high bigint;
  middle bigint;
  m record;
  found_balance bigint;
BEGIN
  SELECT t.version INTO high FROM holdfast.stock_movement t WHERE t.level = of_level ORDER BY t.version DESC LIMIT 1;
  WHILE low < high LOOP
    middle := (low + high + 1) / 2;
    -- Should one be missing after all, the one before it.
    SELECT t.version, t.at, t.balance INTO m FROM holdfast.stock_movement t
      WHERE t.level = of_level AND t.version <= middle AND t.version > low ORDER BY t.version DESC LIMIT 1;
    IF NOT FOUND THEN
      low := middle;
    ELSIF m.at <= moment THEN
      low := middle;
      found_balance := m.balance;
    ELSE
      high := m.version - 1;
    END IF;
  END LOOP;
  RETURN found_balance;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_own(place jsonb, what text) RETURNS text
LANGUAGE plpgsql STABLE AS $function$
DECLARE
  parts text[] := ARRAY(SELECT jsonb_array_elements_text(place->'table'));
  name text := (SELECT string_agg(quote_ident(p), '.' ORDER BY n) FROM unnest(parts) WITH ORDINALITY u (p, n));
  -- -1: of char(n), the type of any length.
  sku_type text := (SELECT format_type(a.atttypid, -1) FROM pg_attribute a WHERE a.attrelid = name::regclass AND a.attname = place->>'sku');
  at_sku text := format('t.%1$I = u.s::%2$s AND t.%1$I::text COLLATE "C" = u.s', place->>'sku', sku_type);
  at_place text := CASE WHEN place->>'location' IS NULL THEN format('u.l = %L', place->>'only')
    ELSE format('t.%1$I::text = u.l AND t.%1$I::text COLLATE "C" = u.l', place->>'location') END;
  here text := CASE WHEN place->>'location' IS NULL THEN format('%L::text', place->>'only')
    ELSE format('t.%I::text COLLATE "C"', place->>'location') END;
BEGIN
  IF sku_type IS NULL THEN
    RAISE undefined_column USING MESSAGE = format('there is no column %I in %s', place->>'sku', name);
  END IF;
  RETURN CASE what
  WHEN 'read' THEN format('SELECT u.n::int AS n, t.%I::bigint AS on_hand, %s AS min_level FROM unnest($1::text[], $2::text[]) WITH ORDINALITY u (s, l, n)
    JOIN %s t ON %s AND %s ORDER BY u.s COLLATE "C", u.l COLLATE "C" FOR NO KEY UPDATE OF t',
    place->>'onHand', CASE WHEN place->>'minLevel' IS NULL THEN 'NULL::bigint' ELSE format('t.%I::bigint', place->>'minLevel') END,
    name, at_sku, at_place)
  WHEN 'write' THEN format('UPDATE %s t SET %I = u.h FROM unnest($1::text[], $2::text[], $3::bigint[]) u (s, l, h)
    WHERE u.h IS NOT NULL AND %s AND %s', name, place->>'onHand', at_sku, at_place)
  -- Of some ($1, $2), or of all (both NULL).
  WHEN 'spots' THEN format('SELECT t.%I::text COLLATE "C" AS s, %s AS l FROM %s t WHERE $1::text[] IS NULL', place->>'sku', here, name)
  WHEN 'some' THEN format('SELECT u.s, u.l FROM unnest($1::text[], $2::text[]) u (s, l) WHERE EXISTS (SELECT FROM %s t WHERE %s AND %s)',
    name, at_sku, at_place)
  -- $1: skus, or NULL; $2: a location, or NULL.
  WHEN 'levels' THEN format('SELECT t.%I::text COLLATE "C" AS s, %s AS l, t.%I::bigint AS on_hand, %s AS min_level FROM %s t
    WHERE ($1::text[] IS NULL OR t.%I = ANY ($1::text[]::%s[]) AND t.%I::text COLLATE "C" = ANY ($1::text[]))',
    place->>'sku', here, place->>'onHand', CASE WHEN place->>'minLevel' IS NULL THEN 'NULL::bigint' ELSE format('t.%I::bigint', place->>'minLevel') END,
    name, place->>'sku', sku_type, place->>'sku')
  END;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_adopt(book text, place jsonb, ls text[], ll text[]) RETURNS int
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  s text[];
  l text[];
  n int;
BEGIN
  IF ls IS NOT NULL THEN
    SELECT array_agg(u.s), array_agg(u.l) INTO s, l FROM unnest(ls, ll) u (s, l)
      WHERE NOT EXISTS (SELECT FROM holdfast.stock_level t WHERE t.book = book AND t.sku = u.s AND t.location = u.l);
    IF s IS NULL THEN RETURN 0; END IF;
  END IF;
  EXECUTE format('INSERT INTO holdfast.stock_level (book, sku, location, elsewhere)
    SELECT $3, x.s, x.l, true FROM (%s) x ORDER BY x.s COLLATE "C", x.l COLLATE "C" ON CONFLICT DO NOTHING',
    holdfast.stock_own(place, CASE WHEN ls IS NULL THEN 'spots' ELSE 'some' END)) USING s, l, book;
  GET DIAGNOSTICS n = ROW_COUNT;
  RETURN n;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_decide(book text, place jsonb, make boolean, look boolean,
  ls text[], ll text[], lm boolean[],
  ok text[], oi text[], os text[], ot text[], oref text[], ou text[], ow text[], oof text[], ottl bigint[],
  op int[], lk int[], lo int[], li int[], lq bigint[],
  OUT missing boolean, OUT at float8, OUT verdicts int[], OUT ats float8[], OUT untils float8[], OUT states text[],
  OUT moved bigint[], OUT balances bigint[], OUT versions bigint[], OUT rooms bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off AS $function$
#variable_conflict use_variable
DECLARE
  nl int := cardinality(ls);
  no int := cardinality(ok);
  nx int := cardinality(lk);
  moment timestamptz;
  r record;
  h holdfast.stock_reservation;
  id bigint[] := array_fill(NULL::bigint, ARRAY[nl]);
  hand bigint[] := id;
  kept bigint[] := id;
  min bigint[] := id;
  version bigint[] := id;
  kept_before bigint[];
  version_before bigint[];
  reaped boolean[] := array_fill(false, ARRAY[nl]);
  pversion bigint[];
  pquantity bigint[];
  pbalance bigint[];
  pparts int[];
  pat float8[];
  psame boolean[];
  ml bigint[] := '{}';
  mv bigint[] := '{}';
  mq bigint[] := '{}';
  mb bigint[] := '{}';
  mo int[] := '{}';
  mi int[] := '{}';
  i int;
  j int;
  k int;
  m int;
  o int;
  x int := 1;
  n int;
  prior int;
  same int;
  verdict int;
  q bigint;
  free bigint;
  levels bigint[];
  quantities bigint[];
  moves boolean;
BEGIN
  missing := false;
  IF nl > 1 AND no > 1 THEN
    PERFORM set_config('lock_timeout', '200ms', true);
  END IF;
  IF place IS NOT NULL THEN
    PERFORM holdfast.stock_adopt(book, place, ls, ll);
  ELSIF make THEN
    INSERT INTO holdfast.stock_level (book, sku, location)
      SELECT book, u.s, u.l FROM unnest(ls, ll, lm) u (s, l, m)
      WHERE u.m AND NOT EXISTS (SELECT FROM holdfast.stock_level t WHERE t.book = book AND t.sku = u.s AND t.location = u.l)
      ORDER BY u.s COLLATE "C", u.l COLLATE "C" ON CONFLICT DO NOTHING;
  END IF;
  FOR r IN SELECT u.n, t.* FROM unnest(ls, ll) WITH ORDINALITY u (s, l, n)
    JOIN holdfast.stock_level t ON t.book = book AND t.sku = u.s AND t.location = u.l
    ORDER BY t.sku, t.location FOR NO KEY UPDATE OF t LOOP
    k := r.n;
    id[k] := r.id;
    hand[k] := r.on_hand;
    kept[k] := r.reserved;
    min[k] := r.min_level;
    version[k] := r.version;
  END LOOP;
  IF NOT make AND place IS NULL THEN
    FOR k IN 1..nl LOOP
      IF id[k] IS NULL AND lm[k] THEN
        missing := true;
        RETURN;
      END IF;
    END LOOP;
  END IF;
  version_before := version;
  IF place IS NOT NULL THEN
    -- What the caller's table says is so.
    levels := id;
    id := array_fill(NULL::bigint, ARRAY[nl]);
    FOR r IN EXECUTE holdfast.stock_own(place, 'read') USING ls, ll LOOP
      k := r.n;
      id[k] := levels[k];
      hand[k] := r.on_hand;
      min[k] := coalesce(r.min_level, min[k]);
      IF version[k] = 0 THEN
        version[k] := 1;
        ml := ml || id[k];
        mv := mv || 1::bigint;
        mq := mq || hand[k];
        mb := mb || hand[k];
        mo := mo || 0;
        mi := mi || 1;
      END IF;
    END LOOP;
  END IF;
  kept_before := kept;
  moment := clock_timestamp();
  at := extract(epoch FROM moment) * 1000;
  verdicts := array_fill(0, ARRAY[no]);
  ats := array_fill(at, ARRAY[no]);
  untils := array_fill(NULL::float8, ARRAY[no]);
  states := array_fill(NULL::text, ARRAY[no]);
  moved := array_fill(NULL::bigint, ARRAY[nx]);
  balances := moved;
  versions := moved;
  rooms := moved;
  pversion := moved;
  IF look THEN
    pquantity := moved;
    pbalance := moved;
    pparts := array_fill(NULL::int, ARRAY[nx]);
    pat := array_fill(NULL::float8, ARRAY[nx]);
    psame := array_fill(NULL::boolean, ARRAY[nx]);
    FOR r IN SELECT u.n, t.version, t.quantity, t.balance, t.parts, extract(epoch FROM t.at) * 1000 AS at,
        t.kind = ok[u.o] AND (ok[u.o] = 'commit' OR t.source = os[u.o] AND t.reference_type IS NOT DISTINCT FROM ot[u.o]
          AND t.reference_id IS NOT DISTINCT FROM oref[u.o] AND t.origin IS NOT DISTINCT FROM oof[u.o]) AS same
      FROM unnest(lk, lo) WITH ORDINALITY u (k, o, n)
      JOIN holdfast.stock_movement t ON t.external_id = oi[u.o] AND t.level = id[u.k] LOOP
      n := r.n;
      pversion[n] := r.version;
      pquantity[n] := r.quantity;
      pbalance[n] := r.balance;
      pparts[n] := r.parts;
      pat[n] := r.at;
      psame[n] := r.same;
    END LOOP;
  END IF;

  FOR o IN 1..no LOOP
    i := x;
    WHILE x <= nx AND lo[x] = o LOOP x := x + 1; END LOOP;
    j := x - 1;
    n := j - i + 1;
    verdict := 1;
    FOR m IN i..j LOOP
      k := lk[m];
      IF id[k] IS NULL THEN verdict := 4; END IF;
      rooms[m] := CASE WHEN id[k] IS NOT NULL THEN hand[k] - kept[k] - min[k] END;
    END LOOP;
    moves := ok[o] NOT IN ('reserve', 'release');

    -- Done before?
    prior := 0;
    same := 0;
    IF verdict = 1 AND moves AND look THEN
      FOR m IN i..j LOOP
        IF pversion[m] IS NOT NULL THEN
          prior := prior + 1;
          q := CASE ok[o] WHEN 'adjust' THEN pbalance[m] WHEN 'commit' THEN -pquantity[m] ELSE pquantity[m] END;
          IF psame[m] AND q = coalesce(lq[m], q) AND pparts[m] = n AND pat[m] = pat[i] THEN same := same + 1; END IF;
          moved[m] := pquantity[m];
          balances[m] := pbalance[m];
          versions[m] := pversion[m];
        END IF;
      END LOOP;
      IF prior > 0 THEN
        verdict := CASE WHEN same = n THEN 2 ELSE 3 END;
        IF verdict = 2 THEN ats[o] := pat[i]; END IF;
      END IF;
    END IF;

    IF verdict = 1 AND ok[o] IN ('reserve', 'commit', 'release') THEN
      SELECT t.* INTO h FROM holdfast.stock_reservation t WHERE t.book = book AND t.id = oof[o];
      levels := ARRAY(SELECT id[u.k] FROM unnest(lk[i:j]) WITH ORDINALITY u (k, n) ORDER BY u.n);
      quantities := lq[i:j];
      IF h.id IS NULL THEN
        IF ok[o] <> 'reserve' THEN verdict := 5; END IF;
      ELSE
        untils[o] := extract(epoch FROM h.until) * 1000;
        states[o] := CASE WHEN h.state = 'open' AND h.until <= moment THEN 'expired' ELSE h.state END;
        IF h.levels <> levels OR h.quantities <> quantities THEN
          verdict := 3;
        ELSIF ok[o] = 'reserve' THEN
          -- One that has run out may be made again.
          IF states[o] IN ('open', 'committed') THEN
            verdict := 2;
            ats[o] := extract(epoch FROM h.made_at) * 1000;
            FOR m IN i..j LOOP
              moved[m] := lq[m];
              balances[m] := hand[lk[m]];
              versions[m] := version[lk[m]];
            END LOOP;
          ELSIF states[o] = 'released' THEN
            verdict := 7;
          END IF;
        ELSIF ok[o] = 'commit' THEN
          IF states[o] <> 'open' THEN verdict := 7; END IF;
        ELSIF states[o] = 'released' THEN
          verdict := 2;
        ELSIF states[o] = 'committed' THEN
          verdict := 7;
        END IF;
        IF verdict = 1 THEN
          -- All of its levels are locked: what is still kept apart for it goes.
          n := 0;
          FOR r IN DELETE FROM holdfast.stock_reserved t USING unnest(levels, lk[i:j]) u (level, k)
            WHERE t.level = u.level AND t.reservation = h.id RETURNING u.k, t.quantity LOOP
            k := r.k;
            kept[k] := kept[k] - r.quantity;
            n := n + 1;
          END LOOP;
          IF ok[o] = 'commit' AND n < j - i + 1 THEN
            -- By another clock it had run out, and some of it was given away.
            verdict := 7;
            states[o] := 'expired';
            UPDATE holdfast.stock_reservation t SET until = moment WHERE t.book = book AND t.id = h.id;
          END IF;
          n := j - i + 1;
        END IF;
      END IF;
    END IF;

    -- Is there enough, of every line?
    IF verdict = 1 AND ok[o] <> 'release' THEN
      FOR m IN i..j LOOP
        k := lk[m];
        IF ok[o] = 'return' THEN
          SELECT -t.quantity INTO free FROM holdfast.stock_movement t
            WHERE t.external_id = oof[o] AND t.level = id[k] AND t.quantity < 0 AND t.kind IN ('apply', 'commit');
          IF NOT FOUND THEN
            verdict := 5;
            EXIT;
          END IF;
          free := free - coalesce((SELECT sum(t.quantity) FROM holdfast.stock_movement t
            WHERE t.origin = oof[o] AND t.level = id[k]), 0);
          rooms[m] := free;
          moved[m] := coalesce(lq[m], free);
          IF moved[m] > free OR free = 0 THEN verdict := 6; END IF;
          CONTINUE;
        END IF;
        q := CASE ok[o] WHEN 'adjust' THEN lq[m] - hand[k] WHEN 'reserve' THEN -lq[m] WHEN 'commit' THEN -lq[m] ELSE lq[m] END;
        free := hand[k] - kept[k] - min[k];
        IF q < 0 AND free + q < 0 AND kept[k] > 0 AND NOT reaped[k] THEN
          -- What has run out makes room.
          reaped[k] := true;
          WITH gone AS (DELETE FROM holdfast.stock_reserved t WHERE t.level = id[k] AND t.until <= moment RETURNING t.quantity)
            SELECT kept[k] - coalesce(sum(gone.quantity), 0) INTO free FROM gone;
          kept[k] := free;
          free := hand[k] - kept[k] - min[k];
        END IF;
        rooms[m] := free;
        moved[m] := q;
        IF q < 0 AND free + q < 0 THEN verdict := 0; END IF;
      END LOOP;
      IF verdict = 0 AND ok[o] = 'commit' THEN
        -- Only where somebody took it out of the caller's table: it stays reserved.
        INSERT INTO holdfast.stock_reserved (level, reservation, quantity, until)
          SELECT u.l, oof[o], u.q, h.until FROM unnest(levels, quantities) u (l, q);
        FOR m IN i..j LOOP
          k := lk[m];
          kept[k] := kept[k] + lq[m];
        END LOOP;
      END IF;
    END IF;

    IF verdict = 1 AND ok[o] IN ('reserve', 'release', 'commit') THEN
      IF ok[o] = 'reserve' THEN
        INSERT INTO holdfast.stock_reservation AS t (book, id, until, made_at, levels, quantities, source, reference_type, reference_id, user_id, note)
          VALUES (book, oof[o], moment + ottl[o] * interval '1 millisecond', moment, levels, quantities, os[o], ot[o], oref[o], ou[o], ow[o])
          ON CONFLICT ON CONSTRAINT stock_reservation_pkey DO UPDATE SET until = excluded.until, made_at = excluded.made_at
            WHERE t.levels = excluded.levels AND t.quantities = excluded.quantities AND t.state = 'open';
        IF FOUND THEN
          INSERT INTO holdfast.stock_reserved (level, reservation, quantity, until)
            SELECT u.l, oof[o], u.q, moment + ottl[o] * interval '1 millisecond' FROM unnest(levels, quantities) u (l, q);
          untils[o] := at + ottl[o];
          states[o] := 'open';
        ELSE
          -- Somebody made another one of that id just now.
          verdict := 3;
        END IF;
      ELSE
        states[o] := CASE ok[o] WHEN 'commit' THEN 'committed' ELSE 'released' END;
        UPDATE holdfast.stock_reservation t SET state = states[o] WHERE t.book = book AND t.id = oof[o];
      END IF;
    END IF;

    verdicts[o] := verdict;
    CONTINUE WHEN verdict <> 1;
    FOR m IN i..j LOOP
      k := lk[m];
      IF ok[o] = 'reserve' THEN
        kept[k] := kept[k] + lq[m];
        moved[m] := lq[m];
      ELSIF moves THEN
        hand[k] := hand[k] + moved[m];
        version[k] := version[k] + 1;
        ml := ml || id[k];
        mv := mv || version[k];
        mq := mq || moved[m];
        mb := mb || hand[k];
        mo := mo || o;
        mi := mi || li[m];
      ELSE
        moved[m] := lq[m];
      END IF;
      balances[m] := hand[k];
      versions[m] := version[k];
    END LOOP;
  END LOOP;

  IF cardinality(ml) > 0 THEN
    INSERT INTO holdfast.stock_movement (level, version, quantity, balance, at, line, parts, kind, source, external_id, reference_type, reference_id, user_id, note, origin)
      SELECT n.l, n.v, n.q, n.b, moment, n.i, coalesce(op[n.o], 1),
        coalesce(ok[n.o], 'opening'), coalesce(os[n.o], 'MANUAL'), coalesce(oi[n.o], 'opening'),
        ot[n.o], oref[n.o], ou[n.o], ow[n.o], CASE ok[n.o] WHEN 'return' THEN oof[n.o] END
      FROM unnest(ml, mv, mq, mb, mo, mi) n (l, v, q, b, o, i);
  END IF;
  UPDATE holdfast.stock_level t SET on_hand = n.h, reserved = n.r, version = n.v
    FROM unnest(id, hand, kept, version, kept_before, version_before) n (id, h, r, v, r0, v0)
    WHERE t.id = n.id AND (n.v > n.v0 OR n.r <> n.r0);
  IF place IS NOT NULL AND cardinality(mo) > 0 AND 0 < ANY (mo) THEN
    PERFORM set_config('holdfast.stock', 'on', true);
    EXECUTE holdfast.stock_own(place, 'write')
      USING ls, ll, ARRAY(SELECT CASE WHEN EXISTS (SELECT FROM unnest(ml, mo) y (l, o) WHERE y.l = u.id AND y.o > 0) THEN u.h END
        FROM unnest(id, hand) WITH ORDINALITY u (id, h, n) ORDER BY u.n);
    PERFORM set_config('holdfast.stock', '', true);
  END IF;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_apply(plain boolean, lsum bigint[], lcount int[], llow bigint[], lt bigint[], lv int[], book text, place jsonb, make boolean, look boolean,
  ls text[], ll text[], lm boolean[],
  ok text[], oi text[], os text[], ot text[], oref text[], ou text[], ow text[], oof text[], ottl bigint[],
  op int[], lk int[], lo int[], li int[], lq bigint[],
  OUT missing boolean, OUT at float8, OUT verdicts int[], OUT ats float8[], OUT untils float8[], OUT states text[],
  OUT moved bigint[], OUT balances bigint[], OUT versions bigint[], OUT rooms bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
#variable_conflict use_variable
DECLARE
  level record;
  ids bigint[];
  hands bigint[];
  olds bigint[];
  moment timestamptz;
BEGIN
  IF plain THEN
    IF cardinality(ls) > 1 AND cardinality(ok) > 1 THEN
      PERFORM set_config('lock_timeout', '200ms', true);
    END IF;
    IF make THEN
      INSERT INTO holdfast.stock_level (book, sku, location)
      SELECT book, u.s, u.l FROM unnest(ls, ll, lm) u (s, l, m)
      WHERE u.m AND NOT EXISTS (SELECT FROM holdfast.stock_level t WHERE t.book = book AND t.sku = u.s AND t.location = u.l)
      ORDER BY u.s COLLATE "C", u.l COLLATE "C" ON CONFLICT DO NOTHING;
    END IF;
    BEGIN
      -- Joined by the index on names whichever side comes first, so in the order of names: nobody waits crosswise.
      WITH moved AS (
        UPDATE holdfast.stock_level t SET on_hand = t.on_hand + z.q, version = t.version + z.c
        FROM (SELECT u.* FROM unnest(ls, ll, lsum, lcount, llow) WITH ORDINALITY u (s, l, q, c, low, n)
          ORDER BY u.s COLLATE "C", u.l COLLATE "C" OFFSET 0) z
        WHERE t.book = book AND t.sku = z.s AND t.location = z.l AND t.on_hand - t.reserved - t.min_level + z.low >= 0
        RETURNING z.n, t.id, t.on_hand - z.q AS hand, t.version - z.c AS version)
      SELECT count(*) AS n, array_agg(moved.id ORDER BY moved.n) AS ids, array_agg(moved.hand ORDER BY moved.n) AS hands,
        array_agg(moved.version ORDER BY moved.n) AS versions INTO level FROM moved;
      IF level.n < cardinality(ls) THEN
        RAISE SQLSTATE 'HF001';
      END IF;
      moment := clock_timestamp();
      ids := level.ids;
      hands := level.hands;
      olds := level.versions;
      SELECT array_agg(hands[u.k] + u.t ORDER BY u.n), array_agg(olds[u.k] + u.v ORDER BY u.n) INTO balances, versions
        FROM unnest(lk, lt, lv) WITH ORDINALITY u (k, t, v, n);
      INSERT INTO holdfast.stock_movement (level, version, quantity, balance, at, line, parts, kind, source, external_id, reference_type, reference_id, user_id, note)
        SELECT ids[n.k], n.v, n.q, n.b, moment, n.i, op[n.o], ok[n.o], os[n.o], oi[n.o], ot[n.o], oref[n.o], ou[n.o], ow[n.o]
        FROM unnest(lk, versions, lq, balances, li, lo) n (k, v, q, b, i, o);
      missing := false;
      at := extract(epoch FROM moment) * 1000;
      RETURN;
    EXCEPTION
      -- Something does not fit, or is not there.
      WHEN SQLSTATE 'HF001' THEN NULL;
      -- An id was there before: it counts, whether the caller expected it or not.
      WHEN unique_violation THEN
        look := true;
        balances := NULL;
        versions := NULL;
    END;
  END IF;
  SELECT d.* INTO missing, at, verdicts, ats, untils, states, moved, balances, versions, rooms
    FROM holdfast.stock_decide(book, place, make, look, ls, ll, lm, ok, oi, os, ot, oref, ou, ow, oof, ottl, op, lk, lo, li, lq) d;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_move(
  book text, look boolean, s text, l text, q bigint, what text, op text, source text, rtype text, rid text, by_ text, note_ text,
  OUT at float8, OUT verdict int, OUT entered float8, OUT moved bigint, OUT balance bigint, OUT version bigint, OUT room bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  t record;
  moment timestamptz;
BEGIN
  UPDATE holdfast.stock_level x SET on_hand = x.on_hand + q, version = x.version + 1
    WHERE x.book = book AND x.sku = s AND x.location = l AND (q >= 0 OR x.on_hand - x.reserved - x.min_level + q >= 0)
    RETURNING x.id, x.on_hand, x.version INTO t;
  IF FOUND THEN
    moment := clock_timestamp();
    INSERT INTO holdfast.stock_movement (level, version, quantity, balance, at, line, parts, kind, source, external_id, reference_type, reference_id, user_id, note)
      VALUES (t.id, t.version, q, t.on_hand, moment, 1, 1, what, source, op, rtype, rid, by_, note_)
      ON CONFLICT (external_id, level) DO NOTHING;
    IF FOUND THEN
      at := extract(epoch FROM moment) * 1000;
      entered := at;
      verdict := 1;
      moved := q;
      balance := t.on_hand;
      version := t.version;
      RETURN;
    END IF;
    -- It was there before. Nobody has seen this: the row is ours until the end.
    UPDATE holdfast.stock_level x SET on_hand = x.on_hand - q, version = x.version - 1 WHERE x.id = t.id;
    look := true;
  END IF;
  SELECT d.at, d.verdicts[1], d.ats[1], d.moved[1], d.balances[1], d.versions[1], d.rooms[1]
    INTO at, verdict, entered, moved, balance, version, room
    FROM holdfast.stock_decide(book, NULL, true, look, ARRAY[s], ARRAY[l], ARRAY[q >= 0], ARRAY[what], ARRAY[op], ARRAY[source],
      ARRAY[rtype], ARRAY[rid], ARRAY[by_], ARRAY[note_], ARRAY[NULL::text], ARRAY[NULL::bigint],
      ARRAY[1], ARRAY[1], ARRAY[1], ARRAY[1], ARRAY[q]) d;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_order(
  book text, make boolean, look boolean, ls text[], ll text[], lq bigint[],
  what text, op text, source text, rtype text, rid text, by_ text, note_ text,
  OUT missing boolean, OUT at float8, OUT verdict int, OUT entered float8, OUT moved bigint[], OUT balances bigint[],
  OUT versions bigint[], OUT rooms bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
#variable_conflict use_variable
DECLARE
  n int := cardinality(ls);
  lm boolean[];
  done record;
BEGIN
  missing := false;
  IF make THEN
    lm := ARRAY(SELECT u.q >= 0 FROM unnest(lq) WITH ORDINALITY u (q, n) ORDER BY u.n);
    INSERT INTO holdfast.stock_level (book, sku, location)
      SELECT book, u.s, u.l FROM unnest(ls, ll, lm) u (s, l, m)
      WHERE u.m AND NOT EXISTS (SELECT FROM holdfast.stock_level t WHERE t.book = book AND t.sku = u.s AND t.location = u.l)
      ORDER BY u.s COLLATE "C", u.l COLLATE "C" ON CONFLICT DO NOTHING;
  END IF;
  BEGIN
    WITH moved AS (
      UPDATE holdfast.stock_level t SET on_hand = t.on_hand + z.q, version = t.version + 1
      FROM (SELECT u.* FROM unnest(ls, ll, lq) WITH ORDINALITY u (s, l, q, n) ORDER BY u.s COLLATE "C", u.l COLLATE "C" OFFSET 0) z
      WHERE t.book = book AND t.sku = z.s AND t.location = z.l AND (z.q >= 0 OR t.on_hand - t.reserved - t.min_level + z.q >= 0)
      RETURNING z.n, t.id, z.q, t.on_hand, t.version),
    -- When all of them are moved.
    whole AS MATERIALIZED (SELECT count(*) AS n FROM moved),
    moment AS MATERIALIZED (SELECT clock_timestamp() AS at FROM whole WHERE whole.n = n),
    written AS (
      INSERT INTO holdfast.stock_movement (level, version, quantity, balance, at, line, parts, kind, source, external_id, reference_type, reference_id, user_id, note)
      SELECT m.id, m.version, m.q, m.on_hand, moment.at, m.n, n, what, source, op, rtype, rid, by_, note_ FROM moment, moved m)
    SELECT moment.at, (SELECT array_agg(m.on_hand ORDER BY m.n) FROM moved m) AS balances,
      (SELECT array_agg(m.version ORDER BY m.n) FROM moved m) AS versions INTO done FROM moment;
    IF NOT FOUND THEN
      RAISE SQLSTATE 'HF001';
    END IF;
    at := extract(epoch FROM done.at) * 1000;
    entered := at;
    verdict := 1;
    moved := lq;
    balances := done.balances;
    versions := done.versions;
    RETURN;
  EXCEPTION
    WHEN SQLSTATE 'HF001' THEN NULL;
    WHEN unique_violation THEN look := true;
  END;
  SELECT d.missing, d.at, d.verdicts[1], d.ats[1], d.moved, d.balances, d.versions, d.rooms
    INTO missing, at, verdict, entered, moved, balances, versions, rooms
    FROM holdfast.stock_decide(book, NULL, make, look, ls, ll, ARRAY(SELECT u.q >= 0 FROM unnest(lq) WITH ORDINALITY u (q, n) ORDER BY u.n),
      ARRAY[what], ARRAY[op], ARRAY[source], ARRAY[rtype], ARRAY[rid], ARRAY[by_], ARRAY[note_], ARRAY[NULL::text], ARRAY[NULL::bigint],
      ARRAY[n], ARRAY(SELECT generate_series(1, n)), array_fill(1, ARRAY[n]), ARRAY(SELECT generate_series(1, n)), lq) d;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_follow(
  book text, place jsonb, what text, op text, source text, rtype text, rid text, by_ text, note_ text, of_ text,
  ws text[], wl text[], wq bigint[],
  OUT at float8, OUT verdict int, OUT entered float8, OUT until float8, OUT state text, OUT skus text[], OUT locations text[],
  OUT moved bigint[], OUT balances bigint[], OUT versions bigint[], OUT rooms bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off AS $function$
#variable_conflict use_variable
DECLARE
  n int;
  quantities bigint[];
  h holdfast.stock_reservation;
BEGIN
  IF what <> 'return' THEN
    SELECT t.* INTO h FROM holdfast.stock_reservation t WHERE t.book = book AND t.id = of_;
    -- As they were when it was made.
    SELECT array_agg(t.sku ORDER BY u.n), array_agg(t.location ORDER BY u.n), array_agg(u.q ORDER BY u.n) INTO skus, locations, quantities
      FROM unnest(h.levels, h.quantities) WITH ORDINALITY u (l, q, n) JOIN holdfast.stock_level t ON t.id = u.l;
    source := coalesce(source, h.source);
    IF rid IS NULL THEN
      rtype := h.reference_type;
      rid := h.reference_id;
    END IF;
    by_ := coalesce(by_, h.user_id);
    note_ := coalesce(note_, h.note);
  ELSIF ws IS NOT NULL THEN
    skus := ws;
    locations := wl;
    quantities := wq;
  ELSE
    -- All that is left: of lines that came back already, nothing is.
    SELECT array_agg(x.sku ORDER BY x.sku, x.location), array_agg(x.location ORDER BY x.sku, x.location), array_agg(NULL::bigint)
      INTO skus, locations, quantities FROM (
        SELECT t.sku, t.location, -m.quantity AS sold, m.external_id, m.level,
          coalesce((SELECT sum(b.quantity) FROM holdfast.stock_movement b
            WHERE b.origin = of_ AND b.level = m.level AND b.external_id <> op), 0) AS back
        FROM holdfast.stock_movement m JOIN holdfast.stock_level t ON t.id = m.level
        WHERE m.external_id = of_ AND t.book = book AND m.quantity < 0 AND m.kind IN ('apply', 'commit')) x
      WHERE x.back < x.sold;
    IF skus IS NULL THEN
      -- Nothing is left, or nothing was sold.
      verdict := CASE WHEN EXISTS (SELECT FROM holdfast.stock_movement m JOIN holdfast.stock_level t ON t.id = m.level
        WHERE m.external_id = of_ AND t.book = book AND m.quantity < 0 AND m.kind IN ('apply', 'commit')) THEN 6 ELSE 5 END;
      RETURN;
    END IF;
  END IF;
  IF skus IS NULL THEN
    verdict := 5;
    RETURN;
  END IF;
  n := cardinality(skus);
  SELECT d.at, d.verdicts[1], d.ats[1], d.untils[1], d.states[1], d.moved, d.balances, d.versions, d.rooms
    INTO at, verdict, entered, until, state, moved, balances, versions, rooms
    FROM holdfast.stock_decide(book, place, false, true, skus, locations, array_fill(false, ARRAY[n]), ARRAY[what], ARRAY[op], ARRAY[source],
      ARRAY[rtype], ARRAY[rid], ARRAY[by_], ARRAY[note_], ARRAY[of_], ARRAY[NULL::bigint],
      ARRAY[n], ARRAY(SELECT generate_series(1, n)), array_fill(1, ARRAY[n]), ARRAY(SELECT generate_series(1, n)), quantities) d;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_minimum(book text, s text, l text, least_ bigint,
  OUT verdict int, OUT balance bigint, OUT version bigint, OUT room bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  t holdfast.stock_level;
BEGIN
  INSERT INTO holdfast.stock_level (book, sku, location) SELECT book, s, l
    WHERE NOT EXISTS (SELECT FROM holdfast.stock_level x WHERE x.book = book AND x.sku = s AND x.location = l) ON CONFLICT DO NOTHING;
  SELECT x.* INTO t FROM holdfast.stock_level x WHERE x.book = book AND x.sku = s AND x.location = l FOR NO KEY UPDATE;
  IF t.on_hand - t.reserved < least_ THEN
    WITH gone AS (DELETE FROM holdfast.stock_reserved x WHERE x.level = t.id AND x.until <= clock_timestamp() RETURNING x.quantity)
      SELECT t.reserved - coalesce(sum(gone.quantity), 0) INTO t.reserved FROM gone;
  END IF;
  verdict := CASE WHEN t.on_hand - t.reserved >= least_ OR t.elsewhere THEN 1 ELSE 0 END;
  UPDATE holdfast.stock_level x SET reserved = t.reserved, min_level = CASE verdict WHEN 1 THEN least_ ELSE x.min_level END WHERE x.id = t.id;
  balance := t.on_hand;
  version := t.version;
  room := t.on_hand - t.reserved;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_repair(book text, place jsonb, s text, l text, op text, source text, by_ text, note_ text)
RETURNS bigint LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  t holdfast.stock_level;
  r record;
  newest record;
  total bigint;
  open_ bigint;
BEGIN
  SELECT x.* INTO t FROM holdfast.stock_level x WHERE x.book = book AND x.sku = s AND x.location = l FOR NO KEY UPDATE;
  -- Or it is done already, and the answer was lost.
  IF NOT FOUND OR EXISTS (SELECT FROM holdfast.stock_movement m WHERE m.external_id = op AND m.level = t.id) THEN
    RETURN NULL;
  END IF;
  IF place IS NOT NULL THEN
    FOR r IN EXECUTE holdfast.stock_own(place, 'read') USING ARRAY[s], ARRAY[l] LOOP t.on_hand := r.on_hand; END LOOP;
  END IF;
  SELECT coalesce(sum(m.quantity), 0), coalesce(max(m.version), 0) INTO total, t.version FROM holdfast.stock_movement m WHERE m.level = t.id;
  SELECT coalesce(sum(x.quantity), 0) INTO open_ FROM holdfast.stock_reserved x WHERE x.level = t.id;
  INSERT INTO holdfast.stock_movement (level, version, quantity, balance, at, line, parts, kind, source, external_id, user_id, note)
    VALUES (t.id, t.version + 1, t.on_hand - total, t.on_hand, clock_timestamp(), 1, 1, 'repair', source, op, by_, note_);
  UPDATE holdfast.stock_level x SET on_hand = t.on_hand, reserved = open_, version = t.version + 1 WHERE x.id = t.id;
  RETURN t.on_hand - total;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_levels(book text, place jsonb, skus text[], at_location text)
RETURNS TABLE (sku text, location text, on_hand bigint, reserved bigint, min_level bigint, version bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_column
DECLARE
  moment timestamptz := clock_timestamp();
BEGIN
  IF place IS NULL THEN
    RETURN QUERY SELECT t.sku, t.location, t.on_hand, t.reserved - coalesce(
        (SELECT sum(x.quantity)::bigint FROM holdfast.stock_reserved x WHERE t.reserved > 0 AND x.level = t.id AND x.until <= moment), 0), t.min_level, t.version
      FROM holdfast.stock_level t WHERE t.book = stock_levels.book
        AND (skus IS NULL OR t.sku = ANY (skus)) AND (at_location IS NULL OR t.location = at_location) ORDER BY t.sku, t.location;
  ELSE
    RETURN QUERY EXECUTE format('SELECT y.s, y.l, y.on_hand, coalesce(t.reserved - coalesce(
        (SELECT sum(x.quantity)::bigint FROM holdfast.stock_reserved x WHERE x.level = t.id AND x.until <= $3), 0), 0),
        coalesce(y.min_level, t.min_level, 0), coalesce(t.version, 0)
      FROM (%s) y LEFT JOIN holdfast.stock_level t ON t.book = $4 AND t.sku = y.s AND t.location = y.l
      WHERE ($2::text IS NULL OR y.l = $2) ORDER BY y.s COLLATE "C", y.l COLLATE "C"',
      holdfast.stock_own(place, 'levels')) USING skus, at_location, moment, stock_levels.book;
  END IF;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_open(book text, place jsonb, most int) RETURNS int
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  s text[];
  l text[];
BEGIN
  PERFORM holdfast.stock_adopt(book, place, NULL, NULL);
  SELECT array_agg(x.sku), array_agg(x.location) INTO s, l FROM (SELECT t.sku, t.location FROM holdfast.stock_level t
    WHERE t.book = book AND t.elsewhere AND t.version = 0 ORDER BY t.sku, t.location LIMIT most) x;
  IF s IS NULL THEN RETURN 0; END IF;
  PERFORM holdfast.stock_decide(book, place, false, false, s, l, array_fill(false, ARRAY[cardinality(s)]),
    '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}');
  RETURN (SELECT count(*) FROM unnest(s, l) u (s, l) JOIN holdfast.stock_level t ON t.book = book AND t.sku = u.s AND t.location = u.l
    WHERE t.version > 0);
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.stock_guard() RETURNS trigger
LANGUAGE plpgsql AS $function$
BEGIN
  IF current_setting('holdfast.stock', true) IS DISTINCT FROM 'on' THEN
    RAISE EXCEPTION 'Stock in %.% changes through movements only', TG_TABLE_SCHEMA, TG_TABLE_NAME
      USING ERRCODE = 'integrity_constraint_violation', HINT = 'Call apply, increase, decrease or adjustTo of holdfast/stock.';
  END IF;
  RETURN NEW;
END
$function$;
INSERT INTO holdfast.migration (id, name) VALUES (6, 'stock') ON CONFLICT (id) DO NOTHING;

-- holdfast 7: schedule
CREATE TABLE IF NOT EXISTS holdfast.schedule (
  name text PRIMARY KEY,
  last timestamptz NOT NULL,
  decisions bigint NOT NULL DEFAULT 0,
  paused boolean NOT NULL DEFAULT false
) WITH (fillfactor = 70);
CREATE TABLE IF NOT EXISTS holdfast.schedule_run (
  schedule text NOT NULL,
  tick timestamptz NOT NULL,
  manual boolean NOT NULL,
  state text NOT NULL,
  attempt integer NOT NULL,
  fence bigint NOT NULL,
  token text NOT NULL,
  holder text NOT NULL,
  previous timestamptz,
  started timestamptz NOT NULL,
  until timestamptz NOT NULL,
  ended timestamptz,
  error text,
  PRIMARY KEY (schedule, tick, manual)
) WITH (fillfactor = 70);
CREATE INDEX IF NOT EXISTS schedule_run_open ON holdfast.schedule_run (schedule, tick)
  WHERE state IN ('running', 'waiting');
CREATE OR REPLACE FUNCTION holdfast.schedule_step(
  p_schedule text, p_token text, p_holder text, p_ttl double precision, p_attempts integer, p_overlap text, p_take boolean,
  p_tick double precision, p_after double precision, p_before double precision, p_run boolean, p_manual boolean,
  p_state text, p_error text, p_keep integer,
  OUT o_now double precision, OUT o_last double precision, OUT o_wake double precision, OUT o_busy boolean, OUT o_paused boolean,
  OUT o_skipped boolean, OUT o_died double precision[], OUT o_tick double precision, OUT o_previous double precision,
  OUT o_manual boolean, OUT o_fence bigint, OUT o_attempt integer)
LANGUAGE plpgsql VOLATILE
AS $function$
DECLARE
  tick_at timestamptz := timestamptz 'epoch' + p_tick * interval '1 millisecond';
  after_at timestamptz := timestamptz 'epoch' + p_after * interval '1 millisecond';
  before_at timestamptz := timestamptz 'epoch' + p_before * interval '1 millisecond';
  locked boolean := false;
  due boolean;
  s holdfast.schedule%ROWTYPE;
  mine holdfast.schedule_run%ROWTYPE;
BEGIN
  o_busy := false;
  o_skipped := false;
  o_died := '{}';
  LOOP
    IF NOT locked THEN
      SELECT * INTO s FROM holdfast.schedule t WHERE t.name = p_schedule;
      IF NOT FOUND THEN
        INSERT INTO holdfast.schedule (name, last) VALUES (p_schedule, date_trunc('milliseconds', clock_timestamp()))
          ON CONFLICT DO NOTHING;
        CONTINUE;
      END IF;
    END IF;
    due := NOT s.paused AND tick_at IS NOT NULL AND s.last = after_at AND tick_at <= clock_timestamp()
      AND (before_at IS NULL OR clock_timestamp() < before_at);
    EXIT WHEN locked OR NOT (due OR p_manual OR EXISTS (SELECT FROM holdfast.schedule_run r
      WHERE r.schedule = p_schedule AND r.state IN ('running', 'waiting') AND (r.token = p_token OR p_take AND NOT s.paused AND r.until <= clock_timestamp())));
    IF p_state = 'running' THEN
      PERFORM CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END,
      set_config('idle_in_transaction_session_timeout', '5s', true);
    END IF;
    SELECT * INTO s FROM holdfast.schedule t WHERE t.name = p_schedule FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
      o_busy := true;
      SELECT * INTO s FROM holdfast.schedule t WHERE t.name = p_schedule;
      EXIT;
    END IF;
    locked := true;
  END LOOP;

  IF locked THEN
    -- Granted before, and the answer was lost.
    UPDATE holdfast.schedule_run r SET until = clock_timestamp() + p_ttl * interval '1 millisecond'
      WHERE r.schedule = p_schedule AND r.token = p_token AND r.state = 'running' RETURNING * INTO mine;
    WHILE p_take AND NOT s.paused AND mine.fence IS NULL LOOP
      -- One that a transaction has ended, and not committed yet, is passed over: it is still held.
      SELECT * INTO mine FROM holdfast.schedule_run r
        WHERE r.schedule = p_schedule AND r.state IN ('running', 'waiting') AND r.until <= clock_timestamp()
        ORDER BY r.tick LIMIT 1 FOR UPDATE SKIP LOCKED;
      EXIT WHEN NOT FOUND;
      IF mine.state = 'running' AND mine.attempt >= p_attempts THEN
        UPDATE holdfast.schedule_run r SET state = 'failed', ended = clock_timestamp(),
            error = 'Its process died, or did not renew its claim in time, and no attempt is left'
          WHERE r.schedule = p_schedule AND r.tick = mine.tick AND r.manual = mine.manual;
        o_died := o_died || (extract(epoch FROM mine.tick) * 1000)::float8;
        mine := NULL;
      ELSE
        UPDATE holdfast.schedule_run r SET state = 'running', attempt = r.attempt + 1, fence = nextval('holdfast.fence'),
            token = p_token, holder = p_holder, started = clock_timestamp(),
            until = clock_timestamp() + p_ttl * interval '1 millisecond'
          WHERE r.schedule = p_schedule AND r.tick = mine.tick AND r.manual = mine.manual RETURNING * INTO mine;
      END IF;
    END LOOP;

    IF mine.fence IS NULL AND (due OR p_manual) THEN
      IF p_manual THEN
        tick_at := date_trunc('milliseconds', clock_timestamp());
        WHILE EXISTS (SELECT FROM holdfast.schedule_run r WHERE r.schedule = p_schedule AND r.tick = tick_at AND r.manual) LOOP
          tick_at := tick_at + interval '1 millisecond';
        END LOOP;
      END IF;
      IF NOT p_manual AND NOT p_run THEN
        s.last := tick_at;
      ELSIF p_overlap <> 'allow'
        AND EXISTS (SELECT FROM holdfast.schedule_run r WHERE r.schedule = p_schedule AND r.state IN ('running', 'waiting')) THEN
        o_skipped := p_overlap = 'skip' OR p_manual;
        IF p_overlap = 'skip' AND NOT p_manual THEN
          INSERT INTO holdfast.schedule_run (schedule, tick, manual, state, attempt, fence, token, holder, previous, started, until, ended)
            VALUES (p_schedule, tick_at, false, 'skipped', 0, 0, '', p_holder, s.last, clock_timestamp(), clock_timestamp(), clock_timestamp());
          s.last := tick_at;
        END IF;
      ELSE
        INSERT INTO holdfast.schedule_run (schedule, tick, manual, state, attempt, fence, token, holder, previous, started, until, ended, error)
          VALUES (p_schedule, tick_at, p_manual, p_state, 1, nextval('holdfast.fence'), p_token, p_holder, s.last, clock_timestamp(),
            clock_timestamp() + p_ttl * interval '1 millisecond', CASE WHEN p_state <> 'running' THEN clock_timestamp() END, p_error)
          RETURNING * INTO mine;
        IF NOT p_manual THEN
          s.last := tick_at;
        END IF;
      END IF;
      DELETE FROM holdfast.schedule_run r WHERE r.schedule = p_schedule AND NOT (r.state IN ('running', 'waiting')) AND r.tick < (
        SELECT o.tick FROM holdfast.schedule_run o WHERE o.schedule = p_schedule ORDER BY o.tick DESC OFFSET p_keep LIMIT 1);
    END IF;
    UPDATE holdfast.schedule t SET last = s.last, decisions = t.decisions + 1 WHERE t.name = p_schedule;
  END IF;

  o_tick := (extract(epoch FROM mine.tick) * 1000)::float8;
  o_previous := (extract(epoch FROM mine.previous) * 1000)::float8;
  o_manual := mine.manual;
  o_fence := mine.fence;
  o_attempt := mine.attempt;
  o_last := (extract(epoch FROM s.last) * 1000)::float8;
  o_paused := s.paused;
  o_wake := (SELECT (extract(epoch FROM min(r.until)) * 1000)::float8 FROM holdfast.schedule_run r
    WHERE r.schedule = p_schedule AND r.state IN ('running', 'waiting') AND NOT s.paused);
  o_now := (extract(epoch FROM clock_timestamp()) * 1000)::float8;
END
$function$;
INSERT INTO holdfast.migration (id, name) VALUES (7, 'schedule') ON CONFLICT (id) DO NOTHING;

-- holdfast 8: queue
CREATE TABLE IF NOT EXISTS holdfast.queue (
  id integer GENERATED ALWAYS AS IDENTITY,
  name text COLLATE "C" PRIMARY KEY,
  paused boolean NOT NULL DEFAULT false,
  attempts smallint NOT NULL DEFAULT 1,
  most integer,
  group_most integer,
  group_rate integer,
  group_per bigint,
  ordered boolean NOT NULL DEFAULT false
);
CREATE SEQUENCE IF NOT EXISTS holdfast.queue_job_id;
CREATE TABLE IF NOT EXISTS holdfast.queue_ready (
  queue integer NOT NULL,
  priority smallint NOT NULL,
  attempt smallint NOT NULL,
  id bigint NOT NULL,
  at timestamptz NOT NULL,
  key text COLLATE "C",
  payload text NOT NULL,
  PRIMARY KEY (queue, priority, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE IF NOT EXISTS holdfast.queue_delayed (
  queue integer NOT NULL,
  priority smallint NOT NULL,
  attempt smallint NOT NULL,
  id bigint NOT NULL,
  at timestamptz NOT NULL,
  run_at timestamptz NOT NULL,
  key text COLLATE "C",
  grp text COLLATE "C",
  payload text NOT NULL,
  PRIMARY KEY (queue, run_at, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX IF NOT EXISTS queue_delayed_id ON holdfast.queue_delayed (id);
CREATE TABLE IF NOT EXISTS holdfast.queue_grouped (
  queue integer NOT NULL,
  priority smallint NOT NULL,
  attempt smallint NOT NULL,
  id bigint NOT NULL,
  at timestamptz NOT NULL,
  grp text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  payload text NOT NULL,
  PRIMARY KEY (queue, grp, priority, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE IF NOT EXISTS holdfast.queue_group (
  queue integer NOT NULL,
  grp text COLLATE "C" NOT NULL,
  running integer NOT NULL DEFAULT 0,
  since timestamptz,
  started integer NOT NULL DEFAULT 0,
  next timestamptz,
  PRIMARY KEY (queue, grp)
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS holdfast.queue_worker (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue integer NOT NULL,
  beat timestamptz NOT NULL,
  since timestamptz NOT NULL DEFAULT clock_timestamp(),
  ttl integer NOT NULL,
  lock bigint,
  name text
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS holdfast.queue_lease (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  worker bigint NOT NULL,
  queue integer NOT NULL,
  counted boolean NOT NULL,
  size integer NOT NULL,
  done integer[],
  jobs text NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE IF NOT EXISTS holdfast.queue_mark (
  lease bigint NOT NULL,
  place integer NOT NULL,
  PRIMARY KEY (lease, place)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE IF NOT EXISTS holdfast.queue_key (
  queue integer NOT NULL,
  key text COLLATE "C" NOT NULL,
  job bigint NOT NULL,
  PRIMARY KEY (queue, key)
);
CREATE TABLE IF NOT EXISTS holdfast.queue_failed (
  queue integer NOT NULL,
  id bigint NOT NULL,
  priority smallint NOT NULL,
  attempt smallint NOT NULL,
  at timestamptz NOT NULL,
  failed_at timestamptz NOT NULL,
  key text COLLATE "C",
  grp text COLLATE "C",
  payload text NOT NULL,
  error text NOT NULL,
  PRIMARY KEY (queue, id)
);
CREATE OR REPLACE FUNCTION holdfast.queue_open(q text, settings jsonb) RETURNS integer
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_know(q integer, grps text[]) RETURNS void
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
BEGIN
  INSERT INTO holdfast.queue_group (queue, grp)
    SELECT q, u.g FROM (SELECT DISTINCT x.g COLLATE "C" AS g FROM unnest(grps) x (g) WHERE x.g IS NOT NULL) u
    WHERE NOT EXISTS (SELECT FROM holdfast.queue_group t WHERE t.queue = q AND t.grp = u.g)
    ORDER BY u.g ON CONFLICT DO NOTHING;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_add(q integer, payloads text[], priorities smallint[], runs float8[],
  grps text[], keys text[], swaps boolean[], alone boolean, tell text, OUT ids bigint[], OUT added boolean[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_due(q integer, n integer) RETURNS text[]
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_due_now(q integer) RETURNS float8
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
BEGIN
  IF EXISTS (SELECT FROM holdfast.queue_delayed t WHERE t.queue = q AND t.run_at <= clock_timestamp()) THEN
    PERFORM holdfast.queue_know(q, holdfast.queue_due(q, 1000));
    RETURN 0;
  END IF;
  RETURN (SELECT greatest(0, extract(epoch FROM d.run_at - clock_timestamp())) * 1000 FROM (
    SELECT t.run_at FROM holdfast.queue_delayed t WHERE t.queue = q ORDER BY t.run_at LIMIT 1) d);
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_unknown(q integer) RETURNS text[]
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
BEGIN
  -- From group to group by the index, whatever the number of their jobs.
  RETURN ARRAY(WITH RECURSIVE g AS (
    (SELECT t.grp FROM holdfast.queue_grouped t WHERE t.queue = q ORDER BY t.grp LIMIT 1)
    UNION ALL SELECT (SELECT t.grp FROM holdfast.queue_grouped t WHERE t.queue = q AND t.grp > g.grp ORDER BY t.grp LIMIT 1)
    FROM g WHERE g.grp IS NOT NULL)
  SELECT g.grp FROM g
    WHERE g.grp IS NOT NULL AND NOT EXISTS (SELECT FROM holdfast.queue_group t WHERE t.queue = q AND t.grp = g.grp));
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_pick(s holdfast.queue, n integer, onward text, OUT places tid[], OUT last text)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_claim(q integer, w bigint, n integer, priorities smallint[], floors bigint[],
  whole boolean, grouped boolean, onward text,
  OUT lease bigint, OUT jobs text, OUT counted boolean, OUT last text, OUT idle text, OUT soon float8)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_pause(q integer, is_paused boolean) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('holdfast_queue_pause ' || q, 0));
  UPDATE holdfast.queue t SET paused = is_paused WHERE t.id = q;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_finish(q integer, w bigint, leases bigint[], parts bigint[], places integer[],
  failed bigint[], failed_places integer[], again float8[], errors text[],
  key_leases bigint[], keys text[], key_jobs bigint[], group_leases bigint[], group_places integer[], grps text[], OUT ours bigint[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_complete(w bigint, of_lease bigint, at_place integer) RETURNS boolean
LANGUAGE plpgsql AS $function$
BEGIN
  PERFORM FROM holdfast.queue_lease t WHERE t.id = of_lease AND t.worker = w AND NOT coalesce(at_place = ANY(t.done), false) FOR KEY SHARE;
  IF NOT FOUND THEN RETURN false; END IF;
  INSERT INTO holdfast.queue_mark (lease, place) VALUES (of_lease, at_place) ON CONFLICT DO NOTHING;
  RETURN true;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_free(queues integer[], grps text[]) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
  PERFORM FROM holdfast.queue_group t JOIN (SELECT DISTINCT x.q, x.g FROM unnest(queues, grps) x (q, g)) u
    ON t.queue = u.q AND t.grp = u.g ORDER BY t.queue, t.grp FOR NO KEY UPDATE OF t;
  UPDATE holdfast.queue_group t SET running = greatest(0, t.running - u.n)
    FROM (SELECT x.q, x.g, count(*)::int AS n FROM unnest(queues, grps) x (q, g) GROUP BY x.q, x.g) u
    WHERE t.queue = u.q AND t.grp = u.g;
END
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_recover(OUT workers integer, OUT jobs integer, OUT queues text[])
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_give_back(w bigint, leases bigint[], places integer[]) RETURNS void
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_take(q integer, n integer, job bigint) RETURNS text
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_settle(q integer, ids bigint[], priorities smallint[], grps text[],
  keys text[], again float8, why text) RETURNS void
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off AS $function$
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_revive(q integer, ids bigint[]) RETURNS bigint
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
$function$;
CREATE OR REPLACE FUNCTION holdfast.queue_discard(q integer, ids bigint[], before float8) RETURNS bigint
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
$function$;
INSERT INTO holdfast.migration (id, name) VALUES (8, 'queue') ON CONFLICT (id) DO NOTHING;

-- holdfast 9: audit
CREATE TABLE IF NOT EXISTS holdfast.audit (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  actor text NOT NULL,
  action text NOT NULL,
  target text COLLATE "C" NOT NULL,
  details jsonb,
  outcome text NOT NULL DEFAULT 'begun' CHECK (outcome IN ('begun', 'done', 'failed')),
  result jsonb,
  error text,
  ended_at timestamptz
);
CREATE INDEX IF NOT EXISTS audit_target ON holdfast.audit (target, id);
INSERT INTO holdfast.migration (id, name) VALUES (9, 'audit') ON CONFLICT (id) DO NOTHING;
