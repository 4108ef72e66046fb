/** What is special of Sequelize, on PostgreSQL; what every client must do is in test/conformance. */
import { AsyncLocalStorage } from "node:async_hooks";
import { basename } from "node:path";
import {
  ConnectionLostError,
  DeadlineExceededError,
  type Holdfast,
  type HoldfastOptions,
  LockTimeoutError,
  NoConnectionError,
  NotInTransactionError,
  PoolExhaustedError,
  TransactionAbortedError,
  UnsupportedError,
  UsageError,
  WrongConnectionError,
  holdfast,
  isRetryable,
  isUniqueViolation,
  key,
} from "holdfast";
import { findAll, fromSequelize } from "holdfast/sequelize";
import { Client } from "pg";
import {
  type CreationOptional,
  DataTypes,
  DatabaseError,
  type InferAttributes,
  type InferCreationAttributes,
  Model,
  type ModelStatic,
  type Options,
  Sequelize,
  type Transaction,
  UniqueConstraintError,
} from "sequelize";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";
import { eventually } from "../harness/wait.ts";

interface Account extends Model<InferAttributes<Account>, InferCreationAttributes<Account>> {
  id: number;
  ownerName: CreationOptional<string | null>;
  balance: number;
}

function accounts(sequelize: Sequelize): ModelStatic<Account> {
  return sequelize.define<Account>(
    "account",
    {
      id: { type: DataTypes.INTEGER, primaryKey: true },
      ownerName: { type: DataTypes.TEXT },
      balance: { type: DataTypes.INTEGER, allowNull: false },
    },
    { tableName: "account", timestamps: false, underscored: true },
  );
}

let database: TestDatabase;
let sequelize: Sequelize;
let account: ModelStatic<Account>;
let hf: Holdfast<Transaction>;
/** Somebody else, who writes SQL by hand. */
let psql: Client;

function open(url = database.url, options: Options = {}): Sequelize {
  return new Sequelize(url, { logging: false, pool: { max: 10 }, ...options });
}

beforeAll(async () => {
  database = await createDatabase("postgres");
  sequelize = open();
  account = accounts(sequelize);
  hf = holdfast(fromSequelize(sequelize));
  psql = new Client({ connectionString: database.url });
  await psql.connect();
  await psql.query(
    "CREATE TABLE account (id integer PRIMARY KEY, owner_name text, balance integer NOT NULL)",
  );
});

beforeEach(async () => {
  await psql.query("TRUNCATE account; INSERT INTO account VALUES (1, 'ada', 100), (2, 'bob', 100)");
});

afterAll(async () => {
  await sequelize.close();
  await psql.end();
  await database.drop();
});

const balance = async (id: number): Promise<number | undefined> =>
  (await psql.query<{ balance: number }>("SELECT balance FROM account WHERE id = $1", [id])).rows[0]?.balance;

const caught = (running: PromiseLike<unknown>): Promise<unknown> =>
  Promise.resolve(running).then(
    () => undefined,
    (error: unknown) => error,
  );

/** Runs with a Sequelize of its own. */
async function using<T>(own: Sequelize, run: (own: Sequelize) => Promise<T>): Promise<T> {
  try {
    return await run(own);
  } finally {
    await own.close();
  }
}

interface Manager {
  getConnection(options: object): Promise<{ query(text: string): Promise<{ rows: { pid: number }[] }> }>;
  releaseConnection(connection: unknown): void;
}
const managerOf = (own: Sequelize) => own.connectionManager as unknown as Manager;

