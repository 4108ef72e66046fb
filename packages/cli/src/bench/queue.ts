/** Jobs that do nothing: a table with SKIP LOCKED, as it is written by hand, and holdfast/queue. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import type { Pool as MysqlPool } from "mysql2/promise";
import type { Pool } from "pg";
import { byMysql, mysqlTransaction, transaction } from "./locks.ts";
import { type Round, type Timing, inTurns, medians, roundCount } from "./measure.ts";
import type { MysqlPlace, PostgresPlace } from "./place.ts";
import {
  type Cell,
  type Opened,
  type Suite,
  alternating,
  byHand,
  naive,
  ours,
  perConnection,
} from "./suite.ts";

interface Payload {
  readonly n: number;
}

/** One way to have jobs done. */
interface Way {
  fill(jobs: number): Promise<void>;
  /** Calls the handler for each job that is there, and resolves when all have been done, at least. */
  drain(jobs: number, handler: (n: number) => void, signal: AbortSignal | undefined): Promise<void>;
}

/** So many are enqueued with one call. */
const perCall = 1000;

function tableOf(workers: number, fill: (jobs: number) => Promise<void>, work: Worked): Way {
  return {
    fill,
    async drain(_, handler, signal) {
      const worker = async (): Promise<void> => {
        while (await work(handler)) signal?.throwIfAborted();
      };
      await Promise.all(Array.from({ length: workers }, worker));
    },
  };
}

async function fillPostgres(pool: Pool, table: string, jobs: number): Promise<void> {
  await pool.query(`TRUNCATE ${table}`);
  await pool.query(
    `INSERT INTO ${table} (payload) SELECT jsonb_build_object('n', n) FROM generate_series(0, $1::int - 1) n`,
    [jobs],
  );
  await pool.query(`ANALYZE ${table}`);
}

async function fillMysql(pool: MysqlPool, table: string, jobs: number): Promise<void> {
  await pool.query(`TRUNCATE ${table}`);
  for (let n = 0; n < jobs; n += perCall)
    await pool.query(`INSERT INTO ${table} (payload) VALUES ?`, [
      Array.from({ length: Math.min(perCall, jobs - n) }, (_, i) => [JSON.stringify({ n: n + i })]),
    ]);
  await pool.query(`ANALYZE TABLE ${table}`);
}

/** Does one job; false if there is none. */
type Worked = (handler: (n: number) => void) => Promise<boolean>;

/** Claimed, done and deleted in one transaction: a worker that dies leaves the job as it was. */
const skipLocked =
  (pool: Pool, table: string): Worked =>
  (handler) =>
    transaction(pool, async (client) => {
      const { rows } = await client.query<{ payload: Payload }>(
        `DELETE FROM ${table} WHERE id = (SELECT id FROM ${table} ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING payload`,
      );
      for (const { payload } of rows) handler(payload.n);
      return rows.length > 0;
    });

/** The first that is there, done, then deleted. */
const unlocked =
  (pool: Pool, table: string): Worked =>
  async (handler) => {
    const { rows } = await pool.query<{ id: string; payload: Payload }>(
      `SELECT id, payload FROM ${table} ORDER BY id LIMIT 1`,
    );
    for (const { id, payload } of rows) {
      handler(payload.n);
      await pool.query(`DELETE FROM ${table} WHERE id = $1`, [id]);
    }
    return rows.length > 0;
  };

/** MariaDB brings JSON as text. */
const numberOf = (payload: unknown): number =>
  (typeof payload === "string" ? (JSON.parse(payload) as Payload) : (payload as Payload)).n;

const skipLockedOnMysql =
  (pool: MysqlPool, table: string): Worked =>
  (handler) =>
    mysqlTransaction(pool, async (send) => {
      const [row] = await send(
        `SELECT id, payload FROM ${table} ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED`,
        [],
      );
      if (!row) return false;
      handler(numberOf(row["payload"]));
      await send(`DELETE FROM ${table} WHERE id = ?`, [row["id"]]);
      return true;
    });

const unlockedOnMysql =
  (pool: MysqlPool, table: string): Worked =>
  async (handler) => {
    const send = byMysql(pool);
    const [row] = await send(`SELECT id, payload FROM ${table} ORDER BY id LIMIT 1`, []);
    if (!row) return false;
    handler(numberOf(row["payload"]));
    await send(`DELETE FROM ${table} WHERE id = ?`, [row["id"]]);
    return true;
  };

/** Jobs for a drain of about so long: not so few that starting counts, nor so many that filling takes for ever. */
const jobsFor = (perSecond: number, ms: number): number =>
  Math.round(Math.min(20_000, Math.max(100, (perSecond * ms) / 1000)));

async function timed(way: Way, jobs: number, signal: AbortSignal | undefined): Promise<Round> {
  await way.fill(jobs);
  globalThis.gc?.();
  let [first, last] = [0, 0];
  // From the first job on: how long a worker takes to start is not what it drains.
  const handler = (): void => {
    last = performance.now();
    first ||= last;
  };
  await way.drain(jobs, handler, signal);
  return { opsPerSecond: (jobs / (last - first)) * 1000, latenciesMs: [] };
}

function drains(ways: Readonly<Record<string, Way>>): Cell {
  return {
    name: "drain",
    contestants: Object.keys(ways),
    async measure({ seconds, rounds = roundCount, signal, onRound }: Timing) {
      const sizes = new Map<string, number>();
      for (const [name, way] of Object.entries(ways)) {
        const { opsPerSecond } = await timed(way, 200, signal);
        sizes.set(name, jobsFor(opsPerSecond, (seconds * 1000) / rounds));
        onRound?.();
      }
      const results = await inTurns(Object.entries(ways), rounds, async ([name, way]) => {
        const round = await timed(way, sizes.get(name) ?? 100, signal);
        onRound?.();
        return round;
      });
      return [...results].map(([[name], all]) => medians(name, all));
    },
  };
}

