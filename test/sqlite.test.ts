/** What is particular to SQLite and its clients, beyond what every backend promises. */
import { randomUUID } from "node:crypto";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { setTimeout as sleep } from "node:timers/promises";
import { type Client, createClient } from "@libsql/client";
import Sqlite from "better-sqlite3";
import { type Holdfast, fenced, holdfast, key, once, sql, versioned } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromLibsql } from "holdfast/libsql";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { execute } from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type Backend, backends } from "./backends.ts";
import { type Place, placeFor } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

const files = backends.filter(({ server }) => server === "file");
const isLibsql = ({ name }: Backend) => name.startsWith("libsql") || name === "Drizzle on SQLite";

describe.each(files)("$name", (backend: Backend) => {
  let place: Place;
  let site: Awaited<ReturnType<Backend["open"]>>;
  let hf: Holdfast<unknown>;
  /**
   * Another client of the same kind. Two different ones in one process would not see each other's locks: these belong
   * to the process, and each client brings an SQLite of its own (https://sqlite.org/howtocorrupt.html, 2.2.1).
   */
  let other: typeof site;
  const ask = (text: string) => execute(other, sql.raw(text));
  /** Runs a body while somebody else writes. */
  const during = (body: () => Promise<void>) => other.ownTransaction(body);

  beforeAll(async () => {
    place = await placeFor(backend);
    site = await backend.open(place.url);
    hf = holdfast(site.database);
    other = await backend.open(place.url);
    await hf.migrate();
    await ask("CREATE TABLE parent (id integer PRIMARY KEY, n integer CHECK (n < 100), name text UNIQUE)");
    await ask(
      "CREATE TABLE child (id integer PRIMARY KEY, parent_id integer NOT NULL REFERENCES parent (id))",
    );
    await ask(
      "CREATE TABLE kept (id text PRIMARY KEY, whatever, data blob, version integer NOT NULL DEFAULT 0)",
    );
  });
  beforeEach(async () => {
    for (const table of ["child", "parent", "kept"]) await ask(`DELETE FROM ${table}`);
  });
  afterAll(async () => {
    await other.close();
    await hf.close();
    await site.close();
    await place.drop();
  });

  const failure = async (work: Promise<unknown>) =>
    hf.classify(
      await work.then(
        () => expect.unreachable("it succeeded"),
        (error: unknown) => error,
      ),
    );
  const query = (statement: ReturnType<typeof sql>) => hf.transaction((tx) => tx.query(statement));

  test("errors are known by their codes", async () => {
    await query(sql`INSERT INTO parent VALUES (1, 1, 'a')`);
    expect(await failure(query(sql`INSERT INTO parent VALUES (1, 1, 'b')`))).toBe("unique");
    expect(await failure(query(sql`INSERT INTO parent VALUES (2, 1, 'a')`))).toBe("unique");
    expect(await failure(query(sql`INSERT INTO parent VALUES (2, 100, 'b')`))).toBe("check");
    const orphan = hf.transaction(async (tx) => {
      await tx.query(sql`PRAGMA defer_foreign_keys = 0`);
      await tx.query(sql`INSERT INTO child VALUES (1, 77)`);
    });
    // Where the client does not enforce them by itself nothing is violated.
    const [enforced] = await execute(site, sql`PRAGMA foreign_keys`);
    if (Number(enforced?.foreign_keys) === 1) expect(await failure(orphan)).toBe("foreign-key");
    else await orphan;
    const reading = hf.transaction({ readOnly: true }, (tx) => tx.query(sql`DELETE FROM parent`));
    expect(await failure(reading)).toBe("read-only");
    // None of these clients can interrupt a statement; others that share the codes may.
    for (const code of ["SQLITE_INTERRUPT", 9]) expect(hf.classify({ code })).toBe("canceled");
    for (const code of ["SQLITE_BUSY_SNAPSHOT", 517]) expect(hf.classify({ code })).toBe("serialization");
    for (const code of ["SQLITE_ERROR", 1, "toString", undefined])
      expect(hf.classify({ code })).toBe(undefined);
  });

  test("a busy file does not say that a key is taken", async () => {
    const lock = key("busy");
    const enter = async () => expect.unreachable("entered");
    const busy = { code: "HF_FILE_BUSY", retryable: true };
    await during(async () => {
      expect(await failure(hf.transaction({ wait: 30 }, enter))).toBe("lock-timeout");
      for (const call of [
        () => hf.transaction({ lock, wait: 30 }, enter),
        () => hf.tryLock(lock, enter),
        () => hf.lease(lock, { wait: 30 }),
      ])
        await expect<Promise<unknown>>(call()).rejects.toMatchObject(busy);
    });
    expect(await hf.tryLock(lock, async () => 1)).toEqual({ acquired: true, value: 1 });
  });

  test("a key that the writer holds is taken", async () => {
    const theirs = holdfast(other.database);
    const refused = async (lock: ReturnType<typeof key>) => {
      expect(await theirs.tryLock(lock, async () => {})).toEqual({ acquired: false });
      const waiting = theirs.transaction({ lock, wait: 30 }, async () => {});
      await expect(waiting).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
    };
    await hf.transaction({ lock: key("held") }, async (tx) => {
      await refused(key("held"));
      await tx.lock(key("also held"));
      await refused(key("also held"));
      const unrelated = theirs.transaction({ lock: key("not held"), wait: 30 }, async () => {});
      await expect(unrelated).rejects.toMatchObject({ code: "HF_FILE_BUSY" });
    });
    await during(async () => {
      const over = hf.transaction({ lock: key("held"), wait: 30 }, async () => {});
      await expect(over).rejects.toMatchObject({ code: "HF_FILE_BUSY" });
    });
    // Recorded by a transaction that relies on it, whoever waits finds it taken although its time is over.
    const lease = await hf.lease(key("fenced"), { ttl: 100, renew: false });
    await hf.transaction(async (tx) => {
      await fenced(tx, lease);
      await eventually(() => Date.now() > lease.until.getTime());
      expect(await theirs.lease(key("fenced"), { wait: "skip" })).toBe(undefined);
    });
    await theirs.close();
  });

  test("row and table locks are the write lock: refused where it is not held", async () => {
    await query(sql`INSERT INTO parent VALUES (1, 1, 'a')`);
    const reading = hf.transaction({ readOnly: true }, (tx) => tx.rows("parent", [1]));
    await expect(reading).rejects.toMatchObject({ code: "HF_USAGE" });
    await hf.transaction(async (tx) => {
      for (const strength of ["update", "no key update", "share", "key share"] as const)
        for (const wait of [10, "nowait", "skip"] as const)
          expect(await tx.rows("parent", [1], { for: strength, wait })).toHaveLength(1);
      const unrelated = { lock: key("unrelated"), wait: 20 };
      const theirs = holdfast(other.database).transaction(unrelated, async () => {});
      await expect(theirs).rejects.toMatchObject({ code: "HF_FILE_BUSY" });
      await tx.table("parent", "exclusive", { wait: "nowait" });
      await expect(tx.table("parent", "access exclusive")).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
      await expect(tx.table("nowhere", "exclusive")).rejects.toThrow(/nowhere/);
    });
  });

  test("values come back as they went in, whole numbers as integers", async () => {
    const rows = versioned<Record<string, unknown>>(hf, "kept");
    await query(sql`INSERT INTO kept (id, whatever) VALUES (${7}, ${1})`);
    // A number that names a row of a text column means its digits, not "7.0".
    expect(await ask("SELECT id, typeof(whatever) AS type FROM kept")).toEqual([
      { id: "7", type: "integer" },
    ]);
    for (const [value, kept] of [
      [2 ** 40, 2 ** 40],
      [1.5, 1.5],
      [true, 1],
      [new Date(0), "1970-01-01T00:00:00.000Z"],
      [{ a: [1, "it's"] }, '{"a":[1,"it\'s"]}'],
      [12n, 12],
      // libSQL reads text up to its first NUL.
      ...(isLibsql(backend) ? [] : [["\0 😀", "\0 😀"]]),
      [null, null],
    ]) {
      await rows.update(7, () => ({ whatever: value }));
      expect(await ask("SELECT whatever FROM kept")).toEqual([{ whatever: kept }]);
    }
    await rows.update("7", () => ({ data: Uint8Array.from([0, 1, 255]) }));
    expect(await ask("SELECT hex(data) AS hex FROM kept")).toEqual([{ hex: "0001FF" }]);
    const keys = await hf.transaction((tx) => tx.rows("kept", [7, "7"]));
    expect(keys).toHaveLength(2);
    // More than one statement may hold.
    const many = Array.from({ length: 2500 }, (_, i) => `k${i}`);
    await ask(
      "WITH RECURSIVE c (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM c WHERE i < 2499) INSERT INTO kept (id) SELECT 'k' || i FROM c",
    );
    const found = await hf.transaction((tx) => tx.rows<{ id: string }>("kept", many.toReversed()));
    expect(found.map(({ id }) => id)).toEqual(many.toReversed());
  });

  test("a lease is taken over while another one writes, and fences grow although all rows are deleted", async () => {
    const lease = await hf.lease(key("grow"), { ttl: 300, renew: false });
    await ask("DELETE FROM holdfast_lease");
    await ask("DELETE FROM holdfast_resource");
    await expect(hf.transaction((tx) => fenced(tx, lease))).rejects.toMatchObject({ code: "HF_STALE_FENCE" });
    const next = await hf.lease(key("grow"), { wait: "nowait" });
    expect(next.fence).toBeGreaterThan(lease.fence);
    // A writer that takes long does not make it last shorter: the renewal comes when it can.
    let renewing: Promise<void> | undefined;
    await during(async () => {
      renewing = next.renew(60_000);
      await new Promise((resolve) => setTimeout(resolve, 400));
      expect(await hf.leases(key("grow"))).toHaveLength(1);
    });
    await renewing;
    await next.release();
  });

  test("who holds what: leases by name, the writer only as there being one", async () => {
    const lease = await hf.lease(key("seen"), { holder: "me" });
    expect((await hf.inspect()).holders).toMatchObject([
      { kind: "lease", name: "seen", granted: true, session: { id: "me" } },
    ]);
    await during(async () => {
      const { holders } = await hf.inspect();
      expect(holders.map(({ kind }) => kind)).toEqual(["lease", "database"]);
    });
    await lease.release();
  });

  test("a savepoint outside of a transaction, which SQLite would begin with it, is refused", async () => {
    await site.withIdle(async (native) => {
      const nested = hf.join(native).transaction(async () => expect.unreachable("entered"));
      await expect(nested).rejects.toMatchObject({ code: "HF_NOT_IN_TRANSACTION" });
    });
  });

  test("tables that are missing are named, with what to do", async () => {
    const empty = await placeFor(backend);
    const fresh = await backend.open(empty.url);
    const none = holdfast(fresh.database);
    try {
      await expect(none.lease(key("x"))).rejects.toMatchObject({ code: "HF_SCHEMA_MISSING" });
      await expect(once(none, "x", async () => {})).rejects.toThrow(/holdfast_once .*hf\.migrate/);
      await expect(holdfast(fresh.database, { strategy: "lock row" }).capabilities()).rejects.toMatchObject({
        code: "HF_UNSUPPORTED",
      });
    } finally {
      await none.close();
      await fresh.close();
      await empty.drop();
    }
  });
});

