import { once } from "node:events";
import type { AddressInfo } from "node:net";
import { PrismaPg } from "@prisma/adapter-pg";
import { HazardError } from "holdfast";
import { command, hazardOf, open } from "../support.ts";
import { appOf, shopOf } from "./app.ts";
import { PrismaClient } from "./generated/client.ts";
import { checkoutWithBank } from "./naive.ts";
import { sell } from "./textbook.ts";

const tables = {
  holdfast_example_variant:
    "sku text PRIMARY KEY, title text NOT NULL, cents int NOT NULL, stock int NOT NULL",
  holdfast_example_purchase: "id text PRIMARY KEY, email text NOT NULL, cents int NOT NULL",
  holdfast_example_movement:
    "external_id text, sku text, quantity int NOT NULL, balance_after int NOT NULL, PRIMARY KEY (external_id, sku)",
};

export interface Result {
  /** 30 purchases of two things, of which there are 20 and 1,000. */
  readonly checkout: { readonly sold: number; readonly refused: number };
  /** 25 sales of one, each sent three times at once. */
  readonly marketplace: { readonly told: number; readonly refused: number; readonly counted: number };
  readonly left: Readonly<Record<string, number>>;
  readonly channels: Readonly<Record<string, number>>;
  readonly books: string;
  readonly textbook: { readonly sold: number; readonly refused: number; readonly left: number };
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

async function textbook(url: string): Promise<Result["textbook"]> {
  await using place = await open(url, tables);
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
async function naive(prisma: PrismaClient, bank: string): Promise<string> {
  const shop = shopOf(prisma, { hazards: "throw" });
  try {
    await checkoutWithBank(shop, bank, "MUG");
    return "no hazard";
  } catch (error) {
    if (!(error instanceof HazardError)) throw error;
    return hazardOf(error);
  } finally {
    await shop.hf.close();
  }
}

export async function main(url: string): Promise<Result> {
  const byHand = await textbook(url);
  await using place = await open(url, tables);
  const { pool, hf: admin } = place;
  await admin.migrate();
  // What a shop has before it adopts this.
  await pool.query(
    "INSERT INTO holdfast_example_variant VALUES ('CAP', 'A cap', 1500, 20), ('MUG', 'A mug', 900, 1000), ('SHIRT', 'A shirt', 2500, 10)",
  );
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: url }) });
  const shop = shopOf(prisma);
  const { shelf } = shop;
  const server = appOf(shop).listen(0, "127.0.0.1");
  try {
    await once(server, "listening");
    const before = new Date();
    await shelf.adopt();
    const { port } = server.address() as AddressInfo;
    const { checkout, marketplace } = await storm(`http://127.0.0.1:${port}`);
    const hazard = await naive(prisma, `http://127.0.0.1:${port}/`);
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
      textbook: byHand,
      naive: hazard,
    };
  } finally {
    server.close();
    server.closeAllConnections();
    await shop.hf.close();
    await prisma.$disconnect();
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
