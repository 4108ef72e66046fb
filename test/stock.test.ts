/** Stock, on a real server: what each call does, and what many of them at once come to. */
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import {
  InsufficientStockError,
  type Stock,
  StockConflictError,
  StockError,
  UnknownSkuError,
  stock,
} from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import { sell } from "../examples/shop/textbook.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";
import { random } from "./harness/random.ts";
import type { SaleArg, SaleResult } from "./workers/stock-sale.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 8 });
  hf = holdfast(fromPg(pool));
  await hf.migrate();
});
afterAll(async () => {
  await hf?.close();
  await pool?.end();
  await database?.drop();
});

let made = 0;
const named = () => `book ${++made}`;

/** With so many of each. */
async function shopWith(levels: Readonly<Record<string, number>>): Promise<Stock> {
  const shop = stock(hf, { name: named() });
  await shop.apply(Object.entries(levels).map(([sku, quantity]) => ({ sku, quantity })));
  return shop;
}

/** Movements add up to the levels, and open reservations to what is reserved. */
async function whole(shop: Stock): Promise<void> {
  expect(await shop.reconcile()).toMatchObject({ ok: true, findings: [] });
}

async function failed<T>(work: Promise<unknown>, type: new (...args: never[]) => T): Promise<T> {
  const error: unknown = await work.then(
    () => undefined,
    (e: unknown) => e,
  );
  expect(error).toBeInstanceOf(type);
  return error as T;
}

async function deadlocks(): Promise<number> {
  const { rows } = await pool.query(
    "SELECT deadlocks::int FROM pg_stat_database WHERE datname = current_database()",
  );
  return rows[0].deadlocks;
}

describe("an order", () => {
  test("is taken whole, and each line says what is left", async () => {
    const shop = await shopWith({ CAP: 5, SHIRT: 3 });
    const done = await shop.apply(
      [
        { sku: "SHIRT", quantity: -1 },
        { sku: "CAP", quantity: -2 },
      ],
      { source: "ORDER", reference: { type: "order", id: "1001" }, by: "ada", note: "gift" },
    );
    expect(done).toMatchObject({
      replayed: false,
      lines: [
        { sku: "CAP", location: "main", quantity: -2, onHand: 3, version: 2 },
        { sku: "SHIRT", location: "main", quantity: -1, onHand: 2, version: 2 },
      ],
    });
    const { movements } = await shop.history({ reference: { id: "1001" } });
    expect(movements.map(({ sku, quantity, source, by, note }) => [sku, quantity, source, by, note])).toEqual(
      expect.arrayContaining([
        ["CAP", -2, "ORDER", "ada", "gift"],
        ["SHIRT", -1, "ORDER", "ada", "gift"],
      ]),
    );
    await whole(shop);
  });

  test("that does not fit is refused whole, and every line that is short is named", async () => {
    const shop = await shopWith({ CAP: 5, SHIRT: 3, MUG: 1 });
    const error = await failed(
      shop.apply([
        { sku: "CAP", quantity: -1 },
        { sku: "SHIRT", quantity: -4 },
        { sku: "MUG", quantity: -3 },
      ]),
      InsufficientStockError,
    );
    expect(error.code).toBe("HF_STOCK_INSUFFICIENT");
    expect(error.lines).toEqual([
      { sku: "MUG", location: "main", requested: 3, available: 1, short: 2 },
      { sku: "SHIRT", location: "main", requested: 4, available: 3, short: 1 },
    ]);
    expect(error.message).toContain("MUG at main: 3 wanted, 1 available, 2 short");
    expect((await shop.levels()).map(({ onHand }) => onHand)).toEqual([5, 1, 3]);
    await whole(shop);
  });

  test("lines of one SKU are summed before they are checked", async () => {
    const shop = await shopWith({ CAP: 5 });
    const lines = [
      { sku: "CAP", quantity: -3 },
      { sku: "CAP", quantity: -3 },
    ];
    const error = await failed(shop.apply(lines), InsufficientStockError);
    expect(error.lines).toEqual([{ sku: "CAP", location: "main", requested: 6, available: 5, short: 1 }]);
    expect(await shop.apply(lines.slice(1))).toMatchObject({ lines: [{ quantity: -3, onHand: 2 }] });
  });

  test("of an SKU that nobody has heard of", async () => {
    const shop = await shopWith({ CAP: 5 });
    const error = await failed(
      shop.apply([
        { sku: "CAP", quantity: -1 },
        { sku: "CPA", quantity: -1 },
      ]),
      UnknownSkuError,
    );
    expect(error).toMatchObject({ code: "HF_STOCK_UNKNOWN_SKU", lines: [{ sku: "CPA", location: "main" }] });
    await failed(shop.decrease("CPA", 1), UnknownSkuError);
    await failed(shop.decrease("CAP", 1, { location: "moon" }), UnknownSkuError);
    await failed(shop.level("CPA"), UnknownSkuError);
    expect(await shop.level("CAP")).toMatchObject({ onHand: 5, available: 5 });
  });

  test("many at once: each gets its own verdict, and nothing is oversold", async () => {
    const shop = await shopWith({ a: 30, b: 30, c: 5 });
    const verdicts = await Promise.allSettled(
      Array.from({ length: 100 }, (_, i) =>
        shop.apply([
          { sku: "a", quantity: -1 },
          { sku: i % 2 ? "b" : "c", quantity: -1 },
        ]),
      ),
    );
    const sold = verdicts.filter(({ status }) => status === "fulfilled").length;
    const levels = Object.fromEntries((await shop.levels()).map(({ sku, onHand }) => [sku, onHand]));
    expect(levels).toEqual({ a: 0, b: 5, c: 0 });
    expect(sold).toBe(30);
    for (const each of verdicts)
      if (each.status === "rejected") expect(each.reason).toBeInstanceOf(InsufficientStockError);
    await whole(shop);
  });

  test("an error of one of them is not that of the others", async () => {
    const shop = await shopWith({ a: 100 });
    const results = await Promise.allSettled([
      shop.decrease("a", 1),
      shop.decrease("a", 1),
      // More than numbers can say.
      shop.increase("a", Number.MAX_SAFE_INTEGER),
      shop.decrease("nothing", 1),
      shop.decrease("a", 1),
    ]);
    expect(results.filter(({ status }) => status === "fulfilled").length).toBe(3);
    expect(await shop.level("a")).toMatchObject({ onHand: 97, version: 4 });
    await whole(shop);
  });

  test("SKUs and locations may be anything", async () => {
    const shop = stock(hf, { name: named() });
    const skus = [
      "'; DROP",
      '{"a":1}',
      "a,b",
      '"quoted"',
      "back\\slash",
      "é\u{1F600}",
      " ",
      "NULL",
      "x".repeat(400),
    ];
    await shop.apply(skus.map((sku) => ({ sku, quantity: 2, location: sku })));
    await shop.apply(skus.map((sku) => ({ sku, quantity: -1, location: sku })));
    for (const sku of skus) {
      await shop.decrease(sku, 1, { location: sku });
      expect(await shop.level(sku, { location: sku })).toMatchObject({
        sku,
        location: sku,
        onHand: 0,
        version: 3,
      });
    }
    expect(() => shop.decrease("", 1)).toThrow("empty");
    expect(() => shop.decrease("a\0b", 1)).toThrow("NUL");
    await whole(shop);
  });

  test("what is not an order is refused before it is sent", async () => {
    const shop = await shopWith({ a: 1 });
    expect(() => shop.apply([])).toThrow("at least one line");
    expect(() => shop.apply([{ sku: "a", quantity: 0 }])).toThrow("moves nothing");
    expect(() => shop.apply([{ sku: "a", quantity: 1.5 }])).toThrow("whole number");
    expect(() => shop.decrease("a", -1)).toThrow("from 1");
    // @ts-expect-error: it is called `externalId`.
    expect(() => shop.apply([{ sku: "a", quantity: 1 }], { id: "x" })).toThrow("no option `id`");
    // @ts-expect-error: not one of the sources.
    const source: Parameters<typeof shop.decrease>[2] = { source: "TILL" };
    expect(source).toBeDefined();
  });
});

