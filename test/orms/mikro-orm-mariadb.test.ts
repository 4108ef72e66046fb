/** MikroORM on MariaDB: what differs there from PostgreSQL. */
import { MikroORM, type Options, UniqueConstraintViolationException, defineEntity } from "@mikro-orm/mysql";
import {
  ConnectionLostError,
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
import { fromMikroOrm } from "holdfast/mikro-orm";
import mysql, { type Connection } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "../harness/databases.ts";

const Account = defineEntity({
  name: "Account",
  tableName: "account",
  properties: (p) => ({
    id: p.integer().primary(),
    ownerName: p.string().length(20).unique(),
    balance: p.integer(),
  }),
});

type Manager = MikroORM["em"];

const caught = (failing: Promise<unknown>) =>
  failing.then(
    () => undefined,
    (error: unknown) => error,
  );

describe("on MariaDB", () => {
  let database: TestDatabase;
  let orm: MikroORM;
  let hf: Holdfast<Manager>;
  /** Somebody else, who writes SQL by hand. */
  let other: Connection;
  const statements: string[] = [];

  const open = (options: Partial<Options> = {}) =>
    MikroORM.init({
      clientUrl: database.url,
      entities: [Account],
      logger: () => {},
      ...options,
    } as Options) as Promise<MikroORM>;

  const why = unavailable("mariadb");

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase("mariadb");
    orm = await open({
      debug: ["query"],
      logger: (text: string) => void statements.push(text),
      colors: false,
    });
    await orm.schema.create();
    hf = holdfast(fromMikroOrm(orm));
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
    await orm.close();
    await database.drop();
  });

  const balances = async () => {
    const [rows] = await other.query("SELECT balance FROM account ORDER BY id");
    return (rows as { balance: number }[]).map(({ balance }) => balance);
  };

  const kill = async (em: Manager) => {
    const [row] = await em.execute<{ id: number }[]>("SELECT CONNECTION_ID() AS id");
    await other.query(`KILL ${row?.id}`);
  };

  test("tx.client works with entities, all of it or nothing", async () => {
    const body = async ({ client: em }: { client: Manager }) => {
      (await em.findOneOrFail(Account, 1)).balance += 11;
      em.create(Account, { id: 4, ownerName: "o4", balance: 0 });
    };
    const undone = hf.transaction(async (tx) => {
      await body(tx);
      await tx.client.flush();
      throw new Error("undo");
    });
    await expect(undone).rejects.toThrow("undo");
    expect(await balances()).toEqual([100, 100, 100]);
    await hf.transaction({ lock: key("accounts") }, body);
    expect(await balances()).toEqual([111, 100, 100, 0]);
  });

  test("isolation and read only are those that were asked for", async () => {
    for (const isolation of ["read committed", "repeatable read", "serializable"] as const) {
      statements.length = 0;
      await hf.transaction({ isolation }, (tx) => tx.client.execute("SELECT 1"));
      expect(statements.join()).toContain(`isolation level ${isolation}`);
    }
    const writing = hf.transaction({ readOnly: true }, async ({ client: em }) => {
      (await em.findOneOrFail(Account, 1)).balance = 1;
    });
    await expect(writing).rejects.toMatchObject({ errno: 1792 });
  });

  test("a unique violation passes through as MikroORM's own", async () => {
    const error = await caught(
      hf.transaction(async ({ client: em }) => {
        em.create(Account, { id: 9, ownerName: "o1", balance: 0 });
      }),
    );
    expect(error).toBeInstanceOf(UniqueConstraintViolationException);
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
  });

  const deadlock = (swallow: boolean) => {
    let [attempts, arrived] = [0, 0];
    let meet!: () => void;
    const both = new Promise<void>((resolve) => (meet = resolve));
    const add = (first: number, second: number) =>
      hf.transaction({ retry: swallow ? false : {} }, async ({ client: em, attempt }) => {
        attempts++;
        const plus = (id: number) =>
          em.execute("UPDATE account SET balance = balance + 1 WHERE id = ?", [id]);
        await plus(first);
        if (++arrived === 2) meet();
        if (attempt === 1) await both;
        await (swallow ? plus(second).catch(() => {}) : plus(second));
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

  test("a lost connection is retried, and its place in the pool is free again", async () => {
    const small = await open({ pool: { min: 0, max: 1 } });
    const one = holdfast(fromMikroOrm(small));
    try {
      for (let i = 0; i < 3; i++) {
        const never = one.transaction({ retry: false }, async ({ client: em }) => {
          await kill(em);
          await em.execute("SELECT 1");
        });
        await expect(never).rejects.toThrow(ConnectionLostError);
      }
      let attempts = 0;
      await one.transaction(async ({ client: em, attempt }) => {
        attempts = attempt;
        (await em.findOneOrFail(Account, 1)).balance++;
        if (attempt === 1) await kill(em);
      });
      expect([attempts, (await balances())[0]]).toEqual([2, 101]);
    } finally {
      await small.close();
    }
  });

  test("an EntityManager from outside is refused with both places, and does not hang", async () => {
    const strict = holdfast(fromMikroOrm(orm), { wrongConnection: "throw" });
    const outer = orm.em.fork();
    for (const use of [
      () => outer.find(Account, {}),
      () => outer.getKysely<{ account: { id: number } }>().selectFrom("account").selectAll().execute(),
    ]) {
      const error = await caught(
        strict.transaction(async () => {
          await use();
        }),
      );
      expect(error).toBeInstanceOf(WrongConnectionError);
      expect((error as Error).message.match(/mikro-orm-mariadb\.test\.ts:\d+/g)).toHaveLength(2);
    }
    await strict.close();
    const small = await open({ pool: { min: 0, max: 1 } });
    const off = holdfast(fromMikroOrm(small), { wrongConnection: "off" });
    const beside = small.em.fork();
    await expect(off.transaction(() => beside.find(Account, {}))).rejects.toThrow(PoolExhaustedError);
    await small.close();
  });

  test("rows of a query are locked", async () => {
    await hf.transaction(async (tx) => {
      const query = tx.client.qb(Account).where({ id: 2 });
      expect(await tx.rows(query)).toMatchObject([{ id: 2, ownerName: "o2", balance: 100 }]);
      expect(statements.some((text) => text.includes("for update"))).toBe(true);
      const busy = other.query("SELECT * FROM account WHERE id = 2 FOR UPDATE NOWAIT");
      await expect(busy).rejects.toMatchObject({ errno: 1205 });
      await tx.rows(query, { for: "share" });
      await expect(tx.rows(query, { for: "key share" })).rejects.toThrow(UnsupportedError);
    });
    await other.query("BEGIN");
    await other.query("SELECT * FROM account WHERE id = 1 FOR UPDATE");
    try {
      const query = orm.em.fork().qb(Account).orderBy({ id: "asc" });
      for (const strength of ["update", "share"] as const) {
        const found = await hf.transaction((tx) => tx.rows(query, { for: strength, wait: "skip" }));
        expect(found.map(({ id }) => id)).toEqual([2, 3]);
        await expect(
          hf.transaction((tx) => tx.rows(query, { for: strength, wait: "nowait" })),
        ).rejects.toThrow(LockNotAvailableError);
      }
    } finally {
      await other.query("ROLLBACK");
    }
  });
});
