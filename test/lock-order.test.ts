/** Locks that are taken in different orders: seen before they are a deadlock, also by processes that never met. */
import { execFile } from "node:child_process";
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { promisify } from "node:util";
import { PrismaPg } from "@prisma/adapter-pg";
import { eq } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import { integer, pgTable } from "drizzle-orm/pg-core";
import {
  type Events,
  HazardError,
  type OrderStep,
  type Transaction,
  holdfast,
  key,
  rows,
  shared,
} from "holdfast";
import { fromDrizzle } from "holdfast/drizzle";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { fromPrisma } from "holdfast/prisma";
import { createPool } from "mysql2/promise";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, onTestFinished, test } from "vitest";
import { PrismaClient } from "./generated/prisma/client.ts";
import { command, root } from "./harness/command.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

const inversions: (readonly OrderStep[])[] = [];
const listen = (event: unknown) => void inversions.push((event as Events["holdfast:order:inverted"]).steps);
const folder = mkdtempSync(join(tmpdir(), "holdfast-order-"));
let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  subscribe("holdfast:order:inverted", listen);
  if (unavailable("postgres")) return;
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 5 });
  const tables = ["orders", "stock", "invoice", "shelf", "parcel", "van"];
  for (const table of tables) {
    await pool.query(`CREATE TABLE ${table} (id int PRIMARY KEY, n int NOT NULL)`);
    await pool.query(`INSERT INTO ${table} VALUES (1, 100), (2, 100)`);
  }
  await pool.query(`CREATE SCHEMA shop;
    CREATE TABLE upload (id serial PRIMARY KEY, user_id text NOT NULL, bytes integer NOT NULL);
    CREATE TABLE shop.product (id integer PRIMARY KEY, name text NOT NULL UNIQUE, stock integer NOT NULL)`);
});

afterAll(async () => {
  unsubscribe("holdfast:order:inverted", listen);
  rmSync(folder, { recursive: true, force: true });
  await pool?.end();
  await database?.drop();
});

/** What was told since. */
function since(): () => string[][] {
  const from = inversions.length;
  return () => inversions.slice(from).map((steps) => steps.map((step) => `${step.from} → ${step.to}`));
}

const open = () => holdfast(fromPg(pool), { hazards: "count" });
const places = /lock-order\.test\.ts:\d+:\d+$/;

describe("two tests that never run at the same time", () => {
  test("an order takes its stock: orders → stock", async () => {
    const found = since();
    const hf = open();
    await hf.transaction(async (tx) => {
      await tx.rows("orders", [1]);
      await tx.client.query("UPDATE stock SET n = n - 1 WHERE id = 1");
    });
    await hf.close();
    expect(found()).toEqual([]);
  });

  test("a delivery looks for orders that wait: stock → orders, which is told with all four places, once", async () => {
    const found = since();
    const hf = open();
    const deliver = () =>
      hf.transaction(async (tx) => {
        await tx.client.query("UPDATE stock SET n = n + 1 WHERE id = 1");
        await tx.client.query("SELECT * FROM orders WHERE id = 1 FOR UPDATE");
      });
    await deliver();
    await deliver();
    await hf.close();
    expect(found()).toEqual([["table stock → table orders", "table orders → table stock"]]);
    const steps = inversions.at(-1) as readonly OrderStep[];
    for (const { first, second } of steps) {
      expect(first).toMatch(places);
      expect(second).toMatch(places);
    }
    expect(new Set(steps.flatMap(({ first, second }) => [first, second])).size).toBe(4);
  });
});

test("keys and rows, over three: told when the third step leads back", async () => {
  const found = since();
  const hf = open();
  const pair = (a: string, b: string) =>
    hf.transaction(async (tx) => {
      await tx.lock(key(a, 1));
      await tx.lock(key(b, 1));
    });
  await pair("one", "two");
  await pair("two", "three");
  expect(found()).toEqual([]);
  await pair("three", "one");
  expect(found()).toEqual([["key three → key one", "key one → key two", "key two → key three"]]);
  await hf.close();
});

