/** Claims jobs as there is room for them, and says for how long there is nothing to do. */
import { classify } from "../../seam/failure.ts";
import { rolledBack } from "../../transaction/retry.ts";
import { sleep } from "../../waiting/wait.ts";
import type { JobClaim } from "../store.ts";
import type { ClaimSize } from "./claim-size.ts";
import type { Handlers } from "./handlers.ts";
import type { Leases } from "./leases.ts";
import type { WorkerParts } from "./parts.ts";
import { longestRestMs } from "./settings.ts";
import type { Look } from "./trail.ts";

/** How soon it looks again, at first and at the most, for room that nobody may tell it of. */
const roomMs = { least: 50, most: 1000 };

/** For how long there is nothing to do, unless it is woken; `looked`: others look for it meanwhile. */
export interface Rest {
  readonly ms: number;
  readonly looked: boolean;
}

interface ClaimsContext<P> extends WorkerParts<P> {
  readonly leases: Leases;
  readonly handlers: Handlers<P>;
  readonly size: ClaimSize;
}

type Granted = Extract<JobClaim, { readonly lease: number }>;
type Refused = Extract<JobClaim, { readonly lease: undefined }>;

export class Claims<P> {
  readonly #worker: ClaimsContext<P>;
  /** Jobs that claims under way have asked for. */
  #asking = 0;
  /** The last claim brought all that it asked for, and jobs are short. */
  #plenty = false;
  #onward: string | undefined;
  /** How often in a row there was no room. */
  #full = 0;
  #wake: (() => void) | undefined;

  constructor(worker: ClaimsContext<P>) {
    this.#worker = worker;
  }

  /** How many to claim now. */
  get room(): number {
    const { handlers, size } = this.#worker;
    return size.room(handlers.running, handlers.waiting + this.#asking);
  }

  get plenty(): boolean {
    return this.#plenty;
  }

  /** Until there is less to do, or it is woken. */
  untilRoom(): Promise<void> {
    return new Promise((resolve) => {
      this.#wake = () => {
        this.#wake = undefined;
        resolve();
      };
    });
  }

  /** There may be room. */
  freed(): void {
    if (this.#wake && this.room > 0) this.#wake();
  }

  wake(): void {
    this.#wake?.();
  }

  /** No claim is under way. */
  async settled(): Promise<void> {
    while (this.#asking > 0 && !this.#worker.life.left) await sleep(5);
  }

  /** The next batch, before this one has come. */
  claimAhead(): void {
    void this.claim().catch((error: unknown) => {
      this.#plenty = false;
      this.#worker.settings.trouble(error);
    });
  }

  /** Whether to rest, if there was nothing. */
  async claim(): Promise<Rest | undefined> {
    const asked = this.room;
    this.#asking += asked;
    try {
      return await this.#claim(asked);
    } finally {
      this.#asking -= asked;
      this.freed();
    }
  }

  async #claim(asked: number): Promise<Rest | undefined> {
    const { member, settings, size } = this.#worker;
    const { concurrency } = settings;
    const { id, trail, ear } = member;
    if (id === undefined) return undefined;
    const look = trail.look();
    ear.rung = false;
    const claimed = await this.#ask(id, asked, look);
    look.end(claimed.lease === undefined ? 0 : claimed.jobs.length);
    trail.moved(claimed.moment);
    // Two claims at once may overtake each other, which one handler at a time would see.
    this.#plenty =
      claimed.lease !== undefined && claimed.jobs.length === asked && size.isAhead && concurrency > 1;
    if (claimed.lease === undefined) return this.#refused(id, claimed, asked, look.whole);
    this.#granted(id, claimed, asked);
    return undefined;
  }

  #ask(worker: number, most: number, look: Look): Promise<JobClaim> {
    const { batcher, member, settings, leases, size } = this.#worker;
    return batcher
      .ask((connection, how) => {
        const { number: queue } = settings;
        const { trail: where } = member;
        const call = { queue, worker, most, where, whole: look.whole, onward: this.#onward };
        return batcher.store.claim(connection, call, how);
      })
      .catch((error: unknown) => {
        const failure = classify(batcher.context.database, error);
        if (failure === undefined || !rolledBack.has(failure)) leases.unanswered();
        // Whatever it was: not the same again for ever.
        size.tooMany(most);
        look.end(0);
        throw error;
      });
  }

  async #refused(
    id: number,
    { why, soon = Infinity, onward }: Refused,
    asked: number,
    whole: boolean,
  ): Promise<Rest | undefined> {
    const { member, size } = this.#worker;
    if (why === "lost") {
      if (id === member.id) await member.lose();
      return undefined;
    }
    if (why === "large") {
      size.tooMany(asked);
      return undefined;
    }
    this.#onward = onward ?? this.#onward;
    // Other processes tell when they have made room, but not if nobody hears it.
    if (why === "limit" || why === "full")
      return {
        ms: Math.min(roomMs.most, roomMs.least * 2 ** Math.min(this.#full++, 5), Math.max(1, soon)),
        looked: false,
      };
    this.#full = 0;
    // There may be some where nobody has looked.
    const again = why === "empty" && !whole ? member.trail.wholeNext() : Infinity;
    if (again <= 0) return undefined;
    return { ms: Math.min(longestRestMs, again, Math.max(1, soon)), looked: true };
  }

  #granted(id: number, claimed: Granted, asked: number): void {
    const { member, leases, handlers, size } = this.#worker;
    const { jobs, length, onward } = claimed;
    this.#onward = onward;
    this.#full = 0;
    size.weigh(jobs.length, length);
    const batch = leases.open(id, claimed, asked);
    for (const job of jobs) member.trail.found(job);
    handlers.add(batch, jobs);
  }
}
