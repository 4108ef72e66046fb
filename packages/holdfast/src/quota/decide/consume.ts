/**
 * Whether something may be used, or held. Calls are decided in the order in which they came, and those of one group are
 * granted all or none.
 *
 * - An **id** stands for one use of one bucket. One that was granted before, by an earlier call or by an earlier one of
 *   these, is answered again with the answer of then; with another amount, or for something else, it is a conflict. Of a
 *   group all were granted together, or it is another group: then those that are new are a conflict too. A refusal is not
 *   kept. A hold that has not ended is known by its id also after its line was rolled up: then it is answered with how it
 *   stands now.
 * - **Room**: what is used and held, and what is asked for, must fit into the limit, what is let through above it, and
 *   the credits. Only if it does not, or takes credits, is it looked for holds and grants that are over: they make room,
 *   or are none. What was found of them is kept, also if the call is refused.
 * - **Credits** are taken for what does not fit into the limit beside what is used. A hold takes none: which grants pay
 *   is decided when it is settled.
 * - **A refusal** says of the one whose refusal it was when to try again: when enough has come back, if nobody uses
 *   anything else. The others of its group have neither granted nor refused.
 * - **A line** is written for each that is granted, and the bucket is what its newest line says.
 */
import type { UseBatch, BucketStanding, Use, UseVerdict, Verdicts } from "../store.ts";
import { BucketDraft } from "./draft.ts";
import {
  type BucketView,
  Lacking,
  type QuotaNeed,
  type QuotaWrites,
  isElsewhere,
  milliseconds,
  standingOf,
  unlessLacking,
} from "./rows.ts";
import { isLate, retryIn } from "./windows.ts";

export interface UsesView {
  readonly now: number;
  /** In the order of the batch's. */
  readonly buckets: readonly BucketView[];
}

export interface UsesDecided {
  readonly verdicts: Verdicts;
  readonly writes: QuotaWrites;
}

/** What was granted under an id. */
interface Known {
  readonly kind: string;
  readonly amount: number;
  readonly standing: BucketStanding;
}

/**
 * Which ids may have been used before. `true`: all of them are looked for. "refused": if one of the calls has no room, since it may have
 * been granted earlier; what is granted cannot be written under an id that is taken, and is then decided again. `false`: none.
 */
export type LookForIds = boolean | "refused";

export type UsesToDecide = Omit<UseBatch, "make" | "look"> & { readonly look: LookForIds };

export function decideUses(view: UsesView, batch: UsesToDecide): UsesDecided | { readonly need: QuotaNeed } {
  const found = unlessLacking((): UsesDecided => {
    const { definitions, buckets, uses } = batch;
    const looked = view.buckets.every(({ lines }) => lines);
    const look = batch.look === "refused" ? looked : batch.look;
    const at = milliseconds(view.now);
    if (view.buckets.some(({ row }) => isElsewhere(row)))
      return { verdicts: { missing: true, at, elsewhere: true }, writes: BucketDraft.writes([]) };
    if (definitions.some(({ rule }) => isLate(rule, view.now)))
      return { verdicts: { missing: true, at, elsewhere: false }, writes: BucketDraft.writes([]) };
    if (look && !looked) throw new Lacking("lines", ...buckets.keys());
    const drafts = buckets.map(({ definition: place, limit }, i) => {
      const definition = definitions[place];
      const found = view.buckets[i];
      if (!definition || !found) throw new RangeError(`bucket ${i} of a batch has no definition, or no row`);
      return new BucketDraft(found, i, definition, limit, view.now);
    });
    const granted = new Map<string, Known>();
    const verdicts = groupsOf(uses).flatMap((group) => {
      const draftOf = ({ bucket }: Use) => drafts[bucket] as BucketDraft;
      const known = group.map(
        (use) =>
          granted.get(nameOf(use)) ??
          lineKnown(view.buckets[use.bucket], use) ??
          (look ? holdKnown(draftOf(use), use) : undefined),
      );
      // A hold that was found by its id is known to whatever comes after it, as PostgreSQL's function has it.
      for (const [i, each] of known.entries()) if (each) granted.set(nameOf(group[i] as Use), each);
      const isNew = known.map((each) => each === undefined);
      if (isNew.includes(false)) {
        // Those that seem to be new may have been granted by an earlier call.
        if (isNew.includes(true) && batch.look && !looked) throw new Lacking("lines", ...buckets.keys());
        return group.map((use, i) => repeated(use, known[i], at));
      }
      const refused = group.find((use) => !hasRoom(draftOf(use), use.amount));
      if (refused && batch.look && !looked) throw new Lacking("lines", ...buckets.keys());
      if (refused) return group.map((use) => refuse(draftOf(use), use, use === refused));
      return group.map((use) => {
        const verdict = grant(draftOf(use), use);
        granted.set(nameOf(use), { kind: kindOf(use), amount: use.amount, standing: verdict });
        return verdict;
      });
    });
    return { verdicts: { missing: false, at, verdicts }, writes: BucketDraft.writes(drafts) };
  });
  return "need" in found ? { need: everywhere(found.need, view, batch) } : found;
}

