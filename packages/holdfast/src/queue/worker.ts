/** Claims jobs, runs their handler, and says how they ended. Each part of that is a file of `worker/`. */
import { emit } from "../events/events.ts";
import { Pauses } from "../transaction/retry.ts";
import { sleep } from "../waiting/wait.ts";
import type { QueueBatcher } from "./batcher.ts";
import { WorkerLeftError } from "./errors.ts";
import type { Job } from "./job.ts";
import type { Worker } from "./types.ts";
import { ClaimSize } from "./worker/claim-size.ts";
import { Claims } from "./worker/claims.ts";
import { Endings } from "./worker/endings.ts";
import { Handlers } from "./worker/handlers.ts";
import { Leases } from "./worker/leases.ts";
import { Lifetime } from "./worker/lifetime.ts";
import { Membership } from "./worker/membership.ts";
import type { BatchItem } from "./worker/parts.ts";
import type { WorkerSettings } from "./worker/settings.ts";

export class QueueWorker<P> implements Worker {
  readonly done: Promise<void>;
  readonly #settings: WorkerSettings<P>;
  readonly #life: Lifetime;
  readonly #member: Membership;
  readonly #leases: Leases;
  readonly #endings: Endings;
  readonly #handlers: Handlers<P>;
  readonly #claims: Claims<P>;
  #losing: Promise<void> | undefined;

  constructor(
    batcher: QueueBatcher,
    settings: WorkerSettings<P>,
    handler: (job: Job<P>) => unknown,
    signal: AbortSignal | undefined,
  ) {
    this.#settings = settings;
    const life = (this.#life = new Lifetime(() => this.#leave()));
    const member = (this.#member = new Membership(batcher, settings, life.stopping, () => this.#lose()));
    const parts = { batcher, settings, life, member };
    const leases = (this.#leases = new Leases(parts));
    const endings = (this.#endings = new Endings(parts, leases));
    const size = new ClaimSize(settings);
    const freed = () => this.#claims.freed();
    const handlers = (this.#handlers = new Handlers({ ...parts, leases, endings, size, freed }, handler));
    this.#claims = new Claims({ ...parts, leases, handlers, size });
    this.done = life.done;
    const onStop = () => {
      this.#claims.wake();
      // By itself: a claim that is under way may wait for the connection that a handler has.
      life.later(life.patienceMs, () => handlers.breakOff());
    };
    life.stopping.addEventListener("abort", onStop, { once: true });
    life.begin(() => this.#run(), signal);
  }

  stop(options?: { readonly patienceMs?: number }): Promise<void> {
    return this.#life.stop(options);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stop();
  }

  /** Gives no more signs of life: others find what it had. */
  #leave(): void {
    void this.#member.part();
    const { running } = this.#handlers;
    this.#leases.dropAll();
    const { queue, trouble } = this.#settings;
    trouble(new WorkerLeftError(queue, running));
  }

  async #run(): Promise<void> {
    this.#member.join();
    try {
      await this.#member.enlist();
      await this.#work();
    } finally {
      this.#endings.stopTimer();
      this.#member.deafen();
      if (!this.#life.left)
        await this.#retire().catch((error: unknown) => this.#life.left || this.#settings.trouble(error));
      await this.#member.part();
    }
  }

  async #work(): Promise<void> {
    const signal = this.#life.stopping;
    const pauses = new Pauses(100, 5000);
    while (!signal.aborted) {
      if (this.#leases.lookForAstray) await this.#returnAstray();
      if (this.#member.id === undefined) {
        // It was lost, and is being enlisted again.
        await (this.#losing ?? sleep(100, signal)).catch(() => {});
        continue;
      }
      if (this.#claims.room <= 0) {
        await this.#claims.untilRoom();
        continue;
      }
      // While there is plenty, the next batch is fetched before this one has come.
      if (this.#claims.plenty) {
        this.#claims.claimAhead();
        continue;
      }
      try {
        const rest = await this.#claims.claim();
        pauses.reset();
        if (rest && !signal.aborted) await this.#member.rest(rest.ms, rest.looked);
      } catch (error) {
        this.#settings.trouble(error);
        await sleep(pauses.next(), signal).catch(() => {});
      }
    }
  }

  async #returnAstray(): Promise<void> {
    await this.#claims.settled();
    await this.#leases.returnAstray();
  }

  /** Others have what was ours. */
  async #lose(): Promise<void> {
    // Two may find out at the same time.
    this.#losing ??= this.#beginAnew().finally(() => (this.#losing = undefined));
    await this.#losing;
  }

  async #beginAnew(): Promise<void> {
    this.#leases.dropAll();
    const { id } = this.#member;
    if (id !== undefined) emit("holdfast:queue:lost", () => ({ queue: this.#settings.queue, worker: id }));
    this.#member.id = undefined;
    await this.#member.enlist();
  }

  async #retire(): Promise<void> {
    // What they bring is to be given back too.
    await this.#claims.settled();
    // What has not been started does not have to wait for what runs.
    const unstarted = this.#handlers.takeWaiting();
    if (this.#leases.mayBeAstray) await this.#returnAstray();
    await this.#return(unstarted);
    while (this.#handlers.running > 0 && !this.#life.left) await sleep(5);
    if (this.#life.left) return;
    await this.#return(this.#handlers.brokenOff);
    await this.#endings.drain(this.#leases.endEmpty());
    await this.#member.retire();
  }

  async #return(items: readonly BatchItem[]): Promise<void> {
    const { id } = this.#member;
    if (items.length === 0 || id === undefined) return;
    try {
      await this.#leases.giveBack(
        id,
        items.map(({ batch, place }) => ({ lease: batch.lease, place })),
      );
      for (const { batch } of items) batch.left--;
    } catch (error) {
      // Their leases are left behind, and others find them.
      this.#settings.trouble(error);
    }
  }
}
