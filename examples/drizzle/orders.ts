/** A quota, stock and a queue in Drizzle's own transactions. */
import { eq } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import { bigint, boolean, pgTable, text } from "drizzle-orm/pg-core";
import { holdfast } from "holdfast";
import { fromDrizzle } from "holdfast/drizzle";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Pool } from "pg";
import { type Orders, type Receipt, daily, start } from "../orders.ts";
import { patient } from "../uploads.ts";

const purchase = pgTable("purchase", {
  id: bigint({ mode: "bigint" }).primaryKey().generatedAlwaysAsIdentity(),
  userId: text("user_id").notNull(),
  sku: text().notNull(),
  receipt: boolean().notNull().default(false),
});

export async function open(connectionString: string): Promise<Orders> {
  const pool = new Pool({ connectionString });
  const db = drizzle(pool);
  const hf = holdfast(fromDrizzle(db), patient);
  const limit = quota(hf, daily);
  const shelf = stock(hf);
  const receipts = queue<Receipt>(hf, "receipts");
  return {
    order: (userId, sku) =>
      db.transaction(async (tx) => {
        const [made] = await tx.insert(purchase).values({ userId, sku }).returning({ id: purchase.id });
        await limit.consume(userId, 1, { tx });
        await shelf.decrease(sku, 1, { tx, source: "ORDER" });
        await receipts.enqueue({ orderId: String(made?.id) }, { tx });
      }),
    work: () =>
      receipts.work((job) =>
        db.transaction(async (tx) => {
          await tx
            .update(purchase)
            .set({ receipt: true })
            .where(eq(purchase.id, BigInt(job.payload.orderId)));
          await job.complete(tx);
        }),
      ),
    async close() {
      await hf.close();
      await pool.end();
    },
  };
}

await start(import.meta.url, open);
