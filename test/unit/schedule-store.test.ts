/**
 * Schedules and the audit over a dialect alone: what every engine must do, on PostgreSQL with the generic stores in place of
 * its own, and on an engine that has nothing else. And both stores at once, on the same tables.
 */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type Database, type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Run, type Schedule, runs, schedule } from "holdfast/schedule";
import { type ConformanceSite, type Ground, conformance, prepare } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import type { SqlConnection } from "../../packages/holdfast/src/seam/database.ts";
import { storeDialect } from "../../packages/holdfast/src/engines/postgres/store-dialect.ts";
import { schedules as functions } from "../../packages/holdfast/src/engines/postgres/schedule/index.ts";
import { auditStore, auditTables } from "../../packages/holdfast/src/engines/sql/audit.ts";
import { scheduleStore, scheduleTables } from "../../packages/holdfast/src/engines/sql/schedule.ts";
import type { Claimed, ScheduleStep } from "../../packages/holdfast/src/schedule/store.ts";
import { type TestDatabase, createDatabase } from "../harness/databases.ts";
import { random } from "../harness/random.ts";
import { eventually } from "../harness/wait.ts";
import { bareSqlite, dialect as bareDialect, fromBareSqlite } from "../sketches/bare-sqlite.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const cases = conformance().filter(({ suite }) => suite === "schedule" || suite === "audit");
const unused = () => {
  throw new Error("these cases do not need it");
};

/** A client of PostgreSQL with the generic stores. */
function generic(pool: Pool): Database<unknown, SqlConnection> {
  const database = fromPg(pool) as unknown as Database<unknown, SqlConnection>;
  const stores = { schedules: scheduleStore(storeDialect), audit: auditStore(storeDialect) };
  return { ...database, engine: { ...database.engine, ...stores } };
}

const bare = bareSqlite({ schedules: scheduleStore(bareDialect), audit: auditStore(bareDialect) }, [
  ...scheduleTables,
  ...auditTables,
]);

interface Backend {
  readonly name: string;
  open(): Promise<{ readonly databases: readonly [Database, Database]; close(): Promise<unknown> }>;
}

const backends: readonly Backend[] = [
  {
    name: "PostgreSQL with the generic stores",
    async open() {
      const database = await createDatabase("postgres");
      const pools = [1, 2].map(() => new Pool({ connectionString: database.url, max: 8 })) as [Pool, Pool];
      return {
        databases: pools.map(generic) as unknown as [Database, Database],
        async close() {
          for (const pool of pools) await pool.end();
          await database.drop();
        },
      };
    },
  },
  {
    name: "one on the generic stores, one on its functions",
    async open() {
      const database = await createDatabase("postgres");
      const pools = [1, 2].map(() => new Pool({ connectionString: database.url, max: 8 })) as [Pool, Pool];
      return {
        databases: [generic(pools[0]), fromPg(pools[1])],
        async close() {
          for (const pool of pools) await pool.end();
          await database.drop();
        },
      };
    },
  },
  {
    name: "an engine that has nothing but a dialect",
    async open() {
      const folder = await mkdtemp(join(tmpdir(), "holdfast-bare-"));
      const one = () => fromBareSqlite(join(folder, "test.db"), bare) as unknown as Database;
      return { databases: [one(), one()], close: () => rm(folder, { recursive: true, force: true }) };
    },
  },
];

describe.each(backends)("$name", ({ open }) => {
  let opened: Awaited<ReturnType<Backend["open"]>>;
  let ground: (name: string) => Promise<Ground>;

  beforeAll(async () => {
    opened = await open();
    const [one, two] = opened.databases.map((database) => ({
      database,
      ownTransaction: unused,
      withIdle: unused,
      send: unused,
      close: async () => {},
    })) as unknown as [ConformanceSite, ConformanceSite];
    ground = await prepare(one, two);
  });
  afterAll(() => opened?.close());

  test.each(cases)("$suite: $name", async ({ suite, run }) => {
    await run(await ground(suite));
  });
});

