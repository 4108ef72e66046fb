/** Random histories of several processes, some of which are killed and started again with the same calls. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { Pool } from "pg";
import { describe, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { random } from "./harness/random.ts";
import { startProxy } from "./harness/proxy.ts";
import { checkAnswers } from "./harness/quota-answers.ts";
import type { Answer, QuotaArg } from "./workers/quota-random.ts";

const worker = new URL("./workers/quota-random.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const seeds = long ? 200 : 3;

async function within<T>(body: (database: TestDatabase, pool: Pool) => Promise<T>): Promise<T> {
  const database = await createDatabase("postgres");
  const pool = new Pool({ connectionString: database.url, max: 8 });
  try {
    const hf = holdfast(fromPg(pool));
    await hf.migrate();
    return await body(database, pool);
  } finally {
    await pool.end();
    await database.drop();
  }
}

/** Each process runs its calls to the end; those that are killed run all of them again, with the same ids. */
async function crew(url: string, seed: number, lives: number, naive = false): Promise<Answer[]> {
  const one = async (clock: number, index: number): Promise<Answer[]> => {
    for (let life = 1; ; life++) {
      const arg: QuotaArg = { url, seed, index, calls: 200, callers: index % 2 === 0 ? 6 : 20, clock, naive };
      const process = startWorker<Answer[]>(worker, arg);
      try {
        if (life >= lives) return await process.result;
        await process.message("busy");
        await new Promise((resolve) => setTimeout(resolve, (seed + life * 7 + index * 3) % 30));
      } finally {
        process.sigkill();
        await process.exited;
      }
    }
  };
  // Clocks that are wrong by more than a window: they must not take it back, nor forward.
  return (await Promise.all([0, -900, 900, 0].map(one))).flat();
}

describe("4 processes, each killed once in the middle of it", () => {
  test.for(Array.from({ length: seeds }, (_, i) => i))("seed + %i", { timeout: 120_000 }, async (i) => {
    const seed = inject("seed") + i;
    await within(async (database, pool) => {
      const answers = await crew(database.url, seed, 2);
      expect(answers.length).toBeGreaterThan(100);
      const kinds = await checkAnswers(pool, answers, `HOLDFAST_SEED=${seed}`);
      // It happened, or it was not shown.
      const wanted = "consume hold settle release expire refund grant lapse limit plan reset".split(" ");
      expect(wanted.filter((kind) => !kinds.has(kind))).toEqual([]);
    });
  });
});

test("callers who look first and use then are found out", async () => {
  const seed = inject("seed");
  await within(async (database, pool) => {
    const answers = await crew(database.url, seed, 1, true);
    await expect(checkAnswers(pool, answers, `HOLDFAST_SEED=${seed}`)).rejects.toThrow(
      /never above the limit|or there is room/,
    );
  });
});

test("connections that are cut, also during a commit: every id is applied once", async () => {
  await within(async (database, pool) => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const through = new Pool({ connectionString: proxy.url(database.url), max: 4 });
    through.on("error", () => {});
    const hf = holdfast(fromPg(through), { wait: 60_000 });
    const of = quota(hf, { name: "cut off", limit: 100_000 });
    const next = random(inject("seed"));
    // Before it gets there, or after it was committed and before the answer is back.
    proxy.cutWhen((direction, chunk) => {
      if (direction === "to-client" || !chunk.includes("cut off") || next() > 0.3) return "pass";
      return next() < 0.5 ? "cut-before" : "drop-answer";
    });
    try {
      const granted = new Set<string>();
      await Promise.all(
        Array.from({ length: 16 }, async (_, caller) => {
          for (let i = 0; i < 75; i++) {
            const id = `${caller}-${i}`;
            // Holdfast gives up after some tries; the caller tries again with the same id.
            for (;;) {
              try {
                await of.consume("u", 1, { id });
                granted.add(id);
                break;
              } catch {
                await new Promise((resolve) => setTimeout(resolve, 5));
              }
            }
          }
        }),
      );
      expect(proxy.cuts).toBeGreaterThan(5);
      const { rows } = await pool.query(
        "SELECT count(*)::int AS n, max(used)::int AS used FROM holdfast.quota_entry WHERE quota = 'cut off'",
      );
      expect([granted.size, rows[0].n, rows[0].used]).toEqual([1200, 1200, 1200]);
    } finally {
      await hf.close();
      await through.end();
      await proxy.close();
    }
  });
});

test("1,024 callers, 10,000 users, 4 batches in flight: the server sees no deadlock", async () => {
  await within(async (database, pool) => {
    const pools = [pool, new Pool({ connectionString: database.url, max: 8 })];
    const quotas = pools.map((each) =>
      quota(holdfast(fromPg(each), { wait: 60_000 }), { name: "spread", limit: 1_000_000 }),
    );
    try {
      const before = await deadlocks(pool);
      let next = inject("seed");
      await Promise.all(
        Array.from({ length: 1024 }, async (_, caller) => {
          for (let i = 0; i < 6; i++) {
            next = (Math.imul(next, 1_103_515_245) + 12_345) >>> 0;
            await quotas[caller % 2]?.consume(`user-${next % 10_000}`);
          }
        }),
      );
      const { rows } = await pool.query("SELECT sum(used)::int AS used FROM holdfast.quota_bucket");
      expect(rows[0].used).toBe(1024 * 6);
      expect(await deadlocks(pool)).toBe(before);
    } finally {
      await pools[1]?.end();
    }
  });
});

async function deadlocks(pool: Pool): Promise<number> {
  const { rows } = await pool.query(
    "SELECT deadlocks::int FROM pg_stat_database WHERE datname = current_database()",
  );
  return rows[0].deadlocks;
}
