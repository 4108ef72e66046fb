/** The traps that code like this falls into on PostgreSQL, one test each: it fails if the protection is taken away. */
import { chmod, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { startPostgres } from "@holdfast/cli";
import {
  type Capabilities,
  type Database,
  type Holdfast,
  LockTimeoutError,
  type SqlConnection,
  holdfast,
  key,
  shared,
  sql,
} from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { fromPrisma } from "holdfast/prisma";
import { PrismaPg } from "@prisma/adapter-pg";
import { Client, Pool, type PoolClient } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { PrismaClient } from "./generated/prisma/client.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;
/** A session of its own, as psql would be. */
let psql: Client;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 10, application_name: "shop" });
  pool.on("error", () => {});
  hf = holdfast(fromPg(pool));
  psql = new Client({ connectionString: database.url });
  await psql.connect();
  await hf.migrate();
  await psql.query("CREATE TABLE quota (n integer NOT NULL)");
});

afterAll(async () => {
  await psql.end();
  await pool.end();
  await database.drop();
});

const advisory = async () =>
  Number(
    (
      await psql.query(
        "SELECT count(*) AS n FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
      )
    ).rows[0].n,
  );
const setting = async (client: PoolClient, name: string) =>
  (await client.query<{ v: string }>("SELECT current_setting($1) AS v", [name])).rows[0]?.v;

async function consume(
  limit: number,
  calls: number,
  one: (
    check: (client: { query(text: string): Promise<{ rows: { n: string }[] }> }) => Promise<boolean>,
  ) => Promise<boolean>,
): Promise<number> {
  await psql.query("DELETE FROM quota");
  const check = async (client: { query(text: string): Promise<{ rows: { n: string }[] }> }) => {
    const { rows } = await client.query("SELECT count(*) AS n FROM quota");
    if (Number(rows[0]?.n) >= limit) return false;
    await client.query("INSERT INTO quota VALUES (1)");
    return true;
  };
  await Promise.all(Array.from({ length: calls }, () => one(check)));
  return Number((await psql.query("SELECT count(*) AS n FROM quota")).rows[0].n);
}

describe("the snapshot and the lock", () => {
  test("a lock taken after an earlier read still makes the next read fresh", async () => {
    const kept = await consume(20, 60, (check) =>
      hf.transaction({ wait: 30_000 }, async (tx) => {
        await tx.client.query("SELECT count(*) FROM quota");
        await tx.lock(key("quota"), { wait: 30_000 });
        return check(tx.client);
      }),
    );
    expect(kept).toBe(20);
  });

  test("the same with the lock inside the reading statement leaks: that is why it is one of its own", async () => {
    // Not ours: the trap itself, so that the test above is known to be able to fail.
    const kept = await consume(20, 200, async () => {
      const client = await pool.connect();
      try {
        await client.query("BEGIN");
        const { rows } = await client.query(
          "SELECT pg_advisory_xact_lock(77)::text, (SELECT count(*) FROM quota) AS n",
        );
        if (Number(rows[0].n) < 20) await client.query("INSERT INTO quota VALUES (1)");
        await client.query("COMMIT");
        return true;
      } finally {
        client.release();
      }
    });
    expect(kept).toBeGreaterThan(20);
  });

  test("REPEATABLE READ with a lock is refused, opened by us or joined", async () => {
    await expect(
      hf.transaction({ isolation: "repeatable read", lock: key("rr") }, async () => {}),
    ).rejects.toMatchObject({ code: "HF_ISOLATION" });
    const client = await pool.connect();
    try {
      for (const level of ["REPEATABLE READ", "SERIALIZABLE"]) {
        await client.query(`BEGIN ISOLATION LEVEL ${level}`);
        await expect(hf.join(client).lock(key("rr"))).rejects.toMatchObject({ code: "HF_ISOLATION" });
        expect(await advisory()).toBe(0);
        await client.query("ROLLBACK");
      }
    } finally {
      client.release();
    }
  });

  test("SERIALIZABLE takes the lock before BEGIN: exact, and nobody has to try again", async () => {
    let attempts = 0;
    const kept = await consume(20, 60, (check) =>
      hf.transaction({ isolation: "serializable", lock: key("quota"), wait: 30_000 }, (tx) => {
        attempts++;
        return check(tx.client);
      }),
    );
    expect({ kept, attempts }).toEqual({ kept: 20, attempts: 60 });
    expect(await advisory()).toBe(0);
  });

  test("SERIALIZABLE: an abort in the middle of several locks leaves none of them behind", async () => {
    const [a, b] = [key("s", "a"), key("s", "b")];
    const held = await hf.hold(b);
    const running = hf.transaction(
      { isolation: "serializable", lock: [a, b], wait: 20_000, signal: AbortSignal.timeout(200) },
      async () => {},
    );
    await expect(running).rejects.toThrow();
    expect((await hf.tryLock(a, async () => 1)).acquired).toBe(true);
    await held.release();
    expect(await advisory()).toBe(0);
  });

  test("BEGIN says its isolation: the default of the database does not matter", async () => {
    const { name, url, drop } = await createDatabase("postgres");
    await psql.query(`ALTER DATABASE ${name} SET default_transaction_isolation = 'repeatable read'`);
    const own = new Pool({ connectionString: url, max: 4 });
    const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: url }) });
    try {
      const read = async (client: PoolClient) => setting(client, "transaction_isolation");
      expect(await holdfast(fromPg(own)).transaction({ lock: key("x") }, (tx) => read(tx.client))).toBe(
        "read committed",
      );
      const viaPrisma = await holdfast(fromPrisma(prisma)).transaction(
        { lock: key("x") },
        (tx) => tx.client.$queryRaw<{ v: string }[]>`SELECT current_setting('transaction_isolation') AS v`,
      );
      expect(viaPrisma).toEqual([{ v: "read committed" }]);
    } finally {
      await own.end();
      await prisma.$disconnect();
      await drop();
    }
  });
});

