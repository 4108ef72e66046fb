/** The function that decides about any orders, in parts that are read one at a time. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept, vanished } from "../../hidden.ts";
import { batch, briefly, lists, make, plans } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

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
  IF place IS NULL THEN
    FOR k IN 1..level_count LOOP
      IF id[k] IS NULL AND level_makes[k] THEN
        IF make THEN
          ${vanished("stock_level")};
        END IF;
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
    FOR r IN SELECT * FROM ${own("stock_at_own")}(place, 'read', level_skus, level_locations, NULL) LOOP
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
      ${kept("stock_reserved")};
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
        GET DIAGNOSTICS k = ROW_COUNT;
        IF k <> cardinality(levels) THEN
          ${vanished("stock_reserved")};
        END IF;
        untils[o] := extract(epoch FROM moment + order_ttls[o] * interval '1 millisecond') * 1000;
        states[o] := 'open';
      ELSE
        -- Somebody made another one of that id just now.
        verdict := 3;
        PERFORM FROM ${own("stock_reservation")} t WHERE t.book = book AND t.id = order_origins[o];
        ${kept("stock_reservation")};
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
        coalesce(order_kinds[n.o], 'opening'), coalesce(order_sources[n.o], 'MANUAL'), coalesce(order_ids[n.o], 'opening:'),
        order_types[n.o], order_references[n.o], order_users[n.o], order_notes[n.o], CASE order_kinds[n.o] WHEN 'return' THEN order_origins[n.o] END
      FROM unnest(moved_levels, moved_versions, moved_quantities, moved_balances, moved_orders, moved_lines) n (l, v, q, b, o, i);
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n <> cardinality(moved_levels) THEN
      ${vanished("stock_movement")};
    END IF;
  END IF;
  UPDATE ${own("stock_level")} t SET on_hand = n.h, reserved = n.r, version = n.v
    FROM unnest(id, hand, kept, version, kept_before, version_before) n (id, h, r, v, r0, v0)
    WHERE t.id = n.id AND (n.v > n.v0 OR n.r <> n.r0);
  IF place IS NOT NULL AND cardinality(moved_orders) > 0 AND 0 < ANY (moved_orders) THEN
    PERFORM set_config(${own.text("stock")}, 'on', true);
    PERFORM ${own("stock_at_own")}(place, 'write', level_skus, level_locations, ARRAY(SELECT CASE WHEN EXISTS (SELECT FROM unnest(moved_levels, moved_orders) y (l, o) WHERE y.l = u.id AND y.o > 0) THEN u.h END
        FROM unnest(id, hand) WITH ORDINALITY u (id, h, n) ORDER BY u.n));
    PERFORM set_config(${own.text("stock")}, '', true);
  END IF;`;

/**
 * Decides about orders in the order in which they came, each all or nothing.
 * Verdicts: 0 short, 1 done, 2 done before, 3 the id was used for something else, 4 a level is not there,
 * 5 no such sale or reservation, 6 more than is left of the sale, 7 the reservation is over.
 * place: the caller's own table, whose rows are locked after ours, in the same order.
 */
export const decide = sql`CREATE OR REPLACE FUNCTION ${own("stock_decide")}(${batch})
${plpgsql} ${plans} AS $function$
#variable_conflict use_variable
DECLARE
  ${lists}
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
