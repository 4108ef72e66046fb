export type { Older } from "../input/older.ts";
export { JobLostError, JobUndecidedError, PayloadError, WorkerLeftError } from "./errors.ts";
export type { Job } from "./job.ts";
export { jobs, workers } from "./jobs.ts";
export { queues } from "./list.ts";
export { type Queue, queue } from "./queue.ts";
export type {
  FailedJob,
  JobInfo,
  JobPage,
  JobState,
  JobView,
  QueueCounts,
  QueueInfo,
  WorkerInfo,
} from "./store.ts";
export type {
  Backoff,
  EnqueueOptions,
  Enqueued,
  Groups,
  QueueOptions,
  StandardSchema,
  TransactionalJob,
  WorkOptions,
  Worker,
} from "./types.ts";
