/** Keys spread over two databases. Even users live on the first one, odd users on the second. */
import { type Key, ShardError, UsageError, holdfast, key, once, sharded, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import type { SpendArg } from "./workers/sharded-spend.ts";

type PgDatabase = ReturnType<typeof fromPg<Pool>>;

let places: TestDatabase[];
let pools: Pool[];
let databases: PgDatabase[];
// Above those whom the processes spend for.
let fresh = 100;

beforeAll(async () => {
  places = await Promise.all([createDatabase("postgres"), createDatabase("postgres")]);
  pools = places.map(({ url }) => new Pool({ connectionString: url, max: 8 }));
  databases = pools.map((pool) => fromPg(pool));
  for (const [i, database] of databases.entries()) {
    await holdfast(database).migrate();
    await pools[i]?.query("CREATE TABLE spent (user_id integer NOT NULL)");
  }
});

afterAll(async () => {
  await Promise.all(pools.map((pool) => pool.end()));
  await Promise.all(places.map((place) => place.drop()));
});

const home = ({ parts }: Key) => databases[Number(parts[1]) % 2] as PgDatabase;
const both = () => sharded(home);

/** Keys of one test: of the first and of the second database. */
function users() {
  fresh += 2;
  return { even: key("credits", fresh), odd: key("credits", fresh + 1), user: fresh };
}

const never = async () => expect.unreachable("entered");
describe("two processes, two databases, 10 users with a limit of 20 each", () => {
  async function spend(offsets: readonly number[]) {
    for (const pool of pools) await pool.query("TRUNCATE spent");
    const worker = new URL("./workers/sharded-spend.ts", import.meta.url);
    const arg = { urls: places.map(({ url }) => url), users: 10, calls: 30, limit: 20 };
    const workers = offsets.map((offset) =>
      startWorker<number>(worker, { ...arg, offset } satisfies SpendArg),
    );
    const granted = await Promise.all(workers.map(({ result }) => result));
    const rows = await Promise.all(
      pools.map((pool) =>
        pool.query<{ user: number; n: number }>(
          `SELECT user_id AS "user", count(*)::int AS n FROM spent GROUP BY user_id ORDER BY user_id`,
        ),
      ),
    );
    return { granted: granted.reduce((a, b) => a + b, 0), found: rows.map((result) => result.rows) };
  }

  test("each spends 20, where it lives", async () => {
    const of = (first: number) => [0, 2, 4, 6, 8].map((i) => ({ user: i + first, n: 20 }));
    expect(await spend([0, 0])).toEqual({ granted: 200, found: [of(0), of(1)] });
  });

  // The test would see it if a key had two homes.
  test("each spends more if the processes route differently", async () => {
    expect((await spend([0, 1])).granted).toBeGreaterThan(200);
  });
});

describe("a call", () => {
  test("runs on the database of its key, on one instance for each", async () => {
    const { even, odd } = users();
    await using shards = both();
    for (const [i, lock] of [even, odd].entries()) {
      const where = (tx: { query: (s: ReturnType<typeof sql>) => Promise<unknown[]> }) =>
        tx.query(sql`SELECT current_database() AS name`);
      const here = [{ name: places[i]?.name }];
      expect(await shards.transaction({ lock }, where)).toEqual(here);
      expect(await shards.lock(lock, where)).toEqual(here);
      expect(await shards.tryLock([lock], where)).toEqual({ acquired: true, value: here });
      expect(await shards.on(lock).transaction(where)).toEqual(here);
      expect(shards.on(lock)).toBe(shards.on([lock, key("upload", lock.parts[1] ?? "")]));
    }
    expect(shards.on(even)).not.toBe(shards.on(odd));
  });

  test("that would need two databases throws, and names the locks", async () => {
    const { even, odd, user } = users();
    await using shards = both();
    const lock = [even, odd];
    const calls = [
      async () => shards.on(lock),
      () => shards.transaction({ lock }, never),
      () => shards.lock(lock, never),
      () => shards.tryLock(lock, never),
      () => shards.hold(lock),
    ];
    for (const call of calls) {
      const error: unknown = await call().catch((e: unknown) => e);
      expect(error).toBeInstanceOf(ShardError);
      expect(error).toMatchObject({ code: "HF_SHARDS", retryable: false });
      expect((error as Error).message).toContain(`credits:${user}`);
      expect((error as Error).message).toContain(`credits:${user + 1}`);
    }
  });

  test("to an instance of one database refuses locks of the other", async () => {
    const { even, odd } = users();
    await using shards = both();
    const hf = shards.on(even);
    const semaphore = { permits: 1 };
    await expect(hf.transaction({ lock: odd }, never)).rejects.toBeInstanceOf(ShardError);
    await expect(hf.tryLock(odd, never)).rejects.toBeInstanceOf(ShardError);
    await expect(hf.hold(odd)).rejects.toBeInstanceOf(ShardError);
    await expect(hf.lease(odd)).rejects.toBeInstanceOf(ShardError);
    await expect(hf.lease(odd, { wait: "skip" })).rejects.toBeInstanceOf(ShardError);
    await expect(async () => hf.semaphore(odd, semaphore).acquire()).rejects.toBeInstanceOf(ShardError);
  });

  test("needs a lock to be routed by", async () => {
    await using shards = both();
    for (const options of [{}, undefined, { lock: undefined }, never])
      await expect(shards.transaction(options as never, never)).rejects.toThrow(/needs `lock`/);
    await expect(shards.transaction({ lock: "credits" } as never, never)).rejects.toBeInstanceOf(UsageError);
  });
});

describe("inside a transaction", () => {
  test("locks of the other database are refused, and it goes on", async () => {
    const { even, odd, user } = users();
    await using shards = both();
    await shards.transaction({ lock: even }, async (tx) => {
      await tx.query(sql`INSERT INTO spent (user_id) VALUES (${user})`);
      await expect(tx.lock(odd)).rejects.toBeInstanceOf(ShardError);
      await expect(tx.tryLock(odd)).rejects.toBeInstanceOf(ShardError);
      await expect(tx.lockAll([odd])).rejects.toBeInstanceOf(ShardError);
      await expect(tx.transaction({ lock: odd }, never)).rejects.toBeInstanceOf(ShardError);
      await expect(shards.on(even).transaction({ lock: odd }, never)).rejects.toBeInstanceOf(ShardError);
      await tx.lock(key("upload", user));
      expect(tx.holds(odd)).toBe(false);
    });
    const { rows } = (await pools[0]?.query("SELECT 1 FROM spent WHERE user_id = $1", [user])) ?? {};
    expect(rows).toHaveLength(1);
  });

  test("locks of the other database are refused in a transaction that the caller opened", async () => {
    const { even, odd } = users();
    await using shards = both();
    const client = await (pools[0] as Pool).connect();
    try {
      await client.query("BEGIN");
      const tx = shards.on(even).join(client);
      await tx.lock(even);
      await expect(tx.lock(odd)).rejects.toBeInstanceOf(ShardError);
      await client.query("COMMIT");
    } finally {
      client.release();
    }
  });

  test("a transaction of the other database is refused unless it is said to be separate", async () => {
    const { even, odd, user } = users();
    await using shards = both();
    const undo = new Error("undo");
    const running = shards.transaction({ lock: even }, async (tx) => {
      await tx.query(sql`INSERT INTO spent (user_id) VALUES (${user})`);
      const inner = [
        () => shards.transaction({ lock: odd }, never),
        () => shards.lock(odd, never),
        () => shards.tryLock(odd, never),
        () => shards.on(odd).transaction(never),
        () => once(shards.on(odd), ["credits", user + 1, "x"], never),
      ];
      for (const call of inner) await expect(call()).rejects.toBeInstanceOf(ShardError);
      await shards.transaction({ lock: odd, separate: true }, async (other) => {
        await other.query(sql`INSERT INTO spent (user_id) VALUES (${user + 1})`);
        // The way back is no savepoint of the first: it would be in the middle of two transactions.
        await expect(shards.transaction({ lock: even }, never)).rejects.toBeInstanceOf(ShardError);
        await shards.transaction({ lock: key("upload", user + 1) }, (nested) =>
          nested.query(sql`INSERT INTO spent (user_id) VALUES (${user + 1})`),
        );
      });
      // A savepoint of the one that it is in.
      await shards.transaction({ lock: key("upload", user) }, (nested) =>
        nested.query(sql`INSERT INTO spent (user_id) VALUES (${user})`),
      );
      throw undo;
    });
    await expect(running).rejects.toBe(undo);
    const counts = await Promise.all(
      pools.map(
        async (pool, i) =>
          (await pool.query("SELECT 1 FROM spent WHERE user_id = $1", [user + i])).rows.length,
      ),
    );
    expect(counts).toEqual([0, 2]);
  });

  test("what is held apart from transactions may be of the other database", async () => {
    const { even, odd } = users();
    await using shards = both();
    await shards.transaction({ lock: even }, async () => {
      await using held = await shards.hold(odd);
      expect(held.signal.aborted).toBe(false);
    });
  });
});

describe("what outlives transactions", () => {
  test("is held on the database of its key, and given back by close", async () => {
    const { odd } = users();
    const shards = both();
    const [first, second] = databases.map((database) => holdfast(database));
    await shards.hold(odd);
    await shards.lease(odd);
    const semaphore = shards.semaphore(key("slots", odd.parts[1] ?? ""), { permits: 1 });
    await using permit = await semaphore.acquire();
    expect(permit).toBeDefined();
    // Instances without shards see where it is.
    expect(await second?.hold(odd, { wait: "skip" })).toBeUndefined();
    expect(await second?.lease(odd, { wait: "skip" })).toBeUndefined();
    await (await first?.hold(odd, { wait: "skip" }))?.release();
    await (await first?.lease(odd, { wait: "skip" }))?.release();
    await shards.close();
    await (await second?.hold(odd))?.release();
    await (await second?.lease(odd))?.release();
  });

  test("once: its id is routed as a key is", async () => {
    const { even, odd, user } = users();
    await using shards = both();
    let runs = 0;
    const body = async () => ++runs;
    const id = ["stripe", user, "evt_1"];
    expect(await once(shards.on(even), id, body)).toMatchObject({ value: 1, replayed: false });
    expect(await once(shards.on(even), id, body)).toMatchObject({ value: 1, replayed: true });
    // On the other database nobody would know of it.
    await expect(once(shards.on(odd), id, body)).rejects.toThrow(`stripe:${user}:evt_1`);
    await expect(once(shards.on(odd), id, body)).rejects.toBeInstanceOf(ShardError);
    await shards.transaction({ lock: even }, async (tx) => {
      expect(await once(shards.on(even), id, body, { tx })).toMatchObject({ replayed: true });
      await expect(once(shards.on(odd), id, body, { tx })).rejects.toBeInstanceOf(ShardError);
    });
    expect(await once(shards, id, body)).toMatchObject({ value: 1, replayed: true });
    expect(runs).toBe(1);
  });
});

describe("a route that cannot be right", () => {
  test.each([
    ["undefined", () => undefined],
    ["null", () => null],
    ["text", () => "postgres://"],
    ["a promise", async () => databases[0]],
    ["the pool", () => pools[0]],
  ])("returns %s", async (_, route) => {
    await expect(sharded(route as never).transaction({ lock: key("a", 0) }, never)).rejects.toThrow(
      /the route of a:0 is no database/,
    );
  });

  test("makes a database with each call, or chooses by chance", async () => {
    let calls = 0;
    const dice = sharded(() => databases[calls++ % 2] as PgDatabase);
    const maker = sharded(() => fromPg(pools[0] as Pool));
    for (const shards of [dice, maker]) {
      await expect(shards.transaction({ lock: key("a", 0) }, never)).rejects.toBeInstanceOf(UsageError);
      await expect(shards.lock(key("a", 0), never)).rejects.toThrow(/Make each database once/);
    }
  });

  test("is no function, or throws by itself", async () => {
    expect(() => sharded(databases[0] as never)).toThrow(UsageError);
    const own = new Error("no such tenant");
    const shards = sharded((): PgDatabase => {
      throw own;
    });
    await expect(shards.lock(key("a", 0), never)).rejects.toBe(own);
  });

  test("has options that do not exist", async () => {
    const shards = sharded(home, { wiat: 5 } as never);
    await expect(shards.lock(key("a", 0), never)).rejects.toBeInstanceOf(UsageError);
  });

  test("and names of keys are shown as the options say", async () => {
    const { even, odd, user } = users();
    await using shards = sharded(home, { names: (name) => name.replace(/:.*/, ":…") });
    const errors = [
      await shards.lock([even, odd], never).catch((e: unknown) => e),
      await shards
        .on(even)
        .lock(odd, never)
        .catch((e: unknown) => e),
    ];
    for (const error of errors) {
      expect((error as Error).message).toContain("credits:…");
      expect((error as Error).message).not.toContain(String(user));
    }
  });
});
