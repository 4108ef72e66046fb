/** What looks after a ledger, on a real server: `prune` and `reconcile`, whatever is in it and whoever uses it meanwhile. */
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Quota, type QuotaOptions, quota } from "holdfast/quota";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test, vi } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { startProxy } from "./harness/proxy.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";

const hour = 3_600_000;
const day = 24 * hour;

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

let made = 0;
const named = () => `u${++made}`;

const bucketOf = ({ name }: Quota) => `quota = '${name}'`;
const lineOf = (q: Quota) => `bucket IN (SELECT id FROM holdfast.quota_bucket WHERE ${bucketOf(q)})`;

/** Lines of these versions are made so much older. */
const age = (q: Quota, versions = "true", interval = "90 days") =>
  pool.query(
    `UPDATE holdfast.quota_line SET at = at - interval '${interval}' WHERE ${lineOf(q)} AND ${versions}`,
  );

/** As if all that has been done to it had been done so much earlier. */
const earlier = (q: Quota, interval: string) =>
  pool.query(
    `UPDATE holdfast.quota_bucket SET since = since - interval '${interval}' WHERE ${bucketOf(q)};
    UPDATE holdfast.quota_line SET since = since - interval '${interval}', at = at - interval '${interval}' WHERE ${lineOf(q)}`,
  );

const spoil = (q: Quota, set: string) =>
  pool.query(`UPDATE holdfast.quota_bucket SET ${set} WHERE ${bucketOf(q)}`);

const monthAgo = () => new Date(Date.now() - 30 * day);

async function whole(of: Quota, subject: string, hint = ""): Promise<void> {
  expect(await of.reconcile(subject), hint).toMatchObject({ ok: true, findings: [] });
}

/** As if this process's clock were wrong by so many milliseconds. */
async function withClock<T>(ms: number, work: () => Promise<T>): Promise<T> {
  const real = Date.now;
  const clock = vi.spyOn(Date, "now").mockImplementation(() => real() + ms);
  try {
    return await work();
  } finally {
    clock.mockRestore();
  }
}

/** Every kind of entry, in an order in which each can be. */
async function everyKind(q: Quota, subject: string): Promise<void> {
  await q.setPlan(subject, "pro");
  await q.setLimit(subject, 90);
  await q.grant(subject, 5, { id: `gone of ${subject}`, expiresAt: new Date(Date.now() - 1000) });
  await q.grant(subject, 50, { id: `gift of ${subject}` });
  await q.consume(subject, 100, { id: `use of ${subject}` });
  await q.refund(subject, `use of ${subject}`, { amount: 30 });
  await q.hold(subject, 3, { id: `short of ${subject}`, holdFor: 1 });
  await eventually(async () => (await q.peek(subject)).held === 0);
  const [released, settled] = [await q.hold(subject, 4), await q.hold(subject, 5)];
  await released.release();
  await settled.settle(2);
  await q.hold(subject, 6, { id: `open of ${subject}` });
  await q.reset(subject);
  await pool.query(`UPDATE holdfast.quota_bucket SET used = used + 1 WHERE ${bucketOf(q)} AND subject = $1`, [
    subject,
  ]);
  expect(await q.reconcile(subject, { repair: true })).toMatchObject({ repaired: true });
  await q.consume(subject, 7);
  const { entries } = await q.history(subject, { limit: 1000 });
  expect([...new Set(entries.map(({ kind }) => kind))].toSorted().join(" ")).toBe(
    "consume expire grant hold lapse limit plan refund release repair reset settle",
  );
}

const plans = { plans: { free: 10, pro: 80 }, default: "free" };

