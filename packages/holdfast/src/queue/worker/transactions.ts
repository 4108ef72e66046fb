/** Jobs in the transaction of their handlers: taken, run one after the other, and settled, each behind a savepoint. */
import type { Connection, Isolation } from "../../seam/database.ts";
import { TransactionAbortedError } from "../../seam/errors.ts";
import { classify } from "../../seam/failure.ts";
import { traced } from "../../events/events.ts";
import { type Scope, scopeOf } from "../../transaction/scope.ts";
import { words } from "../errors.ts";
import type { ClaimedJob } from "../store.ts";
import type { TransactionalJob } from "../types.ts";
import { type BegunJob, type JobTimes, beginning, failedAttempt, tellFailed, timesOf } from "./outcome.ts";
import type { WorkerParts } from "./parts.ts";
import { inTransaction } from "./settings.ts";

/** What is known of a transaction while it runs, and of its last attempt. */
export interface Turn {
  last: ClaimedJob | undefined;
  ended: { readonly job: ClaimedJob; readonly times: JobTimes }[];
  /** How long its handlers took. */
  busy: number;
  /** It has looked everywhere. */
  whole: boolean;
  /** It had jobs of groups. */
  grouped: boolean;
}

const savepoint = "holdfast_job";

/**
 * Never inherited from the session. With a snapshot for the whole transaction a worker sees a pause too late, and on some engines
 * producers wait for handlers. An instance that is serializable stays so: its handlers rely on it.
 */
function isolationOf({ isolation }: { readonly isolation: Isolation }): Isolation {
  return isolation === "serializable" ? isolation : "read committed";
}

/**
 * One transaction has several jobs while their handlers take no longer than this together: a BEGIN and a COMMIT less for
 * each. What goes by between them does not count: on a busy machine, one job in a transaction is what makes it busier.
 */
export const togetherMs = 20;
/** A job with which the connection was lost so often in a row is not taken for innocent any more. */
const mostLosses = 3;

/** What a handler has thrown, where nothing but the whole transaction can be undone. */
export class HandlerFailure extends Error {
  readonly times: JobTimes | undefined;

  constructor(thrown: unknown, times: JobTimes | undefined) {
    super(words(thrown), { cause: thrown });
    this.times = times;
  }
}

interface TransactionsContext<P> extends WorkerParts<P> {
  /** Ends transactions that are under way: they are rolled back, and their jobs are there for others. */
  readonly hard: AbortSignal;
  /** Of so many that were asked for. */
  readonly taken: (jobs: number, most: number) => void;
}

export class JobTransactions<P> {
  readonly #worker: TransactionsContext<P>;
  readonly #handler: (job: TransactionalJob<P>, tx: never) => unknown;
  #onward: string | undefined;
  /** The last job with which the connection was lost, and how often. */
  #losses = { job: 0, count: 0 };

  constructor(worker: TransactionsContext<P>, handler: (job: TransactionalJob<P>, tx: never) => unknown) {
    this.#worker = worker;
    this.#handler = handler;
  }

