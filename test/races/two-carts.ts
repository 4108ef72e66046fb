import assert from "node:assert/strict";
import { LockMode } from "@mikro-orm/core";
import { type SqlEntityManager, defineEntity } from "@mikro-orm/postgresql";
import { type Race, number, postgresOnly } from "./race.ts";

const Cart = defineEntity({
  name: "CustomerCart",
  tableName: "customer_cart",
  properties: (p) => ({ id: p.integer().primary().autoincrement(), customer: p.integer() }),
});
const Item = defineEntity({
  name: "CustomerCartItem",
  tableName: "customer_cart_item",
  properties: (p) => ({ cartId: p.integer().primary(), sku: p.string().primary() }),
});

/** The cart is locked. While there is none, nothing is. */
async function naive(em: SqlEntityManager, customer: number, sku: string): Promise<void> {
  await em.transactional(async (em) => {
    let cart = await em.findOne(Cart, { customer }, { lockMode: LockMode.PESSIMISTIC_WRITE });
    if (!cart) {
      cart = em.create(Cart, { customer });
      await em.persist(cart).flush();
    }
    em.persist(em.create(Item, { cartId: cart.id, sku }));
  });
}

async function fixed(em: SqlEntityManager, customer: number, sku: string): Promise<void> {
  await em.transactional(async (em) => {
    await em.upsert(Cart, { customer }, { onConflictFields: ["customer"], onConflictAction: "ignore" });
    const cart = await em.findOneOrFail(Cart, { customer }, { lockMode: LockMode.PESSIMISTIC_WRITE });
    em.persist(em.create(Item, { cartId: cart.id, sku }));
  });
}

export const twoCarts: Race = {
  title: "two carts for a customer who had none",
  source: "broadleaf 2478",
  client: "mikro-orm",
  engines: postgresOnly,
  tables: {
    customer_cart: "id serial PRIMARY KEY, customer int NOT NULL",
    customer_cart_item: "cart_id int NOT NULL, sku varchar(20) NOT NULL, PRIMARY KEY (cart_id, sku)",
  },
  rows: [],
  entities: { mikroOrm: [Cart, Item] },
  naive: {
    actors: ({ em }) => ({ A: () => naive(em.fork(), 1, "pen"), B: () => naive(em.fork(), 1, "ink") }),
  },
  fixed: {
    migration: ["CREATE UNIQUE INDEX one_cart ON customer_cart (customer)"],
    actors: ({ em }) => ({ A: () => fixed(em.fork(), 1, "pen"), B: () => fixed(em.fork(), 1, "ink") }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM customer_cart"), 1, "carts of the customer");
    assert.equal(await number(clients, "SELECT count(*) FROM customer_cart_item"), 2, "items");
  },
  expects: "phantom",
};
