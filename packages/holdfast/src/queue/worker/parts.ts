import type { QueueBatcher } from "../batcher.ts";
import type { JobBatch } from "../job.ts";
import type { ClaimedJob } from "../store.ts";
import type { BegunJob } from "./outcome.ts";
import type { Lifetime } from "./lifetime.ts";
import type { Membership } from "./membership.ts";
import type { WorkerSettings } from "./settings.ts";

/** What the parts of a worker have in common. */
export interface WorkerParts<P> {
  readonly batcher: QueueBatcher;
  readonly settings: WorkerSettings<P>;
  readonly life: Lifetime;
  readonly member: Membership;
}

/** A job that was claimed, and where it stands. */
export interface BatchItem {
  readonly batch: JobBatch;
  readonly place: number;
  readonly job: ClaimedJob;
  /** When its handler was called, if somebody wants to know. */
  began?: BegunJob;
}
