/**
 * Stock in a column of your own, with a movement for each change. `stock(hf, { levels: { table, … } })` does that on PostgreSQL,
 * with reservations, returns and a chain of balances. This is what is needed at the least, on every database.
 */
import { fork } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { type Holdfast, sql } from "holdfast";
import { open } from "../database.ts";
import { command } from "../support.ts";

/**
 * An order counts once for each SKU: that is the primary key of movements. Products are found by theirs, and locked in its order,
 * so no other index is needed for selling. The CHECK is for those who write by hand.
 */
export const tables = {
  holdfast_example_product: "sku varchar(40) PRIMARY KEY, stock int NOT NULL CHECK (stock >= 0)",
  holdfast_example_sale:
    "order_id varchar(60) NOT NULL, sku varchar(40) NOT NULL, quantity int NOT NULL, balance int NOT NULL, PRIMARY KEY (order_id, sku)",
} as const;

export interface Item {
  readonly sku: string;
  readonly quantity: number;
}

/** All of it, or nothing. `before`: this order was sold already, and is not counted again. */
export function sell(
  hf: Holdfast<unknown>,
  order: string,
  items: readonly Item[],
): Promise<"sold" | "before" | "short"> {
  // Two lines of one thing are one: each of them alone might fit.
  const wanted = new Map<string, number>();
  for (const { sku, quantity } of items) wanted.set(sku, (wanted.get(sku) ?? 0) + quantity);
  return hf.transaction(async (tx) => {
    const products = await tx.rows<{ sku: string; stock: number }>(
      "holdfast_example_product",
      [...wanted.keys()],
      { missing: "report" },
    );
    // Under the locks: a second one with this id has waited for the first.
    const [known] = await tx.query(
      sql`SELECT order_id FROM holdfast_example_sale WHERE order_id = ${order} LIMIT 1`,
    );
    if (known) return "before";
    const short = products.some(({ sku, stock }) => stock < (wanted.get(sku) ?? 0));
    if (short || products.missing.length > 0) return "short";
    for (const { sku, stock } of products) {
      const quantity = wanted.get(sku) ?? 0;
      const balance = stock - quantity;
      await tx.query(sql`UPDATE holdfast_example_product SET stock = ${balance} WHERE sku = ${sku}`);
      await tx.query(sql`INSERT INTO holdfast_example_sale (order_id, sku, quantity, balance)
        VALUES (${order}, ${sku}, ${-quantity}, ${balance})`);
    }
    return "sold";
  });
}

export interface Result {
  readonly sold: number;
  readonly before: number;
  readonly short: number;
  readonly left: Readonly<Record<string, number>>;
  /** What was there less what is left, as the sales have it. */
  readonly moved: Readonly<Record<string, number>>;
}

const shops = 3;
const had = { CAP: 20, MUG: 100 };

/** Three processes sell the last 20 caps to 30 orders, and are told of each order twice. */
export async function main(url: string): Promise<Result> {
  await using database = await open(url, tables);
  const { query } = database;
  for (const [sku, count] of Object.entries(had))
    await query(sql`INSERT INTO holdfast_example_product (sku, stock) VALUES (${sku}, ${count})`);
  const file = fileURLToPath(new URL("./shop.ts", import.meta.url));
  const answers = await Promise.all(
    Array.from({ length: shops }, async (_, i) => {
      const child = fork(file, [String(i), String(shops)], { env: { ...process.env, DATABASE_URL: url } });
      const [told] = (await Promise.race([once(child, "message"), once(child, "exit")])) as [string[]];
      return told;
    }),
  );
  const count = (answer: string) => answers.flat().filter((each) => each === answer).length;
  const left = await query<{ sku: string; stock: number }>(
    sql`SELECT sku, stock FROM holdfast_example_product ORDER BY sku`,
  );
  const moved = await query<{ sku: string; n: number | string }>(
    sql`SELECT sku, sum(quantity) AS n FROM holdfast_example_sale GROUP BY sku ORDER BY sku`,
  );
  return {
    sold: count("sold"),
    before: count("before"),
    short: count("short"),
    left: Object.fromEntries(left.map(({ sku, stock }) => [sku, stock])),
    moved: Object.fromEntries(moved.map(({ sku, n }) => [sku, Number(n)])),
  };
}

await command(
  import.meta.url,
  main,
  ({ sold, before, short, left }) =>
    `${sold} orders sold, ${before} of them told again, ${short} refused; left: ${Object.entries(left)
      .map(([sku, n]) => `${n} ${sku}`)
      .join(", ")}`,
);
