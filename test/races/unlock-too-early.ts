import assert from "node:assert/strict";
import type { Pool } from "pg";
import { withTransaction } from "./app.ts";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

const LOCK = "hashtext('wallet:' || $1)";

/** Unlocked in the finally, as one does. The transaction is still open then, and others see the old balance. */
const naive = (pool: Pool, owner: string, amount: number): Promise<void> =>
  withTransaction(pool, async (client) => {
    await client.query(`SELECT pg_advisory_lock(${LOCK})`, [owner]);
    try {
      const { rows } = await client.query("SELECT balance FROM wallet WHERE owner = $1", [owner]);
      if (rows[0].balance < amount) throw new Error("Not enough");
      await client.query("INSERT INTO withdrawal (owner, amount) VALUES ($1, $2)", [owner, amount]);
      await client.query("UPDATE wallet SET balance = balance - $1 WHERE owner = $2", [amount, owner]);
    } finally {
      await client.query(`SELECT pg_advisory_unlock(${LOCK})`, [owner]);
    }
  });

const fixed = (pool: Pool, owner: string, amount: number): Promise<void> =>
  withTransaction(pool, async (client) => {
    await client.query(`SELECT pg_advisory_xact_lock(${LOCK})`, [owner]);
    const { rows } = await client.query("SELECT balance FROM wallet WHERE owner = $1", [owner]);
    if (rows[0].balance < amount) throw new Error("Not enough");
    await client.query("INSERT INTO withdrawal (owner, amount) VALUES ($1, $2)", [owner, amount]);
    await client.query("UPDATE wallet SET balance = balance - $1 WHERE owner = $2", [amount, owner]);
  });

export const unlockTooEarly: Race = {
  title: "a lock is given back before COMMIT",
  client: "pg",
  engines: postgresOnly,
  tables: {
    wallet: "owner text PRIMARY KEY, balance int NOT NULL",
    withdrawal: "owner text NOT NULL, amount int NOT NULL",
  },
  rows: ["INSERT INTO wallet VALUES ('ada', 100)"],
  naive: { actors: ({ pool }) => ({ A: () => naive(pool, "ada", 60), B: () => naive(pool, "ada", 70) }) },
  fixed: { actors: ({ pool }) => ({ A: () => fixed(pool, "ada", 60), B: () => fixed(pool, "ada", 70) }) },
  async invariant(clients, results) {
    const balance = await number(clients, "SELECT balance FROM wallet");
    assert.equal(balance, 100 - (await number(clients, "SELECT sum(amount) FROM withdrawal")));
    assert.ok(balance >= 0, `the balance is ${balance}`);
    assert.equal(accepted(results), 1);
  },
};
