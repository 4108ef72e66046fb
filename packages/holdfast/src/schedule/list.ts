import { placeOf, send } from "../core/calls.ts";
import type { Connection } from "../core/database.ts";
import { UnsupportedError, UsageError } from "../core/errors.ts";
import { checkNames } from "../core/options.ts";
import type { Schedules } from "../core/schedules.ts";
import { homeOf } from "../core/scope.ts";
import { type RunInfo, asInfo } from "./schedule.ts";

/** What is known of a schedule without its definition, which is in the code. */
export interface ScheduleInfo {
  readonly name: string;
  /** No tick is begun. */
  readonly paused: boolean;
  /** The newest tick that was decided upon; of one that is new, when it was first started. */
  readonly last: Date;
  /** How many runs are not over. */
  readonly open: number;
  /** The newest that is over, and was not skipped. */
  readonly lastRun: RunInfo | undefined;
}

async function ask<T>(
  hf: object,
  call: string,
  work: (store: Schedules<Connection>, connection: Connection) => Promise<T>,
): Promise<T> {
  const home = homeOf(hf, call);
  const { schedules: store, name } = home.database.engine;
  if (!store) throw new UnsupportedError(`${call}: ${name} does not keep schedules yet`);
  return send(home, placeOf(home, {}, call), { names: [call] }, (connection) => work(store, connection));
}

/** All schedules of this database, or those of these names that are there, by name. Nothing is made by asking. */
export async function schedules(
  hf: object,
  options: { readonly names?: readonly string[] } = {},
): Promise<readonly ScheduleInfo[]> {
  checkNames("schedules", options, new Set(["names"]));
  const { names } = options;
  if (names?.some((name) => typeof name !== "string" || name.includes("\0")))
    throw new UsageError("schedules: names must be texts, without NUL");
  const found = await ask(hf, "schedules", (store, connection) => store.all(connection, names));
  return found.map(({ name, paused, last, open, lastRun }) => ({
    name,
    paused,
    last: new Date(last),
    open,
    lastRun: lastRun && asInfo(lastRun),
  }));
}

/** As `schedule.pause()`, for whoever has not its definition. `false`: there is no such schedule. */
export async function pauseSchedule(hf: object, name: string): Promise<boolean> {
  return setPaused(hf, "pauseSchedule", name, true);
}

/** As `schedule.resume()`. `false`: there is no such schedule. */
export async function resumeSchedule(hf: object, name: string): Promise<boolean> {
  return setPaused(hf, "resumeSchedule", name, false);
}

function setPaused(hf: object, call: string, name: string, paused: boolean): Promise<boolean> {
  if (typeof name !== "string" || name.includes("\0"))
    throw new UsageError(`${call}: the name of a schedule is text, without NUL`);
  return ask(hf, call, (store, connection) => store.pause(connection, name, paused));
}

/** The newest runs of a schedule, the newest first; those that are not over are always among them. */
export async function runs(
  hf: object,
  schedule: string,
  options: { readonly limit?: number } = {},
): Promise<readonly RunInfo[]> {
  checkNames("runs", options, new Set(["limit"]));
  const { limit = 20 } = options;
  if (typeof schedule !== "string" || schedule.includes("\0"))
    throw new UsageError("runs: the name of a schedule is text, without NUL");
  if (!Number.isSafeInteger(limit) || limit < 1 || limit > 1_000_000)
    throw new UsageError("runs: limit must be a whole number from 1 to 1,000,000");
  const found = await ask(hf, "runs", (store, connection) => store.list(connection, schedule, limit));
  return found.runs.map(asInfo);
}
