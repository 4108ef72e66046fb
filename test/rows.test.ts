/** What row locks and table locks do on PostgreSQL beyond what every engine must: each fails if its protection is taken away. */
import {
  type Holdfast,
  LockTimeoutError,
  SerializationError,
  holdfast,
  key,
  rows,
  sql,
  versioned,
} from "holdfast";
import { fromPg } from "holdfast/pg";
import { Client, Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;
/** Somebody else, who writes SQL by hand. */
let psql: Client;

interface Account {
  id: number;
  owner: string;
  balance: number;
}

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 10 });
  hf = holdfast(fromPg(pool));
  psql = new Client({ connectionString: database.url });
  await psql.connect();
  await hf.migrate();
  await psql.query("CREATE SCHEMA shop");
  await psql.query(
    "CREATE TABLE account (id integer PRIMARY KEY, owner text NOT NULL, balance integer NOT NULL)",
  );
  await psql.query("CREATE TABLE shop.item (sku text PRIMARY KEY, stock integer NOT NULL)");
});

beforeEach(async () => {
  await psql.query(
    "TRUNCATE account; INSERT INTO account SELECT g, 'o' || g % 2, 100 FROM generate_series(1, 9) g",
  );
});

afterAll(async () => {
  await psql.end();
  await pool.end();
  await database.drop();
});

const timeoutOf = async ({ client }: { client: PoolClient }) =>
  (await client.query<{ v: string }>("SELECT current_setting('lock_timeout') AS v")).rows[0]?.v;

test("many keys of a table that the planner takes for small", async () => {
  // Of which it made a loop in a loop: 31 s for a third of these.
  await psql.query("ANALYZE account");
  await psql.query("INSERT INTO account SELECT g, 'many', 1 FROM generate_series(10, 60000) g");
  const keys = Array.from({ length: 60_000 }, (_, i) => 60_000 - i);
  const rows = await hf.transaction({ deadline: 300_000 }, (tx) =>
    tx.rows<{ id: number }>("account", keys, { wait: 100_000 }),
  );
  expect(rows.map(({ id }) => id)).toEqual(keys);
});

describe("a timeout for one call", () => {
  test("is not left to the caller's own statements, whatever was found", async () => {
    await hf.transaction(async (tx) => {
      await tx.client.query("SET LOCAL lock_timeout = '7s'");
      const still = async (what: string) => expect(await timeoutOf(tx), what).toBe("7s");
      await tx.rows("account", [1], { wait: 300 });
      await still("one row");
      await tx.rows("account", [99], { wait: 300, missing: "report" });
      await still("no row");
      await tx.rows("account", [3, 1], { wait: 300 });
      await still("two rows");
      await tx.rows("account", [98, 99], { wait: 300, missing: "report" });
      await still("none of two rows");
      await tx.rows("account", { owner: "o1" }, { wait: 300 });
      await still("a condition");
      await tx.rows("account", { owner: "nobody" }, { wait: 300, orderBy: "id", limit: 2 });
      await still("a condition that nothing fulfils");
      await tx.rows("account", { owner: "o1" }, { wait: 300, orderBy: { balance: "desc" }, limit: 2 });
      await still("some of a condition");
      await tx.table("account", "share row exclusive", { wait: 300 });
      await still("a table");
      await tx.lockAll([key("timeouts"), rows("account", [1, 2]), rows("shop.item", [])], { wait: 300 });
      await still("all of that");
    });
  });

  test("is over by itself, and the savepoint around it keeps the caller's own", async () => {
    await psql.query("BEGIN; SELECT FROM account WHERE id IN (2, 5) FOR UPDATE");
    try {
      await hf.transaction(async (tx) => {
        await tx.client.query("SET LOCAL lock_timeout = '7s'");
        for (const which of [[2], [1, 2], { owner: "o0" }] as const) {
          const waiting = tx.transaction((inner) => inner.rows("account", which, { wait: 100 }));
          const error = await waiting.then(
            () => undefined,
            (e: unknown) => e,
          );
          expect(error).toBeInstanceOf(LockTimeoutError);
          expect((error as Error).message).toMatch(/Held by pid \d+/);
          expect(await timeoutOf(tx)).toBe("7s");
        }
        await expect(tx.table("account", "exclusive", { wait: 100 })).rejects.toThrow(LockTimeoutError);
        expect(await timeoutOf(tx)).toBe("7s");
      });
    } finally {
      await psql.query("ROLLBACK");
    }
  });
});