test("two keys of one namespace, one after the other, in whatever order they come", async () => {
  const found = since();
  const hf = open();
  const transfer = (from: number, to: number) =>
    hf.transaction(async (tx) => {
      await tx.lock(key("wallet", from));
      await tx.lock(key("wallet", to));
    });
  await transfer(1, 2);
  expect(found()).toEqual([]);
  await transfer(2, 1);
  expect(found()).toEqual([["key wallet → key wallet", "key wallet → key wallet"]]);
  await hf.close();
});

test("a transaction inside of another: who waits there holds what is locked here", async () => {
  const found = since();
  const hf = open();
  const nested = (outer: string, inner: string) =>
    hf.transaction({ lock: key(outer, 1) }, () =>
      hf.transaction({ separate: true }, async (tx) => {
        await tx.lock(key(inner, 1));
      }),
    );
  await nested("outer", "inner");
  await hf.transaction({ lock: key("inner", 1) }, () =>
    hf.transaction({ separate: true, lock: key("outer", 1) }, async () => {}),
  );
  expect(found()).toEqual([["key inner → key outer", "key outer → key inner"]]);
  await hf.close();
});

test("transactions that the caller opens, one after the other in a loop: those that are over hold nothing", async () => {
  const found = since();
  // The end of a transaction is told by this client, and not by that one.
  const [one, other] = [open(), await pool.connect()];
  const file = new DatabaseSync(":memory:");
  const unsettled = holdfast(fromNodeSqlite(file), { hazards: "count" });
  onTestFinished(async () => {
    other.release(true);
    await one.close();
    await unsettled.close();
  });
  await unsettled.migrate();
  for (const name of ["first", "second", "first", "second"]) {
    await other.query("BEGIN");
    await one.join(other).lock(key(`told-${name}`, 1));
    await other.query("COMMIT");
    file.exec("BEGIN IMMEDIATE");
    await unsettled.join(file).lock(key(`untold-${name}`, 1));
    file.exec("COMMIT");
  }
  expect(found()).toEqual([]);
  // Inside of one of them it is seen.
  for (const [a, b] of [
    ["x", "y"],
    ["y", "x"],
  ] as const) {
    await other.query("BEGIN");
    await one.join(other).lock(key(`told-${a}`, 1));
    await one.join(other).lock(key(`told-${b}`, 1));
    await other.query("COMMIT");
    file.exec("BEGIN IMMEDIATE");
    const tx = unsettled.join(file);
    await tx.lock(key(`untold-${a}`, 1));
    await tx.lock(key(`untold-${b}`, 1));
    file.exec("COMMIT");
  }
  expect(found()).toEqual([
    ["key told-y → key told-x", "key told-x → key told-y"],
    ["key untold-y → key untold-x", "key untold-x → key untold-y"],
  ]);
});

test("those who share a lock do not wait for each other: only what is in the way everywhere is a round", async () => {
  const found = since();
  const hf = open();
  type Lock = (tx: Transaction<PoolClient>) => Promise<unknown>;
  const take = (...locks: readonly Lock[]) =>
    hf.transaction(async (tx) => {
      for (const lock of locks) await lock(tx);
    });
  const menu: Lock = (tx) => tx.lock(key("menu", 1));
  const menuShared: Lock = (tx) => tx.lock(shared(key("menu", 1)));
  const wine: Lock = (tx) => tx.rows("van", [1]);
  const wineShared: Lock = (tx) => tx.rows("van", [1], { for: "share" });
  await take(menuShared, wineShared);
  await take(wineShared, menuShared);
  await take(wine, menuShared);
  expect(found()).toEqual([]);
  // Who shares the menu and wants the wine, and who has the wine and shares the menu, do not meet at the menu.
  await take(menuShared, wine);
  expect(found()).toEqual([]);
  await take(wineShared, menu);
  expect(found()).toEqual([["table van → key menu", "key menu → table van"]]);
  await hf.close();
});

test("places: of what was locked before anybody listened, as soon as it is seen again", async () => {
  unsubscribe("holdfast:order:inverted", listen);
  const hf = open();
  const pair = (a: string, b: string) =>
    hf.transaction({ lock: key(a, 1) }, async (tx) => {
      await tx.lock(key(b, 1));
    });
  await pair("unheard", "heard");
  subscribe("holdfast:order:inverted", listen);
  await pair("unheard", "heard");
  const found = since();
  await pair("heard", "unheard");
  await hf.close();
  expect(found()).toEqual([["key heard → key unheard", "key unheard → key heard"]]);
  for (const { first, second } of inversions.at(-1) ?? []) {
    expect(first).toMatch(places);
    expect(second).toMatch(places);
  }
});