describe("in memory", () => {
  let folder: string;
  beforeAll(async () => void (folder = await mkdtemp(join(tmpdir(), "holdfast-apart-"))));
  afterAll(() => rm(folder, { recursive: true, force: true }));

  test("node:sqlite and libSQL with one connection", async () => {
    const client = createClient({ url: ":memory:" });
    for (const hf of [
      holdfast(fromNodeSqlite(new DatabaseSync(":memory:"))),
      holdfast(fromLibsql(client, { connections: 1 })),
    ] as Holdfast<unknown>[]) {
      await hf.migrate();
      const lease = await hf.lease(key("memory"));
      let inside = 0;
      const turn = () =>
        hf.transaction({ lock: key("a") }, async (tx) => {
          expect(++inside).toBe(1);
          await fenced(tx, lease);
          inside--;
        });
      await Promise.all([turn(), turn(), turn()]);
      await lease.release();
    }
    client.close();
  });

  test.each<[string, () => Holdfast<never>]>([
    ["node:sqlite", () => holdfast(fromNodeSqlite(() => new DatabaseSync(":memory:"))) as Holdfast<never>],
    ["node:sqlite, no name", () => holdfast(fromNodeSqlite(() => new DatabaseSync(""))) as Holdfast<never>],
    ["better-sqlite3", () => holdfast(fromBetterSqlite3(() => new Sqlite(":memory:"))) as Holdfast<never>],
    ["better-sqlite3, no name", () => holdfast(fromBetterSqlite3(() => new Sqlite(""))) as Holdfast<never>],
    [
      "node:sqlite, another file each time",
      () => holdfast(fromNodeSqlite(() => new DatabaseSync(join(folder, randomUUID())))) as Holdfast<never>,
    ],
  ])("%s: handles that each have a database of their own are refused", async (_, open) => {
    await using hf = open();
    let inside = 0;
    const enter = () =>
      hf.transaction({ lock: key("a") }, async () => {
        inside++;
        await sleep(20);
      });
    const outcomes = await Promise.allSettled([enter(), enter()]);
    const refused = outcomes.flatMap((each) => (each.status === "rejected" ? [each.reason as unknown] : []));
    expect(inside + refused.length).toBe(2);
    expect(inside).toBeLessThan(2);
    for (const error of refused)
      expect(error).toMatchObject({
        code: "HF_UNSUPPORTED",
        message: expect.stringContaining("a database of its own") as string,
      });
  });

  test("libSQL without having been told says what to do", async () => {
    const client = createClient({ url: ":memory:" });
    const hf = holdfast(fromLibsql(client));
    await hf.transaction(() =>
      expect(hf.transaction({ separate: true }, async () => {})).rejects.toThrow(/connections: 1/),
    );
    client.close();
  });
});

