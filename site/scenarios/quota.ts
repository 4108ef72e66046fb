import assert from "node:assert/strict";
import type { Pool } from "pg";
import { type Scenario, inTransaction, one } from "./scenario.ts";

async function upload(pool: Pool, userId: string): Promise<void> {
  await inTransaction(pool, async (client) => {
    const { used } = await one<{ used: number }>(
      client,
      "SELECT count(*)::int AS used FROM image WHERE user_id = $1",
      [userId],
    );
    if (used >= 10) throw new Error("The limit is 10");
    await client.query("INSERT INTO image (user_id) VALUES ($1)", [userId]);
  });
}

export const scenario: Scenario = {
  title: "Two uploads of a user who has 9 of 10",
  tables: "CREATE TABLE image (user_id text NOT NULL)",
  rows: "DELETE FROM image; INSERT INTO image SELECT 'ada' FROM generate_series(1, 9)",
  actors: (pool) => ({ A: () => upload(pool, "ada"), B: () => upload(pool, "ada") }),
  async invariant(pool) {
    const { n } = await one<{ n: number }>(pool, "SELECT count(*)::int AS n FROM image");
    assert.ok(n <= 10, `${n} images, and the limit is 10`);
  },
};
