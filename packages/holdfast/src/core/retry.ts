import { UsageError } from "./errors.ts";
import { checkNames } from "./options.ts";
import { milliseconds, sleep } from "./wait.ts";
import type { Failure } from "./database.ts";
import * as protection from "./protections.ts";

export interface RetryOptions {
  /**
   * How often the transaction runs at the most, the first run included. Default 5; 50 after a conflict where locks exclude
   * at COMMIT only (`capabilities().exclusion`).
   */
  readonly attempts?: number;
  /** Bound of the first random pause; doubles from attempt to attempt. Default 20 ms. */
  readonly baseMs?: number;
  /** The longest random pause. Default 1,000 ms. */
  readonly maxMs?: number;
  /**
   * Failures retried besides deadlock, serialization failure and a connection lost before COMMIT. "lock-timeout": a wait
   * for a lock that was over, that of `lock` or of a call in the body. What was not to wait is never retried.
   */
  readonly on?: readonly "lock-timeout"[];
}

const retryNames = new Set(["attempts", "baseMs", "maxMs", "on"]);

/** Of these the server has undone everything. */
export const undone: readonly Failure[] = ["deadlock", "serialization"];

/** Where locks exclude at COMMIT only: to be undone is there what to wait is elsewhere. The deadline comes first, as a rule. */
const attemptsAtCommit = 50;

export interface RetryPolicy {
  readonly attempts: number;
  /** The same for a conflict with another node, where locks exclude at COMMIT only. */
  readonly attemptsAtCommit: number;
  readonly baseMs: number;
  readonly maxMs: number;
  readonly on: ReadonlySet<Failure>;
}

export function retryPolicy(options: RetryOptions | false | undefined, fallback?: RetryPolicy): RetryPolicy {
  if (options === undefined && fallback) return fallback;
  if (options !== undefined && options !== false) checkNames("retry", options, retryNames);
  const given = options === false ? { attempts: 1 } : (options ?? {});
  const { attempts = 5, baseMs = 20, maxMs = 1000, on = [] } = given;
  if (!Number.isSafeInteger(attempts) || attempts < 1) {
    throw new UsageError(`retry.attempts must be a whole number from 1, not ${String(attempts)}`);
  }
  for (const extra of on) {
    if (extra !== "lock-timeout")
      throw new UsageError(`retry.on may add "lock-timeout", not ${JSON.stringify(extra)}`);
  }
  return {
    attempts,
    attemptsAtCommit: given.attempts ?? attemptsAtCommit,
    baseMs: milliseconds(baseMs, "retry.baseMs"),
    maxMs: milliseconds(maxMs, "retry.maxMs"),
    on: new Set<Failure>([...(protection.failuresRetried ? undone : []), "lost", "unavailable", ...on]),
  };
}

/** Full jitter: callers that collided once must not meet again at the same instant. */
export function pause({ baseMs, maxMs }: RetryPolicy, attempt: number): number {
  return Math.random() * Math.min(maxMs, baseMs * 2 ** Math.min(attempt - 1, 31));
}

export interface OwnRetryOptions extends Omit<RetryOptions, "on"> {
  /**
   * Failures retried besides deadlock and serialization failure, of which the server has undone everything. "lost": a
   * connection that was lost, perhaps after COMMIT, so only for work that may be done twice.
   */
  readonly on?: readonly ("lock-timeout" | "lost")[];
  readonly signal?: AbortSignal | undefined;
}

/** `failureOf`: what an error means, if it may be retried at all. `atCommit`: whether locks exclude at COMMIT only. */
export async function retried<T>(
  work: (attempt: number) => Promise<T>,
  { on = [], signal, ...options }: OwnRetryOptions,
  failureOf: (error: unknown) => Failure | undefined,
  atCommit: () => boolean,
): Promise<T> {
  const policy = retryPolicy(options);
  for (const extra of on)
    if (extra !== "lock-timeout" && extra !== "lost")
      throw new UsageError(`on may add "lock-timeout" and "lost", not ${JSON.stringify(extra)}`);
  const kinds = new Set<Failure>([...undone, ...on]);
  for (let attempt = 1; ; attempt++) {
    signal?.throwIfAborted();
    try {
      return await work(attempt);
    } catch (error) {
      const failure = failureOf(error);
      const most = atCommit() ? policy.attemptsAtCommit : policy.attempts;
      if (attempt >= most || failure === undefined || !kinds.has(failure)) throw error;
      await sleep(pause(policy, attempt), signal);
    }
  }
}
