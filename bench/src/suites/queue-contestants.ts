/** The queues that are compared, each behind the same few calls, with the settings that its documentation recommends for speed. */
import { createPostgresBackend, withBackend } from "bullmq";
import { Logger, makeWorkerUtils, run, runMigrations } from "graphile-worker";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Groups, queue } from "holdfast/queue";
import { Pool } from "pg";
import { PgBoss } from "pg-boss";

export interface Payload {
  readonly n: number;
  /** When it was enqueued, by the clock that all processes of the machine share. */
  readonly at: number;
  /** How long its handler takes. */
  readonly ms?: number;
}

export interface Producer {
  addMany(jobs: readonly Payload[]): Promise<void>;
  add(job: Payload): Promise<void>;
  close(): Promise<void>;
}

export interface Consumer {
  stop(): Promise<void>;
}

type Handler = (payload: Payload) => unknown;

export interface Contestant {
  readonly name: string;
  migrate(url: string): Promise<void>;
  produce(url: string): Promise<Producer>;
  consume(url: string, handler: Handler): Promise<Consumer>;
  /** Of jobs that are not done, as its tables have it. */
  readonly left: string;
  /** Tables that a long-running reader would have read. */
  readonly tables: readonly string[];
  /** Adds so many jobs that are due tomorrow. */
  readonly later?: (jobs: number) => string;
}

const task = "noop";
/** Enough for whatever a contestant does at the same time. */
const connections = 30;
const concurrency = 24;
const quiet = new Logger(() => () => {});

function pool(url: string): Pool {
  const made = new Pool({ connectionString: url, max: connections });
  // A database that is dropped ends its connections; graphile-worker wants to see a listener on each of them.
  made.on("error", () => {});
  made.on("connect", (client) => client.on("error", () => {}));
  return made;
}

interface OursOptions {
  readonly name: string;
  readonly transactional?: boolean;
  /** Jobs are spread over so many groups, each limited. */
  readonly groups?: number;
  /** Workers of so many queues, of which the first has the jobs. */
  readonly queues?: number;
}

function ours({ name, transactional = false, groups, queues = 1 }: OursOptions): Contestant {
  const open = (url: string) => {
    const own = pool(url);
    const hf = holdfast(fromPg(own));
    const limits: Groups | undefined = groups === undefined ? undefined : { concurrency: 5 };
    const jobs = queue<Payload>(hf, task, limits && { groups: limits });
    return {
      hf,
      jobs,
      async close() {
        await hf.close();
        await own.end();
      },
    };
  };
  const groupOf = ({ n }: Payload) => (groups === undefined ? {} : { group: `tenant-${n % groups}` });
  return {
    name,
    async migrate(url) {
      const place = open(url);
      await place.hf.migrate();
      await place.close();
    },
    async produce(url) {
      const { jobs, close } = open(url);
      return {
        addMany: async (all) =>
          void (await jobs.enqueueMany(all.map((payload) => ({ payload, ...groupOf(payload) })))),
        add: async (payload) => void (await jobs.enqueue(payload, groupOf(payload))),
        close,
      };
    },
    async consume(url, handler) {
      const { hf, jobs, close } = open(url);
      const trouble = { onTrouble: (error: unknown) => console.error(name, error) };
      const others = Array.from({ length: queues - 1 }, (_, n) => queue<Payload>(hf, `${task} ${n}`));
      const workers = [jobs, ...others].map((each) =>
        transactional
          ? each.work(({ payload }) => handler(payload), { concurrency, transactional: true, ...trouble })
          : each.work(({ payload }) => handler(payload), { concurrency, ...trouble }),
      );
      return {
        async stop() {
          await Promise.all(workers.map((worker) => worker.stop()));
          await close();
        },
      };
    },
    left: `SELECT (SELECT count(*) FROM holdfast.queue_ready) + (SELECT count(*) FROM holdfast.queue_grouped)
      + (SELECT count(*) FROM holdfast.queue_delayed) + (SELECT count(*) FROM holdfast.queue_lease)
      + (SELECT count(*) FROM holdfast.queue_failed) AS left`,
    tables: [
      "holdfast.queue_ready",
      "holdfast.queue_grouped",
      "holdfast.queue_group",
      "holdfast.queue_lease",
    ],
    later: (count) => `INSERT INTO holdfast.queue_delayed (queue, priority, attempt, id, at, run_at, payload)
      SELECT holdfast.queue_open('${task}', NULL), 0, 0, nextval('holdfast.queue_job_id'), now(),
        now() + interval '1 day' + n * interval '1 millisecond', '{}' FROM generate_series(1, ${count}) n`,
  };
}

