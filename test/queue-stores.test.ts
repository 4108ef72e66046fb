/**
 * PostgreSQL's functions and the generic store, which decides by the same rules as every engine: the same states and the same
 * calls, at the same moment of the same clock, must come to the same answers and to the same rows, column by column. Then both at
 * once, on the same tables.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { type Database, type Holdfast, type SqlConnection, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Queue, type Worker, queue } from "holdfast/queue";
import { Pool, type PoolClient } from "pg";
import {
  type MockInstance,
  afterAll,
  beforeAll,
  beforeEach,
  describe,
  expect,
  inject,
  test,
  vi,
} from "vitest";
import { replacing } from "./harness/catalog.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";
import { generic } from "./sketches/generic-queues.ts";

const why = unavailable("postgres");
let database: TestDatabase;
let pool: Pool;

beforeAll(async () => {
  if (why !== undefined) return;
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 30 });
  await holdfast(fromPg(pool)).migrate();
});

afterAll(async () => {
  await pool?.end();
  await database?.drop();
});

beforeEach(({ skip }) => skip(why !== undefined, why));

type Store = Extract<Database<unknown, SqlConnection>["engine"]["queues"], { claim: unknown }>;

const tables = [
  "",
  "_ready",
  "_grouped",
  "_delayed",
  "_failed",
  "_group",
  "_key",
  "_worker",
  "_lease",
  "_mark",
];
const how = { free: false, waitMs: 5000 };
const now = 1_800_000_000_123_457;
const second = 1_000_000;

/** A moment, as a literal. */
const at = (micros: number | undefined) =>
  micros === undefined ? "NULL" : `(timestamptz 'epoch' + ${micros} * interval '1 microsecond')`;
const text = (value: string | undefined) => (value === undefined ? "NULL" : `'${value}'`);

interface Call {
  readonly name: string;
  run(store: Store, connection: SqlConnection): Promise<unknown>;
}

/** Random states of one queue, and calls that fit them. */
class World {
  readonly #random: () => number;
  readonly statements: string[] = [];
  readonly settings: { attempts: number; most?: number; groupMost?: number; rate?: number; ordered: boolean };
  readonly leases: { id: number; worker: number; jobs: { id: number; key?: string; group?: string }[] }[] =
    [];
  readonly #free: string[] = [];
  #id = 0;

  constructor(seed: number) {
    this.#random = random(seed);
    const ordered = this.#chance(0.25);
    const most = this.#chance(0.2) ? this.#int(1, 8) : undefined;
    const groupMost = ordered ? 1 : this.#chance(0.3) ? this.#int(1, 3) : undefined;
    const rate = this.#chance(0.25) ? this.#int(1, 3) : undefined;
    this.settings = {
      attempts: this.#int(1, 3),
      ...(most && { most }),
      ...(groupMost && { groupMost }),
      ...(rate && { rate }),
      ordered,
    };
    this.#free = ["a", "b", "c", "d", "e", "f"];
    this.#make();
  }

  #int(from: number, to: number): number {
    return from + Math.floor(this.#random() * (to - from + 1));
  }

