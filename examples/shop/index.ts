import { randomUUID } from "node:crypto";
import { once } from "node:events";
import type { AddressInfo } from "node:net";
import { PrismaPg } from "@prisma/adapter-pg";
import { HazardError, type HoldfastOptions, holdfast, sql } from "holdfast";
import { fromPrisma } from "holdfast/prisma";
import { type Database, connect, kindOf, open } from "../database.ts";
import { command, hazardOf, open as openPg } from "../support.ts";
import { type Services, appOf, shopOf } from "./app.ts";
import { byPrisma, bySql } from "./catalog.ts";
import { PrismaClient } from "./generated/client.ts";
import { checkoutWithBank } from "./naive.ts";
import { sell } from "./textbook.ts";

const tables = {
  holdfast_example_variant:
    "sku varchar(40) PRIMARY KEY, title varchar(100) NOT NULL, cents int NOT NULL, stock int NOT NULL",
  holdfast_example_purchase: "id varchar(40) PRIMARY KEY, email varchar(100) NOT NULL, cents int NOT NULL",
  holdfast_example_movement:
    "external_id varchar(40), sku varchar(40), quantity int NOT NULL, balance_after int NOT NULL, PRIMARY KEY (external_id, sku)",
};

export interface Result {
  /** 30 purchases of two things, of which there are 20 and 1,000. */
  readonly checkout: { readonly sold: number; readonly refused: number };
  /** 25 sales of one, each sent three times at once. */
  readonly marketplace: { readonly told: number; readonly refused: number; readonly counted: number };
  readonly left: Readonly<Record<string, number>>;
  readonly channels: Readonly<Record<string, number>>;
  readonly books: string;
  /** On PostgreSQL. */
  readonly textbook?: { readonly sold: number; readonly refused: number; readonly left: number };
  /** What Holdfast says of a checkout that charges the card while it keeps others from the stock. */
  readonly naive: string;
}

async function storm(base: string): Promise<Pick<Result, "checkout" | "marketplace">> {
  const post = async (path: string, body: unknown): Promise<number> => {
    const response = await fetch(`${base}${path}`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    await response.arrayBuffer();
    return response.status;
  };
  const checkouts = Array.from({ length: 30 }, (_, i) =>
    post("/checkout", {
      email: `${i}@example.com`,
      items: [
        { sku: "CAP", quantity: 1 },
        { sku: "MUG", quantity: 1 },
        // The same thing twice in one cart.
        { sku: "MUG", quantity: 1 },
      ],
    }),
  );
  const webhooks = Array.from({ length: 75 }, (_, i) =>
    post("/webhooks/marketplace", { id: String(i % 25), items: [{ sku: "SHIRT", quantity: 1 }] }),
  );
  const [bought, told] = await Promise.all([Promise.all(checkouts), Promise.all(webhooks)]);
  const count = (statuses: readonly number[], status: number) =>
    statuses.filter((each) => each === status).length;
  return {
    checkout: { sold: count(bought, 201), refused: count(bought, 409) },
    marketplace: { told: count(told, 200), refused: count(told, 409), counted: 0 },
  };
}

async function textbook(url: string): Promise<NonNullable<Result["textbook"]>> {
  await using place = await openPg(url, tables);
  const { pool } = place;
  await pool.query("INSERT INTO holdfast_example_variant VALUES ('CAP', 'A cap', 1500, 20)");
  const names = { variants: "holdfast_example_variant", movements: "holdfast_example_movement" };
  const sold = await Promise.all(
    Array.from({ length: 30 }, (_, i) => sell(pool, names, `order-${i}`, [{ sku: "CAP", quantity: 1 }])),
  );
  const { rows } = await pool.query("SELECT stock FROM holdfast_example_variant");
  return {
    sold: sold.filter(Boolean).length,
    refused: sold.filter((each) => !each).length,
    left: rows[0].stock,
  };
}

/** As a test would: with `hazards: "throw"` the transaction fails, and nothing of it is kept. */
async function naive(url: string, name: string, bank: string): Promise<string> {
  await using own = served(url, { hazards: "throw" });
  try {
    await checkoutWithBank(shopOf({ ...own, name }), bank, "MUG");
    return "no hazard";
  } catch (error) {
    if (!(error instanceof HazardError)) throw error;
    return hazardOf(error);
  }
}

/**
 * On PostgreSQL with Prisma, whose client is generated for one kind of database, and with what is on hand in the shop's own column.
 * Elsewhere Holdfast keeps it: [recipe-stock](../recipe-stock/index.ts) is for a column of one's own.
 */
function served(url: string, options: HoldfastOptions = {}): Services & AsyncDisposable {
  const database = connect(url, options);
  if (database.kind !== "postgres")
    return {
      hf: database.hf,
      catalog: bySql(database),
      [Symbol.asyncDispose]: database[Symbol.asyncDispose],
    };
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: url }) });
  const hf = holdfast(fromPrisma(prisma), options);
  return {
    hf,
    catalog: byPrisma(prisma),
    levels: { table: "holdfast_example_variant", sku: "sku", onHand: "stock" },
    async [Symbol.asyncDispose]() {
      await hf.close();
      await prisma.$disconnect();
      await database[Symbol.asyncDispose]();
    },
  };
}

