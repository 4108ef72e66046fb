/** Queues worked on by several processes, which are killed, stopped, and cut off. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";
import type { QueueArg } from "./workers/queue-worker.ts";

const file = new URL("./workers/queue-worker.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
/** Of a campaign: 30 kills alone are a minute and a half. */
const timeout = long ? 900_000 : 120_000;

describe.each(["postgres", "pgbouncer"] as const)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolClient>;
  let made = 0;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = new Pool({ connectionString: database.url, max: 8 });
    hf = holdfast(fromPg(pool));
    await hf.migrate();
    await pool.query("CREATE TABLE effect (job int, pid int)");
  });
  afterAll(async () => {
    await hf?.close();
    await pool?.end();
    await database?.drop();
  });
  beforeEach(async ({ skip }) => {
    skip(why !== undefined, why);
    await pool.query("TRUNCATE effect");
  });

  const start = (arg: Partial<QueueArg> & { queue: string }): Worker =>
    startWorker(file, {
      url: database.url,
      concurrency: 4,
      ttlMs: 3000,
      jobMs: 0,
      how: "complete",
      ...arg,
    } satisfies QueueArg);

  /** Every job to its end, while workers are killed and others started in their place. */
  async function storm(how: QueueArg["how"], jobs: number): Promise<{ effects: number; distinct: number }> {
    const next = random(inject("seed"));
    const q = queue<number>(hf, `storm ${++made}`);
    await q.enqueueMany(Array.from({ length: jobs }, (_, payload) => ({ payload })));
    const crew: Worker[] = [];
    try {
      for (let i = 0; i < 4; i++) crew.push(start({ queue: q.name, how, jobMs: 1 }));
      for (let kills = 0; kills < (long ? 30 : 4); kills++) {
        await Promise.race([crew[0]?.message("ready").catch(() => {}), sleep(3000)]);
        await sleep(100 + next() * 300);
        const victim = crew.splice(Math.floor(next() * crew.length), 1)[0] as Worker;
        victim.sigkill();
        crew.push(start({ queue: q.name, how, jobMs: 1 }));
      }
      await eventually(
        async () => {
          const { waiting, delayed, running } = await q.counts();
          return waiting + delayed + running === 0;
        },
        { timeout: long ? 600_000 : 100_000, interval: 100 },
      );
      expect(await q.failed()).toEqual([]);
    } finally {
      for (const each of crew) each.sigkill();
      await Promise.all(crew.map(({ exited }) => exited));
    }
    const { rows } = await pool.query(
      "SELECT count(*)::int AS effects, count(DISTINCT job)::int AS distinct FROM effect",
    );
    if (long) console.log(`${server}, ${how}: 30 kills,`, rows[0]);
    return rows[0] as { effects: number; distinct: number };
  }

  test("every effect exactly once, while workers are killed: complete(tx)", { timeout }, async () => {
    const jobs = long ? 50_000 : 2000;
    expect(await storm("complete", jobs), `HOLDFAST_SEED=${inject("seed")}`).toEqual({
      effects: jobs,
      distinct: jobs,
    });
  });

  // What a pooler makes of it is the same as above.
  test.for(server === "postgres" || long ? ["transactional"] : [])(
    "every effect exactly once, while workers are killed: %s",
    { timeout },
    async () => {
      const jobs = long ? 20_000 : 1000;
      expect(await storm("transactional", jobs), `HOLDFAST_SEED=${inject("seed")}`).toEqual({
        effects: jobs,
        distinct: jobs,
      });
    },
  );

  test(
    "stopped past its time, taken over, and woken up: it completes nothing, and is told so",
    { timeout },
    async () => {
      const rounds = long ? 200 : 3;
      const q = queue<number>(hf, `stop ${++made}`);
      for (let round = 0; round < rounds; round++) {
        const sleeper = start({ queue: q.name, slow: true, ttlMs: 300 });
        let heir: Worker | undefined;
        try {
          await sleeper.message("ready");
          await q.enqueue(round);
          await sleeper.message("begun");
          sleeper.sigstop();
          heir = start({ queue: q.name, slow: true, ttlMs: 3000 });
          await heir.message("begun");
          heir.send("go");
          expect(await heir.message("ended")).toEqual({ lost: false, aborted: false });
          sleeper.sigcont();
          sleeper.send("go");
          expect(await sleeper.message("ended")).toEqual({ lost: true, aborted: true });
        } finally {
          for (const each of [sleeper, heir]) {
            each?.sigcont();
            each?.sigkill();
          }
          await Promise.all([sleeper.exited, heir?.exited]);
        }
      }
      const { rows } = await pool.query("SELECT count(*)::int AS n FROM effect");
      expect(rows).toEqual([{ n: rounds }]);
    },
  );

  test("a worker that is asked to stop leaves nothing behind", async () => {
    const q = queue<number>(hf, `bye ${++made}`);
    await q.enqueueMany(Array.from({ length: 200 }, (_, payload) => ({ payload })));
    const one = start({ queue: q.name, jobMs: 5 });
    await eventually(async () => (await pool.query("SELECT FROM effect")).rowCount);
    one.send("stop");
    await one.result;
    const { rows } = await pool.query("SELECT count(*)::int AS n FROM effect");
    const { waiting, running, workers, delayed } = await q.counts();
    expect([waiting + rows[0].n, running, workers, delayed]).toEqual([200, 0, 0, 0]);
  });
});

test("effects that are written beside the job's end are written twice now and then: what the above would find", async () => {
  const database = await createDatabase("postgres");
  const pool = new Pool({ connectionString: database.url, max: 8 });
  const hf = holdfast(fromPg(pool));
  try {
    await hf.migrate();
    await pool.query("CREATE TABLE effect (job int, pid int)");
    const q = queue<number>(hf, "naive");
    // Killed after the effects, before the end of the batch is written down.
    for (let life = 0; life < 12; life++) {
      const { waiting, running, delayed } = await q.counts();
      if (waiting + running + delayed === 0)
        await q.enqueueMany(Array.from({ length: 40 }, (_, i) => ({ payload: 40 * life + i })));
      const worker = startWorker(file, {
        url: database.url,
        queue: q.name,
        concurrency: 20,
        ttlMs: 300,
        jobMs: 0,
        how: "naive",
      } satisfies QueueArg);
      const before = (await pool.query("SELECT FROM effect")).rowCount ?? 0;
      await eventually(async () => ((await pool.query("SELECT FROM effect")).rowCount ?? 0) > before, {
        interval: 0,
      });
      worker.sigkill();
      await worker.exited;
      const { rows } = await pool.query("SELECT count(*) - count(DISTINCT job) AS twice FROM effect");
      if (Number(rows[0].twice) > 0) return;
    }
    throw new Error("each of them was written once");
  } finally {
    await hf.close();
    await pool.end();
    await database.drop();
  }
});
