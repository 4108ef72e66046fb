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

test("SKIP LOCKED and NOWAIT do not wait: what is taken so is held, and in no round", async () => {
  const found = since();
  const hf = open();
  const take = (first: string, second: string) =>
    hf.transaction(async ({ client }) => {
      await client.query(first);
      await client.query(second);
    });
  await pool.query("CREATE TABLE free_a (id int); CREATE TABLE free_b (id int)");
  await take("SELECT id FROM free_a FOR UPDATE", "SELECT id FROM free_b FOR UPDATE SKIP LOCKED");
  await take("SELECT id FROM free_b FOR UPDATE", "SELECT id FROM free_a FOR UPDATE NOWAIT");
  expect(found()).toEqual([]);
  await take("SELECT id FROM free_a FOR UPDATE SKIP LOCKED", "UPDATE free_b SET id = 1");
  await take("SELECT id FROM free_b FOR UPDATE NOWAIT", "UPDATE free_a SET id = 1");
  expect(found()).toEqual([["table free_b → table free_a", "table free_a → table free_b"]]);
  await hf.close();
});

test("LOCK TABLE locks", async () => {
  const found = since();
  const hf = open();
  await pool.query("CREATE TABLE whole_a (id int); CREATE TABLE whole_b (id int)");
  for (const [first, second] of [
    ["whole_a", "whole_b"],
    ["whole_b", "whole_a"],
  ] as const)
    await hf.transaction(async ({ client }) => {
      await client.query(`LOCK TABLE ${first} IN SHARE ROW EXCLUSIVE MODE`);
      await client.query(`UPDATE ${second} SET id = 1`);
    });
  expect(found()).toEqual([["table whole_b → table whole_a", "table whole_a → table whole_b"]]);
  await hf.close();
});

/** A table of its own: what is known of a table is known for the whole process. */
let tablesMade = 0;
async function rowsIn(db: Pick<Pool, "query"> = pool): Promise<string> {
  const name = `rows_${++tablesMade}`;
  await db.query(`CREATE TABLE ${name} (id int PRIMARY KEY, sku text, n int)`);
  return name;
}
const upAndDown = (name: string) => [[`${name} → ${name}`, `${name} → ${name}`]];

describe("rows of one table, one after the other", () => {
  type Lock = (client: PoolClient, table: string, id: number) => Promise<unknown>;
  const ways: readonly (readonly [string, Lock])[] = [
    ["parameters", (client, t, id) => client.query(`UPDATE ${t} SET n = $1 WHERE id = $2`, [5, id])],
    ["an object", (client, t, id) => client.query({ text: `DELETE FROM ${t} WHERE id = $1`, values: [id] })],
    [
      "literals",
      (client, t, id) => client.query(`UPDATE "${t}" SET n = 5 WHERE ${t}."id" = ${id} AND n > 1`),
    ],
    [
      "FOR UPDATE",
      (client, t, id) => client.query(`SELECT * FROM ${t} WHERE id = $1 FOR UPDATE`, [String(id)]),
    ],
  ];
  test.each(ways)("%s", async (_, lock) => {
    const found = since();
    const hf = open();
    const table = await rowsIn();
    const take = (...ids: readonly number[]) =>
      hf.transaction(async ({ client }) => {
        for (const id of ids) await lock(client, table, id);
      });
    // By their values, and not as texts.
    await take(1, 2, 10);
    await take(9, 10);
    // What is held is not waited for.
    await take(1, 2, 1);
    expect(found()).toEqual([]);
    await take(10, 9);
    await hf.close();
    expect(found()).toEqual(upAndDown(`table ${table}`));
  });

  test("not told: where it is not known which rows are held, where they are new, or shared", async () => {
    const found = since();
    const hf = open();
    const table = await rowsIn();
    const write = (client: PoolClient, id: number) =>
      client.query(`UPDATE ${table} SET n = 1 WHERE id = $1`, [id]);
    const share = (client: PoolClient, id: number) =>
      client.query(`SELECT 1 FROM ${table} WHERE id = $1 FOR SHARE`, [id]);
    const bodies: ((client: PoolClient) => Promise<unknown>)[] = [
      (client) => write(client, 1).then(() => write(client, 2)),
      (client) =>
        client
          .query(`SELECT 1 FROM ${table} WHERE id = ANY($1) ORDER BY id FOR UPDATE`, [[1, 2]])
          .then(() => write(client, 2))
          .then(() => write(client, 1)),
      (client) =>
        client
          .query(`INSERT INTO ${table} (id) VALUES (7)`)
          .then(() => write(client, 7))
          .then(() => write(client, 1)),
      (client) => share(client, 2).then(() => share(client, 1)),
      (client) =>
        client
          .query(`UPDATE ${table} SET n = 1 WHERE sku = 'b'`)
          .then(() => client.query(`UPDATE ${table} SET n = 1 WHERE sku = 'c' OR sku = 'a'`)),
    ];
    for (const body of bodies) await hf.transaction(async ({ client }) => void (await body(client)));
    await hf.close();
    expect(found()).toEqual([]);
  });

  test("in a file that one transaction has as a whole, there is no order", async () => {
    const found = since();
    const file = new DatabaseSync(":memory:");
    file.exec("CREATE TABLE one_file (id int); CREATE TABLE other_file (id int)");
    const hf = holdfast(fromNodeSqlite(file), { hazards: "count" });
    for (const [a, b] of [
      ["one_file", "other_file"],
      ["other_file", "one_file"],
    ])
      await hf.transaction(async ({ client }) => {
        client.exec(`UPDATE ${a} SET id = 1`);
        client.prepare(`UPDATE ${b} SET id = 1 WHERE id = ?`).run(1);
      });
    await hf.close();
    expect(found()).toEqual([]);
  });
});

