/** One process of several that does everything at once for some time: quotas, stock, queues and schedules. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, sql } from "holdfast";
import { type Worker, queue } from "holdfast/queue";
import { schedule } from "holdfast/schedule";
import { random } from "../harness/random.ts";
import { openNamed } from "../harness/sites.ts";
import { plan as quotaPlan, quotasOf } from "./quota-random.ts";
import { plan as stockPlan, shopOf } from "./stock-random.ts";

export interface MixedLoadArg {
  readonly backend: string;
  readonly url: string;
  readonly seed: number;
  readonly index: number;
  readonly ms: number;
}

export interface MixedLoadResult {
  readonly quota: number;
  readonly stock: number;
  readonly enqueued: number;
  readonly worked: number;
  readonly ticks: number;
  readonly errors: readonly string[];
}

/** Of which some jobs have an order, and of which so many of a group run at a time. */
export const errands = (hf: Holdfast<unknown>) =>
  queue<string>(hf, "errands", { retries: 1000, groups: { concurrency: 2 } });
export const chores = (hf: Holdfast<unknown>) => queue<string>(hf, "chores", { retries: 1000 });

export default async function mixedLoad(arg: MixedLoadArg): Promise<MixedLoadResult> {
  const site = await openNamed(arg.backend, arg.url);
  const { hf } = site;
  const end = performance.now() + arg.ms;
  const next = random(arg.seed * 31 + arg.index);
  const below = (most: number) => Math.floor(next() * most);
  const done = { quota: 0, stock: 0, enqueued: 0, worked: 0, ticks: 0 };
  const errors: string[] = [];
  const report = (error: unknown) => void errors.push(String(error));

  /** Some of the calls in transactions of their own, together with rows of the caller's. */
  const repeat = async (kind: "quota" | "stock" | "enqueued", stepOf: () => () => Promise<unknown>) => {
    while (performance.now() < end) {
      const step = stepOf();
      try {
        await (next() < 0.3
          ? hf.transaction(async (tx) => {
              await step();
              await tx.query(sql`INSERT INTO effect (kind, name) VALUES (${kind}, ${String(done[kind])})`);
            })
          : step());
        done[kind]++;
      } catch (error) {
        report(error);
      }
    }
  };
  const stepsOf = <T>(made: (round: number) => T[]) => {
    let [round, steps] = [0, [] as T[]];
    return () => {
      while (steps.length === 0) steps = made(round++);
      return steps.shift() as T;
    };
  };
  const [all, shop] = [quotasOf(hf), shopOf(hf)];
  // Each round with other ids.
  const where = (round: number) => ({ seed: arg.seed + round, index: arg.index + round * 100, calls: 100 });
  const nextQuota = stepsOf((round) => quotaPlan(where(round)));
  const nextStock = stepsOf((round) => stockPlan(where(round)));
  const newJobs = () =>
    Array.from({ length: 1 + below(8) }, () => ({
      payload: "something",
      ...(next() < 0.5 && { group: `group ${below(6)}` }),
      ...(next() < 0.3 && { key: `key ${below(30)}` }),
      ...(next() < 0.2 && { delayMs: below(300) }),
      ...(next() < 0.3 && { priority: below(3) }),
    }));

  const effectOf = (kind: string, name: string) =>
    sql`INSERT INTO effect (kind, name) VALUES (${kind}, ${name})`;
  const options = { concurrency: 4, pollMs: 50, onTrouble: report };
  const workers: Worker[] = [
    errands(hf).work(async (job) => {
      if (next() < 0.1) throw new Error("another time");
      await hf.transaction(async (tx) => {
        await tx.query(effectOf("errand", String(job.id)));
        await job.complete(tx);
      });
      done.worked++;
    }, options),
    chores(hf).work(
      async (job, tx) => {
        await tx.query(effectOf("chore", String(job.id)));
        if (next() < 0.1) throw new Error("another time");
        done.worked++;
      },
      { ...options, transactional: true },
    ),
  ];
  // Nobody dies here, and a machine that is busy with this and more may keep one waiting for seconds.
  const often = { every: 250, catchUp: "all", ttl: 60_000, onError: report } as const;
  const schedules = [
    schedule(hf, "enqueues", {
      ...often,
      enqueue: async (tick, tx) => {
        await tx.query(effectOf("enqueues", tick.toISOString()));
        await errands(hf).enqueue("of a tick", { tx, group: `group ${tick.getTime() % 7}` });
      },
    }),
    schedule(hf, "completes", often, async (run) => {
      await hf.transaction(async (tx) => {
        await tx.query(effectOf("completes", run.tick.toISOString()));
        await run.complete(tx);
      });
      done.ticks++;
    }),
  ];
  await Promise.all(schedules.map((each) => each.start()));
  await Promise.all([
    ...Array.from({ length: 4 }, () =>
      repeat("quota", () => {
        const step = nextQuota();
        return () => step(all);
      }),
    ),
    ...Array.from({ length: 4 }, () =>
      repeat("stock", () => {
        const step = nextStock();
        return () => step(shop);
      }),
    ),
    ...[errands(hf), chores(hf)].map((to) =>
      repeat("enqueued", () => async () => {
        await to.enqueueMany(newJobs());
        await sleep(below(20));
      }),
    ),
  ]);
  await Promise.all(schedules.map((each) => each.stop()));
  await Promise.all(workers.map((each) => each.stop()));
  await site.close();
  return { ...done, errors };
}
