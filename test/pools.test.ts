/** Small pools, full pools, silent networks: nothing may wait for ever, and nothing may be left behind. */
import { execFile } from "node:child_process";
import { getEventListeners } from "node:events";
import { setTimeout as delay } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { ConnectionLostError, type Holdfast, holdfast, key, sql } from "holdfast";
import { drizzle } from "drizzle-orm/node-postgres";
import { fromDrizzle } from "holdfast/drizzle";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { type PoolConnection, createPool } from "mysql2/promise";
import { Client, Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { backendNamed } from "./backends.ts";
import { type Proxy, isCommit, startProxy } from "./harness/proxy.ts";

let database: TestDatabase;

beforeAll(async () => {
  database = await createDatabase("postgres");
});

afterAll(() => database.drop());

function pgPool(max: number, connectionString = database.url): Pool {
  const pool = new Pool({ connectionString, max });
  pool.on("error", () => {});
  return pool;
}

describe("a network that falls silent", () => {
  let proxy: Proxy;
  beforeAll(async () => {
    proxy = await startProxy({ port: Number(new URL(database.url).port) });
  });
  afterAll(() => proxy.close());

  test.each([
    ["pg", "in BEGIN"],
    ["pg", "in the body"],
    ["pg", "in COMMIT"],
    ["postgres.js", "in BEGIN"],
    ["postgres.js", "in the body"],
  ])("%s, %s: the deadline is kept", async (client, moment) => {
    const url = proxy.url(database.url);
    const pool = pgPool(2, url);
    const sqlPool = postgres(url, { max: 2 });
    const hf = (
      client === "pg" ? holdfast(fromPg(pool)) : holdfast(fromPostgres(sqlPool))
    ) as Holdfast<unknown>;
    await hf.transaction({ lock: key("silent") }, async () => {});
    if (moment === "in BEGIN") proxy.freeze();
    const running = hf.transaction({ lock: key("silent"), deadline: 500, retry: false }, async (tx) => {
      if (moment === "in the body") {
        proxy.freeze();
        await tx.query(sql`SELECT 1 AS one`);
      } else if (moment === "in COMMIT") proxy.freeze();
    });
    const outcome = running.then(
      () => "resolved",
      (error: unknown) => (error as { code?: string }).code,
    );
    // What became of a COMMIT is asked of the server as soon as it answers again.
    if (moment === "in COMMIT") void delay(8000).then(() => proxy.thaw());
    expect(await outcome).toBeOneOf(
      // A machine that has no time for it may not come to COMMIT before the deadline.
      moment === "in COMMIT"
        ? ["resolved", "HF_CONNECTION_LOST", "HF_COMMIT_UNKNOWN", "HF_DEADLINE"]
        : ["HF_DEADLINE"],
    );
    proxy.thaw();
    await hf.transaction({ lock: key("silent"), wait: 20_000 }, async () => {});
    await pool.end();
    await sqlPool.end({ timeout: 1 });
  });
});

describe("clients that write COMMIT themselves, and a network that falls silent in it", () => {
  const clients = [
    "Prisma",
    "Drizzle",
    "Kysely",
    "Kysely with its pool",
    "Knex",
    "TypeORM",
    "MikroORM",
    "Sequelize",
  ];
  test.concurrent.for(clients)("%s: the call ends", async (name, { expect }) => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const site = await backendNamed(name).open(proxy.url(database.url));
    const hf = holdfast(site.database);
    await hf.transaction(async () => {});
    let armed = false;
    let stalled = false;
    proxy.cutWhen((direction, chunk) => {
      if (!armed || direction !== "to-server" || !/\bcommit\b/i.test(chunk.toString("latin1"))) return "pass";
      armed = false;
      stalled = true;
      return "stall";
    });
    const outcome = await hf
      .transaction({ deadline: 500, retry: false }, async (tx) => {
        await tx.query(sql`SELECT 1 AS one`);
        armed = true;
      })
      .then(
        () => "resolved",
        (error: unknown) => (error as { code?: string }).code,
      );
    expect(stalled).toBe(true);
    // The server has ended it, by the same deadline.
    expect(outcome).toBeOneOf(["HF_CONNECTION_LOST", "HF_DEADLINE"]);
    expect(await hf.transaction({ deadline: 20_000 }, async () => "next")).toBe("next");
    // First: a pool waits for a connection that it cannot end.
    await proxy.close();
    await site.close();
  });
});