describe("the order", () => {
  /** Waits until somebody waits for psql's transaction. */
  const waiter = () =>
    eventually(async () => {
      const { rows: found } = await pool.query(
        "SELECT 1 FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT l.granted AND a.datname = current_database()",
      );
      return found.length > 0;
    });

  const free = async (id: number) =>
    (await pool.query("SELECT id FROM account WHERE id = $1 FOR UPDATE SKIP LOCKED", [id])).rowCount === 1;

  test.each<[string, (tx: Parameters<Parameters<typeof hf.transaction>[1]>[0]) => Promise<unknown>]>([
    ["keys, whatever order they are named in", (tx) => tx.rows("account", [9, 7, 5, 2])],
    ["a condition", (tx) => tx.rows("account", sql`id IN (9, 7, 5, 2)`)],
    [
      "a condition with an order of its own",
      (tx) => tx.rows("account", sql`id IN (9, 7, 5, 2)`, { orderBy: { id: "desc" }, limit: 4 }),
    ],
    ["one call for several", (tx) => tx.lockAll([rows("account", [9, 7]), rows("account", [5, 2])])],
  ])("is that of the primary key: %s", async (_, lock) => {
    await psql.query("BEGIN; SELECT FROM account WHERE id = 2 FOR UPDATE");
    const waiting = hf.transaction(lock);
    try {
      await waiter();
      // The first is waited for, so none of the later ones may be locked: somebody may hold them and wait for the first.
      expect([await free(5), await free(7), await free(9)]).toEqual([true, true, true]);
    } finally {
      await psql.query("COMMIT");
      await waiting;
    }
  });

  test("is that of the tables' names, and keys come first", async () => {
    await psql.query("INSERT INTO shop.item VALUES ('a', 1) ON CONFLICT DO NOTHING");
    const lock = key("order");
    await psql.query("BEGIN");
    await psql.query("SELECT FROM account WHERE id = 1 FOR UPDATE");
    const waiting = hf.transaction((tx) =>
      tx.lockAll([rows("shop.item", ["a"]), rows("account", [1]), lock]),
    );
    try {
      await waiter();
      const item = await pool.query("SELECT FROM shop.item WHERE sku = 'a' FOR UPDATE SKIP LOCKED");
      expect(item.rowCount).toBe(1);
      expect(await hf.tryLock(lock, async () => 1)).toEqual({ acquired: false });
    } finally {
      await psql.query("COMMIT");
      await waiting;
    }
  });
});

test("a snapshot that is older than the lock is an error, and the transaction is run again", async () => {
  let attempts = 0;
  const read = await hf.transaction({ isolation: "repeatable read" }, async (tx) => {
    attempts = tx.attempt;
    await tx.client.query("SELECT 1 FROM account");
    if (tx.attempt === 1) await psql.query("UPDATE account SET balance = 7 WHERE id = 1");
    return tx.row<Account>("account", 1);
  });
  expect([attempts, read.balance]).toEqual([2, 7]);
  const never = hf.transaction({ isolation: "repeatable read", retry: false }, async (tx) => {
    await tx.client.query("SELECT 1 FROM account");
    await psql.query("UPDATE account SET balance = balance + 1 WHERE id = 1");
    return tx.rows("account", [1, 2]);
  });
  await expect(never).rejects.toThrow(SerializationError);
});

