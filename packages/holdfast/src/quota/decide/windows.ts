/**
 * How time gives back.
 *
 * - **none**: never.
 * - **fixed**: all of it, when the next window begins. The caller names the beginnings of windows around now, ascending;
 *   the window of now is the last that has begun. A bucket never goes back to an earlier window than the one it is in. If
 *   now is before the first, or not before the last, of the beginnings, the caller's clock is far off: it is late.
 * - **refill**: evenly, as much as the limit in `per`. Whole units come back, rounded down; the time that a unit has not
 *   used up counts for the next one, so the moment from which it counts moves by what the units took, rounded up. After
 *   `per`, when all is back, and without a limit, nothing is used any more. With a limit of 0 nothing comes back.
 * - **parts**: `per` is cut in `parts` of the same length (rounded down to a microsecond), which begin at multiples of
 *   that length since 1970. `parts + 1` of them are counted, the one of now first, so that what was used counts for `per`
 *   at least, and for one part more at the most. Parts never go back.
 * - **log**: each use counts until `per` has passed since it was entered, exactly. Its lines are read backwards until one
 *   is too old, or a reset.
 */
import type { Rule, UseVerdict } from "../store.ts";
import { type BucketRow, type CountedUses, type LineRow, leftOf, mostUsed } from "./rows.ts";

export type Rolled = Pick<BucketRow, "used" | "since" | "parts">;

/** Whether the windows that the caller knows are not those of now. */
export function isLate(rule: Rule, now: number): boolean {
  if (rule.window !== "fixed") return false;
  const { starts } = rule;
  return !(now >= (starts[0] ?? Infinity) * 1000 && now < (starts.at(-1) ?? -Infinity) * 1000);
}

/** What is left of a bucket's use now. `counted`: of the lines that an exact sliding window counts. */
export function roll(
  bucket: Rolled,
  rule: Rule,
  limit: number | undefined,
  now: number,
  counted: () => number,
): Rolled {
  switch (rule.window) {
    case "none":
      return bucket;
    case "fixed": {
      const start = Math.max(...rule.starts.map((ms) => ms * 1000).filter((each) => each <= now));
      return bucket.since === undefined || start > bucket.since
        ? { ...bucket, used: 0, since: start }
        : bucket;
    }
    case "refill":
      return refill(bucket, rule.per, limit, now);
    case "parts":
      return slide(bucket, rule, now);
    case "log":
      return { ...bucket, used: counted(), since: Math.max(bucket.since ?? now, now) };
  }
}

function refill(bucket: Rolled, per: number, limit: number | undefined, now: number): Rolled {
  const { used, since } = bucket;
  const elapsed = Math.max(0, now - (since ?? now));
  if (since === undefined || elapsed >= per || limit === undefined || limit <= 0)
    return { ...bucket, used: limit !== undefined && limit <= 0 ? used : 0, since: now };
  const units = floorOf(elapsed, limit, per);
  if (units >= used) return { ...bucket, used: 0, since: now };
  return { ...bucket, used: used - units, since: since + ceilOf(units, per, limit) };
}

function slide(bucket: Rolled, rule: Rule & { window: "parts" }, now: number): Rolled {
  const length = partLength(rule);
  const start = Math.floor(now / length) * length;
  let { parts, since } = bucket;
  parts ??= zeros(rule.parts + 1);
  if (since !== undefined && start > since) {
    const passed = Math.min(rule.parts + 1, partsBetween(since, start, length));
    parts = [...zeros(passed), ...parts.slice(0, rule.parts + 1 - passed)];
  }
  since = Math.max(since ?? start, start);
  return { used: sum(parts), since, parts };
}

/** Of a window in parts, in microseconds. */
export function partLength({ per, parts }: { readonly per: number; readonly parts: number }): number {
  return Math.floor(per / parts);
}

/** How many parts lie between two beginnings, rounded: the length may have been another one. */
export function partsBetween(from: number, to: number, length: number): number {
  const distance = to - from;
  const rounded = Math.floor((2 * Math.abs(distance) + length) / (2 * length));
  return distance < 0 ? -rounded : rounded;
}

/** The first version that an exact sliding window counts follows the newest line that ends it: this one, if it does. */
export function endsCount(line: Pick<LineRow, "at" | "kind">, per: number, now: number): boolean {
  return line.at <= now - per || line.kind === "reset";
}

/** The lines that an exact sliding window counts, of those after the one that ends it. */
export const countedKinds: readonly string[] = ["consume", "settle"];

/** What an exact sliding window counts, by all of a bucket's lines, newest first. */
export function counts(lines: Iterable<LineRow>, per: number, now: number): number {
  let counted = 0;
  for (const line of lines) {
    if (endsCount(line, per, now)) break;
    if (countedKinds.includes(line.kind)) counted += leftOf(line);
  }
  return counted;
}

/** What a refusal knows of the bucket. */
export interface WindowRefused {
  readonly bucket: Rolled;
  readonly limit: number | undefined;
  /** So much has to come back. */
  readonly need: number;
  /** Used by calls of the same batch, and not among the lines yet. */
  readonly newest: number;
  readonly uses: () => readonly CountedUses[];
}

/**
 * Microseconds until so much has come back that it fits, if nobody else uses anything. "window": when the next one begins,
 * which the caller knows. "never": time alone does not help, or not in our lifetime.
 */
export function retryIn(
  rule: Rule,
  refused: WindowRefused,
  now: number,
): Exclude<UseVerdict["retry"], undefined> {
  const { bucket, limit, need } = refused;
  const since = bucket.since ?? now;
  switch (rule.window) {
    case "none":
    case "fixed":
      return "window";
    case "refill":
      if (limit === undefined || limit <= 0 || need > bucket.used) return "never";
      return orNever(ceilOf(need, rule.per, limit) - (now - since));
    case "parts": {
      const passing = partsUntil(bucket.parts ?? [], need);
      return passing === undefined ? "never" : orNever(passing * partLength(rule) - (now - since));
    }
    case "log":
      return leavesIn(refused, rule.per, now);
  }
}

const orNever = (wait: number) => (wait > mostUsed ? "never" : wait);

/** So many parts have to pass: the last of them first. */
function partsUntil(parts: readonly number[], need: number): number | undefined {
  let left = need;
  for (const [passed, part] of parts.toReversed().entries()) {
    left -= part;
    if (left <= 0) return passed + 1;
  }
  return undefined;
}

/** A line that is too old ends the count, so what was before it does not count any more either. */
function leavesIn({ need, newest, bucket, uses }: WindowRefused, per: number, now: number): number | "never" {
  if (need > bucket.used) return "never";
  if (need > bucket.used - newest) return per;
  let gone = 0;
  let first = Infinity;
  for (const { at, left } of uses()) {
    gone += left;
    if (gone >= need) first = Math.min(first, at);
  }
  return first === Infinity ? "never" : first - now + per;
}

/** a × b / c, exactly, rounded down: the product may be larger than what a number can hold. */
export function floorOf(a: number, b: number, c: number): number {
  const product = a * b;
  return product <= mostUsed ? Math.floor(product / c) : Number((BigInt(a) * BigInt(b)) / BigInt(c));
}

/** The same, rounded up. */
export function ceilOf(a: number, b: number, c: number): number {
  const product = a * b;
  if (product <= mostUsed) return Math.ceil(product / c);
  return Number((BigInt(a) * BigInt(b) + BigInt(c) - 1n) / BigInt(c));
}

export const sum = (values: readonly number[]): number => values.reduce((total, value) => total + value, 0);

const zeros = (count: number): number[] => Array.from({ length: count }, () => 0);
