/**
 * What patterns are given: each value is kept exactly as it was given, or refused with an error that names it. No value
 * reaches the server as something else, none comes back as the server's own error, and no two share what is kept of them.
 */
import { audited, trail } from "holdfast/audit";
import { HoldfastError, UsageError, holdfast, once } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue, queues } from "holdfast/queue";
import { quota, subjects } from "holdfast/quota";
import { pauseSchedule, runs, schedule, schedules } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { random } from "./harness/random.ts";

let database: TestDatabase;
let pool: Pool;
let hf: ReturnType<typeof holdfast<PoolClient, never>>;

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
const named = () => `input${++made}`;

const hashOf = (text: string) => `sha256:${Buffer.from(text).toString("hex").padEnd(64, "0").slice(0, 64)}`;

/** Texts that have been taken for something else somewhere. */
const texts = [
  "",
  " ",
  "a",
  "A",
  "é",
  "e\u0301",
  "\0",
  "a\0b",
  "\ud800",
  "\udfff",
  "a\ud800b",
  "\ufffd",
  "\u{1f600}",
  '"',
  '"a"',
  "{",
  '{"a":1}',
  '{"a":"1"}',
  "[",
  '["a"]',
  "null",
  "NULL",
  "{}",
  "1",
  "1.0",
  "01",
  "-1",
  "NaN",
  "Infinity",
  "toString",
  "__proto__",
  "constructor",
  "'; DROP TABLE x; --",
  "\\",
  "\\u0000",
  "a,b",
  'a"b',
  "settle:h1",
  "release:h1",
  "refund:h1",
  "rollup:2",
  "revoke:g1",
  "expire:3:h",
  "lapse:3:g",
  "opening:",
  "opening",
  "commit:r9",
  "return:r9",
  "sha256:",
  hashOf("x"),
  "x".repeat(400),
  "x".repeat(401),
  "x".repeat(5000),
  "é".repeat(300),
  "\r\n\t",
];

const numbers = [
  0,
  -0,
  1,
  -1,
  0.5,
  1e15,
  1e21,
  2 ** 31,
  2 ** 53,
  Number.MAX_SAFE_INTEGER,
  -Number.MAX_SAFE_INTEGER,
  Number.NaN,
  Infinity,
  -Infinity,
  Number.MIN_VALUE,
];

const dates = [
  new Date(Number.NaN),
  new Date(8.64e15),
  new Date(-8.64e15),
  new Date(0),
  new Date("0001-01-01"),
  new Date("1000-01-01"),
  new Date("9999-12-30"),
  new Date("+010000-01-01"),
];

const others: unknown[] = [
  undefined,
  null,
  true,
  [],
  ["a"],
  [["a"]],
  {},
  { a: 1 },
  { a: "1" },
  { b: 1, a: 1 },
  { a: 1, b: 1 },
  { a: Number.NaN },
  { a: "\ud800" },
  { "\ud800": 1 },
  { a: "a\0b" },
  { a: null },
  // Neither has a text.
  { toString: 1 },
  { constructor: { name: { toString: 1 } }, toString: 1, valueOf: 1 },
  { a: undefined },
  { a: 1n },
  10n ** 30n,
  1n,
  Symbol("s"),
  () => 1,
  new Map([["a", 1]]),
  /x/,
];

/** One of these, or something that was put together of them. */
function any(next: () => number): unknown {
  const pick = <T>(from: readonly T[]): T => from[Math.floor(next() * from.length)] as T;
  const kind = next();
  if (kind < 0.35) return pick(texts);
  if (kind < 0.5) return pick(numbers);
  if (kind < 0.6) return pick(dates);
  if (kind < 0.8) return pick(others);
  if (kind < 0.9) return `${pick(texts)}${pick(texts)}`;
  if (kind < 0.95) return { [pick(texts)]: pick([...texts, ...numbers]) };
  return [pick(texts), pick(numbers)];
}

async function outcomeOf(call: () => unknown): Promise<{ value?: unknown; error?: unknown }> {
  try {
    return { value: await call() };
  } catch (error) {
    return { error };
  }
}

/** It is an answer, or an error of ours that says what is wrong with what was given. */
function expectOurs({ error }: { error?: unknown }, what: string): void {
  if (error !== undefined) expect(error, what).toBeInstanceOf(HoldfastError);
}

