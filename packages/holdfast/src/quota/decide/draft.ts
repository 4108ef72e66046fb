/** A bucket while it is decided about: what was read, as it changes, and what is to be written in the end. */
import type { Definition, BucketStanding } from "../store.ts";
import {
  type BucketRow,
  type BucketView,
  type CountedUses,
  type Drain,
  type GrantRow,
  type HoldRow,
  Lacking,
  type LineRow,
  type QuotaWrites,
  capOf,
  compareNames,
  limitOf,
  milliseconds,
  mostUsed,
  unusual,
} from "./rows.ts";
import { ownId } from "./own-id.ts";
import { roll } from "./windows.ts";

type Kind = Pick<LineRow, "kind" | "id" | "amount"> &
  Partial<Pick<LineRow, "delta" | "entry" | "drains" | "details" | "max">>;

export class BucketDraft {
  readonly now: number;
  readonly definition: Definition;
  /** As it was read. */
  readonly row: BucketRow;
  readonly lines: LineRow[] = [];
  used: number;
  held: number;
  credit: number;
  version: number;
  since: number | undefined;
  parts: readonly number[] | undefined;
  reset: number;
  own_limit: number | undefined;
  plan: string | undefined;
  /** Used by calls of this batch. */
  newest = 0;
  /** What time has given back, and no line says yet. */
  #forgotten = 0;
  readonly #place: number;
  readonly #view: BucketView;
  readonly #code: number | undefined;
  #holds: readonly HoldRow[] | undefined;
  #grants: readonly GrantRow[] | undefined;
  readonly #made: { readonly holds: HoldRow[]; readonly grants: GrantRow[] } = { holds: [], grants: [] };
  readonly #refunds: { readonly version: number; readonly refunded: number }[] = [];

  /** `place`: where it is in the view; `code`: the limit that the code has for it. */
  constructor(
    view: BucketView,
    place: number,
    definition: Definition,
    code: number | undefined,
    now: number,
  ) {
    this.row = view.row;
    ({
      used: this.used,
      held: this.held,
      credit: this.credit,
      version: this.version,
      since: this.since,
      parts: this.parts,
      reset: this.reset,
      own_limit: this.own_limit,
      plan: this.plan,
    } = view.row);
    this.now = now;
    this.definition = definition;
    this.#view = view;
    this.#place = place;
    this.#code = code;
    this.#holds = view.holds;
    this.#grants = view.grants;
    this.#roll();
  }

