/** What goes wrong with a schedule, for whoever is told of it. */
import { emit } from "../events/events.ts";
import { HoldfastError, UsageError, message } from "../seam/errors.ts";
import { described, isOpaque } from "../seam/thrown.ts";
import type { ScheduleDefinition } from "./definition.ts";
import { ScheduleError } from "./errors.ts";

export class Reports {
  readonly #definition: ScheduleDefinition<never>;

  constructor(definition: ScheduleDefinition<never>) {
    this.#definition = definition;
  }

  /** `run`: of an attempt that failed. Without: trouble with the database. */
  report(error: unknown, run?: { readonly tick: Date; readonly attempt: number }): void {
    const { name, onError } = this.#definition;
    const of = run ? `${name} at ${run.tick.toISOString()} (attempt ${run.attempt})` : name;
    if (onError) {
      try {
        return onError(error, run);
      } catch (thrown) {
        process.emitWarning(`onError of the schedule ${name} threw: ${message(thrown)}`, "HoldfastWarning");
      }
    }
    process.emitWarning(`The schedule ${of} failed: ${text(error)}`, "HoldfastWarning");
  }

  /** Between runs. What the database says comes as one of ours; anything else is of a function of the caller's own. */
  trouble(error: unknown, what = ""): void {
    const ours = !isOpaque(error) && error instanceof HoldfastError;
    const { name } = this.#definition;
    this.report(
      ours ? error : new UsageError(`schedule ${name}: ${what}${message(error)}`, "HF_USAGE", error),
    );
  }

  died(tick: Date): void {
    const { name, terms } = this.#definition;
    const { attempts: attempt } = terms;
    const error = new ScheduleError(
      "HF_SCHEDULE_LOST",
      `The process that ran ${name} at ${tick.toISOString()} died, or did not renew its claim in time, and no attempt is left.`,
    );
    emit("holdfast:schedule:failed", () => ({
      schedule: name,
      tick,
      attempt,
      retryInMs: undefined,
      error,
    }));
    this.report(error, { tick, attempt });
  }

  /** Milliseconds before the attempt after this one. */
  pauseAfter(attempt: number): number {
    try {
      return this.#definition.backoff(attempt);
    } catch (error) {
      this.trouble(error, "backoff threw: ");
      return 1000;
    }
  }
}

/** As it is stored, and shown to people. */
export function text(error: unknown): string {
  return described(error, 2000, { stack: false });
}
