/** What is particular to patterns on DuckDB, beyond what every backend promises: one process, and one snapshot for each transaction. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type DuckDBConnection, DuckDBInstance } from "@duckdb/node-api";
import { type Holdfast, holdfast, sql } from "holdfast";
import { fromDuckdb } from "holdfast/duckdb";
import { queue } from "holdfast/queue";
import { type Quota, quota } from "holdfast/quota";
import { InsufficientStockError, stock } from "holdfast/stock";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import { type DuckdbRushArg, limit, openDuckdb, uploads } from "./workers/duckdb-rush.ts";

let instance: DuckDBInstance;
/** Two instances of Holdfast, made separately, on one of DuckDB. */
let hf: Holdfast<DuckDBConnection>;
let other: Holdfast<DuckDBConnection>;

beforeAll(async () => {
  instance = await DuckDBInstance.create(":memory:");
  const patience = { wait: 60_000, retry: { attempts: 100 } };
  [hf, other] = [holdfast(fromDuckdb(instance), patience), holdfast(fromDuckdb(instance), patience)];
  await hf.migrate();
  await hf.transaction((tx) =>
    tx.query(sql`CREATE TABLE effect (what varchar NOT NULL, n integer NOT NULL)`),
  );
});
afterAll(async () => {
  await Promise.all([hf.close(), other.close()]);
  instance.closeSync();
});

async function effects(what: string): Promise<number[]> {
  const rows = await hf.transaction((tx) =>
    tx.query(sql`SELECT n FROM effect WHERE what = ${what} ORDER BY n`),
  );
  return rows.map(({ n }) => Number(n));
}

describe("in transactions that read first, and so have an older snapshot", () => {
  const attempts = 60;

  test("a limit of 10: 10 are granted, with what the callers wrote", async () => {
    const answers = await Promise.all(
      Array.from({ length: attempts }, (_, n) => {
        const [one, of] = n % 2 ? [hf, uses(hf)] : [other, uses(other)];
        return one.transaction(async (tx) => {
          await tx.query(sql`SELECT count(*) AS found FROM effect`);
          const { granted } = await of.tryConsume("ann", 1, { tx });
          if (granted) await tx.query(sql`INSERT INTO effect VALUES ('granted', ${n})`);
          return granted;
        });
      }),
    );
    const granted = answers.flatMap((each, n) => (each ? [n] : []));
    expect(granted).toHaveLength(10);
    expect(await effects("granted")).toEqual(granted);
    expect(await uses(hf).reconcile("ann")).toMatchObject({ ok: true, entries: 10 });
  });

  // The same without us must show the bug, or it would prove nothing.
  test("by adding up what is there, a limit of 1 is used twice", async () => {
    const read = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    await Promise.all(
      read.map(({ resolve }, n) =>
        hf.transaction(async (tx) => {
          const [row] = await tx.query(sql`SELECT count(*) AS found FROM effect WHERE what = 'naive'`);
          resolve();
          await Promise.all(read.map(({ promise }) => promise));
          if (Number(row?.["found"]) < 1) await tx.query(sql`INSERT INTO effect VALUES ('naive', ${n})`);
        }),
      ),
    );
    expect(await effects("naive")).toEqual([0, 1]);
  });

  test("the last 5 units: sold once each", async () => {
    const shop = stock(hf, { name: "shop" });
    await shop.increase("CAP", 5);
    const sales = await Promise.allSettled(
      Array.from({ length: 30 }, () =>
        hf.transaction(async (tx) => {
          await tx.query(sql`SELECT count(*) AS found FROM effect`);
          await shop.decrease("CAP", 1, { tx });
        }),
      ),
    );
    const refused = sales.flatMap((each) => (each.status === "rejected" ? [each.reason as unknown] : []));
    expect(refused).toHaveLength(25);
    for (const reason of refused) expect(reason).toBeInstanceOf(InsufficientStockError);
    expect(await shop.level("CAP")).toMatchObject({ onHand: 0 });
    expect(await shop.reconcile()).toMatchObject({ ok: true });
  });
});

