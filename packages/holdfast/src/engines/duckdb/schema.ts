import type { Migration, Migrations } from "../../seam/database.ts";
import { message } from "../../seam/errors.ts";
import { recorded } from "../../seam/migrations.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import { entryViews } from "../sql/entries.ts";
import { type DuckdbConnection, dialect, render } from "./dialect.ts";
import { leaseTables } from "./leases.ts";
import { lockTable } from "./locks.ts";
import { replayTable } from "./replay.ts";
import { storeTables } from "./stores.ts";

const views = entryViews({
  create: sql.raw("CREATE VIEW IF NOT EXISTS"),
  moment: (column) => sql`make_timestamptz(CAST(${column} AS bigint))`,
});

const migrationTable = sql`CREATE TABLE IF NOT EXISTS ${own("migration")} (
  id integer NOT NULL,
  name varchar NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
)`;

const all: readonly Migration[] = [
  { id: 1, name: "migrations", statements: [migrationTable] },
  { id: 2, name: "lock rows", statements: lockTable },
  { id: 3, name: "leases", statements: leaseTables },
  { id: 4, name: "once", statements: replayTable },
  { id: 5, name: "patterns", statements: storeTables },
  { id: 6, name: "entries", statements: views },
];

const read = (connection: DuckdbConnection) =>
  recorded(connection, all, (connection.names ?? dialect.names).own("migration"), (error) =>
    message(error).startsWith("Binder Error"),
  );

function record({ id, name }: Pick<Migration, "id" | "name">): Statement {
  const table = own("migration");
  return sql`INSERT INTO ${table} (id, name) SELECT ${sql.raw(`${id}, '${name}'`)} WHERE NOT EXISTS (SELECT 1 FROM ${table} WHERE id = ${sql.raw(String(id))})`;
}

export const migrationsIn = (names: Names): Migrations<DuckdbConnection> => ({
  all,
  print: (statement) => `${render(statement, names).text};`,
  record,
  applied: async (connection) =>
    (await connection.inProcess).oneAtATime.run(async () => {
      const { rows: tables } = await connection.query(
        sql`SELECT 1 AS there FROM duckdb_tables() WHERE table_name = ${own.text("migration")}`,
      );
      return tables.length === 0 ? [] : read(connection);
    }),
  apply: async (connection) =>
    (await connection.inProcess).oneAtATime.run(async () => {
      await connection.query(sql.raw("BEGIN TRANSACTION"));
      try {
        await connection.query(migrationTable);
        const applied = new Set((await read(connection)).map(({ id }) => id));
        const missing = all.filter(({ id }) => !applied.has(id));
        for (const migration of missing) {
          for (const statement of migration.statements) await connection.query(statement);
          await connection.query(record(migration));
        }
        await connection.query(sql.raw("COMMIT"));
        return missing;
      } catch (error) {
        await connection.query(sql.raw("ROLLBACK")).catch(() => {});
        throw error;
      }
    }),
});