describe("libSQL: a file that is busy", () => {
  let folder: string;
  let client: Client;
  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-libsql-"));
    client = createClient({ url: `file:${join(folder, "test.db")}`, concurrency: 2 });
    await client.execute("PRAGMA journal_mode = WAL");
    await client.execute("CREATE TABLE t (n integer)");
  });
  afterAll(async () => {
    client.close();
    await rm(folder, { recursive: true, force: true });
  });

  // https://github.com/tursodatabase/libsql-client-ts/issues/352
  test("does not leave a connection behind on which nothing can be committed", async () => {
    const hf = holdfast(fromLibsql(client, { connections: 2 }));
    const other = createClient({ url: `file:${join(folder, "test.db")}` });
    const writing = await other.transaction("write");
    for (let i = 0; i < 5; i++)
      await expect(hf.transaction({ lock: key("x"), wait: 20 }, async () => {})).rejects.toMatchObject({
        code: "HF_FILE_BUSY",
      });
    await writing.commit();
    for (let i = 0; i < 5; i++) await hf.transaction((tx) => tx.client.execute("INSERT INTO t VALUES (1)"));
    expect((await other.execute("SELECT count(*) AS n FROM t")).rows[0]?.n).toBe(5);
    other.close();
  });

  test("a transaction of the caller's that is deferred is refused by join", async () => {
    const hf = holdfast(fromLibsql(client));
    const tx = await client.transaction("deferred");
    await expect(hf.join(tx).lock(key("x"))).rejects.toThrow(/BEGIN IMMEDIATE/);
    await tx.rollback();
    const writing = await client.transaction("write");
    await hf.join(writing).lock(key("x"));
    await writing.commit();
    await expect(hf.join(writing).lock(key("x"))).rejects.toMatchObject({ code: "HF_NOT_IN_TRANSACTION" });
  });
});

