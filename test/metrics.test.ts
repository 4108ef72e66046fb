/** Spans and figures: what OpenTelemetry and Prometheus are told is what happened, and nothing that is secret. */
import diagnostics from "node:diagnostics_channel";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { DatabaseSync } from "node:sqlite";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import * as api from "@opentelemetry/api";
import { AsyncLocalStorageContextManager } from "@opentelemetry/context-async-hooks";
import {
  InMemorySpanExporter,
  type ReadableSpan,
  SimpleSpanProcessor,
  type SpanProcessor,
  TracerProvider,
} from "@opentelemetry/sdk-trace";
import { type Events, type Holdfast, holdfast, key, leader, once, shared, versioned } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { type Telemetry, openTelemetry } from "holdfast/opentelemetry";
import { fromPg } from "holdfast/pg";
import { type Prometheus, prometheus } from "holdfast/prometheus";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import mysql from "mysql2/promise";
import { Pool, type PoolClient } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type Backend, backends } from "./backends.ts";
import { type Family, parseExposition } from "./harness/exposition.ts";
import { type OtelPrometheus, otelPrometheus, parseOtel } from "./harness/otel-prometheus.ts";
import { missing, placeFor } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

const root = fileURLToPath(new URL("../", import.meta.url));
const read = (file: string) => readFileSync(root + file, "utf8");

/** Everything that is ever published, as its source has it. */
const source = read("packages/holdfast/src/events/events.ts");
const published = [
  ...new Set([...source.matchAll(/^ {2}"(holdfast:[\w:]+)"/gm)].map(([, name]) => name ?? "")),
];
const traces = ["transaction", "retry", "lock", "job", "schedule"].map((name) => `holdfast:${name}`);
const events = published.filter((name) => !traces.includes(name));

function heard(): string[] {
  return [
    ...events.filter((name) => diagnostics.hasSubscribers(name)),
    ...traces.filter((name) => diagnostics.tracingChannel(name).hasSubscribers),
  ];
}

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;
const exporter = new InMemorySpanExporter();
/** The times of spans are not fine enough to tell which began first. */
const began: string[] = [];
const order: SpanProcessor = {
  onStart: (each) => void began.push(each.spanContext().spanId),
  onEnd() {},
  async forceFlush() {},
  async shutdown() {},
};
const tracers = new TracerProvider({ spanProcessors: [order, new SimpleSpanProcessor({ exporter })] });
const mine = tracers.getTracer("mine");
let telemetry: Telemetry | undefined;
let fresh = 0;

beforeAll(async () => {
  api.context.setGlobalContextManager(new AsyncLocalStorageContextManager().enable());
  api.trace.setGlobalTracerProvider(tracers);
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 10 });
  // What is slow depends on the machine.
  hf = holdfast(fromPg(pool), { slow: false });
  await hf.migrate();
  await pool.query("CREATE TABLE account (id int PRIMARY KEY, amount int NOT NULL, version int NOT NULL)");
  await pool.query("INSERT INTO account VALUES (1, 0, 1), (2, 0, 1)");
});

afterAll(async () => {
  await hf.close();
  await pool.end();
  await database.drop();
  api.trace.disable();
  api.context.disable();
});

beforeEach(() => {
  fresh++;
  exporter.reset();
  began.length = 0;
});

afterEach(() => {
  telemetry?.stop();
  const left = heard();
  if (left.length > 0) throw new Error(`still subscribed: ${left.join(", ")}`);
});

/** With a span of the caller's around it, as in a request. */
async function request<T>(body: () => Promise<T>): Promise<T> {
  return mine.startActiveSpan("request", async (span) => {
    try {
      return await body();
    } finally {
      span.end();
    }
  });
}

function step(name: string): void {
  mine.startSpan(name).end();
}

function spans(name: string): ReadableSpan[] {
  return exporter.getFinishedSpans().filter((span) => span.name === name);
}

function span(name: string): ReadableSpan {
  const found = spans(name);
  expect(found, `spans ${name}`).toHaveLength(1);
  return found[0] as ReadableSpan;
}

function parentOf(child: ReadableSpan): string | undefined {
  const { spanId } = child.parentSpanContext ?? {};
  return exporter.getFinishedSpans().find((each) => each.spanContext().spanId === spanId)?.name;
}

/** The tree of all that has ended, in the order of their starts. */
function tree(of?: ReadableSpan, depth = 0): string[] {
  const id = of?.spanContext().spanId;
  return exporter
    .getFinishedSpans()
    .filter((each) => each.parentSpanContext?.spanId === id)
    .toSorted((a, b) => began.indexOf(a.spanContext().spanId) - began.indexOf(b.spanContext().spanId))
    .flatMap((each) => [`${"  ".repeat(depth)}${each.name}`, ...tree(each, depth + 1)]);
}

