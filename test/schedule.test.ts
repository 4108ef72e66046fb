/** Schedules: each tick once, whatever becomes of those who run it. */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { DatabaseSync } from "node:sqlite";
import { setTimeout as sleep } from "node:timers/promises";
import { type Events, type Holdfast, holdfast } from "holdfast";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import {
  type Handler,
  type Run,
  type Schedule,
  type ScheduleOptions,
  nextRuns,
  pauseSchedule,
  resumeSchedule,
  schedule,
  schedules,
} from "holdfast/schedule";
import { Pool, type PoolClient } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 12 });
  hf = holdfast(fromPg(pool));
  await hf.migrate();
  await pool.query("CREATE TABLE effect (schedule text, tick timestamptz, note text)");
});

afterAll(async () => {
  await hf.close();
  await pool.end();
  await database.drop();
});

const begun: Schedule[] = [];
/** Of handlers that stay. */
const gates: (() => void)[] = [];
let over = false;
let made = 0;
let name: string;

beforeEach(() => {
  over = false;
  name = `nightly ' " ${++made}`;
});

afterEach(async () => {
  over = true;
  for (const open of gates.splice(0)) open();
  await Promise.all(begun.splice(0).map((each) => each.stop({ grace: 0 })));
});

/** One that is stopped after the test. Errors that a test does not ask for are no business of the log. */
function make(options: ScheduleOptions, handler: Handler): Schedule {
  const made = schedule(hf, name, { onError: () => {}, ...options }, handler);
  begun.push(made);
  return made;
}

const year = { every: "365 days" } as const;

/** As if nobody had been there since. */
async function longAgo(interval: string): Promise<void> {
  await pool.query(
    `INSERT INTO holdfast.schedule (name, last) VALUES ($1, date_trunc('milliseconds', now()) - $2::interval)
     ON CONFLICT (name) DO UPDATE SET last = excluded.last`,
    [name, interval],
  );
}

/** As if the process of whatever runs had died a while ago. */
async function die(): Promise<void> {
  await pool.query(
    "UPDATE holdfast.schedule_run SET until = now() - interval '1 second' WHERE schedule = $1",
    [name],
  );
}

async function effects(): Promise<number[]> {
  const { rows } = await pool.query<{ tick: Date }>(
    "SELECT tick FROM effect WHERE schedule = $1 ORDER BY tick",
    [name],
  );
  return rows.map(({ tick }) => tick.getTime());
}

async function write(client: { query: Pool["query"] }, tick: Date, note = ""): Promise<void> {
  await client.query("INSERT INTO effect VALUES ($1, $2, $3)", [name, tick, note]);
}

function every(ms: number, ticks: readonly number[]): boolean {
  return ticks.every((tick, i) => i === 0 || tick - (ticks[i - 1] as number) === ms);
}

/** A handler that stays until it is let go. */
function staying() {
  const runs: Run[] = [];
  const mine: (() => void)[] = [];
  const handler: Handler = async (run) => {
    runs.push(run);
    if (over) return;
    await new Promise<void>((resolve) => {
      mine.push(resolve);
      gates.push(resolve);
    });
  };
  const go = () => {
    for (const open of mine.splice(0)) open();
  };
  return { runs, handler, go };
}

test("five instances: each tick once, in order, and each knows the one before", async () => {
  const ticks: { tick: number; previous: number | undefined; fence: number }[] = [];
  const told: unknown[] = [];
  const onError = (error: unknown) => void told.push(error);
  for (let i = 0; i < 5; i++) {
    await make({ every: 100, catchUp: "all", onError }, ({ tick, previous, fence }) => {
      ticks.push({ tick: tick.getTime(), previous: previous?.getTime(), fence });
    }).start();
  }
  await eventually(() => ticks.length >= 12);
  expect(told).toEqual([]);
  const found = ticks.map(({ tick }) => tick);
  expect(every(100, found), found.join()).toBe(true);
  expect(found.every((tick) => tick % 100 === 0)).toBe(true);
  expect(ticks.slice(1).map(({ previous }) => previous)).toEqual(found.slice(0, -1));
  expect(ticks.every(({ fence }, i) => i === 0 || fence > (ticks[i - 1]?.fence ?? 0))).toBe(true);
});

test.each(["last", "none", "all"] as const)(
  "an interval that is shorter than a round trip is run as fast as that goes (%s)",
  async (catchUp) => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const far = new Pool({ connectionString: proxy.url(database.url) });
    far.on("error", () => {});
    const distant = holdfast(fromPg(far));
    const seen: number[] = [];
    const one = schedule(distant, name, { every: 20, catchUp }, ({ tick }) => void seen.push(tick.getTime()));
    begun.push(one);
    await one.start();
    proxy.delayMs = 20;
    await eventually(() => seen.length > 4);
    expect(seen).toEqual([...new Set(seen)].toSorted((a, b) => a - b));
    await one.stop();
    await distant.close();
    await far.end();
    await proxy.close();
  },
);

