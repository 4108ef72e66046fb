/** What is special about MikroORM; what every client must do is in the conformance suite. */
import {
  type InferEntity,
  MikroORM,
  type Options,
  type SqlEntityManager,
  UniqueConstraintViolationException,
  defineEntity,
} from "@mikro-orm/postgresql";
import {
  ConnectionLostError,
  DeadlineExceededError,
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
  sql,
} from "holdfast";
import { fromMikroOrm } from "holdfast/mikro-orm";
import { Client } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
import { startProxy } from "../harness/proxy.ts";

const Account = defineEntity({
  name: "Account",
  tableName: "account",
  properties: (p) => ({
    id: p.integer().primary(),
    ownerName: p.text().unique(),
    balance: p.integer(),
    entries: () => p.oneToMany(Entry).mappedBy("account"),
  }),
});
const Entry = defineEntity({
  name: "Entry",
  tableName: "entry",
  properties: (p) => ({ id: p.integer().primary(), account: () => p.manyToOne(Account) }),
});
type Account = InferEntity<typeof Account>;

let database: TestDatabase;
let orm: MikroORM;
let hf: Holdfast<MikroORM["em"]>;
/** Somebody else, who writes SQL by hand. */
let psql: Client;
const statements: string[] = [];

function open(options: Partial<Options> = {}): Promise<MikroORM> {
  return MikroORM.init({
    clientUrl: database.url,
    entities: [Account, Entry],
    logger: () => {},
    ...options,
  } as Options) as Promise<MikroORM>;
}