describe("spans", () => {
  test("a transaction that waits for its lock is a child of the request, and the parent of what is done inside", async () => {
    telemetry = openTelemetry(api, { meter: false });
    const lock = key("upload", fresh);
    const taken = Promise.withResolvers<void>();
    const leave = Promise.withResolvers<void>();
    const before = hf.transaction({ lock }, async () => {
      taken.resolve();
      await leave.promise;
    });
    await taken.promise;
    const answer = request(() =>
      hf.transaction({ lock }, async (tx) => {
        step("body");
        await tx.client.query("SELECT 1");
        await tx.lock(key("other", fresh));
        step("after statements");
        return "answer";
      }),
    );
    await eventually(async () => expect((await hf.inspect()).waiters).toHaveLength(1));
    leave.resolve();
    await before;
    expect(await answer).toBe("answer");
    expect(tree()).toEqual([
      "holdfast.transaction",
      "  holdfast.lock.wait",
      "request",
      "  holdfast.transaction",
      "    holdfast.lock.wait",
      "    body",
      "    holdfast.lock.wait",
      "    after statements",
    ]);
    const [, own] = spans("holdfast.transaction");
    expect(own?.attributes).toEqual({
      "holdfast.locks": [`upload:${fresh}`],
      "holdfast.isolation": "read committed",
      "holdfast.attempts": 1,
      "holdfast.outcome": "commit",
    });
    expect(own?.status).toEqual({ code: api.SpanStatusCode.UNSET });
    const waits = spans("holdfast.lock.wait").map(({ attributes }) => attributes);
    const wait = { "holdfast.lock.kind": "transaction", "holdfast.outcome": "granted" };
    expect(waits).toContainEqual({ ...wait, "holdfast.locks": [`upload:${fresh}`] });
    expect(waits).toContainEqual({ ...wait, "holdfast.locks": [`other:${fresh}`] });
  });

  test("a deadlock: the second attempt is a span of its own, and the transaction tells why", async () => {
    telemetry = openTelemetry(api, { meter: false });
    const both = [Promise.withResolvers<void>(), Promise.withResolvers<void>()] as const;
    // The second attempt could lock its row before the other transaction, which waits for that row, has woken up.
    const through = Promise.withResolvers<void>();
    const move = (from: 0 | 1) =>
      hf.transaction({ retry: { baseMs: 1 } }, async (tx) => {
        step(`attempt ${tx.attempt}`);
        if (tx.attempt > 1) await through.promise;
        const add = (i: number) =>
          tx.client.query("UPDATE account SET amount = amount + 1 WHERE id = $1", [i + 1]);
        await add(from);
        both[from].resolve();
        await both[1 - from]?.promise;
        await add(1 - from);
      });
    await Promise.all(([0, 1] as const).map((from) => move(from).finally(through.resolve)));
    const again = spans("holdfast.transaction").filter((each) => each.attributes["holdfast.attempts"] === 2);
    expect(again).toHaveLength(1);
    const [retried] = again as [ReadableSpan];
    expect(retried.status).toEqual({ code: api.SpanStatusCode.UNSET });
    expect(retried.attributes).toMatchObject({ "holdfast.outcome": "commit" });
    const { attributes } = span("holdfast.retry");
    expect(attributes).toEqual({
      "holdfast.attempt": 2,
      "holdfast.failure": "deadlock",
      "holdfast.delay_ms": expect.any(Number),
    });
    // It may have held its locks for long enough to be slow, too.
    const retries = retried.events.filter(({ name }) => name === "holdfast.retry");
    expect(retries.map(({ attributes: told }) => told)).toEqual([{ ...attributes, "holdfast.attempt": 1 }]);
    expect(tree(retried)).toEqual(["attempt 1", "holdfast.retry", "  attempt 2"]);
  });

  test("locks that were held for too long: where, and the slowest statement without its values", async () => {
    telemetry = openTelemetry(api, { meter: false });
    const impatient = holdfast(fromPg(pool), { slow: { suspect: 0, broken: 1 } });
    try {
      await impatient.transaction({ lock: key("slow", fresh) }, async (tx) => {
        // Far longer than the other statement takes, also on a busy machine.
        await tx.client.query("SELECT pg_sleep(1), 'secret'");
        await tx.client.query("SELECT 1");
      });
    } finally {
      await impatient.close();
    }
    expect(span("holdfast.transaction").events.map(({ name, attributes }) => [name, attributes])).toEqual([
      [
        "holdfast.section.slow",
        {
          "holdfast.section.level": "broken",
          "holdfast.held_ms": expect.any(Number),
          "holdfast.place": expect.stringMatching(/metrics\.test\.ts:\d+:\d+$/),
          "holdfast.slowest.statement": "SELECT pg_sleep(?), ?",
          "holdfast.slowest.duration_ms": expect.any(Number),
        },
      ],
    ]);
  });

  test("failures have the status and the type of the error, and no word of its message", async () => {
    telemetry = openTelemetry(api, { meter: false });
    const lock = key("busy", "s3cret-name");
    const masked = holdfast(fromPg(pool), { names: (name) => name.replace(/:.*/, ":*") });
    const secret = "s3cret-value";
    await expect(
      masked.transaction({ lock }, (tx) => tx.client.query("SELECT $1::text::int", [secret])),
    ).rejects.toThrow(secret);
    await masked.transaction({ lock }, async () => {
      expect(await masked.tryLock(lock, async () => {}, { separate: true })).toEqual({ acquired: false });
      await expect(
        masked.transaction({ lock, wait: 20, separate: true }, async () => {}),
      ).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
    });
    await expect(
      hf.transaction(async () => {
        throw new RangeError(secret);
      }),
    ).rejects.toThrow(RangeError);
    const { UNSET, ERROR } = api.SpanStatusCode;
    const told = spans("holdfast.transaction").map(({ attributes, status }) => [
      attributes["holdfast.outcome"],
      attributes["error.type"],
      status,
    ]);
    expect(told).toEqual([
      ["rollback", "22P02", { code: ERROR }],
      // Whoever asked not to wait has been answered.
      ["busy", undefined, { code: UNSET }],
      ["timeout", "HF_LOCK_TIMEOUT", { code: ERROR }],
      ["commit", undefined, { code: UNSET }],
      ["rollback", "RangeError", { code: ERROR }],
    ]);
    expect(spans("holdfast.lock.wait").map(({ attributes }) => attributes["holdfast.outcome"])).toEqual([
      "granted",
      "granted",
      "busy",
      "timeout",
    ]);
    const everything = exporter.getFinishedSpans().map(({ name, attributes, events: all, status }) => ({
      name,
      attributes,
      all,
      status,
    }));
    expect(JSON.stringify(everything)).not.toContain("s3cret");
    expect(JSON.stringify(everything)).toContain("busy:*");
    // Only if they are asked for.
    telemetry.stop();
    telemetry = openTelemetry(api, { meter: false, recordErrors: true });
    await hf.transaction(() => Promise.reject(new Error(secret))).catch(() => {});
    expect(spans("holdfast.transaction").at(-1)?.events[0]?.attributes).toMatchObject({
      "exception.message": secret,
    });
  });

  test("held locks and leases are spans from their grant to their end", async () => {
    telemetry = openTelemetry(api, { meter: false });
    using figures = prometheus();
    const fences: number[] = [];
    await request(async () => {
      const held = await hf.hold([key("h", fresh), shared(key("s", fresh))]);
      const lease = await hf.lease(key("l", fresh));
      const second = await hf.lease(key("l", fresh), { wait: "skip" });
      expect(second).toBeUndefined();
      await lease.release();
      await held.release();
      const lost = await hf.lease(key("short", fresh), { ttl: 1000, renew: false });
      fences.push(lease.fence, lost.fence);
      await eventually(async () => expect(lost.signal.aborted).toBe(true));
      await lost[Symbol.asyncDispose]();
    });
    expect(tree()).toEqual([
      "request",
      "  holdfast.lock.wait",
      "  holdfast.lock.hold",
      "  holdfast.lock.wait",
      "  holdfast.lock.hold",
      "  holdfast.lock.wait",
      "  holdfast.lock.wait",
      "  holdfast.lock.hold",
    ]);
    const told = Object.fromEntries(
      spans("holdfast.lock.hold").map(({ attributes, status }) => [
        String(attributes["holdfast.locks"]),
        [
          attributes["holdfast.lock.kind"],
          attributes["holdfast.outcome"],
          attributes["holdfast.fence"],
          status,
        ],
      ]),
    );
    const { UNSET, ERROR } = api.SpanStatusCode;
    expect(told).toEqual({
      [`h:${fresh},s:${fresh} (shared)`]: ["session", "released", undefined, { code: UNSET }],
      [`l:${fresh}`]: ["lease", "released", fences[0], { code: UNSET }],
      [`short:${fresh}`]: ["lease", "lost", fences[1], { code: ERROR }],
    });
    const text = await figures.text();
    // It was lost, and then released: that is one end.
    expect(text).toContain('holdfast_locks_lost_total{kind="lease",lock="short"} 1\n');
    expect(text).toContain('holdfast_lock_hold_seconds_count{kind="lease",lock="short"} 1\n');
    expect(text).toContain('holdfast_locks_held{kind="lease",lock="short"} 0\n');
  });

  test("a session that is killed takes its lock with it", async () => {
    telemetry = openTelemetry(api, { meter: false });
    using figures = prometheus();
    const quiet = new Pool({ connectionString: database.url, max: 4 });
    quiet.on("error", () => {});
    const own = holdfast(fromPg(quiet));
    try {
      await own.hold(key("killed", fresh));
      const label = `% [hf:killed:${fresh}]`;
      await pool.query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE $1",
        [label],
      );
      await eventually(async () => expect(spans("holdfast.lock.hold")).toHaveLength(1));
      expect(span("holdfast.lock.hold")).toMatchObject({
        attributes: { "holdfast.outcome": "lost", "error.type": expect.any(String) },
        status: { code: api.SpanStatusCode.ERROR },
      });
      expect(await figures.text()).toContain('holdfast_locks_lost_total{kind="session",lock="killed"} 1\n');
    } finally {
      await own.close();
      await quiet.end();
    }
  });

  test("a statement on the wrong connection is told where it happened", async () => {
    telemetry = openTelemetry(api, { meter: false });
    using figures = prometheus();
    const warned = new Promise((resolve) => process.once("warning", resolve));
    await hf.transaction(async () => void (await pool.query("SELECT 's3cret'")));
    await warned;
    const [told] = span("holdfast.transaction").events;
    expect(told?.name).toBe("holdfast.connection.wrong");
    expect(told?.attributes).toEqual({
      "holdfast.query.place": expect.stringContaining("metrics.test.ts"),
      "holdfast.transaction.place": expect.stringContaining("metrics.test.ts"),
    });
    expect(await figures.text()).toContain("holdfast_connections_wrong_total 1\n");
  });

  test("jobs and runs of schedules are traces of their own", async () => {
    telemetry = openTelemetry(api, { meter: false });
    const mails = queue<{ to: string }>(hf, `mails ${fresh}`, { retries: 0 });
    const short = queue<number>(hf, `short ${fresh}`);
    const nightly = schedule(hf, `nightly ${fresh}`, { every: "1 day" }, async () => step("report"));
    await request(async () => {
      const worker = mails.work(async ({ payload }) => {
        step("send");
        if (payload.to === "s3cret") throw new Error("s3cret");
      });
      await mails.enqueue({ to: "ada" });
      await mails.enqueue({ to: "s3cret" });
      await eventually(async () => expect(spans("holdfast.job")).toHaveLength(2));
      await worker.stop();
      const careful = short.work(async () => step("write"), { transactional: true, concurrency: 1 });
      await short.enqueue(1);
      await eventually(async () => expect(spans("write")).toHaveLength(1));
      await careful.stop();
    });
    await request(() => nightly.runNow().then(() => nightly.stop()));
    const all = spans("holdfast.job");
    const jobs = all.filter(({ attributes }) => attributes["holdfast.queue"] === `mails ${fresh}`);
    // In the transaction that its end is a part of.
    expect(all.filter((job) => !jobs.includes(job)).map((job) => [parentOf(job), tree(job)])).toEqual([
      ["holdfast.transaction", ["write"]],
    ]);
    expect(jobs.map((job) => [job.kind, job.parentSpanContext, tree(job)])).toEqual([
      [api.SpanKind.CONSUMER, undefined, ["send"]],
      [api.SpanKind.CONSUMER, undefined, ["send"]],
    ]);
    expect(jobs.map(({ attributes, status }) => [attributes["holdfast.queue"], status.code])).toEqual([
      [`mails ${fresh}`, api.SpanStatusCode.UNSET],
      [`mails ${fresh}`, api.SpanStatusCode.ERROR],
    ]);
    const run = span("holdfast.schedule");
    expect(parentOf(run)).toBe("request");
    expect(tree(run)).toContain("report");
    expect(run.attributes).toMatchObject({ "holdfast.schedule": `nightly ${fresh}`, "holdfast.attempt": 1 });
    expect(JSON.stringify(exporter.getFinishedSpans().map(({ attributes }) => attributes))).not.toContain(
      "s3cret",
    );
  });

  test("a stop in the middle ends the spans, and changes nothing of what runs", async () => {
    telemetry = openTelemetry(api);
    const held = await hf.hold(key("h", fresh));
    const value = await hf.transaction({ lock: key("stop", fresh) }, async (tx) => {
      telemetry?.stop();
      expect(heard()).toEqual([]);
      expect(spans("holdfast.transaction")).toHaveLength(1);
      const { rows } = await tx.client.query<{ n: number }>("SELECT 1 AS n");
      return rows[0]?.n;
    });
    expect(value).toBe(1);
    await held.release();
    await hf.transaction(async () => {});
    expect(exporter.getFinishedSpans().map(({ name }) => name)).toEqual([
      "holdfast.lock.wait",
      "holdfast.lock.wait",
      "holdfast.transaction",
      "holdfast.lock.hold",
    ]);
    expect(exporter.getFinishedSpans().every(({ ended }) => ended)).toBe(true);
    // Twice does no harm.
    telemetry.stop();
    using again = openTelemetry(api);
    expect(heard().length).toBeGreaterThan(20);
    again.stop();
  });

  test("others may bind stores, and wrap, through tracing channels", async () => {
    const { start, asyncEnd } = diagnostics.tracingChannel("holdfast:transaction");
    const { AsyncLocalStorage } = await import("node:async_hooks");
    const store = new AsyncLocalStorage<string>();
    const order: string[] = [];
    const onStart = (message: unknown) => {
      const { wrap } = message as { wrap(around: <T>(run: () => T) => T): void };
      for (const name of ["a", "b"])
        wrap((run) => {
          order.push(name);
          return run();
        });
    };
    const messages: unknown[] = [];
    const onEnd = (message: unknown) => void messages.push(message);
    start.bindStore(store, () => "bound");
    start.subscribe(onStart);
    asyncEnd.subscribe(onEnd);
    try {
      const seen = await hf.transaction(async () => store.getStore());
      expect(seen).toBe("bound");
      expect(order.toSorted()).toEqual(["a", "b"]);
      // What the body returned is nobody's business.
      expect(messages).toEqual([
        {
          locks: [],
          isolation: "read committed",
          attempts: 1,
          wrap: expect.any(Function),
          result: undefined,
        },
      ]);
    } finally {
      start.unbindStore(store);
      start.unsubscribe(onStart);
      asyncEnd.unsubscribe(onEnd);
    }
    expect(store.getStore()).toBeUndefined();
  });

  test("on SQLite", async () => {
    telemetry = openTelemetry(api, { meter: false });
    const db = new DatabaseSync(":memory:");
    const small = holdfast(fromNodeSqlite(db));
    await request(() =>
      small.transaction({ lock: key("a", 1) }, async () => {
        await sleep(1);
        step("body");
      }),
    );
    expect(tree()).toEqual(["request", "  holdfast.transaction", "    holdfast.lock.wait", "    body"]);
    await small.close();
    db.close();
  });
});

