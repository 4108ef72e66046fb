import { waitedInVain } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { UsageError } from "../seam/errors.ts";
import { emit } from "../events/events.ts";
import { checkMoment } from "../input/values.ts";
import { made } from "../events/made.ts";
import { checkSignal } from "../input/options.ts";
import { Pauses } from "../transaction/retry.ts";
import { type InstanceContext, contextOf, detached } from "../transaction/scope.ts";
import type { Transactor } from "../transaction/transaction.ts";
import { milliseconds, sleep } from "../waiting/wait.ts";
import { ActiveRuns } from "./active-runs.ts";
import { ScheduleCalls } from "./calls.ts";
import type { ScheduleWish } from "./decide.ts";
import { type ScheduleDefinition, definitionOf, whole } from "./definition.ts";
import { DueTicks } from "./due-ticks.ts";
import { Enqueuing } from "./enqueuing.ts";
import { Reports } from "./reports.ts";
import { asInfo } from "./run-info.ts";
import type { Claimed, RunState, ScheduleStanding } from "./store.ts";
import { following } from "./ticks.ts";
import type { Enqueue, Handler, RunInfo, Schedule, ScheduleOptions, ScheduleStatus } from "./types.ts";

/** The clock may be set, and a machine may sleep: nobody sleeps for longer. */
const floorMs = 30_000;
/** Of runs that may overlap, in one process. */
const mostAtOnce = 16;

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

class ScheduleRunner<Native> implements Schedule {
  readonly name: string;
  readonly #context: InstanceContext<unknown, Connection>;
  readonly #definition: ScheduleDefinition<Native>;
  readonly #reports: Reports;
  readonly #calls: ScheduleCalls;
  readonly #ticks: DueTicks;
  readonly #runs: ActiveRuns;
  /** Instead of runs. */
  readonly #enqueuing: Enqueuing<Native> | undefined;
  #looping: { readonly stop: AbortController; readonly ended: Promise<void> } | undefined;
  /** Ends the sleep. */
  #nudge: () => void = () => {};
  #nudged = false;
  #busyTimes = 0;

