/** Short jobs, each in a transaction that its claim is a part of: a crash rolls both back, and there is no lease. */
import type { Ear } from "../core/bell.ts";
import type { Connection } from "../core/database.ts";
import { passes } from "../core/errand.ts";
import { emit, traced } from "../core/events.ts";
import type { ClaimedJob } from "../core/queues.ts";
import { type Scope, scopeOf } from "../core/scope.ts";
import { sleep } from "../core/wait.ts";
import type { Desk } from "./desk.ts";
import { words } from "./errors.ts";
import { type Began, type Worker, type WorkerSettings, beginning, leaveMs, timesOf } from "./worker.ts";

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

const savepoint = "holdfast_job";
/**
 * One transaction has several jobs while their handlers take no longer than this together: a BEGIN and a COMMIT less for
 * each. What goes by between them does not count: on a busy machine, one job in a transaction is what makes it busier.
 */
const togetherMs = 20;
/** What is due is looked for this often while there are other jobs. */
const dueMs = 100;

export class TransactionalWorker<P> implements Worker {
  readonly #desk: Desk;
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
    this.done = this.#ended.promise;
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
    const { number, pollMs, most, trouble } = this.#settings;
    const { store } = this.#desk;
    let pause = 100;
    /** So many more alone, after a batch that could not be committed: it may be the fault of one of them. */
    let alone = 0;
    while (!signal.aborted) {
      ear.rung = false;
      const batch = alone > 0 ? 1 : this.#size;
      alone = Math.max(0, alone - 1);
      let last: ClaimedJob | undefined;
      let ended: Told[] = [];
      try {
        await this.#due(false);
        let busy = 0;
        const done = await this.#desk.instance.transaction({ signal: this.#hard.signal }, async (tx) => {
          const scope = scopeOf(tx, "queue");
          busy = 0;
          ended = [];
          const jobs = await scope.work(({ connection }) =>
            store.take(connection, number, { savepoint, most: batch }),
          );
          const settled: ClaimedJob[] = [];
          let count = 0;
          let saved = true;
          for (const job of jobs) {
            if (count > 0) {
              if (signal.aborted || busy > togetherMs) break;
              const before = saved;
              await scope.work(({ connection }) => store.another(connection, savepoint, before));
            }
            count++;
            last = job;
            const start = beginning();
            const from = performance.now();
            saved = await this.#one(scope, tx, job, start);
            busy += performance.now() - from;
            if (saved) settled.push(job);
            if (saved && start) ended.push({ job, ...timesOf(job, start) });
          }
          if (settled.length > 0)
            await scope.work(({ connection }) => store.settle(connection, number, settled));
          return count;
        });
        if (busy > togetherMs) this.#size = Math.max(1, this.#size >> 1);
        else if (done === this.#size && busy < togetherMs / 2) this.#size = Math.min(most, this.#size * 2);
        // Not before they are committed.
        for (const { job, waitedMs, durationMs } of ended)
          emit("holdfast:queue:done", () => ({
            queue: this.#settings.queue,
            job: job.id,
            attempt: job.failures + 1,
            waitedMs,
            durationMs,
          }));
        pause = 100;
        if (done === 0) {
          const soon = await this.#due(true);
          if (soon !== 0) await ear.sleep(Math.min(pollMs, soon ?? pollMs), signal).catch(() => {});
        }
      } catch (error) {
        // Given up, and not its fault.
        if (this.#hard.signal.aborted) return;
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

  /** Apart from the handlers' transactions, which would keep what is due from others. 0: there is some now. */
  async #due(idle: boolean): Promise<number | undefined> {
    if (this.#asking) return this.#asking;
    if (!idle && performance.now() - this.#dueAt < dueMs) return undefined;
    this.#dueAt = performance.now();
    this.#asking = this.#desk
      .ask((connection) => this.#desk.store.due(connection, this.#settings.number))
      .finally(() => (this.#asking = undefined));
    return this.#asking;
  }

  /** Whether its savepoint is still there: a rollback takes it away. */
  async #one(
    scope: Scope<unknown, Connection>,
    tx: unknown,
    job: ClaimedJob,
    began: Began | undefined,
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
      // The whole transaction may be run again: then the job is claimed again, too.
      if (passes(this.#desk.home.database, error)) throw error;
      await this.#putBack(scope, job, error, began && timesOf(job, began));
      return false;
    }
  }

  /** Its handler did not fail, but its transaction did, for example by a constraint that is checked at COMMIT. */
  async #failAlone({ id }: ClaimedJob, error: unknown): Promise<void> {
    await this.#desk.instance.transaction({}, async (tx) => {
      const scope = scopeOf(tx, "queue");
      const { number } = this.#settings;
      const [job] = await scope.work(({ connection }) =>
        this.#desk.store.take(connection, number, { savepoint, most: 1, id }),
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
      await this.#desk.home.database.engine.savepoint(connection, savepoint, "rollback");
      await this.#desk.store.settle(connection, number, [job], { error: words(error), again });
    });
    emit("holdfast:queue:failed", () => ({ queue, job: job.id, attempt: failures, ...times, again, error }));
  }
}