test("node:sqlite before 22.16 does not tell whether it is in a transaction: found out by trying", async () => {
  class Older extends DatabaseSync {
    // @ts-expect-error as it was
    override get isTransaction(): undefined {
      return undefined;
    }
    override prepare(text: string) {
      return Object.defineProperty(super.prepare(text), "columns", { value: undefined });
    }
  }
  const db = new Older(":memory:");
  const hf = holdfast(fromNodeSqlite(db as never));
  await hf.transaction((tx) => tx.query(sql`CREATE TABLE t (n integer)`));
  await hf.transaction((tx) => tx.query(sql`INSERT INTO t VALUES (1)`));
  db.exec("BEGIN IMMEDIATE");
  await expect(hf.transaction(async () => {})).rejects.toMatchObject({ code: "HF_USAGE" });
  await hf.join(db as never).lock(key("x"));
  db.exec("ROLLBACK");
  await eventually(async () => (await hf.transaction((tx) => tx.query(sql`SELECT n FROM t`))).length === 1);
  db.close();
});

// libSQL does not end a statement that failed, so its connection keeps the old snapshot:
// https://github.com/tursodatabase/libsql-client-ts/issues/352
test.for(files.filter((backend) => !isLibsql(backend)))(
  "a snapshot that is too old is run again: $name",
  async (backend) => {
    const place = await placeFor(backend);
    const [site, other] = [await backend.open(place.url), await backend.open(place.url)];
    const hf = holdfast(site.database);
    try {
      await execute(other, sql`CREATE TABLE parent (id integer PRIMARY KEY, n integer)`);
      let runs = 0;
      // Read only means deferred: what it writes all the same meets a snapshot that is too old, the first time.
      await hf.transaction({ readOnly: true }, async (tx) => {
        await tx.query(sql`SELECT count(*) FROM parent`);
        if (++runs === 1) await execute(other, sql`INSERT INTO parent VALUES (5, 5)`);
        await tx.query(sql`PRAGMA query_only = 0`);
        await tx.query(sql`UPDATE parent SET n = n + 1 RETURNING n`);
      });
      expect([runs, await execute(other, sql`SELECT n FROM parent`)]).toEqual([2, [{ n: 6 }]]);
    } finally {
      await hf.close();
      await other.close();
      await site.close();
      await place.drop();
    }
  },
);

