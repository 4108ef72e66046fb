import assert from "node:assert/strict";
import { type DataSource, type EntityManager, EntitySchema } from "typeorm";
import { type Race, everywhere, number, was } from "./race.ts";

interface Cart {
  id: number;
}
interface CartItem {
  id: number;
  cartId: number;
  price: number;
}
interface Order {
  id: number;
  total: number;
}
interface OrderItem {
  id: number;
  orderId: number;
  price: number;
}

const Cart = new EntitySchema<Cart>({
  name: "LfsCart",
  tableName: "lfs_cart",
  columns: { id: { type: "int", primary: true } },
});
const CartItem = new EntitySchema<CartItem>({
  name: "LfsCartItem",
  tableName: "lfs_cart_item",
  columns: {
    id: { type: "int", primary: true },
    cartId: { name: "cart_id", type: "int" },
    price: { type: "int" },
  },
});
const Order = new EntitySchema<Order>({
  name: "LfsOrder",
  tableName: "lfs_order",
  columns: { id: { type: "int", primary: true }, total: { type: "int" } },
});
const OrderItem = new EntitySchema<OrderItem>({
  name: "LfsOrderItem",
  tableName: "lfs_order_item",
  columns: {
    id: { type: "int", primary: true },
    orderId: { name: "order_id", type: "int" },
    price: { type: "int" },
  },
});

async function totalOf(manager: EntityManager, cartId: number): Promise<number> {
  return (await manager.sum(CartItem, "price", { cartId })) ?? 0;
}

async function placeOrder(manager: EntityManager, cartId: number): Promise<void> {
  await manager.insert(Order, { id: cartId, total: await totalOf(manager, cartId) });
  for (const { id, price } of await manager.find(CartItem, { where: { cartId }, order: { id: "ASC" } })) {
    await manager.insert(OrderItem, { id, orderId: cartId, price });
  }
  await manager.delete(CartItem, { cartId });
}

const naive = {
  checkout: (dataSource: DataSource, cartId: number): Promise<void> =>
    dataSource.transaction((manager) => placeOrder(manager, cartId)),

  async add(dataSource: DataSource, item: CartItem): Promise<void> {
    await dataSource.manager.insert(CartItem, item);
  },
};

const locked = (manager: EntityManager, id: number): Promise<Cart> =>
  manager.findOneOrFail(Cart, { where: { id }, lock: { mode: "pessimistic_write" } });

const fixed = {
  checkout: (dataSource: DataSource, cartId: number): Promise<void> =>
    dataSource.transaction(async (manager) => {
      await locked(manager, cartId);
      await placeOrder(manager, cartId);
    }),

  add: (dataSource: DataSource, item: CartItem): Promise<void> =>
    dataSource.transaction(async (manager) => {
      await locked(manager, item.cartId);
      await manager.insert(CartItem, item);
    }),
};

const ink = { id: 2, cartId: 1, price: 7 };

export const cartTotal: Race = {
  title: "the cart is edited during checkout",
  source: "django-lfs 201, ror_ecommerce 174",
  client: "typeorm",
  engines: everywhere,
  tables: {
    lfs_cart: "id int PRIMARY KEY",
    lfs_cart_item: "id int PRIMARY KEY, cart_id int NOT NULL, price int NOT NULL",
    lfs_order: "id int PRIMARY KEY, total int NOT NULL",
    lfs_order_item: "id int PRIMARY KEY, order_id int NOT NULL, price int NOT NULL",
  },
  rows: ["INSERT INTO lfs_cart VALUES (1)", "INSERT INTO lfs_cart_item VALUES (1, 1, 5)"],
  entities: { typeorm: [Cart, CartItem, Order, OrderItem] },
  naive: {
    actors: ({ dataSource }) => ({
      checkout: () => naive.checkout(dataSource, 1),
      add: () => naive.add(dataSource, ink),
    }),
  },
  fixed: {
    actors: ({ dataSource }) => ({
      checkout: () => fixed.checkout(dataSource, 1),
      add: () => fixed.add(dataSource, ink),
    }),
  },
  async invariant(clients, results) {
    const total = await number(clients, "SELECT total FROM lfs_order");
    const items = await number(clients, "SELECT sum(price) FROM lfs_order_item");
    assert.equal(total, items, "the total of the order");
    const left = await number(clients, "SELECT coalesce(sum(price), 0) FROM lfs_cart_item");
    assert.equal(items + left, was(results, "add") ? 12 : 5, "nothing that was put into the cart is lost");
  },
};
