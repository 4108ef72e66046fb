import { LeaseLostError, UsageError, message } from "../../seam/errors.ts";
import { emit, nextHold } from "../../events/events.ts";
import { apart } from "../../context/inside.ts";
import type { Connection } from "../../seam/database.ts";
import type { ClaimResult, Grip } from "../../seam/leases.ts";
import { Turns } from "../../waiting/turns.ts";
import { watched } from "../../waiting/watched-signal.ts";
import type { InstanceContext } from "../../transaction/scope.ts";
import { retrying } from "../../transaction/retry.ts";
import type { Errands } from "./errands.ts";
import { type LeaseTerms, checkTtl, trust } from "./terms.ts";
import type { Lease } from "./types.ts";

/** What a lease needs of the manager that gave it. */
export interface Keeper {
  readonly errands: Pick<
    Errands<unknown, Connection>,
    "refuseInside" | "renew" | "release" | "retryable" | "told"
  >;
  /** Those that it has given and not got back. */
  readonly held: Set<Granted>;
  readonly context: InstanceContext<unknown, Connection>;
}

interface Known {
  /** By which the database knows it. */
  readonly grip: Grip;
  /** Whose it is. */
  readonly home: InstanceContext<unknown, Connection>;
}

const known = new WeakMap<object, Known>();

/** Undefined: it is no lease of ours. */
export function knownLease(lease: unknown): Known | undefined {
  return typeof lease === "object" && lease !== null ? known.get(lease) : undefined;
}

/** A lease that is held: renews itself, and knows when it can no longer be relied on. */
export class Granted implements Lease {
  readonly name: string;
  readonly fence: number;
  readonly since: Date;
  /** In events. */
  readonly hold = nextHold();
  readonly #began = performance.now();
  readonly #keeper: Keeper;
  readonly #grip: Grip;
  readonly #terms: LeaseTerms;
  readonly #controller = new AbortController();
  readonly #signal: AbortSignal;
  readonly #queue = new Turns();
  #until: Date;
  #ttlMs: number;
  /** By this process's own clock that never jumps: the application's idea of the date may be an hour off. */
  #trustUntil: number;
  #watch: NodeJS.Timeout | undefined;
  #next: NodeJS.Timeout | undefined;
  /** Why the last renewal failed, and how many have in a row. */
  #trouble: unknown;
  #failures = 0;
  #lost: LeaseLostError | undefined;
  #over = false;
  #releasing: Promise<void> | undefined;

  constructor(
    keeper: Keeper,
    name: string,
    grip: Grip,
    terms: LeaseTerms,
    grant: ClaimResult & { granted: true },
    sentAt: number,
  ) {
    this.#keeper = keeper;
    this.#grip = grip;
    this.#terms = terms;
    this.#ttlMs = terms.ttlMs;
    this.#trustUntil = trust(sentAt, terms.ttlMs);
    this.name = name;
    this.fence = grant.fence;
    this.since = grant.since;
    this.#until = grant.until;
    this.#signal = watched(this.#controller.signal, () => this.#look());
    known.set(this, { grip, home: keeper.context });
    // It goes on after whatever transaction it is asked for in.
    apart(() => {
      this.#arm();
      if (terms.renew) this.#schedule(sentAt + terms.ttlMs / 3 - performance.now());
    });
  }

  get until(): Date {
    return this.#until;
  }

  get signal(): AbortSignal {
    this.#look();
    return this.#signal;
  }

