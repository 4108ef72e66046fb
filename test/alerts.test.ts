/**
 * The alerts and the dashboard as they are documented, asked of figures of a real run: as holdfast/prometheus exposes them,
 * and as OpenTelemetry's exporter for Prometheus does. By a Prometheus that watches the run, and by its tool over hours.
 */
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import * as api from "@opentelemetry/api";
import { type Holdfast, holdfast, key, leader, once, versioned } from "holdfast";
import { openTelemetry } from "holdfast/opentelemetry";
import { fromPg } from "holdfast/pg";
import { prometheus } from "holdfast/prometheus";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { Client, Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { freePort } from "../packages/cli/src/server-process.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { type Family, parseExposition } from "./harness/exposition.ts";
import { otelPrometheus, parseOtel } from "./harness/otel-prometheus.ts";
import { type Prometheus, faster, noPrometheus, startPrometheus } from "./harness/prometheus.ts";
import { type Scrape, Timeline, noPromtool, promtool } from "./harness/promtool.ts";
import { eventually } from "./harness/wait.ts";

const root = fileURLToPath(new URL("../", import.meta.url));
const read = (file: string) => readFileSync(root + file, "utf8");
const alerts = read("docs/grafana/alerts.yml");

const ways = ["holdfast/prometheus", "OpenTelemetry"] as const;
type Way = (typeof ways)[number];

/** Figures of one process, both ways at once. */
async function figures(options: Parameters<typeof prometheus>[0]) {
  const native = prometheus(options);
  const exporter = await otelPrometheus();
  const telemetry = openTelemetry(api, { ...options, tracer: false, meter: exporter.meter });
  const server = createServer(native.handler);
  return {
    /** Of OpenTelemetry's exporter. */
    otel: exporter.address,
    /** From now on holdfast/prometheus can be scraped, on that port. Returns where. */
    async listen(port = 0): Promise<string> {
      await new Promise<void>((resolve) => server.listen(port, "127.0.0.1", resolve));
      return `127.0.0.1:${(server.address() as AddressInfo).port}`;
    },
    texts: async (): Promise<Record<Way, string>> => ({
      "holdfast/prometheus": await native.text(),
      OpenTelemetry: await exporter.text(),
    }),
    async close() {
      server.close();
      server.closeAllConnections();
      native.stop();
      telemetry.stop();
      await exporter.close();
    },
  };
}

const parse: Record<Way, (text: string) => Map<string, Family>> = {
  "holdfast/prometheus": parseExposition,
  OpenTelemetry: parseOtel,
};

const flat = (families: ReadonlyMap<string, Family>): Scrape =>
  new Map([...families.values()].flatMap(({ samples }) => [...samples]));

/** What was scraped: before anything had happened, after what is usual, and after what is not. */
type Step = "start" | "usual" | "trouble";
const scraped = new Map<string, string>();
const scrape = (way: Way, step: Step, process = "old"): Map<string, Family> =>
  parse[way](scraped.get(`${process} ${way} ${step}`) as string);

/** What had fired in a real Prometheus: while all was as usual, and since. */
const fired = new Map<Step, readonly string[]>();

const increasing = [
  "HoldfastHazards",
  "HoldfastLockLost",
  "HoldfastScheduleFailed",
  "HoldfastScheduleMissed",
  "HoldfastSlowSections",
  "HoldfastWrongConnection",
];
/** All of them, of both ways; of a process that was not scraped before the trouble, what only increases, and a candidate. */
const expected = [
  ...["native", "otel"].flatMap((job) =>
    [...alerts.matchAll(/- alert: (\w+)/g)].map(([, name]) => `${job} ${name}`),
  ),
  ...[...increasing, "HoldfastNobodyLeads"].map((name) => `unscraped ${name}`),
].toSorted();

let database: TestDatabase;
const closing: (() => Promise<unknown>)[] = [];

/** All that there is to count. */
async function run(): Promise<void> {
  database = await createDatabase("postgres");
  closing.push(() => database.drop());
  const connect = (): [Pool, Holdfast<PoolClient>] => {
    const pool = new Pool({ connectionString: database.url, max: 10 });
    // One of them is terminated.
    pool.on("error", () => {});
    const hf = holdfast(fromPg(pool));
    closing.push(async () => {
      await hf.close();
      if (!pool.ended) await pool.end();
    });
    return [pool, hf];
  };
  const [pool, hf] = connect();
  const [, other] = connect();
  const [farPool, farHf] = connect();
  await hf.migrate();
  await pool.query("CREATE TABLE account (id int PRIMARY KEY, amount int NOT NULL, version int NOT NULL)");
  await pool.query("INSERT INTO account VALUES (1, 0, 1)");

  // Some of it is there before anybody listens.
  const uploads = quota(hf, { name: "uploads", limit: 3, per: "day" });
  const mails = queue<string>(hf, "mails", { retries: 1, backoff: () => 1 });
  const imports = queue<string>(hf, "imports", { retries: 0 });
  const far = queue<string>(farHf, "far");
  const orphans = queue<string>(hf, "orphans");
  const queues = [mails, imports, far, orphans];
  const process = await figures({ queues });
  closing.push(() => process.close());
  const keep = async (step: Step, name = "old", of = process) => {
    for (const [way, text] of Object.entries(await of.texts())) scraped.set(`${name} ${way} ${step}`, text);
  };

  let fails = false;
  const nightly = schedule(hf, "nightly", { every: "1 day", retries: 0, onError: () => {} }, async () => {
    if (fails) throw new Error("no");
  });
  const sweep = schedule(hf, "sweep", { every: 50, catchUp: "last" }, async () => {});
  closing.push(() => sweep.stop());
  await keep("start");
  const unscraped = await figures({});
  closing.push(() => unscraped.close());
  // Nobody answers there before the trouble has come.
  const port = await freePort();
  const prometheus: Prometheus = await startPrometheus(faster(alerts), {
    native: [await process.listen()],
    otel: [process.otel],
    unscraped: [`127.0.0.1:${port}`],
  });
  closing.push(() => prometheus.stop());

  // What is usual: locks are waited for, in vain too; a job fails and is done the second time.
  const uploading = key("upload", 1);
  for (let i = 0; i < 3; i++) await hf.transaction({ lock: uploading }, async () => {});
  const inVain = () =>
    expect(
      hf.transaction({ lock: uploading, wait: 1, separate: true }, async () => {}),
    ).rejects.toMatchObject({
      code: "HF_LOCK_TIMEOUT",
    });
  await hf.transaction({ lock: uploading }, async () => {
    await hf.tryLock(uploading, async () => {}, { separate: true });
    await inVain();
  });
  for (const lock of [key("hot", 1), key("warm", 1)]) await hf.transaction({ lock }, async () => {});
  await (await hf.hold(key("deploy", 1))).release();
  await (await hf.lease(key("import", 1))).release();
  const workers = [
    mails.work(async ({ attempt }) => {
      if (attempt === 1) throw new Error("no");
    }),
    imports.work(async ({ payload }) => {
      if (payload === "bad") throw new Error("no");
    }),
  ];
  closing.push(() => Promise.all(workers.map((worker) => worker.stop())));
  await mails.enqueue("hello");
  await imports.enqueue("good");
  await nightly.runNow();
  const led = Promise.withResolvers<void>();
  const taken = Promise.withResolvers<void>();
  const indexer = leader(
    hf,
    "indexer",
    async ({ signal }) => {
      led.resolve();
      await new Promise((resolve) => signal.addEventListener("abort", resolve));
      if (!fails) return;
      // Until somebody else has it, who does not lead.
      await taken.promise;
    },
    { ttl: 9000 },
  );
  closing.push(() => indexer.stop());
  await led.promise;
  await uploads.tryConsume("ada", 1);
  await versioned(hf, "account").update(1, () => ({ amount: 5 }));
  await once(hf, "event", async () => 1);
  await eventually(async () => {
    expect(await mails.counts()).toMatchObject({ waiting: 0, delayed: 0, running: 0, failed: 0 });
    expect(await imports.counts()).toMatchObject({ waiting: 0, running: 0, failed: 0 });
  });
  await eventually(async () => {
    const found = await process.texts();
    for (const way of ways)
      expect(found[way]).toMatch(/^holdfast_queue_jobs_total\{[^}]*queue="mails",outcome="done"[^}]*\} 1$/m);
  });
  await keep("usual");
  // Longer than any alert waits; and jobs go on.
  await eventually(async () => expect(await prometheus.query("up == 1")).toHaveLength(2));
  for (let i = 0; i < 15; i++) {
    await imports.enqueue("good");
    await sleep(1000);
  }
  await eventually(async () => expect(await imports.counts()).toMatchObject({ waiting: 0, running: 0 }));
  fired.set("usual", await prometheus.fired());

  // Another process that has just been started, and is asked for the first time. What happens first is trouble.
  const young = await figures({ queues, locks: ["upload", "deploy", "import", "leader", "hot", "warm"] });
  closing.push(() => young.close());
  await keep("start", "new", young);

  fails = true;
  await hf.transaction({ lock: uploading }, async () => {
    for (let i = 0; i < 60; i++) await inVain();
  });
  // Not on a connection that a worker has: it would show that one's name.
  const held = await other.hold(key("deploy", 2));
  const { holders } = await hf.inspect();
  const pid = holders.find(({ name }) => name.startsWith("deploy:2"))?.session.id;
  await pool.query("SELECT pg_terminate_backend($1)", [pid]);
  await eventually(() => held.signal.aborted);
  const lease = await hf.lease(key("import", 2), { ttl: 9000 });
  await pool.query("DELETE FROM holdfast.lease WHERE name = 'import:2' OR name = 'leader:indexer'");
  const usurper = await other.lease(key("leader", "indexer"), { wait: 60_000, ttl: 600_000 });
  closing.push(() => usurper.release());
  taken.resolve();
  await eventually(() => lease.signal.aborted && !indexer.leading);
  await imports.enqueue("bad");
  await eventually(async () => expect(await imports.counts()).toMatchObject({ running: 0, failed: 1 }));
  await farHf.close();
  await farPool.end();
  await expect(nightly.runNow()).rejects.toThrow();
  await hf.transaction(async () => void (await pool.query("SELECT 1")));
  // What is a second elsewhere is a millisecond here.
  const impatient = holdfast(fromPg(pool), { slow: { suspect: 0, broken: 1 }, hazards: "warn" });
  closing.push(() => impatient.close());
  for (let i = 0; i < 5; i++)
    await impatient.transaction({ lock: uploading }, async ({ client }) => {
      await client.query("SELECT pg_sleep(0.01)");
      await new Promise((resolve) => setTimeout(resolve, 5));
    });
  await orphans.enqueue("nobody comes");
  // Nobody runs it for a while.
  await sweep.start();
  await eventually(async () => expect(await sweep.runs(1)).toHaveLength(1));
  await sweep.stop();
  await sleep(500);
  await sweep.start();
  await eventually(async () => expect((await process.texts())["holdfast/prometheus"]).toMatch(missedOnce));
  await sweep.stop();
  await storm(pool, 60);
  await keep("trouble");
  await keep("trouble", "new", young);
  await unscraped.listen(port);
  await eventually(
    async () => {
      const all = await prometheus.fired();
      // These last for ten seconds, in which a busy machine may not be scraped. Then they come again.
      const brief = ["LockTimeouts", "RetryStorm", "ManyAttempts"].map((name) => `Holdfast${name}`);
      const found = all.filter((each) => !brief.some((name) => each === `unscraped ${name}`));
      fired.set("trouble", found);
      if (!brief.every((name) => ["native", "otel"].every((job) => found.includes(`${job} ${name}`)))) {
        await storm(pool, 60);
        await hf.transaction({ lock: uploading }, async () => {
          for (let i = 0; i < 60; i++) await inVain();
        });
      }
      expect(found).toEqual(expected);
    },
    { timeout: 120_000, interval: 1000 },
  ).catch(() => {});
}

