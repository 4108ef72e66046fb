/** What is special about Kysely; what every client must do is in the conformance suite. */
import {
  type Holdfast,
  LockNotAvailableError,
  LockTimeoutError,
  NotInTransactionError,
  TransactionAbortedError,
  UsageError,
  WrongConnectionError,
  failureOf,
  holdfast,
  isLockTimeout,
  isUniqueViolation,
  key,
} from "holdfast";
import { fromKysely } from "holdfast/kysely";
import { CamelCasePlugin, Kysely, PostgresDialect, type Transaction, sql } from "kysely";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, expectTypeOf, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";

interface Tables {
  account: { id: number; ownerName: string; balance: number };
}

let database: TestDatabase;
let second: Client;
let db: Kysely<Tables>;
let hf: Holdfast<Transaction<Tables>>;

function open(max = 5): Kysely<Tables> {
  const pool = new Pool({ connectionString: database.url, max });
  // A plugin that renames columns must not reach our own statements.
  return new Kysely<Tables>({ dialect: new PostgresDialect({ pool }), plugins: [new CamelCasePlugin()] });
}

beforeAll(async () => {
  database = await createDatabase("postgres");
  second = new Client({ connectionString: database.url });
  await second.connect();
  await second.query(
    "CREATE TABLE account (id int PRIMARY KEY, owner_name text UNIQUE NOT NULL, balance int NOT NULL)",
  );
  db = open();
  hf = holdfast(fromKysely(db));
});

beforeEach(async () => {
  await second.query("TRUNCATE account");
  await second.query("INSERT INTO account VALUES (1, 'ada', 10), (2, 'bob', 20), (3, 'cy', 30)");
});

afterAll(async () => {
  await hf?.close();
  await db?.destroy();
  await second?.end();
  await database?.drop();
});

const lockedBy = async (where: string): Promise<number> => {
  const { rows } = await second.query(`SELECT id FROM account WHERE ${where} FOR UPDATE SKIP LOCKED`);
  return 3 - rows.length;
};

describe("tx.rows(query)", () => {
  test("locks what the query finds, and brings what it would bring", async () => {
    await hf.transaction(async (tx) => {
      const query = tx.client
        .selectFrom("account")
        .select(["id", "ownerName"])
        .where("balance", ">", 15)
        .orderBy("id");
      const rows = await tx.rows(query);
      expectTypeOf(rows).toEqualTypeOf<{ id: number; ownerName: string }[]>();
      expect(rows).toEqual([
        { id: 2, ownerName: "bob" },
        { id: 3, ownerName: "cy" },
      ]);
      expect(await lockedBy("true")).toBe(2);
    });
  });

  test("waits as told: not at all, around what is locked, or for so long", async () => {
    await second.query("BEGIN");
    await second.query("SELECT 1 FROM account WHERE id = 2 FOR UPDATE");
    try {
      const all = (trx: Kysely<Tables>) => trx.selectFrom("account").select("id").orderBy("id");
      const skipped = await hf.transaction((tx) => tx.rows(all(tx.client), { wait: "skip" }));
      expect(skipped.map(({ id }) => id)).toEqual([1, 3]);
      await expect(hf.transaction((tx) => tx.rows(all(tx.client), { wait: "nowait" }))).rejects.toThrow(
        LockNotAvailableError,
      );
      const timeout = await hf
        .transaction((tx) => tx.rows(all(tx.client), { wait: 50 }))
        .catch((error: unknown) => error);
      expect(timeout).toBeInstanceOf(LockTimeoutError);
      expect(isLockTimeout(timeout)).toBe(true);
      // The session's own timeout is as it was before.
      const setting = await hf.transaction(async (tx) => {
        await tx.rows(all(tx.client).where("id", "=", 1), { wait: 70 });
        return sql<{ lock_timeout: string }>`SHOW lock_timeout`.execute(tx.client);
      });
      expect(setting.rows).toEqual([{ lockTimeout: "0" }]);
    } finally {
      await second.query("ROLLBACK");
    }
  });

  test("a shared lock lets others share", async () => {
    await hf.transaction(async (tx) => {
      await tx.rows(tx.client.selectFrom("account").selectAll(), { for: "share" });
      const { rowCount } = await second.query("SELECT 1 FROM account FOR SHARE NOWAIT");
      expect(rowCount).toBe(3);
      await expect(second.query("SELECT 1 FROM account FOR UPDATE NOWAIT")).rejects.toMatchObject({
        code: "55P03",
      });
    });
  });

  test("refuses what is no SELECT, or no query", async () => {
    await hf.transaction(async (tx) => {
      const update = tx.client.updateTable("account").set({ balance: 0 });
      await expect(tx.rows(update)).rejects.toThrow(UsageError);
      await expect(tx.rows({} as never)).rejects.toThrow(/builder of kysely/);
      // One made with the outer instance runs in the transaction all the same.
      expect(await tx.rows(db.selectFrom("account").selectAll().where("id", "=", 1))).toHaveLength(1);
      expect(await lockedBy("true")).toBe(1);
    });
    expect(
      (await db.selectFrom("account").select("balance").execute()).map(({ balance }) => balance),
    ).toEqual([10, 20, 30]);
  });

  test("in a transaction of the caller's own", async () => {
    await db.transaction().execute(async (trx) => {
      const rows = await hf.join(trx).rows(trx.selectFrom("account").select("id").where("id", "=", 1));
      expect(rows).toEqual([{ id: 1 }]);
      expect(await lockedBy("true")).toBe(1);
    });
    await expect(async () => hf.join(db as never)).rejects.toThrow(NotInTransactionError);
  });
});