test("cron, with seconds and a zone", async () => {
  const ticks: number[] = [];
  const cron = make({ cron: "* * * * * *", timeZone: "Europe/Madrid" }, ({ tick }) => {
    ticks.push(tick.getTime());
  });
  await cron.start();
  await eventually(() => ticks.length >= 2);
  expect(ticks.every((tick) => tick % 1000 === 0)).toBe(true);
  const { last, next, started, name: called } = await cron.status();
  expect([started, called]).toEqual([true, name]);
  expect(next?.getTime()).toBeGreaterThan(last?.getTime() ?? Infinity);
  const daily = make({ cron: "30 2 * * *", timeZone: "Europe/Madrid" }, () => {});
  expect(daily.nextRuns(2, new Date("2026-10-24T12:00:00Z")).map((at) => at.toISOString())).toEqual([
    "2026-10-25T00:30:00.000Z",
    "2026-10-26T01:30:00.000Z",
  ]);
});

describe("ticks that were missed", () => {
  const all: number[] = [];
  const note: Handler = ({ tick }) => {
    all.push(tick.getTime());
  };
  beforeEach(() => {
    all.length = 0;
  });

  test('"last" (default): the newest is run, once, and knows since when', async () => {
    await longAgo("3 days");
    const { rows } = await pool.query("SELECT last FROM holdfast.schedule WHERE name = $1", [name]);
    const runs: Run[] = [];
    const events: Events["holdfast:schedule:missed"][] = [];
    const listen = (event: unknown) => {
      const missed = event as Events["holdfast:schedule:missed"];
      if (missed.schedule === name) events.push(missed);
    };
    subscribe("holdfast:schedule:missed", listen);
    for (let i = 0; i < 3; i++) await make({ every: "1 hour" }, (run) => void runs.push(run)).start();
    await eventually(() => runs.length > 0);
    const hour = 3_600_000;
    const newest = Math.floor(Date.now() / hour) * hour;
    await eventually(async () => (await make(year, note).runs())[0]?.state === "done");
    expect(runs.map(({ tick }) => tick.getTime())).toEqual([newest]);
    expect(runs[0]?.previous).toEqual(rows[0].last);
    unsubscribe("holdfast:schedule:missed", listen);
    expect(events).toEqual([
      {
        schedule: name,
        first: new Date(Math.floor(rows[0].last / hour) * hour + hour),
        before: new Date(newest),
      },
    ]);
  });

  test('"none": they are passed over', async () => {
    await longAgo("3 days 30 minutes");
    const one = make({ every: "1 day", catchUp: "none", grace: 1000 }, note);
    await one.start();
    await eventually(async () => ((await one.status()).last?.getTime() ?? 1) % 86_400_000 === 0);
    expect(all).toEqual([]);
    expect(await one.runs()).toEqual([]);
  });

  test('"none": one that is not older than `grace` is not missed', async () => {
    await longAgo("3 days");
    await make({ every: "1 hour", catchUp: "none", grace: 3_600_000 }, note).start();
    await eventually(() => all.length === 1);
  });

  test('"all": each of them, in order, by several instances', async () => {
    await longAgo("20 hours");
    for (let i = 0; i < 3; i++) await make({ every: "1 hour", catchUp: "all" }, note).start();
    await eventually(() => all.length === 20);
    expect(every(3_600_000, all), all.join()).toBe(true);
  });

  test('"all", with a limit: the newest, in order', async () => {
    await longAgo("200 hours");
    for (let i = 0; i < 2; i++)
      await make({ every: "1 hour", catchUp: "all", catchUpLimit: 5, keep: 3 }, note).start();
    const newest = Math.floor(Date.now() / 3_600_000) * 3_600_000;
    await eventually(async () => (await make(year, note).status()).last?.getTime() === newest);
    await eventually(() => all.at(-1) === newest);
    expect(all.length).toBe(5);
    expect(every(3_600_000, all), all.join()).toBe(true);
    // Of what is over, as much is kept as was asked for.
    expect((await make(year, note).runs(50)).length).toBeLessThanOrEqual(4);
  });

  test("a new schedule has missed nothing", async () => {
    await make({ every: "1 day", catchUp: "all" }, note).start();
    const another = make({ every: 200, catchUp: "all" }, note);
    await another.start();
    await eventually(() => all.length > 0);
    expect(all[0]).toBeGreaterThan(Date.now() - 60_000);
  });
});

