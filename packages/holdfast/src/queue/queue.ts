import { type CallOptions, callNames } from "../batch/calls.ts";
import { Pauses } from "../transaction/retry.ts";
import type { Connection, Wait } from "../seam/database.ts";
import { UsageError, message } from "../seam/errors.ts";
import { emit } from "../events/events.ts";
import { checkJson, checkMoment, checkRows, checkText, checkWhole } from "../input/values.ts";
import { Silence, within } from "../waiting/interrupt.ts";
import { made } from "../events/made.ts";
import { type Older, olderThan } from "../input/older.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { type Transaction, detached } from "../transaction/scope.ts";
import { type Address, type Instances, instancesOf } from "../shards/shards.ts";
import { milliseconds, sleep } from "../waiting/wait.ts";
import { type QueueBatcher, queueBatcherOf } from "./batcher.ts";
import { sumOfCounts } from "./list.ts";
import { PayloadError } from "./errors.ts";
import type { Job } from "./job.ts";
import type { FailedJob, How, JobView, NewJob, QueueCounts, QueueSettings, QueueStep } from "./store.ts";
import { type TransactionalJob, TransactionalWorker } from "./transactional.ts";
import { QueueWorker, type WorkOptions, type Worker, type WorkerSettings, leaveMs } from "./worker.ts";

/** Any library that speaks Standard Schema (Zod, Valibot, ArkType, …): https://standardschema.dev */
export interface StandardSchema<Input, Output = Input> {
  readonly "~standard": {
    readonly version: 1;
    readonly vendor: string;
    readonly validate: (value: unknown) => SchemaResult<Output> | Promise<SchemaResult<Output>>;
    readonly types?: { readonly input: Input; readonly output: Output } | undefined;
  };
}

type SchemaResult<Output> =
  | { readonly value: Output; readonly issues?: undefined }
  | {
      readonly issues: readonly {
        readonly message: string;
        readonly path?: readonly unknown[] | undefined;
      }[];
    };

export interface Backoff {
  /** After the first failure. Default 1,000 ms. */
  readonly baseMs?: number;
  /** Default one hour. */
  readonly maxMs?: number;
  /** Default 2: twice as long after each failure. */
  readonly factor?: number;
  /** A random part, so that jobs that failed together do not come again together. Default 0.1. */
  readonly jitter?: number;
}

export interface Groups {
  /** Jobs of one group at the same time, in all processes together. */
  readonly concurrency?: number;
  /** Starts of one group in a window of so many milliseconds, which begins with the first of them. */
  readonly rate?: { readonly limit: number; readonly perMs: number };
  /** One at a time, in the order in which they came: one that fails holds up its group until it runs again. */
  readonly serial?: boolean;
}

export interface QueueOptions<Input, Output> {
  /** Payloads are checked when they are enqueued, and again when they are worked on. */
  readonly schema?: StandardSchema<Input, Output>;
  /** How often a job that failed runs again. Default 10. */
  readonly retries?: number;
  /** How long it waits before. A function of the number of failures and the error; or undefined from it: not again. */
  readonly backoff?: Backoff | ((failures: number, error: unknown) => number | undefined);
  /** Jobs at the same time, in all processes together. Default: as many as the workers have room for. */
  readonly concurrency?: number;
  readonly groups?: Groups;
}

export interface EnqueueOptions {
  /**
   * In your own transaction: it is there if that is committed. Without it: in the transaction of the same instance whose
   * body calls, if there is one.
   */
  readonly tx?: unknown;
  /** Inside a transaction's body: apart from it. The job is there also if that is rolled back. */
  readonly separate?: boolean;
  /** Milliseconds to wait while somebody's transaction has added a job with the same key. Default: the instance's (5 s). */
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
  /** At most one job of a key waits or runs: see `onDuplicate`. */
  readonly key?: string;
  /** If there is one: leave it (`"ignore"`, default), or put this in the place of one that waits (`"replace"`). */
  readonly onDuplicate?: "ignore" | "replace";
  /** Not before. */
  readonly runAt?: Date;
  /** Not before so many milliseconds have passed, by the database's clock. */
  readonly delayMs?: number;
  /** Smaller numbers first; from -32,767 to 32,767. Default 0. */
  readonly priority?: number;
  readonly group?: string;
}