test("a call is one round trip: applied, repeated, refused, of one line or of many", async () => {
  const shop = await shopWith({ a: 10, b: 10 });
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  const near = new Pool({ connectionString: proxy.url(database.url), max: 1 });
  const mine = stock(holdfast(fromPg(near)), { name: shop.name });
  const two = (quantity: number) => [
    { sku: "a", quantity },
    { sku: "b", quantity },
  ];
  try {
    await mine.apply(two(-1));
    for (const work of [
      () => mine.decrease("a", 1),
      () => mine.decrease("a", 1, { externalId: "x" }),
      () => mine.decrease("a", 1, { externalId: "x" }),
      () => mine.decrease("a", 1000),
      () => mine.apply(two(-1), { externalId: "y" }),
      () => mine.apply(two(-1), { externalId: "y" }),
      () => mine.apply(two(-1000)),
      () => mine.reserve(two(1), { id: "r" }),
      () => mine.commit("r"),
      () => mine.return("y"),
      () => mine.transfer("a", 1, { from: "main", to: "shop" }),
      () => mine.adjustTo("a", 3),
    ]) {
      proxy.resetCount();
      await work().catch((error: unknown) => expect(error).toBeInstanceOf(InsufficientStockError));
      expect(proxy.roundTrips, String(work)).toBe(1);
    }
  } finally {
    await near.end();
    await proxy.close();
  }
});

test("a batch that was done unheard and never got through again: sent one by one, all are done", async () => {
  const shop = await shopWith({ other: 1, "unheard of": 3 });
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  const near = new Pool({ connectionString: proxy.url(database.url), max: 4 });
  near.on("error", () => {});
  const mine = stock(holdfast(fromPg(near)), { name: shop.name });
  let times = 0;
  proxy.cutWhen((direction, chunk) => {
    if (direction === "to-client" || !chunk.includes("unheard of")) return "pass";
    times++;
    return times === 1 ? "drop-answer" : times <= 5 ? "cut-before" : "pass";
  });
  try {
    // While the first is under way, the others come together.
    const [, ...answers] = await Promise.allSettled([
      mine.decrease("other", 1),
      ...Array.from({ length: 3 }, () => mine.decrease("unheard of", 1)),
    ]);
    expect(answers.map(({ status }) => status)).toEqual(["fulfilled", "fulfilled", "fulfilled"]);
    expect(times).toBe(7);
    expect((await shop.levels()).map(({ onHand }) => onHand)).toEqual([0, 0]);
    await whole(shop);
  } finally {
    await near.end();
    await proxy.close();
  }
});

