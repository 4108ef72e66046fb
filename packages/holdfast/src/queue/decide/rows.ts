/** What is stored of queues, as plain rows with the columns' names; and what is to be written of them, or read before that is known. */

/** A job as it is kept. Moments are whole microseconds since 1970. */
export interface JobRow {
  readonly queue: number;
  readonly priority: number;
  /** How often it has failed. */
  readonly attempt: number;
  readonly id: number;
  readonly at: number;
  readonly key: string | undefined;
  readonly grp: string | undefined;
  /** JSON. */
  readonly payload: string;
}

export interface QueueRow {
  readonly id: number;
  readonly name: string;
  readonly paused: boolean;
  readonly attempts: number;
  readonly most: number | undefined;
  readonly group_most: number | undefined;
  readonly group_rate: number | undefined;
  readonly group_per: number | undefined;
  readonly ordered: boolean;
}

export interface DelayedRow extends JobRow {
  readonly run_at: number;
}

export interface FailedRow extends JobRow {
  readonly failed_at: number;
  readonly error: string;
}

export interface KeyRow {
  readonly queue: number;
  readonly key: string;
  readonly job: number;
}

export interface GroupRow {
  readonly queue: number;
  readonly grp: string;
  readonly running: number;
  readonly since: number | undefined;
  readonly started: number;
  /** Not before, after a failure of a group in order, and the job that it waits for. */
  readonly next: number | undefined;
  readonly head: number | undefined;
  readonly head_priority: number | undefined;
  /** Of this priority, what is below it is gone: for engines that would walk over it. */
  readonly floor: number | undefined;
  readonly floor_priority: number | undefined;
}

export interface LeaseRow {
  readonly id: number;
  readonly worker: number;
  readonly queue: number;
  /** Its jobs are counted in their groups. */
  readonly counted: boolean;
  readonly size: number;
  readonly done: readonly number[] | undefined;
  readonly jobs: string;
}

/** A job that was completed in a transaction of its handler. */
export interface MarkRow {
  readonly lease: number;
  readonly place: number;
}

export const markId = ({ lease, place }: MarkRow): string => `${lease}/${place}`;

export interface WorkerState {
  readonly id: number;
  readonly queue: number;
  readonly beat: number;
  readonly ttl: number;
}

export type GroupName = Pick<GroupRow, "queue" | "grp">;

/** What is to be written, by table. */
export interface QueueWrites {
  readonly insert: {
    readonly ready: readonly JobRow[];
    readonly grouped: readonly JobRow[];
    readonly delayed: readonly DelayedRow[];
    /** Unless they are there. */
    readonly failed: readonly FailedRow[];
    /** Unless they are there. */
    readonly group: readonly GroupName[];
  };
  readonly update: {
    readonly key: readonly KeyRow[];
    readonly group: readonly GroupRow[];
    readonly lease: readonly Pick<LeaseRow, "id" | "done">[];
  };
  readonly remove: {
    /** Wherever it waits. If it does not, or somebody has it, it stays. */
    readonly job: readonly Pick<JobRow, "queue" | "id">[];
    /** From where they wait, or were due. */
    readonly waiting: readonly JobRow[];
    readonly due: readonly DelayedRow[];
    readonly failed: readonly Pick<FailedRow, "queue" | "id">[];
    readonly key: readonly KeyRow[];
    /** With their marks. */
    readonly lease: readonly number[];
  };
}

/** Keys and groups that have to be read, and locked, before it can be decided. */
export interface QueueNeed {
  readonly keys: readonly Pick<KeyRow, "queue" | "key">[];
  readonly groups: readonly GroupName[];
}

/** They were read, with locks, as far as they are there. */
export interface HeldLease {
  readonly keys: readonly KeyRow[];
  readonly groups: readonly GroupRow[];
}

export type QueueDecided<Verdicts> =
  { readonly need: QueueNeed } | { readonly verdicts: Verdicts; readonly writes: QueueWrites };
