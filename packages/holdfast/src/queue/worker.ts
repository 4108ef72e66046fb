/** Claims jobs, runs their handler, and says how they ended. */
import type { Ear } from "../batch/notifier.ts";
import type { Connection } from "../seam/database.ts";
import { classify } from "../seam/failure.ts";
import { Pauses, rolledBack } from "../transaction/retry.ts";
import { emit, heard, traced } from "../events/events.ts";
import { sleep } from "../waiting/wait.ts";
import type { QueueBatcher } from "./batcher.ts";
import { JobLostError, words } from "./errors.ts";
import { type JobBatch, type Job, JobOf, type JobKeeper } from "./job.ts";
import type { Member } from "./rounds.ts";
import type { ClaimedJob, EndedJobs, How, Leased, JobPlace } from "./store.ts";
import { Trail } from "./trail.ts";

export interface WorkOptions {
  /** Handlers at the same time, in this process. Default 10. */
  readonly concurrency?: number;
  /**
   * Jobs that are claimed at a time, at the most. Default 500. It begins with `concurrency`, and grows only while jobs
   * are so short that a batch is done in an instant: slow jobs are left to others. Of transactional jobs: how many share
   * a transaction, if they are done within 20 ms. Default 25.
   */
  readonly batch?: number;
  /** Ends the worker, as `stop()` does. */
  readonly signal?: AbortSignal;
  /** How often it looks for jobs when nobody tells it of any. Default 1,000 ms. */
  readonly pollMs?: number;
  /**
   * A worker that has given no sign of life for so long has its jobs taken away. Default 30,000 ms; a process that died
   * is found within about two seconds, where sessions can be kept.
   */
  readonly ttlMs?: number;
  /** What went wrong in the worker itself, not in a handler: it goes on. Default: a warning on stderr. */
  readonly onTrouble?: (error: unknown) => void;
}

export interface Worker extends AsyncDisposable {
  /** Resolves when the worker has ended. */
  readonly done: Promise<void>;
  /**
   * Lets running handlers finish, gives back the rest, and ends. After `patienceMs` (30 s) the signals of handlers that still
   * run are aborted. 5 s later it has ended, whatever they do and whether or not there is a database: what could not be
   * written down is found by others, and runs again.
   */
  stop(options?: { readonly patienceMs?: number }): Promise<void>;
}

/** After the signals of handlers were aborted. */
export const leaveMs = 5000;

/** Of what is called in a transaction that somebody else has begun. */
export const inTransaction: How = { free: false, waitMs: 5000 };

/** A batch that takes less is too small, one that takes more too large. */
const shortMs = 50;
const longMs = 200;
/** What has ended is written down at once if its batch is done, and else after so long. */
const partMs = 20;
/** How often, and for how long, leases are looked for whose claim was not answered: the server may still be at it. */
const astrayMs = 1000;
const astrayForMs = 60_000;
/** How soon it looks again, at first and at the most, for room that nobody may tell it of. */
const roomMs = { least: 50, most: 1000 };
/** The text of a claim that is worth a round trip, and no burden to anybody's memory. */
const fairLength = 8 * 1024 * 1024;

interface Item {
  readonly batch: JobBatch;
  readonly place: number;
  readonly job: ClaimedJob;
  /** When its handler was called, if somebody wants to know. */
  began?: BegunJob;
}

/** By the clock of the day, and by the one that never jumps. */
export interface BegunJob {
  readonly date: number;
  readonly ms: number;
}

export function beginning(): BegunJob | undefined {
  if (!heard("holdfast:queue:done") && !heard("holdfast:queue:failed")) return undefined;
  return { date: Date.now(), ms: performance.now() };
}

export function timesOf(job: ClaimedJob, began: BegunJob): { waitedMs: number; durationMs: number } {
  return { waitedMs: Math.max(0, began.date - job.at), durationMs: performance.now() - began.ms };
}

export interface WorkerSettings<P> {
  readonly queue: string;
  readonly number: number;
  readonly concurrency: number;
  readonly most: number;
  readonly pollMs: number;
  readonly ttlMs: number;
  readonly attempts: number;
  /** Jobs of it are counted: others may wait for room. */
  readonly limited: boolean;
  /** A promise, if the schema answers later. */
  readonly read: (payload: unknown) => P | Promise<P>;
  readonly again: (failures: number, error: unknown) => number | undefined;
  readonly handler: (job: Job<P>) => unknown;
  readonly trouble: (error: unknown) => void;
}