test("a transaction delays those who want the same SKU, not those who were sent together with them; nobody deadlocks", async () => {
  const shop = await shopWith({ a: 10, b: 10, c: 10, m: 10, z: 10 });
  // In a deadlock, it is the transaction that would find it.
  const theirs = new Pool({ connectionString: database.url, options: "-c deadlock_timeout=5s" });
  const ours = new Pool({ connectionString: database.url, max: 6, options: "-c deadlock_timeout=60s" });
  const other = holdfast(fromPg(theirs));
  const slow = stock(other, { name: shop.name });
  const mine = stock(holdfast(fromPg(ours)), { name: shop.name });
  const client = await theirs.connect();
  try {
    await client.query("BEGIN");
    const tx = other.join(client);
    await slow.decrease("m", 1, { tx });
    // While the first is under way, the others come together.
    const first = mine.decrease("z", 1);
    const a = mine.decrease("a", 1);
    const both = mine.apply([
      { sku: "m", quantity: -1 },
      { sku: "z", quantity: -1 },
    ]);
    const b = mine.reserve([{ sku: "b", quantity: 1 }]);
    const m = mine.decrease("m", 1);
    let through = false;
    const same = Promise.all([both, m]).finally(() => (through = true));
    await eventually(async () => {
      const { rows } = await pool.query(
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
      );
      return rows.length > 0;
    });
    expect((await slow.decrease("a", 1, { tx })).lines).toMatchObject([{ quantity: -1 }]);
    expect(await b).toMatchObject({ lines: [{ quantity: 1 }] });
    expect(await mine.decrease("c", 1)).toMatchObject({ lines: [{ onHand: 9 }] });
    expect(through).toBe(false);
    await client.query("COMMIT");
    expect((await same).map(({ lines }) => lines[0]?.onHand)).toEqual([8, 7]);
    await Promise.all([first, a]);
    expect((await shop.levels()).map(({ onHand }) => onHand)).toEqual([8, 10, 9, 7, 8]);
    await whole(shop);
  } finally {
    client.release(true);
    await theirs.end();
    await ours.end();
  }
});

test("what queued goes together: 200 orders at once are a few round trips", async () => {
  const shop = await shopWith({ a: 1000, b: 1000 });
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  const near = new Pool({ connectionString: proxy.url(database.url), max: 2 });
  const mine = stock(holdfast(fromPg(near)), { name: shop.name });
  try {
    await mine.decrease("a", 1);
    proxy.resetCount();
    await Promise.all(Array.from({ length: 200 }, (_, i) => mine.decrease(i % 2 ? "a" : "b", 1)));
    expect(proxy.roundTrips).toBeLessThan(20);
    expect((await shop.levels()).map(({ onHand }) => onHand)).toEqual([899, 900]);
    await whole(shop);
  } finally {
    await near.end();
    await proxy.close();
  }
});

test("words of one's own", async () => {
  const shop = stock<{ source: "POS" | "AMAZON"; reference: "receipt" }>(hf, { name: named() });
  await shop.increase("a", 5, { source: "POS", reference: { type: "receipt", id: "1" } });
  await shop.decrease("a", 1, { source: "ORDER" });
  // @ts-expect-error: there is no such reference.
  await shop.decrease("a", 1, { reference: { type: "order", id: "1" } });
  // @ts-expect-error: there is no such source.
  await shop.decrease("a", 1, { source: "EBAY" });
  const { movements } = await shop.history({ source: "POS" });
  expect(movements).toMatchObject([{ source: "POS", reference: { type: "receipt", id: "1" } }]);
});

