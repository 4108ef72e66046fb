import type { Capabilities } from "./capabilities.ts";
import type { DriverError, Failure, Violated } from "./database.ts";
import {
  type HiddenRows,
  HoldfastError,
  KilledError,
  LockNotAvailableError,
  LockTimeoutError,
  UnsupportedError,
} from "./errors.ts";
import { isOpaque, read } from "./thrown.ts";

/** Codes that Node's sockets give when a peer is gone; true of every client that lets them through. */
const socketCodes = new Set([
  "ECONNRESET",
  "EPIPE",
  "ECONNREFUSED",
  "ECONNABORTED",
  "ENOTCONN",
  "ETIMEDOUT",
  "EHOSTUNREACH",
]);

interface Source {
  readonly engine: {
    classify(error: DriverError): Failure | undefined;
    hopeless?(error: DriverError): string | undefined;
    mayBeKept?(error: DriverError, capabilities: Capabilities): boolean;
    hidden?(error: DriverError): HiddenRows | undefined;
    violated?(error: object): Violated;
  };
  readonly unwrap?: ((error: unknown) => DriverError | undefined) | undefined;
}

/** Clients in use, so that questions about an error need no instance at hand. */
const sources = new Set<Source>();

/** `sockets`: whether a socket that was closed can only have been ours. */
export function classify(source: Source, error: unknown, sockets = true): Failure | undefined {
  return find(source, error, sockets)?.kind;
}

/** What an error means, whoever threw it, and which rule of which table it is about, where it says so. */
export interface FailureInfo extends Violated {
  readonly kind: Failure;
}

/**
 * Whether an error about a lock came after a wait, and not of a statement that was not to wait. Undefined: the server has
 * the same words for both.
 */
export function waited(
  source: Source & { readonly engine: { waited?(error: object, flavour?: string): boolean | undefined } },
  error: unknown,
  flavour: string | undefined,
): boolean | undefined {
  for (const each of chain(error)) {
    if (each instanceof LockTimeoutError) return true;
    if (each instanceof LockNotAvailableError) return false;
    const found = findOne(source, each, false);
    if (found?.kind === "lock-timeout")
      return (
        source.engine.waited?.(source.unwrap?.(each) ?? each, flavour) ??
        source.engine.waited?.(each, flavour)
      );
  }
  return undefined;
}

/** An error, and what it says that it was caused by. */
export function* chain(error: unknown): Generator<object> {
  const seen = new Set<unknown>();
  for (
    let e = error;
    typeof e === "object" && e !== null && !seen.has(e) && !isOpaque(e);
    e = read(e, "cause")
  ) {
    seen.add(e);
    yield e;
  }
}

function find(source: Source, error: unknown, sockets = true): FailureInfo | undefined {
  for (const each of chain(error)) {
    // Its cause is a lost connection, after which work would be run again.
    if (each instanceof KilledError) return undefined;
    const found = findOne(source, each, sockets);
    if (found) return found;
  }
  return undefined;
}

function findOne(source: Source, error: object, sockets: boolean): FailureInfo | undefined {
  try {
    return look(source, error, sockets);
  } catch {
    // A look at it throws: it is none of a server or a driver.
    return undefined;
  }
}

function look(source: Source, error: object, sockets: boolean): FailureInfo | undefined {
  const unwrapped = source.unwrap?.(error);
  for (const candidate of unwrapped ? [unwrapped, error as DriverError] : [error as DriverError]) {
    if (candidate.lost === true || (sockets && socketCodes.has(String(candidate.code))))
      return { kind: "lost" };
    const kind = source.engine.classify(candidate);
    if (kind) return { kind, ...(candidate.violated ?? source.engine.violated?.(candidate)) };
  }
  return undefined;
}

/** The same error, or, if nothing that is tried again could end otherwise, one that says why. */
export function explained(source: Source, error: unknown): unknown {
  if (isOpaque(error)) return error;
  for (const each of chain(error)) {
    if (each instanceof HoldfastError) return error;
    const why = said(source, each, (one) => source.engine.hopeless?.(one));
    if (why !== undefined) return new UnsupportedError(why, error);
  }
  return error;
}

/** Whether an error of a statement that was a transaction by itself leaves open what became of it. */
export function mayBeKept(source: Source, error: unknown, capabilities: Capabilities): boolean {
  if (isOpaque(error) || error instanceof HoldfastError) return false;
  if (classify(source, error) === "lost") return true;
  for (const each of chain(error))
    if (said(source, each, (one) => source.engine.mayBeKept?.(one, capabilities) || undefined)) return true;
  return false;
}

/** Which of our tables hides rows, if that is what an error of one of our own statements says. */
export function hiddenRows(source: Source, error: unknown): HiddenRows | undefined {
  for (const each of chain(error)) {
    const hidden = said(source, each, (one) => source.engine.hidden?.(one));
    if (hidden) return hidden;
  }
  return undefined;
}

/** What an engine reads in an error, as the driver threw it or as the client wrapped it. */
function said<T>(
  { unwrap }: Source,
  error: object,
  ask: (error: DriverError) => T | undefined,
): T | undefined {
  try {
    const unwrapped = unwrap?.(error);
    return (unwrapped && ask(unwrapped)) ?? ask(error);
  } catch {
    // A look at it throws: it is none of a server or a driver.
    return undefined;
  }
}

export function remember(source: Source): void {
  // One entry per kind of client, not per instance, is enough and cannot leak.
  for (const known of sources) if (known.engine === source.engine && known.unwrap === source.unwrap) return;
  sources.add(source);
}

/**
 * What an error means, whether it comes from the driver, from the ORM or from Holdfast, or is wrapped in your own:
 * `failureOf(error)?.constraint === "user_email_key"`. Of clients that an instance was made for in this process.
 */
export function failureOf(error: unknown): FailureInfo | undefined {
  for (const source of sources) {
    const found = find(source, error);
    if (found) return found;
  }
  return undefined;
}

function anyFailure(error: unknown): Failure | undefined {
  return failureOf(error)?.kind;
}

/** Whether a lock was not to be had: in time, or at once. */
export function isLockTimeout(error: unknown): boolean {
  if (isOpaque(error)) return false;
  if (error instanceof LockTimeoutError || error instanceof LockNotAvailableError) return true;
  return anyFailure(error) === "lock-timeout";
}

/** Whether an error, of the driver, of the ORM or wrapped by your own, is a violated UNIQUE or primary key. */
export function isUniqueViolation(error: unknown): boolean {
  return anyFailure(error) === "unique";
}

const passing = new Set<Failure>(["deadlock", "serialization", "lost", "unavailable", "lock-timeout"]);

/** Whether running the whole transaction again may succeed. */
export function isRetryable(error: unknown): boolean {
  if (isOpaque(error)) return false;
  if (error instanceof HoldfastError) return error.retryable;
  const failure = anyFailure(error);
  return failure !== undefined && passing.has(failure);
}

/**
 * Failures in place of an answer to COMMIT that say that nothing was kept, whichever node of several they come from. A serialization failure
 * does not: the node that was asked may find the conflict after another one has committed.
 */
export const undone: ReadonlySet<Failure | undefined> = new Set<Failure>([
  "deadlock",
  "unique",
  "foreign-key",
  "check",
  "aborted",
]);
