/**
 * A bad day: six sessions wait for one that does nothing, an ALTER among them; processes have died, people have changed
 * tables by hand, a pooler has leaked a lock. The doctor's first finding is who is in the way, what it advises frees them
 * all with one command, and it finds whatever else is wrong.
 */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { jobs, queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { createConnection, createPool } from "mysql2/promise";
import { Client, Pool } from "pg";
import { expect, onTestFinished, test } from "vitest";
import { command } from "./harness/command.ts";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";
import type { QueueArg } from "./workers/queue-worker.ts";

interface Finding {
  readonly check: string;
  readonly severity: string;
  readonly what: string;
  readonly fix: string;
}

interface Session {
  readonly id: string;
  query(text: string): Promise<unknown>;
}

async function connect(url: string): Promise<Session> {
  if (url.startsWith("postgres")) {
    const client = new Client({ connectionString: url, application_name: "api" });
    client.on("error", () => {});
    await client.connect();
    onTestFinished(() => client.end().catch(() => {}));
    const { rows } = await client.query<{ id: string }>("SELECT pg_backend_pid()::text AS id");
    return { id: rows[0]?.id ?? "", query: (text) => client.query(text) };
  }
  const connection = await createConnection(url);
  connection.on("error", () => {});
  onTestFinished(() => connection.destroy());
  // As patient as a session on PostgreSQL.
  await connection.query("SET SESSION innodb_lock_wait_timeout = 600");
  return { id: String(connection.threadId), query: (text) => connection.query(text) };
}

interface Chain {
  /** In everybody's way, and idle. */
  readonly root: Session;
  readonly changer: Session;
  /** Resolves when all of the six have got through. */
  through(): Promise<void>;
}

/** Three wait for rows, one behind the other; an ALTER waits for all of them; two come to the table after it. */
async function sixWait(url: string, hf: Holdfast<unknown>): Promise<Chain> {
  const [root, ...rows] = await Promise.all(Array.from({ length: 4 }, () => connect(url)));
  const [changer, ...late] = await Promise.all(Array.from({ length: 3 }, () => connect(url)));
  if (!root || !changer) throw new Error("no sessions");
  await root.query("CREATE TABLE image (id int PRIMARY KEY, n int)");
  await root.query("INSERT INTO image VALUES (1, 0), (2, 0), (3, 0), (4, 0)");
  await root.query("BEGIN");
  await root.query("UPDATE image SET n = 1 WHERE id = 1");
  // Named locks of other databases are told on MySQL too.
  const waiting = (n: number) =>
    eventually(
      async () => {
        const own = (await hf.inspect()).waiters.filter(({ name }) => name.startsWith("image"));
        return new Set(own.map(({ session }) => session.id)).size === n;
      },
      { interval: 150 },
    );
  const updates: Promise<unknown>[] = [];
  for (const [i, session] of rows.entries()) {
    await session.query("BEGIN");
    await session.query(`UPDATE image SET n = 2 WHERE id = ${i + 2}`);
    updates.push(session.query(`UPDATE image SET n = 3 WHERE id = ${i + 1}`));
    await waiting(i + 1);
  }
  const altered = changer.query("ALTER TABLE image ADD COLUMN m int");
  await waiting(4);
  const reads = late.map((session) => session.query("SELECT * FROM image"));
  await waiting(6);
  return {
    root,
    changer,
    async through() {
      for (const [i, session] of rows.entries()) {
        await updates[i];
        await session.query("COMMIT");
      }
      await Promise.all([altered, ...reads]);
    },
  };
}

async function doctor(url: string): Promise<Finding[]> {
  const { out, err } = await command(["doctor", "--json", "--url", url]);
  expect(out, err).toMatch(/^\{/);
  return (JSON.parse(out) as { findings: Finding[] }).findings;
}

/** The command as somebody copies it. */
const advice = ({ fix }: Finding): string[] => (fix.split("   #")[0] ?? "").split(" ");

/** What is found first is the root, and one command frees them all. */
async function freed(url: string, { root, changer, through }: Chain): Promise<Finding[]> {
  let found: Finding[] = [];
  await eventually(async () => {
    found = await doctor(url);
    return found[0]?.check === "waits" && /in the way of 6 sessions/.test(found[0].what);
  });
  const [first] = found;
  if (!first) throw new Error("nothing found");
  expect(first.severity).toBe("error");
  expect(first.what).toContain(`session ${root.id} of `);
  expect(first.what).toContain(
    `2 of them stand behind session ${changer.id}, which waits too (ALTER TABLE image`,
  );
  expect(first.fix).toContain("frees 6 sessions");
  expect(found.filter(({ check }) => check === "waits")).toHaveLength(1);
  // Nobody is told to end a victim.
  for (const { fix } of found) expect(/holdfast kill (\d+)/.exec(fix)?.[1] ?? root.id).not.toBe(changer.id);
  const [holdfastWord, ...args] = advice(first);
  expect([holdfastWord, ...args]).toEqual(["holdfast", "kill", root.id]);
  const kill = await command([...args, "--yes", "--url", url]);
  expect(kill.code, kill.err).toBe(0);
  await through();
  return found;
}

const said = (found: readonly Finding[], check: string): string[] =>
  found.filter((each) => each.check === check).map(({ what }) => what);

/** A lease whose process is gone: it ran out, a while ago. */
async function leaveLease(hf: Holdfast<unknown>, age: () => Promise<unknown>): Promise<void> {
  await hf.lease(key("export", 7), { renew: false, ttl: 100, holder: "web-3:88" });
  await age();
}

test("PostgreSQL behind PgBouncer", { timeout: 300_000 }, async ({ skip }) => {
  const reason = unavailable("pgbouncer");
  skip(reason !== undefined, reason);
  const database: TestDatabase = await createDatabase("pgbouncer");
  const direct = Object.assign(new URL(serverUrl("postgres")), { pathname: `/${database.name}` }).href;
  const pool = new Pool({ connectionString: direct, max: 6, application_name: "shop" });
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool));
  onTestFinished(async () => {
    await hf.close();
    await pool.end();
    await database.drop();
  });
  await hf.migrate();

  // Jobs that fail; and some that nobody works on any more, since their worker was killed in the middle of one.
  const failing = queue(hf, "emails", { retries: 0 });
  await failing.enqueueMany([1, 2, 3].map((to) => ({ payload: { to } })));
  const trying = failing.work(() => {
    throw new Error("smtp refused");
  });
  await eventually(async () => (await failing.counts()).failed === 3);
  await trying.stop();
  await queue(hf, "reports").enqueueMany([1, 2, 3].map((payload) => ({ payload })));
  const doomed = startWorker(new URL("./workers/queue-worker.ts", import.meta.url), {
    url: direct,
    queue: "reports",
    concurrency: 1,
    ttlMs: 3_600_000,
    jobMs: 0,
    how: "complete",
    slow: true,
  } satisfies QueueArg);
  await doomed.message("begun");
  // Its lock is taken in the background: without one its death would be known by its time alone.
  await eventually(async () => {
    const { rows } = await pool.query("SELECT FROM holdfast.queue_worker WHERE lock IS NOT NULL");
    return rows.length > 0;
  });
  doomed.sigkill();
  await doomed.exited;
  // A quota that is used up is no fault; one that was edited is, and so is stock.
  const uploads = quota(hf, { name: "uploads", limit: 5 });
  await uploads.consume("full", 5);
  await uploads.consume("edited", 2);
  await uploads.grant("granted", 5);
  await pool.query("UPDATE holdfast.quota_bucket SET used = 0 WHERE subject = 'edited'");
  await pool.query("UPDATE holdfast.quota_grant SET amount = 50 WHERE subject = 'granted'");
  await stock(hf).apply([
    { sku: "CAP", quantity: 10 },
    { sku: "HAT", quantity: 10 },
  ]);
  await pool.query("UPDATE holdfast.stock_level SET on_hand = 99 WHERE sku = 'CAP'");
  // A nightly schedule that no process runs any more, and a run that was left.
  const nightly = schedule(hf, "nightly", { every: 1000 }, () => {});
  await nightly.start();
  await eventually(async () => (await nightly.runs(10)).filter(({ state }) => state === "done").length >= 3);
  await nightly.stop();
  await pool.query("UPDATE holdfast.schedule SET last = last - interval '1 hour'");
  await pool.query(`INSERT INTO holdfast.schedule (name, last) VALUES ('cleanup', now() - interval '1 hour');
    INSERT INTO holdfast.schedule_run (schedule, tick, manual, state, attempt, fence, token, holder, started, until)
    VALUES ('cleanup', now() - interval '1 hour', false, 'running', 1, nextval('holdfast.fence'), 't', 'web-3:88', now() - interval '1 hour', now() - interval '59 minutes')`);
  await leaveLease(hf, () => pool.query("UPDATE holdfast.lease SET until = until - interval '1 minute'"));
  await pool.query("DELETE FROM holdfast.migration WHERE id = 4");
  await pool.query(`UPDATE holdfast.queue_ready SET at = at - interval '10 minutes'`);

  // A session lock that was taken through the pooler belongs to nobody.
  const leaky = new Client({ connectionString: database.url });
  await leaky.connect();
  await leaky.query("SELECT pg_advisory_lock(4242)");
  await leaky.end();
  // And somebody forgot a COMMIT, in nobody's way yet.
  const idle = await connect(direct);
  await idle.query("CREATE TABLE other (id int PRIMARY KEY)");
  await idle.query("BEGIN; INSERT INTO other VALUES (1)");
  const chain = await sixWait(direct, hf);
  await eventually(async () => {
    const { rows } = await pool.query(
      `SELECT state_change < clock_timestamp() - interval '11 s' AS long FROM pg_stat_activity WHERE pid = $1`,
      [Number(idle.id)],
    );
    return (rows[0] as { long: boolean }).long;
  });

  const found = await freed(database.url, chain);
  const faults = {
    error: ["waits", "queue-workers", "schedules", "stock-ledger", "quota-ledger", "migrations"],
    warning: ["idle-holders", "failed-jobs", "dead-leases", "named-locks", "pooler", "lock-timeout"],
  };
  for (const [severity, checks] of Object.entries(faults))
    for (const check of checks)
      expect([check, found.find((each) => each.check === check)?.severity]).toEqual([check, severity]);
  // The worst first, and of these what is happening now.
  expect(found.map(({ severity }) => severity)).toEqual(
    ["error", "warning", "hint"].flatMap((each) =>
      found.filter(({ severity }) => severity === each).map(() => each),
    ),
  );
  expect(said(found, "idle-holders")).toEqual([
    expect.stringContaining(`session ${idle.id} of postgres (api)`),
  ]);
  expect(said(found, "failed-jobs")).toEqual([
    expect.stringMatching(/^3 jobs of queue emails failed; the first of them .* ago: Error: smtp refused/),
  ]);
  expect(said(found, "queue-workers")).toEqual([
    expect.stringMatching(
      /^2 jobs of queue reports wait, the oldest for 1\d min, 1 job is with a worker that died, no worker is alive \(1 is dead\)$/,
    ),
  ]);
  const listed = await command(["queue", "--json", "--url", direct]);
  expect((JSON.parse(listed.out) as { queues: unknown[] }).queues).toContainEqual(
    expect.objectContaining({ name: "reports", workers: 0, deadWorkers: 1 }),
  );
  expect(await jobs(hf, "reports", { state: "running" })).toMatchObject({
    jobs: [{ worker: { alive: false } }],
  });
  expect(said(found, "schedules")).toEqual([
    expect.stringMatching(/^a run of schedule cleanup was left by web-3:88 (?:59|6\d) min ago/),
    expect.stringMatching(
      /^the last tick of schedule nightly was 6\d min ago; before, they were \d+ s apart at the most$/,
    ),
  ]);
  expect(said(found, "stock-ledger")).toEqual(["stock of CAP at main: 99 on hand, and 10 by the movements"]);
  expect(said(found, "quota-ledger")).toEqual([
    "quota uploads of edited: 0 used, 2 by its ledger",
    "quota uploads of granted: 5 of credit, 50 by its grants",
  ]);
  expect(said(found, "dead-leases")).toEqual([
    expect.stringMatching(/^lease export:7 of web-3:88 \(fence \d+\) ran out \d+ (?:s|min) ago$/),
  ]);
  expect(said(found, "named-locks")).toEqual([expect.stringMatching(/holds advisory lock 4242$/)]);
  expect(JSON.stringify(found)).not.toContain("of full:");

  // What it says is what mends it; of the pooler's lock it is the end of that session.
  for (const finding of found.filter(({ check }) =>
    ["idle-holders", "dead-leases", "named-locks"].includes(check),
  )) {
    const [word, ...args] = advice(finding);
    expect(word).toBe("holdfast");
    const { code, err } = await command([...args, "--yes", "--url", direct]);
    // A pooler's session is the pooler's to close, and it may have done so since: then the lock is gone with it, and this is the right answer.
    if (finding.check === "named-locks" && code === 2)
      expect(err).toMatch(/^holdfast: There is no session \d+ \(any more\)/);
    else expect(code, err).toBe(0);
  }
  for (const args of [
    ["stock", "reconcile", "--repair"],
    ["quota", "reconcile", "uploads", "--repair"],
    ["queue", "retry", "emails", "--all"],
    ["queue", "discard", "emails", "1", "2", "3"],
    ["migrate"],
  ])
    await command([...args, "--yes", "--url", direct]);
  await using _ = queue<number>(hf, "reports").work(() => {});
  await pool.query("DELETE FROM holdfast.schedule; DELETE FROM holdfast.schedule_run");
  await eventually(async () => {
    const left = await doctor(database.url);
    const names = [...faults.error, ...faults.warning].filter(
      (check) => !["pooler", "lock-timeout"].includes(check),
    );
    expect(left.filter(({ check }) => names.includes(check))).toEqual([]);
  });
});

