/** From the start of a worker to its end, which comes in time, whatever its handlers and its database do. */

/** After the signals of handlers were aborted. */
export const leaveMs = 5000;

const usualPatienceMs = 30_000;

export class Lifetime {
  /** Resolves when the worker has ended, or is not waited for any more. */
  readonly done: Promise<void>;
  /** Aborts when it is told to stop. */
  readonly stopping: AbortSignal;
  readonly #stop = new AbortController();
  readonly #ended = Promise.withResolvers<void>();
  readonly #onLeave: (() => void) | undefined;
  readonly #timers: NodeJS.Timeout[] = [];
  #patienceMs: number | undefined;
  #left = false;

  /** `onLeave`: it was told to stop, and has not come to an end in time. */
  constructor(onLeave?: () => void) {
    this.#onLeave = onLeave;
    this.done = this.#ended.promise;
    this.stopping = this.#stop.signal;
  }

  /** Nobody waits for it any more. */
  get left(): boolean {
    return this.#left;
  }

  /** How long handlers may still run, once it is told to stop. */
  get patienceMs(): number {
    return this.#patienceMs ?? usualPatienceMs;
  }

  /** `run`: what it does, until it has ended. `signal`: tells it to stop. */
  begin(run: () => Promise<void>, signal: AbortSignal | undefined): void {
    const onAbort = () => void this.stop();
    signal?.addEventListener("abort", onAbort, { once: true });
    void run()
      .then(this.#ended.resolve, this.#ended.reject)
      .finally(() => {
        for (const timer of this.#timers) clearTimeout(timer);
        signal?.removeEventListener("abort", onAbort);
      });
    if (signal?.aborted) onAbort();
  }

  async stop({ patienceMs = usualPatienceMs }: { readonly patienceMs?: number } = {}): Promise<void> {
    if (this.#patienceMs === undefined) {
      this.#patienceMs = patienceMs;
      this.later(patienceMs + leaveMs, () => this.#leave());
      this.#stop.abort();
    }
    await this.done;
  }

  /** Unless it has ended by then. */
  later(ms: number, act: () => void): void {
    this.#timers.push(setTimeout(act, ms));
  }

  #leave(): void {
    this.#left = true;
    this.#onLeave?.();
    this.#ended.resolve();
  }
}

/** Why signals of handlers are aborted then. */
export function stops(queue: string): Error {
  return new Error(`The worker of queue ${JSON.stringify(queue)} stops`);
}
