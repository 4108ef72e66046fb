/** Ten processes with the same schedules, killed and started again and again, and one that is frozen. */
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { schedule } from "holdfast/schedule";
import { Pool, type PoolClient } from "pg";
import { afterEach, beforeEach, describe, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";
import type { FrozenDone, ScheduleFrozenArg } from "./workers/schedule-frozen.ts";
import type { ScheduleInstanceArg } from "./workers/schedule-instance.ts";

const instanceFile = new URL("./workers/schedule-instance.ts", import.meta.url);
const frozenFile = new URL("./workers/schedule-frozen.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const second = 1000;

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeEach(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 4 });
  hf = holdfast(fromPg(pool));
  await hf.migrate();
  await pool.query("CREATE TABLE effect (kind text, tick timestamptz, attempt integer)");
});

afterEach(async () => {
  await hf.close();
  await pool.end();
  await database.drop();
});

async function ticks(kind: string): Promise<number[]> {
  const { rows } = await pool.query<{ tick: Date }>("SELECT tick FROM effect WHERE kind = $1 ORDER BY tick", [
    kind,
  ]);
  return rows.map(({ tick }) => tick.getTime());
}

/** Those that are there more often than once, and those between the first and the last that are not. */
function faults(found: readonly number[]): { twice: number; missing: number } {
  const once = new Set(found);
  const span = found.length === 0 ? 0 : ((found.at(-1) as number) - (found[0] as number)) / second + 1;
  return { twice: found.length - once.size, missing: span - once.size };
}

