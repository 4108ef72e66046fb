/**
 * What an engine keeps of queues: the contract behind `queue`, `queues`, `jobs` and `workers`. Moments are in milliseconds of the
 * database's clock. The work itself is six methods; the rest is apart, by who needs it.
 *
 * What becomes of jobs is decided in `decide/`, for every engine. Who gets one is not: to choose jobs that nobody else gets
 * is what a claim does, by whatever the engine has for it, and the conformance suite says what it must come to.
 */
import type { Connection } from "../seam/database.ts";
import type { Key } from "../seam/key.ts";
import type { How } from "../seam/store.ts";

export type { How };

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
  readonly where: JobPlace;
  /** Look everywhere. */
  readonly whole: boolean;
  /** The group that was served last. */
  readonly onward: string | undefined;
}

/** Where a worker has found jobs, and so where the next ones are expected: what is gone below is not looked at each time. */
export interface JobPlace {
  /** By priority: nothing is expected at or below this id. */
  readonly floors: ReadonlyMap<number, number>;
  /** Nothing that was due before this moment is expected to wait for it any more. */
  readonly after: number | undefined;
}

export type JobClaim =
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
export interface QueueLook {
  /** Look for workers that are gone; `thorough`: and for leases of workers that are not there any more. */
  readonly sweep: "no" | "yes" | "thorough";
  readonly idle: readonly (JobPlace & { readonly queue: number })[];
  /** Look for jobs everywhere. */
  readonly whole: boolean;
}

export interface Looked {
  /** Jobs of dead workers that others can have, and the names of their queues. */
  readonly jobs: number;
  readonly queues: readonly string[];
  /** Of the queues that were asked about, those that have something. */
  readonly ready: readonly number[];
}

/** A part of what was asked for. `last`: where to go on; undefined: that was all. */
export interface QueueStep {
  readonly count: number;
  readonly last: number | undefined;
}

/** Where a job is that was claimed: the number of the lease is the fence, the place is where it stands in it. */
export interface Leased {
  readonly lease: number;
  readonly place: number;
}

export interface EndedJobs extends Leased {
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
  readonly ended: readonly EndedJobs[];
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

export type JobState = "waiting" | "delayed" | "running" | "failed";

/** Where a job is. */
export interface JobView {
  readonly id: number;
  readonly state: JobState;
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

/** The work: jobs come, are claimed, and end. */
export interface QueueStore<C extends Connection> {
  /** The channel on which new jobs are told, for clients that can listen; the payload is the queue's name. */
  readonly channel?: string;
  notify?(connection: C, payload: string): Promise<void>;
  /** The number of a queue, which is made if it is new. `settings`: what a worker wants of it; the last one is right. */
  open(connection: C, name: string, settings: QueueSettings | undefined, how: How): Promise<number>;
  /**
   * `tell`: ring with this, if the jobs are committed. `joined`: in a transaction of the caller's. `waitMs`: for somebody's
   * transaction that has added a job with the same key.
   */
  add(
    connection: C,
    queue: number,
    jobs: readonly NewJob[],
    how: How & { readonly tell: string | undefined; readonly joined: boolean },
  ): Promise<readonly Added[]>;
  /** Each job is given to one worker; nobody else gets it before it comes back. */
  claim(connection: C, call: ClaimCall, how: How): Promise<JobClaim>;
  /**
   * The leases that are still this worker's; what belongs to others changes nothing. A job that was completed in a committed
   * transaction has not failed, whatever is said of it. Twice is as once.
   */
  finish(connection: C, call: Finish, how: How): Promise<ReadonlySet<number>>;
  /** What has not been started goes back as it was, without counting as an attempt. What was completed does not. Twice is as once. */
  giveBack(connection: C, worker: number, unstarted: readonly Leased[], how: How): Promise<void>;
  /** For dead workers, whose jobs others get, and then for jobs. */
  look(connection: C, look: QueueLook, how: How): Promise<Looked>;