  get #alone(): boolean {
    return this.#worker.batcher.store.transactional.alone === true;
  }

  /** Resolves to how many jobs were done, or have failed. Rejects with a `HandlerFailure` where a failed one cannot be undone alone. */
  run(batch: number, turn: Turn): Promise<number> {
    const { batcher, settings, life, hard } = this.#worker;
    const { store, instance } = batcher;
    const { stopping } = life;
    const isolation = isolationOf(batcher.context);
    return instance.transaction({ signal: hard, isolation }, async (tx) => {
      const scope = scopeOf(tx, "queue");
      turn.busy = 0;
      turn.ended = [];
      const jobs = await this.#take(scope, this.#alone ? 1 : batch, turn);
      const settled: ClaimedJob[] = [];
      let count = 0;
      let saved = true;
      for (const job of jobs) {
        if (count > 0) {
          if (stopping.aborted || turn.busy > togetherMs) break;
          const before = saved;
          await scope.work(({ connection }) => store.transactional.another(connection, savepoint, before));
        }
        count++;
        turn.last = job;
        const start = beginning();
        const from = performance.now();
        saved = await this.#one(scope, tx, job, start);
        turn.busy += performance.now() - from;
        if (saved) settled.push(job);
        if (saved && start) turn.ended.push({ job, times: timesOf(job, start) });
      }
      // Without its transaction a job would be gone for ever, whether or not what its handler wrote was kept.
      await scope.work(({ connection }) => {
        if (batcher.context.database.engine.isEnded?.(connection)) throw TransactionAbortedError.early();
        return Promise.resolve();
      });
      const done = await this.#stillThere(scope, settled);
      if (done.length > 0)
        await scope.work(({ connection }) =>
          store.transactional.settle(connection, settings.number, done, undefined, inTransaction),
        );
      return count;
    });
  }

  /** Without those that their own handlers have discarded, or replaced: whatever else is missing is a failure. */
  async #stillThere(
    scope: Scope<unknown, Connection>,
    jobs: readonly ClaimedJob[],
  ): Promise<readonly ClaimedJob[]> {
    const { batcher, settings } = this.#worker;
    if (!batcher.removals.has(scope)) return jobs;
    const found: ClaimedJob[] = [];
    for (const job of jobs) {
      const there = await scope.work(({ connection }) =>
        batcher.store.transactional.takeOne(connection, settings.number, job, { savepoint }, inTransaction),
      );
      if (there) found.push(job);
    }
    return found;
  }

  async #take(scope: Scope<unknown, Connection>, most: number, turn: Turn): Promise<readonly ClaimedJob[]> {
    const { batcher, settings, member, taken } = this.#worker;
    const { trail } = member;
    const look = trail.look();
    turn.whole = look.whole;
    let jobs: readonly ClaimedJob[] = [];
    try {
      const { whole } = look;
      const what = { savepoint, most, where: trail, whole, onward: this.#onward };
      const found = await scope.work(({ connection }) =>
        batcher.store.transactional.take(connection, settings.number, what, inTransaction),
      );
      jobs = found.jobs;
      this.#onward = found.onward ?? this.#onward;
    } finally {
      look.end(jobs.length);
    }
    for (const job of jobs) trail.found(job);
    if (jobs.some(({ group }) => group !== undefined)) turn.grouped = true;
    taken(jobs.length, most);
    return jobs;
  }

  /** Whether its savepoint is still there: a rollback takes it away. */
  async #one(
    scope: Scope<unknown, Connection>,
    tx: unknown,
    job: ClaimedJob,
    began: BegunJob | undefined,
  ): Promise<boolean> {
    const { queue, read } = this.#worker.settings;
    try {
      const { id, failures, priority, key, group, at } = job;
      const reading = read(job.payload);
      const payload = reading instanceof Promise ? await reading : reading;
      const attempt = failures + 1;
      const given = { id, payload, attempt, priority, key, group, at: new Date(at) };
      await traced(
        "holdfast:job",
        () => ({ queue, job: id, attempt, transactional: true }),
        () => this.#handler(given, tx as never) as Promise<unknown>,
      );
      return true;
    } catch (error) {
      if (await this.#isOurs(scope, error)) throw error;
      const times = began && timesOf(job, began);
      if (this.#alone) throw new HandlerFailure(error, times);
      await this.#putBack(scope, job, error, times);
      return false;
    }
  }

  /**
   * What a handler throws is its own failure, also if it talks to others and one of them hung up. Unless the transaction itself is
   * over: then all of it is run again, and the job is taken again, too.
   */
  async #isOurs(scope: Scope<unknown, Connection>, error: unknown): Promise<boolean> {
    const failure = classify(this.#worker.batcher.context.database, error, false);
    if (failure === "deadlock" || failure === "serialization") return true;
    return scope.work(({ connection }) => Promise.resolve(connection.lost.aborted)).catch(() => true);
  }

  /** Its transaction was not committed. Whether it counts as an attempt of this job, which was alone in it. */
  isToBlame({ id }: ClaimedJob, error: unknown): boolean {
    if (classify(this.#worker.batcher.context.database, error) !== "lost") return true;
    // A server that restarts is nobody's fault. A job that ends its own connection, each time, is to come to an end.
    const count = this.#losses.job === id ? this.#losses.count + 1 : 1;
    this.#losses = { job: id, count };
    return count >= mostLosses;
  }

  /** Its handler did not fail, but its transaction did, for example by a constraint that is checked at COMMIT. */
  async failAlone(last: ClaimedJob, failure: unknown): Promise<void> {
    const { batcher, settings } = this.#worker;
    const [error, times] =
      failure instanceof HandlerFailure ? [failure.cause, failure.times] : [failure, undefined];
    const isolation = isolationOf(batcher.context);
    await batcher.instance.transaction({ isolation }, async (tx) => {
      const scope = scopeOf(tx, "queue");
      const job = await scope.work(({ connection }) =>
        batcher.store.transactional.takeOne(connection, settings.number, last, { savepoint }, inTransaction),
      );
      // Since the rollback somebody else may have had it, and have counted the same attempt.
      if (job?.failures === last.failures) await this.#putBack(scope, job, error, times);
    });
  }

  async #putBack(
    scope: Scope<unknown, Connection>,
    job: ClaimedJob,
    error: unknown,
    times?: JobTimes,
  ): Promise<void> {
    const { batcher, settings } = this.#worker;
    const attempt = failedAttempt(settings, job, error);
    await scope.work(async ({ connection }) => {
      if (!this.#alone) await batcher.context.database.engine.savepoint(connection, savepoint, "rollback");
      const failure = { error: words(error), again: attempt.again };
      await batcher.store.transactional.settle(connection, settings.number, [job], failure, inTransaction);
    });
    tellFailed(settings.queue, job, attempt, times);
  }
}
