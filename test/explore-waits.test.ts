/** Every wait is recognised, or ends with a reason; and nothing is left locked after it. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import Sqlite from "better-sqlite3";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { type Scenario, type ThreadScenario, explore, inThread } from "holdfast/testing";
import { type Pool as MysqlPool, createPool } from "mysql2/promise";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type Proxy, startProxy } from "./harness/proxy.ts";

/** For what ends by itself after a few seconds; a hang takes longer than any test. */
const timeout = 30_000;

const sell = async (from: Pool, lock: string) => {
  const client = await from.connect();
  try {
    await client.query("BEGIN");
    const { rows } = await client.query(`SELECT qty FROM stock WHERE id = 'pen' ${lock}`);
    if (rows[0].qty >= 1) await client.query("UPDATE stock SET qty = $1 WHERE id = 'pen'", [rows[0].qty - 1]);
    await client.query("COMMIT");
    return rows[0].qty >= 1;
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
};
const soldOnce: Scenario["invariant"] = ({ A, B }) =>
  expect([A, B].filter((each) => each?.status === "fulfilled" && each.value).length).toBe(1);

const schema =
  "CREATE TABLE stock (id text PRIMARY KEY, qty int NOT NULL); INSERT INTO stock VALUES ('pen', 1)";

describe.each(["postgres", "postgresOld"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  let proxy: Proxy;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = new Pool({ connectionString: database.url, max: 6 });
    proxy = await startProxy({ port: Number(new URL(database.url).port) });
    await pool.query(schema);
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await pool?.end();
    await proxy?.close();
    await database?.drop();
  });

  const reset = () => pool.query("UPDATE stock SET qty = 1");
  const twice = (act: () => Promise<unknown>, more: Partial<Scenario> = {}) =>
    explore("twice", { db: fromPg(pool), reset, actors: { A: act, B: act }, invariant: soldOnce, ...more });
  const works = async () => {
    expect(await twice(() => sell(pool, "FOR UPDATE"))).toMatchObject({ ok: true, coverage: "exhaustive" });
    expect(await twice(() => sell(pool, ""))).toMatchObject({ ok: false, preemptions: 1 });
  };

  test("through a proxy, whose ports are not the clients'", { timeout }, async () => {
    const far = new Pool({ connectionString: proxy.url(database.url), max: 6 });
    try {
      for (const db of [fromPg(pool), fromPg(far)]) {
        expect(await twice(() => sell(far, "FOR UPDATE"), { db })).toMatchObject({
          ok: true,
          coverage: "exhaustive",
        });
        expect(await twice(() => sell(far, ""), { db })).toMatchObject({ ok: false, preemptions: 1 });
      }
    } finally {
      await far.end();
    }
  });

  test("asked by another user, who sees nothing of the actors' sessions", { timeout }, async () => {
    const name = `asks_${database.name}`;
    await pool.query(`CREATE ROLE ${name} LOGIN PASSWORD 'secret'`);
    const url = new URL(database.url);
    [url.username, url.password] = [name, "secret"];
    const other = new Pool({ connectionString: url.href, max: 2 });
    try {
      const db = fromPg(other);
      expect(await twice(() => sell(pool, "FOR UPDATE"), { db })).toMatchObject({
        ok: true,
        coverage: "exhaustive",
      });
      expect(await twice(() => sell(pool, ""), { db })).toMatchObject({ ok: false });
    } finally {
      await other.end();
      await pool.query(`DROP ROLE ${name}`);
    }
  });

  test("a lock of somebody else is named, and the next exploration works", { timeout }, async () => {
    const client = new Client({ connectionString: database.url, application_name: "nightly report" });
    await client.connect();
    try {
      await client.query("BEGIN");
      await client.query("SELECT 1 FROM stock WHERE id = 'pen' FOR UPDATE /* keeps it */");
      const { rows } = await client.query("SELECT pg_backend_pid() AS pid, current_user AS me");
      await client.query("SELECT 2 /* then this */");
      const held = twice(() => sell(pool, "FOR UPDATE"), { reset: async () => {} });
      await expect(held).rejects.toThrow(
        new RegExp(
          `A waits for a lock that no actor has: "SELECT qty .*" waits for session ${rows[0].pid} of ${rows[0].me}, application nightly report, idle in transaction, its last statement: SELECT 2 /\\* then this \\*/`,
        ),
      );
      // Nobody of ours still waits for it, or has something open.
      const left = await pool.query(
        "SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND state <> 'idle' AND pid NOT IN ($1, pg_backend_pid())",
        [rows[0].pid],
      );
      expect(left.rows[0].n).toBe(0);
      await client.query("ROLLBACK");
    } finally {
      await client.end();
    }
    await works();
  });

  test("a deadlock that the server ends before anybody has looked", { timeout }, async () => {
    await pool.query(
      "CREATE TABLE account (id int PRIMARY KEY, n int); INSERT INTO account VALUES (1, 0), (2, 0)",
    );
    const move = (ids: readonly number[]) => async () => {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        for (const id of ids) await client.query("UPDATE account SET n = n + 1 WHERE id = $1", [id]);
        await client.query("COMMIT");
      } catch (error) {
        await client.query("ROLLBACK");
        throw error;
      } finally {
        client.release();
      }
    };
    // A machine that is busy with others for a while: who waits for whom is known late, and whom it ends is another one.
    const db = fromPg(pool);
    const { engine } = db;
    let runs = 0;
    const waiting: NonNullable<typeof engine.protocol>["waiting"] = async (...args) => {
      if (runs < 8) await sleep(100);
      return (engine.protocol as NonNullable<typeof engine.protocol>).waiting(...args);
    };
    const slow = Object.create(db, {
      engine: {
        value: Object.create(engine, {
          protocol: { value: Object.assign(Object.create(engine.protocol ?? null), { waiting }) },
        }),
      },
    }) as typeof db;
    const report = await explore("moves", {
      db: slow,
      reset: async () => void runs++,
      actors: { A: move([1, 2]), B: move([2, 1]) },
      invariant: () => {},
      maxMs: 25_000,
    });
    expect(report).toMatchObject({ ok: true });
    expect(report.deadlocks).toBeGreaterThan(0);
  });

  test("an actor that waits for itself", { timeout }, async () => {
    const act = async () => {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        await client.query("UPDATE stock SET qty = 0 WHERE id = 'pen'");
        await pool.query("UPDATE stock SET qty = 0 WHERE id = 'pen'");
        await client.query("COMMIT");
      } finally {
        await client.query("ROLLBACK").finally(() => client.release());
      }
    };
    await expect(twice(act)).rejects.toThrow(/nobody can go on|did not end in time/);
    await works();
  });

  test("a statement that takes too long", { timeout }, async () => {
    const act = async () => {
      await pool.query("SELECT pg_sleep(600)");
    };
    await expect(twice(act, { maxMs: 1 })).rejects.toThrow(
      /pg_sleep.*not answered for 1 s|time was over.*pg_sleep/,
    );
    await works();
  });

  test("an actor that does nothing, and one that leaves its transaction open", { timeout }, async () => {
    await expect(twice(() => new Promise(() => {}), { maxMs: 1 })).rejects.toThrow(
      /neither sends a statement|(?:time was over|did not end in time).*something that is not a statement/,
    );
    const clients: { release(destroy: boolean): void }[] = [];
    const act = async () => {
      const client = await pool.connect();
      clients.push(client);
      await client.query("BEGIN");
      await client.query("UPDATE stock SET qty = 0 WHERE id = 'pen'");
    };
    await expect(twice(act, { maxMs: 1 })).rejects.toThrow(/nobody can go on|in time|does not end/);
    for (const client of clients) client.release(true);
    await works();
  });

  test("a signal ends it, and what is asked for meanwhile comes after it", { timeout }, async () => {
    const controller = new AbortController();
    const endless = twice(() => sell(pool, "FOR UPDATE"), {
      maxMs: 600_000,
      signal: controller.signal,
      async invariant() {
        controller.abort(new Error("The test is over"));
      },
    });
    const next = works();
    await expect(endless).rejects.toThrow("The test is over");
    await next;
  });
});