test("columns of types that compare in a way of their own", async () => {
  await psql.query("CREATE EXTENSION IF NOT EXISTS citext");
  await psql.query("CREATE DOMAIN handle AS citext; CREATE TYPE mood AS ENUM ('calm', 'cross')");
  await psql.query(
    "CREATE TABLE feeling (who handle, nick citext, mood mood, since tstzrange, of uuid, version int NOT NULL DEFAULT 0, PRIMARY KEY (who, nick))",
  );
  await psql.query(
    "INSERT INTO feeling VALUES ('Ada', 'Countess', 'calm', '[2026-01-01,)', gen_random_uuid())",
  );
  await hf.transaction(async (tx) => {
    expect(await tx.rows("feeling", [{ who: "ADA", nick: "countess" }])).toHaveLength(1);
    const calm = { nick: ["COUNTESS"], mood: "calm", since: "[2026-01-01,)" };
    expect(await tx.rows("feeling", calm, { orderBy: "who", limit: 1 })).toHaveLength(1);
  });
  const feelings = versioned(hf, "feeling");
  expect(await feelings.update({ who: "ada", nick: "COUNTESS" }, () => ({ mood: "cross" }))).toMatchObject({
    who: "Ada",
    mood: "cross",
  });
});

test("schemas, and names that need quotes", async () => {
  await psql.query(`CREATE TABLE shop."Order Line" ("orderId" bigint, "No" smallint, "isOpen" boolean NOT NULL DEFAULT true,
    placed timestamptz NOT NULL DEFAULT '2026-01-01Z', tags text[] NOT NULL DEFAULT '{}', doc jsonb, price numeric(10,2),
    version int NOT NULL DEFAULT 0, PRIMARY KEY ("orderId", "No"))`);
  await psql.query(`INSERT INTO shop."Order Line" ("orderId", "No") VALUES (9007199254740993, 1), (2, 1)`);
  await hf.transaction(async (tx) => {
    const [big, small] = await tx.rows<{ orderId: string }>("shop.Order Line", [
      { orderId: 9007199254740993n, No: 1 } as never,
      { No: 1, orderId: 2 } as never,
    ]);
    expect([big?.orderId, small?.orderId]).toEqual(["9007199254740993", "2"]);
    const open = await tx.rows("shop.Order Line", { isOpen: true, placed: new Date("2026-01-01Z") });
    expect(open).toHaveLength(2);
    await expect(tx.rows("Order Line", [1])).rejects.toThrow(/no table Order Line/);
  });
  const lines = versioned(hf, "shop.Order Line");
  const written = await lines.update({ orderId: 2, No: 1 }, () => ({
    tags: ["a", 'b"c', "d,e", null],
    doc: { a: [1, "x'y"] },
    price: "12.50",
    isOpen: false,
    placed: new Date("2026-02-03T04:05:06Z"),
  }));
  expect(written).toMatchObject({
    tags: ["a", 'b"c', "d,e", null],
    doc: { a: [1, "x'y"] },
    price: "12.50",
    isOpen: false,
    placed: new Date("2026-02-03T04:05:06Z"),
    version: 1,
  });
  expect(await lines.update({ orderId: 2, No: 1 }, () => ({ doc: [1, 2] }))).toMatchObject({ doc: [1, 2] });
});

test("a table whose columns have changed is looked at again", async () => {
  await psql.query(
    "CREATE TABLE moving (id integer PRIMARY KEY, a text); INSERT INTO moving VALUES (1, 'x')",
  );
  await hf.transaction((tx) => tx.rows("moving", { a: "x" }));
  await psql.query("ALTER TABLE moving DROP COLUMN a, ADD COLUMN b text DEFAULT 'y'");
  await expect(hf.transaction((tx) => tx.rows("moving", { a: "x" }))).rejects.toThrow(/"?a"?/);
  expect(await hf.transaction((tx) => tx.rows("moving", { b: "y" }))).toEqual([{ id: 1, b: "y" }]);
});

