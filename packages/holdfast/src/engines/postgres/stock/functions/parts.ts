/** What the functions of stock share. */
import { own, sql } from "../../../../seam/sql.ts";
import * as protection from "../../../../seam/protections.ts";

/**
 * Of functions that take a batch. Levels: ls, ll, and whether something is put into them (lm). Orders: what (ok), id (oi),
 * what for (os, ot, oref, ou, ow), of which one (oof), for how long (ottl), how many lines (op). Lines, side by side: their
 * level's place (lk), their order (lo, ascending), the how manieth of it (li), how much (lq).
 */
export const batch = sql.raw(`book text, place jsonb, make boolean, look boolean,
  ls text[], ll text[], lm boolean[],
  ok text[], oi text[], os text[], ot text[], oref text[], ou text[], ow text[], oof text[], ottl bigint[],
  op int[], lk int[], lo int[], li int[], lq bigint[],
  OUT missing boolean, OUT at float8, OUT verdicts int[], OUT ats float8[], OUT untils float8[], OUT states text[],
  OUT moved bigint[], OUT balances bigint[], OUT versions bigint[], OUT rooms bigint[]`);

/** Their names, as bodies say them. */
export const lists = sql.raw(`level_skus ALIAS FOR ls;
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
  line_quantities ALIAS FOR lq;`);

/** There is so much left of a level that is neither reserved nor to stay. */
export const room = (level: string, change: string) =>
  sql.raw(
    protection.stockChecked
      ? `${level}.on_hand - ${protection.stockReservedKept ? `${level}.reserved` : "0"} - ${level}.min_level + ${change} >= 0`
      : "true",
  );

/** Joins with lists of unknown length are by index, whatever the tables were like when the plan was made. */
export const plans = sql.raw(
  `SET plan_cache_mode = force_generic_plan SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off`,
);

/**
 * Spots that something is put into and that are not there yet. Before anything is locked, in order: who waits here for
 * another one's INSERT holds nothing that the other could want.
 */
export const make = sql`INSERT INTO ${own("stock_level")} (book, sku, location)
      SELECT book, u.s, u.l FROM unnest(level_skus, level_locations, level_makes) u (s, l, m)
      WHERE u.m AND NOT EXISTS (SELECT FROM ${own("stock_level")} t WHERE t.book = book AND t.sku = u.s AND t.location = u.l)
      ORDER BY u.s COLLATE "C", u.l COLLATE "C" ON CONFLICT DO NOTHING`;

/**
 * Of several orders about several levels. Who waits for somebody's transaction with levels in hand that it comes to want
 * ends in a deadlock, which may be the transaction's: they part before the server looks for one (deadlock_timeout, 1 s).
 */
export const briefly = sql.raw("PERFORM set_config('lock_timeout', '200ms', true)");
