import assert from "node:assert/strict";
import type { Kysely } from "kysely";
import type { Clients } from "./clients.ts";
import { type Race, everywhere, number } from "./race.ts";

type Tables = {
  blob_cart: { token: string; payload: string };
  blob_cart_line: { token: string; sku: string };
};

const database = ({ kysely }: Clients) => kysely.withTables<Tables>();

async function naive(db: Kysely<Tables>, token: string, sku: string): Promise<void> {
  const { payload } = await db
    .selectFrom("blob_cart")
    .select("payload")
    .where("token", "=", token)
    .executeTakeFirstOrThrow();
  const cart = JSON.parse(payload) as string[];
  cart.push(sku);
  await db
    .updateTable("blob_cart")
    .set({ payload: JSON.stringify(cart) })
    .where("token", "=", token)
    .execute();
}

async function fixed(db: Kysely<Tables>, token: string, sku: string): Promise<void> {
  await db.insertInto("blob_cart_line").values({ token, sku }).execute();
}

export const cartBlob: Race = {
  title: "the cart is one JSON text",
  source: "shopware 8724",
  client: "kysely",
  engines: everywhere,
  tables: {
    blob_cart: "token varchar(20) PRIMARY KEY, payload text NOT NULL",
    blob_cart_line: "token varchar(20) NOT NULL, sku varchar(20) NOT NULL, PRIMARY KEY (token, sku)",
  },
  rows: ["INSERT INTO blob_cart VALUES ('t1', '[]')"],
  naive: {
    actors: (clients) => ({
      A: () => naive(database(clients), "t1", "pen"),
      B: () => naive(database(clients), "t1", "ink"),
    }),
  },
  fixed: {
    actors: (clients) => ({
      A: () => fixed(database(clients), "t1", "pen"),
      B: () => fixed(database(clients), "t1", "ink"),
    }),
  },
  async invariant(clients) {
    const [cart] = await clients.query("SELECT payload FROM blob_cart");
    const lines = await number(clients, "SELECT count(*) FROM blob_cart_line");
    assert.equal((JSON.parse(String(cart?.["payload"])) as string[]).length + lines, 2, "items in the cart");
  },
  expects: "lost update",
};
