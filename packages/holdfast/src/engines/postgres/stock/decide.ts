/** The functions that move stock: for any batch, for the usual one, for a single line, and for what comes later. */
import { type Statement, own, sql } from "../../../seam/sql.ts";
import * as protection from "../../../seam/protections.ts";

/**
 * Of functions that take a batch. Levels: ls, ll, and whether something is put into them (lm). Orders: what (ok), id (oi),
 * what for (os, ot, oref, ou, ow), of which one (oof), for how long (ottl), how many lines (op). Lines, side by side: their
 * level's place (lk), their order (lo, ascending), the how manieth of it (li), how much (lq).
 */
const batch = sql.raw(`book text, place jsonb, make boolean, look boolean,
  ls text[], ll text[], lm boolean[],
  ok text[], oi text[], os text[], ot text[], oref text[], ou text[], ow text[], oof text[], ottl bigint[],
  op int[], lk int[], lo int[], li int[], lq bigint[],
  OUT missing boolean, OUT at float8, OUT verdicts int[], OUT ats float8[], OUT untils float8[], OUT states text[],
  OUT moved bigint[], OUT balances bigint[], OUT versions bigint[], OUT rooms bigint[]`);

/** There is so much left of a level that is neither reserved nor to stay. */
const room = (level: string, change: string) =>
  sql.raw(
    protection.stockChecked
      ? `${level}.on_hand - ${protection.stockReservedKept ? `${level}.reserved` : "0"} - ${level}.min_level + ${change} >= 0`
      : "true",
  );

/** Joins with lists of unknown length are by index, whatever the tables were like when the plan was made. */
const plans = sql.raw(
  `SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off`,
);

/**
 * Spots that something is put into and that are not there yet. Before anything is locked, in order: who waits here for
 * another one's INSERT holds nothing that the other could want.
 */
const make = sql`INSERT INTO ${own("stock_level")} (book, sku, location)
      SELECT book, u.s, u.l FROM unnest(level_skus, level_locations, level_makes) u (s, l, m)
      WHERE u.m AND NOT EXISTS (SELECT FROM ${own("stock_level")} t WHERE t.book = book AND t.sku = u.s AND t.location = u.l)
      ORDER BY u.s COLLATE "C", u.l COLLATE "C" ON CONFLICT DO NOTHING`;

/**
 * Of several orders about several levels. Who waits for somebody's transaction with levels in hand that it comes to want
 * ends in a deadlock, which may be the transaction's: they part before the server looks for one (deadlock_timeout, 1 s).
 */
const briefly = sql.raw("PERFORM set_config('lock_timeout', '200ms', true)");

/** The levels, made if something is put into them, locked in one order, and read. */
const lockLevels = sql`
  IF place IS NOT NULL THEN
    PERFORM ${own("stock_adopt")}(book, place, level_skus, level_locations);
  ELSIF make THEN
    ${make};
  END IF;
  FOR r IN SELECT u.n, t.* FROM unnest(level_skus, level_locations) WITH ORDINALITY u (s, l, n)
    JOIN ${own("stock_level")} t ON t.book = book AND t.sku = u.s AND t.location = u.l
    ORDER BY t.sku, t.location FOR NO KEY UPDATE OF t LOOP
    k := r.n;
    id[k] := r.id;
    hand[k] := r.on_hand;
    kept[k] := r.reserved;
    min[k] := r.min_level;
    version[k] := r.version;
  END LOOP;
  IF NOT make AND place IS NULL THEN
    FOR k IN 1..level_count LOOP
      IF id[k] IS NULL AND level_makes[k] THEN
        missing := true;
        RETURN;
      END IF;
    END LOOP;
  END IF;`;

/** What the caller's own table says is so. */
const readOwn = sql`
  IF place IS NOT NULL THEN
    -- What the caller's table says is so.
    levels := id;
    id := array_fill(NULL::bigint, ARRAY[level_count]);
    FOR r IN EXECUTE ${own("stock_own")}(place, 'read') USING level_skus, level_locations LOOP
      k := r.n;
      id[k] := levels[k];
      hand[k] := r.on_hand;
      min[k] := coalesce(r.min_level, min[k]);
      IF version[k] = 0 THEN
        version[k] := 1;
        moved_levels := moved_levels || id[k];
        moved_versions := moved_versions || 1::bigint;
        moved_quantities := moved_quantities || hand[k];
        moved_balances := moved_balances || hand[k];
        moved_orders := moved_orders || 0;
        moved_lines := moved_lines || 1;
      END IF;
    END LOOP;
  END IF;`;

/** What is written down under these ids. */
const findMovements = sql`
  IF look THEN
    prior_quantities := moved;
    prior_balances := moved;
    prior_parts := array_fill(NULL::int, ARRAY[line_count]);
    prior_ats := array_fill(NULL::float8, ARRAY[line_count]);
    prior_same := array_fill(NULL::boolean, ARRAY[line_count]);
    FOR r IN SELECT u.n, t.version, t.quantity, t.balance, t.parts, extract(epoch FROM t.at) * 1000 AS at,
        t.kind = order_kinds[u.o] AND (order_kinds[u.o] = 'commit' OR t.source = order_sources[u.o] AND t.reference_type IS NOT DISTINCT FROM order_types[u.o]
          AND t.reference_id IS NOT DISTINCT FROM order_references[u.o] AND t.origin IS NOT DISTINCT FROM order_origins[u.o]) AS same
      FROM unnest(line_levels, line_orders) WITH ORDINALITY u (k, o, n)
      JOIN ${own("stock_movement")} t ON t.external_id = order_ids[u.o] AND t.level = id[u.k] LOOP
      n := r.n;
      prior_versions[n] := r.version;
      prior_quantities[n] := r.quantity;
      prior_balances[n] := r.balance;
      prior_parts[n] := r.parts;
      prior_ats[n] := r.at;
      prior_same[n] := r.same;
    END LOOP;
  END IF;`;

