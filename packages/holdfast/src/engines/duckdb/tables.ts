/** Rows of the caller's, read by key and compared and set. There is no way to lock them. */
import type { Row } from "../../seam/database.ts";
import { UnsupportedError, UsageError, some } from "../../seam/errors.ts";
import { type Identifier, type Statement, sql } from "../../seam/sql.ts";
import type { RowCall, RowSelection, TableShape, Tables, VersionedWrite } from "../../seam/tables.ts";
import { sleep } from "../../waiting/wait.ts";
import type { DuckdbConnection } from "./dialect.ts";
import { isConflict } from "./errors.ts";

const positionAlias = "holdfastposition";

function typed({ shape }: { shape: TableShape }, name: string, value: unknown): Statement {
  const type = shape.columns.get(name);
  if (type === undefined)
    throw new UsageError(
      `${shape.name} has no column ${JSON.stringify(name)}; it has ${some([...shape.columns.keys()])}`,
    );
  return sql`CAST(${value} AS ${sql.raw(type)})`;
}

async function describe(connection: DuckdbConnection, table: Identifier): Promise<TableShape | undefined> {
  const [name, schema = null, database = null] = table.path.toReversed();
  const where = sql`table_name = ${name} AND schema_name = coalesce(${schema}, current_schema())
    AND database_name = coalesce(${database}, current_database())`;
  const { rows } = await connection.query(
    sql`SELECT column_name AS name, data_type AS type FROM duckdb_columns() WHERE ${where} ORDER BY column_index`,
  );
  if (rows.length === 0) return undefined;
  const keys = await connection.query(
    sql`SELECT unnest(constraint_column_names) AS name FROM duckdb_constraints() WHERE ${where} AND constraint_type = 'PRIMARY KEY'`,
  );
  return {
    name: table.path.join("."),
    key: keys.rows.map((row) => String(row.name)),
    columns: new Map(rows.map((row) => [String(row.name), String(row.type)])),
  };
}

async function select(connection: DuckdbConnection, call: RowCall): Promise<RowSelection> {
  const { which, table, key, strength } = call;
  if (strength || !("keys" in which)) throw noLocks();
  const names = sql.join([sql.id(positionAlias), ...key.map((name) => sql.id(name))]);
  const values = which.keys.map(
    (each, i) => sql`(${i}, ${sql.join(key.map((name, j) => typed(call, name, each[j])))})`,
  );
  const same = sql.join(
    key.map((name) => sql`t.${sql.id(name)} = k.${sql.id(name)}`),
    " AND ",
  );
  const { rows } = await connection.query(
    sql`SELECT k.${sql.id(positionAlias)} AS ${sql.id(positionAlias)}, t.* FROM (VALUES ${sql.join(values)}) AS k (${names}) JOIN ${table} AS t ON ${same}`,
  );
  const found: (Row | undefined)[] = which.keys.map(() => undefined);
  for (const { [positionAlias]: position, ...row } of rows) found[Number(position)] = row;
  return { granted: true, rows: found };
}

function noLocks(): UnsupportedError {
  return new UnsupportedError("Row and table locks: DuckDB has none");
}

/**
 * Two that write the same row's version at the same time exclude each other: one of them fails. By itself it is sent
 * again, to find another version; inside of a transaction, which fails with it, the whole is run again.
 */
async function write(connection: DuckdbConnection, call: VersionedWrite): Promise<RowSelection> {
  const { table, key, id, version, expected, changes, waitMs, alone } = call;
  const sets = Object.entries(changes).map(
    ([name, value]) => sql`${sql.id(name)} = ${typed(call, name, value)}`,
  );
  const where = key.map((name, i) => sql`${sql.id(name)} = ${typed(call, name, id[i])}`);
  const statement = sql`UPDATE ${table} SET ${sql.join([...sets, sql`${sql.id(version)} = ${sql.id(version)} + 1`])}
    WHERE ${sql.join(where, " AND ")} AND ${sql.id(version)} = ${typed(call, version, expected)} RETURNING *`;
  const until = performance.now() + waitMs;
  for (;;) {
    try {
      return { granted: true, rows: (await connection.query(statement)).rows };
    } catch (error) {
      if (!alone || !isConflict(error)) throw error;
      if (performance.now() >= until)
        return { granted: false, reason: "timeout", usable: true, cause: error };
      await sleep(Math.random() * 10);
    }
  }
}

export const tables: Tables<DuckdbConnection> = {
  describe,
  select,
  write,
  present: () => Promise.reject(noLocks()),
  lock: () => Promise.reject(noLocks()),
};