describe("a run that is not over when the next is due", () => {
  test('"skip" (default): that one is recorded as skipped, by whoever sees it', async () => {
    const { runs, handler, go } = staying();
    const told: unknown[] = [];
    const onError = (error: unknown) => void told.push(error);
    for (let i = 0; i < 3; i++) await make({ every: 100, onError }, handler).start();
    const one = begun[0] as Schedule;
    await eventually(
      async () => (await one.runs(100)).filter(({ state }) => state === "skipped").length >= 4,
    );
    expect(runs.length).toBe(1);
    const before = await one.runs(100);
    expect(before.filter(({ state }) => state === "running").map(({ tick }) => tick)).toEqual([
      runs[0]?.tick,
    ]);
    go();
    await eventually(() => runs.length === 2);
    const after = await one.runs(100);
    expect(after.filter(({ state }) => state === "done").map(({ tick }) => tick)).toEqual([runs[0]?.tick]);
    expect(after.filter(({ state }) => state === "running").map(({ tick }) => tick)).toEqual([runs[1]?.tick]);
    expect(told).toEqual([]);
    go();
  });

  test('"queue": the newest is run after it', async () => {
    const { runs, handler, go } = staying();
    for (let i = 0; i < 3; i++) await make({ every: 100, overlap: "queue" }, handler).start();
    await eventually(() => runs.length === 1);
    const first = runs[0]?.tick.getTime() as number;
    await eventually(() => Date.now() > first + 1500);
    expect((await (begun[0] as Schedule).runs(100)).length).toBe(1);
    go();
    await eventually(() => runs.length === 2);
    // The newest when somebody looked, who may have been on the way to claim it at this moment.
    expect(runs[1]?.tick.getTime()).toBeGreaterThan(first + 200);
    expect(runs[1]?.previous?.getTime()).toBe(first);
    go();
  });

  test('"allow": they run side by side', async () => {
    const { runs, handler, go } = staying();
    await make({ every: 100, overlap: "allow", catchUp: "all" }, handler).start();
    await eventually(() => runs.length >= 5);
    expect(
      every(
        100,
        runs.map(({ tick }) => tick.getTime()),
      ),
    ).toBe(true);
    expect((await (begun[0] as Schedule).status()).running.length).toBeGreaterThanOrEqual(5);
    // What is being claimed at this moment still begins.
    const opening = setInterval(go, 20);
    await (begun[0] as Schedule).stop().finally(() => clearInterval(opening));
  });
});

describe("a handler that throws", () => {
  test("is called again, for the same tick, and the error is there to be read", async () => {
    await longAgo("1 hour");
    const runs: Run[] = [];
    const told: unknown[] = [];
    const one = make(
      { every: "30 minutes", retries: 2, backoff: 20, onError: (error) => void told.push(error) },
      (run) => {
        runs.push(run);
        if (run.attempt < 3) throw new Error(`attempt ${run.attempt} of \0 failed`);
      },
    );
    await one.start();
    await eventually(async () => (await one.status()).lastRun?.state === "done");
    expect(runs.map(({ attempt }) => attempt)).toEqual([1, 2, 3]);
    expect(new Set(runs.map(({ tick }) => tick.getTime())).size).toBe(1);
    expect(told.map((error) => (error as Error).message)).toEqual([
      "attempt 1 of \0 failed",
      "attempt 2 of \0 failed",
    ]);
    expect((await one.status()).lastError).toBeUndefined();
  });

  test("in vain: the run has failed, with its last error, and the schedule goes on", async () => {
    const attempts: number[] = [];
    const events: Events["holdfast:schedule:failed"][] = [];
    const listen = (event: unknown) => events.push(event as Events["holdfast:schedule:failed"]);
    subscribe("holdfast:schedule:failed", listen);
    const one = make(
      { every: 200, overlap: "queue", retries: 1, backoff: (attempt) => attempt * 10 },
      (run) => {
        attempts.push(run.attempt);
        throw new RangeError("too far");
      },
    );
    await one.start();
    await eventually(() => attempts.length >= 4);
    unsubscribe("holdfast:schedule:failed", listen);
    expect(attempts.slice(0, 4)).toEqual([1, 2, 1, 2]);
    const { lastRun, lastError } = await one.status();
    expect(lastRun).toMatchObject({ state: "failed", attempt: 2, error: "RangeError: too far" });
    expect(lastError?.error).toBe("RangeError: too far");
    expect(events.filter(({ schedule: of }) => of === name).slice(0, 2)).toMatchObject([
      { attempt: 1, retryInMs: 10 },
      { attempt: 2, retryInMs: undefined },
    ]);
  });

  test("without onError, a warning is printed", async () => {
    const warnings: Error[] = [];
    const listen = (warning: Error) => warnings.push(warning);
    process.on("warning", listen);
    await longAgo("1 hour");
    const one = schedule(hf, name, { every: "30 minutes", retries: 0 }, () =>
      Promise.reject(new Error("no paper")),
    );
    begun.push(one);
    await one.start();
    await eventually(() =>
      warnings.some(({ message }) => message.includes("no paper") && message.includes(name)),
    );
    process.off("warning", listen);
  });
});

