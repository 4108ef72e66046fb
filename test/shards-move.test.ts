/** Quotas that go from one of two databases to the other, while they are used. Everything is routed to the first, but for "other". */
import { type Holdfast, ShardError, type Sharded, UsageError, holdfast, sharded } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota, quotas, subjects } from "holdfast/quota";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, onTestFinished, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import { type MoveArg, route } from "./workers/shards-move.ts";

type PgDatabase = ReturnType<typeof fromPg<Pool>>;

const servers = ["postgres", unavailable("postgresOld") ? "postgres" : "postgresOld"] as const;
let places: TestDatabase[];
let pools: Pool[];
let databases: PgDatabase[];
let shards: Sharded<PoolClient>;
let fresh = 0;

/** As another process that has heard of nothing. */
function another(): Sharded<PoolClient> {
  const made = sharded(databases, route);
  onTestFinished(() => made.close());
  return made;
}

beforeAll(async () => {
  places = await Promise.all(servers.map(createDatabase));
  pools = places.map(({ url }) => new Pool({ connectionString: url, max: 8 }));
  databases = pools.map((pool) => fromPg(pool));
  await Promise.all(databases.map((database) => holdfast(database).migrate()));
  shards = sharded(databases, route);
});

afterAll(async () => {
  await shards.close();
  await Promise.all(pools.map((pool) => pool.end()));
  await Promise.all(places.map((place) => place.drop()));
});

/** Of each database: whether the bucket counts there. */
async function counts(name: string, subject: string): Promise<boolean[]> {
  const found = await Promise.all(
    pools.map((pool) =>
      pool.query<{ here: boolean }>(
        "SELECT moved_to IS NULL AND moved_from IS NULL AS here FROM holdfast.quota_bucket WHERE quota = $1 AND subject = $2",
        [name, subject],
      ),
    ),
  );
  return found.map(({ rows }) => rows[0]?.here ?? false);
}

const aborted = (signal: AbortSignal) =>
  new Promise<false>((resolve) => signal.addEventListener("abort", () => resolve(false), { once: true }));

const named = () => `limit ${++fresh}`;

