/**
 * What comes in wrong is refused where it comes in, in words about the call: not by the server, in words about a
 * statement that the caller never wrote, and never by being quietly understood as something else.
 */
import { PGlite } from "@electric-sql/pglite";
import {
  type Holdfast,
  HoldfastError,
  NotInTransactionError,
  UsageError,
  holdfast,
  key,
  shared,
} from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { fromPglite } from "holdfast/pglite";
import { fromPostgres } from "holdfast/postgres";
import { fromPrisma } from "holdfast/prisma";
import { Client, Pool, type PoolClient } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

const why = unavailable("postgres");
let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  if (why !== undefined) return;
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 4 });
  hf = holdfast(fromPg(pool));
  // Asked once, so that what follows meets a server that is known and works.
  await hf.capabilities();
});

beforeEach(({ skip }) => skip(why !== undefined, why));

afterAll(async () => {
  await hf?.close();
  await pool?.end();
  await database?.drop();
});

/** What a call throws, or rejects with. */
async function thrownBy(call: () => unknown): Promise<unknown> {
  try {
    await call();
  } catch (error) {
    return error;
  }
  return undefined;
}

async function refused(call: () => unknown, kind: typeof HoldfastError = UsageError): Promise<string> {
  const error = await thrownBy(call);
  expect(error).toBeInstanceOf(HoldfastError);
  expect(error).toBeInstanceOf(kind as never);
  const { message, code, retryable } = error as HoldfastError;
  expect(code).toMatch(/^HF_[A-Z_]+$/);
  expect(retryable).toBe(false);
  expect(message.length).toBeGreaterThan(15);
  // Neither the server's words nor those of a program that stumbled.
  expect(message).not.toMatch(
    /syntax error|relation ".*" does not|invalid input|Cannot read prop|is not a function/i,
  );
  return message;
}

const nothing = async () => expect.unreachable("the body ran");

/** Things that are given by mistake, and are no client of anything. */
const things: readonly [string, () => unknown][] = [
  ["nothing", () => undefined],
  ["null", () => null],
  ["an object", () => ({})],
  ["a list", () => []],
  ["a URL", () => "postgres://localhost/test"],
  ["a number", () => 5432],
  ["a class", () => Pool],
  ["a promise of a client", () => Promise.resolve({})],
  ["what holdfast(…) returns", () => hf],
  ["what an adapter returns", () => fromPg(pool)],
];

type From = (client: never) => unknown;

describe("what is no client", () => {
  const makers: Readonly<Record<string, From>> = {
    fromPg,
    fromPostgres,
    fromPglite,
    fromPrisma,
    fromMysql2,
  };
  describe.each(Object.entries(makers))("%s", (name, from) => {
    test.each(things)("refuses %s", async (_, thing) => {
      expect(await refused(() => from(thing() as never))).toContain(name);
    });
  });

  test.each(things.filter(([name]) => name !== "a class"))(
    "fromBetterSqlite3 refuses %s",
    async (_, thing) => {
      expect(await refused(() => fromBetterSqlite3(thing() as never))).toContain("fromBetterSqlite3");
    },
  );

  test("fromBetterSqlite3 refuses a function that opens something else", async () => {
    for (const open of [() => undefined, () => ({}), async () => ({})])
      expect(await refused(() => holdfast(fromBetterSqlite3(open as never)).capabilities())).toContain(
        "the function",
      );
  });

  test("each refuses the clients of the others", async () => {
    const sql = postgres("postgres://localhost:1/none", { max: 1 });
    const db = new PGlite();
    const others: readonly [object, readonly From[]][] = [
      [new Pool(), [fromPostgres, fromPglite, fromPrisma, fromMysql2, fromBetterSqlite3]],
      [new Client(), [fromPostgres, fromPglite, fromPrisma, fromMysql2, fromBetterSqlite3]],
      [sql, [fromPg, fromPglite, fromPrisma, fromMysql2]],
      [db, [fromPg, fromPostgres, fromPrisma, fromMysql2, fromBetterSqlite3]],
    ];
    for (const [client, makers] of others)
      for (const from of makers) await refused(() => from(client as never));
    await db.close();
    await sql.end();
  });

  test.each(things.filter(([name]) => name !== "what an adapter returns"))(
    "holdfast(…) refuses %s",
    async (_, thing) => {
      expect(await refused(() => holdfast(thing() as never))).toContain("takes what an adapter returns");
    },
  );

  test("holdfast(…) refuses a client without its adapter", async () => {
    expect(await refused(() => holdfast(pool as never))).toContain("fromPg");
  });

  test("hf.join refuses what is no transaction's client", async () => {
    expect(await refused(() => hf.join(pool as never), NotInTransactionError)).toContain("Pool");
    for (const [, thing] of things) await refused(() => hf.join(thing() as never), NotInTransactionError);
  });

  test("hf.join(client) refuses to lock where nothing was begun", async () => {
    const client = await pool.connect();
    try {
      await refused(() => hf.join(client).lock(key("input")), NotInTransactionError);
      // And the client is as it was.
      expect((await client.query("SELECT 1 AS one")).rows).toEqual([{ one: 1 }]);
    } finally {
      client.release();
    }
  });
});

