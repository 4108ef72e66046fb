/** The leases of a worker, as long as the database may still have them, and what is known of their jobs. */
import type { Connection } from "../../seam/database.ts";
import { JobLostError } from "../errors.ts";
import type { JobBatch } from "../job.ts";
import type { How, JobClaim, Leased } from "../store.ts";
import { stops } from "./lifetime.ts";
import type { WorkerParts } from "./parts.ts";

/** How often, and for how long, leases are looked for whose claim was not answered: the server may still be at it. */
const astrayMs = 1000;
const astrayForMs = 60_000;

export class Leases {
  readonly #worker: WorkerParts<unknown>;
  /** Leases that the database may still have. */
  readonly #known = new Set<number>();
  /** Of those of which jobs have not ended, or been lost. */
  readonly #batches = new Set<JobBatch>();
  /** Until when to look for others, and when next. */
  #astray = { until: 0, at: 0 };

  constructor(worker: WorkerParts<unknown>) {
    this.#worker = worker;
  }

  /** `id`: the number with which it was claimed. If the worker has another one by now, others have what it had. */
  open(
    id: number,
    { lease, counted, jobs }: Extract<JobClaim, { readonly lease: number }>,
    asked: number,
  ): JobBatch {
    const { member, settings } = this.#worker;
    if (id === member.id) this.#known.add(lease);
    const batch: JobBatch = {
      lease,
      counted,
      asked,
      size: jobs.length,
      left: jobs.length,
      began: performance.now(),
      lost: id === member.id ? undefined : new JobLostError(settings.queue, 0),
      running: new Set(),
    };
    this.#batches.add(batch);
    return batch;
  }

  /** All of its jobs have ended. */
  ended(batch: JobBatch): void {
    this.#batches.delete(batch);
  }

  /** Those of which nothing is left, though none of their jobs was the last to end: some were given back. */
  endEmpty(): readonly number[] {
    const empty = [...this.#batches].filter(({ left }) => left === 0);
    for (const batch of empty) this.#batches.delete(batch);
    return empty.map(({ lease }) => lease);
  }

  /** The database does not have them any more. */
  forget(leases: readonly number[]): void {
    for (const lease of leases) this.#known.delete(lease);
  }

  /** Others have them: their jobs are told. */
  drop(leases: ReadonlySet<number>): void {
    for (const batch of this.#batches) if (leases.has(batch.lease)) this.#drop(batch);
  }

  dropAll(): void {
    for (const batch of this.#batches) this.#drop(batch);
  }

  #drop(batch: JobBatch): void {
    const { queue } = this.#worker.settings;
    batch.lost = new JobLostError(queue, 0);
    this.#known.delete(batch.lease);
    this.#batches.delete(batch);
    for (const job of batch.running) job.abort(new JobLostError(queue, job.id));
  }

  /** Tells handlers to end. */
  abort(): void {
    const { queue } = this.#worker.settings;
    for (const batch of this.#batches) for (const job of batch.running) job.abort(stops(queue));
  }

  /** A claim was not answered, and may have been granted. */
  unanswered(): void {
    this.#astray = { until: performance.now() + astrayForMs, at: 0 };
  }

  get mayBeAstray(): boolean {
    return performance.now() < this.#astray.until;
  }

  /** It is time to look for them. */
  get lookForAstray(): boolean {
    return performance.now() >= this.#astray.at && this.mayBeAstray;
  }

  /**
   * A claim may have been granted although its answer was lost: this worker lives, so nobody else would look for it. No
   * claim is under way meanwhile, or its lease would be taken for one of those.
   */
  async returnAstray(): Promise<void> {
    this.#astray.at = performance.now() + astrayMs;
    const { batcher, member, settings } = this.#worker;
    const { id } = member;
    if (id === undefined) return;
    // As of now: if the worker is lost while it waits for a connection, it knows of none, and others find what it had.
    const known = [...this.#known];
    try {
      const jobs = await batcher.keep((connection, how) =>
        batcher.store.workers.astray(connection, id, known, how),
      );
      if (jobs.length > 0 && id === member.id) await this.giveBack(id, jobs);
    } catch (error) {
      settings.trouble(error);
    }
  }

  async giveBack(id: number, jobs: readonly Leased[]): Promise<void> {
    const { batcher, settings } = this.#worker;
    const { store, notifier } = batcher;
    const { queue, trouble } = settings;
    const giving = (connection: Connection, how: How) => store.giveBack(connection, id, jobs, how);
    await batcher.keep(giving, queue, true);
    notifier.notify(queue);
    await batcher.ask(async (connection) => store.notify?.(connection, queue)).catch(trouble);
  }
}
