/** Orders that take from stock: by hand in several ways, and holdfast/stock. All write a movement per line. */
import { type Holdfast, holdfast } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { InsufficientStockError, type Stock, stock } from "holdfast/stock";
import type { ResultSetHeader } from "mysql2/promise";
import type { ClientBase, Pool } from "pg";
import { type Send, byMysql, mysqlTransaction, transaction } from "./locks.ts";
import { scatter } from "./measure.ts";
import type { MysqlPlace, PostgresPlace } from "./place.ts";
import { type Opened, type Suite, alternating, byHand, naive, ours, perConnection, scarce } from "./suite.ts";

export const skus = 1000;
export const plenty = 1_000_000_000;

/** In canonical order, as somebody writes it who has met a deadlock. */
export type Skus = readonly string[];

export const skuOf = (n: number) => `sku-${String(n).padStart(4, "0")}`;
export const hot: Skus = [skuOf(0)];

/** Three of them, no two the same. */
export function three(turn: number): Skus {
  const found = new Set<string>();
  for (let i = 0; found.size < 3; i++) found.add(skuOf(Math.floor(scatter(turn * 7 + i) * skus)));
  return [...found].toSorted();
}

export class NotEnough extends Error {}

// Named: prepared once per connection.
const read = (order: Skus) => ({
  name: "read",
  text: "SELECT sku, stock FROM variant WHERE sku = ANY ($1) ORDER BY sku FOR UPDATE",
  values: [order],
});
const write = (order: Skus) => ({
  name: "write",
  text: "UPDATE variant SET stock = stock - 1 WHERE sku = ANY ($1)",
  values: [order],
});
const take = (sku: string) => ({
  name: "take",
  text: "UPDATE variant SET stock = stock - 1 WHERE sku = $1 AND stock >= 1",
  values: [sku],
});
const note = (order: Skus, reference: string) => ({
  name: "note",
  text: `INSERT INTO movement (sku, quantity, source, reference_type, reference_id)
    SELECT sku, -1, 'ORDER', 'order', $2 FROM unnest($1::text[]) sku`,
  values: [order, reference],
});

/** Rows locked, checked, written. */
export function textbook(pool: Pool, order: Skus, reference: string, begin?: string): Promise<void> {
  return transaction(
    pool,
    async (client) => {
      const { rows } = await client.query<{ stock: number }>(read(order));
      if (rows.length < order.length || rows.some(({ stock: left }) => left < 1))
        throw new NotEnough("not enough");
      await client.query(write(order));
      await client.query(note(order, reference));
    },
    begin,
  );
}

/** The check in the UPDATE itself, line by line. */
export function conditional(pool: Pool, order: Skus, reference: string): Promise<void> {
  return transaction(pool, async (client) => {
    for (const sku of order)
      if ((await client.query(take(sku))).rowCount === 0) throw new NotEnough("not enough");
    await client.query(note(order, reference));
  });
}

export async function apply(shop: Stock, order: Skus, id: string): Promise<void> {
  await shop.apply(
    order.map((sku) => ({ sku, quantity: -1 })),
    { source: "ORDER", reference: { type: "order", id }, externalId: `order-${id}` },
  );
}

/** The tables, plenty of everything in them, and the same with Holdfast. */
export async function makeShop(admin: Pool): Promise<Stock> {
  await admin.query(
    "CREATE TABLE variant (sku text PRIMARY KEY, stock int NOT NULL CHECK (stock >= 0)) WITH (fillfactor = 50)",
  );
  await admin.query(`CREATE TABLE movement (id bigserial PRIMARY KEY, sku text NOT NULL, quantity int NOT NULL,
    source text NOT NULL, reference_type text, reference_id text, at timestamptz NOT NULL DEFAULT now())`);
  await admin.query("CREATE INDEX ON movement (sku, at)");
  await admin.query(
    "INSERT INTO variant SELECT 'sku-' || lpad(n::text, 4, '0'), $1 FROM generate_series(0, $2::int - 1) n",
    [plenty, skus],
  );
  const shop = await stocked(holdfast(fromPg(admin)));
  await admin.query("VACUUM ANALYZE");
  return shop;
}

async function stocked(hf: Holdfast<unknown>): Promise<Stock> {
  await hf.migrate();
  const shop = stock(hf, { name: "bench" });
  await shop.apply(Array.from({ length: skus }, (_, i) => ({ sku: skuOf(i), quantity: plenty })));
  return shop;
}

/** Read, computed and written back: as many as there were when it was read. */
async function unlocked(client: Pick<ClientBase, "query">, order: Skus, reference: string): Promise<void> {
  for (const sku of order) {
    const { rows } = await client.query<{ stock: number }>("SELECT stock FROM variant WHERE sku = $1", [sku]);
    const left = rows[0]?.stock ?? 0;
    if (left < 1) throw new NotEnough("not enough");
    await client.query("UPDATE variant SET stock = $2 WHERE sku = $1", [sku, left - 1]);
  }
  await client.query(note(order, reference));
}

const conditionalByHand = "conditional UPDATE";
const few = 10;
const tries = 20;

async function onPostgres({ pool: make, connections }: PostgresPlace): Promise<Opened> {
  const pool = make();
  const shop = await makeShop(pool);
  return open({
    shop,
    connections,
    ways: {
      [naive]: (order, reference) => unlocked(pool, order, reference),
      [byHand]: (order, reference) => textbook(pool, order, reference),
      [conditionalByHand]: (order, reference) => conditional(pool, order, reference),
    },
    add: async (some, count) =>
      void (await pool.query("INSERT INTO variant SELECT unnest($1::text[]), $2", [some, count])),
    close: () => pool.end(),
  });
}

