import { type Capabilities, requireHeld } from "../seam/capabilities.ts";
import type { CallSite } from "../context/call-site.ts";
import type { Connection, Isolation, Wait } from "../seam/database.ts";
import type { Deadline } from "../waiting/deadline.ts";
import { UsageError } from "../seam/errors.ts";
import type { LockRequest } from "../seam/key.ts";
import { checkSupport } from "./lock-support.ts";
import type { RetryPolicy } from "./retry.ts";
import type { InstanceContext } from "./scope.ts";

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