function graphile(name: string, tuned: boolean): Contestant {
  return {
    name,
    migrate: (url) => runMigrations({ connectionString: url, logger: quiet }),
    async produce(url) {
      const pgPool = pool(url);
      const utils = await makeWorkerUtils({ pgPool, logger: quiet });
      return {
        addMany: async (jobs) =>
          void (await utils.addJobs(jobs.map((payload) => ({ identifier: task, payload })))),
        add: async (payload) => void (await utils.addJob(task, payload)),
        async close() {
          await utils.release();
          await pgPool.end();
        },
      };
    },
    async consume(url, handler) {
      const pgPool = pool(url);
      const runner = await run({
        pgPool,
        noHandleSignals: true,
        logger: quiet,
        taskList: { [task]: (payload) => handler(payload as Payload) as void },
        preset: {
          worker: {
            concurrentJobs: concurrency,
            ...(tuned && {
              localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
              completeJobBatchDelay: 0,
              failJobBatchDelay: 0,
            }),
          },
        },
      });
      return {
        async stop() {
          await runner.stop();
          await pgPool.end();
        },
      };
    },
    left: "SELECT count(*) AS left FROM graphile_worker._private_jobs",
    tables: ["graphile_worker._private_jobs"],
    later: (count) => `SELECT graphile_worker.add_job('${task}', run_at := now() + interval '1 day');
      INSERT INTO graphile_worker._private_jobs (task_id, payload, run_at)
        SELECT t.id, '{}', now() + interval '1 day' + n * interval '1 millisecond'
        FROM graphile_worker._private_tasks t, generate_series(2, ${count}) n WHERE t.identifier = '${task}'`,
  };
}

function boss(name: string): Contestant {
  const open = async (url: string) => {
    const made = new PgBoss({
      connectionString: url,
      max: connections,
      useListenNotify: true,
      // On a loaded machine its sends stand in line for a connection for longer than the default of 10 s.
      connectionTimeoutMillis: 120_000,
    });
    made.on("error", () => {});
    await made.start();
    return made;
  };
  return {
    name,
    async migrate(url) {
      const made = await open(url);
      await made.createQueue(task, { notify: true });
      await made.stop();
    },
    async produce(url) {
      const made = await open(url);
      return {
        addMany: async (jobs) =>
          void (await made.insert(
            task,
            jobs.map((data) => ({ data })),
          )),
        add: async (data) => void (await made.send(task, data)),
        close: () => made.stop(),
      };
    },
    async consume(url, handler) {
      const made = await open(url);
      await made.work<Payload>(
        task,
        { batchSize: 500, localConcurrency: 4, burstWhenBatchFull: true },
        async (jobs) => {
          for (const { data } of jobs) await handler(data);
        },
      );
      return { stop: () => made.stop() };
    },
    left: "SELECT count(*) AS left FROM pgboss.job WHERE state < 'completed'",
    tables: ["pgboss.job"],
  };
}

function bull(name: string): Contestant {
  const { Queue, Worker } = withBackend(createPostgresBackend);
  const schema = "bullmq";
  const connection = (url: string, migrate = false) => ({
    connectionString: url,
    max: connections,
    schema,
    migrate,
  });
  return {
    name,
    async migrate(url) {
      const made = new Queue<Payload>(task, { connection: connection(url, true) });
      await made.waitUntilReady();
      await made.close();
    },
    async produce(url) {
      const defaultJobOptions = { removeOnComplete: true };
      const made = new Queue<Payload>(task, { connection: connection(url), defaultJobOptions });
      made.on("error", () => {});
      await made.waitUntilReady();
      return {
        addMany: async (jobs) => void (await made.addBulk(jobs.map((data) => ({ name: task, data })))),
        add: async (data) => void (await made.add(task, data)),
        close: () => made.close(),
      };
    },
    async consume(url, handler) {
      const worker = new Worker<Payload>(task, async ({ data }) => handler(data), {
        connection: connection(url),
        concurrency: 32,
        removeOnComplete: { count: 0 },
      });
      worker.on("error", () => {});
      await worker.waitUntilReady();
      return { stop: () => worker.close() };
    },
    left: `SELECT count(*) AS left FROM ${schema}.job`,
    tables: [`${schema}.job`],
  };
}

export const holdfastQueue = ours({ name: "holdfast/queue" });
export const holdfastTransactional = ours({ name: "holdfast/queue, transactional", transactional: true });
export const holdfastGroups = ours({ name: "holdfast/queue, 1,000 groups", groups: 1000 });
export const holdfastMany = ours({ name: "holdfast/queue, 10 queues", queues: 10 });
export const graphileTuned = graphile("graphile-worker, tuned", true);
export const graphilePlain = graphile("graphile-worker, plain", false);
export const pgBoss = boss("pg-boss");
export const bullMq = bull("BullMQ on PostgreSQL");

export const contestants: ReadonlyMap<string, Contestant> = new Map(
  [
    holdfastQueue,
    holdfastTransactional,
    holdfastGroups,
    holdfastMany,
    graphileTuned,
    graphilePlain,
    pgBoss,
    bullMq,
  ].map((each) => [each.name, each]),
);