describe("tx.client", () => {
  test("is Sequelize's own transaction, for models and raw statements alike", async () => {
    const left = await hf.transaction({ lock: key("account", 1) }, async ({ client: transaction }) => {
      await account.decrement("balance", { by: 30, where: { id: 1 }, transaction });
      const [row] = await sequelize.query("SELECT balance FROM account WHERE id = :id", {
        replacements: { id: 1 },
        transaction,
        plain: false,
      });
      expect(await balance(1)).toBe(100);
      const found = await account.findByPk(1, { transaction });
      expect((row[0] as Account).balance).toBe(70);
      return found?.balance;
    });
    expect([left, await balance(1)]).toEqual([70, 70]);
  });

  test("nests by savepoints, Sequelize's and ours", async () => {
    await hf.transaction(async (tx) => {
      const set = (id: number, to: number, transaction: Transaction) =>
        account.update({ balance: to }, { where: { id }, transaction });
      await caught(
        sequelize.transaction({ transaction: tx.client }, async (inner) => {
          await set(1, 1, inner);
          throw new Error("undone");
        }),
      );
      await sequelize.transaction({ transaction: tx.client }, async (inner) => {
        await hf.join(inner).lock(key("nested"));
        await set(2, 2, inner);
      });
      await caught(
        tx.transaction(async ({ client }) => {
          await set(2, 3, client);
          throw new Error("undone");
        }),
      );
    });
    expect([await balance(1), await balance(2)]).toEqual([100, 2]);
  });

  test("has the isolation and access that were asked for, whatever Sequelize's default is", async () => {
    const own = open(database.url, { isolationLevel: "REPEATABLE READ" });
    await using(own, async () => {
      const other = holdfast(fromSequelize(own));
      const asked = async (transaction: Transaction) => {
        const [rows] = await own.query(
          "SELECT current_setting('transaction_isolation') AS isolation, current_setting('transaction_read_only') AS read_only",
          { transaction },
        );
        return rows[0];
      };
      for (const isolation of ["read committed", "repeatable read", "serializable"] as const)
        expect(await other.transaction({ isolation }, ({ client }) => asked(client))).toEqual({
          isolation,
          read_only: "off",
        });
      expect(await other.transaction({ readOnly: true }, ({ client }) => asked(client))).toMatchObject({
        read_only: "on",
      });
    });
  });

  test("runs hooks after COMMIT, and what they throw runs nothing again", async () => {
    const seen: string[] = [];
    await hf.transaction(async ({ client }) => {
      client.afterCommit(async () => void seen.push(`after ${await balance(1)}`));
      await account.update({ balance: 7 }, { where: { id: 1 }, transaction: client });
      seen.push("body");
    });
    expect(seen).toEqual(["body", "after 7"]);
    let runs = 0;
    const failing = hf.transaction(async ({ client }) => {
      runs++;
      // Looks like a deadlock, which would be retried.
      client.afterCommit(() => Promise.reject(Object.assign(new Error("hook"), { code: "40P01" })));
      await account.update({ balance: 8 }, { where: { id: 1 }, transaction: client });
    });
    await expect(failing).rejects.toMatchObject({ code: "HF_USAGE", cause: { message: "hook" } });
    expect([runs, await balance(1)]).toEqual([1, 8]);
    await caught(
      hf.transaction(async ({ client }) => {
        client.afterCommit(() => void seen.push("never"));
        throw new Error("rolled back");
      }),
    );
    expect(seen).not.toContain("never");
  });
});

describe("what does not commit is not reported as committed", () => {
  test("an error that the body swallows", async () => {
    const running = hf.transaction(async ({ client: transaction }) => {
      await account.create({ id: 3, balance: 1 }, { transaction });
      await caught(account.create({ id: 1, balance: 1 }, { transaction }));
    });
    await expect(running).rejects.toBeInstanceOf(TransactionAbortedError);
    expect(await balance(3)).toBeUndefined();
  });

  test.each(["commit", "rollback"] as const)("t.%s() in the body", async (how) => {
    const running = hf.transaction(async ({ client: transaction }) => {
      await account.create({ id: 3, balance: 1 }, { transaction });
      await transaction[how]();
    });
    await expect(running).rejects.toThrow(/t\.commit\(\) or t\.rollback\(\)/);
    await expect(running).rejects.toBeInstanceOf(UsageError);
    // The pool is as it was.
    expect(await hf.transaction({ lock: key("after") }, async () => "fine")).toBe("fine");
  });
});