/** An order that was done before: all of its lines together, and the same. */
const findRepeats = sql`
  -- Done before?
  prior := 0;
  same := 0;
  IF verdict = 1 AND moves AND look THEN
    FOR m IN i..j LOOP
      IF prior_versions[m] IS NOT NULL THEN
        prior := prior + 1;
        q := CASE order_kinds[o] WHEN 'adjust' THEN prior_balances[m] WHEN 'commit' THEN -prior_quantities[m] ELSE prior_quantities[m] END;
        IF prior_same[m] AND q = coalesce(line_quantities[m], q) AND prior_parts[m] = n AND prior_ats[m] = prior_ats[i] THEN same := same + 1; END IF;
        moved[m] := prior_quantities[m];
        balances[m] := prior_balances[m];
        versions[m] := prior_versions[m];
      END IF;
    END LOOP;
    IF prior > 0 THEN
      verdict := CASE WHEN same = n THEN 2 ELSE 3 END;
      IF verdict = 2 THEN ats[o] := prior_ats[i]; END IF;
    END IF;
  END IF;`;

/** What an order says of a reservation, and what that is by now. */
const findReservation = sql`
  IF verdict = 1 AND order_kinds[o] IN ('reserve', 'commit', 'release') THEN
    SELECT t.* INTO h FROM ${own("stock_reservation")} t WHERE t.book = book AND t.id = order_origins[o];
    levels := ARRAY(SELECT id[u.k] FROM unnest(line_levels[i:j]) WITH ORDINALITY u (k, n) ORDER BY u.n);
    quantities := line_quantities[i:j];
    IF h.id IS NULL THEN
      IF order_kinds[o] <> 'reserve' THEN verdict := 5; END IF;
    ELSE
      untils[o] := extract(epoch FROM h.until) * 1000;
      states[o] := CASE WHEN h.state = 'open' AND h.until <= moment THEN 'expired' ELSE h.state END;
      IF h.levels <> levels OR h.quantities <> quantities THEN
        verdict := 3;
      ELSIF order_kinds[o] = 'reserve' THEN
        -- One that has run out may be made again.
        IF states[o] IN ('open', 'committed') THEN
          verdict := 2;
          ats[o] := extract(epoch FROM h.made_at) * 1000;
          FOR m IN i..j LOOP
            moved[m] := line_quantities[m];
            balances[m] := hand[line_levels[m]];
            versions[m] := version[line_levels[m]];
          END LOOP;
        ELSIF states[o] = 'released' THEN
          verdict := 7;
        END IF;
      ELSIF order_kinds[o] = 'commit' THEN
        IF states[o] <> 'open' THEN verdict := 7; END IF;
      ELSIF states[o] = 'released' THEN
        verdict := 2;
      ELSIF states[o] = 'committed' THEN
        verdict := 7;
      END IF;
      IF verdict = 1 THEN
        -- All of its levels are locked: what is still kept apart for it goes.
        n := 0;
        FOR r IN DELETE FROM ${own("stock_reserved")} t USING unnest(levels, line_levels[i:j]) u (level, k)
          WHERE t.level = ANY(levels) AND t.level = u.level AND t.reservation = h.id RETURNING u.k, t.quantity LOOP
          k := r.k;
          kept[k] := kept[k] - r.quantity;
          n := n + 1;
        END LOOP;
        IF order_kinds[o] = 'commit' AND n < j - i + 1 THEN
          -- By another clock it had run out, and some of it was given away.
          verdict := 7;
          states[o] := 'expired';
          UPDATE ${own("stock_reservation")} t SET until = moment WHERE t.book = book AND t.id = h.id;
        END IF;
        n := j - i + 1;
      END IF;
    END IF;
  END IF;`;

/** Whether there is enough, of every line: what has run out makes room. */
const findRoom = sql`
  -- Is there enough, of every line?
  IF verdict = 1 AND order_kinds[o] <> 'release' THEN
    FOR m IN i..j LOOP
      k := line_levels[m];
      IF order_kinds[o] = 'return' THEN
        SELECT -t.quantity INTO free FROM ${own("stock_movement")} t
          WHERE t.external_id = order_origins[o] AND t.level = id[k] AND t.quantity < 0 AND t.kind IN ('apply', 'commit');
        IF NOT FOUND THEN
          verdict := 5;
          EXIT;
        END IF;
        free := free - coalesce((SELECT sum(t.quantity) FROM ${own("stock_movement")} t
          WHERE t.origin = order_origins[o] AND t.level = id[k]), 0);
        rooms[m] := free;
        moved[m] := coalesce(line_quantities[m], free);
        IF moved[m] > free OR free = 0 THEN verdict := 6; END IF;
        CONTINUE;
      END IF;
      q := CASE order_kinds[o] WHEN 'adjust' THEN line_quantities[m] - hand[k] WHEN 'reserve' THEN -line_quantities[m] WHEN 'commit' THEN -line_quantities[m] ELSE line_quantities[m] END;
      free := hand[k] - kept[k] - min[k];
      IF q < 0 AND free + q < 0 AND kept[k] > 0 AND NOT reaped[k] THEN
        -- What has run out makes room.
        reaped[k] := true;
        WITH gone AS (DELETE FROM ${own("stock_reserved")} t WHERE t.level = id[k] AND t.until <= moment RETURNING t.quantity)
          SELECT kept[k] - coalesce(sum(gone.quantity), 0) INTO free FROM gone;
        kept[k] := free;
        free := hand[k] - kept[k] - min[k];
      END IF;
      rooms[m] := free;
      moved[m] := q;
      IF q < 0 AND free + q < 0 THEN verdict := 0; END IF;
    END LOOP;
    IF verdict = 0 AND order_kinds[o] = 'commit' THEN
      -- Only where somebody took it out of the caller's table: it stays reserved.
      INSERT INTO ${own("stock_reserved")} (level, reservation, quantity, until)
        SELECT u.l, order_origins[o], u.q, h.until FROM unnest(levels, quantities) u (l, q);
      FOR m IN i..j LOOP
        k := line_levels[m];
        kept[k] := kept[k] + line_quantities[m];
      END LOOP;
    END IF;
  END IF;`;

