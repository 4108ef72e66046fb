/** Everybody has one cart, which is made when it is first needed, with Knex. */
import makeKnex from "knex";
import { opened } from "./opened.ts";

const open = opened((filename) =>
  makeKnex({ client: "better-sqlite3", connection: { filename }, useNullAsDefault: true }),
);

async function cartOf(file: string, table: string, owner: string): Promise<number | undefined> {
  const cart: { id: number } | undefined = await open(file)(table).where({ owner }).first("id");
  return cart?.id;
}

export async function naive(file: string, owner: string, item: string): Promise<void> {
  const knex = open(file);
  let cart = await cartOf(file, "cart", owner);
  if (cart === undefined) [cart] = await knex("cart").insert({ owner });
  await knex("cart_item").insert({ cart, item });
}

/** In a table whose owners are UNIQUE. */
export async function unique(file: string, owner: string, item: string): Promise<void> {
  const knex = open(file);
  await knex("own_cart").insert({ owner }).onConflict("owner").ignore();
  await knex("cart_item").insert({ cart: await cartOf(file, "own_cart", owner), item });
}