describe("prune", () => {
  test("a subject's old entries may be of any kind, one by one", async () => {
    const q = quota(hf, { name: named(), limit: plans });
    await everyKind(q, "u");
    const newest = (await q.history("u", { limit: 1 })).entries[0]?.version as number;
    const stands = await q.peek("u");
    for (let version = 1; version < newest; version++) {
      const [entry] = (await q.history("u", { before: version + 1, limit: 1 })).entries;
      await age(q, `version = ${version}`);
      expect(await q.prune({ before: monthAgo() }), entry?.kind).toEqual({ entries: 1, broken: [] });
      const [rolled] = (await q.history("u", { before: version + 1, limit: 1 })).entries;
      expect(rolled).toMatchObject({ kind: "rollup", first: 1, version, used: entry?.used });
      await whole(q, "u", entry?.kind);
    }
    expect({ ...(await q.peek("u")), at: 0 }).toEqual({ ...stands, at: 0 });
    expect(await q.settle("u", "open of u", 6)).toMatchObject({ used: 13, held: 0 });
    await whole(q, "u");
  });

  test("and each kind may be the only one", async () => {
    const q = quota(hf, { name: named(), limit: plans });
    const first: Record<string, (subject: string) => Promise<unknown>> = {
      consume: (subject) => q.consume(subject),
      hold: (subject) => q.hold(subject, 1),
      grant: (subject) => q.grant(subject, 1),
      limit: (subject) => q.setLimit(subject, 20),
      plan: (subject) => q.setPlan(subject, "pro"),
      reset: (subject) => q.reset(subject),
    };
    for (const [kind, call] of Object.entries(first)) {
      await call(kind);
      await call(kind);
    }
    await age(q, "version = 1");
    expect(await q.prune({ before: monthAgo() })).toEqual({ entries: 6, broken: [] });
    for (const kind of Object.keys(first)) await whole(q, kind);
    const { rows } = await pool.query(
      `SELECT amount::int, count(*)::int AS n FROM holdfast.quota_line WHERE kind = 'rollup' AND ${lineOf(q)} GROUP BY 1 ORDER BY 1`,
    );
    expect(rows).toEqual([
      { amount: 0, n: 5 },
      { amount: 1, n: 1 },
    ]);
  });

  test("an earlier entry with a later time ends it there, and not the going on with others", async () => {
    const q = quota(hf, { name: named(), limit: 100 });
    for (const subject of ["first", "middle", "none"]) for (let i = 0; i < 6; i++) await q.consume(subject);
    await age(q, "version < 6");
    const later = (subject: string, version: number) =>
      pool.query(
        `UPDATE holdfast.quota_line SET at = clock_timestamp() WHERE version = ${version} AND ${lineOf(q)}
        AND bucket = (SELECT id FROM holdfast.quota_bucket WHERE ${bucketOf(q)} AND subject = '${subject}')`,
      );
    await later("first", 1);
    await later("middle", 3);
    // On and on, without the mending: the signal is how it would be seen.
    const signal = AbortSignal.timeout(20_000);
    expect(await q.prune({ before: monthAgo(), signal })).toEqual({ entries: 2 + 5, broken: [] });
    const kinds = async (subject: string) =>
      (await q.history(subject)).entries.map(({ kind, version }) => (kind === "rollup" ? -version : version));
    expect(await kinds("first")).toEqual([6, 5, 4, 3, 2, 1]);
    expect(await kinds("middle")).toEqual([6, 5, 4, 3, -2]);
    expect(await kinds("none")).toEqual([6, -5]);
    for (const subject of ["first", "middle", "none"]) await whole(q, subject);
  });

  test("an entry that is missing between what is old and what is not: nothing is lost", async () => {
    const q = quota(hf, { name: named(), limit: 100 });
    for (let i = 0; i < 5; i++) await q.consume("u");
    await age(q, "version < 4");
    await pool.query(`DELETE FROM holdfast.quota_line WHERE version = 3 AND ${lineOf(q)}`);
    expect(await q.prune({ before: monthAgo() })).toEqual({ entries: 2, broken: [] });
    expect((await q.history("u")).entries.map(({ first, version }) => [first, version])).toEqual([
      [5, 5],
      [4, 4],
      [1, 2],
    ]);
    expect((await q.reconcile("u")).findings).toEqual(["versions 3 to 3 are missing"]);
  });

  test("what was wrong before a repair does not keep it from being rolled up", async () => {
    const q = quota(hf, { name: named(), limit: 100 });
    for (let i = 0; i < 4; i++) await q.consume("u", 2);
    await pool.query(`DELETE FROM holdfast.quota_line WHERE version IN (1, 3) AND ${lineOf(q)}`);
    await age(q);
    expect(await q.prune({ before: monthAgo() })).toEqual({ entries: 0, broken: ["u"] });
    await q.reconcile("u", { repair: true });
    await q.consume("u", 1);
    await q.consume("u", 1);
    await age(q, "version < 7");
    expect(await q.prune({ before: monthAgo() })).toEqual({ entries: 4, broken: [] });
    expect((await q.history("u")).entries).toMatchObject([
      { version: 7, used: 10 },
      { kind: "rollup", first: 1, version: 6, used: 9 },
    ]);
    await whole(q, "u");
  });

  test("what time it is, the database says: a clock that is ahead does not empty a sliding window", async () => {
    for (const window of ["sliding-log", "sliding-parts"] as const) {
      const q = quota(hf, { name: named(), limit: 10, per: "hour", window });
      for (let i = 0; i < 10; i++) await q.consume("u");
      await withClock(2 * hour, () => q.prune({ before: new Date(Date.now()) }));
      expect(await q.tryConsume("u"), window).toMatchObject({ granted: false, used: 10 });
      expect((await q.history("u")).entries.length, window).toBe(10);
      await withClock(2 * hour, () => q.prune({ olderThanMs: 0 }));
      expect((await q.history("u")).entries.length, window).toBe(10);
    }
  });

  test("of a window in parts, what is counted for up to a part longer stays too", async () => {
    const q = quota(hf, { name: named(), limit: 10, per: "hour", window: "sliding-parts", parts: 4 });
    await q.consume("u", 3);
    await earlier(q, "1 hour");
    await q.consume("u", 1);
    await q.consume("u", 1);
    expect(await q.prune({ before: new Date(Date.now() + day) })).toEqual({ entries: 0, broken: [] });
    await whole(q, "u");
    await earlier(q, "15 minutes");
    expect(await q.prune({ before: new Date(Date.now() + day) })).toEqual({ entries: 1, broken: [] });
    await whole(q, "u");
  });

  test("by age: by the database's clock alone", async () => {
    const q = quota(hf, { name: named(), limit: 10 });
    for (let i = 0; i < 4; i++) await q.consume("u");
    await age(q, "version < 3", "50 minutes");
    expect(await withClock(hour, () => q.prune({ olderThanMs: hour }))).toEqual({ entries: 0, broken: [] });
    await age(q, "version < 2", "20 minutes");
    expect(await withClock(-hour, () => q.prune({ olderThanMs: hour }))).toEqual({ entries: 1, broken: [] });
    for (const wrong of [
      {},
      { before: new Date(), olderThanMs: 1 },
      { before: new Date(NaN) },
      { olderThanMs: -1 },
    ])
      await expect(q.prune(wrong as never), JSON.stringify(wrong)).rejects.toMatchObject({
        code: "HF_USAGE",
      });
    expect(await q.prune({ before: new Date(-8.64e15) })).toEqual({ entries: 0, broken: [] });
  });

  test("steps over what it has rolled up once, and not once for every two thousand", async () => {
    const q = quota(hf, { name: named(), limit: 1_000_000 });
    const lines = 30_000;
    await q.consume("u");
    await pool.query(
      `INSERT INTO holdfast.quota_line (bucket, version, amount, used, at, kind, id)
        SELECT b.id, n, 1, n, clock_timestamp() - interval '90 days', 'consume', 'id-' || n
        FROM holdfast.quota_bucket b, generate_series(2, ${lines}) n WHERE ${bucketOf(q)};
      UPDATE holdfast.quota_bucket SET used = ${lines}, version = ${lines} WHERE ${bucketOf(q)}`,
    );
    await age(q, "version = 1");
    await pool.query("VACUUM ANALYZE holdfast.quota_line");
    // Somebody's long transaction: what is deleted meanwhile stays in the index, and nobody may forget it.
    const reader = await pool.connect();
    const other = new Pool({ connectionString: database.url, max: 1, application_name: "pruner" });
    const readers = async (): Promise<number> => {
      const { rows } = await pool.query<{ n: number }>(
        "SELECT sum(idx_tup_read)::int AS n FROM pg_stat_user_indexes WHERE relname = 'quota_line'",
      );
      return rows[0]?.n as number;
    };
    /** A session tells what it has read when it ends, at the latest. */
    const gone = () =>
      eventually(async () => {
        const { rows } = await pool.query("SELECT FROM pg_stat_activity WHERE application_name = 'pruner'");
        return rows.length === 0;
      });
    try {
      await reader.query("BEGIN ISOLATION LEVEL REPEATABLE READ");
      await reader.query("SELECT count(*) FROM holdfast.quota_line");
      await pool.query("SELECT pg_stat_force_next_flush()");
      const before = await readers();
      const far = holdfast(fromPg(other));
      const it = quota(far, { name: q.name, limit: 1_000_000 });
      expect(await it.prune({ before: monthAgo() })).toEqual({ entries: lines - 1, broken: [] });
      expect(await it.prune({ before: monthAgo() })).toEqual({ entries: 0, broken: [] });
      await far.close();
      await other.end();
      await gone();
      // Each line is looked at four times, 120,000 in all; from the beginning again and again it was 1.3 million.
      expect((await readers()) - before).toBeLessThan(20 * lines);
    } finally {
      await reader.query("ROLLBACK");
      reader.release();
    }
    await whole(q, "u");
  });

  test("while others use it, and look at it: nobody finds anything wrong", async () => {
    const q = quota(hf, { name: named(), limit: 1_000_000 });
    await Promise.all(Array.from({ length: 3000 }, (_, i) => q.consume(`s${i % 3}`)));
    await age(q);
    let done = false;
    const looking = Array.from({ length: 3 }, async (_, i) => {
      for (let n = 0; n === 0 || !done; n++) await whole(q, `s${i}`);
    });
    const working = Promise.all([
      q.prune({ before: monthAgo() }),
      q.prune({ before: monthAgo() }),
      ...Array.from({ length: 300 }, (_, i) => q.consume(`s${i % 3}`)),
    ]).finally(() => (done = true));
    await Promise.all([working, ...looking]);
    for (const subject of ["s0", "s1", "s2"]) expect(await q.peek(subject)).toMatchObject({ used: 1100 });
  });
});

