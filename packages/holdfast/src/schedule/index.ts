export { ScheduleError } from "./errors.ts";
export { type ScheduleInfo, pauseSchedule, resumeSchedule, runs, schedules } from "./list.ts";
export type { Run } from "./run.ts";
export { schedule } from "./schedule.ts";
export { type CronLike, type Every, type Unit, type When, nextRuns } from "./ticks.ts";
export type { Overlap, RunState } from "./store.ts";
export type {
  CatchUp,
  CommonOptions,
  Enqueue,
  Handler,
  RunInfo,
  Schedule,
  ScheduleOptions,
  ScheduleStatus,
} from "./types.ts";
