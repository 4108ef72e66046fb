/** Short jobs, each in a transaction that its claim is a part of: a crash rolls both back, and there is no lease. */
import { SerializationError } from "../seam/errors.ts";
import { sleep } from "../waiting/wait.ts";
import type { QueueBatcher } from "./batcher.ts";
import type { TransactionalJob, Worker } from "./types.ts";
import { Lifetime, stops } from "./worker/lifetime.ts";
import { Membership } from "./worker/membership.ts";
import { tellDone } from "./worker/outcome.ts";
import { type WorkerSettings, longestRestMs } from "./worker/settings.ts";
import { HandlerFailure, JobTransactions, type Turn, togetherMs } from "./worker/transactions.ts";

/** What is due is looked for this often while there are other jobs. */
const dueMs = 100;
/** Pauses after a transaction that failed grow to this. */
const longestPauseMs = 5000;

export class TransactionalWorker<P> implements Worker {
  readonly done: Promise<void>;
  readonly #batcher: QueueBatcher;
  readonly #settings: WorkerSettings<P>;
  readonly #life = new Lifetime();
  readonly #hard = new AbortController();
  readonly #member: Membership;
  readonly #transactions: JobTransactions<P>;
  /** As many as were done in time: behind a slow one, the others of its transaction would wait. */
  #size = 1;
  #dueAt = 0;
  #asking: Promise<number | undefined> | undefined;
  /** One of those who have nothing to do watches for jobs, and the others wait until there is something for them. */
  #watching = false;
  #waiting: (() => void)[] = [];
  /** Jobs of groups have ended since the groups were looked at. */
  #grouped = false;

  constructor(
    batcher: QueueBatcher,
    settings: WorkerSettings<P>,
    handler: (job: TransactionalJob<P>, tx: never) => unknown,
    signal: AbortSignal | undefined,
  ) {
    this.#batcher = batcher;
    this.#settings = settings;
    const life = this.#life;
    const member = (this.#member = new Membership(batcher, settings, life.stopping, () => this.#lose()));
    const taken = (jobs: number, most: number) => this.#taken(jobs, most);
    const worker = { batcher, settings, life, member, hard: this.#hard.signal, taken };
    this.#transactions = new JobTransactions(worker, handler);
    this.done = life.done;
    life.begin(() => this.#run(), signal);
  }

  /** What is not committed by the time at which it leaves is rolled back, or found to be committed by whoever looks. */
  stop(options?: { readonly patienceMs?: number }): Promise<void> {
    return this.#life.stop(options);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }

  /** It has no leases, so there is nothing to lose but its place among the workers that are counted. */
  async #lose(): Promise<void> {
    this.#member.id = undefined;
    await this.#member.enlist();
  }

  async #run(): Promise<void> {
    const life = this.#life;
    const { queue, concurrency, trouble } = this.#settings;
    this.#member.join();
    // Whoever throws where trouble is told has been told.
    const enlisted = this.#member.enlist().catch(() => {});
    const onStop = () => {
      life.later(life.patienceMs, () => this.#hard.abort(stops(queue)));
      for (const go of this.#waiting.splice(0)) go();
    };
    life.stopping.addEventListener("abort", onStop, { once: true });
    try {
      // The first wakes the second, if there is more to do, and so on.
      const others = Array.from({ length: concurrency - 1 }, () => this.#wait().then(() => this.#loop()));
      await Promise.all([this.#loop(), ...others]);
    } finally {
      this.#member.deafen();
      await enlisted;
      await this.#member.retire().catch(trouble);
      await this.#member.part();
    }
  }

  #wait(): Promise<void> {
    if (this.#life.stopping.aborted) return Promise.resolve();
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  async #loop(): Promise<void> {
    const signal = this.#life.stopping;
    const { queue, trouble } = this.#settings;
    let pause = 100;
    /** So many more alone, after a batch that could not be committed: it may be the fault of one of them. */
    let alone = 0;
    while (!signal.aborted) {
      this.#member.ear.rung = false;
      const batch = alone > 0 ? 1 : this.#size;
      alone = Math.max(0, alone - 1);
      const turn: Turn = { last: undefined, ended: [], busy: 0, whole: false, grouped: false };
      try {
        await this.#due(false);
        const done = await this.#transactions.run(batch, turn);
        this.#learn(done, turn.busy);
        if (turn.grouped) this.#grouped = true;
        // Not before they are committed.
        for (const { job, times } of turn.ended) tellDone(queue, job, times);
        pause = 100;
        if (done === 0 && !signal.aborted) await this.#rest(turn.whole);
      } catch (error) {
        // Given up, and not its fault.
        if (this.#hard.signal.aborted) return;
        const { last } = turn;
        if (last && error instanceof HandlerFailure) {
          await this.#transactions.failAlone(last, error).catch(trouble);
          continue;
        }
        // Workers that want the same jobs refuse each other in serializable transactions. It is trouble once the pauses grow no longer.
        const contended = error instanceof SerializationError && pause < longestPauseMs;
        if (!contended) trouble(error);
        if (last && batch > 1) alone = batch;
        else if (last && !contended && this.#transactions.isToBlame(last, error))
          await this.#transactions.failAlone(last, error).catch(trouble);
        await sleep(pause, signal).catch(() => {});
        pause = Math.min(pause * 2, longestPauseMs);
      }
    }
  }

  /** There may be more than these; and somebody has to watch while they run. */
  #taken(jobs: number, most: number): void {
    if (jobs === most || (jobs > 0 && !this.#watching)) this.#waiting.shift()?.();
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
      const again = whole ? Infinity : this.#member.trail.wholeNext();
      if (again <= 0) return;
      const soon = await this.#due(true);
      if (soon === 0) return;
      await this.#member.rest(Math.min(longestRestMs, again, soon ?? Infinity), true);
    } finally {
      this.#watching = false;
    }
  }

  #learn(done: number, busy: number): void {
    const { most } = this.#settings;
    if (busy > togetherMs) this.#size = Math.max(1, this.#size >> 1);
    else if (done === this.#size && busy < togetherMs / 2) this.#size = Math.min(most, this.#size * 2);
  }

  /** Apart from the handlers' transactions, which would keep what is due from others. 0: there is some now. */
  async #due(idle: boolean): Promise<number | undefined> {
    if (this.#asking && !idle) return this.#asking;
    if (!idle && performance.now() - this.#dueAt < dueMs) return undefined;
    await this.#asking?.catch(() => {});
    this.#dueAt = performance.now();
    if (idle) this.#grouped = false;
    this.#asking = this.#tend(idle).finally(() => (this.#asking = undefined));
    return this.#asking;
  }

  async #tend(whole: boolean): Promise<number | undefined> {
    const { trail } = this.#member;
    const what = { after: trail.after, whole };
    const { soon, moment } = await this.#batcher.ask((connection, how) =>
      this.#batcher.store.transactional.tend(connection, this.#settings.number, what, how),
    );
    trail.moved(moment);
    return soon;
  }
}