  #chance(p: number): boolean {
    return this.#random() < p;
  }

  #one<T>(of: readonly T[]): T {
    return of[this.#int(0, of.length - 1)] as T;
  }

  #group(): string | undefined {
    return this.#chance(0.5) ? this.#one(["g", "h", "ö", "z"]) : undefined;
  }

  #job(insert: (job: { id: number; key?: string; group?: string }, columns: string) => void): void {
    const id = ++this.#id;
    const key = this.#chance(0.3) ? this.#free.shift() : undefined;
    const group = this.#group();
    const priority = this.#int(-1, 1);
    const attempt = this.#int(0, 2);
    const when = now - this.#int(0, 100 * second);
    const job = { id, ...(key && { key }), ...(group && { group }) };
    insert(job, `1, ${priority}, ${attempt}, ${id}, ${at(when)}, ${text(key)}`);
    // One that runs may have lost it to another, which took its place.
    const holder = this.#chance(0.15) ? 900 + id : id;
    if (key) this.statements.push(`INSERT INTO holdfast.queue_key VALUES (1, '${key}', ${holder})`);
  }

  #payload(id: number): string {
    return this.#one([`${id}`, `{"n": ${id}, "x": [1.50, "a,]\\""]}`, `"ä ${id}"`, "null"]);
  }

  #make(): void {
    const { attempts, most, groupMost, rate, ordered } = this.settings;
    this.statements.push(
      `INSERT INTO holdfast.queue (id, name, attempts, most, group_most, group_rate, group_per, ordered) OVERRIDING SYSTEM VALUE
       VALUES (1, 'q', ${attempts}, ${most ?? "NULL"}, ${groupMost ?? "NULL"}, ${rate ?? "NULL"}, ${rate ? 10_000 : "NULL"}, ${ordered})`,
    );
    const jobs = "(queue, priority, attempt, id, at, key";
    for (let n = this.#int(0, 8); n > 0; n--)
      this.#job((job, columns) => {
        const payload = text(this.#payload(job.id));
        if (this.#chance(0.25))
          this.statements.push(
            `INSERT INTO holdfast.queue_delayed ${jobs}, run_at, grp, payload) VALUES (${columns}, ${at(now + this.#int(-5, 5) * second)}, ${text(job.group)}, ${payload})`,
          );
        else if (job.group)
          this.statements.push(
            `INSERT INTO holdfast.queue_grouped ${jobs}, grp, payload) VALUES (${columns}, ${text(job.group)}, ${payload})`,
          );
        else
          this.statements.push(
            `INSERT INTO holdfast.queue_ready ${jobs}, payload) VALUES (${columns}, ${payload})`,
          );
      });
    for (let n = this.#int(0, 3); n > 0; n--) {
      const id = ++this.#id;
      const key = this.#chance(0.4) ? this.#one(["a", "b", "x"]) : undefined;
      this.statements.push(
        `INSERT INTO holdfast.queue_failed (queue, id, priority, attempt, at, failed_at, key, grp, payload, error)
         VALUES (1, ${id}, 0, 3, ${at(now - 50 * second)}, ${at(now - this.#int(1, 40) * second)}, ${text(key)}, ${text(this.#group())}, '1', 'no')`,
      );
    }
    for (const worker of [1, 2])
      this.statements.push(
        `INSERT INTO holdfast.queue_worker (id, queue, beat, since, ttl, name) OVERRIDING SYSTEM VALUE
         VALUES (${worker}, 1, ${worker === 2 && this.#chance(0.5) ? "'-infinity'" : at(now - (worker === 1 ? 1 : 60) * second)}, ${at(now - 90 * second)}, 30000, 'w${worker}')`,
      );
    this.#leaseSome();
    for (const group of ["g", "h", "ö", "z"]) if (this.#chance(0.7)) this.#makeGroup(group);
  }

  #leaseSome(): void {
    for (const [i, worker] of [1, 1, 2, 3].entries()) {
      if (this.#chance(0.3)) continue;
      const id = i + 1;
      const jobs: { id: number; key?: string; group?: string }[] = [];
      const written: string[] = [];
      for (let n = this.#int(1, 3); n > 0; n--)
        this.#job((job) => {
          jobs.push(job);
          written.push(
            `[${job.id},${this.#int(0, 2)},0,${Math.floor(now / 1000) - this.#int(0, 9000)},${JSON.stringify(job.key ?? null)},${JSON.stringify(job.group ?? null)},${this.#payload(job.id)}]`,
          );
        });
      const done = this.#chance(0.3) ? "'{0}'" : "NULL";
      this.leases.push({ id, worker, jobs });
      this.statements.push(
        `INSERT INTO holdfast.queue_lease (id, worker, queue, counted, size, done, jobs, since) OVERRIDING SYSTEM VALUE
         VALUES (${id}, ${worker}, 1, ${this.#chance(0.7)}, ${jobs.length}, ${done}, ${text(`[${written.join(",")}]`)}, ${at(now - 5 * second)})`,
      );
      if (this.#chance(0.3))
        this.statements.push(
          `INSERT INTO holdfast.queue_mark VALUES (${id}, ${this.#int(0, jobs.length - 1)})`,
        );
    }
  }

  #makeGroup(group: string): void {
    const since = this.#chance(0.6) ? now - this.#one([0, 1, 9, 10, 10, 11, 20]) * second : undefined;
    const next = this.settings.ordered && this.#chance(0.4) ? now + this.#int(-5, 5) * second : undefined;
    this.statements.push(
      `INSERT INTO holdfast.queue_group (queue, grp, running, since, started, next, head, head_priority, floor, floor_priority)
       VALUES (1, '${group}', ${this.#int(0, 3)}, ${at(since)}, ${this.#int(0, 3)}, ${at(next)},
         ${next === undefined ? "NULL, NULL" : `${this.#int(1, this.#id)}, 0`}, ${this.#chance(0.2) ? "0, 0" : "NULL, NULL"})`,
    );
  }

  /** One of a lease's, or of one that is not there. */
  #places() {
    return this.leases.flatMap(({ id, jobs }) =>
      jobs.flatMap((job, place) => (this.#chance(0.6) ? [{ lease: id, place, job }] : [])),
    );
  }

  call(): Call {
    const makers = [
      this.#add,
      this.#add,
      this.#claim,
      this.#claim,
      this.#finish,
      this.#finish,
      this.#giveBack,
      this.#look,
      this.#take,
      this.#tend,
      this.#revive,
      this.#discard,
      this.#prune,
      this.#lists,
    ];
    return this.#one(makers).call(this);
  }

  #add(): Call {
    const jobs = Array.from({ length: this.#int(1, 5) }, () => ({
      payload: this.#payload(0),
      priority: this.#int(-1, 1),
      runAt: this.#chance(0.3) ? Math.floor(now / 1000) + this.#int(-3, 3) * 1000 : undefined,
      delayMs: undefined,
      group: this.#group(),
      key: this.#chance(0.5) ? this.#one(["a", "b", "c", "new"]) : undefined,
      replace: this.#chance(0.4),
    }));
    const joined = this.#chance(0.3);
    return {
      name: `add ${JSON.stringify(jobs)}`,
      run: (store, connection) => store.add(connection, 1, jobs, { ...how, tell: undefined, joined }),
    };
  }

  #claim(): Call {
    const whole = this.#chance(0.5);
    const call = {
      queue: 1,
      worker: this.#chance(0.9) ? 1 : 99,
      most: this.#int(1, 12),
      where: {
        floors: new Map(this.#chance(0.5) ? [[0, this.#int(0, 5)] as const, [1, 0] as const] : []),
        after: this.#chance(0.3) ? Math.floor(now / 1000) - this.#int(0, 4000) : undefined,
      },
      whole,
      onward: this.#chance(0.5) ? this.#one(["g", "h", "zz"]) : undefined,
    };
    return {
      name: `claim ${JSON.stringify({ ...call, floors: [...call.where.floors] })}`,
      run: (store, connection) => store.claim(connection, call, how),
    };
  }

  #finish(): Call {
    const worker = this.#int(1, 2);
    const waiting = new Set<string>();
    const ended = this.#places().map(({ lease, place, job }) => {
      const { id, key, group } = job;
      const failed = this.#chance(0.5);
      // A group in order has one at work: that which it waits for is one.
      const first = group === undefined || !waiting.has(group);
      if (group !== undefined) waiting.add(group);
      const again = this.#chance(0.6) && first ? this.#int(0, 4_000_000) / 1000 : undefined;
      return {
        lease,
        place,
        counted: this.countedOf(lease),
        job: { id, failures: 0, priority: 0, at: 0, key, group, payload: null },
        marked: this.#chance(0.2),
        failure: failed ? { error: "no", again } : undefined,
      };
    });
    const whole = this.leases.flatMap(({ id }) => (this.#chance(0.3) ? [id] : []));
    return {
      name: `finish ${JSON.stringify({ worker, whole, ended })}`,
      run: (store, connection) => store.finish(connection, { queue: 1, worker, whole, ended }, how),
    };
  }

  /** As it was written. */
  countedOf(lease: number): boolean {
    const row = this.statements.find(
      (each) => each.startsWith("INSERT INTO holdfast.queue_lease") && each.includes(`VALUES (${lease}, `),
    );
    return row?.includes("1, true, ") ?? false;
  }

  #giveBack(): Call {
    const worker = this.#int(1, 2);
    const places = this.#places().map(({ lease, place }) => ({ lease, place }));
    return {
      name: `give back ${JSON.stringify({ worker, places })}`,
      run: (store, connection) => store.giveBack(connection, worker, places, how),
    };
  }

  #look(): Call {
    const look = {
      sweep: this.#one(["no", "yes", "thorough"] as const),
      idle: [{ queue: 1, floors: new Map([[0, this.#int(0, 6)]]), after: undefined }],
      whole: this.#chance(0.5),
    };
    return {
      name: `look ${JSON.stringify(look)}`,
      run: (store, connection) => store.look(connection, look, how),
    };
  }

  #take(): Call {
    const what = {
      most: this.#int(1, 8),
      where: { floors: new Map(this.#chance(0.5) ? [[0, this.#int(0, 5)] as const] : []), after: undefined },
      whole: this.#chance(0.5),
      onward: this.#chance(0.5) ? this.#one(["g", "h", "zz"]) : undefined,
      savepoint: "s",
    };
    const failure = this.#one([
      undefined,
      { error: "no", again: undefined },
      { error: "no", again: this.#int(0, 9_000_000) / 1000 },
    ]);
    return {
      name: `take ${JSON.stringify({ ...what, failure })}`,
      async run({ transactional }, connection) {
        const taken = await transactional.take(connection, 1, what, how);
        await transactional.another(connection, "s", true);
        if (taken.jobs.length > 0) await transactional.settle(connection, 1, taken.jobs, failure, how);
        return taken;
      },
    };
  }

  #tend(): Call {
    const what = {
      after: this.#chance(0.5) ? Math.floor(now / 1000) - 2000 : undefined,
      whole: this.#chance(0.5),
    };
    return {
      name: `tend ${JSON.stringify(what)}`,
      run: ({ transactional }, connection) => transactional.tend(connection, 1, what, how),
    };
  }

  #ids(): number[] {
    return Array.from({ length: this.#id }, (_, i) => i + 1).filter(() => this.#chance(0.5));
  }

  #revive(): Call {
    const which = this.#chance(0.5)
      ? { ids: this.#ids() }
      : { after: this.#int(0, 3), upTo: this.#chance(0.3) ? this.#id : undefined, most: this.#int(1, 3) };
    return {
      name: `revive ${JSON.stringify(which)}`,
      run: ({ administration }, connection) => administration.revive(connection, 1, which, how),
    };
  }

  #discard(): Call {
    const ids = this.#ids();
    return {
      name: `discard ${ids.join()}`,
      run: ({ administration }, connection) => administration.discard(connection, 1, ids, how),
    };
  }

  #prune(): Call {
    const older = {
      before: this.#chance(0.5) ? now / 1000 - 20_000 : undefined,
      ageMs: this.#int(0, 30) * 1000,
    };
    const from = { after: 0, most: this.#int(1, 3) };
    return {
      name: `prune ${JSON.stringify({ older, from })}`,
      run: ({ administration }, connection) => administration.prune(connection, 1, older, from, how),
    };
  }

  #lists(): Call {
    const ids = this.#ids();
    return {
      name: `lists ${ids.join()}`,
      async run({ lists, workers, completion, ...store }, connection) {
        const pages = [];
        for (const state of ["waiting", "delayed", "running", "failed"] as const) {
          const page = await lists.jobs(connection, "q", { state, after: undefined, most: 3 });
          pages.push(page?.jobs);
          const { next } = page ?? {};
          if (next !== undefined)
            pages.push((await lists.jobs(connection, "q", { state, after: next, most: 2 }))?.jobs);
        }
        const found = [];
        for (const id of ids) found.push(await lists.find(connection, 1, id));
        return {
          pages,
          found,
          counts: await lists.counts(connection, 1),
          queues: await lists.queues(connection, undefined),
          failed: await lists.failed(connection, 1, 1, 10),
          workers: await lists.workers(connection),
          astray: await workers.astray(connection, 1, [1], how),
          beat: await workers.beat(connection, [1, 2, 9], how),
          complete: await completion.complete(connection, 1, { lease: 1, place: 0 }, how),
          completed: await completion.completed(
            connection,
            [
              { lease: 1, place: 0 },
              { lease: 2, place: 1 },
            ],
            how,
          ),
          open: await store.open(
            connection,
            "q",
            { attempts: 9, most: 2, groupMost: undefined, groupRate: 1, groupPer: 5, ordered: true },
            how,
          ),
          enlist: await workers.enlist(connection, 1, { ttlMs: 5, name: "n", lock: undefined }, how),
          retire: [await workers.retire(connection, 1, how), await workers.retire(connection, 2, how)],
          pause: await store.administration.pause(connection, 1, true, how),
        };
      },
    };
  }
}

/** Sets in their order, and moments to the microsecond: what a float of the server's has beyond it is noise. */
function plain(value: unknown): unknown {
  if (typeof value === "number") return Math.round(value * 1000) / 1000;
  if (value instanceof Set) return [...(value as Set<number>)].toSorted((a, b) => a - b);
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, plain(each)]));
}

