/** Queues when answers are lost, when what they are given is odd, and when processes are gone or older than others. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import {
  type EnqueueOptions,
  type Job,
  type Queue,
  type QueueCounts,
  type WorkOptions,
  type Worker,
  queue,
} from "holdfast/queue";
import { Pool, type PoolClient } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type LossyPool, lossyPool } from "./harness/lossy.ts";
import { eventually } from "./harness/wait.ts";

const why = unavailable("postgres");
let database: TestDatabase;
/** To look with, and to enqueue with: nothing is lost here. */
let pool: Pool;
let hf: Holdfast<PoolClient>;
/** To work with. */
let lossy: LossyPool;
let mine: Holdfast<PoolClient>;

beforeAll(async () => {
  if (why !== undefined) return;
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 10 });
  hf = holdfast(fromPg(pool));
  await hf.migrate();
});

afterAll(async () => {
  await hf?.close();
  await pool?.end();
  await database?.drop();
});

beforeEach(({ skip }) => {
  skip(why !== undefined, why);
  lossy = lossyPool(database.url);
  mine = holdfast(fromPg(lossy.pool));
});

const workers: Worker[] = [];
afterEach(async () => {
  lossy.mend();
  const ended = Promise.all(workers.splice(0).map((worker) => worker.stop({ patienceMs: 0 })));
  // A worker that cannot end is a fault that its own test has shown: the others have to go on.
  await Promise.race([
    ended.then(() => mine.close()).then(() => lossy.pool.end()),
    sleep(8000, undefined, { ref: false }),
  ]);
  await pool.query("DELETE FROM holdfast.queue_mark");
});

let made = 0;
const named = () => `faults ${++made}`;

/** Ends with the test. Trouble of its own is a failure of the test, unless it is expected. */
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

async function empty(of: { counts(): Promise<QueueCounts> }): Promise<boolean> {
  const { waiting, delayed, running } = await of.counts();
  return waiting + delayed + running === 0;
}

const ascending = (a: number, b: number) => a - b;
const upTo = (n: number) => Array.from({ length: n }, (_, i) => i);

async function one<T>(text: string, values: unknown[] = []): Promise<T> {
  const { rows } = await pool.query<{ value: T }>(text, values);
  return rows[0]?.value as T;
}

const numberOf = (name: string) =>
  one<number>("SELECT id AS value FROM holdfast.queue WHERE name = $1", [name]);

/** What the jobs of a queue have left behind. */
async function left(name: string): Promise<{ leases: number; marks: number; keys: number; running: number }> {
  const { rows } = await pool.query(
    `SELECT (SELECT count(*)::int FROM holdfast.queue_lease WHERE queue = q.id) AS leases,
      (SELECT count(*)::int FROM holdfast.queue_mark) AS marks,
      (SELECT count(*)::int FROM holdfast.queue_key WHERE queue = q.id) AS keys,
      (SELECT coalesce(sum(running), 0)::int FROM holdfast.queue_group WHERE queue = q.id) AS running
    FROM holdfast.queue q WHERE name = $1`,
    [name],
  );
  return rows[0] as Awaited<ReturnType<typeof left>>;
}

const nothing = { leases: 0, marks: 0, keys: 0, running: 0 };

/** A claim as of a process that nothing more is heard of. */
async function claim(name: string): Promise<{ worker: string; lease: string }> {
  const number = await numberOf(name);
  // As a worker would have set it: its jobs run again.
  await pool.query("UPDATE holdfast.queue SET attempts = 11 WHERE id = $1", [number]);
  const worker = await one<string>(
    "INSERT INTO holdfast.queue_worker (queue, beat, ttl) VALUES ($1, clock_timestamp(), 60000) RETURNING id AS value",
    [number],
  );
  const lease = await one<string | null>(
    `SELECT lease AS value FROM holdfast.queue_claim_jobs(q => $1, w => $2, n => 10, priorities => '{}', floors => '{}', after => NULL,
      whole => true, onward => NULL)`,
    [number, worker],
  );
  if (lease === null) throw new Error(`nothing was claimed of ${name}`);
  return { worker, lease };
}