/** Histories of both at the same time, with processes that die, on one schedule each. */
describe("functions and the generic store at once", () => {
  let database: TestDatabase;
  let pool: Pool;
  let connections: { connection: SqlConnection; release(): unknown }[] = [];
  let hf: Holdfast<unknown>;

  beforeAll(async () => {
    database = await createDatabase("postgres");
    pool = new Pool({ connectionString: database.url, max: 12 });
    const db = fromPg(pool) as unknown as Database<unknown, SqlConnection>;
    hf = holdfast(db);
    await hf.migrate();
    const connect = db.connect as NonNullable<typeof db.connect>;
    for (let i = 0; i < 8; i++) connections.push(await connect({ use: "session", locks: [], wait: 1000 }));
  });
  afterAll(async () => {
    for (const { release } of connections) await release();
    connections = [];
    await hf?.close();
    await pool?.end();
    await database?.drop();
  });

  test.for(Array.from({ length: long ? 20 : 2 }, (_, i) => i))("each tick once, seed + %i", async (i) => {
    const seed = inject("seed") + i;
    const hint = `HOLDFAST_SEED=${seed - i} + ${i}`;
    const name = `mixed ${i}`;
    const every = 20;
    const ticks = long ? 200 : 60;
    const stores = [functions, scheduleStore(storeDialect)];
    const granted: Claimed[] = [];
    const completed: Claimed[] = [];
    const trouble: string[] = [];
    const overlap = (["queue", "skip", "allow"] as const)[seed % 3] as ScheduleStep["overlap"];
    let over = false;

    /** One of the processes: it asks for the next tick, and ends what it gets, unless it dies. */
    async function work(connection: SqlConnection, at: number): Promise<void> {
      const next = random(seed + 1000 * at);
      const store = stores[at % 2] as (typeof stores)[number];
      const how = { waitMs: 10_000, free: true };
      const ask = (wish: ScheduleStep["wish"]) =>
        store.step(
          connection,
          {
            schedule: name,
            token: `${at} ${next()}`,
            holder: String(at),
            ttlMs: 100,
            attempts: 1000,
            overlap,
            take: true,
            wish,
            as: "running",
            keep: 100_000,
          },
          how,
        );
      let { last, now, claimed: first } = await ask(undefined);
      // Others have begun before: it is as if this one had died.
      if (first) granted.push(first);
      while (!over) {
        const tick = (Math.floor(last / every) + 1) * every;
        const standing = await ask(
          tick <= now + 5 ? { tick, after: last, before: undefined, run: true } : undefined,
        );
        ({ last, now } = standing);
        const { claimed } = standing;
        if (!claimed) {
          await new Promise((resolve) => setTimeout(resolve, 5 * next()));
          continue;
        }
        granted.push(claimed);
        // Dead: somebody else gets it, when its claim is over.
        if (next() < 0.15) continue;
        if (next() < 0.3) await store.renew(connection, claimed, 100, how);
        const fails = next() < 0.2;
        const ended = await store.end(
          connection,
          claimed,
          fails ? { state: "failed", error: "again", retryInMs: 1, uncounted: false } : { state: "done" },
          { ...how, joined: false },
        );
        if (ended === "before") trouble.push(`ended before: ${JSON.stringify(claimed)}`);
        if (ended === "ended" && !fails) completed.push(claimed);
      }
    }

    const working = connections.map(({ connection }, at) => work(connection, at));
    try {
      await eventually(() => completed.length >= ticks, { timeout: 90_000 });
    } finally {
      over = true;
      await Promise.all(working);
    }
    expect(trouble, hint).toEqual([]);
    // No fence was given twice, and no tick was ended twice.
    expect(new Set(granted.map(({ fence }) => fence)).size, hint).toBe(granted.length);
    const done = completed.map(({ tick }) => tick);
    expect(new Set(done).size, hint).toBe(done.length);
    const { rows } = await pool.query<{ tick: string; previous: string; state: string; attempt: number }>(
      `SELECT (extract(epoch FROM tick) * 1000)::text AS tick, (extract(epoch FROM previous) * 1000)::text AS previous, state, attempt
         FROM holdfast.schedule_run WHERE schedule = $1 ORDER BY 1`,
      [name],
    );
    // None was left out: each begins where the one before it was.
    expect(
      rows.slice(1).map(({ previous }) => Number(previous)),
      hint,
    ).toEqual(rows.slice(0, -1).map(({ tick }) => Number(tick)));
    expect(
      rows.slice(1).every(({ tick, previous }) => Number(tick) - Number(previous) === every),
      hint,
    ).toBe(true);
    // The attempts of each are those that were granted, in the order of their fences. Answers may arrive in another one.
    const byFence = granted.toSorted((a, b) => a.fence - b.fence);
    for (const { tick, attempt, state } of rows) {
      const mine = byFence.filter((each) => each.tick === Number(tick));
      expect(
        mine.map((each) => each.attempt),
        hint,
      ).toEqual(mine.map((_, k) => k + 1));
      expect(attempt, hint).toBe(mine.length);
      if (state === "done") expect(done, hint).toContain(Number(tick));
    }
  });

  test("whole instances of both: each tick once, whoever runs it", async () => {
    const others = new Pool({ connectionString: database.url, max: 8 });
    const instances = [hf, holdfast(generic(others) as unknown as Database)];
    const seen: { readonly run: Run; readonly by: number }[] = [];
    const made: Schedule[] = [];
    const start = async (by: number) => {
      const one = schedule(
        instances[by] as Holdfast<unknown>,
        "instances",
        { every: 100, catchUp: "all", overlap: "queue", ttl: 30_000, onError: () => {} },
        (run) => void seen.push({ run, by }),
      );
      made.push(one);
      await one.start();
    };
    try {
      for (const by of [0, 1, 0, 1]) await start(by);
      await eventually(() => seen.length >= 10 && new Set(seen.map(({ by }) => by)).size === 2, {
        timeout: 60_000,
      });
      const ticks = seen.map(({ run }) => run.tick.getTime());
      expect(ticks).toEqual(ticks.map((_, k) => (ticks[0] as number) + 100 * k));
      const fences = seen.map(({ run }) => run.fence);
      expect(fences).toEqual(fences.toSorted((a, b) => a - b));
      expect(
        (await runs(hf, "instances", { limit: 1000 })).every(
          ({ state }) => state === "done" || state === "running",
        ),
      ).toBe(true);
    } finally {
      await Promise.all(made.map((each) => each.stop({ grace: 0 })));
      await instances[1]?.close();
      await others.end();
    }
  });
});
