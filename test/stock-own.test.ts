/** Stock whose quantities stay in a table of the shop's own. */
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import {
  InsufficientStockError,
  type OwnLevels,
  type Stock,
  StockError,
  UnknownSkuError,
  stock,
} from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type Backend, backends } from "./backends.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { missing, placeFor } from "./harness/places.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;
let shop: Stock;
let made = 0;

const levels: OwnLevels = { table: "product_variants", sku: "sku", onHand: "stock" };

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

beforeEach(async () => {
  await pool.query("DROP TABLE IF EXISTS product_variants");
  await pool.query(
    "CREATE TABLE product_variants (id serial PRIMARY KEY, sku text UNIQUE NOT NULL, title text, stock int NOT NULL)",
  );
  await pool.query("INSERT INTO product_variants (sku, stock) VALUES ('CAP', 5), ('MUG', 20), ('SHIRT', 0)");
  shop = stock(hf, { name: `own ${++made}`, levels });
});

async function inTable(): Promise<Record<string, number>> {
  const { rows } = await pool.query<{ sku: string; stock: number }>(
    "SELECT sku, stock FROM product_variants",
  );
  return Object.fromEntries(rows.map((row) => [row.sku, row.stock]));
}

async function refused(work: Promise<unknown>, type: new (...args: never[]) => Error): Promise<Error> {
  const error: unknown = await work.catch((e: unknown) => e);
  expect(error).toBeInstanceOf(type);
  return error as Error;
}

test("what is there is where it begins; movements are written beside it", async () => {
  expect(await shop.level("CAP")).toMatchObject({ onHand: 5, available: 5, version: 0 });
  const lines = [
    { sku: "CAP", quantity: -2 },
    { sku: "MUG", quantity: -1 },
  ];
  // An id that Holdfast used for its own first entry.
  const options = { externalId: "opening", source: "ML_SALE" } as const;
  expect(await shop.apply(lines, options)).toMatchObject({ lines: [{ onHand: 3 }, { onHand: 19 }] });
  expect(await shop.apply(lines, options)).toMatchObject({ replayed: true });
  expect(await inTable()).toEqual({ CAP: 3, MUG: 19, SHIRT: 0 });
  await refused(shop.apply([...lines, { sku: "SHIRT", quantity: -1 }]), InsufficientStockError);
  await refused(shop.decrease("NOPE", 1), UnknownSkuError);
  // A restock does not make a product.
  await refused(shop.increase("NOPE", 1), UnknownSkuError);
  const { movements } = await shop.history({ sku: "CAP" });
  expect(movements.map(({ kind, quantity, balance }) => [kind, quantity, balance])).toEqual([
    ["apply", -2, 3],
    ["opening", 5, 5],
  ]);
  expect(await shop.reconcile()).toMatchObject({ ok: true });
});

test("a trigger on it finds what it names by the caller's search path", async () => {
  await pool.query(`CREATE SCHEMA IF NOT EXISTS store; DROP TABLE IF EXISTS store.variants, store.seen;
    CREATE TABLE store.variants (sku text PRIMARY KEY, stock int NOT NULL); CREATE TABLE store.seen (sku text, stock int);
    INSERT INTO store.variants VALUES ('CAP', 5);
    CREATE OR REPLACE FUNCTION store.note() RETURNS trigger LANGUAGE plpgsql AS
      $$ BEGIN INSERT INTO seen SELECT NEW.sku, NEW.stock; RETURN NULL; END $$;
    CREATE TRIGGER note AFTER UPDATE ON store.variants FOR EACH ROW EXECUTE FUNCTION store.note()`);
  const there = new URL(database.url);
  there.searchParams.set("options", "-c search_path=store");
  const theirs = new Pool({ connectionString: there.href, max: 2 });
  const inStore = holdfast(fromPg(theirs));
  try {
    const shelf = stock(inStore, { name: `own ${++made}`, levels: { ...levels, table: "variants" } });
    await shelf.decrease("CAP", 2);
    await inStore.transaction(async (tx) => {
      await tx.client.query("SET LOCAL search_path = store, public");
      await shelf.decrease("CAP", 1, { tx });
      expect((await tx.client.query("SHOW search_path")).rows).toEqual([{ search_path: "store, public" }]);
      expect(await shelf.levels({ tx, limit: 5 })).toMatchObject([{ sku: "CAP", onHand: 2 }]);
    });
    await theirs.query("UPDATE variants SET stock = 9");
    expect(await shelf.reconcile({ repair: true })).toMatchObject({ ok: false });
    expect((await theirs.query("SELECT stock FROM seen")).rows.map(({ stock: n }) => Number(n))).toEqual([
      3, 2, 9, 2,
    ]);
    await expect(
      stock(hf, { name: "no", levels: { ...levels, table: "variants" } }).level("CAP"),
    ).rejects.toThrow('relation "variants" does not exist');
  } finally {
    await inStore.close();
    await theirs.end();
  }
});

