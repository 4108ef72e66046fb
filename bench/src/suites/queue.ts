/**
 * Jobs that do nothing: holdfast/queue next to graphile-worker, pg-boss and BullMQ, all on one PostgreSQL. Workers are
 * processes of their own, each run has a database of its own, and the clock starts with the first job.
 */
import { type ChildProcess, fork } from "node:child_process";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import { Client } from "pg";
import { alternate, median, percentile, inTurns } from "../../../packages/cli/src/bench/measure.ts";
import { oldBinaries } from "../../../test/harness/old-postgres.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";
import {
  type Contestant,
  type Payload,
  type Producer,
  bullMq,
  graphilePlain,
  graphileTuned,
  holdfastGroups,
  holdfastMany,
  holdfastQueue,
  holdfastTransactional,
  pgBoss,
} from "./queue-contestants.ts";
import {
  type FromChild,
  type Order,
  type Outcome,
  type Progress,
  type ToChild,
  now,
} from "./queue-process.ts";

const perCall = 1000;
const steadyRate = 1000;
const slowJobs = 10;
const later = 1_000_000;
/** Nobody waits longer than this for a drain that has stopped. */
const patienceMs = 300_000;

/** A process that works on whatever it is told to. It stays for all rounds: a service is warm. */
class Hand {
  readonly #child: ChildProcess;
  #progress: Progress = { count: 0, first: 0, last: 0 };
  #expected: { type: FromChild["type"]; resolve: (message: FromChild) => void } | undefined;
  readonly #died = Promise.withResolvers<never>();

