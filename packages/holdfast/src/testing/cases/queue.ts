/** Queues, by example: through the public doors, and where a worker must die or an answer be lost, by the store's contract. */
import { type Capabilities, type Unsupported, isSupported } from "../../seam/capabilities.ts";
import type { Connection, Database } from "../../seam/database.ts";
import { withConnection } from "../../transaction/one-shot.ts";
import { UnsupportedError } from "../../seam/errors.ts";
import { contextOf, scopeOf } from "../../transaction/scope.ts";
import { sleep } from "../../waiting/wait.ts";
import type { Holdfast } from "../../holdfast.ts";
import {
  type Job,
  type Queue,
  type QueueOptions,
  type WorkOptions,
  jobs as jobsOf,
  queue,
  queues,
  workers as workersOf,
} from "../../queue/index.ts";
import type { ConformanceCase, Ground } from "../ground.ts";
import { TestGate, assert, sql, suite, table } from "./support.ts";

type Run = ConformanceCase["run"];
type Store = Exclude<Database["engine"]["queues"], Unsupported>;
type Settings = Parameters<Store["open"]>[2];

/** Where there are no queues, jobs are refused. */
function kept(run: Run): Run {
  return async (ground) => {
    if (isSupported(ground.capabilities.queues)) return run(ground);
    await assert.rejects(queue(ground.hf, ground.fresh).enqueue(1), UnsupportedError);
  };
}

async function until(what: string, holds: () => Promise<boolean> | boolean): Promise<void> {
  const end = performance.now() + 60_000;
  while (!(await holds())) {
    assert.ok(performance.now() < end, `not so after a minute: ${what}`);
    await sleep(20);
  }
}

const isEmpty = async (of: Pick<Queue<never>, "counts">): Promise<boolean> => {
  const { waiting, delayed, running } = await of.counts();
  return waiting + delayed + running === 0;
};

/** Works on a queue while the body runs. Whatever goes wrong in a worker is wrong. */
async function working<P>(
  of: readonly Queue<P>[],
  handler: (job: Job<P>) => unknown,
  body: () => Promise<void>,
  options: WorkOptions = {},
): Promise<void> {
  const troubles: unknown[] = [];
  const onTrouble = (error: unknown) => void troubles.push(error);
  const started = of.map((each) => each.work(handler, { pollMs: 50, onTrouble, ...options }));
  try {
    await body();
  } finally {
    await Promise.all(started.map((worker) => worker.stop({ patienceMs: 0 })));
  }
  assert.deepEqual(troubles, []);
}

/** The same queue of both instances. */
function both<P>({ hf, other, fresh }: Ground, options: QueueOptions<P, P> = {}): [Queue<P>, Queue<P>] {
  return [queue<P>(hf, fresh, options), queue<P>(other, fresh, options)];
}

interface ContractContext {
  readonly database: Database;
  known(): Capabilities | undefined;
}

/** The store itself, as a worker of some process would call it. */
class Contract {
  readonly number: number;
  readonly store: Store;
  readonly #context: ContractContext;

  constructor(context: ContractContext, number: number) {
    this.#context = context;
    this.store = context.database.engine.queues as Store;
    this.number = number;
  }

  static async of(hf: Holdfast<unknown>, name: string, settings?: Settings): Promise<Contract> {
    const instance = contextOf(hf, "queue");
    const context = { database: instance.database, known: () => instance.known() };
    const opening = new Contract(context, 0);
    return new Contract(context, await opening.ask((c, how) => opening.store.open(c, name, settings, how)));
  }

  ask<T>(
    work: (connection: Connection, how: { readonly free: boolean; readonly waitMs: number }) => Promise<T>,
  ): Promise<T> {
    const { database, known } = this.#context;
    const how = { free: database.connect !== undefined, waitMs: 10_000 };
    const call = (connection: Connection) => {
      const capabilities = known();
      const alone = () => work(connection, how);
      return how.free && capabilities && database.engine.apart
        ? database.engine.apart(connection, capabilities, alone)
        : alone();
    };
    return withConnection({ database, known }, call, 60_000);
  }

  /** A worker that says once that it lives, for so long. */
  enlist(ttlMs = 600_000): Promise<number> {
    const what = { ttlMs, name: "somebody", lock: undefined };
    return this.ask((c, how) => this.store.workers.enlist(c, this.number, what, how));
  }

  claim(worker: number, most = 10) {
    const where = { floors: new Map(), after: undefined };
    const call = { queue: this.number, worker, most, where, whole: true, onward: undefined };
    return this.ask((c, how) => this.store.claim(c, call, how));
  }

  /** All of what was claimed, one way or the other. */
  async claimed(worker: number, most = 10) {
    const claim = await this.claim(worker, most);
    assert.ok(claim.lease !== undefined, "there was nothing to claim");
    return claim;
  }