export interface Enqueued {
  readonly id: number;
  /** False: there is a job with this key already, and this is its id. */
  readonly added: boolean;
}

const queueOptions = new Set(["schema", "retries", "backoff", "concurrency", "groups"]);
const jobNames = ["key", "onDuplicate", "runAt", "delayMs", "priority", "group"];
const jobOptions = new Set(jobNames);
const enqueueOptions = new Set([...callNames, ...jobNames]);
const workOptions = new Set([
  "concurrency",
  "batch",
  "signal",
  "pollMs",
  "ttlMs",
  "onTrouble",
  "transactional",
]);

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
  readonly #options: QueueOptions<Input, Output>;
  readonly #settings: QueueSettings;

  constructor(instances: Instances, name: string, options: QueueOptions<Input, Output>) {
    checkText("queue", "the name", name, { most: 200 });
    checkNames("queue", options, queueOptions);
    const { retries = 10, groups = {}, concurrency } = options;
    checkNames("queue: groups", groups, new Set(["concurrency", "rate", "serial"]));
    const { rate, serial = false } = groups;
    if (!Number.isSafeInteger(retries) || retries < 0 || retries > 30_000)
      throw new UsageError("queue: retries must be a whole number from 0 to 30,000");
    const groupMost = serial ? 1 : groups.concurrency;
    for (const [what, value] of [
      ["concurrency", concurrency],
      ["groups.concurrency", groups.concurrency],
      ["groups.rate.limit", rate?.limit],
    ] as const)
      if (value !== undefined && (!Number.isSafeInteger(value) || value < 1))
        throw new UsageError(`queue: ${what} must be a whole number from 1`);
    if (serial && groups.concurrency !== undefined && groups.concurrency !== 1)
      throw new UsageError("queue: groups that are serial run one at a time: leave groups.concurrency out");
    if (instances.sharded && concurrency !== undefined)
      throw new UsageError(
        "queue: concurrency is counted in one database, and this queue is in several: leave it out, and limit groups (groups.concurrency)",
      );
    this.name = name;
    this.#instances = instances;
    this.#options = options;
    this.#settings = {
      attempts: retries + 1,
      most: concurrency,
      groupMost,
      groupRate: rate?.limit,
      groupPer: rate && milliseconds(rate.perMs, "queue: groups.rate.perMs", 1),
      ordered: serial,
    };
    made("queue", name);
  }

  async enqueue(payload: Input, options: EnqueueOptions = {}): Promise<Enqueued> {
    checkNames("enqueue", options, enqueueOptions);
    const jobs = [await this.#job(payload, options)];
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
    jobs: readonly (Omit<EnqueueOptions, keyof CallOptions> & { readonly payload: Input })[],
    options: Pick<EnqueueOptions, keyof CallOptions> = {},
  ): Promise<readonly Enqueued[]> {
    checkNames("enqueueMany", options, new Set(callNames));
    const made: NewJob[] = [];
    for (const { payload, ...each } of jobs) {
      checkNames("enqueueMany", each, jobOptions);
      made.push(await this.#job(payload, each));
    }
    const characters = made.reduce((sum, job) => sum + job.payload.length, 0);
    if (characters > largestTogether)
      throw new UsageError(
        `enqueueMany: the payloads for queue ${JSON.stringify(this.name)} are ${characters} characters of JSON together, and ${largestTogether} are the most: enqueue them in several calls`,
      );
    return made.length === 0 ? [] : this.#at("enqueueMany", made).add(this.name, made, options);
  }

  async #job(payload: Input, options: Omit<EnqueueOptions, keyof CallOptions>): Promise<NewJob> {
    const { key, group, priority = 0, runAt, delayMs, onDuplicate = "ignore" } = options;
    if (onDuplicate !== "ignore" && onDuplicate !== "replace")
      throw new UsageError('enqueue: onDuplicate must be "ignore" or "replace"');
    checkWhole("enqueue", "priority", priority, -32_767, 32_767);
    if (runAt !== undefined) checkMoment("enqueue", "runAt", runAt);
    if (runAt !== undefined && delayMs !== undefined)
      throw new UsageError("enqueue: either runAt or delayMs");
    if (delayMs !== undefined && !(typeof delayMs === "number" && delayMs >= 0 && delayMs <= longestMs))
      throw new UsageError(
        `enqueue: delayMs must be a number of milliseconds from 0 to ${longestMs}, not ${String(delayMs)}`,
      );
    for (const [what, text] of Object.entries({ key, group }))
      if (text !== undefined) checkText("enqueue", what, text, { most: longestName });
    if (this.#options.schema) await this.#validate(payload);
    const json = checkJson("enqueue", "the payload", payload);
    // A character has up to three bytes.
    const bytes = json.length * 3 > largest ? Buffer.byteLength(json) : 0;
    if (bytes > largest)
      throw new UsageError(
        `enqueue: the payload for queue ${JSON.stringify(this.name)} is ${bytes} bytes of JSON, and ${largest} are the most: keep it elsewhere, and enqueue where it is`,
      );
    return {
      payload: json,
      priority,
      group,
      key,
      replace: onDuplicate === "replace",
      // Whatever is past is due now; the server's calendar does not go back as far as a Date does.
      runAt: runAt ? Math.max(0, runAt.getTime()) : undefined,
      delayMs,
    };
  }

  async #validate(payload: unknown): Promise<Output> {
    const result = await this.#options.schema?.["~standard"].validate(payload);
    return (result && this.#accepted(result)) as Output;
  }

  #unfit(issues: Extract<SchemaResult<Output>, { issues: readonly unknown[] }>["issues"]): PayloadError {
    return new PayloadError(
      this.name,
      issues.map(({ message, path }) => ({
        message,
        ...(path && {
          path: path.map((part) =>
            typeof part === "object" && part !== null && "key" in part ? part.key : part,
          ),
        }),
      })),
    );
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
    checkNames("work", options, workOptions);
    // Throws here, and not later, where nobody listens, if the engine has none.
    for (const { store } of this.#batchers) void store;
    const { concurrency = 10, signal, pollMs = 1000, ttlMs = 30_000, transactional } = options;
    const { batch = transactional ? 25 : 500 } = options;
    checkSignal(signal);
    for (const [what, value] of [
      ["concurrency", concurrency],
      ["batch", batch],
    ] as const)
      if (!Number.isSafeInteger(value) || value < 1)
        throw new UsageError(`work: ${what} must be a whole number from 1`);
    const { attempts, groupMost, groupRate } = this.#settings;
    const counted = groupMost !== undefined || groupRate !== undefined;
    if (transactional && (counted || this.#settings.most !== undefined))
      throw new UsageError("work: limits are not counted for transactional jobs; leave one or the other out");
    const { name } = this;
    const trouble = options.onTrouble ?? warner(name);
    const settings: Omit<WorkerSettings<Output>, "handler" | "number"> = {
      queue: name,
      concurrency,
      most: batch,
      pollMs: milliseconds(pollMs, "work: pollMs", 1),
      ttlMs: milliseconds(ttlMs, "work: ttlMs", 100),
      attempts,
      limited: counted || this.#settings.most !== undefined,
      read: (payload) => this.#read(payload),
      again: checked(name, this.#options.backoff, trouble),
      trouble,
    };
    const started = this.#batchers.map(
      (batcher) =>
        new Starting(batcher, name, this.#settings, settings.trouble, signal, (number, stop) =>
          transactional
            ? new TransactionalWorker(batcher, { ...settings, number }, handler as never, stop)
            : new QueueWorker(batcher, { ...settings, number, handler: handler as never }, stop),
        ),
    );
    const [only, ...more] = started as [Starting, ...Starting[]];
    return more.length === 0 ? only : new Crew(started);
  }

  /** What the schema makes of it: a promise only if it answers later, since most answer at once. */
  #read(payload: unknown): Output | Promise<Output> {
    const { schema } = this.#options;
    if (!schema) return payload as Output;
    const result = schema["~standard"].validate(payload);
    return "then" in result
      ? Promise.resolve(result).then((later) => this.#accepted(later))
      : this.#accepted(result);
  }

  #accepted(result: SchemaResult<Output>): Output {
    if (result.issues) throw this.#unfit(result.issues);
    return result.value;
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
        this.#call(batcher, (connection, number) => batcher.store.lists.counts(connection, number)),
      ),
    );
    return all.reduce(sumOfCounts);
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
    return this.#call(batcher, (connection, number) =>
      batcher.store.lists.failed(connection, number, after, limit),
    );
  }

  /** Where a job is, and how it stands; undefined if it has ended. Looks into what runs, so it is for people to ask. */
  async inspect(id: number): Promise<JobView | undefined> {
    checkWhole("inspect", "id", id);
    const batcher = this.#one("inspect");
    return this.#call(batcher, (connection, number) => batcher.store.lists.find(connection, number, id));
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
          ? await this.#steps(batcher, progress, (connection, number, from, how) =>
              administration.revive(connection, number, from, how),
            )
          : await this.#chunks(
              batcher,
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
    const count = await this.#chunks(
      batcher,
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
      await this.#steps(batcher, progress, (connection, number, from, how) =>
        batcher.store.administration.prune(connection, number, older, from, how),
      );
    return progress.done;
  }

  /** By their ids, from the first to the last. */
  async #steps(
    batcher: QueueBatcher,
    progress: Progress,
    one: (connection: Connection, number: number, from: From, how: How) => Promise<QueueStep & Partial<From>>,
  ): Promise<number> {
    const before = progress.done;
    for (let from: From | undefined = { after: 0, upTo: undefined, most: perStep }; from;) {
      const now: From = from;
      const step: QueueStep & Partial<From> = await this.#call(batcher, (connection, number, how) =>
        one(connection, number, now, how),
      );
      progress.add(step.count);
      from = step.last === undefined ? undefined : { after: step.last, upTo: step.upTo, most: perStep };
    }
    return progress.done - before;
  }

  async #chunks(
    batcher: QueueBatcher,
    ids: readonly number[],
    progress: Progress,
    step: (connection: Connection, number: number, some: readonly number[], how: How) => Promise<number>,
  ): Promise<number> {
    for (let from = 0; from < ids.length; from += perStep)
      progress.add(
        await this.#call(batcher, (connection, number, how) =>
          step(connection, number, ids.slice(from, from + perStep), how),
        ),
      );
    return progress.done;
  }
}