describe("external ids", () => {
  const lines = [
    { sku: "a", quantity: -1 },
    { sku: "b", quantity: -2 },
  ];

  test("the same content is answered again, other content is refused", async () => {
    const shop = await shopWith({ a: 1, b: 10 });
    const options = { externalId: "ml-1", source: "ML_SALE" } as const;
    const first = await shop.apply(lines, options);
    await shop.increase("b", 5);
    // Though there is none left of `a`, and whatever the order of the lines.
    expect(await shop.apply(lines.toReversed(), options)).toEqual({ ...first, replayed: true });
    for (const [other, more] of [
      [lines.slice(0, 1), {}],
      [[...lines, { sku: "c", quantity: 1 }], {}],
      [lines.map((line) => ({ ...line, quantity: -1 })), {}],
      [lines, { source: "ORDER" }],
      [lines, { reference: { type: "order", id: "2" } }],
    ] as const) {
      const error = await failed(shop.apply(other, { ...options, ...more }), StockConflictError);
      expect(error).toMatchObject({ code: "HF_STOCK_ID_CONFLICT", id: "ml-1" });
    }
    const { movements } = await shop.history({ source: "ML_SALE" });
    expect(movements.length).toBe(2);
    await whole(shop);
  });

  test("in one batch: the same content has one effect, other content is refused", async () => {
    const shop = await shopWith({ a: 3 });
    const results = await Promise.allSettled([
      ...Array.from({ length: 5 }, () => shop.decrease("a", 2, { externalId: "one" })),
      shop.decrease("a", 1, { externalId: "one" }),
      shop.decrease("a", 2, { externalId: "two" }),
    ]);
    expect(results.map(({ status }) => status)).toEqual([
      ...Array.from({ length: 5 }, () => "fulfilled"),
      "rejected",
      "rejected",
    ]);
    expect(results.filter((each) => each.status === "fulfilled" && !each.value.replayed).length).toBe(1);
    expect((results[5] as PromiseRejectedResult).reason).toBeInstanceOf(StockConflictError);
    expect((results[6] as PromiseRejectedResult).reason).toBeInstanceOf(InsufficientStockError);
    expect(await shop.level("a")).toMatchObject({ onHand: 1, version: 2 });
  });

  test("a refusal is not kept: the same id may be taken later", async () => {
    const shop = await shopWith({ a: 1 });
    await failed(shop.decrease("a", 2, { externalId: "x" }), InsufficientStockError);
    await shop.increase("a", 1);
    expect(await shop.decrease("a", 2, { externalId: "x" })).toMatchObject({ replayed: false });
  });

  test("5 webhooks at one instant, from 5 processes' worth of pools: one set of movements, 5 successes", async () => {
    const name = named();
    const pools = Array.from({ length: 5 }, () => new Pool({ connectionString: database.url, max: 2 }));
    try {
      const shops = pools.map((each) => stock(holdfast(fromPg(each)), { name }));
      const rounds = 60;
      // Just as much as is needed: who comes second finds nothing left.
      await shops[0]?.apply(lines.map(({ sku, quantity }) => ({ sku, quantity: -quantity * rounds })));
      for (let round = 0; round < rounds; round++) {
        const answers = await Promise.all(
          shops.map((each) => each.apply(lines, { externalId: `hook-${round}`, source: "ML_SALE" })),
        );
        const [{ replayed: _, ...first }] = answers as [(typeof answers)[0]];
        for (const { replayed: __, ...each } of answers) expect(each).toEqual(first);
        expect(answers.filter(({ replayed }) => !replayed).length).toBe(1);
      }
      const shop = shops[0] as Stock;
      expect((await shop.levels()).map(({ onHand, version }) => [onHand, version])).toEqual([
        [0, rounds + 1],
        [0, rounds + 1],
      ]);
      await whole(shop);
    } finally {
      for (const each of pools) await each.end();
    }
  });
});

describe("counting", () => {
  test("adjustTo writes the difference, also if there is none", async () => {
    const shop = await shopWith({ a: 10 });
    expect(await shop.adjustTo("a", 7, { note: "counted" })).toMatchObject({
      lines: [{ quantity: -3, onHand: 7 }],
    });
    expect(await shop.adjustTo("a", 7)).toMatchObject({ lines: [{ quantity: 0, onHand: 7, version: 3 }] });
    expect(await shop.adjustTo("new", 4)).toMatchObject({ lines: [{ quantity: 4, onHand: 4, version: 1 }] });
    const options = { externalId: "count-1" };
    await shop.adjustTo("a", 9, options);
    await shop.decrease("a", 1);
    expect(await shop.adjustTo("a", 9, options)).toMatchObject({ replayed: true, lines: [{ quantity: 2 }] });
    await failed(shop.adjustTo("a", 8, options), StockConflictError);
    expect(await shop.level("a")).toMatchObject({ onHand: 8 });
    await whole(shop);
  });

  test("less than is reserved is refused", async () => {
    const shop = await shopWith({ a: 10 });
    await shop.reserve([{ sku: "a", quantity: 6 }]);
    const error = await failed(shop.adjustTo("a", 5), InsufficientStockError);
    expect(error.lines).toEqual([{ sku: "a", location: "main", requested: 5, available: 4, short: 1 }]);
    await whole(shop);
  });

  test("a minimum, and a negative one: backorder", async () => {
    const shop = await shopWith({ a: 10 });
    await shop.setMinimum("a", 4);
    const error = await failed(shop.decrease("a", 7), InsufficientStockError);
    expect(error.lines[0]).toMatchObject({ available: 6, short: 1 });
    await shop.decrease("a", 6);
    await failed(shop.setMinimum("a", 5), InsufficientStockError);
    await shop.setMinimum("a", -2);
    await shop.decrease("a", 6);
    expect(await shop.level("a")).toMatchObject({ onHand: -2, available: 0, min: -2 });
    await failed(shop.decrease("a", 1), InsufficientStockError);
    await whole(shop);
  });

  test("the database holds the same rule", async () => {
    const shop = await shopWith({ a: 1 });
    const set = "UPDATE holdfast.stock_level SET on_hand = -1 WHERE book = $1";
    await expect(pool.query(set, [shop.name])).rejects.toThrow("stock_level_minimum");
  });
});

