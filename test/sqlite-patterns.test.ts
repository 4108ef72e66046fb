/** What is particular to patterns on SQLite, beyond what every backend promises. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { setTimeout as sleep } from "node:timers/promises";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { createClient } from "@libsql/client";
import Sqlite from "better-sqlite3";
import { type Holdfast, holdfast, key, sql } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromLibsql } from "holdfast/libsql";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { afterEach, beforeEach, describe, expect, test } from "vitest";

let folder: string;
let file: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "holdfast-sqlite-"));
  file = join(folder, "test.db");
});
afterEach(() => rm(folder, { recursive: true, force: true }));

/** By default without WAL, as SQLite is. */
async function opened(journal: "DELETE" | "WAL" = "DELETE"): Promise<Holdfast<Sqlite.Database>> {
  const hf = holdfast(
    fromBetterSqlite3(() => {
      const db = new Sqlite(file);
      db.pragma(`journal_mode = ${journal}`);
      return db;
    }),
  );
  await hf.migrate();
  return hf;
}

/** Somebody who writes to the file without Holdfast, in another process as far as SQLite is concerned. */
function writer(): { readonly db: Sqlite.Database; end(): void } {
  const db = new Sqlite(file, { timeout: 0 });
  db.exec("BEGIN IMMEDIATE");
  return {
    db,
    end() {
      db.exec("ROLLBACK");
      db.close();
    },
  };
}

describe("while somebody else writes", () => {
  test("a call that has waited for long enough is told so, and nothing was done", async () => {
    await using hf = await opened();
    const uploads = quota(hf, { name: "uploads", limit: 100 });
    await uploads.consume("ann");
    const other = writer();
    await expect(uploads.consume("ann", 1, { wait: 50 })).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
    const jobs = queue<number>(hf, "jobs");
    await expect(jobs.enqueue(1, { wait: 50 })).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
    // Whoever only reads is not kept waiting.
    expect(await uploads.peek("ann")).toMatchObject({ used: 1 });
    other.end();
    await uploads.consume("ann");
    expect(await uploads.peek("ann")).toMatchObject({ used: 2 });
  });

  test("an abort ends the wait", async () => {
    await using hf = await opened();
    const uploads = quota(hf, { name: "uploads", limit: 100 });
    await uploads.consume("ann");
    const other = writer();
    const stop = new AbortController();
    const reason = new Error("not any more");
    const call = uploads.reset("ann", { wait: 60_000, signal: stop.signal });
    setTimeout(() => stop.abort(reason), 50);
    await expect(call).rejects.toBe(reason);
    other.end();
    await sleep(50);
    expect(await uploads.peek("ann")).toMatchObject({ used: 1 });
  });

  test("a COMMIT keeps readers out for a moment, without WAL: they wait", async () => {
    await using hf = await opened();
    const uploads = quota(hf, { name: "uploads", limit: 100 });
    await uploads.consume("ann");
    const db = new Sqlite(file, { timeout: 0 });
    db.exec("BEGIN EXCLUSIVE");
    const peeked = uploads.peek("ann");
    await sleep(100);
    db.exec("COMMIT");
    db.close();
    expect(await peeked).toMatchObject({ used: 1 });
  });
});

describe("in a transaction of the caller's own", () => {
  test("a deferred one is refused, and one that is the writer takes part", async () => {
    await using hf = await opened("WAL");
    const shop = stock(hf, { name: "shop" });
    await shop.increase("CAP", 5);
    const db = new Sqlite(file);
    db.exec("BEGIN");
    db.prepare("SELECT count(*) FROM holdfast_stock_level").get();
    await expect(shop.decrease("CAP", 1, { tx: hf.join(db) })).rejects.toMatchObject({
      code: "HF_NOT_IN_TRANSACTION",
    });
    db.exec("ROLLBACK");
    db.exec("BEGIN IMMEDIATE");
    await shop.decrease("CAP", 2, { tx: hf.join(db) });
    db.exec("ROLLBACK");
    expect((await shop.level("CAP")).onHand).toBe(5);
    db.exec("BEGIN IMMEDIATE");
    await shop.decrease("CAP", 2, { tx: hf.join(db) });
    db.exec("COMMIT");
    db.close();
    expect((await shop.level("CAP")).onHand).toBe(3);
  });

  test("one that only reads can read, and use nothing", async () => {
    await using hf = await opened("WAL");
    const uploads = quota(hf, { name: "uploads", limit: 100 });
    await uploads.consume("ann");
    await hf.transaction({ readOnly: true }, async () => {
      expect(await uploads.peek("ann")).toMatchObject({ used: 1 });
    });
    await expect(hf.transaction({ readOnly: true }, () => uploads.consume("ann"))).rejects.toThrow();
    expect(await uploads.peek("ann")).toMatchObject({ used: 1 });
  });
});

