import { shown } from "./shown.ts";
import { message } from "./thrown.ts";

export { message };

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

/** "a, b, c", and of many "a, b, c, d, e and 12 more": a message is read by people. */
export function some(names: readonly string[], separator = ", "): string {
  const most = 5;
  const more = names.length - most;
  const shown = (more > 1 ? names.slice(0, most) : names).map((name) =>
    name.length > 200 ? `${name.slice(0, 199)}…` : name,
  );
  return `${shown.join(separator)}${more > 1 ? ` and ${more} more` : ""}`;
}

function named(keys: readonly string[]): string {
  return `${keys.length === 1 ? "lock" : "locks"} ${some(keys)}`;
}

/** What happened to what: of a call that has a name. */
function told(what: string | undefined, text: string): string {
  return what === undefined || what === ""
    ? text
    : `${what}: ${text.slice(0, 1).toLowerCase()}${text.slice(1)}`;
}

const ruined =
  " The transaction cannot go on, unless the call was in a savepoint (`tx.transaction`) of its own.";

/** The wait was over before the lock was free. Nothing of the transaction's work was kept. */
export class LockTimeoutError extends HoldfastError {
  readonly keys: readonly string[];
  readonly waitedMs: number;
  readonly holders: readonly Holder[];
  /** `usable`: the transaction can go on. */
  constructor(blocked: Blocked & { waitedMs: number }, cause?: unknown, usable = true) {
    super(
      "HF_LOCK_TIMEOUT",
      `Waited ${blocked.waitedMs} ms for ${named(blocked.keys)} in vain.${held(blocked)}${usable ? "" : ruined}` +
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
  constructor(blocked: Blocked, usable = true) {
    super(
      "HF_LOCK_NOT_AVAILABLE",
      `${blocked.keys.length === 1 ? "The lock" : "At least one of the locks"} ${some(blocked.keys)} is taken, and the call was not to wait.${held(blocked)}${usable ? "" : ruined}` +
        ` Use \`wait: "skip"\` (or \`tryLock\`) to get an answer instead of an error, or \`wait: ms\` to wait.`,
      { retryable: true },
    );
    this.keys = blocked.keys;
    this.holders = blocked.holders;
  }
}

/**
 * Somebody else writes to a database that has one writer at a time, and it is not known that they hold the lock. Whether
 * it is free was not found out.
 */
export class FileBusyError extends HoldfastError {
  readonly keys: readonly string[];
  readonly waitedMs: number;
  constructor(keys: readonly string[], waitedMs: number, cause?: unknown) {
    super(
      "HF_FILE_BUSY",
      `Waited ${waitedMs} ms for the file in vain: somebody else writes to it, and it has one writer at a time.` +
        (keys.length === 0 ? "" : ` Nobody is known to hold the ${named(keys)}.`) +
        ` Try again later, give \`wait\` more time, or shorten what the writer does in its transaction.`,
      { retryable: true, cause },
    );
    this.keys = keys;
    this.waitedMs = waitedMs;
  }

  /** For a synchronous call: the writer is a transaction of this process, which cannot go on until the call has returned. */
  static own(keys: readonly string[]): FileBusyError {
    const error = new FileBusyError(keys, 0);
    error.message =
      "Another transaction of this process writes to the file, and cannot end while hf.transactionSync waits for it. " +
      "Use hf.transaction here, or try again after that one has ended.";
    return error;
  }
}

export class DeadlockError extends HoldfastError {
  constructor(attempts: number, cause: unknown, what?: string) {
    super(
      "HF_DEADLOCK",
      told(
        what,
        `The server ended this transaction to break a deadlock${attempts === 1 ? "" : `, ${attempts} times in a row`}. ` +
          `Take what is locked in one call (\`lock: [a, b]\`), so that everybody takes it in the same order.`,
      ),
      { retryable: true, cause },
    );
  }
}

export class SerializationError extends HoldfastError {
  constructor(detail: string, cause?: unknown) {
    super("HF_SERIALIZATION", detail, { retryable: true, cause });
  }

  /** Where locks exclude at COMMIT only. */
  static atCommit(attempts: number, cause: unknown, what?: string): SerializationError {
    return new SerializationError(
      told(
        what,
        `Another node committed first${attempts === 1 ? "" : `, ${attempts} times in a row`}: locks exclude at COMMIT only on this cluster. Nothing was kept. ` +
          `Allow more attempts (\`retry: { attempts }\`), or send those who want the same key to one node.`,
      ),
      cause,
    );
  }

  static after(attempts: number, cause: unknown, what?: string): SerializationError {
    return new SerializationError(
      told(
        what,
        `A concurrent transaction changed what this one had read${attempts === 1 ? "" : `, ${attempts} times in a row`}. Lock what you check before you read it, or allow more attempts (\`retry: { attempts }\`).`,
      ),
      cause,
    );
  }
}

/** A node of a cluster that takes no statements: it has lost the others, or has not caught up with them. */
export class ServerUnavailableError extends HoldfastError {
  constructor(attempts: number, cause: unknown, what?: string) {
    super(
      "HF_UNAVAILABLE",
      told(
        what,
        `The server takes no statements for now (attempt ${attempts}): ${message(cause)}. It is a node of a cluster that has lost the others, or ` +
          `has not caught up with them. Nothing was kept. Connect to another node, or try again later.`,
      ),
      { retryable: true, cause },
    );
  }
}

export class ConnectionLostError extends HoldfastError {
  constructor(attempts: number, cause: unknown, what?: string) {
    super(
      "HF_CONNECTION_LOST",
      told(
        what,
        what === undefined
          ? `The connection was lost before the transaction was committed (attempt ${attempts}): ${message(cause)}. Nothing was kept.`
          : `The connection was lost, or could not be made (attempt ${attempts}): ${message(cause)}. Nothing was kept. Try again when the server is there.`,
      ),
      { retryable: true, cause },
    );
  }
}

/** Somebody ended the transaction's session on purpose, with `holdfast kill`. Nothing was kept, and it is not run again. */
export class KilledError extends HoldfastError {
  constructor(locks: readonly string[], cause: unknown) {
    super(
      "HF_KILLED",
      `Somebody ended this transaction on purpose (holdfast kill)${locks.length === 0 ? "" : `, which held the ${named(locks)}`}. Nothing was kept, and it was not run again. ` +
        `To run it again after a kill, too: \`retry: { on: ["killed"] }\`.`,
      { cause },
    );
  }
}

/** The transaction ran longer than its `deadline`; it was rolled back. */
export class DeadlineExceededError extends HoldfastError {
  readonly deadlineMs: number;
  /** A limit that the server has has ended it. */
  static ofServer(
    { setting, value }: { readonly setting: string; readonly value: string },
    deadlineMs: number,
    cause: unknown,
    what?: string,
  ): DeadlineExceededError {
    const limit = told(
      what,
      `The server ended the transaction: its ${setting} is ${value}, and the transaction took longer. Nothing was kept, and it was not run again, ` +
        `as it would be ended again. Do slow work outside of it, or raise ${setting} for this user.`,
    );
    return new DeadlineExceededError(deadlineMs, cause, "", undefined, limit);
  }

  constructor(deadlineMs: number, cause?: unknown, state = "", what?: string, instead?: string) {
    super(
      "HF_DEADLINE",
      instead ??
        (what === undefined
          ? `The transaction did not end within its deadline of ${deadlineMs} ms (or a shorter limit that the server has) and ` +
            `was rolled back${state === "" ? "" : `; ${state}`}. Do slow work outside of it, or set \`deadline\`.`
          : `${what}: there was no answer after ${deadlineMs} ms, and it was ended, ${state}. ` +
            `Nothing was kept. Try again, or give it more time, e.g. with a longer limit of the server's.`),
      { cause },
    );
    this.deadlineMs = deadlineMs;
  }

  /** The same, saying what it was doing. */
  while(state: string): DeadlineExceededError {
    return new DeadlineExceededError(this.deadlineMs, this.cause, state);
  }
}

/** There was no connection to be had. */
export class NoConnectionError extends HoldfastError {
  constructor(waitedMs: number | undefined, cause?: unknown, detail?: string, retryable = true) {
    super(
      "HF_NO_CONNECTION",
      detail ??
        `The pool gave no connection for ${waitedMs} ms: all of them are in use. Make the pool larger, or hold connections for a shorter time.`,
      { retryable, cause },
    );
  }

  /** The client, or the server, said why. `passes`: and that it is for now. */
  static refused(cause: unknown, passes: boolean): NoConnectionError {
    return new NoConnectionError(
      undefined,
      cause,
      `No connection could be had: ${message(cause)}. Nothing was sent. Is the client closed, or its address wrong? Does the server take more connections?`,
      passes,
    );
  }

  /** The same, saying for what. */
  about(what: string | undefined): NoConnectionError {
    return new NoConnectionError(undefined, this.cause, told(what, this.message), this.retryable);
  }
}

/** The server does not let this user do it. */
export class AccessDeniedError extends HoldfastError {
  /** All rights to Holdfast's own tables and routines that the user lacks: "SELECT, INSERT on holdfast.lease". Empty: not known. */
  readonly lacking: readonly string[];
  readonly #named: boolean;
  constructor(what: string | undefined, cause: unknown, lacking: readonly string[] = []) {
    const remedy =
      lacking.length === 0
        ? "Grant the rights to it (Holdfast's own tables and routines included), or connect as a user that has them."
        : `This user lacks ${lacking.join("; ")}. \`holdfast migrate grants --role …\` prints the SQL that grants all of it: run that as the owner of these tables.`;
    super(
      "HF_ACCESS_DENIED",
      told(what, `The server does not let this user do it: ${message(cause)}. Nothing was kept. ${remedy}`),
      { cause },
    );
    this.lacking = lacking;
    this.#named = what !== undefined;
  }

  /** The same, saying for what. */
  about(what: string | undefined): AccessDeniedError {
    return this.#named || what === undefined ? this : new AccessDeniedError(what, this.cause, this.lacking);
  }
}

/** Why rows of ours are hidden. */
export interface HiddenRows {
  /** As it is written in SQL, or in the server's words if those are all there is. */
  readonly table: string;
  /** Row-level security hides them from this role; else a trigger, a rule or a view has kept a row away. */
  readonly byPolicy: boolean;
}

/** A table of Holdfast's own does not show all of its rows, or does not keep what was written. Nothing was decided. */
export class RowsHiddenError extends HoldfastError {
  readonly table: string;
  constructor(what: string | undefined, { table, byPolicy }: HiddenRows, cause?: unknown) {
    super(
      "HF_ROWS_HIDDEN",
      told(
        what,
        byPolicy
          ? `Row-level security hides rows of Holdfast's table ${table} from this role, so nothing can be decided. Nothing was kept. ` +
              `Disable it (ALTER TABLE ${table} DISABLE ROW LEVEL SECURITY), or connect as a role that sees all rows: ` +
              `one with BYPASSRLS, or the owner if the table is not under FORCE ROW LEVEL SECURITY.`
          : `A row that was written to Holdfast's table ${table} is not there. Nothing was kept. ` +
              `Remove the trigger, the rule or the view that keeps rows out of it or hides them.`,
      ),
      { cause },
    );
    this.table = table;
  }
}

/** The database has no room left: on its disk, in its memory. */
export class ServerFullError extends HoldfastError {
  constructor(what: string | undefined, cause: unknown) {
    super(
      "HF_SERVER_FULL",
      told(
        what,
        `The database has no room left: ${message(cause)}. Nothing was kept. Make room for it, then try again.`,
      ),
      { cause },
    );
  }
}

/** The database could not read or write what it is kept in, or found it damaged. */
export class StorageError extends HoldfastError {
  constructor(what: string | undefined, cause: unknown) {
    super(
      "HF_STORAGE",
      told(
        what,
        `The database could not read or write its files: ${message(cause)}. It was rolled back as far as that was possible. ` +
          `Look at the disk, and check that the database is whole, before you go on.`,
      ),
      { cause },
    );
  }
}

/** Somebody deleted or replaced a database file that this process has open. */
export class FileReplacedError extends HoldfastError {
  readonly file: string;
  constructor(file: string, isGone: boolean, cause?: unknown) {
    super(
      "HF_FILE_REPLACED",
      `The database file ${file} was ${isGone ? "deleted or moved" : "replaced by another file"} while this process had it open. ` +
        `What this process writes now is lost, and its locks keep nobody out, so Holdfast refuses to go on. ` +
        `Put the file back, or restart the process (or close the client and open it again).`,
      { cause },
    );
    this.file = file;
  }
}

/** A statement of Holdfast's own failed in a way that it has no better word for: see `cause`. */
export class StatementError extends HoldfastError {
  constructor(what: string | undefined, cause: unknown) {
    super(
      "HF_STATEMENT",
      told(
        what,
        `A statement failed: ${message(cause)}. Nothing of it was kept. The cause has the server's, or the client's, own words.`,
      ),
      { cause },
    );
  }
}

/** COMMIT was sent, its answer never came, and the server could not tell what became of it. */
export class CommitUnknownError extends HoldfastError {
  /** `partly`: several nodes commit, and one may have done so without the others. */
  constructor(detail: string, cause: unknown, partly = false) {
    super(
      "HF_COMMIT_UNKNOWN",
      `The answer to COMMIT was lost, and ${detail}: ${
        partly
          ? "the work may be kept, or not, or what it wrote on one node without what it wrote on another. "
          : "the work is either kept whole or not at all. "
      }Look for its effects before you repeat it, or make it idempotent.`,
      { cause },
    );
  }
}

/** A call of a pattern was sent, its answer was lost, and it could not be found out whether it was applied. */
export class OutcomeUnknownError extends HoldfastError {
  /** What the call is known by: with this id it is applied once, however often it is sent. */
  readonly id: string | undefined;
  /**
   * `named`: the id was the caller's own, so that repeating the call is safe as it is. `instead`: what follows, of a call that
   * can be repeated without an id.
   */
  constructor(what: string, id: string | undefined, named: boolean, cause: unknown, instead?: string) {
    super(
      "HF_OUTCOME_UNKNOWN",
      `${what}: the call was sent, and its answer was lost (${message(cause)}): it was applied whole, or not at all. ` +
        (id === undefined
          ? (instead ?? `Look for its effects before you repeat it.`)
          : named
            ? `Repeat it with the same id: it is applied once.`
            : `Repeat it with the id of this error, ${JSON.stringify(id)}: it is applied once. Without it, it may count twice.`),
      { retryable: named || instead !== undefined, cause },
    );
    this.id = id;
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

  /** Its body has sent COMMIT or ROLLBACK by itself, or the database has rolled it back after an error that was swallowed. */
  static early(cause?: unknown): TransactionAbortedError {
    return new TransactionAbortedError(
      cause,
      "The transaction was over before its end, and its locks with it: its body has sent COMMIT or ROLLBACK by itself, or swallowed an error that rolled it back. What came after was kept, statement by statement.",
    );
  }
}

/** `hf.join(client)` on a client that is in no transaction: a lock taken there would be gone at once. */
export class NotInTransactionError extends HoldfastError {
  readonly #detail: string;
  constructor(detail: string, cause?: unknown, options: { call?: string; cause?: unknown } = {}) {
    super("HF_NOT_IN_TRANSACTION", `${options.call ?? "hf.join"}: ${detail}`, { cause });
    this.#detail = detail;
  }

  /** The same, of another call than `hf.join`. */
  of(call: string): NotInTransactionError {
    return new NotInTransactionError(this.#detail, this.cause, { call });
  }
}

export class ReplicaError extends HoldfastError {
  /** A file that was opened so that nothing can be written to it. */
  static file(cause: unknown): ReplicaError {
    return new ReplicaError(
      cause,
      undefined,
      `A lock here would keep nobody out, for this client cannot write to the file: ${message(cause)}. Open the file without a read-only ` +
        "option (`readonly`, `mode=ro`, `immutable=1`, `PRAGMA query_only`), as a user who may write to it.",
    );
  }

  /** A server that takes writes, although another one feeds it. */
  static writable(why: string): ReplicaError {
    return new ReplicaError(
      undefined,
      undefined,
      `This server takes writes, but ${why}: both would grant the same lock and the same quota. Connect to the server that it replicates from. ` +
        "If no other server takes locks or counts for this database, say so: holdfast(…, { acceptReplica: true }).",
    );
  }

  /** What is asked again is answered from a memory of answers. */
  static cache(): ReplicaError {
    return new ReplicaError(
      undefined,
      undefined,
      "A cache stands between this client and the server: it has answered the same question twice with what changes each time. What it answers may be " +
        "over. Give Holdfast an address that leads to the primary itself, or turn the cache off for it.",
    );
  }

  constructor(cause?: unknown, what?: string, instead?: string) {
    super(
      "HF_REPLICA",
      instead ??
        (what === undefined
          ? "This connection leads to a read-only replica: a lock taken there excludes nobody on the primary. Connect to the primary."
          : `${what}: a server that is read only was asked: ${message(cause)}. Either a replica was asked, directly or through what sends reads, or some of the ` +
            `connections, to one: give Holdfast an address that leads to the primary alone. Or the transaction, the user or the database is read only: ` +
            `open one that writes.`),
      { cause },
    );
  }
}

export class ServerTooOldError extends HoldfastError {
  constructor(found: string, minimum: string, why: string) {
    super("HF_SERVER_TOO_OLD", `The server is ${found}; Holdfast needs ${minimum} or newer: ${why}.`);
  }
}

/** Something of somebody else's has the name that Holdfast's own tables would have. */
export class SchemaTakenError extends HoldfastError {
  constructor(what: string, cause?: unknown) {
    super(
      "HF_SCHEMA_TAKEN",
      `${what}. Holdfast leaves it alone. Choose another name for its own tables: holdfast(…, { schema: "…" }) in every process, and ` +
        "HOLDFAST_SCHEMA or --schema of the command.",
      { cause },
    );
  }
}

export class SchemaMissingError extends HoldfastError {
  constructor(what: string, cause?: unknown) {
    super(
      "HF_SCHEMA_MISSING",
      `${what} is not in this database, or is that of an older version of Holdfast. Call \`await hf.migrate()\` once, or put the SQL of \`hf.migrationSql()\` into your own migrations.`,
      { cause },
    );
  }
}

/** Keys were given that name no row. Nothing was wrong with the locks. */
export class RowsMissingError extends HoldfastError {
  readonly table: string;
  readonly missing: readonly unknown[];
  constructor(table: string, missing: readonly unknown[]) {
    const shown = missing
      .slice(0, 5)
      .map((key) => shownKey(key))
      .join(", ");
    super(
      "HF_ROWS_MISSING",
      `${table} has no row ${shown}${missing.length > 5 ? ` and ${missing.length - 5} more` : ""}. If that may be so, ask with \`missing: "report"\` and look at \`missing\` of the result.`,
    );
    this.table = table;
    this.missing = missing;
  }
}

/** The row has changed since it was read, more often than the call was to try. */
export class StaleVersionError extends HoldfastError {
  readonly table: string;
  readonly key: unknown;
  /** The version that was read. */
  readonly expected: unknown;
  /** The version that is there now; undefined if the row is gone. */
  readonly found: unknown;
  constructor(table: string, key: unknown, expected: unknown, found: unknown, attempts: number) {
    super(
      "HF_STALE_VERSION",
      `${table} ${shownKey(key)} was read at version ${shown(expected)} and ${found === undefined ? "is gone" : `is at ${shown(found)}`} now${attempts > 1 ? ` (attempt ${attempts})` : ""}. ` +
        `Read it again and decide anew, allow more \`attempts\`, or lock the row (\`tx.rows\`) where many write to it.`,
      { retryable: found !== undefined },
    );
    this.table = table;
    this.key = key;
    this.expected = expected;
    this.found = found;
  }
}

/** A lease that is no longer ours, or may not be: the reason of its `signal`. */
export class LeaseLostError extends HoldfastError {
  readonly lease: string;
  readonly fence: number;
  constructor(lease: string, fence: number, detail: string, cause?: unknown) {
    super(
      "HF_LEASE_LOST",
      `The lease ${lease} (fence ${fence}) can no longer be relied on: ${detail}. Stop the work it protects.`,
      {
        cause,
      },
    );
    this.lease = lease;
    this.fence = fence;
  }
}

/** `fenced(tx, lease)`: somebody else has had the lease since. The transaction must not write. */
export class StaleFenceError extends HoldfastError {
  readonly lease: string;
  readonly fence: number;
  /** The newest fence known for the resource. */
  readonly newest: number;
  constructor(lease: string, fence: number, newest: number) {
    super(
      "HF_STALE_FENCE",
      newest > fence
        ? `The lease ${lease} with fence ${fence} is over: fence ${newest} has been given since. Nothing may be written for it any more.`
        : `The lease ${lease} with fence ${fence} is over: it was released, or ran out. Nothing may be written for it any more.`,
    );
    this.lease = lease;
    this.fence = fence;
    this.newest = newest;
  }
}

/** `once`: the id has been used with another payload, or is too old for its record to be still there. */
export class OnceError extends HoldfastError {
  readonly id: string;
  constructor(code: "HF_ONCE_CONFLICT" | "HF_ONCE_TOO_OLD", id: string, detail: string) {
    super(code, `once ${id}: ${detail}`);
    this.id = id;
  }
}

/** One call, or one transaction, would need two shards. */
export class ShardError extends HoldfastError {
  constructor(detail: string) {
    super(
      "HF_SHARDS",
      `${detail} A transaction lives on one shard: choose keys that are routed together, or do one after the other.`,
    );
  }
}

/** The list of databases, or the way from a key to its shard, is not the one that is written down in the database. */
export class ShardMapError extends HoldfastError {
  constructor(
    detail: string,
    options: { readonly retryable?: boolean; readonly cause?: unknown } = {},
    advice = "Processes that route differently would grant the same thing twice: give all of them the same databases, in the same " +
      "order, and the same route. If the list was changed on purpose: await shards.renumber(), once, by a process that has the new one.",
  ) {
    super("HF_SHARD_MAP", `${detail} ${advice}`, options);
  }

  /** The list was changed, and `settle()` has not moved this yet, as far as the caller can know. */
  static unsettled(call: string, what: string, advice: string): ShardMapError {
    return new ShardMapError(
      `${call}: ${what} may still be where the list before had it.`,
      { retryable: true },
      `${advice}, or wait until shards.settle() has ended.`,
    );
  }
}

/** Locks are kept in another way here, or are about to be: whoever kept them in two ways would exclude nobody. */
export class StrategyError extends HoldfastError {
  constructor(detail: string, retryable = false) {
    super("HF_STRATEGY", detail, { retryable });
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

/** A key of a row, for people. */
export function shownKey(key: unknown): string {
  const text =
    typeof key === "object" && key !== null && !(key instanceof Date) && !(key instanceof Uint8Array)
      ? Object.entries(key)
          .map(([column, value]) => `${column}=${typeof value === "string" ? value : shown(value)}`)
          .join(", ")
      : key instanceof Date && !Number.isNaN(key.getTime())
        ? key.toISOString()
        : key instanceof Uint8Array
          ? `0x${Buffer.from(key).toString("hex")}`
          : typeof key === "string"
            ? key
            : shown(key);
  return text.length > 80 ? `${text.slice(0, 77)}...` : text;
}

const unseen = "a place that the stack does not show";

/** A statement went through the outer client, inside of a transaction's body. */
export class WrongConnectionError extends HoldfastError {
  constructor(query: string | undefined, transaction: string | undefined) {
    super(
      "HF_WRONG_CONNECTION",
      `A statement inside a transaction was sent through the outer client: at ${query ?? unseen}, in the transaction of ${transaction ?? unseen}. ` +
        `It is not part of the transaction, and takes a second connection. Send it through \`tx.client\`; if it is meant to be apart, wrap it in \`hf.outside(() => …)\`.`,
    );
  }

  /** A call of ours that does not name the transaction of the client's own which it is in. */
  static forgotten(
    call: string,
    at: string | undefined,
    transaction: string | undefined,
  ): WrongConnectionError {
    const error = new WrongConnectionError(at, transaction);
    error.message =
      `A call of ${call} is inside a transaction and not part of it: at ${at ?? unseen}, in the transaction of ${transaction ?? unseen}. ` +
      `It takes a second connection, and what it does is kept if the transaction rolls back. Pass \`{ tx }\`; if it is meant to be apart, say \`separate: true\`.`;
    return error;
  }
}

/** A process waited for one of its own transactions. Given to `process.emitWarning`. */
export class StalledError extends HoldfastError {
  constructor(stalledMs: number, transaction: string | undefined) {
    super(
      "HF_STALLED",
      `This process stood still for ${(stalledMs / 1000).toFixed(1)} s, with the transaction of ${transaction ?? unseen} open. ` +
        `A call of a synchronous client most likely waited for the file, which this transaction was writing to and could not go on to end. ` +
        `Inside the body, write through \`tx.client\`. Elsewhere in the process, open the handle with a busy timeout of 0 and try again later, or keep the transaction free of everything that has to be awaited for long.`,
    );
  }
}

export const hazardKinds = [
  "fetch",
  "http",
  "socket",
  "dns",
  "timer",
  "process",
  "prompt",
  "connection",
  "pool",
  "late",
  "order",
] as const;

/** What should not be done, or waited for, while locks are held. */
export type HazardKind = (typeof hazardKinds)[number];

/** What was done, or waited for, while locks were held. With `hazards: "throw"` the transaction fails with it. */
export class HazardError extends HoldfastError {
  readonly kind: HazardKind;
  /** Where it was done, as `file:line:column`. */
  readonly place: string | undefined;
  readonly transaction: string | undefined;

  constructor(
    kind: HazardKind,
    locks: readonly string[],
    place: string | undefined,
    transaction: string | undefined,
    detail = "",
  ) {
    const under =
      locks.length > 0 && kind !== "late"
        ? ` while ${named(locks)} ${locks.length > 1 ? "were" : "was"} held`
        : "";
    const { what, instead } = hazards[kind];
    super(
      "HF_HAZARD",
      `${what}${under}: at ${place ?? unseen}, in the transaction of ${transaction ?? unseen}.${detail} ${instead}`,
    );
    this.kind = kind;
    this.place = place;
    this.transaction = transaction;
  }
}

const elsewhere =
  "Everybody who wants the same waits for it. Do it before the transaction or after it; if it has to be here, wrap it in `hf.outside(() => …)`.";

const hazards: Readonly<Record<HazardKind, { readonly what: string; readonly instead: string }>> = {
  fetch: { what: "A request was sent (fetch)", instead: elsewhere },
  http: { what: "A request was sent (http)", instead: elsewhere },
  socket: { what: "A connection to another server was opened", instead: elsewhere },
  dns: { what: "A name was looked up (DNS)", instead: elsewhere },
  timer: { what: "A timer was waited for", instead: elsewhere },
  process: { what: "A process or a thread was started", instead: elsewhere },
  prompt: { what: "Somebody was asked a question", instead: elsewhere },
  connection: {
    what: "A statement was sent through the outer client",
    instead: "Send it through `tx.client`; if it is meant to be apart, wrap it in `hf.outside(() => …)`.",
  },
  pool: {
    what: "Another connection was asked for, and the pool had none left,",
    instead:
      "If all who hold one wait for another, nobody gets it. Use `tx.client`, or make the pool larger.",
  },
  late: {
    what: "A statement was sent after its transaction had ended",
    instead: "It was refused. Is an `await` missing in the body?",
  },
  order: {
    what: "Locks were taken in another order than elsewhere",
    instead: "Two of these at once are a deadlock. Take them in one order, or in one call: `tx.lockAll`.",
  },
};

/** All connections of the pool are held by transactions that wait for another one. */
export class PoolExhaustedError extends HoldfastError {
  constructor(max: number, query: string | undefined, transaction: string | undefined) {
    super(
      "HF_POOL_EXHAUSTED",
      `${max === 1 ? "The one connection of the pool is held by a transaction that waits" : `All ${max} connections of the pool are held by transactions that wait`} for another one, so none would ever come: ` +
        `at ${query ?? unseen}, in the transaction of ${transaction ?? unseen}. Use \`tx.client\` inside of a transaction, or make the pool larger than the number of transactions at a time.`,
      { retryable: true },
    );
  }
}