describe("a worker that is stopped while it has jobs that it has not begun", () => {
  const jobs = 360;

  /** It is at one job, has claimed others behind it, and ends while what is to be given back is lost. */
  async function stopped(lose: () => void): Promise<number[]> {
    const name = named();
    await queue<number>(hf, name).enqueueMany(
      upTo(jobs).map((payload) => ({ payload, key: `k${payload}`, ...(payload % 2 && { group: "g" }) })),
    );
    const seen: number[] = [];
    const [begun, go] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    const handler = async ({ payload }: Job<number>) => {
      seen.push(payload);
      // Batches grow while jobs are short.
      if (seen.length !== 200) return;
      begun.resolve();
      await go.promise;
    };
    const worker = work(queue<number>(mine, name), handler, { concurrency: 1, onTrouble: () => {} });
    await begun.promise;
    const q = queue<number>(hf, name);
    await eventually(async () => (await q.counts()).running > 1);
    lose();
    const stopping = worker.stop({ patienceMs: 2000 });
    await eventually(() => lossy.lost > 0);
    go.resolve();
    await stopping;
    work(q, handler);
    await eventually(() => empty(q));
    expect(new Set(seen).size).toBe(jobs);
    await eventually(async () => expect(await left(name)).toEqual(nothing));
    return seen;
  }

  test.for([
    ["for a while", 3],
    ["for good", Infinity],
  ] as const)("and cannot give them back %s: none of them is lost", async ([, times]) => {
    await stopped(() => lossy.lose(/queue_give_back/, "statement", { times }));
  });

  test("and does not learn that they were given back: each runs once", async () => {
    const seen = await stopped(() => lossy.lose(/queue_give_back/, "answer"));
    expect(seen.toSorted(ascending)).toEqual(upTo(jobs));
  });
});

test("a lease of a worker that is not there any more: its jobs run", async () => {
  const name = named();
  const q = queue<number>(hf, name, { groups: { concurrency: 2 } });
  await q.enqueueMany([{ payload: 0 }, { payload: 1, group: "g" }, { payload: 2, key: "k" }]);
  // As when the sweep that gave it up for dead did not see the claim yet.
  const { worker } = await claim(name);
  await pool.query("DELETE FROM holdfast.queue_worker WHERE id = $1", [worker]);
  // Whoever it is.
  work(queue<number>(mine, named()), () => {});
  await eventually(async () => (await q.counts()).waiting === 3);
  const seen: number[] = [];
  work(queue<number>(mine, name, { groups: { concurrency: 2 } }), ({ payload }) => void seen.push(payload));
  await eventually(() => empty(q));
  expect(seen.toSorted(ascending)).toEqual([0, 1, 2]);
  await eventually(async () => expect(await left(name)).toEqual(nothing));
});

