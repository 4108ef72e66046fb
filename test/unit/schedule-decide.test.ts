/**
 * What schedules decide, three times: by the pure rules, by PostgreSQL's functions and by the generic store, from the same
 * states, with the same calls, at the same moment. They must say the same, and leave the same rows, column by column.
 */
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import type { SqlConnection } from "../../packages/holdfast/src/seam/database.ts";
import { sql } from "../../packages/holdfast/src/seam/sql.ts";
import { schedules as functions } from "../../packages/holdfast/src/engines/postgres/schedule/index.ts";
import { storeDialect } from "../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { StoredRows } from "../../packages/holdfast/src/engines/sql/rows.ts";
import { runTable, scheduleStore, scheduleTable } from "../../packages/holdfast/src/engines/sql/schedule.ts";
import {
  type StepView,
  type StoredRun,
  type StoredSchedule,
  decideEnd,
  decideRenew,
  decideStep,
  wishFor,
} from "../../packages/holdfast/src/schedule/decide.ts";
import type {
  RunEnding,
  Overlap,
  RunGrip,
  RunState,
  Schedules,
  ScheduleStanding,
  ScheduleStep,
} from "../../packages/holdfast/src/schedule/store.ts";
import { replacing } from "../harness/catalog.ts";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
import { random } from "../harness/random.ts";

const long = process.env["HOLDFAST_LONG"] === "1";

/** What is in the tables of one schedule. */
interface State {
  readonly schedule: StoredSchedule | undefined;
  readonly runs: readonly StoredRun[];
}

/** Who has what: `schedule`: its row; runs by `tick manual`. */
interface Locks {
  readonly schedule: boolean;
  readonly runs: ReadonlySet<string>;
}

const keyOf = ({ tick, manual }: { readonly tick: number; readonly manual: boolean }) => `${tick} ${manual}`;
const isOpen = ({ state }: StoredRun) => state === "running" || state === "waiting";
const inOrder = (runs: readonly StoredRun[]) =>
  runs.toSorted((a, b) => a.tick - b.tick || Number(a.manual) - Number(b.manual));

/** The rules, on rows in memory. */
function stepInMemory(state: State, locks: Locks, step: ScheduleStep, now: number, fence: number) {
  let { schedule } = state;
  const open = inOrder(state.runs.filter(isOpen));
  let view: StepView = { now, schedule, open, lock: "none" };
  for (let i = 0; i < 10; i++) {
    const decided = decideStep(view, step);
    if (!("need" in decided)) {
      const { verdicts, writes } = decided;
      if (!writes) return { verdicts, state: { schedule, runs: state.runs } };
      const changed = new Map(writes.update.map((run) => [keyOf(run), run]));
      const runs = [...state.runs.map((run) => changed.get(keyOf(run)) ?? run), ...writes.insert];
      const kept = runs.filter((run) => isOpen(run) || !(run.tick < (writes.forget ?? -Infinity)));
      return { verdicts, state: { schedule: writes.schedule, runs: kept } };
    }
    const { need } = decided;
    if (typeof need === "object") view = { ...view, schedule: (schedule = need.make) };
    else if (need === "lock") view = { ...view, lock: locks.schedule ? "theirs" : "ours" };
    else if (need === "fence") view = { ...view, fence };
    else if (need === "free")
      view = {
        ...view,
        free: new Set(open.filter((run) => run.until <= now && !locks.runs.has(keyOf(run)))),
      };
    else if (need === "manual")
      view = {
        ...view,
        manual: state.runs
          .filter(({ manual, tick }) => manual && tick >= Math.floor(now / 1000) * 1000)
          .map(({ tick }) => tick),
      };
    else
      view = {
        ...view,
        edge: state.runs
          .map(({ tick }) => tick)
          .toSorted((a, b) => b - a)
          .slice(step.keep - 1, step.keep + 1),
      };
  }
  throw new Error("it asks for more and more");
}

function standingOf({ verdicts }: ReturnType<typeof stepInMemory>): ScheduleStanding {
  const { claimed, now, last, wake, died, ...rest } = verdicts;
  return {
    ...rest,
    now: now / 1000,
    last: last / 1000,
    wake: wake === undefined ? undefined : wake / 1000,
    died: died.map((tick) => tick / 1000),
    claimed: claimed && {
      schedule: claimed.schedule,
      tick: claimed.tick / 1000,
      previous: claimed.previous === undefined ? undefined : claimed.previous / 1000,
      manual: claimed.manual,
      fence: claimed.fence,
      attempt: claimed.attempt,
    },
  };
}

