/**
 * Rows of a database that is part of this process. Its statements are answered at once, so a batch is read, decided and written in
 * one go, with nobody's turn in between; and each statement is written once, however often it is sent.
 */
import { type Statement, sql } from "../../seam/sql.ts";
import type { AtOnce, StoreDialect } from "./dialect.ts";
import { type StoredRows, valueOf } from "./rows.ts";
import { type NewRow, type RowOf, type Table, kindOf } from "./table.ts";

/** Rows that are written with one statement: of a few sizes only, since statements are kept by their text. */
const portions = [64, 16, 4, 1];

const known = new WeakMap<Table, Map<string, Statement>>();

function once(of: Table, shape: string, make: () => Statement): Statement {
  let statements = known.get(of);
  if (!statements) known.set(of, (statements = new Map()));
  let statement = statements.get(shape);
  if (!statement) statements.set(shape, (statement = make()));
  return statement;
}

const name = (column: string) => sql`${sql.id(column)}`;
const equal = (column: string) => sql`${name(column)} = ${null}`;

/** Statements on some tables, as {@link StoredRows} has them. */
export class RowsAtOnce {
  readonly #at: AtOnce;
  readonly #dialect: Pick<StoreDialect, "table" | "plain">;

  constructor(at: AtOnce, { dialect }: Pick<StoredRows<never>, "dialect">) {
    this.#at = at;
    this.#dialect = dialect;
  }

  now(): number {
    return this.#at.now();
  }

  /** The row with this key. */
  find<T extends Table>(of: T, key: readonly string[]): RowOf<T> | undefined {
    const columns = Object.keys(of.columns);
    const statement = once(
      of,
      "find",
      () =>
        sql`SELECT ${sql.join(columns.map(name))} FROM ${this.#dialect.table(of.name)} WHERE ${sql.join(of.key.map(equal), " AND ")}`,
    );
    const [row] = this.#at.ask(statement, key);
    if (!row) return undefined;
    const read: Record<string, unknown> = {};
    for (const column of columns) read[column] = valueOf(kindOf(of, column), row[column]);
    return read as RowOf<T>;
  }

  /** All that is given, of the row with this key. */
  update<T extends Table>(of: T, key: readonly string[], set: Partial<RowOf<T>>): void {
    const columns = Object.keys(set);
    const statement = once(
      of,
      `set ${columns.join()}`,
      () =>
        sql`UPDATE ${this.#dialect.table(of.name)} SET ${sql.join(columns.map(equal))} WHERE ${sql.join(of.key.map(equal), " AND ")}`,
    );
    this.#at.ask(statement, [...this.#values(of, columns, [set]), ...key]);
  }

  insert<T extends Table>(into: T, rows: readonly NewRow<T>[]): void {
    const columns = Object.keys(into.columns).filter((column) =>
      rows.some((row) => row[column as keyof NewRow<T>] !== undefined),
    );
    for (let from = 0; from < rows.length;) {
      const count = portions.find((size) => size <= rows.length - from) as number;
      const statement = once(into, `insert ${count} ${columns.join()}`, () => {
        const row = sql`(${sql.join(columns.map(() => null))})`;
        return sql`INSERT INTO ${this.#dialect.table(into.name)} (${sql.join(columns.map(name))}) VALUES ${sql.join(Array.from({ length: count }, () => row))}`;
      });
      this.#at.ask(statement, this.#values(into, columns, rows.slice(from, from + count)));
      from += count;
    }
  }

  #values(of: Table, columns: readonly string[], rows: readonly object[]): unknown[] {
    const { plain } = this.#dialect as Required<Pick<StoreDialect, "plain">>;
    const kinds = columns.map((column) => kindOf(of, column));
    const values: unknown[] = [];
    for (const row of rows as readonly Readonly<Record<string, unknown>>[])
      for (let i = 0; i < columns.length; i++)
        values.push(plain(kinds[i] as (typeof kinds)[number], row[columns[i] as string]));
    return values;
  }
}
