/** Random calls of a quota's store, over every kind of window. */
import type { Amendment, UseBatch, Bucket, Definition } from "../../../packages/holdfast/src/quota/store.ts";
import { random } from "../../harness/random.ts";

const hourMs = 3_600_000;

export interface Kept {
  readonly name: string;
  readonly limit: number | undefined;
  readonly definition: (now: number) => Definition;
  /** Time may be turned by multiples of it, in microseconds, without a window that no clock could have. */
  readonly unit: number;
  /** What is usual to be used at once. */
  readonly scale: number;
}

function kept(
  name: string,
  limit: number | undefined,
  rule: Definition["rule"],
  more: Partial<Omit<Kept, "name" | "definition">> & Partial<Definition> = {},
): Kept {
  const { unit = 1_000_000, scale = 1, plans, over = 0 } = more;
  const definition = (now: number): Definition => {
    const own = Math.floor(now / hourMs) * hourMs;
    const starts = [own - hourMs, own, own + hourMs, own + 2 * hourMs];
    return {
      rule: rule.window === "fixed" ? { ...rule, starts } : rule,
      plans,
      over: over === -1 ? undefined : over,
    };
  };
  return { name, limit, definition, unit, scale };
}

const fixed = { window: "fixed", starts: [] } as const;

export const quotas: readonly Kept[] = [
  kept("plain", 20, { window: "none" }),
  kept("over", 10, { window: "none" }, { over: 5 }),
  kept("record", 10, { window: "none" }, { over: -1 }),
  kept("unlimited", undefined, { window: "none" }),
  kept("credits", 0, { window: "none" }),
  kept("fixed", 15, fixed, { unit: hourMs * 1000 }),
  kept("plans", 8, fixed, { unit: hourMs * 1000, plans: { free: 8, pro: 30, all: Infinity } }),
  kept("refill", 7, { window: "refill", per: 10_000_000 }, { unit: 333_333 }),
  // More than what a number holds exactly, once it is multiplied.
  kept("wide", 10_000_000_007, { window: "refill", per: 86_400_000_000 }, { scale: 1_000_000_019 }),
  kept("parts", 15, { window: "parts", per: 10_000_000, parts: 5 }, { unit: 2_000_000 }),
  kept("uneven", 15, { window: "parts", per: 7_001_000, parts: 3 }, { unit: 2_333_666 }),
  kept("log", 12, { window: "log", per: 10_000_000 }, { unit: 777_777 }),
];

export const subjects = ["ada", "böb"];

export class Calls {
  readonly next: () => number;
  /** Those that it calls. */
  readonly quotas: readonly Kept[];
  #made = 0;

  constructor(seed: number, of: readonly Kept[] = quotas) {
    this.next = random(seed);
    this.quotas = of;
  }

  below(most: number): number {
    return Math.floor(this.next() * most);
  }

  pick<T>(of: readonly T[]): T {
    return of[this.below(of.length)] as T;
  }

  chance(of: number): boolean {
    return this.next() < of;
  }

