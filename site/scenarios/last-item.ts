import assert from "node:assert/strict";
import type { Pool } from "pg";
import { type Scenario, inTransaction, one } from "./scenario.ts";

async function buy(pool: Pool, sku: string, buyer: string): Promise<void> {
  await inTransaction(pool, async (client) => {
    const { pieces } = await one<{ pieces: number }>(client, "SELECT pieces FROM item WHERE sku = $1", [sku]);
    if (pieces < 1) throw new Error("Sold out");
    await client.query("UPDATE item SET pieces = pieces - 1 WHERE sku = $1", [sku]);
    await client.query("INSERT INTO sale (sku, buyer) VALUES ($1, $2)", [sku, buyer]);
  });
}

export const scenario: Scenario = {
  title: "Two buyers, one piece",
  tables: `
    CREATE TABLE item (sku text PRIMARY KEY, pieces int NOT NULL);
    CREATE TABLE sale (sku text NOT NULL, buyer text NOT NULL)`,
  rows: "DELETE FROM sale; DELETE FROM item; INSERT INTO item VALUES ('CAP', 1)",
  actors: (pool) => ({ A: () => buy(pool, "CAP", "ada"), B: () => buy(pool, "CAP", "bob") }),
  async invariant(pool) {
    const { n } = await one<{ n: number }>(pool, "SELECT count(*)::int AS n FROM sale");
    assert.ok(n <= 1, `${n} sold of 1`);
  },
};