describe("a process that dies, or is frozen", () => {
  test("the same tick is taken over, with a larger fence; the late one is told, and refused", async () => {
    await longAgo("1 hour");
    const first = staying();
    const second = staying();
    const options = { every: "30 minutes", ttl: 1000, overlap: "allow" } as const;
    const errors: unknown[] = [];
    await make({ ...options, onError: (error) => void errors.push(error) }, first.handler).start();
    await eventually(() => first.runs.length === 1);
    const [late] = first.runs as [Run];
    await die();
    await make(options, second.handler).start();
    await eventually(() => second.runs.length === 1 || first.runs.length === 2);
    const taken = (second.runs[0] ?? first.runs[1]) as Run;
    expect(taken.tick).toEqual(late.tick);
    expect(taken.previous).toEqual(late.previous);
    expect([late.attempt, taken.attempt]).toEqual([1, 2]);
    expect(taken.fence).toBeGreaterThan(late.fence);
    // It learns of it with its next heartbeat.
    await eventually(() => late.signal.aborted);
    expect(late.signal.reason).toMatchObject({ code: "HF_SCHEDULE_LOST" });
    await expect(
      hf.transaction(async (tx) => {
        await write(tx.client, late.tick, "late");
        await late.complete(tx);
      }),
    ).rejects.toMatchObject({ code: "HF_SCHEDULE_LOST" });
    await hf.transaction(async (tx) => {
      await write(tx.client, taken.tick, "taken");
      await taken.complete(tx);
    });
    first.go();
    second.go();
    await eventually(() => errors.length > 0);
    const { rows } = await pool.query("SELECT note FROM effect WHERE schedule = $1", [name]);
    expect(rows).toEqual([{ note: "taken" }]);
    expect(await make(year, () => {}).runs()).toMatchObject([
      { state: "done", attempt: 2, fence: taken.fence },
    ]);
  });

  test("retries: 0 means at most once: it is never begun again", async () => {
    await longAgo("1 hour");
    const { runs, handler, go } = staying();
    const told: unknown[] = [];
    await make({ every: "30 minutes", retries: 0 }, handler).start();
    await eventually(() => runs.length === 1);
    await die();
    const other = make(
      { every: "30 minutes", retries: 0, onError: (error) => void told.push(error) },
      handler,
    );
    await other.start();
    await eventually(() => told.length > 0);
    expect(await other.runs()).toMatchObject([
      { state: "failed", attempt: 1, error: expect.stringContaining("died") },
    ]);
    expect(runs.length).toBe(1);
    go();
  });

  test("after a pause of the whole process the signal tells the truth before any timer has run", async () => {
    await longAgo("1 hour");
    const said = Promise.withResolvers<boolean[]>();
    await make({ every: "30 minutes", ttl: 500 }, ({ signal }) => {
      const before = signal.aborted;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 600);
      said.resolve([before, signal.aborted]);
    }).start();
    expect(await said.promise).toEqual([false, true]);
  });

  test("a row that was deleted by hand is a run that is lost", async () => {
    await longAgo("1 hour");
    const { runs, handler, go } = staying();
    await make({ every: "30 minutes", ttl: 600 }, handler).start();
    await eventually(() => runs.length === 1);
    await pool.query("DELETE FROM holdfast.schedule_run WHERE schedule = $1", [name]);
    await eventually(() => runs[0]?.signal.aborted);
    go();
  });

  test("heartbeats keep a run that takes longer than its ttl", async () => {
    await longAgo("1 hour");
    const { runs, handler, go } = staying();
    for (let i = 0; i < 2; i++) await make({ every: "30 minutes", ttl: 1500 }, handler).start();
    await eventually(() => runs.length === 1);
    const started = performance.now();
    await eventually(() => performance.now() > started + 4000);
    expect(runs.length).toBe(1);
    expect(runs[0]?.signal.aborted).toBe(false);
    go();
  });
});

