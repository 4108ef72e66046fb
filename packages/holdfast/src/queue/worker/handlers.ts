/** Jobs that were claimed, from then on until their handlers have ended: so many at a time, in the order in which they came. */
import type { Connection } from "../../seam/database.ts";
import { LockTimeoutError } from "../../seam/errors.ts";
import { traced } from "../../events/events.ts";
import { sleep } from "../../waiting/wait.ts";
import { Pauses } from "../../transaction/retry.ts";
import { JobUndecidedError, words } from "../errors.ts";
import { type Job, type JobBatch, type JobKeeper, JobOf } from "../job.ts";
import type { ClaimedJob, EndedJobs, Leased } from "../store.ts";
import type { ClaimSize } from "./claim-size.ts";
import type { Endings } from "./endings.ts";
import type { Leases } from "./leases.ts";
import { beginning, failedAttempt, tellDone, tellFailed, timesOf } from "./outcome.ts";
import type { BatchItem, WorkerParts } from "./parts.ts";
import { inTransaction } from "./settings.ts";

/** A transaction that completes a job and is open for so long after the end of its handler is worth telling. */
const undecidedMs = 5000;

/** What else of the worker they concern. */
interface HandlersContext<P> extends WorkerParts<P> {
  readonly leases: Leases;
  readonly endings: Endings;
  readonly size: ClaimSize;
  /** There may be room for more. */
  readonly freed: () => void;
}

export class Handlers<P> implements JobKeeper {
  readonly #worker: HandlersContext<P>;
  readonly #handler: (job: Job<P>) => unknown;
  #buffer: BatchItem[] = [];
  #next = 0;
  #running = 0;
  /** What was claimed and broken off when the worker was told to stop: given back, as if it had not begun. */
  readonly #brokenOff: BatchItem[] = [];
  #impatient = false;

  constructor(worker: HandlersContext<P>, handler: (job: Job<P>) => unknown) {
    this.#worker = worker;
    this.#handler = handler;
  }

  get name(): string {
    return this.#worker.settings.queue;
  }

  get context(): JobKeeper["context"] {
    return this.#worker.batcher.context;
  }

  complete(connection: Connection, job: Leased): Promise<boolean> {
    const { batcher, member } = this.#worker;
    return batcher.store.completion.complete(connection, member.id ?? 0, job, inTransaction);
  }

  get running(): number {
    return this.#running;
  }

  /** Those that have not been started. */
  get waiting(): number {
    return this.#buffer.length - this.#next;
  }

  add(batch: JobBatch, jobs: readonly ClaimedJob[]): void {
    for (const [place, job] of jobs.entries()) this.#buffer.push({ batch, place, job });
    this.#fill();
  }

  /** What waits is not started any more. */
  takeWaiting(): readonly BatchItem[] {
    const rest = this.#buffer.slice(this.#next);
    this.#buffer = [];
    this.#next = 0;
    return rest.filter(({ batch }) => !batch.lost);
  }

  /** What runs is told to end. */
  breakOff(): void {
    this.#impatient = true;
    this.#worker.leases.abort();
  }

  get brokenOff(): readonly BatchItem[] {
    return this.#brokenOff.filter(({ batch }) => !batch.lost);
  }

  #fill(): void {
    const { settings, life, freed } = this.#worker;
    const { concurrency } = settings;
    while (this.#running < concurrency && this.#next < this.#buffer.length && !life.stopping.aborted)
      this.#start(this.#buffer[this.#next++] as BatchItem);
    if (this.#next > 1000 && this.#next * 2 > this.#buffer.length) {
      this.#buffer = this.#buffer.slice(this.#next);
      this.#next = 0;
    }
    freed();
  }

  #start(item: BatchItem): void {
    const { batch, job, place } = item;
    if (batch.lost) {
      batch.left--;
      return;
    }
    this.#running++;
    let mine: JobOf<P> | undefined;
    const end = (error?: unknown, failed = false) => {
      mine?.end();
      if (mine) batch.running.delete(mine);
      if (batch.lost) this.#release();
      else if (mine?.marked) void this.#confirm(item, mine, failed, error);
      else if (failed && mine) this.#failed(item, error);
      else this.#ended(item, failed ? this.#failure(item, error) : undefined);
    };
    const begin = (payload: P) => {
      // A schema that answers later may have taken too long.
      if (batch.lost) return undefined;
      mine = new JobOf(payload, job, batch, place, this);
      batch.running.add(mine);
      return this.#handle(mine, item);
    };
    try {
      const payload = this.#worker.settings.read(job.payload);
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

  #handle(mine: JobOf<P>, item: BatchItem): unknown {
    const { queue } = this.#worker.settings;
    const handler = this.#handler;
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

  /**
   * Of a job that may have been completed in a transaction: only the database knows whether that was committed, and not before it is
   * over. A handler may end earlier, for example by a `Promise.race` with a timeout.
   */
  async #confirm(item: BatchItem, mine: JobOf<P>, failed: boolean, error: unknown): Promise<void> {
    const { batch, place } = item;
    const { batcher, settings, life } = this.#worker;
    const mark = { lease: batch.lease, place };
    const since = performance.now();
    for (const pauses = new Pauses(50, 5000); !batch.lost && !life.left; await sleep(pauses.next())) {
      if (mine.completing > 0) continue;
      try {
        const committed = (await batcher.completed(mark)) || (await batcher.settled(mark));
        if (batch.lost) break;
        if (committed) this.#ended(item, undefined, true);
        else if (failed) this.#failed(item, error);
        else {
          const undone = new Error("it was completed in a transaction that was rolled back");
          this.#ended(item, this.#failure(item, undone), true);
        }
        return;
      } catch (trouble) {
        if (!(trouble instanceof LockTimeoutError)) settings.trouble(trouble);
        else if (performance.now() - since > undecidedMs)
          settings.trouble(new JobUndecidedError(this.name, mine.id, trouble));
      }
    }
    this.#release();
  }

  /** Its handler has begun and failed. If the worker was told to stop, it was the worker that broke it off. */
  #failed(item: BatchItem, error: unknown): void {
    if (!this.#impatient) return this.#ended(item, this.#failure(item, error));
    this.#brokenOff.push(item);
    this.#running--;
  }

  #ended(item: BatchItem, failure: EndedJobs["failure"], marked = false): void {
    this.#settle(item, failure, marked);
    this.#release();
  }

  #settle({ batch, job, place, began }: BatchItem, failure: EndedJobs["failure"], marked: boolean): void {
    const { leases, endings, size } = this.#worker;
    if (!failure && began) tellDone(this.name, job, timesOf(job, began));
    batch.left--;
    const last = batch.left === 0;
    if (last) {
      size.learn(batch);
      leases.ended(batch);
    }
    endings.add({ lease: batch.lease, place, job, failure, marked, counted: batch.counted }, last);
  }

  #failure({ job, began }: BatchItem, error: unknown): NonNullable<EndedJobs["failure"]> {
    const attempt = failedAttempt(this.#worker.settings, job, error);
    tellFailed(this.name, job, attempt, began && timesOf(job, began));
    return { error: words(error), again: attempt.again };
  }
}

function isPromise(value: unknown): value is PromiseLike<unknown> {
  return typeof (value as { then?: unknown } | null | undefined)?.then === "function";
}
