/**
 * What an engine keeps of quotas: the contract behind `quota`. What is decided is written in `decide/`; a store reads and
 * writes, or is a faster way to the same.
 */
import type { Connection } from "../seam/database.ts";
import type { How, Soon } from "../seam/store.ts";
import type { Trust } from "../input/trust.ts";
import type { BucketRow, GrantRow, HoldRow, LineRow } from "./stored.ts";

/** What is counted. Moments are in milliseconds, `per` in microseconds. */
export type Rule =
  | { readonly window: "none" }
  /** `starts`: of windows around now, ascending; the last one only says where the one before ends. */
  | { readonly window: "fixed"; readonly starts: readonly number[] }
  | { readonly window: "refill" | "log"; readonly per: number }
  | { readonly window: "parts"; readonly per: number; readonly parts: number };

export interface Definition {
  readonly rule: Rule;
  /** By name; of a bucket whose plan is stored. Infinity: no limit. */
  readonly plans: Readonly<Record<string, number>> | undefined;
  /** How far above the limit it may go; undefined: as far as it likes. */
  readonly over: number | undefined;
}

export interface Bucket {
  readonly quota: string;
  readonly subject: string;
  /** Its place in `definitions`. */
  readonly definition: number;
  /** The limit that the code has for it, if none is stored; undefined: none. */
  readonly limit: number | undefined;
}

export interface Use {
  /** Its place in `buckets`. */
  readonly bucket: number;
  readonly id: string;
  readonly amount: number;
  /** Those of one group, side by side, are granted all or none. */
  readonly group: number;
  /** Kept apart for so many milliseconds, instead of used. */
  readonly holdMs: number | undefined;
  readonly details: string | undefined;
}

export interface UseBatch {
  readonly definitions: readonly Definition[];
  readonly buckets: readonly Bucket[];
  readonly uses: readonly Use[];
  /** Some of the buckets may not be there yet. */
  readonly make: boolean;
  /** Ids may have been used before. */
  readonly look: boolean;
}

export interface BucketStanding {
  readonly used: number;
  readonly held: number;
  readonly credit: number;
  /** Undefined: there is none. */
  readonly limit: number | undefined;
  readonly version: number;
  readonly at: number;
}

export interface UseVerdict extends BucketStanding {
  /** `before`: this id was granted earlier; `conflict`: it was used for something else. */
  readonly kind: "granted" | "refused" | "before" | "conflict";
  /** Microseconds until it may be granted: of the one that was the reason of a refusal. */
  readonly retry: number | "window" | "never" | undefined;
}

/**
 * `missing`: buckets are not there, or the clocks differ so much that the window is not among those that were named.
 * `elsewhere`: some of them count on another of several databases, so nothing was decided.
 */
export type Verdicts =
  | { readonly missing: false; readonly at: number; readonly verdicts: readonly UseVerdict[] }
  | { readonly missing: true; readonly at: number; readonly elsewhere: boolean };

export type Amendment = {
  readonly definition: Definition;
  readonly bucket: Omit<Bucket, "definition">;
  readonly id: string;
  readonly details: string | undefined;
} & (
  | { readonly kind: "refund"; readonly of: string; readonly amount: number | undefined }
  | { readonly kind: "settle"; readonly of: string; readonly amount: number }
  | { readonly kind: "release"; readonly of: string }
  | {
      readonly kind: "grant";
      readonly amount: number;
      readonly priority: number;
      readonly until: number | undefined;
    }
  | { readonly kind: "revoke"; readonly of: string }
  /** Infinity: no limit; undefined: none of its own. */
  | { readonly kind: "limit"; readonly amount: number | undefined }
  | { readonly kind: "plan"; readonly plan: string | undefined }
  | { readonly kind: "reset" }
);

export interface Amended extends BucketStanding {
  readonly kind: "done" | "before" | "conflict" | "refused" | "unknown" | "too much";
  readonly amount: number;
}

/** Nothing was done: by the database's clock, it is none of the windows that were named. */
export interface Late {
  readonly late: number;
}

/** Nothing was done: the bucket counts on another of several databases. */
export interface Elsewhere {
  readonly elsewhere: true;
}

export interface QuotaEntry {
  readonly version: number;
  /** The first of those that it stands for: its own version, if it is not a roll-up. */
  readonly first: number;
  readonly kind: string;
  readonly id: string;
  /** The entry or hold that it is about. */
  readonly of: string | undefined;
  readonly amount: number;
  readonly delta: number;
  readonly forgotten: number;
  readonly refunded: number;
  readonly used: number;
  readonly held: number;
  readonly credit: number;
  readonly limit: number | undefined;
  readonly at: number;
  readonly details: Readonly<Record<string, unknown>> | undefined;
}

export interface QuotaInfo {
  readonly name: string;
  /** Counted up to a hundred thousand. */
  readonly subjects: number;
}

/** A bucket as it was left by the last entry: what time has given back since then is not taken off. */
export interface StoredBucket {
  /** As it is stored: JSON, if it has several dimensions. */
  readonly subject: string;
  readonly used: number;
  readonly held: number;
  readonly credit: number;
  /** Its own, if it has one; Infinity: it has none at all. */
  readonly limit: number | undefined;
  readonly plan: string | undefined;
  /** Of its newest entry. */
  readonly version: number;
  readonly since: number | undefined;
  /** Of a window that slides in parts: how many. */
  readonly parts: number | undefined;
}

/** Credits as they were granted, in the order in which they are used. */
export interface StoredGrant {
  readonly id: string;
  readonly amount: number;
  readonly spent: number;
  readonly priority: number;
  readonly until: number | undefined;
  /** It has run out, and the next call takes it off. */
  readonly over: boolean;
  /** When it was granted; undefined: that entry was rolled up. */
  readonly at: number | undefined;
}

