export type { Older } from "../input/older.ts";
export { JobLostError, PayloadError } from "./errors.ts";
export type { Job } from "./job.ts";
export { jobs, workers } from "./jobs.ts";
export { queues } from "./list.ts";
export {
  type Backoff,
  type EnqueueOptions,
  type Enqueued,
  type Groups,
  type Queue,
  type QueueOptions,
  type StandardSchema,
  queue,
} from "./queue.ts";
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
export type { TransactionalJob } from "./transactional.ts";
export type { WorkOptions, Worker } from "./worker.ts";
