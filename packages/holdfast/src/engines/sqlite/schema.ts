import type { Migration, Migrations } from "../../core/database.ts";
import { sql } from "../../core/sql.ts";
import { asWriter } from "./begin.ts";
import { type SqliteConnection, render } from "./dialect.ts";
import { leaseTables } from "./leases.ts";
import { replayTable } from "./replay.ts";

const migrationTable = sql`CREATE TABLE IF NOT EXISTS holdfast_migration (
  id integer NOT NULL PRIMARY KEY,
  name text NOT NULL,
  applied_at text NOT NULL DEFAULT CURRENT_TIMESTAMP
)`;

const all: readonly Migration[] = [
  { id: 1, name: "migrations", statements: [migrationTable] },
  { id: 2, name: "leases", statements: leaseTables },
  { id: 3, name: "once", statements: replayTable },
];

export const migrations: Migrations<SqliteConnection> = {
  all,
  print: (statement) => `${render(statement).text};`,
  apply: (connection) =>
    asWriter(connection, 60_000, async () => {
      await connection.query(migrationTable);
      const { rows } = await connection.query(sql`SELECT id FROM holdfast_migration`);
      const applied = new Set(rows.map(({ id }) => Number(id)));
      const missing = all.filter(({ id }) => !applied.has(id));
      for (const { id, name, statements } of missing) {
        for (const statement of statements) await connection.query(statement);
        await connection.query(sql`INSERT INTO holdfast_migration (id, name) VALUES (${id}, ${name})`);
      }
      return missing;
    }),
};
