/** Quotas, on real servers: what each call does, and what many of them at once come to. */
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Quota, QuotaError, QuotaExceededError, quota } from "holdfast/quota";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { eventually } from "./harness/wait.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { startProxy } from "./harness/proxy.ts";

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

/** Lines of the ledger are stored by their bucket's number. */
const lineOf = ({ name }: Quota) =>
  `bucket IN (SELECT id FROM holdfast.quota_bucket WHERE quota = '${name}')`;

let made = 0;
const named = () => `q${++made}`;

/** The chain is whole, and what is counted is what the entries say. */
async function whole(of: Quota, subject: string): Promise<void> {
  expect(await of.reconcile(subject)).toMatchObject({ ok: true, findings: [] });
}

describe("a limit for good", () => {
  test("100 of 100, and not 101", async () => {
    const uploads = quota(hf, { name: named(), limit: 100 });
    const answers = await Promise.all(Array.from({ length: 150 }, () => uploads.tryConsume("ada")));
    expect(answers.filter(({ granted }) => granted).length).toBe(100);
    expect(await uploads.peek("ada")).toMatchObject({ used: 100, limit: 100, remaining: 0 });
    expect(await uploads.peek("bob")).toMatchObject({ used: 0, remaining: 100 });
    await whole(uploads, "ada");
  });

  test("who asks for more than is left is told how it stands, and nothing is used", async () => {
    const uploads = quota(hf, { name: named(), limit: 10 });
    await uploads.consume("ada", 7);
    const error: unknown = await uploads.consume("ada", 4).catch((e: unknown) => e);
    expect(error).toBeInstanceOf(QuotaExceededError);
    expect(error).toMatchObject({
      code: "HF_QUOTA_EXCEEDED",
      used: 7,
      limit: 10,
      remaining: 3,
      retryAfter: undefined,
    });
    expect(await uploads.consume("ada", 3)).toMatchObject({ granted: true, used: 10, remaining: 0 });
  });

  test("subjects may be anything", async () => {
    const any = quota(hf, { name: named(), limit: 1 });
    const subjects = [
      "a",
      "a\0b",
      '{"a":1}',
      { a: 1 },
      { a: 1, b: "x" },
      "x".repeat(5000),
      "é",
      "'; DROP",
      7,
      "  ",
    ];
    for (const subject of subjects) expect(await any.consume(subject)).toMatchObject({ used: 1 });
    expect(await any.tryConsume({ b: "x", a: 1 })).toMatchObject({ granted: false });
    await expect(any.consume("")).rejects.toThrow("empty");
    await expect(any.consume({ user: "" })).rejects.toThrow("empty");
  });
});

test("a call is one round trip, granted, repeated or refused", async () => {
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  const near = new Pool({ connectionString: proxy.url(database.url), max: 1 });
  const q = quota(holdfast(fromPg(near)), { name: named(), limit: 2, per: "day" });
  try {
    await q.consume("u", 1, { id: "first" });
    for (const id of ["second", "second", "too many"]) {
      proxy.resetCount();
      await q.tryConsume("u", 1, { id });
      expect(proxy.roundTrips, id).toBe(1);
    }
  } finally {
    await near.end();
    await proxy.close();
  }
});

test("a batch that was granted unheard and never got through again: sent one by one, all are granted", async () => {
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  const near = new Pool({ connectionString: proxy.url(database.url), max: 4 });
  near.on("error", () => {});
  const q = quota(holdfast(fromPg(near)), { name: named(), limit: 3 });
  let times = 0;
  proxy.cutWhen((direction, chunk) => {
    if (direction === "to-client" || !chunk.includes("unheard of")) return "pass";
    times++;
    return times === 1 ? "drop-answer" : times <= 5 ? "cut-before" : "pass";
  });
  try {
    // While the first is under way, the others come together.
    const [, ...answers] = await Promise.all([
      q.tryConsume("somebody else"),
      ...Array.from({ length: 3 }, () => q.tryConsume("unheard of")),
    ]);
    expect(answers.map(({ granted }) => granted)).toEqual([true, true, true]);
    expect(times).toBe(7);
    expect(await q.peek("unheard of")).toMatchObject({ used: 3 });
    await whole(q, "unheard of");
  } finally {
    await near.end();
    await proxy.close();
  }
});