describe("errors", () => {
  test("of the driver pass through, and are known with constraint and table", async () => {
    const doubled = hf.transaction((tx) =>
      tx.client.insertInto("account").values({ id: 4, ownerName: "ada", balance: 0 }).execute(),
    );
    const error = await doubled.catch((e: unknown) => e);
    expect(isUniqueViolation(error)).toBe(true);
    expect(failureOf(new Error("mine", { cause: error }))).toEqual({
      kind: "unique",
      constraint: "account_owner_name_key",
      table: "account",
      columns: ["owner_name"],
    });
  });

  test("one that is swallowed does not commit", async () => {
    const swallowed = hf.transaction(async (tx) => {
      await tx.client.updateTable("account").set({ balance: 0 }).execute();
      await tx.client
        .insertInto("account")
        .values({ id: 1, ownerName: "x", balance: 0 })
        .execute()
        .catch(() => {});
    });
    await expect(swallowed).rejects.toThrow(TransactionAbortedError);
    expect((await second.query("SELECT sum(balance)::int AS n FROM account")).rows).toEqual([{ n: 60 }]);
  });
});

describe("a statement through the outer client", () => {
  test("is reported with both places", async () => {
    const strict = holdfast(fromKysely(db), { wrongConnection: "throw" });
    const wrong = strict.transaction(async () => {
      await db.selectFrom("account").selectAll().execute();
    });
    await expect(wrong).rejects.toThrow(WrongConnectionError);
    const { message } = (await wrong.catch((error: unknown) => error)) as Error;
    expect(message.match(/kysely\.test\.ts:\d+:\d+/g)).toHaveLength(2);
    const fine = await strict.transaction({ lock: key("a") }, async (tx) => {
      await strict.outside(() => db.selectFrom("account").selectAll().execute());
      await strict.transaction({ separate: true }, async (other) =>
        other.client.selectFrom("account").selectAll().execute(),
      );
      return tx.client.selectFrom("account").selectAll().execute();
    });
    expect(fine).toHaveLength(3);
    await strict.close();
  });

  test("is warned about once per place, by default", async () => {
    const warnings: Error[] = [];
    const listener = (warning: Error) => warnings.push(warning);
    process.on("warning", listener);
    try {
      for (let i = 0; i < 3; i++)
        await hf.transaction(async () => {
          await db.selectFrom("account").selectAll().execute();
        });
      await expect
        .poll(() => warnings.map(({ name }) => name), { timeout: 20_000 })
        .toEqual(["WrongConnectionError"]);
    } finally {
      process.off("warning", listener);
    }
  });
});