async function whoRuns(): Promise<number | undefined> {
  for (let i = 0; i < 100; i++) {
    const { rows } = await pool.query<{ holder: string }>(
      "SELECT holder FROM holdfast.schedule_run WHERE schedule = 'effect' AND state = 'running' AND until > now() + interval '1 second'",
    );
    if (rows[0]) return Number(rows[0].holder.split(":").at(-1));
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  return undefined;
}

/** Ten instances, of which one is killed and replaced again and again, for so many ticks. Returns how many were killed. */
async function crew(count: number, naive: boolean): Promise<number> {
  const next = random(inject("seed"));
  // Clocks that are wrong: ticks are the database's.
  const start = (i: number): Worker =>
    startWorker(instanceFile, {
      url: database.url,
      clockMs: [0, -3500, 3500, 0, 86_400_000][i % 5] as number,
      naive,
    } satisfies ScheduleInstanceArg);
  const crew = Array.from({ length: 10 }, (_, i) => start(i));
  let killed = 0;
  try {
    await Promise.all(crew.map((worker) => worker.message("started")));
    const first = Date.now();
    while (Date.now() < first + count * second) {
      await new Promise((resolve) => setTimeout(resolve, 100 + next() * 700));
      let i = Math.floor(next() * crew.length);
      // Every fourth is one that is in the middle of a run, if there is one.
      if (killed % 4 === 3 && !naive) {
        const running = await whoRuns();
        i = Math.max(0, running === undefined ? i : crew.findIndex(({ pid }) => pid === running));
      }
      crew[i]?.sigkill();
      killed++;
      crew[i] = start(killed);
    }
    // Those that have just been started may not have come to it yet.
    for (const worker of crew) worker.send("stop");
    if (!naive) await Promise.all(crew.map((worker) => worker.result));
  } finally {
    for (const worker of crew) worker.sigkill();
    await Promise.all(crew.map((worker) => worker.exited));
  }
  return killed;
}

describe("10 processes, a schedule every second, processes killed and started meanwhile", () => {
  test("each tick once, none twice, none missing", { timeout: 120_000 }, async () => {
    const count = long ? 30 : 12;
    const hint = `HOLDFAST_SEED=${inject("seed")}`;
    const killed = await crew(count, false);
    expect(killed).toBeGreaterThan(count / 2);
    // What was left by those who were killed last is found by whoever comes.
    const { rows } = await pool.query<{ last: Date }>(
      "SELECT last FROM holdfast.schedule WHERE name = 'effect'",
    );
    const last = startWorker(instanceFile, { url: database.url, clockMs: 0 } satisfies ScheduleInstanceArg);
    await last.message("started");
    await eventually(async () => {
      const found = await ticks("effect");
      return found.length >= count && (found.at(-1) ?? 0) > (rows[0]?.last.getTime() ?? Infinity);
    });
    last.send("stop");
    await last.result;

    const effects = await ticks("effect");
    expect(effects.length, hint).toBeGreaterThanOrEqual(count);
    expect(faults(effects), `${hint} effects of handlers`).toEqual({ twice: 0, missing: 0 });
    const queued = await ticks("queued");
    expect(queued.length, hint).toBeGreaterThanOrEqual(count);
    expect(faults(queued), `${hint} jobs that were enqueued`).toEqual({ twice: 0, missing: 0 });
    // At most once: a process that dies between its claim and its handler leaves nothing, and nobody does it again.
    const begun = await ticks("begun");
    expect(faults(begun).twice, `${hint} begun`).toBe(0);
    const { rows: runs } = await pool.query(
      "SELECT state, count(*)::int AS count FROM holdfast.schedule_run WHERE schedule = 'effect' GROUP BY state",
    );
    expect(runs).toEqual([{ state: "done", count: effects.length }]);
    // It happened, or it was not shown: some runs were taken over.
    const { rows: again } = await pool.query(
      "SELECT count(*)::int AS count FROM holdfast.schedule_run WHERE schedule = 'effect' AND attempt > 1",
    );
    expect(again[0].count).toBeGreaterThan(0);
    console.log(
      `${hint}: ${effects.length} ticks, ${killed} processes killed, ${again[0].count} runs taken over`,
    );
  });

  test("the same as people write it is found out", { timeout: 60_000 }, async () => {
    await pool.query("CREATE TABLE naive AS SELECT now() AS last");
    await crew(3, true);
    expect(faults(await ticks("effect")).twice).toBeGreaterThan(0);
  });
});

describe("a process that is stopped (SIGSTOP) past its ttl", () => {
  async function freeze(name: string, naive: boolean): Promise<FrozenDone> {
    const hour = 3_600_000;
    await pool.query("INSERT INTO holdfast.schedule (name, last) VALUES ($1, now() - interval '2 hours')", [
      name,
    ]);
    const worker = startWorker(frozenFile, {
      url: database.url,
      name,
      ttl: 2000,
      naive,
    } satisfies ScheduleFrozenArg);
    try {
      const held = await worker.message<{ tick: Date; fence: number }>("held");
      worker.sigstop();
      const taken = Promise.withResolvers<{ tick: Date; fence: number; attempt: number }>();
      const other = schedule(hf, name, { every: hour, ttl: 2000 }, async (run) => {
        await hf.transaction(async (tx) => {
          await tx.client.query("INSERT INTO effect (kind, tick, attempt) VALUES ($1, $2, $3)", [
            name,
            run.tick,
            run.attempt,
          ]);
          await run.complete(tx);
        });
        taken.resolve(run);
      });
      await other.start();
      const run = await taken.promise;
      expect(run.tick).toEqual(held.tick);
      expect(run.fence).toBeGreaterThan(held.fence);
      expect(run.attempt).toBe(2);
      await eventually(async () => (await other.status()).lastRun?.state === "done");
      await other.stop();
      worker.send("go on");
      worker.sigcont();
      return await worker.message<FrozenDone>("done");
    } finally {
      worker.sigkill();
      await worker.exited;
    }
  }

  test("the tick is taken over; it finds its signal aborted, and its end is refused", async () => {
    for (let round = 0; round < (long ? 20 : 3); round++) {
      expect(await freeze(`frozen ${round}`, false)).toEqual({ aborted: true, outcome: "HF_SCHEDULE_LOST" });
      expect((await ticks(`frozen ${round}`)).length).toBe(1);
    }
  });

  test("one that does not ask writes a second time", async () => {
    expect(await freeze("unasked", true)).toEqual({ aborted: true, outcome: "written" });
    expect((await ticks("unasked")).length).toBe(2);
  });
});
