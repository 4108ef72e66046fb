import type { LockRequest } from "./key.ts";

/** Everything Holdfast throws by itself. Errors of the caller's own statements pass through unchanged. */
export class HoldfastError extends Error {
  readonly code: string;
  /** Running the whole outermost transaction again may succeed. */
  readonly retryable: boolean;

  constructor(code: string, message: string, options: { retryable?: boolean; cause?: unknown } = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.name = new.target.name;
    this.code = code;
    this.retryable = options.retryable ?? false;
  }
}

/** The call itself is wrong: it would be wrong on every server. */
export class UsageError extends HoldfastError {
  constructor(message: string, code = "HF_USAGE", cause?: unknown) {
    super(code, message, { cause });
  }
}

/** This engine, server or client cannot give what was asked for; the message says why. */
export class UnsupportedError extends HoldfastError {
  constructor(message: string, cause?: unknown) {
    super("HF_UNSUPPORTED", message, { cause });
  }
}

/** A session seen holding a lock that somebody else wants. */
export interface Holder {
  readonly pid: number | string;
  readonly application: string;
  readonly state: string;
  /** When its transaction (or, for a session lock, its session) began; undefined if the server does not let us see it. */
  readonly since: Date | undefined;
}

export interface Blocked {
  readonly keys: readonly string[];
  readonly holders: readonly Holder[];
}

function held({ holders }: Blocked, now = Date.now()): string {
  if (holders.length === 0) return "";
  const first = holders[0] as Holder;
  const more = holders.length > 1 ? ` and ${holders.length - 1} more` : "";
  if (!first.since) return ` Held by pid ${first.pid}${more} (this user may not see more of it).`;
  const seconds = Math.max(0, (now - first.since.getTime()) / 1000).toFixed(1);
  return ` Held by pid ${first.pid} (${first.application || "no application name"}, ${first.state}) since ${first.since.toISOString()}, ${seconds} s ago${more}.`;
}

function named(keys: readonly string[]): string {
  return keys.length === 1 ? `lock ${keys[0]}` : `locks ${keys.join(", ")}`;
}

export function keyNames(requests: readonly LockRequest[], show = (name: string) => name): string[] {
  return requests.map(({ key, mode }) => (mode === "shared" ? `${show(key.name)} (shared)` : show(key.name)));
}

/** The wait was over before the lock was free. Nothing of the transaction's work was kept. */
export class LockTimeoutError extends HoldfastError {
  readonly keys: readonly string[];
  readonly waitedMs: number;
  readonly holders: readonly Holder[];
  constructor(blocked: Blocked & { waitedMs: number }, cause?: unknown) {
    super(
      "HF_LOCK_TIMEOUT",
      `Waited ${blocked.waitedMs} ms for ${named(blocked.keys)} in vain.${held(blocked)}` +
        ` Try again later, give \`wait\` more time, or shorten what the holder does under the lock.`,
      { retryable: true, cause },
    );
    this.keys = blocked.keys;
    this.waitedMs = blocked.waitedMs;
    this.holders = blocked.holders;
  }
}

/** `wait: "nowait"` and the lock was not free. */
export class LockNotAvailableError extends HoldfastError {
  readonly keys: readonly string[];
  readonly holders: readonly Holder[];
  constructor(blocked: Blocked) {
    super(
      "HF_LOCK_NOT_AVAILABLE",
      `${blocked.keys.length === 1 ? "The lock" : "At least one of the locks"} ${blocked.keys.join(", ")} is taken, and the call was not to wait.${held(blocked)}` +
        ` Use \`tryLock\` to get an answer instead of an error, or \`wait: ms\` to wait.`,
      { retryable: true },
    );
    this.keys = blocked.keys;
    this.holders = blocked.holders;
  }
}

export class DeadlockError extends HoldfastError {
  constructor(attempts: number, cause: unknown) {
    super(
      "HF_DEADLOCK",
      `The server ended this transaction to break a deadlock${attempts === 1 ? "" : `, ${attempts} times in a row`}. ` +
        `Take what is locked in one call (\`lock: [a, b]\`), so that everybody takes it in the same order.`,
      { retryable: true, cause },
    );
  }
}

export class SerializationError extends HoldfastError {
  constructor(detail: string, cause?: unknown) {
    super("HF_SERIALIZATION", detail, { retryable: true, cause });
  }