describe("behind PgBouncer, in transaction mode", () => {
  const why = unavailable("pgbouncer") ?? unavailable("postgres");
  let database: TestDatabase;
  let pool: Pool;
  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase("pgbouncer");
    pool = new Pool({ connectionString: database.url, max: 6 });
    await pool.query(`${schema}; CREATE TABLE seat (n int)`);
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await pool?.end();
    await database?.drop();
  });

  const twice = (act: () => Promise<unknown>, more: Partial<Scenario> = {}) =>
    explore("twice", {
      db: fromPg(pool),
      reset: () => pool.query("UPDATE stock SET qty = 1; DELETE FROM seat"),
      actors: { A: act, B: act },
      invariant: soldOnce,
      ...more,
    });

  test("waits are seen, whichever session a transaction has", { timeout }, async () => {
    expect(await twice(() => sell(pool, "FOR UPDATE"))).toMatchObject({ ok: true, coverage: "exhaustive" });
    expect(await twice(() => sell(pool, ""))).toMatchObject({
      ok: false,
      preemptions: 1,
      anomaly: "lost update",
    });
    expect(await twice(() => sell(pool, ""), { isolation: "repeatable read" })).toMatchObject({ ok: true });
    const { rows } = await pool.query(
      "SELECT current_setting('application_name') AS name, current_setting('default_transaction_isolation') AS level",
    );
    expect(rows[0]).toEqual({
      name: expect.not.stringContaining("holdfast explore"),
      level: "read committed",
    });
  });

  test("and statements by themselves are kept open", { timeout }, async () => {
    const guarded = "INSERT INTO seat SELECT 1 WHERE (SELECT count(*) FROM seat) < 1";
    const report = await twice(() => pool.query(guarded), {
      async invariant() {
        expect((await pool.query("SELECT count(*)::int AS n FROM seat")).rows[0].n).toBe(1);
      },
    });
    expect(report).toMatchObject({ ok: false, preemptions: 1 });
    const atomic = async () =>
      (await pool.query("UPDATE stock SET qty = qty - 1 WHERE id = 'pen' AND qty >= 1")).rowCount === 1;
    expect(await twice(atomic)).toMatchObject({ ok: true, coverage: "exhaustive" });
  });
});

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: MysqlPool;
  let far: MysqlPool;
  let proxy: Proxy;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 6 });
    proxy = await startProxy({ port: Number(new URL(database.url).port) });
    far = createPool({ uri: proxy.url(database.url), connectionLimit: 6 });
    await pool.query("CREATE TABLE stock (id varchar(20) PRIMARY KEY, qty int NOT NULL)");
    await pool.query("INSERT INTO stock VALUES ('pen', 1)");
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await Promise.all([pool?.end(), far?.end()]);
    await proxy?.close();
    await database?.drop();
  });

  const sellOn = async (from: MysqlPool, lock: string) => {
    const connection = await from.getConnection();
    try {
      await connection.query("START TRANSACTION");
      const [rows] = (await connection.query(
        `SELECT qty FROM stock WHERE id = 'pen' ${lock}`,
      )) as unknown as [{ qty: number }[]];
      const qty = rows[0]?.qty ?? 0;
      if (qty >= 1) await connection.query("UPDATE stock SET qty = ? WHERE id = 'pen'", [qty - 1]);
      await connection.query("COMMIT");
      return qty >= 1;
    } catch (error) {
      await connection.query("ROLLBACK");
      throw error;
    } finally {
      connection.release();
    }
  };
  const twice = (act: () => Promise<unknown>, more: Partial<Scenario> = {}) =>
    explore("twice", {
      db: fromMysql2(pool),
      reset: () => pool.query("UPDATE stock SET qty = 1"),
      actors: { A: act, B: act },
      invariant: soldOnce,
      maxMs: 20_000,
      ...more,
    });

  test("through a proxy", { timeout }, async () => {
    expect(await twice(() => sellOn(far, "FOR UPDATE"))).toMatchObject({ ok: true, coverage: "exhaustive" });
    expect(await twice(() => sellOn(far, ""))).toMatchObject({ ok: false, preemptions: 1 });
  });

  test("a lock of somebody else is named, and the next exploration works", { timeout }, async () => {
    const connection = await far.getConnection();
    await connection.query("START TRANSACTION");
    await connection.query("SELECT 1 FROM stock WHERE id = 'pen' FOR UPDATE");
    const id = connection.threadId === null ? "" : String(connection.threadId);
    await expect(twice(() => sellOn(pool, "FOR UPDATE"), { reset: async () => {} })).rejects.toThrow(
      new RegExp(`A waits for a lock that no actor has: .*session ${id} of`),
    );
    await connection.query("ROLLBACK");
    connection.release();
    await works();
  });

  const works = async () => {
    expect(await twice(() => sellOn(pool, "FOR UPDATE"))).toMatchObject({ ok: true, coverage: "exhaustive" });
    expect(await twice(() => sellOn(pool, ""))).toMatchObject({ ok: false, preemptions: 1 });
  };

  test("asked by another user", { timeout }, async () => {
    const name = `asks_${database.name}`.slice(0, 30);
    await pool.query(`CREATE USER ${name}@'%' IDENTIFIED BY 'secret'`);
    await pool.query(`GRANT PROCESS ON *.* TO ${name}@'%'`);
    await pool.query(
      `GRANT SELECT ON ${server === "mysql" ? "performance_schema.*" : `${database.name}.*`} TO ${name}@'%'`,
    );
    await pool.query(`GRANT SELECT ON ${database.name}.* TO ${name}@'%'`);
    const url = new URL(database.url);
    [url.username, url.password] = [name, "secret"];
    const other = createPool({ uri: url.href, connectionLimit: 2 });
    try {
      const db = fromMysql2(other);
      expect(await twice(() => sellOn(pool, "FOR UPDATE"), { db })).toMatchObject({
        ok: true,
        coverage: "exhaustive",
      });
      expect(await twice(() => sellOn(pool, ""), { db })).toMatchObject({ ok: false });
    } finally {
      await other.end();
      await pool.query(`DROP USER ${name}@'%'`);
    }
  });

  test("an actor that waits for itself", { timeout }, async () => {
    const act = async () => {
      const connection = await pool.getConnection();
      try {
        await connection.query("START TRANSACTION");
        await connection.query("UPDATE stock SET qty = 0 WHERE id = 'pen'");
        await pool.query("UPDATE stock SET qty = 0 WHERE id = 'pen'");
        await connection.query("COMMIT");
      } finally {
        await connection.query("ROLLBACK").finally(() => connection.release());
      }
    };
    await expect(twice(act, { maxMs: 3500 })).rejects.toThrow(/nobody can go on|did not end in time/);
    await works();
  });

  test("a statement that takes too long", { timeout }, async () => {
    const act = async () => {
      await pool.query("SELECT SLEEP(600)");
    };
    await expect(twice(act, { maxMs: 1 })).rejects.toThrow(
      /SLEEP.*not answered for 1 s|time was over.*SLEEP/i,
    );
    await works();
  });

  test("an actor that does nothing, and one that leaves its transaction open", { timeout }, async () => {
    await expect(twice(() => new Promise(() => {}), { maxMs: 1 })).rejects.toThrow(
      /neither sends a statement|(?:time was over|did not end in time).*something that is not a statement/,
    );
    const connections: { destroy(): void }[] = [];
    const act = async () => {
      const connection = await pool.getConnection();
      connections.push(connection);
      await connection.query("START TRANSACTION");
      await connection.query("UPDATE stock SET qty = 0 WHERE id = 'pen'");
    };
    await expect(twice(act, { maxMs: 1 })).rejects.toThrow(/nobody can go on|in time|does not end/);
    for (const connection of connections) connection.destroy();
    await works();
  });

  test("a signal ends it, and what is asked for meanwhile comes after it", { timeout }, async () => {
    const controller = new AbortController();
    const endless = twice(() => sellOn(pool, "FOR UPDATE"), {
      maxMs: 600_000,
      signal: controller.signal,
      async invariant() {
        controller.abort(new Error("The test is over"));
      },
    });
    const next = works();
    await expect(endless).rejects.toThrow("The test is over");
    await next;
  });
});