/** What a shop has before it adopts this. */
async function stocked({ hf, query }: Database): Promise<Record<string, number>> {
  const [cap, mug, shirt] = [20, 1000, 10];
  await hf.migrate();
  await query(sql`INSERT INTO holdfast_example_variant (sku, title, cents, stock)
    VALUES ('CAP', 'A cap', 1500, ${cap}), ('MUG', 'A mug', 900, ${mug}), ('SHIRT', 'A shirt', 2500, ${shirt})`);
  return { CAP: cap, MUG: mug, SHIRT: shirt };
}

export async function main(url: string): Promise<Result> {
  const byHand = kindOf(url) === "postgres" ? await textbook(url) : undefined;
  await using place = await open(url, tables);
  const had = await stocked(place);
  await using services = served(url);
  // Another name each time: the example may have been run before.
  const name = `shop-${randomUUID()}`;
  const shop = shopOf({ ...services, name });
  const { shelf } = shop;
  const server = appOf(shop).listen(0, "127.0.0.1");
  try {
    await once(server, "listening");
    const before = new Date();
    if (services.levels) await shelf.adopt();
    else for (const [sku, count] of Object.entries(had)) await shelf.adjustTo(sku, count);
    const { port } = server.address() as AddressInfo;
    const { checkout, marketplace } = await storm(`http://127.0.0.1:${port}`);
    const hazard = await naive(url, name, `http://127.0.0.1:${port}/`);
    const levels = await shelf.levels();
    const { movements } = await shelf.history({ source: "ML_SALE", limit: 1000 });
    const channels = (await shelf.byChannel({ from: before })).filter(({ decreased }) => decreased > 0);
    const { ok, findings } = await shelf.reconcile();
    return {
      checkout,
      marketplace: { ...marketplace, counted: movements.length },
      left: Object.fromEntries(levels.map(({ sku, onHand }) => [sku, onHand])),
      channels: Object.fromEntries(channels.map(({ source, net }) => [source, net])),
      books: ok ? "add up" : findings.map(({ text }) => text).join("; "),
      ...(byHand && { textbook: byHand }),
      naive: hazard,
    };
  } finally {
    server.close();
    server.closeAllConnections();
  }
}

await command(
  import.meta.url,
  main,
  ({ checkout, marketplace, left, books, naive: hazard }) =>
    `${checkout.sold} purchases and ${checkout.refused} refused; ${marketplace.counted} sales of the marketplace, told ${marketplace.told} times; ` +
    `left: ${Object.entries(left)
      .map(([sku, n]) => `${n} ${sku}`)
      .join(", ")}; the books ${books}; charged under a lock: ${hazard}`,
);
