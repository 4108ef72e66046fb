/** What there is, now and at any time, and the least that has to stay. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept } from "../../hidden.ts";
import { plpgsql } from "../../search-path.ts";

/** Levels as they are now. Of a table of the caller's, with what it says. */
export const levels = sql`CREATE OR REPLACE FUNCTION ${own("stock_levels")}(book text, place jsonb, skus text[], at_location text)
RETURNS TABLE (sku text, location text, on_hand bigint, reserved bigint, min_level bigint, version bigint)
${plpgsql} AS $function$
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
    RETURN QUERY SELECT y.s, y.l, y.on_hand, coalesce(t.reserved - coalesce(
        (SELECT sum(x.quantity)::bigint FROM ${own("stock_reserved")} x WHERE x.level = t.id AND x.until <= moment), 0), 0),
        coalesce(y.min_level, t.min_level, 0), coalesce(t.version, 0)
      FROM ${own("stock_at_own")}(place, 'levels', skus, NULL, NULL) y
      LEFT JOIN ${own("stock_level")} t ON t.book = stock_levels.book AND t.sku = y.s AND t.location = y.l
      WHERE at_location IS NULL OR y.l = at_location ORDER BY y.s COLLATE "C", y.l COLLATE "C";
  END IF;
END
$function$`;

/** Halves the versions, which have no gaps, until the last one at that time is found: 20 steps for a million movements. */
export const levelAt = sql`CREATE OR REPLACE FUNCTION ${own("stock_level_at")}(of_level bigint, moment timestamptz) RETURNS bigint
${plpgsql} STABLE AS $function$
DECLARE
  low bigint := 0;
  high bigint;
  middle bigint;
  m record;
  found_balance bigint;
BEGIN
  SELECT t.version INTO high FROM ${own("stock_movement")} t WHERE t.level = of_level ORDER BY t.version DESC LIMIT 1;
  WHILE low < high LOOP
    middle := (low + high + 1) / 2;
    -- Should one be missing after all, the one before it.
    SELECT t.version, t.at, t.balance INTO m FROM ${own("stock_movement")} t
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
$function$`;

/** The least that has to stay. Refused if less is there already. */
export const minimum = sql`CREATE OR REPLACE FUNCTION ${own("stock_minimum")}(book text, s text, l text, least_ bigint,
  OUT verdict int, OUT balance bigint, OUT version bigint, OUT room bigint)
${plpgsql} AS $function$
#variable_conflict use_variable
DECLARE
  t ${own("stock_level")};
BEGIN
  INSERT INTO ${own("stock_level")} (book, sku, location) SELECT book, s, l
    WHERE NOT EXISTS (SELECT FROM ${own("stock_level")} x WHERE x.book = book AND x.sku = s AND x.location = l) ON CONFLICT DO NOTHING;
  SELECT x.* INTO t FROM ${own("stock_level")} x WHERE x.book = book AND x.sku = s AND x.location = l FOR NO KEY UPDATE;
  ${kept("stock_level")};
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

/** Movements as people read them: with the names of what was moved. */
export const entries = sql`CREATE OR REPLACE VIEW ${own("stock_entry")} AS
  SELECT l.book, l.sku, l.location, m.version, m.kind, m.quantity, m.balance, m.at, m.source, m.external_id, m.reference_type,
    m.reference_id, m.user_id, m.note, m.origin
  FROM ${own("stock_movement")} m JOIN ${own("stock_level")} l ON l.id = m.level`;
