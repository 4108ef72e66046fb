/** What is in a cart, with Drizzle: as one JSON text, or one row for each item. */
import Database from "better-sqlite3";
import { eq } from "drizzle-orm";
import { drizzle } from "drizzle-orm/better-sqlite3";
import { sqliteTable, text } from "drizzle-orm/sqlite-core";
import { opened } from "./opened.ts";

const carts = sqliteTable("blob_cart", {
  token: text().primaryKey(),
  items: text({ mode: "json" }).$type<string[]>().notNull(),
});
const lines = sqliteTable("blob_cart_line", { token: text().notNull(), item: text().notNull() });

const open = opened((file) => drizzle(new Database(file)));

export async function naive(file: string, token: string, item: string): Promise<void> {
  const db = open(file);
  const [cart] = await db.select().from(carts).where(eq(carts.token, token));
  await db
    .update(carts)
    .set({ items: [...(cart?.items ?? []), item] })
    .where(eq(carts.token, token));
}

export async function rowEach(file: string, token: string, item: string): Promise<void> {
  await open(file).insert(lines).values({ token, item });
}

export async function immediate(file: string, token: string, item: string): Promise<void> {
  open(file).transaction(
    (tx) => {
      const cart = tx.select().from(carts).where(eq(carts.token, token)).get();
      tx.update(carts)
        .set({ items: [...(cart?.items ?? []), item] })
        .where(eq(carts.token, token))
        .run();
    },
    { behavior: "immediate" },
  );
}