/** What becomes of the reservation. */
const writeReservation = sql`
  IF verdict = 1 AND order_kinds[o] IN ('reserve', 'release', 'commit') THEN
    IF order_kinds[o] = 'reserve' THEN
      INSERT INTO ${own("stock_reservation")} AS t (book, id, until, made_at, levels, quantities, source, reference_type, reference_id, user_id, note)
        VALUES (book, order_origins[o], moment + order_ttls[o] * interval '1 millisecond', moment, levels, quantities, order_sources[o], order_types[o], order_references[o], order_users[o], order_notes[o])
        ON CONFLICT ON CONSTRAINT stock_reservation_pkey DO UPDATE SET until = excluded.until, made_at = excluded.made_at
          WHERE t.levels = excluded.levels AND t.quantities = excluded.quantities AND t.state = 'open';
      IF FOUND THEN
        INSERT INTO ${own("stock_reserved")} (level, reservation, quantity, until)
          SELECT u.l, order_origins[o], u.q, moment + order_ttls[o] * interval '1 millisecond' FROM unnest(levels, quantities) u (l, q);
        untils[o] := extract(epoch FROM moment + order_ttls[o] * interval '1 millisecond') * 1000;
        states[o] := 'open';
      ELSE
        -- Somebody made another one of that id just now.
        verdict := 3;
      END IF;
    ELSE
      states[o] := CASE order_kinds[o] WHEN 'commit' THEN 'committed' ELSE 'released' END;
      UPDATE ${own("stock_reservation")} t SET state = states[o] WHERE t.book = book AND t.id = order_origins[o];
    END IF;
  END IF;`;

/** The ledger, the levels, the caller's own table. */
const writeMovements = sql`
  IF cardinality(moved_levels) > 0 THEN
    INSERT INTO ${own("stock_movement")} (level, version, quantity, balance, at, line, parts, kind, source, external_id, reference_type, reference_id, user_id, note, origin)
      SELECT n.l, n.v, n.q, n.b, moment, n.i, coalesce(order_parts[n.o], 1),
        coalesce(order_kinds[n.o], 'opening'), coalesce(order_sources[n.o], 'MANUAL'), coalesce(order_ids[n.o], 'opening'),
        order_types[n.o], order_references[n.o], order_users[n.o], order_notes[n.o], CASE order_kinds[n.o] WHEN 'return' THEN order_origins[n.o] END
      FROM unnest(moved_levels, moved_versions, moved_quantities, moved_balances, moved_orders, moved_lines) n (l, v, q, b, o, i);
  END IF;
  UPDATE ${own("stock_level")} t SET on_hand = n.h, reserved = n.r, version = n.v
    FROM unnest(id, hand, kept, version, kept_before, version_before) n (id, h, r, v, r0, v0)
    WHERE t.id = n.id AND (n.v > n.v0 OR n.r <> n.r0);
  IF place IS NOT NULL AND cardinality(moved_orders) > 0 AND 0 < ANY (moved_orders) THEN
    PERFORM set_config(${own.text("stock")}, 'on', true);
    EXECUTE ${own("stock_own")}(place, 'write')
      USING level_skus, level_locations, ARRAY(SELECT CASE WHEN EXISTS (SELECT FROM unnest(moved_levels, moved_orders) y (l, o) WHERE y.l = u.id AND y.o > 0) THEN u.h END
        FROM unnest(id, hand) WITH ORDINALITY u (id, h, n) ORDER BY u.n);
    PERFORM set_config(${own.text("stock")}, '', true);
  END IF;`;

/**
 * Decides about orders in the order in which they came, each all or nothing.
 * Verdicts: 0 short, 1 done, 2 done before, 3 the id was used for something else, 4 a level is not there,
 * 5 no such sale or reservation, 6 more than is left of the sale, 7 the reservation is over.
 * place: the caller's own table, whose rows are locked after ours, in the same order.
 */
