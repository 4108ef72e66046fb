import assert from "node:assert/strict";
import { eq } from "drizzle-orm";
import type { NodePgDatabase } from "drizzle-orm/node-postgres";
import { integer, pgTable } from "drizzle-orm/pg-core";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

const storeCredit = pgTable("store_credit", {
  userId: integer("user_id").primaryKey(),
  amount: integer().notNull(),
  used: integer().notNull(),
});
const creditPayment = pgTable("store_credit_payment", {
  orderId: integer("order_id").primaryKey(),
  amount: integer().notNull(),
});

class NotEnough extends Error {}

/** The lock is there, but what it should protect is decided before it. */
async function naive(db: NodePgDatabase, userId: number, orderId: number, amount: number): Promise<void> {
  const [credit] = await db.select().from(storeCredit).where(eq(storeCredit.userId, userId));
  if (!credit || credit.amount - credit.used < amount) throw new NotEnough();
  await db.transaction(async (tx) => {
    const [row] = await tx.select().from(storeCredit).where(eq(storeCredit.userId, userId)).for("update");
    await tx
      .update(storeCredit)
      .set({ used: (row?.used ?? 0) + amount })
      .where(eq(storeCredit.userId, userId));
    await tx.insert(creditPayment).values({ orderId, amount });
  });
}

async function fixed(db: NodePgDatabase, userId: number, orderId: number, amount: number): Promise<void> {
  await db.transaction(async (tx) => {
    const [credit] = await tx.select().from(storeCredit).where(eq(storeCredit.userId, userId)).for("update");
    if (!credit || credit.amount - credit.used < amount) throw new NotEnough();
    await tx
      .update(storeCredit)
      .set({ used: credit.used + amount })
      .where(eq(storeCredit.userId, userId));
    await tx.insert(creditPayment).values({ orderId, amount });
  });
}

export const storeCreditScope: Race = {
  title: "store credit is locked too late",
  source: "spree 11284",
  client: "drizzle",
  engines: postgresOnly,
  tables: {
    store_credit: "user_id int PRIMARY KEY, amount int NOT NULL, used int NOT NULL",
    store_credit_payment: "order_id int PRIMARY KEY, amount int NOT NULL",
  },
  rows: ["INSERT INTO store_credit VALUES (1, 50, 0)"],
  naive: {
    actors: ({ drizzle: db }) => ({ A: () => naive(db, 1, 1, 40), B: () => naive(db, 1, 2, 30) }),
  },
  fixed: {
    actors: ({ drizzle: db }) => ({ A: () => fixed(db, 1, 1, 40), B: () => fixed(db, 1, 2, 30) }),
  },
  async invariant(clients, results) {
    const paid = await number(clients, "SELECT sum(amount) FROM store_credit_payment");
    assert.equal(await number(clients, "SELECT used FROM store_credit"), paid);
    assert.ok(paid <= 50, `${paid} of 50 were spent`);
    assert.equal(accepted(results), 1);
  },
};
