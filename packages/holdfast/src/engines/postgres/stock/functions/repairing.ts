/** Movements and what is on hand, made to agree. */
import { own, sql } from "../../../../seam/sql.ts";
import { kept } from "../../hidden.ts";
import { plainSql, plpgsql } from "../../search-path.ts";

/**
 * Makes movements and what is on hand agree. trust: 'ledger', what is on hand becomes what the movements come to; 'levels',
 * what is on hand stays as it is. Either way a movement of what the movements lack says so; and what is open is what is
 * reserved. Where movements are missing, what the next one says counts, as after a repair. Returns what is on hand then;
 * NULL: it was done before, and the answer was lost.
 */
export const mend = sql`CREATE OR REPLACE FUNCTION ${own("stock_mend")}(book text, place jsonb, s text, l text, op text, source text, by_ text, note_ text, trust text)
RETURNS bigint ${plpgsql} AS $function$
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
    FOR r IN SELECT * FROM ${own("stock_at_own")}(place, 'read', ARRAY[s], ARRAY[l], NULL) LOOP
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
    PERFORM ${own("stock_at_own")}(place, 'write', ARRAY[s], ARRAY[l], ARRAY[t.on_hand]);
    PERFORM set_config(${own.text("stock")}, '', true);
  END IF;
  INSERT INTO ${own("stock_movement")} (level, version, quantity, balance, at, line, parts, kind, source, external_id, user_id, note)
    VALUES (t.id, t.version + 1, t.on_hand - total, t.on_hand, clock_timestamp(), 1, 1, 'repair', source, op, by_, note_);
  ${kept("stock_movement")};
  UPDATE ${own("stock_level")} x SET on_hand = t.on_hand, reserved = open_, version = t.version + 1 WHERE x.id = t.id;
  RETURN t.on_hand;
END
$function$`;

/** As releases before stock_mend called it: what is on hand stayed as it was. */
export const repair = sql`CREATE OR REPLACE FUNCTION ${own("stock_repair")}(book text, place jsonb, s text, l text, op text, source text, by_ text, note_ text)
RETURNS bigint ${plainSql} AS $function$
  SELECT ${own("stock_mend")}(book, place, s, l, op, source, by_, note_, 'levels')
$function$`;