test("SQL of the caller's own means the table's columns, whatever they are called", async () => {
  await psql.query(
    "CREATE TABLE odd (id integer PRIMARY KEY, before integer, now integer, k integer, l integer, t integer); INSERT INTO odd VALUES (1, 2, 3, 4, 5, 6)",
  );
  await hf.transaction(async (tx) => {
    const where = sql`before = 2 AND now = 3 AND k = 4 AND l = 5 AND t = ${6} AND id = 1`;
    expect(await tx.rows("odd", where)).toHaveLength(1);
    expect(await tx.rows("odd", where, { orderBy: ["now", "k"], limit: 1 })).toHaveLength(1);
    expect(await tx.rows("odd", where, { wait: "nowait", orderBy: "now" })).toHaveLength(1);
    expect(await tx.rows("odd", where, { wait: "skip", limit: 1 })).toHaveLength(1);
  });
});

test("rows without a primary key can be named by other columns", async () => {
  await psql.query(
    "CREATE TABLE loose (code text UNIQUE NOT NULL, n integer); INSERT INTO loose VALUES ('a', 1), ('b', 2)",
  );
  await hf.transaction(async (tx) => {
    await expect(tx.transaction((inner) => inner.rows("loose", ["a"]))).rejects.toThrow(/no primary key/);
    expect(await tx.rows("loose", ["b", "a"], { key: "code", columns: ["n"] })).toEqual([{ n: 2 }, { n: 1 }]);
  });
});

describe("types that are easily cut", () => {
  test("char(n) and bit(n) keep their length, in keys, conditions and writes", async () => {
    await psql.query(
      "CREATE TABLE country (code char(2) PRIMARY KEY, alt char(3), flags bit(4), many char(2)[], version int NOT NULL DEFAULT 0)",
    );
    await psql.query("INSERT INTO country VALUES ('D', 'D', '0001', '{}'), ('DE', 'DEU', '0101', '{}')");
    await hf.transaction(async (tx) => {
      expect(await tx.row("country", "DE")).toMatchObject({ alt: "DEU" });
      expect(await tx.rows("country", { alt: "DEU", flags: "0101" })).toHaveLength(1);
    });
    const written = await versioned(hf, "country").update("DE", () => ({
      alt: "FRA",
      flags: "1111",
      many: ["NL", "BE"],
    }));
    expect(written).toMatchObject({ alt: "FRA", flags: "1111", many: ["NL", "BE"] });
  });

  test("a Date is refused for a day, which it is not", async () => {
    await psql.query("CREATE TABLE day (d date PRIMARY KEY); INSERT INTO day VALUES ('2024-01-02')");
    await hf.transaction(async (tx) => {
      expect(await tx.rows("day", ["2024-01-02"])).toHaveLength(1);
      await expect(tx.rows("day", [new Date()])).rejects.toThrow(/pass it as text/);
    });
  });

  test("columns that a primary key only includes are not part of it", async () => {
    await psql.query(
      "CREATE TABLE inc (id integer, name text, PRIMARY KEY (id) INCLUDE (name)); INSERT INTO inc VALUES (1, 'x')",
    );
    expect(await hf.transaction((tx) => tx.row("inc", 1))).toEqual({ id: 1, name: "x" });
  });
});

describe("the bound of a wait", () => {
  test("counts for all rows together", async () => {
    await psql.query("BEGIN; SELECT FROM account WHERE id = 1 FOR UPDATE");
    const second = new Client({ connectionString: database.url });
    await second.connect();
    await second.query("BEGIN; SELECT FROM account WHERE id = 2 FOR UPDATE");
    try {
      const waiting = hf.transaction({ retry: false }, (tx) => tx.rows("account", [1, 2], { wait: 1500 }));
      const outcome = waiting.then(
        () => undefined,
        (error: unknown) => error,
      );
      await new Promise((resolve) => setTimeout(resolve, 1000));
      // The server begins to count anew for the second row.
      await psql.query("COMMIT");
      const error = await outcome;
      expect(error).toBeInstanceOf(LockTimeoutError);
    } finally {
      await second.query("ROLLBACK");
      await second.end();
      await psql.query("ROLLBACK");
    }
  });

  test("also where the whole table is locked", async () => {
    await psql.query("BEGIN; LOCK TABLE account IN EXCLUSIVE MODE");
    try {
      for (const keys of [[1], [1, 2]])
        await expect(hf.transaction((tx) => tx.rows("account", keys, { wait: 200 }))).rejects.toThrow(
          LockTimeoutError,
        );
    } finally {
      await psql.query("ROLLBACK");
    }
  });
});

