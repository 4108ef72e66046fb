/** What is special about Drizzle; what every client must do is in the conformance suite. */
import { PGlite } from "@electric-sql/pglite";
import { DrizzleQueryError, asc, eq, gt } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import { integer, pgTable, text } from "drizzle-orm/pg-core";
import { drizzle as drizzlePglite } from "drizzle-orm/pglite";
import { drizzle as drizzlePostgres } from "drizzle-orm/postgres-js";
import {
  LockNotAvailableError,
  LockTimeoutError,
  NotInTransactionError,
  PoolExhaustedError,
  TransactionAbortedError,
  UsageError,
  WrongConnectionError,
  failureOf,
  holdfast,
  key,
} from "holdfast";
import { fromDrizzle } from "holdfast/drizzle";
import { Client, Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, beforeEach, describe, expect, expectTypeOf, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";

const account = pgTable("account", {
  id: integer().primaryKey(),
  ownerName: text("owner_name").notNull().unique(),
  balance: integer().notNull(),
});

let database: TestDatabase;
let second: Client;
let pool: Pool;

function open(from = pool) {
  return drizzle(from, { schema: { account } });
}
let db: ReturnType<typeof open>;

beforeAll(async () => {
  database = await createDatabase("postgres");
  second = new Client({ connectionString: database.url });
  await second.connect();
  await second.query(
    "CREATE TABLE account (id int PRIMARY KEY, owner_name text UNIQUE NOT NULL, balance int NOT NULL)",
  );
  pool = new Pool({ connectionString: database.url, max: 5 });
  db = open();
});

beforeEach(async () => {
  await second.query("TRUNCATE account");
  await second.query("INSERT INTO account VALUES (1, 'ada', 10), (2, 'bob', 20), (3, 'cy', 30)");
});

afterAll(async () => {
  await pool?.end();
  await second?.end();
  await database?.drop();
});

async function free(): Promise<number[]> {
  const { rows } = await second.query<{ id: number }>(
    "SELECT id FROM account ORDER BY id FOR UPDATE SKIP LOCKED",
  );
  return rows.map(({ id }) => id);
}

describe("tx.rows(query)", () => {
  test("locks what the query finds, and brings what it would bring", async () => {
    await holdfast(fromDrizzle(db)).transaction(async (tx) => {
      const query = tx.client
        .select({ id: account.id, owner: account.ownerName })
        .from(account)
        .where(gt(account.balance, 15))
        .orderBy(asc(account.id));
      const rows = await tx.rows(query);
      expectTypeOf(rows).toEqualTypeOf<{ id: number; owner: string }[]>();
      expect(rows).toEqual([
        { id: 2, owner: "bob" },
        { id: 3, owner: "cy" },
      ]);
      expect(await free()).toEqual([1]);
      // Relational queries work in it too.
      expect(await tx.client.query.account.findFirst({ where: eq(account.id, 1) })).toMatchObject({
        ownerName: "ada",
      });
    });
  });

  test("waits as told: not at all, around what is locked, or for so long", async () => {
    const hf = holdfast(fromDrizzle(db));
    await second.query("BEGIN");
    await second.query("SELECT 1 FROM account WHERE id = 2 FOR UPDATE");
    try {
      const skipped = await hf.transaction((tx) =>
        tx.rows(tx.client.select().from(account).orderBy(asc(account.id)), { wait: "skip" }),
      );
      expect(skipped.map(({ id }) => id)).toEqual([1, 3]);
      const nowait = hf.transaction((tx) => tx.rows(tx.client.select().from(account), { wait: "nowait" }));
      await expect(nowait).rejects.toThrow(LockNotAvailableError);
      const timeout = hf.transaction((tx) => tx.rows(tx.client.select().from(account), { wait: 50 }));
      await expect(timeout).rejects.toThrow(LockTimeoutError);
    } finally {
      await second.query("ROLLBACK");
    }
  });

  test("refuses what is no SELECT, or is of the outer db", async () => {
    await holdfast(fromDrizzle(db)).transaction(async (tx) => {
      await expect(tx.rows(tx.client.update(account).set({ balance: 0 }))).rejects.toThrow(UsageError);
      await expect(tx.rows(db.select().from(account))).rejects.toThrow(/outer/);
    });
    expect(await free()).toEqual([1, 2, 3]);
  });
});

test("a transaction of the caller's own is joined; the db itself is none", async () => {
  const hf = holdfast(fromDrizzle(db));
  await db.transaction(async (tx) => {
    await hf.join(tx).lock(key("a"));
    await expect(hf.transaction({ lock: key("a"), wait: "nowait" }, async () => {})).rejects.toThrow(
      LockNotAvailableError,
    );
  });
  expect(() => hf.join(db as never)).toThrow(NotInTransactionError);
});

test("errors come as Drizzle's own, and are known with constraint and table", async () => {
  const hf = holdfast(fromDrizzle(db));
  const doubled = hf.transaction((tx) =>
    tx.client.insert(account).values({ id: 4, ownerName: "ada", balance: 0 }),
  );
  const error = await doubled.catch((e: unknown) => e);
  expect(error).toBeInstanceOf(DrizzleQueryError);
  expect(failureOf(error)).toEqual({
    kind: "unique",
    constraint: "account_owner_name_key",
    table: "account",
    columns: ["owner_name"],
  });
});

test.for(["node-postgres", "postgres.js"])(
  "an error that is swallowed does not commit, on %s",
  async (driver) => {
    const sql = postgres(database.url, { max: 2 });
    const own = driver === "postgres.js" ? drizzlePostgres(sql, { schema: { account } }) : open();
    const swallowed = holdfast(fromDrizzle(own)).transaction(async (tx) => {
      await tx.client.update(account).set({ balance: 0 });
      await tx.client
        .insert(account)
        .values({ id: 1, ownerName: "x", balance: 0 })
        .catch(() => {});
    });
    await expect(swallowed).rejects.toThrow(TransactionAbortedError);
    expect((await second.query("SELECT sum(balance)::int AS n FROM account")).rows).toEqual([{ n: 60 }]);
    await sql.end();
  },
);

describe("a statement through the outer db", () => {
  test("is reported with both places", async () => {
    const strict = holdfast(fromDrizzle(db), { wrongConnection: "throw" });
    const wrong = strict.transaction(async () => {
      await db.select().from(account);
    });
    await expect(wrong).rejects.toMatchObject({ name: "WrongConnectionError" });
    const { message } = (await wrong.catch((error: unknown) => error)) as Error;
    expect(message.match(/drizzle\.test\.ts:\d+:\d+/g)).toHaveLength(2);
    const rows = await strict.transaction(async (tx) => {
      await strict.outside(() => db.select().from(account));
      return tx.client.select().from(account);
    });
    expect(rows).toHaveLength(3);
    await strict.close();
  });

  test("that would wait for its own transaction's connection fails at once", async () => {
    const one = new Pool({ connectionString: database.url, max: 1 });
    const alone = drizzle(one);
    const hf = holdfast(fromDrizzle(alone), { wrongConnection: "off" });
    try {
      const stuck = hf.transaction(async () => {
        await alone.select().from(account);
      });
      await expect(stuck).rejects.toThrow(PoolExhaustedError);
      await expect(hf.transaction(() => hf.transaction({ separate: true }, async () => {}))).rejects.toThrow(
        PoolExhaustedError,
      );
      // Nothing is left behind.
      expect(await hf.transaction((tx) => tx.client.select().from(account))).toHaveLength(3);
    } finally {
      await hf.close();
      await one.end();
    }
  });

  test("also when several transactions fill the pool together", async () => {
    const two = new Pool({ connectionString: database.url, max: 2 });
    const small = drizzle(two);
    const hf = holdfast(fromDrizzle(small), { wrongConnection: "off" });
    try {
      const both = Promise.withResolvers<void>();
      let inside = 0;
      const nested = () =>
        hf.transaction({ retry: false }, async () => {
          if (++inside === 2) both.resolve();
          await both.promise;
          await small.select().from(account);
        });
      const results = await Promise.allSettled([nested(), nested()]);
      // One gives way, and the other gets its connection.
      expect(results.map(({ status }) => status).toSorted()).toEqual(["fulfilled", "rejected"]);
      const rejected = results.find((result) => result.status === "rejected");
      expect(rejected?.reason).toBeInstanceOf(PoolExhaustedError);
    } finally {
      await hf.close();
      await two.end();
    }
  });

  test("in PGlite, where it would wait for ever, fails at once", async () => {
    const client = new PGlite();
    const embedded = drizzlePglite(client);
    const hf = holdfast(fromDrizzle(embedded), { wrongConnection: "off" });
    const stuck = hf.transaction(async () => {
      await client.query("SELECT 1");
    });
    await expect(stuck).rejects.toThrow(PoolExhaustedError);
    const strict = holdfast(fromDrizzle(embedded), { wrongConnection: "throw" });
    await expect(strict.transaction(() => embedded.execute("SELECT 1"))).rejects.toThrow(/outer client/);
    await client.close();
  });
});

test("what is not reached is refused", () => {
  expect(() => fromDrizzle({} as never)).toThrow(UsageError);
  expect(() => fromDrizzle({ $client: {}, transaction() {}, select() {} } as never)).toThrow(
    /pg, on postgres\.js/,
  );
  expect(WrongConnectionError.name).toBe("WrongConnectionError");
});