describe("errors", () => {
  test("a unique violation is Sequelize's own", async () => {
    const error = await caught(
      hf.transaction(({ client: transaction }) => account.create({ id: 1, balance: 1 }, { transaction })),
    );
    expect(error).toBeInstanceOf(UniqueConstraintError);
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
    const bulk = await caught(
      hf.transaction(({ client: transaction }) =>
        account.bulkCreate([{ id: 1, balance: 1 }], { transaction, individualHooks: true }),
      ),
    );
    expect(isUniqueViolation(bulk), String(bulk)).toBe(true);
    // As bulkCreate with individual hooks and validation puts them together.
    const { AggregateError: Aggregate, BulkRecordError } = await import("sequelize");
    expect(isUniqueViolation(new Aggregate([new BulkRecordError(error as Error, {} as Account)]))).toBe(true);
  });

  test("others too are known inside of Sequelize's", async () => {
    const failing = (text: string) =>
      caught(hf.transaction(({ client: transaction }) => sequelize.query(text, { transaction })));
    const error = await failing("SELECT 1/0");
    expect(error).toBeInstanceOf(DatabaseError);
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([false, false]);
    await psql.query("BEGIN; LOCK TABLE account");
    const busy = await failing("LOCK TABLE account IN SHARE MODE NOWAIT");
    await psql.query("ROLLBACK");
    expect(busy).toBeInstanceOf(DatabaseError);
    expect(isRetryable(busy)).toBe(true);
  });

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
  });

  test("a serialization failure at COMMIT is retried", async () => {
    let attempts = 0;
    await hf.transaction({ isolation: "serializable" }, async ({ client: transaction, attempt }) => {
      attempts = attempt;
      const sum = await account.sum("balance", { transaction });
      if (attempt === 1) {
        await psql.query("BEGIN ISOLATION LEVEL SERIALIZABLE");
        await psql.query("INSERT INTO account SELECT 3, 'eve', sum(balance) FROM account");
        await psql.query("COMMIT");
      }
      await account.create({ id: 4, balance: sum }, { transaction });
    });
    expect([attempts, await balance(3), await balance(4)]).toEqual([2, 200, 400]);
  });

  test("a connection that is refused", async () => {
    await using(open("postgres://postgres@127.0.0.1:1/none"), async (own) => {
      const error = await caught(holdfast(fromSequelize(own), { retry: false }).transaction(async () => {}));
      expect(isRetryable(error), String(error)).toBe(true);
      expect(isRetryable(await caught(own.authenticate()))).toBe(true);
    });
  });

  test("a password that is wrong is nothing to try again", async () => {
    const url = new URL(database.url);
    url.pathname = "/there_is_no_such_database";
    await using(open(url.href), async (own) => {
      const error = await caught(holdfast(fromSequelize(own)).transaction(async () => {}));
      expect([isRetryable(error), String(error)]).toEqual([false, expect.stringMatching(/does not exist/)]);
    });
  });

  test("a connection that dies in the body: it is known as lost, and the error of the body is not hidden", async () => {
    await using(open(), async (own) => {
      const once = holdfast(fromSequelize(own), { retry: false });
      const ask = async (transaction: Transaction) =>
        (await own.query("SELECT pg_backend_pid() AS pid", { transaction }))[0][0] as { pid: number };
      const die = async (transaction: Transaction) => {
        const { pid } = await ask(transaction);
        await psql.query("SELECT pg_terminate_backend($1)", [pid]);
      };
      const later = caught(
        once.transaction(async ({ client }) => {
          await die(client);
          await caught(ask(client));
          await ask(client);
        }),
      );
      expect(await later).toBeInstanceOf(ConnectionLostError);
      const mine = new Error("mine");
      const hidden = caught(
        once.transaction(async ({ client, signal }) => {
          await die(client);
          await eventually(() => signal.aborted);
          throw mine;
        }),
      );
      expect(await hidden).toBe(mine);
      expect(await once.transaction(async () => "next")).toBe("next");
    });
  });

  test("a pool that has none to give", async () => {
    await using(open(database.url, { pool: { max: 1, acquire: 1500 } }), async (own) => {
      const single = holdfast(fromSequelize(own));
      await single.transaction(async () => {});
      const connection = await managerOf(own).getConnection({});
      const error = await caught(single.transaction(async () => {}));
      expect(error).toBeInstanceOf(NoConnectionError);
      expect(error).toMatchObject({ cause: { name: "SequelizeConnectionAcquireTimeoutError" } });
      managerOf(own).releaseConnection(connection);
    });
  });

  test("a deadline, and an abort, end the wait for the pool", async () => {
    await using(open(database.url, { pool: { max: 1 } }), async (own) => {
      const single = holdfast(fromSequelize(own));
      await single.transaction(async () => {});
      const connection = await managerOf(own).getConnection({});
      let late = 0;
      const body = async () => void late++;
      await expect(single.transaction({ deadline: 100 }, body)).rejects.toBeInstanceOf(DeadlineExceededError);
      const reason = new Error("no longer wanted");
      expect(await caught(single.transaction({ signal: AbortSignal.abort(reason) }, body))).toBe(reason);
      managerOf(own).releaseConnection(connection);
      expect(await single.transaction(async () => "next")).toBe("next");
      expect(late).toBe(0);
    });
  });
});

