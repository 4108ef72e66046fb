/** What is special about TypeORM; what every client must do is in the conformance suite. */
import {
  ConnectionLostError,
  type Holdfast,
  LockNotAvailableError,
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
import { fromTypeorm } from "holdfast/typeorm";
import { Client } from "pg";
import {
  DataSource,
  type DataSourceOptions,
  type EntityManager,
  EntitySchema,
  QueryFailedError,
} from "typeorm";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";

interface Account {
  id: number;
  ownerName: string;
  balance: number;
  entries?: Entry[];
}

interface Entry {
  id: number;
  account: Account;
}

const Account = new EntitySchema<Account>({
  name: "Account",
  tableName: "account",
  columns: {
    id: { type: "int", primary: true },
    ownerName: { name: "owner_name", type: "text", unique: true },
    balance: { type: "int", default: 0 },
  },
  relations: { entries: { type: "one-to-many", target: "Entry", inverseSide: "account" } },
});
const Entry = new EntitySchema<Entry>({
  name: "Entry",
  columns: { id: { type: "int", primary: true } },
  relations: { account: { type: "many-to-one", target: "Account", inverseSide: "entries" } },
});

let database: TestDatabase;
let dataSource: DataSource;
let hf: Holdfast<EntityManager>;
/** Somebody else, who writes SQL by hand. */
let psql: Client;
const statements: string[] = [];

function source(options: Partial<DataSourceOptions> = {}): DataSource {
  return new DataSource({
    type: "postgres",
    url: database.url,
    entities: [Account, Entry],
    poolErrorHandler: () => {},
    ...options,
  } as DataSourceOptions);
}

beforeAll(async () => {
  database = await createDatabase("postgres");
  dataSource = source({
    logging: true,
    logger: {
      logQuery: (text: string) => void statements.push(text),
      logQueryError() {},
      logQuerySlow() {},
      logSchemaBuild() {},
      logMigration() {},
      log() {},
    },
  });
  await dataSource.initialize();
  await dataSource.synchronize();
  hf = holdfast(fromTypeorm(dataSource));
  psql = new Client({ connectionString: database.url });
  await psql.connect();
});

beforeEach(async () => {
  await psql.query(
    "TRUNCATE account CASCADE; INSERT INTO account SELECT g, 'o' || g, 100 FROM generate_series(1, 4) g",
  );
  statements.length = 0;
});

afterAll(async () => {
  await psql.end();
  await dataSource.destroy();
  await database.drop();
});

const balances = async () =>
  (await psql.query<{ balance: number }>("SELECT balance FROM account ORDER BY id")).rows.map(
    (r) => r.balance,
  );

const caught = (failing: Promise<unknown>) =>
  failing.then(
    () => undefined,
    (error: unknown) => error,
  );

describe("tx.client", () => {
  test("works with entities, repositories and builders, all of it or nothing", async () => {
    const body = async ({ client }: { client: EntityManager }) => {
      const accounts = client.getRepository(Account);
      const one = await accounts.findOneByOrFail({ id: 1 });
      one.balance += 11;
      await accounts.save(one);
      await client.createQueryBuilder().update(Account).set({ balance: 7 }).where({ id: 2 }).execute();
      await client.insert(Account, { id: 5, ownerName: "o5" });
      return accounts.count();
    };
    await expect(
      hf.transaction(async (tx) => {
        await body(tx);
        throw new Error("undo");
      }),
    ).rejects.toThrow("undo");
    expect(await balances()).toEqual([100, 100, 100, 100]);
    expect(await hf.transaction({ lock: key("accounts") }, body)).toBe(5);
    expect(await balances()).toEqual([111, 7, 100, 100, 0]);
  });

  test("has the isolation that was asked for, whatever the DataSource's own is", async () => {
    const level = (
      of: Holdfast<EntityManager>,
      isolation: "read committed" | "repeatable read" | "serializable",
    ) =>
      of.transaction({ isolation }, async ({ client }) => {
        const [row] = await client.query<{ transaction_isolation: string }[]>("SHOW transaction_isolation");
        return row?.transaction_isolation;
      });
    const strict = source({ isolationLevel: "SERIALIZABLE" });
    await strict.initialize();
    try {
      for (const isolation of ["read committed", "repeatable read", "serializable"] as const) {
        expect(await level(hf, isolation)).toBe(isolation);
        expect(await level(holdfast(fromTypeorm(strict)), isolation)).toBe(isolation);
      }
    } finally {
      await strict.destroy();
    }
  });

  test("is read only if that was asked for", async () => {
    const writing = hf.transaction({ readOnly: true }, ({ client }) =>
      client.update(Account, 1, { balance: 1 }),
    );
    await expect(writing).rejects.toMatchObject({ code: "25006" });
  });

  test("can nest, and what is left open inside is not taken for a commit", async () => {
    await hf.transaction(async ({ client }) => {
      await client.transaction((inner) => inner.update(Account, 1, { balance: 1 }));
    });
    const left = hf.transaction(async ({ client }) => {
      await client.queryRunner?.startTransaction();
      await client.update(Account, 1, { balance: 2 });
    });
    await expect(left).rejects.toThrow(/left a transaction open/);
    const ended = hf.transaction(async ({ client }) => {
      await client.update(Account, 1, { balance: 3 });
      await client.queryRunner?.rollbackTransaction();
    });
    await expect(ended).rejects.toThrow(/ended the transaction by itself/);
    expect(await balances()).toEqual([1, 100, 100, 100]);
    // Nothing of that is left on the pooled connections.
    const { rows } = await psql.query(
      "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'",
    );
    expect(rows).toEqual([]);
  });
});

describe("errors", () => {
  test("a unique violation passes through as TypeORM's own", async () => {
    const error = await caught(
      hf.transaction(({ client }) => client.insert(Account, { id: 9, ownerName: "o1" })),
    );
    expect(error).toBeInstanceOf(QueryFailedError);
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
  });

  test("of COMMIT are those of the transaction", async () => {
    const error = await caught(
      hf.transaction(async ({ client }) => {
        await client.query("CREATE TABLE twice (n int, UNIQUE (n) DEFERRABLE INITIALLY DEFERRED)");
        await client.query("INSERT INTO twice VALUES (1), (1)");
      }),
    );
    expect(error).toBeInstanceOf(QueryFailedError);
    expect(isUniqueViolation(error)).toBe(true);
  });

  test("a deadlock is retried and committed", async () => {
    let attempts = 0;
    let arrived = 0;
    let meet!: () => void;
    const both = new Promise<void>((resolve) => (meet = resolve));
    const add = (first: number, second: number) =>
      hf.transaction(async ({ client, attempt }) => {
        attempts++;
        await client.increment(Account, { id: first }, "balance", 1);
        if (++arrived === 2) meet();
        if (attempt === 1) await both;
        await client.increment(Account, { id: second }, "balance", 1);
      });
    await Promise.all([add(1, 2), add(2, 1)]);
    expect(attempts).toBeGreaterThan(2);
    expect(await balances()).toEqual([102, 102, 100, 100]);
  });

  test("a lost connection is retried, whatever TypeORM calls it", async () => {
    let attempts = 0;
    const kill = async (client: EntityManager) => {
      const [row] = await client.query<{ pid: number }[]>("SELECT pg_backend_pid() AS pid");
      await psql.query("SELECT pg_terminate_backend($1)", [row?.pid]);
    };
    await hf.transaction(async ({ client, attempt, signal }) => {
      attempts = attempt;
      await client.increment(Account, { id: 1 }, "balance", 1);
      if (attempt > 1) return;
      await kill(client);
      // From then on TypeORM refuses: the runner has been released.
      await new Promise<void>((resolve) => {
        if (signal.aborted) resolve();
        else signal.addEventListener("abort", () => resolve());
      });
      await client.increment(Account, { id: 1 }, "balance", 1);
    });
    expect([attempts, (await balances())[0]]).toEqual([2, 101]);
    const never = hf.transaction({ retry: false }, async ({ client }) => {
      await kill(client);
      await client.query("SELECT 1");
    });
    await expect(never).rejects.toThrow(ConnectionLostError);
  });

  test("a server that is not there is a lost connection", async () => {
    const gone = source();
    await gone.initialize();
    // The one connection that it has made.
    const runner = gone.createQueryRunner();
    await runner.connect();
    const { options } = (gone.driver as unknown as { master: { options: Record<string, unknown> } }).master;
    delete options["connectionString"];
    options["port"] = 1;
    const never = holdfast(fromTypeorm(gone)).transaction({ retry: false }, async () => 1);
    await expect(never).rejects.toThrow(ConnectionLostError);
    await runner.release();
    await gone.destroy();
  });

  test.each([
    ["drop-answer", 1, 101],
    ["cut-before", 2, 101],
  ] as const)("of a connection that is lost during COMMIT are resolved: %s", async (fate, runs, balance) => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const own = source({ url: proxy.url(database.url) });
    await own.initialize();
    let [ran, armed] = [0, false];
    proxy.cutWhen((direction, chunk) => {
      if (!armed || direction !== "to-server" || !chunk.toString("latin1").includes("COMMIT")) return "pass";
      armed = false;
      return fate;
    });
    await holdfast(fromTypeorm(own)).transaction(async ({ client }) => {
      armed = ++ran === 1;
      await client.increment(Account, { id: 1 }, "balance", 1);
    });
    expect([ran, (await balances())[0]]).toEqual([runs, balance]);
    await own.destroy();
    await proxy.close();
  });

  test("a swallowed error is not committed", async () => {
    const swallowing = hf.transaction(async ({ client }) => {
      await client.update(Account, 1, { balance: 0 });
      await client.insert(Account, { id: 1, ownerName: "twice" }).catch(() => {});
    });
    await expect(swallowing).rejects.toThrow(TransactionAbortedError);
    expect(await balances()).toEqual([100, 100, 100, 100]);
  });

  test("a subscriber that fails after COMMIT does not run the body again", async () => {
    const own = source();
    await own.initialize();
    let ran = 0;
    own.subscribers.push({
      afterTransactionCommit: () => {
        throw Object.assign(new Error("a deadlock, somewhere else"), { code: "40P01" });
      },
    });
    const error = await caught(
      holdfast(fromTypeorm(own)).transaction(async ({ client }) => {
        ran++;
        await client.increment(Account, { id: 1 }, "balance", 1);
      }),
    );
    expect(error).toBeInstanceOf(UsageError);
    expect([ran, (await balances())[0]]).toEqual([1, 101]);
    await own.destroy();
  });
});