describe("texts", () => {
  const half = "😀".slice(0, 1);

  test.for([
    ["a text", half],
    ["the other half", "😀".slice(1)],
    ["deep inside", { a: [1, { b: [`x${half}y`] }] }],
    ["the name of a property", { a: { [half]: 1 } }],
  ])("half of a surrogate pair is no payload: %s", async ([, payload]) => {
    const q = queue<unknown>(hf, named());
    await expect(q.enqueue(payload)).rejects.toMatchObject({
      code: "HF_USAGE",
      message: expect.stringMatching(/surrogate|pair/i),
    });
    await expect(q.enqueueMany([{ payload: 1 }, { payload }])).rejects.toMatchObject({ code: "HF_USAGE" });
    expect(await q.counts()).toMatchObject({ waiting: 0 });
  });

  test("nor is it a key, or a group; and NUL is none of them", async () => {
    const q = queue<unknown>(hf, named());
    for (const options of [
      { key: `k${half}` },
      { group: `g${half}` },
      { key: "k\0" },
      { group: "g\0" },
    ] satisfies EnqueueOptions[])
      await expect(q.enqueue(1, options), JSON.stringify(options)).rejects.toMatchObject({
        code: "HF_USAGE",
      });
    for (const payload of ["a\0b", { a: ["\0"] }, { "\0": 1 }])
      await expect(q.enqueue(payload)).rejects.toMatchObject({ code: "HF_USAGE" });
    expect(await q.counts()).toMatchObject({ waiting: 0 });
  });

  test("what only looks like it comes out as it was", async () => {
    const q = queue<unknown>(mine, named());
    const payloads = [
      "\\u0000",
      "\\ud83d",
      "\\\\u0000",
      { "\\u0000": ["\\ude00", "😀"] },
      "\\\\\\ud83d",
      "\\",
    ];
    await q.enqueueMany(payloads.map((payload) => ({ payload })));
    const seen: unknown[] = [];
    work(q, ({ payload }) => void seen.push(payload), { concurrency: 1 });
    await eventually(() => empty(q));
    expect(seen).toEqual(payloads);
  });

  test("a lease that cannot be read does not keep dead workers of other queues from being recovered", async () => {
    const [spoilt, other] = [queue<number>(hf, named()), queue<number>(mine, named())];
    await spoilt.enqueue(1);
    await other.enqueueMany([{ payload: 1 }, { payload: 2, group: "g" }]);
    const dead = [await claim(spoilt.name), await claim(other.name)];
    try {
      await pool.query("UPDATE holdfast.queue_lease SET jobs = $1 WHERE id = $2", [
        String.raw`[[1,0,0,0,null,null,"\ud83d"]]`,
        dead[0]?.lease,
      ]);
      await pool.query("UPDATE holdfast.queue_worker SET beat = '-infinity' WHERE id = ANY($1)", [
        dead.map(({ worker }) => worker),
      ]);
      const seen: number[] = [];
      work(other, ({ payload }) => void seen.push(payload), { onTrouble: () => {} });
      await eventually(() => seen.length === 2);
      await eventually(() => empty(other));
    } finally {
      // Whatever was made of it: it is not for the other tests.
      await pool.query("DELETE FROM holdfast.queue_lease WHERE id = $1", [dead[0]?.lease]);
      await pool.query("DELETE FROM holdfast.queue_worker WHERE id = $1", [dead[0]?.worker]);
    }
  });
});