test.for<[string, (pool: Pool) => Holdfast<unknown>]>([
  ["pg", (pool) => holdfast(fromPg(pool))],
  ["Drizzle", (pool) => holdfast(fromDrizzle(drizzle({ client: pool })))],
])("%s: the deadline is told, if the server was the first to keep it", async ([, instance]) => {
  const pool = pgPool(2);
  const hf = instance(pool);
  const late = hf.transaction({ deadline: 300, retry: false }, async (tx) => {
    await tx.query(sql`SELECT 1 AS one`);
    // As if the process were frozen: the server has ended the session by then.
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1500);
    await tx.query(sql`SELECT 1 AS one`);
  });
  await expect(late).rejects.toMatchObject({ code: "HF_DEADLINE" });
  await pool.end();
});

test("a session that ends in one breath with its greeting ends no process", async () => {
  const { stdout } = await promisify(execFile)(process.execPath, [
    "--conditions=holdfast-source",
    fileURLToPath(new URL("./workers/one-breath.ts", import.meta.url)),
    database.url,
  ]);
  expect(stdout.trim()).toBe("HF_CONNECTION_LOST");
});

describe("a small pool", () => {
  test.for<[string, () => { hf: Holdfast<unknown>; end(): Promise<unknown> }]>([
    [
      "pg",
      () => {
        const pool = pgPool(1);
        return { hf: holdfast(fromPg(pool)), end: () => pool.end() };
      },
    ],
    [
      "postgres.js",
      () => {
        const pool = postgres(database.url, { max: 1 });
        return { hf: holdfast(fromPostgres(pool)) as Holdfast<unknown>, end: () => pool.end() };
      },
    ],
  ])("%s: of one connection nobody asks for a second", async ([, open]) => {
    const { hf, end } = open();
    const { sessionLocks } = await hf.capabilities();
    expect(sessionLocks).toMatchObject({ why: expect.stringContaining("one connection") });
    await expect(hf.hold(key("one"))).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
    await hf.transaction({ lock: key("one") }, async () => {});
    await end();
  });

  test("lost COMMIT answers are looked up although every connection was lost", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const pool = pgPool(2, proxy.url(database.url));
    const hf = holdfast(fromPg(pool));
    await hf.transaction((tx) => tx.client.query("CREATE TABLE small (n integer)"));
    let armed = 0;
    proxy.cutWhen((direction, chunk) => {
      if (armed === 0 || direction !== "to-server" || !isCommit(chunk)) return "pass";
      armed--;
      return "drop-answer";
    });
    const insert = () =>
      hf.transaction(async (tx) => {
        await tx.client.query("INSERT INTO small VALUES (1)");
        armed++;
      });
    await Promise.all([insert(), insert()]);
    expect((await pool.query("SELECT count(*)::int AS n FROM small")).rows).toEqual([{ n: 2 }]);
    await pool.end();
    await proxy.close();
  });

  test("finds out about sessions with the two connections that it has, also under SERIALIZABLE", async () => {
    const pool = pgPool(2);
    const hf = holdfast(fromPg(pool));
    const lock = key("small", "serializable");
    await Promise.all(
      [0, 1, 2, 3].map(() =>
        hf.transaction({ isolation: "serializable", lock, wait: 20_000 }, async () => {}),
      ),
    );
    const held = await hf.hold(lock);
    await held.release();
    await pool.end();
  });

  test("says so when it has no connection for a session lock, instead of waiting for ever", async () => {
    const pool = pgPool(2);
    const hf = holdfast(fromPg(pool));
    await hf.capabilities();
    const taken = await Promise.all([pool.connect(), pool.connect()]);
    await expect(hf.hold(key("small", "none"), { wait: 100 })).rejects.toMatchObject({
      code: "HF_NO_CONNECTION",
    });
    for (const client of taken) client.release();
    await (await hf.hold(key("small", "none"))).release();
    await pool.end();
  });

  test("the longest deadline and the longest wait that are taken", async () => {
    const pool = pgPool(3);
    const longest = 2 ** 31 - 1 - 60_000;
    const hf = holdfast(fromPg(pool), { wait: longest, deadline: longest });
    await expect(hf.transaction({ deadline: longest + 1 }, async () => {})).rejects.toThrow("deadline");
    await pool.query("CREATE TABLE IF NOT EXISTS long (id int PRIMARY KEY, version int NOT NULL DEFAULT 0)");
    await pool.query("INSERT INTO long VALUES (1) ON CONFLICT DO NOTHING");
    await hf.transaction({ lock: key("long"), deadline: longest, wait: longest }, async (tx) => {
      await tx.row("long", 1, { wait: longest });
      await tx.query(sql`SELECT pg_sleep(0.05)`);
    });
    await pool.end();
  });

  test("an aborted hold on a shared session does not keep it", async () => {
    const pool = pgPool(4);
    const hf = holdfast(fromPg(pool));
    const first = await hf.hold(key("shared", "x"));
    await expect(hf.hold(key("shared", "y"), { signal: AbortSignal.abort(new Error("no")) })).rejects.toThrow(
      "no",
    );
    const controller = new AbortController();
    const second = hf.hold(key("shared", "z"), { signal: controller.signal });
    controller.abort(new Error("late"));
    await second.then((held) => held.release()).catch(() => {});
    await first.release();
    await expect.poll(() => pool.idleCount === pool.totalCount, { timeout: 20_000 }).toBe(true);
    await pool.end();
  });
});

