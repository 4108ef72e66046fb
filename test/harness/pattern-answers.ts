/**
 * A question about each pattern, with the answer of the primary, for tests with something between Holdfast and a primary whose standby
 * shows what was there a while ago.
 */
import { type Holdfast, HoldfastError, type Lease, fenced, key, leader, once, versioned } from "holdfast";
import { audited, trail } from "holdfast/audit";
import { jobs, queue, queues } from "holdfast/queue";
import { quota, quotas, subjects } from "holdfast/quota";
import { schedule, schedules } from "holdfast/schedule";
import { stock, stocks } from "holdfast/stock";
import { channel } from "node:diagnostics_channel";
import { eventually } from "./wait.ts";

export type Any = Holdfast<any>;

/** The primary itself. */
export interface Ground {
  readonly direct: Any;
  /** Sends a statement. */
  query(text: string): Promise<unknown>;
}

/** What was taken in {@link after}. */
const ends: (() => unknown)[] = [];

export async function giveBack(): Promise<void> {
  await Promise.all(ends.splice(0).map((end) => end()));
}

export const uploads = (hf: Any) => quota(hf, { name: "uploads", limit: 5 });
const shop = (hf: Any) => stock(hf, { name: "shop" });
const mail = (hf: Any) => queue<{ n: number }>(hf, "mail");
const nightly = (hf: Any) => schedule(hf, "nightly", { every: 3_600_000 }, async () => {});
const few = (hf: Any) => hf.semaphore(key("few"), { permits: 1, ttl: 600_000 });
/** The standby has `stale`, which is over by now, and not `fresh`. */
const leases = {} as { stale: Lease; fresh: Lease };
let newestFence = 0;
let newestJob = 0;
const account = (hf: Any) => versioned<{ id: number; balance: number; version: number }>(hf, "account");

/** What the standby has. */
export async function before({ direct, query }: Ground): Promise<void> {
  await query(
    "CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL, version int NOT NULL DEFAULT 0)",
  );
  await query("INSERT INTO account (id, balance) VALUES (1, 0)");
  for (const subject of ["full", "peeked", "freed"]) await uploads(direct).consume(subject, 3);
  await uploads(direct).consume("freed", 2);
  await shop(direct).increase("CAP", 5);
  await shop(direct).increase("PEN", 5);
  await mail(direct).enqueue({ n: 1 });
  await nightly(direct).runNow();
  await audited(direct, { action: "look", target: "it", actor: "me" }, async () => 1);
  leases.stale = await direct.lease(key("fenced"), { ttl: 600_000 });
}

/** What only the primary has. */
export async function after({ direct, query }: Ground): Promise<void> {
  await query("UPDATE account SET balance = 7, version = 1 WHERE id = 1");
  await query("INSERT INTO account (id, balance) VALUES (2, 20), (3, 30)");
  await uploads(direct).consume("full", 2);
  await uploads(direct).consume("peeked", 1, { id: "p" });
  await uploads(direct).grant("peeked", 2, { id: "gift" });
  await uploads(direct).reset("freed");
  await uploads(direct).consume("new", 5, { id: "n" });
  await shop(direct).decrease("CAP", 5, { externalId: "sale" });
  await shop(direct).increase("MUG", 7);
  await mail(direct).enqueueMany([2, 3].map((n) => ({ payload: { n } })));
  newestJob = (await mail(direct).enqueue({ n: 4 }, { key: "k" })).id;
  await mail(direct).pause();
  await queue(direct, "later").enqueue({});
  const broken = queue(direct, "broken", { retries: 0 });
  await broken.enqueue({});
  const worker = broken.work(async () => {
    throw new Error("broken");
  });
  await eventually(async () => {
    if ((await broken.counts()).failed !== 1) throw new Error("not yet");
  });
  await worker.stop();
  await nightly(direct).runNow();
  await nightly(direct).pause();
  await once(direct, "event", async () => "first");
  await audited(direct, { action: "look", target: "it", actor: "me" }, async () => 2);
  const lease = await direct.lease(key("export"), { ttl: 600_000 });
  const held = await direct.hold(key("report"));
  await leases.stale.release();
  leases.fresh = await direct.lease(key("fenced"), { ttl: 600_000 });
  const permit = await few(direct).acquire();
  for (let i = 0; i < 3; i++) {
    const led = await direct.lease(key("leader", "chief"));
    newestFence = led.fence;
    await led.release();
  }
  ends.push(
    () => leases.fresh.release(),
    () => permit.release(),
    () => lease.release(),
    () => held.release(),
  );
}