describe("on MariaDB", () => {
  const why = unavailable("mariadb");
  beforeEach(({ skip }) => skip(why !== undefined, why));

  test("a wait, a deadlock, a lease", async () => {
    const own = await createDatabase("mariadb");
    const pool = mysql.createPool({ uri: own.url, connectionLimit: 6 });
    const maria = holdfast(fromMysql2(pool));
    try {
      await maria.migrate();
      await pool.query("CREATE TABLE account (id int PRIMARY KEY, amount int NOT NULL)");
      await pool.query("INSERT INTO account VALUES (1, 0), (2, 0)");
      telemetry = openTelemetry(api, { meter: false });
      const both = [Promise.withResolvers<void>(), Promise.withResolvers<void>()] as const;
      const move = (from: 0 | 1) =>
        maria.transaction({ lock: key("move", from), retry: { baseMs: 1 } }, async (tx) => {
          step(`attempt ${tx.attempt}`);
          const add = (i: number) =>
            tx.client.query("UPDATE account SET amount = amount + 1 WHERE id = ?", [i + 1]);
          await add(from);
          both[from].resolve();
          await both[1 - from]?.promise;
          await add(1 - from);
        });
      await request(() => Promise.all([move(0), move(1)]));
      await (await maria.lease(key("l", 1))).release();
      expect(tree()).toEqual(
        expect.arrayContaining(["    attempt 1", "    holdfast.retry", "      attempt 2"]),
      );
      expect(spans("holdfast.transaction").map(parentOf)).toEqual(["request", "request"]);
      expect(span("holdfast.retry").attributes).toMatchObject({ "holdfast.failure": "deadlock" });
      expect(span("holdfast.lock.hold").attributes).toMatchObject({ "holdfast.fence": 1 });
    } finally {
      await maria.close();
      await pool.end();
      await own.drop();
    }
  });
});

