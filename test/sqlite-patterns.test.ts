/** What is particular to patterns on SQLite, beyond what every backend promises. */
import { setTimeout as sleep } from "node:timers/promises";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { createClient } from "@libsql/client";
import Sqlite from "better-sqlite3";
import { type Holdfast, holdfast, sql } from "holdfast";
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
