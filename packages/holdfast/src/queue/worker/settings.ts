/** What a worker was told to do, and what all of them go by. */
import type { How } from "../store.ts";

export interface WorkerSettings<P> {
  readonly queue: string;
  readonly number: number;
  readonly concurrency: number;
  readonly most: number;
  readonly pollMs: number;
  readonly ttlMs: number;
  readonly attempts: number;
  /** Jobs of it are counted: others may wait for room. */
  readonly limited: boolean;
  /** A promise, if the schema answers later. */
  readonly read: (payload: unknown) => P | Promise<P>;
  readonly again: (failures: number, error: unknown) => number | undefined;
  readonly trouble: (error: unknown) => void;
}

/** Of what is called in a transaction that somebody else has begun. */
export const inTransaction: How = { free: false, waitMs: 5000 };

/** Of a timer. */
export const longestRestMs = 3_600_000;
