/** Published flows that are told on PostgreSQL's own clients elsewhere, as they are written on mysql2. */
import assert from "node:assert/strict";
import type { Pool, PoolConnection, ResultSetHeader, RowDataPacket } from "mysql2/promise";
import { Locks } from "./evicted-lock.ts";
import { type Engine, type Race, accepted, number } from "./race.ts";

type Connection = Pool | PoolConnection;

async function one(on: Connection, sql: string, values: unknown[]): Promise<RowDataPacket | undefined> {
  const [rows] = await on.query<RowDataPacket[]>(sql, values);
  return rows[0];
}

async function write(on: Connection, sql: string, values: unknown[]): Promise<number> {
  const [{ affectedRows }] = await on.query<ResultSetHeader>(sql, values);
  return affectedRows;
}

async function transaction<T>(pool: Pool, body: (connection: PoolConnection) => Promise<T>): Promise<T> {
  const connection = await pool.getConnection();
  try {
    await connection.beginTransaction();
    const value = await body(connection);
    await connection.commit();
    return value;
  } catch (error) {
    await connection.rollback();
    throw error;
  } finally {
    connection.release();
  }
}

const common = { client: "mysql2", engines: ["mariadb"] as readonly Engine[] } as const;

const useVoucher = {
  naive: (pool: Pool, order: number) =>
    transaction(pool, async (db) => {
      const voucher = await one(db, "SELECT used_by FROM voucher WHERE code = ?", ["SPRING"]);
      if (!voucher || voucher["used_by"] !== null) throw new Error("The voucher is not valid");
      await write(db, "INSERT INTO voucher_order VALUES (?, ?)", [order, "SPRING"]);
      await write(db, "UPDATE voucher SET used_by = ? WHERE code = ?", [order, "SPRING"]);
    }),
  fixed: (pool: Pool, order: number) =>
    transaction(pool, async (db) => {
      const used = await write(db, "UPDATE voucher SET used_by = ? WHERE code = ? AND used_by IS NULL", [
        order,
        "SPRING",
      ]);
      if (used === 0) throw new Error("The voucher is not valid");
      await write(db, "INSERT INTO voucher_order VALUES (?, ?)", [order, "SPRING"]);
    }),
};

