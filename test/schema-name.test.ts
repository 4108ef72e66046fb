/** Two applications in one database: what they keep, lock and listen to is apart, though they have one pool. */
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, type HoldfastOptions, holdfast, key, once } from "holdfast";
import { audited, trail } from "holdfast/audit";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { fromMysql2 } from "holdfast/mysql2";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { explore } from "holdfast/testing";
import { type Pool as MysqlPool, createPool } from "mysql2/promise";
import { Client, Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { command } from "./harness/command.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

const missingPostgres = unavailable("postgres");
const missingMariadb = unavailable("mariadb");

/** As long as a name may be, and of what has to be quoted. */
const odd = "Öl & Käse-1 " + "x".repeat(49);

describe("PostgreSQL", () => {
  let database: TestDatabase;
  let pool: Pool;
  const instances = new Map<string, Holdfast<PoolClient>>();
  const of = (schema: string) => instances.get(schema) as Holdfast<PoolClient>;
  let count = 0;
  const [plain, app, other] = ["holdfast", "app_locks", odd];

  beforeAll(async () => {
    if (missingPostgres !== undefined) return;
    database = await createDatabase("postgres");
    // One connection where it can be: what is prepared on it is prepared for all.
    pool = new Pool({ connectionString: database.url, max: 4 });
    for (const schema of [plain, app, other]) {
      const hf = holdfast(fromPg(pool), { schema });
      instances.set(schema, hf);
      await hf.migrate();
    }
  });

  afterAll(async () => {
    if (missingPostgres !== undefined) return;
    for (const hf of instances.values()) await hf.close();
    await pool.end();
    await database.drop();
  });

  beforeEach(({ skip }) => {
    skip(missingPostgres !== undefined, missingPostgres);
  });

  test("each has all of it, and nothing is left to do", async () => {
    expect(Buffer.byteLength(odd)).toBe(63);
    for (const hf of instances.values()) {
      expect(await hf.migrate()).toEqual([]);
      expect(new Set((await hf.migrations()).map(({ state }) => state))).toEqual(new Set(["applied"]));
    }
    const { rows } = await pool.query<{ schema: string; n: number }>(
      "SELECT table_schema AS schema, count(*)::int AS n FROM information_schema.tables WHERE table_schema NOT LIKE 'pg%' AND table_schema <> 'information_schema' GROUP BY 1",
    );
    expect(rows.map(({ schema }) => schema).toSorted()).toEqual([plain, app, other].toSorted());
    expect(new Set(rows.map(({ n }) => n)).size).toBe(1);
  });

  test("an instance without the option is the default one", async () => {
    await using hf = holdfast(fromPg(pool));
    await of(plain).lock(key("default"), async () => {
      expect(await hf.tryLock(key("default"), async () => {}, { separate: true })).toEqual({
        acquired: false,
      });
    });
  });

  describe.each([
    [plain, app],
    [app, other],
  ])("%s and %s are apart", (first, second) => {
    /** Two applications, and a name that was not used before. */
    const pair = (): [Holdfast<PoolClient>, Holdfast<PoolClient>, string] => [
      of(first),
      of(second),
      `${first} ${second.length} ${++count}`,
    ];

    test("locks of transactions", async () => {
      const [one, two] = pair();
      const lock = key("upload", 42);
      await one.lock(lock, async () => {
        await two.lock(lock, async () => {}, { wait: "nowait" });
        const same = await one.tryLock(lock, async () => {}, { separate: true });
        expect(same).toEqual({ acquired: false });
      });
      await using held = await one.hold(lock);
      await using too = await two.hold(lock, { wait: "nowait" });
      expect([held.signal.aborted, too.signal.aborted]).toEqual([false, false]);
    });

    test("numbers that older code locks are the same for all", async () => {
      const [one, two] = pair();
      const lock = key.bigint(77n);
      await one.lock(lock, async () => {
        expect(await two.tryLock(lock, async () => {})).toEqual({ acquired: false });
      });
    });

    test("leases, and semaphores", async () => {
      const [one, two, fresh] = pair();
      await using lease = await one.lease(key(fresh));
      await using other = await two.lease(key(fresh), { wait: "nowait" });
      expect((await one.leases()).map(({ fence }) => fence)).toContain(lease.fence);
      expect(await two.leases(key(fresh))).toHaveLength(1);
      expect(other.fence).toBeGreaterThan(0);
      const permits = one.semaphore(key("few", fresh), { permits: 1 });
      await using permit = await permits.acquire();
      await using free = await two.semaphore(key("few", fresh), { permits: 1 }).acquire({ wait: "nowait" });
      expect([permit.signal.aborted, free.signal.aborted]).toEqual([false, false]);
    });

    test("once", async () => {
      const [one, two, id] = pair();
      expect((await once(one, id, async () => "one")).value).toBe("one");
      expect((await once(two, id, async () => "two")).value).toBe("two");
      expect((await once(one, id, async () => "again")).value).toBe("one");
    });

    test("quotas", async () => {
      const [one, two, name] = pair();
      const both = [one, two].map((hf) => quota(hf, { name, limit: 2, per: "1 day" }));
      for (const each of both) {
        const answers = await Promise.all([1, 2, 3].map(() => each.tryConsume("ada")));
        expect(answers.filter(({ granted }) => granted)).toHaveLength(2);
      }
    });

    test("stock", async () => {
      const [one, two, sku] = pair();
      await stock(one).increase(sku, 3);
      await stock(two).increase(sku, 5);
      await stock(one).decrease(sku, 1);
      expect((await stock(one).level(sku))?.onHand).toBe(2);
      expect((await stock(two).level(sku))?.onHand).toBe(5);
    });

    test("schedules", async () => {
      const [one, two, name] = pair();
      const ran: string[] = [];
      const [mine, theirs] = [one, two].map((hf, i) =>
        schedule(hf, name, { cron: "0 3 * * *" }, async () => void ran.push(String(i))),
      );
      await mine?.runNow();
      await theirs?.runNow();
      expect(ran.toSorted()).toEqual(["0", "1"]);
      await Promise.all([mine?.stop(), theirs?.stop()]);
    });

    test("queues, and who is woken", async () => {
      const [one, two, name] = pair();
      const heard: string[] = [];
      await using listener = await listening(database.url, (channel) => heard.push(channel));
      await listener.to("holdfast_queue");
      const done: string[] = [];
      const [mine, theirs] = [queue<string>(one, name), queue<string>(two, name)];
      const worker = theirs.work(async (job) => void done.push(job.payload), { pollMs: 100 });
      await mine.enqueue("of the first");
      await theirs.enqueue("of the second");
      await eventually(() => done.length === 1);
      // The lock of its session, by which others see that it lives, is the one that it says.
      const schema = [app, other].find((each) => of(each) === two) as string;
      const locks = async () => {
        const { rows } = await pool.query<{ said: boolean; holds: boolean }>(
          `SELECT w.lock IS NOT NULL AS said, EXISTS (SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 1
  AND ((l.classid::bigint << 32) | l.objid::bigint) = w.lock) AS holds
FROM "${schema}".queue_worker w JOIN "${schema}".queue q ON q.id = w.queue WHERE q.name = $1`,
          [name],
        );
        return rows;
      };
      // It works before it has one.
      await eventually(async () => (await locks()).every(({ said }) => said));
      expect(await locks()).toEqual([{ said: true, holds: true }]);
      expect(done).toEqual(["of the second"]);
      expect(await mine.counts()).toMatchObject({ waiting: 1, running: 0 });
      await worker.stop();
      // What one of them tells its workers goes by its own channel.
      await eventually(() => heard.length > 0 || one !== of(plain));
      if (one !== of(plain)) expect(heard).toEqual([]);
    });

    test("the audit", async () => {
      const [one, two, target] = pair();
      await audited(one, { action: "mend", target, actor: "ada" }, async () => {});
      expect(await trail(one, { target })).toHaveLength(1);
      expect(await trail(two, { target })).toEqual([]);
    });
  });

  test("each has its own way to keep locks", async () => {
    const schema = "rows_of_its_own";
    await using hf = holdfast(fromPg(pool), { schema, strategy: "lock row" });
    await hf.migrate();
    await hf.lock(key("row"), async () => {});
    const { rows } = await pool.query(`SELECT name FROM ${schema}.lock`);
    expect(rows).toEqual([{ name: "row" }]);
    expect((await of(plain).capabilities()).transactionLocks).toBe("transaction advisory");
    await expect(
      holdfast(fromPg(pool), { schema, strategy: "transaction advisory" }).lock(key("row"), async () => {}),
    ).rejects.toMatchObject({
      code: "HF_STRATEGY",
    });
  });

  test.each([plain, app, other])("psql takes the same lock in %s", async (schema) => {
    const quoted = `"${schema}"`;
    const { rows } = await pool.query<{ id: string }>(`SELECT ${quoted}.key('upload', '42')::text AS id`);
    const lock = key("upload", 42);
    expect(rows[0]?.id).toBe((schema === plain ? lock : key.in(schema, lock)).id.slice(1));
    const client = await pool.connect();
    try {
      await client.query(`BEGIN; SELECT pg_advisory_xact_lock(${quoted}.key('upload', '42'))`);
      for (const each of [plain, app, other]) {
        const { acquired } = await of(each).tryLock(lock, async () => {});
        expect([each, acquired]).toEqual([each, each !== schema]);
      }
    } finally {
      await client.query("ROLLBACK");
      client.release();
    }
  });

  test("names of locks are shown, whoever's they are", async () => {
    await of(app).lock(key("shown", 7), async () => {
      for (const schema of [app]) {
        const { holders } = await of(schema).inspect();
        expect(holders.map(({ name }) => name).join()).toContain("shown:7");
      }
    });
  });

  test("what is missing is named", async () => {
    await using hf = holdfast(fromPg(pool), { schema: "not there" });
    await expect(hf.lease(key("a"))).rejects.toMatchObject({
      code: "HF_SCHEMA_MISSING",
      message: expect.stringContaining('The table "not there".lease'),
    });
  });

  test("explore lets leases of the schema run out", async () => {
    const hf = of(app);
    await pool.query("CREATE TABLE account (balance int); INSERT INTO account VALUES (0)");
    const act = async () => {
      const lease = await hf.lease(key("report"), { wait: 30_000, renew: false, ttl: 60_000 });
      try {
        const { rows } = await pool.query<{ balance: number }>("SELECT balance FROM account");
        await pool.query("UPDATE account SET balance = $1", [(rows[0]?.balance ?? 0) + 1]);
      } finally {
        await lease.release().catch(() => {});
      }
    };
    const found = await explore("lease", {
      db: fromPg(pool),
      schema: app,
      reset: async () => void (await pool.query(`UPDATE account SET balance = 0; DELETE FROM ${app}.lease`)),
      actors: { A: act, B: act },
      invariant: async (results) => {
        const ended = Object.values(results).filter(({ status }) => status === "fulfilled").length;
        expect((await pool.query("SELECT balance FROM account")).rows).toEqual([{ balance: ended }]);
      },
      faults: ["pause", "expired lease"],
      preemptions: 0,
      minCoverage: 0,
      maxMs: 60_000,
    });
    expect(found, found.text).toMatchObject({ ok: false, anomaly: "fault" });
  });

  test("a schema that was renamed is mended by migrate", async () => {
    await using before = holdfast(fromPg(pool), { schema: "first" });
    await before.migrate();
    const daily = (hf: Holdfast<PoolClient>) => quota(hf, { name: "renamed", limit: 2, per: "1 day" });
    await daily(before).consume("ada", 1);
    await pool.query("ALTER SCHEMA first RENAME TO second");
    await using after = holdfast(fromPg(pool), { schema: "second" });
    const made = await after.migrate();
    expect(new Set(made.map(({ kind }) => kind))).toEqual(new Set(["routine"]));
    expect((await daily(after).tryConsume("ada", 2)).granted).toBe(false);
    expect((await daily(after).tryConsume("ada", 1)).granted).toBe(true);
    expect(await after.migrate()).toEqual([]);
  });

  test("the command", async () => {
    const run = async (...args: string[]) => command(args, { env: { HOLDFAST_URL: database.url } });
    const schema = "by command";
    expect(await run("migrate", "--yes", "--schema", schema)).toMatchObject({ code: 0 });
    expect(await run("migrate", "status", "--schema", schema)).toMatchObject({ code: 0 });
    const status = await command(["migrate", "status", "--url", database.url], {
      env: { HOLDFAST_SCHEMA: "nobody" },
    });
    expect(status).toMatchObject({ code: 1, out: expect.stringContaining("missing") });

    await using hf = holdfast(fromPg(pool), { schema });
    await queue(hf, "emails").enqueue({ to: "ada" });
    await quota(hf, { name: "uploads", limit: 2, per: "1 day" }).consume("ada", 1);
    const queues = await run("queue", "--schema", schema, "--json");
    expect(JSON.parse(queues.out)).toMatchObject({ queues: [{ name: "emails", waiting: 1 }] });

    // A unique key is gone: the doctor says which, and how to make it again.
    await pool.query(`ALTER TABLE "${schema}".once DROP CONSTRAINT once_pkey`);
    const doctor = await run(
      "doctor",
      "--schema",
      schema,
      "--json",
      "--only",
      "unique-keys",
      "migrations",
      "queue-workers",
    );
    expect(JSON.parse(doctor.out).findings).toEqual([
      expect.objectContaining({ check: "unique-keys", what: `"${schema}".once has no unique key on (id)` }),
    ]);
    await pool.query(JSON.parse(doctor.out).findings[0].fix);
    expect(await run("doctor", "--schema", schema, "--only", "unique-keys", "migrations")).toMatchObject({
      code: 0,
    });

    const keys = await run("keys", "upload:42", "--schema", app, "--json");
    expect(JSON.parse(keys.out).keys[0].bigint).toBe(key.in(app, key("upload", 42)).id.slice(1));
    await of(app).lock(key("upload", 42), async () => {
      const busy = await run("exec", "--schema", app, "--lock", "upload:42", "--wait", "0", "--", "true");
      expect(busy.code).toBe(75);
      expect(await run("exec", "--lock", "upload:42", "--wait", "0", "--", "true")).toMatchObject({
        code: 0,
      });
    });
  });
});

interface Listener extends AsyncDisposable {
  to(channel: string): Promise<void>;
}

async function listening(url: string, heard: (channel: string) => void): Promise<Listener> {
  const client = new Client({ connectionString: url });
  await client.connect();
  client.on("notification", ({ channel }) => heard(channel));
  return {
    to: async (channel) => void (await client.query(`LISTEN "${channel}"`)),
    [Symbol.asyncDispose]: () => client.end(),
  };
}

test.each([
  ["", "must be the name"],
  [7, "must be the name"],
  ['a"b', "quote"],
  ["it's", "quote"],
  ["a\\b", "backslash"],
  ["$function$", "$"],
  ["a\nb", "cannot be seen"],
  ["a\0b", "cannot be the name"],
  ["pg_mine", "for itself"],
  ["public", "of its own"],
  ["ä".repeat(32), "63 bytes"],
])("on PostgreSQL %j is refused", async (schema, why) => {
  const pool = new Pool();
  expect(() => holdfast(fromPg(pool), { schema } as HoldfastOptions)).toThrow(why);
  expect(() => holdfast(fromPg(pool), { schema } as HoldfastOptions)).toThrow(
    expect.objectContaining({ code: "HF_USAGE" }),
  );
  await pool.end();
});

test.each([
  ["App", "small letters"],
  ["my app", "small letters"],
  ["größe", "small letters"],
  ["a`b", "small letters"],
  ["1a", "small letters"],
  ["a".repeat(33), "32"],
  ["app_queue", "queue"],
])("as a prefix %j is refused", (schema, why) => {
  const database = fromNodeSqlite(() => new DatabaseSync(":memory:"));
  expect(() => holdfast(database, { schema })).toThrow(why);
});

describe("by prefix", () => {
  let mysql: TestDatabase | undefined;
  let pool: MysqlPool | undefined;

  afterAll(async () => {
    await pool?.end();
    await mysql?.drop();
  });

  const apart = async (one: Holdfast<never>, two: Holdfast<never>, concurrent: boolean) => {
    await one.migrate();
    await two.migrate();
    expect(await one.migrate()).toEqual([]);
    const id = "payment";
    expect((await once(one, id, async () => "one")).value).toBe("one");
    expect((await once(two, id, async () => "two")).value).toBe("two");
    await using lease = await one.lease(key("printer"));
    await using other = await two.lease(key("printer"), { wait: "nowait" });
    expect([lease.signal.aborted, other.signal.aborted]).toEqual([false, false]);
    if (!concurrent) return;
    const lock = key("upload", 42);
    await one.lock(lock, async () => {
      await two.lock(lock, async () => {}, { wait: "nowait" });
      expect(await one.tryLock(lock, async () => {}, { separate: true })).toEqual({ acquired: false });
    });
    await using held = await one.hold(lock);
    await using too = await two.hold(lock, { wait: "nowait" });
    expect([held.signal.aborted, too.signal.aborted]).toEqual([false, false]);
  };

  test("MariaDB", async ({ skip }) => {
    skip(missingMariadb !== undefined, missingMariadb);
    mysql = await createDatabase("mariadb");
    pool = createPool({ uri: mysql.url, connectionLimit: 6 });
    await using one = holdfast(fromMysql2(pool));
    await using two = holdfast(fromMysql2(pool), { schema: "app" });
    await apart(one as unknown as Holdfast<never>, two as unknown as Holdfast<never>, true);
    const [rows] = await pool.query(
      "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = DATABASE()",
    );
    const names = (rows as { name: string }[]).map(({ name }) => name);
    expect(names.filter((name) => name.startsWith("app_")).length).toBe(names.length / 2);
    const doctor = await command([
      "doctor",
      "--url",
      mysql.url,
      "--schema",
      "app",
      "--json",
      "--only",
      "unique-keys",
      "migrations",
    ]);
    expect(JSON.parse(doctor.out).findings).toEqual([]);
  });

  test("SQLite", async () => {
    const file = `file:schema-${process.pid}?mode=memory&cache=shared`;
    const database = fromNodeSqlite(() => new DatabaseSync(file));
    await using one = holdfast(database);
    await using two = holdfast(database, { schema: "app" });
    await apart(one as unknown as Holdfast<never>, two as unknown as Holdfast<never>, false);
    expect(two.migrationSql()).not.toMatch(/\bholdfast_/);
  });
});
