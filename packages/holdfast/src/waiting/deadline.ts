import { DeadlineExceededError } from "../seam/errors.ts";

/** When a call must stop: the caller's abort, or the end of its time, whichever comes first. */
export class Deadline {
  readonly ms: number;
  readonly signal: AbortSignal;
  readonly #endsAt: number;
  readonly #timer: NodeJS.Timeout;
  readonly #caller: AbortSignal | undefined;
  readonly #controller = new AbortController();
  readonly #onAbort = () => this.#controller.abort(this.#caller?.reason);

  constructor(deadlineMs: number, signal: AbortSignal | undefined) {
    signal?.throwIfAborted();
    this.ms = deadlineMs;
    this.#caller = signal;
    this.#endsAt = performance.now() + deadlineMs;
    this.signal = this.#controller.signal;
    this.#timer = setTimeout(() => this.#controller.abort(new DeadlineExceededError(deadlineMs)), deadlineMs);
    this.#timer.unref();
    signal?.addEventListener("abort", this.#onAbort, { once: true });
  }

  /** Its time is over, whether or not the timer has come to run. */
  get over(): boolean {
    return performance.now() >= this.#endsAt;
  }

  get leftMs(): number {
    return Math.max(1, Math.ceil(this.#endsAt - performance.now()));
  }

  clear(): void {
    clearTimeout(this.#timer);
    this.#caller?.removeEventListener("abort", this.#onAbort);
  }
}
