/** The rules of quotas, without a database: random histories on rows in memory, by a clock that goes as it is told. */
import { describe, expect, inject, test } from "vitest";
import { decideAmendment } from "../../../packages/holdfast/src/quota/decide/amend.ts";
import { QuotaLedger } from "../../../packages/holdfast/src/quota/decide/check.ts";
import { decideUses } from "../../../packages/holdfast/src/quota/decide/consume.ts";
import { type BucketRow, capOf, compareNames } from "../../../packages/holdfast/src/quota/decide/rows.ts";
import { ceilOf, floorOf } from "../../../packages/holdfast/src/quota/decide/windows.ts";
import type {
  Amendment,
  UseBatch,
  Definition,
  Rule,
  UseVerdict,
} from "../../../packages/holdfast/src/quota/store.ts";
import { random } from "../../harness/random.ts";
import { Calls, quotas, subjects } from "./calls.ts";
import { Reader, type State, applied, decided } from "./state.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const start = 1_794_000_000_000_000;

const bucket = (id: number, quota: string, subject: string): BucketRow => ({
  id,
  quota,
  subject,
  used: 0,
  held: 0,
  credit: 0,
  version: 0,
  reset: 0,
  since: undefined,
  parts: undefined,
  own_limit: undefined,
  plan: undefined,
  rolled: undefined,
  moves: undefined,
  moved_to: undefined,
  moved_from: undefined,
});

/** A decision changes nothing of what it was given. */
function frozen<T>(value: T): T {
  if (typeof value === "object" && value !== null && !(value instanceof Map)) {
    for (const each of Object.values(value)) frozen(each);
    Object.freeze(value);
  }
  return value;
}

class Memory {
  state: State;
  now = start;

  constructor(buckets: readonly BucketRow[]) {
    this.state = { buckets, lines: [], holds: [], grants: [] };
  }

  consume(batch: Omit<UseBatch, "make">, keep = true): readonly UseVerdict[] {
    const wanted = batch.buckets.map(({ quota, subject, definition }, place) => {
      const uses = batch.uses.filter((use) => use.bucket === place);
      return {
        quota,
        subject,
        rule: batch.definitions[definition]?.rule as Rule,
        ids: uses.map(({ id }) => id),
        holds: uses.map(({ id }) => id),
        allGrants: false,
      };
    });
    const reader = new Reader(frozen(this.state), wanted, this.now);
    const { verdicts, writes } = decided(reader, (buckets) =>
      decideUses(frozen({ now: this.now, buckets: [...buckets] }), { ...batch, look: true }),
    );
    const next = applied(this.state, writes);
    if (!next) throw new Error("an id is written twice");
    if (keep) this.state = next;
    return verdicts.missing ? [] : verdicts.verdicts;
  }

  amend(amendment: Amendment): void {
    const about = "of" in amendment ? amendment.of : undefined;
    const ids = about === undefined ? [amendment.id] : [amendment.id, about];
    const wanted = { ...amendment.bucket, rule: amendment.definition.rule, ids, holds: ids, allGrants: true };
    const reader = new Reader(frozen(this.state), [wanted], this.now);
    const { writes } = decided(reader, ([view]) =>
      decideAmendment(frozen({ now: this.now, bucket: view as never }), amendment),
    );
    this.state = applied(this.state, writes) as State;
  }
}

const total = <T>(rows: readonly T[], amount: (row: T) => number) =>
  rows.reduce((sum, row) => sum + amount(row), 0);

/** What must be true of every bucket, whatever was called. */
function check({ state }: Memory, hint: string): void {
  for (const row of state.buckets) {
    const isOf = (each: { quota: string; subject: string }) =>
      each.quota === row.quota && each.subject === row.subject;
    const held = total(state.holds.filter(isOf), ({ amount }) => amount);
    const credit = total(state.grants.filter(isOf), ({ amount, spent }) => amount - spent);
    const lines = state.lines.filter((line) => line.bucket === row.id);
    expect([row.held, row.credit], hint).toEqual([held, credit]);
    for (const { spent, amount } of state.grants) expect(spent >= 0 && spent <= amount, hint).toBe(true);
    expect(
      lines.map(({ version }) => version),
      hint,
    ).toEqual(lines.map((_, i) => i + 1));
    const rule = (quotas.find(({ name }) => name === row.quota) ?? quotas[0])?.definition(0).rule as Rule;
    // Of parts, a definition that was changed in between may have others.
    const ledger = new QuotaLedger(row, rule.window === "parts" ? { window: "none" } : rule);
    for (const line of lines) ledger.add(line);
    expect(ledger.checked({ held, credit }).findings, hint).toEqual([]);
    expect(row.used, hint).toBeGreaterThanOrEqual(0);
    expect(row.used - Number.MAX_SAFE_INTEGER + row.held, hint).toBeLessThanOrEqual(0);
  }
}

