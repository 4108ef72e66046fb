import { UnsupportedError } from "./errors.ts";
import type { Isolation } from "./database.ts";

/** From the strongest to the weakest. */
export const rowStrengths = ["update", "no key update", "share", "key share"] as const;
export type RowStrength = (typeof rowStrengths)[number];

/** From the weakest to the strongest. */
export const tableModes = [
  "access share",
  "row share",
  "row exclusive",
  "share update exclusive",
  "share",
  "share row exclusive",
  "exclusive",
  "access exclusive",
] as const;
export type TableMode = (typeof tableModes)[number];

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

/** For what means nothing but that nobody else is at it right now. */
export function requireHeld({ exclusion }: Pick<Capabilities, "exclusion">, what: string): void {
  if (exclusion === "held") return;
  throw new UnsupportedError(
    `${what}: this is a cluster with several writers, where locks exclude at COMMIT only: on two nodes both bodies would run at the same time. ` +
      `Use hf.transaction({ lock: key(…) }, …), of which all but one are undone and run again, or once(…), and connect to one node for what must not run twice.`,
  );
}

/** How a lock is kept. */
export const strategies = [
  "transaction advisory",
  "session advisory",
  "lock row",
  "database write lock",
] as const;
export type Strategy = (typeof strategies)[number];

/** What locks of transactions can do here. */
export type LockSupport = Pick<
  Capabilities,
  "transactionLocks" | "joinedLocks" | "sharedLocks" | "foreignKeys" | "namedLocks"
>;

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
  /**
   * `held`: while one has a lock, nobody else has it. `at commit`: on another node somebody may, and all but one of them
   * fail at COMMIT, to be run again: what is written is exact, but bodies run at the same time.
   */
  readonly exclusion: "held" | "at commit";
  /** `key`: locks of different keys do not wait for each other. `database`: they do. */
  readonly granularity: "key" | "database";
  /** Strengths of row locks (`tx.rows`). */
  readonly rowLocks: Support<readonly RowStrength[]>;
  /** Modes of table locks (`tx.table`). */
  readonly tableLocks: Support<readonly TableMode[]>;
  /** Leases, semaphores and reader-writer leases. */
  readonly leases: Support;
  /** Those who wait for a lease are woken when it is released; elsewhere they look again and again. */
  readonly wake: Support;
  /** Compare-and-set by a version column (`versioned`). */
  readonly versions: Support;
  /** Effects that happen once (`once`). */
  readonly once: Support;
  /** Limits, credits and their ledger (`quota`). */
  readonly quotas: Support;
  /** Levels and movements of stock (`stock`). */
  readonly stock: Support;
  /** Jobs (`queue`). */
  readonly queues: Support;
  /** Ticks that run once (`schedule`). */
  readonly schedules: Support;
  /** A trace of what people change by hand (`audited`). */
  readonly audit: Support;
  /** A nested transaction that fails is undone alone, and the outer one can go on. */
  readonly savepoints: Support;
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
  /** A COMMIT whose answer was lost can be looked up: of every transaction, or only of those that begin with a lock. */
  readonly commitOutcome: Support<true | "with a lock">;
  /** A timeout names who held the lock. */
  readonly holders: Support;
  /** Who holds what and who waits for whom (`hf.inspect`). */
  readonly inspect: Support;
  /** Keys that the server itself hashes, to meet locks that older code takes (`key.hashtext`, `key.hashtextextended`). */
  readonly foreignKeys: Support;
  /** Locks that older code takes by a name of its own (`key.getLock`): also for a transaction, or by `hf.hold` only. */
  readonly namedLocks: Support<true | "by hf.hold">;
  /**
   * A pattern's call inside of a transaction counts what others have committed since that began. Otherwise such a call throws a
   * serialization failure, and the transaction is run again.
   */
  readonly currentReads: Support;
  readonly connections: "many" | "one";
  /** No other server feeds this one by replication. Otherwise a lock here excludes nobody who locks there. */
  readonly primary: Support;
  /** Facts for the engine itself. */
  readonly details?: Readonly<Record<string, boolean | string>>;
}

/** Those that an engine has a store for, or a reason why not. */
export const patterns = ["quotas", "stock", "queues", "schedules", "audit"] as const;
export type Pattern = (typeof patterns)[number];

