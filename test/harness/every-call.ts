/** Nearly every call of the library, on whatever database: for tests of what these calls need, or are kept from. */
import { type Holdfast, type Key, fenced, key, leader, once, shared } from "holdfast";
import { audited, trail } from "holdfast/audit";
import { jobs, queue, queues, workers } from "holdfast/queue";
import { quota, quotas, subjects } from "holdfast/quota";
import { schedule, schedules } from "holdfast/schedule";
import { stock, stocks } from "holdfast/stock";
import { expect } from "vitest";
import { eventually } from "./wait.ts";

/**
 * `advisory`: keys of advisory locks, where there are any. These can also
 * be shared, held by transactions that only read, and looked at without a right to see everybody's sessions.
 */
export async function useLocks(hf: Holdfast<any>, advisory: readonly Key[] = []): Promise<void> {
  await hf.capabilities();
  const one = key("upload", 1);
  await hf.transaction({ lock: one }, async (tx) => {
    await tx.lock([key("b", 1), advisory.length > 0 ? shared(key("c", 1)) : key("c", 1)]);
    await tx.lock(key("d", 1), { wait: "nowait" });
    await tx.transaction(async () => {});
    // Somebody waits for it: who holds it is looked up.
    const refused = hf.outside(() => hf.transaction({ lock: one, wait: 20, retry: false }, async () => {}));
    await expect(refused).rejects.toThrow("upload:1");
    if (advisory.length > 0) expect((await hf.inspect()).holders.length).toBeGreaterThan(0);
  });
  await hf.transaction({ lock: key("a"), wait: "nowait" }, async () => {});
  await hf.tryLock(key("try", 1), async () => 1);
  if (advisory.length > 0) {
    await hf.transaction({ lock: [key("a"), key("b")], isolation: "serializable" }, async () => {});
    await hf.transaction({ lock: key("a"), readOnly: true }, async () => {});
    await hf.transaction({ lock: advisory }, async () => {});
  }
  const held = await hf.hold(key("session", 1));
  await held.release();
  await once(hf, ["order", 1], async () => ({ paid: true }));
  await once(hf, ["order", 1], async () => ({ paid: true }));
  const lease = await hf.lease(key("export", 1), { ttl: 60_000 });
  await lease.renew(60_000);
  await hf.transaction(async (tx) => fenced(tx, lease));
  expect(await hf.lease(key("export", 1), { wait: "skip" })).toBeUndefined();
  expect(await hf.leases()).toHaveLength(1);
  await lease.release();
  const other = await hf.lease(key("export", 2), { ttl: 60_000 });
  await hf.endLease(other.fence);
  const places = hf.semaphore(key("places"), { permits: 2 });
  await (await places.acquire()).release();
  const led = Promise.withResolvers<void>();
  const leading = leader(hf, "every-call", async ({ signal }) => {
    led.resolve();
    await new Promise((resolve) => signal.addEventListener("abort", resolve));
  });
  await led.promise;
  await leading.stop();
}

async function useQuotas(hf: Holdfast<any>, name: string): Promise<void> {
  const plain = quota(hf, { name, limit: 5 });
  const answers = await Promise.all(Array.from({ length: 12 }, () => plain.tryConsume("ada")));
  expect(answers.filter(({ granted }) => granted)).toHaveLength(5);
  for (const window of ["fixed", "sliding-log", "sliding-parts", "refill"] as const) {
    const of = quota(hf, {
      name: `${name} ${window}`,
      limit: { plans: { free: 3, pro: 9 }, default: "free" },
      per: 60_000,
      window,
    });
    const used = await of.consume("ada", 2, { id: "a" });
    expect(used.remaining).toBe(1);
    await of.consume("ada", 2, { id: "a" });
    await of.refund("ada", "a", { amount: 1 }).catch(() => {});
    const hold = await of.hold("ada", 1);
    await of.settle("ada", hold.id, 1);
    await of.release("ada", (await of.hold("ada", 1).catch(() => hold)).id).catch(() => {});
    await of.grant("ada", 5, { id: "gift" });
    await of.tryConsume("ada", 4);
    await of.grants("ada");
    await of.revoke("ada", "gift");
    await of.setLimit("ada", 7);
    await of.setPlan("ada", "pro");
    await of.peek("ada");
    await of.history("ada");
    expect(await of.reconcile("ada")).toMatchObject({ ok: true });
    await of.reconcile("ada", { repair: true });
    await of.reset("ada");
    await of.prune({ olderThanMs: 0 });
    await hf.transaction(async (tx) => {
      await of.consume("bob", 1, { tx });
      await of.peek("bob", { tx });
    });
  }
  await quotas(hf);
  await subjects(hf, name);
}