const decide = sql`CREATE OR REPLACE FUNCTION ${own("stock_decide")}(${batch})
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  level_skus ALIAS FOR ls;
  level_locations ALIAS FOR ll;
  level_makes ALIAS FOR lm;
  order_kinds ALIAS FOR ok;
  order_ids ALIAS FOR oi;
  order_sources ALIAS FOR os;
  order_types ALIAS FOR ot;
  order_references ALIAS FOR oref;
  order_users ALIAS FOR ou;
  order_notes ALIAS FOR ow;
  order_origins ALIAS FOR oof;
  order_ttls ALIAS FOR ottl;
  order_parts ALIAS FOR op;
  line_levels ALIAS FOR lk;
  line_orders ALIAS FOR lo;
  line_numbers ALIAS FOR li;
  line_quantities ALIAS FOR lq;
  level_count int := cardinality(level_skus);
  order_count int := cardinality(order_kinds);
  line_count int := cardinality(line_levels);
  moment timestamptz;
  r record;
  h ${own("stock_reservation")};
  id bigint[] := array_fill(NULL::bigint, ARRAY[level_count]);
  hand bigint[] := id;
  kept bigint[] := id;
  min bigint[] := id;
  version bigint[] := id;
  kept_before bigint[];
  version_before bigint[];
  reaped boolean[] := array_fill(false, ARRAY[level_count]);
  prior_versions bigint[];
  prior_quantities bigint[];
  prior_balances bigint[];
  prior_parts int[];
  prior_ats float8[];
  prior_same boolean[];
  moved_levels bigint[] := '{}';
  moved_versions bigint[] := '{}';
  moved_quantities bigint[] := '{}';
  moved_balances bigint[] := '{}';
  moved_orders int[] := '{}';
  moved_lines int[] := '{}';
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
  IF level_count > 1 AND order_count > 1 THEN
    ${briefly};
  END IF;
  ${lockLevels}
  version_before := version;
  ${readOwn}
  kept_before := kept;
  moment := clock_timestamp();
  at := extract(epoch FROM moment) * 1000;
  verdicts := array_fill(0, ARRAY[order_count]);
  ats := array_fill(at, ARRAY[order_count]);
  untils := array_fill(NULL::float8, ARRAY[order_count]);
  states := array_fill(NULL::text, ARRAY[order_count]);
  moved := array_fill(NULL::bigint, ARRAY[line_count]);
  balances := moved;
  versions := moved;
  rooms := moved;
  prior_versions := moved;
  ${findMovements}
  FOR o IN 1..order_count LOOP
    i := x;
    WHILE x <= line_count AND line_orders[x] = o LOOP x := x + 1; END LOOP;
    j := x - 1;
    n := j - i + 1;
    verdict := 1;
    FOR m IN i..j LOOP
      k := line_levels[m];
      IF id[k] IS NULL THEN verdict := 4; END IF;
      rooms[m] := CASE WHEN id[k] IS NOT NULL THEN hand[k] - kept[k] - min[k] END;
    END LOOP;
    moves := order_kinds[o] NOT IN ('reserve', 'release');

    ${findRepeats}
    ${findReservation}
    ${findRoom}
    ${writeReservation}
    verdicts[o] := verdict;
    CONTINUE WHEN verdict <> 1;
    FOR m IN i..j LOOP
      k := line_levels[m];
      IF order_kinds[o] = 'reserve' THEN
        kept[k] := kept[k] + line_quantities[m];
        moved[m] := line_quantities[m];
      ELSIF moves THEN
        hand[k] := hand[k] + moved[m];
        version[k] := version[k] + 1;
        moved_levels := moved_levels || id[k];
        moved_versions := moved_versions || version[k];
        moved_quantities := moved_quantities || moved[m];
        moved_balances := moved_balances || hand[k];
        moved_orders := moved_orders || o;
        moved_lines := moved_lines || line_numbers[m];
      ELSE
        moved[m] := line_quantities[m];
      END IF;
      balances[m] := hand[k];
      versions[m] := version[k];
    END LOOP;
  END LOOP;

  ${writeMovements}
END
$function$`;

/**
 * What most batches come to: lines that all fit, under ids that are new. No lock comes first: the UPDATE itself goes through
 * the levels in their order, and each is checked as it is found after any wait. Of each level the caller says what all lines
 * come to (lsum), how many (lcount), and the lowest on the way (llow); of each line, the sum up to it (lt) and the how manieth
 * of its level it is (lv). Whatever else turns out is undone, and left to stock_decide.
 */
