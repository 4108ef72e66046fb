/** A store for express-rate-limit: its hits are counted by the database, so one limit holds for all processes. */
import { UsageError } from "../../seam/errors.ts";
import { checkNames } from "../../input/options.ts";
import type { Transactor } from "../../transaction/transaction.ts";
import { quota } from "../define.ts";
import type { Quota } from "../quota.ts";

export interface StoreOptions {
  /** Hits are kept under this name, that of a quota: another one for each `rateLimit(…)`. */
  readonly name: string;
}

/** As much of the options of `rateLimit(…)` as is needed. */
export interface RateLimitOptionsLike {
  readonly windowMs: number;
  readonly skipFailedRequests?: boolean;
  readonly skipSuccessfulRequests?: boolean;
}

export interface Hits {
  totalHits: number;
  resetTime: Date | undefined;
}

/** Requests of one client that one process is answering at a time: more than these are not taken back. */
const mostUnderWay = 1000;

/** `rateLimit({ windowMs, limit, store: new HoldfastStore(hf, { name: "api" }) })` */
export class HoldfastStore<Native = unknown> {
  /** The keys are those of all processes. */
  readonly localKeys = false;
  /** Tells the stores of one application apart. */
  readonly prefix: string;
  readonly #hf: Transactor<Native>;
  #quota: Quota | undefined;
  /** Of the window that began last, so that `decrement` can give one back. */
  readonly #ids = new Map<string, string[]>();
  #remembers = false;
  #window = 0;

  constructor(hf: Transactor<Native>, options: StoreOptions) {
    checkNames("HoldfastStore", options, new Set(["name"]));
    this.#hf = hf;
    this.prefix = options.name;
    // Says at once if the name cannot be one.
    quota(hf, { name: options.name, limit: Infinity });
  }

  init({ windowMs, skipFailedRequests = false, skipSuccessfulRequests = false }: RateLimitOptionsLike): void {
    // It decides by itself, by the number of hits, and counts those too that it refuses: here, there is no limit.
    this.#quota = quota(this.#hf, { name: this.prefix, limit: Infinity, per: windowMs });
    this.#remembers = skipFailedRequests || skipSuccessfulRequests;
  }

  async get(key: string): Promise<Hits | undefined> {
    const { used, resetAt } = await this.#counted().peek(key);
    return used === 0 ? undefined : { totalHits: used, resetTime: resetAt };
  }

  async increment(key: string): Promise<Hits> {
    const { used, resetAt, id } = await this.#counted().consume(key);
    if (this.#remembers) this.#remember(key, id, resetAt?.getTime() ?? 0);
    return { totalHits: used, resetTime: resetAt };
  }

  /** Gives back a hit that this process counted in this window; it is called with `skip…Requests` only. */
  async decrement(key: string): Promise<void> {
    const ids = this.#ids.get(key);
    const id = ids?.pop();
    if (ids?.length === 0) this.#ids.delete(key);
    if (id !== undefined) await this.#counted().refund(key, id);
  }

  async resetKey(key: string): Promise<void> {
    this.#ids.delete(key);
    await this.#counted().reset(key);
  }

  #counted(): Quota {
    if (!this.#quota) throw new UsageError("HoldfastStore: rateLimit({ store }) has to be called first");
    return this.#quota;
  }

  #remember(key: string, id: string, window: number): void {
    // What was used before this window is forgotten already.
    if (window > this.#window) {
      this.#window = window;
      this.#ids.clear();
    }
    let ids = this.#ids.get(key);
    if (!ids) this.#ids.set(key, (ids = []));
    ids.push(id);
    if (ids.length > mostUnderWay) ids.shift();
  }
}