test("in one call there is one order, and who does not wait is in no deadlock", async () => {
  const found = since();
  const hf = open();
  await hf.transaction(async (tx) => tx.lockAll([rows("shelf", [1]), key("till", 1), rows("invoice", [1])]));
  await hf.transaction(async (tx) => tx.lockAll([rows("invoice", [1]), rows("shelf", [1]), key("till", 1)]));
  await hf.transaction({ lock: [key("x", 1), key("y", 1)] }, async () => {});
  await hf.transaction({ lock: [key("y", 2), key("x", 2)] }, async () => {});
  await hf.transaction({ lock: key("p", 1) }, (tx) => tx.lock(key("q", 1)));
  await hf.transaction({ lock: key("q", 1) }, async (tx) => void (await tx.tryLock(key("p", 1))));
  expect(found()).toEqual([]);
  await hf.close();
});

test("it is told while the second lock is still waited for", async () => {
  const found = since();
  const hf = open();
  await hf.transaction({ lock: key("early", 1) }, (tx) => tx.lock(key("late", 1)));
  const taken = Promise.withResolvers<void>();
  const leave = Promise.withResolvers<void>();
  const holder = hf.transaction({ lock: key("early", 1) }, async () => {
    taken.resolve();
    await leave.promise;
  });
  await taken.promise;
  let granted = false;
  const waiter = hf.transaction({ lock: key("late", 1), wait: 60_000 }, async (tx) => {
    await tx.lock(key("early", 1), { wait: 60_000 });
    granted = true;
  });
  await eventually(() => expect(found()).toHaveLength(1));
  expect(granted).toBe(false);
  leave.resolve();
  await Promise.all([holder, waiter]);
  await hf.close();
});

test('"throw": the transaction that is in another order fails, with both', async () => {
  const hf = holdfast(fromPg(pool), { hazards: "throw" });
  await hf.transaction({ lock: key("left", 1) }, (tx) => tx.lock(key("right", 1)));
  const other = hf.transaction({ lock: key("right", 1) }, (tx) => tx.lock(key("left", 1)));
  const error = (await other.catch((thrown: unknown) => thrown)) as HazardError;
  expect(error).toBeInstanceOf(HazardError);
  expect(error.kind).toBe("order");
  expect(error.message.match(/lock-order\.test\.ts:\d+:\d+/g)?.length).toBeGreaterThanOrEqual(4);
  await hf.close();
});

test("Drizzle: what its builder writes", async () => {
  const found = since();
  const [parcel, van] = ["parcel", "van"].map((name) =>
    pgTable(name, { id: integer().primaryKey(), n: integer().notNull() }),
  ) as [ReturnType<typeof table>, ReturnType<typeof table>];
  const hf = holdfast(fromDrizzle(drizzle(pool)), { hazards: "count" });
  const both = (tables: readonly (typeof parcel)[]) =>
    hf.transaction(async ({ client }) => {
      for (const each of tables) await client.update(each).set({ n: 1 }).where(eq(each.id, 1));
    });
  await both([parcel, van]);
  await both([van, parcel]);
  await hf.close();
  expect(found()).toEqual([["table van → table parcel", "table parcel → table van"]]);
});
const table = () => pgTable("t", { id: integer().primaryKey(), n: integer().notNull() });

test("Prisma: what its models write", async () => {
  const found = since();
  const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: database.url, max: 2 }) });
  const hf = holdfast(fromPrisma(prisma), { hazards: "count" });
  await hf.transaction(async ({ client }) => {
    await client.upload.updateMany({ where: { id: 1 }, data: { bytes: 1 } });
    await client.product.updateMany({ where: { id: 1 }, data: { stock: 1 } });
  });
  await hf.transaction(async ({ client }) => {
    await client.product.updateMany({ where: { id: 1 }, data: { stock: 2 } });
    await client.upload.deleteMany({ where: { id: 1 } });
  });
  await hf.close();
  await prisma.$disconnect();
  expect(found()).toEqual([["table product → table upload", "table upload → table product"]]);
});