describe("an abort", () => {
  test("ends the caller's own statements on postgres.js, and the place in the line for a connection", async () => {
    const client = postgres(database.url, { max: 1 });
    const hf = holdfast(fromPostgres(client));
    await hf.transaction(async () => {});
    const reason = new Error("enough");
    const sleeping = new AbortController();
    const running = hf.transaction({ signal: sleeping.signal }, (tx) => tx.client`SELECT pg_sleep(60)`);
    const waiting = hf.transaction({ signal: AbortSignal.timeout(100) }, async () => {});
    await expect(waiting).rejects.toThrow(/timeout/);
    sleeping.abort(reason);
    await expect(running).rejects.toBe(reason);
    // The connection is as good as before.
    expect(await hf.transaction((tx) => tx.client`SELECT 1 AS one`)).toEqual([{ one: 1 }]);
    await client.end({ timeout: 5 });
  });

  test("whose cancel request fails does not end the process", async () => {
    const rejections: unknown[] = [];
    const note = (error: unknown) => rejections.push(error);
    process.on("unhandledRejection", note);
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const pool = pgPool(2, proxy.url(database.url));
    const hf = holdfast(fromPg(pool));
    const blocker = new Client({ connectionString: database.url });
    await blocker.connect();
    await hf.capabilities();
    await blocker.query("SELECT pg_advisory_lock(4242)");
    const waiting = hf.transaction(
      { lock: key.bigint(4242), wait: 1000, signal: AbortSignal.timeout(100) },
      async () => {},
    );
    // New connections, which a cancel request is, get nowhere.
    await proxy.close().catch(() => {});
    await expect(waiting).rejects.toThrow();
    await delay(50);
    process.off("unhandledRejection", note);
    expect(rejections).toEqual([]);
    await blocker.end();
    await pool.end();
  });

  test("between the grant and the body is not missed", async () => {
    const pool = pgPool(2);
    const hf = holdfast(fromPg(pool));
    const controller = new AbortController();
    const { subscribe, unsubscribe } = await import("node:diagnostics_channel");
    const abort = () => controller.abort(new Error("now"));
    subscribe("holdfast:lock:granted", abort);
    let entered = false;
    const running = hf.transaction({ lock: key("granted"), signal: controller.signal }, async () => {
      entered = true;
    });
    await expect(running).rejects.toThrow("now");
    unsubscribe("holdfast:lock:granted", abort);
    expect(entered).toBe(false);
    await pool.end();
  });
});

