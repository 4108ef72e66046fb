/** Statements on tables of ours, in an engine's own words. */
import type { Result, Row, SqlConnection } from "../../seam/database.ts";
import { RowsHiddenError, SchemaMissingError } from "../../seam/errors.ts";
import { type Statement, sql } from "../../seam/sql.ts";
import type { Locking, StoreDialect } from "./dialect.ts";
import { type ColumnKind, type NewRow, type RowOf, type Table, kindOf } from "./table.ts";

/** How often a row is made, or looked for where it was a moment ago, before that is given up. */
export const mostTurns = 10;

const ids = new Map<string, ReturnType<typeof sql.id>>();

/** Of a column: there are few, and they are in every statement. */
function id(column: string): ReturnType<typeof sql.id> {
  let known = ids.get(column);
  if (!known) ids.set(column, (known = sql.id(column)));
  return known;
}

const name = (column: string) => sql`${id(column)}`;

/** Of what a server has sent for `dialect.read`. */
export function valueOf(kind: ColumnKind, sent: unknown): unknown {
  if (sent === null || sent === undefined) return undefined;
  const found = sent instanceof Uint8Array ? Buffer.from(sent).toString() : sent;
  switch (kind) {
    case "text":
      return String(found);
    case "boolean":
      return (
        found === true || found === 1 || found === 1n || found === "1" || found === "t" || found === "true"
      );
    case "json":
    case "integers":
      // Some clients have read it already.
      return typeof found === "string" ? (JSON.parse(found) as unknown) : found;
    default:
      return Number(found);
  }
}

/** So many rows in one statement: some servers take 32,766 values. */
const mostRows = 500;

export function* chunksOf<T>(items: readonly T[], size = mostRows): Generator<readonly T[]> {
  for (let start = 0; start < items.length; start += size) yield items.slice(start, start + size);
}

export interface StoredSelection {
  readonly order?: Statement;
  readonly limit?: number;
  readonly offset?: number;
  readonly locking?: Locking | undefined;
  /** What is not in a column, by a name that none of them has: it is in the rows, too. */
  readonly computed?: Readonly<Record<string, readonly [ColumnKind, Statement]>>;
  /** Gets the moment of each row, for {@link StoredRows.clockAfter}. */
  readonly moments?: number[];
}

/** No column has this name. */
const momentName = "holdfast_now";

/** Statements on the tables of one engine. */
export class StoredRows<C extends SqlConnection = SqlConnection> {
  readonly dialect: StoreDialect<C>;

  constructor(dialect: StoreDialect<C>) {
    this.dialect = dialect;
  }

  /** `column = value`, or IS NULL. */
  is<T extends Table>(of: T, column: string & keyof T["columns"], value: unknown): Statement {
    if (value === undefined) return sql`${name(column)} IS NULL`;
    return sql`${name(column)} = ${this.dialect.write(kindOf(of, column), value)}`;
  }

  /** `column <op> value`. */
  compare<T extends Table>(
    of: T,
    column: string & keyof T["columns"],
    operator: "<" | "<=" | ">" | ">=" | "<>",
    value: unknown,
  ): Statement {
    return sql`${name(column)} ${sql.raw(operator)} ${this.dialect.write(kindOf(of, column), value)}`;
  }

  /** `column IN (…)`. */
  among<T extends Table>(of: T, column: string & keyof T["columns"], values: readonly unknown[]): Statement {
    if (values.length === 0) return sql`1 = 0`;
    const kind = kindOf(of, column);
    const { plain } = this.dialect;
    if (plain) {
      const all = values.map((value) => plain(kind, value));
      return sql`${id(column)} IN (${sql.repeat(["", ""], ", ", all)})`;
    }
    return sql`${name(column)} IN (${sql.join(values.map((value) => this.dialect.write(kind, value)))})`;
  }

