import { placeOf, send } from "../core/calls.ts";
import type { Connection } from "../core/database.ts";
import { UnsupportedError, UsageError } from "../core/errors.ts";
import { checkRows, checkText, optionalText, shown } from "../core/input.ts";
import { checkNames } from "../core/options.ts";
import type { JobPage, JobState, QueueJobs, WorkerInfo } from "../core/queue-jobs.ts";
import { homeOf } from "../core/scope.ts";

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
  return ask(hf, "jobs", (store, connection) => store.list(connection, queue, { state, after, most: limit }));
}

/** The workers of all queues, those too that have died and were not noticed yet. */
export async function workers(hf: object): Promise<readonly WorkerInfo[]> {
  return ask(hf, "workers", (store, connection) => store.workers(connection));
}

async function ask<T>(
  hf: object,
  call: string,
  work: (store: QueueJobs<Connection>, connection: Connection) => Promise<T>,
): Promise<T> {
  const home = homeOf(hf, call);
  const { queueJobs: store, name } = home.database.engine;
  if (!store) throw new UnsupportedError(`queue: ${name} does not have queues yet`);
  return send(home, placeOf(home, {}, call), { names: ["queues"] }, (connection) => work(store, connection));
}
