import { placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { UsageError } from "../seam/errors.ts";
import { shown } from "../seam/shown.ts";
import { checkRows, checkText, optionalText } from "../input/values.ts";
import { checkNames } from "../input/options.ts";
import { queueBatcherOf } from "./batcher.ts";
import type { JobPage, JobState, QueueLists, WorkerInfo } from "./store.ts";

const states: readonly unknown[] = ["waiting", "delayed", "running", "failed"] satisfies JobState[];

/**
 * The jobs of a queue that are in one state, page by page, in the order in which they are begun; of groups, by their names.
 * Undefined: there is no such queue, and none is made by asking. Jobs in the transaction of a transactional worker wait,
 * as others see it.
 */
export async function jobs(
  hf: object,
  queue: string,
  options: {
    readonly state: JobState;
    /** `next` of the page before. */
    readonly after?: string | undefined;
    readonly limit?: number;
  },
): Promise<JobPage | undefined> {
  checkNames("jobs", options, new Set(["state", "after", "limit"]));
  const { state, after, limit = 100 } = options;
  checkText("jobs", "the queue", queue);
  if (!states.includes(state)) throw new UsageError(`jobs: there is no state ${shown(state)}`);
  optionalText("jobs", "after", after);
  checkRows("jobs", "limit", limit, 10_000);
  return ask(hf, "jobs", (lists, connection) => lists.jobs(connection, queue, { state, after, most: limit }));
}

/** The workers of all queues, those too that have died and were not noticed yet. */
export async function workers(hf: object): Promise<readonly WorkerInfo[]> {
  return ask(hf, "workers", (lists, connection) => lists.workers(connection));
}

async function ask<T>(
  hf: object,
  call: string,
  work: (lists: QueueLists<Connection>, connection: Connection) => Promise<T>,
): Promise<T> {
  const { context, store } = queueBatcherOf(hf, call);
  const place = placeOf(context, undefined, call);
  return send(context, place, { names: ["queues"] }, (connection) => work(store.lists, connection));
}
