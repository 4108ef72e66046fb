/** Patterns inside the body of a transaction of the same instance: they take part in it, unless they are told to be apart. */
import { audited, trail } from "holdfast/audit";
import { HoldfastError, holdfast, leader, once, versioned } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue, queues } from "holdfast/queue";
import { quota, quotas, subjects } from "holdfast/quota";
import { pauseSchedule, runs, schedule, schedules } from "holdfast/schedule";
import { stock, stocks } from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 8 });
  await holdfast(fromPg(pool)).migrate();
  await pool.query("CREATE TABLE thing (id int PRIMARY KEY, n int NOT NULL, version int NOT NULL DEFAULT 1)");
});
afterAll(async () => {
  await pool?.end();
  await database?.drop();
});

let made = 0;
const named = () => `inside${++made}`;

type Instance = ReturnType<typeof holdfast<PoolClient, never>>;

interface Pattern {
  /** So that there is something to look at, outside of any transaction. */
  prepare?(hf: Instance, name: string): Promise<unknown>;
  write(hf: Instance, name: string, options: { readonly separate?: boolean }): Promise<unknown>;
  /** How often it was written, as the calling code sees it. */
  count(hf: Instance, name: string): Promise<number>;
}

const patterns: Record<string, Pattern> = {
  "quota.consume": {
    write: (hf, name, options) => quota(hf, { name, limit: 9 }).consume("ada", 1, options),
    count: async (hf, name) => (await quota(hf, { name, limit: 9 }).peek("ada")).used,
  },
  "quota.hold and settle": {
    write: async (hf, name, options) => {
      const { id } = await quota(hf, { name, limit: 9 }).hold("ada", 3, options);
      await quota(hf, { name, limit: 9 }).settle("ada", id, 1, options);
    },
    count: async (hf, name) => (await quota(hf, { name, limit: 9 }).peek("ada")).used,
  },
  "quota.grant": {
    write: (hf, name, options) => quota(hf, { name, limit: 9 }).grant("ada", 1, options),
    count: async (hf, name) => {
      const { entries } = await quota(hf, { name, limit: 9 }).history("ada");
      return entries.length;
    },
  },
  "quota.all": {
    write: (hf, name, options) =>
      quota
        .all([quota(hf, { name, limit: 9 }), quota(hf, { name: `${name}b`, limit: 9 })])
        .consume("ada", 1, options),
    count: async (hf, name) => {
      const [found] = await subjects(hf, name);
      return found?.used ?? 0;
    },
  },
  "stock.increase": {
    write: (hf, name, options) => stock(hf, { name }).increase("cap", 1, options),
    count: async (hf, name) => (await stock(hf, { name }).levels())[0]?.onHand ?? 0,
  },
  "stock.reserve and commit": {
    prepare: (hf, name) => stock(hf, { name }).increase("cap", 9),
    write: async (hf, name, options) => {
      const shop = stock(hf, { name });
      const { id } = await shop.reserve([{ sku: "cap", quantity: 1 }], options);
      await shop.commit(id, options);
    },
    count: async (hf, name) => (await stock(hf, { name }).history()).movements.length - 1,
  },
  "queue.enqueue": {
    prepare: (hf, name) => queue(hf, name).counts(),
    write: (hf, name, options) => queue(hf, name).enqueue({}, options),
    count: async (hf, name) => (await queue(hf, name).counts()).waiting,
  },
  "queue.enqueueMany": {
    prepare: (hf, name) => queue(hf, name).counts(),
    write: (hf, name, options) => queue(hf, name).enqueueMany([{ payload: 1 }], options),
    count: async (hf, name) => (await queues(hf, { names: [name] }))[0]?.waiting ?? 0,
  },
  once: {
    write: (hf, name, options) => once(hf, ["inside", name], async () => 1, options),
    // The record is all that it writes.
    count: (hf, name) =>
      hf.transaction(async (tx) => {
        const { rows } = await tx.client.query("SELECT 1 FROM holdfast.once WHERE id LIKE $1", [`%${name}%`]);
        return rows.length;
      }),
  },
  audited: {
    write: (hf, name, options) =>
      audited(hf, { action: "a", target: name, actor: "me", ...options }, async () => {}),
    count: async (hf, name) =>
      (await trail(hf, { target: name })).filter(({ outcome }) => outcome === "done").length,
  },
  "versioned.update": {
    prepare: async (_, name) => pool.query("INSERT INTO thing VALUES ($1, 0)", [Number(name.slice(6))]),
    write: (hf, name, options) =>
      versioned<{ id: number; n: number; version: number }, PoolClient>(hf, "thing").update(
        Number(name.slice(6)),
        ({ n }) => ({ n: n + 1 }),
        options,
      ),
    count: async (hf, name) => {
      const row = await versioned<{ id: number; n: number; version: number }, PoolClient>(hf, "thing").read(
        Number(name.slice(6)),
      );
      return row?.n ?? 0;
    },
  },
};

class Undo extends Error {}