/** What one bucket lacks is read of all that may come to lack it: else a batch would ask as often as it has buckets. */
function everywhere({ what, buckets: [first] }: QuotaNeed, view: UsesView, batch: UsesToDecide): QuotaNeed {
  const mayLack = ({ row }: BucketView, place: number): boolean => {
    if (place === first || what === "lines") return true;
    if (what === "holds") return row.held > 0;
    if (what === "grants") return row.credit > 0;
    return batch.definitions[batch.buckets[place]?.definition ?? 0]?.rule.window === "log";
  };
  const lacking = [...view.buckets.entries()].filter(
    ([place, each]) => each[what] === undefined && mayLack(each, place),
  );
  return { what, buckets: lacking.map(([place]) => place) };
}

/** Those of one group are side by side. */
function groupsOf(uses: readonly Use[]): Use[][] {
  const groups: Use[][] = [];
  for (const use of uses) {
    const last = groups.at(-1);
    if (last && last[0]?.group === use.group) last.push(use);
    else groups.push([use]);
  }
  return groups;
}

const nameOf = ({ bucket, id }: Use): string => `${bucket}:${id}`;

const kindOf = ({ holdMs }: Use): string => (holdMs === undefined ? "consume" : "hold");

function lineKnown(view: BucketView | undefined, { id }: Use): Known | undefined {
  const line = view?.lines?.get(id);
  return line && { kind: line.kind, amount: line.amount, standing: standingOf(line) };
}

function holdKnown(draft: BucketDraft, { id, holdMs }: Use): Known | undefined {
  const hold = holdMs === undefined ? undefined : draft.holds.find((each) => each.id === id);
  return hold && { kind: "hold", amount: hold.amount, standing: draft.standing() };
}

/** One of a group of which at least one was granted before. */
function repeated(use: Use, known: Known | undefined, at: number): UseVerdict {
  if (!known)
    return {
      kind: "conflict",
      used: 0,
      held: 0,
      credit: 0,
      limit: undefined,
      version: 0,
      at,
      retry: undefined,
    };
  const same = known.amount === use.amount && known.kind === kindOf(use);
  return { ...known.standing, kind: same ? "before" : "conflict", retry: undefined };
}

function hasRoom(draft: BucketDraft, amount: number): boolean {
  const short = draft.shortage(amount) > 0;
  const takesCredit = draft.credit > 0 && draft.above(amount) > 0;
  if ((short && draft.held > 0) || takesCredit) draft.reap();
  return draft.shortage(amount) <= 0;
}

function refuse(draft: BucketDraft, { amount }: Use, reason: boolean): UseVerdict {
  const retry = reason
    ? retryIn(
        draft.definition.rule,
        {
          bucket: draft,
          limit: draft.limit,
          need: draft.shortage(amount),
          newest: draft.newest,
          uses: () => draft.uses,
        },
        draft.now,
      )
    : undefined;
  return { ...draft.standing(), version: 0, kind: "refused", retry };
}

function grant(draft: BucketDraft, use: Use): UseVerdict {
  const { id, amount, holdMs } = use;
  const line = { kind: kindOf(use), id, amount, max: draft.limit, details: parsed(use.details) };
  if (holdMs !== undefined) {
    draft.startHold(id, amount, draft.now + holdMs * 1000);
    draft.write({ ...line, delta: 0 });
  } else {
    const fits = Math.min(amount, Math.max(draft.cap - draft.used, 0));
    const drains = fits < amount ? draft.drain(amount - fits) : undefined;
    draft.count(fits);
    draft.write({ ...line, delta: fits, drains });
  }
  return { ...draft.standing(), kind: "granted", retry: undefined };
}

export function parsed(details: string | undefined): unknown {
  return details === undefined ? undefined : (JSON.parse(details) as unknown);
}