describe("what the body finds", () => {
  test("its own settings, not ours", async () => {
    const client = await pool.connect();
    await client.query("SET lock_timeout = '7s'; SET statement_timeout = '33s'");
    client.release();
    const seen: (string | undefined)[] = [];
    await hf.transaction({ lock: key("settings"), wait: 1234 }, async (tx) => {
      await tx.lock([key("more"), key("and more")], { wait: 2345 });
      seen.push(await setting(tx.client, "lock_timeout"), await setting(tx.client, "statement_timeout"));
    });
    const all = await Promise.all(Array.from({ length: pool.totalCount }, () => pool.connect()));
    for (const one of all) {
      await one.query("RESET lock_timeout; RESET statement_timeout");
      expect(await setting(one, "application_name")).toBe("shop");
      expect(await setting(one, "transaction_timeout")).toBe("0");
      one.release();
    }
    expect(["7s 33s", "0 0"]).toContain(seen.join(" "));
  });

  test("the lock on its own connection", async () => {
    await hf.transaction({ lock: key("same") }, async (tx) => {
      const { rows } = await tx.client.query(
        "SELECT pid = pg_backend_pid() AS own FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
      );
      expect(rows).toEqual([{ own: true }]);
    });
  });

  test("an error if it swallowed one: COMMIT would have been ROLLBACK", async () => {
    const swallow = (instance: Holdfast<{ query(text: string): Promise<unknown> }>) =>
      instance.transaction(async (tx) => {
        await tx.client.query("INSERT INTO quota VALUES (1)");
        await tx.client.query("SELECT 1/0").catch(() => {});
      });
    await expect(swallow(hf as never)).rejects.toMatchObject({ code: "HF_TRANSACTION_ABORTED" });
    const prisma = new PrismaClient({ adapter: new PrismaPg({ connectionString: database.url }) });
    const viaPrisma = holdfast(fromPrisma(prisma)).transaction(async (tx) => {
      await tx.client.$queryRaw`SELECT 1/0`.catch(() => {});
    });
    await expect(viaPrisma).rejects.toMatchObject({ code: "HF_TRANSACTION_ABORTED" });
    await prisma.$disconnect();
  });

  test("a network error of its own is its own: not retried, not taken for the database's", async () => {
    let runs = 0;
    const failed = hf.transaction(async () => {
      runs++;
      await fetch("http://127.0.0.1:1/charge");
    });
    await expect(failed).rejects.toThrow("fetch failed");
    expect(runs).toBe(1);
  });
});