describe.each(Object.entries(patterns))("%s in the body of a transaction", (_, { prepare, write, count }) => {
  test("is part of it, also if the pool has one connection", async () => {
    const single = new Pool({ connectionString: database.url, max: 1 });
    const hf = holdfast(fromPg(single), { wrongConnection: "throw" });
    const name = named();
    try {
      await prepare?.(hf, name);
      const undone = hf.transaction(async () => {
        await write(hf, name, {});
        expect(await count(hf, name)).toBe(1);
        throw new Undo();
      });
      await expect(undone).rejects.toThrow(Undo);
      expect(await count(hf, name)).toBe(0);
      await hf.transaction(() => write(hf, name, {}));
      expect(await count(hf, name)).toBe(1);
    } finally {
      await hf.close();
      await single.end();
    }
  });

  test("is apart from it if it is told so, and in the body of another instance", async () => {
    const hf = holdfast(fromPg(pool));
    const other = holdfast(fromPg(pool));
    const name = named();
    await prepare?.(hf, name);
    const undone = hf.transaction(async () => {
      await write(hf, name, { separate: true });
      throw new Undo();
    });
    await expect(undone).rejects.toThrow(Undo);
    expect(await count(hf, name)).toBe(1);
    const outside = named();
    await prepare?.(hf, outside);
    const undoneToo = other.transaction(async () => {
      await write(hf, outside, {});
      throw new Undo();
    });
    await expect(undoneToo).rejects.toThrow(Undo);
    expect(await count(hf, outside)).toBe(1);
    await hf.close();
    await other.close();
  });
});

test("what only looks takes part too: it sees what the transaction has done, and needs no second connection", async () => {
  const single = new Pool({ connectionString: database.url, max: 1 });
  const hf = holdfast(fromPg(single), { wrongConnection: "throw" });
  const name = named();
  try {
    await queue(hf, name).counts();
    const nightly = schedule(hf, name, { every: "1 day" }, () => {});
    await hf
      .transaction(async () => {
        const q = quota(hf, { name, limit: 5 });
        await q.consume("ada");
        expect((await quotas(hf)).map((each) => each.name)).toContain(name);
        expect(await q.reconcile("ada")).toMatchObject({ ok: true, entries: 1 });
        const shop = stock(hf, { name });
        await shop.increase("cap", 2);
        expect((await stocks(hf)).map((each) => each.name)).toContain(name);
        expect(await shop.reconcile()).toMatchObject({ ok: true, levels: 1 });
        expect(await shop.byChannel()).toMatchObject([{ net: 2 }]);
        expect(await shop.levelAt("cap", new Date(Date.now() + 3_600_000))).toBe(2);
        await queue(hf, name).pause();
        expect(await queue(hf, name).counts()).toMatchObject({ paused: true });
        expect(await queue(hf, name).failed()).toEqual([]);
        await nightly.pause();
        expect(await nightly.status()).toMatchObject({ paused: true });
        expect(await schedules(hf, { names: [name] })).toMatchObject([{ paused: true }]);
        expect(await pauseSchedule(hf, name)).toBe(true);
        expect(await runs(hf, name)).toEqual([]);
        throw new Undo();
      })
      .catch((error: unknown) => expect(error).toBeInstanceOf(Undo));
    expect(await queue(hf, name).counts()).toMatchObject({ paused: false });
    expect(await schedules(hf, { names: [name] })).toEqual([]);
  } finally {
    await hf.close();
    await single.end();
  }
});

test("after the end of the transaction it is an error, and not silently outside", async () => {
  const hf = holdfast(fromPg(pool));
  const name = named();
  let late: Promise<unknown> | undefined;
  const over = Promise.withResolvers<void>();
  await hf.transaction(async () => {
    late = over.promise.then(() => quota(hf, { name, limit: 1 }).consume("ada"));
    await Promise.resolve();
  });
  over.resolve();
  await expect(late).rejects.toMatchObject({ code: "HF_TRANSACTION_OVER" });
  await hf.close();
});

test("`tx` and `separate` together, and a `tx` of another instance, are refused", async () => {
  const hf = holdfast(fromPg(pool));
  const other = holdfast(fromPg(pool));
  const q = quota(hf, { name: named(), limit: 1 });
  await hf.transaction(async (tx) => {
    await expect(q.consume("ada", 1, { tx, separate: true })).rejects.toThrow(/either `tx` or `separate`/);
  });
  await other.transaction(async (tx) => {
    await expect(q.consume("ada", 1, { tx })).rejects.toThrow(/another instance/);
    await expect(q.consume("ada", 1, { tx })).rejects.toBeInstanceOf(HoldfastError);
  });
  await hf.close();
  await other.close();
});

describe("what goes on in the background does not belong to the transaction in whose body it was begun", () => {
  for (const transactional of [false, true])
    test(`a worker${transactional ? " of transactional jobs" : ""}`, async () => {
      const hf = holdfast(fromPg(pool));
      const name = named();
      const jobs = queue<string>(hf, name);
      const q = quota(hf, { name, limit: 100 });
      const done: string[] = [];
      const troubles: unknown[] = [];
      const worker = await hf.transaction(async () => {
        await q.consume("body");
        return jobs.work(
          async ({ payload }: { payload: string }) => {
            await q.consume("job");
            done.push(payload);
          },
          { transactional, pollMs: 50, onTrouble: (error: unknown) => troubles.push(error) } as never,
        );
      });
      await jobs.enqueue("a");
      await jobs.enqueue("b");
      await eventually(() => done.length === 2);
      await worker.stop();
      expect(troubles).toEqual([]);
      expect(await q.peek("job")).toMatchObject({ used: 2 });
      await hf.close();
    });

  test("a schedule, and a leader", async () => {
    const hf = holdfast(fromPg(pool));
    const name = named();
    const q = quota(hf, { name, limit: 100_000 });
    const errors: unknown[] = [];
    const onError = (error: unknown) => errors.push(error);
    const [often, led] = await hf.transaction(async () => {
      await q.consume("body");
      const often = schedule(hf, name, { every: 100, onError }, () => q.consume("tick"));
      await often.start();
      const led = leader(
        hf,
        name,
        async ({ signal }) => {
          await q.consume("leader");
          await new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
        },
        { onError },
      );
      return [often, led] as const;
    });
    await eventually(async () => (await q.peek("tick")).used > 1 && (await q.peek("leader")).used === 1);
    await often.stop();
    await led.stop();
    expect(errors).toEqual([]);
    await hf.close();
  });
});
