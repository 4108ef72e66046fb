import type { DriverError, Failure } from "./database.ts";
import { HoldfastError } from "./errors.ts";

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
  readonly engine: { classify(error: DriverError): Failure | undefined };
  readonly unwrap?: ((error: unknown) => DriverError | undefined) | undefined;
}

/** Clients in use, so that questions about an error need no instance at hand. */
const sources = new Set<Source>();

/** `sockets`: whether a socket that was closed can only have been ours. */
export function classify(source: Source, error: unknown, sockets = true): Failure | undefined {
  const seen = new Set<unknown>();
  for (
    let e = error;
    typeof e === "object" && e !== null && !seen.has(e);
    e = (e as { cause?: unknown }).cause
  ) {
    seen.add(e);
    const failure = classifyOne(source, e, sockets);
    if (failure) return failure;
  }
  return undefined;
}

function classifyOne(source: Source, error: object, sockets: boolean): Failure | undefined {
  const unwrapped = source.unwrap?.(error);
  for (const candidate of unwrapped ? [unwrapped, error as DriverError] : [error as DriverError]) {
    if (candidate.lost === true || (sockets && socketCodes.has(String(candidate.code)))) return "lost";
    const failure = source.engine.classify(candidate);
    if (failure) return failure;
  }
  return undefined;
}

export function remember(source: Source): void {
  // One entry per kind of client, not per instance, is enough and cannot leak.
  for (const known of sources) if (known.engine === source.engine && known.unwrap === source.unwrap) return;
  sources.add(source);
}

function anyFailure(error: unknown): Failure | undefined {
  for (const source of sources) {
    const failure = classify(source, error);
    if (failure) return failure;
  }
  return undefined;
}

/** Whether an error, of the driver, of the ORM or wrapped by your own, is a violated UNIQUE or primary key. */
export function isUniqueViolation(error: unknown): boolean {
  return anyFailure(error) === "unique";
}

/** Whether running the whole transaction again may succeed. */
export function isRetryable(error: unknown): boolean {
  if (error instanceof HoldfastError) return error.retryable;
  const failure = anyFailure(error);
  return (
    failure === "deadlock" || failure === "serialization" || failure === "lost" || failure === "lock-timeout"
  );
}