const voucher: Race = {
  ...common,
  title: "a voucher is checked, then used",
  source: "django-oscar 2101, saleor 544, opencart 4812",
  tables: {
    voucher: "code varchar(20) PRIMARY KEY, used_by int",
    voucher_order: "id int PRIMARY KEY, code varchar(20) NOT NULL",
  },
  rows: ["INSERT INTO voucher VALUES ('SPRING', NULL)"],
  naive: {
    actors: ({ mysql }) => ({ A: () => useVoucher.naive(mysql, 1), B: () => useVoucher.naive(mysql, 2) }),
  },
  fixed: {
    actors: ({ mysql }) => ({ A: () => useVoucher.fixed(mysql, 1), B: () => useVoucher.fixed(mysql, 2) }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM voucher_order"), 1, "orders with the voucher");
    assert.equal(accepted(results), 1);
  },
};

async function pay(db: Connection, order: number, used: number, amount: number): Promise<void> {
  await write(db, "UPDATE store_credit SET used = ? WHERE user_id = 1", [used + amount]);
  await write(db, "INSERT INTO credit_payment VALUES (?, ?)", [order, amount]);
}

const credit = {
  /** The lock is there, but what it should protect is decided before it. */
  async naive(pool: Pool, order: number, amount: number): Promise<void> {
    const seen = await one(pool, "SELECT amount, used FROM store_credit WHERE user_id = ?", [1]);
    if (seen?.["amount"] - seen?.["used"] < amount) throw new Error("Not enough");
    await transaction(pool, async (db) => {
      const row = await one(db, "SELECT used FROM store_credit WHERE user_id = ? FOR UPDATE", [1]);
      await pay(db, order, row?.["used"], amount);
    });
  },
  fixed: (pool: Pool, order: number, amount: number) =>
    transaction(pool, async (db) => {
      const row = await one(db, "SELECT amount, used FROM store_credit WHERE user_id = ? FOR UPDATE", [1]);
      if (row?.["amount"] - row?.["used"] < amount) throw new Error("Not enough");
      await pay(db, order, row?.["used"], amount);
    }),
};

const storeCredit: Race = {
  ...common,
  title: "store credit is locked too late",
  source: "spree 11284",
  tables: {
    store_credit: "user_id int PRIMARY KEY, amount int NOT NULL, used int NOT NULL",
    credit_payment: "order_id int PRIMARY KEY, amount int NOT NULL",
  },
  rows: ["INSERT INTO store_credit VALUES (1, 50, 0)"],
  naive: {
    actors: ({ mysql }) => ({ A: () => credit.naive(mysql, 1, 40), B: () => credit.naive(mysql, 2, 30) }),
  },
  fixed: {
    actors: ({ mysql }) => ({ A: () => credit.fixed(mysql, 1, 40), B: () => credit.fixed(mysql, 2, 30) }),
  },
  async invariant(clients) {
    assert.ok((await number(clients, "SELECT coalesce(sum(amount), 0) FROM credit_payment")) <= 50, "spent");
  },
};

/** Its time is over as soon as it is taken: some day the work takes longer than any. */
async function acquire(pool: Pool, owner: string): Promise<void> {
  await write(
    pool,
    "INSERT INTO lease VALUES ('status', ?, NOW(6)) ON DUPLICATE KEY UPDATE owner = IF(expires_at <= NOW(6), VALUES(owner), owner)",
    [owner],
  );
  const row = await one(pool, "SELECT owner FROM lease WHERE name = ?", ["status"]);
  if (row?.["owner"] !== owner) throw new Error("Somebody else is at it");
}

const fetchStatus = {
  async naive(pool: Pool, owner: string): Promise<void> {
    await acquire(pool, owner);
    const known = await one(pool, "SELECT uri FROM status WHERE uri = ?", ["1"]);
    if (!known) await write(pool, "INSERT INTO status VALUES (?, ?)", ["1", owner]);
  },
  /** The write counts only while the lease is ours. */
  async fixed(pool: Pool, owner: string): Promise<void> {
    await acquire(pool, owner);
    await transaction(pool, async (db) => {
      const row = await one(db, "SELECT owner FROM lease WHERE name = ? FOR UPDATE", ["status"]);
      if (row?.["owner"] !== owner) throw new Error("The lease was lost");
      const known = await one(db, "SELECT uri FROM status WHERE uri = ?", ["1"]);
      if (!known) await write(db, "INSERT INTO status VALUES (?, ?)", ["1", owner]);
    });
  },
};

const expiredLock: Race = {
  ...common,
  title: "a lock runs out before the work is done",
  source: "mastodon 15645",
  tables: {
    lease: "name varchar(20) PRIMARY KEY, owner varchar(20) NOT NULL, expires_at timestamp(6) NOT NULL",
    status: "uri varchar(20) NOT NULL, fetched_by varchar(20) NOT NULL",
  },
  rows: [],
  naive: {
    actors: ({ mysql }) => ({
      A: () => fetchStatus.naive(mysql, "A"),
      B: () => fetchStatus.naive(mysql, "B"),
    }),
  },
  fixed: {
    actors: ({ mysql }) => ({
      A: () => fetchStatus.fixed(mysql, "A"),
      B: () => fetchStatus.fixed(mysql, "B"),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM status"), 1, "statuses with this uri");
  },
};

async function add(db: Connection, customer: number, price: number, lock: string): Promise<void> {
  const row = await one(db, `SELECT total FROM blc_order WHERE customer = ?${lock}`, [customer]);
  await write(db, "UPDATE blc_order SET total = ? WHERE customer = ?", [row?.["total"] + price, customer]);
}

async function customerOf(pool: Pool, token: string): Promise<number> {
  return (await one(pool, "SELECT customer FROM blc_session WHERE token = ?", [token]))?.["customer"];
}

const cache = {
  async naive(pool: Pool, locks: Locks, token: string, price: number): Promise<void> {
    const customer = await customerOf(pool, token);
    await locks.of(customer).run(() => add(pool, customer, price, ""));
  },
  async fixed(pool: Pool, token: string, price: number): Promise<void> {
    const customer = await customerOf(pool, token);
    await transaction(pool, (db) => add(db, customer, price, " FOR UPDATE"));
  },
};

const evictedLock: Race = {
  ...common,
  title: "a cache evicts a lock that is held",
  source: "broadleaf 2555",
  tables: {
    blc_session: "token varchar(20) PRIMARY KEY, customer int NOT NULL",
    blc_order: "customer int PRIMARY KEY, total int NOT NULL",
  },
  rows: [
    "INSERT INTO blc_session VALUES ('phone', 1), ('work', 1), ('bob', 2)",
    "INSERT INTO blc_order VALUES (1, 0), (2, 0)",
  ],
  naive: {
    actors({ mysql }) {
      const locks = new Locks(1);
      return {
        A: () => cache.naive(mysql, locks, "phone", 5),
        B: () => cache.naive(mysql, locks, "work", 7),
        C: () => cache.naive(mysql, locks, "bob", 9),
      };
    },
  },
  fixed: {
    actors: ({ mysql }) => ({
      A: () => cache.fixed(mysql, "phone", 5),
      B: () => cache.fixed(mysql, "work", 7),
      C: () => cache.fixed(mysql, "bob", 9),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT total FROM blc_order WHERE customer = 1"), 12, "total");
  },
};

async function record(db: Connection): Promise<void> {
  await write(db, "INSERT INTO payment (intent_id, amount) VALUES (?, ?)", ["pi_1", 100]);
  await write(db, "UPDATE paid_order SET paid = paid + ?, state = 'paid' WHERE id = ?", [100, 1]);
}

/** The shop's page looks for the payment, the bank's message at the order. */
const payment = (lock: boolean) => ({
  page: (pool: Pool) =>
    transaction(pool, async (db) => {
      if (lock) await one(db, "SELECT state FROM paid_order WHERE id = ? FOR UPDATE", [1]);
      if (!(await one(db, "SELECT 1 FROM payment WHERE intent_id = ?", ["pi_1"]))) await record(db);
    }),
  bank: (pool: Pool) =>
    transaction(pool, async (db) => {
      const order = await one(
        db,
        `SELECT state FROM paid_order WHERE id = ?${lock ? " FOR UPDATE" : ""}`,
        [1],
      );
      if (order?.["state"] !== "paid") await record(db);
    }),
});

const webhook: Race = {
  ...common,
  title: "the webhook comes while the page confirms the payment",
  source: "spree 13938",
  tables: {
    paid_order: "id int PRIMARY KEY, state varchar(20) NOT NULL, paid int NOT NULL",
    payment: "id int AUTO_INCREMENT PRIMARY KEY, intent_id varchar(20) NOT NULL, amount int NOT NULL",
  },
  rows: ["INSERT INTO paid_order VALUES (1, 'open', 0)"],
  naive: {
    actors: ({ mysql }) => ({
      page: () => payment(false).page(mysql),
      bank: () => payment(false).bank(mysql),
    }),
  },
  fixed: {
    migration: ["CREATE UNIQUE INDEX one_payment ON payment (intent_id)"],
    actors: ({ mysql }) => ({
      page: () => payment(true).page(mysql),
      bank: () => payment(true).bank(mysql),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM payment"), 1, "payments");
    assert.equal(await number(clients, "SELECT paid FROM paid_order"), 100, "paid");
  },
};

const book = (lock: boolean) => (pool: Pool, from: number, to: number) =>
  transaction(pool, async (db) => {
    if (lock) await one(db, "SELECT id FROM room WHERE id = ? FOR UPDATE", [1]);
    const taken = await one(db, "SELECT 1 FROM booking WHERE room = 1 AND starts < ? AND ends > ?", [
      to,
      from,
    ]);
    if (taken) throw new Error("The room is taken");
    await write(db, "INSERT INTO booking (room, starts, ends) VALUES (1, ?, ?)", [from, to]);
  });

const doubleBooking: Race = {
  ...common,
  title: "a room is booked twice",
  source: "cal.com 13397",
  tables: {
    room: "id int PRIMARY KEY",
    booking: "id int AUTO_INCREMENT PRIMARY KEY, room int NOT NULL, starts int NOT NULL, ends int NOT NULL",
  },
  rows: ["INSERT INTO room VALUES (1)"],
  naive: {
    actors: ({ mysql }) => ({ A: () => book(false)(mysql, 9, 11), B: () => book(false)(mysql, 10, 12) }),
  },
  fixed: {
    actors: ({ mysql }) => ({ A: () => book(true)(mysql, 9, 11), B: () => book(true)(mysql, 10, 12) }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM booking"), 1, "bookings at 10");
  },
};

async function cartOf(pool: Pool): Promise<void> {
  const cart = await one(pool, "SELECT id FROM cart WHERE customer = ?", [1]);
  if (!cart) await write(pool, "INSERT INTO cart (customer) VALUES (?)", [1]);
}

const twoCarts: Race = {
  ...common,
  title: "two carts for one customer",
  source: "broadleaf 2478",
  tables: { cart: "id int AUTO_INCREMENT PRIMARY KEY, customer int NOT NULL" },
  rows: [],
  naive: { actors: ({ mysql }) => ({ A: () => cartOf(mysql), B: () => cartOf(mysql) }) },
  fixed: {
    migration: ["CREATE UNIQUE INDEX one_cart ON cart (customer)"],
    actors: ({ mysql }) => ({ A: () => cartOf(mysql), B: () => cartOf(mysql) }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM cart"), 1, "carts");
  },
};

export const onMysql2: readonly Race[] = [
  voucher,
  storeCredit,
  expiredLock,
  evictedLock,
  webhook,
  doubleBooking,
  twoCarts,
];