describe("figures", () => {
  let figures: Prometheus;
  let exporter: OtelPrometheus;

  beforeEach(async () => {
    figures = prometheus();
    exporter = await otelPrometheus();
    telemetry = openTelemetry(api, { tracer: false, meter: exporter.meter });
  });

  afterEach(async () => {
    figures.stop();
    await exporter.close();
  });

  async function families(): Promise<Map<string, Family>> {
    return parseExposition(await figures.text());
  }

  /** Of all that are not histograms, and the counts of those that are; without those that have not counted anything. */
  function counted(of: ReadonlyMap<string, Family>): Record<string, number> {
    const found: Record<string, number> = {};
    for (const { samples } of of.values())
      for (const [name, value] of samples)
        if (value !== 0 && !/_(bucket|sum)(\{|$)/.test(name)) found[name] = value;
    return found;
  }

  const counts = async () => counted(await families());
  const otelCounts = async () => counted(parseOtel(await exporter.text()));

  test("are exact: five granted, two refused, and whatever else has happened", async () => {
    const lock = (n: number) => key("upload", `${fresh}-${n}`);
    for (let i = 0; i < 4; i++) await hf.transaction({ lock: lock(i) }, async () => {});
    await hf.transaction({ lock: lock(0) }, async () => {
      await hf.tryLock(lock(0), async () => {}, { separate: true });
      await hf.transaction({ lock: lock(0), wait: 10, separate: true }, async () => {}).catch(() => {});
    });
    await hf.transaction({ lock: [key("a", fresh), key("b", fresh)] }, async (tx) => {
      await tx.rows("account", [1, 2]);
      await tx.table("account", "share");
      const busy = { code: "HF_LOCK_NOT_AVAILABLE" };
      const beside = (run: (other: typeof tx) => Promise<unknown>) =>
        expect(hf.transaction({ separate: true }, run)).rejects.toMatchObject(busy);
      await beside((other) => other.rows("account", [1], { wait: "nowait" }));
      await beside((other) => other.table("account", "exclusive", { wait: "nowait" }));
    });
    await hf.transaction({ retry: { baseMs: 0 } }, async (tx) => {
      if (tx.attempt === 1) await tx.client.query("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$");
    });
    const held = await hf.hold(key("h", fresh));
    await expect(hf.hold(key("h", fresh), { wait: "nowait" })).rejects.toMatchObject({
      code: "HF_LOCK_NOT_AVAILABLE",
    });
    const lease = await hf.lease(key("l", fresh));
    expect(await hf.lease(key("l", fresh), { wait: "skip" })).toBeUndefined();
    const permit = await hf.semaphore(key("p", fresh), { permits: 2 }).acquire();
    const expected = {
      'holdfast_transactions_total{lock="upload",outcome="commit"}': 5,
      'holdfast_transactions_total{lock="upload",outcome="rollback"}': 2,
      'holdfast_transactions_total{lock="several",outcome="commit"}': 1,
      'holdfast_transactions_total{lock="none",outcome="commit"}': 1,
      'holdfast_transactions_total{lock="none",outcome="rollback"}': 3,
      'holdfast_transaction_duration_seconds_count{lock="upload",outcome="commit"}': 5,
      'holdfast_transaction_duration_seconds_count{lock="upload",outcome="rollback"}': 2,
      'holdfast_transaction_duration_seconds_count{lock="several",outcome="commit"}': 1,
      'holdfast_transaction_duration_seconds_count{lock="none",outcome="commit"}': 1,
      'holdfast_transaction_duration_seconds_count{lock="none",outcome="rollback"}': 3,
      'holdfast_transaction_retries_total{failure="serialization",lock="none"}': 1,
      'holdfast_lock_wait_seconds_count{kind="transaction",lock="upload",outcome="granted"}': 5,
      'holdfast_lock_wait_seconds_count{kind="transaction",lock="upload",outcome="busy"}': 1,
      'holdfast_lock_wait_seconds_count{kind="transaction",lock="upload",outcome="timeout"}': 1,
      'holdfast_lock_wait_seconds_count{kind="transaction",lock="several",outcome="granted"}': 1,
      'holdfast_lock_wait_seconds_count{kind="rows",lock="public.account",outcome="granted"}': 1,
      'holdfast_lock_wait_seconds_count{kind="rows",lock="public.account",outcome="busy"}': 1,
      'holdfast_lock_wait_seconds_count{kind="table",lock="account",outcome="granted"}': 1,
      'holdfast_lock_wait_seconds_count{kind="table",lock="account",outcome="busy"}': 1,
      'holdfast_lock_wait_seconds_count{kind="session",lock="h",outcome="granted"}': 1,
      'holdfast_lock_wait_seconds_count{kind="session",lock="h",outcome="busy"}': 1,
      'holdfast_lock_wait_seconds_count{kind="lease",lock="l",outcome="granted"}': 1,
      'holdfast_lock_wait_seconds_count{kind="lease",lock="l",outcome="busy"}': 1,
      'holdfast_lock_wait_seconds_count{kind="lease",lock="p",outcome="granted"}': 1,
      'holdfast_locks_refused_total{kind="transaction",lock="upload",reason="busy"}': 1,
      'holdfast_locks_refused_total{kind="transaction",lock="upload",reason="timeout"}': 1,
      'holdfast_locks_refused_total{kind="rows",lock="public.account",reason="busy"}': 1,
      'holdfast_locks_refused_total{kind="table",lock="account",reason="busy"}': 1,
      'holdfast_locks_refused_total{kind="session",lock="h",reason="busy"}': 1,
      'holdfast_locks_refused_total{kind="lease",lock="l",reason="busy"}': 1,
      'holdfast_lock_hold_seconds_count{kind="transaction",lock="upload"}': 5,
      'holdfast_lock_hold_seconds_count{kind="transaction",lock="several"}': 1,
      'holdfast_section_duration_seconds_count{kind="transaction",lock="upload"}': 5,
      'holdfast_section_duration_seconds_count{kind="transaction",lock="several"}': 1,
      'holdfast_locks_held{kind="session",lock="h"}': 1,
      'holdfast_locks_held{kind="lease",lock="l"}': 1,
      'holdfast_locks_held{kind="lease",lock="p"}': 1,
    };
    expect(await counts()).toEqual(expected);
    expect(await otelCounts()).toEqual(expected);
    await held.release();
    await lease.release();
    await permit.release();
    const ended = {
      ...expected,
      'holdfast_lock_hold_seconds_count{kind="session",lock="h"}': 1,
      'holdfast_lock_hold_seconds_count{kind="lease",lock="l"}': 1,
      'holdfast_lock_hold_seconds_count{kind="lease",lock="p"}': 1,
    } as Record<string, number>;
    for (const name of Object.keys(ended)) if (name.startsWith("holdfast_locks_held")) delete ended[name];
    expect(await counts()).toEqual(ended);
    expect(await otelCounts()).toEqual(ended);
    // Nothing is counted any more.
    figures.stop();
    telemetry?.stop();
    await hf.transaction({ lock: lock(0) }, async () => {});
    expect(await counts()).toEqual(ended);
    expect(await otelCounts()).toEqual(ended);
  });

  test("quotas, queues, schedules, leaders, versions, once", async () => {
    const name = `mails ${fresh}`;
    const uploads = quota(hf, { name: `uploads ${fresh}`, limit: 3, per: "day" });
    const wide = quota(hf, { name: `wide ${fresh}`, limit: 100 });
    for (let i = 0; i < 5; i++) await uploads.tryConsume("ada", 1);
    await uploads.tryConsume("bob", 1, { id: "x" });
    await uploads.tryConsume("bob", 1, { id: "x" });
    // The wide one has neither granted nor refused.
    const both = quota.all([wide, uploads]);
    expect((await both.tryConsume("ada")).granted).toBe(false);
    await both.consume("eve");

    const mails = queue<string>(hf, name, { retries: 1, backoff: () => 1 });
    const watched = prometheus({ queues: [mails], namespace: false, labels: { service: "api" } });
    const worker = mails.work(async ({ payload, attempt }) => {
      if (payload === "never" || (payload === "twice" && attempt === 1)) throw new Error("no");
    });
    for (const payload of ["once", "twice", "never"]) await mails.enqueue(payload);
    await eventually(async () =>
      expect(await mails.counts()).toMatchObject({ waiting: 0, running: 0, delayed: 0, failed: 1 }),
    );
    await worker.stop();
    await mails.enqueue("waits");

    const nightly = schedule(hf, `nightly ${fresh}`, { every: "1 day", onError: () => {} }, async () => {
      if (fails) throw new Error("no");
    });
    let fails = false;
    await nightly.runNow();
    fails = true;
    await nightly.runNow().catch(() => {});
    await nightly.stop();

    const lead = Promise.withResolvers<void>();
    const leading = leader(hf, `indexer ${fresh}`, async ({ signal }) => {
      lead.resolve();
      await new Promise((resolve) => signal.addEventListener("abort", resolve));
    });
    await lead.promise;
    expect(await counts()).toMatchObject({
      [`holdfast_leader{leader="leader:indexer ${fresh}"}`]: 1,
      [`holdfast_leader_candidates{leader="leader:indexer ${fresh}"}`]: 1,
    });
    // Who begins to look now is told the same.
    using late = prometheus();
    expect(counted(parseExposition(await late.text()))).toEqual({
      [`holdfast_leader{leader="leader:indexer ${fresh}"}`]: 1,
      [`holdfast_leader_candidates{leader="leader:indexer ${fresh}"}`]: 1,
    });
    await leading.stop();
    expect(counted(parseExposition(await late.text()))).toEqual({
      'holdfast_lock_hold_seconds_count{kind="lease",lock="leader"}': 1,
    });
    late.stop();

    await once(hf, `event ${fresh}`, async () => 1);
    await once(hf, `event ${fresh}`, async () => 2);
    const accounts = versioned(hf, "account");
    let tries = 0;
    await accounts.update(1, async () => {
      if (tries++ === 0) await pool.query("UPDATE account SET version = version + 1 WHERE id = 1");
      return { amount: 5 };
    });

    const found = await counts();
    const named = (label: string) =>
      Object.fromEntries(Object.entries(found).filter(([each]) => each.includes(label)));
    expect(named(`quota="uploads ${fresh}"`)).toEqual({
      [`holdfast_quota_decisions_total{quota="uploads ${fresh}",verdict="allowed"}`]: 5,
      [`holdfast_quota_decisions_total{quota="uploads ${fresh}",verdict="denied"}`]: 3,
      [`holdfast_quota_decisions_total{quota="uploads ${fresh}",verdict="replayed"}`]: 1,
    });
    expect(named(`quota="wide ${fresh}"`)).toEqual({
      [`holdfast_quota_decisions_total{quota="wide ${fresh}",verdict="allowed"}`]: 1,
    });
    expect(named(`queue="${name}"`)).toEqual({
      [`holdfast_queue_jobs_total{outcome="done",queue="${name}"}`]: 2,
      [`holdfast_queue_jobs_total{outcome="retry",queue="${name}"}`]: 2,
      [`holdfast_queue_jobs_total{outcome="failed",queue="${name}"}`]: 1,
      [`holdfast_queue_duration_seconds_count{outcome="done",queue="${name}"}`]: 2,
      [`holdfast_queue_duration_seconds_count{outcome="retry",queue="${name}"}`]: 2,
      [`holdfast_queue_duration_seconds_count{outcome="failed",queue="${name}"}`]: 1,
      [`holdfast_queue_wait_seconds_count{queue="${name}"}`]: 3,
    });
    expect(named(`schedule="nightly ${fresh}"`)).toEqual({
      [`holdfast_schedule_runs_total{outcome="done",schedule="nightly ${fresh}"}`]: 1,
      [`holdfast_schedule_runs_total{outcome="failed",schedule="nightly ${fresh}"}`]: 1,
      [`holdfast_schedule_duration_seconds_count{outcome="done",schedule="nightly ${fresh}"}`]: 1,
      [`holdfast_schedule_duration_seconds_count{outcome="failed",schedule="nightly ${fresh}"}`]: 1,
    });
    expect(found).toMatchObject({
      holdfast_once_replayed_total: 1,
      'holdfast_versions_stale_total{table="account"}': 1,
    });
    expect(await otelCounts()).toEqual(found);

    const text = await watched.text();
    const depth = parseExposition(text).get("holdfast_queue_depth")?.samples;
    const of = (state: string) =>
      depth?.get(`holdfast_queue_depth{queue="${name}",service="api",state="${state}"}`);
    expect(["waiting", "delayed", "running", "failed"].map(of)).toEqual([1, 0, 0, 1]);
    // No label `lock`, and what is always there is there.
    expect(text).not.toMatch(/lock="/);
    for (const line of text.split("\n").filter((each) => /^[a-z]/.test(each)))
      expect(line).toContain('service="api"');
    watched.stop();
  });

  const elsewhere = ["mysql2 on MySQL", "mysql2 on MariaDB", "better-sqlite3"].map(
    (name) => backends.find((each) => each.name === name) as Backend,
  );

  describe.each(elsewhere)("$name", (backend) => {
    test("locks, quotas, queues and schedules are counted as on PostgreSQL", async ({ skip }) => {
      const lacking = missing(backend);
      skip(lacking !== undefined, lacking);
      const place = await placeFor(backend);
      const site = await backend.open(place.url);
      const there = holdfast(site.database, { slow: false });
      await there.migrate();
      figures.stop();
      figures = prometheus();
      try {
        const uploads = quota(there, { name: "uploads", limit: 3 });
        for (let i = 0; i < 5; i++) await uploads.tryConsume("ada", 1);
        const mails = queue<string>(there, "mails", { retries: 1, backoff: () => 1 });
        using watched = prometheus({ queues: [mails], namespace: false });
        const worker = mails.work(async ({ payload }) => {
          if (payload === "never") throw new Error("no");
        });
        for (const payload of ["once", "never"]) await mails.enqueue(payload);
        await eventually(async () =>
          expect(await mails.counts()).toMatchObject({ waiting: 0, running: 0, delayed: 0, failed: 1 }),
        );
        await worker.stop();
        await mails.enqueue("waits");
        const nightly = schedule(there, "nightly", { every: "1 day" }, async () => {});
        await nightly.runNow();
        await nightly.stop();
        await there.lock(key("document", 1), async () => {
          await there.tryLock(key("document", 1), async () => {}, { separate: true });
        });
        const found = await counts();
        const named = (part: string) =>
          Object.fromEntries(
            Object.entries(found).filter(([each]) => each.includes(part) && each.includes("_total{")),
          );
        expect({
          ...named("quota="),
          ...named("queue="),
          ...named("schedule="),
          ...named('lock="document"'),
        }).toEqual({
          'holdfast_quota_decisions_total{quota="uploads",verdict="allowed"}': 3,
          'holdfast_quota_decisions_total{quota="uploads",verdict="denied"}': 2,
          'holdfast_queue_jobs_total{outcome="done",queue="mails"}': 1,
          'holdfast_queue_jobs_total{outcome="retry",queue="mails"}': 1,
          'holdfast_queue_jobs_total{outcome="failed",queue="mails"}': 1,
          'holdfast_schedule_runs_total{outcome="done",schedule="nightly"}': 1,
          'holdfast_transactions_total{lock="document",outcome="commit"}': 1,
          'holdfast_transactions_total{lock="document",outcome="rollback"}': 1,
          'holdfast_locks_refused_total{kind="transaction",lock="document",reason="busy"}': 1,
        });
        const depth = parseExposition(await watched.text()).get("holdfast_queue_depth")?.samples;
        const of = (state: string) => depth?.get(`holdfast_queue_depth{queue="mails",state="${state}"}`);
        expect(["waiting", "delayed", "running", "failed"].map(of)).toEqual([1, 0, 0, 1]);
      } finally {
        await there.close();
        await site.close();
        await place.drop();
      }
    });
  });

  test("what seldom happens is counted, too", async () => {
    const date = new Date();
    const error = new Error("no");
    const seldom: { [K in keyof Events]?: Events[K] } = {
      "holdfast:commit:resolved": { outcome: "committed" },
      "holdfast:quota:failed": { quotas: ["a", "b"], failed: "open", error },
      "holdfast:queue:recovered": { jobs: 7, queues: ["a"] },
      "holdfast:hazard": { kind: "fetch", locks: ["x:1"], place: undefined, transaction: undefined },
      "holdfast:section:slow": {
        level: "broken",
        kind: "transaction",
        locks: ["x:1"],
        tables: ["y"],
        heldMs: 2000,
        place: undefined,
        statements: 1,
        statement: undefined,
        slowest: undefined,
        hazards: {},
      },
      "holdfast:queue:trouble": { queue: "a", error },
      "holdfast:schedule:skipped": { schedule: "s", tick: date },
      "holdfast:schedule:missed": { schedule: "s", first: date, before: date },
      "holdfast:schedule:lost": { schedule: "s", tick: date, fence: 1, error },
      // Of what began before anybody listened: nothing goes below zero.
      "holdfast:leader:lost": { leader: "l", fence: 1 },
      "holdfast:session:released": { hold: -1, locks: ["x:1"], heldMs: 5 },
    };
    for (const [name, event] of Object.entries(seldom)) diagnostics.channel(name).publish(event);
    const expected = {
      'holdfast_commits_resolved_total{outcome="committed"}': 1,
      'holdfast_quota_failures_total{mode="open"}': 1,
      holdfast_queue_recovered_total: 7,
      'holdfast_hazards_total{kind="fetch"}': 1,
      'holdfast_sections_slow_total{level="broken",lock="x"}': 1,
      'holdfast_queue_troubles_total{queue="a"}': 1,
      'holdfast_schedule_skipped_total{schedule="s"}': 1,
      'holdfast_schedule_missed_total{schedule="s"}': 1,
      'holdfast_schedule_lost_total{schedule="s"}': 1,
      'holdfast_lock_hold_seconds_count{kind="session",lock="x"}': 1,
    };
    expect(await counts()).toEqual(expected);
    expect(await otelCounts()).toEqual(expected);
  });

  test("begin with zero as soon as it is known that they may come, and from the start if they are named", async () => {
    telemetry?.stop();
    const otel = await otelPrometheus();
    const options = { locks: ["nightly"], queues: [] };
    const native = prometheus(options);
    telemetry = openTelemetry(api, { ...options, tracer: false, meter: otel.meter });
    const zeros = async (part: string) => {
      const [mine, theirs] = [await native.text(), await otel.text()].map((text, i) =>
        [...(i === 0 ? parseExposition(text) : parseOtel(text)).values()]
          .flatMap(({ samples }) => [...samples])
          .filter(([name, value]) => value === 0 && name.includes(part) && !/_(bucket|sum)\{/.test(name))
          .map(([name]) => name)
          .toSorted(),
      );
      expect(theirs).toEqual(mine);
      return mine ?? [];
    };
    try {
      const ofLock = (name: string, kinds: readonly string[]) =>
        [
          ...kinds
            .filter((kind) => kind !== "transaction")
            .map((kind) => `holdfast_locks_lost_total{kind="${kind}",lock="${name}"}`),
          ...kinds.flatMap((kind) =>
            ["busy", "timeout"].map(
              (reason) => `holdfast_locks_refused_total{kind="${kind}",lock="${name}",reason="${reason}"}`,
            ),
          ),
        ].toSorted();
      expect((await zeros('lock="nightly"')).filter((name) => name.startsWith("holdfast_locks"))).toEqual(
        ofLock("nightly", ["transaction", "session", "lease"]),
      );
      expect(await zeros("_total")).toEqual(
        expect.arrayContaining([
          'holdfast_commits_resolved_total{outcome="unknown"}',
          "holdfast_connections_wrong_total",
          'holdfast_quota_failures_total{mode="open"}',
          'holdfast_transactions_total{lock="none",outcome="rollback"}',
        ]),
      );
      // While it is waited for: a scrape may come before its time is over.
      const taken = Promise.withResolvers<void>();
      const leave = Promise.withResolvers<void>();
      const before = hf.transaction({ lock: key("first", fresh) }, async () => {
        taken.resolve();
        await leave.promise;
      });
      await taken.promise;
      const refused = `holdfast_locks_refused_total{kind="transaction",lock="first",reason="timeout"}`;
      expect(await zeros('lock="first"')).toContain(refused);
      leave.resolve();
      await before;
      await using held = await hf.hold(key("held", fresh));
      await using lease = await hf.lease(key("leased", fresh));
      expect(await zeros('lock="held"')).toEqual(ofLock("held", ["session"]));
      expect(await zeros('lock="leased"')).toEqual(ofLock("leased", ["lease"]));
      expect([held.signal.aborted, lease.signal.aborted]).toEqual([false, false]);
      queue(hf, `zeros ${fresh}`);
      quota(hf, { name: `zeros ${fresh}`, limit: 1 });
      schedule(hf, `zeros ${fresh}`, { every: "1 day" }, async () => {});
      versioned(hf, `zeros_${fresh}`);
      expect(
        (await zeros(`"zeros`)).map((name) =>
          name.replace(/\{.*?(?:(outcome|verdict)="(\w+)".*)?\}$/, " $2"),
        ),
      ).toEqual([
        "holdfast_queue_jobs_total done",
        "holdfast_queue_jobs_total failed",
        "holdfast_queue_jobs_total retry",
        "holdfast_queue_troubles_total ",
        "holdfast_quota_decisions_total allowed",
        "holdfast_quota_decisions_total denied",
        "holdfast_quota_decisions_total replayed",
        "holdfast_schedule_lost_total ",
        "holdfast_schedule_missed_total ",
        "holdfast_schedule_runs_total done",
        "holdfast_schedule_runs_total failed",
        "holdfast_schedule_runs_total retry",
        "holdfast_schedule_skipped_total ",
        "holdfast_versions_stale_total ",
      ]);
    } finally {
      native.stop();
      await otel.close();
    }
  });

  test("those who would lead wait on: that is no refusal", async () => {
    const leads = Promise.withResolvers<void>();
    const first = leader(hf, `busy ${fresh}`, async ({ signal }) => {
      leads.resolve();
      await new Promise((resolve) => signal.addEventListener("abort", resolve));
    });
    await leads.promise;
    const refused = diagnostics.channel("holdfast:lease:refused");
    // As a candidate tells after a minute.
    refused.publish({ lease: `leader:busy ${fresh}`, waitedMs: 60_000, reason: "timeout" });
    refused.publish({ lease: `other:busy ${fresh}`, waitedMs: 60_000, reason: "timeout" });
    await first.stop();
    expect(await counts()).toEqual({
      'holdfast_lock_wait_seconds_count{kind="lease",lock="leader",outcome="granted"}': 1,
      'holdfast_lock_wait_seconds_count{kind="lease",lock="other",outcome="timeout"}': 1,
      'holdfast_locks_refused_total{kind="lease",lock="other",reason="timeout"}': 1,
      'holdfast_lock_hold_seconds_count{kind="lease",lock="leader"}': 1,
    });
    expect(await otelCounts()).toEqual(await counts());
  });

  test("names of keys are no labels, and labels are not without end", async () => {
    telemetry?.stop();
    const odd = prometheus({ namespace: (each) => `a"b\\c\n${each}` });
    try {
      await hf.transaction({ lock: key("user", 7) }, async () => {});
      // As 1,199 more would tell of themselves.
      const ended = diagnostics.channel("holdfast:transaction:end");
      for (let i = 1000; i < 2199; i++)
        ended.publish({ attempt: 1, locks: [`user:${i}`], outcome: "commit", durationMs: 1 });
      const plain = await figures.text();
      expect(plain).toContain('holdfast_transactions_total{outcome="commit",lock="user"} 1200\n');
      expect(plain).not.toContain("user:");
      const all = parseExposition(await odd.text()).get("holdfast_transactions_total")?.samples;
      expect(all?.get('holdfast_transactions_total{lock="a"b\\c\nuser:7",outcome="commit"}')).toBe(1);
      // Two of each lock that was seen to begin, which is one; and those without any.
      expect(all?.size).toBe(1001);
      expect(all?.get('holdfast_transactions_total{lock="other",outcome="other"}')).toBe(203);
    } finally {
      odd.stop();
    }
  });

  test("a function that throws, a queue that does not answer: the rest is told", async () => {
    const warned: string[] = [];
    const onWarning = ({ name, message }: Error) => void warned.push(`${name}: ${message}`);
    process.on("warning", onWarning);
    const silent = { name: "silent", counts: () => Promise.reject(new Error("s3cret")) };
    const broken = prometheus({
      queues: [silent],
      namespace: () => {
        throw new Error("broken");
      },
    });
    try {
      await hf.transaction({ lock: key("x", fresh) }, async () => {});
      await once(hf, `broken ${fresh}`, async () => 1);
      await once(hf, `broken ${fresh}`, async () => 1);
      const text = await broken.text();
      expect(text).toContain("holdfast_once_replayed_total 1\n");
      const again = await broken.text();
      expect(again).toContain('holdfast_queue_unknown_total{queue="silent"} 2\n');
      expect(again).toContain('holdfast_queue_depth{queue="silent",state="failed"} NaN\n');
      expect(text).not.toContain("s3cret");
      await eventually(async () => expect(warned).toContain("HoldfastWarning: Metrics of Holdfast: broken"));
    } finally {
      process.off("warning", onWarning);
      broken.stop();
    }
  });

  test("are served to whoever asks", async () => {
    const server = createServer(figures.handler).listen(0, "127.0.0.1");
    await new Promise((resolve) => server.once("listening", resolve));
    const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}/metrics`;
    try {
      await hf.transaction(async () => {});
      const got = await fetch(url);
      expect(got.status).toBe(200);
      expect(got.headers.get("content-type")).toBe("text/plain; version=0.0.4; charset=utf-8");
      expect(parseExposition(await got.text())).toEqual(await families());
      const head = await fetch(url, { method: "HEAD" });
      expect([head.status, await head.text()]).toEqual([200, ""]);
      const post = await fetch(url, { method: "POST", body: "x" });
      expect([post.status, post.headers.get("allow")]).toEqual([405, "GET, HEAD"]);
      const response = await figures.response();
      expect(response.headers.get("content-type")).toBe(figures.contentType);
      expect(await response.text()).toBe(await figures.text());
    } finally {
      await new Promise((resolve) => server.close(resolve));
    }
  });

  test("wrong options are refused", () => {
    expect(() => prometheus({ namespaces: false } as never)).toThrow("there is no option `namespaces`");
    expect(() => prometheus({ queues: [{}] as never })).toThrow("queues");
    expect(() => prometheus({ locks: "upload" as never })).toThrow("locks must be a list");
    expect(() => openTelemetry(api, { namespace: "x" as never })).toThrow("namespace must be a function");
    expect(() => openTelemetry({} as never)).toThrow("@opentelemetry/api");
  });
});

describe("what is written of them", () => {
  interface Panel {
    readonly id: number;
    readonly title: string;
    readonly type: string;
    readonly datasource?: unknown;
    readonly gridPos: { readonly h: number; readonly w: number; readonly x: number; readonly y: number };
    readonly targets?: readonly {
      readonly expr: string;
      readonly legendFormat: string;
      readonly refId: string;
    }[];
  }
  const dashboard = JSON.parse(read("docs/grafana/holdfast.json")) as {
    readonly schemaVersion: number;
    readonly uid: string;
    readonly title: string;
    readonly panels: readonly Panel[];
    readonly templating: {
      readonly list: readonly {
        readonly name: string;
        readonly type: string;
        readonly definition?: string;
      }[];
    };
  };
  let all: Map<string, Family>;
  const page = read("docs/metrics.md");
  /** By name, the labels that the page says. */
  const rows = new Map(
    [...page.matchAll(/^\| `(holdfast_\w+)` +\| ([^|]+?) +\|/gm)].map(([, name = "", labels = ""]) => [
      name,
      labels.match(/\w+/g) ?? [],
    ]),
  );

  beforeAll(async () => {
    using empty = prometheus();
    all = parseExposition(await empty.text());
  });

  test("docs/metrics.md has every figure", () => {
    expect([...rows.keys()].toSorted()).toEqual([...all.keys()].toSorted());
  });

  test("docs/metrics.md has every alert", () => {
    const named = [...read("docs/grafana/alerts.yml").matchAll(/- alert: (\w+)/g)].map(([, name]) => name);
    expect([...page.matchAll(/^\| `(Holdfast\w+)`/gm)].map(([, name]) => name)).toEqual(named);
  });

  test("docs/observability.md has every event and every trace", () => {
    const told = read("docs/observability.md");
    expect(published.length).toBeGreaterThan(40);
    expect(events.length + traces.length).toBe(published.length);
    expect(published.filter((name) => !told.includes(`\`${name}\``))).toEqual([]);
  });

  test("the dashboard asks for figures and labels that are there, and leaves none out", () => {
    const queries = dashboard.panels.flatMap(({ targets = [] }) => targets.map(({ expr }) => expr));
    const variables = dashboard.templating.list.flatMap(({ definition = "" }) => definition);
    const asked = new Set<string>();
    for (const query of [...queries, ...variables])
      for (const [name] of query.matchAll(/holdfast_\w+/g)) {
        const family = name.replace(/_(bucket|sum|count)$/, "");
        const found = all.get(family);
        expect(found, `${name} in ${query}`).toBeDefined();
        expect(found?.type === "histogram", query).toBe(name !== family);
        asked.add(family);
        for (const [, by = ""] of query.matchAll(/by \(([^)]*)\)/g))
          for (const label of by.split(", "))
            expect(["le", "instance", ...(rows.get(family) ?? [])], query).toContain(label);
      }
    expect([...asked].toSorted()).toEqual([...all.keys()].toSorted());
    for (const query of queries) {
      expect(query).toContain('job=~"$job"');
      expect(query.replaceAll(/[^(]/g, "").length, query).toBe(query.replaceAll(/[^)]/g, "").length);
      // Counters only as rates; histograms only as quantiles or counts.
      if (/_total\{/.test(query)) expect(query).toMatch(/(rate|increase)\(holdfast/);
      if (query.includes("_bucket")) expect(query).toMatch(/^histogram_quantile\(0\.\d+, sum by \(le, /);
    }
    for (const { targets = [] } of dashboard.panels)
      for (const { expr, legendFormat } of targets)
        for (const [, label = ""] of legendFormat.matchAll(/\{\{(\w+)\}\}/g))
          expect(expr).toMatch(new RegExp(`by \\([^)]*\\b${label}\\b`));
  });

  test("the dashboard can be imported: one id each, nothing on top of another, any data source", () => {
    const { panels, templating, schemaVersion } = dashboard;
    expect(schemaVersion).toBeGreaterThanOrEqual(36);
    expect(templating.list.map(({ name, type }) => [name, type])).toEqual([
      ["datasource", "datasource"],
      ["job", "query"],
    ]);
    expect(new Set(panels.map(({ id }) => id)).size).toBe(panels.length);
    const taken = new Set<string>();
    for (const { type, title, datasource, gridPos, targets = [] } of panels) {
      expect(title).not.toBe("");
      expect(gridPos.x + gridPos.w).toBeLessThanOrEqual(24);
      for (let x = gridPos.x; x < gridPos.x + gridPos.w; x++)
        for (let y = gridPos.y; y < gridPos.y + gridPos.h; y++) {
          expect(taken.has(`${x} ${y}`), title).toBe(false);
          taken.add(`${x} ${y}`);
        }
      if (type === "row") continue;
      expect(datasource).toEqual({ type: "prometheus", uid: "${datasource}" });
      expect(targets.length).toBeGreaterThan(0);
      expect(new Set(targets.map(({ refId }) => refId)).size).toBe(targets.length);
    }
  });
});
