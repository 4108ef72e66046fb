import type { ConformanceSite } from "holdfast/testing";

const patient = { timeout: 60_000, maxWait: 60_000 };

const sendPrisma: ConformanceSite["send"] = async (tx, text) =>
  (tx as { $executeRawUnsafe(text: string): Promise<unknown> }).$executeRawUnsafe(text);

export async function openPrisma(connectionString: string): Promise<ConformanceSite> {
  const [{ PrismaClient }, { PrismaPg }, { fromPrisma }] = await Promise.all([
    import("../generated/prisma/client.ts"),
    import("@prisma/adapter-pg"),
    import("holdfast/prisma"),
  ]);
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString, max: 10 }) });
  return {
    database: fromPrisma(prisma),
    ownTransaction: (body) => prisma.$transaction((tx) => body(tx), patient),
    send: sendPrisma,
    // Without $transaction it looks like a transaction's client, but every statement commits by itself.
    withIdle: (body) => body({ $queryRawUnsafe: prisma.$queryRawUnsafe.bind(prisma) }),
    close: () => prisma.$disconnect(),
  };
}

export async function openPrisma6(url: string): Promise<ConformanceSite> {
  const [{ prisma6 }, { fromPrisma }] = await Promise.all([
    import("../../older/clients.ts"),
    import("holdfast/prisma"),
  ]);
  const prisma = prisma6(url);
  return {
    database: fromPrisma(prisma),
    ownTransaction: (body) => prisma.$transaction((tx) => body(tx), patient),
    send: sendPrisma,
    withIdle: (body) => body({ $queryRawUnsafe: prisma.$queryRawUnsafe.bind(prisma) }),
    close: () => prisma.$disconnect(),
  };
}

/** On MySQL and on MariaDB: Prisma has one adapter for both. */
export async function openPrismaMysql(url: string): Promise<ConformanceSite> {
  const [{ PrismaClient }, { PrismaMariaDb }, { fromPrisma }] = await Promise.all([
    import("../generated/prisma-mysql/client.ts"),
    import("@prisma/adapter-mariadb"),
    import("holdfast/prisma"),
  ]);
  const prisma = new PrismaClient({ adapter: new PrismaMariaDb(url) });
  return {
    database: fromPrisma(prisma),
    ownTransaction: (body) => prisma.$transaction((tx) => body(tx), patient),
    send: sendPrisma,
    // Prisma takes it for one that is open; the server does not.
    withIdle: (body) =>
      prisma.$transaction(async (tx) => {
        await tx.$executeRawUnsafe("COMMIT");
        return body(tx);
      }, patient),
    close: () => prisma.$disconnect(),
  };
}