const apply = sql`CREATE OR REPLACE FUNCTION ${own("stock_apply")}(plain boolean, lsum bigint[], lcount int[], llow bigint[], lt bigint[], lv int[], ${batch})
LANGUAGE plpgsql ${plans} SET enable_bitmapscan = off AS $function$
#variable_conflict use_variable
DECLARE
  level_skus ALIAS FOR ls;
  level_locations ALIAS FOR ll;
  level_makes ALIAS FOR lm;
  order_kinds ALIAS FOR ok;
  order_ids ALIAS FOR oi;
  order_sources ALIAS FOR os;
  order_types ALIAS FOR ot;
  order_references ALIAS FOR oref;
  order_users ALIAS FOR ou;
  order_notes ALIAS FOR ow;
  order_origins ALIAS FOR oof;
  order_ttls ALIAS FOR ottl;
  order_parts ALIAS FOR op;
  line_levels ALIAS FOR lk;
  line_orders ALIAS FOR lo;
  line_numbers ALIAS FOR li;
  line_quantities ALIAS FOR lq;
  level_sums ALIAS FOR lsum;
  level_counts ALIAS FOR lcount;
  level_lows ALIAS FOR llow;
  line_totals ALIAS FOR lt;
  line_versions ALIAS FOR lv;
  level record;
  ids bigint[];
  hands bigint[];
  olds bigint[];
  moment timestamptz;
BEGIN
  IF plain THEN
    IF cardinality(level_skus) > 1 AND cardinality(order_kinds) > 1 THEN
      ${briefly};
    END IF;
    IF make THEN
      ${make};
    END IF;
    BEGIN
      -- Joined by the index on names whichever side comes first, so in the order of names: nobody waits crosswise.
      WITH moved AS (
        UPDATE ${own("stock_level")} t SET on_hand = t.on_hand + z.q, version = t.version + z.c
        FROM (SELECT u.* FROM unnest(level_skus, level_locations, level_sums, level_counts, level_lows) WITH ORDINALITY u (s, l, q, c, low, n)
          ORDER BY u.s COLLATE "C", u.l COLLATE "C" OFFSET 0) z
        WHERE t.book = book AND t.sku = z.s AND t.location = z.l AND ${room("t", "z.low")}
        RETURNING z.n, t.id, t.on_hand - z.q AS hand, t.version - z.c AS version)
      SELECT count(*) AS n, array_agg(moved.id ORDER BY moved.n) AS ids, array_agg(moved.hand ORDER BY moved.n) AS hands,
        array_agg(moved.version ORDER BY moved.n) AS versions INTO level FROM moved;
      IF level.n < cardinality(level_skus) THEN
        RAISE SQLSTATE 'HF001';
      END IF;
      moment := clock_timestamp();
      ids := level.ids;
      hands := level.hands;
      olds := level.versions;
      SELECT array_agg(hands[u.k] + u.t ORDER BY u.n), array_agg(olds[u.k] + u.v ORDER BY u.n) INTO balances, versions
        FROM unnest(line_levels, line_totals, line_versions) WITH ORDINALITY u (k, t, v, n);
      INSERT INTO ${own("stock_movement")} (level, version, quantity, balance, at, line, parts, kind, source, external_id, reference_type, reference_id, user_id, note)
        SELECT ids[n.k], n.v, n.q, n.b, moment, n.i, order_parts[n.o], order_kinds[n.o], order_sources[n.o], order_ids[n.o], order_types[n.o], order_references[n.o], order_users[n.o], order_notes[n.o]
        FROM unnest(line_levels, versions, line_quantities, balances, line_numbers, line_orders) n (k, v, q, b, i, o);
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
    FROM ${own("stock_decide")}(book, place, make, look, level_skus, level_locations, level_makes, order_kinds, order_ids, order_sources, order_types, order_references, order_users, order_notes, order_origins, order_ttls, order_parts, line_levels, line_orders, line_numbers, line_quantities) d;
END
$function$`;

/** The same for a single line: few and plain values, since parsing the many of a batch took longer than what it does. */
const move = sql`CREATE OR REPLACE FUNCTION ${own("stock_move")}(
  book text, look boolean, s text, l text, q bigint, what text, op text, source text, rtype text, rid text, by_ text, note_ text,
  OUT at float8, OUT verdict int, OUT entered float8, OUT moved bigint, OUT balance bigint, OUT version bigint, OUT room bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  t record;
  moment timestamptz;
BEGIN
  UPDATE ${own("stock_level")} x SET on_hand = x.on_hand + q, version = x.version + 1
    WHERE x.book = book AND x.sku = s AND x.location = l AND (q >= 0 OR ${room("x", "q")})
    RETURNING x.id, x.on_hand, x.version INTO t;
  IF FOUND THEN
    moment := clock_timestamp();
    INSERT INTO ${own("stock_movement")} (level, version, quantity, balance, at, line, parts, kind, source, external_id, reference_type, reference_id, user_id, note)
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
    UPDATE ${own("stock_level")} x SET on_hand = x.on_hand - q, version = x.version - 1 WHERE x.id = t.id;
    look := true;
  END IF;
  SELECT d.at, d.verdicts[1], d.ats[1], d.moved[1], d.balances[1], d.versions[1], d.rooms[1]
    INTO at, verdict, entered, moved, balance, version, room
    FROM ${own("stock_decide")}(book, NULL, true, look, ARRAY[s], ARRAY[l], ARRAY[q >= 0], ARRAY[what], ARRAY[op], ARRAY[source],
      ARRAY[rtype], ARRAY[rid], ARRAY[by_], ARRAY[note_], ARRAY[NULL::text], ARRAY[NULL::bigint],
      ARRAY[1], ARRAY[1], ARRAY[1], ARRAY[1], ARRAY[q]) d;
END
$function$`;