describe("a transaction delays those who want the same subject, not those who were sent together with them", () => {
  for (const known of [true, false])
    test(`${known ? "one that was there" : "one that it has made"}; and nobody deadlocks`, async () => {
      const name = named();
      // In a deadlock, it is the transaction that would find it.
      const theirs = new Pool({ connectionString: database.url, options: "-c deadlock_timeout=5s" });
      const ours = new Pool({ connectionString: database.url, max: 6, options: "-c deadlock_timeout=60s" });
      const other = holdfast(fromPg(theirs));
      const slow = quota(other, { name, limit: 100 });
      const q = quota(holdfast(fromPg(ours)), { name, limit: 100 });
      const before = known ? 1 : 0;
      if (known) for (const subject of ["a", "b", "m"]) await q.consume(subject);
      const client = await theirs.connect();
      try {
        await client.query("BEGIN");
        const tx = other.join(client);
        await slow.consume("m", 1, { tx });
        // While the first is under way, the others come together.
        const [first, a, m, b, again] = ["first", "a", "m", "b", "m"].map((subject) => q.consume(subject));
        let through = false;
        const same = Promise.all([m, again]).finally(() => (through = true));
        await eventually(waits);
        expect(await slow.consume("a", 1, { tx })).toMatchObject({ granted: true });
        expect(await b).toMatchObject({ used: before + 1 });
        // Who comes later is behind those who wait already.
        const later = q.consume("m");
        const enough = new AbortController();
        const impatient = q.consume("m", 1, { signal: enough.signal });
        enough.abort(new Error("enough"));
        await expect(impatient).rejects.toThrow("enough");
        expect(await q.consume("c")).toMatchObject({ used: 1 });
        expect(through).toBe(false);
        await client.query("COMMIT");
        expect((await same).map((answer) => answer?.used)).toEqual([before + 2, before + 3]);
        expect(await later).toMatchObject({ used: before + 4 });
        await Promise.all([first, a]);
        expect(await q.peek("a")).toMatchObject({ used: before + 2 });
        for (const subject of ["a", "b", "m"]) await whole(q, subject);
      } finally {
        client.release(true);
        await theirs.end();
        await ours.end();
      }
    });

  test("nor does the ledger's roll-up hold any while it waits", async () => {
    const name = named();
    const slow = new Pool({ connectionString: database.url, options: "-c deadlock_timeout=5s" });
    const other = holdfast(fromPg(slow));
    const near = new Pool({ connectionString: database.url, options: "-c deadlock_timeout=60s" });
    const [theirs, q] = [other, holdfast(fromPg(near))].map((each) => quota(each, { name, limit: 100 })) as [
      Quota,
      Quota,
    ];
    for (const subject of ["a", "a", "a", "m", "m", "m"]) await q.consume(subject);
    await pool.query(`UPDATE holdfast.quota_line SET at = at - interval '60 days' WHERE ${lineOf(q)}`);
    const client = await slow.connect();
    try {
      await client.query("BEGIN");
      const tx = other.join(client);
      await theirs.consume("m", 1, { tx });
      const pruned = q.prune({ before: new Date(Date.now() - 30 * 86_400_000) });
      await eventually(waits);
      expect(await theirs.consume("a", 1, { tx })).toMatchObject({ used: 4 });
      await client.query("COMMIT");
      expect(await pruned).toMatchObject({ broken: [] });
      expect((await q.history("m")).entries.at(-1)).toMatchObject({ kind: "rollup" });
      for (const subject of ["a", "m"]) await whole(q, subject);
    } finally {
      client.release(true);
      await slow.end();
      await near.end();
    }
  });
});

/** Whether somebody waits for somebody. */
async function waits(): Promise<boolean> {
  const { rows } = await pool.query(
    "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
  );
  return rows.length > 0;
}

