/**
 * What is told of failures that are nobody's fault here: no right, no room, no connection, no tables, no time. Every error that
 * leaves a call is one of Holdfast's, names what the call was about, and has what the server or the client said as its cause.
 */
import { randomBytes } from "node:crypto";
import { type Holdfast, HoldfastError, holdfast, isRetryable, key, once, versioned } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startProxy } from "./harness/proxy.ts";

type Hf = Holdfast<PoolClient>;

const missing = unavailable("postgres");
const suffix = randomBytes(4).toString("hex");
let database: TestDatabase;
let empty: TestDatabase;
let admin: Pool;

/** Roles belong to the server, and not to the database. */
const role = (name: string) => `failures_${name}_${suffix}`;
const roles = ["plain", "poor", "reader", "hasty", "limited"];

beforeAll(async () => {
  if (missing !== undefined) return;
  [database, empty] = await Promise.all([createDatabase("postgres"), createDatabase("postgres")]);
  admin = new Pool({ connectionString: database.url, max: 4 });
  const hf = holdfast(fromPg(admin));
  await hf.migrate();
  await admin.query(
    "CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL, version int NOT NULL DEFAULT 0)",
  );
  await admin.query("INSERT INTO account VALUES (1, 100)");
  for (const name of roles) await admin.query(`CREATE ROLE ${role(name)} LOGIN PASSWORD 'secret'`);
  for (const name of roles.filter((each) => each !== "poor")) {
    await admin.query(`GRANT USAGE ON SCHEMA holdfast, public TO ${role(name)}`);
    await admin.query(`GRANT ALL ON ALL TABLES IN SCHEMA holdfast, public TO ${role(name)}`);
    await admin.query(`GRANT ALL ON ALL SEQUENCES IN SCHEMA holdfast TO ${role(name)}`);
    await admin.query(`GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA holdfast TO ${role(name)}`);
  }
  await admin.query(`ALTER ROLE ${role("reader")} SET default_transaction_read_only = on`);
  await admin.query(`ALTER ROLE ${role("hasty")} SET statement_timeout = '1500ms'`);
  await admin.query(`ALTER ROLE ${role("limited")} CONNECTION LIMIT 0`);
  // What the calls below are about is there.
  for (const [name, call] of Object.entries(calls)) if (name !== "schedule.start") await call(hf);
  await hf.close();
});

afterAll(async () => {
  if (missing !== undefined) return;
  for (const name of roles) {
    await admin.query(`DROP OWNED BY ${role(name)}`);
    await admin.query(`DROP ROLE ${role(name)}`);
  }
  await admin.end();
  await Promise.all([database.drop(), empty.drop()]);
});

const limits = (hf: Hf) => quota(hf, { name: "failing", limit: 1_000_000 });
const goods = (hf: Hf) => stock(hf, { name: "failing" });
const jobs = (hf: Hf) => queue<number>(hf, "failing");
const nightly = (hf: Hf) => schedule(hf, "failing", { every: "1 day" }, () => {});
const accounts = (hf: Hf) => versioned<{ id: number; balance: number }>(hf, "account");
const lock = key("failing", 1);

/** In a transaction of ours, and in one of the caller's. */
const inside = (call: (hf: Hf, tx: never) => Promise<unknown>) => (hf: Hf) =>
  hf.transaction({ retry: false }, (tx) => call(hf, tx as never));

const calls: Readonly<Record<string, (hf: Hf) => Promise<unknown>>> = {
  "hf.lock": (hf) => hf.lock(lock, async () => 1, { retry: { attempts: 2 } }),
  "hf.tryLock": (hf) => hf.tryLock(lock, async () => 1, { retry: { attempts: 2 } }),
  "hf.hold": async (hf) => (await hf.hold(lock)).release(),
  "hf.lease": async (hf) => (await hf.lease(lock)).release(),
  "hf.leases": (hf) => hf.leases(),
  "semaphore.acquire": async (hf) => (await hf.semaphore(lock, { permits: 2 }).acquire()).release(),
  "hf.inspect": (hf) => hf.inspect(),
  "hf.migrations": (hf) => hf.migrations(),
  "hf.capabilities": (hf) => hf.capabilities(),
  "tx.lock": inside((_, tx: { lock(of: unknown): Promise<void> }) => tx.lock(lock)),
  "tx.rows": inside((_, tx: { rows(...of: unknown[]): Promise<unknown> }) => tx.rows("account", [1])),
  once: (hf) => once(hf, ["failing", randomBytes(4).toString("hex")], async () => 1),
  "versioned.update": (hf) => accounts(hf).update(1, ({ balance }) => ({ balance: balance + 1 })),
  "quota.consume": (hf) => limits(hf).consume("ann"),
  "quota.consume in tx": inside((hf, tx) => limits(hf).consume("ann", 1, { tx })),
  "quota.peek": (hf) => limits(hf).peek("ann"),
  "quota.grant": (hf) => limits(hf).grant("ann", 1),
  "quota.history": (hf) => limits(hf).history("ann"),
  "stock.increase": (hf) => goods(hf).increase("pen", 1),
  "stock.increase in tx": inside((hf, tx) => goods(hf).increase("pen", 1, { tx })),
  "stock.level": (hf) => goods(hf).level("pen"),
  "stock.history": (hf) => goods(hf).history({ sku: "pen" }),
  "queue.enqueue": (hf) => jobs(hf).enqueue(1),
  "queue.enqueue in tx": inside((hf, tx) => jobs(hf).enqueue(1, { tx })),
  "queue.counts": (hf) => jobs(hf).counts(),
  "schedule.status": (hf) => nightly(hf).status(),
  "schedule.pause": (hf) => nightly(hf).pause(),
  "schedule.start": (hf) => nightly(hf).start(),
  "schedule.runNow": (hf) => nightly(hf).runNow(),
};

