/** Poolers lend sessions out in their own ways: a lock of a session is refused behind each of them, every time. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { type Holdfast, UnsupportedError, holdfast, key, once, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { backendNamed } from "./backends.ts";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { startOdyssey } from "./harness/odyssey.ts";
import { startPgbouncer } from "./harness/pgbouncer.ts";
import type { StartedServer } from "./harness/started-server.ts";
import { eventually } from "./harness/wait.ts";

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

  function instanceOf(
    client: "pg" | "postgres.js",
    to: string,
    max: number,
  ): AsyncDisposable & { hf: Holdfast<unknown> } {
    const pool = client === "pg" ? new Pool({ connectionString: to, max }) : undefined;
    pool?.on("error", () => {});
    const other = pool ? undefined : postgres(to, { max, prepare: false });
    const hf: Holdfast<unknown> = other ? holdfast(fromPostgres(other)) : holdfast(fromPg(pool as Pool));
    return {
      hf,
      async [Symbol.asyncDispose]() {
        await hf.close();
        await pool?.end();
        // By itself postgres.js waits for a connection that was closed at BEGIN.
        await other?.end({ timeout: 0 });
      },
    };
  }

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
      const { transactionLocks, savepoints, quotas } = await hf.capabilities();
      for (const gap of [transactionLocks, savepoints])
        expect(gap).toMatchObject({ supported: false, why: expect.stringMatching(why) });
      expect(quotas).toBe(true);
    } finally {
      unsubscribe("holdfast:transaction:retry", retried);
      await hf.close();
      await site.close();
    }
  });

  test.for([
    ["pg", 10],
    ["pg", 1],
    ["postgres.js", 10],
    ["postgres.js", 1],
  ] as const)(
    "%s with a pool of %i: what needs a transaction is unsupported, and what is one statement is exact",
    async ([name, max], { skip }) => {
      skip(reason !== undefined, reason);
      const direct = instanceOf("pg", database.url, 1);
      await direct.hf.migrate();
      await direct[Symbol.asyncDispose]();
      await using site = instanceOf(name, url, max);
      const { hf } = site;
      const refused = async (call: () => Promise<unknown>) => {
        const error = await call().then(
          () => undefined,
          (e: unknown) => e,
        );
        expect(error).toMatchObject({ code: "HF_UNSUPPORTED", message: expect.stringMatching(why) });
      };
      // Before and after it is known.
      await refused(() => hf.transaction((tx) => tx.query(sql`SELECT 1`)));
      const { transactionLocks, joinedLocks, sessionLocks, sharedLocks, ...rest } = await hf.capabilities();
      const { rowLocks, tableLocks, savepoints, once: effects, serverDeadline, commitOutcome } = rest;
      const needing = {
        transactionLocks,
        joinedLocks,
        sessionLocks,
        sharedLocks,
        rowLocks,
        tableLocks,
        savepoints,
      };
      for (const gap of Object.values({ ...needing, effects, serverDeadline, commitOutcome }))
        expect(gap).toMatchObject({ supported: false, why: expect.stringMatching(why) });
      expect(rest).toMatchObject({ isolation: [], lockIsolation: [], lockFirstIsolation: [] });
      const exact = {
        quotas: true,
        stock: true,
        queues: true,
        schedules: true,
        leases: true,
        versions: true,
      };
      expect(rest).toMatchObject(exact);
      for (const call of [
        () => hf.transaction(async () => "ran"),
        () => hf.transaction({ lock: key("a") }, async () => "ran"),
        () => hf.tryLock(key("a"), async () => "ran"),
        () => hf.transaction((tx) => tx.rows("holdfast.agreed", [1])),
        () => once(hf, "event", async () => "ran"),
        () => hf.migrate(),
        () => hf.hold(key("a")),
      ])
        await refused(call);

      const subject = `${name} ${max}`;
      const uploads = quota(hf, { name: "uploads", limit: 5 });
      const granted = await Promise.all(Array.from({ length: 12 }, () => uploads.tryConsume(subject)));
      expect(granted.filter((each) => each.granted)).toHaveLength(5);
      const goods = stock(hf);
      await goods.increase(subject, 3);
      const sold = await Promise.allSettled(Array.from({ length: 5 }, () => goods.decrease(subject, 1)));
      expect(sold.filter(({ status }) => status === "fulfilled")).toHaveLength(3);
      const jobs = queue<number>(hf, subject);
      for (const n of [1, 2, 3]) await jobs.enqueue(n);
      const done: number[] = [];
      const worker = jobs.work(async ({ payload }) => void done.push(payload));
      await eventually(() => done.length === 3);
      await worker.stop();
      expect(done.toSorted((a, b) => a - b)).toEqual([1, 2, 3]);
      const lease = await hf.lease(key(subject));
      expect(await hf.lease(key(subject), { wait: "skip" })).toBeUndefined();
      await lease.release();
    },
  );
});