describe("what belongs to a subject goes with it", () => {
  test("uses, holds, credits, its limit and its ledger; and back again", async () => {
    const name = named();
    const q = quota(shards, { name, limit: 10, per: "day" });
    await q.consume("u", 3, { id: "three", metadata: { of: "then" } });
    await q.consume("u", 2, { id: "two" });
    const hold = await q.hold("u", 1, { id: "held" });
    await q.grant("u", 5, { id: "gift", priority: 2 });
    await q.setLimit("u", 20);
    await q.refund("u", "two", { amount: 1 });
    const [standing, history, grants] = [await q.peek("u"), await q.history("u"), await q.grants("u")];

    const all = [q, quota(another(), { name, limit: 10, per: "day" })];
    for (const to of [1, 0, 1]) {
      expect(await shards.move("u", { to })).toEqual([{ quota: name, from: 1 - to }]);
      expect(await counts(name, "u")).toEqual([to === 0, to === 1]);
      for (const each of all) {
        expect(await each.peek("u")).toEqual({ ...standing, at: expect.any(Date) });
        expect(await each.history("u")).toEqual(history);
        expect(await each.grants("u")).toEqual(grants);
        expect(await each.reconcile("u")).toMatchObject({ ok: true, entries: history.entries.length });
        expect(await each.consume("u", 3, { id: "three" })).toMatchObject({ replayed: true });
      }
      expect(await subjects(shards, name)).toMatchObject([{ subject: "u", used: 4, held: 1, credit: 5 }]);
      expect(await quotas(shards)).toContainEqual({ name, subjects: 1 });
    }
    await hold.settle(1);
    await q.refund("u", "two");
    await q.revoke("u", "gift");
    expect(await all[1]?.peek("u")).toMatchObject({ used: 4, held: 0, credit: 0, limit: 20 });
    await expect(q.consume("u", 17)).rejects.toThrow("Quota");
    await all[1]?.consume("u", 16);
    expect(await q.tryConsume("u", 1)).toMatchObject({ granted: false, used: 20 });
    expect((await all[1]?.reconcile("u"))?.findings).toEqual([]);
  });

  test.each(["sliding-log", "sliding-parts", "refill"] as const)("a window: %s", async (window) => {
    const options = { name: named(), limit: 10, per: "day", window } as const;
    const q = quota(shards, options);
    for (let i = 0; i < 4; i++) await q.consume("u", 2, { id: `use ${i}` });
    await shards.move("u", { to: 1, quotas: [q.name] });
    const lost = quota(another(), options);
    expect(await lost.peek("u")).toMatchObject({ used: 8 });
    expect(await lost.tryConsume("u", 3)).toMatchObject({ granted: false, used: 8 });
    await q.refund("u", "use 1");
    await lost.consume("u", 3);
    expect(await q.reconcile("u")).toMatchObject({ ok: true, findings: [] });
  });

  test("all quotas of a subject in one moment, and those that are named although nothing was used", async () => {
    const [a, b, c] = [named(), named(), named()];
    const [one, two] = [a, b].map((name) => quota(shards, { name, limit: 10 }));
    const three = quota(shards, { name: c, limit: 10 });
    const set = quota.all([one as never, two as never]);
    await set.consume("v", 1);
    expect(await shards.move("v", { to: 1 })).toEqual([
      { quota: a, from: 0 },
      { quota: b, from: 0 },
    ]);
    await set.consume("v", 1);
    await expect(quota.all([one as never, three]).consume("v", 1)).rejects.toThrow(
      /is on shard 1, and .* is on shard 0/,
    );
    expect(await shards.move("v", { to: 1, quotas: [c] })).toEqual([{ quota: c, from: 0 }]);
    await quota.all([one as never, three]).consume("v", 1);
    expect(await one?.peek("v")).toMatchObject({ used: 3 });
    expect(await shards.move("v", { to: 1 })).toEqual([]);
    const others = another();
    const there = [a, b].map((name) => quota(others, { name, limit: 10 }));
    await quota.all(there).consume("v", 1);
    expect(await there[1]?.peek("v")).toMatchObject({ used: 3 });
  });

  test("a long ledger, and others of the same batch stay where they are", async () => {
    const name = named();
    const q = quota(shards, { name, limit: 10_000 });
    await Promise.all(Array.from({ length: 2500 }, () => q.consume("w")));
    await shards.move("w", { to: 1, quotas: [name] });
    const lost = quota(another(), { name, limit: 10_000 });
    await Promise.all(
      ["a", "b", "c", "d", "e", "f", "g", "h"].flatMap((subject) => [
        lost.consume("w"),
        lost.consume(subject),
      ]),
    );
    expect(await q.reconcile("w")).toMatchObject({ ok: true, entries: 2508 });
    expect(await counts(name, "a")).toEqual([true, false]);
  });
});