export class QueueWorker<P> implements Worker, JobKeeper, Member {
  readonly #batcher: QueueBatcher;
  readonly #settings: WorkerSettings<P>;
  readonly done: Promise<void>;
  readonly #ended = Promise.withResolvers<void>();
  readonly #ear: Ear;
  #id: number | undefined;
  #buffer: Item[] = [];
  #next = 0;
  #running = 0;
  #size: number;
  #batches = new Set<JobBatch>();
  #results: EndedJobs[] = [];
  #whole: number[] = [];
  #flushing: Promise<void> | undefined;
  #partTimer: NodeJS.Timeout | undefined;
  #soonCalled = false;
  #stopping: { readonly patienceMs: number } | undefined;
  /** Nobody waits for it any more. */
  #left = false;
  #leaving: NodeJS.Timeout | undefined;
  readonly #stop = new AbortController();
  #wake: (() => void) | undefined;
  /** Leases that the database may still have. */
  readonly #leases = new Set<number>();
  /** Until when to look for others, and when next. */
  #astray = { until: 0, at: 0 };
  readonly #trail = new Trail();
  /** So many jobs at the most, as they are large. */
  #bearable = Infinity;
  /** What was claimed and broken off when the worker was told to stop: given back, as if it had not begun. */
  readonly #brokenOff: Item[] = [];
  #impatient = false;
  #resting = false;
  /** Jobs that claims under way have asked for. */
  #asking = 0;
  /** The last claim brought all that it asked for, and jobs are short. */
  #plenty = false;
  #onward: string | undefined;
  /** How often in a row there was no room. */
  #full = 0;
  #part: (() => Promise<void>) | undefined;
  lock: string | undefined;
  #losing: Promise<void> | undefined;