const shown = (value: unknown) => {
  try {
    return typeof value === "bigint" ? `${value}n` : (JSON.stringify(value) ?? String(value));
  } catch {
    return String(value);
  }
};

type Call = (value: never, name: string) => unknown;

/** Every argument that is kept, sent or looked for. */
const calls: Record<string, Call> = {
  "quota name": (v) => quota(hf, { name: v, limit: 1 }).peek("a"),
  "quota limit": (v, name) => quota(hf, { name, limit: v }).peek("a"),
  "quota default plan": (v, name) => quota(hf, { name, limit: { plans: { a: 1 }, default: v } }).peek("a"),
  "quota plan's name": (v, name) =>
    quota(hf, { name, limit: { plans: { [typeof v === "string" ? v : "x"]: 1, b: 1 }, default: "b" } }).peek(
      "a",
    ),
  "quota per": (v, name) => quota(hf, { name, limit: 5, per: v }).consume("a"),
  "quota timeZone": (v, name) => quota(hf, { name, limit: 5, per: "day", timeZone: v }).consume("a"),
  "quota over": (v, name) => quota(hf, { name, limit: 5, over: v }).consume("a"),
  "quota subject": (v, name) => quota(hf, { name, limit: 9 }).consume(v),
  "quota amount": (v, name) => quota(hf, { name, limit: 9 }).tryConsume("a", v),
  "quota id": (v, name) => quota(hf, { name, limit: 9 }).consume("a", 1, { id: v }),
  "quota by": (v, name) => quota(hf, { name, limit: 9 }).consume("a", 1, { by: v }),
  "quota source": (v, name) => quota(hf, { name, limit: 9 }).consume("a", 1, { source: v }),
  "quota reference": (v, name) => quota(hf, { name, limit: 9 }).consume("a", 1, { reference: v }),
  "quota metadata": (v, name) => quota(hf, { name, limit: 9 }).consume("a", 1, { metadata: v }),
  "quota wait": (v, name) => quota(hf, { name, limit: 9 }).consume("a", 1, { wait: v }),
  "quota hold": (v, name) => quota(hf, { name, limit: 9 }).hold("a", 1, { holdFor: v }),
  "quota settle": (v, name) => quota(hf, { name, limit: 9 }).settle("a", v, 1),
  "quota settle amount": async (v, name) => {
    const q = quota(hf, { name, limit: 9 });
    const { id } = await q.hold("a", 1);
    return q.settle("a", id, v);
  },
  "quota release": (v, name) => quota(hf, { name, limit: 9 }).release("a", v),
  "quota refund": (v, name) => quota(hf, { name, limit: 9 }).refund("a", v),
  "quota refund amount": async (v, name) => {
    const q = quota(hf, { name, limit: 9 });
    const { id } = await q.consume("a", 3);
    return q.refund("a", id, { amount: v });
  },
  "quota refund id": async (v, name) => {
    const q = quota(hf, { name, limit: 9 });
    const { id } = await q.consume("a", 3);
    return q.refund("a", id, { id: v });
  },
  "quota grant amount": (v, name) => quota(hf, { name, limit: 9 }).grant("a", v),
  "quota grant expiresAt": (v, name) => quota(hf, { name, limit: 9 }).grant("a", 1, { expiresAt: v }),
  "quota grant priority": (v, name) => quota(hf, { name, limit: 9 }).grant("a", 1, { priority: v }),
  "quota setPlan": (v, name) => quota(hf, { name, limit: { plans: { a: 1 }, default: "a" } }).setPlan("a", v),
  "quota history before": (v, name) => quota(hf, { name, limit: 9 }).history("a", { before: v }),
  "quota history limit": (v, name) => quota(hf, { name, limit: 9 }).history("a", { limit: v }),
  "subjects quota": (v) => subjects(hf, v),
  "subjects after": (v, name) => subjects(hf, name, { after: v }),
  "subjects limit": (v, name) => subjects(hf, name, { limit: v }),
  "subjects of": (v, name) => subjects(hf, name, { of: [v] }),
  "stock name": (v) => stock(hf, { name: v }).levels(),
  "stock default location": (v, name) => stock(hf, { name, location: v }).increase("a", 1),
  "stock sku": (v, name) => stock(hf, { name }).increase(v, 1),
  "stock location": (v, name) => stock(hf, { name }).increase("a", 1, { location: v }),
  "stock quantity": (v, name) => stock(hf, { name }).apply([{ sku: "a", quantity: v }]),
  "stock lines": (v, name) => stock(hf, { name }).apply(v),
  "stock count": (v, name) => stock(hf, { name }).adjustTo("a", v),
  "stock externalId": (v, name) => stock(hf, { name }).increase("a", 1, { externalId: v }),
  "stock by": (v, name) => stock(hf, { name }).increase("a", 1, { by: v }),
  "stock note": (v, name) => stock(hf, { name }).increase("a", 1, { note: v }),
  "stock source": (v, name) => stock<{ source: string }>(hf, { name }).increase("a", 1, { source: v }),
  "stock reference type": (v, name) =>
    stock(hf, { name }).increase("a", 1, { reference: { type: v, id: "1" } }),
  "stock reference id": (v, name) =>
    stock(hf, { name }).increase("a", 1, { reference: { type: "t", id: v } }),
  "stock transfer": (v, name) => stock(hf, { name }).transfer("a", 1, { from: "x", to: v }),
  "stock reserve id": (v, name) => stock(hf, { name }).reserve([{ sku: "a", quantity: 1 }], { id: v }),
  "stock reserve ttl": (v, name) => stock(hf, { name }).reserve([{ sku: "a", quantity: 1 }], { ttl: v }),
  "stock commit": (v, name) => stock(hf, { name }).commit(v),
  "stock release": (v, name) => stock(hf, { name }).release(v),
  "stock return": (v, name) => stock(hf, { name }).return(v),
  "stock level": (v, name) => stock(hf, { name }).level(v),
  "stock levels skus": (v, name) => stock(hf, { name }).levels({ skus: v }),
  "stock levels sku": (v, name) => stock(hf, { name }).levels({ skus: [v] }),
  "stock levels location": (v, name) => stock(hf, { name }).levels({ location: v }),
  "stock levels limit": (v, name) => stock(hf, { name }).levels({ limit: v }),
  "stock levels after": (v, name) =>
    stock(hf, { name }).levels({ limit: 1, after: { sku: v, location: "x" } }),
  "stock minimum": (v, name) => stock(hf, { name }).setMinimum("a", v),
  "stock split": (v, name) => stock(hf, { name }).split([{ sku: "a", quantity: 1 }], { locations: [v] }),
  "stock history sku": (v, name) => stock(hf, { name }).history({ sku: v }),
  "stock history location": (v, name) => stock(hf, { name }).history({ location: v }),
  "stock history source": (v, name) => stock<{ source: string }>(hf, { name }).history({ source: v }),
  "stock history reference": (v, name) => stock(hf, { name }).history({ reference: { type: v, id: v } }),
  "stock history from": (v, name) => stock(hf, { name }).history({ from: v }),
  "stock history to": (v, name) => stock(hf, { name }).history({ to: v }),
  "stock history limit": (v, name) => stock(hf, { name }).history({ limit: v }),
  "stock history after": (v, name) => stock(hf, { name }).history({ after: v }),
  "stock levelAt": (v, name) => stock(hf, { name }).levelAt("a", v),
  "stock channels": (v, name) => stock(hf, { name }).byChannel({ sku: v, from: new Date(0) }),
  "stock reconcile": (v, name) => stock(hf, { name }).reconcile({ sku: v }),
  "queue name": (v) => queue(hf, v).counts(),
  "queue payload": (v, name) => queue(hf, name).enqueue(v),
  "queue key": (v, name) => queue(hf, name).enqueue(1, { key: v }),
  "queue group": (v, name) => queue(hf, name).enqueue(1, { group: v }),
  "queue priority": (v, name) => queue(hf, name).enqueue(1, { priority: v }),
  "queue runAt": (v, name) => queue(hf, name).enqueue(1, { runAt: v }),
  "queue delayMs": (v, name) => queue(hf, name).enqueue(1, { delayMs: v }),
  "queue failed after": (v, name) => queue(hf, name).failed({ after: v }),
  "queue failed limit": (v, name) => queue(hf, name).failed({ limit: v }),
  "queue inspect": (v, name) => queue(hf, name).inspect(v),
  "queue retry": (v, name) => queue(hf, name).retry(v),
  "queue discard": (v, name) => queue(hf, name).discard(v),
  "queue prune": (v, name) => queue(hf, name).prune({ before: v }),
  "queues names": (v) => queues(hf, { names: [v] }),
  "schedule name": (v) => schedule(hf, v, { every: "1 day" }, () => {}).status(),
  "schedule holder": (v, name) => schedule(hf, name, { every: "1 day", holder: v }, () => {}).pause(),
  "schedule runs": (v, name) => schedule(hf, name, { every: "1 day" }, () => {}).runs(v),
  "schedule nextRuns": (v, name) => schedule(hf, name, { every: "1 day" }, () => {}).nextRuns(1, v),
  "schedules names": (v) => schedules(hf, { names: [v] }),
  "schedule pause": (v) => pauseSchedule(hf, v),
  "runs of": (v) => runs(hf, v),
  "audit actor": (v) => audited(hf, { action: "a", target: "t", actor: v }, async () => {}),
  "audit target": (v) => audited(hf, { action: "a", target: v, actor: "x" }, async () => {}),
  "audit details": (v) => audited(hf, { action: "a", target: "t", actor: "x", details: v }, async () => {}),
  "trail before": (v) => trail(hf, { before: v }),
  "trail target": (v) => trail(hf, { target: v }),
  "once id": (v) => once(hf, v, async () => 1),
  "once payload": (v, name) => once(hf, name, async () => 1, { payload: v }),
  "once issuedAt": (v, name) => once(hf, name, async () => 1, { issuedAt: v }),
};

