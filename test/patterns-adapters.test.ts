/** Queues and stock through every client and ORM: what one of them sends or reads otherwise shows here. */
import { type Holdfast, type Transaction, holdfast, sql } from "holdfast";
import { queue } from "holdfast/queue";
import { InsufficientStockError, stock } from "holdfast/stock";
import { type ConformanceSite, execute } from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type Backend, backends } from "./backends.ts";
import { type Place, missing, placeFor } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

const isPostgres = ({ server, name }: Backend) =>
  ["postgres", "postgresOld", "pgbouncer"].includes(server) || name.includes("PGlite");

let made = 0;

describe.each(backends.filter(isPostgres))("$name", (backend) => {
  const why = missing(backend);
  let place: Place;
  let site: ConformanceSite;
  let hf: Holdfast<unknown>;
  let table: string;

  beforeAll(async () => {
    if (why !== undefined) return;
    place = await placeFor(backend);
    site = await backend.open(place.url);
    hf = holdfast(site.database, { wait: 60_000 });
    await hf.migrate();
    table = `effect_${++made}`;
    await execute(site, sql`CREATE TABLE ${sql.id(table)} (n int NOT NULL)`);
  });
  afterAll(async () => {
    await hf?.close();
    await site?.close();
    await place?.drop();
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));

  const write = (tx: Transaction<unknown>, n: number) =>
    tx.query(sql`INSERT INTO ${sql.id(table)} (n) VALUES (${n})`);
  const written = () =>
    hf.transaction(async (tx) =>
      (await tx.query(sql`SELECT n FROM ${sql.id(table)} ORDER BY n`)).map(({ n }) => Number(n)),
    );

  test("jobs: enqueued with the caller's writes, completed with the handler's, tried again", async () => {
    const q = queue<{ n: number; text: string }>(hf, `jobs ${++made}`, { backoff: { baseMs: 1 } });
    const undone = new Error("undone");
    await expect(
      hf.transaction(async (tx) => {
        await q.enqueue({ n: -1, text: "" }, { tx });
        throw undone;
      }),
    ).rejects.toBe(undone);
    await hf.transaction((tx) =>
      q.enqueueMany(
        [0, 1, 2].map((n) => ({ payload: { n, text: `"'\\{}é${n}` }, key: `k${n}`, group: "g" })),
        { tx },
      ),
    );
    expect(await q.enqueue({ n: 9, text: "" }, { key: "k1" })).toMatchObject({ added: false });
    const texts: string[] = [];
    const worker = q.work(
      async (job) => {
        await hf.transaction(async (tx) => {
          await write(tx, job.payload.n);
          await job.complete(tx);
          if (job.attempt === 1 && job.payload.n === 1) throw new Error("once");
        });
        texts.push(job.payload.text);
      },
      { concurrency: 2, pollMs: 50 },
    );
    try {
      await eventually(() => texts.length === 3);
      expect(texts.toSorted()).toEqual([0, 1, 2].map((n) => `"'\\{}é${n}`));
      expect(await written()).toEqual([0, 1, 2]);
    } finally {
      await worker.stop();
    }
    expect(await q.counts()).toMatchObject({ waiting: 0, delayed: 0, running: 0, failed: 0, workers: 0 });
  });

  test("transactional jobs: the handler's writes are those of the job", async () => {
    const q = queue<number>(hf, `short ${++made}`, { retries: 1, backoff: { baseMs: 1 } });
    await q.enqueueMany([10, 11, 12, 13].map((payload) => ({ payload })));
    const worker = q.work(
      async (job, tx) => {
        await write(tx, job.payload);
        if (job.payload === 11 && job.attempt === 1) throw new Error("once");
        if (job.payload === 12) throw new Error("always");
      },
      { transactional: true, concurrency: 2, pollMs: 50 },
    );
    try {
      await eventually(async () => {
        const { waiting, delayed, failed } = await q.counts();
        return waiting + delayed === 0 && failed === 1;
      });
      expect((await written()).filter((n) => n >= 10)).toEqual([10, 11, 13]);
    } finally {
      await worker.stop();
    }
  });

  test("stock: with the caller's writes, once for each id, and never below nothing", async () => {
    const shelf = stock(hf, { name: `shelf ${++made}` });
    await shelf.increase("CAP", 5);
    await shelf.increase(`M"'\\{}é`, 2);
    const lines = [
      { sku: `M"'\\{}é`, quantity: -1 },
      { sku: "CAP", quantity: -2 },
    ];
    const undone = new Error("undone");
    await expect(
      hf.transaction(async (tx) => {
        await shelf.apply(lines, { tx, externalId: "a" });
        throw undone;
      }),
    ).rejects.toBe(undone);
    await hf.transaction(async (tx) => {
      await write(tx, 100);
      expect(await shelf.apply(lines, { tx, externalId: "a" })).toMatchObject({ replayed: false });
    });
    expect(await shelf.apply(lines, { externalId: "a" })).toMatchObject({ replayed: true });
    await expect(shelf.decrease("CAP", 4)).rejects.toThrow(InsufficientStockError);
    const sales = await Promise.allSettled(Array.from({ length: 8 }, () => shelf.decrease("CAP", 1)));
    expect(sales.filter(({ status }) => status === "fulfilled").length).toBe(3);
    expect(await shelf.level("CAP")).toMatchObject({ onHand: 0, available: 0 });
    expect((await shelf.reconcile()).ok).toBe(true);
    expect((await written()).includes(100)).toBe(true);
  });
});
