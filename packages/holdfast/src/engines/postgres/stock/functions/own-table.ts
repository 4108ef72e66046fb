/** What is on hand in a table of the caller's. */
import { own, sql } from "../../../../seam/sql.ts";

/**
 * The statements about a table of the caller's. Types are the catalog's, so that its own index on the column is used;
 * but only the column's own text is that SKU: "007" would be a second level of a 7, as would another case of a uuid.
 * $1, $2: skus and locations; $3: what is on hand now, NULL: as it was.
 */
export const ownTable = sql`CREATE OR REPLACE FUNCTION ${own("stock_own")}(place jsonb, what text) RETURNS text
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
export const adopt = sql`CREATE OR REPLACE FUNCTION ${own("stock_adopt")}(book text, place jsonb, ls text[], ll text[]) RETURNS int
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

/** Takes over so many rows of the caller's table: a level, and a movement of what is there. Resolves to how many. */
export const open = sql`CREATE OR REPLACE FUNCTION ${own("stock_open")}(book text, place jsonb, most int) RETURNS int
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
export const guard = sql`CREATE OR REPLACE FUNCTION ${own("stock_guard")}() RETURNS trigger
LANGUAGE plpgsql AS $function$
BEGIN
  IF current_setting(${own.text("stock")}, true) IS DISTINCT FROM 'on' THEN
    RAISE EXCEPTION 'Stock in %.% changes through movements only', TG_TABLE_SCHEMA, TG_TABLE_NAME
      USING ERRCODE = 'integrity_constraint_violation', HINT = 'Call apply, increase, decrease or adjustTo of holdfast/stock.';
  END IF;
  RETURN NEW;
END
$function$`;
