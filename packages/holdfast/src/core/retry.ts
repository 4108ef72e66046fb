import { UsageError } from "./errors.ts";
import { checkNames } from "./options.ts";
import { milliseconds } from "./wait.ts";
import type { Failure } from "./database.ts";

export interface RetryOptions {
  /** How often the transaction runs at the most, the first run included. Default 5. */
  readonly attempts?: number;
  /** Bound of the first random pause; doubles from attempt to attempt. Default 20 ms. */
  readonly baseMs?: number;
  /** The longest random pause. Default 1,000 ms. */
  readonly maxMs?: number;
  /** Failures retried besides deadlock, serialization failure and a connection lost before COMMIT. */
  readonly on?: readonly "lock-timeout"[];
}

const retryNames = new Set(["attempts", "baseMs", "maxMs", "on"]);

export interface RetryPolicy {
  readonly attempts: number;
  readonly baseMs: number;
  readonly maxMs: number;
  readonly on: ReadonlySet<Failure>;
}

export function retryPolicy(options: RetryOptions | false | undefined, fallback?: RetryPolicy): RetryPolicy {
  if (options === undefined && fallback) return fallback;
  if (options !== undefined && options !== false) checkNames("retry", options, retryNames);
  const {
    attempts = 5,
    baseMs = 20,
    maxMs = 1000,
    on = [],
  } = options === false ? { attempts: 1 } : (options ?? {});
  if (!Number.isSafeInteger(attempts) || attempts < 1) {
    throw new UsageError(`retry.attempts must be a whole number from 1, not ${String(attempts)}`);
  }
  for (const extra of on) {
    if (extra !== "lock-timeout")
      throw new UsageError(`retry.on may add "lock-timeout", not ${JSON.stringify(extra)}`);
  }
  return {
    attempts,
    baseMs: milliseconds(baseMs, "retry.baseMs"),
    maxMs: milliseconds(maxMs, "retry.maxMs"),
    on: new Set<Failure>(["deadlock", "serialization", "lost", ...on]),
  };
}

/** Full jitter: callers that collided once must not meet again at the same instant. */
export function pause({ baseMs, maxMs }: RetryPolicy, attempt: number): number {
  return Math.random() * Math.min(maxMs, baseMs * 2 ** Math.min(attempt - 1, 31));
}