describe("the functions and the generic store", () => {
  let client: PoolClient;
  let connection: SqlConnection;
  let coin: MockInstance | undefined;
  const stores: [string, Store][] = [];

  beforeAll(async () => {
    if (why !== undefined) return;
    client = await pool.connect();
    // The server's clock stands still, and its coins fall as ours do, for functions and statements of this session.
    coin = vi.spyOn(Math, "random").mockReturnValue(0.25);
    await client.query(`BEGIN; ${replacing("random", "", "float8", "still.clock", "0.25")};
      ${replacing("clock_timestamp", "", "timestamptz", "still.clock", at(now))};
      ALTER TABLE holdfast.queue_lease ALTER COLUMN since SET DEFAULT clock_timestamp();
      ALTER TABLE holdfast.queue_worker ALTER COLUMN since SET DEFAULT clock_timestamp();
      COMMIT; SET still.clock = 'yes'`);
    const functions = fromPg(pool);
    connection = functions.join(client);
    stores.push(["functions", functions.engine.queues as Store]);
    stores.push(["generic", generic(functions).engine.queues as Store]);
  });

  afterAll(async () => {
    coin?.mockRestore();
    await client?.query("RESET still.clock");
    client?.release();
  });

  /** What a store answers, and what is in the tables then. Nothing of it is kept. */
  async function outcome(world: World, store: Store, call: Call) {
    await client.query("BEGIN");
    try {
      await client.query(`SELECT setval('holdfast.queue_job_id', 1000), setval('holdfast.queue_lease_id_seq', 2000), setval('holdfast.queue_worker_id_seq', 3000);
        ${world.statements.join(";\n")}`);
      const answer = plain(await call.run(store, connection));
      const rows: Record<string, unknown> = {};
      for (const name of tables) {
        const { rows: found } = await client.query<{ row: Record<string, unknown> }>(
          `SELECT to_jsonb(t) AS row FROM holdfast.queue${name} t ORDER BY to_jsonb(t)::text COLLATE "C"`,
        );
        // Places that are done are a set.
        rows[name] = found.map(({ row }) =>
          Array.isArray(row["done"])
            ? { ...row, done: (row["done"] as number[]).toSorted((a, b) => a - b) }
            : row,
        );
      }
      return { answer, rows };
    } finally {
      await client.query("ROLLBACK");
    }
  }

  test("the clock stands still for both", async () => {
    const { rows } = await client.query<{ same: boolean }>(`SELECT clock_timestamp() = ${at(now)} AS same`);
    expect(rows).toEqual([{ same: true }]);
  });

  const rounds = process.env["HOLDFAST_LONG"] ? 40 : 4;
  const perRound = 150;
  test.for(Array.from({ length: rounds }, (_, i) => inject("seed") + i * 7919))(
    "answer the same and write the same, seed %i",
    async (seed) => {
      for (let i = 0; i < perRound; i++) {
        const world = new World(seed * 1000 + i);
        const call = world.call();
        const [[, functions], [, other]] = stores as [[string, Store], [string, Store]];
        const expected = await outcome(world, functions, call);
        const found = await outcome(world, other, call);
        const state = `seed ${seed * 1000 + i}: ${call.name}\n${world.statements.join(";\n")}`;
        expect(found, state).toEqual(expected);
      }
    },
  );
});

