/**
 * The ledger of quotas and the movements of stock as people read them, in SQL or as relations of an ORM: `quota_entry` and
 * `stock_entry`, with the same columns on every engine.
 */
import { type Statement, own, sql } from "../../seam/sql.ts";
import { quotaBuckets, quotaLines } from "./quota/tables.ts";
import { stockLevel, stockMovement } from "./stock/tables.ts";
import { type Table, kindOf } from "./table.ts";

export interface EntryDialect {
  /** CREATE VIEW, up to the name. Who is there before is left alone, or replaced. */
  readonly create: Statement;
  /** A text, if it is kept as something else. */
  text?(column: Statement): Statement;
  /** Microseconds since 1970, as a date and time. */
  moment(column: Statement): Statement;
}

export function entryViews({ create, text, moment }: EntryDialect): readonly Statement[] {
  const columns = (of: Table, alias: string, names: readonly string[]): Statement[] =>
    names.map((name) => {
      const column = sql`${sql.id(alias, name)}`;
      const kind = kindOf(of, name);
      const shown = kind === "moment" ? moment(column) : kind === "text" ? text?.(column) : undefined;
      return sql`${shown ?? column} AS ${sql.id(name)}`;
    });
  /** What is not written down if it is what it usually is. */
  const or = (name: string, usual: Statement): Statement =>
    sql`coalesce(${sql.id("l", name)}, ${usual}) AS ${sql.id(name)}`;
  const zero = sql.raw("0");
  const quotas = [
    ...columns(quotaBuckets, "b", ["quota", "subject"]),
    ...columns(quotaLines, "l", ["version", "kind", "id", "entry", "amount"]),
    or("delta", sql`${sql.id("l", "amount")}`),
    or("forgotten", zero),
    or("refunded", zero),
    ...columns(quotaLines, "l", ["used"]),
    or("held", zero),
    or("credit", zero),
    ...columns(quotaLines, "l", ["max", "since", "at"]),
    or("first", sql`${sql.id("l", "version")}`),
    ...columns(quotaLines, "l", ["drains", "details"]),
  ];
  const movements = [
    ...columns(stockLevel, "l", ["book", "sku", "location"]),
    ...columns(stockMovement, "m", ["version", "kind", "quantity", "balance", "at", "source", "external_id"]),
    ...columns(stockMovement, "m", ["reference_type", "reference_id", "user_id", "note", "origin"]),
  ];
  return [
    sql`${create} ${own("quota_entry")} AS
  SELECT ${sql.join(quotas)}
  FROM ${own("quota_line")} l JOIN ${own("quota_bucket")} b ON b.id = l.bucket
  WHERE b.moved_from IS NULL`,
    sql`${create} ${own("stock_entry")} AS
  SELECT ${sql.join(movements)}
  FROM ${own("stock_movement")} m JOIN ${own("stock_level")} l ON l.id = m.level`,
  ];
}
