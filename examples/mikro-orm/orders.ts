/** A quota, stock and a queue in MikroORM's own transactions. */
import { MikroORM, defineEntity } from "@mikro-orm/postgresql";
import { holdfast } from "holdfast";
import { fromMikroOrm } from "holdfast/mikro-orm";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { type Orders, type Receipt, daily, start } from "../orders.ts";
import { patient } from "../uploads.ts";

const Purchase = defineEntity({
  name: "Purchase",
  tableName: "purchase",
  properties: (p) => ({
    id: p.bigint().primary(),
    userId: p.text(),
    sku: p.text(),
    receipt: p.boolean().default(false),
  }),
});

export async function open(clientUrl: string): Promise<Orders> {
  const orm = await MikroORM.init({ clientUrl, entities: [Purchase] });
  const hf = holdfast(fromMikroOrm(orm), patient);
  const limit = quota(hf, daily);
  const shelf = stock(hf);
  const receipts = queue<Receipt>(hf, "receipts");
  return {
    order: (userId, sku) =>
      orm.em.fork().transactional(async (em) => {
        const purchase = em.create(Purchase, { userId, sku });
        // Its id comes from the database.
        await em.flush();
        await limit.consume(userId, 1, { tx: em });
        await shelf.decrease(sku, 1, { tx: em, source: "ORDER" });
        await receipts.enqueue({ orderId: String(purchase.id) }, { tx: em });
      }),
    work: () =>
      receipts.work((job) =>
        orm.em.fork().transactional(async (em) => {
          const purchase = await em.findOneOrFail(Purchase, { id: BigInt(job.payload.orderId) });
          purchase.receipt = true;
          await job.complete(em);
        }),
      ),
    async close() {
      await hf.close();
      await orm.close();
    },
  };
}

await start(import.meta.url, open);
