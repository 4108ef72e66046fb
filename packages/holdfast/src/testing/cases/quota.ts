/** Quotas and credits: what `quota/decide` says, by example, and exact under concurrency. */
import { isSupported } from "../../seam/capabilities.ts";
import { LockTimeoutError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import {
  type Quota,
  QuotaError,
  QuotaExceededError,
  type QuotaOptions,
  quota,
  quotas,
  subjects,
} from "../../quota/index.ts";
import type { ConformanceCase, Ground } from "../ground.ts";
import { assert, during, suite } from "./support.ts";

interface Quotas extends Ground {
  /** The same quota of both instances, under a name that no other case uses. */
  both(options: Omit<QuotaOptions, "name">, name?: string): readonly [Quota, Quota];
  /** Of the first one alone. */
  one(options: Omit<QuotaOptions, "name">, name?: string): Quota;
}

/** Where there are no quotas, all of their calls are refused. */
function counted(run: (ground: Quotas) => Promise<void>): ConformanceCase["run"] {
  return async (ground) => {
    const { hf, other, fresh, capabilities } = ground;
    const of = (instance: typeof hf, options: Omit<QuotaOptions, "name">, name = "") =>
      quota(instance, { ...options, name: `${fresh}${name}` });
    if (!isSupported(capabilities.quotas)) {
      await assert.rejects(of(hf, { limit: 1 }).consume("u"), UnsupportedError);
      return;
    }
    await run({
      ...ground,
      both: (options, name) => [of(hf, options, name), of(other, options, name)],
      one: (options, name) => of(hf, options, name),
    });
  };
}

/** All at once, by turns of both instances. They may have to wait for each other for long on a busy machine. */
function together<T>(
  count: number,
  both: readonly [Quota, Quota],
  call: (of: Quota, i: number) => Promise<T>,
): Promise<T[]> {
  return Promise.all(Array.from({ length: count }, (_, i) => call(both[i % 2] as Quota, i)));
}

const patient = { wait: 60_000 } as const;

/** The ledger adds up to what is counted. */
async function whole(of: Quota, subject = "u"): Promise<void> {
  assert.deepEqual((await of.reconcile(subject)).findings, []);
}

function coded(code: string) {
  return (error: unknown) => {
    assert.ok(error instanceof QuotaError, String(error));
    assert.equal(error.code, code);
    return true;
  };
}

function exceeded(expected: Partial<QuotaExceededError>) {
  return (error: unknown) => {
    assert.ok(error instanceof QuotaExceededError, String(error));
    assert.deepEqual(part(error, expected), expected);
    return true;
  };
}

/** Those of its properties that are expected of it. */
function part(of: object, expected: object): Record<string, unknown> {
  const all = of as Record<string, unknown>;
  return Object.fromEntries(Object.keys(expected).map((name) => [name, all[name]]));
}

function has(of: object, expected: object): void {
  assert.deepEqual(part(of, expected), expected);
}

/** Until it is so, for as long as a busy machine may take. */
async function becomes(what: string, check: () => Promise<boolean>): Promise<void> {
  const end = performance.now() + 60_000;
  while (!(await check())) {
    assert.ok(performance.now() < end, `in vain: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

const later = () => new Date(Date.now() + 3_600_000);
const soon = () => new Date(Date.now() + 200);

/** What is there is used up, and used again as time gives it back. */
async function usedTwice(of: Quota, limit: number): Promise<void> {
  let used = 0;
  await becomes("time gives back", async () => {
    const answer = await of.tryConsume("u");
    if (answer.granted) used++;
    else assert.ok((answer.retryAfter ?? 0) > 0, "a refusal says when to try again");
    return used > 2 * limit;
  });
}

/** In no span of this length was more used than this, by the database's own clock. */
async function neverMore(of: Quota, perMs: number, most: (spanMs: number) => number): Promise<void> {
  const { entries } = await of.history("u", { limit: 10_000 });
  const uses = entries.filter(({ kind }) => kind === "consume").toReversed();
  assert.ok(uses.length > 0);
  for (const [i, first] of uses.entries()) {
    let sum = 0;
    for (const { at, amount } of uses.slice(i)) {
      // Moments are rounded down to milliseconds here.
      const span = at.getTime() - first.at.getTime() + 1;
      sum += amount;
      if (span >= perMs) break;
      assert.ok(sum <= most(span), `${sum} in ${span} ms`);
    }
  }
}

export const quotaCases = suite("quota", {
  "exactly as many as the limit, of many callers at once": counted(async ({ both }) => {
    const pair = both({ limit: 25 });
    const answers = await together(60, pair, (of) => of.tryConsume("u", 1, patient));
    assert.equal(answers.filter(({ granted }) => granted).length, 25);
    has(await pair[0].peek("u"), { used: 25, limit: 25, remaining: 0 });
    await whole(pair[1]);
  }),

  "amounts of many subjects at once, each by itself": counted(async ({ both }) => {
    const pair = both({ limit: 10 });
    const answers = await together(60, pair, (of, i) => of.tryConsume(`u${i % 5}`, 1 + (i % 3), patient));
    for (let s = 0; s < 5; s++) {
      const granted = answers.filter((answer, i) => answer.granted && i % 5 === s);
      const sum = granted.reduce((total, { amount }) => total + amount, 0);
      const { used } = await pair[0].peek(`u${s}`);
      assert.equal(used, sum);
      assert.ok(used >= 8 && used <= 10, `${used} of 10`);
      await whole(pair[0], `u${s}`);
    }
  }),

  "a refusal says how it stands, and uses nothing": counted(async ({ one }) => {
    const of = one({ limit: 10 });
    await of.consume("u", 7);
    await assert.rejects(
      of.consume("u", 4),
      exceeded({ used: 7, held: 0, limit: 10, remaining: 3, amount: 4, retryAfter: undefined }),
    );
    has(await of.consume("u", 3), { used: 10, remaining: 0, replayed: false });
    has(await of.peek("nobody"), { used: 0, remaining: 10 });
  }),

  "subjects of any text, and of several dimensions": counted(async ({ both }) => {
    const [of, same] = both({ limit: 1 });
    const any = [
      "a",
      "a\0b",
      '{"a":1}',
      { a: 1 },
      { a: 1, b: "x" },
      "x".repeat(5000),
      "é",
      "e\u0301",
      "A",
      "'; --",
      7,
      "  ",
    ];
    for (const subject of any) has(await of.consume(subject), { used: 1 });
    for (const subject of any) has(await same.tryConsume(subject), { granted: false, used: 1 });
    has(await same.tryConsume({ b: "x", a: 1 }), { granted: false });
    has(await same.consume("a "), { used: 1 });
  }),

  "an id is applied once, and answered again with the answer of then": counted(async ({ both }) => {
    const [of, same] = both({ limit: 10 });
    const first = await of.consume("u", 6, { id: "one" });
    await of.consume("u", 4);
    assert.deepEqual(await same.consume("u", 6, { id: "one" }), { ...first, replayed: true });
    await assert.rejects(same.consume("u", 5, { id: "one" }), coded("HF_QUOTA_ID_CONFLICT"));
    await assert.rejects(same.hold("u", 6, { id: "one" }), coded("HF_QUOTA_ID_CONFLICT"));
    has(await same.consume("somebody else", 5, { id: "one" }), { used: 5, replayed: false });
    await whole(of);
  }),

  "the same id from many at the same moment is applied once": counted(async ({ both }) => {
    const pair = both({ limit: 1 });
    const answers = await together(12, pair, (of) => of.tryConsume("u", 1, { id: "one", ...patient }));
    assert.ok(answers.every(({ granted }) => granted));
    assert.equal(answers.filter((answer) => answer.granted && !answer.replayed).length, 1);
    has(await pair[0].peek("u"), { used: 1 });
  }),

  "an id that is refused, granted and sent again, all at once": counted(async ({ one }) => {
    const of = one({ limit: 5 });
    const others = ["v", "w", "x"].map((subject) => of.consume(subject));
    const [refused, first, second] = await Promise.all([
      of.tryConsume("u", 10, { id: "x" }),
      of.tryConsume("u", 1, { id: "x" }),
      of.tryConsume("u", 1, { id: "x" }),
    ]);
    await Promise.all(others);
    assert.ok(!refused.granted && first.granted && second.granted);
    assert.notEqual(first.replayed, second.replayed);
    has(await of.peek("u"), { used: 1 });
  }),

  "a refusal is not kept: the same id may be granted later": counted(async ({ one }) => {
    const of = one({ limit: 5 });
    await of.consume("u", 5, { id: "all" });
    has(await of.tryConsume("u", 2, { id: "two" }), { granted: false });
    await of.refund("u", "all", { amount: 3 });
    has(await of.consume("u", 2, { id: "two" }), { used: 4, replayed: false });
    await whole(of);
  }),

  "a hold counts until it is settled at what it came to, or released": counted(async ({ both }) => {
    const [of, same] = both({ limit: 10 });
    const hold = await of.hold("u", 8);
    has(hold, { used: 0, held: 8, remaining: 2 });
    has(await same.tryConsume("u", 3), { granted: false, held: 8 });
    has(await same.settle("u", hold.id, 5), { used: 5, held: 0, replayed: false });
    has(await hold.settle(5), { used: 5, replayed: true });
    await assert.rejects(hold.settle(4), coded("HF_QUOTA_ID_CONFLICT"));
    await assert.rejects(hold.release(), coded("HF_QUOTA_UNKNOWN"));
    const other = await of.hold("u", 5);
    await other.release();
    await other.release();
    has(await of.peek("u"), { used: 5, held: 0, remaining: 5 });
    has(await of.refund("u", `settle:${hold.id}`), { used: 0, amount: 5 });
    await whole(of);
  }),

  "no id of a caller takes the place of one of ours": counted(async ({ one }) => {
    const of = one({ limit: 10 });
    // The hold is entry 1, and its end would be entry 2 or 3.
    const hold = await of.hold("u", 3, { id: "h", holdFor: 100 });
    for (const id of ["expire:2:h", "expire:3:h", "lapse:2:h", "settle:h", "release:h", "rollup:1"])
      await assert.rejects(of.consume("u", 1, { id }), UsageError);
    await becomes("the hold is over", async () => (await of.tryConsume("u", 10)).granted);
    await assert.rejects(hold.settle(1), coded("HF_QUOTA_UNKNOWN"));
    await whole(of);
  }),

  "a number is the same subject as its digits, alone and in several dimensions": counted(async ({ both }) => {
    const [of, same] = both({ limit: 4 });
    await of.consume(42);
    has(await same.peek("42"), { used: 1 });
    await of.consume({ org: 42, user: "ann" });
    await of.consume({ user: "ann", org: "42" });
    has(await same.consume({ org: 42n, user: "ann" }), { used: 3 });
    await of.consume({ org: "42.0", user: "ann" });
    has(await same.peek({ org: "42", user: "ann" }), { used: 3 });
  }),

  "more than was held is settled if there is room, else the hold stays": counted(async ({ one }) => {
    const of = one({ limit: 10 });
    const hold = await of.hold("u", 4);
    await of.consume("u", 5);
    await assert.rejects(hold.settle(6), exceeded({ used: 5, held: 4, amount: 6 }));
    has(await of.peek("u"), { used: 5, held: 4 });
    has(await hold.settle(5), { used: 10, held: 0 });
    await whole(of);
  }),

  "a hold that is over makes room for whoever needs it": counted(async ({ both }) => {
    const [of, same] = both({ limit: 4 });
    const hold = await of.hold("u", 3, { holdFor: 150 });
    await becomes("the hold is over", async () => (await same.tryConsume("u", 4)).granted);
    await assert.rejects(hold.settle(1), coded("HF_QUOTA_UNKNOWN"));
    has(await of.peek("u"), { used: 4, held: 0 });
    const { entries } = await of.history("u");
    assert.deepEqual(
      entries.map(({ kind, of: about }) => [kind, about]),
      [
        ["consume", undefined],
        ["expire", hold.id],
        ["hold", undefined],
      ],
    );
    await whole(of);
  }),

  "a refund gives back some, or all that is left of it, and never more": counted(async ({ both }) => {
    const [of, same] = both({ limit: 10 });
    const { id } = await of.consume("u", 6);
    has(await same.refund("u", id, { amount: 2, id: "two" }), { used: 4, amount: 2, replayed: false });
    has(await of.refund("u", id, { amount: 2, id: "two" }), { used: 4, amount: 2, replayed: true });
    await assert.rejects(of.refund("u", id, { amount: 5 }), coded("HF_QUOTA_TOO_MUCH"));
    has(await of.refund("u", id), { used: 0, amount: 4 });
    has(await of.refund("u", id), { amount: 4, replayed: true });
    await assert.rejects(of.refund("u", "nothing"), coded("HF_QUOTA_UNKNOWN"));
    await assert.rejects(of.refund("u", "two"), coded("HF_QUOTA_UNKNOWN"));
    await whole(of);
  }),

  "credits come after the limit: by priority, then what runs out first, then by id": counted(
    async ({ one }) => {
      const of = one({ limit: 2 });
      await of.grant("u", 3, { id: "last", priority: 1 });
      await of.grant("u", 3, { id: "b" });
      await of.grant("u", 3, { id: "a" });
      await of.grant("u", 3, { id: "ends", expiresAt: later() });
      has(await of.consume("u", 4, { id: "x" }), { used: 2, credit: 10, remaining: 10 });
      has(await of.consume("u", 5, { id: "y" }), { used: 2, credit: 5 });
      const spent = async () =>
        Object.fromEntries((await of.grants("u")).map(({ id, spent: of }) => [id, of]));
      assert.deepEqual(await spent(), { ends: 3, a: 3, b: 1, last: 0 });
      assert.deepEqual(
        (await of.grants("u")).map(({ id }) => id),
        ["ends", "a", "b", "last"],
      );
      // To the last one first.
      await of.refund("u", "y", { amount: 2 });
      assert.deepEqual(await spent(), { ends: 3, a: 2, b: 0, last: 0 });
      // What is not of credits makes room in the limit.
      has(await of.refund("u", "x"), { used: 0, credit: 9 });
      assert.deepEqual(await spent(), { ends: 1, a: 2, b: 0, last: 0 });
      await whole(of);
    },
  ),

  "credits are never spent twice": counted(async ({ both }) => {
    const pair = both({ limit: 0 });
    await pair[0].grant("u", 7);
    await pair[1].grant("u", 8, { expiresAt: later() });
    const answers = await together(30, pair, (of) => of.tryConsume("u", 1, patient));
    assert.equal(answers.filter(({ granted }) => granted).length, 15);
    has(await pair[0].peek("u"), { used: 0, credit: 0, remaining: 0 });
    await whole(pair[0]);
  }),

  "what is left of a grant can be revoked, or runs out": counted(async ({ both }) => {
    const [of, same] = both({ limit: 0 });
    await of.grant("u", 5, { id: "g" });
    await of.consume("u", 2, { id: "x" });
    has(await same.revoke("u", "g"), { amount: 3, credit: 0, replayed: false });
    has(await of.revoke("u", "g"), { amount: 3, replayed: true });
    await assert.rejects(of.revoke("u", "unknown"), coded("HF_QUOTA_UNKNOWN"));
    // There is nothing any more that it could go back to.
    has(await of.refund("u", "x"), { amount: 2, credit: 0, used: 0 });
    await of.grant("u", 4, { expiresAt: soon() });
    await becomes("the grant is over", async () => (await same.peek("u")).credit === 0);
    has(await of.tryConsume("u"), { granted: false, credit: 0 });
    assert.equal((await of.history("u")).entries[0]?.kind, "lapse");
    await assert.rejects(
      of.grant("u", Number.MAX_SAFE_INTEGER).then(() => of.grant("u", 1)),
      coded("HF_QUOTA_TOO_MUCH"),
    );
    await whole(of);
  }),

  "a limit of its own comes before the plan's, and that before the code's": counted(async ({ both }) => {
    const plans = { free: 3, pro: 6, all: Infinity };
    const [of, same] = both({ limit: { plans, default: "free" } });
    await of.consume("u", 3);
    has(await same.setPlan("u", "pro"), { limit: 6, remaining: 3 });
    has(await of.consume("u", 3), { used: 6 });
    has(await same.setLimit("u", 7), { limit: 7, remaining: 1 });
    has(await of.setLimit("u", 2), { limit: 2, remaining: 0, over: 4 });
    has(await of.tryConsume("u"), { granted: false, limit: 2 });
    has(await of.setLimit("u", Infinity), { limit: Infinity });
    has(await of.consume("u", 1000), { used: 1006, limit: Infinity });
    has(await of.setLimit("u", undefined), { limit: 6 });
    has(await of.setPlan("u", "all"), { limit: Infinity });
    has(await of.setPlan("u", undefined), { limit: 3, over: 1003 });
    await whole(of);
  }),

  "above the limit so much is let through, or everything, and is known": counted(async ({ one }) => {
    const some = one({ limit: 5, over: 2 }, "-some");
    has(await some.consume("u", 7), { used: 7, over: 2, remaining: 0 });
    has(await some.tryConsume("u"), { granted: false });
    const all = one({ limit: 5, over: "record" }, "-all");
    has(await all.consume("u", 50), { used: 50, over: 45, remaining: 0 });
    await whole(some);
    await whole(all);
  }),

  "reset: nothing is used any more, and holds and credits stay": counted(async ({ one }) => {
    const of = one({ limit: 10, per: "day" });
    const { id } = await of.consume("u", 6);
    await of.hold("u", 2);
    await of.grant("u", 1);
    has(await of.reset("u"), { used: 0, held: 2, credit: 1, remaining: 9 });
    // What was used before is not to be given back.
    has(await of.refund("u", id), { used: 0, amount: 6 });
    has(await of.consume("u", 8), { used: 8 });
    await whole(of);
  }),

  "a fixed window gives all back when the next one begins": counted(async ({ both }) => {
    const [of, same] = both({ limit: 3, per: 1500 });
    const { resetAt } = await of.consume("u", 3, { id: "before" });
    assert.ok(resetAt && resetAt.getTime() % 1500 === 0);
    await becomes("the next window begins", async () => {
      const answer = await same.tryConsume("u", 3);
      if (!answer.granted) assert.ok((answer.retryAfter ?? 0) <= 1500);
      return answer.granted;
    });
    // It was used in a window that is over.
    has(await of.refund("u", "before"), { amount: 3 });
    assert.ok((await of.history("u")).entries.some(({ kind }) => kind === "refund"));
    await whole(of);
  }),

  "a refill gives back evenly": counted(async ({ one }) => {
    const of = one({ limit: 4, per: 1000, window: "refill" });
    await usedTwice(of, 4);
    await neverMore(of, Infinity, (span) => 4 + (4 * span) / 1000);
    await whole(of);
    // What comes back so slowly that nobody lives to see it does not come back.
    const slow = one({ limit: 1e15, per: "year", window: "refill" }, "-slow");
    await slow.consume("u", 1e15);
    await slow.setLimit("u", 1);
    has(await slow.tryConsume("u", 1), { granted: false, retryAfter: undefined });
  }),

  "a window that slides exactly counts each use for its time": counted(async ({ one }) => {
    const of = one({ limit: 4, per: 1000, window: "sliding-log" });
    await usedTwice(of, 4);
    await neverMore(of, 1000, () => 4);
    await whole(of);
  }),

  "a window that slides in parts never lets more through either": counted(async ({ one }) => {
    const of = one({ limit: 4, per: 1000, window: "sliding-parts", parts: 4 });
    await usedTwice(of, 4);
    await neverMore(of, 1000, () => 4);
    await whole(of);
  }),

  "of calls that are sent together, the refused one knows when the others leave": counted(async ({ one }) => {
    const of = one({ limit: 3, per: "hour", window: "sliding-log" });
    // While those of others are under way, these come together.
    const others = ["v", "w", "x"].map((subject) => of.consume(subject));
    const answers = await Promise.all(Array.from({ length: 8 }, () => of.tryConsume("u")));
    await Promise.all(others);
    const refused = answers.filter(({ granted }) => !granted);
    assert.equal(refused.length, 5);
    for (const answer of refused)
      assert.ok(!answer.granted && answer.retryAfter !== undefined && answer.retryAfter <= 3_600_000);
  }),

  "several limits at once: all of them, or none": counted(async ({ both }) => {
    const wide = both({ limit: 100 }, "-wide");
    const narrow = both({ limit: 20, per: "day" }, "-narrow");
    const [set, sameSet] = [quota.all([wide[0], narrow[0]]), quota.all([wide[1], narrow[1]])];
    const answers = await Promise.all(
      Array.from({ length: 40 }, (_, i) => (i % 2 ? set : sameSet).tryConsume(["org", "u"], 1, patient)),
    );
    assert.equal(answers.filter(({ granted }) => granted).length, 20);
    for (const answer of answers) if (!answer.granted) assert.equal(answer.denied.quota, narrow[0].name);
    has(await wide[0].peek("org"), { used: 20 });
    has(await narrow[0].peek("u"), { used: 20 });
    const [first] = await set.consume(["org", "v"], 2, { id: "set" });
    const [again] = await sameSet.consume(["org", "v"], 2, { id: "set" });
    assert.deepEqual([first?.replayed, again?.replayed], [false, true]);
    await assert.rejects(sameSet.consume(["org", "w"], 2, { id: "set" }), coded("HF_QUOTA_ID_CONFLICT"));
    await whole(wide[0], "org");
    await whole(narrow[0]);
  }),

  "in a transaction: kept with it, and undone with it": counted(async ({ hf, one }) => {
    const of = one({ limit: 10 });
    const undone = hf.transaction(async (tx) => {
      has(await of.consume("u", 4, { tx, id: "x" }), { used: 4 });
      await of.hold("u", 2, { tx });
      await of.grant("u", 3, { tx });
      has(await of.consume("u", 4, { tx, id: "x" }), { used: 4, replayed: true });
      throw new Error("undone");
    });
    await assert.rejects(undone, /undone/);
    has(await of.peek("u"), { used: 0, held: 0, credit: 0 });
    await hf.transaction(async (tx) => {
      await of.consume("u", 4, { tx, id: "x" });
      // Without saying so, it is part of the transaction whose body calls.
      await of.refund("u", "x", { amount: 1 });
      has(await of.peek("u"), { used: 3 });
      has(await of.tryConsume("u", 8), { granted: false, used: 3 });
    });
    has(await of.peek("u"), { used: 3 });
    has(await of.consume("u", 4, { id: "x" }), { replayed: true });
    await whole(of);
  }),

  "who wants what a transaction has waits for its end, or for as long as it may": counted(async (ground) => {
    const { hf, both, capabilities } = ground;
    const [of, same] = both({ limit: 10 });
    await of.consume("u", 1);
    let late: Promise<unknown> | undefined;
    await during(
      (inside) =>
        hf.transaction(async (tx) => {
          await of.consume("u", 5, { tx });
          await inside();
        }),
      async () => {
        // With one connection for all, it is that which is waited for.
        if (capabilities.connections === "many")
          await assert.rejects(same.consume("u", 1, { wait: 100 }), LockTimeoutError);
        late = same.tryConsume("u", 5, patient);
      },
    );
    has((await late) as object, { granted: false, used: 6 });
    await whole(of);
  }),

  "transactions that take two subjects crosswise end, both of them": counted(async ({ hf, other, both }) => {
    const [of, same] = both({ limit: 100 });
    const cross = (instance: typeof hf, quotaOf: Quota, order: readonly string[]) =>
      instance.transaction(async (tx) => {
        for (const subject of order) await quotaOf.consume(subject, 1, { tx, ...patient });
      });
    for (let i = 0; i < 2; i++)
      await Promise.all([cross(hf, of, ["a", "b"]), cross(other, same, ["b", "a"])]);
    has(await of.peek("a"), { used: 4 });
    has(await of.peek("b"), { used: 4 });
  }),

  "the ledger, newest first, in pages, with what was given": counted(async ({ both }) => {
    const [of, same] = both({ limit: 100 });
    const metadata = { note: "é", list: [1, { a: null }] };
    await of.consume("u", 3, { id: "first", by: "ada", source: "web", reference: "r1", metadata });
    for (let i = 0; i < 4; i++) await same.consume("u", 1);
    const { entries, next } = await of.history("u", { limit: 2 });
    assert.deepEqual(
      entries.map(({ version, used }) => [version, used]),
      [
        [5, 7],
        [4, 6],
      ],
    );
    assert.equal(next, 4);
    const { entries: rest } = await of.history("u", { before: 4 });
    assert.deepEqual(
      rest.map(({ version }) => version),
      [3, 2, 1],
    );
    has(rest[2] as object, {
      kind: "consume",
      id: "first",
      amount: 3,
      used: 3,
      limit: 100,
      by: "ada",
      source: "web",
      reference: "r1",
      metadata,
    });
  }),

  "old entries become one, from which the chain goes on": counted(async ({ both }) => {
    const [of, same] = both({ limit: 100 });
    for (let i = 0; i < 6; i++) await of.consume("u", 2, { id: `id-${i}` });
    await of.refund("u", "id-1", { id: "back" });
    await of.consume("v", 1);
    // As soon as the clock has gone on.
    let pruned = 0;
    const old = (count: number) =>
      becomes(
        "they are old",
        async () => (pruned += (await same.prune({ olderThanMs: 0 })).entries) >= count,
      );
    await old(6);
    const { entries } = await of.history("u");
    assert.deepEqual(
      entries.map(({ kind, first, version, used }) => [kind, first, version, used]),
      [
        ["refund", 7, 7, 10],
        ["rollup", 1, 6, 12],
      ],
    );
    await whole(of);
    // Its id is not known any more.
    has(await of.consume("u", 2, { id: "id-0" }), { used: 12, replayed: false });
    await old(7);
    assert.equal(pruned, 7);
    assert.deepEqual(await of.prune({ olderThanMs: 3_600_000 }), { entries: 0, broken: [] });
    await whole(of);
  }),

  "a hold that is open, and a grant, are known by their ids also when their entries are gone": counted(
    async ({ one }) => {
      const of = one({ limit: 10 });
      await of.grant("u", 5, { id: "bonus" });
      await of.hold("u", 4, { id: "hold" });
      await of.consume("u", 1);
      let pruned = 0;
      await becomes(
        "they are old",
        async () => (pruned += (await of.prune({ olderThanMs: 0 })).entries) >= 2,
      );
      has(await of.grant("u", 5, { id: "bonus" }), { credit: 5, held: 4, used: 1 });
      await assert.rejects(of.grant("u", 6, { id: "bonus" }), coded("HF_QUOTA_ID_CONFLICT"));
      has(await of.hold("u", 4, { id: "hold" }), { held: 4, replayed: true });
      await assert.rejects(of.hold("u", 5, { id: "hold" }), coded("HF_QUOTA_ID_CONFLICT"));
      has(await of.settle("u", "hold", 3), { held: 0, used: 4 });
      await whole(of);
    },
  ),

  "quotas and their subjects can be listed": counted(async ({ hf, other, one, fresh }) => {
    const of = one({ limit: 10 });
    for (const subject of ["b", "a", "c"]) await of.consume(subject, 2);
    await of.setLimit("c", 50);
    assert.deepEqual(
      (await quotas(other)).filter(({ name }) => name === fresh),
      [{ name: fresh, subjects: 3 }],
    );
    const found = await subjects(hf, fresh, { limit: 2 });
    assert.deepEqual(
      found.map(({ subject, used, version }) => [subject, used, version]),
      [
        ["a", 2, 1],
        ["b", 2, 1],
      ],
    );
    const [c] = await subjects(other, fresh, { after: "b" });
    has(c as object, { subject: "c", limit: 50, used: 2, version: 2 });
    assert.equal((await subjects(hf, fresh, { of: ["a", "nobody"] })).length, 1);
  }),

  "whatever is called, from two instances at once, the ledger adds up": counted(async ({ both }) => {
    const pair = both({ limit: 20 });
    const orNothing = (error: unknown) => {
      if (error instanceof QuotaExceededError || error instanceof QuotaError) return undefined;
      throw error;
    };
    await together(72, pair, async (of, i) => {
      const id = `id-${i % 20}`;
      const calls = [
        () => of.consume("u", 1 + (i % 20) / 5, { id: `${id}-c`, ...patient }),
        () => of.consume("u", 1 + (i % 3), { id, ...patient }),
        () => of.hold("u", 3, { id: `hold-${i}`, holdFor: i % 2 ? 20 : 60_000, ...patient }),
        () => of.settle("u", `hold-${i - 1}`, 2, patient),
        () => of.refund("u", `id-${(i + 7) % 20}`, { amount: 1, id: `back-${i}`, ...patient }),
        () => of.grant("u", 2, { id: `grant-${i}`, ...(i % 4 && { expiresAt: soon() }), ...patient }),
      ];
      const call = calls[i % calls.length] ?? assert.fail("no call");
      if (Number.isInteger(1 + (i % 20) / 5) || i % calls.length > 0) await call().catch(orNothing);
    });
    const { entries } = await pair[0].history("u", { limit: 10_000 });
    assert.deepEqual(
      entries.map(({ version }) => version),
      entries.map((_, i) => entries.length - i),
    );
    assert.equal(new Set(entries.map(({ id }) => id)).size, entries.length);
    for (const { kind, used, held, credit } of entries)
      if (kind === "consume" || kind === "hold") assert.ok(used + held <= 20 + credit, `${used} and ${held}`);
    await whole(pair[1]);
  }),
});
