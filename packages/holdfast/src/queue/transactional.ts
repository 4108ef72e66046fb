/** Short jobs, each in a transaction that its claim is a part of: a crash rolls both back, and there is no lease. */
import type { Ear } from "../batch/notifier.ts";
import type { Connection } from "../seam/database.ts";
import { emit, traced } from "../events/events.ts";
import { classify } from "../seam/failure.ts";
import { type Scope, scopeOf } from "../transaction/scope.ts";
import { sleep } from "../waiting/wait.ts";
import type { QueueBatcher } from "./batcher.ts";
import { words } from "./errors.ts";
import type { Member } from "./rounds.ts";
import type { ClaimedJob, JobPlace } from "./store.ts";
import { Trail } from "./trail.ts";
import {
  type BegunJob,
  type Worker,
  type WorkerSettings,
  beginning,
  inTransaction,
  leaveMs,
  timesOf,
} from "./worker.ts";

export interface TransactionalJob<P> {
  readonly id: number;
  readonly payload: P;
  readonly attempt: number;
  readonly priority: number;
  readonly key: string | undefined;
  readonly group: string | undefined;
  readonly at: Date;
}

type Times = ReturnType<typeof timesOf>;
type Told = Times & { readonly job: ClaimedJob };

/** What is known of a transaction while it runs, and of its last attempt. */
interface Turn {
  last: ClaimedJob | undefined;
  ended: Told[];
  /** How long its handlers took. */
  busy: number;
  /** It has looked everywhere. */
  whole: boolean;
  /** It had jobs of groups. */
  grouped: boolean;
}

const savepoint = "holdfast_job";
/**
 * One transaction has several jobs while their handlers take no longer than this together: a BEGIN and a COMMIT less for
 * each. What goes by between them does not count: on a busy machine, one job in a transaction is what makes it busier.
 */
const togetherMs = 20;
/** What is due is looked for this often while there are other jobs. */
const dueMs = 100;
/** A job with which the connection was lost so often in a row is not taken for innocent any more. */
const mostLosses = 3;
/** Of a timer. */
const longestRestMs = 3_600_000;

export class TransactionalWorker<P> implements Worker, Member {
  readonly #batcher: QueueBatcher;
  readonly #settings: Omit<WorkerSettings<P>, "handler">;
  readonly #handler: (job: TransactionalJob<P>, tx: never) => unknown;
  readonly #stop = new AbortController();
  /** Ends transactions that are under way: they are rolled back, and their jobs are there for others. */
  readonly #hard = new AbortController();
  readonly #ended = Promise.withResolvers<void>();
  #stopping: NodeJS.Timeout[] | undefined;
  /** As many as were done in time: behind a slow one, the others of its transaction would wait. */
  #size = 1;
  #dueAt = 0;
  #asking: Promise<number | undefined> | undefined;
  readonly #trail = new Trail();
  #onward: string | undefined;
  readonly #ear: Ear;
  /** One of those who have nothing to do watches for jobs, and the others wait until there is something for them. */
  #watching = false;
  #resting = false;
  #waiting: (() => void)[] = [];
  /** The last job with which the connection was lost, and how often. */
  #losses = { job: 0, count: 0 };
  /** Jobs of groups have ended since the groups were looked at. */
  #grouped = false;
  #id: number | undefined;
  lock: string | undefined;
  readonly done: Promise<void>;

