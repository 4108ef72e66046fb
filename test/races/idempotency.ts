import assert from "node:assert/strict";
import { Prisma, type PrismaClient } from "../generated/prisma-races/client.ts";
import { type Race, number, postgresOnly, values } from "./race.ts";

/** The key is unique. But by the time that the second one is refused, the money is gone. */
async function naive(prisma: PrismaClient, key: string, amount: number): Promise<number | null> {
  const seen = await prisma.chargeRequest.findUnique({ where: { key } });
  if (seen) return seen.chargeId;
  const charge = await prisma.charge.create({ data: { customer: "ada", amount } });
  await prisma.chargeRequest.create({ data: { key, chargeId: charge.id } });
  return charge.id;
}

async function fixed(prisma: PrismaClient, key: string, amount: number): Promise<number | null> {
  try {
    return await prisma.$transaction(async (tx) => {
      await tx.chargeRequest.create({ data: { key } });
      const charge = await tx.charge.create({ data: { customer: "ada", amount } });
      await tx.chargeRequest.update({ where: { key }, data: { chargeId: charge.id } });
      return charge.id;
    });
  } catch (error) {
    if (!(error instanceof Prisma.PrismaClientKnownRequestError) || error.code !== "P2002") throw error;
    return (await prisma.chargeRequest.findUniqueOrThrow({ where: { key } })).chargeId;
  }
}

export const idempotency: Race = {
  title: "an idempotency key is kept after the charge",
  client: "prisma",
  engines: postgresOnly,
  tables: {
    charge: "id serial PRIMARY KEY, customer text NOT NULL, amount int NOT NULL",
    charge_request: "key text PRIMARY KEY, charge_id int",
  },
  rows: [],
  naive: { actors: ({ prisma }) => ({ A: () => naive(prisma, "k1", 50), B: () => naive(prisma, "k1", 50) }) },
  fixed: { actors: ({ prisma }) => ({ A: () => fixed(prisma, "k1", 50), B: () => fixed(prisma, "k1", 50) }) },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM charge"), 1, "charges");
    assert.equal(new Set(values(results)).size, 1, "both get the same answer");
  },
};
