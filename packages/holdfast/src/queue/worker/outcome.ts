/** How jobs end, as it is told to whoever listens, and when they run again. */
import { emit, heard } from "../../events/events.ts";
import type { ClaimedJob } from "../store.ts";
import type { WorkerSettings } from "./settings.ts";

/** By the clock of the day, and by the one that never jumps. */
export interface BegunJob {
  readonly date: number;
  readonly ms: number;
}

export interface JobTimes {
  readonly waitedMs: number;
  readonly durationMs: number;
}

/** When its handler is called, if somebody wants to know. */
export function beginning(): BegunJob | undefined {
  if (!heard("holdfast:queue:done") && !heard("holdfast:queue:failed")) return undefined;
  return { date: Date.now(), ms: performance.now() };
}

export function timesOf(job: ClaimedJob, began: BegunJob): JobTimes {
  return { waitedMs: Math.max(0, began.date - job.at), durationMs: performance.now() - began.ms };
}

export function tellDone(queue: string, job: ClaimedJob, times: JobTimes): void {
  emit("holdfast:queue:done", () => ({ queue, job: job.id, attempt: job.failures + 1, ...times }));
}

/** A job that has failed once more. `again`: in how many milliseconds it runs again; undefined: never. */
export interface FailedAttempt {
  readonly error: unknown;
  readonly again: number | undefined;
}

export function failedAttempt(
  { attempts, again }: WorkerSettings<unknown>,
  job: ClaimedJob,
  error: unknown,
): FailedAttempt {
  const failures = job.failures + 1;
  return { error, again: failures >= attempts ? undefined : again(failures, error) };
}

export function tellFailed(
  queue: string,
  job: ClaimedJob,
  { error, again }: FailedAttempt,
  times: JobTimes | undefined,
): void {
  emit("holdfast:queue:failed", () => ({
    queue,
    job: job.id,
    attempt: job.failures + 1,
    ...times,
    again,
    error,
  }));
}
