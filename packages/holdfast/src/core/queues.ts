/** What an engine keeps of queues: the contract behind `queue`. Moments are in milliseconds of the database's clock. */
import type { Connection } from "./database.ts";

export interface QueueSettings {
  /** How often a job runs at the most. */
  readonly attempts: number;
  /** Jobs at the same time, in all processes together. */
  readonly most: number | undefined;
  /** Of one group: at the same time, and starts in a span of so many milliseconds. */
  readonly groupMost: number | undefined;
  readonly groupRate: number | undefined;
  readonly groupPer: number | undefined;
  /** A job that failed holds up its group until it runs again. */
  readonly ordered: boolean;
}

export interface NewJob {
  /** JSON. */
  readonly payload: string;
  readonly priority: number;
  /** Not before; or not before so many milliseconds have passed. */
  readonly runAt: number | undefined;
  readonly delayMs: number | undefined;
  readonly group: string | undefined;
  readonly key: string | undefined;
  /** If another job that has this key waits: take its place, instead of leaving it there. */
  readonly replace: boolean;
}

export interface Added {
  readonly id: number;
  /** False: the key was taken, and this is the id of the job that has it. */
  readonly added: boolean;
}

/** A job as it was claimed. */
export interface ClaimedJob {
  readonly id: number;
  /** How often it has failed. */
  readonly failures: number;
  readonly priority: number;
  readonly at: number;
  readonly key: string | undefined;
  readonly group: string | undefined;
  readonly payload: unknown;
}

export interface ClaimCall {
  readonly queue: number;
  readonly worker: number;
  readonly most: number;
  readonly where: Where;
  /** Look everywhere. */
  readonly whole: boolean;
  /** The group that was served last. */
  readonly onward: string | undefined;
}

/** Where a worker has found jobs, and so where the next ones are expected: what is gone below is not looked at each time. */
export interface Where {
  /** By priority: nothing is expected at or below this id. */
  readonly floors: ReadonlyMap<number, number>;
  /** Nothing that was due before this moment is expected to wait for it any more. */
  readonly after: number | undefined;
}

export type Claim =
  | {
      readonly lease: number;
      readonly jobs: readonly ClaimedJob[];
      /** They are counted in their groups. */
      readonly counted: boolean;
      readonly onward: string | undefined;
      /** What was due by then has been moved. */
      readonly moment: number;
      /** How long the text of them was. */
      readonly length: number;
    }
  /**
   * `full`: groups have jobs, but no room. `lost`: the worker has been given up for dead. `large`: they are more than anybody
   * could read at once; ask for fewer. `soon`: in how many milliseconds one is due.
   */
  | {
      readonly lease: undefined;
      readonly why: "empty" | "full" | "paused" | "limit" | "lost" | "large";
      readonly soon: number | undefined;
      readonly onward: string | undefined;
      readonly moment: number | undefined;
    };

/** What the workers of a process that have nothing to do ask together. */
export interface Round {
  /** Look for workers that are gone; `thorough`: and for leases of workers that are not there any more. */
  readonly sweep: "no" | "yes" | "thorough";
  readonly idle: readonly (Where & { readonly queue: number })[];
  /** Look for jobs everywhere. */
  readonly whole: boolean;
}

export interface RoundAnswer {
  /** Jobs of dead workers that others can have, and the names of their queues. */
  readonly jobs: number;
  readonly queues: readonly string[];
  /** Of the queues that were asked about, those that have something. */
  readonly ready: readonly number[];
}

/** A part of what was asked for. `last`: where to go on; undefined: that was all. */
export interface Step {
  readonly count: number;
  readonly last: number | undefined;
}

export interface Ended {
  readonly lease: number;
  /** Its place in the lease. */
  readonly place: number;
  readonly job: ClaimedJob;
  /** It was counted in its group when it was claimed. */
  readonly counted: boolean;
  /** It was completed in a transaction of its handler. */
  readonly marked?: boolean;
  /** If it failed: why, and in how many milliseconds it runs again; undefined: never. */
  readonly failure?: { readonly error: string; readonly again: number | undefined } | undefined;
}

export interface Finish {
  readonly queue: number;
  readonly worker: number;
  /** Leases of which nothing is left. */
  readonly whole: readonly number[];
  readonly ended: readonly Ended[];
}

export interface QueueCounts {
  /** Counted up to a hundred thousand. */
  readonly waiting: number;
  readonly delayed: number;
  readonly running: number;
  readonly failed: number;
  readonly workers: number;
  readonly paused: boolean;
  /** Milliseconds for which the oldest has waited. */
  readonly oldest: number | undefined;
}

export interface QueueInfo extends QueueCounts {
  readonly name: string;
}

export interface FailedJob {
  readonly id: number;
  readonly attempts: number;
  readonly payload: unknown;
  readonly error: string;
  readonly key: string | undefined;
  readonly group: string | undefined;
  readonly at: number;
  readonly failedAt: number;
}

/** Where a job is. */
export interface JobView {
  readonly id: number;
  readonly state: "waiting" | "delayed" | "running" | "failed";
  /** How often it has failed. */
  readonly failures: number;
  readonly priority: number;
  readonly payload: unknown;
  readonly key: string | undefined;
  readonly group: string | undefined;
  readonly at: number;
  /** Of one that is delayed: when it is due. */
  readonly runAt: number | undefined;
  /** Of one that runs, or was claimed to: the worker that has it. */
  readonly worker: string | undefined;
  /** Of one that has failed for good. */
  readonly error: string | undefined;
}

