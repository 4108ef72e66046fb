import assert from "node:assert/strict";
import type { Knex } from "knex";
import { type Race, accepted, everywhere, number } from "./race.ts";

/** The query is `knex`'s, not `trx`'s: its lock is gone before the next line. */
async function naive(knex: Knex, code: string, orderId: number, amount: number): Promise<void> {
  await knex.transaction(async (trx) => {
    const card = await knex("gift_card").where({ code }).forUpdate().first("balance");
    if (card.balance < amount) throw new Error("Not enough on the card");
    await trx("gift_payment").insert({ order_id: orderId, amount });
    await trx("gift_card")
      .where({ code })
      .update({ balance: card.balance - amount });
  });
}

async function fixed(knex: Knex, code: string, orderId: number, amount: number): Promise<void> {
  await knex.transaction(async (trx) => {
    const card = await trx("gift_card").where({ code }).forUpdate().first("balance");
    if (card.balance < amount) throw new Error("Not enough on the card");
    await trx("gift_payment").insert({ order_id: orderId, amount });
    await trx("gift_card")
      .where({ code })
      .update({ balance: card.balance - amount });
  });
}

export const lockOutside: Race = {
  title: "FOR UPDATE outside of the transaction",
  client: "knex",
  engines: everywhere,
  tables: {
    gift_card: "code varchar(20) PRIMARY KEY, balance int NOT NULL",
    gift_payment: "order_id int PRIMARY KEY, amount int NOT NULL",
  },
  rows: ["INSERT INTO gift_card VALUES ('G1', 100)"],
  naive: { actors: ({ knex }) => ({ A: () => naive(knex, "G1", 1, 60), B: () => naive(knex, "G1", 2, 70) }) },
  fixed: { actors: ({ knex }) => ({ A: () => fixed(knex, "G1", 1, 60), B: () => fixed(knex, "G1", 2, 70) }) },
  async invariant(clients, results) {
    const paid = await number(clients, "SELECT sum(amount) FROM gift_payment");
    assert.equal(await number(clients, "SELECT balance FROM gift_card"), 100 - paid);
    assert.equal(accepted(results), 1);
  },
  expects: "lost update",
};
