/** A quota, stock and a queue in Kysely's own transactions. */
import { holdfast } from "holdfast";
import { fromKysely } from "holdfast/kysely";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { type Generated, Kysely, PostgresDialect } from "kysely";
import { Pool } from "pg";
import { type Orders, type Receipt, daily, start } from "../orders.ts";
import { patient } from "../uploads.ts";

interface Tables {
  purchase: { id: Generated<string>; user_id: string; sku: string; receipt: Generated<boolean> };
}

export async function open(connectionString: string): Promise<Orders> {
  const db = new Kysely<Tables>({ dialect: new PostgresDialect({ pool: new Pool({ connectionString }) }) });
  const hf = holdfast(fromKysely(db), patient);
  const limit = quota(hf, daily);
  const shelf = stock(hf);
  const receipts = queue<Receipt>(hf, "receipts");
  return {
    order: (userId, sku) =>
      db.transaction().execute(async (trx) => {
        const { id } = await trx
          .insertInto("purchase")
          .values({ user_id: userId, sku })
          .returning("id")
          .executeTakeFirstOrThrow();
        await limit.consume(userId, 1, { tx: trx });
        await shelf.decrease(sku, 1, { tx: trx, source: "ORDER" });
        await receipts.enqueue({ orderId: id }, { tx: trx });
      }),
    work: () =>
      receipts.work((job) =>
        db.transaction().execute(async (trx) => {
          await trx
            .updateTable("purchase")
            .set({ receipt: true })
            .where("id", "=", job.payload.orderId)
            .execute();
          await job.complete(trx);
        }),
      ),
    async close() {
      await hf.close();
      await db.destroy();
    },
  };
}

await start(import.meta.url, open);