export interface Queues<C extends Connection> {
  /** The channel on which new jobs are told, for clients that can listen; the payload is the queue's name. */
  readonly channel?: string;
  ring?(connection: C, payload: string): Promise<void>;
  open(connection: C, name: string, settings: QueueSettings | undefined): Promise<number>;
  /**
   * `tell`: ring with this, if the jobs are committed. `joined`: in a transaction of the caller's. `waitMs`: for somebody's
   * transaction that has added a job with the same key.
   */
  add(
    connection: C,
    queue: number,
    jobs: readonly NewJob[],
    how: { readonly tell: string | undefined; readonly joined: boolean; readonly waitMs: number },
  ): Promise<readonly Added[]>;
  enlist(
    connection: C,
    queue: number,
    what: { readonly ttlMs: number; readonly name: string; readonly lock: string | undefined },
  ): Promise<number>;
  /** From now on these workers are gone when this lock is free. */
  locked(connection: C, workers: readonly number[], lock: string): Promise<void>;
  /** Those of them that have not been given up for dead. */
  beat(connection: C, workers: readonly number[]): Promise<ReadonlySet<number>>;
  claim(connection: C, call: ClaimCall): Promise<Claim>;
  /** The leases that are still this worker's; what belongs to others changes nothing. */
  finish(connection: C, call: Finish): Promise<ReadonlySet<number>>;
  /** In a transaction of the caller's. False: it is not this worker's any more. */
  complete(connection: C, worker: number, lease: number, place: number): Promise<boolean>;
  /** Whether these were completed in a transaction that was committed. */
  completed(connection: C, of: readonly Pick<Ended, "lease" | "place">[]): Promise<readonly boolean[]>;
  /** The jobs of leases that this worker does not know of: the answer to their claim was lost. */
  astray(
    connection: C,
    worker: number,
    known: readonly number[],
  ): Promise<readonly Pick<Ended, "lease" | "place">[]>;
  /** What has not been started goes back as it was, without counting as an attempt. Twice is as once. */
  giveBack(
    connection: C,
    worker: number,
    unstarted: readonly Pick<Ended, "lease" | "place">[],
  ): Promise<void>;
  /** The worker is gone. If it has left something behind, others find it. */
  retire(connection: C, worker: number): Promise<void>;
  /** What is due can be taken. `soon`: milliseconds until more is due; 0: some was; undefined: nothing waits. */
  tend(
    connection: C,
    queue: number,
    how: { readonly after: number | undefined; readonly whole: boolean },
  ): Promise<{ readonly soon: number | undefined; readonly moment: number }>;
  /**
   * The next jobs, for the transaction of their handlers, and a savepoint. Nobody else gets them before its end; those that
   * are not settled in it are as they were.
   */
  take(
    connection: C,
    queue: number,
    how: Pick<ClaimCall, "most" | "where" | "whole" | "onward"> & { readonly savepoint: string },
  ): Promise<{ readonly jobs: readonly ClaimedJob[]; readonly onward: string | undefined }>;
  /** The same of one job, if it is still there and nobody has it. */
  takeOne(
    connection: C,
    queue: number,
    job: ClaimedJob,
    how: { readonly savepoint: string },
  ): Promise<ClaimedJob | undefined>;
  /** A savepoint for the next one. `saved`: that of the one before is there, and not needed any more. */
  another(connection: C, savepoint: string, saved: boolean): Promise<void>;
  /** In the same transaction: they are done, or have failed and were rolled back. */
  settle(
    connection: C,
    queue: number,
    jobs: readonly ClaimedJob[],
    failure?: NonNullable<Ended["failure"]>,
  ): Promise<void>;
  /** In one statement, whatever the number of queues. */
  round(connection: C, round: Round): Promise<RoundAnswer>;
  pause(connection: C, queue: number, paused: boolean): Promise<void>;
  counts(connection: C, queue: number): Promise<QueueCounts>;
  /** All of them, or those of these names that are there, by name. Makes none. */
  list(connection: C, names: readonly string[] | undefined): Promise<readonly QueueInfo[]>;
  failed(
    connection: C,
    queue: number,
    after: number | undefined,
    most: number,
  ): Promise<readonly FailedJob[]>;
  /** Undefined: it has ended, or there never was one. */
  find(connection: C, queue: number, id: number): Promise<JobView | undefined>;
  /** Failed jobs begin anew: those with these ids, or `most` of those after one and up to another (undefined: the last). */
  revive(
    connection: C,
    queue: number,
    which:
      | { readonly ids: readonly number[] }
      | { readonly after: number; readonly upTo: number | undefined; readonly most: number },
  ): Promise<Step & { readonly upTo: number | undefined }>;
  /** Jobs that have failed, or wait. Resolves to how many. */
  discard(connection: C, queue: number, ids: readonly number[]): Promise<number>;
  /** Of `most` failed jobs after an id, those that are older: than a moment, or so many milliseconds, whichever is first. */
  prune(
    connection: C,
    queue: number,
    older: { readonly before: number | undefined; readonly ageMs: number },
    from: { readonly after: number; readonly most: number },
  ): Promise<Step>;
}