  constructor() {
    this.#child = fork(fileURLToPath(new URL("./queue-process.ts", import.meta.url)));
    this.#child.on("message", (message: FromChild) => {
      if (message.type === "progress") this.#progress = message.progress;
      if (message.type !== this.#expected?.type) return;
      this.#expected.resolve(message);
      this.#expected = undefined;
    });
    this.#child.once("exit", (code, signal) =>
      this.#died.reject(new Error(`A worker ended with ${code ?? signal}`)),
    );
    this.#died.promise.catch(() => {});
  }

  get progress(): Progress {
    return this.#progress;
  }

  async #ask<T extends FromChild["type"]>(
    message: ToChild,
    type: T,
  ): Promise<Extract<FromChild, { type: T }>> {
    const answer = Promise.withResolvers<FromChild>();
    this.#expected = { type, resolve: answer.resolve };
    this.#child.send(message);
    return (await Promise.race([answer.promise, this.#died.promise])) as Extract<FromChild, { type: T }>;
  }

  async work(order: Order): Promise<void> {
    this.#progress = { count: 0, first: 0, last: 0 };
    await this.#ask({ type: "work", order }, "working");
  }

  async stop(): Promise<Outcome> {
    return (await this.#ask({ type: "stop" }, "outcome")).outcome;
  }

  async kill(): Promise<void> {
    const gone = once(this.#child, "exit");
    this.#child.kill("SIGKILL");
    await gone;
  }

  [Symbol.dispose](): void {
    this.#child.kill("SIGKILL");
  }
}

/** The server, and a database for each run: a copy of one in which the contestant has made its tables. */
class Ground {
  readonly server: EmbeddedPostgres;
  readonly #templates = new Map<string, string>();
  readonly #hands = new Map<string, Hand[]>();
  #made = 0;

  constructor(server: EmbeddedPostgres) {
    this.server = server;
  }

  /** The same processes for all runs of a contestant. */
  hands(contestant: Contestant, count: number): Hand[] {
    const all = this.#hands.get(contestant.name) ?? [];
    this.#hands.set(contestant.name, all);
    while (all.length < count) all.push(new Hand());
    return all.slice(0, count);
  }

  async #template(contestant: Contestant, later: number): Promise<string> {
    const key = `${contestant.name} ${later}`;
    const known = this.#templates.get(key);
    if (known !== undefined) return known;
    const name = `template_${this.#templates.size}`;
    await this.server.createDatabase(name);
    await contestant.migrate(this.server.url(name));
    if (later > 0 && contestant.later) {
      const client = new Client({ connectionString: this.server.url(name) });
      await client.connect();
      await client.query(contestant.later(later));
      await client.end();
    }
    this.#templates.set(key, name);
    return name;
  }

  async database<T>(
    contestant: Contestant,
    body: (url: string, client: Client) => Promise<T>,
    later = 0,
  ): Promise<T> {
    const template = await this.#template(contestant, later);
    const name = `run_${++this.#made}`;
    await this.server.createDatabase(name, template);
    const client = new Client({ connectionString: this.server.url(name) });
    await client.connect();
    try {
      return await body(this.server.url(name), client);
    } finally {
      await client.end();
      await this.server.dropDatabase(name);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const hand of [...this.#hands.values()].flat()) hand[Symbol.dispose]();
    await this.server.stop();
  }
}

interface Drained {
  readonly perSecond: number;
  readonly hundreds: readonly number[];
  readonly addedPerSecond: number;
  /** How long each call of a thousand took. */
  readonly calls: readonly number[];
  readonly walPerJob: number;
}

interface Entry {
  readonly cell: string;
  readonly contestant: Contestant;
  readonly jobs: number;
  readonly processes: number;
  /** Another session has read the tables before the drain, and keeps its snapshot. */
  readonly snapshot?: boolean;
  /** So many jobs are due tomorrow. */
  readonly later?: number;
  /** Where, if not on the server of all others. */
  readonly on?: Ground;
}

async function fill(producer: Producer, jobs: number): Promise<number[]> {
  const calls: number[] = [];
  for (let n = 0; n < jobs; n += perCall) {
    const since = performance.now();
    const payloads = Array.from({ length: Math.min(perCall, jobs - n) }, (_, i): Payload => ({
      n: n + i,
      at: 0,
    }));
    await producer.addMany(payloads);
    calls.push(performance.now() - since);
  }
  return calls;
}

async function drain(usual: Ground, entry: Entry): Promise<Drained> {
  const { contestant, jobs, processes, snapshot = false, later = 0, on: ground = usual } = entry;
  const body = async (url: string, client: Client) => {
    const lsn = async () =>
      Number((await client.query("SELECT pg_current_wal_lsn() - '0/0' AS at")).rows[0].at);
    const producer = await contestant.produce(url);
    const began = await lsn();
    const since = performance.now();
    const calls = await fill(producer, jobs);
    const addedPerSecond = (jobs / (performance.now() - since)) * 1000;
    const added = await lsn();
    await producer.close();
    await client.query("VACUUM ANALYZE");
    await using cleanup = new AsyncDisposableStack();
    if (snapshot) {
      const reader = new Client({ connectionString: url });
      await reader.connect();
      cleanup.defer(() => reader.end());
      await reader.query("BEGIN ISOLATION LEVEL REPEATABLE READ");
      for (const table of contestant.tables) await reader.query(`SELECT count(*) FROM ${table}`);
    }
    const vacuumed = await lsn();
    const hands = ground.hands(contestant, processes);
    await Promise.all(hands.map((hand) => hand.work({ contestant: contestant.name, url, waits: false })));
    const deadline = performance.now() + patienceMs;
    while (hands.reduce((sum, { progress }) => sum + progress.count, 0) < jobs) {
      if (performance.now() > deadline) throw new Error(`${entry.cell}, ${contestant.name}: it does not end`);
      await sleep(20);
    }
    const outcomes = await Promise.all(hands.map((hand) => hand.stop()));
    const ended = await lsn();
    const done = outcomes.reduce((sum, { count }) => sum + count, 0);
    const left = Number((await client.query(contestant.left)).rows[0].left) - later;
    if (done !== jobs || left !== 0)
      throw new Error(`${entry.cell}, ${contestant.name}: ${done} of ${jobs} ran, and ${left} are left`);
    const busy = outcomes.filter(({ count }) => count > 0);
    const ms = Math.max(...busy.map(({ last }) => last)) - Math.min(...busy.map(({ first }) => first));
    return {
      perSecond: (jobs / ms) * 1000,
      hundreds: outcomes.flatMap(({ hundreds }) => hundreds),
      addedPerSecond,
      calls,
      walPerJob: (added - began + ended - vacuumed) / jobs,
    };
  };
  return ground.database(contestant, body, later);
}

/** Statements that a process with nothing to do sends in a second, as the server counts them. */
async function idle(ground: Ground, contestant: Contestant, seconds: number): Promise<number> {
  return ground.database(contestant, async (url, client) => {
    await client.query("CREATE EXTENSION IF NOT EXISTS pg_stat_statements");
    const [hand] = ground.hands(contestant, 1) as [Hand];
    await hand.work({ contestant: contestant.name, url, waits: false });
    // Until it has settled.
    await sleep(5000);
    const calls = async () =>
      Number(
        (
          await client.query(
            "SELECT sum(calls) AS calls FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = current_database()",
          )
        ).rows[0].calls,
      );
    const before = await calls();
    const since = performance.now();
    await sleep(seconds * 1000);
    // Our own question is one of them.
    const sent = (await calls()) - before - 1;
    const rate = (sent / (performance.now() - since)) * 1000;
    await hand.stop();
    return rate;
  });
}

/** So many jobs a second, each enqueued by itself; how long each waited for its handler. */
async function steady(
  ground: Ground,
  contestant: Contestant,
  seconds: number,
): Promise<{ readonly waits: readonly number[]; readonly perSecond: number }> {
  return ground.database(contestant, async (url) => {
    const producer = await contestant.produce(url);
    const [hand] = ground.hands(contestant, 1) as [Hand];
    await hand.work({ contestant: contestant.name, url, waits: true });
    // Listeners settle, and both sides have met.
    await sleep(500);
    const adding: Promise<void>[] = [];
    const began = now();
    const total = Math.round(seconds * steadyRate);
    while (adding.length < total) {
      const due = Math.min(total, Math.floor(((now() - began) / 1000) * steadyRate));
      while (adding.length < due) adding.push(producer.add({ n: adding.length, at: now() }));
      await sleep(1);
    }
    await Promise.all(adding);
    const deadline = performance.now() + patienceMs;
    while (hand.progress.count < total) {
      if (performance.now() > deadline)
        throw new Error(`steady, ${contestant.name}: ${hand.progress.count} of ${total} ran`);
      await sleep(20);
    }
    const { waits, last } = await hand.stop();
    await producer.close();
    // A job that began before it was enqueued: then the clocks are wrong, and so is all that they say.
    if (waits.some((wait) => wait < 0)) throw new Error(`steady, ${contestant.name}: the clocks differ`);
    return { waits, perSecond: (total / (last - began)) * 1000 };
  });
}

/** kill -9 of a process in the middle of slow jobs: how long until all of them have begun again in another. */
async function recovery(ground: Ground, contestant: Contestant): Promise<number> {
  return ground.database(contestant, async (url) => {
    const producer = await contestant.produce(url);
    using victim = new Hand();
    using heir = new Hand();
    const order = { contestant: contestant.name, url, waits: false };
    const begun = async (hand: Hand) => {
      const deadline = performance.now() + 60_000;
      while (hand.progress.count < slowJobs) {
        if (performance.now() > deadline)
          throw new Error(`recovery, ${contestant.name}: nobody has the jobs`);
        await sleep(5);
      }
    };
    await victim.work(order);
    await producer.addMany(Array.from({ length: slowJobs }, (_, n) => ({ n, at: 0, ms: 600_000 })));
    await begun(victim);
    await heir.work(order);
    await sleep(Math.random() * 1000);
    const killed = now();
    await victim.kill();
    await begun(heir);
    const ms = heir.progress.last - killed;
    await heir.kill();
    await producer.close();
    return ms;
  });
}

export async function run({ seconds, note }: SuiteOptions): Promise<Report> {
  await using cleanup = new AsyncDisposableStack();
  // As it comes: fsync and synchronous_commit are on.
  const server = await startPostgres();
  const ground = cleanup.use(new Ground(server));
  const { dependencies } = JSON.parse(
    await readFile(new URL("../../package.json", import.meta.url), "utf8"),
  ) as { dependencies: Record<string, string> };
  const version = (name: string) => dependencies[name] ?? "of unknown version";
  const long = seconds >= 30;
  const count = long ? 5 : 3;
  // As many as a drain of some seconds needs; a short run is for a look.
  const [many, few] = seconds >= 4 ? [100_000, long ? 20_000 : 3000] : [10_000, 1000];
  const jobs = (fast: boolean) => (fast ? many : few);

  const one = "drain, 1 process";
  const two = "drain, 2 processes";
  const old = "drain, 1 process, an old snapshot open";
  const groups = "drain, 1 process, 1,000 groups, at most 5 of each at a time";
  const transactional = "drain, 1 process, inside of the handler's transaction";
  const tomorrow = "drain, 1 process, 1,000,000 jobs are due tomorrow";
  const binDir = oldBinaries();
  const compiling =
    binDir === undefined ? undefined : cleanup.use(new Ground(await startPostgres({ binDir })));
  const jit = "drain, 1 process, a server with JIT";
  const entry = (cell: string, contestant: Contestant, fast: boolean, more: Partial<Entry> = {}): Entry => ({
    cell,
    contestant,
    jobs: jobs(fast),
    processes: 1,
    ...more,
  });
  // Those that are compared stand close to each other.
  const entries = [
    entry(old, graphileTuned, true, { snapshot: true }),
    entry(old, holdfastQueue, true, { snapshot: true }),
    entry(groups, holdfastGroups, true),
    entry(one, holdfastQueue, true),
    entry(one, graphileTuned, true),
    entry(one, pgBoss, true),
    entry(one, bullMq, false),
    entry(one, graphilePlain, false),
    entry(transactional, holdfastTransactional, false),
    entry(two, holdfastQueue, true, { processes: 2 }),
    entry(two, graphileTuned, true, { processes: 2 }),
    entry(two, pgBoss, true, { processes: 2 }),
    entry(two, bullMq, false, { processes: 2 }),
    entry(tomorrow, graphileTuned, true, { later }),
    entry(tomorrow, holdfastQueue, true, { later }),
    ...(compiling
      ? [
          entry(jit, holdfastQueue, true, { on: compiling }),
          entry(jit, graphileTuned, true, { on: compiling }),
          entry(jit, graphilePlain, false, { on: compiling }),
          entry(jit, holdfastTransactional, false, { on: compiling }),
        ]
      : []),
  ];
  note("warming up …");
  for (const each of new Map(
    entries.map((e) => [`${e.contestant.name} ${e.processes} ${e.on ? "jit" : ""}`, e]),
  ).values())
    await drain(ground, { ...each, jobs: (each.jobs === many ? 2000 : 500) * each.processes });
  const drained = await inTurns(entries, count, async (each) => {
    const result = await drain(ground, each);
    note(`${each.cell}: ${each.contestant.name} ${Math.round(result.perSecond)}/s`);
    return result;
  });

  const rows: BenchRow[] = [];
  const walOf = new Map<Entry, number>();
  const drainRow = (each: Entry, cell = each.cell, contestant = each.contestant.name): BenchRow => {
    const results = drained.get(each) ?? [];
    const perSecond = median(results.map((result) => result.perSecond));
    const walPerJob = Math.round(median(results.map((result) => result.walPerJob)));
    walOf.set(each, walPerJob);
    return {
      cell,
      contestant,
      opsPerSecond: perSecond,
      p50Ms: median(results.map(({ hundreds }) => percentile(hundreds, 0.5))),
      p99Ms: median(results.map(({ hundreds }) => percentile(hundreds, 0.99))),
      jobs: each.jobs,
      walPerJob,
      rounds: results.map((result) => result.perSecond),
    };
  };
  const entryOf = (cell: string, contestant: Contestant) =>
    entries.find((each) => each.cell === cell && each.contestant === contestant) as Entry;
  for (const cell of [one, two, old, tomorrow, transactional, groups, jit]) {
    rows.push(...entries.filter((each) => each.cell === cell).map((each) => drainRow(each)));
    // What a cell is compared with stands next to it; it was measured once.
    if (cell === old) rows.push(drainRow(entryOf(one, holdfastQueue), cell, "holdfast/queue, no snapshot"));
    if (cell === tomorrow)
      rows.push(drainRow(entryOf(one, holdfastQueue), cell, "holdfast/queue, none later"));
    if (cell === transactional) rows.push(drainRow(entryOf(one, graphilePlain), cell));
    if (cell === groups) rows.push(drainRow(entryOf(one, holdfastQueue), cell, "holdfast/queue, no groups"));
  }
  for (const each of entries.filter(({ cell }) => cell === one)) {
    if (each.contestant === graphilePlain) continue;
    const results = drained.get(each) ?? [];
    rows.push({
      cell: `enqueue, ${perCall} in a call`,
      contestant: each.contestant.name,
      opsPerSecond: median(results.map(({ addedPerSecond }) => addedPerSecond)),
      p50Ms: median(results.map(({ calls }) => percentile(calls, 0.5))),
      p99Ms: median(results.map(({ calls }) => percentile(calls, 0.99))),
      jobs: each.jobs,
      rounds: results.map(({ addedPerSecond }) => addedPerSecond),
    });
  }

  const peers = [holdfastQueue, graphileTuned, pgBoss, bullMq];
  note("enqueue, one by one …");
  rows.push(...(await singles(ground, peers, seconds / 3)));

  note(`steady, ${steadyRate} a second …`);
  const steadied = await inTurns([...peers, graphilePlain], count, (contestant) =>
    steady(ground, contestant, long ? 10 : Math.min(2, seconds / 2)),
  );
  const p99 = new Map<Contestant, number>();
  for (const [contestant, results] of steadied) {
    const late = results.map(({ waits }) => percentile(waits, 0.99));
    p99.set(contestant, median(late));
    rows.push({
      cell: `steady, ${steadyRate} a second: how long a job waits`,
      contestant: contestant.name,
      // Less than was wanted: it did not keep up.
      opsPerSecond: median(results.map(({ perSecond }) => perSecond)),
      p50Ms: median(results.map(({ waits }) => percentile(waits, 0.5))),
      p99Ms: median(late),
      rounds: late,
    });
  }

  note("recovery …");
  const back: number[] = [];
  for (let round = 0; round < (long ? 20 : 6); round++) back.push(await recovery(ground, holdfastQueue));
  rows.push({
    cell: `recovery: kill -9 of a process with ${slowJobs} slow jobs`,
    contestant: holdfastQueue.name,
    opsPerSecond: (slowJobs / median(back)) * 1000,
    p50Ms: percentile(back, 0.5),
    p99Ms: percentile(back, 0.99),
    p95Ms: percentile(back, 0.95),
    rounds: back,
  });

  note("idle …");
  const counting = cleanup.use(
    new Ground(await startPostgres({ settings: { shared_preload_libraries: "pg_stat_statements" } })),
  );
  const idling = new Map<Contestant, number>();
  for (const contestant of [
    holdfastQueue,
    holdfastMany,
    holdfastTransactional,
    graphileTuned,
    pgBoss,
    bullMq,
  ]) {
    const rate = await idle(counting, contestant, long ? 30 : 10);
    idling.set(contestant, rate);
    rows.push({
      cell: "idle: statements a second",
      contestant: contestant.name,
      opsPerSecond: rate,
      p50Ms: 0,
      p99Ms: 0,
    });
  }

  // Round by round, and the median of that: what the machine does besides falls on both.
  const over = (mine: Entry, other: Entry) =>
    median(
      (drained.get(mine) ?? []).map(
        ({ perSecond }, round) => perSecond / (drained.get(other)?.[round]?.perSecond ?? Number.NaN),
      ),
    );
  const wal = (contestant: Contestant) => walOf.get(entryOf(one, contestant)) ?? Number.NaN;
  const mine = entryOf(one, holdfastQueue);
  const best = [...p99].filter(([contestant]) => contestant !== holdfastQueue).map(([, ms]) => ms);
  const ratios = {
    drain_vs_graphile_tuned: over(mine, entryOf(one, graphileTuned)),
    drain_vs_pgboss: over(mine, entryOf(one, pgBoss)),
    drain_vs_bullmq: over(mine, entryOf(one, bullMq)),
    drain2_vs_graphile_tuned: over(entryOf(two, holdfastQueue), entryOf(two, graphileTuned)),
    transactional_vs_graphile_plain: over(
      entryOf(transactional, holdfastTransactional),
      entryOf(one, graphilePlain),
    ),
    old_snapshot_vs_none: over(entryOf(old, holdfastQueue), mine),
    wal_vs_graphile: wal(graphileTuned) / wal(holdfastQueue),
    steady_p99_vs_best: Math.min(...best) / (p99.get(holdfastQueue) ?? Number.NaN),
    groups_vs_plain: over(entryOf(groups, holdfastGroups), mine),
    million_later_vs_none: over(entryOf(tomorrow, holdfastQueue), mine),
    million_later_vs_graphile_tuned: over(entryOf(tomorrow, holdfastQueue), entryOf(tomorrow, graphileTuned)),
    ...(compiling && {
      jit_drain_vs_graphile_tuned: over(entryOf(jit, holdfastQueue), entryOf(jit, graphileTuned)),
      jit_transactional_vs_graphile_plain: over(
        entryOf(jit, holdfastTransactional),
        entryOf(jit, graphilePlain),
      ),
    }),
    // Of two that may be sent, so that more is better here too.
    idle_two_over_statements: 2 / (idling.get(holdfastMany) ?? Number.NaN),
  };
  return {
    suite: "queue",
    machine: machine(await versionOf(server)),
    rows,
    ratios: Object.fromEntries(
      Object.entries(ratios).map(([name, value]) => [name, Number(value.toFixed(2))]),
    ),
    notes: [
      `graphile-worker ${version("graphile-worker")} (plain: concurrentJobs 24; tuned: also localQueue 500, refetchDelay 10 ms, batched ends), pg-boss ${version("pg-boss")} (batchSize 500, localConcurrency 4, burstWhenBatchFull, LISTEN), BullMQ ${version("bullmq")} on PostgreSQL (concurrency 32, removeOnComplete), holdfast/queue (concurrency 24).`,
      `synchronous_commit is on; ${count} rounds in ABBA order, medians (of a ratio: the median of its rounds); each run in a database of its own, VACUUM ANALYZE after the jobs were enqueued.`,
      `The slow ones drain fewer jobs (column jobs). p50 and p99 of a drain: from the start of one job to the start of the hundredth after it; of enqueue: one call; of steady: from the call of enqueue to the start of the handler.`,
      `walPerJob: bytes of WAL for enqueue and drain, without VACUUM: ${[holdfastQueue, graphileTuned, pgBoss, bullMq].map((each) => `${each.name} ${wal(each)}`).join(", ")}.`,
      compiling
        ? `A server with JIT: ${await versionOf(compiling.server)}, as Debian ships it.`
        : "No server with JIT: this machine has no PostgreSQL before 17.",
      `pg-boss keeps completed jobs, the others delete them. Transactional jobs of holdfast/queue that are done within 20 ms share a transaction, up to 25 of them (its default); graphile-worker has no such mode, and stands there for what a claim and an end of each job cost.`,
      `recovery: until all ${slowJobs} jobs have begun again in another process, ${back.length} rounds: p50 ${Math.round(percentile(back, 0.5))} ms, p95 ${Math.round(percentile(back, 0.95))} ms. graphile-worker waits 4 hours, pg-boss for expireInSeconds (15 minutes) unless heartbeats are on, BullMQ for its lock (30 s) and the next look for stalled jobs.`,
    ],
  };
}

async function singles(ground: Ground, peers: readonly Contestant[], seconds: number): Promise<BenchRow[]> {
  const callers = 64;
  // One database inside another, so that all of them are there at the same time.
  const open = async (
    rest: readonly Contestant[],
    made: ReadonlyMap<Contestant, Producer>,
  ): Promise<BenchRow[]> => {
    const [next, ...others] = rest;
    if (next)
      return ground.database(next, async (url) => {
        const producer = await next.produce(url);
        try {
          return await open(others, new Map([...made, [next, producer]]));
        } finally {
          await producer.close();
        }
      });
    const measured = await alternate({
      contestants: [...made].map(([{ name }, producer]) => ({
        name,
        call: (turn) => producer.add({ n: turn, at: 0 }),
      })),
      callers,
      seconds,
      reset: async () => {},
    });
    return measured.map(({ name, ...figures }) => ({
      cell: `enqueue, one by one, ${callers} callers`,
      contestant: name,
      ...figures,
    }));
  };
  return open(peers, new Map());
}

async function versionOf(server: EmbeddedPostgres): Promise<string> {
  const client = new Client({ connectionString: server.url() });
  await client.connect();
  try {
    return String((await client.query("SHOW server_version")).rows[0].server_version);
  } finally {
    await client.end();
  }
}