describe("what is no option", () => {
  const times = [NaN, -1, -0.1, Infinity, -Infinity, 2 ** 31, "later", "100", "", null, {}, [], true, 5n];
  const badWaits = [...times, "Skip", "NOWAIT", "nowait "];
  const badDeadlines = [...times, 0];
  const badLevels = [
    "Serializable",
    "SERIALIZABLE",
    "serialisable",
    "repeatable-read",
    "snapshot",
    "",
    2,
    {},
    true,
  ];
  const badRetries = [
    3,
    true,
    "no",
    { attempts: 0 },
    { attempts: 1.5 },
    { on: ["unique"] },
    { baseMs: -1 },
    { attemps: 3 },
  ];

  test("wait", async () => {
    for (const wait of badWaits as never[]) {
      expect(await refused(() => hf.transaction({ wait }, nothing))).toMatch(/^wait must be/);
      expect(await refused(() => hf.lock(key("input"), nothing, { wait }))).toMatch(/^wait must be/);
      expect(await refused(() => hf.hold(key("input"), { wait }))).toMatch(/^wait must be/);
      expect(await refused(() => holdfast(fromPg(pool), { wait }))).toMatch(/^wait must be/);
    }
    await hf.transaction(async (tx) => {
      for (const wait of badWaits as never[]) {
        expect(await refused(() => tx.lock(key("input"), { wait }))).toMatch(/^wait must be/);
        expect(await refused(() => tx.transaction({ lock: key("input"), wait }, nothing))).toMatch(
          /^wait must be/,
        );
      }
      // None of them was so much as sent: an error of the server would have ended this transaction.
      expect((await tx.client.query("SELECT 1 AS one")).rows).toEqual([{ one: 1 }]);
    });
  });

  test("deadline", async () => {
    for (const deadline of badDeadlines as never[]) {
      expect(await refused(() => hf.transaction({ deadline }, nothing))).toMatch(/^deadline must be/);
      expect(await refused(() => holdfast(fromPg(pool), { deadline }))).toMatch(/^deadline must be/);
    }
  });

  test("isolation", async () => {
    for (const isolation of badLevels as never[]) {
      expect(await refused(() => hf.transaction({ isolation }, nothing))).toMatch(
        /^isolation must be one of/,
      );
      expect(await refused(() => holdfast(fromPg(pool), { isolation }))).toMatch(/^isolation must be one of/);
    }
  });

  test("isolation inside a transaction", async () => {
    await hf.transaction(async (tx) => {
      for (const isolation of badLevels as never[])
        await refused(() => tx.transaction({ isolation }, nothing));
      expect(await refused(() => tx.transaction({ isolation: "serializable" }, nothing))).toContain(
        "separate: true",
      );
    });
  });

  test.each(badRetries.map((retry) => [JSON.stringify(retry), retry]))("retry: %s", async (_, retry) => {
    expect(await refused(() => hf.transaction({ retry } as never, nothing))).toContain("retry");
    expect(await refused(() => holdfast(fromPg(pool), { retry } as never))).toContain("retry");
  });

  test("signal", async () => {
    for (const signal of [new AbortController(), "stop", 1000, {}, null] as never[]) {
      expect(await refused(() => hf.transaction({ signal }, nothing))).toContain("AbortSignal");
      expect(await refused(() => hf.hold(key("input"), { signal }))).toContain("AbortSignal");
    }
  });

  test("a name that is none, on a transaction", async () => {
    for (const options of [
      { locks: key("input") },
      { timeout: 5 },
      { Wait: 5 },
      { isolationLevel: "serializable" },
    ]) {
      const message = await refused(() => hf.transaction(options as never, nothing));
      expect(message).toContain(`\`${Object.keys(options)[0]}\``);
      expect(message).toContain("deadline");
      expect(await refused(() => hf.lock(key("input"), nothing, options as never))).toContain("no option");
      expect(await refused(() => hf.tryLock(key("input"), nothing, options as never))).toContain("no option");
    }
  });

  test("a name that is none, on an instance", async () => {
    await refused(() => holdfast(fromPg(pool), { wiat: 5 } as never));
    await refused(() => holdfast(fromPg(pool), { names: "short" } as never));
  });

  test("a name that is none, on a session lock", async () => {
    await refused(() => hf.hold(key("input"), { timeout: 5 } as never).then((held) => held.release()));
  });

  test("a name that is none, inside a transaction", async () => {
    await hf.transaction(async (tx) => {
      await refused(() => tx.lock(key("input"), { timeout: 5 } as never));
      await refused(() => tx.transaction({ deadline: 5 } as never, nothing));
    });
  });

  test("options that are none", async () => {
    for (const options of [null, "serializable", 5, [], key("input")] as never[])
      await refused(() => hf.transaction(options, nothing));
  });
});

