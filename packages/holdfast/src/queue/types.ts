/** Options of queues and of their calls, and what these give. */
import type { Wait } from "../seam/database.ts";
import type { HoldfastError } from "../seam/errors.ts";

/** Any library that speaks Standard Schema (Zod, Valibot, ArkType, …): https://standardschema.dev */
export interface StandardSchema<Input, Output = Input> {
  readonly "~standard": {
    readonly version: 1;
    readonly vendor: string;
    readonly validate: (value: unknown) => SchemaResult<Output> | Promise<SchemaResult<Output>>;
    readonly types?: { readonly input: Input; readonly output: Output } | undefined;
  };
}

/** What such a library answers. */
export type SchemaResult<Output> =
  | { readonly value: Output; readonly issues?: undefined }
  | {
      readonly issues: readonly {
        readonly message: string;
        readonly path?: readonly unknown[] | undefined;
      }[];
    };

export interface Backoff {
  /** After the first failure. Default 1,000 ms. */
  readonly baseMs?: number;
  /** Default one hour. */
  readonly maxMs?: number;
  /** Default 2: twice as long after each failure. */
  readonly factor?: number;
  /** A random part, so that jobs that failed together do not come again together. Default 0.1. */
  readonly jitter?: number;
}

export interface Groups {
  /** Jobs of one group at the same time, in all processes together. */
  readonly concurrency?: number;
  /** Starts of one group in a window of so many milliseconds, which begins with the first of them. */
  readonly rate?: { readonly limit: number; readonly perMs: number };
  /** One at a time, in the order in which they came: one that fails holds up its group until it runs again. */
  readonly serial?: boolean;
}

export interface QueueOptions<Input, Output> {
  /** Payloads are checked when they are enqueued, and again when they are worked on. */
  readonly schema?: StandardSchema<Input, Output>;
  /** How often a job that failed runs again. Default 10. */
  readonly retries?: number;
  /** How long it waits before. A function of the number of failures and the error; or undefined from it: not again. */
  readonly backoff?: Backoff | ((failures: number, error: unknown) => number | undefined);
  /** Jobs at the same time, in all processes together. Default: as many as the workers have room for. */
  readonly concurrency?: number;
  readonly groups?: Groups;
}

export interface EnqueueOptions {
  /**
   * In your own transaction: it is there if that is committed. Without it: in the transaction of the same instance whose
   * body calls, if there is one.
   */
  readonly tx?: unknown;
  /** Inside a transaction's body: apart from it. The job is there also if that is rolled back. */
  readonly separate?: boolean;
  /** Milliseconds to wait while somebody's transaction has added a job with the same key. Default: the instance's (5 s). */
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
  /** At most one job of a key waits or runs: see `onDuplicate`. */
  readonly key?: string;
  /** If there is one: leave it (`"ignore"`, default), or put this in the place of one that waits (`"replace"`). */
  readonly onDuplicate?: "ignore" | "replace";
  /** Not before. */
  readonly runAt?: Date;
  /** Not before so many milliseconds have passed, by the database's clock. */
  readonly delayMs?: number;
  /** Smaller numbers first; from -32,767 to 32,767. Default 0. */
  readonly priority?: number;
  readonly group?: string;
}

export interface Enqueued {
  readonly id: number;
  /** False: there is a job with this key already, and this is its id. */
  readonly added: boolean;
}

/** Of calls that may have much to do. */
export interface StepOptions {
  /** Between two steps: it throws, and what is done so far is done. */
  readonly signal?: AbortSignal | undefined;
  /** After each step: how many so far. */
  readonly onProgress?: ((done: number) => void) | undefined;
}

export interface WorkOptions {
  /** Handlers at the same time, in this process. Default 10. */
  readonly concurrency?: number;
  /**
   * Jobs that are claimed at a time, at the most. Default 500. It begins with `concurrency`, and grows only while jobs
   * are so short that a batch is done in an instant: slow jobs are left to others. Of transactional jobs: how many share
   * a transaction, if they are done within 20 ms. Default 25.
   */
  readonly batch?: number;
  /** Ends the worker, as `stop()` does. */
  readonly signal?: AbortSignal;
  /** How often it looks for jobs when nobody tells it of any. Default 1,000 ms. */
  readonly pollMs?: number;
  /**
   * A worker that has given no sign of life for so long has its jobs taken away. Default 30,000 ms; a process that died
   * is found within about two seconds, where sessions can be kept.
   */
  readonly ttlMs?: number;
  /**
   * What went wrong in the worker itself, not in a handler: it goes on. The driver's error is the `cause`. Default: a warning on
   * stderr.
   */
  readonly onTrouble?: (error: HoldfastError) => void;
}

export interface Worker extends AsyncDisposable {
  /** Resolves when the worker has ended. */
  readonly done: Promise<void>;
  /**
   * Lets running handlers finish, gives back the rest, and ends. After `patienceMs` (30 s) the signals of handlers that still
   * run are aborted. 5 s later it has ended, whatever they do and whether or not there is a database: what could not be
   * written down is found by others, and runs again.
   */
  stop(options?: { readonly patienceMs?: number }): Promise<void>;
}

/** A job in the transaction of its handler. */
export interface TransactionalJob<P> {
  readonly id: number;
  readonly payload: P;
  readonly attempt: number;
  readonly priority: number;
  readonly key: string | undefined;
  readonly group: string | undefined;
  readonly at: Date;
}
