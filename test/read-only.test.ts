/** Files that cannot be written: a lock there would keep nobody out, so it is refused, with the reason. */
import { execFile } from "node:child_process";
import { chmod, mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { fileURLToPath, pathToFileURL } from "node:url";
import { promisify } from "node:util";
import { type DuckDBConnection, DuckDBInstance } from "@duckdb/node-api";
import Database from "better-sqlite3";
import { type Database as Source, type Holdfast, holdfast, key } from "holdfast";
import { trail } from "holdfast/audit";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromDuckdb } from "holdfast/duckdb";
import { fromKnex } from "holdfast/knex";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { jobs, queue, queues, workers } from "holdfast/queue";
import { quota, quotas, subjects } from "holdfast/quota";
import { runs, schedule, schedules } from "holdfast/schedule";
import { stock, stocks } from "holdfast/stock";
import { type Knex, knex } from "knex";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { bundled } from "./harness/bundled.ts";

let folder: string;
let duckdb: DuckDBInstance;
const file = (journal: string) => join(folder, `${journal}.db`);

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "holdfast-read-only-"));
  for (const journal of ["wal", "delete"]) {
    const db = new DatabaseSync(file(journal));
    db.exec(`PRAGMA journal_mode = ${journal}; CREATE TABLE part (id integer PRIMARY KEY, n integer);
      INSERT INTO part VALUES (1, 1)`);
    const hf = holdfast(fromNodeSqlite(db));
    await hf.migrate();
    await quota(hf, { name: "there", limit: 10 }).consume("ann");
    await stock(hf, { name: "there" }).increase("A", 1);
    await queue(hf, "there").enqueue({});
    await hf.close();
    db.close();
  }
  const writes = await DuckDBInstance.create(join(folder, "test.duckdb"));
  const hf = holdfast(fromDuckdb(writes));
  await hf.migrate();
  await hf.transaction({ lock: key("upload", 1) }, async () => {});
  await stock(hf, { name: "there" }).increase("A", 1);
  await hf.close();
  writes.closeSync();
  duckdb = await DuckDBInstance.create(join(folder, "test.duckdb"), { access_mode: "READ_ONLY" });
});

afterAll(async () => {
  for (const each of opened) await each.destroy();
  duckdb?.closeSync();
  if (folder) await rm(folder, { recursive: true, force: true });
});

const uri = (journal: string, query: string) => {
  const url = pathToFileURL(file(journal));
  url.search = query;
  return url;
};
const queryOnly = <Handle extends { exec(text: string): unknown }>(db: Handle): Handle => {
  db.exec("PRAGMA query_only = 1");
  return db;
};

const opened: Knex[] = [];

/** Each opens the file anew. */
const sources: Readonly<Record<string, (journal: string) => Source>> = {
  "better-sqlite3, readonly": (journal) =>
    fromBetterSqlite3(() => new Database(file(journal), { readonly: true })),
  "better-sqlite3, readonly, one handle": (journal) =>
    fromBetterSqlite3(new Database(file(journal), { readonly: true })),
  "better-sqlite3, query_only": (journal) => fromBetterSqlite3(() => queryOnly(new Database(file(journal)))),
  "node:sqlite, readOnly": (journal) =>
    fromNodeSqlite(() => new DatabaseSync(file(journal), { readOnly: true })),
  "node:sqlite, mode=ro": (journal) => fromNodeSqlite(() => new DatabaseSync(uri(journal, "mode=ro"))),
  "node:sqlite, immutable=1": (journal) =>
    fromNodeSqlite(() => new DatabaseSync(uri(journal, "immutable=1"))),
  "node:sqlite, query_only": (journal) => fromNodeSqlite(() => queryOnly(new DatabaseSync(file(journal)))),
  "Knex on better-sqlite3, readonly": (journal) => {
    const connection = { filename: file(journal), options: { readonly: true } };
    const made = knex({ client: "better-sqlite3", connection, useNullAsDefault: true });
    opened.push(made);
    return fromKnex(made) as Source;
  },
};

const lock = key("upload", 1);

/** Whatever only looks, at something that is there, and at something that is not. */
const reads = (hf: Holdfast<unknown>): readonly (() => Promise<unknown>)[] =>
  ["there", "missing"].flatMap((name) => {
    const uploads = quota(hf, { name, limit: 10 });
    const shop = stock(hf, { name: "there" });
    const errands = queue(hf, name);
    const nightly = schedule(hf, name, { every: "day" }, async () => {});
    return [
      () => uploads.peek("ann"),
      () => uploads.history("ann"),
      () => uploads.grants("ann"),
      () => uploads.reconcile("ann"),
      () => shop.level("A"),
      () => shop.levels(),
      () => shop.history({ sku: "A" }),
      () => errands.counts(),
      () => errands.failed(),
      () => errands.inspect(1),
      () => jobs(hf, name, { state: "waiting" }),
      () => nightly.status(),
      () => nightly.runs(),
      () => runs(hf, name),
      () => subjects(hf, name),
      () => Promise.all([quotas(hf), stocks(hf), queues(hf), schedules(hf), workers(hf), trail(hf)]),
      () => Promise.all([hf.leases(), hf.inspect(), hf.migrations(), hf.capabilities()]),
    ];
  });
const entered = () => expect.unreachable("it entered");

