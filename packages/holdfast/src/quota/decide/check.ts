/**
 * Whether a bucket's ledger adds up, to itself and to what is counted; and what the bucket should be.
 *
 * Each line follows from the one before: versions have no gaps, used = used before - forgotten + delta, and what is held
 * and of credit changes by the line's amount where its kind tells. It is checked back to the last repair: what was wrong
 * before it has been seen to. What the bucket should be:
 *
 * - **used**: what the lines add up to, each by its own amount. Where lines are missing, what the next one says.
 * - **parts**: what is left of the window's uses. Those that are rolled up, and of lines that are missing, are as they are.
 * - **held** and **credit**: what its holds and grants come to, for the ledger does not know when they end.
 * - **version** and **since**: those of the newest line.
 *
 * A ledger may be longer than what fits into memory: lines are added one by one, in the order of their versions.
 */
import type { Trust } from "../../input/trust.ts";
import type { Definition, Rule } from "../store.ts";
import { type BucketRow, type LineRow, type QuotaWrites, deltaOf, leftOf, limitOf, unusual } from "./rows.ts";
import { countedKinds, partLength, partsBetween, roll, sum } from "./windows.ts";

type Chain = Pick<LineRow, "version" | "used" | "since"> & { readonly held: number; readonly credit: number };

export interface Checked {
  /** What does not add up, in words. */
  readonly findings: readonly string[];
  readonly entries: number;
  /** What was used after the newest line, as it says. */
  readonly last: number;
  /** What the bucket should be. */
  readonly should: Pick<BucketRow, "version" | "used" | "held" | "credit" | "since" | "parts">;
}

/** `add` each line, and then see what is `checked`. */
export class QuotaLedger {
  readonly #bucket: BucketRow;
  readonly #rule: Rule;
  #before: Chain = { version: 0, used: 0, held: 0, credit: 0, since: undefined };
  #used = 0;
  #entries = 0;
  #broken = false;
  #findings: string[] = [];
  /** Versions that there are lines for, also before the last repair. */
  #covered = 0;
  /** Of a window in parts: what is left of its uses since the last reset, by the beginning of the part. */
  #parts = new Map<number, number>();
  #rolled: number | undefined;

  constructor(bucket: BucketRow, rule: Rule) {
    this.#bucket = bucket;
    this.#rule = rule;
  }