describe("whatever is given", () => {
  test.each(Object.entries(calls))("%s", { timeout: 120_000 }, async (what, call) => {
    const next = random(inject("seed") + what.length);
    const values = [
      ...texts,
      ...numbers,
      ...dates,
      ...others,
      ...Array.from({ length: 20 }, () => any(next)),
    ] as never[];
    const name = named();
    // Some at a time, so that a batch has good and bad ones.
    for (let at = 0; at < values.length; at += 10)
      await Promise.all(
        values.slice(at, at + 10).map(async (value, i) => {
          const outcome = await outcomeOf(() => call(value, `${name}-${at + i}`));
          expectOurs(
            outcome,
            `${what}: ${shown(value)}, HOLDFAST_SEED=${inject("seed")}: ${String(outcome.error)}`,
          );
        }),
      );
  });
});

/** What must be kept apart: a number is its digits. */
function identity(subject: unknown): string {
  if (typeof subject !== "object" || subject === null) return `text ${String(subject === 0 ? 0 : subject)}`;
  const parts = Object.entries(subject).map(([name, value]) => [name, String(value === 0 ? 0 : value)]);
  return `parts ${JSON.stringify(parts.toSorted(([a = ""], [b = ""]) => (a < b ? -1 : 1)))}`;
}

test("no two subjects share a bucket, and none has two", { timeout: 120_000 }, async () => {
  const next = random(inject("seed"));
  const q = quota(hf, { name: named(), limit: 100_000 });
  const used = new Map<string, number>();
  for (let i = 0; i < 600; i++) {
    const subject = i < texts.length ? texts[i] : any(next);
    const outcome = await outcomeOf(() => q.consume(subject as never));
    const why = `${shown(subject)}, HOLDFAST_SEED=${inject("seed")}`;
    if (outcome.error !== undefined) {
      expect(outcome.error, why).toBeInstanceOf(UsageError);
      continue;
    }
    const name = identity(subject);
    used.set(name, (used.get(name) ?? 0) + 1);
    expect(outcome.value, why).toMatchObject({ used: used.get(name) });
  }
  for (const bad of [Number.NaN, Infinity, 0.5, [], ["a"], "\ud800", { a: Number.NaN }])
    await expect(q.consume(bad as never)).rejects.toBeInstanceOf(UsageError);
});