// Whatever may be in the tables, and whatever may be asked for.

type Next = () => number;
const upTo = (next: Next, n: number) => Math.floor(next() * n);
const pick = <T>(next: Next, list: readonly T[]): T => list[upTo(next, list.length)] as T;
const chance = (next: Next, p: number) => next() < p;

const second = 1_000_000;
/** Now and then a whole millisecond, at which things meet. */
const moment = (next: Next) =>
  Date.UTC(2026, 5, 1) * 1000 + (chance(next, 0.4) ? upTo(next, 1000) * 1000 : upTo(next, second));
/** Close together, so that they meet: whole milliseconds around a moment. */
const near = (next: Next, now: number, ms = 6) =>
  Math.floor(now / 1000) * 1000 + (upTo(next, 2 * ms + 1) - ms) * 1000;

function randomState(next: Next, name: string, now: number): State {
  const last = near(next, now - 6000, 3);
  const runs = new Map<string, StoredRun>();
  for (let i = upTo(next, 7); i > 0; i--) {
    const state = pick<RunState>(next, ["running", "waiting", "done", "failed", "skipped"]);
    const ended = state === "running" ? undefined : now - upTo(next, second);
    const manual = chance(next, 0.4);
    const run: StoredRun = {
      schedule: name,
      // Ticks are decided upon in their order.
      tick: manual ? near(next, now) : last - upTo(next, 8) * 1000,
      manual,
      state,
      attempt: upTo(next, 4),
      fence: upTo(next, 1000),
      // One per wish.
      token: i === 1 && chance(next, 0.5) ? "mine" : `theirs ${i}`,
      holder: pick(next, ["a", "b'"]),
      previous: chance(next, 0.8) ? last - second : undefined,
      started: now - upTo(next, second),
      until: pick(next, [now, now + 1, now - 1, now - upTo(next, second), now + upTo(next, second)]),
      ended,
      error: chance(next, 0.3) ? "went wrong" : undefined,
    };
    runs.set(keyOf(run), run);
  }
  const schedule = { name, last, decisions: upTo(next, 9), paused: chance(next, 0.15) };
  return { schedule: chance(next, 0.92) ? schedule : undefined, runs: [...runs.values()] };
}

function randomStep(next: Next, name: string, { schedule }: State, now: number): ScheduleStep {
  const wish = (): ScheduleStep["wish"] => {
    const kind = next();
    if (kind < 0.1) return undefined;
    if (kind < 0.3) return "now";
    return {
      tick: Math.max(near(next, now, 2), (schedule?.last ?? 0) + 1000) / 1000,
      after: (chance(next, 0.85) ? (schedule?.last ?? 0) : near(next, now)) / 1000,
      before: chance(next, 0.4) ? near(next, now, 1) / 1000 + 1 : undefined,
      run: chance(next, 0.85),
    };
  };
  return {
    schedule: name,
    token: pick(next, ["mine", "new", "another"]),
    holder: "me",
    ttlMs: pick(next, [500, 30_000, 1234.567]),
    attempts: 1 + upTo(next, 3),
    overlap: pick<Overlap>(next, ["skip", "queue", "allow", "allow"]),
    take: chance(next, 0.5),
    wish: wish(),
    as: pick(next, ["running", "running", "done", { failed: "in 'vain'" }] as const),
    keep: 1 + upTo(next, 5),
  };
}

function randomLocks(next: Next, { schedule, runs }: State): Locks {
  // Nobody has the row of one that is over, nor of one that the same wish was granted, whose holder has not heard of it yet.
  const others = runs.filter((run) => run.token !== "mine" && isOpen(run));
  return {
    schedule: schedule !== undefined && chance(next, 0.1),
    runs: new Set(others.filter(() => chance(next, 0.2)).map(keyOf)),
  };
}