describe("ids", () => {
  test("the same id is applied once, and answered again", async () => {
    const q = quota(hf, { name: named(), limit: 3 });
    const first = await q.consume("u", 2, { id: "one" });
    const again = await q.consume("u", 2, { id: "one" });
    expect(again).toEqual({ ...first, replayed: true });
    await expect(q.consume("u", 1, { id: "one" })).rejects.toThrow(QuotaError);
    expect(await q.peek("u")).toMatchObject({ used: 2 });
    await whole(q, "u");
  });

  test("twice in one batch, and after a refusal it is a fresh attempt", async () => {
    const q = quota(hf, { name: named(), limit: 5 });
    const all = await Promise.all(
      Array.from({ length: 60 }, (_, i) => q.tryConsume("u", 1, { id: `id${i % 20}` })),
    );
    const won = new Set(all.flatMap((each) => (each.granted ? [each.id] : [])));
    expect(won.size).toBe(5);
    expect(await q.peek("u")).toMatchObject({ used: 5 });
    const lost = Array.from({ length: 20 }, (_, i) => `id${i}`).find((id) => !won.has(id)) as string;
    await q.refund("u", [...won][0] as string);
    expect(await q.consume("u", 1, { id: lost })).toMatchObject({ granted: true, replayed: false });
    await whole(q, "u");
  });

  test("at the last unit 8 callers with one id get 8 identical grants", async () => {
    const others = await Promise.all(
      Array.from({ length: 8 }, async () => {
        const own = new Pool({ connectionString: database.url, max: 2 });
        return { own, hf: holdfast(fromPg(own)) };
      }),
    );
    const name = named();
    try {
      const quotas = others.map((each) => quota(each.hf, { name, limit: 1 }));
      for (let round = 0; round < 500; round++) {
        const answers = await Promise.all(
          quotas.map((each) => each.consume(`u${round}`, 1, { id: "the one" })),
        );
        const [{ replayed: _, ...first }] = answers as [(typeof answers)[0]];
        for (const { replayed: __, ...each } of answers) expect(each).toEqual(first);
        expect(answers.filter(({ replayed }) => !replayed).length).toBe(1);
      }
    } finally {
      for (const { own, hf: mine } of others) {
        await mine.close();
        await own.end();
      }
    }
  });
});

describe("giving back", () => {
  test("a refund is pinned to its entry, and never more than it", async () => {
    const q = quota(hf, { name: named(), limit: 10 });
    const { id } = await q.consume("u", 6);
    expect(await q.refund("u", id, { amount: 2, id: "r1" })).toMatchObject({ used: 4, amount: 2 });
    expect(await q.refund("u", id, { amount: 2, id: "r1" })).toMatchObject({ used: 4, replayed: true });
    await expect(q.refund("u", id, { amount: 5 })).rejects.toMatchObject({ code: "HF_QUOTA_TOO_MUCH" });
    expect(await q.refund("u", id)).toMatchObject({ amount: 4, used: 0 });
    expect(await q.refund("u", id)).toMatchObject({ amount: 4, replayed: true });
    await expect(q.refund("u", "nothing")).rejects.toMatchObject({ code: "HF_QUOTA_UNKNOWN" });
    await whole(q, "u");
  });

  test("a hold is settled at what it came to, released, or runs out", async () => {
    const q = quota(hf, { name: named(), limit: 100 });
    const hold = await q.hold("u", 60);
    expect(hold).toMatchObject({ held: 60, used: 0, remaining: 40 });
    expect(await q.tryConsume("u", 50)).toMatchObject({ granted: false });
    expect(await hold.settle(35)).toMatchObject({ used: 35, held: 0, remaining: 65 });
    expect(await hold.settle(35)).toMatchObject({ used: 35, replayed: true });
    await expect(hold.settle(36)).rejects.toMatchObject({ code: "HF_QUOTA_ID_CONFLICT" });
    await expect(hold.release()).rejects.toMatchObject({ code: "HF_QUOTA_UNKNOWN" });
    const more = await q.hold("u", 20);
    expect(await more.settle(65)).toMatchObject({ used: 100 });
    await q.refund("u", `settle:${more.id}`);
    const tooFar = await q.hold("u", 10);
    await expect(tooFar.settle(66)).rejects.toThrow(QuotaExceededError);
    await tooFar.release();
    await tooFar.release();
    await q.hold("u", 65, { holdFor: 1 });
    await new Promise((resolve) => setTimeout(resolve, 20));
    // What ran out makes room when it is needed; nobody has to do it before.
    expect(await q.consume("u", 65)).toMatchObject({ used: 100, held: 0 });
    const { entries } = await q.history("u");
    expect(entries.map(({ kind }) => kind)).toEqual([
      "consume",
      "expire",
      "hold",
      "release",
      "hold",
      "refund",
      "settle",
      "hold",
      "settle",
      "hold",
    ]);
    await whole(q, "u");
  });
});

