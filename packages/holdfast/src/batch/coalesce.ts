import { Turns } from "../waiting/turns.ts";

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
  /** What an item needs for itself alone: those that need the same wait for each other, if one has to wait. */
  readonly names?: (item: Item) => readonly string[];
  /** Begins a batch outside of whatever the one who came last is in. */
  readonly apart?: (start: () => void) => void;
  /** Answers in the order of the items; an error among them is that item's own. What is thrown is everybody's. */
  readonly run: (items: readonly Item[], terms: CoalesceTerms) => Promise<readonly (Answer | Failed)[]>;
  /** What is told to one who has waited for so long in vain. */
  readonly late?: (item: Item, waitedMs: number, cause: unknown) => unknown;
}

/** How long a batch may wait for others (by the clock that never jumps), and what ends it before. */
export interface CoalesceTerms {
  readonly until: number;
  readonly signal: AbortSignal;
}

/** The error of one item of a batch. */
export class Failed {
  readonly error: unknown;

  constructor(error: unknown) {
    this.error = error;
  }
}

/**
 * Thrown by `run`: nothing was done. "crowded": one of several has to wait for somebody else. Those that need the same are
 * sent again one after the other, those of a single name together. "waited": what they need was not free in time. "aborted":
 * as its signal said, for the sake of one of them.
 */
export class Undone extends Error {
  readonly why: "crowded" | "waited" | "aborted";

  constructor(why: "crowded" | "waited" | "aborted", cause?: unknown) {
    super(why, { cause });
    this.why = why;
  }
}

interface Waiting<Item, Answer> {
  readonly item: Item;
  readonly signal: AbortSignal | undefined;
  readonly waitMs: number;
  readonly resolve: (answer: Answer) => void;
  readonly reject: (error: unknown) => void;
  /** Since when it waits for others, and not only for its turn. */
  since?: number;
  /** While it is under way: ends its batch. */
  recall?: (() => void) | undefined;
  /** It was answered, or left. */
  gone?: boolean;
}

type BatchLine<Item, Answer> = Waiting<Item, Answer>[];

/** A batch that takes longer gives up its place: others are not to wait for those whom it waits for. */
const briefMs = 250;
/** So many have given up their place at the most, and so many go one by one at a time: each takes a connection. */
const most = 8;

export class Coalescer<Item, Answer> {
  readonly #options: CoalesceOptions<Item, Answer>;
  #line: BatchLine<Item, Answer> = [];
  /** By what somebody waits for: who came later and needs it too. */
  readonly #behind = new Map<string, BatchLine<Item, Answer>>();
  readonly #turns = new Turns(most);
  #flying = 0;
  /** Batches that have given up their place. */
  #slow = 0;
  /** The last batch was of several. */
  #busy = false;
  #called = false;

  constructor(options: CoalesceOptions<Item, Answer>) {
    this.#options = options;
  }

