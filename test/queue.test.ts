import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import {
  type Job,
  JobLostError,
  PayloadError,
  type Queue,
  type QueueCounts,
  type WorkOptions,
  type Worker,
  queue,
} from "holdfast/queue";
import { Pool, type PoolClient } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, inject, test, vi } from "vitest";
import { z } from "zod";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";

describe.each(["postgres", "pgbouncer"] as const)("on %s", (server) => {
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolClient>;

  const why = unavailable(server);

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = new Pool({ connectionString: database.url, max: 20 });
    hf = holdfast(fromPg(pool));
    await hf.migrate();
    await pool.query("CREATE TABLE effect (job bigint, n int)");
  });

  afterAll(async () => {
    await hf?.close();
    await pool?.end();
    await database?.drop();
  });

  beforeEach(({ skip }) => skip(why !== undefined, why));

  const workers: Worker[] = [];
  afterEach(async () => {
    await Promise.all(workers.splice(0).map((worker) => worker.stop({ patienceMs: 0 })));
  });

  let made = 0;
  const named = () => `q${++made}`;

  /** Ends with the test. Trouble of its own is a failure of the test. */
  function work<I, P>(of: Queue<I, P>, handler: (job: Job<P>) => unknown, options: WorkOptions = {}): Worker {
    const worker = of.work(handler, {
      pollMs: 100,
      onTrouble: (error) => {
        throw error;
      },
      ...options,
    });
    workers.push(worker);
    return worker;
  }

  const empty = async (of: { counts(): Promise<QueueCounts> }) => {
    const { waiting, delayed, running } = await of.counts();
    return waiting + delayed + running === 0;
  };

  describe("jobs", () => {
    test("each is worked on once, in the order in which they came", async () => {
      const q = queue<{ n: number }>(hf, named());
      await q.enqueueMany(Array.from({ length: 1000 }, (_, n) => ({ payload: { n } })));
      const seen: number[] = [];
      work(q, async ({ payload, attempt }) => void (attempt === 1 && seen.push(payload.n)), {
        concurrency: 1,
      });
      await eventually(() => empty(q));
      expect(seen).toEqual(Array.from({ length: 1000 }, (_, n) => n));
    });

    test("any payload, name, key and group", async () => {
      const q = queue<unknown>(hf, `${named()} "'\\{},🦀`);
      const payloads = ['"quoted" \\ {a,b}', { "k'": [null, 1.5, "é🦀\n"] }, null, 0, [[]], "NULL"];
      for (const payload of payloads)
        await q.enqueue(payload, { key: `k ${JSON.stringify(payload)}`, group: `g'"\\{},` });
      const seen: unknown[] = [];
      work(q, ({ payload, key, group }) => void seen.push([payload, key, group]));
      await eventually(() => empty(q));
      expect(seen).toEqual(payloads.map((payload) => [payload, `k ${JSON.stringify(payload)}`, `g'"\\{},`]));
      const { rows } = await pool.query("SELECT count(*)::int AS n FROM holdfast.queue_key");
      expect(rows).toEqual([{ n: 0 }]);
    });

    test("priority, then age; and not before their time", async () => {
      const q = queue<string>(hf, named());
      await q.enqueue("late", { priority: 5 });
      await q.enqueue("usual");
      await q.enqueue("first", { priority: -5 });
      await q.enqueue("soon", { delayMs: 2500 });
      await q.enqueue("past", { runAt: new Date(0), priority: 1 });
      const seen: string[] = [];
      work(q, ({ payload }) => void seen.push(payload), { concurrency: 1 });
      await eventually(() => empty(q));
      expect(seen).toEqual(["first", "usual", "past", "late", "soon"]);
    });

    test.for([-1, 1])("a delay is by the database's clock, whatever ours says: %i hours", async (hours) => {
      const q = queue<string>(hf, named());
      const [half, real] = [1_800_000, Date.now];
      const clock = vi.spyOn(Date, "now").mockImplementation(() => real() + hours * 2 * half);
      try {
        await q.enqueue("at once", { delayMs: 0 });
        const { id } = await q.enqueue("later", { delayMs: half });
        const far = new Date(real() + 10 * half);
        const many = await q.enqueueMany([
          { payload: "no delay" },
          { payload: "at", runAt: far, key: "at" },
          { payload: "past", runAt: new Date(0) },
          { payload: "delayed", delayMs: half, group: "g" },
        ]);
        expect(await q.counts()).toMatchObject({ waiting: 3, delayed: 3 });
        const when = async (job: number | undefined) => (await q.inspect(job as number))?.runAt;
        expect(await when(many[1]?.id)).toBe(far.getTime());
        const at = (
          await pool.query<{ now: number }>(
            "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::float8 AS now",
          )
        ).rows[0]?.now as number;
        for (const job of [id, many[3]?.id]) {
          expect(await when(job)).toBeLessThanOrEqual(at + half);
          expect(await when(job)).toBeGreaterThan(at);
        }
      } finally {
        clock.mockRestore();
      }
    });

    test("in a transaction of the caller's: there if it is committed, and not if it is rolled back", async () => {
      const q = queue<string>(hf, named());
      const seen: string[] = [];
      work(q, ({ payload }) => void seen.push(payload));
      const undone = new Error("undone");
      await expect(
        hf.transaction(async (tx) => {
          await q.enqueue("never", { tx });
          throw undone;
        }),
      ).rejects.toBe(undone);
      await hf.transaction(async (tx) => {
        await q.enqueueMany([{ payload: "a" }, { payload: "b" }], { tx });
        expect(seen).toEqual([]);
      });
      await eventually(() => seen.length === 2);
      expect(seen).toEqual(["a", "b"]);
    });

    test("a payload that does not fit the schema is refused when it is enqueued, and fails when it is worked on", async () => {
      const name = named();
      const schema = z.object({ to: z.email(), copies: z.number().default(1) });
      const q = queue(hf, name, { schema, retries: 0 });
      await expect(q.enqueue({ to: "nobody" })).rejects.toThrow(PayloadError);
      await expect(q.enqueue({ to: "nobody" })).rejects.toMatchObject({
        code: "HF_PAYLOAD",
        issues: [{ path: ["to"] }],
      });
      await queue<unknown>(hf, name, { retries: 0 }).enqueue({ to: 7 });
      await q.enqueue({ to: "ada@example.org" });
      const seen: number[] = [];
      work(q, ({ payload }) => void seen.push(payload.copies));
      await eventually(() => empty(q));
      expect(seen).toEqual([1]);
      expect(await q.failed()).toMatchObject([
        { payload: { to: 7 }, error: expect.stringContaining("PayloadError") },
      ]);
    });

    test("what cannot be a payload", async () => {
      const q = queue<unknown>(hf, named());
      await expect(q.enqueue(undefined)).rejects.toMatchObject({ code: "HF_USAGE" });
      await expect(q.enqueue("a\0b")).rejects.toMatchObject({ code: "HF_USAGE" });
      await expect(q.enqueue(1, { priority: 1e9 })).rejects.toMatchObject({ code: "HF_USAGE" });
      expect(() => queue(hf, "")).toThrow(/name/);
      expect(() => queue(hf, "x", { groups: { concurrency: 0 } })).toThrow(/groups.concurrency/);
    });
  });

  describe("keys", () => {
    test("one at a time of a key, from any number of callers", async () => {
      const q = queue<number>(hf, named());
      const answers = await Promise.all(Array.from({ length: 50 }, (_, n) => q.enqueue(n, { key: "only" })));
      expect(answers.filter(({ added }) => added).length).toBe(1);
      expect(new Set(answers.map(({ id }) => id)).size).toBe(1);
      const seen: number[] = [];
      work(q, ({ payload }) => void seen.push(payload));
      await eventually(() => empty(q));
      expect(seen.length).toBe(1);
      expect((await q.enqueue(99, { key: "only" })).added).toBe(true);
      await eventually(() => seen.length === 2);
    });

    test("replace: the one that waits is gone, whether it is due or not; one that runs goes on", async () => {
      const q = queue<string>(hf, named());
      await q.enqueue("old", { key: "k", delayMs: 60_000 });
      expect((await q.enqueue("newer", { key: "k", onDuplicate: "replace" })).added).toBe(true);
      expect((await q.enqueue("newest", { key: "k", onDuplicate: "replace" })).added).toBe(true);
      expect(await q.counts()).toMatchObject({ waiting: 1, delayed: 0 });
      const seen: string[] = [];
      const go = Promise.withResolvers<void>();
      work(q, async ({ payload }) => {
        seen.push(payload);
        if (payload === "newest") await go.promise;
      });
      await eventually(() => seen.length === 1);
      expect((await q.enqueue("meanwhile", { key: "k", onDuplicate: "replace" })).added).toBe(true);
      go.resolve();
      await eventually(() => empty(q));
      expect(seen).toEqual(["newest", "meanwhile"]);
    });
  });

  describe("failures", () => {
    test("it runs again, with one attempt more each time, and then it has failed", async () => {
      const q = queue<string>(hf, named(), { retries: 2, backoff: { baseMs: 1, jitter: 0 } });
      const attempts: number[] = [];
      work(q, ({ attempt }) => {
        attempts.push(attempt);
        throw new Error(`no ${attempt}`);
      });
      const { id } = await q.enqueue("x", { key: "k" });
      await eventually(async () => (await q.failed()).length === 1);
      expect(attempts).toEqual([1, 2, 3]);
      expect(await q.failed()).toMatchObject([
        { id, attempts: 3, payload: "x", key: "k", error: expect.stringContaining("no 3") },
      ]);
      // The key is free, and while another job has it the old one does not come back.
      await q.pause();
      expect((await q.enqueue("y", { key: "k" })).added).toBe(true);
      expect(await q.retry(id)).toBe(0);
      expect(await q.retry()).toBe(0);
      expect(await q.counts()).toMatchObject({ waiting: 1, failed: 1, paused: true });
      expect(await q.discard(id)).toBe(1);
      expect(await q.counts()).toMatchObject({ waiting: 1, failed: 0 });
      await q.resume();
      await eventually(async () => (await q.failed()).length === 1);
      expect(await q.prune({ olderThanMs: 60_000 })).toBe(0);
      const [real, hour] = [Date.now, 3_600_000];
      const clock = vi.spyOn(Date, "now").mockImplementation(() => real() + 2 * hour);
      try {
        expect(await q.prune({ olderThanMs: hour })).toBe(0);
      } finally {
        clock.mockRestore();
      }
      for (const wrong of [{}, { before: "2026-01-01" }, { before: new Date(NaN) }, { olderThanMs: NaN }])
        await expect(q.prune(wrong as never), JSON.stringify(wrong)).rejects.toMatchObject({
          code: "HF_USAGE",
        });
      expect(await q.prune({ before: new Date(Date.now() + 60_000) })).toBe(1);
    });

    test("the wait before it runs again is what the queue says, and none is never", async () => {
      const waits: number[] = [];
      const q = queue<string>(hf, named(), {
        backoff(failures, error) {
          waits.push(failures);
          return (error as Error).message === "for good" ? undefined : 1;
        },
      });
      work(q, ({ attempt }) => {
        throw new Error(attempt === 3 ? "for good" : "once more");
      });
      await q.enqueue("x");
      await eventually(async () => (await q.failed()).length === 1);
      expect(waits).toEqual([1, 2, 3]);
    });

    test("while it is paused nothing begins", async () => {
      const q = queue<number>(hf, named());
      await q.pause();
      let seen = 0;
      work(q, () => void seen++);
      await q.enqueueMany(Array.from({ length: 20 }, (_, payload) => ({ payload })));
      await new Promise((resolve) => setTimeout(resolve, 300));
      expect(seen).toBe(0);
      await q.resume();
      await eventually(() => seen === 20);
    });
  });

  describe("complete(tx)", () => {
    test("the handler's writes and the end of the job are one", async () => {
      const q = queue<number>(hf, named(), { backoff: { baseMs: 1 } });
      work(q, async (job) => {
        await hf.transaction(async (tx) => {
          await tx.client.query("INSERT INTO effect VALUES ($1, $2)", [job.id, job.payload]);
          await job.complete(tx);
          if (job.payload % 3 === 0 && job.attempt === 1) throw new Error("after it was completed");
        });
        if (job.payload % 5 === 0) throw new Error("after it was committed");
      });
      const jobs = await q.enqueueMany(Array.from({ length: 60 }, (_, payload) => ({ payload })));
      await eventually(() => empty(q));
      const { rows } = await pool.query("SELECT n FROM effect WHERE job = ANY($1) ORDER BY n", [
        jobs.map(({ id }) => id),
      ]);
      expect(rows.map(({ n }) => Number(n))).toEqual(Array.from({ length: 60 }, (_, n) => n));
      expect(await q.failed()).toEqual([]);
      const { rows: left } = await pool.query(
        "SELECT (SELECT count(*) FROM holdfast.queue_mark)::int AS marks, (SELECT count(*) FROM holdfast.queue_lease)::int AS leases",
      );
      expect(left).toEqual([{ marks: 0, leases: 0 }]);
    });

    test("a rollback that the handler keeps to itself is no end", async () => {
      const q = queue<number>(hf, named(), { retries: 1, backoff: { baseMs: 1 } });
      work(q, async (job) => {
        await hf
          .transaction(async (tx) => {
            await job.complete(tx);
            throw new Error("swallowed");
          })
          .catch(() => {});
      });
      await q.enqueue(1);
      await eventually(async () => (await q.failed()).length === 1);
      expect(await q.failed()).toMatchObject([
        { attempts: 2, error: expect.stringContaining("rolled back") },
      ]);
    });
  });

  describe("a worker that is given up for dead", () => {
    test("completes nothing, is told so, and goes on with other jobs", async () => {
      const q = queue<string>(hf, named(), { backoff: { baseMs: 1 } });
      const stuck = Promise.withResolvers<Job<string>>();
      const go = Promise.withResolvers<void>();
      const ends: unknown[] = [];
      work(
        q,
        async (job) => {
          if (job.attempt > 1) return;
          stuck.resolve(job);
          await go.promise;
          ends.push(
            await hf
              .transaction(async (tx) => {
                await tx.client.query("INSERT INTO effect VALUES ($1, -1)", [job.id]);
                await job.complete(tx);
              })
              .catch((error: unknown) => error),
          );
        },
        { concurrency: 1 },
      );
      await q.enqueue("x");
      const job = await stuck.promise;
      const { signal } = job;
      // As if its signs of life had not come through: the next one may come before anybody looks.
      await eventually(async () => {
        await pool.query("UPDATE holdfast.queue_worker SET beat = '-infinity'");
        return signal.aborted;
      });
      go.resolve();
      await eventually(() => ends.length === 1);
      expect(ends[0]).toBeInstanceOf(JobLostError);
      expect(signal.aborted).toBe(true);
      await eventually(() => empty(q));
      const { rows } = await pool.query("SELECT count(*)::int AS n FROM effect WHERE n = -1");
      expect(rows).toEqual([{ n: 0 }]);
    });
  });

  // A pooler that lends sessions out has none to lose.
  test.for(server === "postgres" ? ["of its own"] : [])(
    "a worker whose session %s is lost lets go at once",
    async () => {
      const q = queue<string>(hf, named(), { backoff: { baseMs: 1 } });
      const attempts: number[] = [];
      const begun = Promise.withResolvers<Job<string>>();
      work(
        q,
        (job) => {
          attempts.push(job.attempt);
          if (job.attempt > 1) return undefined;
          begun.resolve(job);
          return new Promise((_, reject) => {
            job.signal.addEventListener("abort", () => reject(job.signal.reason as Error));
          });
        },
        { onTrouble: () => {} },
      );
      await q.enqueue("x");
      const { signal } = await begun.promise;
      // The lock is taken in the background: a job may begin before it is had.
      await eventually(async () => {
        const { rows } = await pool.query(
          `SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN holdfast.queue_worker w ON l.locktype = 'advisory'
          AND ((l.classid::bigint << 32) | l.objid::bigint) = w.lock AND l.objsubid = 1
          JOIN holdfast.queue q ON q.id = w.queue
          WHERE q.name = $1 AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())`,
          [q.name],
        );
        return rows.length > 0;
      });
      await eventually(() => signal.aborted);
      await eventually(() => empty(q));
      expect(attempts).toEqual([1, 2]);
    },
  );

  describe("stopping", () => {
    test("what runs is finished, what has not begun is given back without an attempt", async () => {
      const q = queue<number>(hf, named());
      await q.enqueueMany(Array.from({ length: 40 }, (_, payload) => ({ payload })));
      const go = Promise.withResolvers<void>();
      const done: number[] = [];
      const worker = work(
        q,
        async ({ payload }) => {
          await go.promise;
          done.push(payload);
        },
        { concurrency: 4, batch: 20 },
      );
      await eventually(async () => (await q.counts()).running > 0);
      const stopping = worker.stop();
      await eventually(async () => (await q.counts()).running === 4);
      go.resolve();
      await stopping;
      expect(done).toEqual([0, 1, 2, 3]);
      expect(await q.counts()).toMatchObject({ waiting: 36, running: 0, workers: 0 });
      const attempts = new Set<number>();
      work(q, ({ attempt }) => void attempts.add(attempt));
      await eventually(() => empty(q));
      expect([...attempts]).toEqual([1]);
    });

    test("without patience, the handlers' signals abort", async () => {
      const q = queue<number>(hf, named());
      const { id } = await q.enqueue(1);
      const begun = Promise.withResolvers<void>();
      const worker = work(q, ({ signal }) => {
        begun.resolve();
        return new Promise((_, reject) =>
          signal.addEventListener("abort", () => reject(signal.reason as Error)),
        );
      });
      await begun.promise;
      await worker.stop({ patienceMs: 0 });
      // It was told to end, and did not fail: as if it had not begun.
      expect(await q.counts()).toMatchObject({ waiting: 1, delayed: 0, running: 0, workers: 0 });
      expect(await q.inspect(id)).toMatchObject({ failures: 0 });
    });
  });

  describe("transactional jobs", () => {
    test("each in a transaction of its own, with what its handler writes", async () => {
      const q = queue<number>(hf, named(), { retries: 1, backoff: { baseMs: 1 } });
      const jobs = await q.enqueueMany(
        Array.from({ length: 80 }, (_, payload) => ({ payload, key: `k${payload}` })),
      );
      const worker = q.work<PoolClient>(
        async (job, tx) => {
          await tx.client.query("INSERT INTO effect VALUES ($1, $2)", [job.id, job.payload]);
          if (job.payload % 10 === 0 && job.attempt === 1) throw new Error("once");
          if (job.payload === 7) throw new Error("always");
        },
        {
          transactional: true,
          concurrency: 6,
          pollMs: 50,
          onTrouble: (error) => {
            throw error;
          },
        },
      );
      workers.push(worker);
      await eventually(async () => (await empty(q)) && (await q.failed()).length === 1);
      const { rows } = await pool.query("SELECT n FROM effect WHERE job = ANY($1) ORDER BY n", [
        jobs.map(({ id }) => id),
      ]);
      expect(rows.map(({ n }) => Number(n))).toEqual(
        Array.from({ length: 80 }, (_, n) => n).filter((n) => n !== 7),
      );
      expect(await q.failed()).toMatchObject([{ payload: 7, attempts: 2 }]);
    });
  });

  describe("transactional jobs, several in one transaction", () => {
    test("one that cannot be committed fails alone", async () => {
      await pool.query(
        "CREATE TABLE one (n int, CONSTRAINT one_n UNIQUE (n) DEFERRABLE INITIALLY DEFERRED); INSERT INTO one VALUES (5)",
      );
      const q = queue<number>(hf, named(), { retries: 0 });
      await q.enqueueMany(Array.from({ length: 12 }, (_, payload) => ({ payload })));
      const worker = q.work<PoolClient>(
        async ({ payload }, tx) => {
          await tx.client.query("INSERT INTO one VALUES ($1)", [payload]);
        },
        { transactional: true, concurrency: 2, pollMs: 20, onTrouble: () => {} },
      );
      workers.push(worker);
      await eventually(async () => (await empty(q)) && (await q.failed()).length === 1);
      expect(await q.failed()).toMatchObject([{ payload: 5, error: expect.stringContaining("one_n") }]);
      const { rows } = await pool.query("SELECT count(*)::int AS n FROM one");
      expect(rows).toEqual([{ n: 12 }]);
    });
  });

  describe("limits", () => {
    /** How many ran at once, of each group and in all. */
    function watch() {
      const now = new Map<string, number>();
      const highest = new Map<string, number>();
      const order: string[] = [];
      const count = (name: string, by: number) => {
        now.set(name, (now.get(name) ?? 0) + by);
        highest.set(name, Math.max(highest.get(name) ?? 0, now.get(name) ?? 0));
      };
      const handler = async ({ group = "", payload }: Job<number>) => {
        order.push(`${group}${payload}`);
        for (const name of [group, "all"]) count(name, 1);
        await new Promise((resolve) => setTimeout(resolve, 2));
        for (const name of [group, "all"]) count(name, -1);
      };
      return { highest, order, handler };
    }

    test("of a group, from several workers", async () => {
      const q = queue<number>(hf, named(), { groups: { concurrency: 2 } });
      await q.enqueueMany(
        Array.from({ length: 120 }, (_, payload) => ({ payload, group: "abc"[payload % 3] as string })),
      );
      const { highest, handler } = watch();
      for (let i = 0; i < 3; i++) work(q, handler, { concurrency: 8 });
      await eventually(() => empty(q));
      expect(["a", "b", "c"].map((group) => highest.get(group))).toEqual([2, 2, 2]);
      const { rows } = await pool.query(
        "SELECT coalesce(sum(running), 0)::int AS n FROM holdfast.queue_group g JOIN holdfast.queue q ON q.id = g.queue WHERE q.name = $1",
        [q.name],
      );
      expect(rows).toEqual([{ n: 0 }]);
    });

    test("of a queue, in all processes together", async () => {
      const q = queue<number>(hf, named(), { concurrency: 3 });
      await q.enqueueMany(Array.from({ length: 60 }, (_, payload) => ({ payload })));
      const { highest, handler } = watch();
      for (let i = 0; i < 3; i++) work(q, handler, { concurrency: 8 });
      await eventually(() => empty(q));
      expect(highest.get("all")).toBeLessThanOrEqual(3);
    });

    test("serial groups: one at a time, in order, also over a failure", async () => {
      const q = queue<number>(hf, named(), { groups: { serial: true }, backoff: { baseMs: 30 } });
      await q.enqueueMany(
        Array.from({ length: 60 }, (_, payload) => ({ payload, group: "ab"[payload % 2] as string })),
      );
      const { highest, order, handler } = watch();
      const ended: string[] = [];
      for (let i = 0; i < 3; i++)
        work(q, async (job) => {
          await handler(job);
          if (job.payload % 10 === 4 && job.attempt === 1) throw new Error("once");
          ended.push(`${job.group}${job.payload}`);
        });
      await eventually(() => empty(q));
      for (const [group, first] of [
        ["a", 0],
        ["b", 1],
      ] as const) {
        expect(highest.get(group)).toBe(1);
        expect(ended.filter((each) => each.startsWith(group))).toEqual(
          Array.from({ length: 30 }, (_, i) => `${group}${first + 2 * i}`),
        );
      }
      expect(order.length).toBe(66);
    });

    test("a rate for each group", async () => {
      const q = queue<number>(hf, named(), { groups: { rate: { limit: 5, perMs: 400 } } });
      await q.enqueueMany(
        Array.from({ length: 30 }, (_, payload) => ({ payload, group: "ab"[payload % 2] as string })),
      );
      const starts: { group: string; at: number }[] = [];
      work(q, ({ group = "" }) => void starts.push({ group, at: performance.now() }), { pollMs: 20 });
      await eventually(() => empty(q));
      const windows = await pool.query(
        "SELECT grp, started::int FROM holdfast.queue_group g JOIN holdfast.queue q ON q.id = g.queue WHERE q.name = $1 AND started > 5",
        [q.name],
      );
      expect(windows.rows).toEqual([]);
      for (const group of ["a", "b"]) {
        const times = starts.filter((each) => each.group === group).map(({ at }) => at);
        expect(times.length).toBe(15);
        // Three windows: the sixth cannot have come in the first, nor the eleventh in the second.
        expect((times[10] as number) - (times[0] as number)).toBeGreaterThan(400);
      }
    });

    test("one tenant's many jobs do not hold up another's few", async () => {
      const q = queue<number>(hf, named());
      await q.enqueueMany(Array.from({ length: 3000 }, (_, payload) => ({ payload, group: "big" })));
      await q.enqueueMany(Array.from({ length: 3 }, (_, payload) => ({ payload, group: "small" })));
      const order: string[] = [];
      work(q, ({ group = "" }) => void order.push(group), { concurrency: 5, batch: 50 });
      await eventually(() => empty(q));
      expect(order.length).toBe(3003);
      expect(order.lastIndexOf("small")).toBeLessThan(200);
    });
  });

  test("groups and jobs of no group have their turns, also one at a time", async () => {
    const q = queue<number>(hf, named());
    await q.enqueueMany(Array.from({ length: 300 }, (_, payload) => ({ payload, group: `g${payload % 7}` })));
    await q.enqueueMany(Array.from({ length: 5 }, (_, payload) => ({ payload })));
    const order: (string | undefined)[] = [];
    work(q, ({ group }) => void order.push(group), { concurrency: 1, batch: 1 });
    await eventually(() => empty(q));
    expect(order.length).toBe(305);
    expect(order.lastIndexOf(undefined)).toBeLessThan(150);
  });

  test("groups that have no jobs leave nothing behind", async () => {
    const q = queue<number>(hf, named(), { groups: { rate: { limit: 50, perMs: 50 } } });
    await q.enqueueMany(
      Array.from({ length: 300 }, (_, payload) => ({ payload, group: `g${payload % 100}` })),
    );
    work(q, () => {}, { pollMs: 20 });
    await eventually(async () => {
      const { rows } = await pool.query(
        "SELECT count(*)::int AS n FROM holdfast.queue_group g JOIN holdfast.queue q ON q.id = g.queue WHERE q.name = $1",
        [q.name],
      );
      return rows[0].n === 0 && (await empty(q));
    });
  });

  test("groups that are new in transactions of two callers do not wait for each other", async () => {
    const q = queue<number>(hf, named());
    const both = Promise.withResolvers<void>();
    let arrived = 0;
    const add = (groups: readonly string[]) =>
      hf.transaction({ retry: false }, async (tx) => {
        await q.enqueue(1, { tx, group: groups[0] as string });
        if (++arrived === 2) both.resolve();
        await both.promise;
        await q.enqueue(2, { tx, group: groups[1] as string });
      });
    await Promise.all([add(["a", "b"]), add(["b", "a"])]);
    const seen: string[] = [];
    work(q, ({ group = "" }) => void seen.push(group));
    await eventually(() => empty(q));
    expect(seen.toSorted()).toEqual(["a", "a", "b", "b"]);
  });

  test("where a job is", async () => {
    const q = queue<string>(hf, named(), { retries: 0 });
    const later = await q.enqueue("later", { delayMs: 60_000, key: "k" });
    const { id } = await q.enqueue("now", { priority: 3, group: "g" });
    expect(await q.inspect(later.id)).toMatchObject({
      state: "delayed",
      payload: "later",
      key: "k",
      failures: 0,
    });
    expect(await q.inspect(id)).toMatchObject({ state: "waiting", group: "g", priority: 3 });
    const go = Promise.withResolvers<void>();
    work(q, () => go.promise);
    await eventually(async () => (await q.inspect(id))?.state === "running");
    expect(await q.inspect(id)).toMatchObject({
      payload: "now",
      group: "g",
      worker: expect.stringContaining(`${process.pid}`),
    });
    go.reject(new Error("no"));
    await eventually(async () => (await q.inspect(id))?.state === "failed");
    expect(await q.inspect(id)).toMatchObject({ failures: 1, error: expect.stringContaining("no") });
    expect(await q.inspect(9e9)).toBeUndefined();
    await q.discard(later.id);
  });

  test("everybody at once, with the same keys and groups: the server finds no deadlock", async () => {
    const seed = inject("seed");
    const next = random(seed);
    const pick = <T>(items: readonly T[]) => items[Math.floor(next() * items.length)] as T;
    const name = named();
    const names = Array.from({ length: 12 }, (_, i) => `n${i}`);
    // By the server's own count: a call that is run again would hide it.
    const deadlocks = async () => {
      const { rows } = await pool.query(
        "SELECT deadlocks::int AS n FROM pg_stat_database WHERE datname = current_database()",
      );
      return (rows[0] as { n: number }).n;
    };
    const before = await deadlocks();
    // Each with an instance of its own, as in processes of their own: calls of one instance go together.
    const instances = Array.from({ length: 4 }, () => holdfast(fromPg(pool)));
    const queues = instances.map((each) =>
      queue<number>(each, name, { retries: 2, backoff: { baseMs: 1 }, groups: { concurrency: 3 } }),
    );
    for (const q of queues)
      work(
        q,
        async ({ payload }) => {
          if (payload % 4 === 0) throw new Error("not this time");
        },
        { concurrency: 6, batch: 20 },
      );
    await Promise.all(
      queues.map(async (q) => {
        for (let round = 0; round < 60; round++) {
          const jobs = Array.from({ length: 1 + Math.floor(next() * 12) }, () => ({
            payload: Math.floor(next() * 1000),
            ...(next() < 0.7 && { key: pick(names), onDuplicate: pick(["replace", "ignore"] as const) }),
            ...(next() < 0.7 && { group: pick(names) }),
            ...(next() < 0.3 && { delayMs: next() * 20 }),
          }));
          const added = await q.enqueueMany(jobs);
          if (next() < 0.2) await q.discard(added.map(({ id }) => id).toReversed());
          if (next() < 0.2) await q.retry();
        }
      }),
    );
    await eventually(() => empty(queues[0] as Queue<number>));
    await Promise.all(workers.splice(0).map((worker) => worker.stop()));
    await Promise.all(instances.map((each) => each.close()));
    // Counters of a session are written when it is idle, at most once a second.
    await new Promise((resolve) => setTimeout(resolve, 1500));
    expect(await deadlocks(), `HOLDFAST_SEED=${seed}`).toBe(before);
  });

  describe("random settings and jobs, three instances, paused now and then", () => {
    test.for(["limits", "serial"] as const)(
      "%s hold, each key at most once, each job to its end",
      async (kind) => {
        const seed = inject("seed");
        const next = random(seed);
        const from = (least: number, most: number) => least + Math.floor(next() * (most - least + 1));
        const pick = <T>(items: readonly T[]) => items[Math.floor(next() * items.length)] as T;
        const serial = kind === "serial";
        const most = next() < 0.5 ? from(3, 8) : undefined;
        const groupMost = serial ? 1 : from(1, 3);
        const againMs = from(1, 40);
        const retries = from(1, 3);
        const name = named();
        const settings = {
          retries,
          backoff: { baseMs: againMs, factor: 1, jitter: 0 },
          groups: serial ? { serial } : { concurrency: groupMost },
          ...(most !== undefined && { concurrency: most }),
        };
        const say = `HOLDFAST_SEED=${seed} ${JSON.stringify(settings)}`;
        const instances = Array.from({ length: 3 }, () => holdfast(fromPg(pool)));
        const queues = instances.map((each) => queue<number>(each, name, settings));
        const [q] = queues as [Queue<number>];

        const wrong: string[] = [];
        const running = new Map<string, number>();
        const count = (what: string, limit: number, by: number) => {
          const n = (running.get(what) ?? 0) + by;
          running.set(what, n);
          if (n > limit) wrong.push(`${n} of ${what} at once, ${limit} at the most`);
        };
        const failedAt = new Map<number, number>();
        const attempts = new Map<number, number>();
        const ended = new Set<number>();
        /** In the order in which they ended, for good or ill. */
        const byGroup = new Map<string, number[]>();
        const failing = new Map<number, number>();
        const handler = async (job: Job<number>) => {
          const limits: [what: string, limit: number][] = [["the queue", most ?? Infinity]];
          if (job.key !== undefined) limits.push([`key ${job.key}`, 1]);
          if (job.group !== undefined) limits.push([`group ${job.group}`, groupMost]);
          for (const [what, limit] of limits) count(what, limit, 1);
          const tried = (attempts.get(job.payload) ?? 0) + 1;
          attempts.set(job.payload, tried);
          if (tried !== job.attempt)
            wrong.push(`${job.payload} runs for the ${tried}. time as attempt ${job.attempt}`);
          const waited = performance.now() - (failedAt.get(job.payload) ?? -Infinity);
          // Of two clocks: timers may be a millisecond early.
          if (waited < againMs - 2)
            wrong.push(`${job.payload} runs again after ${waited} ms, not ${againMs}`);
          await new Promise((resolve) => setTimeout(resolve, next() * 4));
          for (const [what, limit] of limits) count(what, limit, -1);
          const fails = job.attempt <= (failing.get(job.payload) ?? 0);
          if (fails) failedAt.set(job.payload, performance.now());
          if (!fails || job.attempt > retries) {
            if (ended.has(job.payload)) wrong.push(`${job.payload} has ended twice`);
            ended.add(job.payload);
            if (job.group !== undefined)
              byGroup.set(job.group, [...(byGroup.get(job.group) ?? []), job.payload]);
          }
          if (fails) throw new Error("not yet");
        };
        for (const each of queues)
          work(each, handler, { concurrency: from(2, 8), batch: pick([5, 30, 200]) });

        const added = new Set<number>();
        let pauses = 0;
        for (let payload = 0; payload < 300; payload++) {
          if (next() < 0.15) failing.set(payload, from(1, retries + 1));
          const options = {
            ...(next() < 0.3 && { key: pick(["k1", "k2", "k3", "k4"]) }),
            ...(next() < 0.6 && { group: pick(["a", "b", "c"]) }),
            // What comes later, or first, has no place in an order.
            ...(!serial && next() < 0.2 && { delayMs: next() * 50 }),
            ...(!serial && next() < 0.3 && { priority: pick([-1, 1, 2]) }),
          };
          const { added: there } = await pick(queues).enqueue(payload, options);
          if (there) added.add(payload);
          if (next() < 0.01) {
            pauses++;
            await q.pause();
            // What was claimed before has ended: from then on nothing begins.
            await eventually(async () => (await q.counts()).running === 0);
            const before = [...attempts.values()].reduce((sum, n) => sum + n, 0);
            await q.enqueue(1000 + payload);
            added.add(1000 + payload);
            await new Promise((resolve) => setTimeout(resolve, 100));
            const after = [...attempts.values()].reduce((sum, n) => sum + n, 0);
            if (after !== before) wrong.push(`${after - before} began while it was paused`);
            await q.resume();
          }
        }
        await eventually(() => empty(q));
        await Promise.all(workers.splice(0).map((worker) => worker.stop()));
        expect(wrong, say).toEqual([]);
        const sorted = (numbers: Iterable<number>) => [...numbers].toSorted((a, b) => a - b);
        expect(sorted(ended), say).toEqual(sorted(added));
        if (serial) for (const order of byGroup.values()) expect(order, say).toEqual(sorted(order));
        const failed = await q.failed({ limit: 1000 });
        expect(sorted(failed.map(({ payload }) => payload as number)), say).toEqual(
          sorted(
            [...failing].flatMap(([payload, times]) =>
              times > retries && added.has(payload) ? [payload] : [],
            ),
          ),
        );
        expect(pauses, say).toBeLessThan(20);
        await Promise.all(instances.map((each) => each.close()));
      },
    );
  });
});
