import type { Connection } from "../seam/database.ts";
import { type InstanceContext, scopeNamed } from "../transaction/scope.ts";
import { JobLostError } from "./errors.ts";
import type { ClaimedJob, Leased } from "./store.ts";

/** What a worker has claimed together. Its number is the fence of each of its jobs. */
export interface JobBatch {
  readonly lease: number;
  readonly size: number;
  /** Its jobs are counted in their groups. */
  readonly counted: boolean;
  /** How many were asked for, and when they came. */
  readonly asked: number;
  readonly began: number;
  /** How many have not ended. */
  left: number;
  /** Why its jobs are not ours any more. */
  lost: Error | undefined;
  readonly running: Set<JobOf<unknown>>;
}

/** Who a job asks about itself. */
export interface JobKeeper {
  /** Of its queue. */
  readonly name: string;
  readonly context: InstanceContext<unknown, Connection>;
  complete(connection: Connection, job: Leased): Promise<boolean>;
}

/** A job in the hands of its handler. */
export interface Job<P> {
  readonly id: number;
  readonly payload: P;
  /** 1 on the first run, 2 on the first retry, … */
  readonly attempt: number;
  readonly priority: number;
  readonly key: string | undefined;
  readonly group: string | undefined;
  /** When it was enqueued. */
  readonly at: Date;
  /** Grows from claim to claim: whatever you write outside of the database can refuse an older one. */
  readonly fence: number;
  /** Aborts when the job is not this worker's any more, or the worker is told to stop and has no more patience. */
  readonly signal: AbortSignal;
  /**
   * Completes the job in your own transaction: what it writes and the end of the job are committed together, or not at
   * all. Throws `JobLostError` if the job is not this worker's any more.
   */
  complete(tx: unknown): Promise<void>;
}

export class JobOf<P> implements Job<P> {
  readonly payload: P;
  readonly #claimed: ClaimedJob;
  readonly #batch: JobBatch;
  readonly #place: number;
  readonly #keeper: JobKeeper;
  /** It may have been completed in a transaction, whose end is not known here. */
  marked = false;
  /** Calls of `complete` that are not answered yet. */
  completing = 0;
  #ended = false;
  /** Made when somebody asks for it: most handlers do not. */
  #abort: AbortController | undefined;
  #aborted: Error | undefined;

  constructor(payload: P, claimed: ClaimedJob, batch: JobBatch, place: number, keeper: JobKeeper) {
    this.payload = payload;
    this.#claimed = claimed;
    this.#batch = batch;
    this.#place = place;
    this.#keeper = keeper;
  }

  get id(): number {
    return this.#claimed.id;
  }
  get attempt(): number {
    return this.#claimed.failures + 1;
  }
  get priority(): number {
    return this.#claimed.priority;
  }
  get key(): string | undefined {
    return this.#claimed.key;
  }
  get group(): string | undefined {
    return this.#claimed.group;
  }
  get at(): Date {
    return new Date(this.#claimed.at);
  }
  get fence(): number {
    return this.#batch.lease;
  }

  get signal(): AbortSignal {
    if (!this.#abort) {
      this.#abort = new AbortController();
      if (this.#aborted) this.#abort.abort(this.#aborted);
    }
    return this.#abort.signal;
  }

  /** @internal */
  abort(reason: Error): void {
    this.#aborted ??= reason;
    this.#abort?.abort(reason);
  }

  /** @internal Its handler has ended: nobody completes it any more. */
  end(): void {
    this.#ended = true;
  }

  async complete(tx: unknown): Promise<void> {
    const scope = scopeNamed(this.#keeper.context, tx, "job.complete");
    const { lost } = this.#batch;
    if (lost) throw new JobLostError(this.#keeper.name, this.id, lost);
    if (this.#ended)
      throw new JobLostError(
        this.#keeper.name,
        this.id,
        undefined,
        "its handler has ended, and with it the job. End the transaction without committing, and await it in the handler",
      );
    this.marked = true;
    this.completing++;
    const ours = await scope
      .work(
        ({ connection }) =>
          this.#keeper.complete(connection, { lease: this.#batch.lease, place: this.#place }),
        undefined,
        [`job ${this.id} of queue ${this.#keeper.name}`],
      )
      .finally(() => this.completing--);
    if (ours) return;
    const error = new JobLostError(this.#keeper.name, this.id);
    this.abort(error);
    throw error;
  }
}