describe("advisory locks that statements take", () => {
  const take = async (...statements: readonly (readonly [string, unknown[]?])[]) => {
    const hf = open();
    await hf.transaction(async ({ client }) => {
      for (const [text, values] of statements) await client.query(text, values);
    });
    await hf.close();
  };

  test("by numbers, two numbers and texts, with literals and parameters, like keys", async () => {
    const found = since();
    await take(["SELECT pg_advisory_xact_lock(4711)"], ["SELECT pg_advisory_lock($1)", [4712]]);
    await take(
      ["SELECT pg_advisory_xact_lock($1::bigint)", ["4712"]],
      ["SELECT pg_advisory_xact_lock(4711)"],
    );
    expect(found()).toEqual([["key 4712 → key 4711", "key 4711 → key 4712"]]);
    const text = "SELECT pg_advisory_xact_lock(hashtext('book:' || $1))";
    await take([text, ["9"]], [text, ["10"]]);
    expect(found()).toHaveLength(1);
    await take([text, ["10"]], [text, ["9"]]);
    expect(found().slice(1)).toEqual(upAndDown("key book"));
    await take(["SELECT pg_advisory_xact_lock(4713, $1)", [1]], ["UPDATE shelf SET n = 1"]);
    await take(["UPDATE shelf SET n = 1"], ["SELECT pg_advisory_xact_lock(4713, 2)"]);
    expect(found().slice(2)).toEqual([["table shelf → key 4713", "key 4713 → table shelf"]]);
    const hf = open();
    await hf.transaction({ lock: key.bigint(4714) }, ({ client }) =>
      client.query("SELECT pg_advisory_xact_lock(4715)").then(() => {}),
    );
    await hf.close();
    await take(["SELECT pg_advisory_xact_lock(4715)"], ["SELECT pg_advisory_xact_lock(4714)"]);
    expect(found().slice(3)).toEqual([["key 4715 → key 4714", "key 4714 → key 4715"]]);
  });

  test("those that are shared, tried or given back are in nobody's way", async () => {
    const found = since();
    const both = async (first: string, second: string, a: number, b: number) => {
      for (const [one, two] of [
        [a, b],
        [b, a],
      ])
        await take([first.replace("#", String(one))], [second.replace("#", String(two))]);
    };
    const [plain, tried] = ["SELECT pg_advisory_xact_lock(#)", "SELECT pg_try_advisory_xact_lock(#)"];
    const shares = "SELECT pg_advisory_xact_lock_shared(#)";
    await both(shares, shares, 4801, 4802);
    await both(plain, tried, 4803, 4804);
    const [lock, unlock] = ["SELECT pg_advisory_lock(#)", "SELECT pg_advisory_unlock(#)"];
    for (const [a, b] of [
      ["4805", "4806"],
      ["4806", "4805"],
    ] as const)
      await take(
        [lock.replace("#", a)],
        [unlock.replace("#", a)],
        [lock.replace("#", b)],
        [unlock.replace("#", b)],
      );
    expect(found()).toEqual([]);
    await both(tried, plain, 4803, 4804);
    expect(found()).toEqual([["key 4804 → key 4803", "key 4803 → key 4804"]]);
  });
});

