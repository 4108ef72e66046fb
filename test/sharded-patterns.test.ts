/** Quotas, stock and queues over two PostgreSQL databases. Even numbers live on the first one, odd ones on the second. */
import { DatabaseSync } from "node:sqlite";
import {
  type Key,
  ShardError,
  ShardMapError,
  type Sharded,
  UsageError,
  holdfast,
  key,
  leader,
  once,
  sharded,
  versioned,
} from "holdfast";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { queue, queues } from "holdfast/queue";
import { type Quota, quota, quotas, subjects } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock, stocks } from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, beforeEach, afterEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { Got, WantArg } from "./workers/sharded-patterns.ts";

type PgDatabase = ReturnType<typeof fromPg<Pool>>;

/** Two servers where there are two: they have nothing in common, not even transaction ids. */
const servers = ["postgres", unavailable("postgresOld") ? "postgres" : "postgresOld"] as const;

let places: TestDatabase[];
let pools: Pool[];
let databases: PgDatabase[];
let shards: Sharded<PoolClient>;

const home = ({ parts }: Key) => Number(parts[1]) % 2;
const never = async () => expect.unreachable("entered");

async function open() {
  places = await Promise.all(servers.map(createDatabase));
  pools = places.map(({ url }) => new Pool({ connectionString: url, max: 8 }));
  databases = pools.map((pool) => fromPg(pool));
  await Promise.all(databases.map((database) => holdfast(database).migrate()));
}

async function close() {
  await Promise.all(pools.map((pool) => pool.end()));
  await Promise.all(places.map((place) => place.drop()));
}

/** What a table has, on each of both. */
async function rows(text: string): Promise<unknown[][]> {
  const found = await Promise.all(pools.map((pool) => pool.query({ text, rowMode: "array" })));
  return found.map((result) => result.rows.flat());
}

describe("processes that route alike, and one that does not", () => {
  const each = 10;
  beforeEach(open);
  afterEach(close);

  async function want(...others: readonly Partial<WantArg>[]): Promise<Got[]> {
    const arg: WantArg = { urls: places.map(({ url }) => url), each, offset: 0 };
    const worker = new URL("./workers/sharded-patterns.ts", import.meta.url);
    return Promise.all(others.map((other) => startWorker<Got>(worker, { ...arg, ...other }).result));
  }

  /** One of each, on the database that it belongs on. */
  async function fill(): Promise<void> {
    await using all = sharded(databases, home);
    for (let n = 0; n < each; n++) await stock(all).increase(String(n), 1);
  }

  const sum = (got: readonly Got[]) => ({
    quota: got.reduce((total, { quota: n }) => total + n, 0),
    stock: got.reduce((total, { stock: n }) => total + n, 0),
    jobs: got.reduce((total, { jobs: n }) => total + n, 0),
  });
  const once1 = { quota: each, stock: each, jobs: each };

  test("get one each of what there is one of, together", async () => {
    await fill();
    const got = await want({}, {}, {});
    expect(got.flatMap(({ refused }) => refused)).toEqual([]);
    expect(sum(got)).toEqual(once1);
    expect(await rows("SELECT subject FROM holdfast.quota_bucket ORDER BY 1")).toEqual([
      ["0", "2", "4", "6", "8"],
      ["1", "3", "5", "7", "9"],
    ]);
  });

  test.each([
    ["has them in another order", () => ({ urls: places.map(({ url }) => url).toReversed() })],
    ["has another route", () => ({ offset: 1 })],
    ["has one of them only", () => ({ urls: [places[1]?.url ?? ""] })],
  ])("who %s gets nothing", async (_, other) => {
    await fill();
    const got = await want({}, {});
    const [wrong] = await want(other());
    expect(sum(got)).toEqual(once1);
    expect(wrong).toMatchObject({ quota: 0, stock: 0, jobs: 0 });
    expect(new Set(wrong?.refused)).toEqual(new Set(["HF_SHARD_MAP"]));
  });

  test("begin at the same time: one of them comes first in all databases", async () => {
    const urls = places.map(({ url }) => url);
    const got = await want({}, { urls: urls.toReversed() }, {}, { urls: urls.toReversed() });
    expect(sum(got).quota).toBe(each);
    const winners = got.filter(({ refused }) => !refused.includes("HF_SHARD_MAP"));
    expect(winners).toHaveLength(2);
    for (const { quota: n, jobs: m } of got.filter((one) => !winners.includes(one))) expect(n + m).toBe(0);
  });
});

