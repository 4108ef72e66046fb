/** A list of databases that is changed while everything runs: docs/shards.md, and what it rests on. */
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { hash } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import { type Holdfast, type Key, type Sharded, holdfast, key, once, sharded } from "holdfast";
import { places as spreadPlaces } from "holdfast/citus";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { Client, Pool, type PoolClient } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, onTestFinished, test } from "vitest";
import { bundled } from "./harness/bundled.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { eventually } from "./harness/wait.ts";
import type { ReshardArg, Resharded } from "./workers/reshard.ts";

const isLong = process.env["HOLDFAST_LONG"] === "1";
const why = unavailable("postgres");

type PgDatabase = ReturnType<typeof fromPg<Pool>>;

describe("a list that is over", () => {
  let places: TestDatabase[];
  let pools: Pool[];
  let databases: PgDatabase[];
  /** As processes that have one more database than the one before. */
  let old: Sharded<PoolClient>;
  let next: Sharded<PoolClient>;

  const made = (count: number) => {
    const shards = sharded(databases.slice(0, count));
    onTestFinished(() => shards.close());
    return shards;
  };

  beforeAll(async () => {
    if (why !== undefined) return;
    places = await Promise.all([0, 1, 2].map(() => createDatabase("postgres")));
    pools = places.map(({ url }) => new Pool({ connectionString: url, max: 40 }));
    databases = pools.map((pool) => fromPg(pool));
    for (const database of databases) await holdfast(database).migrate();
  });

  afterAll(async () => {
    await Promise.all((pools ?? []).map((pool) => pool.end()));
    await Promise.all((places ?? []).map((place) => place.drop()));
  });

  beforeEach(async ({ skip }) => {
    skip(why !== undefined, why);
    // As before anybody came.
    for (const pool of pools)
      await pool.query(
        `DELETE FROM holdfast.agreed; SELECT setval('holdfast.map_epoch', 0);
         TRUNCATE holdfast.quota_bucket, holdfast.once, holdfast.stock_level, holdfast.queue, holdfast.schedule, holdfast.resource CASCADE`,
      );
    old = made(2);
    next = made(3);
  });

  const refused = { code: "HF_SHARD_MAP" };
  /** Of two databases it is on the first, of three on the last. */
  const subject = "0";
  const found = key("u", subject);
  const pool = () => pools[0] as Pool;

  const calls: Record<string, (shards: Sharded<PoolClient>, from?: Pool) => Promise<unknown>> = {
    "a quota": (shards) => quota(shards, { name: "u", limit: 10 }).consume(subject),
    "a limit": (shards) => quota(shards, { name: "u", limit: 10 }).setLimit(subject, 3),
    "a lock": (shards) => shards.transaction({ lock: found }, async () => {}),
    locks: (shards) => shards.transaction({ lock: [found, key("v", subject)] }, async () => {}),
    "a lock, if it is free": (shards) => shards.tryLock(found, async () => {}),
    "a serializable lock": (shards) =>
      shards.transaction({ lock: found, isolation: "serializable" }, async () => {}),
    "a transaction": (shards) => shards.on(found).transaction((tx) => tx.client.query("SELECT 1")),
    "a session's lock": (shards) => shards.hold(found),
    "a lease": (shards) => shards.lease(found),
    "a permit": (shards) => shards.semaphore(found, { permits: 2 }).acquire(),
    once: (shards) => once(shards, ["u", subject], async () => 1),
    stock: (shards) => stock(shards, { name: "u" }).increase(subject, 1),
    "a reservation": (shards) => stock(shards, { name: "u" }).reserve([{ sku: subject, quantity: 1 }]),
    "a job": (shards) => queue<string>(shards, "u").enqueue("x", { group: subject }),
    "a run": (shards) => schedule(shards.on(found), "u", { every: "1 hour" }, () => {}).runNow(),
    "a move": (shards) => shards.move(subject, { to: 1, quotas: ["u"] }),
    ...Object.fromEntries(
      (["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] as const).flatMap((isolation) =>
        Object.entries({
          lock: (shards: Sharded<PoolClient>, client: PoolClient) =>
            shards.on(found).join(client).lock(found),
          "quota with tx": (shards: Sharded<PoolClient>, client: PoolClient) =>
            quota(shards, { name: "u", limit: 10 }).consume(subject, 1, {
              tx: shards.on(found).join(client),
            }),
          "job with tx": (shards: Sharded<PoolClient>, client: PoolClient) =>
            queue<string>(shards, "u").enqueue("x", { group: subject, tx: shards.on(found).join(client) }),
        }).map(([name, call]) => [
          `${name}, ${isolation}`,
          (shards: Sharded<PoolClient>, from?: Pool) =>
            inside(isolation, (client) => call(shards, client), from),
        ]),
      ),
    ),
  };

  /** In a transaction whose snapshot, if it lasts, is older than what is done next. */
  const opened = new Map<string, PoolClient[]>();
  async function inside(
    isolation: string,
    call: (client: PoolClient) => Promise<unknown>,
    from = pool(),
  ): Promise<void> {
    const client = opened.get(isolation)?.pop() ?? (await begun(isolation, from));
    try {
      await call(client);
    } finally {
      await client.query("ROLLBACK");
      client.release();
    }
  }

  async function begun(isolation: string, from = pool()): Promise<PoolClient> {
    const client = await from.connect();
    await client.query(`BEGIN ISOLATION LEVEL ${isolation}`);
    await client.query("SELECT count(*) FROM holdfast.agreed");
    return client;
  }

  /** The old list is in the databases: a call inside of a transaction waits a moment only for that. */
  const writtenDown = () => old.transaction({ lock: key("v", subject) }, async () => {});

  /** All of the old list are. */
  const closed = () =>
    eventually(async () => {
      for (const each of pools.slice(0, 2)) {
        const { rows } = await each.query<{ closed: boolean }>(
          `SELECT (next::json ->> 'epoch')::bigint = e.last_value AS closed FROM holdfast.agreed, holdfast.map_epoch e WHERE name = 'shard'`,
        );
        expect(rows[0]?.closed).toBe(true);
      }
    });

  test("is refused by the statement itself, whatever it is, also in a transaction with an older snapshot", async () => {
    // Each by a process of its own, that has read the list a moment ago.
    const processes = Object.entries(calls).map(([name, call]) => ({ name, call, shards: made(2) }));
    for (const { shards } of processes) await shards.transaction({ lock: found }, async () => {});
    for (const isolation of ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
      opened.set(isolation, [await begun(isolation), await begun(isolation), await begun(isolation)]);
    await next.renumber();
    for (const { name, call, shards } of processes) {
      const error: unknown = await call(shards).then(
        () => "granted",
        (e: unknown) => e,
      );
      // A lock in a snapshot that lasts is refused for that, or for the other.
      const code =
        name.startsWith("lock, ") && !name.endsWith("READ COMMITTED")
          ? /HF_(SHARD_MAP|ISOLATION)/
          : /HF_SHARD_MAP/;
      expect.soft((error as { code?: string }).code ?? String(error), name).toMatch(code);
    }
    // By now it has read what counts.
    await expect(calls["a quota"]?.(processes[0]?.shards as typeof old)).rejects.toThrow(/of 3.*of 2/);
    for (const { rows } of await Promise.all(
      pools.map((each) => each.query("SELECT 1 FROM holdfast.quota_bucket WHERE used > 0")),
    ))
      expect(rows).toEqual([]);
  });

  test("costs no message more", async () => {
    const sent: string[] = [];
    const counted = places.slice(0, 2).map(({ url }) => {
      const each = new Pool({ connectionString: url, max: 2 });
      each.on("connect", (client) => {
        const query = client.query.bind(client) as (...args: unknown[]) => never;
        client.query = (...args: unknown[]) => {
          sent.push(String((args[0] as { text?: string }).text ?? args[0]));
          return query(...args);
        };
      });
      return each;
    });
    const shards = sharded(counted.map((each) => fromPg(each)));
    onTestFinished(async () => {
      await shards.close();
      await Promise.all(counted.map((each) => each.end()));
    });
    const uploads = quota(shards, { name: "u", limit: 100 });
    for (let i = 0; i < 2; i++) await uploads.consume(subject);
    sent.length = 0;
    await uploads.consume(subject);
    expect(sent).toHaveLength(1);
    expect(sent[0]).toContain("at_map(0)");
  });

  test.for([
    [
      "a transaction",
      async () => {
        await writtenDown();
        const client = await pool().connect();
        await client.query("BEGIN");
        await old.on(found).join(client).lock(found);
        return async () => {
          await client.query("ROLLBACK");
          client.release();
        };
      },
    ],
    [
      "a session's lock",
      async () => {
        const held = await old.hold(found);
        return () => held.release();
      },
    ],
    [
      "a lease",
      async () => {
        const lease = await old.lease(found, { ttl: 60_000 });
        return () => lease.release();
      },
    ],
  ] as const)("%s of the old list is waited for; in vain: everything is as before", async ([name, take]) => {
    const release = await take();
    const error: unknown = await next.renumber({ wait: 100 }).catch((e: unknown) => e);
    expect(error).toMatchObject({ code: "HF_SHARD_MAP", retryable: true });
    expect(String(error)).toMatch(name === "a lease" ? /a lease that lasts/ : /pid \d+/);
    await old.transaction({ lock: key("v", subject) }, async () => {});
    await expect(next.transaction({ lock: found }, async () => {})).rejects.toMatchObject(refused);
    const waiting = next.renumber();
    await closed();
    // Neither of them is granted meanwhile what the other has.
    for (const shards of [old, next])
      await expect(shards.tryLock(key("v", subject), async () => {})).rejects.toMatchObject({
        ...refused,
      });
    await release();
    await waiting;
    await next.transaction({ lock: found }, async () => {});
    await expect(old.transaction({ lock: found }, async () => {})).rejects.toMatchObject(refused);
  });

  test("nobody begins with the new one before it counts, also where nothing is written yet", async () => {
    await writtenDown();
    // Each by a process of its own. The second time it has looked before.
    for (const [name, call] of Object.entries(calls)) {
      const early = made(3);
      for (const time of [1, 2])
        await expect(call(early, pools[2]), `${name}, ${time}`).rejects.toMatchObject(refused);
    }
  });

  test("a renumbering that dies leaves all closed, for the next one", async () => {
    await writtenDown();
    const client = await pool().connect();
    await client.query("BEGIN");
    await old.on(found).join(client).lock(found);
    const file = new URL("./workers/renumber.ts", import.meta.url);
    const worker = startWorker(
      file,
      places.map(({ url }) => url),
    );
    await closed();
    worker.sigkill();
    await worker.exited;
    await client.query("ROLLBACK");
    client.release();
    for (const shards of [old, next])
      await expect(shards.transaction({ lock: found }, async () => {})).rejects.toMatchObject(refused);
    await next.renumber();
    await next.transaction({ lock: found }, async () => {});
  });

  test("what began by it is found by the next one, before and after it is moved", async () => {
    const names = Array.from({ length: 24 }, (_, i) => `s${i}`);
    const before = quota(old, { name: "u", limit: 3 });
    for (const name of names) await before.consume(name, 2);
    expect(await once(old, ["u", subject], async () => "then")).toMatchObject({ replayed: false });
    await old.move("s0", { to: 1 });
    await next.renumber();
    const after = quota(next, { name: "u", limit: 3 });
    for (const name of names) {
      expect(await after.peek(name)).toMatchObject({ used: 2 });
      expect(await after.tryConsume(name, 2)).toMatchObject({ granted: false });
      await after.consume(name);
    }
    expect(await once(next, ["u", subject], async () => "now")).toMatchObject({
      value: "then",
      replayed: true,
    });
    const moved = await next.settle();
    expect(moved).toBeGreaterThan(0);
    expect(await next.settle()).toBe(0);
    const settled = quota(made(3), { name: "u", limit: 3 });
    for (const name of names) {
      expect(await settled.tryConsume(name)).toMatchObject({ granted: false });
      expect(await settled.reconcile(name)).toMatchObject({ ok: true, entries: 2 });
    }
    const { rows } = await (pools[2] as Pool).query<{ n: number }>(
      "SELECT count(*)::int AS n FROM holdfast.quota_bucket WHERE used = 3",
    );
    expect(rows[0]?.n).toBeGreaterThan(0);
    // Nobody is asked any more.
    expect(
      (await pool().query("SELECT value FROM holdfast.agreed WHERE name = 'shard'")).rows[0].value,
    ).not.toMatch(/unsettled/);
  });

  test("what happened once happens no second time, before settle(), beside it, after it and under the next list", async () => {
    const long = "x".repeat(500);
    const ids = Array.from({ length: 24 }, (_, i) => ["u", String(i), ...(i % 4 === 0 ? [long] : [])]);
    const again = async (shards: Sharded<PoolClient>) => {
      const results = await Promise.all(ids.map((id) => once(shards, id, async () => "again")));
      expect(results).toEqual(ids.map(() => ({ status: "done", value: "then", replayed: true })));
    };
    for (const id of ids) await once(old, id, async () => "then");
    await next.renumber();
    await again(next);
    // The instance of one shard looks as well.
    for (const id of ids) {
      const [name, ...rest] = id as [string, ...string[]];
      expect(await once(next.on(key(name, ...rest)), id, async () => "again")).toMatchObject({
        value: "then",
      });
    }
    await Promise.all([next.settle(), again(next)]);
    await next.settle();
    const settled = made(3);
    await again(settled);
    expect(await once(settled, ["u", "new"], async () => 1)).toMatchObject({ replayed: false });
    // Times are copied too.
    const kept = await Promise.all(
      pools.map((each) => each.query("SELECT id, at::text, until::text FROM holdfast.once")),
    );
    const rows = kept.flatMap((each) => each.rows as { id: string; at: string; until: string }[]);
    expect(rows.length).toBeGreaterThan(ids.length + 1);
    expect(new Set(rows.map((row) => Object.values(row).join())).size).toBe(ids.length + 1);
    const shorter = sharded(databases.slice(0, 3), ({ parts }) => (parts[1] ?? "").length % 2);
    onTestFinished(() => shorter.close());
    await shorter.renumber();
    await shorter.settle();
    await again(shorter);
  });

  test("records of an instance that knew of no other are found by the first list", async () => {
    const alone = holdfast(databases[0] as PgDatabase);
    const ids = Array.from({ length: 8 }, (_, i) => ["u", String(i)]);
    for (const id of ids) await once(alone, id, async () => "then");
    await alone.close();
    await old.renumber({ stopped: true });
    for (const id of ids) expect(await once(old, id, async () => "again")).toMatchObject({ value: "then" });
  });

  test("in a transaction, what may be elsewhere is refused until it is settled", async () => {
    const uploads = (shards: Sharded<PoolClient>) => quota(shards, { name: "u", limit: 3 });
    await once(old, ["u", subject], async () => "then");
    await uploads(old).consume(subject, 2);
    await next.renumber();
    const on = next.on(found);
    const unsettled = { ...refused, retryable: true, message: expect.stringMatching(/shards\.settle\(\)/) };
    const calls: Record<string, (tx?: object) => Promise<unknown>> = {
      once: (tx) => once(next, ["u", subject], async () => "again", { tx: tx as never }),
      "once on its shard": (tx) => once(on, ["u", subject], async () => "again", { tx: tx as never }),
      quota: (tx) => uploads(next).consume(subject, 2, { tx }),
      "quota on its shard": (tx) => quota(on, { name: "u", limit: 3 }).consume(subject, 2, { tx }),
      "several quotas": (tx) =>
        quota.all([uploads(next), quota(next, { name: "v", limit: 3 })]).consume(subject, 2, { tx }),
      hold: (tx) => uploads(next).hold(subject, 2, { tx }),
      grant: (tx) => uploads(next).grant(subject, 2, { tx }),
      peek: (tx) => uploads(next).peek(subject, { tx }),
    };
    for (const [name, call] of Object.entries(calls)) {
      await expect
        .soft(
          on.transaction((tx) => call(tx)),
          name,
        )
        .rejects.toMatchObject(unsettled);
      await expect
        .soft(
          on.transaction(() => call(undefined)),
          name,
        )
        .rejects.toMatchObject(unsettled);
      await expect
        .soft(
          inside("READ COMMITTED", (client) => call(on.join(client)), pools[2]),
          name,
        )
        .rejects.toMatchObject(unsettled);
    }
    // Outside of one: once and quota of all shards are looked for, those of one shard are refused.
    await expect(calls["quota on its shard"]?.()).rejects.toMatchObject(unsettled);
    expect(await uploads(next).peek(subject)).toMatchObject({ used: 2 });
    // These ask several databases themselves.
    for (const call of [
      (): Promise<unknown> => next.home("u", subject),
      () => next.move(subject, { to: 1 }),
      () => next.settle(),
      () => uploads(next).reconcile(subject),
    ])
      await expect.soft(on.transaction(call)).rejects.toMatchObject({ code: "HF_SHARDS" });
    // It is known not to be elsewhere.
    const fresh = Array.from({ length: 100 }, (_, i) => `fresh ${i}`).find(
      (name) => next.on(key("u", name)) === on,
    );
    await next.home("u", String(fresh));
    await on.transaction((tx) => uploads(next).consume(String(fresh), 1, { tx }));
    await next.settle();
    const settled = made(3);
    await settled.on(found).transaction(async (tx) => {
      expect(await uploads(settled).tryConsume(subject, 2, { tx })).toMatchObject({ granted: false });
      expect(await once(settled, ["u", subject], async () => "again", { tx })).toMatchObject({
        value: "then",
      });
      expect(await once(settled, ["u", subject, "new"], async () => 1, { tx })).toMatchObject({
        replayed: false,
      });
    });
  });

  test("fences go on growing", async () => {
    const lock = key("u", subject);
    let last = 0;
    for (let i = 0; i < 5; i++) {
      await using lease = await old.lease(lock);
      last = lease.fence;
    }
    await sharded(databases.slice(0, 2), () => 1).renumber();
    await using lease = await sharded(databases.slice(0, 2), () => 1).lease(lock);
    expect(lease.fence).toBeGreaterThan(last);
  });

  test("an instance that knows of one of several is refused, unless it says so", async () => {
    await old.transaction({ lock: found }, async () => {});
    const alone = holdfast(databases[0] as PgDatabase);
    onTestFinished(() => alone.close());
    const sentence = /one of several.*oneShard/;
    for (const call of [
      () => quota(alone, { name: "u", limit: 1 }).consume(subject),
      () => alone.transaction({ lock: found }, async () => {}),
      () => alone.hold(found),
      () => alone.lease(found),
      () => stock(alone).increase("x", 1),
      () => queue(alone, "u").enqueue("x"),
    ]) {
      await expect.soft(call()).rejects.toMatchObject(refused);
      await expect.soft(call()).rejects.toThrow(sentence);
    }
    await alone.migrate();
    await alone.inspect();
    const tool = holdfast(databases[0] as PgDatabase, { oneShard: true });
    await tool.transaction({ lock: found }, async () => {});
  });

  test("a role that may not read the list is refused", async () => {
    await old.transaction({ lock: found }, async () => {});
    const role = `reader_${process.pid}`;
    for (const each of pools.slice(0, 2)) {
      await each.query(
        `DO $$ BEGIN CREATE ROLE ${role} LOGIN PASSWORD 'x'; EXCEPTION WHEN duplicate_object THEN NULL; END $$`,
      );
      await each.query(`GRANT USAGE ON SCHEMA holdfast TO ${role}; GRANT ALL ON ALL TABLES IN SCHEMA holdfast TO ${role};
        GRANT ALL ON ALL SEQUENCES IN SCHEMA holdfast TO ${role}; REVOKE ALL ON holdfast.agreed FROM ${role}`);
    }
    const theirs = places.slice(0, 2).map(({ url }) => {
      const login = new URL(url);
      login.username = role;
      login.password = "x";
      return new Pool({ connectionString: login.href, max: 4 });
    });
    try {
      // With another list, which nobody could tell.
      const shards = sharded(theirs.map((each) => fromPg(each)).toReversed());
      const alone = holdfast(fromPg(theirs[0] as Pool));
      for (const call of [
        () => shards.transaction({ lock: found }, async () => {}),
        () => quota(shards, { name: "u", limit: 1 }).consume(subject),
        () => alone.transaction({ lock: found }, async () => {}),
        () => alone.hold(found),
        () => alone.lease(found),
        () => quota(alone, { name: "u", limit: 1 }).consume(subject),
      ])
        await expect.soft(call()).rejects.toMatchObject({
          code: "HF_ACCESS_DENIED",
          lacking: ["INSERT, SELECT on holdfast.agreed"],
        });
      await alone.inspect();
      await shards.close();
      await alone.close();
    } finally {
      await Promise.all(theirs.map((each) => each.end()));
      for (const each of pools.slice(0, 2)) await each.query(`DROP OWNED BY ${role}`);
      await pool().query(`DROP ROLE ${role}`);
    }
  });

  test("a route has a version: another one, or none, is refused before and after renumber()", async () => {
    const both = databases.slice(0, 2);
    const route = ({ parts }: Key) => Number(parts[1]?.length) % 2;
    // No sample shows it.
    const changed = (lock: Key) => (lock.parts[1] === "vip" ? 0 : route(lock));
    const vip = key("l", "vip");
    const first = sharded(both, route, { version: 1 });
    await first.transaction({ lock: vip }, async () => {});
    const second = () => sharded(both, changed, { version: "2" });
    for (const other of [second(), sharded(both, route), sharded(both)])
      await expect
        .soft(other.transaction({ lock: vip }, async () => {}))
        .rejects.toThrow(/version|routed otherwise/);
    await second().renumber();
    await second().transaction({ lock: vip }, async () => {});
    for (const other of [first, sharded(both, route, { version: 1 }), sharded(both, route)])
      await expect.soft(other.transaction({ lock: vip }, async () => {})).rejects.toMatchObject(refused);
    expect(() => sharded(both, route, { version: {} as never })).toThrow(/version must be/);
  });

  test("no process goes by a map that it has not begun with, also if its route has no version", async () => {
    const both = databases.slice(0, 2);
    const route = ({ parts }: Key) => Number(parts[1]?.length) % 2;
    const before = sharded(both, route);
    const after = sharded(both, (lock) => (lock.parts[1] === "vip" ? 0 : route(lock)));
    const vip = key("l", "vip");
    const used = quota(before, { name: "u", limit: 5 });
    await used.consume("vip", 2);
    await before.transaction({ lock: vip }, async () => {});
    await after.renumber();
    await after.settle();
    // Not at the first call alone, and not on the database either that it has not used yet.
    for (let i = 0; i < 3; i++)
      for (const call of [
        () => used.tryConsume("vip", 3),
        () => before.transaction({ lock: vip }, async () => {}),
        () => before.hold(vip),
        () => before.lease(key("l", "ab")),
      ])
        await expect.soft(call()).rejects.toMatchObject({ ...refused, retryable: false });
    await expect(used.tryConsume("vip", 3)).rejects.toThrow(/restart this process/);
    expect(await quota(after, { name: "u", limit: 5 }).tryConsume("vip", 3)).toMatchObject({ granted: true });
  });

  test("a renumbering that dies while it opens goes on with the same number", async () => {
    await writtenDown();
    const client = await pool().connect();
    await client.query("BEGIN");
    await old.on(found).join(client).lock(found);
    const file = new URL("./workers/renumber.ts", import.meta.url);
    const worker = startWorker(
      file,
      places.map(({ url }) => url),
    );
    await closed();
    // The last one that it opens of those that were closed.
    const selves = await Promise.all(
      pools.slice(0, 2).map(async (each) => {
        const { rows } = await each.query<{ value: string }>(
          "SELECT value FROM holdfast.agreed WHERE name = 'self'",
        );
        return rows[0]?.value ?? "";
      }),
    );
    const [a = "", b = ""] = selves;
    const [opened, left] = a < b ? [0, 1] : [1, 0];
    const blocker = await (pools[left] as Pool).connect();
    await blocker.query("BEGIN; SELECT 1 FROM holdfast.agreed WHERE name = 'shard' FOR UPDATE");
    await client.query("ROLLBACK");
    client.release();
    await eventually(async () => {
      const { rows } = await (pools[opened] as Pool).query<{ next: string | null; value: string }>(
        "SELECT next, value FROM holdfast.agreed WHERE name = 'shard'",
      );
      expect(rows[0]?.next).toBeNull();
      expect(rows[0]?.value).toMatch(/"of":3/);
    });
    // The worker waits for the blocker. A statement that was only sent would be carried out after the kill.
    await eventually(async () => {
      const { rows } = await blocker.query(
        `SELECT 1 FROM pg_stat_activity a
         WHERE a.datname = current_database() AND pg_backend_pid() = ANY (pg_blocking_pids(a.pid))`,
      );
      expect(rows).toHaveLength(1);
    });
    worker.sigkill();
    await worker.exited;
    // The server would go on with what it has been told.
    await eventually(async () => {
      const { rows } = await blocker.query(
        `SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
         WHERE a.datname = current_database() AND pg_backend_pid() = ANY (pg_blocking_pids(a.pid))`,
      );
      expect(rows).toEqual([]);
    });
    await blocker.query("ROLLBACK");
    blocker.release();
    const begun = made(3);
    const on = (place: number) =>
      key(
        "u",
        Array.from({ length: 50 }, (_, i) => String(i)).find(
          (n) => begun.on(key("u", n)) === begun.all()[place],
        ) ?? "",
      );
    await begun.transaction({ lock: on(opened) }, async () => {});
    await expect(begun.transaction({ lock: on(left) }, async () => {})).rejects.toMatchObject({
      ...refused,
      retryable: true,
    });
    await next.renumber();
    for (const shards of [begun, next, made(3)])
      for (const place of [0, 1, 2]) await shards.transaction({ lock: on(place) }, async () => {});
    // Nor does it begin anew what is there already.
    await next.renumber();
    await begun.transaction({ lock: on(left) }, async () => {});
  });

  test("what stays closed is not said to be as before", async () => {
    const lease = await old.lease(found, { ttl: 60_000 });
    await pool().query(
      "UPDATE holdfast.agreed SET next = value, since = clock_timestamp() WHERE name = 'shard'",
    );
    const error: unknown = await next.renumber({ wait: 100 }).catch((e: unknown) => e);
    expect(String(error)).toMatch(/The databases stay closed/);
    expect(String(error)).not.toMatch(/as before\./);
    await expect(made(2).transaction({ lock: found }, async () => {})).rejects.toMatchObject(refused);
    await lease.release();
    await next.renumber();
  });

  test("a shorter list is refused, unless nothing is routed to what is left out, as the page says", async () => {
    const names = Array.from({ length: 20 }, (_, i) => `s${i}`);
    const used = quota(next, { name: "u", limit: 3 });
    for (const name of names) await used.consume(name, 2);
    await expect(old.renumber()).rejects.toThrow(
      /list of 2 databases would follow on one of 3.*routed to the others/,
    );
    for (const name of names) expect(await used.peek(name)).toMatchObject({ used: 2 });
    // Step 1: nothing is routed to the last one.
    const route = ({ parts: [, id = ""] }: Key) => hash("sha256", id, "buffer").readUInt32BE(0) % 2;
    const emptying = sharded(databases, route, { version: "without the third" });
    await emptying.renumber();
    await expect(old.renumber()).rejects.toThrow(/settle\(\) with the longer list/);
    await emptying.settle();
    await emptying.move("s0", { to: 2 });
    await expect(old.renumber()).rejects.toThrow(/moved to shard 2 on purpose/);
    await emptying.move("s0", { to: route(key("u", "s0")) });
    // Step 2.
    await old.renumber();
    await old.settle();
    const left = quota(made(2), { name: "u", limit: 3 });
    for (const name of names) {
      expect(await left.tryConsume(name, 2)).toMatchObject({ granted: false });
      await left.consume(name);
    }
    await expect(quota(emptying, { name: "u", limit: 3 }).tryConsume("s1")).rejects.toMatchObject(refused);
  });

  test("stock, and jobs with a key or a group, that would be looked for elsewhere are refused", async () => {
    // Of two on the first, of three on the last.
    await stock(old, { name: "u" }).increase(subject, 10, { externalId: "delivery" });
    const jobs = queue<string>(old, "u");
    await jobs.enqueue("a", { group: subject });
    await jobs.enqueue("b", { key: subject, delayMs: 60_000 });
    await jobs.enqueue("c");
    await expect(next.renumber()).rejects.toThrow(
      /1 levels of stock, such as u:0 \(on shard 0\).*leave: \["stock"\]/,
    );
    await expect(next.renumber({ leave: ["stock"] })).rejects.toThrow(/2 jobs, such as u:0/);
    // Nothing was closed.
    await old.transaction({ lock: found }, async () => {});
    await expect(next.renumber({ leave: ["orders"] as never })).rejects.toThrow(/leave must be/);
    await next.renumber({ leave: ["stock", "jobs"] });
    await next.transaction({ lock: found }, async () => {});
  });

  test("a job that has ended on a process of the old list does not run again", async () => {
    const group = Array.from({ length: 50 }, (_, i) => String(i)).find(
      (n) => old.all().indexOf(old.on(key("u", n))) === next.all().indexOf(next.on(key("u", n))),
    );
    await queue<string>(old, "u").enqueue("x", { group: group ?? "" });
    let runs = 0;
    const started = Promise.withResolvers<void>();
    const ends = Promise.withResolvers<void>();
    const troubles: unknown[] = [];
    await using worker = queue<string>(old, "u").work(
      async () => {
        runs++;
        started.resolve();
        await ends.promise;
      },
      { onTrouble: (error) => void troubles.push(error) },
    );
    await started.promise;
    await next.renumber();
    ends.resolve();
    await using other = queue<string>(next, "u").work(() => void runs++);
    await eventually(async () => {
      const { rows } = await pool().query("SELECT 1 FROM holdfast.queue_lease");
      const { rows: there } = await (pools[1] as Pool).query("SELECT 1 FROM holdfast.queue_lease");
      expect([...rows, ...there]).toEqual([]);
    });
    // It is told that its list is over: it gets no more jobs.
    await eventually(() => troubles.some((error) => (error as { code?: string }).code === "HF_SHARD_MAP"));
    await worker.stop();
    await other.stop();
    expect(runs).toBe(1);
  });

  test("a database that has lost what was moved to it is found by reconcile, and grants nothing", async () => {
    await quota(old, { name: "u", limit: 5 }).consume(subject, 4);
    await old.move(subject, { to: 1 });
    await (pools[1] as Pool).query("DELETE FROM holdfast.quota_bucket");
    for (const shards of [old, made(2)]) {
      const { ok, findings } = await quota(shards, { name: "u", limit: 5 }).reconcile(subject);
      expect(ok).toBe(false);
      expect(findings.join()).toMatch(/moved from shard 0 to shard 1 .*has lost/);
    }
    await expect(quota(made(2), { name: "u", limit: 5 }).consume(subject)).rejects.toThrow(/has lost/);
  });
});

/** There is no Citus here: this is what can be said of it on a plain server. */
describe("towards Citus", () => {
  describe("places do not begin while the plain schema has data", () => {
    let place: TestDatabase;
    let server: Pool;
    let plain: Holdfast<PoolClient>;
    const places = (count = 2) => spreadPlaces(fromPg(server), count);
    const refusedFilled = {
      code: "HF_UNSUPPORTED",
      message: expect.stringContaining("5 of 5 would get 5 more"),
    };

    beforeEach(async ({ skip }) => {
      skip(why !== undefined, why);
      place = await createDatabase("postgres");
      server = new Pool({ connectionString: place.url, max: 8 });
      plain = holdfast(fromPg(server));
      await plain.migrate();
    });
    afterEach(async () => {
      await plain?.close();
      await server?.end();
      await place?.drop();
    });

    const fill: Record<string, (hf: Holdfast<PoolClient>) => Promise<unknown>> = {
      "a quota": (hf) => quota(hf, { name: "u", limit: 5 }).consume("ann", 5),
      stock: (hf) => stock(hf).increase("cap", 1),
      "a job": (hf) => queue(hf, "mails").enqueue("x"),
      "a schedule": (hf) => schedule(hf, "nightly", { every: "1 hour" }, () => {}).runNow(),
      "a record of once": (hf) => once(hf, ["u", "1"], async () => 1),
      "a lease": (hf) => hf.lease(key("report")),
    };
    test.for(Object.entries(fill))("%s: by migrate()", async ([, use]) => {
      await use(plain);
      const [first, second] = places() as [PgDatabase, PgDatabase];
      for (const each of [first, second, first])
        await expect(holdfast(each).migrate()).rejects.toMatchObject(refusedFilled);
      const { rows } = await server.query("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'holdfast\\_%'");
      expect(rows).toEqual([]);
      // Under another name they have nothing to do with it.
      for (const each of spreadPlaces(fromPg(server), 2, { schema: "other" })) await holdfast(each).migrate();
    });

    test("at the first use of places that were made before it was used", async () => {
      for (const each of places()) await holdfast(each).migrate();
      await plain.transaction({ lock: key("a") }, async () => {});
      await quota(plain, { name: "u", limit: 5 }).consume("ann", 5);
      for (const call of [
        (shards: Sharded<PoolClient>) => quota(shards, { name: "u", limit: 5 }).tryConsume("ann", 5),
        (shards: Sharded<PoolClient>) => shards.transaction({ lock: key("u", "ann") }, async () => {}),
        (shards: Sharded<PoolClient>) => shards.renumber({ stopped: true }),
      ]) {
        const shards = sharded(places());
        await expect.soft(call(shards)).rejects.toMatchObject(refusedFilled);
        await shards.close();
      }
    });

    test("what is used later beside places that are used is of another use", async () => {
      for (const each of places()) await holdfast(each).migrate();
      const shards = sharded(places());
      await quota(shards, { name: "u", limit: 5 }).consume("ann", 5);
      await quota(plain, { name: "v", limit: 5 }).consume("ann", 5);
      for (const each of places(3)) await holdfast(each).migrate();
      expect(await quota(sharded(places()), { name: "u", limit: 5 }).tryConsume("ann", 5)).toMatchObject({
        granted: false,
      });
    });
  });

  test("the map is changed by no statement that computes something which Citus refuses", async ({ skip }) => {
    skip(why !== undefined, why);
    const place = await createDatabase("postgres");
    const pool = new Pool({ connectionString: place.url, max: 4 });
    const sent: string[] = [];
    pool.on("connect", (client) => {
      const query = client.query.bind(client) as (...args: unknown[]) => never;
      client.query = (...args: unknown[]) => {
        sent.push(String((args[0] as { text?: string }).text ?? args[0]));
        return query(...args);
      };
    });
    try {
      const all = spreadPlaces(fromPg(pool), 2);
      for (const each of all) await holdfast(each).migrate();
      const shards = sharded(all);
      await quota(shards, { name: "u", limit: 5 }).consume("ann");
      await shards.settle();
      const changes = sent.filter((text) => /^UPDATE [^ ]*agreed/.test(text));
      expect(changes).not.toEqual([]);
      const called = new Set(
        changes.flatMap((text) => [...text.matchAll(/(\w+)\(\)/g)].map(([, name]) => name)),
      );
      const { rows } = await pool.query(
        "SELECT proname FROM pg_proc WHERE provolatile = 'v' AND proname = ANY ($1)",
        [[...called]],
      );
      expect(rows).toEqual([]);
      // Nor may anything be computed in what an UPDATE returns: Citus refuses all there that is not IMMUTABLE, such as a time as text.
      for (const text of changes) expect(/RETURNING (.*)$/s.exec(text)?.[1] ?? "").toMatch(/^[\w, ]*$/);
    } finally {
      await pool.end();
      await place.drop();
    }
  });
});

describe("a database that one instance has used alone", () => {
  const subjects = Array.from({ length: 12 }, (_, i) => String(i));
  let places: TestDatabase[];
  let pools: Pool[];
  let databases: PgDatabase[];

  beforeEach(async ({ skip }) => {
    skip(why !== undefined, why);
    places = await Promise.all([0, 1].map(() => createDatabase("postgres")));
    pools = places.map(({ url }) => new Pool({ connectionString: url, max: 10 }));
    databases = pools.map((pool) => fromPg(pool));
    for (const database of databases) await holdfast(database).migrate();
  });

  afterEach(async () => {
    if (why !== undefined) return;
    await Promise.all(pools.map((pool) => pool.end()));
    await Promise.all(places.map((place) => place.drop()));
  });

  test("is not made one of several in silence, whatever was used", async () => {
    const uses: Record<string, (hf: ReturnType<typeof plain>) => Promise<unknown>> = {
      lock: (hf) => hf.transaction({ lock: key("l", 1) }, async () => {}),
      "lock in a caller's transaction": async (hf) => {
        const client = await (pools[0] as Pool).connect();
        await client.query("BEGIN");
        await hf.join(client).lock(key("l", 1));
        // The call waits a moment only for the shard's row, which another connection writes.
        await eventually(async () => {
          const text = "SELECT 1 FROM holdfast.agreed WHERE name = 'shard'";
          expect((await (pools[0] as Pool).query(text)).rows).toHaveLength(1);
        });
        await client.query("ROLLBACK");
        client.release();
      },
      hold: async (hf) => (await hf.hold(key("l", 1))).release(),
      lease: async (hf) => (await hf.lease(key("l", 1))).release(),
      quota: (hf) => quota(hf, { name: "u", limit: 1 }).peek("a"),
      once: (hf) => once(hf, ["a"], async () => 1),
      job: (hf) => queue(hf, "u").enqueue("x"),
    };
    const plain = () => holdfast(databases[0] as PgDatabase);
    for (const [name, use] of Object.entries(uses)) {
      for (const pool of pools)
        await pool.query(
          "DELETE FROM holdfast.agreed; TRUNCATE holdfast.quota_bucket, holdfast.once, holdfast.queue, holdfast.resource CASCADE",
        );
      await using hf = plain();
      await use(hf);
      await using shards = sharded(databases);
      for (let i = 0; i < 2; i++)
        await expect
          .soft(
            shards.transaction({ lock: key("l", i) }, async () => {}),
            name,
          )
          .rejects.toThrow(/has used shard 0 alone.*renumber\(\), once/);
      await use(hf);
    }
  });

  test("is one of several at once if it was only looked at", async () => {
    for (let i = 0; i < 2; i++) {
      await using hf = holdfast(databases[i] as PgDatabase);
      await hf.migrate();
      await hf.capabilities();
      await hf.inspect();
    }
    await using shards = sharded(databases);
    await shards.transaction({ lock: key("l", 1) }, async () => {});
  });

  test("in a schema of its own has its map there", async () => {
    const schema = "shop";
    for (const database of databases) await holdfast(database, { schema }).migrate();
    await using shards = sharded(databases, undefined, { schema });
    await shards.transaction({ lock: key("l", 1) }, async () => {});
    const swapped = sharded(databases.toReversed(), undefined, { schema });
    await expect(swapped.transaction({ lock: key("l", 1) }, async () => {})).rejects.toThrow(
      /written down as shard/,
    );
    const { rows } = await (pools[0] as Pool).query("SELECT value FROM shop.agreed WHERE name = 'shard'");
    expect(JSON.parse(rows[0].value)).toMatchObject({ shard: 0, of: 2 });
  });

  test("what it has counted is found by renumber(), and moved", async () => {
    await using hf = holdfast(databases[0] as PgDatabase);
    const alone = quota(hf, { name: "u", limit: 5 });
    for (const name of ["0", "1"]) await alone.consume(name, 5);
    const held = await hf.hold(key("l", "0"));
    await using shards = sharded(databases);
    const both = quota(shards, { name: "u", limit: 5 });
    const call = { stopped: true, wait: 100 };
    await expect(shards.renumber(call)).rejects.toThrow(/pid \d+.*Everything is as before/);
    await alone.peek("0");
    await held.release();
    const lease = await hf.lease(key("l", "0"));
    await expect(shards.renumber(call)).rejects.toThrow(/a lease that lasts/);
    await lease.release();
    const client = await (pools[0] as Pool).connect();
    await client.query("BEGIN");
    await alone.peek("0", { tx: hf.join(client) });
    await expect(shards.renumber(call)).rejects.toThrow(/pid \d+/);
    await client.query("ROLLBACK");
    client.release();
    await shards.renumber(call);
    for (const name of ["0", "1"]) expect(await both.tryConsume(name)).toMatchObject({ granted: false });
    expect(await shards.settle()).toBe(1);
    for (const name of ["0", "1"]) expect(await both.tryConsume(name)).toMatchObject({ granted: false });
  });

  test(
    "an instance that goes on meanwhile is waited for, and refused then",
    { timeout: 120_000 },
    async () => {
      await using hf = holdfast(databases[0] as PgDatabase);
      await using shards = sharded(databases);
      const limit = 20;
      const granted = new Map<string, number>();
      const owners = new Map<string, string>();
      const twice: string[] = [];
      let isOver = false;
      const use = async (by: string, instance: typeof hf | typeof shards) => {
        let used = 0;
        const quotas = quota(instance, { name: "u", limit });
        while (!isOver) {
          const name = subjects[Math.floor(Math.random() * subjects.length)] as string;
          await quotas.tryConsume(name).then(
            (verdict) => {
              used++;
              if (verdict.granted) granted.set(name, (granted.get(name) ?? 0) + 1);
            },
            () => {},
          );
          await instance
            .transaction({ lock: key("l", name) }, async () => {
              const other = owners.get(name);
              if (other !== undefined) twice.push(`${name}: ${other}, ${by}`);
              owners.set(name, by);
              await hf.outside(() => sleep(5));
              owners.delete(name);
            })
            .catch(() => {});
          await sleep(5);
        }
        return used;
      };
      await hf.transaction({ lock: key("l", "x") }, async () => {});
      const running = [
        use("alone", hf),
        use("alone", hf),
        use("one of several", shards),
        use("one of several", shards),
      ];
      await sleep(500);
      await shards.renumber();
      await expect(hf.transaction({ lock: key("l", "x") }, async () => {})).rejects.toMatchObject({
        code: "HF_SHARD_MAP",
      });
      await sleep(1500);
      isOver = true;
      const counts = await Promise.all(running);
      for (const count of counts) expect(count).toBeGreaterThan(0);
      expect(twice).toEqual([]);
      for (const [name, count] of granted) expect([name, Math.min(count, limit)]).toEqual([name, count]);
    },
  );
});

describe("docs/shards.md, step by step", () => {
  const subjects = isLong ? 2000 : 500;
  const limit = 3;
  let servers: EmbeddedPostgres[] = [];
  let folder: string;

  beforeAll(async () => {
    if (why !== undefined) return;
    servers = await Promise.all([0, 1, 2].map(() => startPostgres({ settings: { fsync: "off" } })));
    folder = mkdtempSync(join(tmpdir(), "holdfast-reshard-"));
  }, 120_000);

  afterAll(async () => {
    await Promise.all(servers.map((server) => server.stop()));
    if (folder) rmSync(folder, { recursive: true, force: true });
  });

  test(
    "from two to three servers under load, movers and servers killed",
    { timeout: isLong ? 1_800_000 : 180_000 },
    async ({ skip }) => {
      skip(why !== undefined, why);
      const urls = servers.map((server) => server.url());
      for (const url of urls.slice(0, 2)) await migrated(url);
      const file = new URL("./workers/reshard.ts", import.meta.url);
      const start = (count: number, prefix: string, expires = false) =>
        startWorker<Resharded>(file, {
          expires,
          urls: urls.slice(0, count),
          prefix,
          subjects,
          limit,
          folder,
        } satisfies ReshardArg);
      const frozen = start(2, "e", true);
      const old = [...["a", "b"].map((prefix) => start(2, prefix)), frozen];
      await Promise.all(old.map((worker) => worker.message("used")));
      const fresh: Worker<Resharded>[] = [start(3, "c")];
      await sleep(isLong ? 120_000 : 1000);

      // The steps, as they are written.
      const script = documented();
      const env = { ...process.env, SHARD_0: urls[0], SHARD_1: urls[1], SHARD_2: urls[2] };
      const kills = isLong ? 40 : 3;
      // Stands still until the new list counts, for longer than its leases.
      frozen.sigstop();
      // The first one dies when it has closed all, and waits.
      const blocker = await heldLease(urls.slice(0, 2));
      const first = program(script, env);
      await closedOn(urls.slice(0, 2));
      first.kill();
      await first.ended;
      await blocker.release();
      let runs = 1;
      for (let killed = 1; ; killed++) {
        const { ended, kill } = program(script, env);
        runs++;
        const timer = killed < kills && setTimeout(kill, 400 + Math.random() * 1200);
        if (killed === 1 || killed === 2 || (isLong && killed < kills && killed % 4 === 0))
          await (servers[killed % 3] as EmbeddedPostgres).restart("immediate");
        const code = await ended;
        clearTimeout(timer || undefined);
        if (code === 0) break;
        expect(killed, "the steps fail again and again").toBeLessThan(kills + 20);
        await sleep(50);
      }
      frozen.sigcont();
      fresh.push(start(3, "d"));
      const refusedOld = await Promise.all(old.map((worker) => worker.result));
      await fresh[1]?.message("used");
      await sleep(isLong ? 120_000 : 1000);
      for (const worker of fresh) worker.send("stop");
      const stayed = await Promise.all(fresh.map((worker) => worker.result));
      const all = [...refusedOld, ...stayed];

      // Who went by the old list was refused, and by nothing else than that.
      expect(refusedOld.map(({ refused }) => refused)).toEqual([true, true, true]);
      // Nor is anybody refused who has begun by the new one, however often it was run again.
      expect(stayed.map(({ refused }) => refused)).toEqual([false, false]);
      expect(all.flatMap(({ errors }) => errors)).toEqual([]);
      const kept = new Set(all.flatMap((each) => each.kept));
      expect(kept.size).toBeGreaterThan(100);
      // What a server has lost with its sessions is not held, and its holder learns of it too late.
      const twice = all.flatMap((each) => each.twice);
      expect(twice.filter(([, holder, other]) => kept.has(holder) && kept.has(other))).toEqual([]);

      const ledger = await entries(urls);
      const granted = all.flatMap(({ granted: some }) => some);
      const open = new Set(all.flatMap(({ open: some }) => some).map((each) => each.join()));
      const written = [...ledger].flatMap(([subject, { ids }]) => ids.map((id) => [subject, id].join()));
      expect(new Set(written).size).toBe(written.length);
      const known = new Set(written);
      // What was granted is in the ledger, and nothing else is.
      expect(granted.filter((each) => !known.has(each.join()))).toEqual([]);
      const answered = new Set(granted.map((each) => each.join()));
      expect(written.filter((each) => !answered.has(each) && !open.has(each))).toEqual([]);
      expect(
        [...ledger].filter(([, { used, ids, homes }]) => used > limit || used !== ids.length || homes !== 1),
      ).toEqual([]);
      expect(ledger.size).toBeGreaterThan(subjects / 2);
      expect(runs).toBeGreaterThan(1);
    },
  );

  /** Of the old list: renumber() waits for it. */
  async function heldLease(urls: readonly string[]): Promise<{ release(): Promise<void> }> {
    const owned = urls.map((connectionString) => new Pool({ connectionString, max: 2 }));
    for (const each of owned) each.on("error", () => {});
    const shards = sharded(owned.map((each) => fromPg(each)));
    const lease = await shards.lease(key("blocker", "x"), { ttl: 60_000 });
    return {
      async release() {
        // It is refused by its epoch, so it ends by hand.
        await Promise.all(
          owned.map((each) => each.query("DELETE FROM holdfast.lease WHERE name LIKE 'blocker%'")),
        );
        await lease.release().catch(() => {});
        await shards.close().catch(() => {});
        await Promise.all(owned.map((each) => each.end()));
      },
    };
  }

  async function closedOn(urls: readonly string[]): Promise<void> {
    const clients = urls.map((connectionString) => new Client({ connectionString }));
    await Promise.all(clients.map((client) => client.connect()));
    await eventually(async () => {
      for (const client of clients) {
        const { rows } = await client.query(
          "SELECT 1 FROM holdfast.agreed WHERE name = 'shard' AND next IS NOT NULL",
        );
        expect(rows).toHaveLength(1);
      }
    });
    await Promise.all(clients.map((client) => client.end()));
  }

  async function migrated(connectionString: string): Promise<void> {
    const pool = new Pool({ connectionString });
    await holdfast(fromPg(pool)).migrate();
    await pool.end();
  }

  /** The program of the section. */
  function documented(): string {
    const page = readFileSync(new URL("../docs/shards.md", import.meta.url), "utf8");
    const [, section = ""] = page.split("\n## Adding a database\n");
    const code = /```ts\n(.*?)```/s.exec(section)?.[1];
    if (code === undefined) throw new Error("docs/shards.md has no program for adding a database");
    const generated = fileURLToPath(new URL("./generated/", import.meta.url));
    mkdirSync(generated, { recursive: true });
    const home = mkdtempSync(join(generated, "reshard-"));
    onTestFinished(() => rmSync(home, { recursive: true, force: true }));
    const file = join(home, "add-database.ts");
    writeFileSync(file, code);
    return file;
  }

  function program(file: string, env: NodeJS.ProcessEnv) {
    const child = spawn(process.execPath, [...bundled, file], { env, stdio: ["ignore", "ignore", "ignore"] });
    const ended = new Promise<number | null>((resolve) => child.once("exit", (code) => resolve(code)));
    return { ended, kill: () => child.kill("SIGKILL") };
  }

  async function entries(urls: readonly string[]) {
    const found = new Map<string, { used: number; ids: string[]; homes: number }>();
    for (const connectionString of urls) {
      const client = new Client({ connectionString });
      await client.connect();
      const { rows } = await client.query<{ subject: string; used: number; ids: string[] }>(
        `SELECT b.subject, b.used::int, ARRAY(SELECT l.id FROM holdfast.quota_line l WHERE l.bucket = b.id) AS ids
         FROM holdfast.quota_bucket b WHERE b.moved_to IS NULL AND b.moved_from IS NULL`,
      );
      await client.end();
      for (const { subject, used, ids } of rows) {
        const before = found.get(subject) ?? { used: 0, ids: [], homes: 0 };
        found.set(subject, {
          used: before.used + used,
          ids: [...before.ids, ...ids],
          homes: before.homes + 1,
        });
      }
    }
    return found;
  }
});