const missedOnce = /^holdfast_schedule_missed_total\{schedule="sweep"\} [1-9]/m;

/** Somebody else changes what a transaction has read: it is begun again, once or four times. */
async function storm(pool: Pool, calls: number): Promise<void> {
  // Its transactions take their time on a busy machine, which is another alert's.
  const hf = holdfast(fromPg(pool), { slow: false, retry: { baseMs: 1, maxMs: 1 } });
  const other = new Client({ connectionString: database.url });
  await other.connect();
  try {
    for (const [namespace, retries] of [
      ["warm", 1],
      ["hot", 4],
    ] as const)
      for (let i = 0; i < calls / retries; i++)
        await hf.transaction(
          { lock: key(namespace, 1), isolation: "serializable" },
          async ({ client, attempt }) => {
            await client.query("SELECT amount FROM account WHERE id = 1");
            if (attempt <= retries) await other.query("UPDATE account SET amount = amount + 1 WHERE id = 1");
            await client.query("UPDATE account SET amount = amount - 1 WHERE id = 1");
          },
        );
  } finally {
    await other.end();
    await hf.close();
  }
}

const reason = noPromtool() ?? noPrometheus();
beforeAll(() => (reason === undefined ? run() : undefined), 300_000);

afterAll(async () => {
  for (const close of closing.toReversed()) await close();
});