  throwIfLost(): void {
    this.#look();
    if (this.#lost) throw this.#lost;
    if (this.#over) throw new LeaseLostError(this.name, this.fence, "it was released");
  }

  /** After a pause of the whole process code may run before timers do: whoever looks, looks at the clock too. */
  #look(): void {
    if (performance.now() < this.#trustUntil) return;
    const why = this.#trouble === undefined ? "" : ` (${message(this.#trouble)})`;
    this.#lose(`it was not renewed in time${why}, so somebody else may get it at any moment`, this.#trouble);
  }

  #lose(detail: string, cause?: unknown): void {
    if (this.#over || this.#lost) return;
    this.#stop();
    this.#keeper.held.delete(this);
    const error = (this.#lost = new LeaseLostError(this.name, this.fence, detail, cause));
    this.#controller.abort(error);
    this.#tellLost(error);
  }

  get #heldMs(): number {
    return performance.now() - this.#began;
  }

  #tellLost(error: unknown): void {
    const { hold, name: lease, fence } = this;
    emit("holdfast:lease:lost", () => ({ hold, lease, fence, heldMs: this.#heldMs, error }));
  }

  #stop(): void {
    clearTimeout(this.#watch);
    clearTimeout(this.#next);
  }

  #arm(): void {
    clearTimeout(this.#watch);
    const fire = () => {
      this.#look();
      // A timer may be early, and the deadline may have moved on.
      if (!this.#over && !this.#lost) this.#arm();
    };
    this.#watch = setTimeout(fire, Math.max(1, this.#trustUntil - performance.now())).unref();
  }

  #schedule(ms: number): void {
    clearTimeout(this.#next);
    this.#next = setTimeout(() => void this.#keep(), Math.max(1, ms)).unref();
  }

  async #keep(): Promise<void> {
    try {
      await this.#renewOnce(this.#ttlMs);
    } catch {
      // Whatever it was: the clock decides when it is too late.
      if (!this.#over && !this.#lost) this.#schedule(this.#soon());
    }
  }

  /** At once, then less and less often. */
  #soon(): number {
    return Math.min(this.#ttlMs / 20, 1000, 25 * 2 ** this.#failures) * (0.5 + Math.random());
  }

  async renew(ttl?: number): Promise<void> {
    if (this.#over)
      throw new UsageError(`The lease ${this.name} (fence ${this.fence}) was released: it cannot be renewed`);
    const ttlMs = ttl === undefined ? this.#ttlMs : checkTtl(ttl);
    this.#keeper.errands.refuseInside(
      "It is renewed by itself; renew it by hand before or after the transaction",
    );
    await retrying(
      async () => {
        await this.#renewOnce(ttlMs);
        this.throwIfLost();
      },
      {
        why: (error) => (this.#keeper.errands.retryable(error) ? "passes" : undefined),
        on: new Set(["passes"]),
        // Until it is lost.
        attempts: Infinity,
        wanted: () => !this.#lost && !this.#over,
        pauseMs: () => this.#soon(),
        failed: async (error) => {
          this.throwIfLost();
          throw this.#keeper.errands.told(error, this.name);
        },
      },
    );
  }

  /** Rejects if it is lost, or not known to be renewed. Does nothing once it is released. */
  async #renewOnce(ttlMs: number): Promise<void> {
    return this.#queue.run(async () => {
      this.#look();
      if (this.#lost) throw this.#lost;
      if (this.#over) return;
      try {
        // Two tries have room, so that one on a connection that is dead is not the only one.
        const patience = Math.min(this.#trustUntil - performance.now(), Math.max(ttlMs / 3, 500));
        const { until, sentAt } = await this.#keeper.errands.renew(this.#grip, ttlMs, Math.ceil(patience));
        if (this.#over) return;
        // Its time may have passed while the answer was under way: then it stays lost.
        this.#look();
        if (!until) this.#lose("the server says that it is no longer ours");
        if (this.#lost) throw this.#lost;
        this.#until = until as Date;
        this.#ttlMs = ttlMs;
        this.#trustUntil = Math.max(this.#trustUntil, trust(sentAt, ttlMs));
        this.#trouble = undefined;
        this.#failures = 0;
        // By hand, it may have been in a transaction.
        apart(() => {
          this.#arm();
          if (this.#terms.renew) this.#schedule(sentAt + ttlMs / 3 - performance.now());
        });
        emit("holdfast:lease:renewed", () => ({ hold: this.hold, lease: this.name, fence: this.fence }));
      } catch (error) {
        this.#trouble = error;
        this.#failures++;
        throw error;
      }
    });
  }

  async release(): Promise<void> {
    // Twice does no harm, but whoever comes second waits too.
    if (this.#releasing) return this.#releasing.catch(() => {});
    this.#keeper.errands.refuseInside("Release the lease after the transaction");
    // If its time has passed, the signal says so, although the timer had no turn yet.
    this.#look();
    this.#over = true;
    this.#stop();
    this.#releasing = this.#giveBack();
    return this.#releasing;
  }

  async #giveBack(): Promise<void> {
    const ours = await this.#keeper.errands
      .release(this.#grip, this.#terms.atLeastMs)
      .catch((error: unknown) => {
        // Whether it is held still, nobody knows.
        if (!this.#lost) this.#tellLost(error);
        throw error;
      })
      .finally(() => this.#keeper.held.delete(this));
    if (ours === "not ours" || (ours === "perhaps" && this.#lost)) {
      if (this.#lost) throw this.#lost;
      const detail = "the server says that it was no longer ours when it was released";
      const error = new LeaseLostError(this.name, this.fence, detail);
      this.#tellLost(error);
      throw error;
    }
    emit("holdfast:lease:released", () => ({
      hold: this.hold,
      lease: this.name,
      fence: this.fence,
      ...(!this.#lost && { heldMs: this.#heldMs }),
    }));
  }

  /** The instance is closed: its leases are for others to take at once. */
  async end(): Promise<void> {
    this.#lose("the instance was closed");
    await this.release();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    // Whoever listens to `signal` knows already; a second error here would hide the block's own.
    await this.release().catch((error: unknown) => {
      if (!(error instanceof LeaseLostError)) throw error;
    });
  }
}