describe("where it cannot be followed", () => {
  test("a transaction on the old one is refused, and one at its home is not", async () => {
    const name = named();
    const q = quota(shards, { name, limit: 10 });
    await q.consume("t");
    await shards.move("t", { to: 1, quotas: [name] });
    const others = another();
    const lost = quota(others, { name, limit: 10 });
    const [first] = others.all();
    const use = (hf: Holdfast<PoolClient> | undefined) =>
      hf?.transaction(async (tx) => lost.consume("t", 1, { tx }));
    await expect(use(first)).rejects.toThrow(ShardError);
    await expect(use(first)).rejects.toThrow(/another shard/);
    const home = await others.home(name, "t");
    expect(others.all().indexOf(home)).toBe(1);
    await use(home);
    expect(await q.peek("t")).toMatchObject({ used: 2 });
    const rolledBack = home.transaction(async (tx) => {
      await lost.consume("t", 1, { tx });
      throw new Error("not kept");
    });
    await expect(rolledBack).rejects.toThrow("not kept");
    expect(await q.peek("t")).toMatchObject({ used: 2 });
  });

  test("an instance of one database", async () => {
    const name = named();
    await quota(shards, { name, limit: 10 }).consume("t");
    await shards.move("t", { to: 1, quotas: [name] });
    const alone = quota(holdfast(databases[0] as PgDatabase, { oneShard: true }), { name, limit: 10 });
    for (const call of [() => alone.consume("t"), () => alone.peek("t"), () => alone.history("t")])
      await expect(call()).rejects.toThrow(/was moved to another shard/);
  });

  test("a copy that counts on the other one too is left as it is", async () => {
    const name = named();
    const q = quota(shards, { name, limit: 10 });
    await q.consume("t");
    await quota(holdfast(databases[1] as PgDatabase, { oneShard: true }), { name, limit: 10 }).consume(
      "t",
      2,
    );
    await expect(shards.move("t", { to: 1, quotas: [name] })).rejects.toThrow(
      /counts on the other shard too/,
    );
    expect(await q.peek("t")).toMatchObject({ used: 1 });
  });

  test("options that mean nothing", async () => {
    await expect(shards.move("t", { to: 2 })).rejects.toThrow(UsageError);
    await expect(shards.move("t", {} as never)).rejects.toThrow(UsageError);
    await expect(shards.move("t", { to: 1, quota: "x" } as never)).rejects.toThrow(/quota/);
    await expect(shards.move("t", { to: 1, quotas: [] })).rejects.toThrow(UsageError);
    const routed = sharded(() => databases[0] as PgDatabase);
    await expect(routed.move("t", { to: 0 })).rejects.toThrow(/which databases there are/);
  });

  test("somebody's transaction has it: waited for, and no longer than that", async () => {
    const name = named();
    const q = quota(shards, { name, limit: 10 });
    await q.consume("t");
    await shards.all()[0]?.transaction(async (tx) => {
      await q.consume("t", 1, { tx });
      await expect(
        shards.all()[0]?.outside(() => shards.move("t", { to: 1, quotas: [name], wait: 200 })),
      ).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
    });
    await shards.move("t", { to: 1, quotas: [name] });
    expect(await q.peek("t")).toMatchObject({ used: 2 });
  });
});

describe("who moves may die at any moment", () => {
  test(
    "killed again and again: everybody goes on, and the limit is met exactly",
    { timeout: 180_000 },
    async () => {
      const limit = 1000;
      const urls = places.map(({ url }) => url);
      const file = new URL("./workers/shards-move.ts", import.meta.url);
      const start = (role: MoveArg["role"], prefix: string) =>
        startWorker<string[]>(file, { urls, role, limit, prefix } satisfies MoveArg);
      const users = ["a", "b"].map((prefix) => start("use", prefix));
      const done = new AbortController();
      let moves = 0;
      const failed: string[] = [];
      /** Killed somewhere in its second move or in a later one. */
      const killing = async () => {
        while (!done.signal.aborted) {
          const mover = start("move", "");
          const ended = mover.exited.then(() => false);
          const times = 2 + Math.floor(Math.random() * 3);
          for (let n = 0; n < times; n++)
            if (
              await Promise.race([
                mover.message("moved").then(
                  () => true,
                  () => false,
                ),
                ended,
                aborted(done.signal),
              ])
            )
              moves++;
            else break;
          mover.message<string>("failed").then(
            (why) => failed.push(why),
            () => {},
          );
          await new Promise((resolve) => setTimeout(resolve, Math.random() * 30));
          mover.sigkill();
          await mover.exited;
        }
      };
      const movers = [killing(), killing()];
      const granted = (await Promise.all(users.map((user) => user.result))).flat();
      done.abort();
      await Promise.all(movers);
      expect(failed).toEqual([]);
      expect(moves).toBeGreaterThan(3);
      expect(new Set(granted).size).toBe(granted.length);
      expect(granted).toHaveLength(limit);
      const q = quota(another(), { name: "credits", limit });
      expect(await q.peek("u")).toMatchObject({ used: limit });
      expect(await q.reconcile("u")).toMatchObject({ ok: true, entries: limit });
      await eventually(async () => expect((await counts("credits", "u")).filter(Boolean)).toHaveLength(1));
    },
  );
});