beforeEach(({ skip }) => skip(reason !== undefined, reason));

test("promtool reads the rules", async () => {
  expect(await promtool(["check", "rules", `${root}docs/grafana/alerts.yml`])).toContain("13 rules found");
});

test("a real Prometheus: nothing fires while all is as usual", () => {
  expect(fired.get("usual")).toEqual([]);
});

test("a real Prometheus: every alert fires for its fault, also for what came before the first scrape", () => {
  expect(fired.get("trouble")).toEqual(expected);
});

test("both ways have the same figures, and the same types", () => {
  const [native, otel] = ways.map((way) => scrape(way, "trouble")) as [
    Map<string, Family>,
    Map<string, Family>,
  ];
  const typed = (families: Map<string, Family>) =>
    Object.fromEntries([...families].map(([name, { type, help }]) => [name, `${type} ${help}`]));
  expect(typed(otel)).toEqual(typed(native));
  const counts = (families: Map<string, Family>) =>
    Object.fromEntries(
      // How often a queue could not be asked is another number for each of them: it is asked by scrapes.
      [...(flat(families) as Map<string, number>)].filter(
        ([name]) => !/_(bucket|sum)(\{|$)|^holdfast_queue_unknown_total/.test(name),
      ),
    );
  expect(counts(otel)).toEqual(counts(native));
});

describe.each(ways)("%s", (way) => {
  const firing = (alert: string, labels: Readonly<Record<string, string>> = {}): string => {
    const all = { __name__: "ALERTS", alertname: alert, alertstate: "firing", job: "api", ...labels };
    return `{${Object.entries(all)
      .map(([label, value]) => `${label}="${value}"`)
      .join(", ")}}`;
  };
  /** That these fire then, and no others. */
  const fire = (at: string, ...which: string[]) => ({
    at,
    expr: 'ALERTS{alertstate="firing"}',
    answer: Object.fromEntries(which.map((each) => [each, 1])),
  });

  const waits = [
    firing("HoldfastLockTimeouts", { lock: "upload" }),
    firing("HoldfastRetryStorm", { lock: "warm" }),
    firing("HoldfastRetryStorm", { lock: "hot" }),
    firing("HoldfastManyAttempts", { lock: "hot" }),
  ];
  const quarter = [
    firing("HoldfastLockLost", { kind: "session", lock: "deploy" }),
    firing("HoldfastLockLost", { kind: "lease", lock: "import" }),
    firing("HoldfastLockLost", { kind: "lease", lock: "leader" }),
    firing("HoldfastSlowSections", { lock: "upload" }),
  ];
  const hour = [
    firing("HoldfastScheduleFailed", { schedule: "nightly" }),
    firing("HoldfastScheduleMissed", { schedule: "sweep" }),
    firing("HoldfastWrongConnection"),
    firing("HoldfastHazards", { kind: "timer" }),
  ];
  const lasting = [firing("HoldfastJobsFailed", { queue: "imports" })];
  const later = [
    firing("HoldfastNobodyLeads", { leader: "leader:indexer" }),
    firing("HoldfastQueueUnseen", { queue: "far" }),
  ];
  const idle = firing("HoldfastQueueWithoutWorkers", { queue: "orphans" });

  test("promtool reads what is exposed, and finds nothing to complain of", async () => {
    for (const step of ["start", "usual", "trouble"] as const)
      expect(await promtool(["check", "metrics"], scraped.get(`old ${way} ${step}`) as string)).toBe("");
  });

  test("each alert fires when it should, and no other; and ends when it should", async () => {
    const time = new Timeline()
      .add("start", flat(scrape(way, "start")), 5)
      .add("usual", flat(scrape(way, "usual")), 60)
      .add("trouble", flat(scrape(way, "trouble")), 180)
      .add("gone", undefined, 60);
    await time.ask(alerts, [
      fire(time.at("start", 4)),
      fire(time.at("usual", 1)),
      fire(time.at("usual", 20)),
      fire(time.at("usual", 59)),
      fire(time.at("trouble", 1), ...waits, ...quarter, ...hour, ...lasting),
      fire(time.at("trouble", 3), ...waits, ...quarter, ...hour, ...lasting, later[0] as string),
      fire(time.at("trouble", 10), ...quarter, ...hour, ...lasting, ...later, idle),
      fire(time.at("trouble", 30), ...hour, ...lasting, ...later, idle),
      fire(time.at("trouble", 150), ...lasting, ...later, idle),
      // Nobody is left who could say anything.
      fire(
        time.at("gone", 10),
        ...later,
        ...["mails", "imports", "orphans"].map((name) => firing("HoldfastQueueUnseen", { queue: name })),
      ),
    ]);
  });

  test("what happens right after the first scrape of a process is not missed", async () => {
    const time = new Timeline()
      .add("start", flat(scrape(way, "start", "new")), 0.5)
      .add("trouble", flat(scrape(way, "trouble", "new")), 15);
    await time.ask(alerts, [
      fire(time.at("trouble", 1), ...waits, ...quarter, ...hour, ...lasting),
      fire(time.at("trouble", 10), ...quarter, ...hour, ...lasting, ...later, idle),
    ]);
  });

  test("a leader that is named in the alert is missed also if nobody has ever seen it", async () => {
    const [, rules = ""] = /```yaml\n([^]*?)```/.exec(read("docs/metrics.md")) ?? [];
    const [, name = ""] = /alert: (\w+)/.exec(rules) ?? [];
    const [, ledBy = ""] = /leader="([^"]+)"/.exec(rules) ?? [];
    expect(ledBy).toBe("leader:indexer");
    const whole = `groups:\n  - name: named\n    rules:\n${rules.replaceAll(/^/gm, "      ").trimEnd()}\n`;
    const time = new Timeline()
      .add("start", flat(scrape(way, "start")), 10)
      .add("usual", flat(scrape(way, "usual")), 10)
      .add("trouble", flat(scrape(way, "trouble")), 10);
    // Nothing is known of what is not there.
    const missed = firing(name).replace(', job="api"', "");
    await time.ask(whole, [
      fire(time.at("start", 5), missed),
      fire(time.at("usual", 5)),
      fire(time.at("trouble", 5), missed),
    ]);
  });

  test("every panel of the dashboard shows something", async () => {
    const { panels } = JSON.parse(read("docs/grafana/holdfast.json")) as {
      readonly panels: readonly { readonly title: string; readonly targets?: readonly { expr: string }[] }[];
    };
    const exprs = panels.flatMap(({ targets = [] }) => targets.map(({ expr }) => expr));
    expect(exprs.length).toBeGreaterThan(40);
    const time = new Timeline()
      .add("start", flat(scrape(way, "start")), 5)
      .add("usual", flat(scrape(way, "usual")), 5)
      .add("trouble", flat(scrape(way, "trouble")), 5);
    await time.ask(
      alerts,
      exprs.map((expr) => ({
        at: time.at("trouble", 1),
        expr: `clamp_max(count(${expr.replaceAll("$job", ".*").replaceAll("$__rate_interval", "5m")}), 1)`,
        answer: { "{}": 1 },
      })),
    );
  });
});