describe("reservations", () => {
  const two = [
    { sku: "a", quantity: 2 },
    { sku: "b", quantity: 1 },
  ];

  test("keep stock apart until they are committed or released", async () => {
    const shop = await shopWith({ a: 5, b: 1 });
    const kept = await shop.reserve(two, { id: "cart-1", by: "ada" });
    expect(kept).toMatchObject({ id: "cart-1", state: "open", replayed: false });
    expect(await shop.level("a")).toMatchObject({ onHand: 5, reserved: 2, available: 3 });
    const error = await failed(shop.decrease("b", 1), InsufficientStockError);
    expect(error.lines[0]).toMatchObject({ available: 0, short: 1 });
    expect(await shop.reserve(two, { id: "cart-1" })).toMatchObject({ replayed: true });
    await failed(shop.reserve(two.slice(1), { id: "cart-1" }), StockConflictError);
    const sold = await kept.commit({ reference: { type: "order", id: "7" } });
    expect(sold).toMatchObject({
      replayed: false,
      lines: [
        { quantity: -2, onHand: 3 },
        { quantity: -1, onHand: 0 },
      ],
    });
    expect(await shop.commit("cart-1", { reference: { type: "order", id: "7" } })).toEqual({
      ...sold,
      replayed: true,
    });
    expect(await shop.reserve(two, { id: "cart-1" })).toMatchObject({ state: "committed", replayed: true });
    const ended = await failed(kept.release(), StockError);
    expect(ended.code).toBe("HF_STOCK_RESERVATION_ENDED");
    const { movements } = await shop.history({ sku: "a" });
    expect(movements[0]).toMatchObject({
      kind: "commit",
      source: "ORDER",
      by: "ada",
      reference: { id: "7" },
    });
    await whole(shop);
  });

  test("released, it is there for others, and cannot be committed", async () => {
    const shop = await shopWith({ a: 2, b: 1 });
    const kept = await shop.reserve(two);
    await kept.release();
    await kept.release();
    await failed(kept.commit(), StockError);
    await failed(shop.commit("never"), StockError);
    await shop.apply(two.map(({ sku, quantity }) => ({ sku, quantity: -quantity })));
    expect(await shop.level("a")).toMatchObject({ onHand: 0, reserved: 0 });
    await whole(shop);
  });

  test("run out: they do not count, make room when it is needed, and cannot be committed", async () => {
    const shop = await shopWith({ a: 2, b: 2 });
    const kept = await shop.reserve(two, { ttl: 30, id: "slow" });
    await expect.poll(async () => (await shop.level("a")).reserved, { timeout: 20_000 }).toBe(0);
    expect(await shop.level("a")).toMatchObject({ onHand: 2, reserved: 0, available: 2 });
    // Nobody has needed it yet: it is still in the books.
    await whole(shop);
    await shop.decrease("a", 1);
    expect(await failed(kept.commit(), StockError)).toMatchObject({ code: "HF_STOCK_RESERVATION_ENDED" });
    await failed(shop.reserve(two, { id: "slow" }), InsufficientStockError);
    await shop.increase("a", 1);
    // Under the same id again: it is as if it had never been.
    expect(await shop.reserve(two, { id: "slow" })).toMatchObject({ state: "open", replayed: false });
    expect((await shop.levels()).map(({ reserved }) => reserved)).toEqual([2, 1]);
    await shop.commit("slow");
    await whole(shop);
  });

  test("many at once on the last pieces", async () => {
    const shop = await shopWith({ a: 10, b: 100 });
    const results = await Promise.allSettled(
      Array.from({ length: 30 }, async (_, i) => {
        const kept = await shop.reserve([
          { sku: "a", quantity: 1 },
          { sku: "b", quantity: 1 },
        ]);
        await (i % 2 ? kept.commit() : kept.release());
      }),
    );
    const { onHand, reserved } = await shop.level("a");
    expect(reserved).toBe(0);
    expect(onHand).toBeGreaterThanOrEqual(0);
    expect(await shop.level("b")).toMatchObject({ onHand: 90 + onHand, reserved: 0 });
    for (const each of results)
      if (each.status === "rejected") expect(each.reason).toBeInstanceOf(InsufficientStockError);
    await whole(shop);
  });
});

describe("between locations", () => {
  test("a transfer is two movements of one reference", async () => {
    const shop = await shopWith({ a: 5 });
    const moved = await shop.transfer("a", 3, { from: "main", to: "store" });
    expect(moved.lines.map(({ location, quantity, onHand }) => [location, quantity, onHand])).toEqual([
      ["main", -3, 2],
      ["store", 3, 3],
    ]);
    await failed(shop.transfer("a", 3, { from: "main", to: "store" }), InsufficientStockError);
    const { movements } = await shop.history({ reference: { type: "TRANSFER" } });
    expect(new Set(movements.map(({ reference }) => reference?.id)).size).toBe(1);
    expect(movements.length).toBe(2);
    expect(() => shop.transfer("a", 1, { from: "x", to: "x" })).toThrow("same location");
    await whole(shop);
  });

  test("an order is spread over locations", async () => {
    const shop = stock(hf, { name: named() });
    for (const [location, quantity] of [
      ["east", 2],
      ["west", 3],
    ] as const)
      await shop.increase("a", quantity, { location });
    const { lines, short } = await shop.split([{ sku: "a", quantity: 4 }], { locations: ["west", "east"] });
    expect(lines).toEqual([
      { sku: "a", location: "east", quantity: -1 },
      { sku: "a", location: "west", quantity: -3 },
    ]);
    expect(short).toEqual([]);
    await shop.apply(lines);
    expect((await shop.levels()).map(({ onHand }) => onHand)).toEqual([1, 0]);
  });
});

