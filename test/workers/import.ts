/** One process that works on jobs of pg-boss, of graphile-worker or of Holdfast, and writes down which it has done. */
import { setTimeout as sleep } from "node:timers/promises";
import { Logger, run } from "graphile-worker";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { Pool } from "pg";
import { PgBoss } from "pg-boss";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface ImportArg {
  readonly side: "pg-boss" | "graphile-worker" | "holdfast";
  readonly url: string;
  readonly queue: string;
}

export interface Payload {
  readonly n: number;
  /** Fails the first time, whoever runs it. */
  readonly fails?: boolean;
  /** One at a time. */
  readonly group?: string;
}

export default async function worker(
  { side, url, queue: name }: ImportArg,
  context: WorkerContext,
): Promise<void> {
  const pool = new Pool({ connectionString: url, max: 8 });
  pool.on("error", () => {});
  pool.on("connect", (client) => client.on("error", () => {}));
  const handle = async ({ n, fails, group }: Payload): Promise<void> => {
    const { rows } = await pool.query("INSERT INTO began (job, side, grp) VALUES ($1, $2, $3) RETURNING id", [
      n,
      side,
      group,
    ]);
    await sleep(2);
    const first =
      fails === true && (await pool.query("SELECT FROM began WHERE job = $1", [n])).rowCount === 1;
    await pool.query("UPDATE began SET ended = clock_timestamp(), failed = $2 WHERE id = $1", [
      rows[0].id,
      first,
    ]);
    if (first) throw new Error("the first time");
  };
  if (side === "holdfast") {
    const hf = holdfast(fromPg(pool), { wait: 60_000 });
    const options = { retries: 3, backoff: { baseMs: 10 }, groups: { serial: true } };
    queue<Payload>(hf, name, options).work((job) => handle(job.payload), { concurrency: 10, pollMs: 200 });
  } else if (side === "pg-boss") {
    const boss = new PgBoss({ connectionString: url, max: 3, supervise: false, schedule: false });
    boss.on("error", () => {});
    await boss.start();
    const fetching = async (): Promise<void> => {
      for (;;) {
        const some = await boss.fetch<Payload>(name, { batchSize: 5 });
        if (some.length === 0) await sleep(100);
        for (const job of some)
          await handle(job.data).then(
            () => boss.complete(name, job.id),
            () => boss.fail(name, job.id),
          );
      }
    };
    void Promise.all([fetching(), fetching()]);
  } else
    await run({
      pgPool: pool,
      concurrency: 3,
      pollInterval: 100,
      noHandleSignals: true,
      logger: new Logger(() => () => {}),
      taskList: { [name]: (payload) => handle(payload as Payload) },
    });
  context.send("ready");
  await new Promise<void>(() => {});
}
