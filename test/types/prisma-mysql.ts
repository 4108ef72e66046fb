/** Compiled, never run: a client of Prisma on MySQL is taken, and its transactions are its own. */
import { PrismaMariaDb } from "@prisma/adapter-mariadb";
import { holdfast, key } from "holdfast";
import { fromPrisma, holdfast as extension } from "holdfast/prisma";
import { type Prisma, PrismaClient } from "../generated/prisma-mysql/client.ts";

export async function prismaOnMysql(): Promise<void> {
  const client = new PrismaClient({ adapter: new PrismaMariaDb("") });
  const hf = holdfast(fromPrisma(client));
  await hf.transaction(async (tx) => {
    const own: Prisma.TransactionClient = tx.client;
    const { bytes } = await tx.client.upload.create({ data: { userId: "a", bytes: 1 } });
    // @ts-expect-error models are typed
    await tx.client.upload.create({ data: { userId: 1, bytes: 1 } });
    return [own, bytes];
  });
  await client.$transaction(async (tx) => hf.join(tx).lock(key("upload")));
  // @ts-expect-error an object of another kind is no transaction
  hf.join({ query: async () => {} });
  const extended = client.$extends(extension());
  await extended.$exact({ lock: key("upload") }, async (tx) => {
    const [reading] = await tx.reading.findManyForUpdate({ select: { at: true, big: true } });
    const big: bigint | undefined = reading?.big;
    // @ts-expect-error it was not selected
    return [big, reading?.note];
  });
}
