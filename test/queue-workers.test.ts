/** Workers of queues among many, with few connections, and with handlers that do what handlers do. */
import { setTimeout as sleep } from "node:timers/promises";
import { startPostgres } from "@holdfast/cli";
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { type Queue, type QueueOptions, type WorkOptions, type Worker, queue } from "holdfast/queue";
import { Client, Pool, type PoolClient } from "pg";
import postgres from "postgres";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { lossyPool } from "./harness/lossy.ts";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";

const why = unavailable("postgres");
let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  if (why !== undefined) return;
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 20 });
  pool.on("error", () => {});
  hf = holdfast(fromPg(pool));
  await hf.migrate();
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
const named = () => `workers ${++made}`;
const upTo = (n: number) => Array.from({ length: n }, (_, i) => i);
const quiet = { onTrouble: () => {} };

async function empty(of: Pick<Queue<never>, "counts">): Promise<boolean> {
  const { waiting, delayed, running } = await of.counts();
  return waiting + delayed + running === 0;
}

/** A client with so many connections, and what ends it. */
function clientOf(kind: "pg" | "postgres.js", url: string, max: number) {
  if (kind === "pg") {
    const small = new Pool({ connectionString: url, max });
    small.on("error", () => {});
    return { hf: holdfast(fromPg(small)), end: () => small.end() };
  }
  const small = postgres(url, { max, onnotice: () => {} });
  // Without a time, postgres.js 3.4 waits for ever for a connection that was ended in the middle of a statement.
  return { hf: holdfast(fromPostgres(small)), end: () => small.end({ timeout: 5 }) };
}

