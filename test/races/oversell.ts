import assert from "node:assert/strict";
import type { Knex } from "knex";
import { type Race, everywhere, number } from "./race.ts";

interface Order {
  id: number;
  sku: string;
  qty: number;
}

async function naive(knex: Knex, order: Order): Promise<void> {
  await knex.transaction(async (trx) => {
    const product = await trx("stock_product").where({ sku: order.sku }).first("qty");
    if (product.qty < order.qty) throw new Error("Out of stock");
    await trx("stock_order").insert(order);
    await trx("stock_product").where({ sku: order.sku }).decrement("qty", order.qty);
  });
}

async function fixed(knex: Knex, order: Order): Promise<void> {
  await knex.transaction(async (trx) => {
    const taken = await trx("stock_product")
      .where({ sku: order.sku })
      .where("qty", ">=", order.qty)
      .decrement("qty", order.qty);
    if (taken === 0) throw new Error("Out of stock");
    await trx("stock_order").insert(order);
  });
}

const first = { id: 1, sku: "lamp", qty: 3 };
const second = { id: 2, sku: "lamp", qty: 3 };

export const oversell: Race = {
  title: "more is sold than there is",
  source: "magento2 6363, opencart 4811",
  client: "knex",
  engines: everywhere,
  tables: {
    stock_product: "sku varchar(20) PRIMARY KEY, qty int NOT NULL",
    stock_order: "id int PRIMARY KEY, sku varchar(20) NOT NULL, qty int NOT NULL",
  },
  rows: ["INSERT INTO stock_product VALUES ('lamp', 5)"],
  naive: { actors: ({ knex }) => ({ A: () => naive(knex, first), B: () => naive(knex, second) }) },
  fixed: { actors: ({ knex }) => ({ A: () => fixed(knex, first), B: () => fixed(knex, second) }) },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT sum(qty) FROM stock_order"), 3, "sold");
    assert.equal(await number(clients, "SELECT qty FROM stock_product"), 2, "left");
  },
  expects: "lost update",
};