/** Where a step begins. */
interface From {
  readonly after: number;
  readonly upTo: number | undefined;
  readonly most: number;
}

/** Of jobs at a time: what takes longer than ten seconds is given up, and one step does not. */
const perStep = 1000;

/** Of calls that may have much to do. */
export interface StepOptions {
  /** Between two steps: it throws, and what is done so far is done. */
  readonly signal?: AbortSignal | undefined;
  /** After each step: how many so far. */
  readonly onProgress?: ((done: number) => void) | undefined;
}

const stepOptions: ReadonlySet<string> = new Set(["signal", "onProgress"]);

interface Progress {
  readonly done: number;
  add(count: number): void;
}

function progressOf({ signal, onProgress }: StepOptions): Progress {
  checkSignal(signal);
  if (onProgress !== undefined && typeof onProgress !== "function")
    throw new UsageError("onProgress must be a function");
  signal?.throwIfAborted();
  let done = 0;
  return {
    get done() {
      return done;
    },
    add(count) {
      done += count;
      onProgress?.(done);
      signal?.throwIfAborted();
    },
  };
}

function idsOf(call: string, ids: number | readonly number[]): readonly number[] {
  return [ids].flat().map((id) => checkWhole(call, "id", id));
}

/** A worker, from the moment at which it is wanted: its queue has to be found first. */
class Starting implements Worker {
  readonly done: Promise<void>;
  readonly #stop = new AbortController();
  readonly #worker: Promise<Worker | undefined>;