async function useStock(hf: Holdfast<any>, name: string): Promise<void> {
  const of = stock(hf, { name });
  await of.increase("CAP", 5);
  const sales = await Promise.allSettled(Array.from({ length: 9 }, () => of.decrease("CAP", 1)));
  expect(sales.filter(({ status }) => status === "fulfilled")).toHaveLength(5);
  await of.apply([
    { sku: "CAP", quantity: 3 },
    { sku: "MUG", quantity: 4 },
  ]);
  const sale = await of.decrease("MUG", 1, { reference: { type: "order", id: "o-1" } });
  await of.return(sale.externalId);
  await of.adjustTo("CAP", 7);
  await of.increase("CAP", 1, { location: "shop" });
  await of.transfer("CAP", 1, { from: "shop", to: "depot" });
  const kept = await of.reserve([{ sku: "CAP", quantity: 2 }], { ttl: 60_000 });
  await kept.commit();
  await (await of.reserve([{ sku: "CAP", quantity: 1 }])).release();
  await of.setMinimum("CAP", 1);
  await of.level("CAP");
  await of.levels();
  await of.levels({ limit: 1 });
  await of.history({ sku: "CAP" });
  await of.history({ reference: { id: "o-1" } });
  await of.levelAt("CAP", new Date());
  await of.byChannel();
  expect(await of.reconcile()).toMatchObject({ ok: true });
  await of.reconcile({ repair: true });
  await stocks(hf);
  await hf.transaction(async (tx) => of.decrease("CAP", 1, { tx }));
}

async function useQueues(hf: Holdfast<any>, name: string): Promise<void> {
  const of = queue<{ n: number }>(hf, name, { retries: 1, backoff: () => 1 });
  await of.enqueueMany(
    Array.from({ length: 6 }, (_, n) => ({
      payload: { n },
      ...(n === 3 && { group: "g" }),
      ...(n === 4 && { key: "k" }),
    })),
  );
  await of.enqueue({ n: 6 }, { delayMs: 1 });
  await of.enqueue({ n: 7 }, { delayMs: 60_000 });
  await hf.transaction(async (tx) => of.enqueue({ n: 8 }, { tx }));
  const done = new Set<number>();
  const worker = of.work(
    async (job) => {
      if (job.payload.n === 5) throw new Error("no");
      done.add(job.payload.n);
    },
    { concurrency: 4 },
  );
  await eventually(() => expect([...done].toSorted((a, b) => a - b)).toEqual([0, 1, 2, 3, 4, 6, 8]));
  await eventually(async () => expect((await of.counts()).failed).toBe(1));
  await workers(hf);
  await worker.stop();
  const transactional = of.work(async (_job, _tx) => {}, { transactional: true });
  await of.enqueue({ n: 9 });
  await eventually(async () => expect((await of.counts()).waiting).toBe(0));
  await transactional.stop();
  for (const state of ["waiting", "delayed", "running", "failed"] as const) await jobs(hf, name, { state });
  const gone = await of.failed();
  await of.inspect(gone[0]?.id ?? 0);
  await of.pause();
  await of.retry();
  await of.resume();
  await of.discard(gone.map(({ id }) => id));
  await of.prune({ olderThanMs: 0 });
  await queues(hf);
}

async function useSchedules(hf: Holdfast<any>, name: string): Promise<void> {
  let ran = 0;
  const of = schedule(hf, name, { every: 60_000 }, async (run) => {
    ran++;
    await hf.transaction(async (tx) => run.complete(tx));
  });
  await of.runNow();
  expect(ran).toBe(1);
  await of.pause();
  await of.resume();
  await of.status();
  await of.runs();
  await schedules(hf);
}

export async function useAll(hf: Holdfast<any>, name: string): Promise<void> {
  await useQuotas(hf, name);
  await useStock(hf, name);
  await useQueues(hf, name);
  await useSchedules(hf, name);
  await audited(hf, { action: "look", target: name, actor: "me" }, async () => 1);
  await trail(hf, { target: name, limit: 1 });
  await hf.migrations();
}
