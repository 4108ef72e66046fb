import assert from "node:assert/strict";
import type { Knex } from "knex";
import { type Race, accepted, everywhere, number } from "./race.ts";

async function move(trx: Knex, from: number, to: number, amount: number): Promise<void> {
  await trx("bank_account").where({ id: from }).decrement("balance", amount);
  await trx("bank_account").where({ id: to }).increment("balance", amount);
}

const locked = (trx: Knex, id: number) => trx("bank_account").where({ id }).forUpdate().first("balance");

/** Both rows are locked, in the order in which they come. */
async function naive(knex: Knex, from: number, to: number, amount: number): Promise<void> {
  await knex.transaction(async (trx) => {
    const source = await locked(trx, from);
    await locked(trx, to);
    if (source.balance < amount) throw new Error("Not enough");
    await move(trx, from, to, amount);
  });
}

async function fixed(knex: Knex, from: number, to: number, amount: number): Promise<void> {
  await knex.transaction(async (trx) => {
    const rows = await trx("bank_account").whereIn("id", [from, to]).orderBy("id").forUpdate();
    if (rows.find(({ id }) => id === from).balance < amount) throw new Error("Not enough");
    await move(trx, from, to, amount);
  });
}

export const transferDeadlock: Race = {
  title: "two transfers lock two accounts crosswise",
  client: "knex",
  engines: everywhere,
  tables: { bank_account: "id int PRIMARY KEY, balance int NOT NULL" },
  rows: ["INSERT INTO bank_account VALUES (1, 100), (2, 100)"],
  naive: { actors: ({ knex }) => ({ A: () => naive(knex, 1, 2, 30), B: () => naive(knex, 2, 1, 50) }) },
  fixed: { actors: ({ knex }) => ({ A: () => fixed(knex, 1, 2, 30), B: () => fixed(knex, 2, 1, 50) }) },
  async invariant(clients, results) {
    assert.equal(accepted(results), 2, "transfers, for which there is enough on both sides");
    assert.equal(await number(clients, "SELECT balance FROM bank_account WHERE id = 1"), 120);
  },
  expects: "deadlock",
};
