/** Trials of quotas, stock, queues and schedules. */
import { setTimeout as sleep } from "node:timers/promises";
import { sharded } from "holdfast";
import { fromPg } from "holdfast/pg";
import { JobLostError, queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { models, recorder } from "holdfast/testing";
import { eventually } from "../harness/wait.ts";
import { type Ground, explained, promised, refused, succeeds } from "./ground.ts";
import type { Trial } from "./trials.ts";

/** What is refused with that code is an answer; whatever else is thrown is not. */
async function granted(call: Promise<unknown>, code: string): Promise<boolean> {
  try {
    await call;
    return true;
  } catch (error) {
    if ((error as { code?: unknown }).code === code) return false;
    throw error;
  }
}

/** Four instances, each as if in a process of its own, take one piece after the other until there are none. */
async function taken(
  ground: Ground,
  limit: number,
  take: (hf: ReturnType<Ground["instance"]>) => () => Promise<boolean>,
): Promise<void> {
  const record = recorder();
  const caller = async (process: string) => {
    const one = take(ground.instance());
    for (let i = 0; i < limit / 2; i++)
      await succeeds(record("it", "take", 1, one, { process }), "one that is to be granted or refused");
  };
  await Promise.all(["one", "two", "three", "four"].map(caller));
  explained(record.history(), models.counter({ limit }));
}

export const patternTrials: readonly Trial[] = [
  {
    name: "a quota of 60, four instances",
    by: "history",
    kills: ["quotaLocked"],
    run: (ground) =>
      taken(ground, 60, (hf) => {
        const uses = quota(hf, { name: "uses", limit: 60 });
        return () => granted(uses.consume("ada", 1), "HF_QUOTA_EXCEEDED");
      }),
  },
  {
    name: "a use that is sent twice",
    by: "chaos",
    kills: ["quotaIdKept"],
    async run(ground) {
      const [one, two] = [ground.instance(), ground.instance()].map((hf) =>
        quota(hf, { name: "uses", limit: 100 }),
      ) as [ReturnType<typeof quota>, ReturnType<typeof quota>];
      for (let i = 0; i < 5; i++) {
        const id = `request ${i}`;
        await Promise.all([one.consume("ada", 1, { id }), two.consume("ada", 1, { id })]);
        await one.consume("ada", 1, { id });
      }
      const { used } = await one.peek("ada");
      promised(used === 5, `5 requests, each sent three times, have used ${used}`);
    },
  },
  {
    name: "a quota of which most is held",
    by: "chaos",
    kills: ["quotaHeldCounted"],
    async run(ground) {
      const credits = quota(ground.instance(), { name: "credits", limit: 10 });
      const hold = await credits.hold("ada", 6, { holdFor: 60_000 });
      await refused(credits.consume("ada", 5), "HF_QUOTA_EXCEEDED", "5 more, with 6 of 10 held");
      await hold.settle(6);
      await credits.consume("ada", 4);
    },
  },
  {
    name: "20 pieces, four shops",
    by: "history",
    kills: ["stockChecked"],
    async run(ground) {
      await stock(ground.instance()).increase("mug", 20);
      await taken(ground, 20, (hf) => {
        const shelf = stock(hf);
        return () => granted(shelf.decrease("mug", 1), "HF_STOCK_INSUFFICIENT");
      });
    },
  },
  {
    name: "pieces of which some are reserved",
    by: "chaos",
    kills: ["stockReservedKept"],
    async run(ground) {
      const shelf = stock(ground.instance());
      await shelf.increase("mug", 10);
      const kept = await shelf.reserve([{ sku: "mug", quantity: 6 }], { id: "cart", ttl: 60_000 });
      await refused(shelf.decrease("mug", 5), "HF_STOCK_INSUFFICIENT", "5 of 10, with 6 reserved");
      await kept.commit();
      await shelf.decrease("mug", 4);
    },
  },
  {
    name: "a worker that is given up, and completes its job",
    by: "chaos",
    kills: ["jobStillOurs"],
    async run(ground) {
      await ground.ask("CREATE TABLE effect (who text)");
      const begun = Promise.withResolvers<void>();
      const goOn = Promise.withResolvers<void>();
      const told: string[] = [];
      const work = (who: string) => {
        const hf = ground.instance();
        const jobs = queue<number>(hf, "mails", { retries: 100 });
        const working = jobs.work(
          async (job) => {
            if (who === "late") {
              begun.resolve();
              await goOn.promise;
            }
            try {
              await hf.transaction(async (tx) => {
                await tx.client.query("INSERT INTO effect VALUES ($1)", [who]);
                await job.complete(tx);
              });
              told.push(`${who}: done`);
            } catch (error) {
              told.push(`${who}: ${error instanceof JobLostError ? "lost" : String(error)}`);
            }
          },
          { pollMs: 100, ttlMs: 2000, concurrency: 1 },
        );
        ground.later(() => working.stop());
        return jobs;
      };
      const jobs = work("late");
      await jobs.enqueue(1);
      await begun.promise;
      // As if it had been frozen. Only then the other one begins: it would have got the job at once.
      await ground.ask("UPDATE holdfast.queue_worker SET beat = beat - interval '1 hour'");
      await ground.ask("SELECT holdfast.queue_sweep(true)");
      work("other");
      await eventually(() => told.includes("other: done"));
      goOn.resolve();
      await eventually(() => told.length === 2);
      const effects = await ground.number("SELECT count(*) FROM effect");
      promised(effects === 1, `one job, ${effects} effects (${told.join(", ")})`);
    },
  },
  {
    name: "a job that always fails",
    by: "chaos",
    kills: ["attemptsCounted"],
    async run(ground) {
      const jobs = queue<number>(ground.instance(), "mails", {
        retries: 1,
        backoff: { baseMs: 1, maxMs: 5 },
      });
      let runs = 0;
      const working = jobs.work(
        async () => {
          runs++;
          throw new Error("again");
        },
        { pollMs: 50 },
      );
      ground.later(() => working.stop());
      await jobs.enqueue(1);
      await eventually(
        async () => runs > 5 || (await ground.number("SELECT count(*) FROM holdfast.queue_failed")) === 1,
      );
      promised(runs === 2, `a job with one retry ran ${runs} times`);
    },
  },
  {
    name: "a sweep, while a job runs",
    by: "chaos",
    kills: ["workerDeadFirst"],
    async run(ground) {
      let runs = 0;
      const begun = Promise.withResolvers<void>();
      const goOn = Promise.withResolvers<void>();
      const start = () => {
        const jobs = queue<number>(ground.instance(), "mails");
        const working = jobs.work(
          async () => {
            runs++;
            begun.resolve();
            await goOn.promise;
          },
          { pollMs: 50, ttlMs: 20_000 },
        );
        ground.later(() => working.stop());
        return jobs;
      };
      const jobs = start();
      start();
      await jobs.enqueue(1);
      await begun.promise;
      await ground.ask("SELECT holdfast.queue_sweep(true)");
      await sleep(1500);
      goOn.resolve();
      promised(runs === 1, `a job whose worker is alive ran ${runs} times`);
    },
  },
  {
    name: "a group of which one may run",
    by: "chaos",
    kills: ["groupCounted"],
    async run(ground) {
      let [running, most, done] = [0, 0, 0];
      const start = () => {
        const jobs = queue<number>(ground.instance(), "exports", { groups: { concurrency: 1 } });
        const working = jobs.work(
          async () => {
            most = Math.max(most, ++running);
            await sleep(30);
            running--;
            done++;
          },
          { pollMs: 50, concurrency: 4 },
        );
        ground.later(() => working.stop());
        return jobs;
      };
      const jobs = start();
      start();
      for (let i = 0; i < 10; i++) await jobs.enqueue(i, { group: "ada" });
      await eventually(() => done === 10);
      promised(most === 1, `${most} jobs of a group that allows one ran at the same time`);
    },
  },
  {
    name: "three instances of a schedule",
    by: "chaos",
    kills: ["tickOnce"],
    async run(ground) {
      const ticks: number[] = [];
      const errors: unknown[] = [];
      for (let i = 0; i < 3; i++) {
        const each = schedule(
          ground.instance(),
          "report",
          { every: 500, onError: (error) => void errors.push(error) },
          async (run) => {
            ticks.push(run.tick.getTime());
          },
        );
        await each.start();
        ground.later(() => each.stop({ grace: 0 }));
      }
      await eventually(() => ticks.length >= 6 || errors.length > 0);
      promised(errors.length === 0, `deciding upon a tick failed: ${String(errors[0])}`);
      const twice = ticks.filter((tick, i) => ticks.indexOf(tick) !== i);
      promised(twice.length === 0, `${twice.length} ticks of ${ticks.length} were run twice`);
    },
  },
  {
    name: "a process that has a longer list of shards",
    by: "chaos",
    kills: ["shardAgreed"],
    async run(ground) {
      const [one, two] = [ground.pool, ground.pool].map((pool) => fromPg(pool));
      const uses = (databases: readonly ReturnType<typeof fromPg<typeof ground.pool>>[]) =>
        quota(
          sharded(databases, () => 0),
          { name: "uses", limit: 9 },
        );
      if (!one || !two) throw new Error("there are two");
      await uses([one]).consume("ada");
      await refused(uses([one, two]).consume("ada"), "HF_SHARD_MAP", "a use, on shard 0 of 2 instead of 1");
    },
  },
];