describe("join", () => {
  test("takes the manager of a transaction, or its QueryRunner", async () => {
    await dataSource.transaction(async (manager) => {
      await hf.join(manager).lock(key("joined"));
      expect(await hf.tryLock(key("joined"), async () => 1)).toEqual({ acquired: false });
    });
    const runner = dataSource.createQueryRunner();
    await runner.startTransaction();
    await hf.join(runner.manager).lock(key("joined"));
    await hf.join(runner as never).lock(key("joined"));
    await runner.rollbackTransaction();
    await runner.release();
    expect(() => hf.join(runner.manager)).toThrow(/released/);
  });

  test("refuses what is no transaction, and says what to pass", async () => {
    expect(() => hf.join(dataSource.manager)).toThrow(/dataSource\.transaction/);
    expect(() => hf.join(dataSource as never)).toThrow(/dataSource\.transaction/);
    expect(() => hf.join(dataSource.createEntityManager())).toThrow(/another connection/);
    expect(() => hf.join(dataSource.createQueryRunner().manager)).toThrow(/not connected/);
    const other = source();
    await other.initialize();
    await other.transaction(async (manager) => {
      expect(() => hf.join(manager)).toThrow(NotInTransactionError);
    });
    await other.destroy();
  });
});

describe("the outer DataSource inside of a transaction", () => {
  test.each<[string, (outer: DataSource) => Promise<unknown>]>([
    ["query", (outer) => outer.query("SELECT 1")],
    ["a repository", (outer) => outer.getRepository(Account).find()],
    ["a builder", (outer) => outer.createQueryBuilder(Account, "a").getMany()],
    ["save", (outer) => outer.manager.save(Account, { id: 1, ownerName: "o1", balance: 5 })],
    ["a transaction", (outer) => outer.transaction(async (manager) => manager.find(Account))],
  ])("is refused with both places: %s", async (_, use) => {
    const strict = holdfast(fromTypeorm(dataSource), { wrongConnection: "throw" });
    const error = await caught(
      strict.transaction(async () => {
        await use(dataSource);
      }),
    );
    expect(error).toBeInstanceOf(WrongConnectionError);
    expect((error as Error).message.match(/typeorm\.test\.ts:\d+/g)).toHaveLength(2);
    await strict.transaction(async (tx) => {
      await tx.client.find(Account);
      await tx.client.transaction((inner) => inner.find(Account));
      await strict.outside(() => use(dataSource));
    });
    await use(dataSource);
    await strict.close();
  });

  test("fails at once if there is no second connection to wait for", async () => {
    const one = source({ poolSize: 1 });
    await one.initialize();
    const off = holdfast(fromTypeorm(one), { wrongConnection: "off" });
    await expect(off.transaction(async () => one.getRepository(Account).find())).rejects.toThrow(
      PoolExhaustedError,
    );
    expect(await off.transaction(({ client }) => client.count(Account))).toBe(4);
    await one.destroy();
  });
});

