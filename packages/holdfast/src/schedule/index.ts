export { ScheduleError } from "./errors.ts";
export { type ScheduleInfo, pauseSchedule, resumeSchedule, runs, schedules } from "./list.ts";
export type { Run } from "./run.ts";
export {
  type CatchUp,
  type CommonOptions,
  type Enqueue,
  type Handler,
  type RunInfo,
  type Schedule,
  type ScheduleOptions,
  type ScheduleStatus,
  schedule,
} from "./schedule.ts";
export { type CronLike, type Every, type Unit, type When, nextRuns } from "./ticks.ts";
export type { Overlap, RunState } from "./store.ts";