describe("returns", () => {
  test("never more than was sold", async () => {
    const shop = await shopWith({ a: 10, b: 10 });
    await shop.apply(
      [
        { sku: "a", quantity: -3 },
        { sku: "b", quantity: -1 },
      ],
      { externalId: "sale" },
    );
    const back = { lines: [{ sku: "a", quantity: 2 }], externalId: "rma-1" };
    expect(await shop.return("sale", back)).toMatchObject({ lines: [{ quantity: 2, onHand: 9 }] });
    expect(await shop.return("sale", back)).toMatchObject({ replayed: true });
    const error = await failed(shop.return("sale", { lines: [{ sku: "a", quantity: 2 }] }), StockError);
    expect(error).toMatchObject({ code: "HF_STOCK_TOO_MUCH", id: "sale" });
    expect(error.message).toContain("1 of a at main");
    // The rest.
    expect((await shop.return("sale")).lines).toMatchObject([
      { sku: "a", quantity: 1 },
      { sku: "b", quantity: 1 },
    ]);
    expect(await shop.return("sale")).toMatchObject({ replayed: true });
    await failed(shop.return("sale", { externalId: "once more" }), StockError);
    await failed(shop.return("no such sale"), StockError);
    await failed(shop.return("sale", { lines: [{ sku: "zzz", quantity: 1 }] }), UnknownSkuError);
    expect((await shop.levels()).map(({ onHand }) => onHand)).toEqual([10, 10]);
    await whole(shop);
  });

  test("many at once of one sale", async () => {
    const shop = await shopWith({ a: 10 });
    const sale = await shop.decrease("a", 5);
    const results = await Promise.allSettled(
      Array.from({ length: 20 }, () => shop.return(sale.externalId, { lines: [{ sku: "a", quantity: 1 }] })),
    );
    expect(results.filter(({ status }) => status === "fulfilled").length).toBe(5);
    expect(await shop.level("a")).toMatchObject({ onHand: 10 });
    await whole(shop);
  });
});

describe("in the caller's transaction", () => {
  test("rolled back with it, and usable after a refusal", async () => {
    const shop = await shopWith({ a: 5, b: 5 });
    const lines = [
      { sku: "a", quantity: -1 },
      { sku: "b", quantity: -1 },
    ];
    await expect(
      hf.transaction(async (tx) => {
        await shop.apply(lines, { tx, externalId: "t" });
        await shop.reserve([{ sku: "a", quantity: 1 }], { tx, id: "r" });
        await shop.commit("r", { tx });
        await shop.transfer("a", 1, { tx, from: "main", to: "x" });
        await shop.return("t", { tx });
        await shop.adjustTo("b", 1, { tx });
        expect(await shop.level("b", { tx })).toMatchObject({ onHand: 1 });
        throw new Error("no");
      }),
    ).rejects.toThrow("no");
    expect((await shop.levels()).map(({ onHand, version }) => [onHand, version])).toEqual([
      [5, 1],
      [5, 1],
    ]);
    await hf.transaction(async (tx) => {
      await failed(shop.decrease("a", 6, { tx }), InsufficientStockError);
      await shop.apply(lines, { tx });
    });
    const client = await pool.connect();
    try {
      await client.query("BEGIN");
      await shop.apply(lines, { tx: hf.join(client) });
      await client.query("COMMIT");
    } finally {
      client.release();
    }
    expect((await shop.levels()).map(({ onHand }) => onHand)).toEqual([3, 3]);
    await whole(shop);
  });
});