/** What a server says of itself. Patterns, and `primary`: only the reason why this server does not allow what the engine has. */
export type Probed = Omit<Capabilities, Pattern | "primary"> & {
  readonly [name in Pattern | "primary"]?: Unsupported | undefined;
};

/** With what follows from the engine's stores. */
export function withPatterns(
  probed: Probed,
  stores: { readonly [name in Pattern]: Support<object> },
): Capabilities {
  const support = (name: Pattern): Support => {
    const store = stores[name];
    return isSupported(store) ? (probed[name] ?? true) : store;
  };
  return {
    ...probed,
    quotas: support("quotas"),
    stock: support("stock"),
    queues: support("queues"),
    schedules: support("schedules"),
    audit: support("audit"),
    primary: probed.primary ?? true,
  };
}

/** What is left where no transaction can be opened: calls that are one statement. */
export function withoutTransactions(found: Capabilities, gap: Unsupported): Capabilities {
  return {
    ...found,
    transactionLocks: gap,
    joinedLocks: gap,
    sessionLocks: gap,
    sharedLocks: gap,
    rowLocks: gap,
    tableLocks: gap,
    once: gap,
    savepoints: gap,
    lockIsolation: [],
    lockFirstIsolation: [],
    isolation: [],
    serverDeadline: gap,
    commitOutcome: gap,
    holders: gap,
    foreignKeys: gap,
    currentReads: gap,
  };
}

/** What each of them means, in a sentence: for whoever prints the table, and for the documentation. */
export const capabilityMeanings: Readonly<Record<keyof Capabilities, string>> = {
  engine: "the family",
  flavour: "the member of the family that answered",
  version: "the server's own word",
  client: "the client library",
  transactionLocks: "how a lock of `hf.transaction` is kept",
  joinedLocks: "how a lock in your own transaction is kept",
  sessionLocks: "how a lock of `hf.hold` is kept",
  sharedLocks: "whether `shared(key)` works for locks of transactions and sessions",
  exclusion:
    "`held`: one body at a time; `at commit`: on several nodes bodies run at once, and all but one run again",
  rowLocks: "strengths of row locks (`tx.rows`)",
  tableLocks: "modes of table locks (`tx.table`)",
  leases: "leases, semaphores and reader-writer leases",
  wake: "whether those who wait for a lease are woken; elsewhere they look again and again",
  versions: "compare-and-set by a version column (`versioned`)",
  once: "effects that happen once (`once`)",
  quotas: "limits, credits and their ledger (`quota`)",
  stock: "levels and movements of stock (`stock`)",
  queues: "jobs (`queue`)",
  schedules: "ticks that run once, whatever the number of instances (`schedule`)",
  audit: "a trace of what people change by hand (`audited`)",
  savepoints: "whether a nested transaction that fails is undone alone, and the outer one can go on",
  granularity: "`key`: different keys do not wait for each other; `database`: they do",
  lockIsolation: "isolation levels under which a transaction may take locks",
  lockFirstIsolation: "levels under which the lock is taken on the session, before BEGIN",
  isolation: "levels that a transaction may have",
  defaultIsolation: "the server's default; Holdfast's own is READ COMMITTED",
  cancel: "whether an abort ends the wait on the server",
  serverDeadline:
    "whether the server ends a transaction that outlives its deadline, also if this process is frozen",
  commitOutcome:
    "whether a COMMIT whose answer was lost can be looked up; `with a lock`: of transactions that begin with one",
  holders: "whether a timeout names who held the lock",
  inspect: "whether `hf.inspect()` tells who holds what",
  foreignKeys: "whether `key.hashtext` and `key.hashtextextended` work",
  namedLocks: "whether `key.getLock` works; `by hf.hold`: there, and not for a transaction",
  currentReads: "whether a pattern's call inside of a transaction counts what was committed since that began",
  connections: "`many`, or `one` that all transactions queue up for",
  primary:
    "whether no other server is seen to feed this one by replication; otherwise locks and patterns are refused",
  details: "facts for the engine itself",
};

/** One capability as text: "yes", a value, a list, or "no". */
export function shownCapability(value: unknown): string {
  if (value === true) return "yes";
  if (Array.isArray(value)) return value.length === 0 ? "none" : value.join(", ");
  if (!isSupported(value)) return "no";
  return String(value);
}