describe("who holds it", () => {
  test("is readable on the server while it lasts, and named in the timeout", async () => {
    await hf.transaction({ lock: key("image-upload", 42) }, async () => {
      const { rows } = await psql.query(
        "SELECT application_name FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()",
      );
      expect(rows).toEqual([{ application_name: "shop [hf:image-upload:42]" }]);
      const error: unknown = await hf
        .transaction({ lock: key("image-upload", 42), wait: 100, separate: true }, async () => {})
        .catch((e: unknown) => e);
      expect(error).toBeInstanceOf(LockTimeoutError);
      expect(String(error)).toMatch(
        /Waited \d+ ms for lock image-upload:42 in vain\. Held by pid \d+ \(shop \[hf:image-upload:42\], idle in transaction\) since/,
      );
    });
  });

  test("is not shown where names are secret", async () => {
    for (const [names, expected] of [
      [false, "shop"],
      [(name: string) => name.replace(/:.*/, ":***"), "shop [hf:user:***]"],
    ] as const) {
      const quiet = holdfast(fromPg(pool), { names });
      await quiet.transaction({ lock: key("user", "secret") }, async (tx) => {
        expect(await setting(tx.client, "application_name")).toBe(expected);
      });
    }
  });
});

/** The engine's own calls on a connection, with the capabilities of another server. */
function postgresEngine({ engine, connect }: Database<PoolClient, SqlConnection>) {
  const locks = [{ key: key("x"), mode: "exclusive" }] as const;
  const call = { locks, wait: 1000, names: [], joined: false } as const;
  const run = async <T>(use: (connection: SqlConnection) => Promise<T>) => {
    const pinned = await connect?.({ use: "transaction", locks, wait: 1000 });
    if (!pinned) throw new Error("no connection");
    try {
      return await use(pinned.connection);
    } finally {
      await pinned.release(true);
    }
  };
  return {
    begin: (capabilities: Capabilities) =>
      run((c) =>
        engine.begin(c, {
          ...call,
          begun: false,
          lockFirst: false,
          isolation: "read committed",
          readOnly: false,
          deadlineMs: 9000,
          capabilities,
        }),
      ),
    lock: (capabilities: Capabilities) =>
      run(async (c) => {
        await c.query(sql`BEGIN`);
        return engine.lock(c, { ...call, joined: true, capabilities });
      }),
  };
}

describe("a replica", () => {
  test("is refused: its locks exclude nobody", async () => {
    // A copy of a server, kept in recovery: it answers, reads, and takes advisory locks that nobody else sees.
    const dataDir = await mkdtemp(join(tmpdir(), "holdfast-standby-"));
    // The server may run as somebody else.
    await chmod(dataDir, 0o755);
    const data = join(dataDir, "data");
    const primary = await startPostgres({ dataDir: data, persistent: true });
    await primary.stop();
    await writeFile(join(data, "data", "standby.signal"), "");
    const standby = await startPostgres({ dataDir: data, persistent: true, settings: { hot_standby: "on" } });
    const replica = new Pool({ connectionString: standby.url(), max: 2 });
    const sqlReplica = postgres(standby.url(), { max: 2 });
    try {
      const instances = [
        holdfast(fromPg(replica)),
        holdfast(fromPostgres(sqlReplica)),
      ] as Holdfast<unknown>[];
      for (const instance of instances) {
        await expect(instance.transaction({ lock: key("x") }, async () => {})).rejects.toMatchObject({
          code: "HF_REPLICA",
        });
        await expect(instance.hold(key("x"))).rejects.toMatchObject({ code: "HF_REPLICA" });
      }
      // An instance that met the primary first, as after a failover, finds out in the transaction itself.
      const { begin, lock } = postgresEngine(fromPg(replica));
      const capabilities = await holdfast(fromPg(pool)).capabilities();
      await expect(begin(capabilities)).rejects.toMatchObject({ code: "HF_REPLICA" });
      await expect(lock(capabilities)).rejects.toMatchObject({ code: "HF_REPLICA" });
    } finally {
      await replica.end();
      await sqlReplica.end();
      await standby.stop();
      await rm(dataDir, { recursive: true, force: true });
    }
  });
});