  constructor(batcher: QueueBatcher, settings: WorkerSettings<P>, signal: AbortSignal | undefined) {
    this.#batcher = batcher;
    this.#settings = settings;
    this.#size = Math.min(settings.concurrency, settings.most);
    this.done = this.#ended.promise;
    this.#ear = batcher.notifier.ear(settings.queue);
    const onAbort = () => void this.stop();
    signal?.addEventListener("abort", onAbort, { once: true });
    void this.#run()
      .then(this.#ended.resolve, this.#ended.reject)
      .finally(() => {
        clearTimeout(this.#leaving);
        signal?.removeEventListener("abort", onAbort);
      });
    if (signal?.aborted) onAbort();
  }

  get name(): string {
    return this.#settings.queue;
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

  complete(connection: Connection, job: Leased): Promise<boolean> {
    return this.#batcher.store.completion.complete(connection, this.#id ?? 0, job, inTransaction);
  }

  async stop({ patienceMs = 30_000 }: { readonly patienceMs?: number } = {}): Promise<void> {
    if (!this.#stopping) {
      this.#stopping = { patienceMs };
      this.#leaving = setTimeout(() => this.#leave(), patienceMs + leaveMs);
      this.#stop.abort();
      this.#wake?.();
    }
    await this.done;
  }

  /** Gives no more signs of life: others find what it had. */
  #leave(): void {
    this.#left = true;
    void this.#part?.();
    const running = this.#running;
    for (const batch of this.#batches) this.#drop(batch);
    const { queue, trouble } = this.#settings;
    trouble(
      new Error(
        `The worker of queue ${JSON.stringify(queue)} was stopped and left without having come to an end (handlers that still run: ${running}): ` +
          `what it had not written down runs again elsewhere`,
      ),
    );
    this.#ended.resolve();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }

  async #run(): Promise<void> {
    const silence = this.#batcher.notifier.listen();
    this.#part = this.#batcher.rounds.join(this);
    try {
      await this.#enlist();
      await this.#work();
    } finally {
      clearTimeout(this.#partTimer);
      silence();
      this.#batcher.notifier.forget(this.#settings.queue, this.#ear);
      if (!this.#left)
        await this.#retire().catch((error: unknown) => this.#left || this.#settings.trouble(error));
      await this.#part();
    }
  }

  async #work(): Promise<void> {
    const { signal } = this.#stop;
    const pauses = new Pauses(100, 5000);
    while (!signal.aborted) {
      if (performance.now() >= this.#astray.at && performance.now() < this.#astray.until)
        await this.#fetchAstray();
      if (this.#id === undefined) {
        // It was lost, and is being enlisted again.
        await (this.#losing ?? sleep(100, signal)).catch(() => {});
        continue;
      }
      if (this.#room <= 0) {
        await this.#until();
        continue;
      }
      // While there is plenty, the next batch is fetched before this one has come.
      if (this.#plenty) {
        void this.#claim().catch((error: unknown) => {
          this.#plenty = false;
          this.#settings.trouble(error);
        });
        continue;
      }
      try {
        const rest = await this.#claim();
        pauses.reset();
        if (rest && !signal.aborted) await this.#rest(rest);
      } catch (error) {
        this.#settings.trouble(error);
        await sleep(pauses.next(), signal).catch(() => {});
      }
    }
  }

  get #waiting(): number {
    return this.#buffer.length - this.#next;
  }

  /** Until there is less to do. */
  #until(): Promise<void> {
    return new Promise((resolve) => {
      this.#wake = () => {
        this.#wake = undefined;
        resolve();
      };
    });
  }

  async #rest({ ms, looked }: Rest): Promise<void> {
    this.#resting = looked;
    await this.#ear.sleep(ms, this.#stop.signal).catch(() => {});
    this.#resting = false;
    if (this.#ear.rung) this.#trail.wholeNext();
    this.#ear.rung = false;
  }

  /** Whether to rest, if there was nothing. */
  async #claim(): Promise<Rest | undefined> {
    const asked = this.#room;
    this.#asking += asked;
    try {
      return await this.#claimSome(asked);
    } finally {
      this.#asking -= asked;
      if (this.#room > 0) this.#wake?.();
    }
  }

  async #claimSome(asked: number): Promise<Rest | undefined> {
    const { store } = this.#batcher;
    const { number, concurrency } = this.#settings;
    const worker = this.#id;
    if (worker === undefined) return undefined;
    const look = this.#trail.look();
    this.#ear.rung = false;
    const claimed = await this.#batcher
      .ask((connection, how) => {
        const where = this.#trail;
        const call = { queue: number, worker, most: asked, where, whole: look.whole, onward: this.#onward };
        return store.claim(connection, call, how);
      })
      .catch((error: unknown) => {
        const failure = classify(this.#batcher.context.database, error);
        if (failure === undefined || !rolledBack.has(failure))
          this.#astray = { until: performance.now() + astrayForMs, at: 0 };
        // Whatever it was: not the same again for ever.
        this.#bearable = Math.max(1, asked >> 1);
        look.end(0);
        throw error;
      });
    look.end(claimed.lease === undefined ? 0 : claimed.jobs.length);
    this.#trail.moved(claimed.moment);
    // Two claims at once may overtake each other, which one handler at a time would see.
    this.#plenty =
      claimed.lease !== undefined &&
      claimed.jobs.length === asked &&
      this.#size > concurrency &&
      concurrency > 1;
    if (claimed.lease === undefined) {
      const { why, soon = Infinity } = claimed;
      if (why === "lost") {
        if (worker === this.#id) await this.lose();
        return undefined;
      }
      if (why === "large") {
        this.#bearable = Math.max(1, asked >> 1);
        return undefined;
      }
      this.#onward = claimed.onward ?? this.#onward;
      // Other processes tell when they have made room, but not if nobody hears it.
      if (why === "limit" || why === "full")
        return {
          ms: Math.min(roomMs.most, roomMs.least * 2 ** Math.min(this.#full++, 5), Math.max(1, soon)),
          looked: false,
        };
      this.#full = 0;
      // There may be some where nobody has looked.
      const again = why === "empty" && !look.whole ? this.#trail.wholeNext() : Infinity;
      if (again <= 0) return undefined;
      return { ms: Math.min(longestRestMs, again, Math.max(1, soon)), looked: true };
    }
    this.#onward = claimed.onward;
    this.#full = 0;
    const { lease, jobs, counted, length } = claimed;
    this.#bearable = Math.max(
      1,
      Math.min(2 * this.#bearable, Math.floor((fairLength * jobs.length) / length)),
    );
    if (worker === this.#id) this.#leases.add(lease);
    const batch: JobBatch = {
      lease,
      counted,
      asked,
      size: jobs.length,
      left: jobs.length,
      began: performance.now(),
      lost: worker === this.#id ? undefined : new JobLostError(this.#settings.queue, 0),
      running: new Set(),
    };
    this.#batches.add(batch);
    for (const [place, job] of jobs.entries()) {
      this.#buffer.push({ batch, place, job });
      this.#trail.found(job);
    }
    this.#fill();
    return undefined;
  }

  /**
   * A claim may have been granted although its answer was lost: this worker lives, so nobody else would look for it. No
   * claim is under way meanwhile, or its lease would be taken for one of those.
   */
  async #fetchAstray(): Promise<void> {
    while (this.#asking > 0 && !this.#left) await sleep(5);
    this.#astray.at = performance.now() + astrayMs;
    const { store } = this.#batcher;
    const worker = this.#id;
    if (worker === undefined) return;
    try {
      const jobs = await this.#batcher.ask((connection, how) =>
        store.workers.astray(connection, worker, [...this.#leases], how),
      );
      if (jobs.length > 0) await this.#giveBack(worker, jobs);
    } catch (error) {
      this.#settings.trouble(error);
    }
  }

  async #giveBack(worker: number, jobs: readonly Leased[]): Promise<void> {
    const { store, notifier } = this.#batcher;
    const { queue, trouble } = this.#settings;
    const giving = (connection: Connection, how: How) => store.giveBack(connection, worker, jobs, how);
    await this.#batcher.ask(giving, queue, true);
    notifier.notify(queue);
    await this.#batcher.ask(async (connection) => store.notify?.(connection, queue)).catch(trouble);
  }

  /** Larger batches of what is quickly done, smaller ones of what is not. */
  #learn({ began, asked, size }: JobBatch): void {
    const { concurrency, most } = this.#settings;
    const took = performance.now() - began;
    if (took < shortMs && size * 2 >= asked)
      this.#size = Math.min(most, this.#size * (took < shortMs / 5 ? 4 : 2));
    else if (took > longMs) this.#size = Math.max(Math.min(concurrency, most), Math.floor(this.#size / 2));
  }

  /**
   * How many to claim now. While jobs are slow, none that could not begin at once: another worker may have room. While
   * they are short, up to one batch and a half is on its way or waits.
   */
  get #room(): number {
    const { concurrency, most } = this.#settings;
    const coming = this.#waiting + this.#asking;
    const size = Math.min(this.#size, this.#bearable);
    if (size > concurrency) return coming >= size * 1.5 ? 0 : size;
    return Math.min(most, this.#bearable, concurrency - this.#running - coming);
  }

  #fill(): void {
    const { concurrency } = this.#settings;
    while (this.#running < concurrency && this.#next < this.#buffer.length && !this.#stop.signal.aborted)
      this.#start(this.#buffer[this.#next++] as Item);
    if (this.#next > 1000 && this.#next * 2 > this.#buffer.length) {
      this.#buffer = this.#buffer.slice(this.#next);
      this.#next = 0;
    }
    if (this.#wake && this.#room > 0) this.#wake();
  }

  #start(item: Item): void {
    const { batch, job, place } = item;
    if (batch.lost) {
      batch.left--;
      return;
    }
    this.#running++;
    let mine: JobOf<P> | undefined;
    const end = (error?: unknown, failed = false) => {
      if (mine) batch.running.delete(mine);
      if (mine?.marked && !batch.lost) void this.#confirm(item, failed, error);
      else if (failed && mine && this.#impatient && !batch.lost) {
        // It was told to end, and has.
        this.#brokenOff.push(item);
        this.#running--;
      } else {
        if (!batch.lost) this.#settle(item, failed ? this.#failure(item, error) : undefined);
        this.#release();
      }
    };
    const begin = (payload: P) => {
      // A schema that answers later may have taken too long.
      if (batch.lost) return undefined;
      mine = new JobOf(payload, job, batch, place, this);
      batch.running.add(mine);
      return this.#handle(mine, item);
    };
    try {
      const payload = this.#settings.read(job.payload);
      const answer = payload instanceof Promise ? payload.then(begin) : begin(payload);
      if (isPromise(answer))
        answer.then(
          () => end(),
          (error: unknown) => end(error, true),
        );
      else queueMicrotask(end);
    } catch (error) {
      queueMicrotask(() => end(error, true));
    }
  }

  #handle(mine: JobOf<P>, item: Item): unknown {
    const { handler, queue } = this.#settings;
    const began = beginning();
    if (began) item.began = began;
    return traced(
      "holdfast:job",
      () => ({ queue, job: mine.id, attempt: mine.attempt, transactional: false }),
      // Without anybody who traces, it is called as it is.
      () => handler(mine) as Promise<unknown>,
    );
  }

  #release(): void {
    this.#running--;
    this.#fill();
  }

  /** Of a job that was completed in a transaction: only the database knows whether that was committed. */
  async #confirm(item: Item, failed: boolean, error: unknown): Promise<void> {
    const { batch, place } = item;
    for (let pause = 50; !batch.lost && !this.#left; pause = Math.min(pause * 2, 5000)) {
      try {
        const committed = await this.#batcher.completed({ lease: batch.lease, place });
        const rolledBack = () =>
          this.#failure(
            item,
            failed ? error : new Error("it was completed in a transaction that was rolled back"),
          );
        if (!batch.lost) this.#settle(item, committed ? undefined : rolledBack(), true);
        break;
      } catch (trouble) {
        this.#settings.trouble(trouble);
        await sleep(pause);
      }
    }
    this.#release();
  }

  #settle({ batch, job, place, began }: Item, failure: EndedJobs["failure"], marked = false): void {
    if (!failure && began)
      emit("holdfast:queue:done", () => ({
        queue: this.#settings.queue,
        job: job.id,
        attempt: job.failures + 1,
        ...timesOf(job, began),
      }));
    this.#results.push({ lease: batch.lease, place, job, failure, marked, counted: batch.counted });
    batch.left--;
    if (batch.left === 0) {
      this.#learn(batch);
      this.#whole.push(batch.lease);
      this.#batches.delete(batch);
      this.#soon();
    } else this.#partTimer ??= setTimeout(() => void this.#flush(), partMs);
  }

  #failure({ job, began }: Item, error: unknown): NonNullable<EndedJobs["failure"]> {
    const failures = job.failures + 1;
    const again = failures >= this.#settings.attempts ? undefined : this.#settings.again(failures, error);
    emit("holdfast:queue:failed", () => ({
      queue: this.#settings.queue,
      job: job.id,
      attempt: failures,
      ...(began && timesOf(job, began)),
      again,
      error,
    }));
    return { error: words(error), again };
  }