  readonly workers: QueueWorkers<C>;
  readonly completion: QueueCompletion<C>;
  readonly transactional: QueueTransactional<C>;
  readonly administration: QueueAdministration<C>;
  readonly lists: QueueLists<C>;
}

/** Who works on a queue. Numbers of workers are never used twice. */
export interface QueueWorkers<C extends Connection> {
  /** A new lock for a session to hold, and what it is called here. Absent: nobody asks for it, and workers are known by their signs of life alone. */
  readonly sessionLock?: () => { readonly lock: string; readonly key: Key };
  enlist(
    connection: C,
    queue: number,
    what: { readonly ttlMs: number; readonly name: string; readonly lock: string | undefined },
    how: How,
  ): Promise<number>;
  /** From now on these workers are gone when this lock is free. */
  locked(connection: C, workers: readonly number[], lock: string, how: How): Promise<void>;
  /** Those of them that have not been given up for dead. */
  beat(connection: C, workers: readonly number[], how: How): Promise<ReadonlySet<number>>;
  /** The jobs of leases that this worker does not know of: the answer to their claim was lost. */
  astray(connection: C, worker: number, known: readonly number[], how: How): Promise<readonly Leased[]>;
  /** The worker is gone. If it has left something behind, others find it. */
  retire(connection: C, worker: number, how: How): Promise<void>;
}

/** The end of a job in a transaction of its handler's own. */
export interface QueueCompletion<C extends Connection> {
  /** In that transaction. False: it is not this worker's any more. */
  complete(connection: C, worker: number, job: Leased, how: How): Promise<boolean>;
  /** Whether these are known to have been completed in a transaction that was committed. Waits for nobody. */
  completed(connection: C, of: readonly Leased[], how: How): Promise<readonly boolean[]>;
  /**
   * Whether this one was. Waits for a transaction that has completed it and may still commit, as long as `how` says: then it fails, as
   * any wait for a lock. Nobody completes the job meanwhile who has not begun to.
   */
  settled(connection: C, job: Leased, how: How): Promise<boolean>;
}

/** Jobs in the transaction of their handlers: `tend` beside it, the rest inside. */
export interface QueueTransactional<C extends Connection> {
  /** There are no savepoints: each job is alone in its transaction, and if it fails that is written down in another one. */
  readonly alone?: boolean;
  /** What is due can be taken. `soon`: milliseconds until more is due; 0: some was; undefined: nothing waits. */
  tend(
    connection: C,
    queue: number,
    what: { readonly after: number | undefined; readonly whole: boolean },
    how: How,
  ): Promise<{ readonly soon: number | undefined; readonly moment: number }>;
  /**
   * The next jobs, and a savepoint. Nobody else gets them before the end of the transaction; those that are not settled in it
   * are as they were.
   */
  take(
    connection: C,
    queue: number,
    what: Pick<ClaimCall, "most" | "where" | "whole" | "onward"> & { readonly savepoint: string },
    how: How,
  ): Promise<{ readonly jobs: readonly ClaimedJob[]; readonly onward: string | undefined }>;
  /** The same of one job, if it is still there and nobody has it. */
  takeOne(
    connection: C,
    queue: number,
    job: ClaimedJob,
    what: { readonly savepoint: string },
    how: How,
  ): Promise<ClaimedJob | undefined>;
  /** A savepoint for the next one. `saved`: that of the one before is there, and not needed any more. */
  another(connection: C, savepoint: string, saved: boolean): Promise<void>;
  /** They are done, or have failed and were rolled back. Throws if one of them is not there. */
  settle(
    connection: C,
    queue: number,
    jobs: readonly ClaimedJob[],
    failure: NonNullable<EndedJobs["failure"]> | undefined,
    how: How,
  ): Promise<void>;
}

export interface QueueAdministration<C extends Connection> {
  /** Nothing is claimed after it, not by those either who were at it. */
  pause(connection: C, queue: number, paused: boolean, how: How): Promise<void>;
  /** Failed jobs begin anew: those with these ids, or `most` of those after one and up to another (undefined: the last). */
  revive(
    connection: C,
    queue: number,
    which:
      | { readonly ids: readonly number[] }
      | { readonly after: number; readonly upTo: number | undefined; readonly most: number },
    how: How,
  ): Promise<QueueStep & { readonly upTo: number | undefined }>;
  /** Jobs that have failed, or wait. Resolves to how many. */
  discard(connection: C, queue: number, ids: readonly number[], how: How): Promise<number>;
  /** Of `most` failed jobs after an id, those that are older: than a moment, or so many milliseconds, whichever is first. */
  prune(
    connection: C,
    queue: number,
    older: { readonly before: number | undefined; readonly ageMs: number },
    from: { readonly after: number; readonly most: number },
    how: How,
  ): Promise<QueueStep>;
}

/** For people who look. Nothing is made, or locked, by asking. */
export interface QueueLists<C extends Connection> {
  /** Undefined: there is no such queue. Nothing is made by asking. */
  number(connection: C, queue: string): Promise<number | undefined>;
  counts(connection: C, queue: number): Promise<QueueCounts>;
  /** All of them, or those of these names that are there, by name. */
  queues(connection: C, names: readonly string[] | undefined): Promise<readonly QueueInfo[]>;
  failed(
    connection: C,
    queue: number,
    after: number | undefined,
    most: number,
  ): Promise<readonly FailedJob[]>;
  /** Undefined: it has ended, or there never was one. */
  find(connection: C, queue: number, id: number): Promise<JobView | undefined>;
  /**
   * Of one state, in the order in which they are begun, as far as that is known: found by index, however many there are.
   * Undefined: there is no such queue.
   */
  jobs(
    connection: C,
    queue: string,
    which: { readonly state: JobState; readonly after: string | undefined; readonly most: number },
  ): Promise<JobPage | undefined>;
  /** Of all queues. */
  workers(connection: C): Promise<readonly WorkerInfo[]>;
}