/** There is no proxy, no other user, and no pool: a connection is a file that a thread has opened. */
describe("on SQLite", () => {
  let folder: string;
  let db: Sqlite.Database;
  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-waits-"));
    db = new Sqlite(join(folder, "waits.db"), { timeout: 100 });
    db.exec(`PRAGMA journal_mode = WAL; CREATE TABLE stock (id text PRIMARY KEY, qty int NOT NULL);
      INSERT INTO stock VALUES ('pen', 1)`);
  });
  afterAll(async () => {
    db?.close();
    await rm(folder, { recursive: true });
  });

  const module = new URL("./races/sqlite/waits.ts", import.meta.url);
  const twice = (name: string, more: Partial<ThreadScenario> = {}) =>
    explore("twice", {
      reset: () => db.exec("UPDATE stock SET qty = 1"),
      actors: { A: inThread(module, name, db.name), B: inThread(module, name, db.name) },
      invariant: soldOnce,
      ...more,
    });
  const works = async () => {
    expect(await twice("exact")).toMatchObject({ ok: true, coverage: "exhaustive" });
    expect(await twice("naive")).toMatchObject({ ok: false, preemptions: 1 });
  };

  test("a lock of somebody else is told, and the next exploration works", { timeout }, async () => {
    const other = new Sqlite(db.name);
    try {
      other.exec("BEGIN IMMEDIATE");
      await expect(twice("exact", { reset: () => {} })).rejects.toThrow(
        /A waits for a lock that no actor has: "BEGIN IMMEDIATE" waits for a connection that is in no thread of an actor/,
      );
      other.exec("ROLLBACK");
    } finally {
      other.close();
    }
    await works();
  });

  test("an actor that does nothing, and one that leaves its transaction open", { timeout }, async () => {
    await expect(twice("idle", { maxMs: 1 })).rejects.toThrow(
      /neither sends a statement|(?:time was over|did not end in time).*something that is not a statement/,
    );
    // It is rolled back, as at the end of its process.
    await expect(twice("leavesOpen", { invariant: () => {} })).resolves.toMatchObject({ ok: true });
    await works();
  });

  test("a signal ends it", { timeout }, async () => {
    const controller = new AbortController();
    const endless = twice("exact", {
      maxMs: 600_000,
      signal: controller.signal,
      invariant: () => controller.abort(new Error("The test is over")),
    });
    await expect(endless).rejects.toThrow("The test is over");
    await works();
  });
});
