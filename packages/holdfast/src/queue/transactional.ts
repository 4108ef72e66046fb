/** Short jobs, each in a transaction that its claim is a part of: a crash rolls both back, and there is no lease. */
import type { Ear } from "../core/bell.ts";
import type { Connection } from "../core/database.ts";
import { emit } from "../core/events.ts";
import type { ClaimedJob } from "../core/queues.ts";
import { type Scope, scopeOf } from "../core/scope.ts";
import { sleep } from "../core/wait.ts";
import type { Desk } from "./desk.ts";
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
    const { pollMs, trouble } = this.#settings;
    let pause = 100;
    while (!signal.aborted) {
      ear.rung = false;
      try {
        const found = await this.#desk.instance.transaction({}, (tx) => this.#one(tx));
        pause = 100;
        if (found) continue;
        await ear.sleep(pollMs, signal).catch(() => {});
      } catch (error) {
        trouble(error);
        await sleep(pause, signal).catch(() => {});
        pause = Math.min(pause * 2, 5000);
      }
    }
  }

  /** Whether there was one. */
  async #one(tx: unknown): Promise<boolean> {
    const scope = scopeOf(tx, "queue");
    const { number } = this.#settings;
    const { store } = this.#desk;
    const job = await scope.work(({ connection }) => store.take(connection, number, savepoint));
    if (!job) return false;
    try {
      const { id, failures, priority, key, group, at } = job;
      const payload = this.#settings.read(job.payload);
      const attempt = failures + 1;
      await this.#handler({ id, payload, attempt, priority, key, group, at: new Date(at) }, tx as never);
    } catch (error) {
      // The whole transaction may be run again: then the job is claimed again, too.
      if (this.#desk.passing(error)) throw error;
      await this.#putBack(scope, job, error);
    }
    return true;
  }

  async #putBack(scope: Scope<unknown, Connection>, job: ClaimedJob, error: unknown): Promise<void> {
    const { number, queue, attempts, again: backoff } = this.#settings;
    const failures = job.failures + 1;
    const again = failures >= attempts ? undefined : backoff(failures, error);
    await scope.work(async ({ connection }) => {
      await this.#desk.home.database.engine.savepoint(connection, savepoint, "rollback");
      const text = error instanceof Error ? (error.stack ?? error.message) : String(error);
      await this.#desk.store.putBack(connection, number, job, {
        error: text.replaceAll("\0", "").slice(0, 4000),
        again,
      });
    });
    emit("holdfast:queue:failed", () => ({ queue, job: job.id, attempt: failures, again, error }));
  }
}
