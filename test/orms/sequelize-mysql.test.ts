/** What is special of Sequelize on MySQL and MariaDB. */
import { basename } from "node:path";
import {
  CommitUnknownError,
  ConnectionLostError,
  type Holdfast,
  LockTimeoutError,
  PoolExhaustedError,
  TransactionAbortedError,
  UnsupportedError,
  WrongConnectionError,
  holdfast,
  isRetryable,
  isUniqueViolation,
  key,
  sql,
} from "holdfast";
import { findAll, fromSequelize } from "holdfast/sequelize";
import { type Connection, type RowDataPacket, createConnection } from "mysql2/promise";
import {
  DataTypes,
  type InferAttributes,
  type InferCreationAttributes,
  type Model,
  type ModelStatic,
  Sequelize,
  type Transaction,
  UniqueConstraintError,
} from "sequelize";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";
import { eventually } from "../harness/wait.ts";

const caught = (running: PromiseLike<unknown>): Promise<unknown> =>
  Promise.resolve(running).then(
    () => undefined,
    (error: unknown) => error,
  );

interface Account extends Model<InferAttributes<Account>, InferCreationAttributes<Account>> {
  id: number;
  balance: number;
}

const accounts = (own: Sequelize): ModelStatic<Account> =>
  own.define<Account>(
    "account",
    {
      id: { type: DataTypes.INTEGER, primaryKey: true },
      balance: { type: DataTypes.INTEGER, allowNull: false },
    },
    { tableName: "account", timestamps: false },
  );

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  let database: TestDatabase;
  let sequelize: Sequelize;
  let account: ModelStatic<Account>;
  let hf: Holdfast<Transaction>;
  /** Somebody else, who writes SQL by hand. */
  let other: Connection;

  const why = unavailable(server);

  const open = (url = database.url, max = 10) => new Sequelize(url, { logging: false, pool: { max } });

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    sequelize = open();
    account = accounts(sequelize);
    hf = holdfast(fromSequelize(sequelize));
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
    await sequelize.close();
    await other.end();
    await database.drop();
  });

  const balance = async (id: number) => {
    const [rows] = await other.query<RowDataPacket[]>("SELECT balance FROM account WHERE id = ?", [id]);
    return rows[0]?.["balance"] as number | undefined;
  };

  /** Every connection of the pool is as it was. */
  const autocommit = async (own: Sequelize) => {
    const asking = Array.from({ length: 3 }, () => own.query("SELECT @@autocommit AS a"));
    return (await Promise.all(asking)).map(([rows]) => (rows[0] as { a: number }).a);
  };

  test("a deadlock is retried until both have committed", async () => {
    const retried: number[] = [];
    let arrived = 0;
    const transfer = (from: number, to: number) =>
      hf.transaction(async ({ client: transaction, attempt }) => {
        await account.decrement("balance", { by: 10, where: { id: from }, transaction });
        if (attempt > 1) retried.push(from);
        else {
          arrived++;
          await eventually(() => arrived === 2);
        }
        await account.increment("balance", { by: 10, where: { id: to }, transaction });
      });
    await Promise.all([transfer(1, 2), transfer(2, 1)]);
    // Once, or more often: who runs again may be faster than who was let through.
    expect(retried.length).toBeGreaterThan(0);
    expect([await balance(1), await balance(2)]).toEqual([100, 100]);
    expect(await autocommit(sequelize)).toEqual([1, 1, 1]);
  });

  test("nothing is kept of a body that swallows a deadlock, and the call says so", async () => {
    let arrived = 0;
    const swallowing = (from: number, to: number) =>
      hf.transaction({ retry: false }, async ({ client: transaction }) => {
        await account.update({ balance: 1 }, { where: { id: from }, transaction });
        arrived++;
        await eventually(() => arrived === 2);
        const error = await caught(account.update({ balance: 1 }, { where: { id: to }, transaction }));
        if (!error) return;
        // Sequelize has rolled back and given the connection away: nothing may be sent on it any more.
        expect(await caught(account.create({ id: 3, balance: 3 }, { transaction }))).toBeInstanceOf(Error);
      });
    const ends = await Promise.all([caught(swallowing(1, 2)), caught(swallowing(2, 1))]);
    const failed = ends.filter((end) => end !== undefined);
    expect(failed).toHaveLength(1);
    expect(failed[0]).toBeInstanceOf(TransactionAbortedError);
    expect([await balance(1), await balance(2), await balance(3)]).toEqual([1, 1, undefined]);
    expect(await autocommit(sequelize)).toEqual([1, 1, 1]);
  });

  test("our own statements too are refused once Sequelize has ended the transaction", async () => {
    const running = hf.transaction(async (tx) => {
      await tx.client.rollback();
      await caught(tx.query(sql`INSERT INTO account VALUES (3, 3)`));
    });
    await expect(running).rejects.toBeInstanceOf(TransactionAbortedError);
    expect(await balance(3)).toBeUndefined();
  });

  test("a statement that commits by itself is told of", async () => {
    const running = hf.transaction(async ({ client: transaction }) => {
      await sequelize.query("CREATE TABLE IF NOT EXISTS oops (n int)", { transaction });
      await account.create({ id: 3, balance: 3 }, { transaction });
    });
    await expect(running).rejects.toBeInstanceOf(TransactionAbortedError);
    expect(await balance(3)).toBeUndefined();
  });

  test("a unique violation is Sequelize's own", async () => {
    const error = await caught(
      hf.transaction(({ client: transaction }) => account.create({ id: 1, balance: 1 }, { transaction })),
    );
    expect(error).toBeInstanceOf(UniqueConstraintError);
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
  });

  test("isolation and access are what was asked for", async () => {
    const write = hf.transaction(
      { readOnly: true, isolation: "repeatable read" },
      ({ client: transaction }) => account.create({ id: 3, balance: 1 }, { transaction }),
    );
    expect(await caught(write)).toMatchObject({ original: { errno: 1792 } });
    for (const [isolation, seen] of [
      ["read committed", 5],
      ["repeatable read", 100],
    ] as const)
      for (const readOnly of [false, true]) {
        await other.query("UPDATE account SET balance = 100 WHERE id = 1");
        const read = await hf.transaction({ isolation, readOnly }, async ({ client: transaction }) => {
          await account.findAll({ transaction });
          await other.query("UPDATE account SET balance = 5 WHERE id = 1");
          return account.findByPk(1, { transaction });
        });
        expect(read?.balance).toBe(seen);
      }
  });

  test("a connection that dies in the body", async () => {
    const own = open();
    try {
      const once = holdfast(fromSequelize(own), { retry: false });
      const lost = caught(
        once.transaction(async ({ client: transaction }) => {
          const [rows] = await own.query("SELECT CONNECTION_ID() AS id", { transaction });
          await other.query(`KILL CONNECTION ${(rows[0] as { id: number }).id}`);
          await accounts(own).create({ id: 3, balance: 3 }, { transaction });
        }),
      );
      expect(await lost).toBeInstanceOf(ConnectionLostError);
      expect(await once.transaction(async () => "next")).toBe("next");
      expect(await balance(3)).toBeUndefined();
    } finally {
      await own.close();
    }
  });

  test("a COMMIT whose answer is lost is not known, and not run again", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const own = open(proxy.url(database.url));
    try {
      const proxied = holdfast(fromSequelize(own));
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
        await accounts(own).create({ id: 3, balance: 3 }, { transaction: client });
        armed = true;
      });
      await expect(running).rejects.toBeInstanceOf(CommitUnknownError);
      expect([runs, await balance(3)]).toEqual([1, 3]);
    } finally {
      await own.close();
      await proxy.close();
    }
  });

  test("a network that falls silent does not keep the error of the body to itself", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const own = open(proxy.url(database.url));
    try {
      const proxied = holdfast(fromSequelize(own));
      const mine = new Error("mine");
      const failing = proxied.transaction(async ({ client: transaction }) => {
        await own.query("SELECT 1", { transaction });
        proxy.freeze();
        throw mine;
      });
      expect(await caught(failing)).toBe(mine);
      proxy.thaw();
      expect(await proxied.transaction(async () => "next")).toBe("next");
    } finally {
      proxy.thaw();
      await own.close();
      await proxy.close();
    }
  });

  test("a statement beside its transaction is told of", async () => {
    const own = open();
    const model = accounts(own);
    const guard = holdfast(fromSequelize(own), { wrongConnection: "throw" });
    try {
      const error = await caught(guard.transaction(async () => void (await model.findAll())));
      expect(error).toBeInstanceOf(WrongConnectionError);
      expect((error as Error).message.split(basename(import.meta.url))).toHaveLength(3);
      await guard.transaction({ lock: key("fine") }, async ({ client: transaction }) => {
        await model.findAll({ transaction });
        await guard.outside(() => model.findAll());
      });
    } finally {
      await guard.close();
      await own.close();
    }
  });

  test("a pool of one is exhausted by a statement beside its transaction", async () => {
    const own = open(database.url, 1);
    const single = holdfast(fromSequelize(own), { wrongConnection: "off" });
    try {
      await single.transaction(async () => {});
      const error = await caught(single.transaction(() => accounts(own).findAll()));
      expect(error).toBeInstanceOf(PoolExhaustedError);
    } finally {
      await single.close();
      await own.close();
    }
  });

  test("rows of findAll", async () => {
    const query = findAll(account, { order: ["id"] });
    await other.query("START TRANSACTION");
    await other.query("SELECT * FROM account WHERE id = 1 FOR UPDATE");
    try {
      expect(await caught(hf.transaction((tx) => tx.rows(query, { wait: 100 })))).toBeInstanceOf(
        LockTimeoutError,
      );
      const free = findAll(account, { where: { id: 2 } });
      expect(await hf.transaction((tx) => tx.rows(free, { for: "share" }))).toHaveLength(1);
      // Sequelize would leave these words out without a word.
      for (const wait of ["skip", "nowait"] as const)
        expect(await caught(hf.transaction((tx) => tx.rows(query, { wait })))).toBeInstanceOf(
          UnsupportedError,
        );
      const one = findAll(account, { lock: { of: account } as never });
      expect(await caught(hf.transaction((tx) => tx.rows(one)))).toBeInstanceOf(UnsupportedError);
    } finally {
      await other.query("ROLLBACK");
    }
  });
});

test("the dialect mariadb says what to use instead", () => {
  const own = new Sequelize({ dialect: "mariadb", dialectModule: { createConnection: () => {} } });
  expect(() => fromSequelize(own)).toThrow(/dialect "mysql"/);
});
