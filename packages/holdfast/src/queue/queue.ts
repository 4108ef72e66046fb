import { type CallOptions, callNames } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { UsageError } from "../seam/errors.ts";
import { checkRows, checkText, checkWhole } from "../input/values.ts";
import { made } from "../events/made.ts";
import { type Older, olderThan } from "../input/older.ts";
import { checkNames } from "../input/options.ts";
import type { Transaction } from "../transaction/scope.ts";
import { type Address, type Instances, instancesOf } from "../shards/shards.ts";
import { type QueueBatcher, queueBatcherOf } from "./batcher.ts";
import type { Job } from "./job.ts";
import { largestTogether } from "./limits.ts";
import { noJobs, sumOfCounts } from "./list.ts";
import { type JobOptions, jobNames, newJob } from "./new-job.ts";
import { Payloads } from "./payload.ts";
import { settingsOf } from "./settings.ts";
import { type QueueCall, idsOf, inChunks, inSteps, progressOf, stepNames } from "./steps.ts";
import type { FailedJob, How, JobView, NewJob, QueueCounts, QueueSettings } from "./store.ts";
import type {
  EnqueueOptions,
  Enqueued,
  QueueOptions,
  StepOptions,
  TransactionalJob,
  WorkOptions,
  Worker,
} from "./types.ts";
import { work } from "./work.ts";

const jobOptions = new Set(jobNames);
const enqueueOptions = new Set([...callNames, ...jobNames]);
const stepOptions = new Set(stepNames);

/**
 * A queue of jobs in the database of this instance. Define it once, in a module that both sides import. With
 * `sharded(databases, …)` it is in each of them: a job is on the shard of `key(name, group)`, of `key(name, key)` if it has a key,
 * which must be the same one, or else of `key(name)`.
 */
export function queue<Input, Output = Input>(
  hf: object,
  name: string,
  options: QueueOptions<Input, Output> = {},
): Queue<Input, Output> {
  return new Queue(instancesOf(hf, "queue"), name, options);
}

export class Queue<Input, Output = Input> {
  readonly name: string;
  readonly #instances: Instances;
  readonly #backoff: QueueOptions<Input, Output>["backoff"];
  readonly #payloads: Payloads<Input, Output>;
  readonly #settings: QueueSettings;

  constructor(instances: Instances, name: string, options: QueueOptions<Input, Output>) {
    checkText("queue", "the name", name, { most: 200 });
    this.#settings = settingsOf(options, instances.sharded);
    this.name = name;
    this.#instances = instances;
    this.#backoff = options.backoff;
    this.#payloads = new Payloads(name, options.schema);
    made("queue", name);
  }

  async enqueue(payload: Input, options: EnqueueOptions = {}): Promise<Enqueued> {
    checkNames("enqueue", options, enqueueOptions);
    const jobs = [await newJob(this.name, this.#payloads, payload, options)];
    const [added] = await this.#at("enqueue", jobs).add(this.name, jobs, options);
    return added as Enqueued;
  }

  /** Where these jobs belong, all of them. */
  #at(call: string, jobs: readonly NewJob[]): QueueBatcher {
    const { name } = this;
    const { sharded, all } = this.#instances;
    const addresses = jobs.flatMap(({ key, group }): Address[] => {
      const named = [group, key].filter((each) => each !== undefined);
      // What is in no group and has no key is counted nowhere: on an instance of one shard it is where it was put.
      return named.length === 0 && sharded ? [[name]] : named.map((each) => [name, each] as const);
    });
    return queueBatcherOf(addresses.length === 0 ? all[0] : this.#instances.together(call, addresses));
  }

  get #batchers(): readonly QueueBatcher[] {
    return this.#instances.all.map((instance) => queueBatcherOf(instance));
  }

  /** Several at once: each a payload, or with options of its own. All of them are added, or none. */
  async enqueueMany(
    jobs: readonly (JobOptions & { readonly payload: Input })[],
    options: Pick<EnqueueOptions, keyof CallOptions> = {},
  ): Promise<readonly Enqueued[]> {
    checkNames("enqueueMany", options, new Set(callNames));
    const made: NewJob[] = [];
    for (const { payload, ...each } of jobs) {
      checkNames("enqueueMany", each, jobOptions);
      made.push(await newJob(this.name, this.#payloads, payload, each));
    }
    const characters = made.reduce((sum, job) => sum + job.payload.length, 0);
    if (characters > largestTogether)
      throw new UsageError(
        `enqueueMany: the payloads for queue ${JSON.stringify(this.name)} are ${characters} characters of JSON together, and ${largestTogether} are the most: enqueue them in several calls`,
      );
    return made.length === 0 ? [] : this.#at("enqueueMany", made).add(this.name, made, options);
  }

  /** Works on jobs until it is stopped. A handler that throws has failed: the job runs again later. */
  work(
    handler: (job: Job<Output>) => unknown,
    options?: WorkOptions & { readonly transactional?: false },
  ): Worker;
  /**
   * With `transactional: true`, for short jobs that write to this database: the handler runs in a transaction that the
   * claim is a part of. What it writes with `tx` and the end of the job are one.
   */
  work<Native = unknown>(
    handler: (job: TransactionalJob<Output>, tx: Transaction<Native>) => unknown,
    options: WorkOptions & { readonly transactional: true },
  ): Worker;
  work(
    handler: (job: never, tx: never) => unknown,
    options: WorkOptions & { readonly transactional?: boolean } = {},
  ): Worker {
    const queue = {
      name: this.name,
      batchers: this.#batchers,
      settings: this.#settings,
      payloads: this.#payloads,
      backoff: this.#backoff,
    };
    return work(queue, handler, options);
  }

  /** Nothing more is claimed, by any worker; what runs goes on. */
  async pause(): Promise<void> {
    for (const batcher of this.#batchers)
      await this.#call(batcher, (connection, number, how) =>
        batcher.store.administration.pause(connection, number, true, how),
      );
  }

  async resume(): Promise<void> {
    for (const batcher of this.#batchers) {
      await this.#call(batcher, (connection, number, how) =>
        batcher.store.administration.pause(connection, number, false, how),
      );
      await this.#wake(batcher);
    }
  }

  /** In the transaction of the same instance whose body calls, if there is one. */
  #call<T>(
    batcher: QueueBatcher,
    work: (connection: Connection, number: number, how: How) => Promise<T>,
  ): Promise<T> {
    return batcher.call({}, this.name, work);
  }

  #on(batcher: QueueBatcher): QueueCall {
    return (work) => this.#call(batcher, work);
  }