const works = "works";
const all = (names: readonly string[], outcome = works) =>
  Object.fromEntries(names.map((name) => [name, outcome]));
/** What needs nothing of ours on the server. */
const needless = all(["hf.lock", "hf.tryLock", "hf.hold", "hf.inspect", "hf.capabilities", "tx.lock"]);
/** What writes nothing. */
const reading = all([
  "hf.leases",
  "hf.migrations",
  "quota.peek",
  "quota.history",
  "stock.level",
  "stock.history",
  "queue.counts",
  "schedule.status",
  // It is there already.
  "schedule.start",
]);

interface Trouble {
  /** An instance that is in it, and what ends it. */
  begin(): Promise<{ hf: Hf; end(): Promise<void> }>;
  readonly code: string;
  /** It is known before the server is asked, so there is nothing that the server said. */
  readonly unasked?: boolean;
  /** Calls that fail otherwise, or not at all. */
  readonly except?: Readonly<Record<string, string>>;
}

const at = (url: string, options: { user?: string; options?: string } = {}) => {
  const address = new URL(url);
  if (options.user !== undefined) {
    address.username = options.user;
    address.password = "secret";
  }
  return new Pool({ connectionString: address.href, max: 4 });
};

async function instance(pool: Pool, end: () => Promise<unknown> = async () => {}, wait = 500) {
  // A connection that is cut while nobody uses it.
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool), { wait });
  return {
    hf,
    async end() {
      await hf.close();
      await pool.end();
      await end();
    },
  };
}

const troubles: Readonly<Record<string, Trouble>> = {
  "no right to the schema": {
    begin: () => instance(at(database.url, { user: role("poor") })),
    code: "HF_ACCESS_DENIED",
    unasked: true,
    // It says whose schema that is. Locks need to know whether this database is one of several.
    except: { ...all(["hf.inspect", "hf.capabilities"]), "hf.migrations": "HF_SCHEMA_TAKEN" },
  },
  "nobody can sign in so": {
    begin: () => instance(at(database.url, { user: role("nobody") })),
    code: "HF_ACCESS_DENIED",
  },
  "no tables": {
    begin: () => instance(at(empty.url)),
    code: "HF_SCHEMA_MISSING",
    // The caller's own table is not there either.
    except: { ...needless, "hf.migrations": works, ...all(["tx.rows", "versioned.update"], "HF_USAGE") },
  },
  "read only": {
    begin: () => instance(at(database.url, { user: role("reader") })),
    code: "HF_REPLICA",
    except: { ...needless, ...reading },
  },
  "too many connections": {
    begin: () => instance(at(database.url, { user: role("limited") })),
    code: "HF_NO_CONNECTION",
  },
  "a pool that was closed": {
    async begin() {
      const pool = at(database.url);
      await pool.end();
      const hf = holdfast(fromPg(pool));
      return { hf, end: () => hf.close() };
    },
    code: "HF_NO_CONNECTION",
  },
  "a server that is gone": {
    async begin() {
      const { port } = new URL(database.url);
      const proxy = await startProxy({ port: Number(port) });
      const url = proxy.url(database.url);
      await proxy.close();
      return instance(at(url));
    },
    code: "HF_CONNECTION_LOST",
  },
  "a limit of the server's on statements": {
    async begin() {
      const pool = at(database.url, { user: role("hasty") });
      // The server's limit comes first, and leaves time for what is not blocked.
      const begun = await instance(pool, undefined, 5000);
      await begun.hf.capabilities();
      const client = await admin.connect();
      await client.query("BEGIN");
      const { rows } = await client.query<{ name: string }>(
        "SELECT format('holdfast.%I', tablename) AS name FROM pg_tables WHERE schemaname = 'holdfast'",
      );
      await client.query(
        `LOCK TABLE ${["account", ...rows.map(({ name }) => name)].join()} IN ACCESS EXCLUSIVE MODE`,
      );
      return {
        hf: begun.hf,
        async end() {
          await client.query("ROLLBACK");
          client.release();
          await begun.end();
        },
      };
    },
    code: "HF_DEADLINE",
    except: { ...needless, "tx.rows": "HF_LOCK_TIMEOUT" },
  },
  "no room on the disk": {
    async begin() {
      await admin.query(`CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$`);
      const { rows } = await admin.query<{ name: string }>(
        "SELECT format('holdfast.%I', tablename) AS name FROM pg_tables WHERE schemaname = 'holdfast'",
      );
      for (const { name } of [...rows, { name: "account" }])
        await admin.query(
          `CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE OR DELETE ON ${name} EXECUTE FUNCTION full_disk()`,
        );
      return instance(at(database.url, { user: role("plain") }), () =>
        admin.query("DROP FUNCTION full_disk() CASCADE"),
      );
    },
    code: "HF_SERVER_FULL",
    except: { ...needless, ...reading, "tx.rows": works },
  },
};

