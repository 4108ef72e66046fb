/** Compiled, never run: what the extension of Prisma takes is typed by the models. */
import { PrismaPg } from "@prisma/adapter-pg";
import { type Holdfast, type TryLockResult, once, versioned } from "holdfast";
import { type TransactionOf, holdfast, key, shared } from "holdfast/prisma";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { type Prisma, PrismaClient } from "../generated/prisma/client.ts";

const adapter = new PrismaPg({ connectionString: "" });
const prisma = new PrismaClient({ adapter }).$extends(holdfast());
type Tx = TransactionOf<typeof prisma>;

export async function transactions(): Promise<void> {
  const count: number = await prisma.$exact((tx) => tx.upload.count());
  const same: number = await prisma.$exact({ lock: [key("a"), shared(key("b"))] }, (tx) => tx.upload.count());
  const tried: TryLockResult<string> = await prisma.$tryLock(key("a"), async (tx) => {
    const free: boolean = await tx.$tryLock(key("b"));
    await tx.$exact({ lock: key("c") }, (inner) => inner.upload.count());
    return String(free);
  });
  const own = async (tx: Tx) => tx.upload.findManyForUpdate({ where: { bytes: { gt: 1 } } });
  await prisma.$exact(own);
  await prisma.$transaction(own);
  // @ts-expect-error there is no such model
  await prisma.$exact((tx) => tx.uploads.count());
  // @ts-expect-error a typo
  await prisma.$exact({ lcok: key("a") }, async () => {});
  // @ts-expect-error a string is no key
  await prisma.$exact({ lock: "a" }, async () => {});
  // @ts-expect-error a body is needed
  await prisma.$exact({ lock: key("a") });
  // @ts-expect-error what is not async may have forgotten what it started
  await prisma.$exact(() => 1);
  // @ts-expect-error it does not wait
  await prisma.$tryLock(key("a"), async () => {}, { wait: 100 });
  void [count, same, tried];
}

export async function rows(): Promise<void> {
  await prisma.$exact(async (tx) => {
    const [line] = await tx.orderLine.findManyForUpdate({
      where: { state: "Open", quantity: { gt: 1 } },
      select: { quantity: true, product: { select: { name: true } } },
    });
    const quantity: number | undefined = line?.quantity;
    const name: string | undefined = line?.product?.name;
    // @ts-expect-error it was not selected
    void line?.state;
    // @ts-expect-error there is no such field
    await tx.orderLine.findManyForUpdate({ where: { quantty: 1 } });
    // @ts-expect-error a number is no text
    await tx.orderLine.findFirstForUpdate({ where: { quantity: "1" } });
    // @ts-expect-error a field of nobody's
    await tx.orderLine.findManyForUpdate({ select: { nothing: true } });
    // @ts-expect-error a typo
    await tx.orderLine.findManyForUpdate({ were: { quantity: 1 } });
    // @ts-expect-error this names no row
    await tx.orderLine.findUniqueForUpdate({ where: { quantity: 1 } });
    // @ts-expect-error no such strength
    await tx.orderLine.findManyForUpdate({ lock: { mode: "delete" } });
    return [quantity, name];
  });
}

export async function versions(): Promise<void> {
  const saved: { id: number; body: string; version: number } = await prisma.document.updateVersioned({
    where: { id: 1, version: 3 },
    data: { body: "x" },
  });
  const picked = await prisma.orderLine.updateVersioned({
    where: { orderId_position: { orderId: "", position: 1 } },
    data: async ({ quantity, state }) => (state === "Open" ? { quantity: quantity + 1 } : undefined),
    select: { quantity: true },
    attempts: 3,
  });
  const quantity: number = picked.quantity;
  const where = { orderId_position: { orderId: "", position: 1 } };
  await prisma.orderLine.updateVersioned({
    where,
    data: (row) => {
      if (row.quantity > 3) return;
      return { state: "Packed", quantity: { increment: 1 } };
    },
  });
  await prisma.orderLine.updateVersioned({
    where,
    data: ({ state }) => (state === "Open" ? { state: "Packed" } : { quantity: 1 }),
  });
  await prisma.orderLine.updateVersioned({ where, data: async () => ({ state: "Packed" }) });
  await prisma.orderLine.updateVersioned({
    where,
    data: async ({ state }) => (state === "Open" ? { state: "Packed" } : undefined),
  });
  // @ts-expect-error it was not selected
  void picked.state;
  // Another field counts.
  await prisma.upload.updateVersioned({
    where: { id: 1, bytes: 1 },
    version: "bytes",
    data: { userId: "a" },
  });
  // @ts-expect-error it has no field `version`, and none is named
  await prisma.upload.updateVersioned({ where: { id: 1 }, data: { bytes: 1 } });
  // @ts-expect-error text does not count up
  await prisma.document.updateVersioned({ where: { id: 1 }, version: "body", data: () => ({}) });
  // @ts-expect-error there is no such field
  await prisma.document.updateVersioned({ where: { id: 1, version: 3 }, data: { bdy: "x" } });
  // @ts-expect-error nor here
  await prisma.document.updateVersioned({ where: { di: 1, version: 3 }, data: { body: "x" } });
  // @ts-expect-error or in what a function returns
  await prisma.document.updateVersioned({ where: { id: 1 }, data: () => ({ body: 1 }) });
  // @ts-expect-error or in one that it returns besides others
  await prisma.document.updateVersioned({ where: { id: 1 }, data: () => ({ body: "x", bdy: "x" }) });
  // @ts-expect-error or by itself
  await prisma.document.updateVersioned({ where: { id: 1 }, data: (row) => ({ bdy: row.body }) });
  await prisma.document.updateVersioned({
    where: { id: 1 },
    // @ts-expect-error or later, or not always
    data: async (row) => (row.version > 3 ? { body: row.body, bdy: "x" } : undefined),
  });
  // @ts-expect-error or gets
  await prisma.document.updateVersioned({ where: { id: 1 }, data: (row) => ({ body: row.text }) });
  // @ts-expect-error a typo
  await prisma.document.updateVersioned({ where: { id: 1, version: 3 }, data: {}, atempts: 3 });
  // @ts-expect-error there is no such model
  await prisma.documents.updateVersioned({ where: { id: 1, version: 3 }, data: {} });
  void [saved, quantity];
}

export async function theRest(): Promise<void> {
  const uploads = quota(prisma.$holdfast, { name: "uploads", limit: 3 });
  const shelf = stock(prisma.$holdfast);
  const emails = queue<string>(prisma.$holdfast, "emails");
  const documents = versioned<{ id: number; version: number }>(prisma.$holdfast, "document");
  await prisma.$transaction(async (tx) => {
    await uploads.consume("ada", 1, { tx });
    await shelf.decrease("CAP", 1, { tx });
    await emails.enqueue("x", { tx });
    await once(prisma.$holdfast, "evt_1", async () => 1, { tx });
    await documents.read(1, { tx });
    // @ts-expect-error text is no transaction
    await uploads.consume("ada", 1, { tx: "tx" });
    // @ts-expect-error nor is another object
    await once(prisma.$holdfast, "evt_1", async () => 1, { tx: { commit() {} } });
  });
  const typed = new PrismaClient({ adapter }).$extends(holdfast<Prisma.TransactionClient>());
  const hf: Holdfast<Prisma.TransactionClient> = typed.$holdfast;
  await hf.transaction((tx) => tx.client.upload.count());
}
