import assert from "node:assert/strict";
import type { Pool } from "pg";
import { type Scenario, inTransaction, one } from "./scenario.ts";

async function work(pool: Pool, send: (to: string) => Promise<void>): Promise<void> {
  await inTransaction(pool, async (client) => {
    const { rows } = await client.query<{ id: number; email: string }>(
      "SELECT id, email FROM job WHERE done_at IS NULL ORDER BY id LIMIT 1",
    );
    const [job] = rows;
    if (job === undefined) return;
    await send(job.email);
    await client.query("UPDATE job SET done_at = now() WHERE id = $1", [job.id]);
  });
}

export const scenario: Scenario = {
  title: "Two workers, one job",
  tables: `
    CREATE TABLE job (id int PRIMARY KEY, email text NOT NULL, done_at timestamptz);
    CREATE TABLE sent (email text NOT NULL)`,
  rows: "DELETE FROM sent; DELETE FROM job; INSERT INTO job VALUES (1, 'ada@example.com')",
  actors(pool) {
    // A mail cannot be taken back: it is kept apart from the transaction.
    const send = async (to: string) => void (await pool.query("INSERT INTO sent (email) VALUES ($1)", [to]));
    return { A: () => work(pool, send), B: () => work(pool, send) };
  },
  async invariant(pool) {
    const { n } = await one<{ n: number }>(pool, "SELECT count(*)::int AS n FROM sent");
    assert.ok(n === 1, `The mail was sent ${n} times`);
  },
};