describe("rows of a query", () => {
  const last = () => statements.findLast((text) => text.startsWith('SELECT "a"')) ?? "";
  const busy = (id: number, clause = "UPDATE") =>
    caught(psql.query(`SELECT FROM account WHERE id = ${id} FOR ${clause} NOWAIT`)).then(
      (error) => (error as { code?: string } | undefined)?.code,
    );

  test("are locked as was asked for, until the end, and are entities", async () => {
    for (const [strength, clause] of [
      ["update", "FOR UPDATE"],
      ["no key update", "FOR NO KEY UPDATE"],
      ["share", "FOR SHARE"],
      ["key share", "FOR KEY SHARE"],
    ] as const) {
      await hf.transaction(async (tx) => {
        const query = tx.client.createQueryBuilder(Account, "a").where("a.id = :id", { id: 2 });
        const found: Account[] = await tx.rows(query, { for: strength });
        expect(found).toEqual([{ id: 2, ownerName: "o2", balance: 100 }]);
        expect(last()).toMatch(new RegExp(`${clause}$`));
        expect([await busy(1), await busy(2)]).toEqual([undefined, "55P03"]);
        await tx.rows(query, { for: strength, wait: "skip" });
        expect(last()).toMatch(new RegExp(`${clause} SKIP LOCKED$`));
        await tx.rows(query, { for: strength, wait: "nowait" });
        expect(last()).toMatch(new RegExp(`${clause} NOWAIT$`));
        // The caller's own query is left as it was.
        expect(query.getQuery()).not.toMatch(/FOR/);
      });
      expect(await busy(2)).toBeUndefined();
    }
  });

  test("of a query that was made outside are locked by the transaction", async () => {
    const query = dataSource.getRepository(Account).createQueryBuilder("a").where({ id: 3 }).cache(60_000);
    await hf.transaction(async (tx) => {
      await tx.client.update(Account, 3, { balance: 1 });
      expect(await tx.rows(query)).toMatchObject([{ balance: 1 }]);
      expect(await busy(3)).toBe("55P03");
    });
    expect(await query.getMany()).toHaveLength(1);
  });

  test("somebody else has locked are skipped or refused", async () => {
    await psql.query("BEGIN; SELECT FROM account WHERE id = 1 FOR UPDATE");
    try {
      await hf.transaction(async (tx) => {
        const query = tx.client.createQueryBuilder(Account, "a").orderBy("a.id").limit(2);
        expect((await tx.rows(query, { wait: "skip" })).map(({ id }) => id)).toEqual([2, 3]);
        const refused = tx.transaction((inner) => inner.rows(query, { wait: "nowait" }));
        await expect(refused).rejects.toThrow(LockNotAvailableError);
      });
    } finally {
      await psql.query("ROLLBACK");
    }
  });

  test("with relations, or of no entity", async () => {
    await psql.query(`INSERT INTO "entry" ("id", "accountId") VALUES (7, 1)`);
    await hf.transaction(async (tx) => {
      const joined = tx.client
        .createQueryBuilder(Account, "a")
        .leftJoinAndSelect("a.entries", "e")
        .where("a.id = 1")
        // An outer join's other side cannot be locked.
        .setLock("pessimistic_write", undefined, ["a"]);
      expect(await tx.rows(joined)).toMatchObject([{ id: 1, entries: [{ id: 7 }] }]);
      expect(last()).toMatch(/FOR UPDATE OF a$/);
      const apart = tx.client
        .createQueryBuilder(Account, "a")
        .setFindOptions({ relationLoadStrategy: "query", relations: { entries: true }, where: { id: 1 } });
      expect(await tx.rows(apart)).toMatchObject([{ id: 1, entries: [{ id: 7 }] }]);
      const raw = tx.client.createQueryBuilder().select("n").from("(SELECT 1 AS n)", "t");
      expect(await tx.rows(raw, { for: "share" })).toEqual([{ n: 1 }]);
    });
  });

  test("are those of a SELECT", async () => {
    const { locking } = fromTypeorm(dataSource);
    const lock = { strength: "update", wait: "bounded" } as const;
    await dataSource.transaction(async (manager) => {
      expect(() => locking?.(manager, manager.createQueryBuilder().update(Account), lock)).toThrow(
        UsageError,
      );
      expect(() => locking?.(manager, manager.createQueryBuilder().delete().from(Account), lock)).toThrow(
        UsageError,
      );
      for (const nothing of [undefined, null, 1, {}, dataSource, manager, Account])
        expect(locking?.(manager, nothing, lock)).toBeUndefined();
    });
  });
});

test("what is not reached is refused, with a word about what to do", async () => {
  expect(() => fromTypeorm(new DataSource({ type: "cockroachdb", timeTravelQueries: false }))).toThrow(
    UnsupportedError,
  );
  expect(() => fromTypeorm({} as never)).toThrow(UsageError);
  const late = source();
  const before = holdfast(fromTypeorm(late));
  await expect(before.transaction(async () => 1)).rejects.toThrow(/dataSource\.initialize/);
  await late.initialize();
  expect(await before.transaction(async () => 1)).toBe(1);
  await late.destroy();
});