describe("a COMMIT whose answer is lost", () => {
  async function withProxy(
    fate: "cut-before" | "drop-answer",
    run: (proxied: Holdfast<Transaction>, model: ModelStatic<Account>, arm: () => void) => Promise<void>,
  ): Promise<void> {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const own = open(proxy.url(database.url));
    try {
      let armed = false;
      proxy.cutWhen((direction, chunk) => {
        if (!armed || direction !== "to-server" || !/\bCOMMIT\b/i.test(chunk.toString("latin1")))
          return "pass";
        armed = false;
        return fate;
      });
      await run(holdfast(fromSequelize(own)), accounts(own), () => (armed = true));
    } finally {
      await own.close();
      await proxy.close();
    }
  }

  test("was kept: the call succeeds", async () => {
    let runs = 0;
    await withProxy("drop-answer", async (proxied, model, arm) => {
      const value = await proxied.transaction({ lock: key("commit") }, async ({ client: transaction }) => {
        runs++;
        await model.create({ id: 3, balance: 3 }, { transaction });
        arm();
        return "value";
      });
      expect(value).toBe("value");
    });
    expect([runs, await balance(3)]).toEqual([1, 3]);
  });

  test("never arrived: the call says so, or runs again", async () => {
    const insert = (
      proxied: Holdfast<Transaction>,
      model: ModelStatic<Account>,
      arm: () => void,
      retry: false | object,
    ) =>
      proxied.transaction({ lock: key("commit"), retry }, async ({ client: transaction, attempt }) => {
        await model.create({ id: 3, balance: attempt }, { transaction });
        if (attempt === 1) arm();
      });
    await withProxy("cut-before", async (proxied, model, arm) => {
      await expect(insert(proxied, model, arm, false)).rejects.toBeInstanceOf(ConnectionLostError);
    });
    expect(await balance(3)).toBeUndefined();
    await withProxy("cut-before", (proxied, model, arm) => insert(proxied, model, arm, {}));
    expect(await balance(3)).toBe(2);
  });
});

