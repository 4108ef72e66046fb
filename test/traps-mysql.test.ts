/** The traps of GET_LOCK, snapshots and timeouts on MariaDB, one test each. */
import { type Holdfast, holdfast, key, sql } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { type Pool, type PoolConnection, type RowDataPacket, createPool } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolConnection>;

const why = unavailable("mariadb");

beforeAll(async () => {
  if (why !== undefined) return;
  database = await createDatabase("mariadb");
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
        await new Promise((resolve) => setTimeout(resolve, 3));
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
    const other = await createDatabase("mariadb");
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
        "SELECT id FROM information_schema.processlist WHERE state = 'User lock'",
      );
    }
    await pool.query(`KILL CONNECTION ${victim.id}`);
    expect(await outcome).toBe("error");
    await held.release();
  });
});

describe("what the server does to a transaction behind the body's back", () => {
  test("a deadlock whose error is swallowed keeps nothing, neither before nor after it", async () => {
    await pool.query("CREATE TABLE pair (k int PRIMARY KEY, n int NOT NULL) ENGINE=InnoDB");
    await pool.query("INSERT INTO pair VALUES (1, 0), (2, 0)");
    await pool.query("DELETE FROM quota");
    let met = 0;
    let meet!: () => void;
    const both = new Promise<void>((resolve) => (meet = resolve));
    const run = (first: number, second: number) =>
      hf
        .transaction(async (tx) => {
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
        await expect(tx.lock(key("1205"), { wait: 100 })).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
        expect(await wait()).toBe(before);
      });
    });
    expect(await rows("SELECT n FROM quota WHERE n = 20")).toEqual([{ n: 20 }]);
  });

  test("connections go back to the pool as they came", async () => {
    await hf.transaction({ lock: key("clean") }, async () => {});
    await hf
      .transaction(async () => {
        throw new Error("thrown");
      })
      .catch(() => {});
    const all = await Promise.all(Array.from({ length: 12 }, () => pool.getConnection()));
    for (const connection of all) {
      expect(await rows("SELECT @@autocommit AS autocommit", connection)).toEqual([{ autocommit: 1 }]);
      connection.release();
    }
  });
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
      alone.transaction({ lock: key("small"), wait: 1000, signal: AbortSignal.timeout(100) }, async () => {}),
    ).rejects.toThrow();
  });
  await alone.transaction({ lock: key("small") }, async () => {});
  await small.end();
});
