/** Ticks that are due, and what becomes of those that were missed. */
import { emit } from "../events/events.ts";
import { type ScheduleWish, wishFor } from "./decide.ts";
import type { ScheduleDefinition } from "./definition.ts";
import { due } from "./ticks.ts";

/** As long as the database may take to decide: a tick is not out of date because the next one has come meanwhile. */
const slowMs = 5000;

export class DueTicks {
  readonly #definition: ScheduleDefinition<never>;
  /** Ticks that are to be caught up with, in order, once they have been counted. */
  #backlog: readonly number[] = [];

  constructor(definition: ScheduleDefinition<never>) {
    this.#definition = definition;
  }

  /** What is due at that moment, as far as this process knows. `after`: the newest tick that was decided upon. */
  async at(now: number, after: number): Promise<ScheduleWish | undefined> {
    const { rhythm, catchUp, limit, graceMs } = this.#definition;
    const first = rhythm.after(after);
    if (first === undefined || first > now) return undefined;
    if (catchUp === "all") {
      let at = this.#backlog.indexOf(after) + 1;
      if (at === 0 || at === this.#backlog.length) {
        this.#backlog = await due(rhythm, after, now, limit);
        at = 0;
      }
      const tick = this.#backlog[at] as number;
      return wishFor("all", graceMs, { after, now, first, tick, next: undefined });
    }
    const [tick = first] = await due(rhythm, after, now, 1);
    return wishFor(catchUp, graceMs, {
      after,
      now,
      first,
      tick,
      next: rhythm.after(Math.max(tick, now + slowMs)),
    });
  }

  tellMissed({ missed: [first, before] }: ScheduleWish): void {
    if (first === before) return;
    emit("holdfast:schedule:missed", () => ({
      schedule: this.#definition.name,
      first: new Date(first),
      before: new Date(before),
    }));
  }
}