  /** Those that end in the same turn are written down together. */
  #soon(): void {
    if (this.#soonCalled || this.#flushing) return;
    this.#soonCalled = true;
    setImmediate(() => {
      this.#soonCalled = false;
      void this.#flush();
    });
  }

  #flush(): Promise<void> {
    clearTimeout(this.#partTimer);
    this.#partTimer = undefined;
    if (this.#flushing) return this.#flushing;
    if (this.#results.length + this.#whole.length === 0) return Promise.resolve();
    const ended = this.#results;
    const whole = this.#whole;
    this.#results = [];
    this.#whole = [];
    const { number } = this.#settings;
    const worker = this.#id ?? 0;
    const write = async () => {
      for (const pauses = new Pauses(50, 5000); ;) {
        try {
          const ours = await this.#batcher.ask((connection, how) =>
            this.#batcher.store.finish(connection, { queue: number, worker, whole, ended }, how),
          );
          for (const lease of whole) this.#leases.delete(lease);
          // One that waits for its next attempt may be the first that is due.
          if (ended.some(({ failure }) => failure)) this.#batcher.notifier.notify(this.#settings.queue);
          // There is room again, here and for others.
          if (this.#settings.limited || ended.some(({ counted, job }) => counted && job.group !== undefined))
            void this.#batcher.tell(this.#settings.queue).catch(this.#settings.trouble);
          const gone = new Set(ended.map(({ lease }) => lease).filter((lease) => !ours.has(lease)));
          for (const batch of this.#batches) if (gone.has(batch.lease)) this.#drop(batch);
          return;
        } catch (error) {
          if (this.#left) return;
          this.#settings.trouble(error);
          // Written or not: a second time it changes nothing that is not ours, and finds what is gone gone.
          await sleep(pauses.next());
        }
      }
    };
    this.#flushing = write().finally(() => {
      this.#flushing = undefined;
      if (this.#whole.length > 0) this.#soon();
      else if (this.#results.length > 0) this.#partTimer ??= setTimeout(() => void this.#flush(), partMs);
    });
    return this.#flushing;
  }

  #drop(batch: JobBatch): void {
    batch.lost = new JobLostError(this.#settings.queue, 0);
    this.#leases.delete(batch.lease);
    this.#batches.delete(batch);
    for (const job of batch.running) job.abort(new JobLostError(this.#settings.queue, job.id));
  }

  async #enlist(): Promise<void> {
    for (const pauses = new Pauses(100, 5000); !this.#stop.signal.aborted;) {
      try {
        this.#id = await this.#batcher.rounds.enlist(this);
        return;
      } catch (error) {
        this.#settings.trouble(error);
        await sleep(pauses.next(), this.#stop.signal).catch(() => {});
      }
    }
  }

  /** Others have what was ours. */
  async lose(): Promise<void> {
    // Two may find out at the same time.
    this.#losing ??= this.#beginAnew().finally(() => (this.#losing = undefined));
    await this.#losing;
  }

  async #beginAnew(): Promise<void> {
    for (const batch of this.#batches) this.#drop(batch);
    const worker = this.#id;
    if (worker !== undefined) emit("holdfast:queue:lost", () => ({ queue: this.#settings.queue, worker }));
    this.#id = undefined;
    await this.#enlist();
  }

  async #retire(): Promise<void> {
    // What they bring is to be given back too.
    while (this.#asking > 0 && !this.#left) await sleep(5);
    const rest = this.#buffer.slice(this.#next);
    this.#buffer = [];
    this.#next = 0;
    // What has not been started does not have to wait for what runs.
    const unstarted = rest.filter(({ batch }) => !batch.lost);
    const patience = this.#stopping?.patienceMs ?? 30_000;
    const impatient = setTimeout(() => {
      this.#impatient = true;
      for (const batch of this.#batches)
        for (const job of batch.running)
          job.abort(new Error(`The worker of queue ${JSON.stringify(this.#settings.queue)} stops`));
    }, patience);
    try {
      if (performance.now() < this.#astray.until) await this.#fetchAstray();
      await this.#return(unstarted);
      while (this.#running > 0 && !this.#left) await sleep(5);
      if (this.#left) return;
      await this.#return(this.#brokenOff.filter(({ batch }) => !batch.lost));
      for (const batch of this.#batches)
        if (batch.left === 0) {
          this.#whole.push(batch.lease);
          this.#batches.delete(batch);
        }
      while (this.#results.length + this.#whole.length > 0 || this.#flushing) await this.#flush();
      const worker = this.#id;
      if (worker !== undefined)
        await this.#batcher.ask((connection, how) =>
          this.#batcher.store.workers.retire(connection, worker, how),
        );
    } finally {
      clearTimeout(impatient);
    }
  }

  async #return(items: readonly Item[]): Promise<void> {
    if (items.length === 0 || this.#id === undefined) return;
    try {
      await this.#giveBack(
        this.#id,
        items.map(({ batch, place }) => ({ lease: batch.lease, place })),
      );
      for (const { batch } of items) batch.left--;
    } catch (error) {
      // Their leases are left behind, and others find them.
      this.#settings.trouble(error);
    }
  }
}

/** For how long there is nothing to do, unless it is woken; `looked`: others look for it meanwhile. */
interface Rest {
  readonly ms: number;
  readonly looked: boolean;
}

/** Of a timer. */
const longestRestMs = 3_600_000;

function isPromise(value: unknown): value is PromiseLike<unknown> {
  return typeof (value as { then?: unknown } | null | undefined)?.then === "function";
}