describe("run.complete(tx)", () => {
  test("effects and the end of the run are one", async () => {
    for (let i = 0; i < 3; i++)
      await make({ every: 100, catchUp: "all", backoff: 1, retries: 100 }, async (run) => {
        await hf.transaction(async (tx) => {
          await write(tx.client, run.tick);
          await run.complete(tx);
          // After it, and before COMMIT.
          if (run.attempt === 1 && run.tick.getTime() % 300 === 0) throw new Error("rolled back");
        });
        // After COMMIT: it is done, whatever comes now.
        if (run.tick.getTime() % 200 === 0) throw new Error("too late to matter");
      }).start();
    await eventually(async () => (await effects()).length >= 12);
    const found = await effects();
    expect(every(100, found), found.join()).toBe(true);
  });

  test("a transaction that is rolled back, and a handler that hides it: it is begun again", async () => {
    await longAgo("1 hour");
    const told: unknown[] = [];
    const one = make(
      { every: "30 minutes", backoff: 10, onError: (error) => void told.push(error) },
      async (run) => {
        await hf
          .transaction(async (tx) => {
            await write(tx.client, run.tick);
            await run.complete(tx);
            if (run.attempt === 1) throw new Error("hidden");
          })
          .catch(() => {});
      },
    );
    await one.start();
    await eventually(async () => (await one.status()).lastRun?.state === "done");
    expect(told.map((error) => (error as Error).message)).toEqual([expect.stringContaining("not committed")]);
    expect((await effects()).length).toBe(1);
  });

  test("a transaction that takes longer than the ttl keeps the run", async () => {
    await longAgo("1 hour");
    const signals: AbortSignal[] = [];
    for (let i = 0; i < 2; i++)
      await make({ every: "30 minutes", ttl: 1500 }, async (run) => {
        signals.push(run.signal);
        await hf.transaction(async (tx) => {
          await run.complete(tx);
          await tx.client.query("SELECT pg_sleep(4)");
          await write(tx.client, run.tick);
        });
      }).start();
    await eventually(async () => (await effects()).length === 1);
    await eventually(async () => (await (begun[0] as Schedule).status()).lastRun?.state === "done");
    expect(signals.map(({ aborted }) => aborted)).toEqual([false]);
  });

  test("in a transaction of the caller's own; and not where there is none", async () => {
    await longAgo("1 hour");
    const outcomes: string[] = [];
    const one = make({ every: "30 minutes" }, async (run) => {
      const client = await pool.connect();
      try {
        await run.complete(hf.join(client)).catch((error: Error) => outcomes.push(error.name));
        await client.query("BEGIN");
        await write(client, run.tick);
        await run.complete(hf.join(client));
        await client.query("COMMIT");
      } finally {
        client.release();
      }
    });
    await one.start();
    await eventually(async () => (await one.status()).lastRun?.state === "done");
    expect(outcomes).toEqual(["NotInTransactionError"]);
    expect((await effects()).length).toBe(1);
  });
});

describe("enqueue", () => {
  function enqueuing(
    enqueue: (tick: Date, client: PoolClient) => Promise<unknown>,
    options: ScheduleOptions,
  ): Schedule {
    const one = schedule(hf, name, {
      onError: () => {},
      ...options,
      enqueue: (tick, tx) => enqueue(tick, tx.client),
    });
    begun.push(one);
    return one;
  }

  test("the tick and the job are one, on five instances, some of which fail after they wrote", async () => {
    let calls = 0;
    for (let i = 0; i < 5; i++)
      await enqueuing(
        async (tick, client) => {
          await write(client, tick);
          if (++calls % 3 === 0) throw new Error("after it wrote");
        },
        { every: 100, catchUp: "all", retries: 1000, backoff: 5 },
      ).start();
    await eventually(async () => (await effects()).length >= 12);
    expect(calls).toBeGreaterThan(12);
    const found = await effects();
    expect(every(100, found), found.join()).toBe(true);
    expect((await (begun[0] as Schedule).runs())[0]).toMatchObject({ state: "done" });
  });

  test("in vain: the tick has failed, nothing is written, and it goes on", async () => {
    await longAgo("2 hours");
    const told: unknown[] = [];
    const one = enqueuing(
      async (tick, client) => {
        await write(client, tick);
        throw new Error("no queue");
      },
      { every: "1 hour", catchUp: "all", retries: 1, backoff: 1, onError: (error) => void told.push(error) },
    );
    await one.start();
    await eventually(async () => (await one.runs()).length === 2);
    expect(await one.runs()).toMatchObject([
      { state: "failed", error: "Error: no queue" },
      { state: "failed", error: "Error: no queue" },
    ]);
    expect(told.length).toBe(4);
    expect(await effects()).toEqual([]);
  });

  test("by hand", async () => {
    const one = enqueuing((tick, client) => write(client, tick), year);
    const { ran, tick } = await one.runNow();
    expect(ran).toBe(true);
    expect(await effects()).toEqual([tick?.getTime()]);
    expect(await one.runs()).toMatchObject([{ manual: true, state: "done", tick }]);
  });
});

