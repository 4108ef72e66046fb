import { type Holdfast, versioned } from "holdfast";
import type { ClientBase, Pool } from "pg";
import { command, open } from "../support.ts";

const table = "holdfast_example_item";

interface Item {
  sku: string;
  stock: number;
  version: number;
}

/** Each says whether it sold. The naive read, then write, sells the same piece twice. */
type Sell = (sku: string, count: number) => Promise<boolean>;

/** Pessimistic: the row is locked, so code may run between check and write. Buyers of this item wait in line. */
function pessimistic(hf: Holdfast<ClientBase>): Sell {
  return (sku, count) =>
    hf.transaction(async (tx) => {
      const { stock } = await tx.row<Item>(table, sku);
      if (stock < count) return false;
      await tx.client.query(`UPDATE ${table} SET stock = stock - $2 WHERE sku = $1`, [sku, count]);
      return true;
    });
}

/** Conditional: if all of the check is about the row that is written, one statement does it, without Holdfast. */
function conditional(pool: Pool): Sell {
  return async (sku, count) => {
    const { rowCount } = await pool.query(
      `UPDATE ${table} SET stock = stock - $2 WHERE sku = $1 AND stock >= $2`,
      [sku, count],
    );
    return rowCount === 1;
  };
}

/** Versioned: nobody waits, and who was too late decides anew. So the function may run several times. */
function optimistic(hf: Holdfast<ClientBase>): Sell {
  const items = versioned<Item>(hf, table);
  return async (sku, count) => {
    let sold = false;
    const change = ({ stock }: Item) => {
      sold = stock >= count;
      return sold ? { stock: stock - count } : undefined;
    };
    // All buyers want one item here, which is the worst case for versions: the default of 10 attempts is too few.
    await items.update(sku, change, { attempts: 200 });
    return sold;
  };
}

export interface Sales {
  readonly way: string;
  readonly sold: number;
  readonly refused: number;
  readonly left: number;
}

const stock = 25;
const count = 2;
const buyers = 30;

/** Thirty buyers of two pieces each, at once; there are 25 pieces. */
export async function main(url: string): Promise<Sales[]> {
  await using place = await open(url, {
    [table]: "sku text PRIMARY KEY, stock int NOT NULL, version int NOT NULL DEFAULT 0",
  });
  const { pool, hf } = place;
  const ways = {
    pessimistic: pessimistic(hf),
    conditional: conditional(pool),
    versioned: optimistic(hf),
  };
  const sales: Sales[] = [];
  for (const [way, sell] of Object.entries(ways)) {
    await pool.query(`INSERT INTO ${table} (sku, stock) VALUES ($1, $2)`, [way, stock]);
    const answers = await Promise.all(Array.from({ length: buyers }, () => sell(way, count)));
    const { rows } = await pool.query<Item>(`SELECT * FROM ${table} WHERE sku = $1`, [way]);
    const sold = answers.filter(Boolean).length * count;
    sales.push({
      way,
      sold,
      refused: answers.length * count - sold,
      left: rows[0]?.stock ?? Number.NaN,
    });
  }
  return sales;
}

await command(import.meta.url, main, (sales) =>
  sales
    .map(
      ({ way, sold, refused, left }) => `${way}: ${sold} of ${stock} sold, ${refused} refused, ${left} left`,
    )
    .join("\n"),
);
