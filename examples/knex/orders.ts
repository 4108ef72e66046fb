/** A quota, stock and a queue in Knex's own transactions. */
import { holdfast } from "holdfast";
import { fromKnex } from "holdfast/knex";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import makeKnex from "knex";
import { type Orders, type Receipt, daily, start } from "../orders.ts";
import { patient } from "../uploads.ts";

interface Purchase {
  id: string;
  user_id: string;
  sku: string;
  receipt: boolean;
}

export async function open(connection: string): Promise<Orders> {
  const knex = makeKnex({ client: "pg", connection });
  const hf = holdfast(fromKnex(knex), patient);
  const limit = quota(hf, daily);
  const shelf = stock(hf);
  const receipts = queue<Receipt>(hf, "receipts");
  return {
    order: (userId, sku) =>
      knex.transaction(async (trx) => {
        const [made] = await trx<Purchase>("purchase").insert({ user_id: userId, sku }).returning("id");
        await limit.consume(userId, 1, { tx: trx });
        await shelf.decrease(sku, 1, { tx: trx, source: "ORDER" });
        await receipts.enqueue({ orderId: String(made?.id) }, { tx: trx });
      }),
    work: () =>
      receipts.work((job) =>
        knex.transaction(async (trx) => {
          await trx<Purchase>("purchase").where({ id: job.payload.orderId }).update({ receipt: true });
          await job.complete(trx);
        }),
      ),
    async close() {
      await hf.close();
      await knex.destroy();
    },
  };
}

await start(import.meta.url, open);
