import assert from "node:assert/strict";
import type { Pool } from "pg";
import { withTransaction } from "./app.ts";
import { type Race, number, postgresOnly } from "./race.ts";

class Mutex {
  #last: Promise<unknown> = Promise.resolve();

  run<T>(body: () => Promise<T>): Promise<T> {
    const done = this.#last.then(body);
    this.#last = done.catch(() => {});
    return done;
  }
}

/** Not more than so many locks are kept in memory; the oldest goes, whether somebody has it or not. */
export class Locks {
  readonly #entries = new Map<number, Mutex>();
  readonly #capacity: number;

  constructor(capacity: number) {
    this.#capacity = capacity;
  }

  of(customer: number): Mutex {
    const mutex = this.#entries.get(customer) ?? new Mutex();
    this.#entries.delete(customer);
    this.#entries.set(customer, mutex);
    const [oldest] = this.#entries.keys();
    if (this.#entries.size > this.#capacity && oldest !== undefined) this.#entries.delete(oldest);
    return mutex;
  }
}

async function customerOf(pool: Pool, token: string): Promise<number> {
  const { rows } = await pool.query("SELECT customer FROM blc_session WHERE token = $1", [token]);
  return rows[0].customer;
}

async function naive(pool: Pool, locks: Locks, token: string, price: number): Promise<void> {
  const customer = await customerOf(pool, token);
  await locks.of(customer).run(async () => {
    const { rows } = await pool.query("SELECT total FROM blc_order WHERE customer = $1", [customer]);
    const total = rows[0].total + price;
    await pool.query("UPDATE blc_order SET total = $1 WHERE customer = $2", [total, customer]);
  });
}

async function fixed(pool: Pool, token: string, price: number): Promise<void> {
  const customer = await customerOf(pool, token);
  await withTransaction(pool, async (client) => {
    const { rows } = await client.query("SELECT total FROM blc_order WHERE customer = $1 FOR UPDATE", [
      customer,
    ]);
    const total = rows[0].total + price;
    await client.query("UPDATE blc_order SET total = $1 WHERE customer = $2", [total, customer]);
  });
}

export const evictedLock: Race = {
  title: "a cache evicts a lock that is held",
  source: "broadleaf 2555",
  client: "pg",
  engines: postgresOnly,
  tables: {
    blc_session: "token text PRIMARY KEY, customer int NOT NULL",
    blc_order: "customer int PRIMARY KEY, total int NOT NULL",
  },
  rows: [
    "INSERT INTO blc_session VALUES ('ada on her phone', 1), ('ada at work', 1), ('bob', 2)",
    "INSERT INTO blc_order VALUES (1, 0), (2, 0)",
  ],
  naive: {
    actors({ pool }) {
      const locks = new Locks(1);
      return {
        A: () => naive(pool, locks, "ada on her phone", 5),
        B: () => naive(pool, locks, "ada at work", 7),
        C: () => naive(pool, locks, "bob", 9),
      };
    },
  },
  fixed: {
    actors: ({ pool }) => ({
      A: () => fixed(pool, "ada on her phone", 5),
      B: () => fixed(pool, "ada at work", 7),
      C: () => fixed(pool, "bob", 9),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT total FROM blc_order WHERE customer = 1"), 12, "Ada's total");
    assert.equal(await number(clients, "SELECT total FROM blc_order WHERE customer = 2"), 9, "Bob's total");
  },
  expects: "lost update",
};
