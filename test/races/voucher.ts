import assert from "node:assert/strict";
import type { PrismaClient } from "../generated/prisma-races/client.ts";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

async function naive(prisma: PrismaClient, orderId: number, code: string): Promise<void> {
  await prisma.$transaction(async (tx) => {
    const voucher = await tx.voucher.findUnique({ where: { code } });
    if (!voucher || voucher.usedBy !== null) throw new Error("The voucher is not valid");
    await tx.voucherOrder.create({ data: { id: orderId, voucherCode: code, discount: voucher.discount } });
    await tx.voucher.update({ where: { code }, data: { usedBy: orderId } });
  });
}

async function fixed(prisma: PrismaClient, orderId: number, code: string): Promise<void> {
  await prisma.$transaction(async (tx) => {
    const { count } = await tx.voucher.updateMany({
      where: { code, usedBy: null },
      data: { usedBy: orderId },
    });
    if (count === 0) throw new Error("The voucher is not valid");
    const { discount } = await tx.voucher.findUniqueOrThrow({ where: { code } });
    await tx.voucherOrder.create({ data: { id: orderId, voucherCode: code, discount } });
  });
}

export const voucher: Race = {
  title: "a voucher is checked, then used",
  source: "django-oscar 2101, saleor 544, opencart 4812",
  client: "prisma",
  engines: postgresOnly,
  tables: {
    voucher: "code text PRIMARY KEY, discount int NOT NULL, used_by int",
    voucher_order: "id int PRIMARY KEY, voucher_code text NOT NULL, discount int NOT NULL",
  },
  rows: ["INSERT INTO voucher VALUES ('SPRING', 10, NULL)"],
  naive: {
    actors: ({ prisma }) => ({ A: () => naive(prisma, 1, "SPRING"), B: () => naive(prisma, 2, "SPRING") }),
  },
  fixed: {
    actors: ({ prisma }) => ({ A: () => fixed(prisma, 1, "SPRING"), B: () => fixed(prisma, 2, "SPRING") }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM voucher_order"), 1, "orders with the voucher");
    assert.equal(accepted(results), 1);
  },
  expects: "lost update",
};