  #amount({ scale }: Kept): number {
    if (this.chance(0.02)) return Number.MAX_SAFE_INTEGER;
    return scale * (1 + this.below(6));
  }

  /** So that a use takes several grants, and a refund leaves something to be refunded. */
  #few(of: Kept): number {
    return this.chance(0.1) ? this.#amount(of) : of.scale * (1 + this.below(2));
  }

  /** Those that come again are the same call mostly. */
  #id(of: Kept): { id: string; amount: number } {
    if (this.chance(0.4)) return { id: `new-${++this.#made}`, amount: this.#amount(of) };
    const number = this.below(20);
    return {
      id: `id-${number}`,
      amount: this.chance(0.1) ? this.#amount(of) : of.scale * (1 + (number % 5)),
    };
  }

  /** The quota's definition; now and then somebody else's, as after a change of the code. */
  definition(of: Kept, now: number): Definition {
    const late = this.chance(0.02) ? 10 * hourMs : 0;
    return (this.chance(0.03) ? this.pick(quotas) : of).definition(now + late);
  }

  batch(now: number): UseBatch {
    const definitions: Definition[] = [];
    const buckets: (Bucket & { readonly of: Kept })[] = [];
    const wanted = this.chance(0.5)
      ? [this.pick(this.quotas)]
      : [this.pick(this.quotas), this.pick(this.quotas), this.pick(this.quotas)];
    for (const of of new Set(wanted)) {
      definitions.push(this.definition(of, now));
      for (const subject of subjects.slice(0, 1 + this.below(2)))
        buckets.push({ quota: of.name, subject, definition: definitions.length - 1, limit: of.limit, of });
    }
    const uses: UseBatch["uses"][number][] = [];
    const noted = this.chance(0.2);
    const holding = this.chance(0.5);
    const grouped = this.chance(0.3);
    for (let group = 0; group < 1 + this.below(6); group++) {
      const places = grouped ? buckets.map((_, i) => i).filter(() => this.chance(0.6)) : [];
      if (places.length === 0) places.push(this.below(buckets.length));
      const common = this.#id(buckets[places[0] as number]?.of as Kept);
      for (const bucket of places) {
        const of = buckets[bucket]?.of as Kept;
        const { id, amount } = grouped ? common : this.#id(of);
        uses.push({
          bucket,
          id: this.chance(0.05) ? `other-${id}` : id,
          amount,
          group,
          holdMs: holding && this.chance(0.5) ? 1 + this.below(60_000) : undefined,
          details: noted && this.chance(0.5) ? JSON.stringify({ by: `by-${id}` }) : undefined,
        });
      }
    }
    // Those that are used, and no others.
    const used = [...new Set(uses.map(({ bucket }) => bucket))].toSorted((a, b) => a - b);
    return {
      definitions,
      buckets: used.map((place) => {
        const { of: _, ...bucket } = buckets[place] as Bucket & { readonly of: Kept };
        return bucket;
      }),
      uses: uses.map((use) => ({ ...use, bucket: used.indexOf(use.bucket) })),
      make: true,
      look: this.chance(0.6),
    };
  }

  amendment(
    now: number,
    known: {
      readonly lines: readonly string[];
      /** Of these, those that took credits. */
      readonly drained?: readonly string[];
      readonly holds: readonly string[];
      readonly grants: readonly string[];
    },
    of: Kept,
    subject: string,
  ): Amendment {
    const definition = this.definition(of, now);
    const common = {
      definition,
      bucket: { quota: of.name, subject, limit: of.limit },
      id: this.chance(0.8)
        ? `amend-${++this.#made}`
        : this.pick([`id-${this.below(20)}`, `amend-${this.below(10)}`]),
      details: this.chance(0.2) ? JSON.stringify({ reference: "r" }) : undefined,
    };
    const one = (ids: readonly string[]) => (ids.length > 0 && this.chance(0.9) ? this.pick(ids) : "unknown");
    switch (
      this.pick([
        "refund",
        "refund",
        "refund",
        "settle",
        "settle",
        "release",
        "grant",
        "grant",
        "grant",
        "grant",
        "revoke",
        "limit",
        "plan",
        "reset",
      ] as const)
    ) {
      case "refund":
        return {
          ...common,
          kind: "refund",
          of: one(known.drained?.length && this.chance(0.7) ? known.drained : known.lines),
          amount: this.chance(0.4) ? undefined : this.#few(of),
        };
      case "settle": {
        const hold = one(known.holds);
        const amount = this.pick([0, this.#amount(of), 60 * of.scale]);
        return {
          ...common,
          id: this.chance(0.7) ? `settle:${hold}` : common.id,
          kind: "settle",
          of: hold,
          amount,
        };
      }
      case "release":
        return { ...common, kind: "release", of: one(known.holds) };
      case "grant": {
        const until = this.chance(0.4) ? undefined : Math.floor(now) + this.below(60_000) - 5000;
        return { ...common, kind: "grant", amount: this.#few(of), priority: this.below(2), until };
      }
      case "revoke":
        return { ...common, kind: "revoke", of: one(known.grants) };
      case "limit":
        return {
          ...common,
          kind: "limit",
          amount: this.pick([undefined, 0, Infinity, of.scale * this.below(25)]),
        };
      case "plan":
        return { ...common, kind: "plan", plan: this.pick([undefined, "free", "pro", "all", "gone"]) };
      case "reset":
        return { ...common, kind: "reset" };
    }
  }
}