beforeAll(async () => {
  database = await createDatabase("postgres");
  orm = await open({ debug: ["query"], logger: (text: string) => void statements.push(text), colors: false });
  await orm.schema.create();
  hf = holdfast(fromMikroOrm(orm));
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
  await orm.close();
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

const kill = async (em: SqlEntityManager) => {
  const [row] = await em.execute<{ pid: number }[]>("SELECT pg_backend_pid() AS pid");
  await psql.query("SELECT pg_terminate_backend($1)", [row?.pid]);
};

describe("tx.client", () => {
  test("works with entities, flush and builders, all of it or nothing", async () => {
    const body = async ({ client: em }: { client: MikroORM["em"] }) => {
      const one = await em.findOneOrFail(Account, 1);
      one.balance += 11;
      await em.qb(Account).update({ balance: 7 }).where({ id: 2 }).execute();
      em.create(Account, { id: 5, ownerName: "o5", balance: 0 });
      return em.count(Account);
    };
    await expect(
      hf.transaction(async (tx) => {
        await body(tx);
        await tx.client.flush();
        throw new Error("undo");
      }),
    ).rejects.toThrow("undo");
    expect(await balances()).toEqual([100, 100, 100, 100]);
    await hf.transaction({ lock: key("accounts") }, body);
    expect(await balances()).toEqual([111, 7, 100, 100, 0]);
  });

  test("is what the global EntityManager means inside of the body", async () => {
    const strict = holdfast(fromMikroOrm(orm), { wrongConnection: "throw" });
    await strict.transaction(async ({ client: em }) => {
      (await em.findOneOrFail(Account, 1)).balance = 5;
      await em.flush();
      expect(await orm.em.findOneOrFail(Account, 1)).toMatchObject({ balance: 5 });
    });
    await strict.close();
  });

  test("is another one for each attempt: nothing of the first is left in it", async () => {
    const seen: (number | undefined)[] = [];
    await hf.transaction({ isolation: "repeatable read" }, async ({ client: em, attempt }) => {
      const one = await em.findOneOrFail(Account, 1);
      seen.push(one.balance);
      em.create(Account, { id: 10 + attempt, ownerName: `n${attempt}`, balance: 1 });
      if (attempt === 1) await psql.query("UPDATE account SET balance = 50 WHERE id = 1");
      one.balance++;
    });
    expect(seen).toEqual([100, 50]);
    expect(await balances()).toEqual([51, 100, 100, 100, 1]);
  });

  test("gives entities that can be used afterwards", async () => {
    await psql.query("INSERT INTO entry VALUES (7, 1)");
    const one = await hf.transaction(({ client: em }) => em.findOneOrFail(Account, 1));
    expect((await one.entries.loadItems()).map(({ id }) => id)).toEqual([7]);
  });

  test("has the isolation that was asked for, and is read only if that was", async () => {
    for (const isolation of ["read committed", "repeatable read", "serializable"] as const) {
      const [row] = await hf.transaction({ isolation }, ({ client }) =>
        client.execute("SHOW transaction_isolation"),
      );
      expect(row).toEqual({ transaction_isolation: isolation });
    }
    const writing = hf.transaction({ readOnly: true }, async ({ client: em }) => {
      (await em.findOneOrFail(Account, 1)).balance = 1;
    });
    await expect(writing).rejects.toMatchObject({ code: "25006" });
  });

  test("can nest, and must not be ended", async () => {
    await hf.transaction(async ({ client: em }) => {
      await em.transactional(async (inner) => {
        (await inner.findOneOrFail(Account, 1)).balance = 1;
      });
    });
    const ended = hf.transaction(async ({ client: em }) => {
      await em.nativeUpdate(Account, { id: 1 }, { balance: 3 });
      await em.rollback();
    });
    await expect(ended).rejects.toThrow(/ended the transaction by itself/);
    expect(await balances()).toEqual([1, 100, 100, 100]);
    const { rows } = await psql.query(
      "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'",
    );
    expect(rows).toEqual([]);
  });
});

describe("errors", () => {
  test("a unique violation in the flush at the end passes through as MikroORM's own", async () => {
    const error = await caught(
      hf.transaction(async ({ client: em }) => {
        em.create(Account, { id: 9, ownerName: "o1", balance: 0 });
      }),
    );
    expect(error).toBeInstanceOf(UniqueConstraintViolationException);
    expect([isUniqueViolation(error), isRetryable(error)]).toEqual([true, false]);
  });

  test("of COMMIT are those of the transaction", async () => {
    const error = await caught(
      hf.transaction(async ({ client: em }) => {
        await em.execute("CREATE TABLE twice (n int, UNIQUE (n) DEFERRABLE INITIALLY DEFERRED)");
        await em.execute("INSERT INTO twice VALUES (1), (1)");
      }),
    );
    expect(isUniqueViolation(error)).toBe(true);
  });

  test("a deadlock in the flush is retried and committed", async () => {
    let [attempts, arrived] = [0, 0];
    let meet!: () => void;
    const both = new Promise<void>((resolve) => (meet = resolve));
    const add = (first: number, second: number) =>
      hf.transaction(async ({ client: em, attempt }) => {
        attempts++;
        (await em.findOneOrFail(Account, first)).balance++;
        await em.flush();
        if (++arrived === 2) meet();
        if (attempt === 1) await both;
        await em.nativeUpdate(Account, { id: second }, { balance: 1 });
      });
    await Promise.all([add(1, 2), add(2, 1)]);
    expect(attempts).toBeGreaterThan(2);
  });

  test("a flush that waits is ended by an abort, and by the deadline", async () => {
    const change = async ({ client: em }: { client: MikroORM["em"] }) => {
      (await em.findOneOrFail(Account, 1)).balance = 0;
    };
    await psql.query("BEGIN; SELECT FROM account WHERE id = 1 FOR UPDATE");
    try {
      const signal = AbortSignal.timeout(200);
      await expect(hf.transaction({ signal }, change)).rejects.toMatchObject({ name: "TimeoutError" });
      await expect(hf.transaction({ deadline: 300 }, change)).rejects.toThrow(DeadlineExceededError);
    } finally {
      await psql.query("ROLLBACK");
    }
    expect(await balances()).toEqual([100, 100, 100, 100]);
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

  test.each([
    ["drop-answer", "commit", 1],
    ["cut-before", "commit", 2],
    ["cut-before", "begin", 1],
  ] as const)("of a connection that is lost are resolved: %s of %s", async (fate, statement, runs) => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const own = await open({ clientUrl: proxy.url(database.url), pool: { min: 0, max: 1 } });
    const through = holdfast(fromMikroOrm(own));
    // What it asks once.
    await through.transaction(async () => {});
    let [ran, armed] = [0, true];
    // Not the word in READ COMMITTED. What begins it may have been sent before, and goes by its name: it is the first of all.
    const said = statement === "begin" ? /^/ : /commit(?!ted)/i;
    proxy.cutWhen((direction, chunk) => {
      if (!armed || direction !== "to-server" || !said.test(chunk.toString("latin1"))) return "pass";
      armed = false;
      return fate;
    });
    await through.transaction(async ({ client: em }) => {
      ran++;
      (await em.findOneOrFail(Account, 1)).balance++;
    });
    expect([ran, armed, (await balances())[0]]).toEqual([runs, false, 101]);
    await own.close();
    await proxy.close();
  });

  test("a swallowed error is not committed", async () => {
    const swallowing = hf.transaction(async ({ client: em }) => {
      await em.nativeUpdate(Account, { id: 1 }, { balance: 0 });
      await em.insert(Account, { id: 1, ownerName: "twice", balance: 0 }).catch(() => {});
    });
    await expect(swallowing).rejects.toThrow(TransactionAbortedError);
    expect(await balances()).toEqual([100, 100, 100, 100]);
  });

  test("a subscriber that fails after COMMIT does not run the body again", async () => {
    const own = await open({
      subscribers: [
        {
          afterTransactionCommit: () => {
            throw Object.assign(new Error("a deadlock, somewhere else"), { code: "40P01" });
          },
        },
      ],
    });
    let ran = 0;
    const error = await caught(
      holdfast(fromMikroOrm(own)).transaction(async ({ client: em }) => {
        ran++;
        (await em.findOneOrFail(Account, 1)).balance++;
      }),
    );
    expect(error).toBeInstanceOf(UsageError);
    expect([ran, (await balances())[0]]).toEqual([1, 101]);
    await own.close();
  });

  test("a subscriber that asks the database before BEGIN does not lead us to its connection", async () => {
    const own = await open({
      subscribers: [{ beforeTransactionStart: async () => void (await own.em.fork().execute("SELECT 1")) }],
    });
    await holdfast(fromMikroOrm(own)).transaction({ lock: key("subscribed") }, async (tx) => {
      const [[a], [b]] = await Promise.all([
        tx.query(sql`SELECT pg_backend_pid() AS pid`),
        tx.client.execute("SELECT pg_backend_pid() AS pid"),
      ]);
      expect(a).toEqual(b);
    });
    await own.close();
  });
});

describe("join", () => {
  test("takes the EntityManager of a transaction", async () => {
    await orm.em.transactional(async (em) => {
      await hf.join(em).lock(key("joined"));
      await hf.join(orm.em).lock(key("joined"));
      expect(await hf.tryLock(key("joined"), async () => 1)).toEqual({ acquired: false });
    });
    const em = orm.em.fork();
    await em.begin();
    await hf.join(em).lock(key("joined"));
    await em.rollback();
    expect(() => hf.join(em)).toThrow(/no transaction/);
  });

  test("refuses what is no transaction, and says what to pass", async () => {
    expect(() => hf.join(orm.em)).toThrow(/em\.transactional/);
    expect(() => hf.join(orm as never)).toThrow(NotInTransactionError);
    let kept!: MikroORM["em"];
    await orm.em.transactional(async (em) => void (kept = em));
    expect(() => hf.join(kept)).toThrow(/has ended/);
    const other = await open();
    await other.em.transactional(async (em) => {
      expect(() => hf.join(em)).toThrow(/another MikroORM/);
    });
    await other.close();
  });
});

describe("an EntityManager from outside, inside of a transaction", () => {
  test.each<[string, (outer: MikroORM["em"]) => Promise<unknown>]>([
    ["find", (outer) => outer.find(Account, {})],
    ["execute", (outer) => outer.execute("SELECT 1")],
    ["a builder", (outer) => outer.qb(Account).getResultList()],
    [
      "Kysely",
      (outer) => outer.getKysely<{ account: { id: number } }>().selectFrom("account").selectAll().execute(),
    ],
    ["a transaction", (outer) => outer.transactional((em) => em.find(Account, {}))],
    [
      "flush",
      async (outer) => {
        outer.create(Account, {
          id: Math.floor(Math.random() * 1e9),
          ownerName: String(Math.random()),
          balance: 1,
        });
        await outer.flush();
      },
    ],
  ])("is refused with both places: %s", async (_, use) => {
    const strict = holdfast(fromMikroOrm(orm), { wrongConnection: "throw" });
    const outer = orm.em.fork();
    const error = await caught(
      strict.transaction(async () => {
        await use(outer);
      }),
    );
    expect(error).toBeInstanceOf(WrongConnectionError);
    expect((error as Error).message.match(/mikro-orm\.test\.ts:\d+/g)).toHaveLength(2);
    await strict.transaction(async (tx) => {
      await tx.client.find(Account, {});
      await tx.client.transactional((inner) => inner.find(Account, {}));
      await strict.outside(() => use(orm.em.fork()));
    });
    await use(orm.em.fork());
    await strict.close();
  });

  test("fails at once if there is no second connection to wait for", async () => {
    const small = await open({ pool: { min: 0, max: 1 } });
    const off = holdfast(fromMikroOrm(small), { wrongConnection: "off" });
    const outer = small.em.fork();
    await expect(off.transaction(() => outer.find(Account, {}))).rejects.toThrow(PoolExhaustedError);
    expect(await off.transaction(({ client }) => client.count(Account))).toBe(4);
    await small.close();
  });
});

describe("rows of a query", () => {
  const last = () => statements.findLast((text) => text.includes("select")) ?? "";
  const busy = (id: number) =>
    caught(psql.query(`SELECT FROM account WHERE id = ${id} FOR UPDATE NOWAIT`)).then(
      (error) => (error as { code?: string } | undefined)?.code,
    );

  test("are locked as was asked for, until the end, and are entities", async () => {
    for (const [strength, clause] of [
      ["update", "for update"],
      ["share", "for share"],
    ] as const) {
      await hf.transaction(async (tx) => {
        const query = tx.client.qb(Account).where({ id: 2 });
        const found: Account[] = await tx.rows(query, { for: strength });
        expect(found).toEqual([expect.objectContaining({ id: 2, ownerName: "o2", balance: 100 })]);
        expect(found[0]).toBe(await tx.client.findOne(Account, 2));
        expect(last()).toMatch(new RegExp(`${clause}(?!.*(skip|nowait))`));
        expect([await busy(1), await busy(2)]).toEqual([undefined, "55P03"]);
        await tx.rows(query, { for: strength, wait: "skip" });
        expect(last()).toContain(`${clause} skip locked`);
        await tx.rows(query, { for: strength, wait: "nowait" });
        expect(last()).toContain(`${clause} nowait`);
        // The caller's own query is left as it was.
        expect(query.getQuery()).not.toMatch(/for (update|share)/);
      });
      expect(await busy(2)).toBeUndefined();
    }
  });

  test("are as they are now, although they were read before", async () => {
    await hf.transaction(async (tx) => {
      const before = await tx.client.findOneOrFail(Account, 1);
      await psql.query("UPDATE account SET balance = 42 WHERE id = 1");
      const [now] = await tx.rows(tx.client.qb(Account).where({ id: 1 }));
      expect([now === before, before.balance]).toEqual([true, 42]);
      before.balance++;
    });
    expect((await balances())[0]).toBe(43);
  });

  test("of a query that was made outside are locked by the transaction, and belong to it", async () => {
    const query = orm.em.fork().qb(Account).where({ id: 3 }).cache(60_000);
    await hf.transaction(async (tx) => {
      await tx.client.nativeUpdate(Account, { id: 3 }, { balance: 1 });
      const [found] = await tx.rows(query);
      expect(found).toMatchObject({ balance: 1 });
      expect(await busy(3)).toBe("55P03");
      if (found) found.balance = 2;
    });
    expect((await balances())[2]).toBe(2);
  });

  test("somebody else has locked are skipped or refused", async () => {
    await psql.query("BEGIN; SELECT FROM account WHERE id = 1 FOR UPDATE");
    try {
      await hf.transaction(async (tx) => {
        const query = tx.client.qb(Account).orderBy({ id: "asc" }).limit(2);
        expect((await tx.rows(query, { wait: "skip" })).map(({ id }) => id)).toEqual([2, 3]);
        const refused = tx.transaction((inner) => inner.rows(query, { wait: "nowait" }));
        await expect(refused).rejects.toThrow(LockNotAvailableError);
      });
    } finally {
      await psql.query("ROLLBACK");
    }
  });

  test("with relations", async () => {
    await psql.query("INSERT INTO entry VALUES (7, 1)");
    await hf.transaction(async (tx) => {
      const query = tx.client.qb(Account, "a").leftJoinAndSelect("a.entries", "e").where({ id: 1 });
      const [one] = await tx.rows(query);
      expect(one?.entries.getItems().map(({ id }) => id)).toEqual([7]);
      expect(last()).toContain('for update of "a"');
    });
  });

  test("are those of a SELECT, and of a strength that MikroORM can say", async () => {
    const { locking } = fromMikroOrm(orm);
    const lock = { strength: "update", wait: "bounded" } as const;
    await orm.em.transactional(async (em) => {
      expect(() => locking?.(em, em.qb(Account).update({ balance: 1 }), lock)).toThrow(UsageError);
      expect(() => locking?.(em, em.qb(Account).count(), lock)).toThrow(UsageError);
      for (const strength of ["key share", "no key update"] as const)
        expect(() => locking?.(em, em.qb(Account), { ...lock, strength })).toThrow(UnsupportedError);
      for (const nothing of [undefined, null, 1, {}, orm, em, Account])
        expect(locking?.(em, nothing, lock)).toBeUndefined();
    });
  });
});

test("what is not reached is refused, with a word about what to do", async () => {
  expect(() => fromMikroOrm({} as never)).toThrow(UsageError);
  const none = await open({ disableTransactions: true });
  await expect(holdfast(fromMikroOrm(none)).transaction(async () => 1)).rejects.toThrow(/disabled/);
  await none.close();
});
