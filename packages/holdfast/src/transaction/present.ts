/**
 * What a caller is told. Every error that leaves a call is the caller's own, or one of ours: it says what happened, to what, and
 * what to do, with the driver's as its cause.
 */
import type { Connection, Database, Failure } from "../seam/database.ts";
import { OneShotEnded } from "./one-shot.ts";
import { rightsLacking } from "./rights.ts";
import {
  AccessDeniedError,
  ConnectionLostError,
  DeadlineExceededError,
  DeadlockError,
  HoldfastError,
  LockTimeoutError,
  NoConnectionError,
  OutcomeUnknownError,
  ReplicaError,
  RowsHiddenError,
  SchemaMissingError,
  SerializationError,
  ServerFullError,
  ServerUnavailableError,
  ShardMapError,
  StatementError,
  StorageError,
  TransactionAbortedError,
  UnsupportedError,
  some,
} from "../seam/errors.ts";
import { classify, explained, hiddenRows } from "../seam/failure.ts";
import { isOpaque, message } from "../seam/thrown.ts";
import { graceMs, within } from "../waiting/interrupt.ts";
import type { Instance } from "./instance.ts";

/** Why there is no answer. */
export type Why = Failure | "late" | "aborted" | "no connection";

type Source = Pick<Database<unknown, Connection>, "engine" | "unwrap">;

export function whyOf(source: Source, error: unknown): Why | undefined {
  if (error instanceof OneShotEnded) return error.why;
  return error instanceof NoConnectionError ? "no connection" : classify(source, error);
}

/** Of what is between us and the server, or of others. Anything else is the server's refusal of what was sent. */
export const troubles: ReadonlySet<Why | undefined> = new Set<Why | undefined>([
  "lost",
  "late",
  "aborted",
  "no connection",
  "canceled",
  "deadline",
  "lock-timeout",
  "deadlock",
  "serialization",
]);

/** What is known of the call that failed. */
export interface FailedCall {
  /** What it is about, for people: "quota uploads:ann". */
  readonly names: readonly string[];
  readonly attempts?: number;
  readonly waitedMs?: number;
  /** It may have been applied although its answer was lost: then by which id it can be repeated, or what follows without one. */
  readonly perhaps?: {
    readonly id?: string | undefined;
    /** The id is the caller's own. */
    readonly named?: boolean | undefined;
    readonly instead?: string | undefined;
  };
  /** In the caller's transaction, which cannot go on after it. */
  readonly inside?: boolean;
  /** Of tables of the caller's: what is wrong with these, or with what was to be written there, is the caller's own. */
  readonly theirs?: boolean;
  /** Two can have a lock at the same time until one of them commits. */
  readonly atCommit?: boolean;
}

/** `why`: if it is known better than by the error. */
export function present(
  source: Source,
  error: unknown,
  told: FailedCall,
  why = whyOf(source, error),
): unknown {
  const { attempts = 1, waitedMs = 0, perhaps } = told;
  const what = some(told.names) || undefined;
  if (error instanceof NoConnectionError && !perhaps) return error.about(what);
  if (error instanceof AccessDeniedError) return error.about(what);
  if (isOpaque(error) || (error instanceof HoldfastError && !(perhaps && troubles.has(why)))) return error;
  if (perhaps && troubles.has(why))
    return new OutcomeUnknownError(
      what ?? "A call",
      perhaps.id,
      perhaps.named ?? false,
      error,
      perhaps.instead,
    );
  const hidden = told.theirs ? undefined : hiddenRows(source, error);
  if (hidden) return new RowsHiddenError(what, hidden, error);
  switch (why) {
    case "lock-timeout":
      return inVain(told, error);
    case "lost":
      return new ConnectionLostError(attempts, error, what);
    case "late":
      return new DeadlineExceededError(Math.round(waitedMs), error, "by its own limit", what);
    case "deadline":
    case "canceled":
      // The server keeps the deadline of a transaction, too.
      return why === "deadline" && what === undefined
        ? new DeadlineExceededError(Math.round(waitedMs), error)
        : new DeadlineExceededError(
            Math.round(waitedMs),
            error,
            `by a limit that the server has, or on somebody's request (${message(error)})`,
            what ?? "The transaction",
          );
    case "deadlock":
      return told.atCommit
        ? SerializationError.atCommit(attempts, error, what)
        : new DeadlockError(attempts, error, what);
    case "serialization":
      return told.atCommit
        ? SerializationError.atCommit(attempts, error, what)
        : SerializationError.after(attempts, error, what);
    case "unavailable":
      return new ServerUnavailableError(attempts, error, what);
    case "map-changed":
      return new ShardMapError(
        "The list of databases, or the way from keys to them, was changed since this process read it.",
      );
    case "read-only":
      return new ReplicaError(error, what);
    case "schema-missing":
      if (told.theirs) return error;
      // In the server's words too: of tables of the caller's own, nothing else says which it is.
      return new SchemaMissingError(
        `${what === undefined ? "What it needs" : `What ${what} is kept in`} (${message(error)})`,
        error,
      );
    case "denied":
      return new AccessDeniedError(what, error, told.theirs ? [] : rightsLacking(error));
    case "full":
      return new ServerFullError(what, error);
    case "storage":
      return new StorageError(what, error);
    case "too-many-connections":
      return NoConnectionError.refused(error, true).about(what);
    case "aborted":
      // Of the caller's signal: its reason is told by whoever knows it.
      return error instanceof OneShotEnded ? error : new TransactionAbortedError(error);
    default: {
      const hopeless = explained(source, error);
      return told.theirs || hopeless !== error ? hopeless : new StatementError(what, error);
    }
  }
}

/**
 * The same error; or, if the connection was lost at the beginning of a transaction and it turns out that none can be opened, one
 * that says so. Not every client passes on what it was told before its connection was closed.
 */
export async function orNoTransactions<C extends Connection>(
  { database, noTransactions }: Pick<Instance<unknown, C>, "database" | "noTransactions">,
  error: unknown,
): Promise<unknown> {
  if (classify(database, error) !== "lost") return error;
  const gap = await within(graceMs, noTransactions()).catch(() => undefined);
  return gap ? new UnsupportedError(gap.why, error) : error;
}

/** Of what goes wrong in the background, for `onTrouble` and its like: always one of ours. */
export function troubleOf(source: Source, error: unknown, name: string): HoldfastError {
  const told = present(source, error, { names: [name] });
  return !isOpaque(told) && told instanceof HoldfastError ? told : new StatementError(name, error);
}

/** Nothing was done: what it needed was not free in time. */
export function inVain(
  { names, waitedMs = 0, inside = false }: FailedCall,
  cause: unknown,
): LockTimeoutError {
  return new LockTimeoutError({ keys: names, waitedMs: Math.round(waitedMs), holders: [] }, cause, !inside);
}

/** Runs statements of ours that are told of by these names. What the signal says is the caller's own. */
export async function presenting<T>(
  source: Source,
  names: readonly string[],
  work: () => Promise<T>,
  signal?: AbortSignal,
): Promise<T> {
  const started = performance.now();
  try {
    return await work();
  } catch (error) {
    if (signal?.aborted && error === signal.reason) throw error;
    throw present(source, error, { names, waitedMs: performance.now() - started });
  }
}
