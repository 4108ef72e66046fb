/** Short jobs, each in a transaction that its claim is a part of: a crash rolls both back, and there is no lease. */
import type { Ear } from "../core/bell.ts";
import type { Connection } from "../core/database.ts";
import { passes } from "../core/errand.ts";
import { emit } from "../core/events.ts";
import type { ClaimedJob } from "../core/queues.ts";
import { type Scope, scopeOf } from "../core/scope.ts";
import { sleep } from "../core/wait.ts";
import type { Desk } from "./desk.ts";
import { words } from "./errors.ts";
import type { Worker, WorkerSettings } from "./worker.ts";

export interface TransactionalJob<P> {
  readonly id: number;
  readonly payload: P;
  readonly attempt: number;
  readonly priority: number;
  readonly key: string | undefined;
  readonly group: string | undefined;
  readonly at: Date;
}

const savepoint = "holdfast_job";
/** One transaction has several jobs while they take no longer than this together: a BEGIN and a COMMIT less for each. */
const togetherMs = 20;

export class TransactionalWorker<P> implements Worker {
  readonly #desk: Desk;
  readonly #settings: Omit<WorkerSettings<P>, "handler">;
  readonly #handler: (job: TransactionalJob<P>, tx: never) => unknown;
  readonly #stop = new AbortController();
  readonly done: Promise<void>;

  constructor(
    desk: Desk,
    settings: Omit<WorkerSettings<P>, "handler">,
    handler: (job: TransactionalJob<P>, tx: never) => unknown,
    signal: AbortSignal | undefined,
  ) {
    this.#desk = desk;
    this.#settings = settings;
    this.#handler = handler;
    const onAbort = () => this.#stop.abort();
    signal?.addEventListener("abort", onAbort, { once: true });
    if (signal?.aborted) onAbort();
    this.done = this.#run().finally(() => signal?.removeEventListener("abort", onAbort));
  }

  async stop(): Promise<void> {
    this.#stop.abort();
    await this.done;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }

  async #run(): Promise<void> {
    const { bell } = this.#desk;
    const { queue, concurrency } = this.#settings;
    const silence = bell.listen();
    const ears = Array.from({ length: concurrency }, () => bell.ear(queue));
    try {
      await Promise.all(ears.map((ear) => this.#loop(ear)));
    } finally {
      silence();
      for (const ear of ears) bell.forget(queue, ear);
    }
  }

  async #loop(ear: Ear): Promise<void> {
    const { signal } = this.#stop;
    const { pollMs, most, trouble } = this.#settings;
    let pause = 100;
    /** So many more alone, after a batch that could not be committed: it may be the fault of one of them. */
    let alone = 0;
    while (!signal.aborted) {
      ear.rung = false;
      const batch = alone > 0 ? 1 : most;
      alone = Math.max(0, alone - 1);
      let last: ClaimedJob | undefined;
      try {
        const done = await this.#desk.instance.transaction({}, async (tx) => {
          const scope = scopeOf(tx, "queue");
          const until = performance.now() + togetherMs;
          let count = 0;
          let saved = false;
          for (; count < batch && !signal.aborted && (count === 0 || performance.now() < until); count++) {
            const job = await this.#take(scope, saved);
            if (!job) break;
            last = job;
            saved = await this.#one(scope, tx, job);
          }
          return count;
        });
        pause = 100;
        if (done === 0) await ear.sleep(pollMs, signal).catch(() => {});
      } catch (error) {
        trouble(error);
        if (last && !passes(this.#desk.home.database, error)) {
          if (batch > 1) alone = batch;
          else await this.#failAlone(last, error).catch(trouble);
        }
        await sleep(pause, signal).catch(() => {});
        pause = Math.min(pause * 2, 5000);
      }
    }
  }

  #take(scope: Scope<unknown, Connection>, next: boolean, id?: number): Promise<ClaimedJob | undefined> {
    const { number } = this.#settings;
    return scope.work(({ connection }) => this.#desk.store.take(connection, number, { savepoint, next, id }));
  }

  /** Whether its savepoint is still there: a rollback takes it away. */
  async #one(scope: Scope<unknown, Connection>, tx: unknown, job: ClaimedJob): Promise<boolean> {
    try {
      const { id, failures, priority, key, group, at } = job;
      const payload = this.#settings.read(job.payload);
      const attempt = failures + 1;
      await this.#handler({ id, payload, attempt, priority, key, group, at: new Date(at) }, tx as never);
      return true;
    } catch (error) {
      // The whole transaction may be run again: then the job is claimed again, too.
      if (passes(this.#desk.home.database, error)) throw error;
      await this.#putBack(scope, job, error);
      return false;
    }
  }

  /** Its handler did not fail, but its transaction did, for example by a constraint that is checked at COMMIT. */
  async #failAlone({ id }: ClaimedJob, error: unknown): Promise<void> {
    await this.#desk.instance.transaction({}, async (tx) => {
      const scope = scopeOf(tx, "queue");
      const job = await this.#take(scope, false, id);
      if (job) await this.#putBack(scope, job, error);
    });
  }

  async #putBack(scope: Scope<unknown, Connection>, job: ClaimedJob, error: unknown): Promise<void> {
    const { number, queue, attempts, again: backoff } = this.#settings;
    const failures = job.failures + 1;
    const again = failures >= attempts ? undefined : backoff(failures, error);
    await scope.work(async ({ connection }) => {
      await this.#desk.home.database.engine.savepoint(connection, savepoint, "rollback");
      await this.#desk.store.putBack(connection, number, job, { error: words(error), again });
    });
    emit("holdfast:queue:failed", () => ({ queue, job: job.id, attempt: failures, again, error }));
  }
}
