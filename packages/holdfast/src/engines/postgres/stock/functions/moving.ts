/** What most calls come to, in less time: for the usual batch, for a single line, and for a single order. */
import { own, sql } from "../../../../seam/sql.ts";
import { vanished } from "../../hidden.ts";
import { batch, briefly, lists, make, plans, room } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/**
 * What most batches come to: lines that all fit, under ids that are new. No lock comes first: the UPDATE itself goes through
 * the levels in their order, and each is checked as it is found after any wait. Of each level the caller says what all lines
 * come to (lsum), how many (lcount), and the lowest on the way (llow); of each line, the sum up to it (lt) and the how manieth
 * of its level it is (lv). Whatever else turns out is undone, and left to stock_decide.
 */
export const apply = sql`CREATE OR REPLACE FUNCTION ${own("stock_apply")}(plain boolean, lsum bigint[], lcount int[], llow bigint[], lt bigint[], lv int[], ${batch})
${plpgsql} ${plans} SET enable_bitmapscan = off AS $function$
#variable_conflict use_variable
DECLARE
  ${lists}
  level_sums ALIAS FOR lsum;
  level_counts ALIAS FOR lcount;
  level_lows ALIAS FOR llow;
  line_totals ALIAS FOR lt;
  line_versions ALIAS FOR lv;
  level record;
  ids bigint[];
  hands bigint[];
  olds bigint[];
  written int;
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
      GET DIAGNOSTICS written = ROW_COUNT;
      IF written <> cardinality(line_levels) THEN
        ${vanished("stock_movement")};
      END IF;
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
export const move = sql`CREATE OR REPLACE FUNCTION ${own("stock_move")}(
  book text, look boolean, s text, l text, q bigint, what text, op text, source text, rtype text, rid text, by_ text, note_ text,
  OUT at float8, OUT verdict int, OUT entered float8, OUT moved bigint, OUT balance bigint, OUT version bigint, OUT room bigint)
${plpgsql} AS $function$
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
export const order = sql`CREATE OR REPLACE FUNCTION ${own("stock_order")}(
  book text, make boolean, look boolean, ls text[], ll text[], lq bigint[],
  what text, op text, source text, rtype text, rid text, by_ text, note_ text,
  OUT missing boolean, OUT at float8, OUT verdict int, OUT entered float8, OUT moved bigint[], OUT balances bigint[],
  OUT versions bigint[], OUT rooms bigint[])
${plpgsql} ${plans} SET enable_bitmapscan = off AS $function$
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
      SELECT m.id, m.version, m.q, m.on_hand, moment.at, m.n, n, what, source, op, rtype, rid, by_, note_ FROM moment, moved m RETURNING 1)
    SELECT moment.at, (SELECT count(*) FROM written) AS lines, (SELECT array_agg(m.on_hand ORDER BY m.n) FROM moved m) AS balances,
      (SELECT array_agg(m.version ORDER BY m.n) FROM moved m) AS versions INTO done FROM moment;
    IF NOT FOUND THEN
      RAISE SQLSTATE 'HF001';
    END IF;
    IF done.lines <> n THEN
      ${vanished("stock_movement")};
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