describe("history", () => {
  test("by page, SKU, reference, source and time; sums by channel", async () => {
    const shop = await shopWith({ a: 100, b: 100 });
    for (let i = 0; i < 12; i++)
      await shop.decrease(i % 3 ? "a" : "b", 1 + i, {
        source: i % 2 ? "ML_SALE" : "ORDER",
        reference: { type: "order", id: String(i % 4) },
      });
    const all = (await shop.history()).movements;
    expect(all.length).toBe(14);
    const paged = [];
    for (let after: string | undefined; ;) {
      const page = await shop.history({ limit: 5, after });
      paged.push(...page.movements);
      after = page.next;
      if (after === undefined) break;
    }
    expect(paged).toEqual(all);
    expect((await shop.history({ sku: "b" })).movements.length).toBe(5);
    expect((await shop.history({ source: "ML_SALE" })).movements.length).toBe(6);
    expect((await shop.history({ reference: { type: "order", id: "3" } })).movements.length).toBe(3);
    const middle = all[6]?.at as Date;
    const newer = (await shop.history({ from: middle })).movements.length;
    expect(newer + (await shop.history({ to: middle })).movements.length).toBe(14);
    const channels = await shop.byChannel();
    expect(channels).toEqual([
      { source: "MANUAL", movements: 2, increased: 200, decreased: 0, net: 200 },
      { source: "ML_SALE", movements: 6, increased: 0, decreased: 42, net: -42 },
      { source: "ORDER", movements: 6, increased: 0, decreased: 36, net: -36 },
    ]);
    expect(await shop.byChannel({ to: new Date(0) })).toEqual([]);
  });

  test("of a SKU with many movements, a page reads about a page", async () => {
    const shop = stock(hf, { name: named() });
    const each = 20_000;
    for (const sku of ["MANY", "FEW"])
      for (const location of ["main", "east"]) await shop.apply([{ sku, location, quantity: 1 }]);
    await pool.query(
      `INSERT INTO holdfast.stock_movement (level, version, quantity, balance, at, line, parts, kind, source, external_id)
        SELECT t.id, n, 1, n, m.at - (${each} - n) / 2 * interval '1 second', 1, 1, 'apply', (ARRAY['POS', 'ML_SALE', 'ORDER'])[1 + n % 3], t.id || '-' || n
        FROM holdfast.stock_level t JOIN holdfast.stock_movement m ON m.level = t.id, generate_series(2, ${each}) n
        WHERE t.book = $1 AND t.sku = 'MANY'`,
      [shop.name],
    );
    await pool.query("ANALYZE holdfast.stock_movement");
    const name = "stock reader";
    const other = new Pool({ connectionString: database.url, max: 1, application_name: name });
    const far = holdfast(fromPg(other));
    const it = stock(far, { name: shop.name });
    const read = async (): Promise<number> => {
      const { rows } = await pool.query<{ n: number }>(
        "SELECT (seq_tup_read + idx_tup_fetch)::int AS n FROM pg_stat_user_tables WHERE relname = 'stock_movement'",
      );
      return rows[0]?.n as number;
    };
    await pool.query("SELECT pg_stat_force_next_flush()");
    const before = await read();
    const seen: string[] = [];
    let after: string | undefined;
    for (let page = 0; page < 20; page++) {
      const found = await it.history({ sku: "MANY", limit: 50, ...(after !== undefined && { after }) });
      seen.push(...found.movements.map(({ location, version }) => `${location} ${version}`));
      after = found.next;
    }
    const east = await it.history({ sku: "MANY", location: "east", source: "ML_SALE", limit: 50 });
    // A session tells what it has read when it ends, at the latest.
    await far.close();
    await other.end();
    await eventually(async () => {
      const { rows } = await pool.query("SELECT FROM pg_stat_activity WHERE application_name = $1", [name]);
      return rows.length === 0;
    });
    // 2,300 or so; all of it for each page would be 840,000.
    expect((await read()) - before).toBeLessThan(5 * each);
    const { rows } = await pool.query<{ location: string; version: number; source: string }>(
      `SELECT t.location, m.version::int, m.source FROM holdfast.stock_movement m JOIN holdfast.stock_level t ON t.id = m.level
        WHERE t.book = $1 AND t.sku = 'MANY' ORDER BY m.at DESC, m.level DESC, m.version DESC`,
      [shop.name],
    );
    expect(seen).toEqual(rows.slice(0, 1000).map(({ location, version }) => `${location} ${version}`));
    expect(east.movements.map(({ version }) => version)).toEqual(
      rows
        .filter(({ location, source }) => location === "east" && source === "ML_SALE")
        .slice(0, 50)
        .map(({ version }) => version),
    );
  });

  test("levelAt is what a replay of history comes to, at 100 random times", async () => {
    const seed = inject("seed");
    const next = random(seed);
    const shop = await shopWith({ a: 50, b: 50 });
    for (let i = 0; i < 150; i++) {
      const sku = next() < 0.5 ? "a" : "b";
      const quantity = Math.ceil(next() * 4);
      await (next() < 0.5 ? shop.increase(sku, quantity) : shop.decrease(sku, quantity)).catch(() => {});
    }
    const movements = (await shop.history({ limit: 1000 })).movements.toReversed();
    const [first, last] = [movements[0]?.at.getTime() ?? 0, movements.at(-1)?.at.getTime() ?? 0];
    for (let i = 0; i < 100; i++) {
      const time = new Date(Math.floor(first - 5 + next() * (last - first + 10)));
      for (const sku of ["a", "b"]) {
        const replayed = movements
          .filter((each) => each.sku === sku && each.at <= time)
          .reduce((sum, { quantity }) => sum + quantity, 0);
        expect(await shop.levelAt(sku, time), `HOLDFAST_SEED=${seed} ${time.toISOString()}`).toBe(replayed);
      }
    }
    expect(await shop.levelAt("a", new Date())).toBe((await shop.level("a")).onHand);
    expect(await shop.levelAt("never", new Date())).toBe(0);
  });
});