describe("credits", () => {
  test("are used after the limit: by priority, then what expires first; and a refund gives them back", async () => {
    const q = quota(hf, { name: named(), limit: 10 });
    const soon = new Date(Date.now() + 60_000);
    await q.grant("u", 5, { id: "late", priority: 1 });
    await q.grant("u", 5, { id: "soon", priority: 1, expiresAt: soon });
    await q.grant("u", 5, { id: "first", priority: 0 });
    await q.grant("u", 5, { id: "first", priority: 0 });
    expect(await q.peek("u")).toMatchObject({ credit: 15, remaining: 25 });
    const { id } = await q.consume("u", 18);
    const spent = async () =>
      Object.fromEntries(
        (
          await pool.query("SELECT id, spent::int FROM holdfast.quota_grant WHERE quota = $1 ORDER BY id", [
            q.name,
          ])
        ).rows.map((row: { id: string; spent: number }) => [row.id, row.spent]),
      );
    expect(await spent()).toEqual({ first: 5, soon: 3, late: 0 });
    expect(await q.peek("u")).toMatchObject({ used: 10, credit: 7, remaining: 7 });
    await q.refund("u", id, { amount: 4 });
    expect(await spent()).toEqual({ first: 4, soon: 0, late: 0 });
    await q.refund("u", id);
    expect(await q.peek("u")).toMatchObject({ used: 0, credit: 15 });
    await expect(q.consume("u", 26)).rejects.toMatchObject({ remaining: 25 });
    await whole(q, "u");
  });

  test("lapse when they expire", async () => {
    const q = quota(hf, { name: named(), limit: 0 });
    await q.grant("u", 5, { expiresAt: new Date(Date.now() + 2000) });
    await q.consume("u", 2);
    await eventually(async () => (await q.peek("u")).credit === 0);
    expect(await q.tryConsume("u")).toMatchObject({ granted: false, credit: 0 });
    expect(await q.peek("u")).toMatchObject({ credit: 0, remaining: 0 });
    await whole(q, "u");
  });
});

describe("limits", () => {
  test("of a plan, of the subject's own, computed", async () => {
    const q = quota(hf, { name: named(), limit: { plans: { free: 1, pro: 3 }, default: "free" } });
    await q.consume("u");
    expect(await q.tryConsume("u")).toMatchObject({ granted: false, limit: 1 });
    await q.setPlan("u", "pro");
    expect(await q.consume("u", 2)).toMatchObject({ limit: 3, used: 3 });
    await q.setLimit("u", 4);
    expect(await q.consume("u")).toMatchObject({ limit: 4 });
    await q.setLimit("u", undefined);
    await q.setPlan("u", undefined);
    expect(await q.peek("u")).toMatchObject({ limit: 1, used: 4, over: 3, remaining: 0 });
    const computed = quota(hf, { name: named(), limit: async (subject) => String(subject).length });
    await computed.consume("abc", 3);
    await expect(computed.consume("ab", 3)).rejects.toThrow(QuotaExceededError);
  });

  test("above the limit: some, or recorded", async () => {
    const some = quota(hf, { name: named(), limit: 10, over: 2 });
    expect(await some.consume("u", 12)).toMatchObject({ used: 12, over: 2 });
    expect(await some.tryConsume("u")).toMatchObject({ granted: false });
    const all = quota(hf, { name: named(), limit: 10, over: "record" });
    expect(await all.consume("u", 1000)).toMatchObject({ over: 990 });
  });

  test("several at once: all or none", async () => {
    const [org, user, burst] = [
      quota(hf, { name: named(), limit: 10 }),
      quota(hf, { name: named(), limit: 5, per: "day" }),
      quota(hf, { name: named(), limit: 100, per: "minute", window: "refill" }),
    ];
    const all = quota.all([org, user, burst]);
    const subjects = ["acme", "ada", "ada"];
    await all.consume(subjects, 4, { id: "x" });
    await all.consume(subjects, 4, { id: "x" });
    await expect(all.consume(subjects, 2)).rejects.toMatchObject({ quota: user.name, remaining: 1 });
    expect(await org.peek("acme")).toMatchObject({ used: 4 });
    await all.consume(["acme", "bob", "bob"], 5);
    expect(await all.tryConsume(["acme", "eve", "eve"], 2)).toMatchObject({
      granted: false,
      denied: { quota: org.name },
    });
    expect(await user.peek("eve")).toMatchObject({ used: 0 });
    await whole(org, "acme");
  });
});