/** The same for a single order of several lines: one statement that moves the levels, and then writes the movements. */
const order = sql`CREATE OR REPLACE FUNCTION ${own("stock_order")}(
  book text, make boolean, look boolean, ls text[], ll text[], lq bigint[],
  what text, op text, source text, rtype text, rid text, by_ text, note_ text,
  OUT missing boolean, OUT at float8, OUT verdict int, OUT entered float8, OUT moved bigint[], OUT balances bigint[],
  OUT versions bigint[], OUT rooms bigint[])
LANGUAGE plpgsql ${plans} SET enable_bitmapscan = off AS $function$
#variable_conflict use_variable
DECLARE
  level_skus ALIAS FOR ls;
  level_locations ALIAS FOR ll;
  line_quantities ALIAS FOR lq;
  n int := cardinality(level_skus);
  level_makes boolean[];
  done record;
BEGIN
  missing := false;
  IF make THEN
    level_makes := ARRAY(SELECT u.q >= 0 FROM unnest(line_quantities) WITH ORDINALITY u (q, n) ORDER BY u.n);
    ${make};
  END IF;
  BEGIN
    WITH moved AS (
      UPDATE ${own("stock_level")} t SET on_hand = t.on_hand + z.q, version = t.version + 1
      FROM (SELECT u.* FROM unnest(level_skus, level_locations, line_quantities) WITH ORDINALITY u (s, l, q, n) ORDER BY u.s COLLATE "C", u.l COLLATE "C" OFFSET 0) z
      WHERE t.book = book AND t.sku = z.s AND t.location = z.l AND (z.q >= 0 OR ${room("t", "z.q")})
      RETURNING z.n, t.id, z.q, t.on_hand, t.version),
    -- When all of them are moved.
    whole AS MATERIALIZED (SELECT count(*) AS n FROM moved),
    moment AS MATERIALIZED (SELECT clock_timestamp() AS at FROM whole WHERE whole.n = n),
    written AS (
      INSERT INTO ${own("stock_movement")} (level, version, quantity, balance, at, line, parts, kind, source, external_id, reference_type, reference_id, user_id, note)
      SELECT m.id, m.version, m.q, m.on_hand, moment.at, m.n, n, what, source, op, rtype, rid, by_, note_ FROM moment, moved m)
    SELECT moment.at, (SELECT array_agg(m.on_hand ORDER BY m.n) FROM moved m) AS balances,
      (SELECT array_agg(m.version ORDER BY m.n) FROM moved m) AS versions INTO done FROM moment;
    IF NOT FOUND THEN
      RAISE SQLSTATE 'HF001';
    END IF;
    at := extract(epoch FROM done.at) * 1000;
    entered := at;
    verdict := 1;
    moved := line_quantities;
    balances := done.balances;
    versions := done.versions;
    RETURN;
  EXCEPTION
    WHEN SQLSTATE 'HF001' THEN NULL;
    WHEN unique_violation THEN look := true;
  END;
  SELECT d.missing, d.at, d.verdicts[1], d.ats[1], d.moved, d.balances, d.versions, d.rooms
    INTO missing, at, verdict, entered, moved, balances, versions, rooms
    FROM ${own("stock_decide")}(book, NULL, make, look, level_skus, level_locations, ARRAY(SELECT u.q >= 0 FROM unnest(line_quantities) WITH ORDINALITY u (q, n) ORDER BY u.n),
      ARRAY[what], ARRAY[op], ARRAY[source], ARRAY[rtype], ARRAY[rid], ARRAY[by_], ARRAY[note_], ARRAY[NULL::text], ARRAY[NULL::bigint],
      ARRAY[n], ARRAY(SELECT generate_series(1, n)), array_fill(1, ARRAY[n]), ARRAY(SELECT generate_series(1, n)), line_quantities) d;
END
$function$`;

/** What comes after: 'commit' and 'release' of a reservation, 'return' of what was sold. Finds its lines, then decides. */
const follow = sql`CREATE OR REPLACE FUNCTION ${own("stock_follow")}(
  book text, place jsonb, what text, op text, source text, rtype text, rid text, by_ text, note_ text, of_ text,
  ws text[], wl text[], wq bigint[],
  OUT at float8, OUT verdict int, OUT entered float8, OUT until float8, OUT state text, OUT skus text[], OUT locations text[],
  OUT moved bigint[], OUT balances bigint[], OUT versions bigint[], OUT rooms bigint[])
LANGUAGE plpgsql ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  wanted_skus ALIAS FOR ws;
  wanted_locations ALIAS FOR wl;
  wanted_quantities ALIAS FOR wq;
  n int;
  quantities bigint[];
  h ${own("stock_reservation")};
BEGIN
  IF what <> 'return' THEN
    SELECT t.* INTO h FROM ${own("stock_reservation")} t WHERE t.book = book AND t.id = of_;
    -- As they were when it was made.
    SELECT array_agg(t.sku ORDER BY u.n), array_agg(t.location ORDER BY u.n), array_agg(u.q ORDER BY u.n) INTO skus, locations, quantities
      FROM unnest(h.levels, h.quantities) WITH ORDINALITY u (l, q, n) JOIN ${own("stock_level")} t ON t.id = u.l;
    source := coalesce(source, h.source);
    IF rid IS NULL THEN
      rtype := h.reference_type;
      rid := h.reference_id;
    END IF;
    by_ := coalesce(by_, h.user_id);
    note_ := coalesce(note_, h.note);
  ELSIF wanted_skus IS NOT NULL THEN
    skus := wanted_skus;
    locations := wanted_locations;
    quantities := wanted_quantities;
  ELSE
    -- All that is left: of lines that came back already, nothing is.
    SELECT array_agg(x.sku ORDER BY x.sku, x.location), array_agg(x.location ORDER BY x.sku, x.location), array_agg(NULL::bigint)
      INTO skus, locations, quantities FROM (
        SELECT t.sku, t.location, -m.quantity AS sold, m.external_id, m.level,
          coalesce((SELECT sum(b.quantity) FROM ${own("stock_movement")} b
            WHERE b.origin = of_ AND b.level = m.level AND b.external_id <> op), 0) AS back
        FROM ${own("stock_movement")} m JOIN ${own("stock_level")} t ON t.id = m.level
        WHERE m.external_id = of_ AND t.book = book AND m.quantity < 0 AND m.kind IN ('apply', 'commit')) x
      WHERE x.back < x.sold;
    IF skus IS NULL THEN
      -- Nothing is left, or nothing was sold.
      verdict := CASE WHEN EXISTS (SELECT FROM ${own("stock_movement")} m JOIN ${own("stock_level")} t ON t.id = m.level
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
    FROM ${own("stock_decide")}(book, place, false, true, skus, locations, array_fill(false, ARRAY[n]), ARRAY[what], ARRAY[op], ARRAY[source],
      ARRAY[rtype], ARRAY[rid], ARRAY[by_], ARRAY[note_], ARRAY[of_], ARRAY[NULL::bigint],
      ARRAY[n], ARRAY(SELECT generate_series(1, n)), array_fill(1, ARRAY[n]), ARRAY(SELECT generate_series(1, n)), quantities) d;
END
$function$`;

