/** Applications in other processes, explored through a proxy between them and their database. */
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { type Proxy, type Scenario, explore, proxied } from "holdfast/testing";
import mysql from "mysql2/promise";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { noPsycopg, startUploads } from "./harness/python.ts";
import { type Worker, startWorker } from "./harness/processes.ts";

/** An upload, as a client would ask for it. */
const uploads = (port: number, how: string) => {
  const upload = async () => {
    const answer = await fetch(`http://127.0.0.1:${port}/?bytes=60&how=${how}`);
    const text = await answer.text();
    if (!answer.ok && !text.includes("quota")) throw new Error(text);
    return text;
  };
  return { A: upload, B: upload };
};

describe("PostgreSQL", () => {
  const reason = unavailable("postgres");
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  let database: TestDatabase;
  let pool: Pool;
  let proxy: Proxy;
  let server: Worker;
  let port: number;

  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase("postgres");
    pool = new Pool({ connectionString: database.url, max: 2 });
    await pool.query(`
      CREATE TABLE person (name text PRIMARY KEY);
      CREATE TABLE image (person text REFERENCES person, bytes int NOT NULL);
      INSERT INTO person VALUES ('ada')`);
    proxy = await proxied(fromPg(pool), database.url);
    server = startWorker(new URL("workers/upload-server.ts", import.meta.url), { url: proxy.url });
    port = await server.message<number>("port");
  });

  afterAll(async () => {
    server?.sigkill();
    await server?.exited;
    await proxy?.close();
    await pool?.end();
    await database?.drop();
  });

  const invariant: Scenario["invariant"] = async () => {
    const { rows } = await pool.query<{ used: number }>(
      "SELECT coalesce(sum(bytes), 0)::int AS used FROM image",
    );
    expect(rows[0]?.used).toBeLessThanOrEqual(100);
  };

  test("a server in another process: the race is found", async () => {
    const report = await explore("uploads", {
      db: fromPg(pool),
      proxy,
      actors: uploads(port, "naive"),
      invariant,
    });
    expect(report).toMatchObject({ ok: false, anomaly: "phantom", preemptions: 1 });
  });

  test("the fix passes, and all orders are tried", async () => {
    const report = await explore("uploads", {
      db: fromPg(pool),
      proxy,
      actors: uploads(port, "locked"),
      invariant,
      maxMs: 60_000,
    });
    expect(report).toMatchObject({ ok: true, coverage: "exhaustive" });
  });

  test("an application that insists on TLS, and checks the certificate", async () => {
    await using secure = await proxied(fromPg(pool), database.url, { tls: true });
    const worker = startWorker(new URL("workers/upload-server.ts", import.meta.url), {
      url: secure.url,
      ssl: { ca: secure.certificate, rejectUnauthorized: true },
    });
    try {
      const report = await explore("uploads", {
        db: fromPg(pool),
        proxy: secure,
        actors: uploads(await worker.message<number>("port"), "naive"),
        invariant,
        maxMs: 60_000,
      });
      expect(report).toMatchObject({ ok: false, anomaly: "phantom", preemptions: 1 });
    } finally {
      worker.sigkill();
      await worker.exited;
    }
    // Without it, that is not to be had.
    const client = new Client({ connectionString: proxy.url, ssl: { rejectUnauthorized: false } });
    await expect(client.connect()).rejects.toThrow("The server does not support SSL connections");
  });

  test("a server that is asked over TLS, whose certificate is checked on request", async () => {
    await using secure = await proxied(fromPg(pool), database.url, { tls: true });
    const long = "x".repeat(1_000_000);
    const ask = async (to: string, mode: string) => {
      await using outer = await proxied(fromPg(pool), `${to}?sslmode=${mode}`);
      const client = new Client({ connectionString: outer.url });
      await client.connect();
      const { rows } = await client.query<{ n: number }>("SELECT length($1)::int AS n", [long]);
      await client.end();
      return rows[0]?.n;
    };
    expect(await ask(secure.url, "require")).toBe(long.length);
    // Nobody has signed it, or the server has none.
    await expect(ask(secure.url, "verify-full")).rejects.toThrow("Connection terminated unexpectedly");
    await expect(ask(proxy.url, "require")).rejects.toThrow("Connection terminated unexpectedly");
  });

  test("what cannot be, is said", async () => {
    const db = fromPg(pool);
    await expect(proxied(db, "/var/run/postgresql")).rejects.toThrow("names a host");
    const on = { db, actors: uploads(port, "naive"), invariant };
    await expect(explore("uploads", { ...on, proxy, faults: ["crash"] })).rejects.toThrow(
      "cannot be made to crash",
    );
    await expect(explore("uploads", on)).rejects.toThrow("only through a proxy");
  });

  test("two that go on at once, when one gives back what the other one waits for, are told apart", async () => {
    const report = await explore("uploads", {
      db: fromPg(pool),
      proxy,
      actors: uploads(port, "session"),
      invariant,
      maxMs: 60_000,
    });
    expect(report.ok).toBe(true);
    // Whether its pool could lend a connection that has a lock cannot be tried from here.
    expect(report.levels[0]).toMatchObject({
      slept: [],
      unseen: [],
      lent: ["A", "B"],
      coverage: { runs: report.runs },
    });
    expect(report.levels[0]?.guessed).toBeUndefined();
  });
});

