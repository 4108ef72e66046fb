/**
 * Windows of quotas, next to models of a few lines: each call is decided twice, by the database and by the model, from
 * the moment that the answer carries. It is known to a millisecond, so the model says what must and what may be.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { type Quota, type QuotaOptions, quota } from "holdfast/quota";
import { createPool } from "mysql2/promise";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { checkLedger, linesOf } from "./harness/quota-ledger.ts";
import { startProxy } from "./harness/proxy.ts";
import { random } from "./harness/random.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
/** Subjects at the same time, each with a history of its own. */
const histories = long ? 50 : 5;

let database: TestDatabase;
let pool: Pool;
let hf: Holdfast<PoolClient>;

beforeAll(async () => {
  database = await createDatabase("postgres");
  pool = new Pool({ connectionString: database.url, max: 8 });
  hf = holdfast(fromPg(pool));
  await hf.migrate();
});
afterAll(async () => {
  await hf?.close();
  await pool?.end();
  await database?.drop();
});

interface Use {
  readonly id: string;
  /** Milliseconds, rounded down. */
  readonly at: number;
  left: number;
}

/** What is used at a moment: at least, and at most. */
type Model = (uses: readonly Use[], at: number) => readonly [least: number, most: number];

const sum = (uses: readonly Use[]) => uses.reduce((total, { left }) => total + left, 0);

/** `counts`: uses that are younger; `may`: that may be counted for so much longer. */
const younger =
  (per: number, may: number): Model =>
  (uses, at) => [
    sum(uses.filter((use) => at - use.at <= per - 1)),
    sum(uses.filter((use) => at - use.at - 1 < per + may)),
  ];

const inWindow =
  (per: number): Model =>
  (uses, at) => {
    const used = sum(uses.filter((use) => Math.floor(use.at / per) === Math.floor(at / per)));
    return [used, used];
  };

/** The most that any time up to now was used in, less what came back in it. */
function leaking(limit: number, per: number): Model {
  const level = (uses: readonly Use[], at: number, error: number) => {
    let [total, most] = [0, 0];
    for (const use of uses.toReversed()) {
      total += use.left;
      most = Math.max(most, total - (Math.max(0, at - use.at + error) * limit) / per);
    }
    return Math.ceil(most - 1e-6);
  };
  // Moments are whole microseconds: a little of each call's time is lost.
  return (uses, at) => [level(uses, at, 1.1), level(uses, at, -1.1)];
}

const limit = 10;
const windows: readonly {
  readonly name: string;
  readonly options: Omit<QuotaOptions, "name" | "limit"> & { readonly per: number };
  readonly model: Model;
  readonly refunds: boolean;
}[] = [
  { name: "fixed", options: { per: 150 }, model: inWindow(150), refunds: true },
  {
    name: "sliding-log",
    options: { per: 200, window: "sliding-log" },
    model: younger(200, 0),
    refunds: true,
  },
  {
    name: "sliding-parts",
    options: { per: 200, window: "sliding-parts", parts: 5 },
    model: younger(200, 40),
    refunds: false,
  },
  { name: "refill", options: { per: 200, window: "refill" }, model: leaking(limit, 200), refunds: false },
];

interface Told {
  granted: number;
  refused: number;
  waited: number;
}

