/** How jobs have ended, until it is written down. */
import { Pauses } from "../../transaction/retry.ts";
import { sleep } from "../../waiting/wait.ts";
import type { EndedJobs } from "../store.ts";
import type { Leases } from "./leases.ts";
import type { WorkerParts } from "./parts.ts";

/** What has ended is written down at once if its batch is done, and else after so long. */
const partMs = 20;

export class Endings {
  readonly #worker: WorkerParts<unknown>;
  readonly #leases: Leases;
  #ended: EndedJobs[] = [];
  /** Leases of which nothing is left. */
  #whole: number[] = [];
  #flushing: Promise<void> | undefined;
  #timer: NodeJS.Timeout | undefined;
  #soonCalled = false;

  constructor(worker: WorkerParts<unknown>, leases: Leases) {
    this.#worker = worker;
    this.#leases = leases;
  }

  /** `last`: nothing is left of its lease. */
  add(ended: EndedJobs, last: boolean): void {
    this.#ended.push(ended);
    if (last) {
      this.#whole.push(ended.lease);
      this.#soon();
    } else this.#later();
  }

  /** All that there is, with these leases, of which nothing is left. */
  async drain(whole: readonly number[]): Promise<void> {
    this.#whole.push(...whole);
    while (this.#ended.length + this.#whole.length > 0 || this.#flushing) await this.#flush();
  }

  /** Nothing is written any more of what is left to a timer. */
  stopTimer(): void {
    clearTimeout(this.#timer);
  }

  /** Those that end in the same turn are written down together. */
  #soon(): void {
    if (this.#soonCalled || this.#flushing) return;
    this.#soonCalled = true;
    setImmediate(() => {
      this.#soonCalled = false;
      void this.#flush();
    });
  }

  #later(): void {
    this.#timer ??= setTimeout(() => void this.#flush(), partMs);
  }

  #flush(): Promise<void> {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#flushing) return this.#flushing;
    if (this.#ended.length + this.#whole.length === 0) return Promise.resolve();
    const ended = this.#ended;
    const whole = this.#whole;
    this.#ended = [];
    this.#whole = [];
    this.#flushing = this.#write(whole, ended).finally(() => {
      this.#flushing = undefined;
      if (this.#whole.length > 0) this.#soon();
      else if (this.#ended.length > 0) this.#later();
    });
    return this.#flushing;
  }

  async #write(whole: readonly number[], ended: readonly EndedJobs[]): Promise<void> {
    const { batcher, settings, member, life } = this.#worker;
    const call = { queue: settings.number, worker: member.id ?? 0, whole, ended };
    for (const pauses = new Pauses(50, 5000); ;) {
      try {
        const ours = await batcher.keep((connection, how) => batcher.store.finish(connection, call, how));
        this.#written(whole, ended, ours);
        return;
      } catch (error) {
        if (life.left) return;
        settings.trouble(error);
        // Written or not: a second time it changes nothing that is not ours, and finds what is gone gone.
        await sleep(pauses.next());
      }
    }
  }

  #written(whole: readonly number[], ended: readonly EndedJobs[], ours: ReadonlySet<number>): void {
    const { batcher, settings } = this.#worker;
    const { queue, limited, trouble } = settings;
    this.#leases.forget(whole);
    // One that waits for its next attempt may be the first that is due.
    if (ended.some(({ failure }) => failure)) batcher.notifier.notify(queue);
    // There is room again, here and for others.
    if (limited || ended.some(({ counted, job }) => counted && job.group !== undefined))
      void batcher.tell(queue).catch(trouble);
    this.#leases.drop(new Set(ended.map(({ lease }) => lease).filter((lease) => !ours.has(lease))));
  }
}
