/**
 * Patterns under every isolation, and other settings that change how statements are committed or refused, that a session, an instance or a
 * caller's transaction may have: what is decided is decided on what was committed last, and not on an older snapshot, nor on what may
 * still be rolled back.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, type Transaction, holdfast, key, sql } from "holdfast";
import { fromDrizzle } from "holdfast/drizzle";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { type ConformanceSite, type Ground, conformance, prepare } from "holdfast/testing";
import { drizzle as drizzleMysql } from "drizzle-orm/mysql2";
import { drizzle as drizzlePg } from "drizzle-orm/node-postgres";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, inject, test } from "vitest";
import { sendDrizzle } from "./backends/drizzle.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";
import { type PatternJobsArg, errands } from "./workers/pattern-jobs.ts";

const levels = ["read uncommitted", "read committed", "repeatable read", "serializable"] as const;
/** What sessions of MySQL and MariaDB may have besides. */
const settings = {
  "autocommit off": "SET SESSION autocommit = 0",
  TRADITIONAL: "SET SESSION sql_mode = 'TRADITIONAL'",
  "chained, with safe updates": "SET SESSION completion_type = 'CHAIN', SESSION sql_safe_updates = 1",
} as const;
const others = Object.keys(settings) as (keyof typeof settings)[];
type Level = (typeof levels)[number] | keyof typeof settings;
const isLevel = (level: Level): level is (typeof levels)[number] => levels.includes(level as never);
type ServerName = "postgres" | "mariadb" | "mysql";
const backends = { postgres: "pg", mariadb: "mariadb on MariaDB", mysql: "mysql2 on MySQL" } as const;
const jobber = new URL("./workers/pattern-jobs.ts", import.meta.url);

/** A client whose sessions begin their transactions at this level, unless they are told otherwise; or have this setting. */
function open(server: ServerName, url: string, level: Level, orm = false): ConformanceSite {
  const refuse = () => Promise.reject(new Error("not needed by these suites"));
  if (server === "postgres") {
    const setting = `-c default_transaction_isolation=${level.replace(" ", "\\ ")}`;
    const pool = new Pool({ connectionString: url, max: 10, options: setting });
    pool.on("error", () => {});
    const db = drizzlePg(pool);
    const own = async <T>(body: (native: never) => Promise<T>): Promise<T> => {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        const value = await body(client as never);
        await client.query("COMMIT");
        return value;
      } catch (error) {
        await client.query("ROLLBACK");
        throw error;
      } finally {
        client.release();
      }
    };
    return {
      database: orm ? fromDrizzle(db) : fromPg(pool),
      send: orm ? sendDrizzle : (client, text) => (client as { query(text: string): unknown }).query(text),
      ownTransaction: orm ? (body) => db.transaction((tx) => body(tx)) : own,
      withIdle: refuse,
      close: () => pool.end(),
    };
  }
  const pool = createPool({ uri: url, connectionLimit: 10 });
  pool.pool.on("connection", (connection) => {
    connection.query(
      isLevel(level) ? `SET SESSION TRANSACTION ISOLATION LEVEL ${level.toUpperCase()}` : settings[level],
    );
  });
  const db = drizzleMysql(pool);
  const own = async <T>(body: (native: never) => Promise<T>): Promise<T> => {
    const connection = await pool.getConnection();
    try {
      await connection.beginTransaction();
      const value = await body(connection as never);
      await connection.commit();
      return value;
    } catch (error) {
      await connection.rollback();
      throw error;
    } finally {
      connection.release();
    }
  };
  return {
    database: orm ? fromDrizzle(db) : fromMysql2(pool),
    send: orm ? sendDrizzle : (client, text) => (client as { query(text: string): unknown }).query(text),
    ownTransaction: orm ? (body) => db.transaction((tx) => body(tx)) : own,
    withIdle: refuse,
    close: () => pool.end(),
  };
}

