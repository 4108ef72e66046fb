import { UnsupportedError } from "./errors.ts";
import type { Isolation } from "./database.ts";

/** A deliberate gap, and its reason. Asking for it throws that reason. */
export interface Unsupported {
  readonly supported: false;
  readonly why: string;
}

export function unsupported(why: string): Unsupported {
  return Object.freeze({ supported: false, why });
}

export type Support<T = true> = T | Unsupported;

export function isSupported<T>(support: Support<T>): support is T {
  return !(typeof support === "object" && support !== null && "supported" in support);
}

/** Throws the reason of a gap; returns what is there otherwise. */
export function require<T>(support: Support<T>, what: string): T {
  if (isSupported(support)) return support;
  throw new UnsupportedError(`${what}: ${support.why}`);
}

/** How a lock is kept. */
export type Strategy = "transaction advisory" | "session advisory" | "lock row" | "database write lock";

/** One table of what a database, reached through a client, can promise. Shared code asks this, and nothing else. */
export interface Capabilities {
  readonly engine: string;
  /** The member of the family that answered, e.g. a fork. */
  readonly flavour: string;
  readonly version: string;
  readonly client: string;
  /** Locks that end with the transaction. */
  readonly transactionLocks: Support<Strategy>;
  /** Locks inside a transaction that the caller opened. */
  readonly joinedLocks: Support<Strategy>;
  /** Locks that outlive transactions, on a pinned connection. */
  readonly sessionLocks: Support<Strategy>;
  readonly sharedLocks: Support;
  /** `key`: locks of different keys do not wait for each other. `database`: they do. */
  readonly granularity: "key" | "database";
  /** Isolation levels under which a transaction may take locks. */
  readonly lockIsolation: readonly Isolation[];
  /** Isolation levels whose snapshot would be older than the lock: the lock is taken on the session, before BEGIN. */
  readonly lockFirstIsolation: readonly Isolation[];
  readonly isolation: readonly Isolation[];
  readonly defaultIsolation: Isolation;
  /** An abort ends the wait on the server. */
  readonly cancel: Support;
  /** The server evicts a transaction that outlives its deadline, also if this process is frozen. */
  readonly serverDeadline: Support;
  /** A COMMIT whose answer was lost can be looked up. */
  readonly commitOutcome: Support;
  /** A timeout names who held the lock. */
  readonly holders: Support;
  /** Keys that the server itself hashes, to meet locks that older code takes (`key.hashtext`, `key.hashtextextended`). */
  readonly foreignKeys: Support;
  readonly connections: "many" | "one";
  /** Facts for the engine itself. */
  readonly details?: Readonly<Record<string, boolean>>;
}