export interface Question {
  readonly ask: (hf: Any) => Promise<unknown>;
  readonly truth: unknown;
  /** It changes nothing, so that it may be asked before. */
  readonly reads?: true;
}

const codeOf = (error: unknown): string => {
  if (error instanceof HoldfastError) return error.code;
  throw error;
};

export const questions: Record<string, Question> = {
  "quota: peek": { ask: async (hf) => (await uploads(hf).peek("peeked")).used, truth: 4, reads: true },
  "quota: peek of what is new": {
    ask: async (hf) => (await uploads(hf).peek("new")).used,
    truth: 5,
    reads: true,
  },
  "quota: what is full": {
    ask: async (hf) => (await uploads(hf).tryConsume("full", 1)).granted,
    truth: false,
  },
  "quota: what is free again": {
    ask: async (hf) => (await uploads(hf).tryConsume("freed", 5)).granted,
    truth: true,
  },
  "quota: what is new": { ask: async (hf) => (await uploads(hf).tryConsume("new", 1)).granted, truth: false },
  "quota: once more": {
    ask: async (hf) => {
      const { granted, ...rest } = await uploads(hf).tryConsume("peeked", 1, { id: "p" });
      return granted && "replayed" in rest && rest.replayed;
    },
    truth: true,
  },
  "quota: several": {
    ask: async (hf) => {
      const of = uploads(hf);
      const answers = await Promise.all([
        of.tryConsume("several", 2),
        of.tryConsume("full", 1),
        of.tryConsume("several", 3),
      ]);
      return answers.map(({ granted }) => granted);
    },
    truth: [true, false, true],
  },
  "quota: refund": {
    ask: async (hf) => (await uploads(hf).refund("new", "n", { amount: 1 })).used,
    truth: 4,
  },
  "quota: grants": { ask: async (hf) => (await uploads(hf).grants("peeked")).length, truth: 1, reads: true },
  "quota: history": {
    ask: async (hf) => (await uploads(hf).history("peeked")).entries.length,
    truth: 3,
    reads: true,
  },
  "quota: reconcile": {
    ask: async (hf) => (await uploads(hf).reconcile("peeked")).entries,
    truth: 3,
    reads: true,
  },
  "quota: subjects": {
    ask: async (hf) => (await subjects(hf, "uploads")).find(({ subject }) => subject === "peeked")?.used,
    truth: 4,
    reads: true,
  },
  "quota: quotas": { ask: async (hf) => (await quotas(hf)).length, truth: 1, reads: true },
  "quota: in a transaction": {
    ask: (hf) => hf.transaction(async (tx) => (await uploads(hf).peek("peeked", { tx })).used),
    truth: 4,
    reads: true,
  },
  "quota: in a transaction that reads": {
    ask: (hf) =>
      hf.transaction({ readOnly: true }, async (tx) => (await uploads(hf).peek("peeked", { tx })).used),
    truth: 4,
    reads: true,
  },
  "stock: level": { ask: async (hf) => (await shop(hf).level("CAP")).onHand, truth: 0, reads: true },
  "stock: levels": { ask: async (hf) => (await shop(hf).levels()).length, truth: 3, reads: true },
  "stock: what is sold out": {
    ask: (hf) => shop(hf).decrease("CAP", 1).catch(codeOf),
    truth: "HF_STOCK_INSUFFICIENT",
  },
  "stock: what is new": {
    ask: async (hf) =>
      shop(hf)
        .decrease("MUG", 1)
        .then(({ lines }) => lines[0]?.onHand)
        .catch(codeOf),
    truth: 6,
  },
  "stock: several": {
    ask: async (hf) =>
      shop(hf)
        .apply([
          { sku: "MUG", quantity: -1 },
          { sku: "PEN", quantity: -1 },
        ])
        .then(({ lines }) => lines.length)
        .catch(codeOf),
    truth: 2,
  },
  "stock: what is unknown": {
    ask: (hf) => shop(hf).decrease("NONE", 1).catch(codeOf),
    truth: "HF_STOCK_UNKNOWN_SKU",
  },
  "stock: once more": {
    ask: (hf) =>
      shop(hf)
        .decrease("CAP", 5, { externalId: "sale" })
        .then(({ replayed }) => replayed)
        .catch(codeOf),
    truth: true,
  },
  "stock: a return": {
    ask: (hf) =>
      shop(hf)
        .return("sale")
        .then(({ lines }) => lines[0]?.onHand)
        .catch(codeOf),
    truth: 5,
  },
  "stock: minimum": {
    ask: (hf) =>
      shop(hf)
        .setMinimum("MUG", 1)
        .then(() => "set")
        .catch(codeOf),
    truth: "set",
  },
  "stock: history": {
    ask: async (hf) => (await shop(hf).history({ sku: "CAP" })).movements.length,
    truth: 2,
    reads: true,
  },
  "stock: channels": { ask: async (hf) => (await shop(hf).byChannel())[0]?.movements, truth: 4, reads: true },
  "stock: reconcile": { ask: async (hf) => (await shop(hf).reconcile()).levels, truth: 3, reads: true },
  "stock: stocks": { ask: async (hf) => (await stocks(hf))[0]?.levels, truth: 3, reads: true },
  "queue: counts": { ask: async (hf) => (await mail(hf).counts()).waiting, truth: 4, reads: true },
  "queue: whether it is paused": {
    ask: async (hf) => (await mail(hf).counts()).paused,
    truth: true,
    reads: true,
  },
  "queue: a key that is there": {
    ask: async (hf) => (await mail(hf).enqueue({ n: 5 }, { key: "k" })).added,
    truth: false,
  },
  "queue: jobs": {
    ask: async (hf) => (await jobs(hf, "mail", { state: "waiting" }))?.jobs.length,
    truth: 4,
    reads: true,
  },
  "queue: a job": {
    ask: async (hf) => (await mail(hf).inspect(newestJob))?.payload,
    truth: { n: 4 },
    reads: true,
  },
  "queue: what has failed": {
    ask: async (hf) => (await queue(hf, "broken").failed())[0]?.attempts,
    truth: 1,
    reads: true,
  },
  "queue: queues": { ask: async (hf) => (await queues(hf)).length, truth: 3, reads: true },
  "queue: a worker": {
    ask: async (hf) => {
      const done = Promise.withResolvers<number>();
      const trouble = channel("holdfast:queue:trouble");
      const refuse = (message: unknown) => done.reject((message as { error: unknown }).error);
      trouble.subscribe(refuse);
      const worker = queue<{ n: number }>(hf, "later").work(async () => done.resolve(1));
      try {
        return await done.promise;
      } finally {
        trouble.unsubscribe(refuse);
        await worker.stop();
      }
    },
    truth: 1,
  },
  "schedule: runs": { ask: async (hf) => (await nightly(hf).runs()).length, truth: 2, reads: true },
  "schedule: whether it is paused": {
    ask: async (hf) => (await nightly(hf).status()).paused,
    truth: true,
    reads: true,
  },
  "schedule: schedules": { ask: async (hf) => (await schedules(hf))[0]?.paused, truth: true, reads: true },
  "schedule: a run": { ask: async (hf) => (await nightly(hf).runNow()).ran, truth: true },
  "lease: one that is held": { ask: (hf) => hf.lease(key("export"), { wait: "skip" }), truth: undefined },
  "lease: one that is free": {
    ask: async (hf) => {
      const lease = await hf.lease(key("free"), { wait: "skip", ttl: 60_000 });
      await lease?.release();
      return lease !== undefined;
    },
    truth: true,
  },
  "lease: leases": { ask: async (hf) => (await hf.leases()).length, truth: 3, reads: true },
  "semaphore: one that is full": { ask: (hf) => few(hf).acquire({ wait: "skip" }), truth: undefined },
  "semaphore: one that is free": {
    ask: async (hf) => {
      const permit = await hf.semaphore(key("many"), { permits: 2 }).acquire({ wait: "skip" });
      await permit?.release();
      return permit !== undefined;
    },
    truth: true,
  },
  leader: {
    ask: async (hf) => {
      const { promise, resolve, reject } = Promise.withResolvers<boolean>();
      const candidate = leader(hf, "chief", async ({ fence }) => resolve(fence > newestFence), {
        onError: reject,
      });
      try {
        return await promise;
      } finally {
        await candidate.stop();
      }
    },
    truth: true,
  },
  "fenced: a lease that is over": {
    ask: (hf) => hf.transaction((tx) => fenced(tx, leases.stale).then(() => "held")).catch(codeOf),
    truth: "HF_STALE_FENCE",
  },
  "fenced: a lease that is held": {
    ask: (hf) => hf.transaction((tx) => fenced(tx, leases.fresh).then(() => "held")).catch(codeOf),
    truth: "held",
  },
  "lock: one that is held": {
    ask: async (hf) => {
      const held = await hf.hold(key("report"), { wait: "skip" });
      await held?.release();
      return held !== undefined;
    },
    truth: false,
  },
  "lock: in a transaction": {
    ask: async (hf) => (await hf.tryLock(key("report"), async () => {})).acquired,
    truth: false,
  },
  "lock: before a transaction": {
    ask: (hf) =>
      hf
        .transaction({ lock: key("report"), wait: "nowait", isolation: "serializable" }, async () => "taken")
        .catch(codeOf),
    truth: "HF_LOCK_NOT_AVAILABLE",
  },
  once: {
    ask: (hf) => once(hf, "event", async () => "again"),
    truth: { status: "done", value: "first", replayed: true },
  },
  "versioned: read": { ask: async (hf) => (await account(hf).read(1))?.balance, truth: 7, reads: true },
  "versioned: read of what is new": {
    ask: async (hf) => (await account(hf).read(2))?.balance,
    truth: 20,
    reads: true,
  },
  "versioned: update": {
    ask: async (hf) => (await account(hf).update(1, ({ balance }) => ({ balance: balance + 1 }))).balance,
    truth: 8,
  },
  "versioned: update of what is new": {
    ask: async (hf) =>
      account(hf)
        .update(3, ({ balance }) => ({ balance: balance + 1 }))
        .then(({ balance }) => balance)
        .catch(codeOf),
    truth: 31,
  },
  audited: {
    ask: (hf) => audited(hf, { action: "do", target: "that", actor: "me" }, async () => 3),
    truth: 3,
  },
  "audited: trail": { ask: async (hf) => (await trail(hf, { target: "it" })).length, truth: 2, reads: true },
  inspect: {
    ask: async (hf) => (await hf.inspect()).holders.some(({ name }) => name.includes("report")),
    truth: true,
    reads: true,
  },
  migrations: {
    ask: async (hf) => (await hf.migrations()).every(({ state }) => state === "applied"),
    truth: true,
    reads: true,
  },
};

