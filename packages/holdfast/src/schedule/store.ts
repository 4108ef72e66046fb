/** What an engine keeps of schedules: the contract behind `schedule`. Moments are milliseconds of the database's clock. */
import type { Connection } from "../seam/database.ts";
import type { How, Soon } from "../seam/store.ts";

/** What to do with a tick while an earlier run is not over. */
export type Overlap = "skip" | "queue" | "allow";

export type RunState =
  | "running"
  /** Failed, or given back: to be begun again. */
  | "waiting"
  | "done"
  | "failed"
  /** Another one was not over when it was due. */
  | "skipped";

/** A wish to have the next tick, or a run that somebody else has left. */
export interface ScheduleStep {
  readonly schedule: string;
  /** Random, one per wish: one that is made again, because its answer was lost, gets what it got before. */
  readonly token: string;
  /** Who asks, for people. */
  readonly holder: string;
  readonly ttlMs: number;
  /** How often a run is begun at the most. */
  readonly attempts: number;
  readonly overlap: Overlap;
  /** Runs whose process has died, and those that wait for their next attempt, may be had too, and come first. */
  readonly take: boolean;
  /** "now": a run that is no tick of the schedule. Undefined: only to learn how it stands. */
  readonly wish: Due | "now" | undefined;
  /** What becomes of the tick: it is run, it was done in this very transaction, or it was tried in vain. */
  readonly as: "running" | "done" | { readonly failed: string };
  /** How many runs that are over are kept. */
  readonly keep: number;
}

export interface Due {
  readonly tick: number;
  /** The newest tick that was decided upon, as far as the caller knows. If it is another one, nothing is done. */
  readonly after: number;
  /** From then on the wish is out of date. */
  readonly before: number | undefined;
  /** `false`: it is too late for it, and it is passed over. */
  readonly run: boolean;
}

/** What identifies a run that was granted. */
export interface RunGrip {
  readonly schedule: string;
  readonly tick: number;
  readonly manual: boolean;
  readonly fence: number;
}

export interface Claimed extends RunGrip {
  /** The tick that was decided upon before this one. */
  readonly previous: number | undefined;
  readonly attempt: number;
}

export interface ScheduleStanding {
  readonly now: number;
  /** The newest tick that was decided upon. */
  readonly last: number;
  /** When the first run that is not over runs out, or is to be begun again. */
  readonly wake: number | undefined;
  readonly claimed: Claimed | undefined;
  /** Somebody else is deciding. */
  readonly busy: boolean;
  /** Nothing is begun. */
  readonly paused: boolean;
  /** The tick was recorded as skipped. */
  readonly skipped: boolean;
  /** Ticks of runs that were found dead, with no attempt left. */
  readonly died: readonly number[];
}

export type RunEnding =
  | { readonly state: "done" }
  /** `retryInMs`: it is to be begun again. `uncounted`: this attempt does not count. */
  | {
      readonly state: "failed";
      readonly error: string;
      readonly retryInMs: number | undefined;
      readonly uncounted: boolean;
    };

export interface RunRow {
  readonly tick: number;
  readonly manual: boolean;
  readonly state: RunState;
  readonly attempt: number;
  readonly fence: number;
  readonly holder: string;
  readonly started: number;
  readonly until: number;
  readonly ended: number | undefined;
  readonly error: string | undefined;
}

/** A schedule as it is stored. `lastRun`: the newest that is over, and was not skipped. */
export interface ScheduleRow {
  readonly name: string;
  readonly paused: boolean;
  readonly last: number;
  readonly open: number;
  readonly lastRun: RunRow | undefined;
}

/** The work itself. `step` and `end` may be part of the caller's transaction; `renew` never is. */
export interface Schedules<C extends Connection> {
  /** A schedule that is not there is made: its first tick is the first after now. */
  step(connection: C, step: ScheduleStep, how: How): Soon<ScheduleStanding>;
  /** `locked`: a transaction that has ended the run is not over. `done`: it is. Does not wait for that. */
  renew(connection: C, grip: RunGrip, ttlMs: number, how: How): Soon<Renewal>;
  /** `before`: it was ended so already. `joined`: the transaction is the caller's, and may turn out not to exist. */
  end(
    connection: C,
    grip: RunGrip,
    ending: RunEnding,
    how: How & { readonly joined: boolean },
  ): Soon<"ended" | "before" | "lost">;
  readonly administration: ScheduleAdministration<C>;
}

export type Renewal = "renewed" | "locked" | "done" | "lost";

/** For people: what is there, and whether it goes on. Makes no schedule. */
export interface ScheduleAdministration<C extends Connection> {
  /** All of them, or those of these names that are there, by name. */
  all(connection: C, names: readonly string[] | undefined): Soon<readonly ScheduleRow[]>;
  /** The newest first; those that are not over are always among them. `last` is undefined if there is no such schedule. */
  list(
    connection: C,
    schedule: string,
    limit: number,
  ): Soon<{
    readonly now: number;
    readonly last: number | undefined;
    readonly paused: boolean;
    readonly runs: readonly RunRow[];
  }>;
  /** While it is paused, ticks are neither begun nor decided upon. `false`: there is no such schedule. */
  pause(connection: C, schedule: string, paused: boolean, how: How): Soon<boolean>;
}
