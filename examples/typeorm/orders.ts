/** A quota, stock and a queue in TypeORM's own transactions. */
import { holdfast } from "holdfast";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { fromTypeorm } from "holdfast/typeorm";
import { DataSource, EntitySchema } from "typeorm";
import { type Orders, type Receipt, daily, start } from "../orders.ts";
import { patient } from "../uploads.ts";

interface Purchase {
  id: string;
  userId: string;
  sku: string;
  receipt: boolean;
}

const Purchase = new EntitySchema<Purchase>({
  name: "Purchase",
  tableName: "purchase",
  columns: {
    id: { type: "bigint", primary: true, generated: "increment" },
    userId: { name: "user_id", type: "text" },
    sku: { type: "text" },
    receipt: { type: "boolean", default: false },
  },
});

export async function open(url: string): Promise<Orders> {
  const dataSource = new DataSource({ type: "postgres", url, entities: [Purchase] });
  await dataSource.initialize();
  const hf = holdfast(fromTypeorm(dataSource), patient);
  const limit = quota(hf, daily);
  const shelf = stock(hf);
  const receipts = queue<Receipt>(hf, "receipts");
  return {
    order: (userId, sku) =>
      dataSource.transaction(async (manager) => {
        const { id } = await manager.save(Purchase, { userId, sku });
        await limit.consume(userId, 1, { tx: manager });
        await shelf.decrease(sku, 1, { tx: manager, source: "ORDER" });
        await receipts.enqueue({ orderId: id }, { tx: manager });
      }),
    work: () =>
      receipts.work((job) =>
        dataSource.transaction(async (manager) => {
          await manager.update(Purchase, { id: job.payload.orderId }, { receipt: true });
          await job.complete(manager);
        }),
      ),
    async close() {
      await hf.close();
      await dataSource.destroy();
    },
  };
}

await start(import.meta.url, open);
