/** One run of a schedule that this process has claimed: kept alive by heartbeats, and told when it is lost. */
import type { Connection } from "../seam/database.ts";
import { message } from "../seam/errors.ts";
import { emit } from "../events/events.ts";
import { type InstanceContext, scopeNamed } from "../transaction/scope.ts";
import type { How, Soon } from "../seam/store.ts";
import { sleep } from "../waiting/wait.ts";
import { watched } from "../waiting/watched-signal.ts";
import { ScheduleError } from "./errors.ts";
import type { Claimed, Renewal, Schedules } from "./store.ts";

/** What a handler gets. */
export interface Run {
  /** The moment for which it runs, however late it is: the same in every attempt. */
  readonly tick: Date;
  /** The tick that was decided upon before this one: what came after it, and until this one, is this one's. */
  readonly previous: Date | undefined;
  /** 1, or more if an earlier attempt failed, or its process died. */
  readonly attempt: number;
  /** Grows from attempt to attempt, and never goes back. Pass it to systems that can refuse an older one. */
  readonly fence: number;
  /** By `runNow`. */
  readonly manual: boolean;
  /** Aborts before anybody else can get the run, and when the schedule is stopped and its grace is over. */
  readonly signal: AbortSignal;
  /**
   * Ends the run in a transaction of the same database: what the transaction writes, and that the run is done, are
   * committed together or not at all. Throws if the run is no longer this process's.
   */
  complete(tx: object): Promise<void>;
}

/** What a run needs of the database. */
export interface RunKeeper {
  readonly context: InstanceContext<unknown, Connection>;
  readonly store: Schedules<Connection>;
  /** How long others may be waited for. */
  readonly waitMs: number;
  oneShot<T>(work: (connection: Connection, how: How) => Soon<T>, ms?: number): Promise<T>;
}

/** As for leases: the holder stops this long before its claim runs out. */
function trust(sentAt: number, ttlMs: number): number {
  return sentAt + ttlMs - Math.max(ttlMs / 10, 25);
}

/** How long a transaction with `complete` may go on after the handler has returned. */
const settleMs = 60_000;

export class Active implements Run {
  readonly tick: Date;
  readonly previous: Date | undefined;
  readonly attempt: number;
  readonly fence: number;
  readonly manual: boolean;
  readonly signal: AbortSignal;
  readonly #keeper: RunKeeper;
  readonly #claimed: Claimed;
  readonly #ttlMs: number;
  readonly #controller = new AbortController();
  /** By the clock of this process that never jumps. */
  #trustUntil: number;
  #timer: NodeJS.Timeout | undefined;
  #watch: NodeJS.Timeout | undefined;
  #trouble: unknown;
  #lost: ScheduleError | undefined;
  #over = false;
  /** A transaction has ended it: as long as that lasts, the row is locked, and nobody else can have it. */
  #completing = false;

  constructor(keeper: RunKeeper, claimed: Claimed, ttlMs: number, sentAt: number) {
    this.#keeper = keeper;
    this.#claimed = claimed;
    this.#ttlMs = ttlMs;
    this.#trustUntil = trust(sentAt, ttlMs);
    this.tick = new Date(claimed.tick);
    this.previous = claimed.previous === undefined ? undefined : new Date(claimed.previous);
    this.attempt = claimed.attempt;
    this.fence = claimed.fence;
    this.manual = claimed.manual;
    this.signal = watched(this.#controller.signal, () => this.#look());
    this.#arm();
    this.#schedule(sentAt + ttlMs / 3 - performance.now());
  }

  get name(): string {
    return `${this.#claimed.schedule} at ${this.tick.toISOString()}`;
  }

  get lost(): ScheduleError | undefined {
    this.#look();
    return this.#lost;
  }

  /** The schedule is stopped. */
  abort(reason: unknown): void {
    this.#controller.abort(reason);
  }

  async complete(tx: object): Promise<void> {
    const scope = scopeNamed(this.#keeper.context, tx, "run.complete(tx)");
    const { store, waitMs } = this.#keeper;
    const ended = await scope.work(
      async ({ connection, joined }) =>
        store.end(connection, this.#claimed, { state: "done" }, { waitMs, free: false, joined }),
      undefined,
      [`schedule ${this.name}`],
    );
    if (ended === "lost") {
      this.#lose("somebody else has it, or has ended it");
      throw this.#lost;
    }
    this.#completing = true;
  }

  /** After the handler: what became of the transaction with which it was completed, if it was. */
  async settled(): Promise<"done" | "rolled back" | "open"> {
    if (!this.#completing) return "open";
    for (const giveUpAt = performance.now() + settleMs; ;) {
      const state = await this.#renew();
      if (state === "done") return "done";
      if (state === "renewed") return "rolled back";
      if (state === "lost" || performance.now() > giveUpAt) {
        this.#completing = false;
        this.#lose("its transaction did not end, or somebody else has it");
        return "open";
      }
      await sleep(50);
    }
  }

  /** No more heartbeats. */
  stop(): void {
    this.#over = true;
    clearTimeout(this.#timer);
    clearTimeout(this.#watch);
  }

  #look(): void {
    if (this.#over || this.#completing || performance.now() < this.#trustUntil) return;
    const why = this.#trouble === undefined ? "" : ` (${message(this.#trouble)})`;
    this.#lose(`its claim was not renewed in time${why}, so somebody else may take it over`);
  }

  #lose(why: string): void {
    if (this.#lost) return;
    const error = (this.#lost = new ScheduleError(
      "HF_SCHEDULE_LOST",
      `The run ${this.name} (fence ${this.fence}) is no longer this process's: ${why}. Nothing may be written for it any more.`,
      this.#trouble,
    ));
    this.stop();
    this.#controller.abort(error);
    emit("holdfast:schedule:lost", () => ({
      schedule: this.#claimed.schedule,
      tick: this.tick,
      fence: this.fence,
      error,
    }));
  }

  #arm(): void {
    clearTimeout(this.#watch);
    const fire = () => {
      this.#look();
      // A timer may be early, and the deadline may have moved on.
      if (!this.#over && !this.#lost) this.#arm();
    };
    const ms = Math.max(this.#completing ? this.#ttlMs / 3 : 1, this.#trustUntil - performance.now());
    this.#watch = setTimeout(fire, ms).unref();
  }

  #schedule(ms: number): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.#beat(), Math.max(1, ms)).unref();
  }

  async #beat(): Promise<void> {
    const sentAt = performance.now();
    try {
      const state = await this.#renew();
      if (this.#over) return;
      if (state === "lost") return this.#lose("somebody else has it, or has ended it");
      this.#trouble = undefined;
      // Locked: by the transaction that has ended it, or by somebody who is about to take it over.
      if (state !== "done") this.#schedule(sentAt + this.#ttlMs / 3 - performance.now());
    } catch (error) {
      this.#trouble = error;
      // Whatever it was: the clock decides when it is too late.
      if (!this.#over) this.#schedule(Math.min(this.#ttlMs / 20, 1000) * (0.5 + Math.random()));
    }
  }

  async #renew(): Promise<Renewal> {
    const sentAt = performance.now();
    const patience = Math.max(this.#ttlMs / 3, 500);
    const state = await this.#keeper.oneShot(
      (connection, how) => this.#keeper.store.renew(connection, this.#claimed, this.#ttlMs, how),
      patience,
    );
    if (state === "renewed") {
      // If a transaction had ended it, that was rolled back.
      this.#completing = false;
      this.#look();
      this.#trustUntil = Math.max(this.#trustUntil, trust(sentAt, this.#ttlMs));
      if (!this.#over) this.#arm();
    }
    return state;
  }
}
