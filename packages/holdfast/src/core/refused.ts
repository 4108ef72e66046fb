/** Internal: a lock was not granted. Becomes a `LockTimeoutError`, a `LockNotAvailableError` or `acquired: false`. */
export class Refused extends Error {
  readonly reason: "busy" | "timeout";
  readonly waitedMs: number;
  constructor(reason: "busy" | "timeout", waitedMs: number, cause?: unknown) {
    super(`lock refused: ${reason}`, { cause });
    this.reason = reason;
    this.waitedMs = waitedMs;
  }
}