test.for(["mariadb", "mysql"] as const)("%s", async (server, { skip }) => {
  const reason = unavailable(server);
  skip(reason !== undefined, reason);
  const database = await createDatabase(server);
  const pool = createPool({ uri: database.url, connectionLimit: 6 });
  const hf = holdfast(fromMysql2(pool));
  onTestFinished(async () => {
    await hf.close();
    await pool.end();
    await database.drop();
  });
  await hf.migrate();
  await leaveLease(hf, () => pool.query("UPDATE holdfast_lease SET until = until - INTERVAL 1 MINUTE"));
  const found = await freed(database.url, await sixWait(database.url, hf));
  const [dead, ...more] = found.filter(({ check }) => check === "dead-leases");
  expect(more).toEqual([]);
  expect(dead?.what).toMatch(/^lease export:7 of web-3:88 \(fence \d+\) ran out \d+ (?:s|min) ago$/);
  if (!dead) throw new Error("not found");
  const { code, err } = await command([...advice(dead).slice(1), "--yes", "--url", database.url]);
  expect(code, err).toBe(0);
  const left = await doctor(database.url);
  expect(left.filter(({ check }) => check === "waits" || check === "dead-leases")).toEqual([]);
});

test("SQLite", async ({ skip }) => {
  skip(process.platform !== "linux", "only Linux tells which process has locked a file");
  const folder = mkdtempSync(join(tmpdir(), "holdfast-day-"));
  onTestFinished(() => rmSync(folder, { recursive: true, force: true }));
  const path = join(folder, "app.db");
  const url = `file:${path}`;
  const hf = holdfast(fromNodeSqlite(() => new DatabaseSync(path)));
  onTestFinished(() => hf.close());
  await hf.migrate();
  const db = new DatabaseSync(path);
  onTestFinished(() => db.close());
  db.exec("PRAGMA journal_mode = WAL; CREATE TABLE t (id INTEGER PRIMARY KEY)");
  await leaveLease(hf, async () => db.exec("UPDATE holdfast_lease SET until = until - 60000"));
  writeFileSync(
    join(folder, "stuck.cjs"),
    `const db = new (require("node:sqlite").DatabaseSync)(${JSON.stringify(path)});
    db.exec("BEGIN IMMEDIATE; INSERT INTO t VALUES (1)"); console.log("writing"); setInterval(() => {}, 1000)`,
  );
  const stuck = spawn(process.execPath, ["stuck.cjs"], { cwd: folder, stdio: ["ignore", "pipe", "inherit"] });
  onTestFinished(() => void stuck.kill("SIGKILL"));
  await once(stuck.stdout, "data");
  const waiting = hf.transaction({ wait: 60_000 }, async () => "through");
  const [first, ...others] = await doctor(url);
  expect(first).toMatchObject({ check: "waits", severity: "error" });
  expect(first?.what).toContain(`process ${stuck.pid} (`);
  expect(others.find(({ check }) => check === "dead-leases")?.what).toMatch(/^lease export:7 of web-3:88 /);
  if (!first) throw new Error("nothing found");
  const [word, pid] = advice(first);
  expect([word, pid]).toEqual(["kill", String(stuck.pid)]);
  process.kill(Number(pid));
  expect(await waiting).toBe("through");
  const left = await doctor(url);
  expect(left.map(({ check }) => check)).toEqual(["dead-leases"]);
});

test("as people see it: the first mark is that of the root", async ({ skip }) => {
  const reason = unavailable("postgres");
  skip(reason !== undefined, reason);
  const database = await createDatabase("postgres");
  const pool = new Pool({ connectionString: database.url, max: 2 });
  const hf = holdfast(fromPg(pool));
  onTestFinished(async () => {
    await hf.close();
    await pool.end();
    await database.drop();
  });
  const chain = await sixWait(database.url, hf);
  await eventually(async () => {
    const { rows } = await pool.query(
      "SELECT count(*)::int AS n FROM pg_locks WHERE waitstart < clock_timestamp() - interval '1 s'",
    );
    return (rows[0] as { n: number }).n >= 6;
  });
  const screen = terminal(["doctor", "--url", database.url], { columns: 60, rows: 100 });
  expect(await screen.ended).toBe(1);
  const lines = (await screen.all()).split("\n");
  const at = lines.findIndex((line) => line.startsWith("✗ "));
  expect(lines[at]).toBe("✗ waits");
  expect(lines.slice(at, at + 20).join("\n")).toContain(`    holdfast kill ${chain.root.id}\n`);
  await command(["kill", chain.root.id, "--yes", "--url", database.url]);
  await chain.through();
});
