/** Deadlines that MySQL and MariaDB keep, of a process that is frozen or cannot be heard. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { type Pool, type PoolConnection, type RowDataPacket, createPool } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startProxy } from "./harness/proxy.ts";

describe.each(["mariadb", "mysql"] as const)("%s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolConnection>;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 4 });
    hf = holdfast(fromMysql2(pool));
    await hf.migrate();
    await pool.query("CREATE TABLE effect (n int NOT NULL) ENGINE=InnoDB");
  });

  beforeEach(async ({ skip }) => {
    skip(why !== undefined, why);
    await pool.query("DELETE FROM effect");
  });

  afterAll(async () => {
    if (why !== undefined) return;
    await hf.close();
    await pool.end();
    await database.drop();
  });

  test.each([
    ["with a lock", "read committed", true],
    ["with a lock", "repeatable read", true],
    ["without", "read committed", false],
  ] as const)("a holder that the server does not hear of is ended: %s, %s", async (_, isolation, locked) => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const remote = createPool({ uri: proxy.url(database.url), connectionLimit: 2 });
    const frozen = holdfast(fromMysql2(remote));
    try {
      await pool.query("INSERT INTO effect VALUES (0)");
      const holding = Promise.withResolvers<void>();
      const lost = frozen.transaction(
        { ...(locked && { lock: key("frozen") }), isolation, deadline: 1500, retry: false },
        async (tx) => {
          await tx.client.query("UPDATE effect SET n = 1");
          holding.resolve();
          await sleep(60_000, undefined, { ref: false });
        },
      );
      const outcome = lost.catch((error: unknown) => error);
      await holding.promise;
      proxy.freeze();
      const started = performance.now();
      await hf.transaction({ lock: key("frozen"), wait: 10_000 }, (tx) =>
        tx.client.query("UPDATE effect SET n = n + 10"),
      );
      expect(performance.now() - started).toBeLessThan(5000);
      expect(await outcome).toBeInstanceOf(Error);
      const [rows] = await pool.query<RowDataPacket[]>("SELECT n FROM effect");
      expect(rows).toEqual([{ n: 10 }]);
    } finally {
      proxy.thaw();
      await frozen.close();
      remote.end().catch(() => {});
      await proxy.close();
    }
  });

  test("what the session had before it has again, however the transaction ended", async () => {
    const alone = createPool({ uri: database.url, connectionLimit: 1 });
    const there = holdfast(fromMysql2(alone));
    const setting = async (on: Pool | PoolConnection = alone) => {
      const [rows] = await on.query<RowDataPacket[]>(
        "SELECT @@SESSION.wait_timeout AS n, CONNECTION_ID() AS id",
      );
      return rows[0] as { n: number; id: number };
    };
    await alone.query("SET SESSION wait_timeout = 1234");
    const before = await setting();
    expect(before.n).toBe(1234);
    for (const isolation of ["read committed", "repeatable read"] as const) {
      for (const lock of [{ lock: key("a") }, { lock: [key("a"), key("b")] }, {}]) {
        await there.transaction({ ...lock, isolation, deadline: 5000 }, async (tx) => {
          expect((await setting(tx.client)).n).toBe(6);
        });
        expect(await setting()).toEqual(before);
        const failing = there.transaction({ ...lock, isolation }, () =>
          Promise.reject(new Error("on purpose")),
        );
        await expect(failing).rejects.toThrow("on purpose");
        expect(await setting()).toEqual(before);
      }
    }
    await hf.transaction({ lock: key("taken") }, async () => {
      expect(await there.tryLock(key("taken"), async () => {})).toEqual({ acquired: false });
    });
    expect(await setting()).toEqual(before);
    await there.close();
    await alone.end();
  });

  test("a body that is silent within its deadline is left alone", async () => {
    await hf.transaction({ lock: key("slow"), deadline: 3000 }, async (tx) => {
      await tx.client.query("INSERT INTO effect VALUES (1)");
      await sleep(2500);
    });
    const [rows] = await pool.query<RowDataPacket[]>("SELECT n FROM effect");
    expect(rows).toEqual([{ n: 1 }]);
  });
});
