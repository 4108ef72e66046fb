/** How many jobs a claim asks for: larger batches of what is quickly done, smaller ones of what is not, or is large. */
import type { JobBatch } from "../job.ts";
import type { WorkerSettings } from "./settings.ts";

/** A batch that takes less is too small, one that takes more too large. */
const shortMs = 50;
const longMs = 200;
/** The text of a claim that is worth a round trip, and no burden to anybody's memory. */
const fairLength = 8 * 1024 * 1024;

export class ClaimSize {
  readonly #settings: WorkerSettings<unknown>;
  #size: number;
  /** So many jobs at the most, as they are large. */
  #bearable = Infinity;

  constructor(settings: WorkerSettings<unknown>) {
    this.#settings = settings;
    this.#size = Math.min(settings.concurrency, settings.most);
  }

  /** Jobs are so short that more are claimed than run at once. */
  get isAhead(): boolean {
    return this.#size > this.#settings.concurrency;
  }

  /** A batch has ended. */
  learn({ began, asked, size }: JobBatch): void {
    const { concurrency, most } = this.#settings;
    const took = performance.now() - began;
    if (took < shortMs && size * 2 >= asked)
      this.#size = Math.min(most, this.#size * (took < shortMs / 5 ? 4 : 2));
    else if (took > longMs) this.#size = Math.max(Math.min(concurrency, most), Math.floor(this.#size / 2));
  }

  /** So many could not be had. */
  tooMany(asked: number): void {
    this.#bearable = Math.max(1, asked >> 1);
  }

  /** So many were claimed, and their text was so long. */
  weigh(jobs: number, length: number): void {
    this.#bearable = Math.max(1, Math.min(2 * this.#bearable, Math.floor((fairLength * jobs) / length)));
  }

  /**
   * How many to claim now. While jobs are slow, none that could not begin at once: another worker may have room. While
   * they are short, up to one batch and a half is on its way or waits.
   */
  room(running: number, coming: number): number {
    const { concurrency, most } = this.#settings;
    const size = Math.min(this.#size, this.#bearable);
    if (size > concurrency) return coming >= size * 1.5 ? 0 : size;
    return Math.min(most, this.#bearable, concurrency - running - coming);
  }
}
