/** `holdfast migrate`, `queue`, `schedule`, `quota`, `stock` and `audit`, as people and scripts start them. */
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast } from "holdfast";
import { audited, trail } from "holdfast/audit";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { jobs, queue, queues } from "holdfast/queue";
import { type Quota, type QuotaOptions, quota, quotas, subjects } from "holdfast/quota";
import { schedule, schedules } from "holdfast/schedule";
import { stock, stocks } from "holdfast/stock";
import { type Pool as MysqlPool, createPool } from "mysql2/promise";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type Outcome, command, environment, root } from "./harness/command.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { statements } from "./harness/mysql-text.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";

const evil = "na\u001b[31mme\n";

let folder: string;
let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), "holdfast-patterns-"));
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 6 });
  hf = holdfast(fromPg(pool));
});

afterAll(async () => {
  await hf?.close();
  await pool?.end();
  await database?.drop();
  rmSync(folder, { recursive: true, force: true });
});

const run = (...args: string[]) => command(args, { env: { HOLDFAST_URL: database.url } });

// oxlint-disable-next-line typescript/no-unnecessary-type-parameters -- it says what the caller expects.
function json<T = Record<string, unknown>>({ out, err }: Outcome): T {
  expect(out, err).toMatch(/^\{.*\}\n$/s);
  return JSON.parse(out) as T;
}

/** One line for people, and nothing else. */
function complaint({ code, out, err }: Outcome): string {
  expect(code).toBe(2);
  expect(out).toBe("");
  const lines = err.trimEnd().split("\n");
  expect(err).not.toMatch(/\n\s+at /);
  expect(err).not.toContain("\u001b");
  return lines.at(-1) ?? "";
}

const newest = async (target: string) => (await trail(hf, { target, limit: 1 }))[0];

async function tables(of: Pool): Promise<unknown> {
  const { rows } = await of.query(
    `SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns WHERE table_schema = 'holdfast'
     UNION ALL SELECT p.proname, pg_get_function_arguments(p.oid), md5(p.prosrc), '', '' FROM pg_proc p WHERE p.pronamespace = 'holdfast'::regnamespace
     UNION ALL SELECT indexname, indexdef, '', '', '' FROM pg_indexes WHERE schemaname = 'holdfast'
     ORDER BY 1, 2`,
  );
  expect(rows.length).toBeGreaterThan(100);
  return rows;
}

// The first of all: the others need its tables.
describe("migrate", () => {
  test("gives schemas to nodes of Citus only where there are some", async () => {
    const [none, alone, odd] = await Promise.all([
      run("migrate", "--citus", "--places", "2", "--yes"),
      run("migrate", "--places", "2", "--yes"),
      run("migrate", "--citus", "--places", "0", "--yes"),
    ]);
    expect(complaint(none)).toContain("is no Citus");
    expect(complaint(alone)).toContain("--places is for --citus");
    expect(odd.code).not.toBe(0);
    expect((await hf.migrations()).every(({ state }) => state === "missing")).toBe(true);
  });

  test("asks before, does nothing without an answer, applies what is missing, and says so", async () => {
    const [missing, early, refused] = await Promise.all([
      run("migrate", "status", "--json"),
      run("queue"),
      run("migrate"),
    ]);
    expect(missing.code).toBe(1);
    const states = json<{ migrations: { kind: string; state: string }[] }>(missing).migrations;
    const count = (kind: string) => states.filter((each) => each.kind === kind).length;
    const question = `Apply ${count("migration")} migrations and ${count("routine")} routines?`;
    expect(count("migration")).toBeGreaterThan(8);
    expect(count("routine")).toBeGreaterThan(40);
    expect(new Set(states.map(({ state }) => state))).toEqual(new Set(["missing"]));
    expect(complaint(early)).toContain("run holdfast migrate");
    expect(complaint(refused)).toContain("add --yes");
    expect((await hf.migrations()).every(({ state }) => state === "missing")).toBe(true);

    const no = terminal(["migrate"], { env: { HOLDFAST_URL: database.url }, columns: 80 });
    await no.until(question);
    no.type("n\r");
    expect(await no.ended).toBe(1);
    expect(await no.screen()).toContain("Nothing was done.");
    expect((await hf.migrations()).every(({ state }) => state === "missing")).toBe(true);

    const yes = terminal(["migrate", "--note", "first"], { env: { HOLDFAST_URL: database.url } });
    await yes.until(question);
    yes.type("y\r");
    expect(await yes.ended).toBe(0);
    // Folded wherever the terminal ends.
    expect((await yes.screen()).replaceAll("\n", "")).toMatch(
      /Applied 1 keys, .*9 audit, .* routines \(holdfast\.key, .* more\)\./,
    );

    const after = await run("migrate", "status", "--json");
    expect(after.code).toBe(0);
    expect(json(after)).toMatchObject({ missing: 0, outdated: 0 });
    const [line] = await trail(hf);
    expect(line).toMatchObject({ action: "migrate", outcome: "done", details: { note: "first" } });
    expect(line?.result).toHaveLength(states.length);
  });

  test("says which functions are missing or outdated, and makes these again", async () => {
    await pool.query("DROP FUNCTION holdfast.queue_pause");
    await pool.query("UPDATE holdfast.routine SET checksum = 'another' WHERE name = 'holdfast.queue_know'");
    const [status, inWords] = await Promise.all([
      run("migrate", "status", "--json"),
      run("migrate", "status"),
    ]);
    expect([status.code, inWords.code]).toEqual([1, 1]);
    expect(json(status)).toMatchObject({ missing: 1, outdated: 1 });
    expect(inWords.out).toMatch(/routine\s+missing\s+holdfast\.queue_pause/);
    expect(inWords.out).toMatch(/routine\s+outdated\s+holdfast\.queue_know/);
    expect(inWords.out).toContain("are missing or outdated: run holdfast migrate.");
    const made = await run("migrate", "--yes");
    expect(made.out).toContain("Applied 2 routines (holdfast.queue_know, holdfast.queue_pause).");
    expect((await run("migrate", "status")).out).toContain("All of them are applied.");
    expect((await run("migrate", "--yes")).out).toMatch(
      /Nothing to do: \d+ migrations and \d+ routines applied/,
    );
  });

  test("prints SQL that makes the same, without a database", async () => {
    const [all, routines, last, nothing] = await Promise.all([
      command(["migrate", "print", "--engine", "postgres"]),
      command(["migrate", "print", "--engine", "postgres", "--only", "routines"]),
      command(["migrate", "print", "--engine", "postgres", "--from", "9", "--json"]),
      command(["migrate", "print", "--engine", "postgres", "--from", "99"]),
    ]);
    expect(json<{ sql: string }>(last).sql).toMatch(/^-- holdfast begins.*\n-- holdfast 9: audit\n/s);
    expect(json<{ sql: string }>(last).sql).not.toContain("holdfast 8");
    expect(complaint(nothing)).toContain("no migration 99");
    expect(routines.out).toMatch(/^-- holdfast begins.*?\n-- holdfast routine: holdfast\.key\n/s);
    expect(routines.out).not.toMatch(/^-- holdfast \d/m);
    expect(all.out).toContain(routines.out.slice(routines.out.indexOf("-- holdfast routine")).trimEnd());
    const other = await createDatabase("postgres");
    const there = new Pool({ connectionString: other.url, max: 2 });
    const elsewhere = holdfast(fromPg(there));
    try {
      // As psql -f does, and once more: other tools may have had a part of it.
      await there.query(all.out);
      await there.query(all.out);
      expect((await elsewhere.migrations()).every(({ state }) => state === "applied")).toBe(true);
      expect(await tables(there)).toEqual(await tables(pool));
      await there.query("INSERT INTO holdfast.migration (id, name) VALUES (99, 'of tomorrow')");
      const status = await command(["migrate", "status", "--url", other.url]);
      expect(status.code).toBe(0);
      expect(status.err).toContain("newer version of Holdfast than this one: 99 of tomorrow");
    } finally {
      await elsewhere.close();
      await there.end();
      await other.drop();
    }
  });

  test("on SQLite", async () => {
    const [made, printed] = [join(folder, "made.db"), join(folder, "printed.db")];
    new DatabaseSync(made).close();
    const applied = await command(["migrate", "--yes", "--json", "--url", `file:${made}`]);
    expect(json<{ applied: unknown[] }>(applied).applied).toHaveLength(6);
    const db = new DatabaseSync(printed);
    db.exec((await command(["migrate", "print", "--engine", "sqlite"])).out);
    const shape = (of: DatabaseSync) =>
      of.prepare("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name").all();
    const other = new DatabaseSync(made);
    expect(shape(db)).toEqual(shape(other));
    expect(shape(db).length).toBeGreaterThan(2);
    other.close();
    db.close();
    const status = await command(["migrate", "status", "--url", `file:${printed}`]);
    expect(status.code).toBe(0);
    expect(status.out).toContain("All of them are applied.");
    // It has the tables of patterns, too.
    const there = holdfast(fromNodeSqlite(() => new DatabaseSync(printed)));
    await quota(there, { name: "uploads", limit: 100 }).consume("ann", 3);
    expect(await audited(there, { action: "a", target: "t", actor: "me" }, async () => 1)).toBe(1);
    await there.close();
    const shown = await command(["quota", "--url", `file:${printed}`, "--json"]);
    expect(json(shown)).toEqual({ quotas: [{ name: "uploads", subjects: 1 }] });
  });
});

