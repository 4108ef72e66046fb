import { setTimeout as sleep } from "node:timers/promises";

export interface EventuallyOptions {
  /** In milliseconds. */
  timeout?: number;
  interval?: number;
}

/** Calls `fn` until it returns something truthy, or nothing at all, without throwing; returns that. */
export async function eventually<T>(
  fn: () => T | Promise<T>,
  { timeout = 30_000, interval = 10 }: EventuallyOptions = {},
): Promise<T> {
  const deadline = performance.now() + timeout;
  for (;;) {
    let last: unknown;
    try {
      const value = await fn();
      // A body of assertions returns undefined.
      if (value || value === undefined) return value;
      last = new Error(`it returned ${String(value)}`);
    } catch (error) {
      last = error;
    }
    if (performance.now() >= deadline) {
      const message = last instanceof Error ? last.message : String(last);
      throw new Error(`Not so within ${timeout} ms: ${message}`, { cause: last });
    }
    await sleep(interval);
  }
}