async function history(
  of: Quota,
  subject: string,
  seed: number,
  model: Model,
  refunds: boolean,
): Promise<Told> {
  const next = random(seed);
  const below = (most: number) => Math.floor(next() * most);
  const uses: Use[] = [];
  const told: Told = { granted: 0, refused: 0, waited: 0 };
  for (let i = 0; i < 80; i++) {
    if (next() < 0.5) await sleep(below(30));
    // Once in a while more than there can ever be.
    const amount = next() < 0.03 ? limit + 1 : 1 + below(5);
    const use = async () => {
      const id = `${i}-${told.waited}`;
      const answer = await of.tryConsume(subject, amount, { id });
      const at = answer.at.getTime();
      const [least, most] = model(uses, at);
      const hint = `HOLDFAST_SEED=${inject("seed")} ${of.name} ${subject} call ${i}: ${amount} at ${at}, used ${least} to ${most}`;
      const before = answer.used - (answer.granted ? amount : 0);
      expect(before, hint).toBeGreaterThanOrEqual(least);
      expect(before, hint).toBeLessThanOrEqual(most);
      if (answer.granted) {
        expect(least + amount, `granted: ${hint}`).toBeLessThanOrEqual(limit);
        uses.push({ id, at, left: amount });
        told.granted++;
        return { wait: undefined, hint };
      }
      expect(most + amount, `refused: ${hint}`).toBeGreaterThan(limit);
      told.refused++;
      if (answer.retryAfter === undefined) expect(amount, hint).toBeGreaterThan(limit);
      // Not earlier than it says; that it is not later is seen below.
      else if (answer.retryAfter > 3)
        expect(model(uses, at + answer.retryAfter - 3)[1] + amount, `too late: ${hint}`).toBeGreaterThan(
          limit,
        );
      return { wait: answer.retryAfter, hint };
    };
    const { wait, hint } = await use();
    if (wait !== undefined && next() < 0.3) {
      await sleep(Math.ceil(wait) + 2);
      told.waited++;
      expect((await use()).wait, `still refused after ${wait} ms: ${hint}`).toBeUndefined();
    }
    if (refunds && uses.length > 0 && next() < 0.15) {
      const back = uses[Math.max(0, uses.length - 1 - below(4))] as Use;
      const some = 1 + below(back.left);
      if (back.left > 0) {
        await of.refund(subject, back.id, { amount: some, id: `refund-${i}` });
        back.left -= some;
      }
    }
  }
  expect(await of.reconcile(subject)).toMatchObject({ ok: true });
  return told;
}

describe("as the model says, call by call", () => {
  test.for(windows)("$name", { timeout: 600_000 }, async ({ name, options, model, refunds }) => {
    const of = quota(hf, { ...options, name, limit });
    const seed = inject("seed");
    const subjects = Array.from({ length: histories }, (_, i) => `s${i}`);
    const told = await Promise.all(
      subjects.map((subject, i) => history(of, subject, seed + i * 101, model, refunds)),
    );
    // It happened, or it was not shown.
    for (const what of ["granted", "refused", "waited"] as const)
      expect(
        told.some((each) => each[what] > 0),
        what,
      ).toBe(true);
    for (const subject of subjects) {
      const rows = await linesOf("pg", { database: fromPg(pool) }, name, subject);
      checkLedger({ ...options, limit }, rows, `HOLDFAST_SEED=${seed} ${name} of ${subject}`);
    }
  });
});

test("windows of the calendar end with the day, week, month and year of their zone", async () => {
  const zones = [
    "UTC",
    "Europe/Madrid",
    "America/New_York",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "Pacific/Apia",
  ];
  for (const timeZone of zones) {
    const day = (at: Date) => at.toLocaleDateString("sv-SE", { timeZone });
    const weekday = (at: Date) => at.toLocaleDateString("en-US", { timeZone, weekday: "short" });
    for (const per of ["day", "week", "month", "year"] as const) {
      const of = quota(hf, { name: `${per} ${timeZone}`, limit: 1, per, timeZone });
      const { resetAt } = await of.consume("u");
      const denied = await of.tryConsume("u");
      expect(denied).toMatchObject({ granted: false, resetAt });
      const [first, last] = [resetAt as Date, new Date((resetAt as Date).getTime() - 1)];
      const hint = `${per} in ${timeZone}: ${last.toISOString()}`;
      const cut = { day: 10, week: 10, month: 7, year: 4 }[per];
      expect(day(first).slice(0, cut), hint).not.toBe(day(last).slice(0, cut));
      if (per === "week") {
        expect(weekday(first), hint).toBe("Mon");
        expect(first.getTime() - denied.at.getTime(), hint).toBeLessThanOrEqual(7 * 86_400_000 + 3_600_000);
      } else expect(day(last).slice(0, cut), hint).toBe(day(denied.at).slice(0, cut));
    }
  }
});