test("mysql2 on MariaDB", async ({ skip }) => {
  skip(unavailable("mariadb") !== undefined, unavailable("mariadb"));
  const found = since();
  const maria = await createDatabase("mariadb");
  const clients = createPool({ uri: maria.url, connectionLimit: 3 });
  for (const name of ["till", "receipt"])
    await clients.query(`CREATE TABLE ${name} (id int PRIMARY KEY, n int)`);
  const hf = holdfast(fromMysql2(clients), { hazards: "count" });
  await hf.transaction(async ({ client }) => {
    await client.query("UPDATE `till` SET n = 1 WHERE id = ?", [1]);
    await client.execute("DELETE FROM receipt WHERE id = ?", [1]);
  });
  await hf.transaction(async (tx) => {
    await tx.rows("receipt", [1], { missing: "report" });
    await tx.client.query({ sql: "REPLACE INTO till VALUES (1, 1)" });
  });
  await hf.close();
  await clients.end();
  await maria.drop();
  expect(found()).toEqual([["table receipt → table till", "table till → table receipt"]]);
});

describe("holdfast order", () => {
  const run = (file: string, first: string) =>
    promisify(execFile)(
      process.execPath,
      ["--conditions=holdfast-source", `${root}test/workers/lock-order.ts`, database.url, first],
      { env: { ...process.env, HOLDFAST_ORDER: file } },
    );

  test("two processes, one after the other: the round is found, with the places of both", async () => {
    const [one, two] = ["one.jsonl", "two.jsonl"].map((name) => join(folder, name)) as [string, string];
    await run(one, "order");
    expect(await command(["order", one])).toMatchObject({
      code: 0,
      out: expect.stringContaining("All take them in one order."),
    });
    await run(two, "stock");
    const { code, out, err } = await command(["order", one, two]);
    expect([code, err]).toEqual([1, ""]);
    expect(out).toContain("1 inversion");
    expect(out).toMatch(
      /key order \(test\/workers\/lock-order\.ts:\d+:\d+\), then table stock \(test\/workers/,
    );
    expect(out).toMatch(
      /table stock \(test\/workers\/lock-order\.ts:\d+:\d+\), then key order \(test\/workers/,
    );

    const json = await command(["order", one, two, "--json"]);
    expect(json.code).toBe(1);
    expect(JSON.parse(json.out)).toMatchObject({
      files: [one, two],
      steps: [
        { from: "key order", to: "table stock", processes: 1 },
        { from: "table stock", to: "key order", processes: 1 },
      ],
      inversions: [[{ from: "key order" }, { from: "table stock" }]],
    });
    const { out: drawn } = await command(["order", one, two, "--mermaid"]);
    expect(drawn.split("\n")[0]).toBe("flowchart LR");
    expect(drawn).toMatch(/n0 ==> n1/);

    // Both may write to the same file; nothing of statements' values is in it.
    const both = join(folder, "both.jsonl");
    await run(both, "order");
    await run(both, "stock");
    await run(both, "stock");
    expect(JSON.parse((await command(["order", both, "--json"])).out)).toMatchObject({
      steps: [{ processes: 1 }, { processes: 2 }],
    });
    expect(readFileSync(both, "utf8")).not.toContain("UPDATE");
  });

  test("a file that is none: 2, and what it is", async () => {
    const odd = join(folder, "odd.jsonl");
    writeFileSync(odd, '{"from":"a"}\n');
    expect(await command(["order", odd])).toMatchObject({
      code: 2,
      out: "",
      err: expect.stringContaining(`${odd}:1`),
    });
    expect(await command(["order", join(folder, "none.jsonl")])).toMatchObject({ code: 2, out: "" });
    const empty = join(folder, "empty.jsonl");
    writeFileSync(empty, "");
    expect(await command(["order", empty])).toMatchObject({ code: 0 });
    const { code, out } = await command(["order", odd, "--json"]);
    expect([code, JSON.parse(out).error.exitCode]).toEqual([2, 2]);
  });
});
