/**
 * What is stored of quotas, as plain rows with the columns' names. Moments are whole microseconds since 1970, by the
 * database's clock: exact up to the year 2255.
 */

export interface BucketRow {
  readonly id: number;
  readonly quota: string;
  readonly subject: string;
  readonly used: number;
  readonly held: number;
  readonly credit: number;
  /** Of its newest line. Every change of a line, a hold or a grant raises it. */
  readonly version: number;
  /** The version that began anew: what was used before it is not to be given back. */
  readonly reset: number;
  /** When what `used` counts began: the window, the last refill, the newest of the parts, the last line. */
  readonly since: number | undefined;
  /** Of a window that slides in parts: what was used in each, the newest first. */
  readonly parts: readonly number[] | undefined;
  readonly own_limit: number | undefined;
  readonly plan: string | undefined;
  /** The version of its roll-up, below which there are no lines. */
  readonly rolled: number | undefined;
  /** Of the last move to another of several databases, counted from 1; undefined: there was none. */
  readonly moves: number | undefined;
  /** It counts on that one, and no longer here. */
  readonly moved_to: number | undefined;
  /** It is a copy of what that one has, and counts as soon as that one says that it has moved. */
  readonly moved_from: number | undefined;
}

/** A line of the ledger: used = used of the version before - forgotten + delta; held and credit after it. */
export interface LineRow {
  readonly bucket: number;
  readonly version: number;
  readonly kind: string;
  readonly id: string;
  /** The line, hold or grant that it is about. */
  readonly entry: string | undefined;
  readonly amount: number;
  /** What it added to `used`; undefined: its amount. */
  readonly delta: number | undefined;
  /** What time had given back since the line before; undefined: nothing. */
  readonly forgotten: number | undefined;
  /** What was given back of it since; undefined: nothing. */
  readonly refunded: number | undefined;
  readonly used: number;
  /** Null: nothing, as of `credit`. */
  readonly held: number | undefined;
  readonly credit: number | undefined;
  /** The limit that was in force; undefined: none. */
  readonly max: number | undefined;
  readonly since: number | undefined;
  readonly at: number;
  /** Of a roll-up: the first version that it stands for; undefined: its own. */
  readonly first: number | undefined;
  /** The grants that it was taken from, in that order; undefined: none. */
  readonly drains: readonly Drain[] | undefined;
  readonly details: unknown;
}

export interface Drain {
  readonly id: string;
  readonly amount: number;
}

/** What a bucket has several of. */
export interface OfBucket {
  readonly quota: string;
  readonly subject: string;
  readonly id: string;
}

export interface HoldRow extends OfBucket {
  readonly amount: number;
  readonly until: number;
}

export interface GrantRow extends OfBucket {
  readonly amount: number;
  readonly spent: number;
  readonly priority: number;
  /** `never`: it does not run out. */
  readonly until: number;
}