describe("listeners", () => {
  test("are not left on connections, whatever passes over them", async () => {
    const pool = pgPool(1);
    const hf = holdfast(fromPg(pool));
    let client: Client | undefined;
    pool.on("connect", (c) => (client = c as unknown as Client));
    const cycle = async () => {
      await hf.transaction({ lock: key("l") }, async () => {});
      await hf.transaction({ lock: key("l"), signal: new AbortController().signal }, (tx) =>
        tx.transaction(async () => {}),
      );
    };
    await cycle();
    const count = () => client?.listenerCount("error");
    const before = count();
    for (let i = 0; i < 30; i++) await cycle();
    expect(count()).toBe(before);
    await pool.end();
  });

  test("are not left on a caller's signal that outlives many transactions", async () => {
    const pool = pgPool(2);
    const hf = holdfast(fromPg(pool));
    const { signal } = new AbortController();
    for (let i = 0; i < 30; i++)
      await hf.transaction({ lock: key("s"), signal }, (tx) => tx.lock(key("t"), { signal }));
    expect(getEventListeners(signal, "abort").length).toBeLessThan(3);
    await pool.end();
  });

  test("are not left on connections of mysql2, whose pool wraps them anew each time", async ({ skip }) => {
    skip(unavailable("mariadb") !== undefined, unavailable("mariadb"));
    const place = await createDatabase("mariadb");
    const pool = createPool({ uri: place.url, connectionLimit: 1 });
    const hf: Holdfast<PoolConnection> = holdfast(fromMysql2(pool));
    await hf.migrate();
    const warnings: Error[] = [];
    const note = (warning: Error) => warnings.push(warning);
    process.on("warning", note);
    for (let i = 0; i < 30; i++) await hf.transaction({ lock: key("l") }, async () => {});
    await delay(20);
    process.off("warning", note);
    expect(warnings).toEqual([]);
    await pool.end();
    await place.drop();
  });
});

