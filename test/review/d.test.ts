import { setTimeout as delay } from "node:timers/promises";
import { holdfast, key, sql as hsql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
let database: TestDatabase; let admin: Pool;
beforeAll(async () => {
  database = await createDatabase("postgres");
  admin = new Pool({ connectionString: database.url, max: 2 }); admin.on("error", () => {});
  await admin.query("CREATE TABLE t (n int)");
});
afterAll(async () => { await admin.end(); await database.drop(); });
const locks = async () => (await admin.query("SELECT DISTINCT l.pid, a.state FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE locktype='advisory' AND granted AND l.database=(SELECT oid FROM pg_database WHERE datname=current_database())")).rows;
const say = (e: Error) => `${e.name}: ${e.message}`;
test("2 warm large", async () => {
  const sql = postgres(database.url, { max: 2, onnotice: () => {} });
  const hf = holdfast(fromPostgres(sql)); await hf.transaction(async () => {});
  for (const n of [100, 400, 800]) {
    const out = await hf.transaction({ lock: Array.from({ length: n }, (_, i) => key("big", i)), retry: false, deadline: 5000 }, async () => "ok").catch(say);
    console.log("2:", n, out, await locks());
  }
  const w = await Promise.all([1, 2, 3, 4].map((n) => sql.unsafe(`INSERT INTO t VALUES (${n})`).then(() => "inserted", say)));
  console.log("2 plain inserts:", w, "seen by others:", (await admin.query("SELECT n FROM t ORDER BY n")).rows);
  await Promise.race([sql.end({ timeout: 1 }), delay(3000)]);
  console.log("2 after end:", (await admin.query("SELECT n FROM t ORDER BY n")).rows);
  await admin.query("TRUNCATE t").catch(say);
}, 40000);
test("12", async () => {
  const sql = postgres(database.url, { max: 2, onnotice: () => {} });
  const hf = holdfast(fromPostgres(sql)); await hf.transaction(async () => {});
  const one = (f: (i: number) => Promise<unknown>) => f;
  for (const what of ["lock", "nest", "query"]) {
    const out = await hf.transaction({ deadline: 3000, retry: false }, async (tx) => {
      const r = await Promise.allSettled([
        tx.client.unsafe(`INSERT INTO t VALUES ($1::int) RETURNING n, '${what}' AS w`, [42]).execute(),
        what === "lock" ? tx.lock(key("zz")) : what === "nest" ? tx.transaction(async (t) => t.query(hsql`SELECT 7 AS seven`)) : tx.query(hsql`SELECT 7 AS seven`),
      ]);
      return JSON.stringify(r.map((x) => x.status === "fulfilled" ? x.value : String(x.reason)));
    }).catch(say);
    console.log("12:", what, out);
  }
  console.log("12 control:", await sql.begin(async (t) => JSON.stringify(await Promise.all([t.unsafe("INSERT INTO t VALUES ($1::int) RETURNING n", [42]).execute(), t.unsafe("SELECT 7 AS seven")]))).catch(say));
  void one;
  await Promise.race([sql.end({ timeout: 1 }), delay(3000)]);
}, 40000);
test("7", async () => {
  const pool = new Pool({ connectionString: database.url, max: 5 });
  const db = fromPg(pool);
  const engine = { ...db.engine, probe: async (c: never, t: never) => { await (c as unknown as { query(s: unknown): Promise<unknown> }).query(hsql`SELECT pg_sleep(0.6)::text`); return db.engine.probe(c, t); } };
  const hf = holdfast({ ...db, engine } as typeof db);
  const ac = new AbortController();
  const a = hf.transaction({ signal: ac.signal }, async () => "a").catch(say);
  await delay(150);
  const b = hf.transaction(async () => "b").catch(say);
  await delay(150); ac.abort();
  console.log("7:", await a, "|", await b);
  await pool.end();
}, 30000);
