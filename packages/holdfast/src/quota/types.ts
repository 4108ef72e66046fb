/** What calls of quotas take, and what they answer. */
import type { Wait } from "../seam/database.ts";
import type { Period } from "../time/windows.ts";

/** Whom a limit is for: text, a number, or several dimensions such as `{ org: "acme", model: "large" }`. */
export type Subject = string | number | bigint | Readonly<Record<string, string | number | bigint>>;

export interface QuotaOptions {
  /** Its buckets and entries are kept under this name. */
  readonly name: string;
  /**
   * A number; a function of the subject; or numbers by plan, and the plan of those who have none stored. A limit that
   * is stored for a subject (`setLimit`) comes before all of these.
   */
  readonly limit:
    | number
    | ((subject: Subject) => number | Promise<number>)
    | { readonly plans: Readonly<Record<string, number>>; readonly default: string };
  /** "day", "15 minutes", milliseconds. Without it what was used stays used. */
  readonly per?: Period;
  /**
   * How time gives back. "fixed" (default): all of it when the next window begins. "sliding-log": each use after
   * exactly that time; a call costs as much as there are entries in the window. "sliding-parts": the same in steps of
   * a part of the window, so up to one part later. "refill": evenly, as much as the limit in that time.
   */
  readonly window?: "fixed" | "sliding-log" | "sliding-parts" | "refill";
  /** Of "sliding-parts". Default 20. */
  readonly parts?: number;
  /** Whose days, weeks, months and years. Default UTC. */
  readonly timeZone?: string;
  /** What happens above the limit: "reject" (default), a number of units that are let through, or "record". */
  readonly over?: "reject" | "record" | number;
}

export interface EntryOptions {
  /** The same id is applied once, and answered again. Default: another one each time. */
  readonly id?: string;
  /**
   * Takes part in this transaction: rolled back with it. Others who use the same subject wait for its end. Without it:
   * in the transaction of the same instance whose body calls, if there is one.
   */
  readonly tx?: object | undefined;
  /** Inside a transaction's body: apart from it. What was used stays used also if it is rolled back. */
  readonly separate?: boolean;
  /** Milliseconds to wait while somebody's transaction has the subject. Default: the instance's (5 s). */
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
  /** For the ledger: who did it, where it came from, what it is about. */
  readonly by?: string;
  readonly source?: string;
  readonly reference?: string;
  readonly metadata?: Readonly<Record<string, unknown>>;
}

export interface HoldOptions extends EntryOptions {
  /** Milliseconds after which it is given back by itself. Default 15 minutes. */
  readonly holdFor?: number;
}

export interface GrantOptions extends EntryOptions {
  readonly expiresAt?: Date | undefined;
  /** Lower ones are used first; of the same, the one that expires first. Default 0. */
  readonly priority?: number;
}

export interface QuotaStanding {
  readonly used: number;
  readonly held: number;
  /** Infinity: there is none. */
  readonly limit: number;
  /** Of grants, what is not spent. */
  readonly credit: number;
  readonly remaining: number;
  /** Used above the limit. */
  readonly over: number;
  /** When the window ends. */
  readonly resetAt: Date | undefined;
  /** By the database's clock. */
  readonly at: Date;
}

export interface Granted extends QuotaStanding {
  readonly granted: true;
  readonly id: string;
  readonly amount: number;
  /** It had been granted before: this is the answer of then. */
  readonly replayed: boolean;
}

export interface Denied extends QuotaStanding {
  readonly granted: false;
  readonly amount: number;
  /** The quota that refused. */
  readonly quota: string;
  readonly subject: string;
  readonly retryAfter: number | undefined;
}

/** What was kept apart, until it is settled at what it came to, released, or over. */
export interface QuotaHold extends Granted {
  /** Uses what it came to; more than was held only if there is room. */
  settle(actual: number, options?: Omit<EntryOptions, "id">): Promise<Granted>;
  release(options?: Omit<EntryOptions, "id">): Promise<void>;
}

export interface Pruned {
  /** How many were rolled up. */
  readonly entries: number;
  /** Subjects whose ledger does not add up: it was left as it is, and `reconcile` says what is wrong with it. */
  readonly broken: readonly string[];
}

export interface HistoryEntry {
  readonly version: number;
  readonly kind:
    | "consume"
    | "hold"
    | "settle"
    | "release"
    | "expire"
    | "refund"
    | "grant"
    | "revoke"
    | "lapse"
    | "limit"
    | "plan"
    | "reset"
    | "repair"
    /** What stands for older entries that were pruned: see `first`. */
    | "rollup";
  /** The first version that it stands for: its own, if it is not a roll-up. */
  readonly first: number;
  readonly id: string;
  /** The entry, hold or grant that it is about. */
  readonly of: string | undefined;
  readonly amount: number;
  readonly refunded: number;
  readonly used: number;
  readonly held: number;
  readonly credit: number;
  readonly limit: number | undefined;
  readonly at: Date;
  readonly by?: string;
  readonly source?: string;
  readonly reference?: string;
  readonly metadata?: Readonly<Record<string, unknown>>;
}

/** Credits on top of the limit. */
export interface Grant {
  readonly id: string;
  readonly amount: number;
  readonly spent: number;
  /** What can still be used of it. */
  readonly left: number;
  readonly priority: number;
  readonly expiresAt: Date | undefined;
  /** When it was granted; undefined: that entry was pruned. */
  readonly at: Date | undefined;
}

export interface Reconciliation {
  readonly ok: boolean;
  readonly entries: number;
  /** What does not add up, in words. */
  readonly findings: readonly string[];
  readonly repaired: boolean;
}

/** Of calls that only look. */
export type ReadOptions = Pick<EntryOptions, "tx" | "separate">;