describe("postgres.js", () => {
  test.for([0, 1, 3, 10])(
    "who gives up while a connection is being opened, after %i ms, costs the pool none",
    async (ms) => {
      const pool = postgres(database.url, { max: 2, onnotice: () => {} });
      const hf = holdfast(fromPostgres(pool));
      // What it wants to know of the server it knows, and all connections have to be opened again.
      await (await hf.hold(key("opening"))).release();
      const admin = new Client({ connectionString: database.url });
      await admin.connect();
      const others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
      await admin.query(`SELECT pg_terminate_backend(pid) ${others}`);
      while ((await admin.query(`SELECT ${others}`)).rowCount) await delay(10);
      await admin.end();
      await delay(50);
      const stop = new AbortController();
      const { signal } = stop;
      const waiting = [1, 2, 3, 4].map((n) =>
        (n % 2 === 0
          ? hf.hold(key("opening", n), { signal }).then((held) => held.release())
          : hf.transaction({ signal, lock: key("opening", n) }, async () => {})
        ).catch(() => {}),
      );
      await delay(ms);
      stop.abort();
      await Promise.all(waiting);
      // Two connections at the same time.
      await hf.transaction(async (tx) => {
        await tx.query(sql`SELECT 1 AS one`);
        expect(await pool`SELECT 2 AS two`).toEqual([{ two: 2 }]);
      });
      await hf.close();
      await pool.end();
    },
  );

  test("keeps the order of the caller's statements and ours, and nothing of a body that failed", async () => {
    const client = postgres(database.url, { max: 2, onnotice: () => {} });
    const hf = holdfast(fromPostgres(client));
    await client`CREATE TABLE IF NOT EXISTS ordered (n integer)`;
    const failing = hf.transaction((tx) =>
      Promise.all([
        tx.client`INSERT INTO ordered VALUES (${1})`,
        tx.client`INSERT INTO ordered VALUES (${2})`,
        Promise.reject(new Error("failed")),
      ]),
    );
    await expect(failing).rejects.toThrow("failed");
    await delay(50);
    expect(await client`SELECT n FROM ordered`).toEqual([]);
    const both = await hf.transaction((tx) =>
      Promise.all([
        tx.client`INSERT INTO ordered VALUES (${42}) RETURNING n`,
        tx.query(sql`SELECT 7 AS seven`),
      ]),
    );
    expect(both).toEqual([[{ n: 42 }], [{ seven: 7 }]]);
    await client.end({ timeout: 5 });
  });

  // Giving back by hand what the next one has got waited for 5 s, one pair of calls after the other: 95 s in all.
  test("leaves a connection alone that the next in line has got", { timeout: 45_000 }, async () => {
    const client = postgres(database.url, { max: 2, onnotice: () => {} });
    const own = holdfast(fromPostgres(client));
    try {
      const calls = Array.from({ length: 40 }, (_, i) =>
        own.transaction(async (tx) => Number((await tx.query(sql`SELECT ${i}::int AS i`))[0]?.i)),
      );
      expect(await Promise.all(calls)).toEqual(calls.map((_, i) => i));
    } finally {
      await client.end();
    }
  });

  test("what ended a connection is nothing to whoever it is opened anew for", async () => {
    const client = postgres(database.url, { max: 1 });
    const hf = holdfast(fromPostgres(client));
    const calls = {
      "a transaction": () =>
        hf.transaction({ retry: false }, async (tx) => (await tx.query(sql`SELECT 1`)).length),
      "a lock of a session": () => hf.lock(key("anew"), async () => 1),
    };
    try {
      for (const [what, call] of Object.entries(calls)) {
        await expect(client`SELECT pg_terminate_backend(pg_backend_pid())`).rejects.toThrow();
        expect(await call(), what).toBe(1);
      }
    } finally {
      await client.end({ timeout: 5 });
    }
  });

  test("refuses its handle after the transaction, where it would reach into the next one", async () => {
    const client = postgres(database.url, { max: 1 });
    const hf = holdfast(fromPostgres(client));
    await hf.transaction(async () => {});
    const escaped = await hf.transaction(async (tx) => ({ sql: tx.client }));
    await hf.transaction(async () => {
      expect(() => escaped.sql`SELECT 1`).toThrow(/over/);
    });
    await client.end({ timeout: 5 });
  });
});

test("a thousand keys in one call", async () => {
  const pool = pgPool(2);
  const hf = holdfast(fromPg(pool));
  const lock = Array.from({ length: 1000 }, (_, i) => key("thousand", i));
  await hf.transaction({ lock }, async (tx) => {
    const { rows } = await tx.client.query(
      "SELECT count(*)::int AS n FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    );
    expect(rows).toEqual([{ n: 1000 }]);
  });
  await hf.transaction({ lock, wait: "nowait" }, async () => {});
  await pool.end();
});

test("a closed pool is an error at once, not a lost connection to be tried again", async () => {
  const pool = pgPool(1);
  const hf = holdfast(fromPg(pool));
  await hf.transaction(async () => {});
  await pool.end();
  const error: unknown = await hf.transaction(async () => {}).catch((e: unknown) => e);
  expect(error).toBeInstanceOf(Error);
  expect(error).not.toBeInstanceOf(ConnectionLostError);
});
