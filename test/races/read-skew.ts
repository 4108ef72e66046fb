import assert from "node:assert/strict";
import type { Pool } from "pg";
import { withTransaction } from "./app.ts";
import { type Race, number, postgresOnly } from "./race.ts";

const move = (pool: Pool, amount: number): Promise<void> =>
  withTransaction(pool, async (client) => {
    await client.query("UPDATE cash_box SET amount = amount - $1 WHERE name = 'till'", [amount]);
    await client.query("UPDATE cash_box SET amount = amount + $1 WHERE name = 'safe'", [amount]);
  });

async function amountIn(pool: Pool, name: string): Promise<number> {
  const { rows } = await pool.query("SELECT amount FROM cash_box WHERE name = $1", [name]);
  return rows[0].amount;
}

/** Two queries at once are faster than one after the other, and just as much two moments. */
async function naive(pool: Pool): Promise<void> {
  const [till, safe] = await Promise.all([amountIn(pool, "till"), amountIn(pool, "safe")]);
  await pool.query("INSERT INTO cash_report (total) VALUES ($1)", [till + safe]);
}

async function fixed(pool: Pool): Promise<void> {
  const { rows } = await pool.query("SELECT sum(amount)::int AS total FROM cash_box");
  await pool.query("INSERT INTO cash_report (total) VALUES ($1)", [rows[0].total]);
}

export const readSkew: Race = {
  title: "a report adds up two queries that were sent together",
  client: "pg",
  engines: postgresOnly,
  tables: { cash_box: "name text PRIMARY KEY, amount int NOT NULL", cash_report: "total int NOT NULL" },
  rows: ["INSERT INTO cash_box VALUES ('till', 100), ('safe', 100)"],
  naive: { actors: ({ pool }) => ({ move: () => move(pool, 30), report: () => naive(pool) }) },
  fixed: { actors: ({ pool }) => ({ move: () => move(pool, 30), report: () => fixed(pool) }) },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT total FROM cash_report"), 200, "cash in the house");
  },
};
