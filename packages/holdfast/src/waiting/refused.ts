import type { Reason } from "../seam/database.ts";
import { type Blocked, FileBusyError, LockNotAvailableError, LockTimeoutError } from "../seam/errors.ts";

/** Internal: a lock was not granted. Becomes one of the errors below, or `acquired: false`. */
export class Refused extends Error {
  readonly reason: Reason;
  readonly waitedMs: number;
  constructor(reason: Reason, waitedMs: number, cause?: unknown) {
    super(`lock refused: ${reason}`, { cause });
    this.reason = reason;
    this.waitedMs = waitedMs;
  }
}

/** The refusal as callers see it. */
export function refusal(
  { reason, waitedMs, cause }: { reason: Reason; waitedMs: number; cause?: unknown },
  blocked: Blocked,
): FileBusyError | LockNotAvailableError | LockTimeoutError {
  if (reason === "file") return new FileBusyError(blocked.keys, waitedMs, cause);
  if (reason === "busy") return new LockNotAvailableError(blocked);
  return new LockTimeoutError({ ...blocked, waitedMs }, cause);
}
