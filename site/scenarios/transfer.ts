import assert from "node:assert/strict";
import type { Pool } from "pg";
import { type Scenario, inTransaction } from "./scenario.ts";

async function transfer(pool: Pool, from: number, to: number, amount: number): Promise<void> {
  await inTransaction(pool, async (client) => {
    await client.query("UPDATE account SET balance = balance - $2 WHERE id = $1", [from, amount]);
    await client.query("UPDATE account SET balance = balance + $2 WHERE id = $1", [to, amount]);
  });
}

export const scenario: Scenario = {
  title: "Two transfers between the same accounts, in both directions",
  tables: "CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL)",
  rows: "DELETE FROM account; INSERT INTO account VALUES (1, 100), (2, 100)",
  actors: (pool) => ({ A: () => transfer(pool, 1, 2, 30), B: () => transfer(pool, 2, 1, 50) }),
  async invariant(_, failures) {
    assert.ok(failures.length === 0, `A transfer failed: ${failures.join(", ")}`);
  },
};
