/** What is started in a body, and goes on in the background, is no part of it: whatever becomes of that. */
import { type Holdfast, holdfast, key, leader, once, sharded, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { schedule } from "holdfast/schedule";
import { Pool, type PoolClient } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

type Hf = Holdfast<PoolClient>;

const missing = unavailable("postgres");
const databases: TestDatabase[] = [];
const pools: Pool[] = [];
/** For looking from outside. */
const lookouts: Pool[] = [];
const [first, second] = [0, 1].map((i) => () => lookouts[i] as Pool) as [() => Pool, () => Pool];
let hf: Hf;
/** On the same database. */
let sibling: Hf;
/** On another one. */
let other: Hf;

beforeAll(async () => {
  if (missing !== undefined) return;
  for (let i = 0; i < 2; i++) {
    const database = await createDatabase("postgres");
    const pool = new Pool({ connectionString: database.url, max: 20 });
    databases.push(database);
    pools.push(pool);
    lookouts.push(new Pool({ connectionString: database.url, max: 2 }));
    await holdfast(fromPg(pool)).migrate();
    await pool.query("CREATE TABLE effect (what text NOT NULL)");
  }
});

beforeEach(({ skip }) => {
  skip(missing !== undefined, missing);
  // Whatever is sent from the background as if it were in the body is found out by this, too.
  const [one, two] = pools.map((pool) => () => holdfast(fromPg(pool), { wrongConnection: "throw" }));
  [hf, sibling, other] = [one?.(), one?.(), two?.()] as [Hf, Hf, Hf];
});

afterEach(async () => {
  await Promise.all([hf, sibling, other].map((each) => each?.close()));
  for (const pool of lookouts) await pool.query("DELETE FROM effect");
});

afterAll(async () => {
  for (const pool of [...pools, ...lookouts]) await pool.end();
  for (const database of databases) await database.drop();
});

let made = 0;
const insert = "INSERT INTO effect VALUES ($1)";

const effects = async (pool: Pool, what: string) =>
  (await pool.query("SELECT 1 FROM effect WHERE what = $1", [what])).rows.length;

const effect = async (of: Hf, what: string) => {
  await of.transaction(async (tx) => void (await tx.client.query(insert, [what])));
};

const feeding = new Set<string>();
afterEach(() => feeding.clear());

/** A queue that is given a job every 20 ms, also after the body is over. */
function fed(of: Hf, name: string) {
  const jobs = queue<number>(of, name);
  feeding.add(name);
  const give = async () => {
    while (feeding.has(name)) {
      await jobs.enqueue(1, { separate: true }).catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  };
  void of.outside(give);
  return jobs;
}

/** Starts something of one instance that has effects by another, or by the same, from now on. */
type Start = (of: Hf, what: string, by?: Hf) => unknown;

const starts: [string, Start][] = [
  ["a worker", (of, what, by = of) => fed(of, what).work(() => effect(by, what), { pollMs: 50 })],
  [
    "a worker whose jobs are completed in transactions",
    (of, what, by = of) =>
      fed(of, what).work(
        async (job) => {
          await effect(by, what);
          await of.transaction((tx) => job.complete(tx));
        },
        { pollMs: 50 },
      ),
  ],
  [
    "a transactional worker",
    (of, what, by) =>
      fed(of, what).work<PoolClient>(
        async (_, tx) => void (by ? await effect(by, what) : await tx.client.query(insert, [what])),
        { transactional: true, pollMs: 50 },
      ),
  ],
  ["a schedule", (of, what, by = of) => schedule(of, what, { every: 50 }, () => effect(by, what)).start()],
  [
    "a schedule that enqueues",
    (of, what, by) =>
      schedule(of, what, {
        every: 50,
        enqueue: async (_, tx) => void (by ? await effect(by, what) : await tx.client.query(insert, [what])),
      }).start(),
  ],
  [
    "a leader",
    (of, what, by = of) => {
      void leader(of, what, async ({ signal }) => {
        while (!signal.aborted) {
          await effect(by, what);
          await once(by, [what, ++made], (tx) => tx.query(sql`SELECT 1 AS one`));
          await new Promise((resolve) => setTimeout(resolve, 20));
        }
      });
    },
  ],
];

/** Somewhere to be inside of; `inner` is run there once, and waited for. */
type Place = (inner: () => Promise<void>) => Promise<unknown>;

const places: Record<string, Place> = {
  "hf.transaction": (inner) => hf.transaction(inner),
  "a savepoint": (inner) => hf.transaction((tx) => tx.transaction(inner)),
  "hf.lock": (inner) => hf.lock(key("detached", ++made), inner),
  "hf.tryLock": (inner) => hf.tryLock(key("detached", ++made), inner),
  once: (inner) => once(hf, ["detached", ++made], inner),
  "the job of a transactional worker": async (inner) => {
    const jobs = queue<number>(hf, `outer ${++made}`, { retries: 0 });
    await jobs.enqueue(1);
    const ended = Promise.withResolvers<void>();
    await using _ = jobs.work(() => inner().then(ended.resolve, fail(ended.reject)), { transactional: true });
    await ended.promise;
  },
  "the body of another instance": (inner) => sibling.transaction(inner),
  "the body of another database": (inner) => other.transaction(inner),
};

/** Told to both: whoever waits, and the worker. */
const fail = (reject: (error: unknown) => void) => (error: unknown) => {
  reject(error);
  throw error;
};

describe.each(Object.entries(places))("in %s", (_, place) => {
  test.each(starts)("%s has its effects while that is open, and after", async (_, start) => {
    const what = `open ${++made}`;
    await place(async () => {
      await start(hf, what);
      await eventually(async () => (await effects(first(), what)) >= 2);
    });
    const before = await effects(first(), what);
    await eventually(async () => (await effects(first(), what)) > before + 2);
  });

  test.each(starts)("%s goes on if that is rolled back", async (_, start) => {
    const what = `rolled back ${++made}`;
    const undone = new Error("undone");
    const running = place(async () => {
      await start(hf, what);
      throw undone;
    });
    await expect(running).rejects.toBe(undone);
    await eventually(async () => (await effects(first(), what)) >= 3);
  });
});

test.each(starts)(
  "%s of another database may use the instance in whose body it was started",
  async (_, start) => {
    const what = `by another ${++made}`;
    await hf.transaction(async () => {
      await start(other, what, hf);
      await eventually(async () => (await effects(first(), what)) >= 2);
    });
    const before = await effects(first(), what);
    await eventually(async () => (await effects(first(), what)) > before + 2);
  },
);

test.each<[string, (of: Hf, told: () => void) => Promise<() => Promise<unknown>>]>([
  [
    "lease",
    async (of, told) => {
      const lease = await of.lease(key("detached", ++made), { ttl: 200, renew: false });
      lease.signal.addEventListener("abort", told);
      return async () => {};
    },
  ],
  [
    "hold",
    async (of, told) => {
      const name = key("detached", ++made);
      const held = await of.hold(name);
      held.signal.addEventListener("abort", told);
      return () =>
        first().query(
          "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE $1 AND pid <> pg_backend_pid()",
          [`%detached:${made}%`],
        );
    },
  ],
])("the loss of a %s is told outside of the body that it was asked for in", async (what, take) => {
  let end!: () => Promise<unknown>;
  const wrong: unknown[] = [];
  await hf.transaction(async () => {
    end = await take(hf, () => void effect(hf, what).catch((error: unknown) => wrong.push(error)));
  });
  await end();
  await eventually(async () => wrong.length > 0 || (await effects(first(), what)) > 0);
  expect(wrong).toEqual([]);
});

describe("of another shard", () => {
  const even = key("shard", 0);
  const odd = key("shard", 1);
  const both = () => {
    const [a, b] = pools.map((pool) => fromPg(pool));
    const route = ({ parts }: { parts: readonly unknown[] }) => (Number(parts[1]) % 2 === 0 ? a : b);
    return sharded(route as () => NonNullable<typeof a>, { wrongConnection: "throw" });
  };

  test.each(starts)("%s, started in the body of one", async (_, start) => {
    await using shards = both();
    for (const end of ["commit", "rollback"] as const) {
      const what = `shard ${end} ${++made}`;
      const running = shards.transaction({ lock: even }, async () => {
        await start(shards.on(odd), what);
        await eventually(async () => (await effects(second(), what)) >= 2);
        if (end === "rollback") throw new Error("undone");
      });
      const ended = await running.then(
        () => "commit",
        () => "rollback",
      );
      expect(ended).toBe(end);
      const before = await effects(second(), what);
      await eventually(async () => (await effects(second(), what)) > before + 2);
    }
  });

  test("a transaction is still refused in the body of one, and allowed outside of it", async () => {
    await using shards = both();
    await shards.transaction({ lock: even }, async () => {
      await expect(shards.on(odd).transaction(async () => {})).rejects.toMatchObject({ code: "HF_SHARDS" });
      await shards.on(even).outside(() => effect(shards.on(odd), "outside"));
      expect(await effects(second(), "outside")).toBe(1);
      await expect(shards.on(odd).transaction(async () => {})).rejects.toMatchObject({ code: "HF_SHARDS" });
    });
  });
});
