/** What schedules promise on every engine that keeps them: the rules of `schedule/decide.ts`, by example. */
import type { Connection, Database } from "../../seam/database.ts";
import { SerializationError, UnsupportedError } from "../../seam/errors.ts";
import { isSupported } from "../../seam/capabilities.ts";
import {
  type Handler,
  type Run,
  type RunInfo,
  type Schedule,
  ScheduleError,
  type ScheduleOptions,
  pauseSchedule,
  resumeSchedule,
  runs,
  schedule,
  schedules,
} from "../../schedule/index.ts";
import type { ConformanceCase, Ground } from "../ground.ts";
import { TestGate, assert, during, sql, suite, table } from "./support.ts";

/** For machines that are busy; nothing takes that long. */
const patience = 60_000;
/** Of one that dies: longer than a busy machine stands still, or it is lost before it dies. */
const claimMs = 2000;
const pause = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

async function eventually(what: string, so: () => boolean | Promise<boolean>): Promise<void> {
  for (const endsAt = performance.now() + patience; !(await so());) {
    assert.ok(performance.now() < endsAt, `not so within ${patience} ms: ${what}`);
    await pause(20);
  }
}

interface Stage extends Ground {
  /** A schedule of the case's name, which is stopped at its end. */
  make(hf: Ground["hf"], options: ScheduleOptions, handler: Handler): Schedule;
  /** Let handlers go that wait for it: they all do, at the end. */
  readonly over: TestGate;
}

/** Where they are not kept, they are refused when they are started. */
function kept(run: (stage: Stage) => Promise<void>): ConformanceCase["run"] {
  return async (ground) => {
    const { capabilities, hf, fresh } = ground;
    if (!isSupported(capabilities.schedules)) {
      const one = schedule(hf, fresh, { every: "1 hour" }, () => {});
      await assert.rejects(one.start(), UnsupportedError);
      await assert.rejects(schedules(hf), UnsupportedError);
      return;
    }
    const made: Schedule[] = [];
    const over = new TestGate();
    try {
      await run({
        ...ground,
        over,
        make(instance, options, handler) {
          const one = schedule(instance, fresh, { onError: () => {}, ...options }, handler);
          made.push(one);
          return one;
        },
      });
    } finally {
      over.open();
      await Promise.all(made.map((each) => each.stop({ grace: 0 })));
    }
  };
}

const year = { every: "365 days" } as const;
const never: Handler = () => assert.fail("it was run");

/** The run of this schedule that is not over. */
async function openRun({ hf, fresh }: Ground): Promise<RunInfo | undefined> {
  return (await runs(hf, fresh)).find(({ state }) => state === "running" || state === "waiting");
}

/** A database that can be cut off, as that of a process that has died: its connections are the other one's no more. */
function fragile(database: Database<unknown, Connection>): {
  readonly database: Database<unknown, Connection>;
  cut(): void;
} {
  let gone = false;
  const guarded =
    (call: (...args: never[]) => unknown) =>
    async (...args: never[]) => {
      if (gone) throw new Error("this process is dead");
      return call.apply(database, args);
    };
  const proxy = new Proxy(database, {
    get(target, name) {
      const value: unknown = Reflect.get(target, name, target);
      if (typeof value !== "function") return value;
      return name === "connect" || name === "transaction"
        ? guarded(value as (...args: never[]) => unknown)
        : (value.bind(target) as unknown);
    },
  });
  return { database: proxy, cut: () => (gone = true) };
}

/** Whether they are neighbours, at that distance. */
function inOrder(ticks: readonly number[], every: number): boolean {
  return ticks.every(
    (tick, i) => tick % every === 0 && (i === 0 || tick - (ticks[i - 1] as number) === every),
  );
}