describe("stop", () => {
  test("waits for what runs, and begins nothing more", async () => {
    const { runs, handler, go } = staying();
    const one = make({ every: 100, overlap: "allow" }, handler);
    await one.start();
    await eventually(() => runs.length >= 1);
    let stopped = false;
    const stopping = one.stop().then(() => (stopped = true));
    const at = performance.now();
    await eventually(() => performance.now() > at + 400);
    expect([stopped, runs[0]?.signal.aborted]).toEqual([false, false]);
    const { length } = runs;
    go();
    await stopping;
    expect(runs.length).toBe(length);
    expect((await one.status()).running).toEqual([]);
    // And may be started again.
    await one.start();
    await eventually(() => runs.length > length);
    go();
  });

  test("after its grace the signal aborts; the tick is given back and goes on elsewhere, as the same attempt", async () => {
    await longAgo("1 hour");
    const obedient: Handler = ({ signal }) =>
      new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason as Error)));
    const told: unknown[] = [];
    const one = make({ every: "30 minutes", onError: (error) => void told.push(error) }, obedient);
    await one.start();
    await eventually(async () => (await one.status()).running.length === 1);
    await one.stop({ grace: 10 });
    // Nothing has gone wrong.
    expect(told).toEqual([]);
    const runs: Run[] = [];
    await make({ every: "30 minutes" }, (run) => void runs.push(run)).start();
    await eventually(() => runs.length === 1);
    expect(runs[0]?.attempt).toBe(1);
  });

  test("by a signal, and by the end of a block", async () => {
    const controller = new AbortController();
    const { runs, handler, go } = staying();
    await make({ every: 100 }, handler).start({ signal: controller.signal });
    await eventually(() => runs.length === 1);
    controller.abort(new Error("shutting down"));
    expect(runs[0]?.signal.reason).toEqual(new Error("shutting down"));
    go();
    await eventually(async () => !(await (begun[0] as Schedule).status()).started);
    await expect(make(year, handler).start({ signal: controller.signal })).rejects.toThrow("shutting down");
    let held: Schedule;
    {
      await using one = make({ every: 100 }, () => {});
      held = one;
      await one.start();
      await expect(one.start()).rejects.toThrow("started already");
    }
    expect((await held.status()).started).toBe(false);
  });
});

describe("pause", () => {
  test("no instance begins a tick, until it is resumed: then catchUp decides", async () => {
    const ticks: number[] = [];
    const byHand: number[] = [];
    for (let i = 0; i < 3; i++)
      await make({ every: 100, catchUp: "all" }, ({ tick, manual }) => {
        (manual ? byHand : ticks).push(tick.getTime());
      }).start();
    const [one] = begun as [Schedule, ...Schedule[]];
    await eventually(() => ticks.length >= 3);
    await one.pause();
    const last = (await one.status()).last?.getTime();
    await eventually(() => ticks.at(-1) === last);
    await sleep(500);
    expect(ticks.at(-1)).toBe(last);
    expect(await one.status()).toMatchObject({ paused: true, started: true, last: new Date(last as number) });
    expect(await schedules(hf, { names: [name] })).toMatchObject([{ name, paused: true }]);
    expect((await one.runNow()).ran).toBe(true);
    expect(byHand).toHaveLength(1);
    await one.resume();
    const paused = ticks.length;
    await eventually(() => ticks.length >= paused + 8);
    // None is left out, none was run twice.
    expect(every(100, ticks), ticks.join()).toBe(true);
    expect(await one.status()).toMatchObject({ paused: false });
  });

  test("nor is a run of a process that died begun again, nor anything enqueued", async () => {
    const { runs, handler } = staying();
    await longAgo("1 hour");
    await make({ every: "1 hour", ttl: 60_000 }, handler).start();
    await eventually(() => runs.length === 1);
    expect(await pauseSchedule(hf, name)).toBe(true);
    await die();
    const other = make({ every: "1 hour" }, handler);
    await other.start();
    const enqueued: Date[] = [];
    const queued = schedule(hf, name, {
      every: 50,
      enqueue: async (tick) => void enqueued.push(tick),
    });
    begun.push(queued);
    await queued.start();
    await sleep(400);
    expect(runs).toHaveLength(1);
    expect(enqueued).toEqual([]);
    await queued.stop();
    await other.stop();
    expect(await resumeSchedule(hf, name)).toBe(true);
    await other.start();
    await eventually(() => runs.length === 2);
    expect(runs[1]).toMatchObject({ attempt: 2, tick: runs[0]?.tick });
  });

  test("one that was never started can be paused; one that is not there is not made", async () => {
    const one = make({ every: 50, catchUp: "all" }, () => expect.fail("paused"));
    await one.pause();
    await one.start();
    await sleep(200);
    expect(await one.status()).toMatchObject({ paused: true, lastRun: undefined });
    expect(await pauseSchedule(hf, "nobody's")).toBe(false);
    expect(await resumeSchedule(hf, "nobody's")).toBe(false);
    expect(await schedules(hf, { names: ["nobody's"] })).toEqual([]);
  });
});