test("where it cannot be written down which database is which, patterns refuse several", async () => {
  const files = [1, 2].map(() => new DatabaseSync(":memory:"));
  const both = sharded(files.map((file) => fromNodeSqlite(file)));
  for (const make of [
    () => quota(both, { name: "x", limit: 1 }),
    () => stock(both),
    () => queue(both, "x"),
    () => both.move("u", { to: 1 }),
  ])
    await expect(async () => make()).rejects.toThrow(/cannot be written down in each which one it is/);
  for (const file of files) file.close();
});

describe("on two databases", () => {
  let fresh = 0;
  const pair = () => ({ even: (fresh += 2), odd: fresh + 1 });

  beforeAll(open);
  afterAll(close);
  beforeEach(() => {
    shards = sharded(databases, home);
  });
  afterEach(() => shards.close());

  describe("a list of databases", () => {
    test("is written down at first use, of locks too, and another one is refused", async () => {
      const { even } = pair();
      expect(await shards.lock(key("a", even), async () => 1)).toBe(1);
      for (const wrong of [
        sharded(databases.toReversed(), home),
        sharded([databases[0] as PgDatabase], () => 0),
        sharded(databases, (k) => 1 - home(k)),
      ]) {
        await expect(wrong.lock(key("a", even), never)).rejects.toBeInstanceOf(ShardMapError);
        await expect(wrong.hold(key("a", even))).rejects.toMatchObject({ code: "HF_SHARD_MAP" });
        await expect(wrong.on(key("a", even)).transaction(never)).rejects.toBeInstanceOf(ShardMapError);
        await expect(quota(wrong, { name: "q", limit: 1 }).consume(even)).rejects.toThrow(
          /renumber|same databases/,
        );
        // Whoever only looks is not kept from it.
        expect((await wrong.on(key("a", even)).capabilities()).engine).toBe("postgres");
        await wrong.close();
      }
      const [first] = pools as [Pool];
      const { rows: written } = await first.query("SELECT value FROM holdfast.agreed WHERE name = 'shard'");
      expect(JSON.parse(written[0].value)).toMatchObject({ shard: 0, of: 2 });
    });

    test("can be renumbered on purpose", async () => {
      const { even } = pair();
      await shards.lock(key("a", even), async () => 1);
      const swapped = sharded(databases.toReversed(), home);
      await swapped.renumber();
      expect(await swapped.lock(key("a", even), async () => 1)).toBe(1);
      await expect(sharded(databases, home).lock(key("a", even), never)).rejects.toBeInstanceOf(
        ShardMapError,
      );
      await shards.renumber();
      expect(await sharded(databases, home).lock(key("a", even), async () => 1)).toBe(1);
      await expect(sharded((k) => databases[home(k)] as PgDatabase).renumber()).rejects.toThrow(
        /does not say which databases/,
      );
    });

    test("that cannot be one is refused", async () => {
      const [first] = databases as [PgDatabase];
      expect(() => sharded([first, first], home)).toThrow(/twice/);
      expect(() => sharded([], home)).toThrow(UsageError);
      expect(() => sharded([pools[0] as never], home)).toThrow(UsageError);
      expect(() => sharded(databases, "user" as never)).toThrow(/key => number/);
      for (const odd of [2, -1, 0.5, Number.NaN, undefined, Promise.resolve(0)])
        await expect(sharded(databases, () => odd as never).lock(key("a", 0), never)).rejects.toThrow(
          /whole number from 0 to 1/,
        );
      // The same database by two pools.
      const second = new Pool({ connectionString: places[0]?.url, max: 2 });
      const [before] = await rows("DELETE FROM holdfast.agreed RETURNING name");
      expect(before).toContain("shard");
      await expect(sharded([first, fromPg(second)], home).lock(key("a", 0), never)).rejects.toThrow(
        /the same database/,
      );
      await second.end();
    });

    test("is needed by patterns", () => {
      const loose = sharded((k) => databases[home(k)] as PgDatabase);
      expect(() => quota(loose, { name: "q", limit: 1 })).toThrow(/sharded\(databases, key => number\)/);
      expect(() => stock(loose)).toThrow(UsageError);
      expect(() => queue(loose, "q")).toThrow(UsageError);
    });
  });

  describe("a quota", () => {
    let uploads: Quota;
    beforeEach(() => {
      uploads = quota(shards, { name: "uploads", limit: 1 });
    });

    test("has each subject on its own database, for every call", async () => {
      const { even, odd } = pair();
      for (const n of [even, odd]) {
        expect((await uploads.consume(n, 1, { id: "one" })).used).toBe(1);
        expect((await uploads.tryConsume(n)).granted).toBe(false);
        await uploads.refund(n, "one");
        const hold = await uploads.hold(n, 1);
        await hold.settle(1);
        await uploads.grant(n, 3, { id: "gift" });
        expect(await uploads.grants(n)).toHaveLength(1);
        await uploads.revoke(n, "gift");
        await uploads.setLimit(n, 7);
        await uploads.reset(n);
        expect(await uploads.peek(n)).toMatchObject({ used: 0, limit: 7 });
        expect((await uploads.history(n)).entries.length).toBeGreaterThan(5);
        expect((await uploads.reconcile(n)).ok).toBe(true);
      }
      const found = await rows("SELECT subject FROM holdfast.quota_bucket");
      expect(found[0]).toContain(String(even));
      expect(found[0]).not.toContain(String(odd));
      expect(found[1]).toContain(String(odd));
    });

    test("of an instance of one database refuses subjects of the other", async () => {
      const { even, odd } = pair();
      const here = quota(shards.on(key("uploads", even)), { name: "uploads", limit: 1 });
      await here.consume(even);
      for (const call of [
        () => here.consume(odd),
        () => here.peek(odd),
        () => here.hold(odd, 1),
        () => here.grant(odd, 1),
        () => here.history(odd),
      ])
        await expect(call()).rejects.toThrow(`uploads:${odd}`);
      await expect(here.consume(odd)).rejects.toBeInstanceOf(ShardError);
    });

    test("of several limits at once: on one database, or refused with both named", async () => {
      const { even, odd } = pair();
      const tokens = quota(shards, { name: "tokens", limit: 5 });
      const both = quota.all([uploads, tokens]);
      expect((await both.tryConsume([even, even], [1, 3])).granted).toBe(true);
      const error: unknown = await both.consume([even, odd]).catch((e: unknown) => e);
      expect(error).toBeInstanceOf(ShardError);
      expect((error as Error).message).toContain(`uploads:${even} is on shard 0`);
      expect((error as Error).message).toContain(`tokens:${odd} is on shard 1`);
      expect((await tokens.peek(odd)).used).toBe(0);
    });

    test("in a transaction: of its database, and undone with it; of the other one refused", async () => {
      const { even, odd } = pair();
      const undo = new Error("undo");
      const running = shards.transaction({ lock: key("credits", even) }, async (tx) => {
        await uploads.consume(even, 1, { tx });
        // The one that calls.
        expect((await uploads.peek(even)).used).toBe(1);
        await expect(uploads.consume(odd, 1, { tx })).rejects.toBeInstanceOf(ShardError);
        await expect(uploads.consume(odd)).rejects.toBeInstanceOf(ShardError);
        await expect(uploads.peek(odd)).rejects.toThrow(/separate: true/);
        await uploads.consume(odd, 1, { separate: true });
        throw undo;
      });
      await expect(running).rejects.toBe(undo);
      expect((await uploads.peek(even)).used).toBe(0);
      expect((await uploads.peek(odd)).used).toBe(1);
    });

    test("in a transaction that the caller opened", async () => {
      const { even, odd } = pair();
      const client = await (pools[0] as Pool).connect();
      try {
        await client.query("BEGIN");
        const tx = shards.on(key("uploads", even)).join(client);
        await uploads.consume(even, 1, { tx });
        await expect(uploads.consume(odd, 1, { tx })).rejects.toBeInstanceOf(ShardError);
        // In which of them it is, the client itself does not say.
        await expect(uploads.consume(even, 1, { tx: client })).rejects.toThrow(
          /shards\.on\(key\)\.join\(tx\)/,
        );
        await client.query("ROLLBACK");
      } finally {
        client.release();
      }
      expect((await uploads.peek(even)).used).toBe(0);
    });

    test("has lists of both, and is pruned on both", async () => {
      const { even, odd } = pair();
      const name = `listed-${even}`;
      const listed = quota(shards, { name, limit: 9 });
      for (const n of [even, odd]) for (let i = 0; i < 3; i++) await listed.consume(n);
      expect((await quotas(shards)).find((each) => each.name === name)).toEqual({ name, subjects: 2 });
      const all = [String(even), String(odd)].toSorted();
      expect((await subjects(shards, name)).map(({ subject }) => subject)).toEqual(all);
      expect((await subjects(shards, name, { limit: 1 })).map(({ subject }) => subject)).toEqual([all[0]]);
      expect((await subjects(shards, name, { after: all[0] ?? "" })).map(({ subject }) => subject)).toEqual([
        all[1],
      ]);
      expect(await subjects(shards, name, { of: [even, odd] })).toHaveLength(2);
      expect((await listed.prune({ olderThanMs: 0 })).entries).toBe(4);
    });
  });

  describe("stock", () => {
    test("has each SKU on its own database, and orders of one", async () => {
      const { even, odd } = pair();
      const shop = stock(shards, { name: `shop-${even}` });
      const [cap, mug] = [String(even), String(odd)];
      for (const sku of [cap, mug]) await shop.increase(sku, 5);
      const error: unknown = await shop
        .apply([
          { sku: cap, quantity: -1 },
          { sku: mug, quantity: -1 },
        ])
        .catch((e: unknown) => e);
      expect(error).toBeInstanceOf(ShardError);
      expect((error as Error).message).toMatch(new RegExp(`${cap} is on shard 0.*${mug} is on shard 1`));
      const lines = [cap, mug].map((sku) => ({ sku, quantity: 1 }));
      await expect(shop.reserve(lines)).rejects.toBeInstanceOf(ShardError);
      await expect(shop.split(lines, { locations: ["main"] })).resolves.toMatchObject({ short: [] });

      const reserved = await shop.reserve([{ sku: mug, quantity: 2 }], { id: "cart" });
      await reserved.commit();
      await expect(shop.return("commit:cart")).rejects.toThrow(/\{ sku \}/);
      expect((await shop.return("commit:cart", { sku: mug })).lines).toMatchObject([{ quantity: 2 }]);
      await shop.reserve([{ sku: cap, quantity: 1 }], { id: "cart" });
      await expect(shop.release("cart")).rejects.toBeInstanceOf(UsageError);
      await shop.release("cart", { sku: cap });
      await expect(shop.return("commit:cart", { sku: cap })).rejects.toMatchObject({
        code: "HF_STOCK_UNKNOWN",
      });

      const all = [cap, mug].toSorted();
      expect((await shop.levels()).map(({ sku }) => sku)).toEqual(all);
      expect((await shop.levels({ limit: 1 })).map(({ sku }) => sku)).toEqual([all[0]]);
      expect(await shop.levels({ skus: [cap, mug] })).toHaveLength(2);
      expect(await shop.level(cap)).toMatchObject({ onHand: 5 });
      expect(await shop.levelAt(mug, new Date(Date.now() + 60_000))).toBe(5);
      expect((await shop.history({ sku: mug })).movements.length).toBe(3);
      await expect(shop.history()).rejects.toThrow(/one SKU each/);
      expect(await shop.byChannel()).toMatchObject([
        { source: "MANUAL", increased: 10 },
        { source: "ORDER", decreased: 2 },
        { source: "RETURN", increased: 2 },
      ]);
      expect(await shop.reconcile()).toMatchObject({ ok: true, levels: 2 });
      expect((await stocks(shards)).find(({ name }) => name === shop.name)).toMatchObject({ levels: 2 });
    });

    test("of an instance of one database refuses SKUs of the other", async () => {
      const { even, odd } = pair();
      const here = stock(shards.on(key("stock", even)));
      await here.increase(String(even), 1);
      await expect(here.increase(String(odd), 1)).rejects.toBeInstanceOf(ShardError);
      await expect(here.level(String(odd))).rejects.toBeInstanceOf(ShardError);
    });

    test("in a transaction of the other database is refused", async () => {
      const { even, odd } = pair();
      const shop = stock(shards);
      await shop.increase(String(odd), 1);
      await shards.transaction({ lock: key("order", even) }, async (tx) => {
        await expect(async () => shop.decrease(String(odd), 1, { tx })).rejects.toBeInstanceOf(ShardError);
        await expect(async () => shop.decrease(String(odd), 1)).rejects.toBeInstanceOf(ShardError);
      });
      expect(await shop.level(String(odd))).toMatchObject({ onHand: 1 });
    });
  });

  describe("a queue", () => {
    test("has jobs where their group and key are, and workers on both", async () => {
      const { even, odd } = pair();
      const mails = queue<{ n: number }>(shards, `mails-${even}`);
      const done: number[] = [];
      await mails.enqueue({ n: even }, { group: String(even) });
      await mails.enqueue({ n: odd }, { key: String(odd) });
      expect((await mails.enqueue({ n: odd }, { key: String(odd) })).added).toBe(false);
      await mails.enqueue({ n: odd + 2 }, { group: String(odd), key: String(odd + 2) });
      expect(await mails.counts()).toMatchObject({ waiting: 3 });
      expect(await queues(shards, { names: [mails.name] })).toMatchObject([{ name: mails.name, waiting: 3 }]);
      await using worker = mails.work((job) => done.push(job.payload.n));
      await eventually(() => done.length === 3);
      await worker.stop();
      await worker.done;
      expect(done.toSorted((a, b) => a - b)).toEqual([even, odd, odd + 2]);
      expect(await mails.counts()).toMatchObject({ waiting: 0, running: 0, workers: 0 });
    });

    test("refuses what would be counted in two places", async () => {
      const { even, odd } = pair();
      const mails = queue<number>(shards, "mails");
      const error: unknown = await mails
        .enqueue(1, { group: String(even), key: String(odd) })
        .catch((e: unknown) => e);
      expect(error).toBeInstanceOf(ShardError);
      expect((error as Error).message).toMatch(/mails:\d+ is on shard 0, and mails:\d+ is on shard 1/);
      const jobs = [even, odd].map((n) => ({ payload: n, group: String(n) }));
      await expect(mails.enqueueMany(jobs)).rejects.toBeInstanceOf(ShardError);
      expect(await mails.enqueueMany(jobs.slice(1))).toHaveLength(1);
      expect(() => queue(shards, "mails", { concurrency: 1 })).toThrow(/groups\.concurrency/);
      const here = queue<number>(shards.on(key("mails", even)), "mails");
      await expect(here.enqueue(1, { group: String(odd) })).rejects.toBeInstanceOf(ShardError);
      await here.enqueue(1);
      for (const call of [
        () => mails.failed(),
        () => mails.inspect(1),
        () => mails.discard(1),
        () => mails.retry(1),
      ])
        await expect(call()).rejects.toThrow(/ids of jobs are those of one database/);
      await mails.pause();
      expect((await here.counts()).paused).toBe(true);
      await mails.resume();
      expect((await mails.counts()).paused).toBe(false);
      expect(await mails.retry()).toBe(0);
      expect(await mails.prune({ olderThanMs: 0 })).toBe(0);
    });

    test("in a transaction: on its database, or refused", async () => {
      const { even, odd } = pair();
      const mails = queue<number>(shards, `inside-${even}`);
      await shards.transaction({ lock: key("credits", even) }, async (tx) => {
        await mails.enqueue(1, { tx, group: String(even) });
        await expect(mails.enqueue(1, { tx, group: String(odd) })).rejects.toBeInstanceOf(ShardError);
        await expect(mails.enqueue(1, { group: String(odd) })).rejects.toBeInstanceOf(ShardError);
      });
      expect(await mails.counts()).toMatchObject({ waiting: 1 });
    });
  });

  test("once goes where its id is; what belongs in one database says so", async () => {
    const { even } = pair();
    expect(await once(shards, ["stripe", even, "x"], async () => 1)).toMatchObject({ replayed: false });
    expect(await once(shards.on(key("a", even)), ["stripe", even, "x"], never)).toMatchObject({
      replayed: true,
    });
    const sentence = /belongs in one database.*shards\.on\(key\)/;
    expect(() => schedule(shards, "s", { every: "1 hour" } as never, () => {})).toThrow(sentence);
    expect(() => leader(shards as never, "l", never)).toThrow(sentence);
    expect(() => versioned(shards as never, "account")).toThrow(sentence);
  });
});