  constructor(
    batcher: QueueBatcher,
    settings: Omit<WorkerSettings<P>, "handler">,
    handler: (job: TransactionalJob<P>, tx: never) => unknown,
    signal: AbortSignal | undefined,
  ) {
    this.#batcher = batcher;
    this.#settings = settings;
    this.#handler = handler;
    this.done = this.#ended.promise;
    this.#ear = batcher.notifier.ear(settings.queue);
    const onAbort = () => void this.stop();
    signal?.addEventListener("abort", onAbort, { once: true });
    if (signal?.aborted) onAbort();
    void this.#run()
      .then(this.#ended.resolve, this.#ended.reject)
      .finally(() => {
        for (const timer of this.#stopping ?? []) clearTimeout(timer);
        signal?.removeEventListener("abort", onAbort);
      });
  }

  async stop({ patienceMs = 30_000 }: { readonly patienceMs?: number } = {}): Promise<void> {
    const { queue } = this.#settings;
    this.#stopping ??= [
      setTimeout(
        () => this.#hard.abort(new Error(`The worker of queue ${JSON.stringify(queue)} stops`)),
        patienceMs,
      ),
      // What is not committed by then is rolled back, or found to be committed by whoever looks.
      setTimeout(this.#ended.resolve, patienceMs + leaveMs),
    ];
    this.#stop.abort();
    await this.done;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }

  get queue(): number {
    return this.#settings.number;
  }

  get id(): number | undefined {
    return this.#id;
  }

  get ttlMs(): number {
    return this.#settings.ttlMs;
  }

  get pollMs(): number {
    return this.#settings.pollMs;
  }

  get idle(): JobPlace | undefined {
    return this.#resting ? this.#trail : undefined;
  }

  wake(): void {
    this.#ear.notify();
  }

  trouble(error: unknown): void {
    this.#settings.trouble(error);
  }

  /** It has no leases, so there is nothing to lose but its place among the workers that are counted. */
  async lose(): Promise<void> {
    this.#id = undefined;
    for (let pause = 100; !this.#stop.signal.aborted; pause = Math.min(pause * 2, 5000)) {
      try {
        this.#id = await this.#batcher.rounds.enlist(this);
        return;
      } catch (error) {
        this.#settings.trouble(error);
        await sleep(pause, this.#stop.signal).catch(() => {});
      }
    }
  }

  async #run(): Promise<void> {
    const { notifier, rounds, store } = this.#batcher;
    const { queue, concurrency, trouble } = this.#settings;
    const silence = notifier.listen();
    const part = rounds.join(this);
    // Whoever throws where trouble is told has been told.
    const enlisted = this.lose().catch(() => {});
    const onStop = () => {
      for (const go of this.#waiting.splice(0)) go();
    };
    this.#stop.signal.addEventListener("abort", onStop, { once: true });
    try {
      // The first wakes the second, if there is more to do, and so on.
      const others = Array.from({ length: concurrency - 1 }, () => this.#wait().then(() => this.#loop()));
      await Promise.all([this.#loop(), ...others]);
    } finally {
      silence();
      notifier.forget(queue, this.#ear);
      await enlisted;
      const worker = this.#id;
      if (worker !== undefined)
        await this.#batcher
          .ask((connection, how) => store.workers.retire(connection, worker, how))
          .catch(trouble);
      await part();
    }
  }

  #wait(): Promise<void> {
    if (this.#stop.signal.aborted) return Promise.resolve();
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  async #loop(): Promise<void> {
    const { signal } = this.#stop;
    const { trouble } = this.#settings;
    let pause = 100;
    /** So many more alone, after a batch that could not be committed: it may be the fault of one of them. */
    let alone = 0;
    while (!signal.aborted) {
      this.#ear.rung = false;
      const batch = alone > 0 ? 1 : this.#size;
      alone = Math.max(0, alone - 1);
      const turn: Turn = { last: undefined, ended: [], busy: 0, whole: false, grouped: false };
      try {
        await this.#due(false);
        const done = await this.#transaction(batch, turn);
        this.#learn(done, turn.busy);
        if (turn.grouped) this.#grouped = true;
        this.#tell(turn.ended);
        pause = 100;
        if (done === 0 && !signal.aborted) await this.#rest(turn.whole);
      } catch (error) {
        // Given up, and not its fault.
        if (this.#hard.signal.aborted) return;
        trouble(error);
        const { last } = turn;
        if (last && batch > 1) alone = batch;
        else if (last && this.#isToBlame(last, error)) await this.#failAlone(last, error).catch(trouble);
        await sleep(pause, signal).catch(() => {});
        pause = Math.min(pause * 2, 5000);
      }
    }
  }

  /** Resolves to how many jobs were done, or have failed. */
  #transaction(batch: number, turn: Turn): Promise<number> {
    const { number } = this.#settings;
    const { store, instance } = this.#batcher;
    const { signal } = this.#stop;
    return instance.transaction({ signal: this.#hard.signal }, async (tx) => {
      const scope = scopeOf(tx, "queue");
      turn.busy = 0;
      turn.ended = [];
      const jobs = await this.#take(scope, batch, turn);
      const settled: ClaimedJob[] = [];
      let count = 0;
      let saved = true;
      for (const job of jobs) {
        if (count > 0) {
          if (signal.aborted || turn.busy > togetherMs) break;
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
        if (saved && start) turn.ended.push({ job, ...timesOf(job, start) });
      }
      if (settled.length > 0)
        await scope.work(({ connection }) =>
          store.transactional.settle(connection, number, settled, undefined, inTransaction),
        );
      return count;
    });
  }

  async #take(scope: Scope<unknown, Connection>, most: number, turn: Turn): Promise<readonly ClaimedJob[]> {
    const { number } = this.#settings;
    const look = this.#trail.look();
    turn.whole = look.whole;
    let jobs: readonly ClaimedJob[] = [];
    try {
      const { whole } = look;
      const what = { savepoint, most, where: this.#trail, whole, onward: this.#onward };
      const taken = await scope.work(({ connection }) =>
        this.#batcher.store.transactional.take(connection, number, what, inTransaction),
      );
      jobs = taken.jobs;
      this.#onward = taken.onward ?? this.#onward;
    } finally {
      look.end(jobs.length);
    }
    for (const job of jobs) this.#trail.found(job);
    if (jobs.some(({ group }) => group !== undefined)) turn.grouped = true;
    // There may be more than these; and somebody has to watch while they run.
    if (jobs.length === most || (jobs.length > 0 && !this.#watching)) this.#waiting.shift()?.();
    return jobs;
  }

  /** There was nothing, where it has looked. One watches until there is, and the others until they are needed. */
  async #rest(whole: boolean): Promise<void> {
    if (this.#watching) {
      // Groups whose last jobs have just ended are to be forgotten.
      if (this.#grouped) await this.#due(true);
      return this.#wait();
    }
    this.#watching = true;
    try {
      const again = whole ? Infinity : this.#trail.wholeNext();
      if (again <= 0) return;
      const soon = await this.#due(true);
      if (soon === 0) return;
      this.#resting = true;
      const ms = Math.min(longestRestMs, again, soon ?? Infinity);
      await this.#ear.sleep(ms, this.#stop.signal).catch(() => {});
      if (this.#ear.rung) this.#trail.wholeNext();
    } finally {
      this.#watching = this.#resting = false;
    }
  }

  #learn(done: number, busy: number): void {
    const { most } = this.#settings;
    if (busy > togetherMs) this.#size = Math.max(1, this.#size >> 1);
    else if (done === this.#size && busy < togetherMs / 2) this.#size = Math.min(most, this.#size * 2);
  }

  /** Not before they are committed. */
  #tell(ended: readonly Told[]): void {
    for (const { job, waitedMs, durationMs } of ended)
      emit("holdfast:queue:done", () => ({
        queue: this.#settings.queue,
        job: job.id,
        attempt: job.failures + 1,
        waitedMs,
        durationMs,
      }));
  }

  /** Apart from the handlers' transactions, which would keep what is due from others. 0: there is some now. */
  async #due(idle: boolean): Promise<number | undefined> {
    if (this.#asking && !idle) return this.#asking;
    if (!idle && performance.now() - this.#dueAt < dueMs) return undefined;
    await this.#asking?.catch(() => {});
    this.#dueAt = performance.now();
    if (idle) this.#grouped = false;
    const { after } = this.#trail;
    const ask = async () => {
      const { soon, moment } = await this.#batcher.ask((connection, how) =>
        this.#batcher.store.transactional.tend(
          connection,
          this.#settings.number,
          { after, whole: idle },
          how,
        ),
      );
      this.#trail.moved(moment);
      return soon;
    };
    this.#asking = ask().finally(() => (this.#asking = undefined));
    return this.#asking;
  }

  /** Its transaction was not committed. Whether it counts as an attempt of this job, which was alone in it. */
  #isToBlame({ id }: ClaimedJob, error: unknown): boolean {
    if (classify(this.#batcher.context.database, error) !== "lost") return true;
    // A server that restarts is nobody's fault. A job that ends its own connection, each time, is to come to an end.
    const count = this.#losses.job === id ? this.#losses.count + 1 : 1;
    this.#losses = { job: id, count };
    return count >= mostLosses;
  }

  /** Whether its savepoint is still there: a rollback takes it away. */
  async #one(
    scope: Scope<unknown, Connection>,
    tx: unknown,
    job: ClaimedJob,
    began: BegunJob | undefined,
  ): Promise<boolean> {
    try {
      const { id, failures, priority, key, group, at } = job;
      const read = this.#settings.read(job.payload);
      const payload = read instanceof Promise ? await read : read;
      const attempt = failures + 1;
      const { queue } = this.#settings;
      const given = { id, payload, attempt, priority, key, group, at: new Date(at) };
      await traced(
        "holdfast:job",
        () => ({ queue, job: id, attempt, transactional: true }),
        () => this.#handler(given, tx as never) as Promise<unknown>,
      );
      return true;
    } catch (error) {
      if (await this.#isOurs(scope, error)) throw error;
      await this.#putBack(scope, job, error, began && timesOf(job, began));
      return false;
    }
  }

  /**
   * What a handler throws is its own failure, also if it talks to others and one of them hung up. Unless the transaction itself is
   * over: then all of it is run again, and the job is taken again, too.
   */
  async #isOurs(scope: Scope<unknown, Connection>, error: unknown): Promise<boolean> {
    const failure = classify(this.#batcher.context.database, error, false);
    if (failure === "deadlock" || failure === "serialization") return true;
    return scope.work(({ connection }) => Promise.resolve(connection.lost.aborted)).catch(() => true);
  }

  /** Its handler did not fail, but its transaction did, for example by a constraint that is checked at COMMIT. */
  async #failAlone(last: ClaimedJob, error: unknown): Promise<void> {
    await this.#batcher.instance.transaction({}, async (tx) => {
      const scope = scopeOf(tx, "queue");
      const { number } = this.#settings;
      const job = await scope.work(({ connection }) =>
        this.#batcher.store.transactional.takeOne(connection, number, last, { savepoint }, inTransaction),
      );
      if (job) await this.#putBack(scope, job, error);
    });
  }

  async #putBack(
    scope: Scope<unknown, Connection>,
    job: ClaimedJob,
    error: unknown,
    times?: Times,
  ): Promise<void> {
    const { number, queue, attempts, again: backoff } = this.#settings;
    const failures = job.failures + 1;
    const again = failures >= attempts ? undefined : backoff(failures, error);
    await scope.work(async ({ connection }) => {
      await this.#batcher.context.database.engine.savepoint(connection, savepoint, "rollback");
      const failure = { error: words(error), again };
      await this.#batcher.store.transactional.settle(connection, number, [job], failure, inTransaction);
    });
    emit("holdfast:queue:failed", () => ({ queue, job: job.id, attempt: failures, ...times, again, error }));
  }
}