test("rows named by other columns are locked in the order of the primary key all the same", async () => {
  await psql.query(
    "CREATE TABLE ord (id integer PRIMARY KEY, code text UNIQUE NOT NULL); INSERT INTO ord VALUES (1, 'c'), (2, 'b'), (3, 'a')",
  );
  await psql.query("BEGIN; SELECT FROM ord WHERE id = 2 FOR UPDATE");
  const calls = [
    hf.transaction({ retry: false }, (tx) => tx.rows("ord", [1, 2, 3])),
    hf.transaction({ retry: false }, (tx) => tx.rows("ord", ["a", "b", "c"], { key: "code" })),
  ];
  await eventually(async () => (await hf.inspect()).waiters.length >= 2);
  await psql.query("COMMIT");
  const [first, second] = await Promise.all(calls);
  expect(first?.map(({ id }) => id)).toEqual([1, 2, 3]);
  expect(second?.map(({ id }) => id)).toEqual([3, 2, 1]);
});

test("a row that its holder deleted and made anew is not missing", async () => {
  await psql.query("BEGIN; DELETE FROM account WHERE id = 4; INSERT INTO account VALUES (4, 'new', 1)");
  const one = hf.transaction((tx) => tx.row<Account>("account", 4));
  const two = hf.transaction((tx) => tx.rows<Account>("account", [3, 4]));
  await eventually(async () => (await hf.inspect()).waiters.length >= 1);
  await psql.query("COMMIT");
  expect(await one).toMatchObject({ owner: "new" });
  expect((await two).map(({ id }) => id)).toEqual([3, 4]);
});

