/** `hf.close()` ends what the instance has started, and `worker.stop()` ends in time, whatever is in its way. */
import { HoldfastError, type Leader, UsageError, holdfast, key, leader, once, versioned } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Worker, queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";

let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 20 });
  await holdfast(fromPg(pool)).migrate();
});
afterAll(async () => {
  await pool?.end();
  await database?.drop();
});

let made = 0;
const named = () => `close${++made}`;
/** Ends with the test that it is in the way of, and not before. */
const never = () => new Promise<void>(() => {});

describe("hf.close()", () => {
  test("ends workers, schedules and leaders, and gives leases back", async () => {
    const hf = holdfast(fromPg(pool));
    const name = named();
    const other = holdfast(fromPg(pool));
    const ran = { job: 0, short: 0, tick: 0 };
    const jobs = queue(hf, name);
    const short = queue(hf, `${name}-short`);
    const worker = jobs.work(() => void ran.job++, { pollMs: 50 });
    const brief = short.work(async () => void ran.short++, { pollMs: 50, transactional: true });
    const often = schedule(hf, name, { every: 100 }, () => void ran.tick++);
    await often.start();
    const led: Leader = leader(hf, name, async ({ signal }) => {
      await new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
    });
    await hf.lease(key("close", name));
    await jobs.enqueue(1);
    await short.enqueue(1);
    await eventually(() => ran.job === 1 && ran.short === 1 && ran.tick > 0 && led.leading);

    await hf.close();

    await Promise.all([worker.done, brief.done, led.ended]);
    expect(led.leading).toBe(false);
    expect(await queue(other, name).counts()).toMatchObject({ workers: 0 });
    const free = await other.lease(key("close", name), { wait: "skip" });
    expect(free).toBeDefined();
    await free?.release();
    const next = leader(other, name, async () => {});
    await next.ended;
    const ticks = ran.tick;
    const { last } = await schedule(other, name, { every: 100 }, () => {}).status();
    await queue(other, name).enqueue(2);
    // Somebody who is there takes part in its place.
    let tookOver = 0;
    const again = schedule(other, name, { every: 100 }, () => void tookOver++);
    await again.start();
    await eventually(() => tookOver > 1);
    expect(ran).toEqual({ job: 1, short: 1, tick: ticks });
    expect(last).toBeInstanceOf(Date);
    await other.close();
  });

  test("starts nothing more", async () => {
    const hf = holdfast(fromPg(pool));
    await hf.close();
    const name = named();
    expect(() => queue(hf, name).work(() => {})).toThrow(UsageError);
    expect(() => leader(hf, name, async () => {})).toThrow(/closed/);
    await expect(schedule(hf, name, { every: "1 day" }, () => {}).start()).rejects.toThrow(/closed/);
  });

  test("refuses every call after it, and says why", async () => {
    const hf = holdfast(fromPg(pool));
    const name = named();
    const limit = quota(hf, { name, limit: 10 });
    const goods = stock(hf, { name });
    await hf.transaction(async () => {});
    await hf.close();
    await hf.close();
    const calls: Record<string, () => Promise<unknown>> = {
      transaction: () => hf.transaction(async () => {}),
      lock: () => hf.lock(key("close", name), async () => {}),
      tryLock: () => hf.tryLock(key("close", name), async () => {}),
      hold: () => hf.hold(key("close", name)),
      lease: () => hf.lease(key("close", name)),
      semaphore: () => hf.semaphore(key("close", name), { permits: 1 }).acquire(),
      capabilities: () => hf.capabilities(),
      inspect: () => hf.inspect(),
      migrate: () => hf.migrate(),
      migrations: () => hf.migrations(),
      once: () => once(hf, name, async () => {}),
      "quota.consume": () => limit.consume("ann"),
      "quota.peek": () => limit.peek("ann"),
      "stock.increase": () => goods.increase("pen", 1),
      "queue.enqueue": () => queue(hf, name).enqueue(1),
      "queue.counts": () => queue(hf, name).counts(),
      "schedule.status": () => schedule(hf, name, { every: "1 day" }, () => {}).status(),
      "versioned.update": () => versioned(hf, "pg_class").update(1, () => ({})),
    };
    const told: Record<string, string> = {};
    for (const [call, run] of Object.entries(calls))
      told[call] = await run().then(
        () => "worked",
        (error: unknown) => (error instanceof HoldfastError ? error.code : String(error)),
      );
    expect(told).toEqual(Object.fromEntries(Object.keys(calls).map((call) => [call, "HF_CLOSED"])));
  });

  test("waits for calls that are under way, and what they wait for", async () => {
    const hf = holdfast(fromPg(pool));
    const other = holdfast(fromPg(pool));
    const name = named();
    const limit = quota(hf, { name, limit: 10 });
    await limit.consume("ann");
    const told: string[] = [];
    const body = Promise.withResolvers<void>();
    const inside = Promise.withResolvers<void>();
    const free = Promise.withResolvers<void>();
    const taken = Promise.withResolvers<void>();
    // Somebody else has the row that the second call needs.
    const holding = other.transaction(async (tx) => {
      await quota(other, { name, limit: 10 }).consume("ann", 1, { tx });
      taken.resolve();
      await free.promise;
    });
    await taken.promise;
    const consuming = limit.consume("ann").then(() => told.push("consumed"));
    const running = hf
      .transaction(async () => {
        inside.resolve();
        await body.promise;
        // In what is under way, calls go on.
        await limit.consume("bob");
      })
      .then(() => told.push("committed"));
    await inside.promise;
    const closing = hf.close().then(() => told.push("closed"));
    await eventually(async () => {
      const refused = await hf.transaction(async () => {}).catch((error: unknown) => error);
      return refused instanceof UsageError;
    });
    free.resolve();
    body.resolve();
    await Promise.all([holding, consuming, running, closing]);
    expect(told.at(-1)).toBe("closed");
    expect(told.toSorted()).toEqual(["closed", "committed", "consumed"]);
    expect(await quota(other, { name, limit: 10 }).peek("bob")).toMatchObject({ used: 1 });
    await other.close();
  });

  test("a handler that runs may call the instance until it has ended", async () => {
    const hf = holdfast(fromPg(pool));
    const name = named();
    const limit = quota(hf, { name, limit: 10 });
    const begun = Promise.withResolvers<void>();
    const go = Promise.withResolvers<void>();
    let outcome: unknown;
    queue(hf, name).work(
      async () => {
        begun.resolve();
        await go.promise;
        outcome = await hf
          .transaction(async (tx) => limit.consume("ann", 1, { tx }))
          .catch((error: unknown) => error);
      },
      { pollMs: 50 },
    );
    await queue(hf, name).enqueue(1);
    await begun.promise;
    const closing = hf.close();
    expect(() => queue(hf, name).work(() => {})).toThrow(/closed/);
    go.resolve();
    await closing;
    expect(outcome).toMatchObject({ granted: true });
  });

  test("in a transaction's body it does not wait for that", { timeout: 60_000 }, async () => {
    const hf = holdfast(fromPg(pool));
    const ended = await hf.transaction(async () => {
      await hf.close();
      return "ended";
    });
    expect(ended).toBe("ended");
  });

  test("does not wait for ever for what ignores its signal", { timeout: 90_000 }, async () => {
    const hf = holdfast(fromPg(pool));
    const name = named();
    const began = { job: false, tick: false, leader: false };
    queue(hf, name).work(
      () => {
        began.job = true;
        return never();
      },
      { onTrouble: () => {} },
    );
    await queue(hf, name).enqueue(1);
    const stuck = schedule(hf, name, { every: 100, onError: () => {} }, () => {
      began.tick = true;
      return never();
    });
    await stuck.start();
    leader(hf, name, () => {
      began.leader = true;
      return never();
    });
    await eventually(() => began.job && began.tick && began.leader);
    await hf.close();
  });
});