  finish(
    worker: number,
    claim: Awaited<ReturnType<Contract["claimed"]>>,
    places?: readonly number[],
    error?: string,
    again?: number,
  ) {
    const ended = claim.jobs
      .map((job, place) => ({
        lease: claim.lease,
        place,
        job,
        counted: claim.counted,
        failure: error === undefined ? undefined : { error, again },
      }))
      .filter(({ place }) => places?.includes(place) ?? true);
    const whole = places === undefined ? [claim.lease] : [];
    return this.ask((c, how) => this.store.finish(c, { queue: this.number, worker, whole, ended }, how));
  }

  /** Until somebody's jobs were found. */
  async sweep(): Promise<void> {
    await until("a worker that is gone is found", async () => {
      const look = { sweep: "thorough", idle: [], whole: true } as const;
      const { jobs } = await this.ask((c, how) => this.store.look(c, look, how));
      return jobs > 0;
    });
  }
}

const settings = {
  attempts: 3,
  most: undefined,
  groupMost: undefined,
  groupRate: undefined,
  groupPer: undefined,
  ordered: false,
};

export const queueCases = suite("queue", {
  "each job runs once, whatever the number of workers": kept(async (ground) => {
    const [q, same] = both<number>(ground);
    const ran = new Map<number, number>();
    await working(
      [q, same, q],
      ({ payload }) => void ran.set(payload, (ran.get(payload) ?? 0) + 1),
      async () => {
        for (const half of [0, 100])
          await q.enqueueMany(Array.from({ length: 100 }, (_, n) => ({ payload: half + n })));
        await until("all have run", () => isEmpty(same));
      },
      { concurrency: 4 },
    );
    assert.equal(ran.size, 200);
    assert.deepEqual(new Set(ran.values()), new Set([1]));
  }),

  "smaller priorities first, then the order in which they came; and not before their time": kept(
    async (ground) => {
      const [q] = both<string>(ground);
      await q.enqueue("late", { priority: 5 });
      await q.enqueue("usual");
      await q.enqueue("second");
      await q.enqueue("first", { priority: -5 });
      await q.enqueue("past", { runAt: new Date(0), priority: 1 });
      const { id } = await q.enqueue("tomorrow", { delayMs: 86_400_000 });
      const seen: string[] = [];
      await working(
        [q],
        ({ payload }) => void seen.push(payload),
        async () => {
          await until("five have run", async () => seen.length === 5 && (await q.counts()).running === 0);
        },
        { concurrency: 1 },
      );
      assert.deepEqual(seen, ["first", "usual", "second", "past", "late"]);
      assert.equal((await q.inspect(id))?.state, "delayed");
      assert.equal(await q.discard(id), 1);
    },
  ),

  "what is due later comes when it is due": kept(async (ground) => {
    const [q, same] = both<string>(ground);
    await q.enqueue("soon", { delayMs: 300, group: "g" });
    await q.enqueue("also", { delayMs: 300 });
    const seen: string[] = [];
    await working(
      [same],
      ({ payload }) => void seen.push(payload),
      () => until("both have run", () => isEmpty(q)),
    );
    assert.deepEqual(seen.toSorted(), ["also", "soon"]);
  }),

  "in a transaction: there if that is committed, and neither the job nor its key if it is rolled back": kept(
    async (ground) => {
      const { hf } = ground;
      const [q, same] = both<string>(ground);
      const rolledBack = hf.transaction(async (tx) => {
        await q.enqueue("never", { tx, key: "k", group: "g" });
        throw new Error("no");
      });
      await assert.rejects(rolledBack, /no/);
      assert.equal((await same.counts()).waiting, 0);
      const { added } = await hf.transaction((tx) => q.enqueue("kept", { tx, key: "k", group: "g" }));
      assert.equal(added, true);
      const seen: string[] = [];
      await working(
        [same],
        ({ payload }) => void seen.push(payload),
        () => until("it has run", () => isEmpty(q)),
      );
      assert.deepEqual(seen, ["kept"]);
    },
  ),

  "one that fails runs again, and is with the failed after its last attempt; retry begins anew": kept(
    async (ground) => {
      const [q] = both<string>(ground, { retries: 2, backoff: { baseMs: 1, jitter: 0 } });
      const { id } = await q.enqueue("x", { key: "k", group: "g", priority: 3 });
      const attempts: number[] = [];
      let fails = true;
      await working(
        [q],
        ({ attempt }) => {
          attempts.push(attempt);
          if (fails) throw new Error(`attempt ${attempt}`);
        },
        async () => {
          await until("it has failed", async () => (await q.counts()).failed === 1);
          assert.deepEqual(attempts, [1, 2, 3]);
          const [failed] = await q.failed();
          assert.equal(failed?.attempts, 3);
          assert.match(failed.error, /attempt 3/);
          assert.deepEqual([failed.id, failed.key, failed.group, failed.payload], [id, "k", "g", "x"]);
          fails = false;
          assert.equal(await q.retry(id), 1);
          await until("it has run", () => isEmpty(q));
        },
      );
      assert.deepEqual(attempts, [1, 2, 3, 1]);
      assert.equal((await q.counts()).failed, 0);
    },
  ),

  "a failed job whose key another has meanwhile stays where it is": kept(async (ground) => {
    const [q] = both<string>(ground, { retries: 0 });
    await q.enqueue("first", { key: "k" });
    await working(
      [q],
      () => {
        throw new Error("no");
      },
      () => until("it has failed", async () => (await q.counts()).failed === 1),
    );
    const { id, added } = await q.enqueue("second", { key: "k" });
    assert.equal(added, true);
    assert.equal(await q.retry(), 0);
    assert.equal(await q.discard(id), 1);
    assert.equal(await q.retry(), 1);
    assert.equal((await q.counts()).waiting, 1);
  }),

  "at most one job of a key, from several instances at once": kept(async (ground) => {
    const [q, same] = both<number>(ground);
    const answers = await Promise.all(
      Array.from({ length: 16 }, (_, n) => (n % 2 ? q : same).enqueue(n, { key: "k", wait: 60_000 })),
    );
    assert.equal(answers.filter(({ added }) => added).length, 1);
    assert.equal(new Set(answers.map(({ id }) => id)).size, 1);
    assert.equal((await q.counts()).waiting, 1);
    const many = await q.enqueueMany([
      { payload: 1, key: "a" },
      { payload: 2, key: "a" },
      { payload: 3, key: "b" },
      { payload: 4, key: "b", onDuplicate: "replace" },
    ]);
    assert.deepEqual(
      many.map(({ added }) => added),
      [true, false, false, true],
    );
    assert.equal(many[1]?.id, many[0]?.id);
    assert.equal((await q.counts()).waiting, 3);
  }),

  "replace takes the place of one that waits; one that runs goes on; the key is free at the end": kept(
    async (ground) => {
      const [q] = both<string>(ground);
      const first = await q.enqueue("first", { key: "k", delayMs: 86_400_000 });
      const second = await q.enqueue("second", { key: "k", onDuplicate: "replace" });
      assert.equal(second.added, true);
      assert.equal(await q.inspect(first.id), undefined);
      const [began, go] = [new TestGate(), new TestGate()];
      const seen: string[] = [];
      await working(
        [q],
        async ({ payload }) => {
          seen.push(payload);
          if (payload !== "second") return;
          began.open();
          await go.opened;
        },
        async () => {
          await began.opened;
          assert.equal((await q.enqueue("ignored", { key: "k" })).added, false);
          assert.equal(
            (await q.enqueue("third", { key: "k", onDuplicate: "replace", delayMs: 1 })).added,
            true,
          );
          go.open();
          await until("both have run", () => isEmpty(q));
          assert.equal((await q.enqueue("fourth", { key: "k" })).added, true);
          await until("that too", () => isEmpty(q));
        },
        { concurrency: 1 },
      );
      assert.deepEqual(seen, ["second", "third", "fourth"]);
    },
  ),

  "of a group so many at the same time, in all workers together": kept(async (ground) => {
    const [q, same] = both<number>(ground, { groups: { concurrency: 2 } });
    await q.enqueueMany(Array.from({ length: 24 }, (_, n) => ({ payload: n, group: `g${n % 2}` })));
    const running = new Map<string, number>();
    let most = 0;
    let done = 0;
    await working(
      [q, same],
      async ({ group = "" }) => {
        running.set(group, (running.get(group) ?? 0) + 1);
        most = Math.max(most, running.get(group) as number);
        await sleep(5);
        running.set(group, (running.get(group) as number) - 1);
        done++;
      },
      () => until("all have run", () => isEmpty(q)),
    );
    assert.equal(done, 24);
    assert.ok(most <= 2, `${most} of a group at the same time`);
  }),

  "of a group so many starts in a window": kept(async (ground) => {
    const [q, same] = both<number>(ground, { groups: { rate: { limit: 3, perMs: 3_600_000 } } });
    await q.enqueueMany(Array.from({ length: 10 }, (_, n) => ({ payload: n, group: n < 5 ? "a" : "b" })));
    const seen: number[] = [];
    await working(
      [q, same],
      ({ payload }) => void seen.push(payload),
      async () => {
        await until("three of each", async () => seen.length >= 6 && (await q.counts()).running === 0);
        // Nothing more: a round of looks goes by.
        await sleep(300);
      },
      { concurrency: 2 },
    );
    assert.deepEqual(new Set(seen), new Set([0, 1, 2, 5, 6, 7]));
    assert.equal(seen.length, 6);
    assert.equal((await q.counts()).waiting, 4);
  }),

  "serial groups: one at a time, in order; one that fails holds up its group, and no other": kept(
    async (ground) => {
      const [q, same] = both<number>(ground, {
        groups: { serial: true },
        backoff: { baseMs: 50, jitter: 0 },
      });
      await q.enqueueMany(
        Array.from({ length: 12 }, (_, n) => ({ payload: n, group: n % 2 ? "odd" : "even" })),
      );
      const seen: number[] = [];
      let running = 0;
      await working(
        [q, same],
        async ({ payload, group, attempt }) => {
          if (group === "odd") assert.equal(++running, 1);
          await sleep(2);
          if (group === "odd") running--;
          if (payload === 3 && attempt === 1) throw new Error("once");
          seen.push(payload);
        },
        () => until("all have run", () => isEmpty(q)),
      );
      assert.deepEqual(
        seen.filter((n) => n % 2),
        [1, 3, 5, 7, 9, 11],
      );
      assert.deepEqual(
        seen.filter((n) => n % 2 === 0),
        [0, 2, 4, 6, 8, 10],
      );
    },
  ),

  "groups are served in turn: many jobs of one do not keep another's waiting": kept(async (ground) => {
    const [q] = both<string>(ground);
    await q.enqueueMany(Array.from({ length: 100 }, () => ({ payload: "many", group: "a" })));
    await q.enqueue("one", { group: "b" });
    await q.enqueue("none");
    const seen: string[] = [];
    await working(
      [q],
      ({ payload }) => void seen.push(payload),
      () => until("all have run", () => isEmpty(q)),
      {
        concurrency: 1,
        batch: 20,
      },
    );
    assert.equal(seen.length, 102);
    assert.ok(seen.indexOf("one") < 50, `after ${seen.indexOf("one")} of the other`);
    assert.ok(seen.indexOf("none") < 50, `after ${seen.indexOf("none")} of groups`);
  }),

  "so many of a queue at the same time, in all workers together": kept(async (ground) => {
    const [q, same] = both<number>(ground, { concurrency: 3 });
    await q.enqueueMany(Array.from({ length: 15 }, (_, n) => ({ payload: n })));
    let [running, most, done] = [0, 0, 0];
    await working(
      [q, same],
      async () => {
        most = Math.max(most, ++running);
        await sleep(5);
        running--;
        done++;
      },
      () => until("all have run", () => isEmpty(q)),
    );
    assert.equal(done, 15);
    assert.ok(most <= 3, `${most} at the same time`);
  }),

  "nothing is claimed while a queue is paused": kept(async (ground) => {
    const [q, same] = both<number>(ground);
    await q.pause();
    await q.enqueueMany(Array.from({ length: 5 }, (_, n) => ({ payload: n })));
    const seen: number[] = [];
    await working(
      [q, same],
      ({ payload }) => void seen.push(payload),
      async () => {
        await until("both work", async () => (await q.counts()).workers === 2);
        await sleep(200);
        assert.deepEqual(seen, []);
        assert.equal((await q.counts()).paused, true);
        await same.resume();
        await until("all have run", () => isEmpty(q));
      },
    );
    assert.equal(seen.length, 5);
  }),

  "job.complete(tx): the end of the job and the effects are committed together, or not at all": kept(
    async (ground) => {
      const { hf } = ground;
      const name = await table(ground);
      const [q] = both<string>(ground, { backoff: { baseMs: 1 } });
      await q.enqueue("x");
      const attempts: number[] = [];
      const found: unknown[] = [];
      await working(
        [q],
        async (job) => {
          attempts.push(job.attempt);
          await hf.transaction(async (tx) => {
            await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES (${"x"}, ${job.attempt})`);
            await job.complete(tx);
            if (job.attempt === 1) throw new Error("rolled back");
          });
          // It has ended, though its handler runs: what comes after makes no difference.
          found.push(await q.inspect(job.id));
          throw new Error("too late to fail");
        },
        () => until("it has ended", () => isEmpty(q)),
      );
      assert.deepEqual(attempts, [1, 2]);
      assert.deepEqual(found, [undefined]);
      const rows = await hf.transaction((tx) => tx.query(sql`SELECT n FROM ${sql.id(name)}`));
      assert.deepEqual(
        rows.map(({ n }) => Number(n)),
        [2],
      );
      assert.equal((await q.counts()).failed, 0);
    },
  ),

  "job.complete(tx), and the handler ends before the transaction: the job runs again only if that is rolled back":
    kept(async (ground) => {
      const { hf } = ground;
      const name = await table(ground);
      const [q] = both<string>(ground, { backoff: { baseMs: 1 } });
      const payloads = ["kept", "undone", "kept late"] as const;
      await q.enqueueMany(payloads.map((payload) => ({ payload, key: payload })));
      const attempts: string[] = [];
      const open: Promise<unknown>[] = [];
      await working(
        [q],
        async (job) => {
          const { payload, attempt } = job;
          attempts.push(`${payload} ${attempt}`);
          const completed = new TestGate();
          open.push(
            hf
              .transaction(async (tx) => {
                await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES (${payload}, ${attempt})`);
                await job.complete(tx);
                completed.open();
                // Long enough for a worker that does not wait for it.
                await sleep(300);
                if (payload === "undone" && attempt === 1) throw new Error("rolled back");
              })
              .catch(completed.open),
          );
          await completed.opened;
          // As of a timeout that was faster; or nobody has awaited the transaction.
          if (payload !== "kept late") throw new Error("took too long");
        },
        async () => {
          await until("all have ended", () => isEmpty(q));
          await Promise.all(open);
          await until("all have ended", () => isEmpty(q));
        },
        { concurrency: 1 },
      );
      assert.deepEqual(attempts.toSorted(), ["kept 1", "kept late 1", "undone 1", "undone 2"]);
      const rows = await hf.transaction((tx) => tx.query(sql`SELECT k, n FROM ${sql.id(name)} ORDER BY k`));
      assert.deepEqual(
        rows.map(({ k, n }) => `${String(k)} ${Number(n)}`),
        ["kept 1", "kept late 1", "undone 2"],
      );
      for (const key of payloads) assert.equal((await q.enqueue(key, { key })).added, true, `${key} is free`);
    }),

  "a worker that stops between job.complete(tx) and COMMIT waits for it": kept(async (ground) => {
    const { hf } = ground;
    const [q, same] = both<string>(ground);
    await q.enqueue("x");
    const attempts: number[] = [];
    const completed = new TestGate();
    let open: Promise<unknown> = Promise.resolve();
    const troubles: unknown[] = [];
    const stopped = q.work(
      async (job) => {
        attempts.push(job.attempt);
        const told = new Promise((_, reject) =>
          job.signal.addEventListener("abort", () => reject(new Error("told to end"))),
        );
        open = hf.transaction(async (tx) => {
          await job.complete(tx);
          completed.open();
          await told.catch(() => {});
          await sleep(300);
        });
        await Promise.race([told, open]);
      },
      { pollMs: 50, onTrouble: (error) => void troubles.push(error) },
    );
    await completed.opened;
    await stopped.stop({ patienceMs: 0 });
    await open;
    await working(
      [same],
      ({ attempt }) => void attempts.push(attempt),
      () => until("it has ended", () => isEmpty(q)),
    );
    assert.deepEqual(attempts, [1]);
    assert.deepEqual(troubles, []);
  }),

  "nobody completes a job whose handler has ended": kept(async (ground) => {
    const { hf } = ground;
    const [q] = both<string>(ground);
    await q.enqueue("x");
    const ended = Promise.withResolvers<Job<string>>();
    await working(
      [q],
      (job) => ended.resolve(job),
      () => until("it has ended", () => isEmpty(q)),
    );
    const job = await ended.promise;
    await assert.rejects(
      hf.transaction((tx) => job.complete(tx)),
      ({ code }: { code?: unknown }) => code === "HF_JOB_LOST",
    );
  }),

  "what was completed in a transaction does not fail, and is not given back": kept(async (ground) => {
    const { hf } = ground;
    const [q] = both<string>(ground);
    const contract = await Contract.of(hf, ground.fresh, { ...settings, groupMost: 5 });
    const all = ["failed", "back", "again"];
    await q.enqueueMany(all.map((payload) => ({ payload, key: payload, group: "g" })));
    const worker = await contract.enlist();
    const claim = await contract.claimed(worker);
    const job = (which: string) => ({
      lease: claim.lease,
      place: claim.jobs.findIndex(({ payload }) => payload === which),
    });
    for (const which of all)
      assert.equal(await hf.transaction((tx) => completeIn(contract, tx, worker, job(which))), true);
    await contract.finish(worker, claim, [job("failed").place], "no");
    await contract.finish(worker, claim, [job("again").place], "no", 1);
    await contract.ask((c, how) => contract.store.giveBack(c, worker, [job("back")], how));
    assert.equal(await isEmpty(q), true);
    assert.equal((await q.counts()).failed, 0);
    for (const key of all) assert.equal((await q.enqueue("new", { key })).added, true, `${key} is free`);
    await contract.ask((c, how) => contract.store.workers.retire(c, worker, how));
  }),

  "transactional: each job's effects once, those of one that fails undone": kept(async (ground) => {
    const { hf } = ground;
    const name = await table(ground);
    const [q, same] = both<number>(ground, { retries: 1, backoff: { baseMs: 1 } });
    await q.enqueueMany(
      Array.from({ length: 20 }, (_, n) => ({
        payload: n,
        ...(n % 3 === 0 && { group: "g", key: `k${n}` }),
      })),
    );
    const troubles: unknown[] = [];
    const started = [q, same].map((each) =>
      each.work(
        async ({ payload, attempt }, tx) => {
          await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES (${String(attempt)}, ${payload})`);
          if (payload === 7 || (payload === 9 && attempt === 1)) throw new Error("no");
        },
        { transactional: true, concurrency: 2, pollMs: 50, onTrouble: (error) => void troubles.push(error) },
      ),
    );
    await until("all have ended", () => isEmpty(q));
    await Promise.all(started.map((worker) => worker.stop()));
    assert.deepEqual(troubles, []);
    // First, as their errors say why an effect is missing.
    assert.deepEqual(
      (await q.failed()).map(({ payload, attempts, error }) => [payload, attempts, error.split("\n")[0]]),
      [[7, 2, "Error: no"]],
    );
    const rows = await hf.transaction((tx) => tx.query(sql`SELECT k, n FROM ${sql.id(name)} ORDER BY n`));
    assert.deepEqual(
      rows.map(({ n }) => Number(n)),
      Array.from({ length: 20 }, (_, n) => n).filter((n) => n !== 7),
    );
    assert.equal(String(rows.find(({ n }) => Number(n) === 9)?.["k"]), "2");
  }),

  "transactional: the next job of a transaction finds the caller's own settings after one that fails": kept(
    async (ground) => {
      const name = await table(ground);
      const [q] = both<number>(ground, { retries: 0 });
      await q.enqueueMany(
        Array.from({ length: 40 }, (_, payload) => ({ payload, ...(payload < 20 && { group: "g" }) })),
      );
      const worker = q.work(
        async ({ payload }, tx) => {
          // A name without a schema: it is found by the caller's settings.
          await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES ('k', ${payload})`);
          if (payload % 2 === 0) throw new Error("no");
        },
        { transactional: true, concurrency: 1, pollMs: 50 },
      );
      await until("all have ended", () => isEmpty(q));
      await worker.stop();
      const failed = await q.failed();
      assert.deepEqual(new Set(failed.map(({ error }) => error.split("\n")[0])), new Set(["Error: no"]));
      assert.equal(failed.length, 20);
    },
  ),

  "serial: while somebody's transaction has the first job of a group, the second one does not begin": kept(
    async (ground) => {
      const [q, same] = both<string>(ground, { groups: { serial: true } });
      const seen: string[] = [];
      for (const how of ["discard", "replace"] as const) {
        const group = how;
        const first = await q.enqueue(`${how} 1`, { group, key: how });
        await q.enqueue(`${how} 2`, { group });
        const taken = new TestGate();
        const undone = ground.hf.transaction(async () => {
          if (how === "discard") assert.equal(await q.discard(first.id), 1);
          else await q.enqueue("never", { group, key: how, onDuplicate: "replace" });
          taken.open();
          // Long enough for a worker that passes over what somebody has.
          await ground.hf.outside(() => sleep(300));
          throw new Error("rolled back");
        });
        await Promise.race([taken.opened, undone]);
        await working(
          [same],
          ({ payload }) => void seen.push(payload),
          async () => {
            await assert.rejects(undone, /rolled back/);
            await until("all have run", () => isEmpty(q));
          },
        );
      }
      assert.deepEqual(seen, ["discard 1", "discard 2", "replace 1", "replace 2"]);
    },
  ),

  "stop gives back what was not started, without counting it": kept(async (ground) => {
    const [q] = both<number>(ground);
    await q.enqueueMany(Array.from({ length: 6 }, (_, n) => ({ payload: n, ...(n > 2 && { group: "g" }) })));
    const contract = await Contract.of(ground.hf, ground.fresh);
    const worker = await contract.enlist();
    const claim = await contract.claimed(worker);
    assert.equal(claim.jobs.length, 6);
    const unstarted = claim.jobs.map((_, place) => ({ lease: claim.lease, place }));
    const give = (some: typeof unstarted) =>
      contract.ask((c, how) => contract.store.giveBack(c, worker, some, how));
    await give(unstarted.slice(0, 4));
    // Twice is as once.
    await give(unstarted.slice(0, 4));
    assert.equal((await q.counts()).waiting, 4);
    await give(unstarted.slice(4));
    await give(unstarted);
    assert.deepEqual(await contract.finish(worker, claim), new Set());
    const seen: [number, number][] = [];
    await working(
      [q],
      ({ payload, attempt }) => void seen.push([payload, attempt]),
      () => until("all have run", () => isEmpty(q)),
    );
    assert.deepEqual(
      seen.toSorted(([a], [b]) => a - b),
      Array.from({ length: 6 }, (_, n) => [n, 1]),
    );
    await contract.ask((c, how) => contract.store.workers.retire(c, worker, how));
  }),

  "a claim gives each job to one claimant, however many claim at once": kept(async (ground) => {
    const [q] = both<number>(ground);
    await q.enqueueMany(
      Array.from({ length: 60 }, (_, n) => ({ payload: n, ...(n % 2 && { group: `g${n % 5}` }) })),
    );
    const contracts = [
      await Contract.of(ground.hf, ground.fresh, settings),
      await Contract.of(ground.other, ground.fresh),
    ];
    const got: number[] = [];
    const leases: number[] = [];
    await Promise.all(
      Array.from({ length: 6 }, async (_, i) => {
        const contract = contracts[i % 2] as Contract;
        const worker = await contract.enlist();
        for (;;) {
          const claim = await contract.claim(worker, 4);
          if (claim.lease === undefined) {
            // What others are choosing from is passed over: it is empty when all of it was given.
            if (got.length === 60) break;
            continue;
          }
          got.push(...claim.jobs.map(({ payload }) => payload as number));
          leases.push(claim.lease);
          assert.deepEqual(await contract.finish(worker, claim), new Set([claim.lease]));
        }
        await contract.ask((c, how) => contract.store.workers.retire(c, worker, how));
      }),
    );
    assert.deepEqual(
      got.toSorted((a, b) => a - b),
      Array.from({ length: 60 }, (_, n) => n),
    );
    assert.equal(new Set(leases).size, leases.length);
    assert.equal(await isEmpty(q), true);
  }),

  "what a dead worker had goes to others, with one attempt more, and its word counts for nothing": kept(
    async (ground) => {
      const { hf } = ground;
      const [q] = both<string>(ground, { retries: 2 });
      const contract = await Contract.of(hf, ground.fresh, settings);
      await q.enqueueMany([
        { payload: "lost", key: "a", group: "g" },
        { payload: "done", key: "b" },
        { payload: "marked", key: "c" },
        { payload: "part", key: "d" },
      ]);
      const worker = await contract.enlist(1);
      const claim = await contract.claimed(worker);
      const place = (payload: string) => claim.jobs.findIndex((job) => job.payload === payload);
      const complete = (which: string) =>
        hf.transaction((tx) => completeIn(contract, tx, worker, { lease: claim.lease, place: place(which) }));
      await contract.finish(worker, claim, [place("done")]);
      assert.equal(await complete("marked"), true);
      await contract.sweep();
      assert.deepEqual(await contract.finish(worker, claim), new Set());
      assert.equal(await complete("lost"), false);
      assert.equal((await contract.claim(worker)).lease, undefined);
      const next = await contract.enlist();
      const again = await contract.claimed(next);
      assert.ok(again.lease > claim.lease, "the number of a lease grows");
      assert.deepEqual(
        again.jobs.map(({ payload, failures }) => [payload, failures]),
        [
          ["lost", 1],
          ["part", 1],
        ],
      );
      assert.equal((await q.enqueue("new", { key: "b" })).added, true);
      assert.equal((await q.enqueue("new", { key: "c" })).added, true);
      assert.equal((await q.enqueue("new", { key: "a" })).added, false);
      await contract.finish(next, again);
      await contract.ask((c, how) => contract.store.workers.retire(c, next, how));
    },
  ),

  "one that is lost in its last attempt has failed, and its key is free": kept(async (ground) => {
    const [q] = both<string>(ground);
    const contract = await Contract.of(ground.hf, ground.fresh, { ...settings, attempts: 1, groupMost: 1 });
    await q.enqueueMany([
      { payload: "x", key: "k", group: "g" },
      { payload: "y", group: "g" },
    ]);
    const worker = await contract.enlist(1);
    assert.equal((await contract.claimed(worker)).jobs.length, 1);
    await contract.sweep();
    const [failed] = await q.failed();
    assert.deepEqual([failed?.payload, failed?.attempts], ["x", 1]);
    assert.match(failed?.error ?? "", /lost/);
    assert.equal((await q.enqueue("new", { key: "k" })).added, true);
    // Its group has room again.
    const next = await contract.enlist();
    const claim = await contract.claimed(next);
    assert.ok(claim.jobs.some(({ payload }) => payload === "y"));
    assert.deepEqual(await contract.finish(next, claim, undefined, "no"), new Set([claim.lease]));
    await contract.ask((c, how) => contract.store.workers.retire(c, next, how));
  }),

  "an end that is told twice counts once; a claim whose answer was lost is found": kept(async (ground) => {
    const [q] = both<number>(ground);
    const contract = await Contract.of(ground.hf, ground.fresh, { ...settings, groupMost: 2 });
    await q.enqueueMany(Array.from({ length: 4 }, (_, n) => ({ payload: n, group: "g" })));
    const worker = await contract.enlist();
    const claim = await contract.claimed(worker);
    assert.equal(claim.jobs.length, 2);
    const full = await contract.claim(worker);
    assert.deepEqual([full.lease, "why" in full && full.why], [undefined, "full"]);
    for (const _ of [1, 2]) await contract.finish(worker, claim, [0], "no");
    assert.equal((await q.counts()).failed, 1);
    assert.equal((await q.counts()).running, 1);
    // One has ended, so there is room for one.
    const more = await contract.claimed(worker);
    assert.equal(more.jobs.length, 1);
    const astray = await contract.ask((c, how) =>
      contract.store.workers.astray(c, worker, [claim.lease], how),
    );
    assert.deepEqual(astray, [{ lease: more.lease, place: 0 }]);
    await contract.ask((c, how) => contract.store.giveBack(c, worker, astray, how));
    assert.equal((await q.counts()).waiting, 2);
    await contract.finish(worker, claim);
    assert.equal((await q.counts()).running, 0);
    await contract.ask((c, how) => contract.store.workers.retire(c, worker, how));
    await q.prune({ olderThanMs: 0 });
    assert.equal((await q.counts()).failed, 0);
  }),

  "what is there can be listed": kept(async (ground) => {
    const { hf, fresh } = ground;
    const [q] = both<number>(ground);
    assert.equal(await jobsOf(hf, fresh, { state: "waiting" }), undefined);
    await q.enqueueMany([
      { payload: 1, priority: 2 },
      { payload: 2 },
      { payload: 3, group: "g" },
      { payload: 4, delayMs: 86_400_000, key: "k" },
    ]);
    const contract = await Contract.of(hf, fresh);
    const worker = await contract.enlist();
    const claim = await contract.claimed(worker, 2);
    const ids = async (state: "waiting" | "delayed" | "running" | "failed") => {
      const found: number[] = [];
      for (let after: string | undefined; ;) {
        const page = await jobsOf(hf, fresh, { state, limit: 1, ...(after !== undefined && { after }) });
        found.push(...(page?.jobs.map(({ id }) => id) ?? []));
        if ((after = page?.next) === undefined) return found;
      }
    };
    assert.equal((await ids("waiting")).length, 1);
    assert.equal((await ids("delayed")).length, 1);
    assert.deepEqual(
      await ids("running"),
      claim.jobs.map(({ id }) => id),
    );
    for (const { id } of claim.jobs) assert.equal((await q.inspect(id))?.state, "running");
    const { waiting, delayed, running, workers } = await q.counts();
    assert.deepEqual(
      { waiting, delayed, running, workers },
      { waiting: 1, delayed: 1, running: 2, workers: 1 },
    );
    const mine = (await workersOf(hf)).filter((each) => each.queue === fresh);
    assert.deepEqual(
      mine.map(({ alive, jobs }) => [alive, jobs]),
      [[true, 2]],
    );
    const [info] = await queues(hf, { names: [fresh] });
    assert.deepEqual([info?.name, info?.running], [fresh, 2]);
    await contract.finish(worker, claim, undefined, "no\nmore");
    assert.equal((await ids("failed")).length, 2);
    await contract.ask((c, how) => contract.store.workers.retire(c, worker, how));
    assert.equal((await q.counts()).workers, 0);
  }),

  "who was given up for dead learns it at its next word": kept(async (ground) => {
    const [q] = both<string>(ground);
    await q.enqueue("x");
    const contract = await Contract.of(ground.hf, ground.fresh, { ...settings, attempts: 1 });
    const worker = await contract.enlist(1);
    await contract.claimed(worker);
    await contract.sweep();
    const beat = () => contract.ask((c, how) => contract.store.workers.beat(c, [worker], how));
    assert.deepEqual(await beat(), new Set());
    const claim = await contract.claim(worker);
    assert.deepEqual([claim.lease, "why" in claim && claim.why], [undefined, "lost"]);
  }),
});

/** In a transaction, as `job.complete(tx)` does it. */
async function completeIn(
  { store }: Contract,
  tx: unknown,
  worker: number,
  job: { readonly lease: number; readonly place: number },
): Promise<boolean> {
  return scopeOf(tx, "queue").work(({ connection }) =>
    store.completion.complete(connection, worker, job, { free: false, waitMs: 10_000 }),
  );
}