describe("a server in Python", () => {
  const reason = unavailable("postgres") ?? noPsycopg();
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  let database: TestDatabase;
  let pool: Pool;
  let proxy: Proxy;
  let server: Awaited<ReturnType<typeof startUploads>>;

  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase("postgres");
    pool = new Pool({ connectionString: database.url, max: 2 });
    await pool.query(`
      CREATE TABLE person (name text PRIMARY KEY);
      CREATE TABLE image (person text REFERENCES person, bytes int NOT NULL);
      INSERT INTO person VALUES ('ada')`);
    proxy = await proxied(fromPg(pool), database.url);
    server = await startUploads(proxy.url);
  });

  afterAll(async () => {
    server?.stop();
    await proxy?.close();
    await pool?.end();
    await database?.drop();
  });

  const invariant: Scenario["invariant"] = async () => {
    const { rows } = await pool.query<{ used: number }>(
      "SELECT coalesce(sum(bytes), 0)::int AS used FROM image",
    );
    expect(rows[0]?.used).toBeLessThanOrEqual(100);
  };

  test("the race is found, and the fix passes", async () => {
    const on = { db: fromPg(pool), proxy, invariant, maxMs: 60_000 };
    const naive = await explore("uploads", { ...on, actors: uploads(server.port, "naive") });
    expect(naive).toMatchObject({ ok: false, anomaly: "phantom", preemptions: 1 });
    const locked = await explore("uploads", { ...on, actors: uploads(server.port, "locked") });
    expect(locked).toMatchObject({ ok: true, coverage: "exhaustive" });
  });
});

describe.each(["mysql", "mariadb"] as const)("%s", (name) => {
  const reason = unavailable(name);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  test("the race is found, and the fix passes", async () => {
    const database = await createDatabase(name);
    const pool = mysql.createPool({ uri: database.url, connectionLimit: 2 });
    await pool.query("CREATE TABLE person (name varchar(20) PRIMARY KEY)");
    await pool.query("CREATE TABLE image (id int AUTO_INCREMENT PRIMARY KEY, person varchar(20), bytes int)");
    await pool.query("INSERT INTO person VALUES ('ada')");
    const proxy = await proxied(fromMysql2(pool), database.url);
    const server = startWorker(new URL("workers/upload-server.ts", import.meta.url), { url: proxy.url });
    try {
      const port = await server.message<number>("port");
      const invariant = async () => {
        const [rows] = await pool.query<mysql.RowDataPacket[]>("SELECT sum(bytes) AS used FROM image");
        expect(Number(rows[0]?.["used"])).toBeLessThanOrEqual(100);
      };
      // The transactions' own level would let a snapshot that is older than the lock be read.
      const on = {
        db: fromMysql2(pool),
        proxy,
        invariant,
        maxMs: 60_000,
        isolation: "read committed",
      } as const;
      const naive = await explore("uploads", { ...on, actors: uploads(port, "naive") });
      expect(naive).toMatchObject({ ok: false, anomaly: "phantom", preemptions: 1 });
      const locked = await explore("uploads", { ...on, actors: uploads(port, "locked") });
      expect(locked).toMatchObject({ ok: true, coverage: "exhaustive" });
    } finally {
      server.sigkill();
      await server.exited;
      await proxy.close();
      await pool.end();
      await database.drop();
    }
  });
});
