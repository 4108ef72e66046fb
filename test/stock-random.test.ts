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
import { type Answer, type StockArg, locations, shopOf, skus } from "./workers/stock-random.ts";

const worker = new URL("./workers/stock-random.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const seeds = long ? 200 : 2;

interface Row {
  level: string;
  sku: string;
  location: string;
  version: number;
  quantity: number;
  balance: number;
  parts: number;
  kind: string;
  id: string;
  origin: string | null;
}

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

function groups<T>(items: readonly T[], by: (item: T) => string): Map<string, T[]> {
  const found = new Map<string, T[]>();
  for (const item of items) {
    const name = by(item);
    found.set(name, [...(found.get(name) ?? []), item]);
  }
  return found;
}

const sumOf = (rows: readonly { readonly quantity: number }[]) =>
  rows.reduce((sum, { quantity }) => sum + quantity, 0);

async function check(pool: Pool, answers: readonly Answer[], hint: string): Promise<void> {
  const { rows: levels } = await pool.query(
    `SELECT t.id::text AS level, on_hand::int, reserved::int, min_level::int, version::int,
      (SELECT coalesce(sum(quantity), 0)::int FROM holdfast.stock_reserved x WHERE x.level = t.id) AS open
      FROM holdfast.stock_level t`,
  );
  const { rows } = await pool.query<Row>(
    `SELECT m.level::text, sku, location, m.version::int, quantity::int, balance::int, parts, kind, external_id AS id, origin
      FROM holdfast.stock_movement m JOIN holdfast.stock_level t ON t.id = m.level ORDER BY m.level, m.version`,
  );
  const byLevel = groups(rows, ({ level }) => level);
  for (const { level, on_hand: onHand, reserved, min_level: min, version, open } of levels) {
    const own = byLevel.get(level) ?? [];
    // Movements add up, without gaps, and each follows from the one before; at no time was there less than nothing.
    expect(sumOf(own), hint).toBe(onHand);
    expect(
      own.map((each) => each.version),
      hint,
    ).toEqual(own.map((_, i) => i + 1));
    expect(version, hint).toBe(own.length);
    let before = 0;
    for (const { quantity, balance } of own) {
      expect(balance, hint).toBe(before + quantity);
      expect(balance, hint).toBeGreaterThanOrEqual(0);
      before = balance;
    }
    expect(onHand - reserved, hint).toBeGreaterThanOrEqual(min);
    expect(reserved, hint).toBe(open);
  }
  // Each id once per level, and whole: as many movements as its call had lines.
  const byId = groups(rows, ({ id }) => id);
  for (const [, own] of byId) {
    expect(new Set(own.map(({ level }) => level)).size, hint).toBe(own.length);
    expect(own.length, hint).toBe(own[0]?.parts);
  }
  // Nothing came back that was not sold.
  const returns = groups(
    rows.filter(({ origin }) => origin !== null),
    ({ origin, level }) => `${origin} ${level}`,
  );
  for (const [, own] of returns) {
    const sale = byId.get(own[0]?.origin ?? "")?.find(({ level }) => level === own[0]?.level);
    expect(sumOf(own), hint).toBeLessThanOrEqual(-(sale?.quantity ?? 0));
  }
  // Reservations that are open have their lines, and those that were committed their movements.
  const { rows: kept } = await pool.query(
    `SELECT id, state, cardinality(levels) AS parts, until <= clock_timestamp() AS over,
      (SELECT count(*)::int FROM holdfast.stock_reserved x WHERE x.reservation = r.id) AS open FROM holdfast.stock_reservation r`,
  );
  for (const { id, state, parts, over, open } of kept) {
    if (state === "open" && !over) expect(open, hint).toBe(parts);
    if (state !== "open") expect(open, hint).toBe(0);
    expect(byId.get(`commit:${id}`)?.length ?? 0, hint).toBe(state === "committed" ? parts : 0);
  }
  // Who was told that it was done finds its movements, with the same answer as everybody.
  for (const { externalId, lines } of answers)
    for (const { sku, location, quantity, onHand, version } of lines)
      expect(
        byId.get(externalId)?.find((row) => row.sku === sku && row.location === location),
        hint,
      ).toMatchObject({ quantity, balance: onHand, version });
  expect(await shopOf(holdfast(fromPg(pool))).reconcile(), hint).toMatchObject({ ok: true });
}

describe("4 processes, each killed once in the middle of it", () => {
  test.for(Array.from({ length: seeds }, (_, i) => i))("seed + %i", { timeout: 120_000 }, async (i) => {
    const seed = inject("seed") + i;
    await within(async (database, pool) => {
      const shop = shopOf(holdfast(fromPg(pool)));
      await shop.apply(skus.flatMap((sku) => locations.map((location) => ({ sku, location, quantity: 15 }))));
      const answers = await crew(database.url, seed, 4, 1);
      expect(answers.length).toBeGreaterThan(50);
      await check(pool, answers, `HOLDFAST_SEED=${seed}`);
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
