/**
 * One change of one bucket that is not a use; and how it stands, without a change.
 *
 * - An **id** that was used before is answered again, if it was for the same: the same kind, of the same line, hold or
 *   grant, and, where one is given, the same amount. Else it is a conflict.
 * - Holds and grants that are over are looked for first, and found also if the change is refused.
 * - **refund**: of a use or of what was settled; all that is left of it, or some, never more than it was (too much). What
 *   came from grants goes back to them first, to the last one first, as far as they are there; the rest makes room, as far
 *   as the window still counts it, and if there was no reset since.
 * - **settle**: ends a hold, and uses what it came to. More than was held only if there is room (refused). What does not
 *   fit into the limit is taken from credits; what they do not cover (a grant ran out meanwhile) is used above the limit.
 * - **release**: ends a hold. A hold that is not there, for these two: unknown.
 * - **grant**: credits; those of a bucket come to what can be counted exactly, at the most (too much: so many more). One
 *   that is there is known by its id also after its line was rolled up: then it is answered with how it stands now.
 * - **revoke**: ends a grant. What was used of it stays used. One that is not there: unknown.
 * - **limit**, **plan**: from now on, in mid-window too. The line says the limit that follows from it.
 * - **reset**: nothing is used any more. Holds and credits stay. A window that is not fixed begins anew.
 */
import type { Amended, Amendment, Bucket, Definition, Elsewhere, Late, BucketStanding } from "../store.ts";
import { parsed } from "./consume.ts";
import { BucketDraft } from "./draft.ts";
import {
  type BucketRow,
  type BucketView,
  type Drain,
  type LineRow,
  type QuotaNeed,
  type QuotaWrites,
  deltaOf,
  isElsewhere,
  limitOf,
  milliseconds,
  mostUsed,
  never,
  standingOf,
  unlessLacking,
  unlimited,
} from "./rows.ts";
import { isLate, partLength, partsBetween, roll } from "./windows.ts";

export interface AmendView {
  readonly now: number;
  readonly bucket: BucketView;
}

export interface AmendDecided {
  readonly verdicts: Amended | Late | Elsewhere;
  readonly writes: QuotaWrites;
}

/** What a change comes to: the line that says so, or why not. */
type Change =
  | { readonly amount: number; readonly delta?: number; readonly drains?: readonly Drain[] | undefined }
  | { readonly not: Exclude<Amended["kind"], "done">; readonly amount: number };

export function decideAmendment(
  { now, bucket }: AmendView,
  amendment: Amendment,
): AmendDecided | { readonly need: QuotaNeed } {
  return unlessLacking((): AmendDecided => {
    const { definition, id, kind, details } = amendment;
    if (isLate(definition.rule, now))
      return { verdicts: { late: milliseconds(now) }, writes: BucketDraft.writes([]) };
    if (isElsewhere(bucket.row)) return { verdicts: { elsewhere: true }, writes: BucketDraft.writes([]) };
    const draft = new BucketDraft(bucket, 0, definition, amendment.bucket.limit, now);
    const before = draft.line(id);
    if (before) return { verdicts: repeated(amendment, before), writes: BucketDraft.writes([]) };
    draft.reap();
    const change = changeOf(draft, amendment);
    if ("not" in change) {
      const answer = { ...draft.standing(), kind: change.not, amount: change.amount };
      return { verdicts: answer, writes: BucketDraft.writes([draft]) };
    }
    const { amount, delta = 0, drains } = change;
    const entry = "of" in amendment ? amendment.of : undefined;
    draft.write({ kind, id, entry, amount, delta, drains, details: parsed(details), max: draft.limit });
    return { verdicts: { ...draft.standing(), kind: "done", amount }, writes: BucketDraft.writes([draft]) };
  });
}

function repeated(amendment: Amendment, line: LineRow): Amended {
  const entry = "of" in amendment ? amendment.of : undefined;
  const amount = "amount" in amendment ? stored(amendment.amount) : undefined;
  const same =
    line.kind === amendment.kind && line.entry === entry && (amount === undefined || amount === line.amount);
  return { ...standingOf(line), kind: same ? "before" : "conflict", amount: line.amount };
}

function changeOf(draft: BucketDraft, amendment: Amendment): Change {
  switch (amendment.kind) {
    case "refund":
      return refund(draft, amendment.of, amendment.amount);
    case "settle":
      return settle(draft, amendment.of, amendment.amount);
    case "release": {
      const amount = draft.endHold(amendment.of);
      return amount === undefined ? { not: "unknown", amount: 0 } : { amount };
    }
    case "grant": {
      const { id, amount, priority, until } = amendment;
      const there = draft.grants.find((each) => each.id === id);
      if (there) return { not: there.amount === amount ? "before" : "conflict", amount: there.amount };
      if (draft.credit + amount > mostUsed) return { not: "too much", amount: mostUsed - draft.credit };
      draft.startGrant(id, { amount, priority, until: until === undefined ? never : until * 1000 });
      return { amount };
    }
    case "revoke":
      if (!draft.grants.some(({ id }) => id === amendment.of)) return { not: "unknown", amount: 0 };
      return { amount: draft.endGrant(amendment.of) };
    case "limit":
      draft.own_limit = stored(amendment.amount);
      return { amount: draft.own_limit ?? 0 };
    case "plan":
      draft.plan = amendment.plan;
      return { amount: 0 };
    case "reset":
      return reset(draft);
  }
}