describe("reconcile", () => {
  const tamper = (shop: Stock, text: string) =>
    pool.query(
      text.replaceAll("$level", "(SELECT id FROM holdfast.stock_level WHERE book = $1 AND sku = 'a')"),
      [shop.name],
    );

  const faults: [string, string, number][] = [
    ["level", "UPDATE holdfast.stock_level SET on_hand = on_hand + 3 WHERE id = $level", 3],
    [
      "chain",
      "UPDATE holdfast.stock_movement SET balance = balance + 2 WHERE level = $level AND version = 2",
      2,
    ],
    ["gap", "DELETE FROM holdfast.stock_movement WHERE level = $level AND version = 2", 0],
    ["version", "UPDATE holdfast.stock_level SET version = version + 1 WHERE id = $level", 0],
    ["reserved", "UPDATE holdfast.stock_level SET reserved = reserved + 1 WHERE id = $level", 1],
    ["reserved", "DELETE FROM holdfast.stock_reserved WHERE level = $level", 2],
  ];
  const both = [undefined, "levels"] as const;

  test.each(faults.flatMap((fault) => both.map((trust) => [...fault, trust] as const)))(
    "finds a broken %s, says where, and repairs it by a movement (%#)",
    async (problem, text, difference, trust) => {
      const shop = await shopWith({ a: 10, b: 10 });
      await shop.decrease("a", 1);
      await shop.decrease("a", 1);
      await shop.reserve([{ sku: "a", quantity: 2 }]);
      const { onHand } = await shop.level("a");
      await tamper(shop, text);
      const found = await shop.reconcile();
      expect(found).toMatchObject({ ok: false, levels: 2, repaired: false });
      expect(found.findings).toContainEqual(expect.objectContaining({ sku: "a", problem, difference }));
      expect(
        found.findings.every(({ sku, text: words }) => sku === "a" && words.startsWith("a at main: ")),
      ).toBe(true);
      const { onHand: now } = await shop.level("a");
      expect(await shop.reconcile({ repair: true, by: "ada", ...(trust && { trust }) })).toMatchObject({
        repaired: true,
      });
      await whole(shop);
      // A change that no movement made is taken back, unless the levels are to be trusted.
      const right = trust === "levels" ? now : onHand;
      expect((await shop.level("a")).onHand).toBe(right);
      expect(problem === "level" ? now - 3 : now).toBe(onHand);
      const { movements } = await shop.history({ sku: "a" });
      expect(movements[0]).toMatchObject({ kind: "repair", by: "ada", balance: right });
      expect(movements[0]?.note).toContain("a at main");
      await shop.decrease("a", 1);
      await whole(shop);
    },
  );

  test("what the movements come to is refused if more than that is reserved", async () => {
    const shop = await shopWith({ a: 2 });
    await tamper(shop, "UPDATE holdfast.stock_level SET on_hand = on_hand + 5 WHERE id = $level");
    await shop.reserve([{ sku: "a", quantity: 6 }]);
    await expect(shop.reconcile({ repair: true })).rejects.toThrow(
      /movements of a at main come to 2, and 6 are reserved.*trust the levels/,
    );
    expect((await shop.level("a")).onHand).toBe(7);
    await shop.reconcile({ repair: true, trust: "levels" });
    await whole(shop);
    await expect(shop.reconcile({ trust: "level" as never })).rejects.toThrow(
      /trust must be "ledger" or "levels"/,
    );
  });
});

test("the textbook (SERIALIZABLE, FOR UPDATE, a row per movement) is exact too", async () => {
  await pool.query("CREATE TABLE variant (sku text PRIMARY KEY, stock int NOT NULL CHECK (stock >= 0))");
  await pool.query(
    "CREATE TABLE movement (external_id text, sku text, quantity int, balance_after int, PRIMARY KEY (external_id, sku))",
  );
  await pool.query("INSERT INTO variant VALUES ('a', 20), ('b', 1000)");
  const tables = { variants: "variant", movements: "movement" };
  const sold = await Promise.all(
    Array.from({ length: 60 }, (_, i) =>
      sell(pool, tables, `order-${i % 40}`, [
        { sku: "b", quantity: 1 },
        { sku: "a", quantity: 1 },
      ]),
    ),
  );
  expect(sold.filter(Boolean).length).toBeGreaterThanOrEqual(20);
  const { rows } = await pool.query(
    "SELECT sku, stock, (SELECT sum(quantity)::int FROM movement m WHERE m.sku = v.sku) AS moved FROM variant v ORDER BY sku",
  );
  expect(rows).toEqual([
    { sku: "a", stock: 0, moved: -20 },
    { sku: "b", stock: 980, moved: -20 },
  ]);
});

describe("the last 100 of one SKU", () => {
  const worker = new URL("./workers/stock-sale.ts", import.meta.url);

  async function sale(name: string, processes: number, attempts: number, naive: boolean) {
    const workers = Array.from({ length: processes }, (_, i) => {
      const own = Math.floor((attempts * (i + 1)) / processes) - Math.floor((attempts * i) / processes);
      const arg: SaleArg = { url: database.url, name, attempts: own, callers: 4, naive };
      return startWorker<SaleResult>(worker, arg);
    });
    try {
      // All of them begin when all of them are there.
      for (const each of workers) await each.message("ready");
      for (const each of workers) each.send("go");
      const results = await Promise.all(workers.map(({ result }) => result));
      const sum = (of: "sold" | "short") => results.reduce((total, each) => total + each[of], 0);
      return { sold: sum("sold"), short: sum("short"), errors: results.flatMap(({ errors }) => errors) };
    } finally {
      for (const each of workers) each.sigkill();
    }
  }

  test("16 processes, 1,000 attempts: 100 sold, 900 refused, no deadlock", async () => {
    const shop = await shopWith({ LAST: 100 });
    const before = await deadlocks();
    expect(await sale(shop.name, 16, 1000, false)).toEqual({ sold: 100, short: 900, errors: [] });
    expect(await shop.level("LAST")).toMatchObject({ onHand: 0, version: 101 });
    const { movements } = await shop.history({ sku: "LAST", limit: 1000 });
    expect(movements.reduce((sum, { quantity }) => sum + quantity, 0)).toBe(0);
    expect(await deadlocks()).toBe(before);
    await whole(shop);
  });

  test("the same attempts, by reading and then writing, sell more than there is", async () => {
    const shop = await shopWith({ LAST: 100 });
    const { sold, errors } = await sale(shop.name, 4, 400, true);
    expect(errors).toEqual([]);
    expect(sold).toBeGreaterThan(100);
  });
});
