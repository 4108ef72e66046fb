/** What is on hand in a table of the caller's. */
import { own, sql } from "../../../../seam/sql.ts";
import { lookingAtNothing, plpgsql, safePath } from "../../search-path.ts";

/** As whoever called said it; processes of earlier releases do not, and are given what their session began with. */
const callersPath = sql.raw(
  "coalesce(place->>'path', (SELECT p.reset_val FROM pg_settings p WHERE p.name = 'search_path'))",
);

/**
 * A statement about a table of the caller's. It runs with the caller's search path ({@link atOwnTable}), so every name in it is written
 * in full; the comparison of SKUs is that of the column's type, so that its own index is used. But only the column's own text is that
 * SKU: "007" would be a second level of a 7, as would another case of a uuid.
 * $1, $2: skus and locations; $3: what is on hand now, NULL: as it was.
 */
export const ownTable = sql`CREATE OR REPLACE FUNCTION ${own("stock_own")}(place jsonb, what text) RETURNS text
${plpgsql} STABLE AS $function$
DECLARE
  parts text[] := ARRAY(SELECT jsonb_array_elements_text(place->'table'));
  name text := (SELECT string_agg(quote_ident(p), '.' ORDER BY n) FROM unnest(parts) WITH ORDINALITY u (p, n));
  relation regclass;
  sku_type text;
  same text;
  at_sku text;
  at_place text := CASE WHEN place->>'location' IS NULL THEN format('u.l OPERATOR(pg_catalog.=) %L', place->>'only')
    ELSE format('t.%1$I::pg_catalog.text OPERATOR(pg_catalog.=) u.l AND t.%1$I::pg_catalog.text COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) u.l', place->>'location') END;
  here text := CASE WHEN place->>'location' IS NULL THEN format('%L::pg_catalog.text', place->>'only')
    ELSE format('t.%I::pg_catalog.text COLLATE pg_catalog."C"', place->>'location') END;
  least_ text := CASE WHEN place->>'minLevel' IS NULL THEN 'NULL::bigint' ELSE format('t.%I::bigint', place->>'minLevel') END;
BEGIN
  -- What the name means is the caller's.
  PERFORM set_config('search_path', ${callersPath}, true);
  relation := name::pg_catalog.regclass;
  PERFORM pg_catalog.set_config('search_path', '${sql.raw(safePath)}', true);
  SELECT format('%I.%I', n.nspname, c.relname) INTO name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
  -- Of char(n), the type of any length. A type that has no comparison of its own, such as varchar, has one of the server's.
  SELECT format('%I.%I', n.nspname, y.typname), format('OPERATOR(%I.=)', coalesce((SELECT s.nspname FROM pg_type b
      JOIN pg_operator o ON o.oprname = '=' AND o.oprleft = b.oid AND o.oprright = b.oid AND o.oprnamespace = b.typnamespace
      JOIN pg_namespace s ON s.oid = o.oprnamespace WHERE b.oid = CASE y.typtype WHEN 'd' THEN y.typbasetype ELSE y.oid END), 'pg_catalog'))
    INTO sku_type, same FROM pg_attribute a JOIN pg_type y ON y.oid = a.atttypid JOIN pg_namespace n ON n.oid = y.typnamespace
    WHERE a.attrelid = relation AND a.attname = place->>'sku' AND NOT a.attisdropped;
  IF sku_type IS NULL THEN
    RAISE undefined_column USING MESSAGE = format('there is no column %I in %s', place->>'sku', name);
  END IF;
  at_sku := format('t.%1$I %2$s u.s::%3$s AND t.%1$I::pg_catalog.text COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) u.s', place->>'sku', same, sku_type);
  RETURN CASE what
  WHEN 'read' THEN format('SELECT u.n::int, u.s, u.l, t.%I::bigint, %s
    FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) WITH ORDINALITY u (s, l, n)
    JOIN %s t ON %s AND %s ORDER BY u.s COLLATE pg_catalog."C", u.l COLLATE pg_catalog."C" FOR NO KEY UPDATE OF t',
    place->>'onHand', least_, name, at_sku, at_place)
  WHEN 'write' THEN format('UPDATE %s t SET %I = u.h FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3)) u (s, l, h)
    WHERE u.h IS NOT NULL AND %s AND %s', name, place->>'onHand', at_sku, at_place)
  -- Of some ($1, $2), or of all.
  WHEN 'spots' THEN format('SELECT NULL::int, t.%I::pg_catalog.text COLLATE pg_catalog."C", %s, NULL::bigint, NULL::bigint FROM %s t', place->>'sku', here, name)
  WHEN 'some' THEN format('SELECT NULL::int, u.s, u.l, NULL::bigint, NULL::bigint FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) u (s, l)
    WHERE EXISTS (SELECT FROM %s t WHERE %s AND %s)', name, at_sku, at_place)
  -- $1: skus, or NULL.
  WHEN 'levels' THEN format('SELECT NULL::int, t.%1$I::pg_catalog.text COLLATE pg_catalog."C", %2$s, t.%3$I::bigint, %4$s FROM %5$s t
    WHERE ($1 IS NULL OR t.%1$I %6$s ANY ($1::%7$s[]) AND t.%1$I::pg_catalog.text COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) ANY ($1))',
    place->>'sku', here, place->>'onHand', least_, name, same, sku_type)
  END;
END
$function$`;