describe("savepoints", () => {
  const body = (table: string, end: string) => async (client: PoolClient) => {
    for (const text of [
      "SAVEPOINT before",
      `UPDATE ${table} SET n = 1 WHERE id = 2`,
      "SELECT pg_advisory_xact_lock(4901)",
      end,
      `UPDATE ${table} SET n = 1 WHERE id = 1`,
      "SELECT pg_advisory_xact_lock(4900)",
    ])
      await client.query(text);
  };
  const other = (table: string) => async (client: PoolClient) => {
    await client.query(`UPDATE ${table} SET n = 1 WHERE id = 1`);
    await client.query(`UPDATE ${table} SET n = 1 WHERE id = 2`);
    await client.query("SELECT pg_advisory_xact_lock(4900)");
    await client.query("SELECT pg_advisory_xact_lock(4901)");
  };

  test("what was locked after one that is rolled back to is given back", async () => {
    const found = since();
    const hf = open();
    const table = await rowsIn();
    const run = (work: (client: PoolClient) => Promise<void>) =>
      hf.transaction(async ({ client }) => work(client));
    await run(other(table));
    await run(body(table, "ROLLBACK TO SAVEPOINT before"));
    await run(body(table, "rollback to before"));
    expect(found()).toEqual([]);
    await run(body(table, "RELEASE SAVEPOINT before"));
    expect(found()).toHaveLength(2);
    await hf.close();
  });

  test("by a nested transaction too; and a lock of the session stays", async () => {
    const found = since();
    const hf = open();
    const nested = (statement: string, first: number, second: number) =>
      hf.transaction(async (tx) => {
        await tx
          .transaction(async (inner) => {
            await inner.lock(key(`inner-${first}`, 1));
            await inner.client.query(statement.replace("#", String(first)));
            throw new Error("undone");
          })
          .catch(() => {});
        await tx.lock(key(`inner-${second}`, 1));
        await tx.client.query(statement.replace("#", String(second)));
      });
    await nested("SELECT pg_advisory_xact_lock(#)", 4911, 4912);
    await nested("SELECT pg_advisory_xact_lock(#)", 4912, 4911);
    expect(found()).toEqual([]);
    await nested("SELECT pg_advisory_lock(#)", 4913, 4914);
    await nested("SELECT pg_advisory_lock(#)", 4914, 4913);
    expect(found().flat()).toContain("key 4914 → key 4913");
    await hf.close();
  });
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

test.for(["mariadb", "mysql"] as const)(
  "on %s: rows, GET_LOCK, and savepoints, which keep rows",
  async (server, { skip }) => {
    skip(unavailable(server) !== undefined, unavailable(server));
    const found = since();
    const own = await createDatabase(server);
    const clients = createPool({ uri: own.url, connectionLimit: 3 });
    const hf = holdfast(fromMysql2(clients), { hazards: "count" });
    onTestFinished(async () => {
      await hf.close();
      await clients.end();
      await own.drop();
    });
    const table = await rowsIn(clients as unknown as Pick<Pool, "query">);
    const take = (...statements: readonly (readonly [string, unknown[]?])[]) =>
      hf.transaction(async ({ client }) => {
        for (const [text, values] of statements) {
          if (values) await client.execute(text, values as string[]);
          else await client.query(text);
        }
      });
    const write = `UPDATE \`${table}\` SET n = ? WHERE id = ?`;
    await take([write, [1, 1]], [`UPDATE ${table} SET n = 5 WHERE id = 2`]);
    expect(found()).toEqual([]);
    await take(
      [write, [1, 2]],
      ["SAVEPOINT a"],
      [write, [1, 3]],
      ["ROLLBACK TO SAVEPOINT a"],
      [write, [1, 2]],
    );
    expect(found()).toEqual([]);
    await take(["SAVEPOINT a"], [write, [1, 2]], ["ROLLBACK TO SAVEPOINT a"], [write, [1, 1]]);
    expect(found()).toEqual(upAndDown(`table ${table}`));
    const name = (of: string) => `${server}-${of}:1`;
    const [get, back] = ["SELECT GET_LOCK(?, 5)", "SELECT RELEASE_LOCK(?)"];
    await take(
      [get, [name("a")]],
      [back, [name("a")]],
      [get, [name("b")]],
      [`SELECT GET_LOCK('${name("a")}', 5)`],
    );
    await take([get, [name("a")]], [`SELECT GET_LOCK('${name("b")}', 0)`]);
    expect(found()).toHaveLength(1);
    await take([get, [name("a")]], ["SELECT GET_LOCK(CONCAT(?, ':1'), 5)", [`${server}-b`]]);
    expect(found().slice(1)).toEqual([
      [`key ${server}-a → key ${server}-b`, `key ${server}-b → key ${server}-a`],
    ]);
  },
);

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