describe("the rules alone", () => {
  test.for(Array.from({ length: long ? 200 : 20 }, (_, i) => i))(
    "hold of whatever there is, seed + %i",
    (i) => {
      const seed = inject("seed") + i;
      const next = random(seed);
      for (let k = 0; k < 300; k++) {
        const now = moment(next);
        const state = randomState(next, "s", now);
        const step = randomStep(next, "s", state, now);
        const locks = randomLocks(next, state);
        const hint = `HOLDFAST_SEED=${seed - i} + ${i}, ${k}: ${JSON.stringify({ state, step, now })}`;
        const found = stepInMemory(state, locks, step, now, 5000);
        const { verdicts: v, state: after } = found;
        const before = state.schedule;
        // `last` grows, and only to the tick that was asked for.
        if (before && after.schedule) {
          expect(after.schedule.decisions - before.decisions, hint).toBeLessThanOrEqual(1);
          if (after.schedule.last !== before.last) {
            expect(typeof step.wish === "object" && step.wish.tick * 1000, hint).toBe(after.schedule.last);
            expect(typeof step.wish === "object" && step.wish.after * 1000, hint).toBe(before.last);
            expect(before.paused, hint).toBe(false);
          }
        }
        // A run is claimed by one fence, and an open one that was not claimed or lost is as it was.
        if (v.claimed && v.claimed.fence !== 5000) expect(v.claimed.token, hint).toBe(step.token);
        for (const run of state.runs.filter(isOpen)) {
          const found = after.runs.find((other) => keyOf(other) === keyOf(run));
          // Whose process died is over, and may have been deleted with others.
          if (v.died.includes(run.tick)) continue;
          expect(found, hint).toBeDefined();
          if (v.claimed && keyOf(v.claimed) === keyOf(run)) continue;
          expect(found, hint).toEqual(run);
        }
        // What somebody's transaction has is nobody else's, and neither is what is not over.
        for (const run of state.runs)
          if (locks.runs.has(keyOf(run)) || (isOpen(run) && run.until > now && run.token !== step.token))
            expect(v.claimed && keyOf(v.claimed), hint).not.toBe(keyOf(run));
        // Two runs do not overlap unless they may.
        const opened = after.runs.filter(isOpen).length;
        if (step.overlap !== "allow" && opened > state.runs.filter(isOpen).length)
          expect(opened, hint).toBe(1);
        // Of those that are over, the newest are kept.
        const deleted = state.runs.filter((run) => !after.runs.some((other) => keyOf(other) === keyOf(run)));
        for (const run of deleted)
          expect(after.runs.filter(({ tick }) => tick > run.tick).length, hint).toBeGreaterThanOrEqual(
            Math.min(step.keep, after.runs.length),
          );
        if (locks.schedule) expect([v.claimed, after.runs], hint).toEqual([undefined, state.runs]);
        if (before?.paused && step.wish !== "now" && v.claimed) expect(v.claimed.token, hint).toBe("mine");
      }
    },
  );

  test("the same wish, made again, gets what it got, and nothing more", () => {
    const seed = inject("seed");
    const next = random(seed);
    for (let k = 0; k < 2000; k++) {
      const now = moment(next);
      const state = randomState(next, "s", now);
      const step = { ...randomStep(next, "s", state, now), token: "new", as: "running" as const };
      const locks = { schedule: false, runs: new Set<string>() };
      const first = stepInMemory(state, locks, step, now, 5000);
      if (!first.verdicts.claimed) continue;
      const again = stepInMemory(first.state, locks, step, now + 7, 5001);
      const hint = `HOLDFAST_SEED=${seed} ${k}`;
      expect(again.verdicts.claimed, hint).toEqual({
        ...first.verdicts.claimed,
        until: first.verdicts.claimed.until + 7,
      });
      expect(again.state.runs.length, hint).toBe(first.state.runs.length);
      expect(again.verdicts.last, hint).toBe(first.verdicts.last);
    }
  });

  test("which tick is asked for", () => {
    const around = { after: 0, now: 130_000, first: 10_000, tick: 100_000, next: 160_000 };
    expect(wishFor("all", 60_000, { ...around, tick: 10_000 })).toEqual({
      tick: 10_000,
      after: 0,
      before: undefined,
      run: true,
      missed: [10_000, 10_000],
    });
    expect(wishFor("last", 60_000, around)).toEqual({
      tick: 100_000,
      after: 0,
      before: 160_000,
      run: true,
      missed: [10_000, 100_000],
    });
    // Until its grace is over, to the millisecond.
    expect(wishFor("none", 30_000, around)).toEqual({
      tick: 100_000,
      after: 0,
      before: 130_001,
      run: true,
      missed: [10_000, 100_000],
    });
    expect(wishFor("none", 29_999, around)).toEqual({
      tick: 100_000,
      after: 0,
      before: 160_000,
      run: false,
      missed: [10_000, 100_001],
    });
  });
});

