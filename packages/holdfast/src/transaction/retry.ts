import { shown } from "../seam/shown.ts";
import { UsageError } from "../seam/errors.ts";
import { checkNames } from "../input/options.ts";
import { milliseconds, sleep } from "../waiting/wait.ts";
import type { Failure } from "../seam/database.ts";
import * as protection from "../seam/protections.ts";

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
   * for a lock that was over, that of `lock` or of a call in the body. What was not to wait is never retried. "killed": somebody
   * ended the transaction on purpose, with `holdfast kill`.
   */
  readonly on?: readonly ("lock-timeout" | "killed")[];
}

const retryNames = new Set(["attempts", "baseMs", "maxMs", "on"]);

/** Of these the server has undone everything. */
export const wasRolledBack: readonly Failure[] = ["deadlock", "serialization"];

/** Where locks exclude at COMMIT only: to be undone is there what to wait is elsewhere. The deadline comes first, as a rule. */
const attemptsAtCommit = 50;

export interface RetryPolicy {
  readonly attempts: number;
  /** The same for a conflict with another node, where locks exclude at COMMIT only. */
  readonly attemptsAtCommit: number;
  readonly baseMs: number;
  readonly maxMs: number;
  readonly on: ReadonlySet<Failure>;
  /** Also after somebody ended it on purpose. */
  readonly afterKill: boolean;
}

export function retryPolicy(options: RetryOptions | false | undefined, fallback?: RetryPolicy): RetryPolicy {
  if (options === undefined && fallback) return fallback;
  if (options !== undefined && options !== false) checkNames("retry", options, retryNames);
  const given = options === false ? { attempts: 1 } : (options ?? {});
  const { attempts = 5, baseMs = 20, maxMs = 1000, on = [] } = given;
  if (!Number.isSafeInteger(attempts) || attempts < 1) {
    throw new UsageError(`retry.attempts must be a whole number from 1, not ${shown(attempts)}`);
  }
  for (const extra of on) {
    if (extra !== "lock-timeout" && extra !== "killed")
      throw new UsageError(`retry.on may add "lock-timeout" and "killed", not ${JSON.stringify(extra)}`);
  }
  return {
    attempts,
    attemptsAtCommit: given.attempts ?? attemptsAtCommit,
    baseMs: milliseconds(baseMs, "retry.baseMs"),
    maxMs: milliseconds(maxMs, "retry.maxMs"),
    on: new Set<Failure>([
      ...(protection.failuresRetried ? wasRolledBack : []),
      "lost",
      "unavailable",
      ...on.filter((extra) => extra !== "killed"),
    ]),
    afterKill: on.includes("killed"),
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

/** One run of work that may be run again. */
export interface RetryRun {
  /** 1 on the first. */
  readonly attempt: number;
  /** An earlier one may have been kept although its answer was lost. */
  readonly perhaps: boolean;
  /** To be called before anything is on its way that may be kept. */
  sent(): void;
}

/** How it ended that was not run again. */
export interface GivenUp<Why extends string> {
  readonly why: Why | undefined;
  readonly attempts: number;
  /** One of them may have been kept although its answer was lost. */
  readonly perhaps: boolean;
}

export interface Retrying<Why extends string> {
  /** What an error means; undefined: nothing that passes. */
  why(error: unknown): Why | undefined;
  /** Of these it is run again. */
  readonly on: ReadonlySet<string>;
  readonly policy?: RetryPolicy;
  /** How often at the most, the first run included. Default: the policy's. */
  readonly attempts?: number | ((why: Why) => number);
  /** Milliseconds before the next run. Default: the policy's. */
  pauseMs?(attempt: number): number;
  /** By the clock that never jumps: more often than `attempts`, if it is before this; */
  readonly wantedUntil?: number | undefined;
  /** and never after that. */
  readonly until?: number | undefined;
  /** Rejects with its reason, also in a pause. */
  readonly signal?: AbortSignal | undefined;
  /** Whether it is still to be run again. */
  wanted?(perhaps: boolean): boolean;
  /** What was kept cannot be found again by the next run: what may have been kept is not run again. */
  readonly once?: boolean;
  /** It was sent before. */
  readonly perhaps?: boolean;
  /** Asked when a run has failed in a way that may pass: the error to end with, if it must not be run again. */
  ended?(error: unknown, why: Why): Promise<Error | undefined>;
  /** Before each pause. */
  again?(next: { readonly why: Why; readonly attempt: number; readonly delayMs: number }): void;
  /** Throws what is told in the end. Default: the error. */
  failed?(error: unknown, ended: GivenUp<Why>): Promise<void>;
}

const usual = retryPolicy(undefined);

/** What may well succeed if it is done again. */
export const passing: ReadonlySet<Failure> = usual.on;

/** The same, of what the server has rolled back: nothing of it was done. */
export const rolledBack: ReadonlySet<Failure> = new Set(wasRolledBack);

/**
 * Runs work until it succeeds, or fails for good. What it did before its answer was lost must be found by the next run, and not
 * done twice: ids make it so. Without them: `once`, or only what the server has `rolledBack`.
 */
export async function retrying<T, Why extends string>(
  work: (run: RetryRun) => Promise<T>,
  how: Retrying<Why>,
): Promise<T> {
  const { policy = usual, attempts = policy.attempts, until = Infinity, wantedUntil = 0, signal } = how;
  let perhaps = how.perhaps ?? false;
  for (let attempt = 1; ; attempt++) {
    signal?.throwIfAborted();
    let sent = false;
    try {
      return await work({ attempt, perhaps, sent: () => void (sent = true) });
    } catch (error) {
      const why = how.why(error);
      if (why === "lost") perhaps ||= sent;
      const final = why === undefined ? undefined : await how.ended?.(error, why);
      if (final) throw final;
      const delayMs = how.pauseMs?.(attempt) ?? pause(policy, attempt);
      const next = performance.now() + delayMs;
      const passes = why !== undefined && how.on.has(why) && !(how.once && perhaps);
      const most = passes && typeof attempts === "function" ? attempts(why) : (attempts as number);
      const enough = next > until || (attempt >= most && next > wantedUntil);
      if (!passes || enough || how.wanted?.(perhaps) === false) {
        await how.failed?.(error, { why, attempts: attempt, perhaps });
        throw error;
      }
      how.again?.({ why, attempt, delayMs });
      await sleep(delayMs, signal);
    }
  }
}

/** `hf.retry`. `failureOf`: what an error means, if it may be retried at all. `atCommit`: whether locks exclude at COMMIT only. */
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
  return retrying(({ attempt }) => work(attempt), {
    why: failureOf,
    on: new Set<Failure>([...wasRolledBack, ...on]),
    policy,
    attempts: () => (atCommit() ? policy.attemptsAtCommit : policy.attempts),
    signal,
  });
}

/** Pauses of what goes on for ever whatever happens: longer with each failure in a row, and not the same for everybody. */
export class Pauses {
  readonly #least: number;
  readonly #most: number;
  #failures = 0;

  constructor(least: number, most: number) {
    this.#least = least;
    this.#most = most;
  }

  /** Milliseconds, after one more failure. */
  next(): number {
    const ms = Math.min(this.#most, this.#least * 2 ** Math.min(this.#failures++, 31));
    return ms * (0.5 + Math.random());
  }

  /** It went well. */
  reset(): void {
    this.#failures = 0;
  }
}