describe("windows", () => {
  /** As if all of it had been so much earlier. */
  const shift = (q: Quota, interval: string) =>
    pool.query(
      `UPDATE holdfast.quota_bucket SET since = since - interval '${interval}' WHERE quota = '${q.name}';
      UPDATE holdfast.quota_line SET since = since - interval '${interval}' WHERE ${lineOf(q)}`,
    );

  test("fixed: a new one begins, and never goes back", async () => {
    const q = quota(hf, { name: named(), limit: 3, per: "day", timeZone: "Europe/Madrid" });
    await q.consume("u", 3);
    const denied = await q.tryConsume("u");
    expect(denied).toMatchObject({ granted: false });
    expect((denied as { retryAfter: number }).retryAfter).toBeLessThanOrEqual(25 * 3_600_000);
    expect(denied.resetAt?.getTime()).toBeGreaterThan(denied.at.getTime());
    await shift(q, "1 day");
    expect(await q.consume("u", 2)).toMatchObject({ used: 2 });
    await shift(q, "-3 days");
    expect(await q.tryConsume("u", 2)).toMatchObject({ granted: false, used: 2 });
    await whole(q, "u");
  });

  test("refill: evenly", async () => {
    const q = quota(hf, { name: named(), limit: 60, per: "1 minute", window: "refill" });
    await q.consume("u", 60);
    const denied = await q.tryConsume("u", 5);
    expect((denied as { retryAfter: number }).retryAfter).toBeGreaterThan(3000);
    expect((denied as { retryAfter: number }).retryAfter).toBeLessThanOrEqual(5000);
    await shift(q, "10 seconds");
    expect(await q.consume("u", 10)).toMatchObject({ granted: true });
    expect(await q.tryConsume("u", 10)).toMatchObject({ granted: false });
    await whole(q, "u");
  });

  test("sliding, in parts", async () => {
    const q = quota(hf, { name: named(), limit: 10, per: "10 minutes", window: "sliding-parts", parts: 10 });
    await q.consume("u", 4);
    await shift(q, "5 minutes");
    await q.consume("u", 6);
    expect(await q.tryConsume("u")).toMatchObject({ granted: false });
    await shift(q, "7 minutes");
    expect(await q.consume("u", 4)).toMatchObject({ used: 10 });
    await whole(q, "u");
  });

  test("sliding, exactly", async () => {
    const q = quota(hf, { name: named(), limit: 3, per: "1 hour", window: "sliding-log" });
    await q.consume("u", 1, { id: "a" });
    await pool.query(`UPDATE holdfast.quota_line SET at = at - interval '59 minutes' WHERE ${lineOf(q)}`);
    await q.consume("u", 2, { id: "b" });
    const denied = await q.tryConsume("u");
    expect((denied as { retryAfter: number }).retryAfter).toBeLessThanOrEqual(60_000);
    await pool.query(`UPDATE holdfast.quota_line SET at = at - interval '2 minutes' WHERE ${lineOf(q)}`);
    expect(await q.consume("u", 1)).toMatchObject({ used: 3 });
    await q.refund("u", "b");
    expect(await q.peek("u")).toMatchObject({ used: 1 });
    await whole(q, "u");
  });
});