/** On a server whose clock stands still while a call is made: at whatever moment the test says. */
describe("next to the database", () => {
  let database: TestDatabase;
  let pool: Pool;
  let others: Pool;
  let hf: Holdfast<PoolClient>;
  let connection: SqlConnection;
  let release: () => unknown;
  const rows = new StoredRows(storeDialect);
  const generic = scheduleStore(storeDialect);

  beforeAll(async () => {
    database = await createDatabase("postgres");
    others = new Pool({ connectionString: database.url, max: 2 });
    const first = holdfast(fromPg(others));
    await first.migrate();
    await first.close();
    const stopped = "to_timestamp(0) + current_setting('stopped.now')::bigint * interval '1 microsecond'";
    await others.query(
      `BEGIN; ${replacing("clock_timestamp", "", "timestamptz", "stopped.now", stopped)}; COMMIT`,
    );
    const options = "-c stopped.now=0";
    pool = new Pool({ connectionString: database.url, max: 1, options });
    const db = fromPg(pool);
    hf = holdfast(db);
    const pinned = await (db.connect as NonNullable<typeof db.connect>)({
      use: "session",
      locks: [],
      wait: 1000,
    });
    connection = pinned.connection;
    release = () => pinned.release();
  });
  afterAll(async () => {
    await release?.();
    await hf?.close();
    await pool?.end();
    await others?.end();
    await database?.drop();
  });

  const stopAt = (now: number) =>
    connection.query(sql`SELECT set_config('stopped.now', ${String(now)}, false)`);

  async function put({ schedule, runs }: State): Promise<void> {
    if (schedule) await rows.insert(connection, scheduleTable, [schedule]);
    await rows.insert(connection, runTable, runs);
  }

  async function stored(name: string): Promise<State> {
    const [schedule] = await rows.select(connection, scheduleTable, rows.is(scheduleTable, "name", name));
    const runs = await rows.select(connection, runTable, rows.is(runTable, "schedule", name));
    return { schedule, runs: runs as StoredRun[] };
  }

  async function forget(name: string): Promise<void> {
    await rows.remove(connection, scheduleTable, rows.is(scheduleTable, "name", name));
    await rows.remove(connection, runTable, rows.is(runTable, "schedule", name));
  }

  /** While somebody else has these rows. */
  async function during<T>(name: string, locks: Locks, work: () => Promise<T>): Promise<T> {
    if (!locks.schedule && locks.runs.size === 0) return work();
    const other = await others.connect();
    try {
      await other.query("BEGIN");
      if (locks.schedule)
        await other.query("SELECT FROM holdfast.schedule WHERE name = $1 FOR UPDATE", [name]);
      for (const key of locks.runs) {
        const [tick, manual] = key.split(" ");
        await other.query(
          `SELECT FROM holdfast.schedule_run WHERE schedule = $1 AND manual = $3
             AND tick = to_timestamp(0) + $2::bigint * interval '1 microsecond' FOR UPDATE`,
          [name, tick, manual],
        );
      }
      return await work();
    } finally {
      await other.query("ROLLBACK");
      other.release();
    }
  }

  const plain = ({ schedule, runs }: State) => ({ schedule, runs: inOrder(runs) });
  const stores: readonly (readonly [string, Schedules<SqlConnection>])[] = [
    ["functions", functions],
    ["generic store", generic],
  ];
  const how = { waitMs: 5000, free: true };
  const seeds = Array.from({ length: long ? 100 : 6 }, (_, i) => i);

  test.for(seeds)("steps: the same verdict, and the same rows, seed + %i", async (i) => {
    const seed = inject("seed") + i;
    const next = random(seed);
    const outcomes = new Set<string>();
    for (let k = 0; k < 40; k++) {
      const now = moment(next);
      const name = `step ${i} ${k}`;
      const state = randomState(next, name, now);
      const step = randomStep(next, name, state, now);
      const locks = randomLocks(next, state);
      await stopAt(now);
      for (const [who, store] of stores) {
        const hint = `HOLDFAST_SEED=${seed - i} + ${i}, ${k}, ${who}: ${JSON.stringify({ state, step, now, locks: [locks.schedule, ...locks.runs] })}`;
        await put(state);
        const found = await during(name, locks, async () => store.step(connection, step, how));
        const expected = stepInMemory(state, locks, step, now, found.claimed?.fence ?? 0);
        expect(found, hint).toEqual(standingOf(expected));
        expect(plain(await stored(name)), hint).toEqual(plain(expected.state));
        outcomes.add(
          found.claimed ? `attempt ${Math.min(found.claimed.attempt, 2)}` : found.skipped ? "skipped" : "",
        );
        await forget(name);
      }
    }
    // It was about something.
    expect(outcomes.size).toBeGreaterThanOrEqual(3);
  });

  test.for(seeds)("renewals and ends: the same verdict, and the same rows, seed + %i", async (i) => {
    const seed = inject("seed") + i;
    const next = random(seed);
    for (let k = 0; k < 40; k++) {
      const now = moment(next);
      const name = `run ${i} ${k}`;
      const state = randomState(next, name, now);
      const run = chance(next, 0.95) ? state.runs[0] : undefined;
      const fence = run && chance(next, 0.85) ? run.fence : upTo(next, 1000);
      const tick = run?.tick ?? near(next, now + second);
      const grip: RunGrip = { schedule: name, tick: tick / 1000, manual: run?.manual ?? false, fence };
      const ending: RunEnding = chance(next, 0.4)
        ? { state: "done" }
        : {
            state: "failed",
            error: "it's over",
            retryInMs: pick(next, [undefined, 0, 1000, 77.125]),
            uncounted: chance(next, 0.3),
          };
      const locks = randomLocks(next, state);
      const lock = locks.runs.has(keyOf({ tick, manual: grip.manual })) ? "theirs" : "ours";
      const ttlMs = pick(next, [500, 999.5, 30_000]);
      await stopAt(now);
      for (const [who, store] of stores) {
        const hint = `HOLDFAST_SEED=${seed - i} + ${i}, ${k}, ${who}: ${JSON.stringify({ state, grip, ending, now })}`;
        const after = (update: StoredRun | undefined) =>
          plain({
            schedule: state.schedule,
            runs: state.runs.map((each) => (update && keyOf(each) === keyOf(update) ? update : each)),
          });
        await put(state);
        const renewal = await during(name, locks, async () => store.renew(connection, grip, ttlMs, how));
        const renewed = decideRenew({ now, run, lock }, { fence, ttlMs });
        expect(renewal, hint).toBe(renewed.verdict);
        expect(plain(await stored(name)), hint).toEqual(after(renewed.update));
        await forget(name);
        await put(state);
        // An end would wait for whoever has the row.
        const end = await store.end(connection, grip, ending, { ...how, joined: false });
        const ended = decideEnd({ now, run }, fence, ending);
        expect(end, hint).toBe(ended.verdict);
        expect(plain(await stored(name)), hint).toEqual(after(ended.update));
        await forget(name);
      }
    }
  });

  test("what is there, and pauses: the same, whoever is asked", async () => {
    const next = random(inject("seed"));
    const now = moment(next);
    await stopAt(now);
    const names = ["list b", "list a", "list Ä", "list Z"];
    for (const name of names) {
      const { schedule, runs } = randomState(next, name, now);
      // Of two at the same moment neither is the newer.
      const apart = runs.filter((run, at) => runs.findIndex(({ tick }) => tick === run.tick) === at);
      await put({ schedule: schedule ?? { name, last: now, decisions: 0, paused: false }, runs: apart });
    }
    const asked = async ({ administration: of }: Schedules<SqlConnection>) => ({
      all: await of.all(connection, undefined),
      some: await of.all(connection, ["list Z", "list a", "nobody"]),
      none: await of.all(connection, []),
      a: await of.list(connection, "list a", 3),
      b: await of.list(connection, "list b", 100),
      nobody: await of.list(connection, "nobody", 3),
    });
    expect(await asked(generic)).toEqual(await asked(functions));
    for (const [, { administration: of }] of stores) {
      expect(await of.pause(connection, "nobody", true, how)).toBe(false);
      for (const paused of [true, true, false]) {
        expect(await of.pause(connection, "list a", paused, how)).toBe(true);
        expect((await stored("list a")).schedule?.paused).toBe(paused);
      }
    }
    for (const name of names) await forget(name);
  });
});
