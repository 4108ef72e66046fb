/**
 * Stands in for `prisma migrate deploy`, whose schema engine is a program of its own and not part of this repository: it
 * adds a column and writes down that it has. A real migration takes seconds; this one takes until all instances have
 * come, so that what the example shows does not depend on how fast they start.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { Client } from "pg";

const client = new Client({ connectionString: process.env["DATABASE_URL"] });
await client.connect();
await client.query("ALTER TABLE holdfast_example_account ADD COLUMN credit integer NOT NULL DEFAULT 0");
await client.query("INSERT INTO holdfast_example_migration VALUES ($1)", [process.env["HOLDFAST_LOCK"]]);
for (let waiting = 0; waiting < 4; await sleep(50)) {
  const { rows } = await client.query<{ count: number }>(
    `SELECT count(*)::int FROM pg_locks l JOIN pg_stat_activity a USING (pid)
      WHERE a.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted`,
  );
  waiting = rows[0]?.count ?? 0;
}
await client.end();