test("reservations, returns, counts and minimums", async () => {
  const kept = await shop.reserve([{ sku: "CAP", quantity: 4 }]);
  expect(await shop.level("CAP")).toMatchObject({ onHand: 5, reserved: 4, available: 1 });
  expect(await inTable()).toMatchObject({ CAP: 5 });
  await refused(shop.decrease("CAP", 2), InsufficientStockError);
  const sold = await kept.commit();
  expect(await inTable()).toMatchObject({ CAP: 1 });
  await shop.return(sold.externalId, { lines: [{ sku: "CAP", quantity: 1 }] });
  await refused(shop.return(sold.externalId, { lines: [{ sku: "CAP", quantity: 4 }] }), StockError);
  await shop.adjustTo("SHIRT", 7);
  await shop.setMinimum("SHIRT", 5);
  await refused(shop.decrease("SHIRT", 3), InsufficientStockError);
  expect(await inTable()).toEqual({ CAP: 2, MUG: 20, SHIRT: 7 });
  expect(await shop.reconcile()).toMatchObject({ ok: true });
});

test("many at once: never oversold", async () => {
  const results = await Promise.allSettled(
    Array.from({ length: 40 }, (_, i) =>
      shop.apply([
        { sku: "MUG", quantity: -1 },
        { sku: i % 2 ? "CAP" : "SHIRT", quantity: i % 2 ? -1 : 1 },
      ]),
    ),
  );
  const table = await inTable();
  expect(table["CAP"]).toBeGreaterThanOrEqual(0);
  expect(table["MUG"]).toBe(20 - results.filter(({ status }) => status === "fulfilled").length);
  expect(await shop.reconcile()).toMatchObject({ ok: true });
});

test("in the caller's transaction", async () => {
  await expect(
    hf.transaction(async (tx) => {
      await shop.decrease("CAP", 1, { tx });
      throw new Error("no");
    }),
  ).rejects.toThrow("no");
  expect(await inTable()).toMatchObject({ CAP: 5 });
  expect((await shop.history()).movements).toEqual([]);
});

