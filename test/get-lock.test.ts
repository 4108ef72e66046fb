/** `key.getLock`: locks that other code takes by GET_LOCK, on MySQL and MariaDB. */
import { type Holdfast, type Key, holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { type Pool, type PoolConnection, type RowDataPacket, createPool } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { backendNamed } from "./backends.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { missing, placeFor } from "./harness/places.ts";

test("a key is the name as it is written", () => {
  expect(key.getLock("Nightly Report")).toMatchObject({
    name: "GET_LOCK Nightly Report",
    id: "gNightly Report",
    form: { kind: "getLock", lock: "Nightly Report" },
  });
  expect(() => key.getLock("")).toThrow("empty");
  expect(() => key.getLock("x".repeat(65))).toThrow("at most 64 characters");
  expect(() => key.getLock("a\0b")).toThrow("NUL");
});

describe.each(["mariadb", "mysql"] as const)("%s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  let old: PoolConnection;
  let hf: Holdfast<PoolConnection>;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 8 });
    hf = holdfast(fromMysql2(pool));
    await hf.migrate();
    await pool.query("CREATE TABLE effect (n int NOT NULL) ENGINE=InnoDB");
    old = await pool.getConnection();
  });

  beforeEach(({ skip }) => skip(why !== undefined, why));

  afterAll(async () => {
    if (why !== undefined) return;
    old.release();
    await hf.close();
    await pool.end();
    await database.drop();
  });

  /** As code that knows nothing of us does it. */
  async function ask(question: string): Promise<unknown> {
    const [rows] = await old.query<RowDataPacket[]>(`SELECT ${question} AS answer`);
    return rows[0]?.["answer"];
  }

  const name = "app's nightly";
  const quoted = "'app''s nightly'";

  test("hf.hold and the older code exclude each other", async () => {
    const held = await hf.hold(key.getLock(name));
    expect(await ask(`GET_LOCK(${quoted}, 0)`)).toBe(0);
    await held.release();
    expect(await ask(`GET_LOCK(${quoted}, 0)`)).toBe(1);
    await expect(hf.hold(key.getLock(name), { wait: "nowait" })).rejects.toMatchObject({
      code: "HF_LOCK_NOT_AVAILABLE",
    });
    const error: unknown = await hf.hold(key.getLock(name), { wait: 300 }).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: "HF_LOCK_TIMEOUT", holders: [{ pid: old.threadId }] });
    expect(await ask(`RELEASE_LOCK(${quoted})`)).toBe(1);
  });

  test("a transaction has it from before its beginning until after COMMIT", async () => {
    const both = [key("ours"), key.getLock(name)];
    await hf.transaction({ lock: both }, async (tx) => {
      await tx.client.query("INSERT INTO effect VALUES (1)");
      expect(await ask(`GET_LOCK(${quoted}, 0)`)).toBe(0);
      expect(tx.holds(key.getLock(name))).toBe(true);
    });
    expect(await ask(`IS_FREE_LOCK(${quoted})`)).toBe(1);
    const failing = hf.transaction({ lock: both }, () => Promise.reject(new Error("on purpose")));
    await expect(failing).rejects.toThrow("on purpose");
    expect(await ask(`IS_FREE_LOCK(${quoted})`)).toBe(1);
  });

  test("it is given back if another lock is not to be had, or the transaction was ended by the server", async () => {
    await hf.transaction({ lock: key("taken") }, async () => {
      const both = [key("taken"), key.getLock(name)];
      const refused = await hf.outside(() => hf.tryLock(both, async () => {}));
      expect(refused).toEqual({ acquired: false });
    });
    expect(await ask(`IS_FREE_LOCK(${quoted})`)).toBe(1);
    const ended = hf.transaction({ lock: [key("ended"), key.getLock(name)] }, (tx) =>
      tx.client.query("CREATE TABLE IF NOT EXISTS another (n int)"),
    );
    await expect(ended).rejects.toMatchObject({ code: "HF_TRANSACTION_ABORTED" });
    expect(await ask(`IS_FREE_LOCK(${quoted})`)).toBe(1);
  });

  test("whether case matters is up to the server, also for one who takes both", async () => {
    const both = [key.getLock("case"), key.getLock("CASE")];
    await hf.transaction({ lock: both[0] as Key }, async () => {
      const other = ask("GET_LOCK('CASE', 0)");
      expect(await other).toBe(server === "mysql" ? 0 : 1);
      if (server === "mariadb") await ask("RELEASE_LOCK('CASE')");
    });
    await hf.transaction({ lock: both }, async () => {
      for (const each of ["case", "CASE"]) expect(await ask(`GET_LOCK('${each}', 0)`)).toBe(0);
    });
    for (const each of ["case", "CASE"]) expect(await ask(`IS_FREE_LOCK('${each}')`)).toBe(1);
  });

  test("an abort while it is waited for leaves nothing behind", async () => {
    expect(await ask(`GET_LOCK(${quoted}, 0)`)).toBe(1);
    const waiting = hf.transaction(
      { lock: key.getLock(name), wait: 5000, signal: AbortSignal.timeout(100) },
      async () => {},
    );
    await expect(waiting).rejects.toThrow();
    expect(await ask(`RELEASE_LOCK(${quoted})`)).toBe(1);
    expect(await ask(`IS_FREE_LOCK(${quoted})`)).toBe(1);
  });

  test("a check under it is exact, with the older code at it too", async () => {
    await pool.query("DELETE FROM effect");
    const limit = 10;
    const add = async (on: PoolConnection) => {
      const [rows] = await on.query<RowDataPacket[]>("SELECT count(*) AS n FROM effect");
      if (Number(rows[0]?.["n"]) < limit) await on.query("INSERT INTO effect VALUES (1)");
    };
    const ours = async () => {
      for (let i = 0; i < 8; i++)
        await hf.transaction({ lock: key.getLock(name), wait: 20_000 }, (tx) => add(tx.client));
    };
    const theirs = async () => {
      for (let i = 0; i < 8; i++) {
        expect(await ask(`GET_LOCK(${quoted}, 20)`)).toBe(1);
        await add(old);
        await ask(`RELEASE_LOCK(${quoted})`);
      }
    };
    await Promise.all([ours(), ours(), ours(), theirs()]);
    const [rows] = await pool.query<RowDataPacket[]>("SELECT count(*) AS n FROM effect");
    expect(Number(rows[0]?.["n"])).toBe(limit);
  });

  test("in the middle of a transaction it is refused, with what to do instead", async () => {
    const lock = key.getLock(name);
    await hf.transaction(async (tx) => {
      await expect(tx.lock(lock)).rejects.toThrow(/must be there before a transaction begins.*hf\.hold/);
    });
    const connection = await pool.getConnection();
    await connection.query("START TRANSACTION");
    await expect(hf.join(connection).lock(lock)).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
    await connection.query("ROLLBACK");
    connection.release();
  });
});

test.for(["pg", "better-sqlite3", "duckdb", "Knex on MariaDB", "Prisma on MariaDB"])(
  "%s: refused, and why",
  async (which, { skip }) => {
    const backend = backendNamed(which);
    skip(missing(backend) !== undefined, missing(backend));
    const place = await placeFor(backend);
    const site = await backend.open(place.url);
    const hf = holdfast(site.database);
    try {
      const running = hf.transaction({ lock: key.getLock("x") }, async () => {});
      await expect(running).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
      await expect(running).rejects.toThrow(
        backend.server === "mariadb" ? "which this client writes by itself" : "GET_LOCK on MySQL and MariaDB",
      );
    } finally {
      await hf.close();
      await site.close();
      await place.drop();
    }
  },
);