describe("failures", () => {
  test.for(Object.keys(troubles))("%s", { timeout: 120_000 }, async (name, { skip }) => {
    skip(missing !== undefined, missing);
    const trouble = troubles[name] as Trouble;
    const { hf, end } = await trouble.begin();
    const found: Record<string, string> = {};
    const wanted: Record<string, string> = {};
    /** Of those that do not say what they are about, or have lost what the server said. */
    const mute: string[] = [];
    try {
      for (const [call, run] of Object.entries(calls)) {
        wanted[call] = trouble.except?.[call] ?? trouble.code;
        try {
          await run(hf);
          found[call] = works;
        } catch (error) {
          const ours = error instanceof HoldfastError;
          found[call] = ours ? error.code : `not ours: ${String(error)}`;
          if (!ours || error.code !== trouble.code) continue;
          const named =
            /failing|account|Leases|is not in this database/.test(error.message) ||
            error.message.includes(call);
          // A transaction that has no lock has no name.
          const kept = error.cause instanceof Error || trouble.unasked === true;
          if (!(named || / in tx$|^tx\./.test(call)) || !kept) mute.push(`${call}: ${error.message}`);
        }
      }
    } finally {
      await end();
    }
    expect(found).toEqual(wanted);
    expect(mute).toEqual([]);
  });

  test("inside of a transaction it is told in our words, and the whole of it is run again all the same", async () => {
    await admin.query("CREATE SEQUENCE unlucky");
    await admin.query(`CREATE FUNCTION unlucky() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      IF nextval('public.unlucky') = 1 THEN RAISE EXCEPTION 'unlucky' USING ERRCODE = 'deadlock_detected'; END IF;
      RETURN NULL; END $$`);
    const { rows } = await admin.query<{ name: string }>(
      "SELECT format('holdfast.%I', tablename) AS name FROM pg_tables WHERE schemaname = 'holdfast' AND tablename LIKE 'quota%'",
    );
    for (const { name } of rows)
      await admin.query(
        `CREATE TRIGGER unlucky BEFORE INSERT OR UPDATE ON ${name} EXECUTE FUNCTION unlucky()`,
      );
    const { hf, end } = await instance(at(database.url));
    try {
      const thrown: unknown[] = [];
      const attempts = await hf.transaction(async (tx) => {
        await limits(hf)
          .consume("bob", 1, { tx })
          .catch((error: unknown) => {
            thrown.push(error);
            throw error;
          });
        return tx.attempt;
      });
      expect(attempts).toBe(2);
      expect(thrown).toMatchObject([{ code: "HF_DEADLOCK", cause: { code: "40P01" } }]);
      expect(String(thrown[0])).toContain("quota failing:bob");
      // In a transaction of the caller's own, who may want to run it again.
      await admin.query("SELECT setval('unlucky', 1, false)");
      const client = await admin.connect();
      await client.query("BEGIN");
      const joined = limits(hf).consume("bob", 1, { tx: hf.join(client) });
      const error = await joined.catch((failed: unknown) => failed);
      expect(error).toMatchObject({ code: "HF_DEADLOCK" });
      expect(isRetryable(error)).toBe(true);
      expect(hf.classify(error)).toBe("deadlock");
      await client.query("ROLLBACK");
      client.release();
    } finally {
      await end();
      await admin.query("DROP FUNCTION unlucky() CASCADE");
    }
  });
});
