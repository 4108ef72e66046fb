import assert from "node:assert/strict";
import { sql } from "drizzle-orm";
import type { NodePgDatabase } from "drizzle-orm/node-postgres";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

class OverBudget extends Error {}

/** Check and write are one statement. The sum in it is that of what others have committed. */
async function naive(db: NodePgDatabase, campaign: number, order: number, amount: number): Promise<void> {
  await db.transaction(async (tx) => {
    const { rowCount } = await tx.execute(sql`
      INSERT INTO campaign_coupon (order_id, campaign_id, amount)
      SELECT ${order}, id, ${amount} FROM campaign
      WHERE id = ${campaign} AND budget >= ${amount} +
        (SELECT coalesce(sum(amount), 0) FROM campaign_coupon WHERE campaign_id = ${campaign})`);
    if (rowCount === 0) throw new OverBudget();
    await tx.execute(sql`INSERT INTO campaign_log (order_id) VALUES (${order})`);
  });
}

async function fixed(db: NodePgDatabase, campaign: number, order: number, amount: number): Promise<void> {
  await db.transaction(async (tx) => {
    const { rowCount } = await tx.execute(sql`
      UPDATE campaign SET spent = spent + ${amount}::int
      WHERE id = ${campaign} AND spent + ${amount}::int <= budget`);
    if (rowCount === 0) throw new OverBudget();
    await tx.execute(sql`
      INSERT INTO campaign_coupon (order_id, campaign_id, amount) VALUES (${order}, ${campaign}, ${amount})`);
    await tx.execute(sql`INSERT INTO campaign_log (order_id) VALUES (${order})`);
  });
}

export const campaignBudget: Race = {
  title: "the budget is summed up in the INSERT",
  client: "drizzle",
  engines: postgresOnly,
  tables: {
    campaign: "id int PRIMARY KEY, budget int NOT NULL, spent int NOT NULL DEFAULT 0",
    campaign_coupon: "order_id int PRIMARY KEY, campaign_id int NOT NULL, amount int NOT NULL",
    campaign_log: "order_id int NOT NULL",
  },
  rows: ["INSERT INTO campaign VALUES (1, 100)"],
  naive: {
    actors: ({ drizzle: db }) => ({ A: () => naive(db, 1, 1, 60), B: () => naive(db, 1, 2, 60) }),
  },
  fixed: {
    actors: ({ drizzle: db }) => ({ A: () => fixed(db, 1, 1, 60), B: () => fixed(db, 1, 2, 60) }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT sum(amount) FROM campaign_coupon"), 60, "spent of 100");
    assert.equal(accepted(results), 1);
  },
  expects: "phantom",
};
