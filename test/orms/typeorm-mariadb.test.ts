/** TypeORM on MariaDB: what differs there from PostgreSQL. */
import {
  type Holdfast,
  LockNotAvailableError,
  PoolExhaustedError,
  TransactionAbortedError,
  UnsupportedError,
  WrongConnectionError,
  holdfast,
  isRetryable,
  isUniqueViolation,
  key,
} from "holdfast";
import { fromTypeorm } from "holdfast/typeorm";
import mysql, { type Connection } from "mysql2/promise";
import {
  DataSource,
  type DataSourceOptions,
  type EntityManager,
  EntitySchema,
  QueryFailedError,
} from "typeorm";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "../harness/databases.ts";

interface Account {
  id: number;
  ownerName: string;
  balance: number;
}

const Account = new EntitySchema<Account>({
  name: "Account",
  tableName: "account",
  columns: {
    id: { type: "int", primary: true },
    ownerName: { name: "owner_name", type: "varchar", length: 20, unique: true },
    balance: { type: "int", default: 0 },
  },
});

const caught = (failing: Promise<unknown>) =>
  failing.then(
    () => undefined,
    (error: unknown) => error,
  );

describe("on MariaDB", () => {
  let database: TestDatabase;
  let dataSource: DataSource;
  let hf: Holdfast<EntityManager>;
  /** Somebody else, who writes SQL by hand. */
  let other: Connection;
  const statements: string[] = [];

  const source = (options: Partial<DataSourceOptions> = {}) =>
    new DataSource({
      type: "mariadb",
      url: database.url,
      entities: [Account],
      ...options,
    } as DataSourceOptions);

  const why = unavailable("mariadb");

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase("mariadb");
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
    await hf.migrate();
    other = await mysql.createConnection(database.url);
  });

  beforeEach(async ({ skip }) => {
    skip(why !== undefined, why);
    await other.query("DELETE FROM account");
    await other.query("INSERT INTO account VALUES (1, 'o1', 100), (2, 'o2', 100), (3, 'o3', 100)");
    statements.length = 0;
  });

  afterAll(async () => {
    if (why !== undefined) return;
    await other.end();
    await dataSource.destroy();
    await database.drop();
  });

  const balances = async () => {
    const [rows] = await other.query("SELECT balance FROM account ORDER BY id");
    return (rows as { balance: number }[]).map(({ balance }) => balance);
  };

  test("tx.client works with entities, all of it or nothing", async () => {
    const body = async ({ client }: { client: EntityManager }) => {
      await client.increment(Account, { id: 1 }, "balance", 11);
      await client.insert(Account, { id: 4, ownerName: "o4" });
    };
    const undone = hf.transaction(async (tx) => {
      await body(tx);
      throw new Error("undo");
    });
    await expect(undone).rejects.toThrow("undo");
    expect(await balances()).toEqual([100, 100, 100]);
    await hf.transaction({ lock: key("accounts") }, body);
    expect(await balances()).toEqual([111, 100, 100, 0]);
  });

  test("isolation and read only are those that were asked for", async () => {
    for (const isolation of ["read committed", "repeatable read", "serializable"] as const) {
      await hf.transaction({ isolation }, (tx) => tx.client.query("SELECT 1"));
      expect(statements).toContain(`SET TRANSACTION ISOLATION LEVEL ${isolation.toUpperCase()}`);
    }
    const writing = hf.transaction({ readOnly: true }, ({ client }) =>
      client.update(Account, 1, { balance: 1 }),
    );
    await expect(writing).rejects.toMatchObject({ errno: 1792 });
    await hf.transaction(({ client }) => client.update(Account, 1, { balance: 1 }));
  });

  test("a unique violation passes through as TypeORM's own", async () => {
    const error = await caught(
      hf.transaction(({ client }) => client.insert(Account, { id: 9, ownerName: "o1" })),
    );
    expect(error).toBeInstanceOf(QueryFailedError);
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
  });

  const deadlock = (swallow: boolean) => {
    let [attempts, arrived] = [0, 0];
    let meet!: () => void;
    const both = new Promise<void>((resolve) => (meet = resolve));
    const add = (first: number, second: number) =>
      hf.transaction({ retry: swallow ? false : {} }, async ({ client, attempt }) => {
        attempts++;
        await client.increment(Account, { id: first }, "balance", 1);
        if (++arrived === 2) meet();
        if (attempt === 1) await both;
        const step = client.increment(Account, { id: second }, "balance", 1);
        await (swallow ? step.catch(() => {}) : step);
      });
    return { done: Promise.allSettled([add(1, 2), add(2, 1)]), attempts: () => attempts };
  };

  test("a deadlock is retried and committed", async () => {
    const { done, attempts } = deadlock(false);
    expect((await done).map(({ status }) => status)).toEqual(["fulfilled", "fulfilled"]);
    expect(attempts()).toBe(3);
    expect(await balances()).toEqual([102, 102, 100]);
  });

  test("a deadlock whose error was swallowed is not taken for a commit", async () => {
    const results = await deadlock(true).done;
    const failed = results.filter((result) => result.status === "rejected");
    expect(failed.map(({ reason }) => reason)).toEqual([expect.any(TransactionAbortedError)]);
    expect(await balances()).toEqual([101, 101, 100]);
  });

  test("a lost connection is retried", async () => {
    let attempts = 0;
    await hf.transaction(async ({ client, attempt }) => {
      attempts = attempt;
      await client.increment(Account, { id: 1 }, "balance", 1);
      if (attempt > 1) return;
      const [row] = await client.query<{ id: number }[]>("SELECT CONNECTION_ID() AS id");
      await other.query(`KILL ${row?.id}`);
      await client.increment(Account, { id: 1 }, "balance", 1);
    });
    expect([attempts, (await balances())[0]]).toEqual([2, 101]);
  });

  test("the outer DataSource is refused with both places, and does not hang", async () => {
    const strict = holdfast(fromTypeorm(dataSource), { wrongConnection: "throw" });
    const error = await caught(strict.transaction(async () => dataSource.getRepository(Account).find()));
    expect(error).toBeInstanceOf(WrongConnectionError);
    expect((error as Error).message.match(/typeorm-mariadb\.test\.ts:\d+/g)).toHaveLength(2);
    await strict.close();
    const one = source({ poolSize: 1 });
    await one.initialize();
    const off = holdfast(fromTypeorm(one), { wrongConnection: "off" });
    await expect(off.transaction(async () => one.getRepository(Account).find())).rejects.toThrow(
      PoolExhaustedError,
    );
    await one.destroy();
  });

  test("rows of a query are locked", async () => {
    await hf.transaction(async (tx) => {
      const query = tx.client.createQueryBuilder(Account, "a").where("a.id = 2");
      expect(await tx.rows(query)).toEqual([{ id: 2, ownerName: "o2", balance: 100 }]);
      expect(statements.some((text) => text.endsWith("FOR UPDATE"))).toBe(true);
      const busy = other.query("SELECT * FROM account WHERE id = 2 FOR UPDATE NOWAIT");
      await expect(busy).rejects.toMatchObject({ errno: 1205 });
      await tx.rows(query, { for: "share" });
      await expect(tx.rows(query, { for: "share", wait: "skip" })).rejects.toThrow(UnsupportedError);
      await expect(tx.rows(query, { for: "key share" })).rejects.toThrow(UnsupportedError);
    });
    await other.query("BEGIN");
    await other.query("SELECT * FROM account WHERE id = 1 FOR UPDATE");
    try {
      const query = dataSource.createQueryBuilder(Account, "a").orderBy("a.id");
      const found = await hf.transaction((tx) => tx.rows(query, { wait: "skip" }));
      expect(found.map(({ id }) => id)).toEqual([2, 3]);
      await expect(hf.transaction((tx) => tx.rows(query, { wait: "nowait" }))).rejects.toThrow(
        LockNotAvailableError,
      );
    } finally {
      await other.query("ROLLBACK");
    }
  });
});