  constructor(
    batcher: QueueBatcher,
    name: string,
    settings: QueueSettings,
    trouble: (error: unknown) => void,
    signal: AbortSignal | undefined,
    start: (number: number, stop: AbortSignal | undefined) => Worker,
  ) {
    const forget = batcher.context.started.add("work", (patienceMs) => this.stop({ patienceMs }));
    const stops = signal ? AbortSignal.any([signal, this.#stop.signal]) : this.#stop.signal;
    const begin = async () => {
      for (const pauses = new Pauses(100, 5000); !stops.aborted;) {
        try {
          const number = await batcher.ask((connection, how) =>
            batcher.store.open(connection, name, settings, how),
          );
          return stops.aborted ? undefined : start(number, signal);
        } catch (error) {
          trouble(error);
          await sleep(pauses.next(), stops).catch(() => {});
        }
      }
      return undefined;
    };
    // Its jobs are no part of the transaction in whose body it may have been started.
    this.#worker = detached(batcher.context, begin);
    this.done = this.#worker.then((worker) => worker?.done).finally(forget);
  }

  async stop(options: { readonly patienceMs?: number } = {}): Promise<void> {
    checkNames("stop", options, new Set(["patienceMs"]));
    const { patienceMs = 30_000 } = options;
    milliseconds(patienceMs, "stop: patienceMs");
    this.#stop.abort();
    const begun = await within(leaveMs, this.#worker).catch((error: unknown) => {
      // Its queue is still being asked for, of a database that does not answer: it begins nothing any more.
      if (!(error instanceof Silence)) throw error;
    });
    await begun?.stop({ patienceMs });
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }
}

/** The workers of one queue that is in several databases. */
class Crew implements Worker {
  readonly done: Promise<void>;
  readonly #workers: readonly Worker[];