describe("changes behind its back", () => {
  test("are found and explained, also after later movements, and repaired by a movement", async () => {
    expect(await shop.adopt()).toBe(3);
    expect(await shop.adopt()).toBe(0);
    await pool.query("UPDATE product_variants SET stock = stock + 3 WHERE sku = 'CAP'");
    const now = await shop.reconcile();
    expect(now.findings).toContainEqual(
      expect.objectContaining({ sku: "CAP", problem: "level", difference: 3 }),
    );
    expect(now.findings.map(({ text }) => text).join()).toContain("changed by +3 without a movement");
    await shop.decrease("CAP", 1);
    expect(await inTable()).toMatchObject({ CAP: 7 });
    const later = await shop.reconcile();
    expect(later.findings).toContainEqual(
      expect.objectContaining({ sku: "CAP", problem: "chain", difference: 3 }),
    );
    expect(await shop.reconcile({ repair: true, trust: "levels" })).toMatchObject({ repaired: true });
    expect(await shop.reconcile()).toMatchObject({ ok: true });
    // What the table says stays.
    expect(await inTable()).toMatchObject({ CAP: 7 });
    expect((await shop.history({ sku: "CAP" })).movements[0]).toMatchObject({ kind: "repair", quantity: 3 });
    // Else the table is set to what the movements come to, also where a trigger guards it.
    for (const statement of shop.guardSql()) await pool.query(statement);
    await pool.query(
      "SET holdfast.stock = 'on'; UPDATE product_variants SET stock = 70 WHERE sku = 'CAP'; RESET holdfast.stock",
    );
    expect(await shop.reconcile({ repair: true })).toMatchObject({ repaired: true });
    expect(await shop.reconcile()).toMatchObject({ ok: true });
    expect(await inTable()).toMatchObject({ CAP: 7 });
    expect((await shop.history({ sku: "CAP" })).movements[0]).toMatchObject({ kind: "repair", quantity: 0 });
    await pool.query("DROP TRIGGER holdfast_stock_guard ON product_variants");
    await shop.decrease("CAP", 1);
    expect(await shop.reconcile()).toMatchObject({ ok: true });
  });

  test("what was reserved and is gone cannot be committed; a restock is not refused", async () => {
    const kept = await shop.reserve([{ sku: "CAP", quantity: 4 }]);
    await pool.query("UPDATE product_variants SET stock = 0 WHERE sku = 'CAP'");
    await refused(kept.commit(), InsufficientStockError);
    await shop.increase("CAP", 4);
    await kept.commit();
    expect(await inTable()).toMatchObject({ CAP: 0 });
  });

  test("are refused with the trigger that is offered", async () => {
    for (const text of shop.guardSql()) await pool.query(text);
    // Again: migrations may run twice.
    for (const text of shop.guardSql()) await pool.query(text);
    await expect(pool.query("UPDATE product_variants SET stock = 1")).rejects.toThrow(
      "through movements only",
    );
    await expect(
      hf.transaction(async (tx) => {
        await shop.decrease("CAP", 1, { tx });
        await tx.client.query("UPDATE product_variants SET stock = 100");
      }),
    ).rejects.toThrow("through movements only");
    await pool.query("UPDATE product_variants SET title = 'A cap' WHERE sku = 'CAP'");
    await shop.apply([
      { sku: "CAP", quantity: -1 },
      { sku: "SHIRT", quantity: 4 },
    ]);
    expect(await inTable()).toMatchObject({ CAP: 4, SHIRT: 4 });
  });
});

test("names of any kind, with a schema, locations and minimums of its own, and a number as SKU", async () => {
  await pool.query('DROP SCHEMA IF EXISTS "my shop" CASCADE');
  await pool.query('CREATE SCHEMA "my shop"');
  await pool.query(
    'CREATE TABLE "my shop"."Order""s" ("S K U" int, "Where" varchar(20), "n" numeric NOT NULL, "least" int NOT NULL, PRIMARY KEY ("S K U", "Where"))',
  );
  await pool.query(
    `INSERT INTO "my shop"."Order""s" VALUES (1, 'east', 5, 2), (1, 'west', 1, -1), (2, 'east', 9, 0)`,
  );
  const own = stock(hf, {
    name: `own ${++made}`,
    levels: {
      table: ["my shop", 'Order"s'],
      sku: "S K U",
      onHand: "n",
      location: "Where",
      minLevel: "least",
    },
  });
  expect((await own.levels()).map(({ sku, location, available }) => [sku, location, available])).toEqual([
    ["1", "east", 3],
    ["1", "west", 2],
    ["2", "east", 9],
  ]);
  await own.transfer("1", 3, { from: "east", to: "west" });
  await own.decrease("1", 5, { location: "west" });
  await refused(own.decrease("1", 1, { location: "west" }), InsufficientStockError);
  await refused(own.decrease("2", 1, { location: "west" }), UnknownSkuError);
  await expect(own.setMinimum("1", 0, { location: "west" })).rejects.toThrow("least");
  const { rows } = await pool.query('SELECT "n"::int FROM "my shop"."Order""s" ORDER BY 1');
  expect(rows.map(({ n }) => n)).toEqual([-1, 2, 9]);
  expect(await own.reconcile()).toMatchObject({ ok: true });
});

