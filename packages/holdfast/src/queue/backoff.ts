/** How long a job that failed waits before it runs again. */
import { shown } from "../seam/shown.ts";
import { UsageError, message } from "../seam/errors.ts";
import { checkNames } from "../input/options.ts";
import { longestMs } from "./limits.ts";
import type { Backoff, QueueOptions } from "./types.ts";

/** What a function of the caller's returns may be anything. */
export function backoffOf(
  queue: string,
  backoff: QueueOptions<never, never>["backoff"],
  trouble: (error: UsageError) => void,
): (failures: number, error: unknown) => number | undefined {
  const usual = growing(typeof backoff === "function" ? {} : backoff);
  if (typeof backoff !== "function") return usual;
  return (failures, error) => {
    let unfit: UsageError | undefined;
    try {
      const ms: unknown = backoff(failures, error);
      if (ms === undefined || ms === null) return undefined;
      if (typeof ms === "number" && !Number.isNaN(ms)) return Math.min(longestMs, Math.max(0, ms));
      throw (unfit = new UsageError(
        `queue ${JSON.stringify(queue)}: backoff must return milliseconds, or undefined for never again, not ${String(ms)}`,
      ));
    } catch (wrong) {
      trouble(
        unfit ??
          new UsageError(
            `queue ${JSON.stringify(queue)}: backoff threw: ${message(wrong)}`,
            "HF_USAGE",
            wrong,
          ),
      );
      return usual(failures);
    }
  };
}

function growing(backoff: Backoff = {}): (failures: number) => number {
  checkNames("queue: backoff", backoff, new Set(["baseMs", "maxMs", "factor", "jitter"]));
  const { baseMs = 1000, maxMs = 3_600_000, factor = 2, jitter = 0.1 } = backoff;
  for (const [what, value] of Object.entries({ baseMs, maxMs, factor, jitter }))
    if (typeof value !== "number" || !(value >= 0))
      throw new UsageError(`queue: backoff.${what} must be a number from 0, not ${shown(value)}`);
  return (failures) => {
    const ms = Math.min(maxMs, longestMs, baseMs * factor ** Math.min(failures - 1, 60));
    return ms * (1 + jitter * Math.random());
  };
}