describe("inside the caller's transaction", () => {
  test("rolled back with it", async () => {
    const q = quota(hf, { name: named(), limit: 5 });
    await expect(
      hf.transaction(async (tx) => {
        await q.consume("u", 5, { tx, id: "x" });
        expect(await q.peek("u", { tx })).toMatchObject({ used: 5 });
        throw new Error("no");
      }),
    ).rejects.toThrow("no");
    expect(await q.peek("u")).toMatchObject({ used: 0 });
    await hf.transaction((tx) => q.consume("u", 5, { tx, id: "x" }));
    await hf.transaction(async (tx) => {
      expect(await q.consume("u", 5, { tx, id: "x" })).toMatchObject({ replayed: true });
      expect(await q.tryConsume("u", 1, { tx })).toMatchObject({ granted: false });
    });
    await whole(q, "u");
  });
});

test("the ledger says who and why, page by page", async () => {
  const q = quota(hf, { name: named(), limit: 100 });
  for (let i = 0; i < 7; i++)
    await q.consume("u", 1, { by: "ada", source: "api", reference: `req-${i}`, metadata: { i } });
  const first = await q.history("u", { limit: 5 });
  expect(first.entries[0]).toMatchObject({
    kind: "consume",
    by: "ada",
    reference: "req-6",
    metadata: { i: 6 },
    used: 7,
  });
  const rest = await q.history("u", { limit: 5, before: first.next as number });
  expect([rest.entries.length, rest.next]).toEqual([2, undefined]);
});

test("what does not add up is found, and mended on request", async () => {
  const q = quota(hf, { name: named(), limit: 100 });
  await q.consume("u", 5);
  await q.consume("u", 6);
  await pool.query(`UPDATE holdfast.quota_bucket SET used = 3 WHERE quota = '${q.name}'`);
  expect(await q.reconcile("u")).toMatchObject({ ok: false, repaired: false });
  expect(await q.reconcile("u", { repair: true })).toMatchObject({ ok: false, repaired: true });
  expect(await q.peek("u")).toMatchObject({ used: 11 });
  expect(await q.reconcile("u")).toMatchObject({ ok: true, findings: [] });
  await q.consume("u", 1);
  expect(await q.reconcile("u")).toMatchObject({ ok: true, findings: [] });
});

test("what is counted is trusted on request, unless it is what the entries say", async () => {
  for (const rule of [{}, { per: "year" }, { per: "year", window: "refill" }] as const) {
    const q = quota(hf, { ...rule, name: named(), limit: 100 });
    await q.consume("u", 5);
    await q.consume("u", 6);
    await pool.query(`UPDATE holdfast.quota_bucket SET used = 3 WHERE quota = '${q.name}'`);
    expect(await q.reconcile("u", { repair: true, trust: "levels" })).toMatchObject({ repaired: true });
    expect(await q.peek("u")).toMatchObject({ used: 3 });
    await q.consume("u", 1);
    expect(await q.peek("u")).toMatchObject({ used: 4 });
    expect(await q.reconcile("u")).toMatchObject({ ok: true, findings: [] });
    expect((await q.history("u")).entries.map(({ kind, used }) => [kind, used])).toEqual([
      ["consume", 4],
      ["repair", 3],
      ["consume", 11],
      ["consume", 5],
    ]);
  }
  const q = quota(hf, { name: named(), limit: 9, per: "year", window: "sliding-parts" });
  await q.consume("u", 1);
  await pool.query(`UPDATE holdfast.quota_bucket SET used = 3 WHERE quota = '${q.name}'`);
  const repair = { repair: true, trust: "levels" } as const;
  await expect(q.reconcile("u", repair)).rejects.toThrow(/nothing but the ledger to trust/);
  // Whoever does not know the window, as the command, is told the same.
  const unknown = quota(hf, { name: q.name, limit: 9 });
  await expect(unknown.reconcile("u", repair)).rejects.toThrow(/has a window that slides.*trust the ledger/);
  await expect(q.reconcile("u", { trust: "me" as never })).rejects.toThrow(
    /trust must be "ledger" or "levels"/,
  );
});