describe("found by random histories", () => {
  test("a hold or grant that runs out when a window has begun leaves the chain whole", async () => {
    const rules = [{}, { window: "sliding-log" }, { window: "sliding-parts" }] as const;
    for (const [i, rule] of rules.entries()) {
      const of = quota(hf, { name: `over ${i}`, limit: 5, per: 100, ...rule });
      const calls = {
        a: () => of.tryConsume("a", 6),
        b: () => of.consume("b", 3),
        c: () => of.setLimit("c", 5),
        d: () => of.settle("d", "no hold", 1).catch(() => {}),
      };
      for (const [subject, call] of Object.entries(calls)) {
        await of.consume(subject, 2);
        await of.hold(subject, 3, { holdFor: 1 });
        await sleep(220);
        await call();
        await of.consume(subject, 1);
        expect(await of.reconcile(subject), `${subject} ${of.name}`).toMatchObject({ findings: [] });
      }
      await of.grant("v", 3, { expiresAt: new Date(Date.now() + 50) });
      await of.consume("v", 4);
      await sleep(220);
      await of.consume("v", 4);
      expect(await of.reconcile("v")).toMatchObject({ findings: [] });
    }
  });

  test("credits that are given back do not make room in an exact sliding window", async () => {
    const of = quota(hf, { name: "log and credits", limit: 5, per: "hour", window: "sliding-log" });
    await of.grant("u", 5);
    const { id } = await of.consume("u", 8);
    await of.refund("u", id, { amount: 3 });
    expect(await of.peek("u")).toMatchObject({ used: 5, credit: 5, remaining: 5 });
    await of.consume("u", 5);
    expect(await of.tryConsume("u", 1)).toMatchObject({ granted: false, used: 5, credit: 0 });
  });

  test("what a reset has given back is not given back again", async () => {
    const rules = [
      {},
      { per: "day" },
      { per: "hour", window: "sliding-log" },
      { per: "hour", window: "sliding-parts" },
    ] as const;
    for (const [i, rule] of rules.entries()) {
      const of = quota(hf, { name: `reset ${i}`, limit: 5, ...rule });
      const { id } = await of.consume("u", 4);
      await of.reset("u");
      await of.consume("u", 5);
      expect(await of.refund("u", id), JSON.stringify(rule)).toMatchObject({ used: 5, amount: 4 });
      expect(await of.tryConsume("u"), JSON.stringify(rule)).toMatchObject({ granted: false });
      expect(await of.reconcile("u")).toMatchObject({ findings: [] });
    }
  });
});

describe.each(["postgres", "mariadb"] as const)("far from %s", (server) => {
  test("windows that are shorter than it takes to decide: the database has the last word all the same", async ({
    skip,
  }) => {
    const why = unavailable(server);
    skip(why !== undefined, why);
    const place = await createDatabase(server);
    const proxy = await startProxy({ port: Number(new URL(place.url).port) });
    const far =
      server === "postgres"
        ? new Pool({ connectionString: proxy.url(place.url) })
        : createPool({ uri: proxy.url(place.url) });
    const database = "totalCount" in far ? fromPg(far) : fromMysql2(far);
    const distant = holdfast(database as ReturnType<typeof fromPg>);
    try {
      await distant.migrate();
      const limited = quota(distant, { name: "short", limit: 5, per: 20 });
      proxy.delayMs = 40;
      const answers = await Promise.all(Array.from({ length: 8 }, () => limited.tryConsume("ada")));
      const within = new Map<number, number>();
      for (const { granted, at } of answers) {
        const start = Math.floor(at.getTime() / 20);
        if (granted) within.set(start, (within.get(start) ?? 0) + 1);
      }
      expect([...within.values()].every((uses) => uses <= 5)).toBe(true);
      expect(within.size).toBeGreaterThan(0);
      expect(await limited.peek("ada")).toMatchObject({ limit: 5 });
    } finally {
      await distant.close();
      await far.end();
      await proxy.close();
      await place.drop();
    }
  });
});
