import assert from "node:assert/strict";
import type { Pool, PoolClient } from "pg";
import { withTransaction } from "./app.ts";
import { type Race, number, postgresOnly } from "./race.ts";

interface Intent {
  id: string;
  orderId: number;
  amount: number;
}

async function record(client: PoolClient, { id, orderId, amount }: Intent): Promise<void> {
  await client.query("INSERT INTO payment (intent_id, order_id, amount) VALUES ($1, $2, $3)", [
    id,
    orderId,
    amount,
  ]);
  await client.query("UPDATE paid_order SET paid = paid + $1, state = 'paid' WHERE id = $2", [
    amount,
    orderId,
  ]);
}

const naive = {
  /** The shop's page, when the customer comes back from the bank. */
  confirm: (pool: Pool, intent: Intent): Promise<void> =>
    withTransaction(pool, async (client) => {
      const known = await client.query("SELECT 1 FROM payment WHERE intent_id = $1", [intent.id]);
      if (known.rowCount === 0) await record(client, intent);
    }),

  /** The bank, at about the same time. */
  webhook: (pool: Pool, intent: Intent): Promise<void> =>
    withTransaction(pool, async (client) => {
      const { rows } = await client.query("SELECT state FROM paid_order WHERE id = $1", [intent.orderId]);
      if (rows[0].state !== "paid") await record(client, intent);
    }),
};

async function locked(client: PoolClient, orderId: number): Promise<string> {
  const { rows } = await client.query("SELECT state FROM paid_order WHERE id = $1 FOR UPDATE", [orderId]);
  return rows[0].state;
}

const fixed = {
  confirm: (pool: Pool, intent: Intent): Promise<void> =>
    withTransaction(pool, async (client) => {
      await locked(client, intent.orderId);
      const known = await client.query("SELECT 1 FROM payment WHERE intent_id = $1", [intent.id]);
      if (known.rowCount === 0) await record(client, intent);
    }),

  webhook: (pool: Pool, intent: Intent): Promise<void> =>
    withTransaction(pool, async (client) => {
      if ((await locked(client, intent.orderId)) !== "paid") await record(client, intent);
    }),
};

const intent = { id: "pi_1", orderId: 1, amount: 100 };

export const webhook: Race = {
  title: "the webhook comes while the page confirms the payment",
  source: "spree 13938",
  client: "pg",
  engines: postgresOnly,
  tables: {
    paid_order: "id int PRIMARY KEY, state text NOT NULL, paid int NOT NULL",
    payment: "id serial PRIMARY KEY, intent_id text NOT NULL, order_id int NOT NULL, amount int NOT NULL",
  },
  rows: ["INSERT INTO paid_order VALUES (1, 'open', 0)"],
  naive: {
    actors: ({ pool }) => ({
      page: () => naive.confirm(pool, intent),
      bank: () => naive.webhook(pool, intent),
    }),
  },
  fixed: {
    migration: ["CREATE UNIQUE INDEX one_payment ON payment (intent_id)"],
    actors: ({ pool }) => ({
      page: () => fixed.confirm(pool, intent),
      bank: () => fixed.webhook(pool, intent),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM payment"), 1, "payments");
    assert.equal(await number(clients, "SELECT paid FROM paid_order"), 100, "paid");
  },
};
