/** What is read of stock, for any engine with a dialect. */
import type { SqlConnection } from "../../../seam/database.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import type { StockBook, MovementFilter, StockLists, StockMovement } from "../../../stock/store.ts";
import { type StoredRows, valueOf } from "../rows.ts";
import { stockLevel, stockMovement, stockReserved } from "./tables.ts";
import { kindOf } from "../table.ts";

/** `BookInfo.levels` is counted up to here. */
const mostCounted = 100_000;

export function stockLists<C extends SqlConnection>(rows: StoredRows<C>): StockLists<C> {
  const { dialect } = rows;
  const level = sql`${dialect.table(stockLevel.name)} t`;
  const movement = sql`${dialect.table(stockMovement.name)} m JOIN ${level} ON t.id = m.level`;
  const ask = (connection: C, statement: Statement) =>
    rows.present(connection, "A table of stock", () => rows.look(connection, statement));
  const textual = (value: unknown) => valueOf("text", value) as string | undefined;
  return {
    async levels(connection, book, { skus, location, after, most }) {
      if (skus?.length === 0) return [];
      const conditions = [sql`t.book = ${dialect.write("text", book.name)}`];
      if (skus) conditions.push(sql`t.sku IN (${sql.join(skus.map((sku) => dialect.write("text", sku)))})`);
      if (location !== undefined) conditions.push(sql`t.location = ${dialect.write("text", location)}`);
      if (after) {
        const [sku, place] = [dialect.write("text", after.sku), dialect.write("text", after.location)];
        conditions.push(sql`(t.sku > ${sku} OR (t.sku = ${sku} AND t.location > ${place}))`);
      }
      const over = sql`SELECT sum(x.quantity) FROM ${dialect.table(stockReserved.name)} x
  WHERE x.level = t.id AND ${dialect.read("moment", sql`x.until`)} <= ${dialect.clock}`;
      const found = await ask(
        connection,
        sql`SELECT t.sku, t.location, t.on_hand, t.reserved - coalesce((${over}), 0) AS reserved, t.min_level, t.version
  FROM ${level} WHERE ${rows.reading(sql.join(conditions, " AND "))} ORDER BY t.sku, t.location${
    most === undefined ? sql`` : sql` LIMIT ${sql.raw(String(Math.floor(most)))}`
  }`,
      );
      return found.map((row) => ({
        sku: String(row["sku"]),
        location: String(row["location"]),
        onHand: Number(row["on_hand"]),
        reserved: Number(row["reserved"]),
        min: Number(row["min_level"]),
        version: Number(row["version"]),
      }));
    },

    async books(connection) {
      const found = await ask(
        connection,
        sql`SELECT t.book AS name, count(*) AS levels, sum(CASE WHEN t.elsewhere THEN 1 ELSE 0 END) AS away
  FROM ${level} WHERE ${rows.reading()} GROUP BY t.book ORDER BY t.book`,
      );
      return found.map((row) => ({
        name: String(row["name"]),
        levels: Math.min(Number(row["levels"]), mostCounted),
        elsewhere: Number(row["away"]) > 0,
      }));
    },

    async history(connection, book, filter, { after, most }) {
      const where = [...matching(rows, book, filter), ...(after === undefined ? [] : [below(rows, after)])];
      const names = Object.keys(stockMovement.columns);
      const columns = names.map(
        (name) =>
          sql`${dialect.read(kindOf(stockMovement, name), sql`m.${sql.id(name)}`)} AS ${sql.id(name)}`,
      );
      const found = await ask(
        connection,
        sql`SELECT t.sku AS sku, t.location AS location, ${sql.join(columns)} FROM ${movement} WHERE ${rows.reading(sql.join(where, " AND "))}
  ORDER BY m.at DESC, m.level DESC, m.version DESC LIMIT ${sql.raw(String(Math.floor(most)))}`,
      );
      return found.map((row): StockMovement => ({
        sku: String(row["sku"]),
        location: String(row["location"]),
        version: Number(row["version"]),
        kind: String(row["kind"]),
        quantity: Number(row["quantity"]),
        balance: Number(row["balance"]),
        at: Number(row["at"]) / 1000,
        source: String(row["source"]),
        referenceType: textual(row["reference_type"]),
        referenceId: textual(row["reference_id"]),
        id: String(row["external_id"]),
        by: textual(row["user_id"]),
        note: textual(row["note"]),
        of: textual(row["origin"]),
        cursor: `${String(row["at"])}.${String(row["level"])}.${String(row["version"])}`,
      }));
    },

    async levelAt(connection, book, { sku, location }, at) {
      const where = matching(rows, book, { ...everything, sku, location });
      // A movement is shown with the millisecond in which it was made: all of that one counts.
      where.push(sql`m.at <= ${dialect.write("moment", Math.floor(at) * 1000 + 999)}`);
      const [row] = await ask(
        connection,
        sql`SELECT m.balance AS balance FROM ${movement} WHERE ${rows.reading(sql.join(where, " AND "))} ORDER BY m.at DESC, m.version DESC LIMIT 1`,
      );
      return row && Number(row["balance"]);
    },

    async channels(connection, book, filter) {
      const found = await ask(
        connection,
        sql`SELECT m.source AS source, count(*) AS movements, sum(CASE WHEN m.quantity > 0 THEN m.quantity ELSE 0 END) AS increased,
  sum(CASE WHEN m.quantity < 0 THEN -m.quantity ELSE 0 END) AS decreased
  FROM ${movement} WHERE ${rows.reading(sql.join(matching(rows, book, filter), " AND "))} GROUP BY m.source ORDER BY m.source`,
      );
      return found.map((row) => ({
        source: String(row["source"]),
        movements: Number(row["movements"]),
        increased: Number(row["increased"]),
        decreased: Number(row["decreased"]),
      }));
    },
  };
}

const everything: MovementFilter = {
  sku: undefined,
  location: undefined,
  source: undefined,
  referenceType: undefined,
  referenceId: undefined,
  from: undefined,
  to: undefined,
};

/** Movements (m) of levels (t). */
function matching<C extends SqlConnection>(
  { dialect }: StoredRows<C>,
  book: StockBook,
  filter: MovementFilter,
): Statement[] {
  const texts: readonly (readonly [Statement, string | undefined])[] = [
    [sql`t.book`, book.name],
    [sql`t.sku`, filter.sku],
    [sql`t.location`, filter.location],
    [sql`m.source`, filter.source],
    [sql`m.reference_type`, filter.referenceType],
    [sql`m.reference_id`, filter.referenceId],
  ];
  const found = texts.flatMap(([column, value]) =>
    value === undefined ? [] : [sql`${column} = ${dialect.write("text", value)}`],
  );
  if (filter.from !== undefined) found.push(sql`m.at >= ${dialect.write("moment", filter.from * 1000)}`);
  if (filter.to !== undefined) found.push(sql`m.at < ${dialect.write("moment", filter.to * 1000)}`);
  return found;
}

/** What comes after that one, newest first. */
function below<C extends SqlConnection>({ dialect }: StoredRows<C>, cursor: string): Statement {
  const [micros, level, version] = cursor.split(".").map(Number);
  const at = dialect.write("moment", micros);
  const at_level = dialect.write("integer", level);
  return sql`m.at <= ${at} AND (m.at < ${at} OR m.level < ${at_level}
  OR (m.level = ${at_level} AND m.version < ${dialect.write("integer", version)}))`;
}