  constructor(
    hf: Transactor<Native>,
    name: string,
    options: ScheduleOptions & { readonly enqueue?: Enqueue<Native> },
    handler: Handler | undefined,
  ) {
    const context = (this.#context = contextOf(hf, "schedule"));
    const definition = (this.#definition = definitionOf(name, options, handler));
    const reports = (this.#reports = new Reports(definition));
    const calls = (this.#calls = new ScheduleCalls(context, definition.terms, reports));
    const { enqueue } = definition;
    this.name = name;
    this.#ticks = new DueTicks(definition);
    this.#runs = new ActiveRuns(definition, calls, reports, () => this.#wake());
    this.#enqueuing = enqueue && new Enqueuing(hf, definition, enqueue, calls, reports);
    made("schedule", name);
  }

  async start({ signal }: { readonly signal?: AbortSignal | undefined } = {}): Promise<void> {
    checkSignal(signal);
    signal?.throwIfAborted();
    if (this.#looping) throw new UsageError(`schedule ${this.name}: it was started already`);
    const stop = new AbortController();
    const begun = Promise.withResolvers<void>();
    const forget = this.#context.started.add("schedule.start", (grace) => this.stop({ grace }));
    stop.signal.addEventListener("abort", forget);
    // Outside of whatever transaction this is called in, which will be over by the time of the first tick.
    const ended = detached(this.#context, () => this.#loop(stop.signal, begun));
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
    const abort = () => this.#runs.abort(reason ?? new UsageError(`The schedule ${this.name} was stopped`));
    const timer = graceMs === undefined ? undefined : setTimeout(abort, graceMs);
    if (graceMs === 0) abort();
    await looping?.ended;
    await this.#runs.settled();
    clearTimeout(timer);
    if (this.#looping === looping) this.#looping = undefined;
    this.#runs.allow();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }

  nextRuns(count = 1, from: Date = new Date()): Date[] {
    return following(this.#definition.rhythm, count, checkMoment("nextRuns", "from", from));
  }

  async runNow(): Promise<{ readonly ran: boolean; readonly tick: Date | undefined }> {
    return detached(this.#context, async () => {
      const { claimed, sentAt } = await this.#byHand();
      if (!claimed) return { ran: false, tick: undefined };
      const tick = new Date(claimed.tick);
      if (!this.#enqueuing) await this.#runs.run(claimed, sentAt);
      return { ran: true, tick };
    });
  }

  /** Somebody who decides about another run at this moment is waited for: that says nothing about this one. */
  async #byHand(): Promise<{ readonly claimed: Claimed | undefined; readonly sentAt: number }> {
    const calls = this.#calls;
    const started = performance.now();
    for (const pauses = new Pauses(10, 250); ;) {
      const sentAt = performance.now();
      const { claimed, busy } = this.#enqueuing
        ? await this.#enqueuing.one("now")
        : await calls.step({ take: false, wish: "now", as: "running" });
      if (!busy) return { claimed, sentAt };
      const waited = performance.now() - started;
      if (waited > calls.waitMs) throw waitedInVain(this.#context, calls.about, waited, undefined);
      await sleep(pauses.next());
    }
  }

  pause(): Promise<void> {
    return this.#pause(true);
  }

  async resume(): Promise<void> {
    await this.#pause(false);
    this.#wake();
  }

  async #pause(paused: boolean): Promise<void> {
    const calls = this.#calls;
    await calls.call(async (connection, how) => {
      const set = () => calls.store.administration.pause(connection, this.name, paused, how);
      if (await set()) return;
      // It was never started anywhere.
      await calls.step({ take: false, wish: undefined, as: "running" }, { connection, how });
      await set();
    });
  }

  async status(): Promise<ScheduleStatus> {
    const { now, last, paused, runs } = await this.#list(100);
    const open = (state: RunState) => state === "running" || state === "waiting";
    const shown = runs.map(asInfo);
    const next = this.#definition.rhythm.after(now);
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
    const calls = this.#calls;
    return calls.call(async (connection) => calls.store.administration.list(connection, this.name, limit));
  }

  async #loop(stop: AbortSignal, begun: PromiseWithResolvers<void>): Promise<void> {
    const pauses = new Pauses(250, floorMs);
    try {
      // A pattern that cannot be read, a table that is not there: told to whoever starts it.
      void this.#definition.rhythm;
      await this.#calls.step({ take: false, wish: undefined, as: "running" });
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
        this.#reports.trouble(error);
        ms = pauses.next();
      }
      await this.#sleep(ms, stop);
    }
  }

  #wake(): void {
    this.#nudged = true;
    this.#nudge();
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

  /** Does what is due, and returns how long there is nothing to do. */
  async #turn(): Promise<number> {
    const { overlap } = this.#definition.terms;
    const room = overlap === "allow" ? this.#runs.size < mostAtOnce : this.#runs.size === 0;
    // While one runs here, others that come are only to be recorded as skipped.
    if (!room && overlap !== "skip") return floorMs;
    const wish = await this.#ticks.at(this.#calls.now(), this.#calls.last);
    const sentAt = performance.now();
    const standing = this.#enqueuing
      ? await this.#enqueuing.due(wish)
      : await this.#calls.step({ take: room, wish, as: "running" });
    const { claimed, busy, skipped, last } = standing;
    if (claimed && !this.#enqueuing) this.#runs.begin(claimed, sentAt);
    if (skipped && wish)
      emit("holdfast:schedule:skipped", () => ({ schedule: this.name, tick: new Date(wish.tick) }));
    if (wish && (claimed ? claimed.tick === wish.tick : !wish.run && last === wish.tick))
      this.#ticks.tellMissed(wish);
    if (claimed || skipped) return 0;
    // Somebody else is at it, for a millisecond, or for as long as a transaction with `enqueue` takes.
    if (busy) return Math.min(1000, 20 * 2 ** this.#busyTimes++) * (0.5 + Math.random());
    this.#busyTimes = 0;
    return this.#restAfter(standing, wish, room);
  }

  /** Nothing could be had. `room`: for another run. */
  #restAfter({ now, last, wake }: ScheduleStanding, wish: ScheduleWish | undefined, room: boolean): number {
    // It was decided upon meanwhile, or the wish was out of date.
    if (wish && (last !== wish.after || (wish.before !== undefined && now >= wish.before))) return 0;
    const next = wish && now < wish.tick ? wish.tick : this.#definition.rhythm.after(Math.max(now, last));
    const times = [floorMs];
    if (next !== undefined) times.push(next - now);
    // One that is over, and still locked or not ours to take, is looked at again a second later.
    if (wake !== undefined && room) times.push(wake > now ? wake - now : 1000);
    return Math.max(1, Math.min(...times));
  }
}
