/** The traps of SQLite, one test each. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import Sqlite from "better-sqlite3";
import { type Holdfast, holdfast, key, sql } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { afterAll, beforeAll, describe, expect, test } from "vitest";

let folder: string;
let file: string;
let hf: Holdfast<Sqlite.Database>;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "holdfast-sqlite-"));
  file = join(folder, "test.db");
  hf = holdfast(
    fromBetterSqlite3(() => {
      const db = new Sqlite(file);
      db.pragma("journal_mode = WAL");
      return db;
    }),
  );
  await hf.transaction((tx) => tx.query(sql`CREATE TABLE quota (n integer NOT NULL)`));
});

afterAll(async () => {
  await hf.close();
  await rm(folder, { recursive: true, force: true });
});

test("BEGIN IMMEDIATE inside a transaction is an error: nested calls are savepoints", async () => {
  const db = new Sqlite(file);
  db.exec("BEGIN IMMEDIATE");
  expect(() => db.exec("BEGIN IMMEDIATE")).toThrow(/within a transaction/);
  db.exec("ROLLBACK");
  db.close();
  await hf.transaction({ lock: key("a") }, () =>
    hf.transaction({ lock: key("b") }, () => hf.lock(key("c"), async () => {})),
  );
});

describe("a deferred transaction", () => {
  test("dies with BUSY_SNAPSHOT when it reads and then writes: the trap itself", async () => {
    const db = new Sqlite(file, { timeout: 3000 });
    db.exec("BEGIN");
    db.prepare("SELECT count(*) FROM quota").get();
    await hf.transaction((tx) => tx.query(sql`INSERT INTO quota VALUES (1)`));
    expect(() => db.exec("INSERT INTO quota VALUES (2)")).toThrow(
      expect.objectContaining({ code: "SQLITE_BUSY_SNAPSHOT" }),
    );
    db.exec("ROLLBACK");
    db.close();
  });

  test("is refused by join, whether or not anybody is in the way", async () => {
    const db = new Sqlite(file);
    db.exec("BEGIN");
    await expect(hf.join(db).lock(key("x"))).rejects.toMatchObject({ code: "HF_NOT_IN_TRANSACTION" });
    db.prepare("SELECT count(*) FROM quota").get();
    await expect(hf.join(db).lock(key("x"))).rejects.toThrow(/BEGIN IMMEDIATE/);
    // With another writer at work it is refused as well, and at once.
    await hf.transaction(async () => {
      await expect(hf.join(db).lock(key("x"))).rejects.toThrow(/BEGIN IMMEDIATE/);
    });
    db.exec("ROLLBACK");
    db.exec("BEGIN IMMEDIATE");
    await hf.join(db).lock(key("x"));
    db.exec("COMMIT");
    db.close();
  });
});

test("a busy file does not stop the process: timers run while a transaction waits", async () => {
  const db = new Sqlite(file);
  db.exec("BEGIN IMMEDIATE");
  let ticks = 0;
  const timer = setInterval(() => ticks++, 5);
  const waiting = hf.transaction({ lock: key("busy"), wait: 20_000 }, async () => "entered");
  while (ticks < 5) await new Promise((resolve) => setTimeout(resolve, 5));
  db.exec("COMMIT");
  expect(await waiting).toBe("entered");
  clearInterval(timer);
  db.close();
});

test("the caller's busy_timeout and query_only are left as they were", async () => {
  await hf.transaction({ readOnly: true }, async () => {});
  await hf.transaction({ lock: key("pragma") }, async (tx) => {
    expect(tx.client.pragma("busy_timeout", { simple: true })).toBe(5000);
    expect(tx.client.pragma("query_only", { simple: true })).toBe(0);
  });
});

test("a lock in a read-only transaction is refused: it would not be the writer", async () => {
  await expect(hf.transaction({ readOnly: true }, (tx) => tx.lock(key("ro")))).rejects.toMatchObject({
    code: "HF_USAGE",
  });
});

test("one Database for all: a body that was given up cannot write into the next transaction", async () => {
  const db = new Sqlite(file);
  const one = holdfast(fromBetterSqlite3(db));
  const controller = new AbortController();
  let wake!: () => void;
  const asleep = new Promise<void>((resolve) => (wake = resolve));
  let late: unknown;
  let ended!: Promise<void>;
  const stubborn = one.transaction({ signal: controller.signal }, (tx) => {
    const statement = tx.client.prepare("INSERT INTO quota VALUES (777)");
    ended = asleep.then(() => {
      try {
        late = undefined;
        statement.run();
      } catch (error) {
        late = error;
      }
    });
    controller.abort(new Error("stop"));
    return ended;
  });
  await expect(stubborn).rejects.toThrow("stop");
  await one.transaction(async () => {
    wake();
    await ended;
  });
  expect(late).toMatchObject({ code: "HF_TRANSACTION_OVER" });
  expect(db.prepare("SELECT count(*) AS n FROM quota WHERE n = 777").get()).toEqual({ n: 0 });
  db.close();
});

test("one Database for all: a transaction of the caller's own is not touched", async () => {
  const db = new Sqlite(file);
  const one = holdfast(fromBetterSqlite3(db));
  db.exec("BEGIN IMMEDIATE");
  db.exec("INSERT INTO quota VALUES (888)");
  await one.capabilities();
  await expect(one.transaction(async () => {})).rejects.toMatchObject({ code: "HF_USAGE" });
  await one.join(db).lock(key("own"));
  expect(db.inTransaction).toBe(true);
  db.exec("COMMIT");
  expect(db.prepare("SELECT count(*) AS n FROM quota WHERE n = 888").get()).toEqual({ n: 1 });
  db.close();
});

test("a handle with an open iterator gives its place and its write lock back when the iterator ends", async () => {
  const few = holdfast(fromBetterSqlite3(() => new Sqlite(file), { handles: 1 }));
  await few.transaction((tx) => tx.query(sql`INSERT INTO quota VALUES (1), (2)`));
  const stuck = few.transaction({ deadline: 200 }, async (tx) => {
    for (const _row of tx.client.prepare("SELECT n FROM quota").iterate())
      await new Promise((resolve) => setTimeout(resolve, 1400));
  });
  await expect(stuck).rejects.toMatchObject({ code: "HF_DEADLINE" });
  expect(await few.transaction({ lock: key("next"), wait: 30_000 }, async () => "entered")).toBe("entered");
  await few.close();
});
