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
  /** What an item needs for itself alone: for the sake of those that need something else, after `Crowded`. */
  readonly names?: (item: Item) => readonly string[];
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

/**
 * Thrown by `run`: nothing was done, since one of several has to wait for somebody else. Those that need the same are sent
 * again one after the other, those of a single name together. Not thrown about these.
 */
export class Crowded extends Error {}

interface Waiting<Item, Answer> {
  readonly item: Item;
  readonly signal: AbortSignal | undefined;
  readonly resolve: (answer: Answer) => void;
  readonly reject: (error: unknown) => void;
}

type Line<Item, Answer> = Waiting<Item, Answer>[];

export class Coalescer<Item, Answer> {
  readonly #options: CoalesceOptions<Item, Answer>;
  #line: Line<Item, Answer> = [];
  /** By what somebody waits for: who came later and needs it too. */
  readonly #behind = new Map<string, Line<Item, Answer>>();
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
      const alone = { item, signal, resolve, reject };
      const waiting = signal ? this.#leaving(alone, signal) : alone;
      const behind = this.#behind.size > 0 ? this.#behindWhom([waiting]) : undefined;
      if (behind) return void behind.push(waiting);
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
      signal,
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
    void this.#send(batch, () => {
      this.#flying--;
      if (this.#line.length > 0) this.#soon();
    });
  }

  /** `landed`: before anybody who was answered can come again. */
  async #send(batch: Line<Item, Answer>, landed?: () => void): Promise<void> {
    try {
      const answers = await this.#options.run(batch.map(({ item }) => item));
      for (const [i, { resolve, reject }] of batch.entries()) {
        const answer = answers[i] as Answer | Failed;
        if (answer instanceof Failed) reject(answer.error);
        else resolve(answer);
      }
    } catch (error) {
      if (error instanceof Crowded && this.#several(batch)) this.#part(batch);
      else for (const { reject } of batch) reject(error);
    } finally {
      landed?.();
    }
  }

  #names(waiting: Line<Item, Answer>): Set<string> {
    return new Set(waiting.flatMap(({ item }) => this.#options.names?.(item) ?? []));
  }

  #several(batch: Line<Item, Answer>): boolean {
    return batch.length > 1 && this.#names(batch).size > 1;
  }

  #behindWhom(waiting: Line<Item, Answer>): Line<Item, Answer> | undefined {
    for (const name of this.#names(waiting)) {
      const behind = this.#behind.get(name);
      if (behind) return behind;
    }
    return undefined;
  }

  /** Those that share a name, by themselves or by way of others, stay together and in their order. */
  #part(batch: Line<Item, Answer>): void {
    let groups: { readonly names: ReadonlySet<string>; readonly line: Line<Item, Answer> }[] = [];
    for (const waiting of batch) {
      const names = this.#names([waiting]);
      const near = groups.filter((group) => [...names].some((name) => group.names.has(name)));
      groups = groups.filter((group) => !near.includes(group));
      const line = [...near.flatMap((group) => group.line), waiting];
      groups.push({ names: this.#names(line), line });
    }
    for (const { line } of groups) {
      line.sort((a, b) => batch.indexOf(a) - batch.indexOf(b));
      const behind = this.#behindWhom(line);
      if (behind) behind.push(...line);
      else void this.#oneByOne(line);
    }
    this.#line = this.#line.filter((waiting) => !this.#behindWhom([waiting])?.push(waiting));
  }

  async #oneByOne(group: Line<Item, Answer>): Promise<void> {
    const names = this.#names(group);
    const behind: Line<Item, Answer> = [];
    for (const name of names) this.#behind.set(name, behind);
    for (let next = 0; next < group.length;) {
      const start = next++;
      while (next < group.length && !this.#several(group.slice(start, next + 1))) next++;
      const batch = group.slice(start, next).filter(({ signal }) => !signal?.aborted);
      if (batch.length > 0) await this.#send(batch);
    }
    for (const name of names) this.#behind.delete(name);
    // They came before those that are in line now.
    const back = behind.filter(({ signal }) => !signal?.aborted);
    this.#line = [...back, ...this.#line].filter((waiting) => !this.#behindWhom([waiting])?.push(waiting));
    if (this.#line.length > 0) this.#soon();
  }
}
