/** Random histories of several processes, some of which are killed and started again with the same calls. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { stock } from "holdfast/stock";
import { Pool } from "pg";
import { describe, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { random } from "./harness/random.ts";
import { checkStock } from "./harness/stock-check.ts";
import { type Answer, type StockArg, locations, shopOf, skus } from "./workers/stock-random.ts";

const worker = new URL("./workers/stock-random.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const seeds = long ? 200 : 2;

async function within<T>(body: (database: TestDatabase, pool: Pool) => Promise<T>): Promise<T> {
  const database = await createDatabase("postgres");
  const pool = new Pool({ connectionString: database.url, max: 8 });
  try {
    await holdfast(fromPg(pool)).migrate();
    return await body(database, pool);
  } finally {
    await pool.end();
    await database.drop();
  }
}

/** Each process runs its calls to the end; those that are killed run all of them again, with the same ids. */
async function crew(url: string, seed: number, processes: number, kills: number): Promise<Answer[]> {
  const one = async (index: number): Promise<Answer[]> => {
    for (let life = 0; ; life++) {
      const arg: StockArg = { url, seed, index, calls: 90, callers: 6 };
      const process = startWorker<Answer[]>(worker, arg);
      try {
        if (life >= kills) return await process.result;
        await process.message("busy");
        await new Promise((resolve) => setTimeout(resolve, (seed + life * 7 + index * 3) % 30));
      } finally {
        process.sigkill();
        await process.exited;
      }
    }
  };
  return (await Promise.all(Array.from({ length: processes }, (_, i) => one(i)))).flat();
}

describe("4 processes, each killed once in the middle of it", () => {
  test.for(Array.from({ length: seeds }, (_, i) => i))("seed + %i", { timeout: 120_000 }, async (i) => {
    const seed = inject("seed") + i;
    await within(async (database, pool) => {
      const shop = shopOf(holdfast(fromPg(pool)));
      await shop.apply(skus.flatMap((sku) => locations.map((location) => ({ sku, location, quantity: 15 }))));
      const answers = await crew(database.url, seed, 4, 1);
      expect(answers.length).toBeGreaterThan(50);
      await checkStock(pool, answers, `HOLDFAST_SEED=${seed}`);
      expect(await deadlocks(pool)).toBe(0);
    });
  });
});

test("connections that are cut, also during a commit: every id is applied once", async () => {
  await within(async (database, pool) => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const through = new Pool({ connectionString: proxy.url(database.url), max: 4 });
    through.on("error", () => {});
    const hf = holdfast(fromPg(through), { wait: 60_000 });
    const shop = stock(hf, { name: "cut" });
    const sku = (n: number) => `sku-${n % 5}`;
    await stock(holdfast(fromPg(pool)), { name: "cut" }).apply(
      Array.from({ length: 5 }, (_, i) => ({ sku: sku(i), quantity: 1000 })),
    );
    const next = random(inject("seed"));
    // Before it gets there, or after it was committed and before the answer is back. What is prepared goes by its name.
    const ours = /holdfast\.stock_|holdfast_[0-9a-f]{12}/;
    proxy.cutWhen((direction, chunk) => {
      if (direction === "to-client" || !ours.test(chunk.toString("latin1")) || next() > 0.3) return "pass";
      return next() < 0.5 ? "cut-before" : "drop-answer";
    });
    try {
      let sold = 0;
      await Promise.all(
        Array.from({ length: 16 }, async (_, caller) => {
          for (let i = 0; i < 30; i++) {
            // Half of them without an id: those that Holdfast repeats by itself count once too.
            const externalId = i % 2 ? `${caller}-${i}` : undefined;
            const lines = [
              { sku: sku(caller), quantity: -1 },
              { sku: sku(caller + i), quantity: -1 },
            ];
            for (;;) {
              try {
                await shop.apply(lines, externalId === undefined ? {} : { externalId });
                sold += 2;
                break;
              } catch {
                // Without an id nobody can know whether it happened: it is not tried again.
                if (externalId === undefined) {
                  sold = Number.NaN;
                  break;
                }
                await new Promise((resolve) => setTimeout(resolve, 5));
              }
            }
          }
        }),
      );
      expect(proxy.cuts).toBeGreaterThan(5);
      const { rows } = await pool.query(
        "SELECT coalesce(-sum(quantity) FILTER (WHERE quantity < 0), 0)::int AS sold FROM holdfast.stock_movement",
      );
      const named = 16 * 15 * 2;
      if (Number.isNaN(sold)) expect(rows[0].sold).toBeGreaterThanOrEqual(named);
      else expect(rows[0].sold).toBe(sold);
      const { rows: twice } = await pool.query(
        "SELECT external_id FROM holdfast.stock_movement GROUP BY external_id HAVING count(*) <> max(parts)",
      );
      expect(twice).toEqual([]);
      expect(await stock(holdfast(fromPg(pool)), { name: "cut" }).reconcile()).toMatchObject({ ok: true });
    } finally {
      await hf.close();
      await through.end();
      await proxy.close();
    }
  });
});

test("512 callers, orders of 3 out of 1,000 SKUs written in any order, new ones among them: no deadlock", async () => {
  await within(async (database, pool) => {
    const pools = [pool, new Pool({ connectionString: database.url, max: 8 })];
    const shops = pools.map((each) => stock(holdfast(fromPg(each), { wait: 60_000 }), { name: "spread" }));
    try {
      const next = random(inject("seed"));
      const lines = (quantity: number) =>
        Array.from({ length: 3 }, () => ({ sku: `sku-${Math.floor(next() * 1000)}`, quantity }));
      await Promise.all(
        Array.from({ length: 512 }, async (_, caller) => {
          for (let i = 0; i < 3; i++) {
            const shop = shops[caller % 2];
            // What is not there yet is made by whoever comes first.
            await shop?.apply(lines(2));
            await shop?.apply(lines(-1)).catch(() => {});
          }
        }),
      );
      expect(await shops[0]?.reconcile()).toMatchObject({ ok: true });
      expect(await deadlocks(pool)).toBe(0);
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