describe("worker.stop()", () => {
  test(
    "ends although a handler ignores its signal, and the job runs elsewhere",
    { timeout: 60_000 },
    async () => {
      const hf = holdfast(fromPg(pool));
      const other = holdfast(fromPg(pool));
      const name = named();
      const troubles: unknown[] = [];
      let aborted = false;
      let begun = false;
      const worker = queue(hf, name).work(
        ({ signal }) => {
          begun = true;
          signal.addEventListener("abort", () => (aborted = true));
          return never();
        },
        { ttlMs: 1000, onTrouble: (error) => troubles.push(error) },
      );
      await queue(hf, name).enqueue("mine");
      await eventually(() => begun);
      await worker.stop({ patienceMs: 50 });
      expect(aborted).toBe(true);
      expect(String(troubles.at(-1))).toContain("handlers that still run: 1");
      const done: unknown[] = [];
      const next = queue<string>(other, name).work(({ payload }) => void done.push(payload), { pollMs: 50 });
      await eventually(() => done.length === 1);
      expect(done).toEqual(["mine"]);
      await next.stop();
      await hf.close();
      await other.close();
    },
  );

  test(
    "of transactional jobs: what is under way is rolled back, and its job waits for others",
    { timeout: 60_000 },
    async () => {
      const hf = holdfast(fromPg(pool));
      const name = named();
      let begun = false;
      const worker = queue(hf, name).work(
        () => {
          begun = true;
          return never();
        },
        { transactional: true, pollMs: 50, onTrouble: () => {} },
      );
      await queue(hf, name).enqueue("mine");
      await eventually(() => begun);
      await worker.stop({ patienceMs: 50 });
      await eventually(async () => (await queue(hf, name).counts()).waiting === 1);
      const done: string[] = [];
      const next = queue<string>(hf, name).work(async ({ payload }) => void done.push(payload), {
        transactional: true,
        pollMs: 50,
      });
      await eventually(() => done.length === 1);
      await next.stop();
      await hf.close();
    },
  );

  for (const when of ["before it has begun", "while it works", "while it rests"] as const)
    test(`ends although the database does not answer any more: ${when}`, { timeout: 90_000 }, async () => {
      const proxy = await startProxy({ port: Number(new URL(database.url).port) });
      const near = new Pool({ connectionString: proxy.url(database.url), max: 6 });
      near.on("error", () => {});
      const hf = holdfast(fromPg(near));
      const name = named();
      const jobs = queue(hf, name);
      try {
        await jobs.counts();
        const started = Promise.withResolvers<void>();
        const end = Promise.withResolvers<void>();
        let worker: Worker | undefined;
        if (when === "before it has begun") proxy.freeze();
        else if (when === "while it works") await jobs.enqueue(1);
        worker = jobs.work(
          async () => {
            started.resolve();
            await end.promise;
          },
          { pollMs: 50, onTrouble: () => {} },
        );
        if (when === "while it works") await started.promise;
        if (when === "while it rests") await eventually(async () => (await jobs.counts()).workers === 1);
        proxy.freeze();
        end.resolve();
        await worker.stop({ patienceMs: 50 });
      } finally {
        await proxy.close();
        await hf.close();
        await near.end();
      }
    });
});
