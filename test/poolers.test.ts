/** Poolers lend sessions out in their own ways: a lock of a session is refused behind each of them, every time. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { UnsupportedError, holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { backendNamed } from "./backends.ts";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { startOdyssey } from "./harness/odyssey.ts";
import { startPgbouncer } from "./harness/pgbouncer.ts";
import type { StartedServer } from "./harness/started-server.ts";

const reason = unavailable("pgbouncer");

/** In front of a server. */
type Start = (server: { port: number; password: string }) => Promise<StartedServer>;

const bouncer =
  (...settings: string[]): Start =>
  (server) =>
    startPgbouncer(server, "transaction", settings);
const odyssey =
  (size: number): Start =>
  (server) =>
    startOdyssey({ ...server, size });

describe.each<[string, Start, number?]>([
  ["PgBouncer, in turn", bouncer("server_round_robin = 1")],
  ["PgBouncer, in turn, two of them", bouncer("server_round_robin = 1", "default_pool_size = 2")],
  ["PgBouncer, in turn, three of them", bouncer("server_round_robin = 1", "default_pool_size = 3")],
  ["PgBouncer, the last one first", bouncer()],
  ["PgBouncer, the last one first, two of them", bouncer("default_pool_size = 2")],
  // Who waits for one gives up after a while.
  ["PgBouncer, one for all", bouncer("default_pool_size = 1"), 2],
  ["Odyssey", odyssey(20)],
  ["Odyssey, three of them", odyssey(3)],
])("lends sessions: %s", (name, start, tries = 20) => {
  let database: TestDatabase;
  let pooler: StartedServer | undefined;
  let url: string;
  /** Why it is not here. */
  let missing = unavailable("postgres");

  beforeAll(async () => {
    if (missing !== undefined) return;
    const { port, password } = new URL(serverUrl("postgres"));
    try {
      pooler = await start({ port: Number(port), password: decodeURIComponent(password) });
    } catch (error) {
      if (process.env["CI"]) throw error;
      missing = `${name} is not available: ${(error as Error).message}`;
      console.log(missing);
      return;
    }
    database = await createDatabase("postgres");
    url = Object.assign(new URL(pooler.url), { pathname: `/${database.name}` }).href;
  });

  afterAll(async () => {
    await pooler?.stop();
    await database?.drop();
  });

  // Each finds out by itself.
  test("nobody believes to have one of its own, busy or not", async ({ skip }) => {
    skip(missing !== undefined, missing);
    const believed: number[] = [];
    for (let i = 0; i < tries; i++) {
      const pool = new Pool({ connectionString: url, max: 4 });
      const others = new Pool({ connectionString: url, max: 2 });
      const hf = holdfast(fromPg(pool));
      // So many sessions are there to be lent.
      const warm = Array.from({ length: (i % 3) + 1 }, () => pool.query("SELECT pg_sleep(0.01)"));
      await Promise.all(warm);
      const busy = i % 2 === 1 ? [others.query("SELECT pg_sleep(0.05)"), others.query("SELECT 1")] : [];
      try {
        const held = await hf.hold(key("report"), { wait: 5000 });
        believed.push(i);
        // It may not be there any more, which is the point.
        await held.release().catch(() => {});
      } catch (error) {
        expect(error).toBeInstanceOf(UnsupportedError);
      } finally {
        await Promise.all(busy);
        await hf.close();
        await pool.end();
        await others.end();
      }
    }
    expect(believed).toEqual([]);
  });

  test("a lock of a transaction excludes", async ({ skip }) => {
    skip(missing !== undefined, missing);
    const pools = [1, 2].map(() => new Pool({ connectionString: url, max: 3 }));
    const instances = pools.map((pool) => holdfast(fromPg(pool)));
    try {
      await pools[0]?.query("CREATE TABLE counter (n int NOT NULL)");
      await pools[0]?.query("INSERT INTO counter VALUES (0)");
      const add = (hf: (typeof instances)[number]) =>
        hf.transaction({ lock: key("counter"), wait: 20_000 }, async ({ client }) => {
          const { rows } = await client.query("SELECT n FROM counter");
          await client.query("UPDATE counter SET n = $1", [Number(rows[0].n) + 1]);
        });
      await Promise.all(Array.from({ length: 10 }, () => instances.map(add)).flat());
      expect((await pools[0]?.query("SELECT n FROM counter"))?.rows).toEqual([{ n: 20 }]);
    } finally {
      for (const hf of instances) await hf.close();
      for (const pool of pools) await pool.end();
    }
  });
});

describe("in statement mode", () => {
  let database: TestDatabase;
  let pooler: StartedServer;
  let url: string;

  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase("postgres");
    const { port, password } = new URL(serverUrl("postgres"));
    pooler = await startPgbouncer(
      { port: Number(port), password: decodeURIComponent(password) },
      "statement",
    );
    url = Object.assign(new URL(pooler.url), { pathname: `/${database.name}` }).href;
  });

  afterAll(async () => {
    await pooler?.stop();
    await database?.drop();
  });

  const why = /A pooler in statement mode [^]*transaction mode [^]*address that leads to the server/;

  test.for([
    "pg",
    "Prisma",
    "Prisma 6",
    "Drizzle",
    "Kysely",
    "Kysely with its pool",
    "Knex",
    "TypeORM",
    "MikroORM",
    "Sequelize",
  ])("%s: a transaction is refused at once, and told why", async (name, { skip }) => {
    skip(reason !== undefined, reason);
    const site = await backendNamed(name).open(url);
    const hf = holdfast(site.database);
    const retries: unknown[] = [];
    const retried = (message: unknown) => void retries.push(message);
    subscribe("holdfast:transaction:retry", retried);
    try {
      const refused = await hf.transaction({ lock: key("a") }, async () => "ran").catch((e: unknown) => e);
      expect(refused).toBeInstanceOf(UnsupportedError);
      expect((refused as Error).message).toMatch(why);
      expect(retries).toEqual([]);
    } finally {
      unsubscribe("holdfast:transaction:retry", retried);
      await hf.close();
      await site.close();
    }
  });

  test("postgres.js keeps the pooler's words to itself: what it is likely to be is told in the end", async ({
    skip,
  }) => {
    skip(reason !== undefined, reason);
    const site = await backendNamed("postgres.js").open(url);
    const hf = holdfast(site.database);
    try {
      const lost = await hf.transaction({ lock: key("a") }, async () => "ran").catch((e: unknown) => e);
      expect(lost).toMatchObject({ code: "HF_CONNECTION_LOST", message: expect.stringMatching(why) });
    } finally {
      await hf.close();
      await site.close();
    }
  });

  test("session locks are refused for the same reason", async ({ skip }) => {
    skip(reason !== undefined, reason);
    const pool = new Pool({ connectionString: url });
    pool.on("error", () => {});
    const hf = holdfast(fromPg(pool));
    try {
      const { sessionLocks } = await hf.capabilities();
      expect(sessionLocks).toMatchObject({ supported: false, why: expect.stringMatching(why) });
      await expect(hf.hold(key("a"))).rejects.toThrow(why);
    } finally {
      await hf.close();
      await pool.end();
    }
  });
});
