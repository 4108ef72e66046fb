/** A standby takes over that has not heard of everything: what is given out by it is newer than all that was given before. */
import { type Holdfast, StaleFenceError, fenced, holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { Pool } from "pg";
import { afterAll, beforeAll, expect, test } from "vitest";
import { type EmbeddedPostgres, startPostgres } from "../packages/cli/src/embedded.ts";
import { type Proxy, startProxy } from "./harness/proxy.ts";
import { type Standby, primarySettings, startStandby } from "./harness/standby.ts";
import { eventually } from "./harness/wait.ts";

const opened: (() => Promise<unknown>)[] = [];
let primary: EmbeddedPostgres;
let line: Proxy;
let standby: Standby;
/** The largest of those that the standby has never heard of. */
const lostJob = { id: 0, fence: 0 };

const on = (connectionString: string): { hf: Holdfast<unknown>; pool: Pool } => {
  const pool = new Pool({ connectionString, max: 4 });
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool), { wait: 20_000, deadline: 30_000 });
  opened.push(async () => {
    await hf.close().catch(() => {});
    await pool.end();
  });
  return { hf, pool };
};

beforeAll(async () => {
  primary = await startPostgres({ settings: primarySettings });
  opened.unshift(() => primary.stop());
  const { hf } = on(primary.url());
  await hf.migrate();
  line = await startProxy({ port: primary.port });
  opened.unshift(() => line.close());
  standby = await startStandby(primary, {
    settings: {
      primary_conninfo: `host=127.0.0.1 port=${line.port} user=postgres password=${primary.password}`,
    },
  });
  opened.unshift(() => standby.stop());
}, 60_000);
afterAll(async () => {
  for (const close of opened.toReversed()) await close().catch(() => {});
});

test("fences do not go back, whatever was lost", { timeout: 60_000 }, async () => {
  const before = on(primary.url());
  const known = await before.hf.lease(key("report"), { ttl: 60_000 });
  const [run] = await takeSome(before.hf, 1);
  await standby.caughtUp();
  // Nothing more arrives there. PostgreSQL writes numbers of sequences ahead, 32 at a time: hence more than that.
  line.freeze();
  const lost = await takeSome(before.hf, 100);
  const mails = queue<string>(before.hf, "mails");
  await mails.enqueueMany(Array.from({ length: 200 }, () => ({ payload: "before" })));
  const worker = mails.work(
    (job) => {
      lostJob.id = Math.max(lostJob.id, job.id);
      lostJob.fence = Math.max(lostJob.fence, job.fence);
    },
    { batch: 2 },
  );
  await eventually(async () => (await mails.counts()).waiting === 0);
  await worker.stop();
  await known.release();
  const newest = await before.hf.lease(key("report"), { ttl: 60_000 });
  await line.close();
  await primary.stop();
  await standby.promote();

  const after = on(standby.url());
  // What was lost is lost: the holder of before has the lease again there, for as long as it was granted.
  expect(await after.hf.leases()).toMatchObject([{ fence: known.fence }]);
  await after.hf.endLease(known.fence);
  const next = await after.hf.lease(key("report"), { ttl: 60_000 });
  const others = await takeSome(after.hf, 3);
  expect(next.fence).toBeGreaterThan(newest.fence);
  expect(Math.min(...others)).toBeGreaterThan(Math.max(run ?? 0, ...lost, newest.fence));
  expect(Number.isSafeInteger(next.fence)).toBe(true);
  // Of the lease that nobody has heard of here, and of the one that was ended.
  for (const lease of [newest, known]) {
    const late = after.hf.transaction((tx) => fenced(tx, lease));
    await expect(late).rejects.toBeInstanceOf(StaleFenceError);
  }
  await after.hf.transaction((tx) => fenced(tx, next));
});

test("numbers of jobs, and of what a worker has claimed, neither", { timeout: 60_000 }, async () => {
  const { hf } = on(standby.url());
  // The sequences are behind, as far as the lost ones.
  const { id } = await queue(hf, "mails").enqueue("after");
  expect(id).toBeGreaterThan(lostJob.id);
  let claimed!: (fence: number) => void;
  const fence = new Promise<number>((resolve) => (claimed = resolve));
  const worker = queue(hf, "mails").work((job) => claimed(job.fence));
  expect(await fence).toBeGreaterThan(lostJob.fence);
  await worker.stop();
});

test("and with pg_upgrade, after which timelines are counted from one again", async () => {
  const { hf, pool } = on(standby.url());
  const [before = 0] = await takeSome(hf, 1);
  // As if all before had been on a later timeline than this one.
  await pool.query("UPDATE holdfast.resource SET seen = seen + 5 WHERE id = 'holdfast.generation'");
  await pool.query("SELECT setval('holdfast.fence', 1)");
  const after = await Promise.all(Array.from({ length: 4 }, () => takeSome(on(standby.url()).hf, 5)));
  expect(Math.min(...after.flat())).toBeGreaterThan(before);
  expect(new Set(after.flat()).size).toBe(20);
});

/** The fences of so many leases, one after the other. */
async function takeSome(hf: Holdfast<unknown>, many: number): Promise<number[]> {
  const fences: number[] = [];
  for (let i = 0; i < many; i++) {
    const lease = await hf.lease(key("some"), { ttl: 60_000 });
    fences.push(lease.fence);
    await lease.release();
  }
  expect(fences).toEqual(fences.toSorted((a, b) => a - b));
  return fences;
}
