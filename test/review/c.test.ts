import { setTimeout as delay } from "node:timers/promises";
import { holdfast, key, sql as hsql } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { createPool } from "mysql2/promise";
import { afterAll, beforeAll, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";
let database: TestDatabase;
beforeAll(async () => { database = await createDatabase("mariadb"); });
afterAll(async () => { await database.drop(); });
test("3 stale owner", async () => {
  const poolA = createPool({ uri: database.url, connectionLimit: 3 });
  const poolB = createPool({ uri: database.url, connectionLimit: 5 });
  const sess = holdfast(fromMysql2(poolA)); const hf = holdfast(fromMysql2(poolB));
  await hf.migrate(); await sess.capabilities();
  const k = key("st");
  // every connection of pool A has once held it
  for (let i = 0; i < 6; i++) await (await sess.hold(k)).release();
  for (let round = 0; round < 3; round++) {
    for (let i = 0; i < 3; i++) await (await sess.hold(k)).release();
    const t0 = Date.now(); const at = () => Date.now() - t0;
    const t1 = hf.transaction({ lock: k }, async () => { await delay(600); });
    await delay(150);
    const t2 = hf.transaction({ lock: k, wait: 4000 }, async () => "t2 ok").catch((e: Error) => e.name).then((x) => `${x} at ${at()}`);
    await delay(150);
    const h = sess.hold(k, { wait: 8000 }).then(async (x) => { const a = at(); await x.release(); return `held at ${a}`; }, (e: Error) => `${e.name} at ${at()}`);
    await t1;
    console.log("3:", await t2, "|", await h);
  }
  await sess.close(); await poolA.end(); await poolB.end();
}, 60000);
test("8 acknowledged commit", async () => {
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  const pool = createPool({ uri: proxy.url(database.url), connectionLimit: 3 });
  const hf = holdfast(fromMysql2(pool));
  await pool.query("create table c8 (n int)");
  let armed = false;
  proxy.cutWhen((d, chunk) => (armed && d === "to-server" && chunk.includes("SET autocommit = COALESCE") ? "drop-answer" : "pass"));
  const out = await hf.transaction(async (tx) => { await tx.client.query("insert into c8 values (1)"); armed = true; return "ok"; }).catch((e: Error) => `${e.name} ${e.message}`);
  armed = false;
  console.log("8:", out, (await pool.query("select * from c8"))[0]);
  await pool.end(); await proxy.close();
}, 60000);
