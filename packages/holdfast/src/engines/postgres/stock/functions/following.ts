/** What comes after a reservation or a sale. */
import { own, sql } from "../../../../seam/sql.ts";
import { plans } from "./parts.ts";
import { plpgsql } from "../../search-path.ts";

/** What comes after: 'commit' and 'release' of a reservation, 'return' of what was sold. Finds its lines, then decides. */
export const follow = sql`CREATE OR REPLACE FUNCTION ${own("stock_follow")}(
  book text, place jsonb, what text, op text, source text, rtype text, rid text, by_ text, note_ text, of_ text,
  ws text[], wl text[], wq bigint[],
  OUT at float8, OUT verdict int, OUT entered float8, OUT until float8, OUT state text, OUT skus text[], OUT locations text[],
  OUT moved bigint[], OUT balances bigint[], OUT versions bigint[], OUT rooms bigint[])
${plpgsql} ${plans} AS $function$
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