const uses = (of: Holdfast<DuckDBConnection>): Quota => quota(of, { name: "uses", limit: 10 });

test("jobs in the transaction of their handlers: one that fails takes nothing with it, and runs again", async () => {
  const jobs = queue<number>(hf, "errands", { retries: 3, backoff: { baseMs: 1 } });
  await jobs.enqueueMany(Array.from({ length: 30 }, (_, payload) => ({ payload })));
  const worker = jobs.work(
    async ({ payload, attempt }, tx) => {
      await tx.query(sql`INSERT INTO effect VALUES ('job', ${payload})`);
      if (payload % 3 === 0 && attempt === 1) throw new Error("not yet");
      if (payload === 29) throw new Error("never");
    },
    { transactional: true, concurrency: 3 },
  );
  try {
    await eventually(async () => {
      const { waiting, delayed, running } = await jobs.counts();
      return waiting + delayed + running === 0;
    });
  } finally {
    await worker.stop();
  }
  expect(await effects("job")).toEqual(Array.from({ length: 29 }, (_, n) => n));
  expect(await jobs.failed()).toMatchObject([
    { payload: 29, error: expect.stringContaining("never") as string },
  ]);
});

describe("while somebody's own transaction has called a pattern", () => {
  test("others wait as long as they may, or until they are told not to", async () => {
    const connection = await instance.connect();
    const of = quota(hf, { name: "waits", limit: 10 });
    await connection.run("BEGIN");
    await of.consume("ann", 1, { tx: hf.join(connection) });
    await expect(of.consume("ann", 1, { wait: 50 })).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
    const stop = new AbortController();
    const call = of.consume("ann", 1, { signal: stop.signal });
    const reason = new Error("not any more");
    setTimeout(() => stop.abort(reason), 20);
    await expect(call).rejects.toBe(reason);
    const late = of.consume("ann", 1);
    await connection.run("COMMIT");
    await late;
    expect(await of.peek("ann")).toMatchObject({ used: 2 });
    connection.closeSync();
  });

  test("inside of one of ours, too", async () => {
    const of = quota(other, { name: "waits", limit: 10 });
    const stop = new AbortController();
    const reason = new Error("not any more");
    await hf.transaction(async (tx) => {
      await quota(hf, { name: "waits", limit: 10 }).consume("ben", 1, { tx });
      const call = other.outside(() => of.consume("ben", 1, { signal: stop.signal }));
      setTimeout(() => stop.abort(reason), 20);
      await expect(call).rejects.toBe(reason);
    });
    await of.consume("ben");
    expect(await of.peek("ben")).toMatchObject({ used: 2 });
  });
});

test("a process that is killed in the middle of a rush: what it was told is in the file, and adds up", async () => {
  const folder = await mkdtemp(join(tmpdir(), "holdfast-duckdb-"));
  const url = join(folder, "test.duckdb");
  try {
    const told = new Set<string>();
    for (let round = 0; round < 3; round++) {
      const worker = startWorker<void>(new URL("./workers/duckdb-rush.ts", import.meta.url), {
        url,
      } satisfies DuckdbRushArg);
      for (let i = 0; i < 5 + 7 * round; i++) told.add(String(await worker.message("granted")));
      worker.sigkill();
      await worker.exited;
    }
    const { hf: found, close } = await openDuckdb(url);
    try {
      const { entries } = await uploads(found).history("ann", { limit: 1000 });
      const kept = new Set(entries.map(({ id }) => id));
      expect([...told].filter((id) => !kept.has(id))).toEqual([]);
      expect(kept.size).toBeLessThanOrEqual(limit);
      expect(await uploads(found).reconcile("ann")).toMatchObject({ ok: true, entries: kept.size });
    } finally {
      await close();
    }
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
});
