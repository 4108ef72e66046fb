import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { placeOf, send, waitedInVain } from "../batch/calls.ts";
import { require } from "../seam/capabilities.ts";
import type { Connection } from "../seam/database.ts";
import { oneShotMs } from "../transaction/one-shot.ts";
import { UsageError, message } from "../seam/errors.ts";
import { emit, traced } from "../events/events.ts";
import { checkMoment, checkText, longestName, shown as shownValue } from "../input/values.ts";
import { made } from "../events/made.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { Pauses, retryPolicy } from "../transaction/retry.ts";
import {
  type InstanceContext,
  type Transaction,
  detached,
  contextOf,
  scopeOf,
} from "../transaction/scope.ts";
import type { How, Soon } from "../seam/store.ts";
import type { Transactor } from "../transaction/transaction.ts";
import { described } from "../seam/thrown.ts";
import { milliseconds, sleep } from "../waiting/wait.ts";
import { type ScheduleWish, wishFor } from "./decide.ts";
import { ScheduleError } from "./errors.ts";
import { Active, type RunKeeper, type Run } from "./run.ts";
import type {
  Claimed,
  Due,
  RunEnding,
  Overlap,
  RunRow,
  RunState,
  Schedules,
  ScheduleStanding,
  ScheduleStep,
} from "./store.ts";
import { type Rhythm, type When, checkWhen, due, following, rhythmOf } from "./ticks.ts";

export type ScheduleOptions = When & CatchUp & CommonOptions;

/** What becomes of ticks that were due while nobody was there, and of those that come while a run is not over. */
export type CatchUp =
  | {
      /** "none": they are passed over. "last" (default): the newest is run, for all of them. */
      readonly catchUp?: "none" | "last";
      readonly catchUpLimit?: never;
      /** With "none": a tick is missed if nobody began it for so many milliseconds, at least 1,000. Default 60,000. */
      readonly grace?: number;
      /**
       * While another run is not over anywhere: "skip" (default) records the tick as skipped, "queue" leaves it until
       * then, "allow" runs it beside.
       */
      readonly overlap?: Overlap;
    }
  | {
      /** Each of them is run, in order. */
      readonly catchUp: "all";
      /** At most so many of them, the newest. Default 1,000. */
      readonly catchUpLimit?: number;
      readonly grace?: never;
      /** "queue" (default): one after the other, in all processes together. "allow": some at a time. */
      readonly overlap?: "queue" | "allow";
    };

export interface CommonOptions {
  /** How often a run that failed, or whose process died, is begun again. 0: each tick is begun at most once. Default 2. */
  readonly retries?: number;
  /**
   * Milliseconds before a run that failed is begun again: the first pause, which doubles from attempt to attempt up to
   * five minutes, or a function of the attempt that failed. Default 1,000.
   */
  readonly backoff?: number | ((attempt: number) => number);
  /** A run whose process died is taken over after so many milliseconds, from 500 to a day. Default 30,000. */
  readonly ttl?: number;
  /** How many runs that are over are kept in the table. Default 100. */
  readonly keep?: number;
  /** Who runs it, for people. Default: host name and process id. */
  readonly holder?: string;
  /** Told of every attempt that failed, with its run, and of trouble with the database, without. Default: a warning of the process. */
  readonly onError?: (error: unknown, run?: { readonly tick: Date; readonly attempt: number }) => void;
}

/** What it returns is waited for. */
export type Handler = (run: Run) => unknown;

/** Puts the tick's work elsewhere, e.g. into a queue, in the transaction in which the tick is recorded. */
export type Enqueue<Native> = (tick: Date, tx: Transaction<Native>) => Promise<unknown>;

export interface RunInfo {
  readonly tick: Date;
  readonly state: RunState;
  readonly attempt: number;
  readonly fence: number;
  readonly manual: boolean;
  readonly holder: string;
  readonly startedAt: Date;
  readonly endedAt: Date | undefined;
  /** Of the last attempt that failed. */
  readonly error: string | undefined;
}

export interface ScheduleStatus {
  readonly name: string;
  /** Whether this object takes part. */
  readonly started: boolean;
  /** No tick is begun, in whatever process. */
  readonly paused: boolean;
  /** The newest tick that was decided upon, by whatever process; undefined if none was ever there. */
  readonly last: Date | undefined;
  /** The first tick after now, by the database's clock. */
  readonly next: Date | undefined;
  /** Those that are not over, in whatever process. */
  readonly running: readonly RunInfo[];
  /** The newest that is over, and was not skipped. */
  readonly lastRun: RunInfo | undefined;
  readonly lastError: { readonly tick: Date; readonly error: string } | undefined;
}