// Each reads large integers in its own way, or refuses to.
test.each([
  ["better-sqlite3", () => fromBetterSqlite3(() => new Sqlite(file))],
  ["node:sqlite", () => fromNodeSqlite(() => new DatabaseSync(file))],
  ["libsql", () => fromLibsql(createClient({ url: `file:${file}` }))],
] as const)("what is unlimited, and credits that never run out: %s", async (_, database) => {
  await using hf = holdfast(database() as ReturnType<typeof fromBetterSqlite3>);
  await hf.migrate();
  const uploads = quota(hf, { name: "uploads", limit: Infinity });
  await uploads.consume("ann", Number.MAX_SAFE_INTEGER - 5);
  expect(await uploads.peek("ann")).toMatchObject({ used: Number.MAX_SAFE_INTEGER - 5, limit: Infinity });
  const credits = quota(hf, { name: "credits", limit: 0 });
  await credits.grant("ann", 5);
  await credits.grant("ann", 5, { expiresAt: new Date("9999-12-31") });
  await credits.consume("ann", 7);
  const left = (await credits.grants("ann")).map(({ amount, spent }) => amount - spent);
  expect(left.reduce((sum, each) => sum + each, 0)).toBe(3);
  await credits.setLimit("bob", Infinity);
  expect(await credits.peek("bob")).toMatchObject({ limit: Infinity });
});

test("what comes later is later, also within a millisecond, and whoever writes it", async () => {
  await using hf = await opened("WAL");
  await using other = await opened("WAL");
  const shops = [hf, other].map((each) => stock(each, { name: "shop" }));
  for (let i = 0; i < 40; i++) await shops[i % 2]?.increase(`SKU ${i}`, 1);
  const { movements } = (await shops[0]?.history({ limit: 100 })) ?? { movements: [] };
  expect(movements.map(({ sku }) => sku)).toEqual(Array.from({ length: 40 }, (_, i) => `SKU ${39 - i}`));
  const rows = await hf.transaction((tx) => tx.query(sql`SELECT at FROM holdfast_stock_movement`));
  expect(new Set(rows.map(({ at }) => at)).size).toBe(40);
});

test("a worker with enough to do lets timers have their turn", async () => {
  await using hf = await opened("WAL");
  const jobs = queue<number>(hf, "jobs");
  await jobs.enqueueMany(Array.from({ length: 5000 }, (_, payload) => ({ payload })));
  let done = 0;
  const worker = jobs.work(() => void done++, { concurrency: 4 });
  let ticks = 0;
  const timer = setInterval(() => ticks++, 1);
  while (done < 5000) await sleep(1);
  clearInterval(timer);
  await worker.stop();
  expect(ticks).toBeGreaterThan(2);
});

describe.each(["better-sqlite3", "node:sqlite"])("%s: the app writes with a handle of its own", (client) => {
  /**
   * With the same copy of SQLite: the locks of two in one process do not see each other. It does not wait: it is refused where
   * others would wait for the writer, and the whole process with them.
   */
  function appOn(path: string) {
    const app: Pick<DatabaseSync, "exec" | "prepare" | "close"> =
      client === "node:sqlite"
        ? new DatabaseSync(path, { timeout: 0 })
        : (new Sqlite(path, { timeout: 0 }) as never);
    app.exec("PRAGMA journal_mode = WAL");
    app.exec("CREATE TABLE effect (id integer PRIMARY KEY)");
    const insert = app.prepare("INSERT INTO effect DEFAULT VALUES");
    const counts = { written: 0, refused: 0 };
    const write = () => {
      try {
        insert.run();
        counts.written++;
      } catch {
        counts.refused++;
      }
    };
    return { app, counts, write };
  }
  const open = () =>
    holdfast(
      client === "node:sqlite"
        ? fromNodeSqlite(() => new DatabaseSync(file))
        : (fromBetterSqlite3(() => new Sqlite(file)) as never),
    ) as Holdfast<unknown>;

  test("no call of ours is the writer while the app has its turn", async () => {
    const { app, counts, write } = appOn(file);
    const hf = open();
    await hf.migrate();
    const jobs = queue<number>(hf, "jobs");
    const uploads = quota(hf, { name: "uploads", limit: 1000 });
    const shop = stock(hf, { name: "shop" });
    const few = async () => {
      for (let i = 0; i < 5; i++) {
        await Promise.resolve();
        write();
      }
    };
    const each = Array.from({ length: 40 }, (_, i) => i);
    let done = 0;
    const worker = jobs.work(
      async () => {
        await few();
        done++;
      },
      { concurrency: 8 },
    );
    await Promise.all(
      each.map(async (i) => {
        await few();
        await jobs.enqueue(i);
        await few();
        await uploads.consume("ada");
        await few();
        await shop.increase("CAP", 1);
        await few();
        const lease = await hf.lease(key("lease", i % 4));
        await few();
        await lease.release();
        await few();
        await uploads.history("ada");
        await few();
      }),
    );
    while (done < each.length) await sleep(5);
    await worker.stop();
    await hf.close();
    app.close();
    expect(counts).toEqual({ written: counts.written, refused: 0 });
    expect(counts.written).toBeGreaterThan(1000);
  });

  test("a process that has waited for its own transaction is told so, and where", async () => {
    const { app } = appOn(file);
    app.exec("PRAGMA busy_timeout = 1600");
    const hf = open();
    await hf.migrate();
    // The warning comes once per place, the event each time.
    const told: unknown[] = [];
    const listener = (message: unknown) => void told.push(message);
    subscribe("holdfast:transaction:stalled", listener);
    await hf.transaction({ lock: key("x") }, async () => {
      await sleep(1);
      expect(() => app.exec("INSERT INTO effect DEFAULT VALUES")).toThrow("locked");
    });
    unsubscribe("holdfast:transaction:stalled", listener);
    expect(told).toMatchObject([
      { transaction: expect.stringContaining("sqlite-patterns.test.ts") as string },
    ]);
    await hf.close();
    app.close();
  });
});
