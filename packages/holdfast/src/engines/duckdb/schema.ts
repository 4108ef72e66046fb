import type { Migration, Migrations } from "../../core/database.ts";
import { sql } from "../../core/sql.ts";
import { type DuckdbConnection, render } from "./dialect.ts";
import { leaseTables } from "./leases.ts";
import { lockTable } from "./locks.ts";
import { replayTable } from "./replay.ts";

const migrationTable = sql`CREATE TABLE IF NOT EXISTS holdfast_migration (
  id integer NOT NULL,
  name varchar NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
)`;

const all: readonly Migration[] = [
  { id: 1, name: "migrations", statements: [migrationTable] },
  { id: 2, name: "lock rows", statements: lockTable },
  { id: 3, name: "leases", statements: leaseTables },
  { id: 4, name: "once", statements: replayTable },
];

export const migrations: Migrations<DuckdbConnection> = {
  all,
  print: (statement) => `${render(statement).text};`,
  apply: async (connection) =>
    (await connection.desk).errands.run(async () => {
      await connection.query(sql.raw("BEGIN TRANSACTION"));
      try {
        await connection.query(migrationTable);
        const { rows } = await connection.query(sql`SELECT id FROM holdfast_migration`);
        const applied = new Set(rows.map(({ id }) => Number(id)));
        const missing = all.filter(({ id }) => !applied.has(id));
        for (const { id, name, statements } of missing) {
          for (const statement of statements) await connection.query(statement);
          await connection.query(sql`INSERT INTO holdfast_migration (id, name) VALUES (${id}, ${name})`);
        }
        await connection.query(sql.raw("COMMIT"));
        return missing;
      } catch (error) {
        await connection.query(sql.raw("ROLLBACK")).catch(() => {});
        throw error;
      }
    }),
};