describe("what is no body", () => {
  test.each([undefined, null, "SELECT 1", {}, Promise.resolve()])("%o", async (body) => {
    expect(await refused(() => hf.transaction({}, body as never))).toContain("body");
    expect(await refused(() => hf.lock(key("input"), body as never))).toContain("body");
    expect(await refused(() => hf.tryLock(key("input"), body as never))).toContain("body");
  });

  test.each([undefined, "SELECT 1", {}])("%o, inside a transaction", async (body) => {
    await hf.transaction(async (tx) => {
      expect(await refused(() => tx.transaction({}, body as never))).toContain("body");
      expect(await refused(() => hf.transaction({}, body as never))).toContain("body");
    });
  });
});

describe("what is no lock", () => {
  const bad: readonly [string, () => unknown][] = [
    ["text", () => "upload"],
    ["a number", () => 42],
    ["null", () => null],
    ["an empty list", () => []],
    ["a list with a hole", () => [key("a"), undefined]],
    ["what looks like a key", () => ({ ...key("a") })],
    ["a key without name", () => key("")],
    ["a key of an id that is missing", () => key("a", undefined as never)],
    ["a key of an id that is no number", () => key("a", NaN)],
    ["a key of a lone surrogate", () => key("a", "\ud800")],
    ["sharing what is no key", () => shared("a" as never)],
  ];

  /** Every call that takes locks. */
  const calls: Readonly<Record<string, (lock: never) => unknown>> = {
    "hf.transaction": (lock) => hf.transaction({ lock }, nothing),
    "hf.lock": (lock) => hf.lock(lock, nothing),
    "hf.tryLock": (lock) => hf.tryLock(lock, nothing),
    "hf.hold": (lock) => hf.hold(lock),
    "tx.lock": (lock) => hf.transaction((tx) => tx.lock(lock)),
    "tx.tryLock": (lock) => hf.transaction((tx) => tx.tryLock(lock)),
    "tx.holds": (lock) => hf.transaction(async (tx) => tx.holds(lock)),
    "tx.transaction": (lock) => hf.transaction((tx) => tx.transaction({ lock }, nothing)),
  };

  describe.each(Object.entries(calls))("%s", (_, call) => {
    test.each(bad)("refuses %s", async (_, lock) => {
      const error = await thrownBy(() => call(lock() as never));
      expect(error).toMatchObject({ code: "HF_BAD_KEY" });
      await refused(() => call(lock() as never));
    });
  });

  // A lock that is missing by mistake must not become no lock at all.
  test.each(Object.entries(calls).filter(([name]) => !name.endsWith("transaction")))(
    "%s refuses undefined",
    async (_, call) => {
      expect(await thrownBy(() => call(undefined as never))).toMatchObject({ code: "HF_BAD_KEY" });
    },
  );
});

test("after all this the pool has all its connections, and nothing is held", async () => {
  const { rows } = await pool.query(
    "SELECT count(*)::int AS n FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
  );
  expect(rows).toEqual([{ n: 0 }]);
  expect(pool.idleCount).toBe(pool.totalCount);
});
