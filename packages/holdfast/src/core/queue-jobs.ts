/** Jobs of a queue as people look at them, page by page: the contract behind `jobs`. Moments are milliseconds of the database's clock. */
import type { Connection } from "./database.ts";

export type JobState = "waiting" | "delayed" | "running" | "failed";

export interface JobInfo {
  readonly id: number;
  readonly state: JobState;
  /** How often it has failed. */
  readonly failures: number;
  readonly priority: number;
  readonly key: string | undefined;
  readonly group: string | undefined;
  readonly at: number;
  /** For how many milliseconds it has been there. */
  readonly ageMs: number;
  /** Of one that is delayed: when it is due. */
  readonly runAt: number | undefined;
  /** Of one that runs, or was claimed to: since when. */
  readonly startedAt: number | undefined;
  /** Of one that runs, or was claimed to: the worker that has it, and whether that is alive. */
  readonly worker: { readonly name: string; readonly alive: boolean } | undefined;
  /** Of one that has failed: the first line of why. */
  readonly error: string | undefined;
}

export interface JobPage {
  readonly jobs: readonly JobInfo[];
  /** Where the next page begins; undefined: there is none. */
  readonly next: string | undefined;
}

/** A worker that has not said that it ends. */
export interface WorkerInfo {
  readonly queue: string;
  readonly name: string;
  readonly since: number;
  /** Its session is there, and it has said in time that it lives. If not, others take over what it had. */
  readonly alive: boolean;
  /** How many jobs it has. */
  readonly jobs: number;
}

export interface QueueJobs<C extends Connection> {
  /**
   * Of one state, in the order in which they are begun, as far as that is known: found by index, however many there are.
   * Undefined: there is no such queue. Nothing is made by asking.
   */
  list(
    connection: C,
    queue: string,
    which: { readonly state: JobState; readonly after: string | undefined; readonly most: number },
  ): Promise<JobPage | undefined>;
  /** Of all queues. */
  workers(connection: C): Promise<readonly WorkerInfo[]>;
}