/**
 * Runs such a statement. Whatever the caller's table brings along, such as a trigger, finds what it names as if the caller had written to
 * the table: with the caller's path, until the end of this function.
 */
export const atOwnTable = sql`CREATE OR REPLACE FUNCTION ${own("stock_at_own")}(place jsonb, what text, ls text[], ll text[], hands bigint[])
RETURNS TABLE (n int, s text, l text, on_hand bigint, min_level bigint)
${lookingAtNothing} SET row_security = on AS $function$
DECLARE
  statement text := ${own("stock_own")}(place, what);
  writes boolean := what = 'write';
BEGIN
  PERFORM set_config('search_path', ${callersPath}, true);
  IF writes THEN
    EXECUTE statement USING ls, ll, hands;
  ELSE
    RETURN QUERY EXECUTE statement USING ls, ll, hands;
  END IF;
END
$function$`;

/** Levels of ours for rows of the caller's that have none yet. In order, and before anything is locked. */
export const adopt = sql`CREATE OR REPLACE FUNCTION ${own("stock_adopt")}(book text, place jsonb, ls text[], ll text[]) RETURNS int
${plpgsql} AS $function$
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
  INSERT INTO ${own("stock_level")} (book, sku, location, elsewhere)
    SELECT book, x.s, x.l, true FROM ${own("stock_at_own")}(place, CASE WHEN level_skus IS NULL THEN 'spots' ELSE 'some' END, s, l, NULL) x
    ORDER BY x.s COLLATE "C", x.l COLLATE "C" ON CONFLICT DO NOTHING;
  GET DIAGNOSTICS n = ROW_COUNT;
  RETURN n;
END
$function$`;

/** Takes over so many rows of the caller's table: a level, and a movement of what is there. Resolves to how many. */
export const open = sql`CREATE OR REPLACE FUNCTION ${own("stock_open")}(book text, place jsonb, most int) RETURNS int
${plpgsql} AS $function$
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
${plpgsql} AS $function$
BEGIN
  IF current_setting(${own.text("stock")}, true) IS DISTINCT FROM 'on' THEN
    RAISE EXCEPTION 'Stock in %.% changes through movements only', TG_TABLE_SCHEMA, TG_TABLE_NAME
      USING ERRCODE = 'integrity_constraint_violation', HINT = 'Call apply, increase, decrease or adjustTo of holdfast/stock.';
  END IF;
  RETURN NEW;
END
$function$`;