  constructor(workers: readonly Worker[]) {
    this.#workers = workers;
    this.done = Promise.all(workers.map(({ done }) => done)).then(() => undefined);
  }

  async stop(options?: { readonly patienceMs?: number }): Promise<void> {
    await Promise.all(this.#workers.map((worker) => worker.stop(options)));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }
}

/** What goes wrong in a worker has nobody to be thrown to. The same is said once a minute. */
function warner(queue: string): (error: unknown) => void {
  let said = "";
  let at = 0;
  return (error) => {
    emit("holdfast:queue:trouble", () => ({ queue, error }));
    const text = `The worker of queue ${JSON.stringify(queue)} goes on after: ${message(error)}`;
    if (text === said && performance.now() - at < 60_000) return;
    said = text;
    at = performance.now();
    process.emitWarning(text, "HoldfastWarning");
  };
}

/** A hundred years: more is a mistake, and more than the server's intervals take. */
const longestMs = 100 * 365 * 86_400_000;
/** Of a payload, in bytes of JSON: it is written three times, and 500 of them may be claimed together. */
const largest = 1024 * 1024;
const largestTogether = 64 * largest;
/** Of a key, or of a group: an index has to hold it. */
const longestName = 1000;

/** What a function of the caller's returns may be anything. */
function checked(
  queue: string,
  backoff: QueueOptions<never, never>["backoff"],
  trouble: (error: unknown) => void,
): (failures: number, error: unknown) => number | undefined {
  const usual = backoffOf(typeof backoff === "function" ? {} : backoff);
  if (typeof backoff !== "function") return usual;
  return (failures, error) => {
    try {
      const ms: unknown = backoff(failures, error);
      if (ms === undefined || ms === null) return undefined;
      if (typeof ms === "number" && !Number.isNaN(ms)) return Math.min(longestMs, Math.max(0, ms));
      throw new UsageError(
        `queue ${JSON.stringify(queue)}: backoff must return milliseconds, or undefined for never again, not ${String(ms)}`,
      );
    } catch (wrong) {
      trouble(wrong);
      return usual(failures);
    }
  };
}

function backoffOf(
  backoff: Exclude<QueueOptions<never, never>["backoff"], (...args: never) => unknown> = {},
): (failures: number) => number {
  checkNames("queue: backoff", backoff, new Set(["baseMs", "maxMs", "factor", "jitter"]));
  const { baseMs = 1000, maxMs = 3_600_000, factor = 2, jitter = 0.1 } = backoff;
  for (const [what, value] of Object.entries({ baseMs, maxMs, factor, jitter }))
    if (typeof value !== "number" || !(value >= 0))
      throw new UsageError(`queue: backoff.${what} must be a number from 0, not ${String(value)}`);
  return (failures) => {
    const ms = Math.min(maxMs, longestMs, baseMs * factor ** Math.min(failures - 1, 60));
    return ms * (1 + jitter * Math.random());
  };
}
