import { type Holdfast, key } from "holdfast";
import { type Stock, stock } from "holdfast/stock";
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

const addSale = (client: Pick<ClientBase, "query"> | Pool, sku: string, buyer: number): Promise<unknown> =>
  (client as Pool).query("INSERT INTO sale (sku, buyer) VALUES ($1, $2)", [sku, buyer]);

/** The same by hand and with a lock. */
async function buy(client: ClientBase, sku: string, buyer: number): Promise<void> {
  if ((await stockOf(client, sku)) < 1) throw new Refused();
  await work();
  await takePiece(client, sku);
  await addSale(client, sku, buyer);
}

const naive = (pool: Pool, sku: string, buyer: number): Promise<void> =>
  byHand(pool, (client) => buy(client, sku, buyer));

const locked = (hf: Holdfast<ClientBase>, sku: string, buyer: number): Promise<void> =>
  hf.transaction({ lock: key("item", sku) }, async (tx) => {
    await buy(tx.client, sku, buyer); // the same code
  });

async function counted(goods: Stock, pool: Pool, sku: string, buyer: number): Promise<void> {
  await goods.decrease(sku, 1); // throws if there is none left
  await work();
  await addSale(pool, sku, buyer);
}

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
    if (way === "Holdfast stock") await stock(hf).apply(skus.map((sku) => ({ sku, quantity: 1 })));
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
      name: "Holdfast lock",
      code: [
        'hf.transaction({ lock: key("item", sku) }, async (tx) => {',
        "  await buy(tx.client, sku, buyer); // the same code",
        "});",
      ],
      why: "One buyer of an item at a time. Buyers of other items do not wait.",
      run: (stage) => callers(stage, items, (buyer, i) => locked(stage.hf, skuOf(i), buyer)),
    },
    {
      name: "Holdfast stock",
      code: [
        "const goods = stock(hf);",
        "await goods.decrease(sku, 1); // throws if there is none left",
        "await addSale(pool, sku, buyer);",
      ],
      why: "Holdfast keeps the pieces: one round trip, in which calls of the same moment go together.",
      run({ hf, pool, ...rest }) {
        const goods = stock(hf);
        return callers({ hf, pool, ...rest }, items, (buyer, i) => counted(goods, pool, skuOf(i), buyer));
      },
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
        `${counted} sold of ${items}`,
        most > 1 && `one ${most} times`,
        sold < items && `${items - sold} not sold`,
        failureText(tally),
      ),
      facts: { mostOfOne: most, refused: tally.refused },
    };
  },
};