describe.each(["mysql", "mariadb"] as const)("migrate on %s", (server) => {
  const missing = unavailable(server);
  beforeEach(({ skip }) => skip(missing !== undefined, missing));

  test("applies, says what is applied, and prints the same", async () => {
    const [mine, theirs] = await Promise.all([createDatabase(server), createDatabase(server)]);
    const there: MysqlPool = createPool({ uri: theirs.url, connectionLimit: 2 });
    const elsewhere = holdfast(fromMysql2(there));
    try {
      const applied = await command(["migrate", "--yes", "--json", "--url", mine.url]);
      const [status, printed, early] = await Promise.all([
        command(["migrate", "status", "--json", "--url", mine.url]),
        command(["migrate", "print", "--engine", server]),
        command(["queue", "--url", mine.url]),
      ]);
      expect(status.code).toBe(0);
      expect(early.code).toBe(0);
      for (const statement of statements(printed.out)) await there.query(statement);
      const states = (await elsewhere.migrations()).map(({ state }) => state);
      expect(states).toEqual(json<{ applied: unknown[] }>(applied).applied.map(() => "applied"));
      const shape = async (name: string) =>
        (
          await there.query(
            `SELECT table_name AS t, column_name AS c, column_type AS k FROM information_schema.columns WHERE table_schema = ?
             UNION ALL SELECT routine_name, '', SHA2(routine_definition, 256) FROM information_schema.routines WHERE routine_schema = ? ORDER BY 1, 2`,
            [name, name],
          )
        )[0];
      expect(await shape(theirs.name)).toEqual(await shape(mine.name));
    } finally {
      await elsewhere.close();
      await there.end();
      await Promise.all([mine.drop(), theirs.drop()]);
    }
  });
});

