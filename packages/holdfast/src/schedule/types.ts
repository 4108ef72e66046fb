/** What is said of a schedule, and what is told of it. */
import type { Transaction } from "../transaction/scope.ts";
import type { Run } from "./run.ts";
import type { Overlap, RunState } from "./store.ts";
import type { When } from "./ticks.ts";

export type ScheduleOptions = When & CatchUp & CommonOptions;

/** What becomes of ticks that were due while nobody was there, and of those that come while a run is not over. */
export type CatchUp =
  | {
      /** "none": they are passed over. "last" (default): the newest is run, for all of them. */
      readonly catchUp?: "none" | "last";
      readonly catchUpLimit?: never;
      /** With "none": a tick is missed if nobody began it for so many milliseconds, at least 1,000. Default 60,000. */
      readonly grace?: number;
      /**
       * While another run is not over anywhere: "skip" (default) records the tick as skipped, "queue" leaves it until
       * then, "allow" runs it beside.
       */
      readonly overlap?: Overlap;
    }
  | {
      /** Each of them is run, in order. */
      readonly catchUp: "all";
      /** At most so many of them, the newest. Default 1,000. */
      readonly catchUpLimit?: number;
      readonly grace?: never;
      /** "queue" (default): one after the other, in all processes together. "allow": some at a time. */
      readonly overlap?: "queue" | "allow";
    };

export interface CommonOptions {
  /** How often a run that failed, or whose process died, is begun again. 0: each tick is begun at most once. Default 2. */
  readonly retries?: number;
  /**
   * Milliseconds before a run that failed is begun again: the first pause, which doubles from attempt to attempt up to
   * five minutes, or a function of the attempt that failed. Default 1,000.
   */
  readonly backoff?: number | ((attempt: number) => number);
  /** A run whose process died is taken over after so many milliseconds, from 500 to a day. Default 30,000. */
  readonly ttl?: number;
  /** How many runs that are over are kept in the table. Default 100. */
  readonly keep?: number;
  /** Who runs it, for people. Default: host name and process id. */
  readonly holder?: string;
  /** Told of every attempt that failed, with its run, and of trouble with the database, without. Default: a warning of the process. */
  readonly onError?: (error: unknown, run?: { readonly tick: Date; readonly attempt: number }) => void;
}

/** What it returns is waited for. */
export type Handler = (run: Run) => unknown;

/** Puts the tick's work elsewhere, e.g. into a queue, in the transaction in which the tick is recorded. */
export type Enqueue<Native> = (tick: Date, tx: Transaction<Native>) => Promise<unknown>;

export interface RunInfo {
  readonly tick: Date;
  readonly state: RunState;
  readonly attempt: number;
  readonly fence: number;
  readonly manual: boolean;
  readonly holder: string;
  readonly startedAt: Date;
  /** Of one that is not over: others take it over from then on, unless its process says meanwhile that it lives. */
  readonly until: Date;
  readonly endedAt: Date | undefined;
  /** Of the last attempt that failed. */
  readonly error: string | undefined;
}

export interface ScheduleStatus {
  readonly name: string;
  /** Whether this object takes part. */
  readonly started: boolean;
  /** No tick is begun, in whatever process. */
  readonly paused: boolean;
  /** The newest tick that was decided upon, by whatever process; undefined if none was ever there. */
  readonly last: Date | undefined;
  /** The first tick after now, by the database's clock. */
  readonly next: Date | undefined;
  /** Those that are not over, in whatever process. */
  readonly running: readonly RunInfo[];
  /** The newest that is over, and was not skipped. */
  readonly lastRun: RunInfo | undefined;
  readonly lastError: { readonly tick: Date; readonly error: string } | undefined;
}

export interface Schedule extends AsyncDisposable {
  readonly name: string;
  /** Takes part in it from now on. Resolves once the database knows the schedule. The abort of `signal` is `stop({ grace: 0 })`. */
  start(options?: { readonly signal?: AbortSignal | undefined }): Promise<void>;
  /** Begins nothing more, and resolves when what runs here has ended. After `grace` milliseconds its signal is aborted. */
  stop(options?: { readonly grace?: number }): Promise<void>;
  /** The next times, by this definition. */
  nextRuns(count?: number, from?: Date): Date[];
  /** Runs it at once, in this process, whatever the time. `ran: false`: another run is not over, and runs may not overlap. */
  runNow(): Promise<{ readonly ran: boolean; readonly tick: Date | undefined }>;
  /** No tick is begun from now on, in whatever process; what runs goes on. `runNow` still does. */
  pause(): Promise<void>;
  /** Ticks are begun again, within half a minute; `catchUp` says what becomes of those that were due meanwhile. */
  resume(): Promise<void>;
  status(): Promise<ScheduleStatus>;
  /** The newest runs, the newest first. */
  runs(limit?: number): Promise<readonly RunInfo[]>;
}