describe("a node of Citus", () => {
  // Debian has no Citus. This is the table by which its nodes know themselves.
  test.for([
    { group: 0, refused: false },
    { group: 2, refused: true },
  ])("of group $group", async ({ group, refused }) => {
    const mine = await createDatabase("postgres");
    const nodes = new Pool({ connectionString: mine.url, max: 5 });
    const client = await nodes.connect();
    try {
      await client.query("SET allow_system_table_mods = on");
      await client.query("CREATE TABLE pg_catalog.pg_dist_local_group (groupid int PRIMARY KEY)");
      await client.query("INSERT INTO pg_catalog.pg_dist_local_group VALUES ($1)", [group]);
      const hf = holdfast(fromPg(nodes));
      const calls = [
        () => hf.transaction({ lock: key("x") }, async () => "done"),
        () => hf.tryLock(key("x"), async () => "done"),
        () => hf.capabilities(),
      ];
      for (const call of calls)
        if (refused)
          await expect(call()).rejects.toMatchObject({
            code: "HF_UNSUPPORTED",
            message: expect.stringMatching(/worker node of Citus.*Connect to the coordinator/),
          });
        else await call();
      await hf.close();
    } finally {
      client.release();
      await nodes.end();
      await mine.drop();
    }
  });
});

describe("session locks", () => {
  test("are given back when the block throws, and do not stack", async () => {
    const lock = key("session", "throw");
    for (let i = 0; i < 3; i++) {
      const failing = async () => {
        await using _held = await hf.hold(lock);
        await psql.query("SELECT 1/0");
      };
      await expect(failing()).rejects.toThrow("division by zero");
    }
    await eventually(async () => (await advisory()) === 0);
  });

  test("an unlock that the server denies is an error, not a silence", async () => {
    const clients: PoolClient[] = [];
    const own = new Pool({ connectionString: database.url, max: 4 });
    own.on("acquire", (client) => clients.push(client));
    const mine = holdfast(fromPg(own));
    const held = await mine.hold(key("session", "stolen"));
    const neighbour = await mine.hold(key("session", "neighbour"));
    // What a pooler or a stray "unlock all" does behind our back.
    for (const client of new Set(clients)) await client.query("SELECT pg_advisory_unlock_all()");
    await expect(held.release()).rejects.toMatchObject({ code: "HF_LOCK_LOST" });
    // It shared the session, which cannot be trusted any more.
    expect(neighbour.signal.aborted).toBe(true);
    await own.end();
  });

  test("share a connection where they can, and need another one where they must wait", async () => {
    const sessions = async () =>
      (
        await psql.query(
          "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        )
      ).rowCount;
    const held = [
      await hf.hold(key("many", 1)),
      await hf.hold(key("many", 2)),
      await hf.hold([key("many", 3), key("many", 4)]),
    ];
    expect(await sessions()).toBe(1);
    // Waits for the first of them, on a connection that can wait.
    const waiting = hf.hold(key("many", 1), { wait: 20_000 });
    await held[0]?.release();
    held.push(await waiting);
    expect(await sessions()).toBe(2);
    for (const one of held.slice(1)) await one.release();
    expect(await advisory()).toBe(0);
  });

  test("two calls at once never share one session for the same key", async () => {
    const first = await hf.hold(key("session", "x"));
    const both = await Promise.allSettled([0, 1].map(() => hf.hold(key("session", "k"), { wait: "nowait" })));
    expect(both.map(({ status }) => status).toSorted()).toEqual(["fulfilled", "rejected"]);
    for (const result of both) if (result.status === "fulfilled") await result.value.release();
    await first.release();
  });

  test("are refused behind transaction pooling, as SERIALIZABLE locks are", async ({ skip }) => {
    skip(unavailable("pgbouncer") !== undefined, unavailable("pgbouncer"));
    const bounced = await createDatabase("pgbouncer");
    const own = new Pool({ connectionString: bounced.url, max: 4 });
    const behind = holdfast(fromPg(own));
    try {
      await expect(behind.hold(key("x"))).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
      await expect(
        behind.transaction({ isolation: "serializable", lock: key("x") }, async () => {}),
      ).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
      expect(await behind.capabilities()).toMatchObject({
        sessionLocks: { supported: false },
        lockFirstIsolation: [],
      });
    } finally {
      await own.end();
      await bounced.drop();
    }
  });
});

describe("the deadline on the server", () => {
  test("is set, and a stricter limit of the server's own stays", async () => {
    const limits = async (instance: Holdfast<PoolClient>, deadline: number) =>
      instance.transaction({ deadline }, (tx) => setting(tx.client, "transaction_timeout"));
    expect(await limits(hf, 30_000)).toMatch(/^30\d{3}ms$|^30250ms$/);
    const { name, url, drop } = await createDatabase("postgres");
    await psql.query(`ALTER DATABASE ${name} SET transaction_timeout = '20s'`);
    const own = new Pool({ connectionString: url, max: 2 });
    try {
      expect(await limits(holdfast(fromPg(own)), 30_000)).toBe("20s");
      expect(await limits(holdfast(fromPg(own)), 5000)).toMatch(/^5\d{3}ms$/);
    } finally {
      await own.end();
      await drop();
    }
  });

  test("a statement timeout that is shorter than the wait ends the wait, as a lock timeout", async () => {
    const { name, url, drop } = await createDatabase("postgres");
    await psql.query(`ALTER DATABASE ${name} SET statement_timeout = '300ms'`);
    const own = new Pool({ connectionString: url, max: 4 });
    const strict = holdfast(fromPg(own));
    try {
      await strict.transaction({ lock: key("x") }, async () => {
        const waiting = strict.transaction({ lock: key("x"), wait: 20_000, separate: true }, async () => {});
        await expect(waiting).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
      });
    } finally {
      await own.end();
      await drop();
    }
  });
});

describe("psql takes the same locks", () => {
  const cases: [string, ReturnType<typeof key>, string][] = [
    [
      "key(…), with the function of the migration",
      key("image-upload", 42),
      "holdfast.key('image-upload', '42')",
    ],
    [
      "key(…), by plain SQL",
      key("image-upload", "ü"),
      "('x' || encode(substring(sha256(convert_to('12:image-upload2:ü', 'UTF8')) from 1 for 8), 'hex'))::bit(64)::bigint",
    ],
    ["key.bigint", key.bigint(-5n), "-5"],
    ["key.int", key.int(7, -8), "7, -8"],
    ["key.hashtext(s)", key.hashtext("it's"), "hashtext('it''s')"],
    ["key.hashtext(ns, s)", key.hashtext("ns", "😀"), "hashtext('ns'), hashtext('😀')"],
    ["key.hashtextextended(s)", key.hashtextextended("s"), "hashtextextended('s', 0)"],
  ];

  test.each(cases)("%s", async (_name, lock, argument) => {
    // It blocks us …
    await psql.query(`BEGIN; SELECT pg_advisory_xact_lock(${argument})`);
    expect(await hf.tryLock(lock, async () => 1)).toEqual({ acquired: false });
    expect(await hf.tryLock(shared(lock), async () => 1)).toEqual({ acquired: false });
    await psql.query("COMMIT");
    // … and is blocked by us.
    const tried = await hf.transaction(
      { lock },
      async () => (await psql.query(`SELECT pg_try_advisory_xact_lock(${argument}) AS free`)).rows[0].free,
    );
    expect(tried).toBe(false);
  });

  test("holdfast.key refuses a missing or empty part", async () => {
    await expect(psql.query("SELECT holdfast.key('a', NULL)")).rejects.toThrow(/missing or empty/);
    await expect(psql.query("SELECT holdfast.key('a', '')")).rejects.toThrow(/missing or empty/);
  });
});

test("hf.query of the body is the same transaction", async () => {
  await hf
    .transaction(async (tx) => {
      await tx.query(sql`INSERT INTO quota VALUES (${99})`);
      const { rows } = await tx.client.query("SELECT count(*)::int AS n FROM quota WHERE n = 99");
      expect(rows).toEqual([{ n: 1 }]);
      throw new Error("undo");
    })
    .catch(() => {});
});