describe("whatever is called, in whatever order", () => {
  test.for(Array.from({ length: long ? 300 : 12 }, (_, i) => i))("seed + %i", (i) => {
    const seed = inject("seed") + i;
    const calls = new Calls(
      seed,
      quotas.filter((_, place) => place % 4 === seed % 4),
    );
    const memory = new Memory(
      calls.quotas.flatMap(({ name }, n) =>
        subjects.map((subject, s) => bucket(10 * n + s + 1, name, subject)),
      ),
    );
    for (let step = 0; step < 120; step++) {
      const hint = `HOLDFAST_SEED=${seed} step ${step}`;
      memory.now += calls.pick([0, 1, 1000, 1_500_000, 12_000_000]) * calls.below(4);
      const ms = memory.now / 1000;
      if (calls.chance(0.6)) {
        const batch = calls.batch(ms);
        const verdicts = memory.consume(batch);
        for (const [n, { kind, used, held, credit, limit }] of verdicts.entries()) {
          const use = batch.uses[n] as UseBatch["uses"][number];
          const definition = batch.definitions[batch.buckets[use.bucket]?.definition ?? 0] as Definition;
          // In this order the sum is exact.
          if (kind === "granted")
            expect(used - capOf(limit, definition) + held - credit, hint).toBeLessThanOrEqual(0);
        }
        for (const group of new Set(batch.uses.map((use) => use.group))) {
          const kinds = new Set(
            verdicts.filter((_, n) => batch.uses[n]?.group === group).map(({ kind }) => kind),
          );
          if (kinds.has("granted")) expect([...kinds], `${hint}: all or none`).toEqual(["granted"]);
        }
      } else {
        const of = calls.pick(calls.quotas);
        const subject = calls.pick(subjects);
        const ids = (rows: readonly { id: string }[]) => rows.map(({ id }) => id);
        const { lines, holds, grants } = memory.state;
        const known = { lines: ids(lines), holds: ids(holds), grants: ids(grants) };
        memory.amend(calls.amendment(ms, known, of, subject));
      }
      check(memory, hint);
    }
  });
});

const sliding: Readonly<Record<string, Rule>> = {
  refill: { window: "refill", per: 1_000_003 },
  parts: { window: "parts", per: 1_000_000, parts: 7 },
  log: { window: "log", per: 1_000_000 },
};

describe.each(Object.entries(sliding))("%s", (name, rule) => {
  test("a refusal says to the microsecond when it is granted", () => {
    const seed = inject("seed");
    const next = random(seed);
    const memory = new Memory([bucket(1, name, "u")]);
    const limit = 11;
    let refusals = 0;
    const call = (amount: number, id: string, keep: boolean) =>
      memory.consume(
        {
          definitions: [{ rule, plans: undefined, over: 0 }],
          buckets: [{ quota: name, subject: "u", definition: 0, limit }],
          uses: [{ bucket: 0, id, amount, group: 0, holdMs: undefined, details: undefined }],
          look: true,
        },
        keep,
      )[0] as UseVerdict;
    for (let step = 0; step < 300; step++) {
      memory.now += Math.floor(next() * 150_000);
      const amount = 1 + Math.floor(next() * limit);
      const { kind, retry } = call(amount, `id-${step}`, true);
      if (kind === "granted") continue;
      const hint = `HOLDFAST_SEED=${seed} step ${step}`;
      expect(retry, hint).toBeTypeOf("number");
      refusals++;
      const at = memory.now;
      // Of a refill it is rounded up, and what was rounded for a refusal is not kept.
      memory.now = at + Number(retry) - (name === "refill" ? 2 : 1);
      expect(call(amount, "probe", false).kind, hint).toBe("refused");
      memory.now = at + Number(retry);
      expect(call(amount, "probe", false).kind, hint).toBe("granted");
      memory.now = at;
    }
    expect(refusals).toBeGreaterThan(50);
  });

  test("never more than the limit in any such time; a refill, and what came back meanwhile", () => {
    const next = random(inject("seed") + 1);
    const moments: number[] = [];
    const memory = new Memory([bucket(1, name, "u")]);
    const per = "per" in rule ? rule.per : 0;
    for (let step = 0; step < 600; step++) {
      memory.now += Math.floor(next() * 120_000);
      const [verdict] = memory.consume({
        definitions: [{ rule, plans: undefined, over: 0 }],
        buckets: [{ quota: name, subject: "u", definition: 0, limit: 9 }],
        uses: [{ bucket: 0, id: `${step}`, amount: 1, group: 0, holdMs: undefined, details: undefined }],
        look: false,
      });
      if (verdict?.kind === "granted") moments.push(memory.now);
    }
    const most = (span: number) => (name === "refill" ? 9 + (span * 9) / per : span < per ? 9 : Infinity);
    const tooMany = moments.flatMap((first, i) =>
      moments.slice(i).filter((at, n) => n + 1 > most(at - first)),
    );
    expect(tooMany).toEqual([]);
    expect(moments.length).toBeGreaterThan(100);
  });
});

