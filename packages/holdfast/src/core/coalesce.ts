/**
 * What queued while a batch was in flight goes together. There is no timer: who comes when nobody is under way goes at
 * once and alone, and the busier it is, the more go at a time.
 */
export interface CoalesceOptions<Item, Answer> {
  /** Batches at the same time. */
  readonly inFlight: number;
  /** Of one batch. */
  readonly most: number;
  /** So many go in one batch even if another could go at the same time; more are shared out. Without it: all. */
  readonly together?: number;
  /** Answers in the order of the items; an error among them is that item's own. What is thrown is everybody's. */
  readonly run: (items: readonly Item[]) => Promise<readonly (Answer | Failed)[]>;
}

/** The error of one item of a batch. */
export class Failed {
  readonly error: unknown;

  constructor(error: unknown) {
    this.error = error;
  }
}

interface Waiting<Item, Answer> {
  readonly item: Item;
  readonly resolve: (answer: Answer) => void;
  readonly reject: (error: unknown) => void;
}

export class Coalescer<Item, Answer> {
  readonly #options: CoalesceOptions<Item, Answer>;
  #line: Waiting<Item, Answer>[] = [];
  #flying = 0;
  /** The last batch was of several. */
  #busy = false;
  #called = false;

  constructor(options: CoalesceOptions<Item, Answer>) {
    this.#options = options;
  }

  add(item: Item, signal?: AbortSignal): Promise<Answer> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason as Error);
      const waiting = signal ? this.#leaving({ item, resolve, reject }, signal) : { item, resolve, reject };
      this.#line.push(waiting);
      if (this.#flying === 0 && !this.#busy) this.#go();
      else this.#soon();
    });
  }

  /** Who gives up while it queues leaves the line; a batch that is under way is not called back. */
  #leaving(waiting: Waiting<Item, Answer>, signal: AbortSignal): Waiting<Item, Answer> {
    const onAbort = () => {
      const at = this.#line.indexOf(wrapped);
      if (at >= 0) this.#line.splice(at, 1);
      waiting.reject(signal.reason);
    };
    const wrapped = {
      item: waiting.item,
      resolve: (answer: Answer) => {
        signal.removeEventListener("abort", onAbort);
        waiting.resolve(answer);
      },
      reject: (error: unknown) => {
        signal.removeEventListener("abort", onAbort);
        waiting.reject(error);
      },
    };
    signal.addEventListener("abort", onAbort, { once: true });
    return wrapped;
  }

  /**
   * Those who were answered together come again together, one after the other: the first is not to go without them.
   * Once everything that is ready now has run, they are all there.
   */
  #soon(): void {
    if (this.#called || this.#flying >= this.#options.inFlight) return;
    this.#called = true;
    setImmediate(() => {
      this.#called = false;
      while (this.#line.length > 0 && this.#flying < this.#options.inFlight) this.#go();
    });
  }

  #go(): void {
    const { inFlight, together } = this.#options;
    const share = Math.ceil(this.#line.length / (inFlight - this.#flying));
    const most = Math.min(this.#options.most, Math.max(together ?? Infinity, share));
    const batch = this.#line.length <= most ? this.#line : this.#line.slice(0, most);
    this.#line = this.#line.length <= most ? [] : this.#line.slice(most);
    this.#flying++;
    this.#busy = batch.length > 1;
    void this.#fly(batch);
  }

  async #fly(batch: readonly Waiting<Item, Answer>[]): Promise<void> {
    try {
      const answers = await this.#options.run(batch.map(({ item }) => item));
      for (const [i, { resolve, reject }] of batch.entries()) {
        const answer = answers[i] as Answer | Failed;
        if (answer instanceof Failed) reject(answer.error);
        else resolve(answer);
      }
    } catch (error) {
      for (const { reject } of batch) reject(error);
    } finally {
      this.#flying--;
      if (this.#line.length > 0) this.#soon();
    }
  }
}
