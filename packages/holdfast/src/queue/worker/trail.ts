import type { ClaimedJob, JobPlace } from "../store.ts";

/** How far below the last one that was found the next are looked for: transactions that began earlier may end later. */
const margin = 2000;
/** The same of what is due, in milliseconds. */
const marginMs = 5000;
/** Everything is looked at this often: what was committed very late, what came back, and other priorities. */
const wholeMs = 500;
/** It may have to walk over many rows that are dead: then it takes up a tenth of the time at the most. */
const wholeShare = 10;
/** If it costs next to nothing, besides what its jobs cost, there is no need to wait with it. */
const cheapMs = 5;
const perJobMs = 0.05;

/** One that has begun. Tell how many jobs it has brought. */
export interface Look {
  readonly whole: boolean;
  end(found: number): void;
}

/** Where a worker has been, and so where to look next. */
export class Trail implements JobPlace {
  readonly floors = new Map<number, number>();
  after: number | undefined;
  /** When to look at everything again, and how long it took the last time. */
  #wholeAt = 0;
  #tookMs = 0;
  #looking = false;

  found({ priority, id, group }: ClaimedJob): void {
    if (group !== undefined) return;
    this.floors.set(priority, Math.max(this.floors.get(priority) ?? 0, id - margin));
  }

  /** What was due by this moment of the server's has been moved, but for what was not committed yet. */
  moved(moment: number | undefined): void {
    if (moment !== undefined) this.after = Math.max(this.after ?? 0, moment - marginMs);
  }

  /** There may be something anywhere: the next look is at everything, if that is not too much. Milliseconds until it may be. */
  wholeNext(): number {
    if (this.#looking) return wholeMs;
    if (this.#tookMs < cheapMs) this.#wholeAt = 0;
    return Math.max(0, this.#wholeAt - performance.now());
  }

  /** Whether the look that begins now is at everything. One at a time. */
  look(): Look {
    const began = performance.now();
    const whole = !this.#looking && began >= this.#wholeAt;
    if (whole) this.#looking = true;
    return {
      whole,
      end: (found) => {
        if (!whole) return;
        this.#looking = false;
        this.#tookMs = performance.now() - began - found * perJobMs;
        this.#wholeAt = performance.now() + Math.max(wholeMs, wholeShare * this.#tookMs);
      },
    };
  }
}