test("however many buckets a batch has, it asks for each kind of what it lacks once", () => {
  const names = Array.from({ length: 40 }, (_, i) => `u${i}`);
  const rows = names.map((subject, i) => ({ ...bucket(i + 1, "log", subject), held: 1, credit: 1 }));
  const memory = new Memory(rows);
  const verdicts = memory.consume({
    definitions: [{ rule: { window: "log", per: 1000 }, plans: undefined, over: 0 }],
    buckets: names.map((subject) => ({ quota: "log", subject, definition: 0, limit: 1 })),
    uses: names.map((_, i) => ({
      bucket: i,
      id: "x",
      amount: 5,
      group: i,
      holdMs: undefined,
      details: undefined,
    })),
    look: true,
  });
  expect(new Set(verdicts.map(({ kind }) => kind))).toEqual(new Set(["refused"]));
});

test("credits let nobody use more than a number holds exactly", () => {
  const most = Number.MAX_SAFE_INTEGER;
  const memory = new Memory([{ ...bucket(1, "unlimited", "ann"), used: 2, credit: most }]);
  const use = { bucket: 0, details: undefined, holdMs: 1000 };
  const verdicts = memory.consume({
    definitions: [{ rule: { window: "none" }, plans: undefined, over: 0 }],
    buckets: [{ quota: "unlimited", subject: "ann", definition: 0, limit: undefined }],
    uses: [most, most - 2, 1].map((amount, i) => ({ ...use, id: `${i}`, group: i, amount })),
    look: true,
  });
  expect(verdicts.map(({ kind, held }) => [kind, held])).toEqual([
    ["refused", 0],
    ["granted", most - 2],
    ["refused", most - 2],
  ]);
});

test("products that are larger than a number holds exactly are divided exactly", () => {
  const next = random(inject("seed"));
  const wrong: (readonly number[])[] = [];
  for (let i = 0; i < 20_000; i++) {
    const [a, b, c] = [1, 2, 3].map(() => Math.floor(next() * 2 ** Math.floor(1 + next() * 52)) + 1) as [
      number,
      number,
      number,
    ];
    const product = BigInt(a) * BigInt(b);
    const [floor, ceil] = [product / BigInt(c), (product + BigInt(c) - 1n) / BigInt(c)].map(Number);
    if (floorOf(a, b, c) !== floor || ceilOf(a, b, c) !== ceil) wrong.push([a, b, c]);
  }
  expect(wrong).toEqual([]);
});

test("names are ordered by their bytes", () => {
  const next = random(inject("seed"));
  const units = [
    "a",
    "b",
    " ",
    "\u00e4",
    "\ud7ff",
    "\ue000",
    "\uffff",
    "\u{10000}",
    "\u{1f600}",
    "\u{10ffff}",
  ];
  const name = () =>
    Array.from({ length: Math.floor(next() * 4) }, () => units[Math.floor(next() * units.length)]).join("");
  for (let i = 0; i < 5000; i++) {
    const [a, b] = [name(), name()];
    expect([a, b, Math.sign(compareNames(a, b))]).toEqual([
      a,
      b,
      Buffer.compare(Buffer.from(a), Buffer.from(b)),
    ]);
  }
});