describe("versioned", () => {
  beforeAll(async () => {
    await psql.query(
      "CREATE TABLE doc (id integer PRIMARY KEY, body text, version integer NOT NULL DEFAULT 0)",
    );
    await psql.query("INSERT INTO doc SELECT g FROM generate_series(1, 9) g");
  });

  test("belongs to the transaction that it is called in", async () => {
    const docs = versioned<{ id: number; body: string }>(hf, "doc");
    const undone = hf.transaction(async () => {
      await docs.update(1, () => ({ body: "inside" }));
      expect(await docs.read(1)).toMatchObject({ body: "inside" });
      await docs.updateAll([1, 2], () => [{ body: "again" }, { body: "too" }]);
      throw new Error("undo");
    });
    await expect(undone).rejects.toThrow("undo");
    expect(await docs.read(1)).toMatchObject({ body: null, version: 0 });
    const slow = hf.transaction(() =>
      docs.updateAfter(
        1,
        async () => 1,
        () => ({ body: "x" }),
      ),
    );
    await expect(slow).rejects.toThrow(/opens its own/);
  });

  test("waits no longer for a locked row than for any lock, ends on abort, and writes nothing later", async () => {
    const quick = holdfast(fromPg(pool), { wait: 200 });
    const impatient = versioned<{ id: number; body: string }>(quick, "doc");
    const patient = versioned<{ id: number; body: string }>(hf, "doc");
    await psql.query("BEGIN; SELECT FROM doc WHERE id = 3 FOR UPDATE");
    try {
      await expect(impatient.update(3, () => ({ body: "late" }))).rejects.toThrow(LockTimeoutError);
      const signal = AbortSignal.timeout(100);
      await expect(patient.update(3, () => ({ body: "late" }), { signal })).rejects.toMatchObject({
        name: "TimeoutError",
      });
      await quick.transaction(async (tx) => {
        const inner = tx.transaction((nested) =>
          impatient.update(3, () => ({ body: "late" }), { tx: nested }),
        );
        await expect(inner).rejects.toThrow(LockTimeoutError);
      });
      await hf.transaction(async (tx) => {
        await tx.client.query("SET LOCAL lock_timeout = '7s'");
        await patient.update(4, () => ({ body: "4" }), { tx });
        expect(await timeoutOf(tx)).toBe("7s");
      });
    } finally {
      await psql.query("COMMIT");
    }
    expect(await patient.read(3)).toMatchObject({ body: null, version: 0 });
  });

  test("a function that never ends keeps others from the row for no longer than a lock would", async () => {
    const quick = holdfast(fromPg(pool), { wait: 200 });
    const docs = versioned<{ id: number; body: string }>(quick, "doc");
    const [stuck, met] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    let runs = 0;
    const never = docs.update(7, async () => {
      // Somebody else is faster the first time, so that the second is a turn.
      if (++runs === 1) await psql.query("UPDATE doc SET version = version + 1 WHERE id = 7");
      else {
        met.resolve();
        await stuck.promise;
      }
      return { body: "late" };
    });
    await met.promise;
    const others = Array.from({ length: 5 }, (_, i) => docs.update(7, () => ({ body: `other ${i}` })));
    const gone = AbortSignal.abort(new Error("not any more"));
    await expect(docs.update(7, () => ({ body: "x" }), { signal: gone })).rejects.toThrow("not any more");
    await Promise.all(others);
    stuck.resolve();
    expect(await never).toMatchObject({ body: "late", version: 7 });
    expect(runs).toBe(3);
  });

  test("a function that writes other rows, or the same one, does not stand in its own way", async () => {
    const docs = versioned<{ id: number; body: string }>(hf, "doc");
    let runs = 0;
    const outer = docs.update(8, async () => {
      if (++runs <= 3) await docs.update(8, () => ({ body: "inner" }));
      await docs.updateAll([9, 8], ([other]) => [{ body: `${other?.body ?? ""}x` }, undefined]);
      return { body: "outer" };
    });
    expect(await outer).toMatchObject({ body: "outer", version: 4 });
    expect(await docs.read(9)).toMatchObject({ body: "xxxx" });
  });

  test("looks again at a table that has got a column", async () => {
    const docs = versioned<Record<string, unknown>>(hf, "doc");
    await docs.update(5, () => ({ body: "x" }));
    await psql.query("ALTER TABLE doc ADD COLUMN late integer");
    expect(await docs.update(5, () => ({ late: 1 }))).toMatchObject({ late: 1 });
  });

  test("refuses a version that is NULL, and a row named twice", async () => {
    await psql.query(
      "CREATE TABLE loosely (id integer PRIMARY KEY, n integer, version integer); INSERT INTO loosely VALUES (1, 0, NULL)",
    );
    await expect(versioned(hf, "loosely").update(1, () => ({ n: 1 }))).rejects.toThrow(/NULL/);
    await expect(versioned(hf, "doc").updateAll([6, 6], () => [{}, {}])).rejects.toThrow(/twice/);
  });
});

test("tables of the caller's that are called like ours are not mistaken", async () => {
  await psql.query(
    "CREATE TABLE patience (id integer PRIMARY KEY); CREATE TABLE locked (id integer PRIMARY KEY); INSERT INTO patience VALUES (1); INSERT INTO locked VALUES (1), (2)",
  );
  await hf.transaction(async (tx) => {
    expect(await tx.rows("patience", [1])).toHaveLength(1);
    expect(await tx.rows("locked", [1, 2])).toHaveLength(2);
    expect(await tx.rows("locked", sql`id IN (SELECT id FROM patience) -- only one`)).toHaveLength(1);
  });
});