  static after(attempts: number, cause: unknown): SerializationError {
    return new SerializationError(
      `A concurrent transaction changed what this one had read${attempts === 1 ? "" : `, ${attempts} times in a row`}. Lock what you check before you read it, or allow more attempts (\`retry: { attempts }\`).`,
      cause,
    );
  }
}

export class ConnectionLostError extends HoldfastError {
  constructor(attempts: number, cause: unknown) {
    super(
      "HF_CONNECTION_LOST",
      `The connection was lost before the transaction was committed (attempt ${attempts}): ${message(cause)}. Nothing was kept.`,
      { retryable: true, cause },
    );
  }
}

/** The transaction ran longer than its `deadline`; it was rolled back. */
export class DeadlineExceededError extends HoldfastError {
  readonly deadlineMs: number;
  constructor(deadlineMs: number, cause?: unknown, state = "") {
    super(
      "HF_DEADLINE",
      `The transaction did not end within its deadline of ${deadlineMs} ms (or a shorter limit that the server has) and ` +
        `was rolled back${state === "" ? "" : `; ${state}`}. Do slow work outside of it, or set \`deadline\`.`,
      { cause },
    );
    this.deadlineMs = deadlineMs;
  }

  /** The same, saying what it was doing. */
  while(state: string): DeadlineExceededError {
    return new DeadlineExceededError(this.deadlineMs, this.cause, state);
  }
}

/** The pool had no connection to give. */
export class NoConnectionError extends HoldfastError {
  constructor(waitedMs: number) {
    super(
      "HF_NO_CONNECTION",
      `The pool gave no connection for ${waitedMs} ms: all of them are in use. Make the pool larger, or hold connections for a shorter time.`,
      { retryable: true },
    );
  }
}

/** COMMIT was sent, its answer never came, and the server could not tell what became of it. */
export class CommitUnknownError extends HoldfastError {
  constructor(detail: string, cause: unknown) {
    super(
      "HF_COMMIT_UNKNOWN",
      `The connection was lost while COMMIT was under way, and ${detail}: the work is either kept whole or not at all. ` +
        `Look for its effects before you repeat it, or make it idempotent.`,
      { cause },
    );
  }
}

/** A statement failed, its error was swallowed, and the server turned COMMIT into ROLLBACK. */
export class TransactionAbortedError extends HoldfastError {
  constructor(
    cause?: unknown,
    detail = "An earlier statement of this transaction failed and its error was swallowed, so the server refuses the rest and kept nothing.",
  ) {
    super(
      "HF_TRANSACTION_ABORTED",
      `${detail} Let the error out, or put the statement that may fail into \`tx.transaction(…)\`, which is a savepoint.`,
      { cause },
    );
  }
}

/** `hf.join(client)` on a client that is in no transaction: a lock taken there would be gone at once. */
export class NotInTransactionError extends HoldfastError {
  constructor(detail: string, cause?: unknown) {
    super("HF_NOT_IN_TRANSACTION", `hf.join: ${detail}`, { cause });
  }
}

export class ReplicaError extends HoldfastError {
  constructor(cause?: unknown) {
    super(
      "HF_REPLICA",
      "This connection leads to a read-only replica: a lock taken there excludes nobody on the primary. Connect to the primary.",
      { cause },
    );
  }
}

export class ServerTooOldError extends HoldfastError {
  constructor(found: string, minimum: string, why: string) {
    super("HF_SERVER_TOO_OLD", `The server is ${found}; Holdfast needs ${minimum} or newer: ${why}.`);
  }
}

export class SchemaMissingError extends HoldfastError {
  constructor(what: string, cause?: unknown) {
    super(
      "HF_SCHEMA_MISSING",
      `${what} is not in this database. Call \`await hf.migrate()\` once, or put the SQL of \`hf.migrationSql()\` into your own migrations.`,
      { cause },
    );
  }
}

/** A session lock whose connection died, or was found to be no longer ours. */
export class LockLostError extends HoldfastError {
  constructor(keys: readonly string[], detail: string, cause?: unknown) {
    super(
      "HF_LOCK_LOST",
      `The ${named(keys)} can no longer be relied on: ${detail}. Stop the work it protects.`,
      { cause },
    );
  }
}

export function message(error: unknown): string {
  return error instanceof Error ? error.message || error.name : String(error);
}