async function onMysql({ pool: make, connections }: MysqlPlace): Promise<Opened> {
  const pool = make();
  await pool.query(
    "CREATE TABLE variant (sku varchar(40) PRIMARY KEY, stock int NOT NULL CHECK (stock >= 0))",
  );
  await pool.query(`CREATE TABLE movement (id bigint AUTO_INCREMENT PRIMARY KEY, sku varchar(40) NOT NULL, quantity int NOT NULL,
    source varchar(20) NOT NULL, reference_type varchar(20), reference_id varchar(40),
    at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), KEY (sku, at))`);
  const add = async (some: Skus, count: number): Promise<void> =>
    void (await pool.query("INSERT INTO variant VALUES ?", [some.map((sku) => [sku, count])]));
  await add(
    Array.from({ length: skus }, (_, i) => skuOf(i)),
    plenty,
  );
  const hf = holdfast(fromMysql2(pool));
  const shop = await stocked(hf);
  const noted = (send: Send, order: Skus, reference: string) =>
    send("INSERT INTO movement (sku, quantity, source, reference_type, reference_id) VALUES ?", [
      order.map((sku) => [sku, -1, "ORDER", "order", reference]),
    ]);
  const left = (found: readonly Record<string, unknown>[], order: Skus): void => {
    if (found.length < order.length || found.some((row) => Number(row["stock"]) < 1))
      throw new NotEnough("not enough");
  };
  return open({
    shop,
    connections,
    ways: {
      async [naive](order, reference) {
        const send = byMysql(pool);
        for (const sku of order) {
          const found = await send("SELECT stock FROM variant WHERE sku = ?", [sku]);
          left(found, [sku]);
          await send("UPDATE variant SET stock = ? WHERE sku = ?", [Number(found[0]?.["stock"]) - 1, sku]);
        }
        await noted(send, order, reference);
      },
      [byHand]: (order, reference) =>
        mysqlTransaction(pool, async (send) => {
          left(
            await send("SELECT stock FROM variant WHERE sku IN (?) ORDER BY sku FOR UPDATE", [order]),
            order,
          );
          await send("UPDATE variant SET stock = stock - 1 WHERE sku IN (?)", [order]);
          await noted(send, order, reference);
        }),
      [conditionalByHand]: (order, reference) =>
        mysqlTransaction(pool, async (send) => {
          for (const sku of order) {
            const taken = (await send("UPDATE variant SET stock = stock - 1 WHERE sku = ? AND stock >= 1", [
              sku,
            ])) as unknown as ResultSetHeader;
            if (taken.affectedRows === 0) throw new NotEnough("not enough");
          }
          await noted(send, order, reference);
        }),
    },
    add,
    async close() {
      await hf.close();
      await pool.end();
    },
  });
}

interface Ground {
  readonly shop: Stock;
  readonly connections: number;
  /** By hand. */
  readonly ways: Readonly<Record<string, (order: Skus, reference: string) => Promise<void>>>;
  /** So many of each, of SKUs that are new. */
  add(some: Skus, count: number): Promise<void>;
  close(): Promise<void>;
}

function open({ shop, connections, ways: hands, add, close }: Ground): Opened {
  let orders = 0;
  const all = { ...hands, [ours]: (order: Skus, reference: string) => apply(shop, order, reference) };
  const ways: Readonly<Record<string, (order: Skus) => Promise<void>>> = Object.fromEntries(
    Object.entries(all).map(([contestant, way]) => [
      contestant,
      (order: Skus) => way(order, String(++orders)),
    ]),
  );
  const callers = connections * perConnection;
  const cell = (name: string, order: (turn: number) => Skus) =>
    alternating(name, {
      contestants: Object.entries(ways).map(([contestant, way]) => ({
        name: contestant,
        call: (turn) => way(order(turn)),
      })),
      callers,
      reset: async () => {},
    });
  return {
    cells: [cell("one hot SKU", () => hot), cell("3 of 1,000 SKUs", three)],
    trials: Object.fromEntries(
      Object.entries(ways).map(([contestant, way], i) => [
        contestant,
        async (until) => {
          const trial = Array.from({ length: tries }, (_, nth) => `trial-${i}-${nth}`);
          await add(trial, few);
          await shop.apply(trial.map((sku) => ({ sku, quantity: few })));
          return scarce(until, callers, few, async (nth) => {
            try {
              await way([trial[nth] ?? ""]);
              return true;
            } catch (error) {
              if (error instanceof NotEnough || error instanceof InsufficientStockError) return false;
              throw error;
            }
          });
        },
      ]),
    ),
    [Symbol.asyncDispose]: close,
  };
}

export const stocks: Suite = {
  name: "stock",
  about: "orders, with 8 requests under way for each connection, and a row for each movement",
  contestants: {
    [naive]: "SELECT stock, then UPDATE with what was computed",
    [byHand]: "BEGIN, SELECT … FOR UPDATE, UPDATE, INSERT, COMMIT",
    [conditionalByHand]: "by hand too: BEGIN, UPDATE … WHERE stock >= 1 for each line, INSERT, COMMIT",
    [ours]: "stock(hf).apply(lines, …), with ids that count once and a chain of balances",
  },
  own: [ours],
  needsDatabase: true,
  measured: 8,
  // By hand 3 and 2, from the first row to COMMIT.
  inLine: (connections) => 5 * perConnection * connections,
  postgres: onPostgres,
  mysql: onMysql,
};
