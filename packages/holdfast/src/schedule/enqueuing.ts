/** Ticks whose work is put elsewhere, in the transaction in which they are recorded. */
import { emit } from "../events/events.ts";
import { scopeOf } from "../transaction/scope.ts";
import type { Transactor } from "../transaction/transaction.ts";
import type { ScheduleCalls } from "./calls.ts";
import type { ScheduleDefinition } from "./definition.ts";
import { type Reports, text } from "./reports.ts";
import type { Due, ScheduleStanding } from "./store.ts";
import type { Enqueue } from "./types.ts";

export class Enqueuing<Native> {
  readonly #hf: Transactor<Native>;
  readonly #definition: ScheduleDefinition<Native>;
  readonly #enqueue: Enqueue<Native>;
  readonly #calls: ScheduleCalls;
  readonly #reports: Reports;
  /** How often the tick that comes next could not be enqueued. */
  #vain = { tick: 0, times: 0, until: 0 };

  constructor(
    hf: Transactor<Native>,
    definition: ScheduleDefinition<Native>,
    enqueue: Enqueue<Native>,
    calls: ScheduleCalls,
    reports: Reports,
  ) {
    this.#hf = hf;
    this.#definition = definition;
    this.#enqueue = enqueue;
    this.#calls = calls;
    this.#reports = reports;
  }

  /** If the tick is really there to be had, in a transaction of its own. */
  async due(wish: Due | undefined): Promise<ScheduleStanding> {
    const standing = await this.#calls.step({ take: false, wish: undefined, as: "done" });
    if (!wish || standing.paused || standing.last !== wish.after || standing.now < wish.tick) return standing;
    if (this.#vain.tick === wish.tick && standing.now < this.#vain.until)
      return { ...standing, wake: this.#vain.until };
    if (!wish.run) return this.#calls.step({ take: false, wish, as: "done" });
    try {
      const done = await this.one(wish);
      if (done.claimed) this.#calls.last = done.claimed.tick;
      return done;
    } catch (error) {
      return this.#failed(wish, standing, error);
    }
  }

  async #failed(wish: Due, standing: ScheduleStanding, error: unknown): Promise<ScheduleStanding> {
    const { name, terms } = this.#definition;
    const { tick } = wish;
    const attempt = this.#vain.tick === tick ? this.#vain.times + 1 : 1;
    const enough = attempt >= terms.attempts;
    const retryInMs = enough ? undefined : this.#reports.pauseAfter(attempt);
    const until = this.#calls.now() + (retryInMs ?? 0);
    this.#vain = { tick, times: attempt, until };
    const at = new Date(tick);
    emit("holdfast:schedule:failed", () => ({ schedule: name, tick: at, attempt, retryInMs, error }));
    this.#reports.report(error, { tick: at, attempt });
    if (enough) return this.#calls.step({ take: false, wish, as: { failed: text(error) } });
    return { ...standing, wake: until };
  }

  async one(wish: Due | "now"): Promise<ScheduleStanding> {
    const calls = this.#calls;
    const enqueue = this.#enqueue;
    const started = performance.now();
    const standing = await this.#hf.transaction({}, async (tx) => {
      const scope = scopeOf(tx, "schedule");
      const how = { waitMs: calls.waitMs, free: false };
      const found = await scope.work(
        ({ connection }) => calls.step({ take: false, wish, as: "done" }, { connection, how }),
        undefined,
        calls.about.names,
      );
      if (found.claimed) await enqueue(new Date(found.claimed.tick), tx);
      return found;
    });
    if (standing.claimed) {
      const { tick, fence, attempt } = standing.claimed;
      emit("holdfast:schedule:done", () => ({
        schedule: this.#definition.name,
        tick: new Date(tick),
        fence,
        attempt,
        durationMs: performance.now() - started,
      }));
    }
    return standing;
  }
}