  /** The limit in force; undefined: none. */
  get limit(): number | undefined {
    return limitOf(this, this.definition, this.#code);
  }

  get cap(): number {
    return capOf(this.limit, this.definition);
  }

  get holds(): readonly HoldRow[] {
    // None is of nothing.
    if (!this.#holds && this.row.held === 0) return [];
    if (!this.#holds) throw new Lacking("holds", this.#place);
    return this.#holds;
  }

  get grants(): readonly GrantRow[] {
    if (!this.#grants) throw new Lacking("grants", this.#place);
    return this.#grants;
  }

  get uses(): readonly CountedUses[] {
    if (!this.#view.uses) throw new Lacking("uses", this.#place);
    return this.#view.uses;
  }

  /** A line that was there before. */
  line(id: string): LineRow | undefined {
    if (!this.#view.lines) throw new Lacking("lines", this.#place);
    return this.#view.lines.get(id);
  }

  #roll(): void {
    const counted = () => {
      if (this.#view.counted === undefined) throw new Lacking("counted", this.#place);
      return this.#view.counted;
    };
    const { used, since, parts } = roll(this, this.definition.rule, this.limit, this.now, counted);
    this.#forgotten = this.used - used;
    this.used = used;
    this.since = since;
    this.parts = parts;
  }

  /** So much of the amount is above the limit: nothing, if it is not above 0. */
  above(amount: number): number {
    // In this order no sum of these is larger than what a number can hold exactly, if it is not far too much anyway.
    return this.used - this.cap + amount + this.held;
  }

  /** So much is missing, in limit and credits: nothing, if it is not above 0. What is used and held stays an exact number. */
  shortage(amount: number): number {
    return this.above(amount) - Math.min(this.credit, mostUsed - this.cap);
  }

  /**
   * Holds and grants that are over, those that ended first first, then by id. Each is a line: 'expire' of a hold, 'lapse'
   * of what was left of a grant.
   */
  reap(): void {
    if (this.held > 0) {
      const over = this.holds.filter(({ until }) => until <= this.now).toSorted(byEnd);
      for (const { id, amount } of over) {
        this.endHold(id);
        this.write({
          kind: "expire",
          id: ownId("expire", this.version + 1, id),
          entry: id,
          amount,
          delta: 0,
        });
      }
    }
    if (this.credit > 0) {
      const over = this.grants.filter(({ until }) => until <= this.now).toSorted(byEnd);
      for (const { id } of over) {
        const amount = this.endGrant(id);
        this.write({ kind: "lapse", id: ownId("lapse", this.version + 1, id), entry: id, amount, delta: 0 });
      }
    }
  }

  startHold(id: string, amount: number, until: number): void {
    const { quota, subject } = this.row;
    this.#made.holds.push({ quota, subject, id, amount, until });
    this.held += amount;
  }

  /** What was held for it; undefined: there is none. */
  endHold(id: string): number | undefined {
    const hold = this.holds.find((each) => each.id === id);
    if (!hold) return undefined;
    this.#holds = this.holds.filter((each) => each !== hold);
    this.held -= hold.amount;
    return hold.amount;
  }

  startGrant(id: string, { amount, priority, until }: Pick<GrantRow, "amount" | "priority" | "until">): void {
    const { quota, subject } = this.row;
    this.#made.grants.push({ quota, subject, id, amount, spent: 0, priority, until });
    this.credit += amount;
  }

  /** What was left of it. */
  endGrant(id: string): number {
    const grant = this.grants.find((each) => each.id === id);
    if (!grant) return 0;
    this.#grants = this.grants.filter((each) => each !== grant);
    const left = grant.amount - grant.spent;
    this.credit -= left;
    return left;
  }

  /** Takes from the grants: by priority, then what runs out first, then by id. */
  drain(amount: number): readonly Drain[] {
    const drains: Drain[] = [];
    let left = amount;
    const usable = this.grants.filter(({ until, spent, amount: all }) => until > this.now && spent < all);
    for (const grant of usable.toSorted((a, b) => a.priority - b.priority || byEnd(a, b))) {
      if (left === 0) break;
      const part = Math.min(left, grant.amount - grant.spent);
      this.#spend(grant.id, part);
      drains.push({ id: grant.id, amount: part });
      left -= part;
    }
    this.credit -= amount;
    return drains;
  }

  /** Gives back to a grant; one that ran out or was revoked is not there any more, and gets nothing. */
  fill(id: string, amount: number): void {
    if (this.#spend(id, -amount)) this.credit += amount;
  }

  #spend(id: string, amount: number): boolean {
    const grant = this.grants.find((each) => each.id === id);
    if (!grant) return false;
    this.#grants = this.grants.map((each) =>
      each === grant ? { ...each, spent: each.spent + amount } : each,
    );
    return true;
  }

  /** Of a line that was read: what was given back of it in all. */
  refunded(version: number, refunded: number): void {
    this.#refunds.push({ version, refunded });
  }

  /** Uses some, or gives it back: of the newest part, if it has parts. */
  count(delta: number): void {
    this.used += delta;
    this.newest += delta;
    if (this.parts && this.parts.length > 0)
      this.parts = this.parts.map((part, i) => (i === 0 ? part + delta : part));
  }

  /** Another line, of how it stands now. What time gave back is said by the first of them. */
  write({ kind, id, amount, delta = amount, entry, drains, details, max }: Kind): void {
    this.version++;
    this.lines.push({
      bucket: this.row.id,
      version: this.version,
      kind,
      id,
      entry,
      amount,
      delta: unusual(delta, amount),
      forgotten: unusual(this.#forgotten, 0),
      refunded: undefined,
      used: this.used,
      held: unusual(this.held, 0),
      credit: unusual(this.credit, 0),
      max,
      since: this.since,
      at: this.now,
      first: undefined,
      drains,
      details,
    });
    this.#forgotten = 0;
  }

  standing(): BucketStanding {
    const { used, held, credit, limit, version, now } = this;
    return { used, held, credit, limit, version, at: milliseconds(now) };
  }

  /** All that has changed. Without a line, nothing has: what time gave back is found again. */
  static writes(drafts: readonly BucketDraft[]): QuotaWrites {
    const changed = drafts.filter(({ version, row }) => version > row.version);
    return {
      buckets: { update: changed.map((draft) => draft.#update()) },
      lines: {
        insert: changed.flatMap(({ lines }) => lines),
        update: changed.flatMap((draft) =>
          draft.#refunds.map((refund) => ({ bucket: draft.row.id, ...refund })),
        ),
      },
      holds: {
        insert: changed.flatMap((draft) => draft.#made.holds),
        delete: changed.flatMap((draft) => lacking(draft.#view.holds, draft.#holds)),
      },
      grants: {
        insert: changed.flatMap((draft) => draft.#made.grants),
        update: changed.flatMap((draft) => draft.#spentGrants()),
        delete: changed.flatMap((draft) => lacking(draft.#view.grants, draft.#grants)),
      },
    };
  }

  #update(): BucketRow {
    const { row, used, held, credit, version, since, reset, own_limit, plan } = this;
    const parts = this.parts && this.parts.length > 0 ? this.parts : undefined;
    return { ...row, used, held, credit, version, since, parts, reset, own_limit, plan };
  }

  #spentGrants(): readonly GrantRow[] {
    const before = new Map(this.#view.grants?.map(({ id, spent }) => [id, spent]));
    return (this.#grants ?? []).filter(({ id, spent }) => before.get(id) !== spent);
  }
}

const byEnd = (a: { until: number; id: string }, b: { until: number; id: string }): number =>
  a.until === b.until ? compareNames(a.id, b.id) : a.until < b.until ? -1 : 1;

function lacking<T extends { readonly id: string }>(
  before: readonly T[] | undefined,
  after: readonly T[] | undefined,
): readonly T[] {
  const left = new Set(after?.map(({ id }) => id));
  return (before ?? []).filter(({ id }) => !left.has(id));
}