/** The least that has to stay. Refused if less is there already. */
const minimum = sql`CREATE OR REPLACE FUNCTION ${own("stock_minimum")}(book text, s text, l text, least_ bigint,
  OUT verdict int, OUT balance bigint, OUT version bigint, OUT room bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  t ${own("stock_level")};
BEGIN
  INSERT INTO ${own("stock_level")} (book, sku, location) SELECT book, s, l
    WHERE NOT EXISTS (SELECT FROM ${own("stock_level")} x WHERE x.book = book AND x.sku = s AND x.location = l) ON CONFLICT DO NOTHING;
  SELECT x.* INTO t FROM ${own("stock_level")} x WHERE x.book = book AND x.sku = s AND x.location = l FOR NO KEY UPDATE;
  IF t.on_hand - t.reserved < least_ THEN
    WITH gone AS (DELETE FROM ${own("stock_reserved")} x WHERE x.level = t.id AND x.until <= clock_timestamp() RETURNING x.quantity)
      SELECT t.reserved - coalesce(sum(gone.quantity), 0) INTO t.reserved FROM gone;
  END IF;
  verdict := CASE WHEN t.on_hand - t.reserved >= least_ OR t.elsewhere THEN 1 ELSE 0 END;
  UPDATE ${own("stock_level")} x SET reserved = t.reserved, min_level = CASE verdict WHEN 1 THEN least_ ELSE x.min_level END WHERE x.id = t.id;
  balance := t.on_hand;
  version := t.version;
  room := t.on_hand - t.reserved;
END
$function$`;

/**
 * Makes movements and what is on hand agree. trust: 'ledger', what is on hand becomes what the movements come to; 'levels',
 * what is on hand stays as it is. Either way a movement of what the movements lack says so; and what is open is what is
 * reserved. Where movements are missing, what the next one says counts, as after a repair. Returns what is on hand then;
 * NULL: it was done before, and the answer was lost.
 */
const mend = sql`CREATE OR REPLACE FUNCTION ${own("stock_mend")}(book text, place jsonb, s text, l text, op text, source text, by_ text, note_ text, trust text)
RETURNS bigint LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  t ${own("stock_level")};
  r record;
  anchor record;
  total bigint;
  open_ bigint;
  there boolean := false;
BEGIN
  SELECT x.* INTO t FROM ${own("stock_level")} x WHERE x.book = book AND x.sku = s AND x.location = l FOR NO KEY UPDATE;
  IF NOT FOUND OR EXISTS (SELECT FROM ${own("stock_movement")} m WHERE m.external_id = op AND m.level = t.id) THEN
    RETURN NULL;
  END IF;
  IF place IS NOT NULL THEN
    FOR r IN EXECUTE ${own("stock_own")}(place, 'read') USING ARRAY[s], ARRAY[l] LOOP
      t.on_hand := r.on_hand;
      there := true;
    END LOOP;
  END IF;
  SELECT coalesce(sum(m.quantity), 0), coalesce(max(m.version), 0) INTO total, t.version FROM ${own("stock_movement")} m WHERE m.level = t.id;
  SELECT coalesce(sum(x.quantity), 0) INTO open_ FROM ${own("stock_reserved")} x WHERE x.level = t.id;
  IF trust = 'ledger' THEN
    SELECT m.version, m.balance INTO anchor FROM (SELECT x.version, x.balance, x.kind, lag(x.version) OVER (ORDER BY x.version) AS before
        FROM ${own("stock_movement")} x WHERE x.level = t.id) m
      WHERE m.kind = 'repair' OR m.version <> coalesce(m.before, 0) + 1 ORDER BY m.version DESC LIMIT 1;
    t.on_hand := coalesce(anchor.balance, 0) + coalesce((SELECT sum(m.quantity) FROM ${own("stock_movement")} m
      WHERE m.level = t.id AND m.version > coalesce(anchor.version, 0)), 0);
  END IF;
  IF NOT t.elsewhere AND t.on_hand - open_ < t.min_level THEN
    RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', MESSAGE = CASE trust
      WHEN 'ledger' THEN format('the movements of %s at %s come to %s, and %s are reserved, %s have to stay: release reservations, lower the minimum, or trust the levels',
        s, l, t.on_hand, open_, t.min_level)
      ELSE format('%s of %s are at %s, and %s are reserved, %s have to stay: release reservations, or lower the minimum',
        t.on_hand, s, l, open_, t.min_level) END;
  END IF;
  IF trust = 'ledger' AND there THEN
    PERFORM set_config(${own.text("stock")}, 'on', true);
    EXECUTE ${own("stock_own")}(place, 'write') USING ARRAY[s], ARRAY[l], ARRAY[t.on_hand];
    PERFORM set_config(${own.text("stock")}, '', true);
  END IF;
  INSERT INTO ${own("stock_movement")} (level, version, quantity, balance, at, line, parts, kind, source, external_id, user_id, note)
    VALUES (t.id, t.version + 1, t.on_hand - total, t.on_hand, clock_timestamp(), 1, 1, 'repair', source, op, by_, note_);
  UPDATE ${own("stock_level")} x SET on_hand = t.on_hand, reserved = open_, version = t.version + 1 WHERE x.id = t.id;
  RETURN t.on_hand;
END
$function$`;

/** As releases before stock_mend called it: what is on hand stayed as it was. */
const repair = sql`CREATE OR REPLACE FUNCTION ${own("stock_repair")}(book text, place jsonb, s text, l text, op text, source text, by_ text, note_ text)
RETURNS bigint LANGUAGE sql AS $function$
  SELECT ${own("stock_mend")}(book, place, s, l, op, source, by_, note_, 'levels')
$function$`;

