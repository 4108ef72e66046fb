import type { Holdfast } from "holdfast";
import { stock } from "holdfast/stock";
import type { ClientBase, Pool } from "pg";
import {
  type Race,
  Refused,
  type Size,
  byHand,
  callers,
  failureText,
  failures,
  one,
  sentence,
  work,
} from "./race.ts";

/** One piece of each. */
const items = 20;
const skus = Array.from({ length: items }, (_, i) => `ITEM-${i + 1}`);

const buyers = ({ processes, callers: own }: Size): number => processes * own;
const total = (size: Size): number => items * buyers(size);

async function stockOf(client: ClientBase, sku: string): Promise<number> {
  const { pieces } = await one<{ pieces: number }>(client, "SELECT pieces FROM item WHERE sku = $1", [sku]);
  return pieces;
}

const takePiece = (client: ClientBase, sku: string): Promise<unknown> =>
  client.query("UPDATE item SET pieces = pieces - 1 WHERE sku = $1", [sku]);

const addSale = (client: ClientBase, sku: string, buyer: number): Promise<unknown> =>
  client.query("INSERT INTO sale (sku, buyer) VALUES ($1, $2)", [sku, buyer]);

const naive = (pool: Pool, sku: string, buyer: number): Promise<void> =>
  byHand(pool, async (client) => {
    if ((await stockOf(client, sku)) < 1) throw new Refused();
    await work();
    await takePiece(client, sku);
    await addSale(client, sku, buyer);
  });

const exact = (hf: Holdfast<ClientBase>, sku: string, buyer: number): Promise<void> =>
  hf.transaction(async (tx) => {
    await work();
    await stock(hf).decrease(sku, 1, { tx });
    await addSale(tx.client, sku, buyer);
  });

/** All want the first one first, then the second, and so on. */
const skuOf = (i: number): string => skus[i % items] ?? "";

export const lastItem: Race = {
  name: "last-item",
  title: "The last item",
  what: (size) =>
    `One piece is left of each of ${items} items, and ${buyers(size)} buyers want each. The code looks whether it is there (SELECT) and, if so, takes it (UPDATE) and writes down the sale.`,
  counts: "pieces sold",
  total,
  does: "calls",
  timed: true,
  shared: false,
  tables: `
    CREATE TABLE item (sku text PRIMARY KEY, pieces int NOT NULL);
    CREATE TABLE sale (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, sku text NOT NULL, buyer int NOT NULL)`,
  async reset({ pool, hf }, way) {
    await pool.query("TRUNCATE item, sale");
    if (way === "Holdfast") await stock(hf).apply(skus.map((sku) => ({ sku, quantity: 1 })));
    else await pool.query("INSERT INTO item (sku, pieces) SELECT unnest($1::text[]), 1", [skus]);
  },
  ways: [
    {
      name: "naive",
      code: [
        "if ((await stockOf(client, sku)) < 1) throw new Refused();",
        "await takePiece(client, sku);",
        "await addSale(client, sku, buyer);",
      ],
      why: "Several see the last piece before the first of them has taken it.",
      run: (stage) => callers(stage, items, (buyer, i) => naive(stage.pool, skuOf(i), buyer)),
    },
    {
      name: "Holdfast",
      code: ["await stock(hf).decrease(sku, 1, { tx });", "await addSale(tx.client, sku, buyer);"],
      why: "It takes the piece, or throws InsufficientStockError if there is none.",
      run: (stage) => callers(stage, items, (buyer, i) => exact(stage.hf, skuOf(i), buyer)),
    },
  ],
  async find({ pool }, _, tally) {
    const { counted, sold, most } = await one<{ counted: number; sold: number; most: number }>(
      pool,
      `SELECT coalesce(sum(n), 0)::int AS counted, count(*)::int AS sold, coalesce(max(n), 0)::int AS most
       FROM (SELECT count(*) AS n FROM sale GROUP BY sku) AS per_item`,
    );
    return {
      counted,
      expected: items,
      right: counted === items && most === 1 && failures(tally) === 0,
      text: sentence(
        `${counted} pieces sold of ${items}`,
        most > 1 && `one of them ${most} times`,
        sold < items && `${items - sold} not sold`,
        failureText(tally),
      ),
      facts: { mostOfOne: most, refused: tally.refused },
    };
  },
};
