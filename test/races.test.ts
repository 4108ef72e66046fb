/** Aborts, timeouts and failures against grants, many times: nothing may be left behind. */
import { setTimeout as delay } from "node:timers/promises";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { type Holdfast, LockTimeoutError, holdfast, key, shared } from "holdfast";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { Client, Pool } from "pg";
import postgres from "postgres";
import { afterAll, beforeAll, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc") as () => void;

let database: TestDatabase;
let admin: Client;

beforeAll(async () => {
  database = await createDatabase("postgres");
  admin = new Client({ connectionString: database.url });
  await admin.connect();
});

afterAll(async () => {
  await admin.end();
  await database.drop();
});

const advisory = async () =>
  Number(
    (
      await admin.query(
        "SELECT count(*) AS n FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
      )
    ).rows[0].n,
  );
const backends = async () =>
  (
    await admin.query(
      "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend' ORDER BY pid",
    )
  ).rows.map(({ pid }) => Number(pid));

interface Racer {
  readonly hf: Holdfast<unknown>;
  readonly sessions: number;
  close(): Promise<void>;
}

const racers: [string, () => Racer][] = [
  [
    "pg",
    () => {
      // One that is closed for want of work would look like one that was lost.
      const pool = new Pool({ connectionString: database.url, max: 16, idleTimeoutMillis: 0 });
      return { hf: holdfast(fromPg(pool)), sessions: 16, close: () => pool.end() };
    },
  ],
  [
    "postgres.js",
    () => {
      const sql = postgres(database.url, { max: 16, onnotice: () => {} });
      return {
        hf: holdfast(fromPostgres(sql)) as Holdfast<unknown>,
        sessions: 16,
        close: () => sql.end({ timeout: 5 }),
      };
    },
  ],
];

test.each(racers)("1,000 races of abort against grant on %s", { timeout: 300_000 }, async (_name, open) => {
  const seed = inject("seed");
  const next = random(seed);
  const { hf, sessions, close } = open();
  // All connections are there before the first race, so that a new one would be a lost one.
  await Promise.all(
    Array.from({ length: sessions }, (_, i) => hf.transaction({ lock: key("warm", i) }, () => delay(50))),
  );
  const before = await backends();
  const outcomes = { granted: 0, aborted: 0 };
  const reason = new Error("not wanted");
  /** How late the abort may come: later after each that came too early, so that it is a race on a slow machine too. */
  let spread = 10;
  const race = async (lane: number, round: number): Promise<void> => {
    const lock = key("race", lane);
    const controller = new AbortController();
    let entered!: () => void;
    const inside = new Promise<void>((resolve) => (entered = resolve));
    const pause = next() * 3;
    const holding = hf.transaction({ lock, wait: 20_000 }, async () => {
      entered();
      await delay(1 + pause);
    });
    await inside;
    const waiting = hf
      .transaction({ lock, wait: 20_000, signal: controller.signal }, async () => {})
      .then(
        () => {
          spread = Math.max(1, spread * 0.95);
          return outcomes.granted++;
        },
        (error: unknown) => {
          // Anything else is a cancel that hit a statement of somebody else.
          if (error !== reason) throw error;
          spread = Math.min(500, spread * 1.05);
          return outcomes.aborted++;
        },
      );
    setTimeout(() => controller.abort(reason), Math.max(0, pause + next() * spread - 3));
    await Promise.all([holding, waiting]);
    // The next one on this connection is not hit by a late cancel.
    if (round % 10 === 0) await hf.transaction({ lock, wait: 5000 }, async () => {});
  };
  const lanes = 8;
  await Promise.all(
    Array.from({ length: lanes }, async (_, lane) => {
      for (let round = 0; round < 1000 / lanes; round++) await race(lane, round);
    }),
  );
  expect(outcomes.granted + outcomes.aborted, `seed ${seed}`).toBe(1000);
  // Both must happen, or it was no race.
  expect(outcomes.granted).toBeGreaterThan(20);
  expect(outcomes.aborted).toBeGreaterThan(20);
  expect(await advisory()).toBe(0);
  expect(await backends()).toEqual(before);
  await close();
});

test(
  "10,000 lock cycles with aborts, timeouts, throws and savepoint rollbacks leave nothing behind",
  { timeout: 600_000 },
  async () => {
    const cycles = long ? 100_000 : 10_000;
    const seed = inject("seed");
    const next = random(seed);
    const pool = new Pool({ connectionString: database.url, max: 12 });
    const hf = holdfast(fromPg(pool), { wait: 20_000 });
    const unexpected: unknown[] = [];
    const expected = new Set(["thrown", "inner", "aborted"]);

    const cycle = async (): Promise<void> => {
      const [a, b] = [key("cycle", Math.floor(next() * 30)), key("cycle", Math.floor(next() * 30))];
      const dice = next();
      const controller = new AbortController();
      const timer =
        dice < 0.15 ? setTimeout(() => controller.abort(new Error("aborted")), next() * 4) : undefined;
      try {
        await hf.transaction(
          {
            lock: next() < 0.3 ? [a, shared(b)] : a,
            wait: dice > 0.9 ? 1 + next() * 3 : 20_000,
            signal: controller.signal,
          },
          async (tx) => {
            if (dice > 0.3 && dice < 0.45) throw new Error("thrown");
            if (dice > 0.45 && dice < 0.6) {
              await tx
                .transaction(async (inner) => {
                  // May time out at the instant it is granted: then it must not stay.
                  await inner.lock(b, { wait: 1 + next() * 3 }).catch((error: unknown) => {
                    if (!(error instanceof LockTimeoutError)) throw error;
                  });
                  throw new Error("inner");
                })
                .catch((error: unknown) => {
                  if ((error as Error).message !== "inner") throw error;
                });
              await tx.client.query("SELECT 1");
            }
            if (dice > 0.6 && dice < 0.7) await tx.tryLock([a, b]);
          },
        );
      } catch (error) {
        if (!(error instanceof LockTimeoutError) && !expected.has((error as Error).message))
          unexpected.push(error);
      } finally {
        clearTimeout(timer);
      }
    };

    const run = async (count: number): Promise<void> => {
      let left = count;
      await Promise.all(
        Array.from({ length: 16 }, async () => {
          while (left-- > 0) await cycle();
        }),
      );
    };
    const heap = (): number => {
      collect();
      collect();
      return process.memoryUsage().heapUsed;
    };
    const timers = () => process.getActiveResourcesInfo().filter((kind) => kind === "Timeout").length;

    await run(cycles / 4);
    const [heapBefore, timersBefore] = [heap(), timers()];
    await run((cycles * 3) / 4);
    const growth = heap() - heapBefore;

    expect(unexpected, `seed ${seed}`).toEqual([]);
    await eventually(async () => (await advisory()) === 0);
    expect({ total: pool.totalCount, idle: pool.idleCount, waiting: pool.waitingCount }).toEqual({
      total: 12,
      idle: 12,
      waiting: 0,
    });
    expect(timers()).toBeLessThanOrEqual(timersBefore);
    // A leak of one small object per cycle would be more.
    expect(growth, `heap grew by ${growth} bytes`).toBeLessThan(cycles * 100);
    await pool.end();
  },
);