describe.each(["postgres", "mariadb", "mysql"] as const)("%s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  const sites: ConformanceSite[] = [];
  let made = 0;
  const named = () => `i${++made}`;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    const hf = at("read committed");
    await hf.migrate();
    await hf
      .transaction((tx) => tx.query(sql`CREATE TABLE effect (job varchar(40) NOT NULL)`))
      .catch(() => {});
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await Promise.all(sites.map((site) => site.close()));
    await database?.drop();
  });

  /** An instance on sessions of this level. */
  function at(level: Level, options: Parameters<typeof holdfast>[1] = {}): Holdfast<unknown> {
    const site = open(server, database.url, level);
    sites.push(site);
    return holdfast(site.database, { hazards: "off", ...options });
  }

  /** Runs a body in a transaction that has looked at something, and changed nothing, before others went on. Once, however often it is tried. */
  async function afterSnapshot<T>(
    hf: Holdfast<unknown>,
    look: () => Promise<unknown>,
    others: () => Promise<unknown>,
    body: (tx: Transaction<unknown>) => Promise<T>,
  ): Promise<T> {
    let gone = false;
    return hf.transaction({ isolation: "repeatable read" }, async (tx) => {
      await look();
      if (!gone) await hf.outside(others);
      gone = true;
      return body(tx);
    });
  }

  test("a repair in a transaction whose snapshot is older than the ledger finds nothing to repair", async () => {
    const hf = at("read committed");
    const uploads = quota(hf, { name: named(), limit: 10 });
    await uploads.consume("ada", 5);
    const looked = () => uploads.peek("ada");
    const found = await afterSnapshot(
      hf,
      looked,
      () => uploads.consume("ada", 5),
      () => uploads.reconcile("ada", { repair: true }),
    );
    expect(found).toMatchObject({ ok: true, repaired: false, findings: [] });
    expect(await uploads.peek("ada")).toMatchObject({ used: 10 });
    await expect(uploads.consume("ada", 1)).rejects.toMatchObject({ code: "HF_QUOTA_EXCEEDED" });
  });

  test("a repair in such a transaction repairs what is wrong now", async () => {
    const hf = at("read committed");
    const name = named();
    const uploads = quota(hf, { name, limit: 10 });
    await uploads.consume("ada", 5);
    const bucket = server === "postgres" ? sql`holdfast.quota_bucket` : sql`holdfast_quota_bucket`;
    const found = await afterSnapshot(
      hf,
      () => uploads.peek("ada"),
      async () => {
        await uploads.consume("ada", 3);
        await hf.transaction((tx) => tx.query(sql`UPDATE ${bucket} SET used = 1 WHERE quota = ${name}`));
      },
      () => uploads.reconcile("ada", { repair: true }),
    );
    expect(found).toMatchObject({ ok: false, repaired: true });
    expect(await uploads.peek("ada")).toMatchObject({ used: 8 });
    expect(await uploads.reconcile("ada")).toMatchObject({ ok: true });
  });

  test("the same of stock: nothing is repaired, or what is wrong", async () => {
    const hf = at("read committed");
    const name = named();
    const shop = stock(hf, { name });
    await shop.increase("cap", 5);
    const repaired = (meanwhile: () => Promise<unknown>) =>
      afterSnapshot(
        hf,
        () => shop.levels(),
        meanwhile,
        () => shop.reconcile({ repair: true }),
      );
    expect(await repaired(() => shop.increase("cap", 5))).toMatchObject({
      ok: true,
      repaired: false,
      findings: [],
    });
    expect(await shop.levels()).toMatchObject([{ onHand: 10 }]);
    // It is in the snapshot, and what comes meanwhile is not.
    const level = server === "postgres" ? sql`holdfast.stock_level` : sql`holdfast_stock_level`;
    await hf.transaction((tx) =>
      tx.query(sql`UPDATE ${level} SET on_hand = on_hand + 4 WHERE book = ${name}`),
    );
    const found = await repaired(() => shop.increase("cap", 2));
    expect(found).toMatchObject({ ok: false, repaired: true });
    expect(await shop.levels()).toMatchObject([{ onHand: 12 }]);
    expect(await shop.reconcile()).toMatchObject({ ok: true });
  });

  test("read uncommitted: nobody is refused for what is rolled back later", async () => {
    const [hf, other] = [at("read committed"), at("read uncommitted")];
    const name = named();
    const [mine, theirs] = [hf, other].map((each) => quota(each, { name, limit: 5 }));
    const [shop, same] = [hf, other].map((each) => stock(each, { name }));
    await Promise.all([mine?.consume("ada", 1), shop?.increase("cap", 5)]);
    const undone = new Error("rolled back");
    let asked: Promise<unknown> = Promise.resolve();
    await expect(
      hf.transaction(async () => {
        await mine?.consume("ada", 4);
        await shop?.decrease("cap", 5);
        asked = hf.outside(() => Promise.all([theirs?.consume("ada", 1), same?.decrease("cap", 1)]));
        asked.catch(() => {});
        // Long enough for one who does not wait.
        await sleep(300);
        throw undone;
      }),
    ).rejects.toBe(undone);
    await asked;
    expect(await mine?.peek("ada")).toMatchObject({ used: 2 });
    expect(await shop?.levels()).toMatchObject([{ onHand: 4 }]);
  });

  test("read uncommitted: a job that was completed in a transaction that is rolled back runs again", async () => {
    const [hf, looking] = [at("read uncommitted"), at("read committed")];
    const name = named();
    const q = queue<string>(hf, name, { backoff: { baseMs: 1 } });
    await q.enqueue("x");
    const attempts: number[] = [];
    const worker = q.work(
      async (job) => {
        attempts.push(job.attempt);
        const completed = Promise.withResolvers<void>();
        const open = hf.transaction(async (tx) => {
          await job.complete(tx);
          completed.resolve();
          await sleep(300);
          if (job.attempt === 1) throw new Error("rolled back");
        });
        open.catch(completed.reject);
        await completed.promise;
      },
      { pollMs: 50 },
    );
    await eventually(() => attempts.length > 1);
    await eventually(async () => {
      const { waiting, delayed, running } = await queue(looking, name).counts();
      return waiting + delayed + running === 0;
    });
    await worker.stop();
    expect(attempts).toEqual([1, 2]);
  });

  // On PostgreSQL nothing can be read that is not committed.
  const dirty = server === "postgres" ? [] : ["lease", "run"];
  const dirtyTests: Readonly<Record<string, () => Promise<void>>> = { lease: leaseOfDirty, run: runOfDirty };
  test.each(dirty)("read uncommitted: no %s is refused for one that is rolled back later", (what) =>
    dirtyTests[what]?.(),
  );

  async function leaseOfDirty(): Promise<void> {
    const hf = at("read uncommitted");
    const name = key(named());
    const first = await hf.lease(name);
    await theirs(async (query) => {
      const columns = "resource, name, holder, mode, weight, waiting, since";
      const made = `SELECT ${columns}, 'nobody', until + INTERVAL 1 HOUR FROM holdfast_lease WHERE fence = ${first.fence}`;
      await query("CREATE TEMPORARY TABLE kept AS SELECT * FROM holdfast_lease");
      await first.release();
      await query("START TRANSACTION");
      await query(
        `INSERT INTO holdfast_lease (${columns}, token, until) ${made.replace("holdfast_lease", "kept")}`,
      );
      const second = await hf.lease(name, { wait: "skip" });
      expect(second).toBeDefined();
      await query("ROLLBACK");
      await second?.release();
    });
  }

  async function runOfDirty(): Promise<void> {
    const hf = at("read uncommitted");
    const name = named();
    let runs = 0;
    const yearly = schedule(hf, name, { every: "1 day" }, async () => void runs++);
    expect(await yearly.runNow()).toMatchObject({ ran: true });
    await theirs(async (query) => {
      await query("START TRANSACTION");
      await query(
        `INSERT INTO holdfast_schedule_run (schedule, tick, manual, state, attempt, fence, token, holder, started, until)
          SELECT schedule, tick + 1000000, manual, 'running', attempt, fence + 1000, token, holder, started + 1000000, until + 1000000000000
          FROM holdfast_schedule_run WHERE schedule = '${name}'`,
      );
      expect(await yearly.runNow()).toMatchObject({ ran: true });
      // What a step looks at before it locks anything, too.
      expect((await yearly.status()).running).toEqual([]);
      await query("ROLLBACK");
    });
    expect(runs).toBe(2);
    await yearly.stop();
  }

  /** Runs statements of somebody else's, on one session. */
  async function theirs(body: (query: (text: string) => Promise<unknown>) => Promise<void>): Promise<void> {
    const pool = createPool({ uri: database.url, connectionLimit: 1 });
    const connection = await pool.getConnection();
    try {
      await connection.query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED");
      await body((text) => connection.query(text));
    } finally {
      connection.release();
      await pool.end();
    }
  }

  test("transactional jobs from several processes, with an instance at repeatable read: each effect once", async () => {
    const hf = at("read committed");
    const of = errands(hf);
    const arg = {
      backend: backends[server],
      url: database.url,
      how: "transactional",
      isolation: "repeatable read",
    } satisfies PatternJobsArg;
    const crew = Array.from({ length: 3 }, () => startWorker(jobber, arg));
    const count = 300;
    try {
      await Promise.all(crew.map((worker) => worker.message("ready")));
      // One by one: what comes while a transaction begins is newer than its snapshot.
      for (let n = 0; n < count; n++) await of.enqueue(String(n));
      await eventually(
        async () => {
          const { waiting, delayed, running } = await of.counts();
          return waiting + delayed + running === 0;
        },
        { timeout: 100_000, interval: 50 },
      );
      for (const worker of crew) worker.send("stop");
      await Promise.all(crew.map(({ exited }) => exited));
    } finally {
      for (const worker of crew) worker.sigkill();
    }
    const rows = await hf.transaction((tx) => tx.query(sql`SELECT job FROM effect`));
    expect(rows).toHaveLength(count);
    expect(new Set(rows.map(({ job }) => String(job))).size).toBe(count);
  }, 120_000);

  test("what a transaction has taken and does not find at its end is not committed", async () => {
    const hf = at("read committed");
    const name = named();
    const q = queue<string>(hf, name);
    const { id } = await q.enqueue("x");
    const ready = server === "postgres" ? sql`holdfast.queue_ready` : sql`holdfast_queue_ready`;
    const troubles: unknown[] = [];
    let runs = 0;
    const worker = q.work(
      async (_, tx) => {
        await tx.query(sql`INSERT INTO effect (job) VALUES (${name})`);
        // As if the transaction was not the one any more that has taken it.
        if (++runs === 1) await tx.query(sql`DELETE FROM ${ready} WHERE id = ${id}`);
      },
      { transactional: true, pollMs: 50, batch: 1, onTrouble: (error) => void troubles.push(error) },
    );
    await eventually(async () => runs === 2 && (await q.counts()).waiting + (await q.counts()).delayed === 0);
    await worker.stop();
    expect(String(troubles[0])).toContain("not there any more");
    const rows = await hf.transaction((tx) => tx.query(sql`SELECT job FROM effect WHERE job = ${name}`));
    expect(rows).toHaveLength(1);
  });

  test("a transactional job may discard or replace itself", async () => {
    const hf = at("read committed");
    const q = queue<string>(hf, named());
    await q.enqueue("discards");
    await q.enqueue("replaces", { key: "k" });
    const seen: string[] = [];
    const troubles: unknown[] = [];
    const worker = q.work(
      async ({ payload, id }) => {
        seen.push(payload);
        if (payload === "discards") await q.discard(id);
        if (payload === "replaces") await q.enqueue("replaced", { key: "k", onDuplicate: "replace" });
      },
      { transactional: true, pollMs: 50, onTrouble: (error) => void troubles.push(error) },
    );
    await eventually(() => seen.includes("replaced"));
    await worker.stop();
    expect(troubles).toEqual([]);
    expect(seen.toSorted()).toEqual(["discards", "replaced", "replaces"]);
    expect(await q.counts()).toMatchObject({ waiting: 0, delayed: 0, failed: 0 });
  });

  const next = random(inject("seed"));
  const stores = ["queue", "quota", "stock", "schedule", "audit", "lease", "semaphore"];
  /** Each of them in each cell of the driver's, by one case at least. PostgreSQL refuses locks where a snapshot outlives its statement. */
  const patterns = server === "postgres" ? stores : [...stores, "once", "session", "lock"];
  /** What this file is about, and others by chance. */
  const always = /job\.complete\(tx\)|COMMIT waits|serial: while|transactional: each/;
  /** They look at everything that is there, which is not theirs alone here; or at a connection that is in no transaction. */
  const wide = /shows what is there|lists|in no transaction/;
  /**
   * They expect of a caller's own transaction that it decides on what others committed after it began. On PostgreSQL above READ COMMITTED
   * that is a serialization failure (40001), and rightly: nobody but the caller can run its transaction again.
   */
  const fresh = /caller's own transaction, what others did/;
  /** They lock, or call `once`, in a transaction of their instance's: refused where its snapshot may be older than the lock. */
  const inside = /takes part in a transaction: kept|error is swallowed|another thing than the lock/;
  const isAbove = (level: Level): boolean => ["repeatable read", "serializable"].includes(level);
  const isOut = (level: Level, name: string): boolean =>
    isAbove(level) && (inside.test(name) || (server === "postgres" && fresh.test(name)));
  const cases = conformance().filter(({ suite, name }) => patterns.includes(suite) && !wide.test(name));
  const cells = [...levels, ...(server === "postgres" ? [] : others)]
    .flatMap((level) => [
      { level, client: "driver", orm: false, count: 0 },
      { level, client: "drizzle", orm: true, count: 2 },
    ])
    .map((each, cell) => ({ ...each, cell }));

  describe.each(cells)(
    `sessions at $level, $client, HOLDFAST_SEED=${inject("seed")}`,
    ({ level, orm, count, cell }) => {
      let ground: (name: string) => Promise<Ground>;
      const both: ConformanceSite[] = [];

      beforeAll(async () => {
        if (why !== undefined) return;
        both.push(open(server, database.url, level, orm), open(server, database.url, level, orm));
        // Instances that say nothing, and instances that say the same.
        const said =
          next() < 0.5 && isLevel(level) && level !== "read uncommitted" ? { isolation: level } : {};
        const made = await prepare(both[0] as ConformanceSite, both[1] as ConformanceSite, said);
        // What a case writes by itself is committed at once, whatever the sessions that it is about do.
        const plain = open(server, database.url, "read committed", orm);
        both.push(plain);
        ground = async (name) => {
          const given = await made(name);
          return { ...given, site: { ...given.site, database: plain.database } };
        };
      });
      afterAll(() => Promise.all(both.map((site) => site.close())));

      const pick = (from: typeof cases) => from.splice(Math.floor(next() * from.length), 1);
      const rest = cases.filter(({ name }) => !always.test(name) && !isOut(level, name));
      const chosen = [
        ...cases.filter(({ name }) => !orm && always.test(name)),
        ...(orm ? [] : patterns.flatMap((each) => pick(rest.filter(({ suite }) => suite === each)))),
        ...Array.from({ length: count }, () => pick(rest)).flat(),
      ];
      test.for([...new Set(chosen)])("$suite: $name", async ({ suite, run }) =>
        run(await ground(`${suite}${cell}`)),
      );
    },
  );
});
