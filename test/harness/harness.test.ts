import { execFile } from "node:child_process";
import { existsSync } from "node:fs";
import { chown, mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { promisify } from "node:util";
import { startPostgres } from "@holdfast/cli";
import mysql from "mysql2/promise";
import { Client } from "pg";
import { describe, expect, inject, onTestFinished, test } from "vitest";
import { serverIdentity, serverTempDir } from "../../packages/cli/src/server-process.ts";
import { copyCheckout } from "./checkout.ts";
import { createDatabase, unavailable } from "./databases.ts";
import { runWorkers, startWorker } from "./processes.ts";
import { type Proxy, startProxy } from "./proxy.ts";
import type { ServerName } from "./servers.ts";
import { eventually } from "./wait.ts";

const ECHO = new URL("./fixtures/echo.ts", import.meta.url);

async function database(server: ServerName) {
  const made = await createDatabase(server);
  onTestFinished(() => made.drop());
  return made;
}

async function connect(connectionString: string) {
  const client = new Client({ connectionString });
  client.on("error", () => {});
  await client.connect();
  onTestFinished(() => client.end().catch(() => {}));
  return client;
}

async function ask(client: Client, sql: string): Promise<unknown> {
  const { rows } = await client.query<unknown[]>({ text: sql, rowMode: "array" });
  return rows[0]?.[0];
}

async function proxied(): Promise<{ proxy: Proxy; url: string; direct: string }> {
  const { url } = await database("postgres");
  const proxy = await startProxy({ port: Number(new URL(url).port) });
  onTestFinished(() => proxy.close());
  return { proxy, url: proxy.url(url), direct: url };
}

test("the seed is a number", () => {
  expect(inject("seed")).toBeTypeOf("number");
});

describe("servers", () => {
  test("PostgreSQL 18 gives each test its own database", async () => {
    const [one, two] = await Promise.all([database("postgres"), database("postgres")]);
    const [a, b] = await Promise.all([connect(one.url), connect(two.url)]);
    await a.query("CREATE TABLE t (id int)");
    expect(await ask(b, "SELECT to_regclass('t') IS NULL")).toBe(true);
    expect(Number(await ask(a, "SHOW server_version_num"))).toBeGreaterThanOrEqual(180_000);
  });

  test("the old PostgreSQL is older than 17", async ({ skip }) => {
    skip(unavailable("postgresOld") !== undefined, unavailable("postgresOld"));
    const client = await connect((await database("postgresOld")).url);
    expect(Number(await ask(client, "SHOW server_version_num"))).toBeLessThan(170_000);
  });

  test("PgBouncer gives a backend away between transactions", async ({ skip }) => {
    skip(unavailable("pgbouncer") !== undefined, unavailable("pgbouncer"));
    const { url } = await database("pgbouncer");
    const [a, b] = [await connect(url), await connect(url)];
    const first = await ask(a, "SELECT pg_backend_pid()");
    await b.query("BEGIN");
    expect(await ask(b, "SELECT pg_backend_pid()")).toBe(first);
    expect(await ask(a, "SELECT pg_backend_pid()")).not.toBe(first);
    await b.query("ROLLBACK");
  });

  test.for(["mariadb", "mysql"] as const)("%s gives each test its own database", async (server, { skip }) => {
    skip(unavailable(server) !== undefined, unavailable(server));
    const [one, two] = await Promise.all([database(server), database(server)]);
    const [a, b] = await Promise.all([mysql.createConnection(one.url), mysql.createConnection(two.url)]);
    onTestFinished(async () => {
      await Promise.all([a.end(), b.end()]);
    });
    await a.query("CREATE TABLE t (id int)");
    await expect(b.query("SELECT * FROM t")).rejects.toMatchObject({ code: "ER_NO_SUCH_TABLE" });
    const anonymous = new URL(one.url);
    anonymous.username = "root";
    anonymous.password = "";
    await expect(mysql.createConnection(anonymous.href)).rejects.toMatchObject({
      code: "ER_ACCESS_DENIED_ERROR",
    });
  });
});

describe("startPostgres", () => {
  test("restarts on its port, with its data", async () => {
    const server = await startPostgres();
    onTestFinished(() => server.stop());
    const before = await connect(server.url());
    await before.query("CREATE TABLE t AS SELECT 7 AS x");
    for (const mode of ["fast", "immediate"] as const) {
      const { pid } = server;
      await server.restart(mode);
      expect(server.pid).not.toBe(pid);
      expect(await ask(await connect(server.url()), "SELECT x FROM t")).toBe(7);
    }
    await expect(before.query("SELECT 1")).rejects.toThrow(/./);
  });

  test("wants a password", async () => {
    const server = await startPostgres();
    onTestFinished(() => server.stop());
    const url = server.url("postgres", { password: "guess" });
    await expect(connect(url)).rejects.toMatchObject({ code: "28P01" });
  });

  test("keeps a given data directory, and opens it again", async () => {
    const dataDir = await mkdtemp(join(serverTempDir(), "holdfast-kept-"));
    onTestFinished(() => rm(dataDir, { recursive: true }));
    const first = await startPostgres({ dataDir });
    await first.createDatabase("kept");
    await first.stop();
    const second = await startPostgres({ dataDir });
    onTestFinished(() => second.stop());
    expect(second.password).toBe(first.password);
    expect(await ask(await connect(second.url("kept")), "SELECT current_database()")).toBe("kept");
    await second.dropDatabase("kept");
    await expect(connect(second.url("kept"))).rejects.toMatchObject({ code: "3D000" });
  });

  test("says why the server did not start", async () => {
    await expect(startPostgres({ settings: { max_connections: "many" } })).rejects.toThrow(
      /invalid value for parameter "max_connections": "many"/,
    );
  });

  test("leaves nothing behind when its process is killed", async () => {
    const worker = startWorker(new URL("./fixtures/hold-postgres.ts", import.meta.url));
    const { pid, url } = await worker.message<{ pid: number; url: string }>("started");
    const data = String(await ask(await connect(url), "SHOW data_directory"));
    expect(existsSync(data)).toBe(true);
    worker.sigkill();
    await eventually(() => !existsSync(data));
    await eventually(() => expect(() => process.kill(pid, 0)).toThrow("ESRCH"));
  });

  test("works for an ordinary user, in a checkout of somebody else", async () => {
    const home = await mkdtemp(join(serverTempDir(), "holdfast-user-"));
    onTestFinished(() => rm(home, { recursive: true }));
    const checkout = join(home, "checkout");
    await promisify(execFile)("mkdir", [checkout, join(home, "tmp")]);
    const identity = serverIdentity();
    const node = await copyCheckout(checkout);
    await promisify(execFile)("chmod", ["755", home]);
    if (identity) await chown(join(home, "tmp"), identity.uid, identity.gid);
    const script = `
      import { startPostgres } from "./src/embedded.ts";
      const server = await startPostgres();
      await server.createDatabase("mine");
      await server.restart();
      await server.stop();
      console.log(JSON.stringify({ uid: process.getuid() }));
    `;
    await writeFile(join(checkout, "script.ts"), script);
    const { stdout } = await promisify(execFile)(node, ["script.ts"], {
      ...identity,
      cwd: checkout,
      env: { PATH: process.env["PATH"], TMPDIR: join(home, "tmp") },
    });
    expect(JSON.parse(stdout)).toEqual({ uid: identity?.uid ?? process.getuid?.() });
    const left = await readdir(join(home, "tmp"));
    expect(left).toEqual([expect.stringMatching(/^holdfast-embedded-/)]);
  });
});

describe("proxy", () => {
  test("counts round trips", async () => {
    const { proxy, url } = await proxied();
    const client = await connect(url);
    expect(proxy.roundTrips).toBeGreaterThan(0);
    proxy.resetCount();
    await client.query("SELECT 1");
    expect(proxy.roundTrips).toBe(1);
    await client.query("SELECT 1");
    await client.query("SELECT $1::int", [1]);
    expect(proxy.roundTrips).toBe(3);
  });

  test("delays both directions and keeps the order", async () => {
    const { proxy, url } = await proxied();
    const client = await connect(url);
    proxy.delayMs = 30;
    const start = performance.now();
    await client.query("SELECT 1");
    expect(performance.now() - start).toBeGreaterThanOrEqual(60);
    const { rows } = await client.query("SELECT i FROM generate_series(1, 200000) AS i");
    expect(rows.map((row: { i: number }) => row.i)).toEqual(Array.from({ length: 200_000 }, (_, i) => i + 1));
  });

  test("cuts connections", async () => {
    const { proxy, url } = await proxied();
    const client = await connect(url);
    const query = client.query("SELECT pg_sleep(60)");
    query.catch(() => {});
    proxy.cut();
    await expect(query).rejects.toMatchObject({ code: "ECONNRESET" });
    await eventually(() => proxy.connections === 0);
    expect(await ask(await connect(url), "SELECT 1")).toBe(1);
  });

  test.each([
    ["drop-answer", "1"],
    ["cut-before", "0"],
  ] as const)("cutWhen: %s", async (verdict, count) => {
    const { proxy, url, direct } = await proxied();
    const watcher = await connect(direct);
    await watcher.query("CREATE TABLE t (id int)");
    const client = await connect(url);
    await client.query("BEGIN");
    await client.query("INSERT INTO t VALUES (1)");
    proxy.cutWhen((direction, chunk) =>
      direction === "to-server" && chunk.includes("COMMIT") ? verdict : "pass",
    );
    await expect(client.query("COMMIT")).rejects.toThrow(/./);
    expect(proxy.cuts).toBe(1);
    await eventually(async () => {
      const sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()";
      expect(await ask(watcher, sessions)).toBe("1");
    });
    expect(await ask(watcher, "SELECT count(*) FROM t")).toBe(count);
  });

  test("freezes and thaws", async () => {
    const { proxy, url } = await proxied();
    const client = await connect(url);
    proxy.freeze();
    let answered = false;
    const query = client.query("SELECT 1").then(() => (answered = true));
    await new Promise((resolve) => setTimeout(resolve, 200));
    expect(answered).toBe(false);
    proxy.thaw();
    expect(await query).toBe(true);
  });

  test("rewrites bytes", async () => {
    const { proxy, url } = await proxied();
    const client = await connect(url);
    proxy.rewrite((direction, chunk) =>
      direction === "to-client"
        ? Buffer.from(chunk.toString("latin1").replace("new", "old"), "latin1")
        : chunk,
    );
    expect(await ask(client, "SELECT 'new'")).toBe("old");
  });
});

describe("workers", () => {
  test("return, throw, and talk", async () => {
    const worker = startWorker(ECHO, {});
    expect(await worker.message("ready")).toBe(worker.pid);
    worker.send("ping", new Map([[1, 2n]]));
    expect(await worker.message("pong")).toEqual(new Map([[1, 2n]]));
    worker.send("stop");
    expect(await worker.result).toEqual({ pid: worker.pid, date: new Date(0) });
    expect(await worker.exited).toEqual({ code: 0, signal: null });

    const failing = startWorker(ECHO, { fail: true });
    failing.send("stop");
    await expect(failing.result).rejects.toMatchObject({
      name: "TypeError",
      message: "as told",
      code: "E_TOLD",
      stack: expect.stringContaining("fixtures/echo.ts"),
    });
  });

  test("run in several processes", async () => {
    const pids = await runWorkers(new URL("./fixtures/pid.ts", import.meta.url), 3, "x");
    expect(new Set(pids).size).toBe(3);
  });

  test("SIGSTOP, SIGCONT and SIGKILL", async () => {
    const worker = startWorker(ECHO, {});
    await worker.message("ready");
    worker.sigstop();
    worker.send("ping", 1);
    let answered = false;
    const pong = worker.message("pong").then((payload) => {
      answered = true;
      return payload;
    });
    await new Promise((resolve) => setTimeout(resolve, 300));
    expect(answered).toBe(false);
    worker.sigcont();
    expect(await pong).toBe(1);
    const never = worker.message("never");
    worker.sigkill();
    expect(await worker.exited).toEqual({ code: null, signal: "SIGKILL" });
    await expect(never).rejects.toThrow("SIGKILL");
    await expect(worker.result).rejects.toThrow("SIGKILL");
  });

  test.each([false, true])("don't outlive their parent (stopped: %s)", async (stop) => {
    const parent = startWorker(new URL("./fixtures/parent.ts", import.meta.url), { stop });
    const pid = await parent.message<number>("child");
    process.kill(pid, 0);
    parent.sigkill();
    await eventually(() => expect(() => process.kill(pid, 0)).toThrow("ESRCH"));
  });
});

test("eventually tells what was missing", async () => {
  let calls = 0;
  expect(await eventually(() => ++calls > 3)).toBe(true);
  const never = eventually(() => Promise.reject(new Error("still dark")), { timeout: 50 });
  await expect(never).rejects.toThrow("still dark");
});