/** What the primary shows where these were refused. */
const untouched: Record<string, (direct: Any) => Promise<boolean>> = {
  "quota: what is free again": async (direct) => (await uploads(direct).peek("freed")).used === 0,
  "quota: refund": async (direct) => (await uploads(direct).peek("new")).used === 5,
  "stock: a return": async (direct) => (await shop(direct).level("CAP")).onHand === 0,
  "versioned: update of what is new": async (direct) => (await account(direct).read(3))?.balance === 30,
};

export interface Tally {
  readonly exact: string[];
  readonly refused: string[];
  readonly wrong: string[];
}

export async function answers(hf: Any, direct: Any, turn: () => unknown = () => {}): Promise<Tally> {
  const tally: Tally = { exact: [], refused: [], wrong: [] };
  const all = Object.entries(questions).toSorted(
    ([, a], [, b]) => Number(b.reads ?? false) - Number(a.reads ?? false),
  );
  for (const [name, { ask, truth }] of all) {
    await turn();
    const answer = await ask(hf).catch((error: unknown) => error);
    const code: unknown = answer instanceof HoldfastError ? answer.code : answer;
    if (code === "HF_REPLICA" || code === "HF_UNSUPPORTED") tally.refused.push(name);
    else if (answer instanceof Error) tally.wrong.push(`${name}: ${answer.name}: ${answer.message}`);
    else if (JSON.stringify(answer) === JSON.stringify(truth)) tally.exact.push(name);
    else tally.wrong.push(`${name}: ${JSON.stringify(answer)}, not ${JSON.stringify(truth)}`);
  }
  const { exact, refused, wrong } = tally;
  for (const [name, isUntouched] of Object.entries(untouched))
    if (refused.includes(name) && !(await isUntouched(direct))) wrong.push(`${name}: refused, and done`);
  console.log(`${exact.length} exact, ${refused.length} refused, ${wrong.length} wrong`);
  return tally;
}