test("runNow: at once, beside the ticks, and not while another runs", async () => {
  const runs: Run[] = [];
  const one = make(year, (run) => void runs.push(run));
  expect(await one.runNow()).toEqual({ ran: true, tick: runs[0]?.tick });
  expect(runs[0]).toMatchObject({ manual: true, attempt: 1 });
  expect((await one.status()).lastRun).toMatchObject({ manual: true, state: "done" });
  const { runs: held, handler, go } = staying();
  const running = make(year, handler).runNow();
  await eventually(() => held.length === 1);
  expect(await one.runNow()).toEqual({ ran: false, tick: undefined });
  go();
  await running;
  await expect(make(year, () => Promise.reject(new Error("not now"))).runNow()).rejects.toThrow("not now");
  // The failure is final: whoever called knows of it.
  expect((await one.status()).lastRun).toMatchObject({ state: "failed", error: "Error: not now" });
});

test("started in the body of a transaction, it goes on without it", async () => {
  const ticks: Date[] = [];
  const one = make({ every: 100, catchUp: "all" }, async ({ tick }) => {
    await hf.transaction(async (tx) => write(tx.client, tick));
    ticks.push(tick);
  });
  await hf.transaction(async () => {
    await one.start();
  });
  await eventually(() => ticks.length >= 3);
});

test("a database that is not there for a while: told, and then it goes on", async () => {
  const told: unknown[] = [];
  const ticks: number[] = [];
  await make({ every: 100, catchUp: "all", onError: (error) => void told.push(error) }, ({ tick }) => {
    ticks.push(tick.getTime());
  }).start();
  await eventually(() => ticks.length >= 2);
  await pool.query("ALTER FUNCTION holdfast.schedule_step RENAME TO away");
  await eventually(() => told.length >= 1);
  await pool.query("ALTER FUNCTION holdfast.away RENAME TO schedule_step");
  const { length } = ticks;
  await eventually(() => ticks.length >= length + 3);
  expect(every(100, ticks), ticks.join()).toBe(true);
});

test("where REPEATABLE READ is the default", async () => {
  const other = new Pool({
    connectionString: database.url,
    options: "-c default_transaction_isolation=repeatable\\ read",
    max: 4,
  });
  const strict = holdfast(fromPg(other));
  const ticks: number[] = [];
  for (let i = 0; i < 4; i++) {
    const one = schedule(
      strict,
      name,
      { every: 50, catchUp: "all" },
      ({ tick }) => void ticks.push(tick.getTime()),
    );
    begun.push(one);
    await one.start();
  }
  await eventually(() => ticks.length >= 20);
  await Promise.all(begun.splice(0).map((each) => each.stop()));
  expect(every(50, ticks), ticks.join()).toBe(true);
  await strict.close();
  await other.end();
});

describe.each(["postgres", "pgbouncer"] as const)("a pool of one, on %s", (server) => {
  beforeEach(({ skip }) => {
    skip(unavailable(server) !== undefined, unavailable(server));
  });

  test("ticks, heartbeats and effects, on four instances", async () => {
    const place = await createDatabase(server);
    const pools = Array.from({ length: 4 }, () => new Pool({ connectionString: place.url, max: 1 }));
    try {
      await holdfast(fromPg(pools[0] as Pool)).migrate();
      await pools[0]?.query("CREATE TABLE effect (schedule text, tick timestamptz, note text)");
      for (const each of pools) {
        const of = holdfast(fromPg(each));
        const one = schedule(of, name, { every: 100, catchUp: "all", ttl: 2000 }, async (run) => {
          await of.transaction(async (tx) => {
            await write(tx.client, run.tick);
            await run.complete(tx);
          });
        });
        const queued = schedule(of, `${name} queued`, {
          every: 200,
          catchUp: "all",
          enqueue: (tick, tx) => tx.client.query("INSERT INTO effect VALUES ('queued', $1)", [tick]),
        });
        begun.push(one, queued);
        await one.start();
        await queued.start();
      }
      const count = async (of: string) => {
        const { rows } = await (pools[0] as Pool).query<{ tick: Date }>(
          "SELECT tick FROM effect WHERE schedule = $1 ORDER BY tick",
          [of],
        );
        return rows.map(({ tick }) => tick.getTime());
      };
      await eventually(async () => (await count(name)).length >= 12 && (await count("queued")).length >= 6);
      await Promise.all(begun.splice(0).map((each) => each.stop()));
      expect(every(100, await count(name))).toBe(true);
      expect(every(200, await count("queued"))).toBe(true);
    } finally {
      await Promise.all(begun.splice(0).map((each) => each.stop({ grace: 0 })));
      await Promise.all(pools.map((each) => each.end()));
      await place.drop();
    }
  });
});