describe("many queues on few connections, started at the same moment", () => {
  const crowds = [
    ["pg", 20, 10],
    ["pg", 10, 10],
    ["pg", 5, 2],
    ["pg", 1, 1],
    ["postgres.js", 20, 10],
    ["postgres.js", 12, 12],
    ["postgres.js", 5, 2],
    ["postgres.js", 1, 1],
  ] as const;

  /** Every queue works: now, after all its sessions were ended, and after whatever else is done to it. */
  async function works(
    url: string,
    [kind, count, max]: (typeof crowds)[number],
    transactional: boolean,
    upset: readonly (() => Promise<unknown>)[],
  ): Promise<void> {
    const { hf: mine, end } = clientOf(kind, url, max);
    const producer = new Pool({ connectionString: url, max: 2 });
    producer.on("error", () => {});
    const theirs = holdfast(fromPg(producer));
    const names = upTo(count).map(named);
    const seen = new Map<string, number>();
    // A call that was under way when the server ended it is made again: each job has a key.
    const enqueue = async (name: string, round: number) =>
      eventually(() =>
        queue<number>(theirs, name)
          .enqueue(round, { key: `round ${round}` })
          .then(() => true),
      );
    try {
      const started = names.map((name) => {
        const q = queue<number>(mine, name, { backoff: { baseMs: 10 } });
        const done = ({ payload }: { payload: number }) =>
          void seen.set(name, Math.max(seen.get(name) ?? -1, payload));
        return transactional
          ? q.work(done, { transactional, concurrency: 1, ...quiet })
          : q.work(done, quiet);
      });
      for (const [round, disturb] of [async () => {}, ...upset].entries()) {
        await disturb();
        for (const name of names) await enqueue(name, round);
        // What was on its way when the sessions were ended may take until the worker's time is over.
        await eventually(() => expect(names.filter((name) => seen.get(name) !== round)).toEqual([]), {
          timeout: 60_000,
        });
      }
      await Promise.all(started.map((worker) => worker.stop({ patienceMs: 0 })));
    } finally {
      await mine.close();
      await end();
      await theirs.close();
      await producer.end();
    }
  }

  const endSessions = async () => {
    const admin = new Client({ connectionString: database.url });
    await admin.connect();
    await admin.query(
      "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    );
    await admin.end();
  };

  test.for(crowds)("%s: %i queues on %i connections", async (crowd) => {
    await works(database.url, crowd, false, [endSessions, endSessions]);
  });

  test.for([crowds[1], crowds[2], crowds[3]])(
    "%s: %i transactional queues on %i connections",
    async (crowd) => {
      await works(database.url, crowd, true, [endSessions]);
    },
  );

  test("and the server restarts", async () => {
    const server = await startPostgres({ settings: { fsync: "off" } });
    try {
      const first = new Pool({ connectionString: server.url(), max: 1 });
      await holdfast(fromPg(first)).migrate();
      await first.end();
      const restarts = [() => server.restart("fast"), () => server.restart("immediate")];
      for (const crowd of [crowds[0], crowds[2], crowds[3]])
        await works(server.url(), crowd, false, restarts);
    } finally {
      await server.stop();
    }
  });
});

test.for(["plain", "transactional"] as const)(
  "%s: ten idle queues ask twice a second at the most",
  async (mode) => {
    const lossy = lossyPool(database.url, 20);
    const mine = holdfast(fromPg(lossy.pool));
    const seen: number[] = [];
    const queues = upTo(10).map(() => queue<number>(mine, named()));
    for (const q of queues) {
      const done = ({ payload }: { payload: number }) => void seen.push(payload);
      workers.push(mode === "plain" ? q.work(done, quiet) : q.work(done, { transactional: true, ...quiet }));
    }
    try {
      for (const q of queues) await q.enqueue(1);
      await eventually(() => seen.length === 10);
      // Until the last of them has found that there is nothing more.
      await eventually(async () => {
        const before = lossy.count(/./);
        await sleep(1000);
        return lossy.count(/./) - before <= 3;
      });
      const before = lossy.count(/./);
      const from = performance.now();
      await sleep(6000);
      // On a busy machine it is longer than that.
      const seconds = (performance.now() - from) / 1000;
      expect(lossy.count(/./) - before).toBeLessThanOrEqual(Math.ceil(2 * seconds));
      // And they still hear.
      for (const q of queues) await queue<number>(hf, q.name).enqueue(2);
      await eventually(() => seen.length === 20);
    } finally {
      await mine.close();
      await lossy.pool.end();
    }
  },
);

describe("a transactional job that fails", () => {
  /** One bad job and ten good ones behind it. */
  async function among(
    handler: (attempt: number, tx: { client: PoolClient }) => Promise<unknown>,
    options: QueueOptions<string, string> = {},
  ): Promise<{ q: Queue<string>; good: number; attempts: number[] }> {
    const q = queue<string>(hf, named(), { retries: 2, backoff: { baseMs: 20, jitter: 0 }, ...options });
    await q.enqueue("bad");
    await q.enqueueMany(upTo(10).map(() => ({ payload: "good" })));
    const attempts: number[] = [];
    let good = 0;
    workers.push(
      q.work<PoolClient>(
        async ({ payload, attempt }, tx) => {
          if (payload === "good") return void good++;
          attempts.push(attempt);
          await handler(attempt, tx);
        },
        { transactional: true, concurrency: 1, ...quiet },
      ),
    );
    // A job that is refused again and again is tried alone after 21 s of pauses.
    await eventually(async () => (await q.failed()).length === 1 && (await empty(q)), { timeout: 100_000 });
    return { q, good, attempts };
  }

  test("with the socket error of its own fetch: it has failed, and the others have run", async () => {
    const { q, attempts, good } = await among(() => fetch("http://127.0.0.1:59321/"));
    expect(attempts).toEqual([1, 2, 3]);
    expect(good).toBe(10);
    expect(await q.failed()).toMatchObject([
      { payload: "bad", error: expect.stringContaining("fetch failed") },
    ]);
  });

  test.for(["ECONNRESET", "ECONNREFUSED", "EPIPE", "ETIMEDOUT"])(
    "with %s of somebody else's",
    async (code) => {
      const { attempts } = await among(() => Promise.reject(Object.assign(new Error(code), { code })));
      expect(attempts).toEqual([1, 2, 3]);
    },
  );

  test("with the loss of another database's connection", async () => {
    const { attempts } = await among(async () => {
      const other = new Client({ connectionString: database.url });
      other.on("error", () => {});
      await other.connect();
      try {
        await other.query("SELECT pg_terminate_backend(pg_backend_pid())");
      } finally {
        await other.end().catch(() => {});
      }
    });
    expect(attempts).toEqual([1, 2, 3]);
  });

  test("with the serialization failure of another database, again and again", async () => {
    const { attempts } = await among(() =>
      Promise.reject(Object.assign(new Error("could not serialize access"), { code: "40001" })),
    );
    expect(new Set(attempts)).toEqual(new Set([1, 2, 3]));
  });

  test("by ending its own connection, each time", async () => {
    const { q } = await among((_, tx) => tx.client.query("SELECT pg_terminate_backend(pg_backend_pid())"), {
      retries: 0,
    });
    expect((await q.failed()).map(({ payload }) => payload)).toEqual(["bad"]);
  });
});

test("workers of serializable instances refuse each other, which is no job's fault", async () => {
  const two = [0, 1].map(() => holdfast(fromPg(pool), { isolation: "serializable" }));
  const name = named();
  const queues = two.map((each) => queue<number>(each, name, { retries: 0 }));
  const [q] = queues as [Queue<number>];
  await q.enqueueMany(upTo(300).map((payload) => ({ payload, ...(payload % 3 === 0 && { group: "g" }) })));
  const troubles: unknown[] = [];
  const onTrouble = (error: unknown) => void troubles.push(error);
  for (const each of queues)
    workers.push(each.work(() => {}, { transactional: true, concurrency: 6, onTrouble }));
  await eventually(() => empty(q));
  expect(troubles).toEqual([]);
  expect(await q.failed()).toEqual([]);
  await Promise.all(workers.splice(0).map((worker) => worker.stop()));
  await Promise.all(two.map((each) => each.close()));
});

describe("groups of transactional jobs", () => {
  test("one tenant's many jobs do not hold up another's one", async () => {
    const q = queue<string>(hf, named());
    await q.enqueueMany(upTo(1500).map(() => ({ payload: "large", group: "large" })));
    await q.enqueue("small", { group: "small" });
    const order: string[] = [];
    workers.push(
      q.work(({ payload }) => void order.push(payload), { transactional: true, concurrency: 1, ...quiet }),
    );
    await eventually(() => order.includes("small"));
    expect(order.indexOf("small")).toBeLessThan(100);
  });

  test("smaller priorities come first, in whatever group they are", async () => {
    const q = queue<number>(hf, named());
    await q.enqueueMany(
      [5, 3, 1, 4, 2].map((priority) => ({ payload: priority, priority, group: `g${9 - priority}` })),
    );
    const order: number[] = [];
    workers.push(
      q.work(({ payload }) => void order.push(payload), { transactional: true, concurrency: 1, ...quiet }),
    );
    await eventually(() => order.length === 5);
    expect(order).toEqual([1, 2, 3, 4, 5]);
  });

  test("groups that have no jobs leave nothing behind", async () => {
    const q = queue<number>(hf, named());
    await q.enqueueMany(upTo(50).map((payload) => ({ payload, group: `g${payload % 7}` })));
    workers.push(q.work(() => {}, { transactional: true, pollMs: 50, ...quiet }));
    await eventually(() => empty(q));
    await eventually(async () => {
      const { rows } = await pool.query(
        "SELECT count(*)::int AS n FROM holdfast.queue_group g JOIN holdfast.queue q ON q.id = g.queue WHERE q.name = $1",
        [q.name],
      );
      return rows[0].n === 0;
    });
  });
});

describe("a serial group that waits for its first job to run again", () => {
  const serial = { groups: { serial: true }, retries: 5, backoff: { baseMs: 3_600_000 } } as const;

  async function waiting(): Promise<{ q: Queue<string>; id: number; ran: string[] }> {
    const q = queue<string>(hf, named(), serial);
    const { id } = await q.enqueue("first", { group: "g", key: "k" });
    await q.enqueue("second", { group: "g" });
    const ran: string[] = [];
    workers.push(
      q.work(({ payload }) => {
        ran.push(payload);
        if (payload === "first") throw new Error("no");
      }, quiet),
    );
    await eventually(async () => (await q.inspect(id))?.failures === 1);
    return { q, id, ran };
  }

  test("says so, and when", async () => {
    const { q, id } = await waiting();
    const { state, runAt = 0 } = (await q.inspect(id)) ?? {};
    expect(state).toBe("delayed");
    expect(runAt).toBeGreaterThan(Date.now() + 1_800_000);
  });

  test("goes on when that was discarded", async () => {
    const { q, id, ran } = await waiting();
    expect(ran).toEqual(["first"]);
    await q.discard(id);
    await eventually(() => expect(ran).toEqual(["first", "second"]));
  });

  test("goes on when that was replaced", async () => {
    const { q, ran } = await waiting();
    await q.enqueue("third", { group: "g", key: "k", onDuplicate: "replace" });
    await eventually(() => expect(ran).toEqual(["first", "second", "third"]));
  });

  test("and goes on waiting if another one was discarded", async () => {
    const { q, ran } = await waiting();
    const { id } = await q.enqueue("third", { group: "g" });
    await q.discard(id);
    await sleep(300);
    expect(ran).toEqual(["first"]);
  });
});

describe("payloads", () => {
  test("of more than a mebibyte are refused, and so are too many of them at once", async () => {
    const q = queue<string>(hf, named());
    await expect(q.enqueue("x".repeat(1024 * 1024))).rejects.toMatchObject({
      code: "HF_USAGE",
      message: expect.stringMatching(/1048578 bytes.*1048576 are the most/),
    });
    await expect(q.enqueue("€".repeat(400_000))).rejects.toMatchObject({ code: "HF_USAGE" });
    await q.enqueue("€".repeat(340_000));
    const large = "x".repeat(1024 * 1024 - 2);
    await expect(q.enqueueMany(upTo(65).map(() => ({ payload: large })))).rejects.toMatchObject({
      code: "HF_USAGE",
      message: expect.stringContaining("several calls"),
    });
  });

  test("that are too large together are claimed in smaller batches", async () => {
    const q = queue<string>(hf, named());
    const large = "x".repeat(1024 * 1024 - 2);
    // As when others were short before: it asks for all of them.
    for (const _ of upTo(2)) await q.enqueueMany(upTo(40).map(() => ({ payload: large })));
    let done = 0;
    workers.push(q.work(() => void done++, { concurrency: 100, ...quiet }));
    await eventually(() => done === 80);
    await eventually(() => empty(q));
  });

  test("a claim that fails, whatever the cause, is not made again at the same size for ever", async () => {
    const lossy = lossyPool(database.url, 10);
    const mine = holdfast(fromPg(lossy.pool));
    const q = queue<number>(mine, named());
    await queue<number>(hf, q.name).enqueueMany(upTo(40).map((payload) => ({ payload })));
    const asked: number[] = [];
    lossy.pool.on("connect", (client) => {
      const send = client.query.bind(client) as (...args: unknown[]) => Promise<unknown>;
      client.query = ((...args: unknown[]) => {
        const { text = "", values = [] } = args[0] as { text?: string; values?: unknown[] };
        if (text.includes("queue_claim_jobs")) {
          asked.push(Number(values[2]));
          if (Number(values[2]) > 5) return Promise.reject(new Error("more than I can take"));
        }
        return send(...args);
      }) as never;
    });
    const seen: number[] = [];
    workers.push(q.work(({ payload }) => void seen.push(payload), { concurrency: 40, ...quiet }));
    try {
      await eventually(() => seen.length === 40);
      expect(asked[0]).toBe(40);
    } finally {
      await mine.close();
      await lossy.pool.end();
    }
  });
});

describe("much to do at once", () => {
  async function failed(count: number): Promise<Queue<number>> {
    const q = queue<number>(hf, named());
    await q.resume();
    await pool.query(
      `INSERT INTO holdfast.queue_failed (queue, id, priority, attempt, at, failed_at, payload, error)
        SELECT q.id, nextval('holdfast.queue_job_id'), 0, 1, now(), now() - interval '1 hour', n::text, 'no'
        FROM holdfast.queue q, generate_series(1, $2) n WHERE q.name = $1`,
      [q.name, count],
    );
    return q;
  }

  test("retry, prune and discard go on in steps, and say how far they are", async () => {
    const q = await failed(3500);
    const told: number[] = [];
    expect(await q.retry(undefined, { onProgress: (done) => told.push(done) })).toBe(3500);
    expect(told).toEqual([1000, 2000, 3000, 3500]);
    expect(await q.counts()).toMatchObject({ waiting: 3500, failed: 0 });
    const { rows } = await pool.query<{ id: string }>(
      "SELECT r.id FROM holdfast.queue_ready r JOIN holdfast.queue q ON q.id = r.queue WHERE q.name = $1",
      [q.name],
    );
    told.length = 0;
    const ids = rows.map(({ id }) => Number(id));
    expect(await q.discard(ids, { onProgress: (done) => told.push(done) })).toBe(3500);
    expect(told).toEqual([1000, 2000, 3000, 3500]);
    const old = await failed(2500);
    told.length = 0;
    expect(await old.prune({ olderThanMs: 60_000, onProgress: (done) => told.push(done) })).toBe(2500);
    expect(told).toEqual([1000, 2000, 2500]);
  });

  test("and end where they are told to", async () => {
    const q = await failed(2500);
    const stop = new AbortController();
    await expect(
      q.retry(undefined, { signal: stop.signal, onProgress: () => stop.abort() }),
    ).rejects.toMatchObject({
      name: "AbortError",
    });
    expect(await q.counts()).toMatchObject({ waiting: 1000, failed: 1500 });
  });

  test("while somebody holds up a step, the call says so with a code", async () => {
    const q = await failed(10);
    const blocker = await pool.connect();
    try {
      await blocker.query("BEGIN; LOCK TABLE holdfast.queue_failed IN ACCESS EXCLUSIVE MODE");
      await expect(q.retry()).rejects.toMatchObject({ code: expect.stringMatching(/^HF_/) });
    } finally {
      await blocker.query("ROLLBACK");
      blocker.release();
    }
    // What was given up was given up on the server too.
    await eventually(async () => (await q.counts()).failed === 10);
    expect(await q.retry()).toBe(10);
  });
});

test("a queue with a limit goes on as soon as there is room, also in other processes", async () => {
  const name = named();
  const other = new Pool({ connectionString: database.url, max: 5 });
  const theirs = holdfast(fromPg(other));
  let running = 0;
  let most = 0;
  let done = 0;
  const handler = async () => {
    most = Math.max(most, ++running);
    await sleep(1);
    running--;
    done++;
  };
  // Looked for every second, as by one who has not heard that there is room, they would take a quarter of an hour.
  await queue<number>(hf, name).enqueueMany(upTo(1000).map((payload) => ({ payload })));
  const both = [hf, theirs].map((each) => queue<number>(each, name, { concurrency: 1 }).work(handler, quiet));
  workers.push(...both);
  try {
    await eventually(() => done === 1000, { timeout: 100_000 });
    expect(most).toBe(1);
  } finally {
    await Promise.all(both.map((worker) => worker.stop()));
    await theirs.close();
    await other.end();
  }
});

test("a worker whose process is gone is not counted, though nobody is there to find it", async () => {
  const q = queue<number>(hf, named());
  await pool.query("CREATE TABLE IF NOT EXISTS effect (job bigint, pid int)");
  await q.enqueue(1);
  const one = startWorker(new URL("./workers/queue-worker.ts", import.meta.url), {
    url: database.url,
    queue: q.name,
    concurrency: 1,
    ttlMs: 600_000,
    jobMs: 600_000,
    how: "complete",
  });
  try {
    await eventually(async () =>
      expect(await q.counts()).toMatchObject({ running: 1, workers: 1, waiting: 0 }),
    );
    // By its session, as soon as that is known; the time of its signs of life is not over.
    await eventually(async () => {
      const { rows } = await pool.query(
        "SELECT FROM holdfast.queue_worker w JOIN holdfast.queue q ON q.id = w.queue WHERE q.name = $1 AND w.lock IS NOT NULL",
        [q.name],
      );
      return rows.length === 1;
    });
    one.sigkill();
    await one.exited;
    await eventually(async () =>
      expect(await q.counts()).toMatchObject({ running: 0, workers: 0, waiting: 1 }),
    );
    // And by time alone.
    await pool.query("UPDATE holdfast.queue_worker SET lock = NULL");
    expect(await q.counts()).toMatchObject({ running: 1, workers: 1 });
    await pool.query("UPDATE holdfast.queue_worker SET beat = beat - interval '1 hour'");
    expect(await q.counts()).toMatchObject({ running: 0, workers: 0, waiting: 1 });
  } finally {
    one.sigkill();
  }
});

test.for(["plain", "transactional"] as const)(
  "%s: a worker that is stopped at once leaves no timers",
  async (mode) => {
    const small = new Pool({ connectionString: database.url, max: 3 });
    const mine = holdfast(fromPg(small));
    const q = queue<number>(mine, named());
    const timers = () => process.getActiveResourcesInfo().filter((what) => what === "Timeout").length;
    const before = timers();
    const options: WorkOptions = quiet;
    const worker =
      mode === "plain" ? q.work(() => {}, options) : q.work(() => {}, { ...options, transactional: true });
    await q.enqueue(1);
    await worker.stop();
    await small.end();
    // Those of the pool, and of whoever was just asked.
    await eventually(() => timers() <= before, { timeout: 900 });
  },
);