describe("queue", () => {
  const emails = () => queue<{ to: number }>(hf, "emails", { retries: 0 });
  let failed: number[];

  beforeAll(async () => {
    await queue(hf, evil).enqueue(null);
    const added = await emails().enqueueMany([1, 2, 3, 4, 5].map((to) => ({ payload: { to } })));
    failed = added.map(({ id }) => id);
    const worker = emails().work(() => {
      throw new Error("smtp \u001b[31mrefused\nand more");
    });
    await eventually(async () => (await emails().counts()).failed === 5);
    await worker.stop();
    await emails().enqueue({ to: 6 }, { delayMs: 3_600_000 });
  });

  test("shows queues, a queue and a job, in words and as JSON", async () => {
    const [words, all, one, job, gone, unknown] = await Promise.all([
      run("queue"),
      run("queue", "--json"),
      run("queue", "show", "emails", "--json"),
      run("queue", "job", "emails", String(failed[0])),
      run("queue", "job", "emails", "999999", "--json"),
      run("queue", "show", "emailz"),
    ]);
    expect(words.out).toMatch(/^emails +0 +1 +0 +5 +0/m);
    expect(words.out).toContain("na\\u001b[31mme\\u000a");
    expect(words.out).not.toContain("\u001b");
    expect(json(all)["queues"]).toEqual([
      expect.objectContaining({ name: "emails", failed: 5, delayed: 1, paused: false }),
      expect.objectContaining({ name: evil, waiting: 1 }),
    ]);
    const shown = json<{ failed: { id: number; error: string; failedAt: string }[] }>(one);
    expect(shown.failed.map(({ id }) => id)).toEqual(failed);
    expect(shown.failed[0]?.error).toContain("Error: smtp \u001b[31mrefused\nand more");
    expect(shown.failed[0]?.failedAt).toMatch(/^\d{4}-\d\d-\d\dT/);
    expect(job.out).toMatch(/^state +failed$/m);
    expect(job.out).toContain('payload      {"to":1}');
    expect(job.out).toContain("Error: smtp \\u001b[31mrefused\nand more");
    expect(gone.code).toBe(1);
    expect(json(gone)).toEqual({ job: null });
    expect(complaint(unknown)).toMatch(/There is no queue "emailz"\. There are "emails"/);
    // Asking makes none.
    expect(await queues(hf, { names: ["emailz"] })).toEqual([]);
  });

  test("changes what it says, and writes it down", async () => {
    const [first, second, third, fourth] = failed.map(String) as [string, string, string, string];
    const retried = await run("queue", "retry", "emails", first, second, "999999", "--yes", "--json");
    expect(retried.code).toBe(1);
    expect(json(retried)).toEqual({ jobs: 2 });
    expect(retried.err).toContain("1 job of those that were named");
    expect(await emails().counts()).toMatchObject({ failed: 3, waiting: 2 });
    expect(await newest("queue:emails")).toMatchObject({
      action: "queue.retry",
      outcome: "done",
      actor: expect.stringMatching(/^.+@.+ as postgres$/),
      details: { ids: [failed[0], failed[1], 999_999] },
      result: { jobs: 2 },
    });

    // What it had failed of is still to be seen.
    const [again, inWords] = await Promise.all([
      run("queue", "job", "emails", first, "--json"),
      run("queue", "job", "emails", first),
    ]);
    expect(json(again)).toMatchObject({
      job: {
        state: "waiting",
        failures: 0,
        before: { attempts: 1, error: expect.stringContaining("smtp \u001b[31mrefused\nand more") },
      },
    });
    expect(inWords.out).toMatch(
      /^It had failed after 1 attempt, and was retried at .* by .* as postgres:\nError: smtp \\u001b\[31mrefused\nand more$/m,
    );

    const discarded = await run("queue", "discard", "emails", third, "--yes", "--note", "a test");
    expect(discarded).toMatchObject({ code: 0, out: "1 job discarded.\n" });
    expect(await emails().inspect(Number(third))).toBeUndefined();
    expect(await newest("queue:emails")).toMatchObject({
      action: "queue.discard",
      details: {
        ids: [Number(third)],
        found: [{ id: Number(third), payload: { to: 3 }, error: expect.stringContaining("smtp") }],
        note: "a test",
      },
      result: { jobs: 1, discarded: [Number(third)] },
    });
    // What was thrown away can be had back.
    const odd = { text: "\u001b[2J", list: [null, 1] };
    const { id } = await queue(hf, "emails").enqueue(odd, { key: "odd", group: "g", priority: 3 });
    const thrown = await run("queue", "discard", "emails", String(id), "999999", "--yes", "--json");
    expect(thrown.code).toBe(1);
    expect(json(thrown)).toMatchObject({
      jobs: 1,
      discarded: [{ id, state: "waiting", payload: odd, key: "odd", group: "g", priority: 3 }],
    });
    expect(await newest("queue:emails")).toMatchObject({ details: { found: [{ id, payload: odd }] } });

    await pool.query(
      "UPDATE holdfast.queue_failed SET failed_at = now() - interval '40 days' WHERE id = $1",
      [fourth],
    );
    expect(json(await run("queue", "prune", "emails", "--before", "30d", "--yes", "--json"))).toEqual({
      jobs: 1,
    });
    expect((await emails().failed()).map(({ id }) => id)).toEqual([failed[4]]);
    expect(await newest("queue:emails")).toMatchObject({ action: "queue.prune", result: { jobs: 1 } });

    expect(json(await run("queue", "retry", "emails", "--all", "--yes", "--json"))).toEqual({ jobs: 1 });
    expect(await emails().counts()).toMatchObject({ failed: 0, waiting: 3 });
  });

  test("lists jobs of each state, page by page", async () => {
    const busy = queue<{ n: number }>(hf, "busy", { groups: { concurrency: 1 } });
    await busy.enqueueMany([1, 2, 3].map((n) => ({ payload: { n }, key: `k${n}`, priority: n })));
    const later = await busy.enqueue({ n: 7 }, { delayMs: 3_600_000, key: "later" });
    const begun = Promise.withResolvers<number>();
    const go = Promise.withResolvers<void>();
    const worker = busy.work(
      async ({ id }) => {
        begun.resolve(id);
        await go.promise;
      },
      { concurrency: 1, batch: 1 },
    );
    try {
      const running = await begun.promise;
      await busy.enqueueMany(["b", "a"].map((group) => ({ payload: { n: 9 }, group })));
      interface Page {
        readonly jobs: {
          id: number;
          state: string;
          key?: string;
          group?: string;
          worker?: { alive: boolean };
        }[];
        readonly next: Record<string, string>;
      }
      const all = json<Page>(await run("queue", "jobs", "busy", "--json"));
      const of = (state: string) => all.jobs.filter((each) => each.state === state);
      expect(of("running")).toMatchObject([
        { id: running, key: "k1", startedAt: expect.stringMatching(/T/), worker: { alive: true } },
      ]);
      expect(of("waiting").map(({ key, group }) => key ?? group)).toEqual(["k2", "k3", "a", "b"]);
      expect(of("delayed")).toMatchObject([
        { id: later.id, key: "later", runAt: expect.stringMatching(/T/) },
      ]);
      expect(all.next).toEqual({});
      // From page to page, from those without a group to those with one.
      const seen: number[] = [];
      for (let after: string | undefined; ;) {
        const more = after === undefined ? [] : ["--after", after];
        const page = json<Page>(
          await run("queue", "jobs", "busy", "--state", "waiting", "--limit", "1", ...more, "--json"),
        );
        seen.push(...page.jobs.map(({ id }) => id));
        if ((after = page.next["waiting"]) === undefined) break;
      }
      expect(seen).toEqual(of("waiting").map(({ id }) => id));
      const narrow = terminal(["queue", "jobs", "emails"], {
        env: { HOLDFAST_URL: database.url },
        columns: 60,
      });
      expect(await narrow.ended).toBe(0);
      const text = await narrow.all();
      expect(text.split("\n").every((line) => line.length <= 60)).toBe(true);
      expect(text).toMatch(/^job +state +age .*key/m);
    } finally {
      go.resolve();
      await worker.stop();
    }
    expect(await jobs(hf, "nowhere", { state: "failed" })).toBeUndefined();
    await expect(jobs(hf, "busy", { state: "failed", after: "x" })).rejects.toThrow(
      /`next` of a page before/,
    );
    await expect(jobs(hf, "busy", { state: "gone" as never })).rejects.toThrow(/no state "gone"/);
    await queue(hf, "busy").discard([later.id]);
  });

  test("pauses and resumes, if somebody at the terminal says yes", async () => {
    const before = await trail(hf);
    const paused = async () => (await emails().counts()).paused;
    const at = (...args: string[]) => terminal(args, { env: { HOLDFAST_URL: database.url }, columns: 80 });
    const no = at("queue", "pause", "emails");
    await no.until('Pause queue "emails"?');
    no.type("\r");
    expect(await no.ended).toBe(1);
    expect(await paused()).toBe(false);
    expect(await trail(hf)).toEqual(before);

    const yes = at("queue", "pause", "emails", "--json");
    await yes.until('Pause queue "emails"?');
    yes.type("y\r");
    expect(await yes.ended).toBe(0);
    expect(await paused()).toBe(true);
    expect(await newest("queue:emails")).toMatchObject({ action: "queue.pause", outcome: "done" });

    const resumed = await run("queue", "resume", "emails", "--yes");
    expect(resumed.out).toBe('Queue "emails" is open.\n');
    expect(await paused()).toBe(false);
    expect(await newest("queue:emails")).toMatchObject({ action: "queue.resume", outcome: "done" });
  });
});

describe("schedule", () => {
  test("shows schedules and their runs", async () => {
    const report = schedule(hf, "report", { every: "1 day", retries: 0, onError: () => {} }, () => {
      throw new Error("out of paper\nreally");
    });
    await report.start();
    await expect(report.runNow()).rejects.toThrow("out of paper");
    await report.stop();
    const fresh = schedule(hf, evil, { every: "1 day" }, () => {});
    await fresh.start();
    await fresh.stop();
    const [all, words, one, unknown] = await Promise.all([
      run("schedule", "--json"),
      run("schedule"),
      run("schedule", "show", "report", "--json"),
      run("schedule", "show", "rapport"),
    ]);
    const known = json<{ schedules: { name: string; lastRun?: { state: string } }[] }>(all).schedules;
    expect(known.map(({ name, lastRun }) => [name, lastRun?.state])).toEqual([
      [evil, undefined],
      ["report", "failed"],
    ]);
    expect(words.out).toMatch(/^report +\S+ \S+ +0 +failed +\d+ m?s +Error: out of paper$/m);
    expect(words.out).not.toContain("\u001b");
    expect(json(one)["runs"]).toEqual([
      expect.objectContaining({
        state: "failed",
        manual: true,
        attempt: 1,
        error: expect.stringMatching(/paper/),
      }),
    ]);
    expect(complaint(unknown)).toContain('There is no schedule "rapport"');
    expect(await schedules(hf, { names: ["rapport"] })).toEqual([]);
  });

  test("pause and resume", async () => {
    const nightly = schedule(hf, "nightly", { every: "1 day" }, () => {});
    const paused = async () => (await nightly.status()).paused;
    await nightly.start();
    await nightly.stop();
    expect(complaint(await run("schedule", "pause", "nightly"))).toContain("--yes");
    expect(complaint(await run("schedule", "pause", "nightli", "--yes"))).toContain("There is no schedule");
    expect(await paused()).toBe(false);
    const done = await run("schedule", "pause", "nightly", "--yes", "--note", "migration");
    expect(done).toMatchObject({ code: 0, out: 'Schedule "nightly" is paused.\n' });
    expect(await paused()).toBe(true);
    expect(await newest("schedule:nightly")).toMatchObject({
      action: "schedule.pause",
      outcome: "done",
      details: { note: "migration" },
    });
    expect((await run("schedule")).out).toMatch(/^nightly .* paused/m);
    expect((await run("schedule", "show", "nightly")).out).toMatch(/state +paused: no tick is begun/);
    expect(json(await run("schedule", "pause", "nightly", "--yes", "--json"))).toMatchObject({
      changed: false,
    });
    const resumed = await run("schedule", "resume", "nightly", "--yes", "--json");
    expect(json(resumed)).toEqual({ schedule: "nightly", paused: false, changed: true });
    expect(await paused()).toBe(false);
    expect(await newest("schedule:nightly")).toMatchObject({ action: "schedule.resume", outcome: "done" });
  });
});

describe("quota", () => {
  const uploads = () => quota(hf, { name: "uploads", limit: 100, per: "day" });

  beforeAll(async () => {
    await uploads().consume("ada", 5, { id: "r1" });
    await uploads().consume("ada", 2, { id: "r2" });
    await uploads().consume({ org: "acme", model: "large" }, 3);
    await uploads().consume(evil, 1);
  });

  test("shows quotas, subjects, how one stands, and its ledger", async () => {
    const [all, some, words, stored, now, several, ledger, unknown, nobody] = await Promise.all([
      run("quota", "--json"),
      run("quota", "show", "uploads", "--json", "--page", "1", "--after", "ada"),
      run("quota", "show", "uploads"),
      run("quota", "show", "uploads", "ada"),
      run("quota", "show", "uploads", "ada", "--limit", "100", "--per", "day", "--json"),
      run("quota", "show", "uploads", '{"org":"acme","model":"large"}', "--json"),
      run("quota", "history", "uploads", "ada", "--json", "--page", "1"),
      run("quota", "show", "upload"),
      run("quota", "grant", "uploads", "adda", "5", "--yes"),
    ]);
    expect(json(all)).toEqual({ quotas: [{ name: "uploads", subjects: 3 }] });
    expect(await quotas(hf)).toEqual([{ name: "uploads", subjects: 3 }]);
    expect(json<{ subjects: unknown[] }>(some).subjects).toEqual([
      expect.objectContaining({ subject: evil }),
    ]);
    expect(words.out).toMatch(/^ada +7 +0 +0 /m);
    expect(words.out).toContain('{"model":"large","org":"acme"}');
    expect(words.out + stored.out).not.toContain("\u001b");
    expect(stored.out).toMatch(/^used +7$/m);
    expect(stored.out).not.toMatch(/^remaining/m);
    expect(stored.err).toContain("defined in your code");
    expect(json(now)).toMatchObject({ now: { used: 7, limit: 100, remaining: 93 }, stored: { version: 2 } });
    expect(json(several)).toMatchObject({ now: null, stored: { used: 3 }, entries: [{ kind: "consume" }] });
    expect(json(ledger)).toMatchObject({ entries: [{ id: "r2", version: 2 }], next: 2 });
    expect(complaint(unknown)).toContain('There is no quota "upload"');
    expect(complaint(nobody)).toContain('has no subject "adda"');
    expect((await subjects(hf, "uploads")).map(({ subject }) => subject)).toEqual([
      "ada",
      evil,
      '{"model":"large","org":"acme"}',
    ]);
  });

  test("grants, limits, plans, refunds and resets, and writes it down", async () => {
    const target = "quota:uploads:ada";
    const changed = async (...args: string[]) =>
      json<{ stored: object }>(await run("quota", ...args, "--yes", "--json")).stored;
    const grant = ["grant", "uploads", "ada", "50", "--expires", "30d", "--id", "ticket", "--note", "sorry"];
    expect(await changed(...grant)).toMatchObject({ credit: 50, used: 7 });
    expect(await newest(target)).toMatchObject({
      action: "quota.grant",
      outcome: "done",
      details: { amount: 50, id: "ticket", note: "sorry" },
    });
    const { entries } = await uploads().history("ada", { limit: 1 });
    expect(entries[0]).toMatchObject({ kind: "grant", source: "holdfast", metadata: { note: "sorry" } });
    expect(entries[0]?.reference).toBe(`audit:${(await newest(target))?.id}`);
    // The same id counts once.
    expect(await changed(...grant)).toMatchObject({ credit: 50 });
    expect(await changed("grant", "uploads", "ada", "30", "--id", "twice")).toMatchObject({ credit: 80 });
    const [credits, one, beyond, much2] = await Promise.all([
      run("quota", "grants", "uploads", "ada", "--json"),
      run("quota", "show", "uploads", "ada"),
      run("quota", "grant", "uploads", "ada", "9007199254740993", "--yes"),
      run("quota", "grant", "uploads", "ada", "9007199254740990", "--yes"),
    ]);
    expect(json(credits)).toMatchObject({
      grants: [
        { id: "ticket", amount: 50, left: 50, expiresAt: expect.stringMatching(/T/) },
        { id: "twice", amount: 30, left: 30 },
      ],
    });
    expect(one.out).toMatch(/^twice +30 +30 +0 +never /m);
    // Neither as another number, nor as a sum that is one.
    expect(beyond.err).toContain("It must be a whole number from 1 to 9007199254740991.");
    expect(complaint(much2)).toContain("come to 9007199254740991 at the most: 9007199254740911 more can be");
    expect(await changed("revoke", "uploads", "ada", "twice", "--note", "by mistake")).toMatchObject({
      credit: 50,
    });
    expect(await newest(target)).toMatchObject({
      action: "quota.revoke",
      outcome: "done",
      details: { grant: "twice", note: "by mistake" },
    });
    expect(complaint(await run("quota", "revoke", "uploads", "ada", "nothing", "--yes"))).toContain(
      "there is no grant nothing",
    );
    expect(await changed("limit", "uploads", "ada", "20")).toMatchObject({ limit: 20 });
    expect((await uploads().peek("ada")).limit).toBe(20);
    expect(await changed("limit", "uploads", "ada", "none")).not.toHaveProperty("limit");
    expect(await changed("plan", "uploads", "ada", "pro")).toMatchObject({ plan: "pro" });
    const planned = quota(hf, {
      name: "uploads",
      limit: { plans: { free: 1, pro: 777 }, default: "free" },
      per: "day",
    });
    expect((await planned.peek("ada")).limit).toBe(777);
    expect(await newest(target)).toMatchObject({ action: "quota.plan", details: { plan: "pro" } });

    expect(complaint(await run("quota", "refund", "uploads", "ada", "r1", "--yes"))).toContain("--per");
    expect(await newest(target)).toMatchObject({ action: "quota.plan" });
    expect(await changed("refund", "uploads", "ada", "r1", "4", "--per", "day")).toMatchObject({ used: 3 });
    expect((await uploads().peek("ada")).used).toBe(3);
    const much = await run("quota", "refund", "uploads", "ada", "r1", "4", "--per", "day", "--yes");
    expect(complaint(much)).toContain("only 1 can still be given back");
    expect(await newest(target)).toMatchObject({
      action: "quota.refund",
      outcome: "failed",
      error: expect.stringContaining("only 1 can still be given back"),
      details: { entry: "r1", amount: 4 },
    });
    expect(await changed("reset", "uploads", "ada")).toMatchObject({ used: 0, credit: 50 });
    expect(await uploads().peek("ada")).toMatchObject({ used: 0, credit: 50 });
    expect((await run("quota", "grant", "uploads", "new one", "1", "--new", "--yes")).code).toBe(0);
    expect((await uploads().peek("new one")).credit).toBe(1);
  });

  const windows: readonly (Pick<QuotaOptions, "window" | "parts"> & { readonly kind: string })[] = [
    { kind: "fixed" },
    { kind: "refill", window: "refill" },
    { kind: "sliding-log", window: "sliding-log" },
    { kind: "sliding-parts", window: "sliding-parts", parts: 4 },
  ];

  test("changes without the window leave a ledger that adds up, and what the window counts", async () => {
    const [per, name] = [1500, (kind: string) => `short ${kind}`];
    const all = windows.map(({ kind, ...rest }) => quota(hf, { name: name(kind), limit: 10, per, ...rest }));
    const each = (work: (it: Quota) => Promise<unknown>) => Promise.all(all.map(work));
    const everywhere = async (verb: string, ...rest: string[]) => {
      const outcomes = await each((it) => run("quota", verb, it.name, "ada", ...rest, "--yes"));
      expect(outcomes.map((outcome) => (outcome as Outcome).code)).toEqual([0, 0, 0, 0]);
    };
    await each((it) => it.consume("ada", 4));
    // The window of what was used is over, and nobody has looked since.
    await sleep(per + 100);
    await everywhere("grant", "10");
    await each((it) => it.consume("ada", 6));
    await each(async (it) => expect((await it.peek("ada")).used).toBeLessThanOrEqual(6));
    const unfit = await run("quota", "limit", "short sliding-parts", "ada", "9", "--per", "1500", "--yes");
    expect(complaint(unfit)).toContain("say --window sliding-parts --parts 4.");
    await everywhere("reset");
    await each(async (it) => expect((await it.peek("ada")).used).toBe(0));
    await each((it) => it.consume("ada", 20));
    await each((it) => expect(it.consume("ada", 20)).rejects.toThrow(/cannot be had/));
    for (const it of all)
      expect(await it.reconcile("ada"), it.name).toMatchObject({ ok: true, findings: [] });
    // As the command asks, which does not know the windows either.
    for (const { name: of } of all)
      expect(await quota(hf, { name: of, limit: Infinity }).reconcile("ada"), of).toMatchObject({ ok: true });
  });

  test("finds what does not add up, and repairs it if asked to", async () => {
    await pool.query(
      "UPDATE holdfast.quota_bucket SET used = used + 5 WHERE quota = 'uploads' AND subject = 'ada'",
    );
    const found = await run("quota", "reconcile", "uploads");
    expect(found.code).toBe(1);
    expect(found.out).toMatch(/^ada: the bucket counts 5 used, the ledger 0$/m);
    expect(found.out).toMatch(/^4 subjects, .*1 subject that does not add up\.$/m);
    expect(await newest("quota:uploads:ada")).not.toMatchObject({ action: "quota.repair" });
    const repaired = await run("quota", "reconcile", "uploads", "--repair", "--yes", "--json");
    expect(repaired.code).toBe(0);
    expect(json(repaired)).toMatchObject({ repaired: true, wrong: [{ subject: "ada" }] });
    expect(await newest("quota:uploads:ada")).toMatchObject({
      action: "quota.repair",
      outcome: "done",
      details: { trust: "ledger" },
    });
    expect(await uploads().reconcile("ada")).toMatchObject({ ok: true });
    expect((await uploads().peek("ada")).used).toBe(0);
    // If what is counted is right, the ledger is what is mended.
    await uploads().consume("ada", 1);
    await pool.query(
      "UPDATE holdfast.quota_bucket SET used = used + 5 WHERE quota = 'uploads' AND subject = 'ada'",
    );
    const levels = await run(
      "quota",
      "reconcile",
      "uploads",
      "ada",
      "--repair",
      "--trust",
      "levels",
      "--yes",
    );
    expect(levels.code, levels.err).toBe(0);
    expect(await uploads().reconcile("ada")).toMatchObject({ ok: true });
    expect((await uploads().peek("ada")).used).toBe(6);
    expect(await newest("quota:uploads:ada")).toMatchObject({ details: { trust: "levels" } });
  });
});

describe("stock", () => {
  const level = async (sku: string, location = "main") => (await stock(hf).level(sku, { location })).onHand;

  beforeAll(async () => {
    await stock(hf).apply([
      { sku: "CAP", quantity: 10 },
      { sku: "HAT", quantity: 2, location: "warehouse" },
      { sku: evil, quantity: 1 },
    ]);
    await stock(hf).decrease("CAP", 3, { source: "ORDER" });
  });

  test("shows levels, movements and where they came from", async () => {
    const [words, first, second, few, ledger, channels, unknown] = await Promise.all([
      run("stock"),
      run("stock", "--json", "--limit", "1"),
      run("stock", "--json", "--limit", "1", "--after", "CAP", "main"),
      run("stock", "--below", "3", "--json"),
      run("stock", "history", "CAP", "--json"),
      run("stock", "channels", "CAP", "--json"),
      run("stock", "history", "CUP"),
    ]);
    expect(words.out).toMatch(/^CAP +main +7 +0 +0 +7$/m);
    expect(words.out).not.toContain("\u001b");
    expect(json(first)).toMatchObject({ levels: [{ sku: "CAP" }], next: { sku: "CAP", location: "main" } });
    expect(json(second)).toMatchObject({ levels: [{ sku: "HAT", location: "warehouse" }] });
    expect(json<{ levels: { sku: string }[] }>(few).levels.map(({ sku }) => sku)).toEqual(["HAT", evil]);
    expect(json(ledger)).toMatchObject({ movements: [{ quantity: -3, source: "ORDER" }, { quantity: 10 }] });
    expect(json(channels)["channels"]).toEqual([
      expect.objectContaining({ source: "MANUAL", net: 10 }),
      expect.objectContaining({ source: "ORDER", net: -3 }),
    ]);
    expect(complaint(unknown)).toBe('holdfast: There is no SKU "CUP".');
    expect(await stocks(hf)).toEqual([{ name: "stock", levels: 3, elsewhere: false }]);
  });

  test("corrects by movements, and writes it down", async () => {
    const adjusted = await run("stock", "adjust", "CAP", "12", "--note", "counted", "--yes", "--json");
    expect(json(adjusted)).toMatchObject({ lines: [{ sku: "CAP", quantity: 5, onHand: 12 }] });
    const { movements } = await stock(hf).history({ sku: "CAP", limit: 1 });
    expect(movements[0]).toMatchObject({ kind: "adjust", source: "MANUAL", note: "counted", balance: 12 });
    expect(movements[0]?.by).toBe((await newest("stock:stock:CAP:main"))?.actor);
    expect(await newest("stock:stock:CAP:main")).toMatchObject({
      action: "stock.adjust",
      outcome: "done",
      details: { count: 12, before: 7, note: "counted" },
    });
    expect((await run("stock", "add", "CAP", "3", "--yes")).code).toBe(0);
    expect(await level("CAP")).toBe(15);
    const taken = await run("stock", "take", "CAP", "100", "--yes");
    expect(complaint(taken)).toContain("100 wanted, 15 available");
    expect(await level("CAP")).toBe(15);
    expect(await newest("stock:stock:CAP:main")).toMatchObject({
      action: "stock.take",
      outcome: "failed",
      error: expect.stringContaining("85 short"),
    });
    const [elsewhere, made] = await Promise.all([
      run("stock", "adjust", "HAT", "1", "--yes"),
      run("stock", "adjust", "HAT", "1", "--location", "shop", "--new", "--yes"),
    ]);
    expect(complaint(elsewhere)).toMatch(/no SKU "HAT" at "main"\. It is at "(?:shop|warehouse)"/);
    expect(made.code).toBe(0);
    expect(await level("HAT", "shop")).toBe(1);
  });

  test("finds what does not add up, and repairs it if asked to", async () => {
    await pool.query("UPDATE holdfast.stock_level SET on_hand = on_hand + 4 WHERE sku = 'CAP'");
    const found = await run("stock", "reconcile");
    expect(found.code).toBe(1);
    expect(found.out).toContain("CAP at main: 19 on hand, but its movements come to 15");
    const repaired = await run("stock", "reconcile", "--repair", "--yes", "--json");
    expect(repaired.code).toBe(0);
    expect(json(repaired)).toMatchObject({ repaired: true });
    expect(await stock(hf).reconcile()).toMatchObject({ ok: true });
    expect(await newest("stock:stock")).toMatchObject({
      action: "stock.repair",
      outcome: "done",
      details: { trust: "ledger" },
    });
    // What a hand has changed is taken back, unless it is said to be right.
    expect(await level("CAP")).toBe(15);
    await pool.query("UPDATE holdfast.stock_level SET on_hand = on_hand + 4 WHERE sku = 'CAP'");
    const asked = terminal(["stock", "reconcile", "--repair", "--trust", "levels"], {
      env: { HOLDFAST_URL: database.url },
      columns: 200,
    });
    await asked.until("Whatever changed it without one counts then.");
    asked.type("y\r");
    expect(await asked.ended).toBe(0);
    expect(await stock(hf).reconcile()).toMatchObject({ ok: true });
    expect(await level("CAP")).toBe(19);
    expect((await run("stock", "reconcile", "--repair", "--trust", "me")).err).toContain(
      "Allowed choices are ledger, levels",
    );
  });

  test("leaves a table of the caller's alone unless it is named", async () => {
    await pool.query("CREATE TABLE product (code text PRIMARY KEY, amount bigint NOT NULL)");
    await pool.query("INSERT INTO product VALUES ('MUG', 4)");
    const levels = { table: "product", sku: "code", onHand: "amount" };
    await stock(hf, { name: "own", levels }).adopt();
    const columns = ["--table", "product", "--sku-column", "code", "--on-hand-column", "amount"];
    const [refused, named] = [
      await run("stock", "adjust", "MUG", "9", "--name", "own", "--yes"),
      await run("stock", "adjust", "MUG", "9", "--name", "own", ...columns, "--yes"),
    ];
    expect(complaint(refused)).toContain("name it with --table");
    expect(named.code).toBe(0);
    expect((await pool.query("SELECT amount::int FROM product")).rows).toEqual([{ amount: 9 }]);
    expect(await stocks(hf)).toMatchObject([{ name: "own", elsewhere: true }, { name: "stock" }]);
  });
});

describe("who may not, and who cannot", () => {
  test("without a terminal and without --yes nothing is changed, and nothing written down", async () => {
    const [audit, standing] = [await trail(hf), await quota(hf, { name: "uploads", limit: 1 }).peek("ada")];
    const refused = await Promise.all([
      run("queue", "pause", "emails"),
      run("quota", "grant", "uploads", "ada", "5"),
      run("stock", "adjust", "CAP", "1"),
    ]);
    for (const outcome of refused) expect(complaint(outcome)).toContain("add --yes");
    expect((await queue(hf, "emails").counts()).paused).toBe(false);
    expect((await stock(hf).level("CAP")).onHand).toBe(19);
    expect((await quota(hf, { name: "uploads", limit: 1 }).peek("ada")).credit).toBe(standing.credit);
    expect(await trail(hf)).toEqual(audit);
  });

  test("a role that may only read sees all, and changes nothing", async () => {
    await pool.query(`CREATE ROLE patterns_reader LOGIN PASSWORD 'r'`);
    await pool.query(`GRANT USAGE ON SCHEMA holdfast TO patterns_reader`);
    await pool.query(`GRANT SELECT ON ALL TABLES IN SCHEMA holdfast TO patterns_reader`);
    const url = new URL(database.url);
    [url.username, url.password] = ["patterns_reader", "r"];
    const as = (...args: string[]) => command([...args, "--url", url.href]);
    try {
      const [all, shown, standing, levels, status, ...refused] = await Promise.all([
        as("queue"),
        as("queue", "show", "emails"),
        as("quota", "show", "uploads", "ada", "--limit", "9", "--per", "day"),
        as("stock"),
        as("migrate", "status"),
        as("queue", "pause", "emails", "--yes"),
        as("stock", "add", "CAP", "1", "--yes"),
      ]);
      for (const outcome of [all, shown, standing, levels, status]) expect(outcome.code, outcome.err).toBe(0);
      for (const outcome of refused)
        expect(complaint(outcome)).toMatch(
          /^holdfast: patterns_reader may not do this in .*: permission denied for table audit\./,
        );
      expect((await queue(hf, "emails").counts()).paused).toBe(false);
      expect((await stock(hf).level("CAP")).onHand).toBe(19);
      // Nor is the password anybody's business.
      expect(refused.map(({ err }) => err).join("")).not.toContain(":r@");
    } finally {
      await pool.query("DROP OWNED BY patterns_reader");
      await pool.query("DROP ROLE patterns_reader");
    }
  });

  test("an unreachable server, and words that are none", async () => {
    const [away, wrong, worse, slip] = await Promise.all([
      run("queue", "--url", "postgres://127.0.0.1:1/nowhere"),
      run("queue", "retry", "emails", "--yes"),
      run("quota", "grant", "uploads", "ada", "many", "--yes"),
      run("queue", "shwo", "emails"),
    ]);
    expect(slip).toMatchObject({
      code: 2,
      err: expect.stringContaining("knows no 'shwo', but show, jobs, job, retry"),
    });
    expect(complaint(away)).toMatch(/Could not connect to postgres:\/\/127\.0\.0\.1:1\/nowhere/);
    expect(complaint(wrong)).toContain("Retry which jobs?");
    expect(worse.code).toBe(2);
    expect(worse.err).toContain("whole number");
  });
});

describe("the audit", () => {
  const me = { action: "test", target: "a test", actor: "me" };

  test("has what was done, what failed, and what was begun by a process that died", async () => {
    const details = { a: "é", n: 1 };
    await expect(
      audited(hf, { ...me, details }, async (line) => ({ line, big: 2n ** 60n })),
    ).resolves.toBeTruthy();
    await expect(
      audited(hf, me, async () => {
        throw new Error("no\0pe");
      }),
    ).rejects.toThrow("no");
    const program = `
      import { Pool } from "pg";
      import { holdfast } from "holdfast";
      import { fromPg } from "holdfast/pg";
      import { audited } from "holdfast/audit";
      const hf = holdfast(fromPg(new Pool({ connectionString: process.env.HOLDFAST_URL })));
      await audited(hf, { action: "test", target: "a test", actor: "it" }, () => new Promise((r) => setTimeout(r, 100_000)));`;
    const child = spawn(
      process.execPath,
      ["--conditions=holdfast-source", "--input-type=module", "--eval", program],
      { cwd: join(root, "test"), env: environment({ HOLDFAST_URL: database.url }), stdio: "inherit" },
    );
    const ended = new Promise((resolve) => child.once("close", resolve));
    try {
      await eventually(async () => (await newest("a test"))?.actor === "it");
    } finally {
      child.kill("SIGKILL");
      await ended;
    }
    const lines = await trail(hf, { target: "a test" });
    expect(lines).toMatchObject([
      { actor: "it", outcome: "begun", endedAt: undefined },
      { actor: "me", outcome: "failed", error: "no\ufffdpe" },
      { actor: "me", outcome: "done", details },
    ]);
    expect(lines[2]?.result).toEqual({ line: lines[2]?.id, big: String(2n ** 60n) });
    expect(lines[2]?.endedAt?.getTime()).toBeGreaterThanOrEqual(lines[2]?.at.getTime() ?? Infinity);
    expect(await trail(hf, { target: "a test", limit: 1, before: lines[0]?.id as number })).toEqual([
      lines[1],
    ]);
  });

  test("needs no right to rewrite what was written", async () => {
    const client = await pool.connect();
    try {
      // As docs/audit.md says.
      await client.query(`CREATE ROLE patterns_support;
        GRANT USAGE ON SCHEMA holdfast TO patterns_support;
        GRANT SELECT ON holdfast.agreed TO patterns_support;
        GRANT SELECT, INSERT, UPDATE (outcome, result, error, ended_at) ON holdfast.audit TO patterns_support`);
      const own = new Pool({ connectionString: database.url, max: 1, options: "-c role=patterns_support" });
      const theirs = holdfast(fromPg(own));
      await audited(theirs, { ...me, target: "support" }, async () => 1);
      expect(await trail(theirs, { target: "support" })).toMatchObject([{ outcome: "done", result: 1 }]);
      await expect(own.query("UPDATE holdfast.audit SET actor = 'nobody'")).rejects.toThrow(/denied/);
      await theirs.close();
      await own.end();
    } finally {
      await client.query("DROP OWNED BY patterns_support; DROP ROLE patterns_support");
      client.release();
    }
  });

  test("does nothing if the line cannot be written", async () => {
    let done = false;
    const work = async () => void (done = true);
    await expect(audited(hf, { ...me, details: { a: "\0" } }, work)).rejects.toThrow(/details.*NUL/);
    await expect(audited(hf, { ...me, target: "" }, work)).rejects.toMatchObject({ code: "HF_USAGE" });
    await expect(audited(hf, { ...me, actor: "x".repeat(1001) }, work)).rejects.toThrow(/up to 1000 bytes/);
    await expect(audited(hf, { ...me, secret: 1 } as never, work)).rejects.toMatchObject({
      code: "HF_USAGE",
    });
    expect(done).toBe(false);
  });

  test("is shown", async () => {
    const [words, some, page] = await Promise.all([
      run("audit"),
      run("audit", "--target", "queue:emails", "--json"),
      run("audit", "--limit", "1"),
    ]);
    expect(words.code).toBe(0);
    expect(words.out).toMatch(/ failed +stock\.take +stock:stock:CAP:main .*Not enough in stock/);
    expect(words.out).not.toContain("\u001b");
    const lines = json<{ lines: { action: string; outcome: string }[] }>(some).lines;
    expect(lines.map(({ action }) => action)).toEqual(
      ["resume", "pause", "retry", "prune", "discard", "discard", "retry"].map((verb) => `queue.${verb}`),
    );
    expect(page.err).toMatch(/More: --before \d+/);
  });
});
