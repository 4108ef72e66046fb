/** A quota, stock and a queue in Prisma's own transactions. */
import { PrismaPg } from "@prisma/adapter-pg";
import { holdfast } from "holdfast/prisma";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { type Orders, type Receipt, daily, start } from "../orders.ts";
import { patient } from "../uploads.ts";
import { PrismaClient } from "./generated/client.ts";

export async function open(connectionString: string): Promise<Orders> {
  const adapter = new PrismaPg({ connectionString });
  const prisma = new PrismaClient({ adapter }).$extends(holdfast(patient));
  const limit = quota(prisma.$holdfast, daily);
  const shelf = stock(prisma.$holdfast);
  const receipts = queue<Receipt>(prisma.$holdfast, "receipts");
  return {
    order: (userId, sku) =>
      prisma.$exact(async (tx) => {
        const { id } = await tx.purchase.create({ data: { userId, sku } });
        await limit.consume(userId, 1, { tx });
        await shelf.decrease(sku, 1, { tx, source: "ORDER" });
        await receipts.enqueue({ orderId: String(id) }, { tx });
      }),
    work: () =>
      receipts.work((job) =>
        prisma.$transaction(async (tx) => {
          await tx.purchase.update({ where: { id: BigInt(job.payload.orderId) }, data: { receipt: true } });
          await job.complete(tx);
        }),
      ),
    async close() {
      await prisma.$holdfast.close();
      await prisma.$disconnect();
    },
  };
}

await start(import.meta.url, open);
