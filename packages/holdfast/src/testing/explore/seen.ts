/** What was there in all runs together: whether anything was tested at all. */
import { message } from "../../seam/errors.ts";
import { wasDeadlock } from "./evidence.ts";
import { StatementPairs } from "./pairs.ts";
import type { ExploreRun } from "./schedule.ts";

export class SeenTable {
  readonly #names: readonly string[];
  /** Actors of which a statement was seen. */
  readonly #sent = new Set<number>();
  /** Actors that had a statement to send while another one had. */
  readonly #together = new Set<number>();
  /** What each threw first. */
  readonly #threw = new Map<number, unknown>();
  /** Somebody has not thrown. */
  #fulfilled = false;
  #deadlocks = 0;
  readonly pairs: StatementPairs;

  constructor(names: readonly string[]) {
    this.#names = names;
    this.pairs = new StatementPairs(names);
  }

  add(run: ExploreRun): void {
    const { choices, together, results } = run;
    for (const { chosen } of choices) this.#sent.add(chosen);
    for (const pair of together) for (const actor of pair.split(",")) this.#together.add(Number(actor));
    this.pairs.add(run);
    if (wasDeadlock(run)) this.#deadlocks++;
    for (const [i, result] of results.entries())
      if (result.status === "fulfilled") this.#fulfilled = true;
      else if (!this.#threw.has(i)) this.#threw.set(i, result.reason);
  }

  /** Whether a run came to its end. */
  get any(): boolean {
    return this.#fulfilled || this.#threw.size > 0;
  }

  /** Actors of which no statement was seen. */
  get silent(): readonly number[] {
    return this.#names.flatMap((_, i) => (this.#sent.has(i) ? [] : [i]));
  }

  /** Why nothing was tested, although nothing failed. */
  nothing(): string | undefined {
    const missing = (of: ReadonlySet<number>) => this.#names.filter((_, i) => !of.has(i)).join(", ");
    if (!this.#fulfilled)
      return `every actor threw in every run, so nothing was tested: ${this.#list()}. If that is right, catch it in the actor.`;
    const silent = missing(this.#sent);
    if (silent)
      return `no statement of ${silent} was seen, so nothing was tested. Statements are seen on connections of this process, also of servers in it that are asked over HTTP; not in another thread, and in another process only through a proxy (\`proxied\`).`;
    const apart = missing(this.#together);
    if (apart && this.#names.length > 1)
      return `${apart} never had a statement to send while another one had, so nothing was tested. Something in this process keeps them apart: a pool with too few connections (each actor needs one, and explore one more) or an HTTP agent with one, calls that are sent as one statement, a lock in memory, which does not hold in another process, or a timer.`;
    return undefined;
  }

  get noted(): { readonly deadlocks: number; readonly threw: Readonly<Record<string, string>> } {
    return {
      deadlocks: this.#deadlocks,
      threw: Object.fromEntries(
        [...this.#threw].map(([i, reason]) => [this.#names[i] ?? "", message(reason)]),
      ),
    };
  }

  #list(): string {
    return Object.entries(this.noted.threw)
      .map(([name, why]) => `${name}: ${why}`)
      .join("; ");
  }
}