describe("both at once, on the same tables", () => {
  interface Mixed {
    readonly pools: readonly Pool[];
    readonly instances: readonly Holdfast<PoolClient>[];
  }
  let mixed: Mixed;

  beforeAll(() => {
    if (why !== undefined) return;
    const pools = Array.from({ length: 4 }, () => new Pool({ connectionString: database.url, max: 8 }));
    const databases = pools.map((each, i) => (i % 2 ? generic(fromPg(each)) : fromPg(each)));
    mixed = { pools, instances: databases.map((each) => holdfast(each)) };
  });

  afterAll(async () => {
    for (const hf of mixed?.instances ?? []) await hf.close();
    for (const each of mixed?.pools ?? []) await each.end();
  });

  const left = async () => {
    const counts: Record<string, number> = {};
    for (const name of ["ready", "grouped", "delayed", "key", "lease", "mark"]) {
      const { rows } = await pool.query<{ n: number }>(
        `SELECT count(*)::int AS n FROM holdfast.queue_${name}`,
      );
      counts[name] = rows[0]?.n as number;
    }
    return counts;
  };

  const nothing = { ready: 0, grouped: 0, delayed: 0, key: 0, lease: 0, mark: 0 };

  test.for([
    ["plain", {}],
    ["limited groups", { groups: { concurrency: 2 } }],
    ["serial groups", { groups: { serial: true } }],
    ["a limited queue", { concurrency: 3 }],
  ] as const)("each job has its effect once: %s", async ([name, options]) => {
    const seed = inject("seed");
    const chance = random(seed);
    const of: Queue<number>[] = mixed.instances.map((hf) =>
      queue<number>(hf, `mixed ${name}`, { retries: 20, backoff: { baseMs: 1, maxMs: 20 }, ...options }),
    );
    const done = new Map<number, number>();
    const running = new Map<string, number>();
    let [at_once, most, mostOfGroup] = [0, 0, 0];
    const troubles: unknown[] = [];
    const workers: Worker[] = of.map((each) =>
      each.work(
        async ({ payload, attempt, group = "" }) => {
          most = Math.max(most, ++at_once);
          running.set(group, (running.get(group) ?? 0) + 1);
          if (group !== "") mostOfGroup = Math.max(mostOfGroup, running.get(group) as number);
          await sleep(chance() * 3);
          running.set(group, (running.get(group) as number) - 1);
          at_once--;
          if (payload % 7 === 0 && attempt < 3) throw new Error("again");
          done.set(payload, (done.get(payload) ?? 0) + 1);
        },
        { concurrency: 3, pollMs: 20, onTrouble: (error) => void troubles.push(error) },
      ),
    );
    try {
      let n = 0;
      await Promise.all(
        of.map(async (each) => {
          for (let i = 0; i < 10; i++)
            await each.enqueueMany(
              Array.from({ length: 5 }, () => {
                const payload = n++;
                return {
                  payload,
                  ...(payload % 2 && { group: `g${payload % 6}` }),
                  ...(payload % 3 === 0 && { key: `k${payload}` }),
                  ...(payload % 10 === 0 && { delayMs: 20 }),
                };
              }),
            );
        }),
      );
      await eventually(
        () => done.size === 200 && of[0]?.counts().then((c) => c.waiting + c.running + c.delayed === 0),
        {
          timeout: 120_000,
        },
      );
    } finally {
      await Promise.all(workers.map((worker) => worker.stop()));
    }
    expect(troubles).toEqual([]);
    expect(new Set(done.values())).toEqual(new Set([1]));
    expect(await left()).toEqual(nothing);
    if ("concurrency" in options) expect(most).toBeLessThanOrEqual(3);
    if ("groups" in options) expect(mostOfGroup).toBeLessThanOrEqual("serial" in options.groups ? 1 : 2);
  });

  test("keys: one job of each, whoever adds it", async () => {
    const of = mixed.instances.map((hf) => queue<number>(hf, "mixed keys"));
    const answers = await Promise.all(
      Array.from({ length: 80 }, (_, n) =>
        (of[n % 4] as Queue<number>).enqueue(n, {
          key: `k${n % 5}`,
          onDuplicate: n % 3 ? "ignore" : "replace",
          wait: 60_000,
        }),
      ),
    );
    expect(answers).toHaveLength(80);
    expect(await of[0]?.counts()).toMatchObject({ waiting: 5 });
    const { rows } = await pool.query<{ n: number }>(
      "SELECT count(*)::int AS n FROM holdfast.queue_key k JOIN holdfast.queue_ready r ON r.id = k.job AND r.key = k.key",
    );
    expect(rows).toEqual([{ n: 5 }]);
    await pool.query("DELETE FROM holdfast.queue_ready; DELETE FROM holdfast.queue_key");
  });

  test("a pause of one keeps the others too", async () => {
    const of = mixed.instances.map((hf) => queue<number>(hf, "mixed pause"));
    for (const each of of.slice(0, 2)) {
      await each.pause();
      const paused = await each.enqueueMany(Array.from({ length: 8 }, (_, n) => ({ payload: n })));
      const began: number[] = [];
      const workers = of.map((other) => other.work(({ id }) => void began.push(id), { pollMs: 20 }));
      await eventually(async () => (await each.counts()).workers === 4);
      await sleep(100);
      expect(began).toEqual([]);
      await each.resume();
      await eventually(() => began.length === 8);
      expect(began.toSorted((a, b) => a - b)).toEqual(paused.map(({ id }) => id));
      await Promise.all(workers.map((worker) => worker.stop()));
    }
  });

  test("transactional: each effect once", async () => {
    await pool.query("CREATE TABLE mixed_effect (n int)");
    const of = mixed.instances.map((hf) =>
      queue<number>(hf, "mixed transactional", { retries: 20, backoff: { baseMs: 1, maxMs: 20 } }),
    );
    const troubles: unknown[] = [];
    const workers = of.map((each) =>
      each.work<PoolClient>(
        async ({ payload, attempt }, tx) => {
          await tx.client.query("INSERT INTO mixed_effect VALUES ($1)", [payload]);
          if (payload % 7 === 0 && attempt < 3) throw new Error("again");
        },
        { transactional: true, concurrency: 2, pollMs: 20, onTrouble: (error) => void troubles.push(error) },
      ),
    );
    await Promise.all(
      of.map((each, i) =>
        each.enqueueMany(
          Array.from({ length: 40 }, (_, n) => ({
            payload: i * 40 + n,
            ...(n % 2 && { group: `g${n % 6}` }),
            ...(n % 5 === 0 && { key: `k${i * 40 + n}` }),
          })),
        ),
      ),
    );
    await eventually(async () => {
      const { waiting, delayed } = (await of[0]?.counts()) ?? {};
      return waiting === 0 && delayed === 0;
    });
    await Promise.all(workers.map((worker) => worker.stop()));
    expect(troubles).toEqual([]);
    const { rows } = await pool.query<{ n: number }>("SELECT n FROM mixed_effect ORDER BY n");
    expect(rows.map(({ n }) => n)).toEqual(Array.from({ length: 160 }, (_, n) => n));
    expect(await left()).toEqual(nothing);
  });
});
