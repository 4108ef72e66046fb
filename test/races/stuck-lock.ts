import assert from "node:assert/strict";
import { LockMode } from "@mikro-orm/core";
import { type SqlEntityManager, defineEntity } from "@mikro-orm/postgresql";
import { type Race, everywhere, number } from "./race.ts";

const Cart = defineEntity({
  name: "FlaggedCart",
  tableName: "flagged_cart",
  properties: (p) => ({ id: p.integer().primary(), locked: p.boolean() }),
});
const Item = defineEntity({
  name: "FlaggedCartItem",
  tableName: "flagged_cart_item",
  properties: (p) => ({ id: p.integer().primary(), cartId: p.integer(), price: p.integer() }),
});
const Order = defineEntity({
  name: "FlaggedOrder",
  tableName: "flagged_order",
  properties: (p) => ({ id: p.integer().primary(), total: p.integer() }),
});

class EmptyCart extends Error {}

async function placeOrder(em: SqlEntityManager, cartId: number): Promise<void> {
  const items = await em.find(Item, { cartId });
  if (items.length === 0) throw new EmptyCart();
  await em.insert(Order, { id: cartId, total: items.reduce((sum, { price }) => sum + price, 0) });
  await em.nativeDelete(Item, { cartId });
}

const naive = {
  /** The flag is taken in one statement, as it should be. Nobody thought of the way out. */
  async checkout(em: SqlEntityManager, cartId: number): Promise<void> {
    if ((await em.count(Item, { cartId })) === 0) throw new EmptyCart();
    const taken = await em.nativeUpdate(Cart, { id: cartId, locked: false }, { locked: true });
    if (taken === 0) throw new Error("Another request is at work on this cart");
    await placeOrder(em, cartId);
    await em.nativeUpdate(Cart, { id: cartId }, { locked: false });
  },

  async remove(em: SqlEntityManager, itemId: number): Promise<void> {
    await em.nativeDelete(Item, { id: itemId });
  },
};

const fixed = {
  checkout: (em: SqlEntityManager, cartId: number): Promise<void> =>
    em.transactional(async (em) => {
      await em.findOneOrFail(Cart, cartId, { lockMode: LockMode.PESSIMISTIC_WRITE });
      await placeOrder(em, cartId);
    }),

  remove: (em: SqlEntityManager, cartId: number, itemId: number): Promise<void> =>
    em.transactional(async (em) => {
      await em.findOneOrFail(Cart, cartId, { lockMode: LockMode.PESSIMISTIC_WRITE });
      await em.nativeDelete(Item, { id: itemId });
    }),
};

export const stuckLock: Race = {
  title: "a lock stays after an error",
  source: "broadleaf 2554",
  client: "mikro-orm",
  engines: everywhere,
  tables: {
    flagged_cart: "id int PRIMARY KEY, locked boolean NOT NULL",
    flagged_cart_item: "id int PRIMARY KEY, cart_id int NOT NULL, price int NOT NULL",
    flagged_order: "id int PRIMARY KEY, total int NOT NULL",
  },
  rows: ["INSERT INTO flagged_cart VALUES (1, false)", "INSERT INTO flagged_cart_item VALUES (1, 1, 5)"],
  entities: { mikroOrm: [Cart, Item, Order] },
  naive: {
    actors: ({ em }) => ({
      checkout: () => naive.checkout(em.fork(), 1),
      remove: () => naive.remove(em.fork(), 1),
    }),
  },
  fixed: {
    actors: ({ em }) => ({
      checkout: () => fixed.checkout(em.fork(), 1),
      remove: () => fixed.remove(em.fork(), 1, 1),
    }),
  },
  async invariant(clients) {
    const locked = await number(clients, "SELECT count(*) FROM flagged_cart WHERE locked");
    assert.equal(locked, 0, "carts that nobody can check out any more");
  },
};