export interface Schedule extends AsyncDisposable {
  readonly name: string;
  /** Takes part in it from now on. Resolves once the database knows the schedule. The abort of `signal` is `stop({ grace: 0 })`. */
  start(options?: { readonly signal?: AbortSignal | undefined }): Promise<void>;
  /** Begins nothing more, and resolves when what runs here has ended. After `grace` milliseconds its signal is aborted. */
  stop(options?: { readonly grace?: number }): Promise<void>;
  /** The next times, by this definition. */
  nextRuns(count?: number, from?: Date): Date[];
  /** Runs it at once, in this process, whatever the time. `ran: false`: another run is not over, and runs may not overlap. */
  runNow(): Promise<{ readonly ran: boolean; readonly tick: Date | undefined }>;
  /** No tick is begun from now on, in whatever process; what runs goes on. `runNow` still does. */
  pause(): Promise<void>;
  /** Ticks are begun again, within half a minute; `catchUp` says what becomes of those that were due meanwhile. */
  resume(): Promise<void>;
  status(): Promise<ScheduleStatus>;
  /** The newest runs, the newest first. */
  runs(limit?: number): Promise<readonly RunInfo[]>;
}

const names = new Set([
  "cron",
  "every",
  "timeZone",
  "catchUp",
  "catchUpLimit",
  "grace",
  "overlap",
  "retries",
  "backoff",
  "ttl",
  "keep",
  "holder",
  "onError",
  "enqueue",
]);

/** The clock may be set, and a machine may sleep: nobody sleeps for longer. */
const floorMs = 30_000;
const longestBackoff = 300_000;
const longestWait = 5000;
/** Of runs that may overlap, in one process. */
const mostAtOnce = 16;

/** What is sent is safe to repeat: by its token, or because it is done already. */
const policy = retryPolicy({ attempts: 6, baseMs: 50, maxMs: 1000 });

/**
 * Runs a handler at the times of a pattern, once per tick however many processes take part:
 * `await schedule(hf, "report", { cron: "0 3 * * *", timeZone: "Europe/Madrid" }, report).start()`.
 */
export function schedule<Native>(
  hf: Transactor<Native>,
  name: string,
  options: ScheduleOptions & { readonly enqueue?: never },
  handler: Handler,
): Schedule;
/** The same as a queued job: the tick and what `enqueue` writes are committed together, exactly once. */
export function schedule<Native>(
  hf: Transactor<Native>,
  name: string,
  options: ScheduleOptions & { readonly enqueue: Enqueue<Native> },
): Schedule;
export function schedule<Native>(
  hf: Transactor<Native>,
  name: string,
  options: ScheduleOptions & { readonly enqueue?: Enqueue<Native> },
  handler?: Handler,
): Schedule {
  return new ScheduleRunner(hf, name, options, handler);
}

class ScheduleRunner<Native> implements Schedule, RunKeeper {
  readonly name: string;
  readonly context: InstanceContext<unknown, Connection>;
  readonly #hf: Transactor<Native>;
  readonly #handler: Handler | undefined;
  readonly #enqueue: Enqueue<Native> | undefined;
  readonly #when: When;
  readonly #terms: Pick<ScheduleStep, "schedule" | "holder" | "ttlMs" | "attempts" | "overlap" | "keep">;
  readonly #catchUp: "none" | "last" | "all";
  readonly #limit: number;
  readonly #graceMs: number;
  readonly #backoff: (attempt: number) => number;
  readonly #onError: CommonOptions["onError"];
  #lazyRhythm: Rhythm | undefined;
  #looping: { readonly stop: AbortController; readonly ended: Promise<void> } | undefined;
  readonly #active = new Set<Active>();
  readonly #running = new Set<Promise<unknown>>();
  /** Ends the sleep. */
  #nudge: () => void = () => {};
  #nudged = false;
  /** The database's clock, and ours that never jumps, at the same moment. */
  #clock = { theirs: 0, ours: 0 };
  /** The newest tick that was decided upon, when the database was asked last. */
  #last = 0;
  /** Whatever is begun now is to stop at once. */
  #aborted: { readonly reason: unknown } | undefined;
  /** Ticks that are to be caught up with, in order, once they have been counted. */
  #backlog: readonly number[] = [];
  /** How often the tick that comes next could not be enqueued. */
  #vain = { tick: 0, times: 0, until: 0 };
  #busyTimes = 0;

