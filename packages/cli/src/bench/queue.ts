/** Jobs that do nothing: a table with SKIP LOCKED, as it is written by hand, and holdfast/queue. */
import { setTimeout as sleep } from "node:timers/promises";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import type { Pool } from "pg";
import { transaction } from "./locks.ts";
import { type Round, type Timing, inTurns, medians, roundCount } from "./measure.ts";
import type { PostgresPlace } from "./place.ts";
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

function tableOf(name: string, pool: Pool, workers: number, run: (name: string) => Worked): Way {
  return {
    async fill(jobs) {
      await pool.query(`TRUNCATE ${name}`);
      await pool.query(
        `INSERT INTO ${name} (payload) SELECT jsonb_build_object('n', n) FROM generate_series(0, $1::int - 1) n`,
        [jobs],
      );
      await pool.query(`ANALYZE ${name}`);
    },
    async drain(_, handler, signal) {
      const work = run(name);
      const worker = async (): Promise<void> => {
        while (await work(pool, handler)) signal?.throwIfAborted();
      };
      await Promise.all(Array.from({ length: workers }, worker));
    },
  };
}

/** Does one job; false if there is none. */
type Worked = (pool: Pool, handler: (n: number) => void) => Promise<boolean>;

/** Claimed, done and deleted in one transaction: a worker that dies leaves the job as it was. */
const skipLocked =
  (table: string): Worked =>
  (pool, handler) =>
    transaction(pool, async (client) => {
      const { rows } = await client.query<{ payload: Payload }>(
        `DELETE FROM ${table} WHERE id = (SELECT id FROM ${table} ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING payload`,
      );
      for (const { payload } of rows) handler(payload.n);
      return rows.length > 0;
    });

/** The first that is there, done, then deleted. */
const unlocked =
  (table: string): Worked =>
  async (pool, handler) => {
    const { rows } = await pool.query<{ id: string; payload: Payload }>(
      `SELECT id, payload FROM ${table} ORDER BY id LIMIT 1`,
    );
    for (const { id, payload } of rows) {
      handler(payload.n);
      await pool.query(`DELETE FROM ${table} WHERE id = $1`, [id]);
    }
    return rows.length > 0;
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

async function open({ pool: make, connections }: PostgresPlace): Promise<Opened> {
  // A worker of Holdfast keeps connections for messages and for its sign of life.
  const pool = make(connections + 2);
  const hf = holdfast(fromPg(pool));
  await hf.migrate();
  const jobs = queue<Payload>(hf, "bench");
  const singles = queue<Payload>(hf, "bench-singles");
  for (const table of ["job", "unlocked_job", "single_job"])
    await pool.query(
      `CREATE TABLE ${table} (id bigserial PRIMARY KEY, payload jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now())`,
    );
  const workers = connections;
  const ways: Readonly<Record<string, Way>> = {
    [naive]: tableOf("unlocked_job", pool, workers, unlocked),
    [byHand]: tableOf("job", pool, workers, skipLocked),
    [ours]: {
      async fill(count) {
        for (let n = 0; n < count; n += perCall)
          await jobs.enqueueMany(
            Array.from({ length: Math.min(perCall, count - n) }, (_, i) => ({ payload: { n: n + i } })),
          );
        await pool.query("ANALYZE");
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
          {
            name: byHand,
            call: async (turn) =>
              void (await pool.query("INSERT INTO single_job (payload) VALUES ($1)", [{ n: turn }])),
          },
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
      await pool.end();
    },
  };
}

export const queues: Suite = {
  name: "queue",
  about: "jobs that do nothing: enqueued one by one, 8 requests under way for each connection; drained",
  contestants: {
    [naive]: "SELECT the first job, run it, DELETE it",
    [byHand]: "one job per transaction: DELETE … FOR UPDATE SKIP LOCKED, run it, COMMIT",
    [ours]: "queue(hf, …).enqueue(job) and .work(handler)",
  },
  own: [ours],
  needsDatabase: true,
  measured: 5,
  // No lock: jobs of a drain, which are never fewer than a hundred.
  inLine: (connections) => 600 / connections,
  postgres: open,
};