export interface Reconciled {
  readonly findings: readonly string[];
  readonly entries: number;
  readonly repaired: boolean;
}

export interface RollUp {
  /** Whichever is first: a moment, or so many milliseconds ago by the database's clock. */
  readonly before: number | undefined;
  readonly ageMs: number;
  readonly from: string | undefined;
  readonly most: number;
}

export interface Quotas<C extends Connection> {
  consume(connection: C, batch: UseBatch, how: How): Soon<Verdicts>;
  amend(connection: C, amendment: Amendment, how: How): Soon<Amended | Late | Elsewhere>;
  peek(
    connection: C,
    definition: Definition,
    bucket: Omit<Bucket, "definition">,
    how: How,
  ): Soon<(BucketStanding & { readonly plan: string | undefined }) | Late | Elsewhere>;
  readonly lists: QuotaLists<C>;
  readonly upkeep: QuotaUpkeep<C>;
  readonly moves: QuotaMoves<C>;
}

/** Of what counts here. For people. */
export interface QuotaLists<C extends Connection> {
  /** Of those that have a bucket. */
  names(connection: C, how: How): Soon<readonly QuotaInfo[]>;
  /** By subject: those after this one, or these, as far as they are there. */
  subjects(
    connection: C,
    quota: string,
    which: {
      readonly after: string | undefined;
      readonly most: number;
      readonly of: readonly string[] | undefined;
    },
    how: How,
  ): Soon<readonly StoredBucket[]>;
  /** What is left of them, and what is not. */
  grants(connection: C, bucket: Pick<Bucket, "quota" | "subject">, how: How): Soon<readonly StoredGrant[]>;
  /** Newest first, below this version. */
  entries(
    connection: C,
    bucket: Pick<Bucket, "quota" | "subject">,
    which: { readonly below: number | undefined; readonly most: number },
    how: How,
  ): Soon<readonly QuotaEntry[]>;
}

/** Whether the ledger adds up to what is counted, and what is old made short. */
export interface QuotaUpkeep<C extends Connection> {
  /**
   * What does not add up, in words. With an id for it (`repair`), it is mended in the same moment, and the same id again
   * has the same answer.
   */
  reconcile(
    connection: C,
    definition: Definition,
    bucket: Omit<Bucket, "definition">,
    repair: { readonly id: string; readonly trust: Trust } | undefined,
    how: How,
  ): Soon<Reconciled | Late | Elsewhere>;
  /**
   * Lines before a moment, of buckets from this subject on, become one line for each bucket. Some at a time: `next`
   * says where to go on, and `before` which moment it was. `broken`: subjects whose lines do not add up, and were left as
   * they are.
   */
  rollUp(connection: C, quota: string, what: RollUp, how: How): Soon<RolledUp>;
}

export interface RolledUp {
  readonly before: number;
  readonly gone: number;
  readonly next: string | undefined;
  readonly broken: readonly string[];
}

export type BucketName = Pick<Bucket, "quota" | "subject">;

/** Where a bucket counts. */
export interface Whereabouts {
  /** Of its last move; 0: there was none. */
  readonly move: number;
  /** On that one of several databases, and no longer here. */
  readonly to: number | undefined;
  /** Not here yet: as soon as that one says so. */
  readonly from: number | undefined;
}

/** A bucket as it goes from one database to another, with what belongs to it; its lines follow. */
export interface MovingBucket {
  readonly bucket: BucketRow;
  readonly holds: readonly HoldRow[];
  readonly grants: readonly GrantRow[];
}

/** One move of one bucket. */
export type BucketMove = BucketName & { readonly move: number };

/**
 * Buckets that go from one of several databases to another, so that each counts in one place at every moment:
 *
 * 1. The database that it leaves gives the move a number (`number`), larger than all before.
 * 2. There it is locked and read (`read`, `lines`), in a transaction that goes on.
 * 3. The other one writes it down as a copy that does not count (`arrive`, `follow`), and commits that.
 * 4. The first one writes down where it is (`leave`), and commits: from this moment on it counts there.
 * 5. The other one is told so (`settle`), by who moves it, or by the first who comes to know.
 */
export interface QuotaMoves<C extends Connection> {
  /** All that there are here, by name, also those that have moved. */
  quotas(connection: C, how: How): Soon<readonly string[]>;
  /** Of each of these; undefined: there is none. */
  find(connection: C, buckets: readonly BucketName[], how: How): Soon<readonly (Whereabouts | undefined)[]>;
  /** The number of the next move of each, which are made if they are not there. Undefined: one of them does not count here. */
  number(connection: C, buckets: readonly BucketName[], how: How): Soon<readonly number[] | undefined>;
  /** In a transaction: locked until its end. Undefined: not all of them count here, and are at these moves. */
  read(connection: C, moves: readonly BucketMove[], how: How): Soon<readonly MovingBucket[] | undefined>;
  /** Some lines of one that was read, from a version on. */
  lines(connection: C, bucket: BucketName, from: number, how: How): Soon<readonly LineRow[]>;
  /**
   * In a transaction. What came by an earlier move, and never was settled, is replaced. False: it counts here, or comes by a later
   * move.
   */
  arrive(connection: C, moving: MovingBucket, from: number, how: How): Soon<boolean>;
  /** Lines of one that has arrived, in the same transaction. */
  follow(connection: C, bucket: BucketName, lines: readonly LineRow[], how: How): Soon<void>;
  /** In the transaction that has read it. */
  leave(connection: C, moving: MovingBucket, to: number, how: How): Soon<void>;
  /** Those that came by these moves count from now on. What has been told so before stays as it is. */
  settle(connection: C, moves: readonly BucketMove[], how: How): Soon<void>;
}
