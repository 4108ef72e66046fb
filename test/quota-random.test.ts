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
import { type Answer, type QuotaArg, limit, quotaOf, subjects } from "./workers/quota-random.ts";

const worker = new URL("./workers/quota-random.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] === "1";
const seeds = long ? 200 : 2;

interface Row {
  version: number;
  kind: string;
  id: string;
  entry: string | null;
  amount: number;
  delta: number;
  used: number;
  held: number;
  refunded: number;
}

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
async function crew(url: string, seed: number, processes: number, kills: number): Promise<Answer[]> {
  const one = async (index: number): Promise<Answer[]> => {
    for (let life = 0; ; life++) {
      const arg: QuotaArg = { url, seed, index, calls: 150, callers: 6 };
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

async function check(pool: Pool, answers: readonly Answer[], hint: string): Promise<void> {
  const hf = holdfast(fromPg(pool));
  const of = quotaOf(hf);
  for (const subject of subjects) {
    const { rows } = await pool.query<Row>(
      `SELECT version::int, kind, id, entry, amount::int, delta::int, used::int, held::int, refunded::int
        FROM holdfast.quota_entry WHERE quota = 'random' AND subject = $1 ORDER BY version`,
      [subject],
    );
    // No gaps, and each one follows from the one before.
    expect(await of.reconcile(subject), hint).toMatchObject({ ok: true });
    expect(
      rows.map(({ version }) => version),
      hint,
    ).toEqual(rows.map((_, i) => i + 1));
    // Never above the limit, at any time.
    expect(Math.max(0, ...rows.map(({ used, held }) => used + held)), hint).toBeLessThanOrEqual(limit);
    // What was used is what the entries say.
    const used = rows
      .filter(({ kind }) => kind === "consume" || kind === "settle")
      .reduce((sum, { amount, refunded }) => sum + amount - refunded, 0);
    const { rows: buckets } = await pool.query(
      "SELECT used::int, held::int FROM holdfast.quota_bucket WHERE quota = 'random' AND subject = $1",
      [subject],
    );
    expect(buckets[0]?.used, hint).toBe(used);
    // Holds are open, or ended once.
    const { rows: open } = await pool.query(
      "SELECT coalesce(sum(amount), 0)::int AS held, count(*)::int AS n FROM holdfast.quota_hold WHERE quota = 'random' AND subject = $1",
      [subject],
    );
    expect(buckets[0]?.held, hint).toBe(open[0].held);
    const held = rows.filter(({ kind }) => kind === "hold");
    const ended = rows.filter(({ kind }) => ["settle", "release", "expire"].includes(kind));
    expect(held.length, hint).toBe(ended.length + open[0].n);
    expect(new Set(ended.map(({ entry }) => entry)).size, hint).toBe(ended.length);
    // Refunds are of entries that are there, and never more than these.
    for (const { entry, kind } of rows)
      if (kind === "refund")
        expect(
          rows.some(({ id }) => id === entry),
          hint,
        ).toBe(true);
    for (const { amount, refunded } of rows) expect(refunded, hint).toBeLessThanOrEqual(amount);
    // Who was told that it was granted finds its entry, with the same answer as everybody.
    const byId = new Map(rows.filter(({ kind }) => kind === "consume").map((row) => [row.id, row]));
    for (const answer of answers) {
      if (answer.subject !== subject || !answer.granted) continue;
      expect(byId.get(answer.id), hint).toMatchObject({ amount: answer.amount, used: answer.used });
    }
  }
}

describe("4 processes, each killed once in the middle of it", () => {
  test.for(Array.from({ length: seeds }, (_, i) => i))("seed + %i", { timeout: 120_000 }, async (i) => {
    const seed = inject("seed") + i;
    await within(async (database, pool) => {
      const answers = await crew(database.url, seed, 4, 1);
      expect(answers.length).toBeGreaterThan(100);
      await check(pool, answers, `HOLDFAST_SEED=${seed}`);
    });
  });
});

test("connections that are cut, also during a commit: every id is applied once", async () => {
  await within(async (database, pool) => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const through = new Pool({ connectionString: proxy.url(database.url), max: 4 });
    through.on("error", () => {});
    const hf = holdfast(fromPg(through));
    const of = quota(hf, { name: "cut", limit: 100_000 });
    const next = random(inject("seed"));
    // Before it gets there, or after it was committed and before the answer is back.
    proxy.cutWhen((direction, chunk) => {
      if (direction === "to-client" || !chunk.includes("quota_consume") || next() > 0.3) return "pass";
      return next() < 0.5 ? "cut-before" : "drop-answer";
    });
    try {
      const granted = new Set<string>();
      await Promise.all(
        Array.from({ length: 16 }, async (_, caller) => {
          for (let i = 0; i < 25; i++) {
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
        "SELECT count(*)::int AS n, max(used)::int AS used FROM holdfast.quota_entry WHERE quota = 'cut'",
      );
      expect([granted.size, rows[0].n, rows[0].used]).toEqual([400, 400, 400]);
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
    const quotas = pools.map((each) => quota(holdfast(fromPg(each)), { name: "spread", limit: 1_000_000 }));
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
