/** `holdfast doctor` on servers that are ill on purpose, and on ones that are well: as docs/doctor.md says how. */
import { execFile } from "node:child_process";
import { readFileSync } from "node:fs";
import { appendFile, chown, mkdtemp, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { promisify } from "node:util";
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import { holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { type QuotaOptions, quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import mysql, { type Connection } from "mysql2/promise";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { command, root } from "./harness/command.ts";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { startMariadb } from "./harness/mariadb.ts";
import { startPgbouncer } from "./harness/pgbouncer.ts";
import type { StartedServer } from "./harness/started-server.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";

interface Finding {
  readonly check: string;
  readonly severity: "error" | "warning" | "hint";
  readonly what: string;
  readonly why: string;
  readonly fix: string;
  readonly couldNotLook?: true;
}

interface Report {
  readonly server: string;
  readonly version: string;
  readonly findings: readonly Finding[];
  readonly checks: readonly { readonly id: string; readonly title: string; readonly status: string }[];
}

interface Answer extends Report {
  readonly code: number | null;
  /** Of checks that found something. */
  readonly found: readonly string[];
  readonly blind: readonly string[];
  of(check: string): readonly Finding[];
}

async function doctor(url: string, ...args: string[]): Promise<Answer> {
  const { code, out, err } = await command(["doctor", "--json", "--url", url, ...args]);
  expect(out, err).toMatch(/^\{/);
  expect(err).toBe("");
  expect(out).not.toContain(URL.canParse(url) && new URL(url).password ? new URL(url).password : "\0");
  const report = JSON.parse(out) as Report;
  const having = (status: string) =>
    report.checks.filter((each) => each.status === status).map(({ id }) => id);
  return {
    ...report,
    code,
    found: having("found"),
    blind: having("could-not-look"),
    of: (check) => report.findings.filter((finding) => finding.check === check),
  };
}

/** The block of docs/doctor.md under this mark. */
function recommended(kind: string, language: "sql" | "ini"): string[] {
  const docs = readFileSync(join(root, "docs/doctor.md"), "utf8");
  const [part = ""] = docs.split(`<!-- settings: ${kind} -->`)[1]?.split("<!-- settings") ?? [];
  const [, block = ""] = new RegExp(`\`\`\`${language}\\n([^]*?)\`\`\``).exec(part) ?? [];
  const lines = block.split("\n").map((line) => line.replace(/\s+--.*$/, "").trim());
  return lines.filter((line) => (language === "sql" ? line.endsWith(";") : line.includes("=")));
}

/** As somebody would copy them, without remarks. */
const lines = (findings: readonly Finding[]): string[] =>
  findings.flatMap(({ fix }) => fix.split("\n")).map((line) => line.replace(/ {3}(?:--|#).*$/, ""));

const statements = (findings: readonly Finding[]): string[] =>
  lines(findings).filter((line) => line.endsWith(";") && !line.startsWith("--"));

/** The sessions that are to be ended are, one after the other, as the doctor says how. */
async function kill(findings: readonly Finding[], url: string): Promise<void> {
  for (const line of lines(findings)) {
    const [, id] = /^holdfast kill (\d+)$/.exec(line) ?? [];
    if (id === undefined) continue;
    const { code, err } = await command(["kill", id, "--yes", "--url", url]);
    // One that another finding has told of too is gone already.
    if (!err.includes("There is no session")) expect(code, err).toBe(0);
  }
}

describe("PostgreSQL", () => {
  const reason = unavailable("pgbouncer");
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  let folder: string;
  let good: EmbeddedPostgres;
  let bad: EmbeddedPostgres;
  let standby: EmbeddedPostgres;
  let pooled: StartedServer;
  const stops: (() => Promise<unknown>)[] = [];
  /** Sessions that do something wrong, until the end. */
  const open = async (url: string): Promise<Client> => {
    const client = new Client({ connectionString: url, application_name: "bad app" });
    client.on("error", () => {});
    await client.connect();
    stops.push(() => client.end());
    return client;
  };
  /** The same place through a pooler. */
  const through = (pooler: StartedServer, url: string): string => {
    const address = new URL(url);
    address.port = new URL(pooler.url).port;
    return address.href;
  };

  beforeAll(async () => {
    if (reason !== undefined) return;
    folder = await mkdtemp(join(tmpdir(), "holdfast-doctor-"));
    stops.push(() => rm(folder, { recursive: true, force: true }));
    // With a path that the servers' user, who is another one for root, can get through.
    await promisify(execFile)("chmod", ["755", folder]);
    const room = { max_connections: "40", max_locks_per_transaction: "10", max_prepared_transactions: "10" };
    [good, bad] = await Promise.all([
      startPostgres(),
      startPostgres({ dataDir: join(folder, "bad"), settings: room }),
    ]);
    stops.push(good.stop, bad.stop);
    pooled = await startPgbouncer(bad);
    stops.push(pooled.stop);
    const well = makeWell();
    standby = await startStandby(room);
    stops.push(standby.stop);
    await Promise.all([makeIll(), well]);
  });

  afterAll(async () => {
    for (const stop of stops.toReversed()) await stop();
  });

  /** A streaming one: the programs of the embedded server lack pg_basebackup, so it is done by hand. */
  async function startStandby(settings: Record<string, string>): Promise<EmbeddedPostgres> {
    const client = await open(bad.url());
    await client.query("SELECT pg_backup_start('doctor', true)");
    await promisify(execFile)("cp", ["-a", join(folder, "bad"), join(folder, "standby")]);
    const { rows } = await client.query("SELECT labelfile FROM pg_backup_stop(false)");
    const data = join(folder, "standby/data");
    const { uid, gid } = await stat(data);
    for (const [name, text] of [
      ["backup_label", rows[0].labelfile],
      ["standby.signal", ""],
    ]) {
      await writeFile(join(data, name), text);
      await chown(join(data, name), uid, gid);
    }
    await rm(join(data, "postmaster.pid"), { force: true });
    await appendFile(
      join(data, "postgresql.auto.conf"),
      `primary_conninfo = 'host=127.0.0.1 port=${bad.port} user=postgres password=${bad.password}'\n`,
    );
    return startPostgres({ dataDir: join(folder, "standby"), settings });
  }

  async function makeIll(): Promise<void> {
    const admin = await open(bad.url());
    await admin.query(`CREATE TABLE "Owner" (id int PRIMARY KEY);
      CREATE TABLE "the ""image""" (id int PRIMARY KEY, "ownerId" int REFERENCES "Owner", idempotency_key text);
      CREATE TABLE indexed (a int, b int, "ownerId" int REFERENCES "Owner", PRIMARY KEY ("ownerId", a));
      CREATE TABLE bare (v int);
      INSERT INTO bare VALUES (1), (1);
      CREATE TABLE big (id int PRIMARY KEY, v int);
      INSERT INTO big SELECT n, n FROM generate_series(1, 10500) n;
      CREATE TABLE job (id int PRIMARY KEY) WITH (autovacuum_enabled = false);
      INSERT INTO job SELECT generate_series(1, 10500);
      DELETE FROM job;
      ANALYZE`);
    await admin.query("CREATE UNIQUE INDEX CONCURRENTLY half ON bare (v)").catch(() => {});
    // These have to be of some age.
    // Its session is over; it is not.
    await admin.query(`BEGIN; UPDATE big SET v = 0 WHERE id = 1; PREPARE TRANSACTION 'it''s lost'`);
    // Through the pooler, on a session that others get next.
    const stranding = await open(pooled.url);
    await stranding.query("SELECT pg_advisory_lock(42)");
    // Directly, and on purpose.
    const direct = await open(bad.url());
    await direct.query("SELECT pg_advisory_lock(43)");
    const idle = await open(bad.url());
    await idle.query("BEGIN; SELECT pg_advisory_xact_lock(n) FROM generate_series(1000, 1300) n");
    await idle.query("UPDATE big SET v = 0 WHERE id = 2");
    const waiter = await open(bad.url());
    waiter.query("UPDATE big SET v = 1 WHERE id = 2").catch(() => {});
    for (const setting of [
      "fsync = off",
      "full_page_writes = off",
      "synchronous_commit = off",
      "deadlock_timeout = '10s'",
      "default_transaction_isolation = 'repeatable read'",
    ])
      await admin.query(`ALTER SYSTEM SET ${setting}`);
    await admin.query("SELECT pg_reload_conf()");
    await admin.query("ALTER DATABASE postgres CONNECTION LIMIT 5");
    await admin.query("CREATE ROLE reporter LOGIN; ALTER ROLE reporter SET synchronous_commit = off");
    const pool = new Pool({ connectionString: bad.url() });
    await holdfast(fromPg(pool)).migrate();
    await pool.end();
    await admin.query("DELETE FROM holdfast.migration WHERE id = 7");
    await admin.query("ALTER TABLE holdfast.once DROP CONSTRAINT once_pkey");
    await admin.query("ALTER TABLE holdfast.lock SET UNLOGGED");
    await admin.query("ALTER TABLE holdfast.lease ENABLE ROW LEVEL SECURITY");
    await admin.query("ALTER TABLE holdfast.once ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY");
    await admin.query("DO $$ BEGIN FOR i IN 1..1001 LOOP PERFORM FROM big WHERE v = -1; END LOOP; END $$");
    await deadlocks(5);
    await admin.query("SELECT pg_stat_force_next_flush()");
    // Old enough to be told, by the server's clock.
    await eventually(async () => {
      const { rows } = await admin.query(`SELECT
        (SELECT count(*) FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - interval '6 s')::int AS prepared,
        (SELECT count(*) FROM pg_locks WHERE waitstart < clock_timestamp() - interval '2 s')::int AS waiting,
        (SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%advisory_lock(43)' AND state = 'idle'
          AND state_change < clock_timestamp() - interval '11 s')::int AS direct`);
      expect(rows[0]).toEqual({ prepared: 1, waiting: 1, direct: 1 });
    });
  }

  /** Each of two sessions wants what the other has. */
  async function deadlocks(n: number): Promise<void> {
    const [a, b] = [await open(bad.url()), await open(bad.url())];
    for (const client of [a, b]) await client.query("SET deadlock_timeout = '20ms'");
    for (let i = 0; i < n; i++) {
      await a.query("BEGIN; SELECT pg_advisory_xact_lock(1)");
      await b.query("BEGIN; SELECT pg_advisory_xact_lock(2)");
      await Promise.allSettled([
        a.query("SELECT pg_advisory_xact_lock(2); ROLLBACK"),
        b.query("SELECT pg_advisory_xact_lock(1); ROLLBACK"),
      ]);
      for (const client of [a, b]) await client.query("ROLLBACK");
    }
    for (const client of [a, b]) await client.query("SELECT pg_stat_force_next_flush()");
  }

  async function makeWell(): Promise<void> {
    const admin = await open(good.url());
    await admin.query("CREATE ROLE app LOGIN PASSWORD 'its-secret'");
    await admin.query("CREATE DATABASE shop OWNER app");
    for (const statement of recommended("postgres", "sql")) await admin.query(statement);
    const url = good.url("shop", { user: "app", password: "its-secret" });
    const app = await open(url);
    const pool = new Pool({ connectionString: url });
    await holdfast(fromPg(pool)).migrate();
    await pool.end();
    // What people have, and what must not be taken for a fault.
    await app.query(`CREATE TABLE owner (id int PRIMARY KEY);
      CREATE TABLE image (id int PRIMARY KEY, owner_id int REFERENCES owner, idempotency_key text, tenant int, UNIQUE (tenant, idempotency_key));
      CREATE INDEX ON image (owner_id, tenant);
      CREATE TABLE event (at date NOT NULL, id int, owner_id int REFERENCES owner, PRIMARY KEY (at, id)) PARTITION BY RANGE (at);
      CREATE INDEX ON event (owner_id);
      CREATE TABLE event_2026 PARTITION OF event FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');
      CREATE TEMP TABLE scratch (v int)`);
    // A lock that is held on purpose.
    await app.query("SELECT pg_advisory_lock(7)");
  }

  const ills = {
    error: [
      "waits",
      "prepared-transactions",
      "connections",
      "durability",
      "invalid-index",
      "row-security",
      "migrations",
      "unique-keys",
    ],
    warning: [
      "pooler",
      "notify",
      "lock-timeout",
      "idle-in-transaction-timeout",
      "deadlock-detection",
      "default-isolation",
      "named-locks",
      "lock-table",
      "deadlocks",
      "queue-bloat",
      "fk-index",
      "primary-key",
      "idempotency-keys",
    ],
    hint: [
      "statement-timeout",
      "transaction-timeout",
      "lock-wait-logging",
      "keepalive",
      "overrides",
      "seq-scans",
    ],
  };

  test("every fault of a server that is ill, through PgBouncer in transaction mode; and what is told mends it", async () => {
    const ill = await doctor(pooled.url);
    expect(ill.code).toBe(1);
    expect(ill.blind).toEqual([]);
    const worst = (check: string) =>
      ["error", "warning", "hint"].find((severity) =>
        ill.of(check).some((each) => each.severity === severity),
      );
    for (const [severity, checks] of Object.entries(ills))
      expect(Object.fromEntries(checks.map((check) => [check, worst(check)]))).toEqual(
        Object.fromEntries(checks.map((check) => [check, severity])),
      );
    // And nothing else.
    expect(ill.found.toSorted()).toEqual(Object.values(ills).flat().toSorted());
    for (const { what, why, fix } of ill.findings)
      for (const text of [what, why, fix]) expect(text).not.toBe("");
    // With names, quoted as they have to be.
    expect(ill.of("fk-index").map(({ fix }) => fix)).toEqual([
      `CREATE INDEX CONCURRENTLY ON "public"."the ""image""" ("ownerId");`,
    ]);
    expect(ill.of("waits").map(({ what }) => what)).toEqual([
      expect.stringMatching(
        /^session \d+ of postgres \(bad app, 127\.0\.0\.1, idle in transaction, .*\) is in the way of 1 session \(big .*\), for .*; it ran UPDATE big SET v = \? WHERE id = \?$/,
      ),
    ]);
    expect(ill.of("named-locks").map(({ what }) => what)).toEqual([
      expect.stringMatching(/^a pooled session \(\d+\) holds advisory lock 42$/),
    ]);
    expect(ill.of("prepared-transactions")[0]?.fix).toContain("ROLLBACK PREPARED 'it''s lost';");
    expect(ill.of("unique-keys").map(({ what }) => what)).toEqual([
      "holdfast.once has no unique key on (id)",
      "holdfast.lock is not crash-safe",
    ]);
    expect(ill.of("row-security").map(({ what, fix }) => [what, fix])).toEqual([
      [
        "row-level security is on for holdfast.lease, for every role but its owner",
        'ALTER TABLE "holdfast"."lease" DISABLE ROW LEVEL SECURITY;',
      ],
      [
        "row-level security is on for holdfast.once, for its owner too",
        'ALTER TABLE "holdfast"."once" DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY;',
      ],
    ]);
    expect(ill.of("connections")[0]?.what).toMatch(/ of 5 connections of database postgres are in use$/);

    const admin = await open(bad.url());
    await kill(ill.findings, pooled.url);
    await admin.query("DELETE FROM bare WHERE ctid = (SELECT min(ctid) FROM bare)");
    for (const statement of statements(ill.findings))
      await admin.query(statement).catch((error: unknown) => {
        // A session that another finding has ended already, and an index whose columns people have to choose.
        if (!/CREATE INDEX CONCURRENTLY ON .* \(…\)/.test(statement))
          throw new Error(statement, { cause: error });
      });
    const pool = new Pool({ connectionString: bad.url() });
    await holdfast(fromPg(pool)).migrate();
    await pool.end();
    // Counters stay until somebody sets them back.
    await admin.query("SELECT pg_stat_reset()");
    const mended = await doctor(bad.url(), "--strict");
    expect(mended.findings).toEqual([]);
    expect(mended.code).toBe(0);
  });

  test("a replica", async () => {
    const { code, found, of } = await doctor(standby.url());
    expect(code).toBe(1);
    expect(of("replica")).toMatchObject([{ severity: "error" }]);
    expect(found).not.toContain("pooler");
    expect(of("notify")).toMatchObject([{ couldNotLook: true, severity: "hint" }]);
  });

  test("a pooler in statement mode, and one in session mode, which is well", async () => {
    const [statement, session] = await Promise.all([
      startPgbouncer(bad, "statement"),
      startPgbouncer(good, "session"),
    ]);
    stops.push(statement.stop, session.stop);
    const { code, of } = await doctor(statement.url, "--only", "pooler", "primary-key");
    expect(code).toBe(1);
    expect(of("pooler")).toMatchObject([
      { severity: "error", what: expect.stringContaining("statement mode") },
    ]);
    const well = await doctor(
      through(session, good.url("shop", { user: "app", password: "its-secret" })),
      "--only",
      "pooler",
      "notify",
      "advisory-locks",
      "named-locks",
    );
    expect(well.findings).toEqual([]);
  });

  test("a server that is set as docs/doctor.md says: nothing", async () => {
    const url = good.url("shop", { user: "app", password: "its-secret" });
    const { code, findings, checks, version } = await doctor(url, "--strict");
    expect(findings).toEqual([]);
    expect(code).toBe(0);
    expect(version).toMatch(/^18\./);
    expect(checks.length).toBeGreaterThan(30);
    expect(new Set(checks.map(({ status }) => status))).toEqual(new Set(["ok"]));
  });

  test("Holdfast at work, and used up, is well: whatever a ledger holds, and while it is written to", async () => {
    const url = good.url("shop", { user: "app", password: "its-secret" });
    const pool = new Pool({ connectionString: url, max: 8 });
    const hf = holdfast(fromPg(pool));
    const windows: readonly Omit<QuotaOptions, "name" | "limit">[] = [
      {},
      { per: "day" },
      { per: "minute", window: "refill" },
      { per: "minute", window: "sliding-log" },
      { per: "minute", window: "sliding-parts" },
    ];
    const all = windows.map((rule, i) => quota(hf, { ...rule, name: `well ${i}`, limit: 10 }));
    const shop = stock(hf);
    await shop.apply([{ sku: "CAP", quantity: 1_000_000 }]);
    const stop = new AbortController();
    const busy = (async () => {
      for (let n = 0; !stop.signal.aborted; n++) {
        await Promise.all(all.map((each) => each.tryConsume(`busy ${n % 3}`, 1)));
        await shop.decrease("CAP", 1);
      }
    })();
    try {
      for (const each of all) {
        await each.consume("ada", 5, { id: "use" });
        expect(await each.tryConsume("ada", 6)).toMatchObject({ granted: false });
        await each.refund("ada", "use", { amount: 2 });
        await (await each.hold("ada", 2)).settle(1);
        await (await each.hold("ada", 1)).release();
        await each.hold("ada", 1, { holdFor: 1 });
        await each.grant("ada", 9, { id: "gift" });
        await each.grant("ada", 3, { expiresAt: new Date(Date.now() + 60_000) });
        await each.consume("ada", 15);
        await each.revoke("ada", "gift");
        await each.reset("ada");
        await each.consume("ada", 1);
        await each.prune({ olderThanMs: 0 });
      }
      const kept = await shop.reserve([{ sku: "CAP", quantity: 5 }]);
      await shop.reserve([{ sku: "CAP", quantity: 5 }], { ttl: 1 });
      await kept.commit();
      await shop.reserve([{ sku: "CAP", quantity: 5 }]);
      await shop.adjustTo("CAP", 500_000);
      await using lease = await hf.lease(key("export", 7));
      await using working = queue<number>(hf, "emails").work(() => {});
      await queue<number>(hf, "emails").enqueueMany([1, 2, 3].map((payload) => ({ payload })));
      await queue<number>(hf, "emails").enqueue(4, { delayMs: 3_600_000 });
      await queue(hf, "new").enqueue(1);
      const nightly = schedule(hf, "nightly", { every: 100 }, () => {});
      await nightly.start();
      await eventually(async () => (await nightly.runs(10)).length >= 4);
      const own = [
        "queue-workers",
        "failed-jobs",
        "schedules",
        "stock-ledger",
        "quota-ledger",
        "dead-leases",
      ];
      const { findings, checks } = await doctor(url, "--strict", "--only", ...own);
      expect(findings).toEqual([]);
      expect(checks.map(({ id, status }) => [id, status])).toEqual(own.map((id) => [id, "ok"]));
      await nightly.stop();
      expect(lease.signal.aborted).toBe(false);
      void working;
    } finally {
      stop.abort();
      await busy;
      await hf.close();
      await pool.end();
    }
  });

  test("what holds autovacuum back: an inactive slot, an old transaction; and what is told mends it", async () => {
    const old = await startPostgres({
      settings: {
        wal_level: "logical",
        // As small as they can be: else it takes two hundred million transactions.
        autovacuum_freeze_max_age: "100000",
        autovacuum_multixact_freeze_max_age: "10000",
        vacuum_failsafe_age: "210000",
      },
    });
    stops.push(old.stop);
    const only = ["--only", "replication-slots", "wraparound"];
    expect((await doctor(old.url(), ...only)).findings).toEqual([]);
    const admin = await open(old.url());
    await admin.query("CREATE TABLE one (id int PRIMARY KEY); INSERT INTO one VALUES (1)");
    await admin.query("SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')");
    const idle = await open(old.url());
    await idle.query("BEGIN; SELECT FROM one FOR KEY SHARE");
    const burn = (n: number, statement: string) =>
      admin.query(
        `DO $$ BEGIN FOR i IN 1..${n} LOOP BEGIN ${statement}; EXCEPTION WHEN division_by_zero THEN END; END LOOP; END $$`,
      );
    await burn(21_000, "PERFORM FROM one FOR KEY SHARE; PERFORM 1 / 0");
    await burn(215_000, "PERFORM pg_logical_emit_message(true, '', '')");

    const { code, of } = await doctor(old.url(), ...only);
    expect(code).toBe(1);
    expect(of("replication-slots")).toMatchObject([
      {
        severity: "warning",
        what: expect.stringMatching(
          /^logical replication slot forgotten is inactive.* of 2\d\d,\d{3} transactions$/,
        ),
      },
    ]);
    const here = of("wraparound").filter(({ what }) => what.startsWith("database postgres: "));
    expect(here).toMatchObject([
      {
        severity: "error",
        what: expect.stringMatching(
          /the oldest transaction ids are 2\d\d,\d{3} old, autovacuum freezes them at 100,000; the oldest tables are \S+ \(2\d\d,\d{3}\).*; held back by .*replication slot forgotten/,
        ),
      },
      {
        severity: "warning",
        what: expect.stringMatching(
          /the oldest multixact ids are 2\d,\d{3} old.*; held back by .*session \d+/,
        ),
      },
    ]);
    expect(of("wraparound").some(({ what }) => what.startsWith("database template0: "))).toBe(true);

    const told = [...of("replication-slots"), ...of("wraparound")];
    await kill(told, old.url());
    for (const line of new Set(lines(told))) {
      const [, database] = /^vacuumdb --freeze --dbname='(\w+)'$/.exec(line) ?? [];
      if (database === undefined && !line.endsWith(";")) continue;
      const client = database === undefined ? admin : await open(old.url(database));
      await client.query(database === undefined ? line : "VACUUM (FREEZE)");
    }
    const mended = await doctor(old.url(), ...only);
    expect(mended.findings).toEqual([]);
  });

  test("limits of time that are shorter than what Holdfast does; no advice to set what is set", async () => {
    const admin = await open(good.url());
    await admin.query("CREATE ROLE hasty LOGIN PASSWORD 'its-secret'");
    for (const setting of [
      "statement_timeout = '4s'",
      "transaction_timeout = '4s'",
      "lock_timeout = '500ms'",
      "deadlock_timeout = '1s'",
    ])
      await admin.query(`ALTER ROLE hasty SET ${setting}`);
    const url = good.url("postgres", { user: "hasty", password: "its-secret" });
    const only = ["--only", "short-timeouts", "deadlock-detection"];
    const hasty = await doctor(url, ...only);
    expect(hasty.of("short-timeouts").map(({ what }) => what)).toEqual([
      "statement_timeout is 4s",
      "transaction_timeout is 4s",
    ]);
    expect(hasty.of("deadlock-detection")).toMatchObject([
      {
        what: "deadlock_timeout is 1s, lock_timeout 500ms",
        fix: `ALTER ROLE "hasty" SET lock_timeout = '5s';`,
      },
    ]);
    for (const statement of statements(hasty.findings)) await admin.query(statement);
    expect((await doctor(url, ...only)).findings).toEqual([]);
    // Where a role has its own, the server's does not count.
    await admin.query("ALTER ROLE hasty SET deadlock_timeout = '10s'");
    const late = await doctor(url, ...only);
    expect(late.found).toEqual(["deadlock-detection"]);
    for (const statement of statements(late.findings)) await admin.query(statement);
    expect((await doctor(url, ...only)).findings).toEqual([]);
  });

  test("a role without rights: says what it could not look at, and how to let it", async () => {
    const admin = await open(good.url("shop"));
    await admin.query(`CREATE ROLE "po""or" LOGIN PASSWORD 'its-secret'`);
    await admin.query("REVOKE EXECUTE ON FUNCTION pg_try_advisory_xact_lock(bigint) FROM PUBLIC");
    for (const setting of [
      "lock_timeout = '60s'",
      "statement_timeout = '30s'",
      "default_transaction_read_only = on",
    ])
      await admin.query(`ALTER ROLE "po""or" SET ${setting}`);
    const poor = await doctor(good.url("shop", { user: 'po"or', password: "its-secret" }));
    // Who waits for whom is told to everybody.
    const sessions = ["idle-holders", "long-transactions", "named-locks"];
    const own = [
      "queue-workers",
      "failed-jobs",
      "schedules",
      "stock-ledger",
      "quota-ledger",
      "dead-leases",
      "migrations",
      "unique-keys",
    ];
    expect(poor.blind).toEqual([...sessions, ...own]);
    for (const [checks, what, fix] of [
      [sessions, /^could not look: .*pg_monitor/, `GRANT pg_monitor TO "po""or";`],
      [
        own,
        /^could not look: permission denied for schema holdfast; it needs SELECT/,
        `GRANT USAGE ON SCHEMA holdfast TO "po""or";\nGRANT SELECT ON ALL TABLES IN SCHEMA holdfast TO "po""or";`,
      ],
    ] as const)
      for (const check of checks)
        expect(poor.of(check)).toMatchObject([
          { severity: "hint", couldNotLook: true, what: expect.stringMatching(what), fix },
        ]);
    expect(poor.found).toEqual([
      "strategy",
      "advisory-locks",
      "replica",
      "rights",
      "timeout-order",
      "idle-in-transaction-timeout",
      "transaction-timeout",
    ]);
    // Whose functions it may not use, it cannot lock with.
    expect(poor.of("advisory-locks")).toMatchObject([{ severity: "error" }]);
    expect(poor.code).toBe(1);
  });
});

const kinds = ["mariadb", "mysql"] as const;

test("an autovacuum that prevents wraparound is in the way: who waits for it is ended, and not the vacuum", async ({
  skip,
}) => {
  const reason = unavailable("postgres");
  skip(reason !== undefined, reason);
  await using stack = new AsyncDisposableStack();
  const server = await startPostgres({
    settings: { autovacuum_freeze_max_age: "100000", autovacuum_naptime: "1s", synchronous_commit: "off" },
  });
  stack.defer(server.stop);
  const open = async (): Promise<Client> => {
    const client = new Client({ connectionString: server.url() });
    client.on("error", () => {});
    await client.connect();
    stack.defer(() => client.end());
    return client;
  };
  const [admin, altering, reading] = [await open(), await open(), await open()];
  // Slow enough to be there until the end: 100 ms for a page. Only what prevents wraparound comes to a table without autovacuum.
  await admin.query(`CREATE TABLE big (id int, filler text)
      WITH (autovacuum_enabled = false, autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1);
    INSERT INTO big SELECT n, repeat('x', 1000) FROM generate_series(1, 20000) n`);
  await admin.query(
    "DO $$ BEGIN FOR i IN 1..101000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$",
  );
  const vacuum = `SELECT pid::text FROM pg_stat_activity WHERE query LIKE 'autovacuum: VACUUM%public.big (to prevent wraparound)'`;
  const worker = await eventually(
    async () => (await admin.query<{ pid: string }>(vacuum)).rows[0]?.pid ?? false,
    { timeout: 60_000, interval: 200 },
  );
  const alter = String((await altering.query("SELECT pg_backend_pid() AS pid")).rows[0]?.pid);
  const altered = altering.query("ALTER TABLE big ADD COLUMN more int").catch((error: unknown) => error);
  const waits = (n: number) =>
    eventually(async () => {
      const { rows } = await admin.query(
        "SELECT FROM pg_locks WHERE NOT granted AND waitstart < clock_timestamp() - interval '2 s'",
      );
      return rows.length === n;
    });
  await waits(1);
  const read = reading.query("SELECT count(*)::int AS n FROM big");
  await waits(2);
  const { of } = await doctor(server.url(), "--only", "waits");
  expect(of("waits")).toMatchObject([
    {
      severity: "error",
      what: expect.stringMatching(
        new RegExp(
          `^session ${alter} \\(ALTER TABLE big ADD COLUMN more int\\) waits for a worker of the server's, session ${String(worker)} .*: autovacuum: VACUUM.* public.big \\(to prevent wraparound\\)\\. 1 session stands behind session ${alter}$`,
        ),
      ),
      fix: expect.stringMatching(new RegExp(`^holdfast kill ${alter} --cancel   # frees 1 session; `)),
    },
  ]);
  // The verb refuses what is not advised, and does what is.
  expect(await command(["kill", String(worker), "--yes", "--url", server.url()])).toMatchObject({ code: 2 });
  const cancel = ["kill", alter, "--cancel", "--yes", "--patience", "20000", "--url", server.url()];
  expect(await command(cancel)).toMatchObject({ code: 0 });
  expect((await read).rows).toEqual([{ n: 20_000 }]);
  expect(await altered).toMatchObject({ code: "57014" });
  expect((await admin.query(vacuum)).rows).toHaveLength(1);
});

test("a backup, and an index that is being built, are not to be ended; nor is a walsender that is idle", async ({
  skip,
}) => {
  const reason = unavailable("postgres");
  skip(reason !== undefined, reason);
  await using stack = new AsyncDisposableStack();
  const database = await createDatabase("postgres");
  stack.defer(database.drop);
  const open = async (name: string, more: object = {}): Promise<Client> => {
    const client = new Client({ connectionString: database.url, application_name: name, ...more });
    client.on("error", () => {});
    await client.connect();
    stack.defer(() => client.end());
    return client;
  };
  const admin = await open("admin");
  await admin.query("CREATE TABLE photo AS SELECT 1 AS id");
  await admin.query(
    "CREATE FUNCTION slowly(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 FROM pg_catalog.pg_sleep(600)'",
  );
  const sender = await open("subscriber", { replication: "database" });
  await sender.query("BEGIN");
  const idleSince = Date.now();
  for (const [name, text, why] of [
    ["pg_dump", "SELECT id FROM photo, pg_sleep(600)", "there is no backup"],
    ["psql", "CREATE INDEX CONCURRENTLY ON photo (slowly(id))", "an invalid index is left"],
  ] as const) {
    const working = await open(name);
    const work = working.query(text).catch((error: unknown) => error);
    const altering = await open("deployment");
    const pidOf = async (client: Client) =>
      String((await client.query("SELECT pg_backend_pid() AS p")).rows[0]?.p);
    const alter = await pidOf(altering);
    const waits = (n: number) =>
      eventually(async () => {
        const { rows } = await admin.query(
          "SELECT FROM pg_locks WHERE relation = 'photo'::regclass AND granted = ($1 = 0) AND ($1 = 0 OR waitstart < clock_timestamp() - interval '2 s')",
          [n],
        );
        return n === 0 ? rows.length > 0 : rows.length === n;
      });
    await waits(0);
    const altered = altering.query("ALTER TABLE photo ADD COLUMN more int").catch((error: unknown) => error);
    await waits(1);
    const { of } = await doctor(database.url, "--only", "waits");
    expect(of("waits")).toMatchObject([
      {
        what: expect.stringMatching(
          new RegExp(`^session ${alter} \\(ALTER .*\\) waits for session .*${name}`),
        ),
        why: expect.stringContaining(why),
        fix: expect.stringMatching(new RegExp(`^holdfast kill ${alter} --cancel   #`)),
      },
    ]);
    await admin.query("SELECT pg_cancel_backend($1)", [alter]);
    expect(await altered).toMatchObject({ code: "57014" });
    await admin.query("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query = $1", [text]);
    expect(await work).toMatchObject({ code: "57014" });
  }
  await eventually(() => expect(Date.now() - idleSince).toBeGreaterThan(11_000), { timeout: 20_000 });
  expect((await doctor(database.url, "--only", "idle-holders")).of("idle-holders")).toEqual([]);
});

describe.each(kinds)("%s", (kind) => {
  const reason = unavailable(kind);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  let ill: TestDatabase;
  let well: TestDatabase;
  const stops: (() => Promise<unknown>)[] = [];
  const open = async (url: string): Promise<Connection> => {
    const connection = await mysql.createConnection(url);
    connection.on("error", () => {});
    stops.push(async () => connection.destroy());
    return connection;
  };

  beforeAll(async () => {
    if (reason !== undefined) return;
    [ill, well] = await Promise.all([createDatabase(kind), createDatabase(kind)]);
    stops.push(ill.drop, well.drop);
  });

  afterAll(async () => {
    for (const stop of stops.toReversed()) await stop();
  });

  /** Settings and counters of the server that all tests share: it runs with less than people should. */
  const shared = [
    "lock-timeout",
    "metadata-lock-timeout",
    "statement-timeout",
    "idle-in-transaction-timeout",
    "lock-wait-logging",
    "default-isolation",
    "rollback-on-timeout",
    "durability",
    "deadlocks",
    "connections",
    "queue-bloat",
    ...(kind === "mariadb" ? ["snapshot-isolation", "seq-scans"] : []),
  ];

  test("every fault of a server that is ill; and what is told mends it", async () => {
    const admin = await open(ill.url);
    for (const statement of [
      "CREATE TABLE `my``isam` (id int PRIMARY KEY) ENGINE = MyISAM",
      "CREATE TABLE bare (v int)",
      "CREATE TABLE `order` (id int PRIMARY KEY, idempotencyKey varchar(40))",
      "CREATE TABLE big (id int PRIMARY KEY, v int)",
      "INSERT INTO big VALUES (1, 0), (2, 0)",
      ...(kind === "mysql" ? ["SET SESSION restrict_fk_on_non_standard_key = OFF"] : []),
      "CREATE TABLE parent (id int PRIMARY KEY, `to` int, KEY (`to`))",
      "CREATE TABLE child (id int PRIMARY KEY, p int, FOREIGN KEY (p) REFERENCES parent (`to`))",
    ])
      await admin.query(statement);
    const pool = mysql.createPool(ill.url);
    await holdfast(fromMysql2(pool)).migrate();
    await pool.end();
    await admin.query("DELETE FROM holdfast_migration WHERE id = 4");
    await admin.query("ALTER TABLE holdfast_seen DROP PRIMARY KEY");
    // Its session is over; it is not.
    const lost = await mysql.createConnection(ill.url);
    const xid = `'${ill.name}', 'b', 7`;
    for (const statement of [
      `XA START ${xid}`,
      "UPDATE big SET v = 1 WHERE id = 2",
      `XA END ${xid}`,
      `XA PREPARE ${xid}`,
    ])
      await lost.query(statement);
    lost.destroy();
    // It would keep the database from being dropped.
    stops.push(() => admin.query(`XA ROLLBACK ${xid}`).catch(() => {}));
    const idle = await open(ill.url);
    await idle.query("BEGIN");
    await idle.query("UPDATE big SET v = 1 WHERE id = 1");
    await idle.query("DO GET_LOCK('nightly', 0)");
    const [waiter, patient] = [await open(ill.url), await open(ill.url)];
    // MySQL's information_schema cannot show them.
    waiter.query("UPDATE big SET v = 2 WHERE id = 1 /* 😀 */").catch(() => {});
    patient.query("DO GET_LOCK('nightly', 60) /* 😀 */").catch(() => {});
    await eventually(async () => {
      const [rows] = await admin.query(
        "SELECT COUNT(*) AS n FROM /*M! information_schema. *//*!80022 performance_schema. */ processlist WHERE db = DATABASE() AND time >= 2 AND (state = 'User lock' OR info LIKE 'UPDATE big%')",
      );
      expect(rows).toEqual([{ n: 2 }]);
    });

    const found = await doctor(ill.url);
    expect(found.code).toBe(1);
    const faults = [
      "waits",
      "prepared-transactions",
      "engine",
      "primary-key",
      "fk-index",
      "idempotency-keys",
      "migrations",
      "unique-keys",
    ];
    const counters = ["deadlocks", "connections", "queue-bloat"];
    const always = shared.filter((check) => check !== "seq-scans" && !counters.includes(check));
    expect(found.found.filter((check) => !counters.includes(check)).toSorted()).toEqual(
      [...faults, ...always].toSorted(),
    );
    expect(found.blind).toEqual(kind === "mariadb" ? ["seq-scans"] : []);
    expect(found.of("engine")).toMatchObject([
      { severity: "error", what: "`my``isam` is MyISAM", fix: "ALTER TABLE `my``isam` ENGINE = InnoDB;" },
    ]);
    expect(found.of("waits")).toMatchObject([
      {
        severity: "error",
        what: expect.stringMatching(
          /^session \d+ of holdfast \(127\.0\.0\.1, idle, .* is in the way of 2 sessions \((?=.*big\[1\])(?=.*nightly)/,
        ),
      },
    ]);
    expect(found.of("unique-keys").map(({ what }) => what)).toEqual([
      "holdfast_seen has no unique key on (id)",
    ]);

    // Not the settings: they are everybody's here.
    const own = found.findings.filter(({ check }) => faults.includes(check));
    await kill(own, ill.url);
    for (const statement of statements(own)) await admin.query(statement);
    const again = mysql.createPool(ill.url);
    await holdfast(fromMysql2(again)).migrate();
    await again.end();
    patient.destroy();
    await eventually(async () => {
      const mended = await doctor(ill.url, "--strict", "--skip", ...shared);
      expect(mended.findings).toEqual([]);
      expect(mended.code).toBe(0);
    });
  });

  // On MySQL without the settings of the server, which take a server of its own; on MariaDB with all of them.
  test("a server that is set as docs/doctor.md says: nothing", async () => {
    const place =
      kind === "mariadb"
        ? await startMariadb(recommended(kind, "ini").map((line) => `--${line.replace(/\s*=\s*/, "=")}`))
        : { url: serverUrl(kind), stop: async () => {} };
    stops.push(place.stop);
    const name = kind === "mariadb" ? "shop" : well.name;
    const admin = await open(place.url);
    if (kind === "mariadb") await admin.query("CREATE DATABASE shop");
    const user = `app_${well.name.slice(-8)}`;
    await admin.query(`CREATE USER '${user}'@'%' IDENTIFIED BY 'its-secret'`);
    stops.push(() => admin.query(`DROP USER '${user}'@'%'`));
    await admin.query(`GRANT ALL ON ${name}.* TO '${user}'@'%'`);
    for (const statement of recommended(kind, "sql"))
      await admin.query(statement.replace("'app'", `'${user}'`));
    await admin.query(`USE ${name}`);
    await admin.query("CREATE TABLE owner (id int PRIMARY KEY)");
    await admin.query(
      "CREATE TABLE image (id int PRIMARY KEY, owner_id int, idempotency_key varchar(40), UNIQUE (owner_id, idempotency_key), FOREIGN KEY (owner_id) REFERENCES owner (id))",
    );
    const url = new URL(place.url);
    [url.username, url.password, url.pathname] = [user, "its-secret", `/${name}`];
    const pool = mysql.createPool(url.href);
    await holdfast(fromMysql2(pool)).migrate();
    await pool.end();
    const skip = kind === "mariadb" ? [] : ["--skip", ...shared];
    const found = await doctor(url.href, "--strict", ...skip);
    expect(found.findings).toEqual([]);
    expect(found.code).toBe(0);
    expect(found.checks.length).toBeGreaterThan(20);
    const limit = kind === "mariadb" ? "max_statement_time" : "max_execution_time";
    const short = ["--only", "short-timeouts"];
    // For this user alone, as others use the server too: 0 is no limit, which it has anyway.
    const [second, many] = kind === "mariadb" ? [1, 10] : [1000, 10_000];
    for (const [value, what] of [
      [second, [`${limit} is 1 s`]],
      [many, []],
    ] as const) {
      await admin.query("SET GLOBAL init_connect = ?", [
        `SET SESSION ${limit} = IF(CURRENT_USER() = '${user}@%', ${value}, 0)`,
      ]);
      try {
        const slow = await doctor(url.href, ...short);
        expect(slow.of("short-timeouts").map((each) => each.what)).toEqual(what);
      } finally {
        await admin.query("SET GLOBAL init_connect = ''");
      }
    }
    if (kind !== "mariadb") return;

    // Nobody else uses this one: it may be ill for a while.
    const only = ["--only", "short-timeouts", "timeout-order"];
    await admin.query("SET GLOBAL max_statement_time = 1, GLOBAL innodb_lock_wait_timeout = 1");
    const hasty = await doctor(url.href, ...only);
    expect(hasty.found).toEqual(["timeout-order", "short-timeouts"]);
    for (const statement of statements(hasty.findings)) await admin.query(statement);
    expect((await doctor(url.href, ...only)).findings).toEqual([]);
  });

  test("what has been prepared has no session that could be ended", async () => {
    const { url } = well;
    const [admin, coordinator, writer] = [await open(url), await open(url), await open(url)];
    await admin.query("CREATE TABLE prepared_row (id int PRIMARY KEY, n int)");
    await admin.query("INSERT INTO prepared_row VALUES (1, 0)");
    const xa = `'left-${well.name}'`;
    for (const text of [`START ${xa}`, "", `END ${xa}`, `PREPARE ${xa}`])
      await coordinator.query(text === "" ? "UPDATE prepared_row SET n = 1" : `XA ${text}`);
    await coordinator.end();
    const written = writer.query("UPDATE prepared_row SET n = n + 2").catch((error: unknown) => error);
    try {
      const told = await eventually(async () => {
        const { of } = await doctor(url, "--only", "waits", "prepared-transactions");
        expect(of("waits")).toHaveLength(1);
        return { of };
      });
      expect(told.of("waits")).toMatchObject([
        {
          what: expect.stringMatching(
            /^a prepared transaction \(two-phase commit\) is in the way of 1 session/,
          ),
          fix: "holdfast doctor --only prepared-transactions   # how to end it",
        },
      ]);
      for (const text of statements(told.of("prepared-transactions"))) await admin.query(text);
      await written;
      expect((await admin.query("SELECT n FROM prepared_row"))[0]).toEqual([{ n: 2 }]);
    } finally {
      await admin.query(`XA ROLLBACK ${xa}`).catch(() => {});
      await admin.query("DROP TABLE prepared_row");
    }
  });

  test("a user without rights: says what it could not look at, and how to let it", async () => {
    const admin = await open(well.url);
    const user = `poor_${well.name.slice(-8)}`;
    await admin.query(`CREATE USER '${user}'@'%' IDENTIFIED BY 'its-secret'`);
    stops.push(() => admin.query(`DROP USER '${user}'@'%'`));
    await admin.query(`GRANT SELECT ON ${well.name}.* TO '${user}'@'%'`);
    const url = new URL(well.url);
    [url.username, url.password] = [user, "its-secret"];
    const poor = await doctor(url.href, "--skip", ...shared);
    expect(poor.code).toBe(0);
    expect(poor.found).toContain("rights");
    expect(poor.blind).toEqual(
      expect.arrayContaining(["replica", "idle-holders", "long-transactions", "waits"]),
    );
    const process = {
      what: expect.stringMatching(/^could not look: .*PROCESS/),
      fix: `GRANT PROCESS ON *.* TO '${user}'@'%';`,
    };
    const locks = {
      what: expect.stringMatching(/^could not look: .*data_locks/),
      fix: `GRANT SELECT ON performance_schema.* TO '${user}'@'%';`,
    };
    expect(poor.of("idle-holders")).toMatchObject([process]);
    expect(poor.of("waits")).toMatchObject([kind === "mysql" ? locks : process]);
    if (kind === "mysql")
      expect(poor.of("prepared-transactions")).toMatchObject([
        { fix: `GRANT XA_RECOVER_ADMIN ON *.* TO '${user}'@'%';` },
      ]);
  });
});

describe("SQLite", () => {
  let folder: string;
  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-doctor-"));
  });
  afterAll(() => rm(folder, { recursive: true, force: true }));

  test("every fault of a file that is ill; and what is told mends it", async () => {
    const file = join(folder, "ill.db");
    const db = new DatabaseSync(file, { enableForeignKeyConstraints: false });
    const hf = holdfast(fromNodeSqlite(() => new DatabaseSync(file)));
    await hf.migrate();
    await hf.close();
    db.exec(`CREATE TABLE owner (id INTEGER PRIMARY KEY);
      CREATE TABLE "im""age" (id INTEGER PRIMARY KEY, owner_id INTEGER REFERENCES owner, dedupe_key TEXT);
      CREATE TABLE tagged (owner_id INTEGER REFERENCES owner (id), tag TEXT, PRIMARY KEY (owner_id, tag)) WITHOUT ROWID;
      CREATE TABLE bare (v);
      INSERT INTO "im""age" (owner_id) VALUES (7);
      DROP TABLE holdfast_once;
      DELETE FROM holdfast_migration WHERE id = 2;
      BEGIN IMMEDIATE`);
    const found = await doctor(`file:${file}`);
    expect(found.code).toBe(1);
    expect(found.found).toEqual([
      "waits",
      "journal-mode",
      "fk-index",
      "foreign-keys",
      "primary-key",
      "idempotency-keys",
      "migrations",
      "unique-keys",
    ]);
    expect(found.of("foreign-keys")).toMatchObject([
      { severity: "error", what: `"im""age" ("owner_id") → "owner": 1 rows point to nothing` },
    ]);
    expect(found.of("unique-keys").map(({ what }) => what)).toEqual(["the table holdfast_once is missing"]);

    // As people see it: the worst first, and no line of prose wider than the screen.
    const tty = terminal(["doctor", "--url", `file:${file}`, "--skip", "waits"], { columns: 80, rows: 60 });
    expect(await tty.ended).toBe(1);
    const text = await tty.all();
    expect(text.split("\n")[0]).toMatch(/^SQLite 3\./);
    expect(text.match(/^(?:Errors|Warnings|Hints|Could not look)$/gm)).toEqual(["Errors", "Warnings"]);
    expect(text).toMatch(/^✗ foreign-keys$/m);
    expect(text.trimEnd().split("\n").at(-1)).toBe("18 checks: 3 errors, 4 warnings");

    db.exec(`ROLLBACK; DELETE FROM "im""age"; DROP TABLE bare; DELETE FROM holdfast_migration WHERE id = 3`);
    for (const statement of statements(found.findings)) if (!statement.includes("…")) db.exec(statement);
    const again = holdfast(fromNodeSqlite(() => new DatabaseSync(file)));
    await again.migrate();
    await again.close();
    db.close();
    const mended = await doctor(`file:${file}`, "--strict");
    expect(mended.findings).toEqual([]);
    expect(mended.code).toBe(0);
  });

  test("a log that is never folded in, because somebody reads; not one that is merely large", async () => {
    const file = join(folder, "log.db");
    const [writer, reader] = [new DatabaseSync(file), new DatabaseSync(file)];
    const only = ["--only", "wal-size"];
    try {
      writer.exec("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; CREATE TABLE t (v)");
      reader.exec("BEGIN; SELECT * FROM t");
      for (let i = 0; i < 20; i++) writer.exec("INSERT INTO t VALUES (randomblob(1048576))");
      const found = await doctor(`file:${file}`, ...only);
      expect(found.of("wal-size")).toMatchObject([
        {
          severity: "warning",
          what: expect.stringMatching(/^2\d MB of .*log\.db-wal are not in the file yet/),
        },
      ]);
      reader.exec("ROLLBACK");
      for (const statement of statements(found.findings)) writer.exec(statement);
      expect((await doctor(`file:${file}`, ...only)).findings).toEqual([]);
      writer.exec(
        "INSERT INTO t SELECT randomblob(1048576) FROM t, t AS u LIMIT 80; PRAGMA wal_checkpoint(PASSIVE)",
      );
      expect((await stat(`${file}-wal`)).size).toBeGreaterThan(64 * 2 ** 20);
      expect((await doctor(`file:${file}`, ...only)).findings).toEqual([]);
    } finally {
      reader.close();
      writer.close();
    }
  });

  test("an empty file that is set as docs/doctor.md says: nothing", async () => {
    const file = join(folder, "well.db");
    const db = new DatabaseSync(file);
    for (const statement of recommended("sqlite", "sql")) db.exec(statement);
    db.close();
    const { code, out } = await command(["doctor", "--strict", "--url", `file:${file}`]);
    expect(out.trimEnd().split("\n").at(-1)).toBe("19 checks: nothing found");
    expect(code).toBe(0);
  });
});

describe("what is asked", () => {
  test("--list tells all checks, or those of one kind of server, without connecting", async () => {
    const all = await command(["doctor", "--list"]);
    expect(all.code).toBe(0);
    for (const name of ["PostgreSQL", "MySQL", "MariaDB", "SQLite", "fk-index", "galera"])
      expect(all.out).toContain(name);
    const one = await command(["doctor", "--list", "--json", "--url", "postgres://nowhere.invalid/x"]);
    const { kinds } = JSON.parse(one.out) as {
      kinds: { kind: string; checks: { id: string; title: string }[] }[];
    };
    const [postgres, ...others] = kinds;
    expect(others).toEqual([]);
    const ids = postgres?.checks.map(({ id }) => id) ?? [];
    expect(new Set(ids).size).toBe(ids.length);
    expect(ids).toContain("pooler");
  });

  test.each([
    ["a name that is none", ["--only", "fkindex"], 'There is no check "fkindex".'],
    ["one of another kind of server", ["--only", "galera"], 'There is no check "galera" of SQLite.'],
    ["a server that is not there", ["--url", "postgres://127.0.0.1:1/x"], "Could not connect"],
  ])("%s: one line, and 2", async (_, args, said) => {
    const folder = await mkdtemp(join(tmpdir(), "holdfast-doctor-"));
    const file = join(folder, "a.db");
    new DatabaseSync(file).close();
    const { code, out, err } = await command(["doctor", ...args], { env: { HOLDFAST_URL: `file:${file}` } });
    await rm(folder, { recursive: true });
    expect(out).toBe("");
    expect(err).toMatch(/^holdfast: [^\n]*\n$/);
    expect(err).toContain(said);
    expect(code).toBe(2);
  });
});
