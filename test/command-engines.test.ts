/** Verbs about patterns, on every engine that has them; `command-patterns.test.ts` has all of them on PostgreSQL. */
import { type Holdfast, holdfast } from "holdfast";
import { trail } from "holdfast/audit";
import { jobs, queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import type { ConformanceSite } from "holdfast/testing";
import { describe, expect, onTestFinished, test } from "vitest";
import { type Backend, backends } from "./backends.ts";
import { command } from "./harness/command.ts";
import { missing, placeFor } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

/** One client of each: which one has written the tables is nothing to the command. MySQL has the statements of MariaDB. */
const names = [
  ...(process.env["HOLDFAST_LONG"] === "1" ? ["mysql2 on MySQL"] : []),
  "mariadb on MariaDB",
  "better-sqlite3",
];
const engines = backends.filter(({ name }) => names.includes(name));

interface Shop {
  readonly hf: Holdfast<unknown>;
  readonly url: string;
  /** What it prints as JSON. Fails unless it ends with this code. */
  run(code: number, ...args: string[]): Promise<Record<string, unknown>>;
  words(...args: string[]): Promise<string>;
  /** A statement of somebody's, in a transaction. */
  ask(text: string): Promise<void>;
}

async function open(backend: Backend): Promise<Shop> {
  const place = await placeFor(backend);
  const site: ConformanceSite = await backend.open(place.url);
  const hf = holdfast(site.database);
  onTestFinished(async () => {
    await hf.close();
    await site.close();
    await place.drop();
  });
  const url = backend.server === "file" ? `file:${place.url}` : place.url;
  return {
    hf,
    url,
    async run(code, ...args) {
      const done = await command([...args, "--json", "--url", url]);
      expect([args, done.code, done.err.includes("    at ")], done.err + done.out).toEqual([
        args,
        code,
        false,
      ]);
      return JSON.parse(done.out) as Record<string, unknown>;
    },
    async words(...args) {
      const done = await command([...args, "--url", url]);
      expect([args, done.code], done.err + done.out).toEqual([args, 0]);
      return done.out;
    },
    ask: (text) => hf.transaction(async (tx) => void (await site.send(tx.client, text))),
  };
}

test("there is one client of each engine", () => {
  expect(engines.map(({ name }) => name).toSorted()).toEqual(names.toSorted());
});

describe.each(engines)("$name", (backend) => {
  const lacking = missing(backend);

  test("queue, schedule and audit", { timeout: 120_000 }, async ({ skip }) => {
    skip(lacking !== undefined, lacking);
    const { hf, run, words } = await open(backend);
    await run(0, "migrate", "--yes");
    expect(await run(0, "migrate", "status")).toMatchObject({ missing: 0, outdated: 0 });

    const emails = queue<{ to: number }>(hf, "emails", { retries: 0 });
    const added = await emails.enqueueMany([1, 2, 3].map((to) => ({ payload: { to } })));
    const [first, second, third] = added.map(({ id }) => String(id)) as [string, string, string];
    const worker = emails.work(() => {
      throw new Error("smtp refused");
    });
    await eventually(async () => (await emails.counts()).failed === 3);
    await worker.stop();
    await emails.enqueue({ to: 4 }, { delayMs: 3_600_000, key: "later" });
    const [all, one, job, delayed] = await Promise.all([
      words("queue"),
      run(0, "queue", "show", "emails"),
      run(0, "queue", "job", "emails", first),
      run(0, "queue", "jobs", "emails", "--state", "delayed"),
    ]);
    expect(all).toMatch(/^emails +0 +1 +0 +3 +0/m);
    expect(one).toMatchObject({
      queue: { failed: 3, delayed: 1, paused: false },
      failed: [1, 2, 3].map(() => ({ error: expect.stringContaining("smtp refused") })),
    });
    expect(job).toMatchObject({ job: { state: "failed", payload: { to: 1 } } });
    expect(delayed).toMatchObject({ jobs: [{ key: "later" }] });
    expect(await run(0, "queue", "retry", "emails", first, "--yes", "--note", "a test")).toEqual({ jobs: 1 });
    expect(await run(0, "queue", "discard", "emails", second, "--yes")).toMatchObject({ jobs: 1 });
    expect(await emails.counts()).toMatchObject({ failed: 1, waiting: 1 });
    // Not so old yet.
    expect(await run(0, "queue", "prune", "emails", "--before", "1d", "--yes")).toEqual({ jobs: 0 });
    expect((await emails.failed()).map(({ id }) => String(id))).toEqual([third]);
    expect(await run(0, "queue", "pause", "emails", "--yes")).toMatchObject({ paused: true, changed: true });
    expect((await emails.counts()).paused).toBe(true);

    const report = schedule(hf, "report", { every: "1 hour", retries: 0, onError: () => {} }, () => {
      throw new Error("out of paper");
    });
    await report.start();
    await expect(report.runNow()).rejects.toThrow("out of paper");
    await report.stop();
    const [schedules, itsRuns] = await Promise.all([words("schedule"), run(0, "schedule", "show", "report")]);
    expect(schedules).toMatch(/^report .* failed .*out of paper$/m);
    expect(itsRuns).toMatchObject({
      runs: [{ state: "failed", manual: true, error: expect.stringContaining("paper") }],
    });
    expect(await run(0, "schedule", "pause", "report", "--yes")).toMatchObject({ changed: true });
    expect((await report.status()).paused).toBe(true);

    // Who did what is written down, and shown.
    const { lines } = (await run(0, "audit")) as { lines: { action: string; outcome: string }[] };
    expect(lines.map(({ action, outcome }) => [action, outcome])).toEqual(
      ["schedule.pause", "queue.pause", "queue.prune", "queue.discard", "queue.retry", "migrate"].map(
        (action) => [action, "done"],
      ),
    );
    expect(await trail(hf, { target: "queue:emails", limit: 10 })).toHaveLength(4);
  });

  test("quota and stock", { timeout: 120_000 }, async ({ skip }) => {
    skip(lacking !== undefined, lacking);
    const { hf, run, words, ask } = await open(backend);
    await hf.migrate();
    const uploads = quota(hf, { name: "uploads", limit: 100, per: "day" });
    await uploads.consume("ada", 7, { id: "use" });
    expect(await run(0, "quota")).toEqual({ quotas: [{ name: "uploads", subjects: 1 }] });
    await run(0, "quota", "grant", "uploads", "ada", "5", "--per", "day", "--id", "gift", "--yes");
    await run(0, "quota", "limit", "uploads", "ada", "50", "--per", "day", "--yes");
    await run(0, "quota", "refund", "uploads", "ada", "use", "2", "--per", "day", "--yes");
    expect(await run(0, "quota", "show", "uploads", "ada", "--limit", "100", "--per", "day")).toMatchObject({
      now: { used: 5, credit: 5, limit: 50, remaining: 50 },
      grants: [{ id: "gift", left: 5 }],
    });
    expect(await words("quota", "history", "uploads", "ada")).toMatch(/ refund .* use/);
    await ask("UPDATE holdfast_quota_bucket SET used = used + 3");
    expect(await run(1, "quota", "reconcile", "uploads")).toMatchObject({
      wrong: [{ subject: "ada" }],
    });
    await run(0, "quota", "reconcile", "uploads", "--repair", "--yes");
    expect(await uploads.peek("ada")).toMatchObject({ used: 5 });

    const shop = stock(hf);
    await shop.apply([{ sku: "CAP", quantity: 10 }], { source: "MANUAL" });
    await run(0, "stock", "adjust", "CAP", "12", "--note", "counted", "--yes");
    await run(0, "stock", "take", "CAP", "2", "--yes");
    await run(2, "stock", "take", "CAP", "100", "--yes");
    expect(await words("stock")).toMatch(/^CAP +main +10 +0 +0 +10$/m);
    expect(await run(0, "stock", "history", "CAP")).toMatchObject({
      movements: [{ quantity: -2 }, { quantity: 2, note: "counted" }, { quantity: 10 }],
    });
    expect(await run(0, "stock", "channels", "CAP")).toMatchObject({ channels: [{ net: 10 }] });
    await ask("UPDATE holdfast_stock_level SET on_hand = on_hand + 4");
    await run(1, "stock", "reconcile");
    expect(await run(0, "stock", "reconcile", "--repair", "--yes")).toMatchObject({ repaired: true });
    expect((await shop.level("CAP")).onHand).toBe(10);
  });

  test("the doctor looks at queues, schedules and ledgers", { timeout: 120_000 }, async ({ skip }) => {
    skip(lacking !== undefined, lacking);
    const { hf, run, ask } = await open(backend);
    const checks = [
      "queue-workers",
      "failed-jobs",
      "schedules",
      "stock-ledger",
      "quota-ledger",
      "dead-leases",
    ];
    const doctor = async (code: number) => {
      const { findings, checks: looked } = await run(code, "doctor", "--strict", "--only", ...checks);
      expect((looked as { id: string }[]).map(({ id }) => id)).toEqual(checks);
      return findings as { check: string; what: string }[];
    };
    // Of tables that are not there, nothing can be said.
    expect(await doctor(0)).toEqual([]);
    await hf.migrate();
    const uploads = quota(hf, { name: "uploads", limit: 100, per: "minute" });
    await uploads.consume("ada", 7);
    await uploads.grant("ada", 3);
    await (await uploads.hold("ada", 2)).settle(1);
    await uploads.hold("bob", 2);
    const shop = stock(hf);
    await shop.apply([{ sku: "CAP", quantity: 10 }]);
    await shop.reserve([{ sku: "CAP", quantity: 3 }]);
    const nightly = schedule(hf, "nightly", { every: 100 }, () => {});
    await nightly.start();
    await eventually(async () => (await nightly.runs(10)).length >= 4);
    await nightly.stop();
    await queue(hf, "emails").enqueue(1);
    await queue(hf, "emails").enqueue(2, { delayMs: 3_600_000 });
    // All of this is well.
    expect(await doctor(0)).toEqual([]);

    await ask("UPDATE holdfast_quota_bucket SET used = 0 WHERE subject = 'ada'");
    await ask("UPDATE holdfast_stock_level SET on_hand = 99");
    // An hour later: moments are microseconds.
    await ask("UPDATE holdfast_queue_ready SET at = at - 3600000000");
    await ask("UPDATE holdfast_schedule SET last = last - 3600000000");
    const failing = queue(hf, "letters", { retries: 0 });
    await failing.enqueue(1);
    const worker = failing.work(() => {
      throw new Error("no paper");
    });
    await eventually(async () => (await failing.counts()).failed === 1);
    await worker.stop();
    expect((await doctor(1)).map(({ check, what }) => `${check}: ${what}`)).toEqual([
      expect.stringMatching(
        /^queue-workers: 1 job of queue emails waits, the oldest for \d+ \w+, it has no worker$/,
      ),
      expect.stringMatching(/^schedules: the last tick of schedule nightly was \d+ \w+ ago/),
      "stock-ledger: stock of CAP at main: 99 on hand, and 10 by the movements",
      expect.stringMatching(/^quota-ledger: quota uploads of ada: 0 used, \d+ by its ledger$/),
      expect.stringMatching(
        /^failed-jobs: 1 job of queue letters failed; the first of them .* ago: Error: no paper/,
      ),
    ]);
    expect(await jobs(hf, "emails", { state: "waiting" })).toMatchObject({ jobs: [{ state: "waiting" }] });
  });
});

test("a file that libSQL has made", { timeout: 60_000 }, async () => {
  const backend = backends.find(({ name }) => name === "libsql");
  const { hf, run } = await open(backend as Backend);
  await hf.migrate();
  await quota(hf, { name: "uploads", limit: 100 }).consume("ada", 7);
  await queue(hf, "emails").enqueue(1);
  const [quotas, queues] = await Promise.all([
    run(0, "quota", "show", "uploads"),
    run(0, "queue", "pause", "emails", "--yes"),
  ]);
  expect(quotas).toMatchObject({ subjects: [{ subject: "ada", used: 7 }] });
  expect(queues).toMatchObject({ paused: true, changed: true });
  expect((await queue(hf, "emails").counts()).paused).toBe(true);
});