const inTrial = 200;

const tables = ["job", "unlocked_job", "single_job"];

async function onPostgres({ pool: make, connections }: PostgresPlace): Promise<Opened> {
  // A worker of Holdfast keeps connections for messages and for its sign of life.
  const pool = make(connections + 2);
  for (const table of tables)
    await pool.query(
      `CREATE TABLE ${table} (id bigserial PRIMARY KEY, payload jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now())`,
    );
  const table = (name: string, work: typeof skipLocked) =>
    tableOf(connections, (jobs) => fillPostgres(pool, name, jobs), work(pool, name));
  return open({
    hf: holdfast(fromPg(pool)),
    connections,
    ways: { [naive]: table("unlocked_job", unlocked), [byHand]: table("job", skipLocked) },
    enqueue: async (n) => void (await pool.query("INSERT INTO single_job (payload) VALUES ($1)", [{ n }])),
    filled: async () => void (await pool.query("ANALYZE")),
    close: () => pool.end(),
  });
}

async function onMysql({ pool: make, connections }: MysqlPlace): Promise<Opened> {
  const pool = make();
  for (const table of tables)
    await pool.query(
      `CREATE TABLE ${table} (id bigint AUTO_INCREMENT PRIMARY KEY, payload json NOT NULL, at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6))`,
    );
  const table = (name: string, work: typeof skipLockedOnMysql) =>
    tableOf(connections, (jobs) => fillMysql(pool, name, jobs), work(pool, name));
  return open({
    hf: holdfast(fromMysql2(pool)),
    connections,
    ways: { [naive]: table("unlocked_job", unlockedOnMysql), [byHand]: table("job", skipLockedOnMysql) },
    enqueue: async (n) =>
      void (await pool.query("INSERT INTO single_job (payload) VALUES (?)", [JSON.stringify({ n })])),
    // InnoDB counts by itself.
    filled: async () => {},
    close: () => pool.end(),
  });
}

interface Ground {
  readonly hf: Holdfast<unknown>;
  readonly connections: number;
  /** By hand. */
  readonly ways: Readonly<Record<string, Way>>;
  /** One job, by hand. */
  enqueue(n: number): Promise<void>;
  /** Jobs of Holdfast have been added. */
  filled(): Promise<void>;
  close(): Promise<void>;
}

async function open({ hf, connections, ways: hands, enqueue, filled, close }: Ground): Promise<Opened> {
  await hf.migrate();
  const jobs = queue<Payload>(hf, "bench");
  const singles = queue<Payload>(hf, "bench-singles");
  const workers = connections;
  const ways: Readonly<Record<string, Way>> = {
    ...hands,
    [ours]: {
      async fill(count) {
        for (let n = 0; n < count; n += perCall)
          await jobs.enqueueMany(
            Array.from({ length: Math.min(perCall, count - n) }, (_, i) => ({ payload: { n: n + i } })),
          );
        await filled();
      },
      async drain(count, handler, signal) {
        let done = 0;
        const all = Promise.withResolvers<void>();
        const worker = jobs.work(
          ({ payload }) => {
            handler(payload.n);
            if (++done >= count) all.resolve();
          },
          { concurrency: workers * 3, onTrouble: (error) => all.reject(error) },
        );
        const onAbort = (): void => all.reject(signal?.reason);
        signal?.addEventListener("abort", onAbort, { once: true });
        try {
          await all.promise;
        } finally {
          signal?.removeEventListener("abort", onAbort);
          await worker.stop();
        }
      },
    },
  };
  return {
    cells: [
      alternating("enqueue", {
        contestants: [
          { name: byHand, call: enqueue },
          { name: ours, call: async (turn) => void (await singles.enqueue({ n: turn })) },
        ],
        callers: connections * perConnection,
        reset: async () => {},
      }),
      drains(ways),
    ],
    trials: Object.fromEntries(
      Object.entries(ways).map(([name, way]) => [
        name,
        async ({ signal }) => {
          await way.fill(inTrial);
          const runs = new Map<number, number>();
          await way.drain(inTrial, (n) => runs.set(n, (runs.get(n) ?? 0) + 1), signal);
          // What ran again does so soon after.
          await sleep(50);
          const counted = [...runs.values()].reduce((sum, times) => sum + times, 0);
          const again = counted - runs.size;
          const never = inTrial - runs.size;
          const text =
            again === 0 && never === 0
              ? "exact"
              : [again > 0 && `${counted} runs of ${inTrial} jobs`, never > 0 && `${never} never ran`]
                  .filter(Boolean)
                  .join(", ");
          return { expected: inTrial, counted, text };
        },
      ]),
    ),
    async [Symbol.asyncDispose]() {
      await hf.close();
      await close();
    },
  };
}

export const queues: Suite = {
  name: "queue",
  about: "jobs that do nothing: enqueued one by one, 8 requests under way for each connection; drained",
  contestants: {
    [naive]: "SELECT the first job, run it, DELETE it",
    [byHand]: "one job per transaction: claimed FOR UPDATE SKIP LOCKED and deleted, run, COMMIT",
    [ours]: "queue(hf, …).enqueue(job) and .work(handler)",
  },
  own: [ours],
  needsDatabase: true,
  measured: 5,
  // No lock: jobs of a drain, which are never fewer than a hundred.
  inLine: (connections) => 600 / connections,
  postgres: onPostgres,
  mysql: onMysql,
};
