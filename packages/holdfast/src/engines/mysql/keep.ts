/** What is in the tables, kept in temporary ones, for tests that begin many times at the same place. */
import type { SqlConnection } from "../../core/database.ts";
import { UsageError } from "../../core/errors.ts";
import { type Identifier, type Statement, sql } from "../../core/sql.ts";
import type { Kept } from "../../core/wire.ts";

/** Test data, not a copy of production. */
const mostRows = 50_000;

interface Table {
  readonly name: Identifier;
  readonly copy: Identifier;
  readonly columns: Statement;
}

export async function keep(connection: SqlConnection): Promise<Kept> {
  await refuseTriggers(connection);
  const tables = await tablesOf(connection);
  await lenient(connection, () => copyAll(connection, tables));
  return {
    restore: () => lenient(connection, () => restore(connection, tables)),
    async forget() {
      for (const { copy } of tables) await connection.query(sql`DROP TEMPORARY TABLE IF EXISTS ${copy}`);
    },
  };
}

/** They cannot be turned off. */
async function refuseTriggers(connection: SqlConnection): Promise<void> {
  const [row] = (
    await connection.query(
      sql`SELECT event_object_table AS name FROM information_schema.triggers WHERE trigger_schema = DATABASE() LIMIT 1`,
    )
  ).rows;
  if (row)
    throw new UsageError(
      `explore: ${String(row["name"])} has triggers, which would run when its rows are brought back; say with \`reset\` how the data is`,
    );
}

async function tablesOf(connection: SqlConnection): Promise<Table[]> {
  const { rows } = await connection.query(sql`
    SELECT c.table_name AS tablename, c.column_name AS columnname, c.extra AS extra FROM information_schema.columns c
    JOIN information_schema.tables t ON t.table_schema = c.table_schema AND t.table_name = c.table_name
    WHERE c.table_schema = DATABASE() AND t.table_type IN ('BASE TABLE', 'SYSTEM VERSIONED')
    ORDER BY c.table_name, c.ordinal_position`);
  return [...Map.groupBy(rows, (row) => String(row["tablename"]))].map(([name, columns], i) => ({
    name: sql.id(name),
    copy: sql.id(`holdfast_kept_${i}`),
    columns: sql.join(
      columns
        .filter(({ extra }) => !/\b(VIRTUAL|STORED|PERSISTENT) GENERATED\b/i.test(String(extra)))
        .map(({ columnname }) => sql.id(String(columnname))),
    ),
  }));
}

async function copyAll(connection: SqlConnection, tables: readonly Table[]): Promise<void> {
  let rows = 0;
  for (const { name, copy, columns } of tables) {
    const { affected } = await connection.query(
      sql`CREATE TEMPORARY TABLE ${copy} AS SELECT ${columns} FROM ${name}`,
    );
    rows += affected;
    if (rows > mostRows)
      throw new UsageError(
        `explore: more than ${mostRows.toLocaleString("en")} rows in this database; say with \`reset\` how the data is brought back`,
      );
  }
}

/** Counters of AUTO_INCREMENT go on: to set one back takes 40 ms on MariaDB. */
async function restore(connection: SqlConnection, tables: readonly Table[]): Promise<void> {
  await connection.query(sql.raw("START TRANSACTION"));
  try {
    for (const { name, copy, columns } of tables) {
      await connection.query(sql`DELETE FROM ${name}`);
      await connection.query(sql`INSERT INTO ${name} (${columns}) SELECT ${columns} FROM ${copy}`);
    }
    await connection.query(sql.raw("COMMIT"));
  } catch (error) {
    await connection.query(sql.raw("ROLLBACK"));
    throw error;
  }
}

/** Rows are taken as they are, in any order; and an actor that left its transaction open is told. */
async function lenient(connection: SqlConnection, body: () => Promise<void>): Promise<void> {
  await connection.query(
    sql.raw(`SET @holdfast_checks = @@foreign_key_checks, @holdfast_mode = @@sql_mode,
      @holdfast_wait = @@innodb_lock_wait_timeout, @holdfast_patience = @@lock_wait_timeout,
      SESSION foreign_key_checks = 0, SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO',
      SESSION innodb_lock_wait_timeout = 10, SESSION lock_wait_timeout = 10`),
  );
  try {
    await body();
  } finally {
    await connection.query(
      sql.raw(`SET SESSION foreign_key_checks = @holdfast_checks, SESSION sql_mode = @holdfast_mode,
        SESSION innodb_lock_wait_timeout = @holdfast_wait, SESSION lock_wait_timeout = @holdfast_patience`),
    );
  }
}