  add(line: LineRow): void {
    this.#covered += line.version - (line.first ?? line.version) + 1;
    if (this.#rule.window === "parts") this.#addPart(line, this.#rule);
    const chain = {
      version: line.version,
      used: line.used,
      held: line.held ?? 0,
      credit: line.credit ?? 0,
      since: line.since,
    };
    if (line.kind === "repair") {
      this.#entries = 0;
      this.#broken = false;
      this.#findings = [];
      this.#used = line.used;
    } else {
      const finding = findingOf(line, this.#before);
      if (finding !== undefined) this.#findings.unshift(finding);
      this.#broken ||= finding !== undefined;
      this.#used = this.#broken ? usedBy(line, this.#before, this.#used) : line.used;
    }
    this.#entries++;
    this.#before = chain;
  }

  /** `held`, `credit`: what its holds and grants come to. */
  checked({ held, credit }: { readonly held: number; readonly credit: number }): Checked {
    const [bucket, before] = [this.#bucket, this.#before];
    const findings = [...this.#findings];
    const { used, parts, known } = this.#counted();
    if (known && String(parts) !== String(bucket.parts))
      findings.push(
        `the parts of the window are {${String(bucket.parts)}}, by the ledger {${String(parts)}}`,
      );
    if (bucket.version !== before.version)
      findings.push(`the bucket is at version ${bucket.version}, the ledger at ${before.version}`);
    if (bucket.used !== used) findings.push(`the bucket counts ${bucket.used} used, the ledger ${used}`);
    if (before.version > 0 && bucket.since !== before.since)
      findings.push(
        `the bucket counts since ${shown(bucket.since)}, the ledger since ${shown(before.since)}`,
      );
    if (bucket.held !== held || before.held !== held)
      findings.push(
        `the bucket has ${bucket.held} held, the ledger ${before.held}, and its holds come to ${held}`,
      );
    if (bucket.credit !== credit || before.credit !== credit)
      findings.push(
        `the bucket has ${bucket.credit} of credit, the ledger ${before.credit}, and its grants come to ${credit}`,
      );
    const { version, since, used: last } = before;
    return { findings, entries: this.#entries, last, should: { version, used, held, credit, since, parts } };
  }

  /** `known`: the parts are those of this window, so that they can be compared. */
  #counted(): Pick<BucketRow, "used" | "parts"> & { readonly known?: true } {
    const { parts } = this.#bucket;
    const rule = this.#rule;
    const { since, used: last } = this.#before;
    // It reads its lines each time, so what they say was right whatever the bucket said.
    if (rule.window === "log") return { used: last, parts };
    if (rule.window === "parts" && parts?.length === rule.parts + 1 && since !== undefined)
      return { ...this.#countedParts(parts, since, partLength(rule)), known: true };
    // Of a window that is not known here: rather given back too late than too early.
    if (parts && sum(parts) !== this.#used)
      return { used: this.#used, parts: parts.map((_, i) => (i === 0 ? this.#used : 0)) };
    return { used: this.#used, parts };
  }

  #countedParts(
    parts: readonly number[],
    since: number,
    length: number,
  ): { used: number; parts: readonly number[] } {
    const rolledFrom = this.#rolled === undefined ? Infinity : partsBetween(this.#rolled, since, length);
    const found = parts.map((part, place) => (place >= rolledFrom ? part : 0));
    for (const [start, amount] of this.#parts) {
      const place = partsBetween(start, since, length);
      if (place >= 0 && place < Math.min(found.length, rolledFrom))
        found[place] = (found[place] as number) + amount;
    }
    const used = sum(found);
    const { used: last, version } = this.#before;
    if (used >= last || this.#covered >= version) return { used, parts: found };
    // Lines are missing: what the newest one says counts.
    if (this.#bucket.since === since && sum(parts) === last) return { used: last, parts };
    return { used: last, parts: found.map((part, i) => (i === 0 ? part + last - used : part)) };
  }

  #addPart(line: LineRow, rule: Rule & { window: "parts" }): void {
    if (line.kind === "reset") this.#parts = new Map();
    if (line.kind === "rollup" && line.since !== undefined)
      this.#rolled = Math.max(this.#rolled ?? line.since, line.since);
    if (!countedKinds.includes(line.kind) || line.since === undefined) return;
    this.#parts.set(line.since, (this.#parts.get(line.since) ?? 0) + leftOf(line));
    if (this.#parts.size <= 4 * (rule.parts + 2)) return;
    const oldest = line.since - (rule.parts + 2) * partLength(rule);
    for (const start of this.#parts.keys()) if (start < oldest) this.#parts.delete(start);
  }
}

/** What is wrong between a line and the one before. */
function findingOf(line: LineRow, before: Chain): string | undefined {
  const { version, used, kind, amount } = line;
  const first = line.first ?? version;
  const [delta, forgotten, held, credit] = [
    deltaOf(line),
    line.forgotten ?? 0,
    line.held ?? 0,
    line.credit ?? 0,
  ];
  if (first !== before.version + 1) return `versions ${before.version + 1} to ${first - 1} are missing`;
  const where = first === version ? `version ${version}` : `versions ${first} to ${version}`;
  if (used !== before.used - forgotten + delta)
    return `${where}: ${before.used} used before, ${forgotten} forgotten, ${delta} more, and ${used} after`;
  const holds = holdsOf(line);
  if (holds !== undefined && held !== before.held + holds)
    return `${where}: ${before.held} held before, and ${held} after ${kind} of ${amount}`;
  const grants = grantsOf(line);
  if (grants !== undefined && credit !== before.credit + grants)
    return `${where}: ${before.credit} of credit before, and ${credit} after ${kind} of ${amount}`;
  return undefined;
}

/** What it changed of what is held; undefined: the line alone does not tell. */
function holdsOf({ kind, amount }: LineRow): number | undefined {
  if (kind === "hold") return amount;
  if (kind === "release" || kind === "expire") return -amount;
  return kind === "settle" || kind === "rollup" || kind === "repair" ? undefined : 0;
}

/** What it changed of credit; undefined: the line alone does not tell. */
function grantsOf(line: LineRow): number | undefined {
  const { kind, amount } = line;
  if (kind === "grant") return amount;
  if (kind === "lapse" || kind === "revoke") return -amount;
  if (kind === "consume" || kind === "settle") return deltaOf(line) - amount;
  return kind === "refund" || kind === "rollup" || kind === "repair" ? undefined : 0;
}

/** Once a figure was wrong, the amounts are what counts. Of a window that has begun, nothing was left. */
function usedBy(line: LineRow, before: Chain, used: number): number {
  const missing = (line.first ?? line.version) !== before.version + 1;
  const [delta, forgotten] = [deltaOf(line), line.forgotten ?? 0];
  if (missing || line.kind === "rollup") return line.used;
  if (line.kind === "reset") return 0;
  if (forgotten > 0 && line.used === delta) return delta;
  return Math.max(0, used - forgotten + delta);
}

const shown = (moment: number | undefined): string =>
  moment === undefined ? "nothing" : new Date(Math.floor(moment / 1000)).toISOString();

export interface QuotaRepair {
  readonly id: string;
  readonly trust: Trust;
  readonly now: number;
  /** Of an exact sliding window: what it counts now. */
  readonly counted: number;
}

/**
 * The bucket as it should be, and a line that says so. `trust: "levels"`: what it counts as used stays. Holds and grants
 * count either way. Undefined: what it counts cannot be trusted, since it has a window that slides, which is what its
 * lines say.
 */
export function repair(
  bucket: BucketRow,
  { findings, entries, last, should }: Checked,
  { id, trust, now, counted }: QuotaRepair,
  definition: Definition,
  code: number | undefined,
): QuotaWrites | undefined {
  if (trust === "levels" && bucket.parts) return undefined;
  const { used, since, parts } = trust === "levels" ? bucket : should;
  const limit = limitOf(bucket, definition, code);
  // Of its window: what was used in one that is over is not charged to this one.
  const rolled = roll({ used: Math.max(0, used), since, parts }, definition.rule, limit, now, () => counted);
  const { held, credit } = should;
  const row = { ...bucket, ...rolled, held, credit, version: Math.max(bucket.version, should.version) + 1 };
  const line: LineRow = {
    bucket: row.id,
    version: row.version,
    kind: "repair",
    id,
    entry: undefined,
    amount: row.used,
    delta: undefined,
    forgotten: unusual(last, 0),
    refunded: undefined,
    used: row.used,
    held: unusual(held, 0),
    credit: unusual(credit, 0),
    max: limit,
    since: row.since,
    at: now,
    first: undefined,
    drains: undefined,
    details: { metadata: { findings, entries } },
  };
  return {
    buckets: { update: [row] },
    lines: { insert: [line], update: [] },
    holds: { insert: [], delete: [] },
    grants: { insert: [], update: [], delete: [] },
  };
}
