/** Processes with the same schedules, killed and started again and again, and one that is frozen. */
import { setTimeout as sleep } from "node:timers/promises";
import { sql } from "holdfast";
import { runs, schedule, schedules } from "holdfast/schedule";
import { execute } from "holdfast/testing";
import { describe, expect, inject, test } from "vitest";
import { missingFor, within } from "./harness/places.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { random } from "./harness/random.ts";
import { type Site, ourTable } from "./harness/sites.ts";
import { eventually } from "./harness/wait.ts";
import type { FrozenDone, ScheduleFrozenArg } from "./workers/schedule-frozen.ts";
import type { ScheduleInstanceArg } from "./workers/schedule-instance.ts";

const instanceFile = new URL("./workers/schedule-instance.ts", import.meta.url);
const frozenFile = new URL("./workers/schedule-frozen.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const second = 1000;

/** When each was noted, in milliseconds. */
async function ticksOf(site: Site, kind: string): Promise<number[]> {
  const rows = await execute(site, sql`SELECT tick FROM effect WHERE kind = ${kind} ORDER BY tick`);
  return rows.map(({ tick }) => Number(tick));
}

const makeEffects = (site: Site) =>
  execute(site, sql`CREATE TABLE effect (kind varchar(40) NOT NULL, tick bigint NOT NULL)`);

/** Those that are there more often than once, and those between the first and the last that are not. */
function faults(found: readonly number[]): { twice: number; missing: number } {
  const once = new Set(found);
  const span = found.length === 0 ? 0 : ((found.at(-1) as number) - (found[0] as number)) / second + 1;
  return { twice: found.length - once.size, missing: span - once.size };
}

async function whoRuns({ hf }: Site): Promise<number | undefined> {
  for (let i = 0; i < 100; i++) {
    const running = (await runs(hf, "effect")).find(({ state }) => state === "running");
    if (running) return Number(running.holder.split(":").at(-1));
    await sleep(10);
  }
  return undefined;
}

interface Crew {
  readonly backend: string;
  readonly url: string;
  readonly site: Site;
  readonly size: number;
  /** How many ticks it lives for. */
  readonly count: number;
  readonly naive?: boolean;
}

/** Instances of which one is killed and replaced again and again. Returns how many were killed. */
async function crew({ backend, url, site, size, count, naive = false }: Crew): Promise<number> {
  const next = random(inject("seed"));
  // Clocks that are wrong: ticks are the database's.
  const start = (i: number): Worker =>
    startWorker(instanceFile, {
      backend,
      url,
      clockMs: [0, -3500, 3500, 0, 86_400_000][i % 5] as number,
      naive,
    } satisfies ScheduleInstanceArg);
  const instances = Array.from({ length: size }, (_, i) => start(i));
  let killed = 0;
  try {
    await Promise.all(instances.map((worker) => worker.message("started")));
    const first = Date.now();
    while (Date.now() < first + count * second) {
      await sleep(100 + next() * 700);
      let i = Math.floor(next() * size);
      // Every second is one that is in the middle of a run, if there is one.
      if (killed % 2 === 1 && !naive) {
        const running = await whoRuns(site);
        i = Math.max(0, running === undefined ? i : instances.findIndex(({ pid }) => pid === running));
      }
      instances[i]?.sigkill();
      killed++;
      instances[i] = start(killed);
    }
    // Those that have just been started may not have come to it yet.
    for (const worker of instances) worker.send("stop");
    if (!naive) await Promise.all(instances.map((worker) => worker.result));
  } finally {
    for (const worker of instances) worker.sigkill();
    await Promise.all(instances.map((worker) => worker.exited));
  }
  return killed;
}

// What is the server's own function on PostgreSQL is decided here elsewhere; there it is shown with more processes.
describe.each([
  { backend: "pg", size: 10, count: long ? 30 : 9 },
  { backend: "mysql2 on MySQL", size: 4, count: long ? 60 : 5 },
  { backend: "mysql2 on MariaDB", size: 4, count: long ? 60 : 5 },
  { backend: "better-sqlite3", size: 4, count: long ? 60 : 5 },
])("$backend: $size processes, a schedule every second, some killed and started meanwhile", (of) => {
  test("each tick once, none twice, none missing", { timeout: 240_000 }, async ({ skip }) => {
    const { backend, count } = of;
    const why = missingFor(backend);
    skip(why !== undefined, why);
    const hint = `HOLDFAST_SEED=${inject("seed")}`;
    await within(backend, async (url, site) => {
      await makeEffects(site);
      const killed = await crew({ ...of, url, site });
      expect(killed).toBeGreaterThan(count / 2);
      // What was left by those who were killed last is found by whoever comes.
      const [known] = await schedules(site.hf, { names: ["effect"] });
      const last = startWorker(instanceFile, { backend, url, clockMs: 0 } satisfies ScheduleInstanceArg);
      await last.message("started");
      await eventually(async () => {
        const found = await ticksOf(site, "effect");
        return found.length >= count && (found.at(-1) ?? 0) > (known?.last.getTime() ?? Infinity);
      });
      last.send("stop");
      await last.result;

      const effects = await ticksOf(site, "effect");
      expect(effects.length, hint).toBeGreaterThanOrEqual(count);
      expect(faults(effects), `${hint} effects of handlers`).toEqual({ twice: 0, missing: 0 });
      const queued = await ticksOf(site, "queued");
      expect(queued.length, hint).toBeGreaterThanOrEqual(count);
      expect(faults(queued), `${hint} jobs that were enqueued`).toEqual({ twice: 0, missing: 0 });
      // At most once: a process that dies between its claim and its handler leaves nothing, and nobody does it again.
      const begun = await ticksOf(site, "begun");
      expect(faults(begun).twice, `${hint} begun`).toBe(0);
      const found = await runs(site.hf, "effect", { limit: 1000 });
      expect(new Set(found.map(({ state }) => state)), hint).toEqual(new Set(["done"]));
      // It happened, or it was not shown: some runs were taken over.
      const again = found.filter(({ attempt }) => attempt > 1).length;
      expect(again, hint).toBeGreaterThan(0);
      console.log(`${hint}: ${effects.length} ticks, ${killed} processes killed, ${again} runs taken over`);
    });
  });
});

test("the same as people write it is found out", { timeout: 60_000 }, () =>
  within("pg", async (url, site) => {
    await makeEffects(site);
    await execute(site, sql`CREATE TABLE naive (last bigint NOT NULL)`);
    await execute(site, sql`INSERT INTO naive VALUES (0)`);
    await crew({ backend: "pg", url, site, size: 10, count: 3, naive: true });
    expect(faults(await ticksOf(site, "effect")).twice).toBeGreaterThan(0);
  }),
);

describe("a process that is stopped (SIGSTOP) past its ttl", () => {
  async function freeze(url: string, site: Site, name: string, naive: boolean): Promise<FrozenDone> {
    const hour = 3_600_000;
    const { hf } = site;
    await execute(
      site,
      sql`INSERT INTO ${ourTable("pg", "schedule")} (name, last) VALUES (${name}, now() - interval '2 hours')`,
    );
    const worker = startWorker(frozenFile, {
      url,
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
          await tx.query(sql`INSERT INTO effect (kind, tick) VALUES (${name}, ${run.tick.getTime()})`);
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

  test("the tick is taken over; it finds its signal aborted, and its end is refused", () =>
    within("pg", async (url, site) => {
      await makeEffects(site);
      for (let round = 0; round < (long ? 20 : 3); round++) {
        const done = await freeze(url, site, `frozen ${round}`, false);
        expect(done).toEqual({ aborted: true, outcome: "HF_SCHEDULE_LOST" });
        expect((await ticksOf(site, `frozen ${round}`)).length).toBe(1);
      }
    }));

  test("one that does not ask writes a second time", () =>
    within("pg", async (url, site) => {
      await makeEffects(site);
      expect(await freeze(url, site, "unasked", true)).toEqual({ aborted: true, outcome: "written" });
      expect((await ticksOf(site, "unasked")).length).toBe(2);
    }));
});