describe("one handle for everybody", () => {
  let folder: string;
  let db: DatabaseSync;
  let hf: Holdfast<DatabaseSync>;
  beforeEach(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-"));
    db = new DatabaseSync(join(folder, "db"));
    db.exec("PRAGMA journal_mode = DELETE; CREATE TABLE t (n integer)");
    hf = holdfast(fromNodeSqlite(db));
    await hf.migrate();
    return async () => {
      await hf.close();
      db.close();
      await rm(folder, { recursive: true });
    };
  });

  test("what was given up does not end the transaction of whoever has the handle next", async () => {
    const lease = await hf.lease(key("a"), { ttl: 60_000, renew: false });
    const reader = new DatabaseSync(join(folder, "db"));
    reader.exec("BEGIN");
    reader.prepare("SELECT * FROM t").all();
    // Its COMMIT waits for the reader, for longer than it is waited for.
    const released = lease.release().catch((error: unknown) => error);
    await hf.transaction(async (tx) => {
      await sleep(300);
      expect(db.isTransaction).toBe(true);
      tx.client.exec("INSERT INTO t VALUES (1)");
      reader.exec("ROLLBACK");
      await sleep(300);
      expect(db.isTransaction).toBe(true);
    });
    await released;
    reader.close();
    expect(db.prepare("SELECT n FROM t").all()).toEqual([{ n: 1 }]);
  });

  test("a renewal is not written into a transaction of the caller's own, which may be rolled back", async () => {
    const until = () => Number(db.prepare("SELECT until FROM holdfast_lease").get()?.["until"]);
    const lease = await hf.lease(key("a"), { ttl: 20_000, renew: false });
    const before = until();
    db.exec("BEGIN IMMEDIATE");
    const renewed = lease.renew();
    await sleep(200);
    db.exec("ROLLBACK");
    await renewed;
    expect(until()).toBeGreaterThan(before);
    await lease.release();
  });
});
