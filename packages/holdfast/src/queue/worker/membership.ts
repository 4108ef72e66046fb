/** A worker among those of its queue: the number that it has in the database, where it listens, and where it has been. */
import type { Ear } from "../../batch/notifier.ts";
import { Pauses } from "../../transaction/retry.ts";
import { sleep } from "../../waiting/wait.ts";
import type { QueueBatcher } from "../batcher.ts";
import type { Member } from "../rounds.ts";
import type { JobPlace } from "../store.ts";
import type { WorkerSettings } from "./settings.ts";
import { Trail } from "./trail.ts";

export class Membership implements Member {
  readonly ear: Ear;
  readonly trail = new Trail();
  id: number | undefined;
  lock: string | undefined;
  /** It has been given up for dead. */
  readonly lose: () => Promise<void>;
  readonly #batcher: QueueBatcher;
  readonly #settings: WorkerSettings<unknown>;
  readonly #stopping: AbortSignal;
  #resting = false;
  #silence: (() => void) | undefined;
  #part: (() => Promise<void>) | undefined;

  constructor(
    batcher: QueueBatcher,
    settings: WorkerSettings<unknown>,
    stopping: AbortSignal,
    lose: () => Promise<void>,
  ) {
    this.#batcher = batcher;
    this.#settings = settings;
    this.#stopping = stopping;
    this.lose = lose;
    this.ear = batcher.notifier.ear(settings.queue);
  }

  get queue(): number {
    return this.#settings.number;
  }

  get ttlMs(): number {
    return this.#settings.ttlMs;
  }

  get pollMs(): number {
    return this.#settings.pollMs;
  }

  get idle(): JobPlace | undefined {
    return this.#resting ? this.trail : undefined;
  }

  wake(): void {
    this.ear.notify();
  }

  trouble(error: unknown): void {
    this.#settings.trouble(error);
  }

  /** Listens for jobs, and takes part in the rounds. */
  join(): void {
    this.#silence = this.#batcher.notifier.listen();
    this.#part = this.#batcher.rounds.join(this);
  }

  /** Until it has a number, or is told to stop. */
  async enlist(): Promise<void> {
    for (const pauses = new Pauses(100, 5000); !this.#stopping.aborted;) {
      try {
        this.id = await this.#batcher.rounds.enlist(this);
        return;
      } catch (error) {
        this.#settings.trouble(error);
        await sleep(pauses.next(), this.#stopping).catch(() => {});
      }
    }
  }

  /** Until it is woken, told to stop, or the time is over. `looked`: others look for jobs meanwhile. */
  async rest(ms: number, looked: boolean): Promise<void> {
    this.#resting = looked;
    await this.ear.sleep(ms, this.#stopping).catch(() => {});
    this.#resting = false;
    if (this.ear.rung) this.trail.wholeNext();
    this.ear.rung = false;
  }

  deafen(): void {
    this.#silence?.();
    this.#batcher.notifier.forget(this.#settings.queue, this.ear);
  }

  async retire(): Promise<void> {
    const { id } = this;
    if (id === undefined) return;
    await this.#batcher.keep((connection, how) => this.#batcher.store.workers.retire(connection, id, how));
  }

  /** Gives no more signs of life. */
  async part(): Promise<void> {
    await this.#part?.();
  }
}