export const scheduleCases = suite("schedule", {
  "runs each tick once, in order, on several instances, and tells the one before": kept(
    async ({ hf, other, make }) => {
      const seen: Run[] = [];
      for (const instance of [hf, other, hf, other])
        await make(instance, { every: 100, catchUp: "all" }, (run) => void seen.push(run)).start();
      await eventually("some ticks have been run", () => seen.length >= 8);
      const ticks = seen.map(({ tick }) => tick.getTime());
      assert.ok(inOrder(ticks, 100), ticks.join());
      assert.deepEqual(
        seen.slice(1).map(({ previous }) => previous?.getTime()),
        ticks.slice(0, -1),
      );
      const fences = seen.map(({ fence }) => fence);
      assert.ok(
        fences.every((fence, i) => i === 0 || fence > (fences[i - 1] as number)),
        fences.join(),
      );
      assert.deepEqual(
        new Set(seen.map(({ attempt, manual }) => `${attempt} ${manual}`)),
        new Set(["1 false"]),
      );
    },
  ),

  "begins with the first tick after it was first started": kept(async ({ hf, make }) => {
    const one = make(hf, { every: "1 day", catchUp: "all" }, never);
    await one.start();
    const { last, next, started, paused, running, lastRun } = await one.status();
    assert.deepEqual([started, paused, running, lastRun], [true, false, [], undefined]);
    assert.ok(last && next && next > last && next.getTime() % 86_400_000 === 0);
  }),

  'catches up with "all": each that was missed, in order, once': kept(async ({ hf, other, make }) => {
    const ticks: number[] = [];
    const note: Handler = ({ tick }) => void ticks.push(tick.getTime());
    const first = make(hf, { every: 50, catchUp: "all" }, note);
    await first.start();
    await eventually("one has been run", () => ticks.length > 0);
    await first.stop();
    const before = ticks.length;
    await pause(500);
    assert.equal(ticks.length, before);
    for (const instance of [hf, other]) await make(instance, { every: 50, catchUp: "all" }, note).start();
    await eventually("those that were missed have been run", () => ticks.length > before + 10);
    assert.ok(inOrder(ticks, 50), ticks.join());
  }),

  'catches up with "last" (default): the newest, for all of them': kept(async ({ hf, other, make }) => {
    const seen: Run[] = [];
    const first = make(hf, { every: 50 }, (run) => void seen.push(run));
    await first.start();
    await eventually("one has been run", () => seen.length > 0);
    await first.stop();
    const before = seen.length;
    const { last } = await first.status();
    await pause(500);
    for (const instance of [hf, other])
      await make(instance, { every: 50 }, (run) => void seen.push(run)).start();
    await eventually("it goes on", () => seen.length > before);
    const { tick, previous } = seen[before] as Run;
    assert.deepEqual(previous, last);
    assert.ok(
      tick.getTime() - (last as Date).getTime() >= 450,
      `${tick.toISOString()} ${last?.toISOString()}`,
    );
  }),

  'while one runs, with "skip" (default), others are recorded as skipped': kept(async (stage) => {
    const { hf, other, make, over, fresh } = stage;
    const seen: Run[] = [];
    const stay: Handler = async (run) => {
      seen.push(run);
      await over.opened;
    };
    // A tick that nobody has asked for before the next one is passed over: longer than it takes to ask, on a machine that is busy.
    for (const instance of [hf, other]) await make(instance, { every: 250 }, stay).start();
    await eventually(
      "some are skipped",
      async () =>
        (await runs(hf, fresh, { limit: 100 })).filter(({ state }) => state === "skipped").length >= 3,
    );
    assert.equal(seen.length, 1);
    const found = await runs(other, fresh, { limit: 100 });
    const skipped = found.find(({ state }) => state === "skipped");
    assert.deepEqual([skipped?.attempt, skipped?.manual], [0, false]);
    assert.deepEqual(
      found.filter(({ state }) => state === "running").map(({ tick }) => tick),
      [seen[0]?.tick],
    );
  }),

  'while one runs, with "queue", others are left until it is over': kept(async (stage) => {
    const { hf, other, make, fresh } = stage;
    const seen: Run[] = [];
    const first = new TestGate();
    const stay: Handler = async (run) => {
      seen.push(run);
      if (seen.length === 1) await first.opened;
    };
    for (const instance of [hf, other]) await make(instance, { every: 250, overlap: "queue" }, stay).start();
    await eventually("one runs", () => seen.length === 1);
    await pause(600);
    assert.equal((await runs(hf, fresh, { limit: 100 })).length, 1);
    first.open();
    await eventually("the next one runs", () => seen.length > 1);
    assert.deepEqual(seen[1]?.previous, seen[0]?.tick);
    assert.ok((seen[1] as Run).tick.getTime() - (seen[0] as Run).tick.getTime() >= 250);
  }),

  'with "allow" they run side by side': kept(async ({ hf, make, over }) => {
    let running = 0;
    const one = make(hf, { every: 50, overlap: "allow", catchUp: "all" }, async () => {
      running++;
      await over.opened;
    });
    await one.start();
    await eventually("several run", () => running >= 3);
    assert.ok((await one.status()).running.length >= 3);
  }),

  "begins a run that failed again, and says how it went": kept(async (stage) => {
    const { hf, make, fresh } = stage;
    const attempts: number[] = [];
    const second: (RunInfo | undefined)[] = [];
    const errors: unknown[] = [];
    const options = { every: 50, retries: 2, backoff: 10, overlap: "queue" } as const;
    const one = make(hf, { ...options, onError: (error) => void errors.push(error) }, async (run) => {
      attempts.push(run.attempt);
      if (run.attempt === 2) second.push(await openRun(stage));
      if (attempts.length < 5) throw new Error(`attempt ${attempts.length} \0failed`);
    });
    await one.start();
    await eventually("one went well", () => attempts.length >= 5);
    await eventually("it is recorded", async () => (await one.status()).lastRun?.state === "done");
    assert.deepEqual(attempts.slice(0, 5), [1, 2, 3, 1, 2]);
    assert.equal(errors.length, 4);
    // While it runs again it has no end, and the error of the attempt before.
    assert.deepEqual(
      [second[0]?.state, second[0]?.attempt, second[0]?.endedAt, second[0]?.error],
      ["running", 2, undefined, "Error: attempt 1 failed"],
    );
    await one.stop();
    const found = (await runs(hf, fresh, { limit: 100 })).toReversed();
    assert.deepEqual(
      found.slice(0, 2).map(({ state, attempt, error }) => [state, attempt, error]),
      [
        ["failed", 3, "Error: attempt 3 failed"],
        ["done", 2, undefined],
      ],
    );
    assert.ok(found[0]?.endedAt && found[0].endedAt >= found[0].startedAt);
  }),

  "commits what a run writes and its end together, or neither": kept(async (ground) => {
    const { hf, other, make, capabilities } = ground;
    const name = await table(ground);
    /** Of a run whose end met another step of its schedule, as often as a transaction is run again. */
    const mayConflict = !isSupported(capabilities.currentReads);
    const errors: unknown[] = [];
    for (const instance of [hf, other]) {
      const options = { every: 100, catchUp: "all", retries: 5, backoff: 1 } as const;
      await make(instance, { ...options, onError: (error) => void errors.push(error) }, async (run) => {
        await instance.transaction(async (tx) => {
          const k = String(run.tick.getTime());
          await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES (${k}, ${run.attempt})`);
          await run.complete(tx);
          if (run.attempt === 1) throw new Error("not yet");
        });
      }).start();
    }
    const written = async () => {
      const rows = await hf.transaction((tx) => tx.query(sql`SELECT k, n FROM ${sql.id(name)} ORDER BY k`));
      return rows.map(({ k, n }) => [Number(k), Number(n)] as const);
    };
    await eventually("some are written", async () => (await written()).length >= 4);
    const found = await written();
    assert.ok(
      inOrder(
        found.map(([tick]) => tick),
        100,
      ),
      found.join(" "),
    );
    assert.deepEqual(
      errors.filter(
        (error) => !/not yet/.test(String(error)) && !(mayConflict && error instanceof SerializationError),
      ),
      [],
    );
    assert.ok(found.every(([, attempt]) => attempt === 2 || (mayConflict && attempt > 2)));
  }),

  "takes over the run of a process that died, once its claim is over": kept(async (stage) => {
    const { hf, site, another, make, over, fresh } = stage;
    const name = await table(stage);
    const dying = fragile(site.database);
    const late: unknown[] = [];
    const taken = new TestGate();
    const options = { every: 200, ttl: claimMs, backoff: 1, overlap: "queue" } as const;
    const victims: Run[] = [];
    const instance = another(dying.database);
    const victim = make(instance, options, async (run) => {
      victims.push(run);
      await new Promise((resolve) => run.signal.addEventListener("abort", resolve, { once: true }));
      // It was told before anybody else could have it; what it writes all the same is not kept.
      await taken.opened;
      const writing = hf.transaction(async (tx) => {
        await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES ('late', 1)`);
        await run.complete(tx);
      });
      late.push(await writing.catch((error: unknown) => error));
    });
    await victim.start();
    await eventually("it runs", () => victims.length === 1);
    dying.cut();
    const seen: Run[] = [];
    const heir = make(hf, options, async (run) => {
      seen.push(run);
      taken.open();
      await over.opened;
    });
    await heir.start();
    await eventually("it is taken over", () => seen.length === 1);
    const [[before], [after]] = [victims, seen];
    assert.deepEqual(after?.tick, before?.tick);
    assert.equal(after?.attempt, 2);
    assert.ok(after.fence > (before as Run).fence);
    assert.ok(before?.signal.aborted && before.signal.reason instanceof ScheduleError);
    await eventually("it came too late", () => late.length === 1);
    const [error] = late;
    assert.ok(error instanceof ScheduleError && error.code === "HF_SCHEDULE_LOST", String(error));
    const rows = await hf.transaction((tx) => tx.query(sql`SELECT k FROM ${sql.id(name)}`));
    assert.equal(rows.length, 0);
    assert.equal((await runs(hf, fresh)).filter(({ state }) => state === "running").length, 1);
  }),

  "gives up the run of a process that died if no attempt is left": kept(
    async ({ hf, site, another, make, over, fresh }) => {
      const dying = fragile(site.database);
      const options = { every: 200, ttl: claimMs, retries: 0, overlap: "queue" } as const;
      let begun = 0;
      const instance = another(dying.database);
      await make(instance, options, async () => {
        begun++;
        await over.opened;
      }).start();
      await eventually("it runs", () => begun === 1);
      dying.cut();
      const told: unknown[] = [];
      const ticks: Date[] = [];
      await make(
        hf,
        { ...options, onError: (error) => void told.push(error) },
        ({ tick }) => void ticks.push(tick),
      ).start();
      await eventually("it goes on with the next", () => ticks.length > 0);
      const died = (await runs(hf, fresh, { limit: 100 })).find(({ state }) => state === "failed");
      assert.match(died?.error ?? "", /process died/);
      assert.ok(died && (ticks[0] as Date) > died.tick);
      assert.ok(told.some((error) => error instanceof ScheduleError));
    },
  ),

  "stopped in the middle of a run, gives it back, and the attempt does not count": kept(
    async ({ hf, other, make }) => {
      const begun: Run[] = [];
      const one = make(hf, { every: 100, overlap: "queue" }, async (run) => {
        begun.push(run);
        await new Promise((_, reject) =>
          run.signal.addEventListener("abort", () => reject(new Error("stopped"))),
        );
      });
      await one.start();
      await eventually("it runs", () => begun.length === 1);
      await one.stop({ grace: 0 });
      const seen: Run[] = [];
      await make(other, { every: 100, overlap: "queue" }, (run) => void seen.push(run)).start();
      await eventually("somebody else has it", () => seen.length > 0);
      assert.deepEqual([seen[0]?.tick, seen[0]?.attempt], [begun[0]?.tick, 1]);
      assert.ok((seen[0] as Run).fence > (begun[0] as Run).fence);
    },
  ),

  "pauses for everybody, and goes on": kept(async ({ hf, other, make, fresh }) => {
    const ticks: Date[] = [];
    const note: Handler = ({ tick }) => void ticks.push(tick);
    const one = make(hf, { every: 50 }, note);
    await one.start();
    await eventually("it runs", () => ticks.length > 0);
    await make(other, { every: 50 }, note).pause();
    await eventually("nothing is under way", async () => (await one.status()).running.length === 0);
    const before = ticks.length;
    await pause(300);
    assert.equal(ticks.length, before);
    assert.equal((await one.status()).paused, true);
    // By hand it can be run all the same, and that is no tick.
    const { last } = await one.status();
    assert.equal((await one.runNow()).ran, true);
    assert.deepEqual([ticks.length, (await one.status()).last], [before + 1, last]);
    assert.equal(await resumeSchedule(other, fresh), true);
    await one.resume();
    await eventually("it goes on", () => ticks.length > before + 2);
    assert.equal(await pauseSchedule(hf, fresh), true);
    assert.equal(await pauseSchedule(hf, `${fresh} of nobody`), false);
  }),

  "runs it by hand, and throws what it throws": kept(async ({ hf, other, make, over }) => {
    const seen: Run[] = [];
    const one = make(hf, year, (run) => {
      seen.push(run);
      if (seen.length === 2) throw new RangeError("by hand");
    });
    const { ran, tick } = await one.runNow();
    assert.deepEqual([ran, tick, seen[0]?.manual, seen[0]?.attempt], [true, seen[0]?.tick, true, 1]);
    await assert.rejects(one.runNow(), RangeError);
    assert.deepEqual(
      (await one.runs()).map(({ state, manual }) => [state, manual]),
      [
        ["failed", true],
        ["done", true],
      ],
    );
    // Two at the same time are two, if they may overlap.
    const both = make(hf, { ...year, overlap: "allow" }, () => {});
    const answers = await Promise.all([both.runNow(), both.runNow(), both.runNow()]);
    assert.equal(new Set(answers.map((answer) => answer.tick?.getTime())).size, 3);
    const long = make(other, year, async () => over.opened);
    const running = long.runNow();
    await eventually("it runs", async () => (await long.status()).running.length === 1);
    assert.deepEqual(await one.runNow(), { ran: false, tick: undefined });
    over.open();
    await running;
  }),

  "by hand, waits for somebody who has the schedule for a moment": kept(async ({ hf, other, make }) => {
    const mine = make(hf, year, () => {});
    await mine.runNow();
    const theirs = make(other, year, () => {});
    const { running } = await during(
      (inside) =>
        hf.transaction(async () => {
          await mine.pause();
          await inside();
        }),
      async () => {
        const begun = theirs.runNow();
        await pause(300);
        return { running: begun };
      },
    );
    assert.equal((await running).ran, true);
    assert.equal((await mine.status()).paused, true);
  }),

  "with `enqueue`, records a tick in the transaction that enqueues its work": kept(async (ground) => {
    const { hf, other, fresh } = ground;
    const name = await table(ground);
    const tried = new Map<number, number>();
    const made = [hf, other].map((instance) =>
      schedule(instance, fresh, {
        every: 100,
        catchUp: "all",
        retries: 3,
        backoff: 1,
        onError: () => {},
        enqueue: async (tick, tx) => {
          const times = (tried.get(tick.getTime()) ?? 0) + 1;
          tried.set(tick.getTime(), times);
          await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES (${String(tick.getTime())}, 1)`);
          if (times === 1) throw new Error("not yet");
        },
      }),
    );
    const written = async () => {
      const rows = await hf.transaction((tx) => tx.query(sql`SELECT k FROM ${sql.id(name)} ORDER BY k`));
      return rows.map(({ k }) => Number(k));
    };
    try {
      for (const each of made) await each.start();
      await eventually("some are written", async () => (await written()).length >= 4);
      const found = await written();
      assert.ok(inOrder(found, 100), found.join());
      const recorded = await runs(hf, fresh, { limit: 100 });
      assert.ok(recorded.every(({ state }) => state === "done"));
    } finally {
      await Promise.all(made.map((each) => each.stop({ grace: 0 })));
    }
  }),

  "keeps as many runs that are over as it is told to": kept(async ({ hf, make, fresh }) => {
    let count = 0;
    const one = make(hf, { every: 50, keep: 3 }, () => void count++);
    await one.start();
    await eventually("some have been run", () => count >= 6);
    await one.stop();
    const found = await runs(hf, fresh, { limit: 100 });
    assert.ok(found.length >= 3 && found.length <= 4, String(found.length));
  }),

  "shows what is there, and makes nothing by looking": kept(async ({ hf, other, make, fresh }) => {
    assert.deepEqual(await schedules(hf, { names: [fresh] }), []);
    assert.deepEqual(await runs(hf, fresh), []);
    const one = make(hf, year, () => {});
    assert.equal((await one.status()).last, undefined);
    assert.deepEqual(await schedules(hf, { names: [fresh] }), []);
    await one.runNow();
    const [found, ...none] = await schedules(other, { names: [fresh, "nobody's"] });
    assert.deepEqual(
      [found?.name, found?.paused, found?.open, found?.lastRun?.state, none],
      [fresh, false, 0, "done", []],
    );
    assert.ok((await schedules(other)).some(({ name }) => name === fresh));
  }),
});
