import assert from "node:assert/strict";
import type { Pool } from "pg";
import { type Scenario, inTransaction, one } from "./scenario.ts";

const quotaBytes = 100;

async function upload(pool: Pool, userId: string, bytes: number): Promise<void> {
  await inTransaction(pool, async (client) => {
    const { used } = await one<{ used: number }>(
      client,
      "SELECT coalesce(sum(bytes), 0)::int AS used FROM upload WHERE user_id = $1",
      [userId],
    );
    if (used + bytes > quotaBytes) throw new Error("The quota is used up");
    await client.query("INSERT INTO upload (user_id, bytes) VALUES ($1, $2)", [userId, bytes]);
  });
}

export const scenario: Scenario = {
  title: "Two uploads of 60 bytes, and room for 100",
  tables: "CREATE TABLE upload (user_id text NOT NULL, bytes int NOT NULL)",
  rows: "DELETE FROM upload",
  actors: (pool) => ({ A: () => upload(pool, "ada", 60), B: () => upload(pool, "ada", 60) }),
  async invariant(pool) {
    const { used } = await one<{ used: number }>(pool, "SELECT sum(bytes)::int AS used FROM upload");
    assert.ok(used <= quotaBytes, `${used} of ${quotaBytes} bytes are used`);
  },
};
