import { type Capabilities, require, requireHeld } from "../seam/capabilities.ts";
import type { CallSite } from "../context/call-site.ts";
import type { Connection, Isolation, Wait } from "../seam/database.ts";
import type { Deadline } from "../waiting/deadline.ts";
import { UsageError } from "../seam/errors.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { type LockRequest, wanted } from "../seam/key.ts";
import { checkSupport } from "./lock-support.ts";
import { type RetryPolicy, retryPolicy } from "./retry.ts";
import type { InstanceContext } from "./scope.ts";
import type { TransactionOptions } from "./types.ts";
import { checkWait, milliseconds } from "../waiting/wait.ts";

/** A transaction that was asked for, with everything that its caller did not say. */
export interface Plan {
  readonly locks: readonly LockRequest[];
  readonly wait: Wait;
  readonly isolation: Isolation;
  readonly readOnly: boolean;
  readonly deadlineMs: number;
  readonly signal: AbortSignal | undefined;
  readonly retry: RetryPolicy;
  /** The call, if it means that nobody else is at it while its body runs. */
  readonly alone?: string | undefined;
  /** Where it was called. */
  readonly site: CallSite | undefined;
}

/** What calls go by that say nothing else. */
export type Defaults = Pick<Plan, "wait" | "deadlineMs" | "isolation" | "retry">;

/** One run of it. */
export interface Run<Native, C extends Connection> {
  readonly context: InstanceContext<Native, C>;
  readonly plan: Plan;
  /** Of all runs together. */
  readonly deadline: Deadline;
  /** 1 on the first. */
  readonly attempt: number;
}

/** Throws if the server cannot keep it. Returns whether its locks are to be taken on the session, before BEGIN. */
export function checkPlan({ locks, isolation, alone }: Plan, capabilities: Capabilities): boolean {
  checkSupport(locks, capabilities, false);
  // None at all: there are no transactions.
  if (capabilities.isolation.length === 0) require(capabilities.transactionLocks, "A transaction");
  if (alone !== undefined) requireHeld(capabilities, alone);
  if (!capabilities.isolation.includes(isolation)) {
    throw new UsageError(
      `Isolation "${isolation}" is not one of this server's: ${capabilities.isolation.join(", ")}`,
    );
  }
  if (locks.length === 0) return false;
  const { lockIsolation, lockFirstIsolation } = capabilities;
  if (lockFirstIsolation.includes(isolation)) return true;
  if (!lockIsolation.includes(isolation)) {
    throw new UsageError(
      `A lock under ${isolation} protects nothing: the transaction's snapshot is taken before the wait for the lock ends, so ` +
        `the check would read what was true before. Use ${[...lockIsolation, ...lockFirstIsolation].join(" or ")}.`,
      "HF_ISOLATION",
    );
  }
  return false;
}

const isolations: readonly Isolation[] = [
  "read uncommitted",
  "read committed",
  "repeatable read",
  "serializable",
];
export const optionNames = new Set([
  "lock",
  "wait",
  "isolation",
  "readOnly",
  "deadline",
  "signal",
  "retry",
  "separate",
]);

export function planOf(options: TransactionOptions, defaults: Defaults, site?: CallSite): Plan {
  checkNames("hf.transaction", options, optionNames);
  const { wait, deadlineMs, isolation, retry } = defaults;
  checkSignal(options.signal);
  return {
    locks: wanted(options),
    wait: options.wait === undefined ? wait : checkWait(options.wait),
    isolation: checkIsolation(options.isolation ?? isolation),
    readOnly: options.readOnly ?? false,
    deadlineMs: options.deadline === undefined ? deadlineMs : milliseconds(options.deadline, "deadline", 1),
    signal: options.signal,
    retry: retryPolicy(options.retry, retry),
    site,
  };
}

export function checkIsolation(value: unknown): Isolation {
  if (isolations.includes(value as Isolation)) return value as Isolation;
  throw new UsageError(
    `isolation must be one of ${isolations.map((i) => `"${i}"`).join(", ")}, not ${JSON.stringify(value)}`,
  );
}
