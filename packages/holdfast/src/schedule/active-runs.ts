/** Runs of a schedule that are under way in this process, from the claim to what became of them. */
import { emit, traced } from "../events/events.ts";
import { UsageError } from "../seam/errors.ts";
import type { ScheduleCalls } from "./calls.ts";
import type { ScheduleDefinition } from "./definition.ts";
import { ScheduleError } from "./errors.ts";
import { type Reports, text } from "./reports.ts";
import { Active } from "./run.ts";
import type { Claimed, RunEnding } from "./store.ts";

/** Why a run has not come to a good end here. */
interface Failed {
  readonly error: unknown;
  /** It is begun again then; undefined: never. */
  readonly retryInMs: number | undefined;
  /** This attempt does not count. */
  readonly uncounted: boolean;
}

export class ActiveRuns {
  readonly #definition: ScheduleDefinition<never>;
  readonly #calls: ScheduleCalls;
  readonly #reports: Reports;
  readonly #onEnd: () => void;
  readonly #active = new Set<Active>();
  readonly #running = new Set<Promise<unknown>>();
  /** Whatever is begun now is to stop at once. */
  #aborted: { readonly reason: unknown } | undefined;

  /** `onEnd`: one that was begun has ended. */
  constructor(
    definition: ScheduleDefinition<never>,
    calls: ScheduleCalls,
    reports: Reports,
    onEnd: () => void,
  ) {
    this.#definition = definition;
    this.#calls = calls;
    this.#reports = reports;
    this.#onEnd = onEnd;
  }

  get size(): number {
    return this.#active.size;
  }

  /** What runs, and what is begun, is to stop at once, until it has settled. */
  abort(reason: unknown): void {
    this.#aborted = { reason };
    for (const run of this.#active) run.abort(reason);
  }

  /** Nothing that was begun is under way. */
  async settled(): Promise<void> {
    while (this.#running.size > 0) await Promise.allSettled(this.#running);
  }

  /** From now on, what is begun goes on. */
  allow(): void {
    this.#aborted = undefined;
  }

  /** Nobody waits for it. */
  begin(claimed: Claimed, sentAt: number): void {
    const tracked = this.run(claimed, sentAt)
      .catch(() => {})
      .finally(() => {
        this.#running.delete(tracked);
        this.#onEnd();
      });
    this.#running.add(tracked);
  }

  /** Rejects with what the handler threw, if that was the last attempt or a run by hand. */
  async run(claimed: Claimed, sentAt: number): Promise<void> {
    const { name: schedule, terms } = this.#definition;
    const run = new Active(this.#calls, claimed, terms.ttlMs, sentAt);
    const { tick, fence, attempt, manual } = run;
    this.#active.add(run);
    if (this.#aborted) run.abort(this.#aborted.reason);
    const started = performance.now();
    emit("holdfast:schedule:started", () => ({ schedule, tick, fence, attempt }));
    const handled = await this.#handle(run);
    const durationMs = performance.now() - started;
    const failed = await this.#end(run, claimed, handled, started);
    if (!failed || (failed.uncounted && !manual)) return;
    const { error, retryInMs } = failed;
    const told = { schedule, tick, attempt, retryInMs, durationMs, error };
    emit("holdfast:schedule:failed", () => told);
    if (manual) throw error;
    this.#reports.report(error, { tick, attempt });
  }

  async #handle(run: Active): Promise<Failed | undefined> {
    const { name: schedule, handler, terms } = this.#definition;
    const { tick, fence, attempt, manual } = run;
    try {
      // The process may have been frozen since it asked.
      if (run.lost) throw run.lost;
      if (handler)
        await traced(
          "holdfast:schedule",
          () => ({ schedule, tick, fence, attempt, manual }),
          async () => handler(run),
        );
      if ((await run.settled()) === "rolled back")
        throw new UsageError(
          `schedule ${schedule}: run.complete(tx) was called, but its transaction was not committed`,
        );
      return undefined;
    } catch (error) {
      // Stopped in the middle of it: others go on with it at once, and it was not its fault.
      const uncounted = run.signal.aborted && !run.lost;
      const again = uncounted || (!manual && attempt < terms.attempts);
      const retryInMs = uncounted ? 0 : again ? this.#reports.pauseAfter(attempt) : undefined;
      return { error, retryInMs, uncounted };
    }
  }

  /** What became of it in the end: others may have it by now. */
  async #end(
    run: Active,
    claimed: Claimed,
    failed: Failed | undefined,
    started: number,
  ): Promise<Failed | undefined> {
    const { name: schedule } = this.#definition;
    const { tick, fence, attempt } = run;
    try {
      const state = await this.#record(run, claimed, failed);
      if (state === "lost")
        return {
          error: run.lost ?? this.#gone(run),
          retryInMs: failed?.retryInMs,
          uncounted: false,
        };
      if (!failed)
        emit("holdfast:schedule:done", () => ({
          schedule,
          tick,
          fence,
          attempt,
          durationMs: performance.now() - started,
        }));
      return failed;
    } catch (error) {
      // It cannot be told that it is over: it will be taken over, and begun again.
      this.#reports.report(error, { tick, attempt });
      return failed ?? { error, retryInMs: undefined, uncounted: false };
    } finally {
      run.stop();
      this.#active.delete(run);
    }
  }

  async #record(
    run: Active,
    claimed: Claimed,
    failed: Failed | undefined,
  ): Promise<"ended" | "before" | "lost"> {
    if (run.lost) return "lost";
    run.stop();
    const ending: RunEnding = failed
      ? { ...failed, state: "failed", error: text(failed.error) }
      : { state: "done" };
    return this.#calls.oneShot((connection, how) =>
      this.#calls.store.end(connection, claimed, ending, { ...how, joined: false }),
    );
  }

  #gone(run: Active): ScheduleError {
    return new ScheduleError(
      "HF_SCHEDULE_LOST",
      `The run ${run.name} (fence ${run.fence}) was somebody else's before it had ended here.`,
    );
  }
}
