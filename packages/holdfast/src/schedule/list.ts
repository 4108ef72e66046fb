import { placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { storeOf } from "../transaction/instance.ts";
import { checkRows, checkText, checkTexts } from "../input/values.ts";
import { checkNames } from "../input/options.ts";
import { contextOf } from "../transaction/scope.ts";
import type { How, Soon } from "../seam/store.ts";
import { asInfo } from "./run-info.ts";
import type { Schedules } from "./store.ts";
import type { RunInfo } from "./types.ts";

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
  work: (store: Schedules<Connection>["administration"], connection: Connection, how: How) => Soon<T>,
): Promise<T> {
  const context = contextOf(hf, call);
  return send(context, placeOf(context, undefined, call), { names: [call] }, async (connection, how) =>
    work(storeOf(context, "schedules", call).administration, connection, how),
  );
}

/** All schedules of this database, or those of these names that are there, by name. Nothing is made by asking. */
export async function schedules(
  hf: object,
  options: { readonly names?: readonly string[] } = {},
): Promise<readonly ScheduleInfo[]> {
  checkNames("schedules", options, new Set(["names"]));
  const { names } = options;
  checkTexts("schedules", "names", names);
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
  checkText(call, "the name", name, { empty: true });
  return ask(hf, call, (store, connection, how) => store.pause(connection, name, paused, how));
}

/** The newest runs of a schedule, the newest first; those that are not over are always among them. */
export async function runs(
  hf: object,
  schedule: string,
  options: { readonly limit?: number } = {},
): Promise<readonly RunInfo[]> {
  checkNames("runs", options, new Set(["limit"]));
  const { limit = 20 } = options;
  checkText("runs", "the name", schedule, { empty: true });
  checkRows("runs", "limit", limit, 1_000_000);
  const found = await ask(hf, "runs", (store, connection) => store.list(connection, schedule, limit));
  return found.runs.map(asInfo);
}
