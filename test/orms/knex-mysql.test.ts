/** What is special of Knex on MySQL and MariaDB. */
import { basename } from "node:path";
import {
  CommitUnknownError,
  ConnectionLostError,
  type Holdfast,
  LockNotAvailableError,
  LockTimeoutError,
  PoolExhaustedError,
  TransactionAbortedError,
  UnsupportedError,
  WrongConnectionError,
  holdfast,
  isRetryable,
  isUniqueViolation,
  key,
} from "holdfast";
import { fromKnex } from "holdfast/knex";
import makeKnex, { type Knex } from "knex";
import { type Connection, type RowDataPacket, createConnection } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";
import { eventually } from "../harness/wait.ts";

const caught = (running: PromiseLike<unknown>): Promise<unknown> =>
  Promise.resolve(running).then(
    () => undefined,
    (error: unknown) => error,
  );

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  let database: TestDatabase;
  let knex: Knex;
  let hf: Holdfast<Knex.Transaction>;
  /** Somebody else, who writes SQL by hand. */
  let other: Connection;

  const why = unavailable(server);

  const open = (url = database.url, max = 10) =>
    makeKnex({ client: "mysql2", connection: url, pool: { min: 0, max }, log: { warn: () => {} } });

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    knex = open();
    hf = holdfast(fromKnex(knex));
    other = await createConnection(database.url);
    await hf.migrate();
    await other.query("CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL) ENGINE=InnoDB");
  });

  beforeEach(async ({ skip }) => {
    skip(why !== undefined, why);
    await other.query("DELETE FROM account");
    await other.query("INSERT INTO account VALUES (1, 100), (2, 100)");
  });

  afterAll(async () => {
    if (why !== undefined) return;
    await knex.destroy();
    await other.end();
    await database.drop();
  });

  const balance = async (id: number) => {
    const [rows] = await other.query<RowDataPacket[]>("SELECT balance FROM account WHERE id = ?", [id]);
    return rows[0]?.["balance"] as number | undefined;
  };

  /** Every connection of the pool is as it was. */
  const autocommit = async (own: Knex) => {
    const asking = Array.from({ length: 3 }, () => own.select<{ a: number }[]>(own.raw("@@autocommit AS a")));
    return (await Promise.all(asking)).map(([row]) => row?.a);
  };

  test("a deadlock is retried until both have committed", async () => {
    const retried: number[] = [];
    let arrived = 0;
    const transfer = (from: number, to: number) =>
      hf.transaction(async ({ client: trx, attempt }) => {
        await trx("account").where({ id: from }).decrement("balance", 10);
        if (attempt > 1) retried.push(from);
        else {
          arrived++;
          await eventually(() => arrived === 2);
        }
        await trx("account").where({ id: to }).increment("balance", 10);
      });
    await Promise.all([transfer(1, 2), transfer(2, 1)]);
    // Once, or more often: who runs again may be faster than who was let through.
    expect(retried.length).toBeGreaterThan(0);
    expect([await balance(1), await balance(2)]).toEqual([100, 100]);
    expect(await autocommit(knex)).toEqual([1, 1, 1]);
  });

  test("nothing is kept of a body that swallows a deadlock, and the call says so", async () => {
    let arrived = 0;
    const swallowing = (from: number, to: number) =>
      hf.transaction({ retry: false }, async ({ client: trx }) => {
        await trx("account").where({ id: from }).update({ balance: 1 });
        arrived++;
        await eventually(() => arrived === 2);
        const error = await caught(trx("account").where({ id: to }).update({ balance: 1 }));
        // The server has ended the transaction: without autocommit off this would be kept.
        if (error) await trx("account").insert({ id: 3, balance: 3 });
      });
    const ends = await Promise.all([caught(swallowing(1, 2)), caught(swallowing(2, 1))]);
    const failed = ends.filter((end) => end !== undefined);
    expect(failed).toHaveLength(1);
    expect(failed[0]).toBeInstanceOf(TransactionAbortedError);
    expect([await balance(1), await balance(2), await balance(3)]).toEqual([1, 1, undefined]);
    expect(await autocommit(knex)).toEqual([1, 1, 1]);
  });

  test("a statement that commits by itself is told of", async () => {
    const running = hf.transaction(async ({ client: trx }) => {
      await trx.raw("CREATE TABLE IF NOT EXISTS oops (n int)");
      await trx("account").insert({ id: 3, balance: 3 });
    });
    await expect(running).rejects.toBeInstanceOf(TransactionAbortedError);
    expect(await balance(3)).toBeUndefined();
  });

  test("a unique violation is the driver's own, as Knex throws it", async () => {
    const error = await caught(
      hf.transaction(({ client }) => client("account").insert({ id: 1, balance: 1 })),
    );
    expect(error).toMatchObject({ code: "ER_DUP_ENTRY" });
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
  });

  test("isolation and access are what was asked for", async () => {
    const write = hf.transaction({ readOnly: true, isolation: "repeatable read" }, ({ client }) =>
      client("account").insert({ id: 3, balance: 1 }),
    );
    expect(await caught(write)).toMatchObject({ errno: 1792 });
    for (const [isolation, seen] of [
      ["read committed", 5],
      ["repeatable read", 100],
    ] as const) {
      await other.query("UPDATE account SET balance = 100 WHERE id = 1");
      const read = await hf.transaction({ isolation }, async ({ client: trx }) => {
        await trx("account").select("*");
        await other.query("UPDATE account SET balance = 5 WHERE id = 1");
        return trx<{ id: number; balance: number }>("account").where({ id: 1 }).first();
      });
      expect(read?.balance).toBe(seen);
    }
  });

  test("a connection that dies in the body", async () => {
    const own = open();
    try {
      const once = holdfast(fromKnex(own), { retry: false });
      const lost = caught(
        once.transaction(async ({ client: trx }) => {
          const [row] = await trx.select<{ id: number }[]>(trx.raw("CONNECTION_ID() AS id"));
          await other.query(`KILL CONNECTION ${row?.id}`);
          await trx("account").insert({ id: 3, balance: 3 });
        }),
      );
      expect(await lost).toBeInstanceOf(ConnectionLostError);
      expect(await once.transaction(async () => "next")).toBe("next");
      expect(await balance(3)).toBeUndefined();
    } finally {
      await own.destroy();
    }
  });

  test("a COMMIT whose answer is lost is not known, and not run again", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const own = open(proxy.url(database.url));
    try {
      const proxied = holdfast(fromKnex(own));
      let armed = false;
      proxy.cutWhen((direction, chunk) => {
        if (!armed || direction !== "to-server" || !/\bCOMMIT\b/i.test(chunk.toString("latin1")))
          return "pass";
        armed = false;
        return "drop-answer";
      });
      let runs = 0;
      const running = proxied.transaction(async ({ client }) => {
        runs++;
        await client("account").insert({ id: 3, balance: 3 });
        armed = true;
      });
      await expect(running).rejects.toBeInstanceOf(CommitUnknownError);
      expect([runs, await balance(3)]).toEqual([1, 3]);
    } finally {
      await own.destroy();
      await proxy.close();
    }
  });

  test("a network that falls silent does not keep the error of the body to itself", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const own = open(proxy.url(database.url));
    try {
      const proxied = holdfast(fromKnex(own));
      const mine = new Error("mine");
      const failing = proxied.transaction(async ({ client }) => {
        await client("account").where({ id: 1 });
        proxy.freeze();
        throw mine;
      });
      expect(await caught(failing)).toBe(mine);
      proxy.thaw();
      expect(await proxied.transaction(async () => "next")).toBe("next");
    } finally {
      proxy.thaw();
      await own.destroy();
      await proxy.close();
    }
  });

  test("a statement beside its transaction is told of", async () => {
    const own = open();
    const guard = holdfast(fromKnex(own), { wrongConnection: "throw" });
    try {
      const error = await caught(guard.transaction(async () => void (await own("account").select("*"))));
      expect(error).toBeInstanceOf(WrongConnectionError);
      expect((error as Error).message.split(basename(import.meta.url))).toHaveLength(3);
      await guard.transaction({ lock: key("fine") }, async (tx) => {
        await tx.client("account").select("*");
        await guard.outside(() => own("account").select("*"));
      });
    } finally {
      await guard.close();
      await own.destroy();
    }
  });

  test("a pool of one is exhausted by a statement beside its transaction", async () => {
    const own = open(database.url, 1);
    const single = holdfast(fromKnex(own), { wrongConnection: "off" });
    try {
      await single.transaction(async () => {});
      const error = await caught(single.transaction(() => own("account").select("*")));
      expect(error).toBeInstanceOf(PoolExhaustedError);
    } finally {
      await single.close();
      await own.destroy();
    }
  });

  test("rows of a query", async () => {
    const rows = (wait: number | "skip" | "nowait") =>
      hf.transaction((tx) => tx.rows(knex("account").orderBy("id"), { wait }));
    await other.query("START TRANSACTION");
    await other.query("SELECT * FROM account WHERE id = 1 FOR UPDATE");
    try {
      expect(await rows("skip")).toMatchObject([{ id: 2 }]);
      expect(await caught(rows("nowait"))).toBeInstanceOf(LockNotAvailableError);
      expect(await caught(rows(100))).toBeInstanceOf(LockTimeoutError);
    } finally {
      await other.query("ROLLBACK");
    }
    await hf.transaction(async (tx) => {
      expect(await tx.rows(knex("account").where({ id: 1 }), { for: "share" })).toHaveLength(1);
      await expect(tx.rows(knex("account"), { for: "share", wait: "skip" })).rejects.toBeInstanceOf(
        UnsupportedError,
      );
      await expect(tx.rows(knex("account"), { for: "key share" })).rejects.toBeInstanceOf(UnsupportedError);
    });
  });
});
