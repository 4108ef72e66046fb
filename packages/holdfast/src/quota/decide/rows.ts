/** What decisions about quotas read and write, and what follows from a row alone. */
import type { Definition, BucketStanding } from "../store.ts";
import type { BucketRow, GrantRow, HoldRow, LineRow, OfBucket } from "../stored.ts";

export type { BucketRow, Drain, GrantRow, HoldRow, LineRow } from "../stored.ts";

/** The most that can be counted: whole numbers are exact up to here. */
export const mostUsed = Number.MAX_SAFE_INTEGER;

/** "No limit", where one is stored: undefined there means that it has none of its own. */
export const unlimited = 2 ** 53;

/** A moment that does not come. */
export const never = Number.MAX_SAFE_INTEGER;

/** Nothing is decided here about a bucket that counts on another of several databases. */
export const isElsewhere = ({ moved_to, moved_from }: BucketRow): boolean =>
  moved_to !== undefined || moved_from !== undefined;

/** What was read of a bucket. What is undefined was not read, and is asked for where it matters. */
export interface BucketView {
  readonly row: BucketRow;
  /** Its lines with the ids of the calls, and with those that the calls are about. */
  readonly lines?: ReadonlyMap<string, LineRow>;
  /** Those that are over, those with the ids of the calls, and the one that a call is about. */
  readonly holds?: readonly HoldRow[];
  /** Those that are over or not spent; all of them for a call that makes one, ends one, or gives back to them. */
  readonly grants?: readonly GrantRow[];
  /** Of an exact sliding window: what it still counts ({@link counts}). */
  readonly counted?: number;
  /** Of an exact sliding window: its uses in the order of their versions ({@link counts}). */
  readonly uses?: readonly CountedUses[];
}

/** What is left of a use, and when it was. */
export interface CountedUses {
  readonly at: number;
  readonly left: number;
}

/** What a decision cannot do without, of which buckets: it is to be read, and the decision asked for again. */
export interface QuotaNeed {
  readonly what: "lines" | "holds" | "grants" | "counted" | "uses";
  /** Their places in the view. */
  readonly buckets: readonly number[];
}

/** What is to be written, by table. */
export interface QuotaWrites {
  readonly buckets: { readonly update: readonly BucketRow[] };
  readonly lines: {
    readonly insert: readonly LineRow[];
    readonly update: readonly Pick<LineRow, "bucket" | "version" | "refunded">[];
  };
  readonly holds: { readonly insert: readonly HoldRow[]; readonly delete: readonly OfBucket[] };
  readonly grants: {
    readonly insert: readonly GrantRow[];
    readonly update: readonly (OfBucket & Pick<GrantRow, "spent">)[];
    readonly delete: readonly OfBucket[];
  };
}

/** Thrown inside of a decision, which returns it. */
export class Lacking {
  readonly need: QuotaNeed;
  constructor(what: QuotaNeed["what"], ...buckets: readonly number[]) {
    this.need = { what, buckets };
  }
}

/** Runs a decision until it is made, or lacks something. */
export function unlessLacking<T extends object>(decision: () => T): T | { readonly need: QuotaNeed } {
  try {
    return decision();
  } catch (error) {
    if (error instanceof Lacking) return { need: error.need };
    throw error;
  }
}

/** The limit of a bucket's own, of its plan, or of the code; undefined: there is none. */
export function limitOf(
  { own_limit, plan }: Pick<BucketRow, "own_limit" | "plan">,
  { plans }: Pick<Definition, "plans">,
  code: number | undefined,
): number | undefined {
  const ofPlan = plan !== undefined && plans && Object.hasOwn(plans, plan) ? plans[plan] : undefined;
  const limit = own_limit ?? ofPlan ?? code ?? Infinity;
  return limit >= unlimited ? undefined : limit;
}

/** What may be counted in all: the limit and what is let through above it. Without one of them, all that can be counted. */
export function capOf(limit: number | undefined, { over }: Pick<Definition, "over">): number {
  return limit === undefined || over === undefined ? mostUsed : Math.min(mostUsed, limit + over);
}

export const deltaOf = ({ delta, amount }: Pick<LineRow, "delta" | "amount">): number => delta ?? amount;

/** What is left of a line's use in its window. Of what was given back, credits came first. */
export function leftOf(line: Pick<LineRow, "delta" | "amount" | "refunded">): number {
  const delta = deltaOf(line);
  return delta - Math.max(0, (line.refunded ?? 0) - (line.amount - delta));
}

/** How it stood after a line. */
export function standingOf(line: LineRow): BucketStanding {
  return {
    used: line.used,
    held: line.held ?? 0,
    credit: line.credit ?? 0,
    limit: line.max,
    version: line.version,
    at: milliseconds(line.at),
  };
}

export const milliseconds = (moment: number): number => moment / 1000;

/** As all engines order names: by their bytes in UTF-8, and so by their characters. */
export function compareNames(a: string, b: string): number {
  const length = Math.min(a.length, b.length);
  for (let i = 0; i < length; i++) {
    const [x, y] = [a.charCodeAt(i), b.charCodeAt(i)];
    if (x !== y) return rankOf(x) - rankOf(y);
  }
  return a.length - b.length;
}

/** Of a unit of UTF-16: halves of characters come after all that are whole. */
const rankOf = (unit: number): number =>
  unit < 0xd800 ? unit : unit < 0xe000 ? unit + 0x2000 : unit - 0x800;

export const unusual = (value: number, usual: number): number | undefined =>
  value === usual ? undefined : value;
