/**
 * What a caller is told. Every error that leaves a call is the caller's own, or one of ours: it says what happened, to what, and
 * what to do, with the driver's as its cause.
 */
import type { Connection, Database, Failure } from "../seam/database.ts";
import { OneShotEnded } from "./one-shot.ts";
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
  SchemaMissingError,
  SerializationError,
  ServerFullError,
  ServerUnavailableError,
  StatementError,
  TransactionAbortedError,
} from "../seam/errors.ts";
import { classify, explained } from "../seam/failure.ts";
import { isOpaque, message } from "../seam/thrown.ts";

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
  const what = told.names.join(", ") || undefined;
  if (error instanceof NoConnectionError && !perhaps) return error.about(what);
  if (isOpaque(error) || (error instanceof HoldfastError && !(perhaps && troubles.has(why)))) return error;
  if (perhaps && troubles.has(why))
    return new OutcomeUnknownError(
      what ?? "A call",
      perhaps.id,
      perhaps.named ?? false,
      error,
      perhaps.instead,
    );
  switch (why) {
    case "lock-timeout":
      return inVain(told, error);
    case "lost":
      return new ConnectionLostError(attempts, error, what);
    case "late":
    case "canceled":
    case "deadline":
      return new DeadlineExceededError(Math.round(waitedMs), error, "", what);
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
      return new AccessDeniedError(what, error);
    case "full":
      return new ServerFullError(what, error);
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
