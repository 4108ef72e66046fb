/**
 * Rows and tables of the caller's. A transaction that may lock is the file's only writer from its start, so whatever
 * it reads is locked already: in every strength, in no particular order, with nothing left to wait for or to skip.
 */
import type { LockGrant, Row } from "../../seam/database.ts";
import { UsageError, some } from "../../seam/errors.ts";
import { type Identifier, type Statement, isStatement, sql } from "../../seam/sql.ts";
import type {
  RowCall,
  RowSelection,
  TableCall,
  TableShape,
  Tables,
  VersionedWrite,
} from "../../seam/tables.ts";
import { ask, granted, insist, write as run } from "./begin.ts";
import type { SqliteConnection } from "./dialect.ts";
import { isBusy } from "./errors.ts";

const positionAlias = "holdfastposition";

/** A statement may have 32,766 values, or 999 where it was built with an older limit. */
const mostValues = 900;

const list = (items: readonly (Statement | Identifier)[], separator = ", ") => sql.join(items, separator);
const column = (alias: string, name: string) => sql`${sql.raw(alias)}.${sql.id(name)}`;

function known({ shape }: { shape: TableShape }, name: string): string {
  if (shape.columns.has(name)) return name;
  throw new UsageError(
    `${shape.name} has no column ${JSON.stringify(name)}; it has ${some([...shape.columns.keys()])}`,
  );
}

async function describe(connection: SqliteConnection, table: Identifier): Promise<TableShape | undefined> {
  const [schema, name] = table.path.length > 1 ? table.path : [null, table.path[0]];
  // Hidden: 1 is a column of a virtual table that SELECT * leaves out; 2 and 3 are generated columns.
  const { rows } = await ask(
    connection,
    schema === null
      ? sql`SELECT name, type, pk FROM pragma_table_xinfo(${name}) WHERE hidden <> 1 ORDER BY cid`
      : sql`SELECT name, type, pk FROM pragma_table_xinfo(${name}, ${schema}) WHERE hidden <> 1 ORDER BY cid`,
  );
  if (rows.length === 0) return undefined;
  const key = rows.filter(({ pk }) => Number(pk) > 0).toSorted((a, b) => Number(a.pk) - Number(b.pk));
  return {
    name: table.path.join("."),
    key: key.map((row) => String(row.name)),
    columns: new Map(rows.map((row) => [String(row.name), String(row.type)])),
  };
}

function columns(call: RowCall): Statement {
  if (!call.columns) return sql.raw("t.*");
  return list(call.columns.map((name) => column("t", known(call, name))));
}

function condition(call: RowCall, where: unknown): Statement {
  if (isStatement(where)) return sql`(${where})`;
  const parts = Object.entries(where as Record<string, unknown>).map(([name, value]) => {
    const left = column("t", known(call, name));
    if (value === null) return sql`${left} IS NULL`;
    if (Array.isArray(value)) return sql`${left} IN (${sql.join(value)})`;
    return sql`${left} = ${value}`;
  });
  return list(parts, " AND ");
}

function ordered(call: RowCall): Statement {
  const { orderBy, key } = call;
  if (orderBy.length === 0) return list(key.map((name) => column("t", known(call, name))));
  return list(
    orderBy.map(({ column: name, descending }) => {
      const by = column("t", known(call, name));
      return descending ? sql`${by} DESC` : by;
    }),
  );
}

/** One entry per key, in the order of these. */
async function byKeys(
  connection: SqliteConnection,
  call: RowCall,
  keys: readonly (readonly unknown[])[],
  what: Statement,
): Promise<(Row | undefined)[]> {
  const { key, table } = call;
  const found: (Row | undefined)[] = keys.map(() => undefined);
  const step = Math.max(1, Math.floor(mostValues / (key.length + 1)));
  const names = list([sql.id(positionAlias), ...key.map((name) => sql.id(known(call, name)))]);
  const same = list(
    key.map((name) => sql`${column("t", name)} = ${column("k", name)}`),
    " AND ",
  );
  for (let start = 0; start < keys.length; start += step) {
    const values = keys.slice(start, start + step).map((each, i) => sql`(${start + i}, ${sql.join(each)})`);
    const { rows } = await ask(
      connection,
      sql`WITH k (${names}) AS (VALUES ${sql.join(values)})
        SELECT k.${sql.id(positionAlias)} AS ${sql.id(positionAlias)}, ${what} FROM k JOIN ${table} AS t ON ${same}`,
    );
    for (const { [positionAlias]: position, ...row } of rows) found[Number(position)] = row;
  }
  return found;
}

async function select(connection: SqliteConnection, call: RowCall): Promise<RowSelection> {
  const { which, table, limit, strength, joined } = call;
  if (strength) await insist(connection, joined);
  if ("keys" in which)
    return { granted: true, rows: await byKeys(connection, call, which.keys, columns(call)) };
  const first = limit === undefined ? sql.raw("") : sql` LIMIT ${limit}`;
  const { rows } = await ask(
    connection,
    sql`SELECT ${columns(call)} FROM ${table} AS t WHERE ${condition(call, which.where)} ORDER BY ${ordered(call)}${first}`,
  );
  return { granted: true, rows };
}

async function present(connection: SqliteConnection, call: RowCall): Promise<ReadonlySet<number>> {
  if (!("keys" in call.which)) return new Set();
  const rows = await byKeys(connection, call, call.which.keys, sql.raw("1 AS there"));
  return new Set(rows.flatMap((row, i) => (row ? [i] : [])));
}

async function lock(connection: SqliteConnection, { table, joined }: TableCall): Promise<LockGrant> {
  await insist(connection, joined);
  if (!(await describe(connection, table)))
    throw new UsageError(`tx.table: there is no table ${table.path.join(".")}`);
  return granted;
}

async function write(connection: SqliteConnection, call: VersionedWrite): Promise<RowSelection> {
  const { table, key, id, version, expected, changes, waitMs, alone } = call;
  const sets = Object.entries(changes).map(([name, value]) => sql`${sql.id(known(call, name))} = ${value}`);
  const where = key.map((name, i) => sql`${column("t", known(call, name))} = ${id[i]}`);
  const statement = sql`UPDATE ${table} AS t SET ${list([...sets, sql`${sql.id(version)} = ${column("t", version)} + 1`])}
    WHERE ${list(where, " AND ")} AND ${column("t", version)} = ${expected} RETURNING *`;
  try {
    return { granted: true, rows: (await run(connection, statement, waitMs)).rows };
  } catch (error) {
    // Inside of a transaction that is not the writer yet, the statement says so itself.
    if (!alone || !isBusy(connection, error)) throw error;
    return { granted: false, reason: "timeout", usable: true, cause: error };
  }
}

/** Around what an ORM sends. */
const around: Tables<SqliteConnection>["around"] = async (connection, { joined }, send) => {
  await insist(connection, joined);
  return { granted: true, value: await send() };
};

export const tables: Tables<SqliteConnection> = { describe, select, present, lock, write, around };