test("a grant is shown, revoked once, and what was used of it stays used", async () => {
  const q = quota(hf, { name: named(), limit: 2 });
  const soon = new Date(Date.now() + 3_600_000);
  await q.grant("u", 5, { id: "gift", expiresAt: soon, by: "ada" });
  await q.grant("u", 7, { id: "second", priority: 1 });
  await q.consume("u", 5, { id: "use" });
  expect(await q.grants("u")).toMatchObject([
    { id: "gift", amount: 5, spent: 3, left: 2, priority: 0, expiresAt: soon, at: expect.any(Date) },
    { id: "second", amount: 7, spent: 0, left: 7, priority: 1, expiresAt: undefined },
  ]);
  expect(await q.revoke("u", "gift", { by: "bob" })).toMatchObject({
    amount: 2,
    credit: 7,
    used: 2,
    replayed: false,
  });
  expect(await q.revoke("u", "gift")).toMatchObject({ amount: 2, credit: 7, replayed: true });
  expect((await q.grants("u")).map(({ id }) => id)).toEqual(["second"]);
  expect((await q.history("u")).entries[0]).toMatchObject({
    kind: "revoke",
    of: "gift",
    amount: 2,
    by: "bob",
  });
  await expect(q.revoke("u", "never")).rejects.toMatchObject({
    code: "HF_QUOTA_UNKNOWN",
    message: expect.stringContaining("there is no grant never"),
  });
  // What came from it does not come back to it.
  expect(await q.refund("u", "use")).toMatchObject({ used: 0, credit: 7 });
  expect(await q.reconcile("u")).toMatchObject({ ok: true, findings: [] });
});

test("credits of a subject stay within what numbers hold exactly", async () => {
  const q = quota(hf, { name: named(), limit: 0 });
  const most = Number.MAX_SAFE_INTEGER;
  await q.grant("u", most - 10);
  await expect(q.grant("u", 11)).rejects.toMatchObject({
    code: "HF_QUOTA_TOO_MUCH",
    message: expect.stringContaining(`come to ${most} at the most: 10 more can be granted`),
  });
  expect(await q.grant("u", 10)).toMatchObject({ credit: most });
  expect(await q.reconcile("u")).toMatchObject({ ok: true, findings: [] });
});

test("a line that is gone, or was changed, is found by its version", async () => {
  const q = quota(hf, { name: named(), limit: 100 });
  for (let i = 0; i < 5; i++) await q.consume("u", 2, { id: `id-${i}` });
  await pool.query(`UPDATE holdfast.quota_line SET amount = 1 WHERE id = 'id-1' AND ${lineOf(q)}`);
  await pool.query(`DELETE FROM holdfast.quota_line WHERE id = 'id-3' AND ${lineOf(q)}`);
  expect((await q.reconcile("u")).findings).toEqual([
    "versions 4 to 4 are missing",
    "version 2: 2 used before, 0 forgotten, 1 more, and 4 after",
  ]);
  await pool.query(`DELETE FROM holdfast.quota_line WHERE ${lineOf(q)}`);
  expect((await q.reconcile("u")).findings).toEqual([
    "the bucket is at version 5, the ledger at 0",
    "the bucket counts 10 used, the ledger 0",
  ]);
});