  constructor(
    hf: Transactor<Native>,
    name: string,
    options: ScheduleOptions & { readonly enqueue?: Enqueue<Native> },
    handler: Handler | undefined,
  ) {
    this.context = contextOf(hf, "schedule");
    this.#hf = hf;
    checkText("schedule", "the name", name, { most: longestName });
    checkNames("schedule", options, names);
    checkWhen(options);
    const { catchUp = "last", retries = 2, backoff = 1000, keep = 100, enqueue, onError } = options;
    const { overlap = catchUp === "all" ? "queue" : "skip", catchUpLimit = 1000, grace = 60_000 } = options;
    const { ttl = 30_000, holder = `${hostname()}:${process.pid}` } = options;
    oneOf("catchUp", catchUp, ["none", "last", "all"]);
    oneOf("overlap", overlap, ["skip", "queue", "allow"]);
    if (catchUp === "all" && overlap === "skip")
      throw new UsageError(
        'schedule: catchUp "all" runs every tick, and overlap "skip" leaves some out. Use overlap "queue" or "allow"',
      );
    if ((handler === undefined) === (enqueue === undefined))
      throw new UsageError("schedule: say what to do: either a handler, or `enqueue` in the options");
    for (const [what, body] of Object.entries({ handler, enqueue, onError }))
      if (body !== undefined && typeof body !== "function")
        throw new UsageError(`schedule: ${what} must be a function`);
    checkText("schedule", "holder", holder);
    if (typeof backoff !== "number" && typeof backoff !== "function")
      throw new UsageError("schedule: backoff must be a number of milliseconds or a function");
    const first = typeof backoff === "number" ? milliseconds(backoff, "backoff") : 0;
    const ttlMs = milliseconds(ttl, "ttl", 500);
    if (ttlMs > 86_400_000) throw new UsageError(`ttl must be a day at the most (86400000 ms), not ${ttlMs}`);
    this.name = name;
    this.#when = options;
    this.#handler = handler;
    this.#enqueue = enqueue;
    this.#onError = onError;
    this.#catchUp = catchUp;
    this.#limit = whole("catchUpLimit", catchUpLimit, 1, 100_000);
    this.#graceMs = milliseconds(grace, "grace", 1000);
    this.#backoff =
      typeof backoff === "function"
        ? (attempt) => milliseconds(backoff(attempt), "backoff")
        : (attempt) => Math.min(longestBackoff, first * 2 ** Math.min(attempt - 1, 31));
    this.#terms = {
      schedule: name,
      holder: holder.slice(0, 200),
      ttlMs,
      attempts: whole("retries", retries, 0, 1_000_000) + 1,
      overlap: enqueue ? "allow" : overlap,
      keep: whole("keep", keep, 1, 1_000_000),
    };
    made("schedule", name);
  }

  get store(): Schedules<Connection> {
    return require(this.context.database.engine.schedules, "schedule");
  }

  /** Nobody is waited for longer: what is asked for can be asked for again. */
  get waitMs(): number {
    const { wait } = this.context;
    return wait === "nowait" ? 1 : Math.min(longestWait, Math.max(1, wait));
  }

  get #rhythm(): Rhythm {
    return (this.#lazyRhythm ??= rhythmOf(this.#when));
  }

  async start({ signal }: { readonly signal?: AbortSignal | undefined } = {}): Promise<void> {
    checkSignal(signal);
    signal?.throwIfAborted();
    if (this.#looping) throw new UsageError(`schedule ${this.name}: it was started already`);
    const stop = new AbortController();
    const begun = Promise.withResolvers<void>();
    const forget = this.context.started.add("schedule.start", (grace) => this.stop({ grace }));
    stop.signal.addEventListener("abort", forget);
    // Outside of whatever transaction this is called in, which will be over by the time of the first tick.
    const ended = detached(this.context, () => this.#loop(stop.signal, begun));
    this.#looping = { stop, ended };
    const onAbort = () => {
      // Told by the signal, so whoever aborts it need not wait here.
      void this.#stop(0, signal?.reason);
    };
    signal?.addEventListener("abort", onAbort, { once: true });
    stop.signal.addEventListener("abort", () => signal?.removeEventListener("abort", onAbort));
    try {
      await begun.promise;
    } catch (error) {
      this.#looping = undefined;
      stop.abort();
      throw error;
    }
  }

  stop({ grace }: { readonly grace?: number } = {}): Promise<void> {
    return this.#stop(grace === undefined ? undefined : milliseconds(grace, "grace"));
  }

  async #stop(graceMs: number | undefined, reason?: unknown): Promise<void> {
    const looping = this.#looping;
    looping?.stop.abort();
    this.#nudge();
    const abort = () => {
      this.#aborted = { reason: reason ?? new UsageError(`The schedule ${this.name} was stopped`) };
      for (const run of this.#active) run.abort(this.#aborted.reason);
    };
    const timer = graceMs === undefined ? undefined : setTimeout(abort, graceMs);
    if (graceMs === 0) abort();
    await looping?.ended;
    while (this.#running.size > 0) await Promise.allSettled(this.#running);
    clearTimeout(timer);
    if (this.#looping === looping) this.#looping = undefined;
    this.#aborted = undefined;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }

  nextRuns(count = 1, from: Date = new Date()): Date[] {
    return following(this.#rhythm, count, checkMoment("nextRuns", "from", from));
  }

  async runNow(): Promise<{ readonly ran: boolean; readonly tick: Date | undefined }> {
    return detached(this.context, async () => {
      const { claimed, sentAt } = await this.#byHand();
      if (!claimed) return { ran: false, tick: undefined };
      const tick = new Date(claimed.tick);
      if (!this.#enqueue) await this.#run(claimed, sentAt);
      return { ran: true, tick };
    });
  }

  /** Somebody who decides about another run at this moment is waited for: that says nothing about this one. */
  async #byHand(): Promise<{ readonly claimed: Claimed | undefined; readonly sentAt: number }> {
    const started = performance.now();
    for (const pauses = new Pauses(10, 250); ;) {
      const sentAt = performance.now();
      const { claimed, busy } = this.#enqueue
        ? await this.#enqueueOne(this.#enqueue, "now")
        : await this.#step({ take: false, wish: "now", as: "running" });
      if (!busy) return { claimed, sentAt };
      const waited = performance.now() - started;
      if (waited > this.waitMs)
        throw waitedInVain(this.context, { names: [`schedule ${this.name}`] }, waited, undefined);
      await sleep(pauses.next());
    }
  }

  pause(): Promise<void> {
    return this.#pause(true);
  }

  async resume(): Promise<void> {
    await this.#pause(false);
    this.#nudged = true;
    this.#nudge();
  }

  async #pause(paused: boolean): Promise<void> {
    await this.#call(async (connection, how) => {
      const set = () => this.store.administration.pause(connection, this.name, paused, how);
      if (await set()) return;
      // It was never started anywhere.
      await this.#step({ take: false, wish: undefined, as: "running" }, { connection, how });
      await set();
    });
  }

  /** In the transaction of the same instance whose body calls, if there is one. What it does may be done again. */
  #call<T>(work: (connection: Connection, how: How) => Promise<T>): Promise<T> {
    return send(
      this.context,
      placeOf(this.context, {}, "schedule"),
      { names: [`schedule ${this.name}`] },
      work,
    );
  }

  async status(): Promise<ScheduleStatus> {
    const { now, last, paused, runs } = await this.#list(100);
    const open = (state: RunState) => state === "running" || state === "waiting";
    const shown = runs.map(asInfo);
    const next = this.#rhythm.after(now);
    const wrong = shown.find(({ error }) => error !== undefined);
    return {
      name: this.name,
      started: this.#looping !== undefined,
      paused,
      last: last === undefined ? undefined : new Date(last),
      next: next === undefined ? undefined : new Date(next),
      running: shown.filter(({ state }) => open(state)),
      lastRun: shown.find(({ state }) => !open(state) && state !== "skipped"),
      lastError: wrong && { tick: wrong.tick, error: wrong.error as string },
    };
  }

  async runs(limit = 20): Promise<readonly RunInfo[]> {
    return (await this.#list(whole("limit", limit, 1, 1_000_000))).runs.map(asInfo);
  }

  #list(limit: number) {
    return this.#call(async (connection) => this.store.administration.list(connection, this.name, limit));
  }

  /** A statement of its own, again after a failure that may pass. */
  async oneShot<T>(work: (connection: Connection, how: How) => Soon<T>, ms?: number): Promise<T> {
    const place = placeOf(this.context, { separate: true }, "schedule");
    // So that the wait is over before it is given up.
    const waitMs = Math.min(place.waitMs, (ms ?? oneShotMs) / 2);
    return send(
      this.context,
      { ...place, waitMs },
      { names: [`schedule ${this.name}`], policy, ...(ms !== undefined && { ms }) },
      async (connection, how) => work(connection, how),
    );
  }

  async #loop(stop: AbortSignal, begun: PromiseWithResolvers<void>): Promise<void> {
    const pauses = new Pauses(250, floorMs);
    try {
      // A pattern that cannot be read, a table that is not there: told to whoever starts it.
      void this.#rhythm;
      await this.#step({ take: false, wish: undefined, as: "running" });
      begun.resolve();
    } catch (error) {
      begun.reject(error);
      return;
    }
    while (!stop.aborted) {
      let ms: number;
      try {
        ms = await this.#turn();
        pauses.reset();
      } catch (error) {
        if (stop.aborted) return;
        this.#report(error);
        ms = pauses.next();
      }
      await this.#sleep(ms, stop);
    }
  }

  /** Wakes up early for a run that ends here, and for `stop`. It keeps the process alive, as a server does. */
  async #sleep(ms: number, stop: AbortSignal): Promise<void> {
    if (stop.aborted || this.#nudged || ms <= 0) {
      this.#nudged = false;
      return;
    }
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, Math.min(ms, floorMs));
      this.#nudge = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    this.#nudge = () => {};
    this.#nudged = false;
  }

  #now(): number {
    return this.#clock.theirs + performance.now() - this.#clock.ours;
  }

  /** Does what is due, and returns how long there is nothing to do. */
  async #turn(): Promise<number> {
    const { overlap } = this.#terms;
    const room = overlap === "allow" ? this.#active.size < mostAtOnce : this.#active.size === 0;
    // While one runs here, others that come are only to be recorded as skipped.
    if (!room && overlap !== "skip") return floorMs;
    const wish = await this.#due(this.#now());
    const sentAt = performance.now();
    const standing = this.#enqueue
      ? await this.#enqueueDue(this.#enqueue, wish)
      : await this.#step({ take: room, wish, as: "running" });
    const { claimed, busy, skipped, wake, now, last } = standing;
    if (claimed && !this.#enqueue) this.#track(this.#run(claimed, sentAt).catch(() => {}));
    if (skipped && wish)
      emit("holdfast:schedule:skipped", () => ({ schedule: this.name, tick: new Date(wish.tick) }));
    if (wish && (claimed ? claimed.tick === wish.tick : !wish.run && last === wish.tick))
      this.#tellMissed(wish);
    if (claimed || skipped) return 0;
    // Somebody else is at it, for a millisecond, or for as long as a transaction with `enqueue` takes.
    if (busy) return Math.min(1000, 20 * 2 ** this.#busyTimes++) * (0.5 + Math.random());
    this.#busyTimes = 0;
    // It was decided upon meanwhile, or the wish was out of date.
    if (wish && (last !== wish.after || (wish.before !== undefined && now >= wish.before))) return 0;
    const next = wish && now < wish.tick ? wish.tick : this.#rhythm.after(Math.max(now, last));
    const times = [floorMs];
    if (next !== undefined) times.push(next - now);
    // One that is over, and still locked or not ours to take, is looked at again a second later.
    if (wake !== undefined && room) times.push(wake > now ? wake - now : 1000);
    return Math.max(1, Math.min(...times));
  }

  /** What is due at that moment, as far as this process knows. */
  async #due(now: number): Promise<ScheduleWish | undefined> {
    const after = this.#last;
    const rhythm = this.#rhythm;
    const first = rhythm.after(after);
    if (first === undefined || first > now) return undefined;
    if (this.#catchUp === "all") {
      let at = this.#backlog.indexOf(after) + 1;
      if (at === 0 || at === this.#backlog.length) {
        this.#backlog = await due(rhythm, after, now, this.#limit);
        at = 0;
      }
      const tick = this.#backlog[at] as number;
      return wishFor("all", this.#graceMs, { after, now, first, tick, next: undefined });
    }
    const [tick = first] = await due(rhythm, after, now, 1);
    return wishFor(this.#catchUp, this.#graceMs, { after, now, first, tick, next: rhythm.after(tick) });
  }

  #tellMissed({ missed: [first, before] }: ScheduleWish): void {
    if (first === before) return;
    emit("holdfast:schedule:missed", () => ({
      schedule: this.name,
      first: new Date(first),
      before: new Date(before),
    }));
  }

  /** `inside`: of a transaction. */
  async #step(
    wish: Pick<ScheduleStep, "take" | "wish" | "as">,
    inside?: { readonly connection: Connection; readonly how: How },
  ): Promise<ScheduleStanding> {
    const step: ScheduleStep = { ...this.#terms, ...wish, token: randomUUID() };
    const work = (connection: Connection, how: How) => this.store.step(connection, step, how);
    const standing = await (inside ? work(inside.connection, inside.how) : this.oneShot(work));
    this.#clock = { theirs: standing.now, ours: performance.now() };
    // What a transaction sees may be undone.
    if (!inside) this.#last = standing.last;
    for (const tick of standing.died) this.#died(new Date(tick));
    return standing;
  }

  #died(tick: Date): void {
    const { attempts: attempt } = this.#terms;
    const error = new ScheduleError(
      "HF_SCHEDULE_LOST",
      `The process that ran ${this.name} at ${tick.toISOString()} died, or did not renew its claim in time, and no attempt is left.`,
    );
    emit("holdfast:schedule:failed", () => ({
      schedule: this.name,
      tick,
      attempt,
      retryInMs: undefined,
      error,
    }));
    this.#report(error, { tick, attempt });
  }

  #track(work: Promise<unknown>): void {
    const tracked = work.finally(() => {
      this.#running.delete(tracked);
      this.#nudged = true;
      this.#nudge();
    });
    this.#running.add(tracked);
  }

  /** Rejects with what the handler threw, if that was the last attempt or a run by hand. */
  async #run(claimed: Claimed, sentAt: number): Promise<void> {
    const run = new Active(this, claimed, this.#terms.ttlMs, sentAt);
    const { tick, fence, attempt, manual } = run;
    this.#active.add(run);
    if (this.#aborted) run.abort(this.#aborted.reason);
    const started = performance.now();
    emit("holdfast:schedule:started", () => ({ schedule: this.name, tick, fence, attempt }));
    let ending: RunEnding = { state: "done" };
    let failed: { error: unknown } | undefined;
    let uncounted = false;
    try {
      // The process may have been frozen since it asked.
      if (run.lost) throw run.lost;
      const handler = this.#handler;
      if (handler)
        await traced(
          "holdfast:schedule",
          () => ({ schedule: this.name, tick, fence, attempt, manual }),
          async () => handler(run),
        );
      if ((await run.settled()) === "rolled back")
        throw new UsageError(
          `schedule ${this.name}: run.complete(tx) was called, but its transaction was not committed`,
        );
    } catch (error) {
      failed = { error };
      // Stopped in the middle of it: others go on with it at once, and it was not its fault.
      uncounted = run.signal.aborted && !run.lost;
      const again = uncounted || (!manual && attempt < this.#terms.attempts);
      const retryInMs = uncounted ? 0 : again ? this.#backoffOf(attempt) : undefined;
      ending = { state: "failed", error: text(error), retryInMs, uncounted };
    }
    const durationMs = performance.now() - started;
    try {
      const state = await this.#end(run, claimed, ending);
      if (state === "lost") {
        failed = { error: run.lost ?? this.#gone(run) };
        uncounted = false;
      } else if (!failed)
        emit("holdfast:schedule:done", () => ({
          schedule: this.name,
          tick,
          fence,
          attempt,
          durationMs: performance.now() - started,
        }));
    } catch (error) {
      // It cannot be told that it is over: it will be taken over, and begun again.
      failed ??= { error };
      this.#report(error, { tick, attempt });
    } finally {
      run.stop();
      this.#active.delete(run);
    }
    if (!failed || (uncounted && !manual)) return;
    const { error } = failed;
    const retryInMs = ending.state === "failed" ? ending.retryInMs : undefined;
    const told = { schedule: this.name, tick, attempt, retryInMs, durationMs, error };
    emit("holdfast:schedule:failed", () => told);
    if (manual) throw error;
    this.#report(error, { tick, attempt });
  }

  async #end(run: Active, claimed: Claimed, ending: RunEnding): Promise<"ended" | "before" | "lost"> {
    if (run.lost) return "lost";
    run.stop();
    return this.oneShot((connection, how) =>
      this.store.end(connection, claimed, ending, { ...how, joined: false }),
    );
  }

  #gone(run: Active): ScheduleError {
    return new ScheduleError(
      "HF_SCHEDULE_LOST",
      `The run ${run.name} (fence ${run.fence}) was somebody else's before it had ended here.`,
    );
  }

  #backoffOf(attempt: number): number {
    try {
      return this.#backoff(attempt);
    } catch (error) {
      this.#report(error);
      return 1000;
    }
  }

  /** If the tick is really there to be had, in a transaction of its own. */
  async #enqueueDue(enqueue: Enqueue<Native>, wish: Due | undefined): Promise<ScheduleStanding> {
    const standing = await this.#step({ take: false, wish: undefined, as: "done" });
    if (!wish || standing.paused || standing.last !== wish.after || standing.now < wish.tick) return standing;
    if (this.#vain.tick === wish.tick && standing.now < this.#vain.until)
      return { ...standing, wake: this.#vain.until };
    if (!wish.run) return this.#step({ take: false, wish, as: "done" });
    try {
      const done = await this.#enqueueOne(enqueue, wish);
      if (done.claimed) this.#last = done.claimed.tick;
      return done;
    } catch (error) {
      const { tick } = wish;
      const attempt = this.#vain.tick === tick ? this.#vain.times + 1 : 1;
      const enough = attempt >= this.#terms.attempts;
      const retryInMs = enough ? undefined : this.#backoffOf(attempt);
      const until = this.#now() + (retryInMs ?? 0);
      this.#vain = { tick, times: attempt, until };
      const at = new Date(tick);
      emit("holdfast:schedule:failed", () => ({ schedule: this.name, tick: at, attempt, retryInMs, error }));
      this.#report(error, { tick: at, attempt });
      if (enough) return this.#step({ take: false, wish, as: { failed: text(error) } });
      return { ...standing, wake: until };
    }
  }

  async #enqueueOne(enqueue: Enqueue<Native>, wish: Due | "now"): Promise<ScheduleStanding> {
    const started = performance.now();
    const standing = await this.#hf.transaction({}, async (tx) => {
      const scope = scopeOf(tx, "schedule");
      const how = { waitMs: this.waitMs, free: false };
      const found = await scope.work(
        ({ connection }) => this.#step({ take: false, wish, as: "done" }, { connection, how }),
        undefined,
        [`schedule ${this.name}`],
      );
      if (found.claimed) await enqueue(new Date(found.claimed.tick), tx);
      return found;
    });
    if (standing.claimed) {
      const { tick, fence, attempt } = standing.claimed;
      emit("holdfast:schedule:done", () => ({
        schedule: this.name,
        tick: new Date(tick),
        fence,
        attempt,
        durationMs: performance.now() - started,
      }));
    }
    return standing;
  }

  #report(error: unknown, run?: { readonly tick: Date; readonly attempt: number }): void {
    const of = run ? `${this.name} at ${run.tick.toISOString()} (attempt ${run.attempt})` : this.name;
    if (this.#onError) {
      try {
        return this.#onError(error, run);
      } catch (thrown) {
        process.emitWarning(
          `onError of the schedule ${this.name} threw: ${message(thrown)}`,
          "HoldfastWarning",
        );
      }
    }
    process.emitWarning(`The schedule ${of} failed: ${text(error)}`, "HoldfastWarning");
  }
}

export function asInfo({
  tick,
  state,
  attempt,
  fence,
  manual,
  holder,
  started,
  ended,
  error,
}: RunRow): RunInfo {
  return {
    tick: new Date(tick),
    state,
    attempt,
    fence,
    manual,
    holder,
    startedAt: new Date(started),
    endedAt: ended === undefined ? undefined : new Date(ended),
    error,
  };
}

function text(error: unknown): string {
  return described(error, 2000, { stack: false });
}

function oneOf(what: string, value: unknown, words: readonly string[]): void {
  if (!words.includes(value as string))
    throw new UsageError(
      `schedule: ${what} must be ${words.map((word) => `"${word}"`).join(" or ")}, not ${shownValue(value)}`,
    );
}

function whole(what: string, value: unknown, least: number, most: number): number {
  if (!Number.isSafeInteger(value) || (value as number) < least || (value as number) > most)
    throw new UsageError(
      `schedule: ${what} must be a whole number from ${least} to ${most}, not ${String(value)}`,
    );
  return value as number;
}
