import type { Migration, Migrations } from "../../seam/database.ts";
import { message } from "../../seam/errors.ts";
import { recorded } from "../../seam/migrations.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import { asWriter } from "./begin.ts";
import { entryViews } from "../sql/entries.ts";
import { execTable } from "../sql/exec.ts";
import { type SqliteConnection, dialect, render } from "./dialect.ts";
import { leaseTables } from "./leases.ts";
import { replayTable } from "./replay.ts";
import { storeTables } from "./stores.ts";

const views = entryViews({
  create: sql.raw("CREATE VIEW IF NOT EXISTS"),
  moment: (column) => sql`strftime('%Y-%m-%dT%H:%M:%fZ', ${column} / 1000000.0, 'unixepoch')`,
});

const migrationTable = sql`CREATE TABLE IF NOT EXISTS ${own("migration")} (
  id integer NOT NULL PRIMARY KEY,
  name text NOT NULL,
  applied_at text NOT NULL DEFAULT CURRENT_TIMESTAMP
)`;

const all: readonly Migration[] = [
  { id: 1, name: "migrations", statements: [migrationTable] },
  { id: 2, name: "leases", statements: leaseTables },
  { id: 3, name: "once", statements: replayTable },
  { id: 4, name: "patterns", statements: storeTables },
  { id: 5, name: "entries", statements: views },
  { id: 6, name: "exec", statements: execTable({ id: "text", text: "text" }) },
];

const read = (connection: SqliteConnection) =>
  recorded(connection, all, (connection.names ?? dialect.names).own("migration"), (error) =>
    /no such column/.test(message(error)),
  );

function record({ id, name }: Pick<Migration, "id" | "name">): Statement {
  return sql`INSERT OR IGNORE INTO ${own("migration")} (id, name) VALUES (${sql.raw(`${id}, '${name}'`)})`;
}

export const migrationsIn = (names: Names): Migrations<SqliteConnection> => ({
  all,
  print: (statement) => `${render(statement, names).text};`,
  record,
  async applied(connection) {
    const { rows: tables } = await connection.query(
      sql`SELECT 1 AS there FROM sqlite_schema WHERE type = 'table' AND name = ${own.text("migration")}`,
    );
    return tables.length === 0 ? [] : read(connection);
  },
  apply: (connection) =>
    asWriter(connection, 60_000, async () => {
      await connection.query(migrationTable);
      const applied = new Set((await read(connection)).map(({ id }) => id));
      const missing = all.filter(({ id }) => !applied.has(id));
      for (const migration of missing) {
        for (const statement of migration.statements) await connection.query(statement);
        await connection.query(record(migration));
      }
      return missing;
    }),
});