describe.each(Object.entries(sources))("SQLite: %s", (_, open) => {
  test.each(["wal", "delete"])("journal_mode %s", async (journal) => {
    await using hf = holdfast(open(journal));
    const calls: readonly (() => Promise<unknown>)[] = [
      () => hf.transaction({ lock }, entered),
      () => hf.transaction({ lock, wait: "nowait" }, entered),
      () => hf.transaction({ lock, readOnly: true }, entered),
      () => hf.transaction((tx) => tx.lock(lock).then(entered)),
      () => hf.transaction((tx) => tx.tryLock(lock).then(entered)),
      () => hf.transaction((tx) => tx.rows("part", [1]).then(entered)),
      () => hf.transaction((tx) => tx.table("part", "share row exclusive").then(entered)),
      () => hf.tryLock(lock, entered),
      () => hf.lease(lock).then(entered),
      () => hf.semaphore(key("s"), { permits: 1 }).acquire().then(entered),
    ];
    for (const call of calls)
      await expect(call(), String(call)).rejects.toMatchObject({
        code: "HF_REPLICA",
        message: expect.stringContaining("attempt to write a readonly database"),
      });
    await expect(hf.hold(lock)).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
    // Reading is as good as before.
    await hf.transaction({ readOnly: true }, async () => {});
    for (const read of reads(hf)) await expect(read(), String(read)).resolves.not.toThrow();
  });
});

test("SQLite: a transaction of the caller's own is told that the file cannot be written", async () => {
  for (const open of [
    () => new DatabaseSync(file("wal"), { readOnly: true }),
    () => new DatabaseSync(uri("delete", "mode=ro")),
  ]) {
    const db = open();
    const hf = holdfast(fromNodeSqlite(open));
    db.exec("BEGIN IMMEDIATE");
    await expect(hf.join(db).lock(lock)).rejects.toMatchObject({
      code: "HF_NOT_IN_TRANSACTION",
      message: expect.stringContaining("the file was opened read-only: open it for writing"),
    });
    db.exec("ROLLBACK");
    await hf.close();
    db.close();
  }
});

test("SQLite: a file that was opened without locks is refused", async () => {
  await using hf = holdfast(fromNodeSqlite(() => new DatabaseSync(uri("delete", "nolock=1"))));
  for (const call of [() => hf.transaction({ lock }, entered), () => hf.lease(lock).then(entered)])
    await expect(call()).rejects.toMatchObject({
      code: "HF_UNSUPPORTED",
      message: expect.stringContaining("nolock=1"),
    });
});

test("SQLite: a file that its user may not write", async () => {
  const path = file("delete");
  const worker = fileURLToPath(new URL("./workers/read-only.ts", import.meta.url));
  await chmod(folder, 0o755);
  await chmod(path, 0o444);
  try {
    // Root may write to any file.
    const nobody = process.getuid?.() === 0 ? { uid: 65534, gid: 65534 } : {};
    const run = () =>
      promisify(execFile)(process.execPath, [...bundled, worker, path], { ...nobody, env: { PATH: "" } });
    for (const { stdout } of await Promise.all([run(), run()]))
      expect(JSON.parse(stdout)).toEqual({
        "better-sqlite3": "HF_REPLICA",
        "node:sqlite": "HF_REPLICA",
        libsql: "HF_REPLICA",
      });
  } finally {
    await chmod(path, 0o644);
  }
});

test("SQLite: a handle that can write is asked once, and keeps what is there", async () => {
  const db = new DatabaseSync(file("wal"));
  db.exec("PRAGMA user_version = 42");
  const hf = holdfast(fromNodeSqlite(db));
  const texts: string[] = [];
  const prepare = db.prepare.bind(db);
  db.prepare = (text: string) => (texts.push(text), prepare(text));
  for (let i = 0; i < 3; i++) await hf.transaction({ lock }, async () => {});
  expect(texts.filter((text) => text.startsWith("PRAGMA user_version ="))).toEqual([
    "PRAGMA user_version = 42",
  ]);
  expect(prepare("PRAGMA user_version").get()).toEqual({ user_version: 42 });
  await hf.close();
  db.close();
});

test("DuckDB: access_mode READ_ONLY", async () => {
  await using hf = holdfast(fromDuckdb(duckdb));
  const calls: readonly (() => Promise<unknown>)[] = [
    () => hf.transaction({ lock }, entered),
    () => hf.transaction({ lock, readOnly: true }, entered),
    () => hf.transaction((tx) => tx.lock(lock).then(entered)),
    () => hf.tryLock(lock, entered),
    () => hf.lease(lock).then(entered),
    () => hf.semaphore(key("s"), { permits: 1 }).acquire().then(entered),
    async () => {
      const own: DuckDBConnection = await duckdb.connect();
      await own.run("BEGIN TRANSACTION");
      await hf
        .join(own)
        .lock(lock)
        .finally(() => own.closeSync());
    },
  ];
  for (const call of calls)
    await expect(call(), String(call)).rejects.toMatchObject({
      code: "HF_REPLICA",
      message: expect.stringContaining("read-only mode"),
    });
  for (const read of reads(hf)) await expect(read(), String(read)).resolves.not.toThrow();
  await expect(hf.hold(lock)).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
  await expect(hf.transaction((tx) => tx.rows("part", [1]))).rejects.toMatchObject({
    code: "HF_UNSUPPORTED",
  });
  await hf.transaction({ readOnly: true }, async () => {});
});