test("names without a schema mean what the search path says, in one order for everybody", async () => {
  await psql.query(
    "CREATE SCHEMA ten1; CREATE SCHEMA ten2; CREATE TABLE ten1.memo (id integer PRIMARY KEY, n integer); CREATE TABLE ten2.memo (id integer PRIMARY KEY, n integer); INSERT INTO ten1.memo VALUES (1, 1); INSERT INTO ten2.memo VALUES (1, 2)",
  );
  const under = (path: string) =>
    hf.transaction(async (tx) => {
      await tx.client.query(`SET LOCAL search_path = ${path}`);
      const [one, two] = await tx.lockAll([
        rows<{ n: number }>("memo", [1]),
        rows<{ n: number }>("ten1.memo", [1]),
      ]);
      return [one[0]?.n, two[0]?.n];
    });
  expect([await under("ten1"), await under("ten2")]).toEqual([
    [1, 1],
    [2, 1],
  ]);
});

test("a refused tryLock does not undo what the caller sends meanwhile, silently", async () => {
  await psql.query("CREATE TABLE side (n integer)");
  const busy = key("busy neighbour");
  await hf.transaction({ lock: busy }, async () => {
    for (let turns = 0; turns < 8; turns++) {
      let inserted = false;
      const attempt = hf.transaction({ separate: true, retry: false }, async (tx) => {
        await Promise.all([
          tx.tryLock([busy, key("other neighbour")]),
          (async () => {
            for (let i = 0; i < turns; i++) await Promise.resolve();
            await tx.client.query("INSERT INTO side VALUES ($1)", [turns]);
            inserted = true;
          })(),
        ]);
      });
      const committed = await attempt.then(
        () => true,
        () => false,
      );
      const { rowCount } = await psql.query("SELECT FROM side WHERE n = $1", [turns]);
      expect(rowCount, `${turns} turns`).toBe(committed && inserted ? 1 : 0);
    }
  });
});

test("a server without advisory functions, or without the right to them, gets lock rows and migrates", async () => {
  const bare = await createDatabase("postgres");
  const admin = new Client({ connectionString: bare.url });
  await admin.connect();
  await admin.query(
    "CREATE ROLE holdfast_poor LOGIN PASSWORD 'poor'; GRANT ALL ON SCHEMA public TO holdfast_poor",
  );
  await admin.query(`GRANT CREATE ON DATABASE ${bare.name} TO holdfast_poor`);
  for (const name of ["pg_advisory_xact_lock(bigint)", "pg_try_advisory_xact_lock_shared(bigint)"])
    await admin.query(`REVOKE EXECUTE ON FUNCTION ${name} FROM PUBLIC`);
  const url = new URL(bare.url);
  url.username = "holdfast_poor";
  url.password = "poor";
  const own = new Pool({ connectionString: url.href });
  const poor = holdfast(fromPg(own));
  try {
    await Promise.all([poor.migrate(), holdfast(fromPg(own)).migrate()]);
    expect((await poor.capabilities()).transactionLocks).toBe("lock row");
    expect(await poor.lock(key("x"), async () => 1)).toBe(1);
  } finally {
    await own.end();
    await admin.end();
    await bare.drop();
    await psql.query("DROP ROLE holdfast_poor");
  }
});

test("a lock table that is not there says what to do", async () => {
  const bare = await createDatabase("postgres");
  const own = new Pool({ connectionString: bare.url });
  const byRows = holdfast(fromPg(own), { strategy: "lock row" });
  await expect(byRows.lock(key("x"), async () => 1)).rejects.toThrow(/holdfast\.lock.*hf\.migrate/);
  await byRows.migrate();
  expect(await byRows.lock(key("x"), async () => 1)).toBe(1);
  await expect(byRows.hold(key("x"))).rejects.toThrow(/lease/);
  expect((await byRows.capabilities()).transactionLocks).toBe("lock row");
  expect(() => holdfast(fromPg(own), { strategy: "rows" as never })).toThrow(/strategy/);
  await own.end();
  await bare.drop();
});
