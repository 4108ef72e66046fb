import { setTimeout as delay } from "node:timers/promises";
import { holdfast, key, sql as hsql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";
let database: TestDatabase;
let admin: Pool;
beforeAll(async () => {
  database = await createDatabase("postgres");
  admin = new Pool({ connectionString: database.url, max: 2 });
  admin.on("error", () => {});
  await admin.query("CREATE TABLE t (n int)");
});
afterAll(async () => { await admin.end(); await database.drop(); });
const locks = async () => (await admin.query("SELECT l.pid, a.state FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE locktype='advisory' AND granted AND l.database=(SELECT oid FROM pg_database WHERE datname=current_database())")).rows;

test("1 pipeline full", async () => {
  const sql = postgres(database.url, { max: 2, onnotice: () => {} });
  const hf = holdfast(fromPostgres(sql));
  await hf.transaction(async () => {});
  for (let n = 196; n <= 206; n++) {
    const many = Array.from({ length: n }, (_, i) => sql.unsafe(i < 2 ? "select pg_sleep(0.2)" : "select 1").catch((e: Error) => e.message));
    for (const q of many) void (q as Promise<unknown>);
    const out = await hf.transaction({ lock: key("p", n), retry: false, deadline: 3000 }, async (tx) => { await tx.query(hsql`INSERT INTO t VALUES (1)`); return "ok"; }).catch((e: Error) => `${e.name}: ${e.message}`);
    await Promise.all(many);
    const l = await locks();
    if (out !== "ok" || l.length) console.log("1:", n, out, l);
  }
  await sql.end({ timeout: 1 });
}, 60000);

test("2 large", async () => {
  const sql = postgres(database.url, { max: 2, onnotice: () => {} });
  const pool = new Pool({ connectionString: database.url, max: 2 });
  for (const n of [100, 400, 800, 900]) {
    for (const [name, hf] of [["pgjs", holdfast(fromPostgres(sql))], ["pg", holdfast(fromPg(pool))]] as const) {
      const out = await hf.transaction({ lock: Array.from({ length: n }, (_, i) => key("big", i)), retry: false, deadline: 5000 }, async () => "ok").catch((e: Error) => `${e.name}: ${e.message}`);
      console.log("2:", n, name, out, (await locks()).length);
    }
  }
  await sql.end({ timeout: 1 }); await pool.end();
}, 60000);

test("12 describe race", async () => {
  const sql = postgres(database.url, { max: 2, onnotice: () => {} });
  const hf = holdfast(fromPostgres(sql));
  const out = await hf.transaction({ deadline: 3000, retry: false }, async (tx) => {
    const r = await Promise.all([
      tx.client`SELECT ${42}::int AS answer, 'x' AS mine`,
      tx.query(hsql`SELECT 7 AS seven`),
    ]);
    return JSON.stringify(r);
  }).catch((e: Error) => `${e.name}: ${e.message} ${String((e as {cause?: unknown}).cause)}`);
  console.log("12a:", out);
  const out2 = await hf.transaction({ deadline: 3000, retry: false }, async (tx) => {
    const r = await Promise.all([
      tx.client`INSERT INTO t VALUES (${42}::int) RETURNING n`,
      tx.lock(key("zz")),
    ]);
    return JSON.stringify(r);
  }).catch((e: Error) => `${e.name}: ${e.message} ${String((e as {cause?: unknown}).cause)}`);
  console.log("12b:", out2);
  await sql.end({ timeout: 1 });
}, 30000);

test("10 silent postgres.js", async () => {
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  for (const moment of ["begin", "body"]) {
    const sql = postgres(proxy.url(database.url), { max: 2, onnotice: () => {} });
    const hf = holdfast(fromPostgres(sql));
    await hf.transaction({ lock: key("s") }, async () => {});
    if (moment === "begin") proxy.freeze();
    const t = Date.now();
    const out = await Promise.race([hf.transaction({ lock: key("s"), deadline: 500, retry: false }, async (tx) => {
      if (moment === "body") { proxy.freeze(); await tx.query(hsql`SELECT 1 AS one`); }
    }).catch((e: Error) => e.name), delay(20000, "HANG")]);
    console.log("10:", moment, out, Date.now() - t);
    proxy.thaw();
    await sql.end({ timeout: 1 });
  }
  await proxy.close();
}, 90000);

test("4 others told", async () => {
  const pool = new Pool({ connectionString: database.url, max: 5 });
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool));
  const a = await hf.hold(key("ha"));
  const pidA = (await locks())[0].pid;
  const b = await hf.hold(key("hb"));
  console.log("4 locks", await locks(), pidA);
  // a statement that fails on release: cancelled by an admin / statement_timeout
  const orig = pool.listenerCount("x");
  void orig;
  const clients = (pool as unknown as { _clients: { processID: number; query: (...x: unknown[]) => unknown }[] })._clients;
  const c = clients.find((x) => x.processID === pidA)!;
  const q = c.query.bind(c);
  await q("SELECT pg_advisory_unlock(((classid::int8 << 32) | objid::int8)) FROM (SELECT * FROM pg_locks WHERE locktype='advisory' AND pid=pg_backend_pid() ORDER BY 1 LIMIT 2) x WHERE (classid::int8<<32 | objid::int8) = (" + String((key("ha") as unknown as { form: { hash: bigint } }).form.hash) + ")::bigint");
  console.log("4 after unlock", await locks());
  console.log("4 release a:", await a.release().then(() => "ok", (e: Error) => e.message));
  await delay(500);
  console.log("4 b.signal.aborted:", b.signal.aborted, "locks left:", await locks());
  const other = await hf.hold(key("hb"), { wait: "nowait" }).then(() => "GRANTED TWICE", (e: Error) => e.name);
  console.log("4 second hold of hb:", other, "b aborted:", b.signal.aborted);
  await hf.close();
  await pool.end();
}, 30000);

test("7 probe cancel", async () => {
  const pool = new Pool({ connectionString: database.url, max: 5 });
  const db = fromPg(pool);
  const engine = { ...db.engine, probe: async (c: never, t: never) => { await (c as unknown as { query(s: unknown): Promise<unknown> }).query(hsql`SELECT pg_sleep(0.5)`); return db.engine.probe(c, t); } };
  const hf = holdfast({ ...db, engine } as typeof db);
  const ac = new AbortController();
  const a = hf.transaction({ signal: ac.signal }, async () => "a").catch((e: Error) => `${e.name}: ${e.message}`);
  const b = hf.transaction(async () => "b").catch((e: Error) => `${e.name}: ${e.message}`);
  await delay(200); ac.abort();
  console.log("7:", await a, "|", await b);
  await pool.end();
}, 30000);

test("11 late use", async () => {
  const sql = postgres(database.url, { max: 1, onnotice: () => {} });
  const hf = holdfast(fromPostgres(sql));
  let leaked!: postgres.TransactionSql;
  await hf.transaction(async (tx) => { leaked = tx.client as never; });
  await hf.transaction(async (tx) => { const [r] = await leaked`SELECT txid_current()::text AS x`; const [s] = await tx.query(hsql`SELECT txid_current()::text AS x`); console.log("11:", r, s); throw new Error("undo"); }).catch((e: Error) => console.log("11", e.message));
  await sql.end({ timeout: 1 });
}, 30000);