describe("only the column's own text is that SKU, since another spelling would be sold a second time", () => {
  const [lower, upper] = ["0f8fad5b-d9cb-469f-a165-70867728950e", "0F8FAD5B-D9CB-469F-A165-70867728950E"];
  for (const [type, sku, others] of [
    ["uuid", lower, [upper, lower.replaceAll("-", "")]],
    ["int", "7", ["007", "+7", " 7"]],
    ["numeric(6,2)", "7.00", ["7", "7.0"]],
    ["char(6)", "CAP", ["CAP ", "CAP   ", "cap"]],
    ["varchar(6)", "CAP", ["CAP ", "cap"]],
    ["citext", "Cap", ["CAP", "cap"]],
    ["text COLLATE any_case", "Cap", ["CAP", "cap"]],
  ] as const)
    test(`a column of ${type}`, async () => {
      await pool.query("CREATE EXTENSION IF NOT EXISTS citext");
      await pool.query(
        "CREATE COLLATION IF NOT EXISTS any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
      );
      await pool.query("DROP TABLE IF EXISTS spelled");
      const where = type === "int" ? "text" : type;
      await pool.query(
        `CREATE TABLE spelled (sku ${type} NOT NULL, place ${where} NOT NULL, n int NOT NULL, PRIMARY KEY (sku, place))`,
      );
      await pool.query("INSERT INTO spelled VALUES ($1, $2, 1)", [sku, sku]);
      const own = stock(hf, {
        name: `own ${++made}`,
        levels: { table: "spelled", sku: "sku", onHand: "n", location: "place" },
      });
      for (const other of others) {
        await refused(own.decrease(other, 1, { location: sku }), UnknownSkuError);
        await refused(own.decrease(sku, 1, { location: other }), UnknownSkuError);
        await refused(own.level(other, { location: sku }), UnknownSkuError);
        await refused(
          own.apply([
            { sku, quantity: -1, location: sku },
            { sku: other, quantity: -1, location: sku },
          ]),
          UnknownSkuError,
        );
      }
      await own.decrease(sku, 1, { location: sku });
      await refused(own.decrease(sku, 1, { location: sku }), InsufficientStockError);
      expect((await pool.query("SELECT n FROM spelled")).rows).toEqual([{ n: 0 }]);
      expect(await own.levels()).toMatchObject([{ sku, location: sku, onHand: 0 }]);
      expect(await own.reconcile()).toMatchObject({ ok: true });
    });
});

test("a table or column that is not there is named", async () => {
  const wrong = (own: Partial<OwnLevels>) => stock(hf, { levels: { ...levels, ...own } }).level("CAP");
  await expect(wrong({ table: "nothing" })).rejects.toThrow("nothing");
  await expect(wrong({ sku: "code" })).rejects.toThrow("code");
  await expect(wrong({ onHand: "n" })).rejects.toThrow("n");
  expect(() => stock(hf, { levels: { ...levels, onHand: "" } })).toThrow("name of a table or column");
});

describe.each(
  ["pg for Citus", "mysql2 on MySQL", "mysql2 on MariaDB", "better-sqlite3"].map(
    (name) => backends.find((each) => each.name === name) as Backend,
  ),
)("$name", (backend) => {
  test("a table of the shop's own is refused, and the recipe for one is named", async ({ skip }) => {
    const lacking = missing(backend);
    skip(lacking !== undefined, lacking);
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const there = holdfast(site.database);
    try {
      await there.migrate();
      const own = stock(there, { name: "own", levels });
      const calls = [
        () => own.level("CAP"),
        () => own.levels(),
        () => own.decrease("CAP", 1),
        () => own.reserve([{ sku: "CAP", quantity: 1 }]),
        () => own.setMinimum("CAP", 1),
        () => own.history(),
        () => own.byChannel(),
        () => own.reconcile(),
        () => own.adopt(),
      ];
      for (const call of calls)
        await expect(call(), String(call)).rejects.toMatchObject({
          code: "HF_UNSUPPORTED",
          message: expect.stringContaining("examples/recipe-stock"),
        });
      // Without it there is stock, in tables of Holdfast's own.
      await stock(there).increase("CAP", 3);
      expect(await stock(there).level("CAP")).toMatchObject({ onHand: 3 });
    } finally {
      await there.close();
      await site.close();
      await place.drop();
    }
  });
});