describe("no limit", () => {
  const kinds: readonly Omit<QuotaOptions, "name" | "limit">[] = [
    {},
    { per: "year" },
    { per: "hour", window: "refill" },
    { per: "hour", window: "sliding-log" },
    { per: "hour", window: "sliding-parts" },
  ];

  test.for(kinds)("in %j: of the quota, of a plan, of a subject's own", async (rule) => {
    const all = quota(hf, { ...rule, name: named(), limit: Infinity });
    expect(await all.consume("u", 1000)).toMatchObject({ limit: Infinity, remaining: Infinity });
    expect(await all.consume("u", 1000)).toMatchObject({ limit: Infinity, over: 0 });
    expect(await all.peek("u")).toMatchObject({ limit: Infinity });
    await whole(all, "u");

    const q = quota(hf, {
      ...rule,
      name: named(),
      limit: { plans: { free: 3, all: Infinity }, default: "free" },
    });
    await q.consume("u", 3);
    expect(await q.tryConsume("u", 1)).toMatchObject({ granted: false, limit: 3 });
    expect(await q.setPlan("u", "all")).toMatchObject({ limit: Infinity });
    expect(await q.consume("u", 1000)).toMatchObject({ granted: true, limit: Infinity, over: 0 });
    const batch = await Promise.all(Array.from({ length: 50 }, () => q.consume("u", 10)));
    for (const answer of batch) expect(answer).toMatchObject({ limit: Infinity, remaining: Infinity });
    const hold = await q.hold("u", 100);
    expect(await hold.settle(1000)).toMatchObject({ limit: Infinity });
    await q.setPlan("u", undefined);
    await q.reset("u");
    expect(await q.tryConsume("u", 4)).toMatchObject({ granted: false, limit: 3 });

    expect(await q.setLimit("u", Infinity, { id: "more" })).toMatchObject({ limit: Infinity });
    expect(await q.setLimit("u", Infinity, { id: "more" })).toMatchObject({ limit: Infinity });
    expect((await q.history("u", { limit: 1 })).entries[0]).toMatchObject({
      kind: "limit",
      amount: Infinity,
      limit: undefined,
    });
    expect(await q.consume("u", 1000)).toMatchObject({ limit: Infinity });
    expect(await q.setLimit("u", undefined)).toMatchObject({ limit: 3 });
    expect(await q.tryConsume("u", 4)).toMatchObject({ granted: false, limit: 3 });
    await whole(q, "u");
  });

  test("nor is more counted than can be: whole numbers are exact up to 2^53 - 1", async () => {
    for (const limit of [Infinity, Number.MAX_SAFE_INTEGER]) {
      const q = quota(hf, { name: named(), limit, over: 1000 });
      await q.consume("u", Number.MAX_SAFE_INTEGER - 1);
      expect(await q.tryConsume("u", 2), String(limit)).toMatchObject({ granted: false });
      expect(await q.consume("u", 1), String(limit)).toMatchObject({ used: Number.MAX_SAFE_INTEGER });
    }
  });
});