test("a network that falls silent does not keep the error of the body to itself", async () => {
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  const own = open(proxy.url(database.url));
  try {
    const proxied = holdfast(fromSequelize(own));
    const mine = new Error("mine");
    const failing = proxied.transaction(async ({ client }) => {
      await own.query("SELECT 1", { transaction: client });
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

test("a connection of one's own that is broken leaves the server at once, and the pool goes on", async () => {
  await using(open(database.url, { pool: { max: 1 } }), async (own) => {
    const pinned = await fromSequelize(own).connect?.({ use: "session", locks: [], wait: 1000 });
    const raw = pinned?.connection.session as Awaited<ReturnType<Manager["getConnection"]>>;
    const { rows } = await raw.query("SELECT pg_backend_pid() AS pid");
    await pinned?.release(true);
    await eventually(
      async () =>
        (await psql.query("SELECT FROM pg_stat_activity WHERE pid = $1", [rows[0]?.pid])).rows.length === 0,
    );
    expect(await accounts(own).count()).toBe(2);
  });
});

describe("join", () => {
  test("refuses what is no transaction, or no longer one", async () => {
    expect(() => hf.join(sequelize as never)).toThrow(NotInTransactionError);
    expect(() => hf.join(sequelize as never)).toThrow(/sequelize\.transaction\(async \(t\)/);
    expect(() => hf.join({} as never)).toThrow(NotInTransactionError);
    expect(() => hf.join(null as never)).toThrow(NotInTransactionError);
    const t = await sequelize.transaction();
    const scope = hf.join(t);
    await scope.lock(key("joined"));
    await t.commit();
    await expect(scope.lock(key("late"))).rejects.toBeInstanceOf(NotInTransactionError);
    await expect(async () => hf.join(t).lock(key("late"))).rejects.toBeInstanceOf(NotInTransactionError);
  });

  test("works on a transaction that was opened without a callback", async () => {
    const t = await sequelize.transaction();
    await hf.join(t).lock(key("joined"));
    expect((await hf.tryLock(key("joined"), async () => {})).acquired).toBe(false);
    await t.rollback();
    expect((await hf.tryLock(key("joined"), async () => {})).acquired).toBe(true);
  });
});

describe("a statement beside its transaction", () => {
  const here = basename(import.meta.url);
  const places = (text: string) => text.split(here).length - 1;

  async function guarded<T>(
    options: HoldfastOptions,
    max: number,
    run: (own: Sequelize, model: ModelStatic<Account>, guard: Holdfast<Transaction>) => Promise<T>,
  ): Promise<T> {
    const own = open(database.url, { pool: { max } });
    const guard = holdfast(fromSequelize(own), options);
    try {
      await guard.transaction(async () => {});
      return await run(own, accounts(own), guard);
    } finally {
      await guard.close();
      await own.close();
    }
  }

  const beside: Record<string, (own: Sequelize, model: ModelStatic<Account>) => Promise<unknown>> = {
    "findAll without { transaction }": (_, model) => model.findAll(),
    "count without { transaction }": (_, model) => model.count({ where: { id: 1 } }),
    "create without { transaction }": (_, model) => model.create({ id: 5, balance: 1 }),
    "bulkCreate without { transaction }": (_, model) => model.bulkCreate([{ id: 5, balance: 1 }]),
    "update of an instance": async (_, model) => model.build({ id: 5, balance: 1 }).save(),
    "findOrCreate, which opens a transaction": (_, model) =>
      model.findOrCreate({ where: { id: 5 }, defaults: { id: 5, balance: 1 } }),
    "a raw statement": (own) => own.query("SELECT 1"),
    "a transaction": (own, model) => own.transaction((transaction) => model.findAll({ transaction })),
  };

  test.each(Object.entries(beside))("is told of, with both places: %s", async (_name, send) => {
    await guarded({ wrongConnection: "throw" }, 10, async (own, model, guard) => {
      const error = await caught(
        guard.transaction(async () => {
          await send(own, model);
        }),
      );
      expect(error).toBeInstanceOf(WrongConnectionError);
      expect(places((error as Error).message), (error as Error).message).toBe(2);
    });
  });

  test("is not told of where it is none", async () => {
    await guarded({ wrongConnection: "throw" }, 10, async (own, model, guard) => {
      await guard.transaction({ lock: key("a") }, async (tx) => {
        const transaction = tx.client;
        await model.findAll({ transaction });
        await own.query("SELECT 1", { transaction });
        await own.transaction({ transaction }, (inner) => model.findAll({ transaction: inner }));
        await model.findOrCreate({ where: { id: 5 }, defaults: { id: 5, balance: 1 }, transaction });
        await tx.rows(findAll(model, { where: { id: 1 } }));
        await tx.lock(key("b"));
        await guard.outside(() => model.findAll());
        await guard.transaction({ separate: true }, (other) => model.findAll({ transaction: other.client }));
      });
      await model.findAll();
      await own.transaction((transaction) => model.findAll({ transaction }));
    });
  });

  test("fails at once where the pool has only the one", async () => {
    await guarded({ wrongConnection: "off" }, 1, async (_, model, guard) => {
      const error = await caught(guard.transaction(() => model.findAll()));
      expect(error).toBeInstanceOf(PoolExhaustedError);
      expect(await model.count()).toBe(2);
    });
  });
});

describe("rows of findAll", () => {
  const suffixes = [
    ["update", "bounded", " FOR UPDATE"],
    ["no key update", "skip", " FOR NO KEY UPDATE SKIP LOCKED"],
    ["share", "skip", " FOR SHARE SKIP LOCKED"],
    ["key share", "bounded", " FOR KEY SHARE"],
  ] as const;

  test.each(suffixes)("for %s, %s", async (strength, wait, suffix) => {
    const client = fromSequelize(sequelize);
    await sequelize.transaction(async (t) => {
      const seen: string[] = [];
      const logging = (text: string) => void seen.push(text);
      const query = findAll(account, { where: { id: 1 }, attributes: ["id"], logging });
      const found = (await client.locking?.(t, query, { strength, wait })?.()) as Account[];
      expect(found.map(({ id }) => id)).toEqual([1]);
      expect(seen.map((text) => text.replace(/^Executing \(.*?\): /, ""))).toEqual([
        `SELECT "id" FROM "account" AS "account" WHERE "account"."id" = 1${suffix};`,
      ]);
    });
  });

  test("are locked, and are instances", async () => {
    await hf.transaction(async (tx) => {
      const [found] = await tx.rows(findAll(account, { where: { id: 1 } }));
      expect(found).toBeInstanceOf(account);
      expect(found?.ownerName).toBe("ada");
      const refused = await caught(psql.query("SELECT FROM account WHERE id = 1 FOR UPDATE NOWAIT"));
      expect(refused).toMatchObject({ code: "55P03" });
      expect((await psql.query("SELECT FROM account WHERE id = 2 FOR UPDATE NOWAIT")).rowCount).toBe(1);
      // Not of the whole join, which could not be locked.
      const [only] = await tx.rows(findAll(account, { where: { id: 2 }, lock: { of: account } as never }));
      expect(only?.id).toBe(2);
    });
  });

  test("that are taken", async () => {
    await psql.query("BEGIN; SELECT FROM account WHERE id = 1 FOR UPDATE");
    try {
      const query = findAll(account, { order: ["id"] });
      await hf.transaction(async (tx) => {
        expect((await tx.rows(query, { wait: "skip" })).map(({ id }) => id)).toEqual([2]);
      });
      await expect(hf.transaction((tx) => tx.rows(query, { wait: 50 }))).rejects.toBeInstanceOf(
        LockTimeoutError,
      );
      await expect(hf.transaction((tx) => tx.rows(query, { wait: "nowait" }))).rejects.toBeInstanceOf(
        UnsupportedError,
      );
    } finally {
      await psql.query("ROLLBACK");
    }
  });

  test("what cannot be locked is refused", async () => {
    expect(() => findAll({} as never)).toThrow(UsageError);
    const other = await sequelize.transaction();
    await hf.transaction(async (tx) => {
      for (const query of [
        findAll(account, { transaction: other }),
        findAll(account, { skipLocked: true }),
        account.build({ id: 1, balance: 1 }),
        {},
      ])
        await expect(tx.rows(query)).rejects.toBeInstanceOf(UsageError);
    });
    await other.rollback();
  });
});

test("with replication everything is done where one writes", async () => {
  const { hostname: host, port, username, password, pathname } = new URL(database.url);
  const server = {
    host,
    port,
    username,
    password: decodeURIComponent(password),
    database: pathname.slice(1),
  };
  // There is nothing to read from.
  const read = [{ ...server, port: "1" }];
  const own = new Sequelize({
    dialect: "postgres",
    logging: false,
    pool: { max: 3 },
    replication: { write: server, read },
  });
  await using(own, async () => {
    const client = fromSequelize(own);
    const replicated = holdfast(client);
    const used = async (transaction: Transaction) => {
      expect(client.room?.()).toEqual({ max: 3, out: 1 });
      return accounts(own).count({ transaction });
    };
    await replicated.transaction(async () => {});
    expect(await replicated.transaction({ readOnly: true }, (tx) => used(tx.client))).toBe(2);
    expect(await replicated.transaction({ lock: key("write") }, (tx) => used(tx.client))).toBe(2);
    await (await replicated.hold(key("held"))).release();
    await replicated.close();
  });
});

test("with useCLS the transaction is passed by itself", async () => {
  const current = new AsyncLocalStorage<Map<string, unknown>>();
  Sequelize.useCLS({
    bind: (run: unknown) => run,
    run: (body: (context: object) => unknown) => {
      const context = new Map<string, unknown>();
      current.run(context, () => body(context));
    },
    get: (name: string) => current.getStore()?.get(name),
    set: (name: string, value: unknown) => current.getStore()?.set(name, value),
  });
  try {
    const guard = holdfast(fromSequelize(sequelize), { wrongConnection: "throw" });
    await caught(
      guard.transaction({ lock: key("cls") }, async () => {
        await account.update({ balance: 1 }, { where: { id: 1 } });
        expect((await account.findByPk(1))?.balance).toBe(1);
        throw new Error("undone");
      }),
    );
    expect(await balance(1)).toBe(100);
    await guard.close();
  } finally {
    (Sequelize as unknown as { _cls?: unknown })._cls = undefined;
  }
});

test("what is no Sequelize, or reaches something else, is refused", () => {
  expect(() => fromSequelize({} as never)).toThrow(UsageError);
  expect(() => fromSequelize(undefined as never)).toThrow(UsageError);
  expect(() => fromSequelize(new Sequelize({ dialect: "mssql", dialectModule: {} }))).toThrow(
    UnsupportedError,
  );
});

test("a lease's waiters are woken by the server", async () => {
  expect((await hf.capabilities()).wake).toBe(true);
});
