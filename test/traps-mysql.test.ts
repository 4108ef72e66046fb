/** The traps of GET_LOCK, snapshots, row locks and timeouts on MySQL and MariaDB, one test each. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { type Holdfast, type TransactionOptions, holdfast, isRetryable, key, sql } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { type Pool, type PoolConnection, type RowDataPacket, createPool } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { statements } from "./harness/mysql-text.ts";
import { eventually } from "./harness/wait.ts";

describe.each(["mariadb", "mysql"] as const)("%s", (server) => {
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolConnection>;

  const why = unavailable(server);

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 12 });
    hf = holdfast(fromMysql2(pool));
    await hf.migrate();
    await pool.query("CREATE TABLE quota (n int NOT NULL) ENGINE=InnoDB");
  });

  beforeEach(({ skip }) => skip(why !== undefined, why));

  afterAll(async () => {
    if (why !== undefined) return;
    await pool.end();
    await database.drop();
  });

  async function rows<T = Record<string, unknown>>(
    statement: string,
    on: Pool | PoolConnection = pool,
  ): Promise<T[]> {
    const [found] = await on.query<RowDataPacket[]>(statement);
    return found as T[];
  }

  const limit = 20;

  async function checkAndWrite(on: PoolConnection): Promise<void> {
    const [row] = await rows<{ n: number }>("SELECT count(*) AS n FROM quota", on);
    if (Number(row?.n) < limit) await on.query("INSERT INTO quota VALUES (1)");
  }

  /** How many were let in. */
  async function hammer(calls: number, one: () => Promise<unknown>): Promise<number> {
    await pool.query("DELETE FROM quota");
    await Promise.all(Array.from({ length: calls }, one));
    const [row] = await rows<{ n: number }>("SELECT count(*) AS n FROM quota");
    return Number(row?.n);
  }

  async function withConnection(use: (connection: PoolConnection) => Promise<void>): Promise<void> {
    const connection = await pool.getConnection();
    try {
      await use(connection);
    } finally {
      connection.release();
    }
  }

  describe("exactness", () => {
    test("through hf.transaction: held until COMMIT is acknowledged", async () => {
      expect(
        await hammer(120, () =>
          hf.transaction({ lock: key("quota"), wait: 60_000 }, (tx) => checkAndWrite(tx.client)),
        ),
      ).toBe(limit);
    });

    test("through join in REPEATABLE READ, the server's default, with the lock first", async () => {
      const one = () =>
        withConnection(async (connection) => {
          await connection.beginTransaction();
          await hf.join(connection).lock(key("quota"), { wait: 60_000 });
          await checkAndWrite(connection);
          await connection.commit();
        });
      expect(await hammer(120, one)).toBe(limit);
    });

    test("GET_LOCK released before COMMIT leaks: that is why it is not used for transactions", async () => {
      const one = () =>
        withConnection(async (connection) => {
          await connection.query("SELECT GET_LOCK('naive', 60)");
          await connection.query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED");
          await connection.beginTransaction();
          await checkAndWrite(connection);
          await connection.query("SELECT RELEASE_LOCK('naive')");
          await new Promise((resolve) => setTimeout(resolve, 40));
          await connection.commit();
        });
      expect(await hammer(400, one)).toBeGreaterThan(limit);
    });
  });

  describe("a snapshot that is older than the lock", () => {
    const read = (connection: PoolConnection) =>
      rows<{ n: number }>("SELECT count(*) AS n FROM quota", connection);

    test("is found out in a joined transaction that had read before", async () => {
      await withConnection(async (connection) => {
        await connection.beginTransaction();
        await read(connection);
        await hf.transaction({ lock: key("stale") }, (tx) => tx.query(sql`INSERT INTO quota VALUES (2)`));
        await expect(hf.join(connection).lock(key("stale"))).rejects.toMatchObject({
          code: "HF_SERIALIZATION",
          retryable: true,
        });
        await connection.rollback();
        // READ COMMITTED has a new one for each statement.
        await connection.query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED");
        await connection.beginTransaction();
        await read(connection);
        await hf.transaction({ lock: key("stale") }, (tx) => tx.query(sql`INSERT INTO quota VALUES (2)`));
        await hf.join(connection).lock(key("stale"));
        await connection.rollback();
      });
    });

    test("is found out in the middle of a transaction of ours, too", async () => {
      let attempts = 0;
      const count = await hf.transaction({ isolation: "repeatable read" }, async (tx) => {
        attempts++;
        await read(tx.client);
        if (attempts === 1)
          await hf.transaction({ lock: key("stale"), separate: true }, (other) =>
            other.query(sql`INSERT INTO quota VALUES (3)`),
          );
        await tx.lock(key("stale")).catch((error: unknown) => {
          expect(error).toMatchObject({ code: "HF_SERIALIZATION" });
        });
        return attempts;
      });
      expect(count).toBe(1);
    });

    test("our own transactions say READ COMMITTED, whatever the server's default is", async () => {
      const level = await hf.transaction({ lock: key("level") }, async (tx) => {
        await read(tx.client);
        await pool.query("INSERT INTO quota VALUES (4)");
        const [first] = await read(tx.client);
        await pool.query("INSERT INTO quota VALUES (4)");
        const [second] = await read(tx.client);
        return Number(second?.n) - Number(first?.n);
      });
      expect(level).toBe(1);
    });
  });

  describe("session locks by GET_LOCK", () => {
    test("differ by case, may be long, and do not reach into other databases of the server", async () => {
      const other = await createDatabase(server);
      const elsewhere = createPool({ uri: other.url, connectionLimit: 4 });
      const there = holdfast(fromMysql2(elsewhere));
      await there.migrate();
      const long = "x".repeat(5000);
      try {
        await using _a = await hf.hold(key("Case", long));
        await using _b = await hf.hold(key("case", long), { wait: "nowait" });
        await using _c = await there.hold(key("Case", long), { wait: "nowait" });
        await expect(hf.hold(key("Case", long), { wait: "nowait" })).rejects.toMatchObject({
          code: "HF_LOCK_NOT_AVAILABLE",
        });
      } finally {
        await elsewhere.end();
        await other.drop();
      }
    });

    test("are released as often as they were taken, on throw too", async () => {
      for (let i = 0; i < 3; i++) {
        const failing = async () => {
          await using _held = await hf.hold([key("once", "a"), key("once", "b")]);
          throw new Error("thrown");
        };
        await expect(failing()).rejects.toThrow("thrown");
      }
      await using _again = await hf.hold([key("once", "a"), key("once", "b")], { wait: "nowait" });
    });

    test("a session that held the key before, and queues up for it again, is not taken for its holder", async () => {
      const lock = key("again");
      // Every connection has held it once.
      for (let i = 0; i < 12; i++) await (await hf.hold(lock)).release();
      let leave!: () => void;
      let entered!: () => void;
      const inside = new Promise<void>((resolve) => (entered = resolve));
      const first = hf.transaction({ lock }, () => {
        entered();
        return new Promise<void>((resolve) => (leave = resolve));
      });
      await inside;
      const second = hf.transaction({ lock, wait: 20_000 }, async () => "second");
      await new Promise((resolve) => setTimeout(resolve, 50));
      const held = hf.hold(lock, { wait: 20_000 });
      await new Promise((resolve) => setTimeout(resolve, 50));
      leave();
      await first;
      expect(await second).toBe("second");
      await (await held).release();
    });

    test("a waiter whose connection is killed gets an error, not the lock", async () => {
      const held = await hf.hold(key("null"));
      const waiting = hf.hold(key("null"), { wait: 30_000 });
      const outcome = waiting.then(
        () => "granted",
        () => "error",
      );
      let victim: { id: number } | undefined;
      while (!victim) {
        [victim] = await rows<{ id: number }>(
          "SELECT id FROM /*M! information_schema. *//*!80022 performance_schema. */ processlist WHERE state = 'User lock' AND db = DATABASE()",
        );
      }
      await pool.query(`KILL CONNECTION ${victim.id}`);
      expect(await outcome).toBe("error");
      await held.release();
    });
  });

  describe("what the server does to a transaction behind the body's back", () => {
    test.each([
      ["without a lock", () => ({})],
      ["with one, hence through the procedures", (n: number) => ({ lock: key("swallowed", n) })],
    ])("a deadlock whose error is swallowed keeps nothing, %s", async (_, options) => {
      await pool.query("CREATE TABLE IF NOT EXISTS pair (k int PRIMARY KEY, n int NOT NULL) ENGINE=InnoDB");
      await pool.query("REPLACE INTO pair VALUES (1, 0), (2, 0)");
      await pool.query("DELETE FROM quota");
      let met = 0;
      let meet!: () => void;
      const both = new Promise<void>((resolve) => (meet = resolve));
      const run = (first: number, second: number) =>
        hf
          .transaction(options(first), async (tx) => {
            await tx.client.query("INSERT INTO quota VALUES (10)");
            await tx.client.query(`UPDATE pair SET n = n + 1 WHERE k = ${first}`);
            if (++met === 2) meet();
            await both;
            let deadlocked = false;
            await tx.client
              .query(`UPDATE pair SET n = n + 1 WHERE k = ${second}`)
              .catch(() => (deadlocked = true));
            if (deadlocked) await tx.client.query("INSERT INTO quota VALUES (11)");
            return "kept";
          })
          .catch((error: unknown) => (error as { code: string }).code);
      const results = await Promise.all([run(1, 2), run(2, 1)]);
      expect(results.toSorted()).toEqual(["HF_TRANSACTION_ABORTED", "kept"]);
      expect(await rows("SELECT n FROM quota")).toEqual([{ n: 10 }]);
    });

    test("a lock wait timeout (1205) leaves the transaction open, and what it waited with is put back", async () => {
      await hf.transaction({ lock: key("1205") }, async () => {
        await hf.transaction({ separate: true }, async (tx) => {
          const wait = async () =>
            (await rows<{ w: number }>("SELECT @@innodb_lock_wait_timeout AS w", tx.client))[0]?.w;
          const before = await wait();
          await tx.client.query("INSERT INTO quota VALUES (20)");
          await expect(tx.lock(key("1205"), { wait: 100 })).rejects.toMatchObject({
            code: "HF_LOCK_TIMEOUT",
          });
          expect(await wait()).toBe(before);
        });
      });
      expect(await rows("SELECT n FROM quota WHERE n = 20")).toEqual([{ n: 20 }]);
    });

    test.each([0, 1])(
      "connections go back to the pool as they came, with autocommit %i",
      async (autocommit) => {
        const small = createPool({ uri: database.url, connectionLimit: 1 });
        const alone = holdfast(fromMysql2(small));
        await alone.transaction(async () => {});
        await small.query(`SET autocommit = ${autocommit}`);
        const id = async () => (await rows("SELECT CONNECTION_ID() AS id, @@autocommit AS a", small))[0];
        const before = await id();
        expect(before).toMatchObject({ a: autocommit });
        const [free, taken] = [key("clean", autocommit), key("clean", "taken")];
        const insert = (tx: { client: PoolConnection }) => tx.client.query("INSERT INTO quota VALUES (40)");
        const thrown = async (tx: { client: PoolConnection }) => {
          await insert(tx);
          throw new Error("thrown");
        };
        await pool.query("DELETE FROM quota");
        await hf.transaction({ lock: taken }, async () => {
          // The first one makes the row, the second finds it; the others end otherwise.
          for (const options of [{ lock: free }, { lock: free }, {}])
            await alone.transaction(options, insert);
          for (const options of [{ lock: free }, {}])
            await expect(alone.transaction(options, thrown)).rejects.toThrow("thrown");
          for (const lock of [taken, [free, taken]])
            await expect(alone.transaction({ lock, wait: "nowait" }, insert)).rejects.toMatchObject({
              code: "HF_LOCK_NOT_AVAILABLE",
            });
          expect(await id()).toEqual(before);
          // Read on another connection: they were committed.
          expect(await rows("SELECT n FROM quota")).toHaveLength(3);
        });
        await small.end();
      },
    );

    test("procedures that go in the middle of a transaction do not keep it from being committed", async () => {
      const other = await createDatabase(server);
      const elsewhere = createPool({ uri: other.url, connectionLimit: 3 });
      const there = holdfast(fromMysql2(elsewhere));
      try {
        await there.migrate();
        await elsewhere.query("CREATE TABLE effect (n int NOT NULL) ENGINE=InnoDB");
        await there.transaction({ lock: key("gone") }, async (tx) => {
          await tx.client.query("INSERT INTO effect VALUES (1)");
          const [procedures] = await elsewhere.query<RowDataPacket[]>(
            "SELECT routine_name AS name FROM information_schema.routines WHERE routine_schema = DATABASE()",
          );
          for (const { name } of procedures)
            if (/^holdfast_(begin|commit)_/.test(name)) await elsewhere.query(`DROP PROCEDURE ${name}`);
        });
        const [found] = await elsewhere.query<RowDataPacket[]>("SELECT n, @@autocommit AS a FROM effect");
        expect(found).toEqual([{ n: 1, a: 1 }]);
        await expect(there.transaction({ lock: key("gone") }, async () => {})).rejects.toMatchObject({
          code: "HF_SCHEMA_MISSING",
        });
        await there.transaction((tx) => tx.client.query("INSERT INTO effect VALUES (2)"));
        // As after a dump without routines, which has the record of migrations all the same.
        expect(await there.migrate()).toEqual([
          { kind: "routine", name: "holdfast_begin", was: "missing" },
          { kind: "routine", name: "holdfast_commit", was: "missing" },
        ]);
        await there.transaction({ lock: key("gone") }, async () => {});
      } finally {
        await there.close();
        await elsewhere.end();
        await other.drop();
      }
    });
  });

  test("without procedures, as after a dump that leaves them out, quotas and stock take statements", async () => {
    const other = await createDatabase(server);
    const elsewhere = createPool({ uri: other.url, connectionLimit: 3 });
    const there = holdfast(fromMysql2(elsewhere));
    try {
      await there.migrate();
      const [procedures] = await elsewhere.query<RowDataPacket[]>(
        "SELECT routine_name AS name FROM information_schema.routines WHERE routine_schema = DATABASE()",
      );
      for (const { name } of procedures) await elsewhere.query(`DROP PROCEDURE ${name}`);
      const of = quota(there, { name: "api", limit: 3 });
      for (const used of [1, 2, 3]) expect(await of.consume("ann")).toMatchObject({ used });
      expect((await of.tryConsume("ann")).granted).toBe(false);
      const shop = stock(there);
      for (const quantity of [2, -1, -1]) await shop.apply([{ sku: "pen", quantity }]);
      await expect(shop.apply([{ sku: "pen", quantity: -1 }])).rejects.toThrow(/pen/);
    } finally {
      await there.close();
      await elsewhere.end();
      await other.drop();
    }
  });

  test("join on a connection that is in no transaction is refused, waiting or not", async () => {
    await hf.transaction({ lock: key("idle") }, async () => {});
    await withConnection(async (connection) => {
      await expect(hf.join(connection).tryLock(key("idle"))).rejects.toMatchObject({
        code: "HF_NOT_IN_TRANSACTION",
      });
      await expect(hf.join(connection).lock(key("idle"))).rejects.toMatchObject({
        code: "HF_NOT_IN_TRANSACTION",
      });
    });
  });

  test("an abort with no other connection in the pool ends with the wait, not never", async () => {
    const small = createPool({ uri: database.url, connectionLimit: 1 });
    const alone = holdfast(fromMysql2(small));
    await alone.capabilities();
    await hf.transaction({ lock: key("small") }, async () => {
      await expect(
        alone.transaction(
          { lock: key("small"), wait: 1000, signal: AbortSignal.timeout(100) },
          async () => {},
        ),
      ).rejects.toThrow();
    });
    await alone.transaction({ lock: key("small") }, async () => {});
    await small.end();
  });

  /** Two transactions that meet in the middle, each with one of the rows that the other wants. */
  function crossing(options: TransactionOptions) {
    let met = 0;
    let meet!: () => void;
    const both = new Promise<void>((resolve) => (meet = resolve));
    const run = (name: number, first: number, second: number) =>
      hf.transaction(options, async (tx) => {
        await tx.client.query(`INSERT INTO effect VALUES (${name})`);
        await tx.client.query(`UPDATE item SET n = n + 1 WHERE id = ${first}`);
        if (++met === 2) meet();
        await both;
        await tx.client.query(`UPDATE item SET n = n + 1 WHERE id = ${second}`);
        return tx.attempt;
      });
    return Promise.allSettled([run(1, 1, 2), run(2, 2, 1)]);
  }

  describe("failures in the middle of a transaction", () => {
    beforeEach(async () => {
      await pool.query("CREATE TABLE IF NOT EXISTS item (id int PRIMARY KEY, n int NOT NULL) ENGINE=InnoDB");
      await pool.query("CREATE TABLE IF NOT EXISTS effect (who int NOT NULL) ENGINE=InnoDB");
      await pool.query("DELETE FROM effect");
      await pool.query("REPLACE INTO item VALUES (1, 0), (2, 0), (3, 0)");
    });

    const effects = () => rows("SELECT who FROM effect ORDER BY who");
    const counts = () => rows("SELECT n FROM item WHERE id < 3 ORDER BY id");

    test("a deadlock: after the retry every effect once", async () => {
      const results = await crossing({ retry: { attempts: 10 } });
      expect(results.map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]);
      const attempts = results.map((result) => (result as PromiseFulfilledResult<number>).value);
      expect(attempts.toSorted((a, b) => a - b)).toEqual([1, 2]);
      expect(await effects()).toEqual([{ who: 1 }, { who: 2 }]);
      expect(await counts()).toEqual([{ n: 2 }, { n: 2 }]);
    });

    test("a deadlock: after giving up nothing", async () => {
      const results = await crossing({ retry: false });
      const [lost] = results.filter(({ status }) => status === "rejected") as PromiseRejectedResult[];
      expect(lost?.reason).toMatchObject({ code: "HF_DEADLOCK", retryable: true });
      expect(await effects()).toHaveLength(1);
      expect(await counts()).toEqual([{ n: 1 }, { n: 1 }]);
    });

    test("a wait that was over: the whole transaction is undone, not the statement alone", async () => {
      const write = (who: number) =>
        hf.transaction({ separate: true, retry: false }, async (tx) => {
          const [before] = await rows<{ w: number }>("SELECT @@innodb_lock_wait_timeout AS w", tx.client);
          await tx.client.query(`INSERT INTO effect VALUES (${who})`);
          await tx.client.query("UPDATE item SET n = n + 1 WHERE id = 1");
          await tx.client.query("SET SESSION innodb_lock_wait_timeout = 1");
          try {
            await tx.client.query("UPDATE item SET n = n + 1 WHERE id = 3");
          } finally {
            await tx.client.query(`SET SESSION innodb_lock_wait_timeout = ${before?.w}`);
          }
        });
      await hf.transaction(async (tx) => {
        await tx.row("item", 3);
        const error: unknown = await write(1).catch((e: unknown) => e);
        // What the body got is what the caller gets; it says so by itself that it may be tried again.
        expect(error).toMatchObject({ errno: 1205 });
        expect(isRetryable(error)).toBe(true);
        expect(await effects()).toEqual([]);
        expect(await counts()).toEqual([{ n: 0 }, { n: 0 }]);
        await hf.transaction({ separate: true, retry: false }, (other) =>
          other.row("item", 1, { wait: "nowait" }),
        );
      });
      await write(1);
      expect(await effects()).toEqual([{ who: 1 }]);
      expect(await counts()).toEqual([{ n: 1 }, { n: 0 }]);
    });

    test("a wait for the lock itself is retried if that is asked for: the effect happens once", async () => {
      const holder = await hf.hold(key("retried"));
      const attempts: number[] = [];
      const refused = Promise.withResolvers<void>();
      const hear = () => refused.resolve();
      subscribe("holdfast:lock:refused", hear);
      const writing = hf.transaction(
        { lock: key("retried"), wait: 100, retry: { attempts: 100, on: ["lock-timeout"] } },
        async (tx) => {
          attempts.push(tx.attempt);
          await tx.client.query("INSERT INTO effect VALUES (7)");
        },
      );
      await refused.promise;
      unsubscribe("holdfast:lock:refused", hear);
      await holder.release();
      await writing;
      expect(attempts).toHaveLength(1);
      expect(attempts[0]).toBeGreaterThan(1);
      expect(await effects()).toEqual([{ who: 7 }]);
    });

    test("a cycle of a row and a lock of a session, which the server does not see, ends by our wait", async () => {
      const lock = key("cycle");
      let taken!: () => void;
      const rowTaken = new Promise<void>((resolve) => (taken = resolve));
      const held = await hf.hold(lock);
      const first = hf
        .transaction({ retry: false }, async (tx) => {
          await tx.client.query("INSERT INTO effect VALUES (1)");
          await tx.row("item", 1);
          taken();
          await (await hf.hold(lock, { wait: 700 })).release();
        })
        .catch((error: unknown) => error);
      await rowTaken;
      const second = hf.transaction({ separate: true }, async (tx) => {
        await tx.row("item", 1, { wait: 60_000 });
        await tx.client.query("INSERT INTO effect VALUES (2)");
      });
      const error = await first;
      expect(error).toMatchObject({ code: "HF_LOCK_TIMEOUT", retryable: true, keys: ["cycle"] });
      expect(String(error)).toMatch(/Waited \d+ ms for lock cycle in vain\. Held by pid \d+/);
      await second;
      await held.release();
      expect(await effects()).toEqual([{ who: 2 }]);
    });

    test("an abort in the middle of a wait leaves the session's settings as they were", async () => {
      await hf.transaction(async (tx) => {
        await tx.row("item", 1);
        const settings = (client: PoolConnection) =>
          rows("SELECT @@innodb_lock_wait_timeout AS w, @@autocommit AS a", client);
        const stopped = hf.transaction({ separate: true }, async (other) => {
          const before = await settings(other.client);
          await expect(
            other.row("item", 1, { signal: AbortSignal.timeout(150), wait: 30_000 }),
          ).rejects.toThrow();
          await expect(other.row("item", 1, { wait: 150 })).rejects.toMatchObject({
            code: "HF_LOCK_TIMEOUT",
          });
          expect(await settings(other.client)).toEqual(before);
          await other.client.query("INSERT INTO effect VALUES (3)");
        });
        await stopped;
      });
      // The statement was ended, not the transaction.
      expect(await effects()).toEqual([{ who: 3 }]);
    });
  });

  describe("row locks", () => {
    beforeAll(async () => {
      if (why !== undefined) return;
      await pool.query(
        "CREATE TABLE stock (sku varchar(40) PRIMARY KEY, big bigint unsigned NOT NULL UNIQUE, n int NOT NULL, kind int NOT NULL) ENGINE=InnoDB",
      );
      const values = Array.from(
        { length: 40 },
        (_, i) => `('${i}', ${2n ** 53n + BigInt(i)}, ${40 - i}, ${i % 4})`,
      );
      await pool.query(
        `INSERT INTO stock VALUES ${values.join(", ")}, ('5abc', 1, 100, 9), ('05', 2, 100, 9)`,
      );
    });

    /** Which rows another transaction cannot have. */
    async function locked(): Promise<string[]> {
      const all = await rows<{ sku: string }>("SELECT sku FROM stock");
      const free = await hf.transaction({ separate: true }, async (tx) =>
        (await tx.rows<{ sku: string }>("stock", sql`true`, { wait: "skip" })).map(({ sku }) => sku),
      );
      return all
        .map(({ sku }) => sku)
        .filter((sku) => !free.includes(sku))
        .toSorted();
    }

    test("lock the rows that were asked for and no others", async () => {
      await hf.transaction(async (tx) => {
        expect(await tx.rows("stock", [5, "7"])).toHaveLength(2);
        expect(await locked()).toEqual(["5", "7"]);
        // By a column without an index, past rows that others have locked and that do not match.
        await hf.transaction({ separate: true }, async (other) => {
          const found = await other.rows<{ sku: string }>("stock", { kind: 2 }, { wait: "nowait" });
          expect(found).toHaveLength(10);
          expect(await locked()).toEqual([...found.map(({ sku }) => sku), "5", "7"].toSorted());
        });
        await hf.transaction({ separate: true }, async (other) => {
          const some = await other.rows<{ sku: string }>(
            "stock",
            { kind: [1, 3] },
            { orderBy: { n: "asc" }, limit: 2 },
          );
          expect(some.map(({ sku }) => sku)).toEqual(["39", "37"]);
          expect(await locked()).toEqual(["37", "39", "5", "7"]);
          const next = await hf.transaction({ separate: true }, (third) =>
            third.rows<{ sku: string }>("stock", { kind: [1, 3] }, { orderBy: "n", limit: 2, wait: "skip" }),
          );
          expect(next.map(({ sku }) => sku)).toEqual(["35", "33"]);
        });
      });
      expect(await locked()).toEqual([]);
    });

    test("tell integers of 64 bits apart, by a unique key that is not the primary one", async () => {
      const big = (i: number) => 2n ** 53n + BigInt(i);
      await hf.transaction(async (tx) => {
        const found = await tx.rows<{ sku: string }>("stock", [big(9), big(8), big(8)], { key: "big" });
        expect(found.map(({ sku }) => sku)).toEqual(["9", "8", "8"]);
        expect(await locked()).toEqual(["8", "9"]);
        const [none] = await Promise.allSettled([
          tx.transaction((inner) => inner.rows("stock", ["1.5"], { key: "big" })),
        ]);
        expect((none as PromiseRejectedResult).reason).toMatchObject({ code: "HF_USAGE" });
      });
    });

    test("of thousands are taken in one order, whatever order they are named in", async () => {
      await pool.query("CREATE TABLE many (id int PRIMARY KEY, n int NOT NULL) ENGINE=InnoDB");
      const all = Array.from({ length: 3000 }, (_, i) => i);
      await pool.query(`INSERT INTO many VALUES ${all.map((i) => `(${i}, 0)`).join(", ")}`);
      const ids = all.filter((i) => i % 2 === 0);
      const turn = (keys: number[]) =>
        hf.transaction({ retry: false }, async (tx) => {
          const found = await tx.rows<{ id: number }>("many", keys, { wait: 60_000, columns: ["id"] });
          expect(found.map(({ id }) => id)).toEqual(keys);
          await tx.client.query("UPDATE many SET n = n + 1 WHERE id = 2");
        });
      await Promise.all(Array.from({ length: 8 }, (_, i) => turn(i % 2 ? ids : ids.toReversed())));
      expect(await rows("SELECT n FROM many WHERE id = 2")).toEqual([{ n: 8 }]);
      // Others in between stay free.
      await hf.transaction(async (tx) => {
        await tx.rows("many", ids, { columns: ["id"] });
        await hf.transaction({ separate: true }, (other) =>
          other.rows(
            "many",
            all.filter((i) => i % 2 === 1),
            { wait: "nowait" },
          ),
        );
      });
    });
  });

  test("a locked transaction with one statement costs 3 round trips", async () => {
    const small = createPool({ uri: database.url, connectionLimit: 1 });
    const alone = holdfast(fromMysql2(small));
    const run = () =>
      alone.transaction({ lock: key("trips") }, (tx) => tx.client.query("INSERT INTO quota VALUES (30)"));
    // What the session itself has sent so far.
    const sent = async () => {
      const [found] = await small.query<RowDataPacket[]>("SHOW SESSION STATUS LIKE 'Questions'");
      return Number(found[0]?.["Value"]);
    };
    await run();
    await run();
    const before = await sent();
    await run();
    expect((await sent()) - before - 1).toBe(3);
    await small.end();
  });

  test("inspect names keys, rows and sessions, and who waits for whom", async () => {
    await pool.query("CREATE TABLE seen (id int PRIMARY KEY) ENGINE=InnoDB");
    await pool.query("INSERT INTO seen VALUES (1)");
    let release!: () => void;
    const done = new Promise<void>((resolve) => (release = resolve));
    let entered!: () => void;
    const inside = new Promise<void>((resolve) => (entered = resolve));
    const first = hf.transaction({ lock: key("upload", 42) }, async (tx) => {
      await tx.row("seen", 1);
      entered();
      await done;
    });
    await inside;
    const held = await hf.hold(key("session"));
    const second = hf.transaction({ lock: key("report") }, (tx) => tx.row("seen", 1, { wait: 60_000 }));
    await eventually(async () => (await hf.inspect()).waiters.some(({ kind }) => kind === "row"), {
      interval: 150,
    });
    const third = hf.transaction({ lock: key("report"), wait: 60_000 }, async () => {});
    const fourth = hf.hold(key("session"), { wait: 60_000 });
    try {
      const found = await eventually(
        async () => {
          const { waiters: all, ...inspection } = await hf.inspect();
          const { chains } = inspection;
          // Named locks of other databases are told too.
          const waiters = all.filter(
            ({ kind, name }) => kind !== "advisory" || /session|holdfast/.test(name),
          );
          const known = waiters.filter(({ blockedBy }) => blockedBy.length === 1).length;
          return waiters.length === 3 && chains.length > 0 && known >= 2 && { ...inspection, waiters };
        },
        { interval: 150 },
      );
      if (!found) throw new Error("never seen");
      const named = found.waiters.map(({ kind, name }) => `${kind} ${name}`);
      expect(named).toEqual(
        expect.arrayContaining([
          expect.stringMatching(/^row seen\[1\]$/),
          "lock row report",
          expect.stringMatching(/^advisory /),
        ]),
      );
      const chain = found.chains.find(({ waiters }) => waiters.some((each) => each.waiters.length > 0));
      expect(chain?.session).toMatchObject({ state: "idle" });
      expect(chain?.session.since).toBeInstanceOf(Date);
      expect(Math.abs(Number(chain?.session.since) - Date.now())).toBeLessThan(600_000);
      // Not known for a moment where it comes from a copy that is renewed every 100 ms.
      for (const { waitingMs = 0 } of found.waiters) expect(waitingMs).toBeGreaterThanOrEqual(0);
      if (server === "mysql")
        expect(found.holders.map(({ kind, name }) => `${kind} ${name}`)).toContain("lock row upload:42");
    } finally {
      release();
      await Promise.all([first, second, third]);
      await held.release();
      await (await fourth).release();
    }
    await eventually(async () => expect((await hf.inspect()).waiters).toEqual([]));
  });

  test("printed migrations can be run by other tools, and hf.migrate() after them", async () => {
    const other = await createDatabase(server);
    const elsewhere = createPool({ uri: other.url, connectionLimit: 3 });
    const there = holdfast(fromMysql2(elsewhere));
    try {
      for (const statement of statements(there.migrationSql())) await elsewhere.query(statement);
      await (await there.lease(key("printed"))).release();
      // It says itself what was done.
      expect(new Set((await there.migrations()).map(({ state }) => state))).toEqual(new Set(["applied"]));
      expect(await there.migrate()).toEqual([]);
      await there.transaction({ lock: key("printed") }, async () => {});
    } finally {
      await there.close();
      await elsewhere.end();
      await other.drop();
    }
  });
});