/**
 * The statements about a table of the caller's. Types are the catalog's, so that its own index on the column is used;
 * but only the column's own text is that SKU: "007" would be a second level of a 7, as would another case of a uuid.
 * $1, $2: skus and locations; $3: what is on hand now, NULL: as it was.
 */
const ownTable = sql`CREATE OR REPLACE FUNCTION ${own("stock_own")}(place jsonb, what text) RETURNS text
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
$function$`;

/** Levels of ours for rows of the caller's that have none yet. In order, and before anything is locked. */
const adopt = sql`CREATE OR REPLACE FUNCTION ${own("stock_adopt")}(book text, place jsonb, ls text[], ll text[]) RETURNS int
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  level_skus ALIAS FOR ls;
  level_locations ALIAS FOR ll;
  s text[];
  l text[];
  n int;
BEGIN
  IF level_skus IS NOT NULL THEN
    SELECT array_agg(u.s), array_agg(u.l) INTO s, l FROM unnest(level_skus, level_locations) u (s, l)
      WHERE NOT EXISTS (SELECT FROM ${own("stock_level")} t WHERE t.book = book AND t.sku = u.s AND t.location = u.l);
    IF s IS NULL THEN RETURN 0; END IF;
  END IF;
  EXECUTE format('INSERT INTO ${own("stock_level")} (book, sku, location, elsewhere)
    SELECT $3, x.s, x.l, true FROM (%s) x ORDER BY x.s COLLATE "C", x.l COLLATE "C" ON CONFLICT DO NOTHING',
    ${own("stock_own")}(place, CASE WHEN level_skus IS NULL THEN 'spots' ELSE 'some' END)) USING s, l, book;
  GET DIAGNOSTICS n = ROW_COUNT;
  RETURN n;
END
$function$`;

/** Levels as they are now. Of a table of the caller's, with what it says. */
const levels = sql`CREATE OR REPLACE FUNCTION ${own("stock_levels")}(book text, place jsonb, skus text[], at_location text)
RETURNS TABLE (sku text, location text, on_hand bigint, reserved bigint, min_level bigint, version bigint)
LANGUAGE plpgsql AS $function$
#variable_conflict use_column
DECLARE
  moment timestamptz := clock_timestamp();
BEGIN
  IF place IS NULL THEN
    RETURN QUERY SELECT t.sku, t.location, t.on_hand, t.reserved - coalesce(
        (SELECT sum(x.quantity)::bigint FROM ${own("stock_reserved")} x WHERE t.reserved > 0 AND x.level = t.id AND x.until <= moment), 0), t.min_level, t.version
      FROM ${own("stock_level")} t WHERE t.book = stock_levels.book
        AND (skus IS NULL OR t.sku = ANY (skus)) AND (at_location IS NULL OR t.location = at_location) ORDER BY t.sku, t.location;
  ELSE
    RETURN QUERY EXECUTE format('SELECT y.s, y.l, y.on_hand, coalesce(t.reserved - coalesce(
        (SELECT sum(x.quantity)::bigint FROM ${own("stock_reserved")} x WHERE x.level = t.id AND x.until <= $3), 0), 0),
        coalesce(y.min_level, t.min_level, 0), coalesce(t.version, 0)
      FROM (%s) y LEFT JOIN ${own("stock_level")} t ON t.book = $4 AND t.sku = y.s AND t.location = y.l
      WHERE ($2::text IS NULL OR y.l = $2) ORDER BY y.s COLLATE "C", y.l COLLATE "C"',
      ${own("stock_own")}(place, 'levels')) USING skus, at_location, moment, stock_levels.book;
  END IF;
END
$function$`;

/** Takes over so many rows of the caller's table: a level, and a movement of what is there. Resolves to how many. */
const open = sql`CREATE OR REPLACE FUNCTION ${own("stock_open")}(book text, place jsonb, most int) RETURNS int
LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
  s text[];
  l text[];
BEGIN
  PERFORM ${own("stock_adopt")}(book, place, NULL, NULL);
  SELECT array_agg(x.sku), array_agg(x.location) INTO s, l FROM (SELECT t.sku, t.location FROM ${own("stock_level")} t
    WHERE t.book = book AND t.elsewhere AND t.version = 0 ORDER BY t.sku, t.location LIMIT most) x;
  IF s IS NULL THEN RETURN 0; END IF;
  PERFORM ${own("stock_decide")}(book, place, false, false, s, l, array_fill(false, ARRAY[cardinality(s)]),
    '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}');
  RETURN (SELECT count(*) FROM unnest(s, l) u (s, l) JOIN ${own("stock_level")} t ON t.book = book AND t.sku = u.s AND t.location = u.l
    WHERE t.version > 0);
END
$function$`;

/** For a trigger on the caller's table: what is on hand changes by movements. */
const guard = sql`CREATE OR REPLACE FUNCTION ${own("stock_guard")}() RETURNS trigger
LANGUAGE plpgsql AS $function$
BEGIN
  IF current_setting(${own.text("stock")}, true) IS DISTINCT FROM 'on' THEN
    RAISE EXCEPTION 'Stock in %.% changes through movements only', TG_TABLE_SCHEMA, TG_TABLE_NAME
      USING ERRCODE = 'integrity_constraint_violation', HINT = 'Call apply, increase, decrease or adjustTo of holdfast/stock.';
  END IF;
  RETURN NEW;
END
$function$`;

export const deciding: readonly Statement[] = [
  ownTable,
  adopt,
  decide,
  apply,
  move,
  order,
  follow,
  minimum,
  mend,
  repair,
  levels,
  open,
  guard,
];