describe("retention", () => {
  const age = (q: Quota, below: number) =>
    pool.query(
      `UPDATE holdfast.quota_line SET at = at - interval '90 days' WHERE version < ${below} AND ${lineOf(q)}`,
    );
  const monthAgo = () => new Date(Date.now() - 30 * 86_400_000);

  test("older lines become one, and the chain can still be checked", async () => {
    const q = quota(hf, { name: named(), limit: 1000 });
    for (let i = 0; i < 20; i++) await q.consume("u", 3, { id: `id-${i}` });
    await q.refund("u", "id-2", { amount: 2 });
    const hold = await q.hold("u", 50);
    await hold.settle(40);
    await q.grant("u", 7, { id: "gift" });
    await q.consume("other", 1, { id: "only" });
    const { version } = (await q.history("u", { limit: 1 })).entries[0] as { version: number };
    await age(q, version - 2);
    expect(await q.prune({ before: monthAgo() })).toEqual({ entries: version - 3, broken: [] });
    expect(await q.reconcile("u")).toEqual({ ok: true, entries: 4, findings: [], repaired: false });
    const { entries } = await q.history("u");
    expect(entries.at(-1)).toMatchObject({ kind: "rollup", first: 1, version: version - 3, used: 58 });
    expect(entries.map(({ kind }) => kind)).toEqual(["grant", "settle", "hold", "rollup"]);
    expect(await q.peek("u")).toMatchObject({ used: 98, credit: 7 });
    // Within the horizon a replay, beyond it a new use.
    expect(await q.consume("other", 1, { id: "only" })).toMatchObject({ replayed: true });
    expect(await q.consume("u", 3, { id: "id-19" })).toMatchObject({ replayed: false, used: 101 });
    await expect(q.refund("u", "id-3")).rejects.toMatchObject({ code: "HF_QUOTA_UNKNOWN" });
    // Once more, with the roll-up among what is old.
    await age(q, version + 1);
    expect((await q.prune({ before: monthAgo() })).entries).toBe(3);
    const rolled = (await q.history("u")).entries.at(-1);
    expect(rolled).toMatchObject({ kind: "rollup", first: 1, version, used: 98, credit: 7 });
    const { rows } = await pool.query(
      `SELECT details->'kinds'->'consume' AS consume FROM holdfast.quota_line WHERE kind = 'rollup' AND ${lineOf(q)}`,
    );
    expect(rows).toEqual([{ consume: { lines: 20, amount: 60 } }]);
    await whole(q, "u");
    expect(await q.prune({ before: monthAgo() })).toEqual({ entries: 0, broken: [] });
  });

  test("many lines and many subjects, some at a time, while others use it", async () => {
    const q = quota(hf, { name: named(), limit: 1_000_000 });
    await Promise.all(Array.from({ length: 5000 }, (_, i) => q.consume(i % 4 ? `u${i % 50}` : "hot", 1)));
    await age(q, 1_000_000);
    const using = Promise.all(Array.from({ length: 300 }, (_, i) => q.consume(`u${i % 50}`, 1)));
    const [{ entries, broken }] = await Promise.all([q.prune({ before: monthAgo() }), using]);
    expect(broken).toEqual([]);
    const { rows } = await pool.query(
      `SELECT count(*)::int AS lines, count(*) FILTER (WHERE kind = 'rollup')::int AS rolled,
        sum(CASE kind WHEN 'rollup' THEN (details->'kinds'->'consume'->>'lines')::int ELSE 1 END)::int AS uses
        FROM holdfast.quota_line WHERE ${lineOf(q)}`,
    );
    expect(rows[0]).toMatchObject({ rolled: 51, uses: 5300, lines: 5300 - entries + 51 });
    for (const subject of ["hot", "u1", "u49"]) await whole(q, subject);
  });

  test("a ledger that does not add up is left as it is", async () => {
    const q = quota(hf, { name: named(), limit: 100 });
    for (let i = 0; i < 5; i++) await q.consume("bad", 1, { id: `id-${i}` });
    for (let i = 0; i < 5; i++) await q.consume("good", 1);
    await pool.query(`DELETE FROM holdfast.quota_line WHERE id = 'id-2' AND ${lineOf(q)}`);
    await age(q, 100);
    expect(await q.prune({ before: monthAgo() })).toEqual({ entries: 4, broken: ["bad"] });
    expect((await q.reconcile("bad")).findings).toEqual(["versions 3 to 3 are missing"]);
  });

  test("what a sliding window counts is kept", async () => {
    const q = quota(hf, { name: named(), limit: 5, per: "hour", window: "sliding-log" });
    for (let i = 0; i < 5; i++) await q.consume("u");
    await pool.query(
      `UPDATE holdfast.quota_line SET at = at - interval '30 minutes' WHERE version < 5 AND ${lineOf(q)}`,
    );
    expect(await q.prune({ before: new Date() })).toEqual({ entries: 0, broken: [] });
    expect(await q.tryConsume("u")).toMatchObject({ granted: false });
  });
});