describe("a claim that is lost", () => {
  test.for([
    ["answer", 0],
    ["answer", 3],
    ["statement", 3],
  ] as const)("its %s, after %i others: each job runs once, in the same worker", async ([what, skip]) => {
    const name = named();
    const q = queue<number>(hf, name);
    const jobs = 300;
    await q.enqueueMany(
      upTo(jobs).map((payload) => ({
        payload,
        key: `k${payload}`,
        ...(payload % 3 === 0 && { group: "g" }),
      })),
    );
    lossy.lose(/queue_claim_jobs\(/, what, { skip });
    const seen: { payload: number; attempt: number }[] = [];
    // It is not given up for dead as long as this test lasts.
    work(queue<number>(mine, name), ({ payload, attempt }) => void seen.push({ payload, attempt }), {
      ttlMs: 60_000,
      concurrency: 5,
      batch: 20,
      onTrouble: () => {},
    });
    await eventually(() => seen.length >= jobs);
    await eventually(async () => expect(await left(name)).toEqual(nothing));
    expect(lossy.lost).toBe(1);
    expect(seen.toSorted((a, b) => a.payload - b.payload)).toEqual(
      upTo(jobs).map((payload) => ({ payload, attempt: 1 })),
    );
    expect(await q.counts()).toMatchObject({ waiting: 0, delayed: 0, running: 0, failed: 0, workers: 1 });
  });
});

/** The settings of the last worker to come are those of the queue. */
async function limited(name: string, to: number | null): Promise<void> {
  const text = "SELECT group_most AS value FROM holdfast.queue WHERE name = $1";
  await eventually(async () => (await one<number | null>(text, [name])) === to);
}

test.for([{ concurrency: 1 }, { serial: true }])(
  "groups that a newer process limits while an older one works: %o",
  async (groups) => {
    const name = named();
    const [older, newer] = [queue<number>(mine, name), queue<number>(hf, name, { groups })];
    const seen: number[] = [];
    const old = work(older, ({ payload }) => void seen.push(payload));
    await eventually(async () => (await older.counts()).workers === 1);
    const first = work(newer, () => {});
    await limited(name, 1);
    await first.stop();
    await older.enqueueMany(upTo(3).map((payload) => ({ payload, group: "g" })));
    await eventually(() => seen.length === 3);
    await eventually(async () => expect(await left(name)).toEqual(nothing));
    await old.stop();
    let [now, most] = [0, 0];
    work(newer, async ({ payload }) => {
      most = Math.max(most, ++now);
      await sleep(5);
      now--;
      seen.push(payload);
    });
    await newer.enqueueMany(upTo(4).map((i) => ({ payload: 3 + i, group: "g" })));
    await eventually(() => seen.length === 7);
    expect([seen, most]).toEqual([upTo(7), 1]);
    await eventually(async () => expect(await left(name)).toEqual(nothing));
  },
);

test("a job that was claimed before its group was limited is not counted when it ends", async () => {
  const name = named();
  const [older, newer] = [queue<string>(hf, name), queue<string>(mine, name, { groups: { concurrency: 1 } })];
  const ends = { a: Promise.withResolvers<void>(), b: Promise.withResolvers<void>() };
  const seen: string[] = [];
  const handler = async ({ payload }: Job<string>) => {
    seen.push(payload);
    if (payload === "a" || payload === "b") await ends[payload].promise;
  };
  try {
    work(newer, handler);
    await limited(name, 1);
    const late = work(older, () => {});
    await limited(name, null);
    await late.stop();
    await newer.enqueue("a", { group: "g" });
    await eventually(() => seen.length === 1);
    work(newer, handler);
    await limited(name, 1);
    await newer.enqueue("b", { group: "g" });
    await eventually(() => seen.length === 2);
    await newer.enqueue("c", { group: "g" });
    ends.a.resolve();
    await eventually(async () => (await newer.counts()).running === 1);
    expect((await left(name)).running).toBe(1);
    await sleep(200);
    expect(seen).toEqual(["a", "b"]);
  } finally {
    for (const end of Object.values(ends)) end.resolve();
  }
  await eventually(() => seen.length === 3);
  await eventually(async () => expect(await left(name)).toEqual(nothing));
});

test("ends of jobs that are written twice, as the answer was lost, are there once", async () => {
  const name = named();
  const q = queue<string>(mine, name, { groups: { concurrency: 9 }, backoff: { baseMs: 1 } });
  await q.enqueueMany(
    ["quick", "slow", "again", "late"].map((payload) => ({ payload, key: payload, group: "g" })),
  );
  const go = { slow: Promise.withResolvers<void>(), late: Promise.withResolvers<void>() };
  const seen: string[] = [];
  lossy.lose(/queue_finish\(/, "answer", { times: 2 });
  work(
    q,
    async ({ payload, attempt }) => {
      seen.push(`${payload} ${attempt}`);
      if (payload === "slow" || payload === "late") await go[payload].promise;
      if (payload === "again" && attempt === 1) throw new Error("once");
    },
    { concurrency: 4, ttlMs: 60_000, onTrouble: () => {} },
  );
  await eventually(() => seen.includes("again 2"));
  go.late.resolve();
  // Only one is left, of a lease that is still there.
  await eventually(async () => (await q.counts()).waiting + (await q.counts()).delayed === 0);
  await eventually(() => lossy.count(/queue_finish\(/) > lossy.lost + 1);
  await eventually(async () => {
    const { rows } = await pool.query<{ size: number; done: number[] }>(
      "SELECT size, done FROM holdfast.queue_lease WHERE queue = $1",
      [await numberOf(name)],
    );
    expect(rows.length).toBe(1);
    const { size, done } = rows[0] as { size: number; done: number[] };
    expect(done).toEqual([...new Set(done)]);
    expect(done.length).toBe(size - 1);
  });
  expect((await left(name)).running).toBe(1);
  expect((await q.counts()).running).toBe(1);
  go.slow.resolve();
  await eventually(() => empty(q));
  await eventually(async () => expect(await left(name)).toEqual(nothing));
  expect(lossy.lost).toBe(2);
  expect(seen.toSorted()).toEqual(["again 1", "again 2", "late 1", "quick 1", "slow 1"]);
});

test.for(["statement", "answer"] as const)(
  "complete(tx), and the %s is lost by which the worker asks whether it was committed: the job has ended",
  async (what) => {
    const name = named();
    const q = queue<number>(hf, name);
    const seen: number[] = [];
    work(
      queue<number>(mine, name),
      async (job) => {
        seen.push(job.attempt);
        await mine.transaction((tx) => job.complete(tx));
      },
      { ttlMs: 60_000, onTrouble: () => {} },
    );
    await eventually(async () => (await q.counts()).workers === 1);
    lossy.lose(/FROM holdfast\.queue_mark/, what);
    await q.enqueue(1, { key: "k" });
    await eventually(() => lossy.lost === 1);
    await eventually(async () => expect(await left(name)).toEqual(nothing));
    expect(await q.enqueue(2, { key: "k" })).toMatchObject({ added: true });
    await eventually(async () => (await empty(q)) && seen.length === 2);
    expect(seen).toEqual([1, 1]);
    expect(await q.counts()).toMatchObject({ failed: 0, workers: 1 });
  },
);

describe.each(["leased", "transactional"] as const)("what backoff answers, %s jobs", (kind) => {
  type Answer = () => number | undefined;

  /** A job that fails once, with others that do not. */
  async function fail(backoff: Answer) {
    const q = queue<string>(mine, named(), { backoff });
    const attempts: number[] = [];
    const troubles: unknown[] = [];
    const others: string[] = [];
    const handler = ({ payload, attempt }: { readonly payload: string; readonly attempt: number }) => {
      if (payload !== "bad") return void others.push(payload);
      attempts.push(attempt);
      if (attempt === 1) throw new Error("once");
    };
    const options = { pollMs: 50, concurrency: 4, onTrouble: (error: unknown) => troubles.push(error) };
    await q.enqueueMany(["a", "bad", "b", "c"].map((payload) => ({ payload, key: payload })));
    workers.push(
      kind === "leased" ? q.work(handler, options) : q.work(handler, { ...options, transactional: true }),
    );
    return { q, attempts, troubles, others };
  }

  test.for([
    ["NaN", () => NaN],
    ["another type", (() => "soon") as unknown as Answer],
    [
      "an exception",
      () => {
        throw new Error("no backoff");
      },
    ],
  ] as [string, Answer][])("%s is told, and the job runs again all the same", async ([, backoff]) => {
    const { q, attempts, troubles, others } = await fail(backoff);
    await eventually(async () => (await empty(q)) && attempts.length === 2);
    expect(await left(q.name)).toEqual(nothing);
    expect([attempts, others.toSorted()]).toEqual([
      [1, 2],
      ["a", "b", "c"],
    ]);
    expect(troubles.length).toBeGreaterThan(0);
  });

  test("less than nothing is at once", async () => {
    const { q, attempts, troubles } = await fail(() => -5);
    await eventually(async () => (await empty(q)) && attempts.length === 2);
    expect([attempts, troubles]).toEqual([[1, 2], []]);
  });

  test.for([Infinity, 1e300])("%d is late, and not never", async (ms) => {
    const { q, attempts, troubles } = await fail(() => ms);
    await eventually(async () =>
      expect(await q.counts()).toMatchObject({ delayed: 1, waiting: 0, running: 0, failed: 0 }),
    );
    expect(
      await one("SELECT isfinite(run_at) AS value FROM holdfast.queue_delayed WHERE queue = $1", [
        await numberOf(q.name),
      ]),
    ).toBe(true);
    expect([attempts, troubles]).toEqual([[1], []]);
  });

  test.for([
    ["undefined", undefined],
    ["null", null],
  ] as const)("%s is never", async ([, never]) => {
    const { q, troubles } = await fail(() => never as undefined);
    await eventually(async () => (await empty(q)) && (await q.failed()).length === 1);
    expect(await q.failed()).toMatchObject([{ payload: "bad", attempts: 1 }]);
    expect(await q.enqueue("bad", { key: "bad" })).toMatchObject({ added: true });
    expect(troubles).toEqual([]);
  });
});

describe("what enqueue is given", () => {
  const refused: Readonly<Record<string, EnqueueOptions>> = {
    "delayMs: NaN": { delayMs: NaN },
    "delayMs: Infinity": { delayMs: Infinity },
    "delayMs: text": { delayMs: "5" as never },
    "delayMs: less than nothing": { delayMs: -1 },
    "runAt: no date": { runAt: new Date(NaN) },
    "a long key": { key: "é".repeat(501) },
    "a long group": { group: "é".repeat(501) },
  };

  test.for(Object.entries(refused))("%s: refused, and nothing is sent", async ([, options]) => {
    const q = queue<number>(mine, named());
    const others = queue<number>(hf, q.name);
    await expect(q.enqueue(1, options)).rejects.toMatchObject({ code: "HF_USAGE" });
    await expect(q.enqueueMany([{ payload: 1 }, { payload: 2, ...options }])).rejects.toMatchObject({
      code: "HF_USAGE",
    });
    expect(lossy.count(/queue_add/)).toBe(0);
    // Those that come in the same turn are sent together.
    const answers = await Promise.allSettled(
      upTo(6).map((n) => others.enqueue(n, n % 2 === 0 ? options : {})),
    );
    expect(answers.map(({ status }) => status)).toEqual(
      upTo(6).map((n) => (n % 2 === 0 ? "rejected" : "fulfilled")),
    );
    expect(await others.counts()).toMatchObject({ waiting: 3, delayed: 0 });
  });

  test("a time long gone is now, and keys and groups of 1,000 bytes are not too long", async () => {
    const q = queue<number>(mine, named());
    await expect(q.enqueue(0, { runAt: new Date(-8.64e15) })).rejects.toMatchObject({ code: "HF_USAGE" });
    await q.enqueue(1, { runAt: new Date("1000-01-01") });
    await q.enqueue(2, { key: "é".repeat(500), group: "é".repeat(500) });
    await q.enqueue(3, { delayMs: 0 });
    const { id } = await q.enqueue(4, { runAt: new Date("9999-12-31") });
    expect(await q.inspect(id)).toMatchObject({ state: "delayed" });
    const seen: number[] = [];
    work(q, ({ payload }) => void seen.push(payload));
    await eventually(() => seen.length === 3);
    expect(seen.toSorted(ascending)).toEqual([1, 2, 3]);
  });
});

test("a worker that has nothing to do does not ask all the time", async () => {
  const q = queue<number>(mine, named());
  work(q, () => {}, { pollMs: 1000 });
  await eventually(async () => (await q.counts()).workers === 1);
  await sleep(200);
  const before = lossy.count(/queue_claim_jobs\(/);
  await sleep(800);
  expect(lossy.count(/queue_claim_jobs\(/) - before).toBeLessThan(10);
});

test("behind 2,500 groups that have used up their rate, one that has not", async () => {
  const name = named();
  const q = queue<string>(hf, name, { groups: { rate: { limit: 1, perMs: 600_000 } } });
  await q.enqueueMany(upTo(2500).map((n) => ({ payload: "early", group: `a${String(n).padStart(4, "0")}` })));
  await pool.query(
    "UPDATE holdfast.queue_group SET started = 1, since = clock_timestamp() WHERE queue = $1",
    [await numberOf(name)],
  );
  await q.enqueue("late", { group: "z" });
  const seen: string[] = [];
  work(
    queue<string>(mine, name, { groups: { rate: { limit: 1, perMs: 600_000 } } }),
    ({ payload }) => void seen.push(payload),
  );
  await eventually(() => seen.length > 0);
  expect(seen).toEqual(["late"]);
});

// What was taken before goes on.
test.for([1, 25])("after pause() no transactional job is taken, %i in a transaction", async (batch) => {
  const q = queue<number>(mine, named());
  await q.enqueueMany(upTo(5000).map((payload) => ({ payload })));
  let begun = 0;
  workers.push(
    q.work<PoolClient>(
      async (_, tx) => {
        begun++;
        await tx.client.query("SELECT pg_sleep(0.001)");
      },
      {
        transactional: true,
        batch,
        concurrency: 4,
        pollMs: 20,
        onTrouble: (error) => {
          throw error;
        },
      },
    ),
  );
  for (let round = 1; round <= 8; round++) {
    const before = begun;
    await eventually(() => begun > before + 40);
    await queue<number>(hf, q.name).pause();
    const then = begun;
    await eventually(async () => {
      const seen = begun;
      await sleep(100);
      return begun === seen;
    });
    expect(begun - then).toBeLessThanOrEqual(4 * batch);
    await queue<number>(hf, q.name).resume();
  }
});

describe("a group that somebody is just taking for empty", () => {
  test.for([
    [
      "give_back",
      "SELECT holdfast.queue_give_back(w => $1, leases => ARRAY[$2::bigint, $2], places => ARRAY[0, 1])",
    ],
    ["recover", "SELECT * FROM holdfast.queue_sweep(true) WHERE $1::bigint > 0 AND $2::bigint > 0"],
  ] as const)("queue_%s does not wait for it, nor makes another", async ([what, text]) => {
    const name = named();
    const q = queue<number>(mine, name);
    await q.enqueueMany([
      { payload: 0, group: "w" },
      { payload: 1, group: "x" },
    ]);
    const { worker, lease } = await claim(name);
    const number = await numberOf(name);
    await pool.query("DELETE FROM holdfast.queue_group WHERE queue = $1 AND grp = 'w'", [number]);
    await pool.query(
      "INSERT INTO holdfast.queue_group (queue, grp) VALUES ($1, 'x') ON CONFLICT DO NOTHING",
      [number],
    );
    if (what === "recover")
      await pool.query("UPDATE holdfast.queue_worker SET beat = '-infinity' WHERE id = $1", [worker]);
    const [a, b] = [await pool.connect(), await pool.connect()];
    try {
      await a.query("BEGIN");
      await a.query("DELETE FROM holdfast.queue_group WHERE queue = $1 AND grp = 'x' AND running = 0", [
        number,
      ]);
      await b.query("SET lock_timeout = 3000");
      await b.query(text, [worker, lease]);
      await a.query("COMMIT");
    } finally {
      a.release(true);
      b.release(true);
    }
    expect(
      await one("SELECT count(*)::int AS value FROM holdfast.queue_group WHERE queue = $1", [number]),
    ).toBe(0);
    const seen: number[] = [];
    work(q, ({ payload }) => void seen.push(payload));
    await eventually(() => empty(q));
    expect(seen.toSorted(ascending)).toEqual([0, 1]);
  });
});