test("a hash of a long subject is not that subject; nor of a long id", async () => {
  const q = quota(hf, { name: named(), limit: 9 });
  const long = "x".repeat(500);
  await q.consume(long, 1, { id: long });
  const [{ subject } = { subject: "" }] = await subjects(hf, q.name);
  const { entries } = await q.history(long);
  expect(subject).toMatch(/^sha256:/);
  expect(await q.consume(subject)).toMatchObject({ used: 1 });
  expect(await q.consume(long, 1, { id: entries[0]?.id ?? "" })).toMatchObject({ used: 2, replayed: false });
  expect(await q.consume(long, 1, { id: long })).toMatchObject({ replayed: true, id: long });
});

test("ids of any kind are applied once, found again, and refunded by", { timeout: 120_000 }, async () => {
  const next = random(inject("seed") + 1);
  const q = quota(hf, { name: named(), limit: 100_000 });
  const shop = stock(hf, { name: named() });
  const seen = { quota: new Set<unknown>(), stock: new Set<unknown>() };
  for (let i = 0; i < 200; i++) {
    const id = i < texts.length ? texts[i] : any(next);
    const again = seen.quota.has(id);
    const why = `${shown(id)}, HOLDFAST_SEED=${inject("seed")}`;
    const outcome = await outcomeOf(() => q.consume("a", 1, { id: id as string }));
    const moved = await outcomeOf(() => shop.increase("a", 1, { externalId: id as string }));
    if (outcome.error === undefined) {
      expect(outcome.value, why).toMatchObject({ replayed: again });
      if (id !== undefined) seen.quota.add(id);
      // Nothing of it is left, and of nothing else.
      if (!again) {
        const { amount } = await q.refund("a", (outcome.value as { id: string }).id);
        expect(amount, why).toBe(1);
      }
    } else expect(outcome.error, why).toBeInstanceOf(UsageError);
    if (moved.error === undefined) {
      expect(moved.value, why).toMatchObject({ replayed: seen.stock.has(id) });
      if (id !== undefined) seen.stock.add(id);
    } else expect(moved.error, why).toBeInstanceOf(UsageError);
  }
});

