/** Patterns from several processes that are killed and started again, where there are no functions of the server's. */
import { setTimeout as sleep } from "node:timers/promises";
import { sql } from "holdfast";
import { execute } from "holdfast/testing";
import { describe, expect, inject, test } from "vitest";
import { missingFor, within } from "./harness/places.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { random } from "./harness/random.ts";
import { type Site, withoutWal } from "./harness/sites.ts";
import { eventually } from "./harness/wait.ts";
import {
  type PatternCallersArg,
  type PatternCallersResult,
  limit,
  shop,
  subject,
  uploads,
} from "./workers/pattern-callers.ts";
import { type PatternJobsArg, errands } from "./workers/pattern-jobs.ts";

const asker = new URL("./workers/pattern-callers.ts", import.meta.url);
const jobber = new URL("./workers/pattern-jobs.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const processes = 4;
const kills = long ? 30 : 3;
/** Of each process. */
const attempts = long ? 1000 : 100;
/** Of jobs. Without WAL each COMMIT waits for the disk several times: on a slow one (20 ms) there are 10 in a second. */
const countOf = (backend: string) => (long ? 5000 : backend === withoutWal ? 60 : 250);
const seed = `HOLDFAST_SEED=${inject("seed")}`;

/** A campaign says what it did: that it was green is not enough. */
function say(what: string, figures: Readonly<Record<string, number>>): void {
  if (long) console.log(seed, what, figures);
}

/** What the processes were told that came to their end. `killed`: so many are killed in the middle, and begin again. */
async function rush(arg: Omit<PatternCallersArg, "ids">, killed: number) {
  const next = random(inject("seed"));
  const begin = async (place: number): Promise<Worker<PatternCallersResult>> => {
    const ids = Array.from({ length: attempts }, (_, i) => `${place}:${i}`);
    const worker = startWorker<PatternCallersResult>(asker, { ...arg, ids } satisfies PatternCallersArg);
    await worker.message("ready");
    return worker;
  };
  const crew = await Promise.all(Array.from({ length: processes }, (_, place) => begin(place)));
  let interrupted = 0;
  try {
    for (const each of crew) each.send("go");
    for (let i = 0; i < killed; i++) {
      const place = Math.floor(next() * processes);
      const victim = crew[place] as Worker<PatternCallersResult>;
      // Not at once, and before it has come to its end.
      for (let asked = 1 + next() * 60; asked > 0; asked--) await victim.message("asked").catch(() => {});
      await sleep(next() * 3);
      victim.sigkill();
      if ((await victim.exited).signal === "SIGKILL") interrupted++;
      (crew[place] = await begin(place)).send("go");
    }
    const results = await Promise.all(crew.map(({ result }) => result));
    const all = (what: "quota" | "stock") => ({
      granted: results.flatMap((each) => each[what].granted).toSorted(),
      refused: results.reduce((sum, each) => sum + each[what].refused, 0),
    });
    const errors = results.flatMap((each) => each.errors);
    return { quota: all("quota"), stock: all("stock"), errors, interrupted };
  } finally {
    for (const each of crew) each.sigkill();
    await Promise.all(crew.map(({ exited }) => exited));
  }
}

async function allGranted(backend: string): Promise<void> {
  await within(backend, async (url, { hf }) => {
    await shop(hf).increase("LAST", limit);
    const told = await rush({ backend, url }, kills);
    expect(told.errors, seed).toEqual([]);
    const asked = processes * attempts;
    for (const { granted, refused } of [told.quota, told.stock])
      expect({ granted: granted.length, refused }, seed).toEqual({ granted: limit, refused: asked - limit });

    expect(await uploads(hf).peek(subject), seed).toMatchObject({ used: limit, remaining: 0 });
    const { entries } = await uploads(hf).history(subject, { limit: 1000 });
    expect(entries.map(({ id }) => id).toSorted(), seed).toEqual(told.quota.granted);
    expect(await uploads(hf).reconcile(subject), seed).toMatchObject({ ok: true, findings: [] });

    expect(await shop(hf).level("LAST"), seed).toMatchObject({ onHand: 0, version: limit + 1 });
    const { movements } = await shop(hf).history({ sku: "LAST", limit: 1000 });
    const sold = movements.filter(({ quantity }) => quantity < 0).map(({ externalId }) => externalId);
    expect(sold.toSorted(), seed).toEqual(told.stock.granted);
    expect(await shop(hf).reconcile(), seed).toMatchObject({ ok: true, findings: [] });
    // It happened, or it was not shown.
    expect(told.interrupted, seed).toBeGreaterThan(0);
    say(backend, {
      kills: told.interrupted,
      asked,
      quota: told.quota.granted.length,
      stock: told.stock.granted.length,
    });
  });
}

async function effects(site: Site): Promise<{ readonly all: number; readonly jobs: number }> {
  const [row] = await execute(site, sql`SELECT count(*) AS written, count(DISTINCT job) AS jobs FROM effect`);
  return { all: Number(row?.["written"]), jobs: Number(row?.["jobs"]) };
}

async function enqueue(site: Site, count: number): Promise<void> {
  await execute(site, sql`CREATE TABLE effect (job varchar(20) NOT NULL)`);
  await errands(site.hf).enqueueMany(Array.from({ length: count }, (_, n) => ({ payload: String(n) })));
}

async function allWorked(backend: string, how: PatternJobsArg["how"]): Promise<void> {
  await within(backend, async (url, site) => {
    const next = random(inject("seed"));
    const count = countOf(backend);
    await enqueue(site, count);
    const left = async () => {
      const { waiting, delayed, running } = await errands(site.hf).counts();
      return waiting + delayed + running;
    };
    const begin = () => startWorker(jobber, { backend, url, how } satisfies PatternJobsArg);
    const crew = Array.from({ length: processes }, begin);
    const start = performance.now();
    let killed = 0;
    try {
      while (long ? (await left()) > 0 : killed < kills) {
        const place = Math.floor(next() * processes);
        const victim = crew[place] as Worker;
        // There may be nothing left for it.
        await Promise.race([victim.message("worked").catch(() => {}), sleep(3000)]);
        await sleep(next() * (long ? 1000 : 20));
        victim.sigkill();
        killed++;
        crew[place] = begin();
      }
      await eventually(async () => (await left()) === 0, { timeout: 600_000, interval: 100 });
    } finally {
      for (const each of crew) each.sigkill();
      await Promise.all(crew.map(({ exited }) => exited));
    }
    expect(killed, seed).toBeGreaterThanOrEqual(3);
    expect(await errands(site.hf).failed(), seed).toEqual([]);
    expect(await effects(site), seed).toEqual({ all: count, jobs: count });
    say(`${backend}, ${how}`, { jobs: count, killed, seconds: (performance.now() - start) / 1000 });
  });
}

// Drivers of one engine differ in how they open files, and in nothing that is killed here: not all cases.
const all = ["mysql2 on MySQL", "mysql2 on MariaDB", "better-sqlite3", withoutWal];
const drivers = long ? ["node:sqlite", "libsql"] : ["libsql"];

describe.each([...all, ...drivers])("%s", (backend) => {
  test(
    "a limit of 100, and the last 100 units: 100 are granted, and each id has one answer",
    { timeout: long ? 900_000 : 240_000 },
    ({ skip }) => {
      const why = missingFor(backend);
      skip(why !== undefined, why);
      return allGranted(backend);
    },
  );
});

describe.each(all)("jobs, %s", (backend) => {
  const ways = backend === withoutWal ? (["complete"] as const) : (["transactional"] as const);
  test.for(long ? (["transactional", "complete"] as const) : ways)(
    "every effect once, while workers are killed: %s",
    { timeout: 900_000 },
    (how, { skip }) => {
      const why = missingFor(backend);
      skip(why !== undefined, why);
      return allWorked(backend, how);
    },
  );
});

// The same without us must show the bug, or it would prove nothing.
describe("as people write it", () => {
  test("more than 100 of 100", { timeout: 240_000 }, () =>
    within("better-sqlite3", async (url, { hf }) => {
      await uploads(hf).consume(subject, 1);
      await shop(hf).increase("LAST", limit);
      const told = await rush({ backend: "better-sqlite3", url, naive: true }, 0);
      expect(told.quota.granted.length).toBeGreaterThan(limit);
      expect(told.stock.granted.length).toBeGreaterThan(limit);
      say("naive", { quota: told.quota.granted.length, stock: told.stock.granted.length });
    }),
  );

  test("an effect beside the job's end is there twice", { timeout: 240_000 }, () =>
    within("better-sqlite3", async (url, site) => {
      await enqueue(site, countOf("better-sqlite3"));
      const twice = async () => {
        const { all: written, jobs } = await effects(site);
        return written > jobs;
      };
      const begin = () =>
        startWorker(jobber, { backend: "better-sqlite3", url, how: "beside" } satisfies PatternJobsArg);
      // Killed after an effect, before the end of its batch is written down; the last one finds what they had.
      for (let life = 0; life < 4; life++) {
        const worker = begin();
        await worker.message("worked");
        worker.sigkill();
        await worker.exited;
      }
      const last = begin();
      try {
        await eventually(twice);
      } finally {
        last.sigkill();
        await last.exited;
      }
    }),
  );
});
