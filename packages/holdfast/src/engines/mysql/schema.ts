import type { Migration, Migrations, SqlConnection } from "../../core/database.ts";
import { UnsupportedError } from "../../core/errors.ts";
import { sql } from "../../core/sql.ts";
import { render } from "./dialect.ts";

const migrationTable = sql`CREATE TABLE IF NOT EXISTS holdfast_migration (
  id int NOT NULL PRIMARY KEY,
  name varchar(100) NOT NULL,
  applied_at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP
) ENGINE=InnoDB`;

const all: readonly Migration[] = [
  {
    id: 1,
    name: "lock rows",
    statements: [
      migrationTable,
      sql`CREATE TABLE IF NOT EXISTS holdfast_lock (
  id varbinary(64) NOT NULL PRIMARY KEY,
  name varchar(200) CHARACTER SET utf8mb4 NOT NULL,
  turn bigint NOT NULL DEFAULT 0
) ENGINE=InnoDB`,
    ],
  },
];

/** DDL commits by itself here, so the lock is one of the session. */
const name = sql`CONCAT('holdfast:', LEFT(SHA2(CONCAT(DATABASE(), ':migrate'), 256), 40))`;

export const migrations: Migrations<SqlConnection> = {
  all,
  print: (statement) => `${render(statement).text};`,
  async apply(connection, begun) {
    if (begun)
      throw new UnsupportedError("hf.migrate: DDL would commit the transaction that this client has opened");
    const [row] = (await connection.query(sql`SELECT GET_LOCK(${name}, 60) AS granted`)).rows;
    if (String(row?.granted) !== "1")
      throw new UnsupportedError("hf.migrate: another process has been migrating for more than a minute");
    try {
      await connection.query(migrationTable);
      const { rows } = await connection.query(sql`SELECT id FROM holdfast_migration`);
      const applied = new Set(rows.map(({ id }) => Number(id)));
      const missing = all.filter(({ id }) => !applied.has(id));
      for (const migration of missing) {
        for (const statement of migration.statements) await connection.query(statement);
        await connection.query(
          sql`INSERT INTO holdfast_migration (id, name) VALUES (${migration.id}, ${migration.name})`,
        );
      }
      return missing;
    } finally {
      if (!connection.lost.aborted) await connection.query(sql`SELECT RELEASE_LOCK(${name})`);
    }
  },
};