  /** The row, or one of the rows, with these values. */
  matching<T extends Table>(of: T, rows: readonly Partial<RowOf<T>>[]): Statement {
    const short = this.dialect.plain && this.#inShort(of, rows);
    if (short) return short;
    const alternatives = rows.map((row) => {
      const conditions = Object.entries(row).map(([column, value]) => this.is(of, column, value));
      return sql`(${sql.join(conditions, " AND ")})`;
    });
    return alternatives.length === 0 ? sql`1 = 0` : sql`(${sql.join(alternatives, " OR ")})`;
  }

  /** The same of several, none of which has NULL, without a fragment for each; where they differ in one column, as a list of that. */
  #inShort<T extends Table>(of: T, rows: readonly Partial<RowOf<T>>[]): Statement | undefined {
    const [first, ...others] = rows as readonly Readonly<Record<string, unknown>>[];
    if (!first || others.length === 0) return undefined;
    const columns = Object.keys(first);
    const values = this.#plain(of, columns, rows);
    if (values.includes(null)) return undefined;
    const differing = columns.filter((column) => others.some((row) => row[column] !== first[column]));
    const [only] = differing;
    if (only !== undefined && differing.length === 1) {
      const common = columns
        .filter((column) => column !== only)
        .map((column) => this.is(of, column, first[column]));
      const list = this.among(
        of,
        only,
        [first, ...others].map((row) => row[only]),
      );
      return sql`(${sql.join([...common, list], " AND ")})`;
    }
    const unit = ["(", ...columns.slice(1).flatMap(() => [" = ", " AND "]), " = ", ")"];
    const named = values.flatMap((value, i) => [id(columns[i % columns.length] as string), value]);
    return sql`(${sql.repeat(unit, " OR ", named)})`;
  }

  async look(connection: C, statement: Statement): Promise<readonly Row[]> {
    return this.dialect.look?.(connection, statement) ?? (await connection.query(statement)).rows;
  }

  /** The condition of what reads, so that no replica answers it. */
  reading(where?: Statement): Statement {
    const { onPrimary } = this.dialect;
    if (!onPrimary) return where ?? sql`1 = 1`;
    return where ? sql`${onPrimary} AND (${where})` : onPrimary;
  }

  /** `columns`: only these. */
  async select<T extends Table, K extends string & keyof T["columns"] = string & keyof T["columns"]>(
    connection: C,
    of: T,
    where: Statement,
    options: StoredSelection & { readonly columns?: readonly K[] } = {},
  ): Promise<Pick<RowOf<T>, K>[]> {
    const { order, limit, offset, locking, computed = {} } = options;
    const moments = this.dialect.lockedClock && locking && options.moments;
    const columns: readonly string[] = options.columns ?? Object.keys(of.columns);
    const besides = Object.entries(computed).map(([as, [, value]]) => sql`, ${value} AS ${name(as)}`);
    const rows = await this.look(
      connection,
      sql`SELECT ${this.#selected(of, columns)}${sql.join(besides, "")}${moments ? sql`, ${this.dialect.lockedClock} AS ${name(momentName)}` : sql``} FROM ${
        locking ? this.found(of) : this.dialect.table(of.name)
      } WHERE ${this.reading(where)}${order ? sql` ORDER BY ${order}` : sql``}${
        limit === undefined ? sql`` : sql` LIMIT ${sql.raw(String(Math.floor(limit)))}`
      }${offset === undefined ? sql`` : sql` OFFSET ${sql.raw(String(Math.floor(offset)))}`}${
        locking ? sql` ${this.dialect.locking(locking, connection)}` : sql``
      }`,
    );
    moments?.push(...rows.map((row) => Number(row[momentName] ?? Number.NaN)));
    return rows.map((row) => {
      const read: Record<string, unknown> = {};
      for (const column of columns) read[column] = valueOf(kindOf(of, column), row[column]);
      for (const as in computed) read[as] = valueOf((computed[as] as [ColumnKind, Statement])[0], row[as]);
      return read as Pick<RowOf<T>, K>;
    });
  }

  /** Without locks. Undefined: this session may show what is not committed, so that nothing can be said. */
  async selectCommitted<T extends Table>(
    connection: C,
    of: T,
    where: Statement,
  ): Promise<RowOf<T>[] | undefined> {
    const { committed } = this.dialect;
    const options = committed ? { computed: { committed: ["boolean", committed] } as const } : {};
    const found = (await this.select(connection, of, where, options)) as (RowOf<T> & {
      committed?: boolean;
    })[];
    return found.some((row) => row.committed === false) ? undefined : found;
  }

  readonly #lists = new WeakMap<Table, Map<string, Statement>>();

  #selected(of: Table, columns: readonly string[]): Statement {
    let lists = this.#lists.get(of);
    if (!lists) this.#lists.set(of, (lists = new Map()));
    const which = columns.join();
    let list = lists.get(which);
    if (!list) {
      const all = columns.map(
        (column) => sql`${this.dialect.read(kindOf(of, column), name(column))} AS ${name(column)}`,
      );
      lists.set(which, (list = sql.join(all)));
    }
    return list;
  }

  /** A table whose rows are locked or changed. */
  found(of: Table): Statement {
    const { table, indexed } = this.dialect;
    return indexed ? sql`${table(of.name)} ${indexed(of)}` : table(of.name);
  }

  /** A row of this table was made, or seen, and is not there: a trigger or a view keeps it away. */
  hidden(of: Table): RowsHiddenError {
    return new RowsHiddenError(undefined, { table: of.name, byPolicy: false });
  }

  /** In the order of the key, so that who locks several meets nobody who does it the other way round. */
  order(of: Table): Statement {
    return sql.join(of.key.map(name));
  }

  /** All values of all rows, as they are bound, one row after the other. */
  #plain(of: Table, columns: readonly string[], rows: readonly object[]): unknown[] {
    const { plain } = this.dialect as Required<StoreDialect<C>>;
    const kinds = columns.map((column) => kindOf(of, column));
    const values: unknown[] = [];
    for (const row of rows)
      for (let i = 0; i < columns.length; i++)
        values.push(plain(kinds[i] as ColumnKind, row[columns[i] as keyof typeof row]));
    return values;
  }

  #values(
    of: Table,
    columns: readonly string[],
    rows: readonly Readonly<Record<string, unknown>>[],
  ): Statement {
    if (this.dialect.plain) {
      const unit = ["(", ...columns.slice(1).map(() => ", "), ")"];
      return sql.repeat(unit, ", ", this.#plain(of, columns, rows));
    }
    return sql.join(
      rows.map(
        (row) =>
          sql`(${sql.join(columns.map((column) => this.dialect.write(kindOf(of, column), row[column])))})`,
      ),
    );
  }

  #columns(of: Table, rows: readonly Readonly<Record<string, unknown>>[]): string[] {
    return Object.keys(of.columns).filter((column) => rows.some((row) => row[column] !== undefined));
  }

  /** As lists, where the server reads them: of 100 lines of a ledger, one by one, its parser took most of the time. */
  #rows(
    of: Table,
    columns: readonly string[],
    rows: readonly Readonly<Record<string, unknown>>[],
  ): Statement {
    const { given, insertsGiven = true } = this.dialect;
    if (!given || !insertsGiven || rows.length === 1) return sql`VALUES ${this.#values(of, columns, rows)}`;
    const lists = columns.map((column) => ({
      name: column,
      kind: kindOf(of, column),
      values: rows.map((row) => row[column]),
    }));
    return sql`SELECT ${sql.join(columns.map((column) => sql`${sql.id("given", column)}`))} FROM ${given(lists)}`;
  }

  /** As many as one statement bears, each time. */
  #portions<R extends object>(rows: readonly R[]): readonly (readonly R[])[] {
    const { largest } = this.dialect;
    if (largest === undefined) return rows.length > 0 ? [rows] : [];
    const portions: R[][] = [];
    let left = 0;
    for (const row of rows) {
      let size = 0;
      for (const value of Object.values(row)) if (typeof value === "string") size += value.length;
      const last = portions.at(-1);
      if (last && size <= left) last.push(row);
      else portions.push([row]);
      left = (last && size <= left ? left : largest) - size;
    }
    return portions;
  }

  /** All columns that any of them has; the others are NULL, or as the database gives them. */
  async insert<T extends Table>(connection: C, into: T, rows: readonly NewRow<T>[]): Promise<void> {
    for (const some of this.insertions(into, rows)) await connection.query(some);
  }

  /** The statements of that. */
  insertions<T extends Table>(into: T, rows: readonly NewRow<T>[]): readonly Statement[] {
    const columns = this.#columns(into, rows);
    return this.#portions(rows).map(
      (some) =>
        sql`INSERT INTO ${this.dialect.table(into.name)} (${sql.join(columns.map(name))}) ${this.#rows(into, columns, some)}`,
    );
  }

  /** Those that are there, by the key, stay as they are. */
  async insertMissing<T extends Table>(connection: C, into: T, rows: readonly NewRow<T>[]): Promise<void> {
    for (const some of this.#portions(rows)) await connection.query(this.#missing(into, some, false));
  }

  /** The same, if it matters how many were not there. */
  async countMissing<T extends Table>(connection: C, into: T, rows: readonly NewRow<T>[]): Promise<number> {
    let count = 0;
    for (const some of this.#portions(rows))
      count += (await connection.query(this.#missing(into, some, true))).affected;
    return count;
  }

  #missing<T extends Table>(into: T, rows: readonly NewRow<T>[], counted: boolean): Statement {
    const columns = this.#columns(into, rows);
    const values = this.#values(into, columns, rows);
    return this.dialect.insertMissing(into, sql.join(columns.map(name)), values, counted);
  }

  /** Resolves to how many it has changed. What is undefined becomes NULL. */
  async update<T extends Table>(
    connection: C,
    of: T,
    where: Statement,
    set: Partial<RowOf<T>>,
  ): Promise<number> {
    const { affected }: Result = await connection.query(this.#updating(of, where, set));
    return affected;
  }

  #updating<T extends Table>(of: T, where: Statement, set: Partial<RowOf<T>>): Statement {
    return sql`UPDATE ${this.found(of)} SET ${this.#assignments(of, Object.entries(set))} WHERE ${where}`;
  }

  #assignments(of: Table, set: readonly (readonly [string, unknown])[]): Statement {
    const { plain } = this.dialect;
    if (!plain)
      return sql.join(
        set.map(([column, value]) => sql`${name(column)} = ${this.dialect.write(kindOf(of, column), value)}`),
      );
    const values = set.flatMap(([column, value]) => [id(column), plain(kindOf(of, column), value)]);
    return sql.repeat(["", " = ", ""], ", ", values);
  }

  /** Each with values of its own, found by one column. All of them have the same columns. `also`: a condition for all of them. */
  async updateAll<T extends Table>(
    connection: C,
    of: T,
    key: string & keyof T["columns"],
    rows: readonly Partial<RowOf<T>>[],
    also?: Statement,
  ): Promise<number> {
    return rows.length === 0 ? 0 : (await connection.query(this.updatingAll(of, key, rows, also))).affected;
  }

  /** The statement of that: of one at least. */
  updatingAll<T extends Table>(
    of: T,
    key: string & keyof T["columns"],
    rows: readonly Partial<RowOf<T>>[],
    also?: Statement,
  ): Statement {
    const first = rows[0] as Partial<RowOf<T>>;
    if (rows.length === 1) {
      const { [key]: found, ...set } = first as Readonly<Record<string, unknown>>;
      const it = this.is(of, key, found);
      return this.#updating(of, also ? sql`${also} AND ${it}` : it, set as Partial<RowOf<T>>);
    }
    const plain = (row: Partial<RowOf<T>>, column: string): unknown => row[column as keyof RowOf<T>];
    const { given, table } = this.dialect;
    if (given) {
      const columns = Object.keys(first);
      const lists = columns.map((column) => ({
        name: column,
        kind: kindOf(of, column),
        values: rows.map((row) => plain(row, column)),
      }));
      const set = columns
        .filter((column) => column !== key)
        .map((column) => sql`${name(column)} = ${sql.id("given", column)}`);
      return sql`UPDATE ${table(of.name)} SET ${sql.join(set)} FROM ${given(lists)} WHERE ${
        also ? sql`${also} AND ` : sql``
      }${sql.id(of.name, key)} = ${sql.id("given", key)}`;
    }
    const value = (row: Partial<RowOf<T>>, column: string) =>
      this.dialect.write(kindOf(of, column), plain(row, column));
    const assignments = Object.keys(first)
      .filter((column) => column !== key)
      .map((column) => {
        const common = rows.every((row) => plain(row, column) === plain(first, column));
        if (common) return sql`${name(column)} = ${value(first, column)}`;
        if (this.dialect.plain) {
          const pairs = sql.repeat(["WHEN ", " THEN ", ""], " ", this.#plain(of, [key, column], rows));
          return sql`${name(column)} = CASE ${name(key)} ${pairs} END`;
        }
        const cases = rows.map((row) => sql`WHEN ${value(row, key)} THEN ${value(row, column)}`);
        return sql`${name(column)} = CASE ${name(key)} ${sql.join(cases, " ")} END`;
      });
    const keys = rows.map((row) => plain(row, key));
    return sql`UPDATE ${this.found(of)} SET ${sql.join(assignments)} WHERE ${
      also ? sql`${also} AND ` : sql``
    }${this.among(of, key, keys)}`;
  }

  async remove(connection: C, from: Table, where: Statement): Promise<number> {
    const { affected } = await connection.query(
      sql`DELETE FROM ${this.dialect.table(from.name)} WHERE ${where}`,
    );
    return affected;
  }

  /** These, by as much of their key as they have, all of them the same. `where`: another way to say it, in fewer words. */
  async removeRows<T extends Table>(
    connection: C,
    from: T,
    rows: readonly Partial<RowOf<T>>[],
    where?: Statement,
  ): Promise<number> {
    const [first] = rows;
    if (!first) return 0;
    const columns = from.key.filter((column) => column in first);
    const valueIn = (row: Partial<RowOf<T>>, column: string): unknown => row[column as keyof RowOf<T>];
    const { removing } = this.dialect;
    if (removing && rows.length > 1) {
      const values = rows.map((row) => columns.map((column) => valueIn(row, column)));
      return (await connection.query(removing(from, columns, values))).affected;
    }
    const keys = rows.map((row) =>
      Object.fromEntries(columns.map((column) => [column, valueIn(row, column)])),
    ) as Partial<RowOf<T>>[];
    return this.remove(connection, from, where ?? this.matching(from, keys));
  }

  /** Says what to do if the tables are not there. */
  async present<T>(connection: C, what: string, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      if (this.dialect.failure(connection, error) !== "schema-missing") throw error;
      throw new SchemaMissingError(what, error);
    }
  }

  async clock(connection: C): Promise<number> {
    if (this.dialect.now) return this.dialect.now(connection);
    const { clock, onPrimary } = this.dialect;
    const rows = await this.look(
      connection,
      sql`SELECT ${clock} AS now${onPrimary ? sql` FROM DUAL WHERE ${onPrimary}` : sql``}`,
    );
    return Number(rows[0]?.["now"]);
  }

  /** After rows were locked: what has passed while they were waited for has passed. `moments`: as their selections told them. */
  async clockAfter(connection: C, moments: readonly number[]): Promise<number> {
    const last = Math.max(...moments);
    return Number.isFinite(last) ? last : this.clock(connection);
  }
}
