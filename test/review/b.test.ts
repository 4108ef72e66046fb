import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as delay } from "node:timers/promises";
import Sqlite from "better-sqlite3";
import { holdfast, key, sql as hsql } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { expect, test } from "vitest";
const file = () => join(mkdtempSync(join(tmpdir(), "rev-")), "x.db");
test("5 iterator", async () => {
  const f = file();
  const s = new Sqlite(f); s.pragma("journal_mode=WAL"); s.exec("create table t(n); insert into t values (1),(2),(3)"); s.close();
  const hf = holdfast(fromBetterSqlite3(() => new Sqlite(f), { handles: 1 }));
  await hf.transaction(async () => {});
  const out = await hf.transaction({ deadline: 200 }, async (tx) => {
    for (const _ of tx.client.prepare("select n from t").iterate()) await delay(1200);
  }).catch((e: Error) => `${e.name}: ${e.message}`);
  console.log("5:", out);
  await delay(4000); // the body has ended long since
  console.log("5 next:", await hf.transaction({ deadline: 1500, lock: key("x"), wait: 1000 }, async () => "ok").catch((e: Error) => `${e.name}: ${e.message}`));
  const o = new Sqlite(f, { timeout: 0 });
  try { o.exec("BEGIN IMMEDIATE"); console.log("5 other writer: free"); } catch (e) { console.log("5 other writer:", (e as Error).message); }
}, 30000);
test("6 user's transaction", async () => {
  const db = new Sqlite(file()); db.exec("create table t(n)");
  const hf = holdfast(fromBetterSqlite3(db));
  db.exec("BEGIN IMMEDIATE"); db.exec("insert into t values (1)");
  await hf.capabilities();
  console.log("6 inTransaction after capabilities():", db.inTransaction, db.prepare("select count(*) c from t").get());
  if (db.inTransaction) db.exec("COMMIT");
  db.exec("BEGIN IMMEDIATE"); db.exec("insert into t values (2)");
  const other = hf.transaction({ lock: key("b") }, async () => { await delay(50); return "ok"; }).catch((e: Error) => e.message);
  await hf.join(db).lock(key("a")).catch((e: Error) => console.log("6 join", e.message));
  db.exec("insert into t values (3)");
  await delay(20);
  let c = "committed"; try { db.exec("COMMIT"); } catch (e) { c = (e as Error).message; }
  console.log("6:", c, await other, db.prepare("select * from t").all());
});
test("9 statements", async () => {
  const db = new Sqlite(file()); db.exec("create table t(n)");
  const hf = holdfast(fromBetterSqlite3(db));
  const out = await hf.transaction({ deadline: 100 }, async (tx) => {
    const st = tx.client.prepare("insert into t values (?)");
    st.run(1); await delay(1500); st.run(2);
  }).catch((e: Error) => e.name);
  await delay(800);
  console.log("9:", out, db.prepare("select * from t").all());
}, 30000);