  /** Ids are those of one database: of several, the same one may be in each. */
  #one(call: string): QueueBatcher {
    return queueBatcherOf(
      this.#instances.only(
        `${call}: ids of jobs are those of one database, and this queue is in several. Ask the queue of that shard: queue(shards.on(key), name)`,
      ),
    );
  }

  async #wake(batcher: QueueBatcher): Promise<void> {
    batcher.notifier.notify(this.name);
    await this.#call(batcher, async (connection) => batcher.store.notify?.(connection, this.name));
  }

  /** Of all shards together, if there are several. */
  async counts(): Promise<QueueCounts> {
    const all = await Promise.all(
      this.#batchers.map((batcher) =>
        batcher.look(this.name, (connection, number) => batcher.store.lists.counts(connection, number)),
      ),
    );
    return all.reduce<QueueCounts>((sum, each) => (each ? sumOfCounts(sum, each) : sum), noJobs);
  }

  /** Jobs that have failed for good, by their ids. Of one database. */
  async failed(
    options: { readonly after?: number; readonly limit?: number } = {},
  ): Promise<readonly FailedJob[]> {
    checkNames("failed", options, new Set(["after", "limit"]));
    const { after, limit = 100 } = options;
    if (after !== undefined) checkWhole("failed", "after", after);
    checkRows("failed", "limit", limit, 100_000);
    const batcher = this.#one("failed");
    const found = await batcher.look(this.name, (connection, number) =>
      batcher.store.lists.failed(connection, number, after, limit),
    );
    return found ?? [];
  }

  /** Where a job is, and how it stands; undefined if it has ended. Looks into what runs, so it is for people to ask. */
  async inspect(id: number): Promise<JobView | undefined> {
    checkWhole("inspect", "id", id);
    const batcher = this.#one("inspect");
    return batcher.look(this.name, (connection, number) => batcher.store.lists.find(connection, number, id));
  }

  /**
   * Failed jobs begin anew: those with these ids, or all of them. One whose key another job has meanwhile stays where it is: at most
   * one of a key waits or runs. In steps, each of which is kept. Resolves to how many.
   */
  async retry(ids?: number | readonly number[], options: StepOptions = {}): Promise<number> {
    checkNames("retry", options, stepOptions);
    const progress = progressOf(options);
    for (const batcher of ids === undefined ? this.#batchers : [this.#one("retry")]) {
      const { administration } = batcher.store;
      const count =
        ids === undefined
          ? await inSteps(this.#on(batcher), progress, (connection, number, from, how) =>
              administration.revive(connection, number, from, how),
            )
          : await inChunks(
              this.#on(batcher),
              idsOf("retry", ids),
              progress,
              async (connection, number, some, how) => {
                const step = await administration.revive(connection, number, { ids: some }, how);
                return step.count;
              },
            );
      if (count > 0) await this.#wake(batcher);
    }
    return progress.done;
  }

  /** Failed jobs, and those that wait: gone. What runs goes on. In steps, each of which is kept. Resolves to how many. */
  async discard(ids: number | readonly number[], options: StepOptions = {}): Promise<number> {
    checkNames("discard", options, stepOptions);
    const batcher = this.#one("discard");
    batcher.removes({});
    const count = await inChunks(
      this.#on(batcher),
      idsOf("discard", ids),
      progressOf(options),
      (connection, number, some, how) => batcher.store.administration.discard(connection, number, some, how),
    );
    // A group may have waited for one of them.
    if (count > 0 && this.#settings.ordered) await this.#wake(batcher);
    return count;
  }

  /** Forgets jobs that failed before. In steps, each of which is kept. Resolves to how many. */
  async prune(options: Older & StepOptions): Promise<number> {
    checkNames("prune", options, new Set(["before", "olderThanMs", ...stepOptions]));
    const { signal, onProgress, ...which } = options;
    const older = olderThan("prune", which);
    const progress = progressOf({ signal, onProgress });
    for (const batcher of this.#batchers)
      await inSteps(this.#on(batcher), progress, (connection, number, from, how) =>
        batcher.store.administration.prune(connection, number, older, from, how),
      );
    return progress.done;
  }
}