/** A limit, or an amount, as it is stored. */
const stored = (amount: number | undefined): number | undefined =>
  amount === undefined ? undefined : Math.min(amount, unlimited);

function refund(draft: BucketDraft, of: string, wanted: number | undefined): Change {
  const line = draft.line(of);
  if (!line || (line.kind !== "consume" && line.kind !== "settle"))
    return { not: "unknown", amount: wanted ?? 0 };
  const refunded = line.refunded ?? 0;
  const left = line.amount - refunded;
  const amount = wanted ?? left;
  if (amount > left) return { not: "too much", amount: left };
  const drained = line.amount - deltaOf(line);
  const toGrants = Math.min(amount, Math.max(0, drained - refunded));
  fillGrants(draft, line.drains ?? [], toGrants, refunded);
  const back = Math.min(stillCounted(draft, line, amount - toGrants), draft.used);
  draft.used -= back;
  draft.refunded(line.version, refunded + amount);
  return { amount, delta: 0 - back };
}

/** The last one first; `before`: what went back to them earlier. */
function fillGrants(draft: BucketDraft, drains: readonly Drain[], amount: number, before: number): void {
  let [left, passed] = [amount, before];
  for (const drain of drains.toReversed()) {
    if (left === 0) break;
    const part = Math.min(left, Math.max(0, drain.amount - passed));
    passed = Math.max(0, passed - drain.amount);
    if (part > 0) draft.fill(drain.id, part);
    left -= part;
  }
}

/** So much of it does the window still count; of one in parts it is taken off. */
function stillCounted(draft: BucketDraft, line: LineRow, amount: number): number {
  const { rule } = draft.definition;
  if (line.version < draft.reset) return 0;
  switch (rule.window) {
    case "fixed":
      return line.since === draft.since ? amount : 0;
    case "log":
      return line.at <= draft.now - rule.per ? 0 : amount;
    case "parts": {
      const parts = draft.parts ?? [];
      if (line.since === undefined || draft.since === undefined) return 0;
      const place = partsBetween(line.since, draft.since, partLength(rule));
      const counted = Math.min(amount, parts[place] ?? 0);
      draft.parts = parts.map((part, i) => (i === place ? part - counted : part));
      return counted;
    }
    default:
      return amount;
  }
}

function settle(draft: BucketDraft, of: string, amount: number): Change {
  const hold = draft.holds.find(({ id }) => id === of);
  if (!hold) return { not: "unknown", amount };
  if (amount > hold.amount && draft.shortage(amount - hold.amount) > 0) return { not: "refused", amount };
  draft.endHold(of);
  const fits = Math.min(amount, Math.max(draft.cap - draft.used, 0));
  const fromCredit = Math.min(amount - fits, draft.credit);
  const drains = fromCredit > 0 ? draft.drain(fromCredit) : undefined;
  const delta = amount - fromCredit;
  draft.count(delta);
  return { amount, delta, drains };
}

function reset(draft: BucketDraft): Change {
  const amount = draft.used;
  draft.used = 0;
  draft.reset = draft.version + 1;
  draft.parts = undefined;
  if (draft.definition.rule.window !== "fixed") draft.since = undefined;
  return { amount, delta: 0 - amount };
}

export interface PeekView {
  readonly now: number;
  /** Undefined: nothing was ever used. */
  readonly row: BucketRow | undefined;
  /** What is held, and what is left of grants, as far as they are not over. */
  readonly held: number;
  readonly credit: number;
  /** Of an exact sliding window. */
  readonly counted: number;
}

/** What a call would find now. */
export function standingNow(
  { now, row, held, credit, counted }: PeekView,
  definition: Definition,
  bucket: Omit<Bucket, "definition">,
): (BucketStanding & { readonly plan: string | undefined }) | Late | Elsewhere {
  const at = milliseconds(now);
  if (isLate(definition.rule, now)) return { late: at };
  if (row && isElsewhere(row)) return { elsewhere: true };
  const { own_limit, plan, used = 0, since, parts, version = 0 }: Partial<BucketRow> = row ?? {};
  const limit = limitOf({ own_limit, plan }, definition, bucket.limit);
  const rolled = roll({ used, since, parts }, definition.rule, limit, now, () => counted);
  return {
    used: rolled.used,
    held,
    credit,
    limit,
    version,
    at,
    plan,
  };
}
