import { PrismaPg } from "@prisma/adapter-pg";
import { holdfast, key } from "holdfast/prisma";
import { type Uploads, patient, quotaBytes, start } from "../uploads.ts";
import { PrismaClient } from "./generated/client.ts";

export async function open(connectionString: string): Promise<Uploads> {
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString }) }).$extends(
    holdfast(patient),
  );
  return {
    upload: (userId, bytes) =>
      prisma.$exact({ lock: key("upload", userId) }, async (tx) => {
        const { _sum } = await tx.userImage.aggregate({ where: { userId }, _sum: { bytes: true } });
        if ((_sum.bytes ?? 0) + bytes > quotaBytes) return false;
        await tx.userImage.create({ data: { userId, bytes } });
        return true;
      }),
    close: () => prisma.$disconnect(),
  };
}

await start(import.meta.url, open);
