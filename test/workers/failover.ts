/**
 * One process of an application whose server changes: it consumes a quota, sells, enqueues and works on jobs, leads, and
 * writes under a lease and under a lock. What it was told is done, it tells; what it was not told, it tries again with the
 * same id, as an application would.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { CommitUnknownError, fenced, holdfast, key, leader } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface FailoverArg {
  url: string;
  me: number;
}

export interface FailoverResult {
  /** Ids whose call was answered. */
  consumed: string[];
  sold: string[];
  enqueued: string[];
  /** Of transactions under a lock that count up: told to be committed, and not known. */
  counted: number;
  unknown: number;
  /** Fences in the order in which they were given to this process. */
  fences: number[];
  /** Those under which something was written, as told. */
  written: number[];
  led: number[];
}

export default async function application(
  { url, me }: FailoverArg,
  context: WorkerContext,
): Promise<FailoverResult> {
  const pool = new Pool({ connectionString: url, max: 12, connectionTimeoutMillis: 2000 });
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool), { wait: 5000, deadline: 10_000 });
  const result: FailoverResult = {
    consumed: [],
    sold: [],
    enqueued: [],
    counted: 0,
    unknown: 0,
    fences: [],
    written: [],
    led: [],
  };
  let over = false;
  void context.receive("stop").then(() => (over = true));

  const mails = queue<string>(hf, "mails", { retries: 1000, backoff: { baseMs: 10, maxMs: 100 } });
  const worker = mails.work<PoolClient>(
    async (job, tx) => {
      await tx.client.query("INSERT INTO sent (mail) VALUES ($1)", [job.payload]);
    },
    { transactional: true, onTrouble: () => {} },
  );
  const chief = leader(
    hf,
    "chief",
    async ({ signal, lease }) => {
      result.led.push(lease.fence);
      while (!signal.aborted) await sleep(50, undefined, { signal }).catch(() => {});
    },
    { ttl: 4000, onError: () => {} },
  );

  const uses = quota(hf, { name: "uses", limit: 1_000_000 });
  const shelf = stock(hf);
  const each: ((i: number) => Promise<unknown>)[] = [
    async (i) => {
      const id = `use ${me} ${i}`;
      await again(() => uses.consume("all", 1, { id }));
      result.consumed.push(id);
    },
    async (i) => {
      const externalId = `sale ${me} ${i}`;
      await again(() => shelf.apply([{ sku: "CAP", quantity: -1 }], { externalId }));
      result.sold.push(externalId);
    },
    async (i) => {
      // The row says whether it is there already.
      const mail = `mail ${me} ${i}`;
      await again(() =>
        hf.transaction(async (tx) => {
          const { rowCount } = await tx.client.query(
            "INSERT INTO mail (id) VALUES ($1) ON CONFLICT DO NOTHING",
            [mail],
          );
          if (rowCount === 1) await mails.enqueue(mail, { tx });
        }),
      );
      result.enqueued.push(mail);
    },
    async () => {
      try {
        await hf.transaction({ lock: key("counter") }, async (tx) => {
          const { rows } = await tx.client.query("SELECT n FROM counter");
          await tx.client.query("UPDATE counter SET n = $1", [rows[0].n + 1]);
        });
        result.counted++;
      } catch (error) {
        if (error instanceof CommitUnknownError) result.unknown++;
        await sleep(20);
      }
    },
    async () => {
      try {
        const lease = await hf.lease(key("pen"), { ttl: 3000 });
        result.fences.push(lease.fence);
        try {
          await hf.transaction(async (tx) => {
            await fenced(tx, lease);
            await tx.client.query("INSERT INTO written (fence) VALUES ($1)", [lease.fence]);
          });
          result.written.push(lease.fence);
        } finally {
          await lease.release();
        }
      } catch {
        await sleep(20);
      }
    },
  ];
  /** Until it is answered, with the same id. */
  const again = async (call: () => Promise<unknown>): Promise<void> => {
    for (;;)
      try {
        await call();
        return;
      } catch {
        await sleep(50);
      }
  };
  context.send("ready");
  await Promise.all(
    each.map(async (step) => {
      for (let i = 0; !over; i++) {
        await step(i);
        await sleep(5);
      }
    }),
  );
  context.send("stopping");
  await context.receive("close");
  await worker.stop();
  await chief.stop();
  await hf.close();
  await pool.end();
  return result;
}