describe("reconcile", () => {
  /** Several instances, each with connections of its own. */
  async function several<T>(count: number, work: (all: readonly Holdfast<PoolClient>[]) => Promise<T>) {
    const pools = Array.from({ length: count }, () => new Pool({ connectionString: database.url, max: 3 }));
    const instances = pools.map((each) => holdfast(fromPg(each)));
    try {
      return await work(instances);
    } finally {
      for (const each of instances) await each.close();
      for (const each of pools) await each.end();
    }
  }

  const sum = (numbers: readonly number[]) => numbers.reduce((total, each) => total + each, 0);

  test("100 repairs, each with uses around it: none is lost, and the limit holds", async () => {
    const limit = 20;
    await several(5, async (instances) => {
      const name = named();
      const all = instances.map((each) => quota(each, { name, limit }));
      const [q] = all as [Quota];
      for (let round = 0; round < 100; round++) {
        const subject = `s${round}`;
        await q.consume(subject, 5);
        // Too much, so that all are refused until it is mended; or too little.
        const much = round % 2 === 0;
        await pool.query(
          `UPDATE holdfast.quota_bucket SET used = ${much ? 1000 : 2} WHERE ${bucketOf(q)} AND subject = $1`,
          [subject],
        );
        const granted = await Promise.all(
          all.map(async (each, i) => {
            let n = 0;
            for (let k = 0; k < 6; k++) {
              if (k === 2 && i < 3) await each.reconcile(subject, { repair: true });
              if ((await each.tryConsume(subject)).granted) n++;
            }
            return n;
          }),
        );
        const hint = `round ${round}: ${granted.join()}`;
        const { used } = await q.peek(subject);
        const { entries } = await q.history(subject, { limit: 1000 });
        expect(entries.filter(({ kind }) => kind === "repair").length, hint).toBe(1);
        expect(used, hint).toBe(5 + sum(granted));
        // Of too little, more was granted before it was mended.
        if (much) expect(used, hint).toBeLessThanOrEqual(limit);
        await whole(q, subject, hint);
      }
    });
  });

  test("an entry is missing, and others use it: what was used is used", async () => {
    await several(5, async (instances) => {
      const name = named();
      const limit = 1000;
      const all = instances.map((each) => quota(each, { name, limit }));
      const [q] = all as [Quota];
      for (let round = 0; round < 40; round++) {
        const subject = `s${round}`;
        for (let i = 0; i < 3; i++) await q.consume(subject, 5);
        await pool.query(
          `DELETE FROM holdfast.quota_line WHERE version = 2 AND bucket IN
            (SELECT id FROM holdfast.quota_bucket WHERE ${bucketOf(q)} AND subject = $1)`,
          [subject],
        );
        await Promise.all(
          all.flatMap((each) => [
            each.consume(subject),
            each.reconcile(subject, { repair: true }),
            each.consume(subject),
            each.consume(subject),
          ]),
        );
        expect(await q.peek(subject), `round ${round}`).toMatchObject({ used: 15 + 15 });
        await whole(q, subject, `round ${round}`);
      }
    });
  });

  const windows: readonly Omit<QuotaOptions, "name" | "limit">[] = [
    { per: "year" },
    { per: "year", window: "refill" },
    { per: "year", window: "sliding-log" },
    { per: "year", window: "sliding-parts" },
  ];

  test.for(windows)("%j: what was used in a window that is over is not charged to this one", async (rule) => {
    const q = quota(hf, { ...rule, name: named(), limit: 10 });
    for (let i = 0; i < 4; i++) await q.consume("u", 2);
    await earlier(q, "3 years");
    await pool.query(`DELETE FROM holdfast.quota_line WHERE version = 2 AND ${lineOf(q)}`);
    expect(await q.reconcile("u", { repair: true })).toMatchObject({
      repaired: true,
      findings: ["versions 2 to 2 are missing"],
    });
    expect(await q.peek("u")).toMatchObject({ used: 0, remaining: 10 });
    expect(await q.consume("u", 10)).toMatchObject({ used: 10 });
    await whole(q, "u");
  });

  test("parts of a sliding window are found, and mended part by part", async () => {
    const q = quota(hf, { name: named(), limit: 100, per: "day", window: "sliding-parts", parts: 24 });
    await q.grant("u", 20);
    await q.consume("u", 9);
    await q.reset("u");
    await q.consume("u", 30, { id: "old" });
    await earlier(q, "5 hours");
    await q.consume("u", 80, { id: "drains" });
    await q.refund("u", "drains", { amount: 15 });
    await q.refund("u", "old", { amount: 4 });
    const hold = await q.hold("u", 3);
    await hold.settle(2);
    await earlier(q, "3 hours");
    await q.consume("u", 6);
    await whole(q, "u");
    const bucket = async () =>
      (
        await pool.query<{ used: string; parts: string[] }>(
          `SELECT used, parts FROM holdfast.quota_bucket WHERE ${bucketOf(q)}`,
        )
      ).rows[0] as { used: string; parts: string[] };
    const right = await bucket();
    expect(right.parts.filter((part) => part !== "0").length).toBe(3);
    for (const wrong of [
      "parts[1] = 0, used = used - 6",
      "parts[1] = 50",
      "parts[9] = parts[9] + 1, parts[4] = parts[4] - 1",
      "used = 0",
      "parts = array_fill(0::bigint, ARRAY[25])",
    ]) {
      await spoil(q, wrong);
      expect(await q.reconcile("u"), wrong).toMatchObject({ ok: false, repaired: false });
      expect(await q.reconcile("u", { repair: true }), wrong).toMatchObject({ repaired: true });
      expect(await q.peek("u"), wrong).toMatchObject({ used: Number(right.used) });
      const mended = await bucket();
      // A part may have passed meanwhile.
      const passed =
        mended.parts.findIndex((part) => part !== "0") - right.parts.findIndex((part) => part !== "0");
      expect(mended.parts.slice(passed), wrong).toEqual(right.parts.slice(0, 25 - passed));
      await whole(q, "u", wrong);
    }
    // A line that is missing: what it came to is still in the figures that follow it.
    await pool.query(`DELETE FROM holdfast.quota_line WHERE id = 'old' AND ${lineOf(q)}`);
    await spoil(q, "used = 1");
    expect(await q.reconcile("u", { repair: true })).toMatchObject({ repaired: true });
    expect(await q.peek("u")).toMatchObject({ used: Number(right.used) });
    await whole(q, "u");
    // What is rolled up within the window is taken for what it is.
    await pool.query(`UPDATE holdfast.quota_line SET at = at - interval '90 days' WHERE ${lineOf(q)}`);
    await quota(hf, { name: q.name, limit: 100 }).prune({ before: monthAgo() });
    await whole(q, "u");
  });

  test("what is held and what is credited are found, and mended", async () => {
    const q = quota(hf, { name: named(), limit: 10 });
    await q.grant("u", 20, { id: "gift" });
    const hold = await q.hold("u", 7);
    await q.consume("u", 8);
    await whole(q, "u");
    for (const [wrong, finding] of [
      ["held = 0", "the bucket has 0 held, the ledger 7, and its holds come to 7"],
      ["held = 500", "the bucket has 500 held, the ledger 7, and its holds come to 7"],
      ["credit = 0", "the bucket has 0 of credit, the ledger 20, and its grants come to 20"],
      ["credit = 500", "the bucket has 500 of credit, the ledger 20, and its grants come to 20"],
    ] as const) {
      await spoil(q, wrong);
      expect((await q.reconcile("u")).findings).toEqual([finding]);
      expect(await q.reconcile("u", { repair: true })).toMatchObject({ repaired: true, findings: [finding] });
      expect(await q.peek("u")).toMatchObject({ used: 8, held: 7, credit: 20, remaining: 15 });
      await whole(q, "u");
    }
    // A hold that is gone cannot end any more: what it held is free.
    await pool.query(`DELETE FROM holdfast.quota_hold WHERE ${bucketOf(q)}`);
    expect((await q.reconcile("u", { repair: true })).findings).toEqual([
      "the bucket has 7 held, the ledger 7, and its holds come to 0",
    ]);
    await expect(hold.settle(7)).rejects.toMatchObject({ code: "HF_QUOTA_UNKNOWN" });
    expect(await q.consume("u", 22)).toMatchObject({ used: 10, held: 0, credit: 0 });
    expect(await q.tryConsume("u", 1)).toMatchObject({ granted: false });
    await whole(q, "u");
  });

  test("a line that says something else of what was held or credited is found by its version", async () => {
    const q = quota(hf, { name: named(), limit: 10 });
    await q.grant("u", 20);
    await q.hold("u", 7);
    await q.consume("u", 1);
    await pool.query(
      `UPDATE holdfast.quota_line SET held = 6, credit = 21 WHERE version = 2 AND ${lineOf(q)}`,
    );
    expect((await q.reconcile("u")).findings).toEqual([
      "version 3: 6 held before, and 7 after consume of 1",
      "version 2: 0 held before, and 6 after hold of 7",
    ]);
  });

  const hands: readonly Omit<QuotaOptions, "name" | "limit">[] = [
    {},
    { per: "year" },
    { per: "year", window: "sliding-log" },
    { per: "year", window: "sliding-parts" },
  ];

  test.for(hands)("%j: what was used after it was changed by hand counts by its amount", async (rule) => {
    for (const wrong of ["used = 2", "used = 90"]) {
      const q = quota(hf, { ...rule, name: named(), limit: 100 });
      await q.consume("u", 5);
      await earlier(q, "3 years");
      await q.consume("u", 5);
      await q.consume("u", 5, { id: "back" });
      await spoil(q, wrong);
      if (rule.window === "sliding-parts") await spoil(q, "parts[1] = used");
      await q.consume("u", 4);
      await q.refund("u", "back", { amount: 2 });
      await q.consume("u", 1);
      await q.reconcile("u", { repair: true });
      expect(await q.peek("u"), wrong).toMatchObject({ used: (rule.per ? 0 : 5) + 13 });
      await whole(q, "u");
    }
  });

  test("a bucket that is behind its ledger, or ahead of it, goes on after both", async () => {
    const q = quota(hf, { name: named(), limit: 10, per: "year" });
    for (let i = 0; i < 5; i++) await q.consume("u");
    for (const wrong of ["version = 2, used = 2", "version = 70", "since = since + interval '5 days'"]) {
      await spoil(q, wrong);
      expect(await q.reconcile("u", { repair: true }), wrong).toMatchObject({ repaired: true });
      expect(await q.peek("u"), wrong).toMatchObject({ used: 5 });
      await whole(q, "u", wrong);
    }
    expect(await q.consume("u")).toMatchObject({ used: 6 });
    await whole(q, "u");
  });

  test("a process of an earlier release asks for a figure, and gets what the ledger says", async () => {
    const q = quota(hf, { name: named(), limit: 10 });
    await q.consume("u", 5);
    await spoil(q, "used = 1");
    const { rows } = await pool.query(
      "SELECT verdict, used::int FROM holdfast.quota_amend($1, 'repair', $2, 'u', 10, 'an id', NULL, 3, '{}', NULL)",
      [JSON.stringify({ window: "none", over: 0 }), q.name],
    );
    expect(rows).toEqual([{ verdict: 1, used: 5 }]);
    await whole(q, "u");
  });

  test("a repair whose answer was lost is told, and not made twice", async () => {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const near = new Pool({ connectionString: proxy.url(database.url), max: 2 });
    near.on("error", () => {});
    const far = holdfast(fromPg(near));
    const q = quota(far, { name: named(), limit: 10 });
    try {
      await q.consume("u", 5);
      await spoil(q, "used = 9");
      let times = 0;
      proxy.cutWhen((direction, chunk) =>
        direction === "to-server" && chunk.includes("quota_mend") && ++times === 1 ? "drop-answer" : "pass",
      );
      expect(await q.reconcile("u", { repair: true })).toEqual({
        ok: false,
        entries: 1,
        findings: ["the bucket counts 9 used, the ledger 5"],
        repaired: true,
      });
      expect(times).toBe(2);
      proxy.cutWhen(undefined);
      const { entries } = await q.history("u");
      expect(entries).toMatchObject([
        { kind: "repair", used: 5, metadata: { findings: ["the bucket counts 9 used, the ledger 5"] } },
        { kind: "consume", used: 5 },
      ]);
    } finally {
      await far.close();
      await near.end();
      await proxy.close();
    }
  });

  test("whatever is changed by hand: a repair brings back what was", async () => {
    const seed = inject("seed");
    const next = random(seed);
    const below = (most: number) => Math.floor(next() * most);
    const rules: readonly Omit<QuotaOptions, "name" | "limit">[] = [{}, ...windows];
    const figure = () => [0, 1, 5, 1000][below(4)] as number;
    for (const [i, rule] of rules.entries()) {
      const q = quota(hf, {
        ...rule,
        name: named(),
        limit: { plans: { free: 60, pro: 90 }, default: "free" },
      });
      for (let round = 0; round < 12; round++) {
        const subject = `s${round}`;
        const holds: string[] = [];
        for (let k = 0; k < 12; k++) {
          const id = `${round}-${k}`;
          const what = below(6);
          if (what < 2) await q.tryConsume(subject, 1 + below(20), { id });
          else if (what === 2) await q.grant(subject, 1 + below(20), { id });
          else if (what === 3) {
            const held = await q.hold(subject, 1 + below(5), { id }).catch(() => undefined);
            if (held) holds.push(held.id);
          } else if (what === 4 && holds.length > 0) await q.release(subject, holds.pop() as string);
          else if (next() < 0.3) await q.reset(subject);
          else await q.refund(subject, `${round}-${below(k + 1)}`, { amount: 1 }).catch(() => {});
        }
        const { at: _, resetAt: __, ...before } = await q.peek(subject);
        const hint = `HOLDFAST_SEED=${seed} rule ${i} ${subject}`;
        await whole(q, subject, hint);
        const wrong = ["used", "held", "credit", "version"].map((name) => `${name} = ${figure()}`);
        if (next() < 0.5) wrong.push("since = since + interval '3 days'");
        if (next() < 0.5) wrong.push(`parts[${1 + below(5)}] = ${figure()}`);
        await pool.query(
          `UPDATE holdfast.quota_bucket SET ${rule.window === "sliding-parts" ? wrong.join() : wrong.filter((each) => !each.startsWith("parts")).join()}
          WHERE ${bucketOf(q)} AND subject = $1`,
          [subject],
        );
        await q.reconcile(subject, { repair: true });
        const { at: ___, resetAt: ____, ...after } = await q.peek(subject);
        // Of a window that refills, some may be back by now.
        if (rule.window === "refill") expect(after.used, hint).toBeLessThanOrEqual(before.used);
        else expect(after, hint).toEqual(before);
        expect({ held: after.held, credit: after.credit }, hint).toEqual({
          held: before.held,
          credit: before.credit,
        });
        await whole(q, subject, hint);
      }
    }
  });
});
