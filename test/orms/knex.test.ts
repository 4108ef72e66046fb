/** What is special of Knex, on PostgreSQL; what every client must do is in test/conformance. */
import { basename } from "node:path";
import {
  ConnectionLostError,
  DeadlineExceededError,
  type Holdfast,
  type HoldfastOptions,
  LockNotAvailableError,
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
import { fromKnex } from "holdfast/knex";
import makeKnex, { type Knex } from "knex";
import { Client, DatabaseError, Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";
import { eventually } from "../harness/wait.ts";

let database: TestDatabase;
let knex: Knex;
let hf: Holdfast<Knex.Transaction>;
/** Somebody else, who writes SQL by hand. */
let psql: Client;

const quiet = { warn: () => {} };

function open(url = database.url, config: Knex.Config = {}): Knex {
  return makeKnex({ client: "pg", connection: url, pool: { min: 0, max: 10 }, log: quiet, ...config });
}

beforeAll(async () => {
  database = await createDatabase("postgres");
  knex = open();
  hf = holdfast(fromKnex(knex));
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
  await knex.destroy();
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

/** Runs with a Knex of its own. */
async function using<T>(own: Knex, run: (own: Knex) => Promise<T>): Promise<T> {
  try {
    return await run(own);
  } finally {
    await own.destroy();
  }
}

describe("tx.client", () => {
  test("is Knex's own transaction, builders and raw statements alike", async () => {
    const left = await hf.transaction({ lock: key("account", 1) }, async ({ client: trx }) => {
      expect(trx.isTransaction).toBe(true);
      await trx("account").where({ id: 1 }).decrement("balance", 30);
      const { rows } = await trx.raw<{ rows: { balance: number }[] }>(
        "SELECT balance FROM account WHERE id = ?",
        [1],
      );
      expect(await balance(1)).toBe(100);
      return rows[0]?.balance;
    });
    expect([left, await balance(1)]).toEqual([70, 70]);
  });

  test("nests by savepoints, Knex's and ours", async () => {
    await hf.transaction(async (tx) => {
      await caught(
        tx.client.transaction(async (inner) => {
          await inner("account").where({ id: 1 }).update({ balance: 1 });
          throw new Error("undone");
        }),
      );
      await tx.client.transaction(async (inner) => {
        await hf.join(inner).lock(key("nested"));
        await inner("account").where({ id: 2 }).update({ balance: 2 });
      });
      await caught(
        tx.transaction(async ({ client }) => {
          await client("account").where({ id: 2 }).update({ balance: 3 });
          throw new Error("undone");
        }),
      );
    });
    expect([await balance(1), await balance(2)]).toEqual([100, 2]);
  });

  test("renames columns as Knex is told to, and our own statements all the same work", async () => {
    const renaming = open(database.url, {
      postProcessResponse: (result: unknown) =>
        Array.isArray(result) ? result.map(({ owner_name: ownerName }) => ({ ownerName })) : {},
      wrapIdentifier: (name, wrap) => wrap(name === "ownerName" ? "owner_name" : name),
    });
    await using(renaming, async (own) => {
      const rows = await holdfast(fromKnex(own)).transaction({ lock: key("a?", "b ? c") }, async (tx) => {
        await tx.lock(key("another?"));
        return tx.client("account").select("ownerName").orderBy("id");
      });
      expect(rows).toEqual([{ ownerName: "ada" }, { ownerName: "bob" }]);
    });
  });

  test("has the isolation and access that were asked for", async () => {
    const asked = (trx: Knex.Transaction) =>
      trx
        .select(trx.raw("current_setting('transaction_isolation') AS isolation"))
        .select(trx.raw("current_setting('transaction_read_only') AS read_only"))
        .first<unknown>();
    for (const isolation of ["read committed", "repeatable read", "serializable"] as const)
      expect(await hf.transaction({ isolation }, ({ client }) => asked(client))).toEqual({
        isolation,
        read_only: "off",
      });
    expect(await hf.transaction({ readOnly: true }, ({ client }) => asked(client))).toMatchObject({
      read_only: "on",
    });
  });
});

describe("what does not commit is not reported as committed", () => {
  test("an error that the body swallows", async () => {
    const running = hf.transaction(async ({ client: trx }) => {
      await trx("account").insert({ id: 3, balance: 1 });
      await caught(trx("account").insert({ id: 1, balance: 1 }));
    });
    await expect(running).rejects.toBeInstanceOf(TransactionAbortedError);
    expect(await balance(3)).toBeUndefined();
  });

  test.each(["commit", "rollback"] as const)("trx.%s() in the body", async (how) => {
    const running = hf.transaction(async ({ client: trx }) => {
      await trx("account").insert({ id: 3, balance: 1 });
      await trx[how]();
    });
    await expect(running).rejects.toThrow(/trx\.commit\(\) or trx\.rollback\(\)/);
    await expect(running).rejects.toBeInstanceOf(UsageError);
    // The pool is as it was.
    expect(await hf.transaction({ lock: key("after") }, async () => "fine")).toBe("fine");
  });
});

describe("errors", () => {
  test("a unique violation is the driver's own, as Knex throws it", async () => {
    const error = await caught(
      hf.transaction(({ client }) => client("account").insert({ id: 1, balance: 1 })),
    );
    expect(error).toBeInstanceOf(DatabaseError);
    expect(error).toMatchObject({ code: "23505", constraint: "account_pkey" });
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
  });

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
  });

  test("a serialization failure at COMMIT is retried", async () => {
    let attempts = 0;
    await hf.transaction({ isolation: "serializable" }, async ({ client: trx, attempt }) => {
      attempts = attempt;
      const { sum } = (await trx("account").sum("balance").first()) as { sum: string };
      if (attempt === 1) {
        await knexOutside((own) =>
          own.transaction(
            async (other) => {
              const seen = (await other("account").sum("balance").first()) as { sum: string };
              await other("account").insert({ id: 3, balance: Number(seen.sum) });
            },
            { isolationLevel: "serializable" },
          ),
        );
      }
      await trx("account").insert({ id: 4, balance: Number(sum) });
    });
    expect([attempts, await balance(3), await balance(4)]).toEqual([2, 200, 400]);
  });

  test("a connection that is refused", async () => {
    const own = open("postgres://postgres@127.0.0.1:1/none");
    await using(own, async () => {
      const error = await caught(holdfast(fromKnex(own), { retry: false }).transaction(async () => {}));
      expect(isRetryable(error), String(error)).toBe(true);
    });
  });

  test("a connection that dies in the body: Knex's words are known, and the error of the body is not hidden", async () => {
    await using(open(), async (own) => {
      const once = holdfast(fromKnex(own), { retry: false });
      const die = async (trx: Knex.Transaction) => {
        const { pid } = (await trx.select(trx.raw("pg_backend_pid() AS pid")).first()) as { pid: number };
        await psql.query("SELECT pg_terminate_backend($1)", [pid]);
      };
      const later = caught(
        once.transaction(async ({ client: trx }) => {
          await die(trx);
          await caught(trx.select(1));
          await trx.select(1);
        }),
      );
      expect(await later).toBeInstanceOf(ConnectionLostError);
      const own2 = new Error("mine");
      const mine = caught(
        once.transaction(async ({ client: trx, signal }) => {
          await die(trx);
          await eventually(() => signal.aborted);
          throw own2;
        }),
      );
      expect(await mine).toBe(own2);
      expect(await once.transaction(async () => "next")).toBe("next");
    });
  });

  test("a pool that has none to give", async () => {
    const own = open(database.url, { pool: { min: 0, max: 1 }, acquireConnectionTimeout: 1500 });
    await using(own, async () => {
      const single = holdfast(fromKnex(own));
      await single.transaction(async () => {});
      const raw: unknown = await own.client.acquireConnection();
      const error = await caught(single.transaction(async () => {}));
      expect(error).toBeInstanceOf(NoConnectionError);
      expect(error).toMatchObject({ cause: { name: "KnexTimeoutError" } });
      await own.client.releaseConnection(raw);
    });
  });

  test("a deadline, and an abort, end the wait for the pool", async () => {
    await using(open(database.url, { pool: { min: 0, max: 1 } }), async (own) => {
      const single = holdfast(fromKnex(own));
      await single.transaction(async () => {});
      const raw: unknown = await own.client.acquireConnection();
      await expect(single.transaction({ deadline: 100 }, async () => {})).rejects.toBeInstanceOf(
        DeadlineExceededError,
      );
      const reason = new Error("no longer wanted");
      const signal = AbortSignal.abort(reason);
      expect(await caught(single.transaction({ signal }, async () => {}))).toBe(reason);
      await own.client.releaseConnection(raw);
      expect(await single.transaction(async () => "next")).toBe("next");
    });
  });
});

async function knexOutside<T>(run: (own: Knex) => Promise<T>): Promise<T> {
  return using(open(), run);
}

describe("a COMMIT whose answer is lost", () => {
  async function withProxy(
    fate: "cut-before" | "drop-answer",
    run: (proxied: Holdfast<Knex.Transaction>, arm: () => void) => Promise<void>,
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
      await run(holdfast(fromKnex(own)), () => (armed = true));
    } finally {
      await own.destroy();
      await proxy.close();
    }
  }

  test("was kept: the call succeeds", async () => {
    let runs = 0;
    await withProxy("drop-answer", async (proxied, arm) => {
      const value = await proxied.transaction({ lock: key("commit") }, async ({ client }) => {
        runs++;
        await client("account").insert({ id: 3, balance: 3 });
        arm();
        return "value";
      });
      expect(value).toBe("value");
    });
    expect([runs, await balance(3)]).toEqual([1, 3]);
  });

  test("never arrived: the call says so, or runs again", async () => {
    const insert = (proxied: Holdfast<Knex.Transaction>, arm: () => void, retry: false | object) =>
      proxied.transaction({ lock: key("commit"), retry }, async ({ client, attempt }) => {
        await client("account").insert({ id: 3, balance: attempt });
        if (attempt === 1) arm();
      });
    await withProxy("cut-before", async (proxied, arm) => {
      await expect(insert(proxied, arm, false)).rejects.toBeInstanceOf(ConnectionLostError);
    });
    expect(await balance(3)).toBeUndefined();
    await withProxy("cut-before", (proxied, arm) => insert(proxied, arm, {}));
    expect(await balance(3)).toBe(2);
  });
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

describe("a connection of one's own", () => {
  test("that is broken leaves the server at once, and the pool goes on", async () => {
    await using(open(database.url, { pool: { min: 0, max: 1 } }), async (own) => {
      const client = fromKnex(own);
      const purpose = { use: "session", locks: [], wait: 1000 } as const;
      const pinned = await client.connect?.(purpose);
      const { rows } = (await own.client.pool.used[0].resource.query("SELECT pg_backend_pid() AS pid")) as {
        rows: { pid: number }[];
      };
      await pinned?.release(true);
      await eventually(
        async () =>
          (await psql.query("SELECT FROM pg_stat_activity WHERE pid = $1", [rows[0]?.pid])).rows.length === 0,
      );
      expect(await own("account").count().first()).toEqual({ count: "2" });
    });
  });

  test("through a pg Pool that Knex was given", async () => {
    const pool = new Pool({ connectionString: database.url, max: 2 });
    const own = makeKnex({ client: "pg", connectionPool: pool } as Knex.Config);
    try {
      const client = fromKnex(own);
      const borrowed = holdfast(client);
      await using(own, async () => {
        await using2(await borrowed.hold(key("held")), async () => {
          expect(client.room?.()).toEqual({ max: 2, out: 1 });
          await borrowed.transaction({ lock: key("other") }, ({ client: trx }) =>
            trx("account").where({ id: 1 }).update({ balance: 5 }),
          );
        });
        const pinned = await client.connect?.({ use: "session", locks: [], wait: 1000 });
        await pinned?.release(true);
        expect(await balance(1)).toBe(5);
        await borrowed.close();
      });
    } finally {
      await pool.end();
    }
  });
});

async function using2(held: AsyncDisposable, run: () => Promise<void>): Promise<void> {
  await using _held = held;
  await run();
}

describe("join", () => {
  test("refuses what is no transaction, or no longer one", async () => {
    expect(() => hf.join(knex as never)).toThrow(NotInTransactionError);
    expect(() => hf.join(knex as never)).toThrow(/knex\.transaction\(async \(trx\)/);
    expect(() => hf.join({} as never)).toThrow(NotInTransactionError);
    expect(() => hf.join(null as never)).toThrow(NotInTransactionError);
    const trx = await knex.transaction();
    const scope = hf.join(trx);
    await scope.lock(key("joined"));
    await trx.commit();
    await expect(scope.lock(key("late"))).rejects.toBeInstanceOf(NotInTransactionError);
    await expect(hf.join(trx).lock(key("late"))).rejects.toBeInstanceOf(NotInTransactionError);
  });

  test("works on a transaction that was opened without a callback", async () => {
    const trx = await knex.transaction();
    await hf.join(trx).lock(key("joined"));
    expect((await hf.tryLock(key("joined"), async () => {})).acquired).toBe(false);
    await trx.rollback();
    expect((await hf.tryLock(key("joined"), async () => {})).acquired).toBe(true);
  });
});

describe("a statement beside its transaction", () => {
  const here = basename(import.meta.url);
  const places = (text: string) => text.split(here).length - 1;

  async function guarded<T>(
    options: HoldfastOptions,
    max: number,
    run: (own: Knex, guard: Holdfast<Knex.Transaction>) => Promise<T>,
  ): Promise<T> {
    const own = open(database.url, { pool: { min: 0, max } });
    const guard = holdfast(fromKnex(own), options);
    try {
      await guard.transaction(async () => {});
      return await run(own, guard);
    } finally {
      await guard.close();
      await own.destroy();
    }
  }

  const beside: Record<string, (own: Knex) => PromiseLike<unknown>> = {
    "a query": (own) => own("account").select("*").where({ id: 1 }),
    "a raw statement": (own) => own.raw("SELECT 1"),
    "a change of the schema": (own) => own.schema.hasTable("account"),
    "a transaction": (own) => own.transaction(async (trx) => trx("account").select("*")),
    "a query of a copy": (own) => own.withUserParams({ a: 1 })("account").select("*"),
  };

  test.each(Object.entries(beside))("is told of, with both places: %s", async (_name, send) => {
    await guarded({ wrongConnection: "throw" }, 10, async (own, guard) => {
      const error = await caught(
        guard.transaction(async () => {
          await send(own);
        }),
      );
      expect(error).toBeInstanceOf(WrongConnectionError);
      expect(places((error as Error).message), (error as Error).message).toBe(2);
    });
  });

  test("is not told of where it is none", async () => {
    await guarded({ wrongConnection: "throw" }, 10, async (own, guard) => {
      await guard.transaction({ lock: key("a") }, async (tx) => {
        await tx.client("account").select("*");
        await tx.client.raw("SELECT 1");
        await tx.client.transaction((inner) => inner("account").select("*"));
        await own("account").select("*").transacting(tx.client);
        await tx.rows(own("account").where({ id: 1 }));
        await tx.lock(key("b"));
        await guard.outside(() => own("account").select("*"));
        await guard.transaction({ separate: true }, (other) => other.client("account").select("*"));
      });
      await own("account").select("*");
      await own.transaction(async (trx) => trx("account").select("*"));
    });
  });

  test("fails at once where the pool has only the one", async () => {
    await guarded({ wrongConnection: "off" }, 1, async (own, guard) => {
      const error = await caught(guard.transaction(() => own("account").select("*")));
      expect(error).toBeInstanceOf(PoolExhaustedError);
      expect(places((error as Error).message), (error as Error).message).toBeGreaterThan(0);
      expect(await own("account").count().first()).toEqual({ count: "2" });
    });
  });
});

describe("rows of a query", () => {
  const suffixes = [
    ["update", "bounded", " for update"],
    ["update", "nowait", " for update nowait"],
    ["no key update", "skip", " for no key update skip locked"],
    ["share", "nowait", " for share nowait"],
    ["key share", "bounded", " for key share"],
  ] as const;

  test.each(suffixes)("for %s, %s", async (strength, wait, suffix) => {
    const client = fromKnex(knex);
    await knex.transaction(async (trx) => {
      const query = knex("account").where({ id: 1 });
      const run = client.locking?.(trx, query, { strength, wait });
      const seen: string[] = [];
      trx.on("query", ({ sql }: { sql: string }) => seen.push(sql));
      expect(await run?.()).toEqual([{ id: 1, owner_name: "ada", balance: 100 }]);
      expect(seen).toEqual([`select * from "account" where "id" = $1${suffix}`]);
      // The caller's own query is as it was.
      expect(query.toString()).toBe(`select * from "account" where "id" = 1`);
    });
  });

  test("of one table of a join", async () => {
    const client = fromKnex(knex);
    await knex.transaction(async (trx) => {
      const query = knex("account as a").leftJoin("account as b", "a.id", "b.id").forUpdate("a");
      const run = client.locking?.(trx, query, { strength: "share", wait: "nowait" });
      expect(await run?.()).toHaveLength(2);
      expect(String(client.locking?.(trx, query, { strength: "share", wait: "nowait" })?.())).toContain(
        `for share of "a" nowait`,
      );
    });
  });

  test("are locked, and typed as the builder types them", async () => {
    interface Account {
      id: number;
      balance: number;
    }
    await hf.transaction(async (tx) => {
      const found: Pick<Account, "id">[] = await tx.rows(
        tx.client<Account>("account").select("id").where({ id: 1 }).orderBy("id"),
      );
      expect(found).toEqual([{ id: 1 }]);
      const first = await tx.rows(tx.client<Account>("account").where({ id: 1 }).first());
      expect(first?.balance).toBe(100);
      const refused = await caught(psql.query("SELECT FROM account WHERE id = 1 FOR UPDATE NOWAIT"));
      expect(refused).toMatchObject({ code: "55P03" });
      expect((await psql.query("SELECT FROM account WHERE id = 2 FOR UPDATE NOWAIT")).rowCount).toBe(1);
    });
  });

  test("that are taken", async () => {
    await psql.query("BEGIN; SELECT FROM account WHERE id = 1 FOR UPDATE");
    try {
      const query = () => knex("account").orderBy("id");
      await hf.transaction(async (tx) => {
        expect(await tx.rows(query(), { wait: "skip" })).toMatchObject([{ id: 2 }]);
      });
      await expect(hf.transaction((tx) => tx.rows(query(), { wait: "nowait" }))).rejects.toBeInstanceOf(
        LockNotAvailableError,
      );
      await expect(hf.transaction((tx) => tx.rows(query(), { wait: 50 }))).rejects.toBeInstanceOf(
        LockTimeoutError,
      );
    } finally {
      await psql.query("ROLLBACK");
    }
  });

  test("what cannot be locked is refused", async () => {
    await hf.transaction(async (tx) => {
      const trx = tx.client;
      for (const query of [
        trx("account").update({ balance: 1 }),
        trx("account").insert({ id: 9, balance: 1 }),
        trx("account").del(),
        trx("account").forShare().skipLocked(),
        trx("account").connection({}),
        trx.raw("SELECT 1"),
        trx.schema.hasTable("account"),
        {},
      ])
        await expect(tx.rows(query)).rejects.toBeInstanceOf(UsageError);
    });
    expect([await balance(1), await balance(9)]).toEqual([100, undefined]);
  });
});

test("what is no Knex, or reaches something else, is refused", async () => {
  expect(() => fromKnex({} as never)).toThrow(UsageError);
  expect(() => fromKnex(undefined as never)).toThrow(UsageError);
  await knex.transaction(async (trx) => {
    expect(() => fromKnex(trx)).toThrow(/make Holdfast once/);
  });
  expect(() => fromKnex(makeKnex({ client: "cockroachdb" }))).toThrow(UnsupportedError);
});

test("a lease's waiters are woken by the server", async () => {
  expect((await hf.capabilities()).wake).toBe(true);
});