describe("what is wrong is said at once", () => {
  const handler = () => {};

  test.each<[unknown, RegExp]>([
    [{}, /either `cron`/],
    [{ every: "1 day", cron: "* * * * *" }, /either `cron`/],
    [{ every: "1 day", catchup: "all" }, /no option `catchup`/],
    [{ every: "1 day", catchUp: "some" }, /catchUp must be "none" or "last" or "all"/],
    [{ every: "1 day", catchUp: "all", overlap: "skip" }, /overlap "skip" leaves some out/],
    [{ every: "1 day", retries: -1 }, /retries must be/],
    [{ every: "1 day", ttl: 10 }, /ttl must be/],
    [{ every: "1 day", catchUp: "none", grace: 10 }, /grace must be/],
    [{ every: "1 day", timeZone: "Mars/Base" }, /no time zone/],
    [{ every: "1 day", enqueue: handler }, /either a handler, or `enqueue`/],
    [{ every: "1 day", backoff: "1 s" }, /backoff must be/],
  ])("%j", (options, text) => {
    expect(() => schedule(hf, "x", options as ScheduleOptions, handler)).toThrow(text);
  });

  test("a pattern that cannot be read, when it is started", async () => {
    const one = make({ cron: "every night" }, handler);
    await expect(one.start()).rejects.toThrow(/"every night" is no cron pattern/);
    expect(() => schedule(hf, "", year, handler)).toThrow("name must be");
    expect(() => schedule({} as typeof hf, "x", year, handler)).toThrow("not what holdfast");
  });

  test("an engine that keeps no schedules, tables that are not there", async () => {
    const file = new DatabaseSync(":memory:");
    const on = fromNodeSqlite(file);
    const gap = { supported: false, why: "this one does not" } as const;
    const none = holdfast({ ...on, engine: { ...on.engine, schedules: gap } });
    await expect(schedule(none, "x", year, handler).start()).rejects.toMatchObject({
      code: "HF_UNSUPPORTED",
    });
    await expect(schedule(holdfast(on), "x", year, handler).start()).rejects.toMatchObject({
      code: "HF_SCHEMA_MISSING",
    });
    file.close();
    const empty = await createDatabase("postgres");
    const other = new Pool({ connectionString: empty.url });
    await expect(schedule(holdfast(fromPg(other)), "x", year, handler).start()).rejects.toMatchObject({
      code: "HF_SCHEMA_MISSING",
    });
    await other.end();
    await empty.drop();
  });

  test("croner is not installed: only patterns need it, and the error says how to get it", async () => {
    const worker = startWorker<{ every: number; cron: string }>(
      new URL("./workers/schedule-no-croner.ts", import.meta.url),
    );
    const { every: runs, cron } = await worker.result;
    expect(runs).toBe(2);
    expect(cron).toMatch(/^HF_CRONER_MISSING .*npm install croner/);
  });

  test("types", () => {
    void (() => {
      // @ts-expect-error one of both
      schedule(hf, "x", { cron: "* * * * *", every: "1 day" }, handler);
      // @ts-expect-error one of both
      schedule(hf, "x", { timeZone: "UTC" }, handler);
      // @ts-expect-error no such unit
      schedule(hf, "x", { every: "1 fortnight" }, handler);
      // @ts-expect-error all, and some left out
      schedule(hf, "x", { every: "1 day", catchUp: "all", overlap: "skip" }, handler);
      // @ts-expect-error nothing to do
      schedule(hf, "x", { every: "1 day" });
      // @ts-expect-error a handler besides
      schedule(hf, "x", { every: "1 day", enqueue: async () => {} }, handler);
      void nextRuns({ every: "15 minutes" }, 3);
    });
    expect(inject("seed")).toBeTypeOf("number");
  });
});
