import { shown } from "../seam/shown.ts";
import { UsageError } from "../seam/errors.ts";
import type { Wait } from "../seam/database.ts";

/** Servers and timers take 2^31 - 1 ms, almost 25 days, and less than that if something is added to it. */
export const longest = 2 ** 31 - 1 - 60_000;

export function milliseconds(value: unknown, what: string, least = 0): number {
  if (typeof value !== "number" || !Number.isFinite(value) || value < least || value > longest) {
    throw new UsageError(
      `${what} must be a number of milliseconds from ${least} to ${longest}, not ${shown(value)}`,
    );
  }
  return Math.ceil(value);
}

/** Waits are finite: an unbounded one is how a frozen process stops all the others. */
export function checkWait(value: unknown, what = "wait", others: readonly string[] = []): Wait {
  if (value === "nowait" || value === 0) return "nowait";
  if (typeof value === "string") {
    const words = ["a number of milliseconds", ...others, '"nowait"'];
    const hint =
      value === "skip" ? ": here nothing can be left out; try* calls answer instead of throwing" : "";
    throw new UsageError(
      `${what} must be ${words.slice(0, -1).join(", ")} or ${words.at(-1)}, not ${JSON.stringify(value)}${hint}`,
    );
  }
  return milliseconds(value, what);
}

export function sleep(ms: number, signal?: AbortSignal, keepsAlive = true): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason as Error);
    const timer = setTimeout(done, ms);
    if (!keepsAlive) timer.unref();
    signal?.addEventListener("abort", aborted, { once: true });
    function done() {
      signal?.removeEventListener("abort", aborted);
      resolve();
    }
    function aborted() {
      clearTimeout(timer);
      reject(signal?.reason as Error);
    }
  });
}

/** Made when it is first needed: not every runtime that loads this has shared memory. */
let cell: Int32Array<SharedArrayBuffer> | undefined;

/** Stops the whole process for this long, so that other processes can go on. */
export function standStill(ms: number): void {
  cell ??= new Int32Array(new SharedArrayBuffer(4));
  Atomics.wait(cell, 0, 0, ms);
}

/** Resolves to whether the promise is fulfilled within this time. Rejects if the promise does. */
export function comesWithin(ms: number, promise: Promise<unknown>): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => resolve(false), ms);
    promise.then(() => resolve(true), reject).finally(() => clearTimeout(timer));
  });
}