  add(item: Item, signal?: AbortSignal, waitMs = Infinity): Promise<Answer> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason as Error);
      const alone = { item, signal, waitMs, resolve, reject };
      const waiting = signal ? this.#leaving(alone, signal) : alone;
      if (this.#stands(waiting)) return;
      this.#line.push(waiting);
      if (this.#flying === 0 && !this.#busy) this.#apart(() => this.#go());
      else this.#soon();
    });
  }

  /** Who gives up while it queues leaves the line; a batch that is under way is called back for its sake. */
  #leaving(waiting: Waiting<Item, Answer>, signal: AbortSignal): Waiting<Item, Answer> {
    const onAbort = () => {
      if (wrapped.recall) wrapped.recall();
      else wrapped.reject(signal.reason);
    };
    const ended =
      <T>(tell: (value: T) => void) =>
      (value: T) => {
        signal.removeEventListener("abort", onAbort);
        wrapped.gone = true;
        tell(value);
      };
    const wrapped: Waiting<Item, Answer> = {
      ...waiting,
      resolve: ended(waiting.resolve),
      reject: ended(waiting.reject),
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
    this.#apart(() =>
      setImmediate(() => {
        this.#called = false;
        while (this.#line.length > 0 && this.#flying < this.#options.inFlight) this.#go();
      }),
    );
  }

  #apart(start: () => void): void {
    const { apart } = this.#options;
    if (apart) apart(start);
    else start();
  }

  #go(): void {
    const { inFlight, together } = this.#options;
    const line = this.#line.filter(({ gone }) => !gone);
    const share = Math.ceil(line.length / (inFlight - this.#flying));
    const size = Math.min(this.#options.most, Math.max(together ?? Infinity, share));
    const batch = line.slice(0, size);
    this.#line = line.slice(size);
    if (batch.length === 0) return;
    this.#flying++;
    this.#busy = batch.length > 1;
    let free = () => {
      this.#flying--;
      if (this.#line.length > 0) this.#soon();
    };
    const timer = setTimeout(() => {
      if (this.#slow >= most) return;
      this.#slow++;
      const leave = free;
      const release = this.#block(batch);
      free = () => {
        this.#slow--;
        release();
      };
      leave();
    }, briefMs);
    timer.unref();
    void this.#send(batch, () => {
      clearTimeout(timer);
      free();
    });
  }

  /** Sends them until each has its answer, or is to go another way. `landed`: before who was answered can come again. */
  async #send(batch: BatchLine<Item, Answer>, landed?: () => void): Promise<void> {
    for (let left = batch; left.length > 0;) {
      const stop = new AbortController();
      const now = performance.now();
      const recall = () => stop.abort();
      let until = Infinity;
      for (const waiting of left) {
        waiting.since ??= now;
        waiting.recall = recall;
        // With those that have waited longer: not all of them are to come again for every one whose time is over.
        until = Math.min(until, Math.max(waiting.since + waiting.waitMs, now + waiting.waitMs / 10));
      }
      const sent = left;
      left = [];
      const back = () => {
        for (const waiting of sent) waiting.recall = undefined;
      };
      try {
        const answers = await this.#options.run(
          sent.map(({ item }) => item),
          { until, signal: stop.signal },
        );
        back();
        for (const [i, { resolve, reject }] of sent.entries()) {
          const answer = answers[i] as Answer | Failed;
          if (answer instanceof Failed) reject(answer.error);
          else resolve(answer);
        }
      } catch (error) {
        back();
        if (!(error instanceof Undone)) for (const { reject } of sent) reject(error);
        else if (error.why === "crowded" && this.#several(sent)) this.#part(sent);
        else left = this.#staying(sent, until, error);
      }
    }
    landed?.();
  }

  /** Those of them that are still wanted, and have time left. */
  #staying(sent: BatchLine<Item, Answer>, until: number, undone: Undone): BatchLine<Item, Answer> {
    return sent.filter(({ item, signal, since = 0, waitMs, reject }) => {
      if (signal?.aborted) reject(signal.reason);
      else if (undone.why === "aborted" || since + waitMs > until) return true;
      else
        reject(
          this.#options.late?.(item, Math.round(performance.now() - since), undone.cause) ?? undone.cause,
        );
      return false;
    });
  }

  #names(waiting: BatchLine<Item, Answer>): Set<string> {
    return new Set(waiting.flatMap(({ item }) => this.#options.names?.(item) ?? []));
  }

  #several(batch: BatchLine<Item, Answer>): boolean {
    return batch.length > 1 && this.#names(batch).size > 1;
  }

  #behindWhom(waiting: BatchLine<Item, Answer>): BatchLine<Item, Answer> | undefined {
    if (this.#behind.size === 0) return undefined;
    for (const name of this.#names(waiting)) {
      const behind = this.#behind.get(name);
      if (behind) return behind;
    }
    return undefined;
  }

  /** Whether it has to wait for what somebody before it needs: then it does. */
  #stands(waiting: Waiting<Item, Answer>): boolean {
    const behind = this.#behindWhom([waiting]);
    if (!behind) return false;
    waiting.since ??= performance.now();
    behind.push(waiting);
    return true;
  }

  /** From now on, whoever needs what these need stands behind them. Returns what ends that. */
  #block(batch: BatchLine<Item, Answer>): () => void {
    const behind: BatchLine<Item, Answer> = [];
    const names = [...this.#names(batch)].filter((name) => !this.#behind.has(name));
    for (const name of names) this.#behind.set(name, behind);
    this.#line = this.#line.filter((waiting) => !this.#stands(waiting));
    return () => {
      for (const name of names) this.#behind.delete(name);
      // They came before those that are in line now.
      this.#line = [...behind, ...this.#line].filter((waiting) => !waiting.gone && !this.#stands(waiting));
      if (this.#line.length > 0) this.#soon();
    };
  }

  /** Those that share a name, by themselves or by way of others, stay together and in their order. */
  #part(batch: BatchLine<Item, Answer>): void {
    let groups: { readonly names: ReadonlySet<string>; readonly line: BatchLine<Item, Answer> }[] = [];
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
  }

  async #oneByOne(group: BatchLine<Item, Answer>): Promise<void> {
    const release = this.#block(group);
    await this.#turns.run(async () => {
      for (let next = 0; next < group.length;) {
        const start = next++;
        while (next < group.length && !this.#several(group.slice(start, next + 1))) next++;
        const batch = group.slice(start, next).filter(({ gone }) => !gone);
        if (batch.length > 0) await this.#send(batch);
      }
    });
    release();
  }
}
