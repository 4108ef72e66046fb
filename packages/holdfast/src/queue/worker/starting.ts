import { checkNames } from "../../input/options.ts";
import { Pauses } from "../../transaction/retry.ts";
import { detached } from "../../transaction/scope.ts";
import { Silence, within } from "../../waiting/interrupt.ts";
import { milliseconds, sleep } from "../../waiting/wait.ts";
import type { QueueBatcher } from "../batcher.ts";
import type { QueueSettings } from "../store.ts";
import type { Worker } from "../types.ts";
import { leaveMs } from "./lifetime.ts";

/** A worker, from the moment at which it is wanted: its queue has to be found first. */
export class Starting implements Worker {
  readonly done: Promise<void>;
  readonly #stop = new AbortController();
  readonly #worker: Promise<Worker | undefined>;

  constructor(
    batcher: QueueBatcher,
    name: string,
    settings: QueueSettings,
    trouble: (error: unknown) => void,
    signal: AbortSignal | undefined,
    start: (number: number, stop: AbortSignal | undefined) => Worker,
  ) {
    const forget = batcher.context.started.add("work", (patienceMs) => this.stop({ patienceMs }));
    const stops = signal ? AbortSignal.any([signal, this.#stop.signal]) : this.#stop.signal;
    const begin = async () => {
      for (const pauses = new Pauses(100, 5000); !stops.aborted;) {
        try {
          const number = await batcher.ask((connection, how) =>
            batcher.store.open(connection, name, settings, how),
          );
          return stops.aborted ? undefined : start(number, signal);
        } catch (error) {
          trouble(error);
          await sleep(pauses.next(), stops).catch(() => {});
        }
      }
      return undefined;
    };
    // Its jobs are no part of the transaction in whose body it may have been started.
    this.#worker = detached(batcher.context, begin);
    this.done = this.#worker.then((worker) => worker?.done).finally(forget);
  }

  async stop(options: { readonly patienceMs?: number } = {}): Promise<void> {
    checkNames("stop", options, new Set(["patienceMs"]));
    const { patienceMs = 30_000 } = options;
    milliseconds(patienceMs, "stop: patienceMs");
    this.#stop.abort();
    const begun = await within(leaveMs, this.#worker).catch((error: unknown) => {
      // Its queue is still being asked for, of a database that does not answer: it begins nothing any more.
      if (!(error instanceof Silence)) throw error;
    });
    await begun?.stop({ patienceMs });
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }
}

/** The workers of one queue that is in several databases. */
export class Crew implements Worker {
  readonly done: Promise<void>;
  readonly #workers: readonly Worker[];

  constructor(workers: readonly Worker[]) {
    this.#workers = workers;
    this.done = Promise.all(workers.map(({ done }) => done)).then(() => undefined);
  }

  async stop(options?: { readonly patienceMs?: number }): Promise<void> {
    await Promise.all(this.#workers.map((worker) => worker.stop(options)));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }
}