test("ids that follow from others are nobody else's, and can be referred to", async () => {
  const q = quota(hf, { name: named(), limit: 100 });
  for (const id of [
    "settle:h1",
    "release:h1",
    "refund:h1",
    "revoke:g1",
    "rollup:2",
    "expire:3:h",
    "lapse:3:g",
  ])
    await expect(q.consume("a", 1, { id })).rejects.toThrow(/quota: id must not begin with/);
  const shop = stock(hf, { name: named() });
  await shop.increase("a", 10);
  for (const id of ["commit:r9", "release:r9", "return:r9", "opening:"]) {
    await expect(shop.increase("a", 1, { externalId: id })).rejects.toThrow(/externalId must not begin with/);
    await expect(shop.reserve([{ sku: "a", quantity: 1 }], { id })).rejects.toThrow(/id must not begin with/);
  }
  for (const hold of ["h1", "x".repeat(500), '"quoted"', "sha256:1", "a\0b"]) {
    await q.hold("a", 5, { id: hold });
    const { id } = await q.settle("a", hold, 2);
    expect(await q.refund("a", id)).toMatchObject({ amount: 2 });
    const kept = await shop.reserve([{ sku: "a", quantity: 1 }], { id: hold });
    expect(kept.id).toBe(hold);
    const { externalId } = await kept.commit();
    expect(await shop.return(externalId)).toMatchObject({ lines: [{ quantity: 1 }] });
    expect(await shop.commit(hold)).toMatchObject({ externalId, replayed: true });
  }
  expect(await q.peek("a")).toMatchObject({ used: 0, held: 0 });
  expect(await shop.level("a")).toMatchObject({ onHand: 10, reserved: 0 });
});

test("more than JavaScript counts exactly is refused, also together with orders that are not", async () => {
  const shop = stock(hf, { name: named() });
  await shop.increase("much", Number.MAX_SAFE_INTEGER);
  const [much, some, more] = await Promise.allSettled([
    shop.increase("much", 1),
    shop.increase("some", 1),
    shop.increase("some", 2),
  ]);
  expect(much).toMatchObject({ status: "rejected", reason: { code: "HF_USAGE" } });
  expect(some.status).toBe("fulfilled");
  expect(more.status).toBe("fulfilled");
  expect(await shop.level("much")).toMatchObject({ onHand: Number.MAX_SAFE_INTEGER });
  expect(await shop.level("some")).toMatchObject({ onHand: 3 });
});

test("a payload that JSON would change is refused, unless a schema reads it; so is a worker without a handler", async () => {
  const mails = queue<Record<string, unknown>>(hf, named());
  for (const at of [
    new Date(),
    new Map([[1, 2]]),
    new Set([1]),
    /x/,
    new URL("http://localhost"),
    Buffer.from("x"),
  ])
    await expect(mails.enqueue({ deep: [{ at }] })).rejects.toThrow(/the payload\.deep\[0\]\.at is a /);
  await mails.enqueue({ at: new Date().toISOString(), none: undefined, list: [null, { a: 1 }] });
  expect(await mails.counts()).toMatchObject({ waiting: 1 });
  expect(() => mails.work(undefined as never)).toThrow(/the handler must be a function/);
});
