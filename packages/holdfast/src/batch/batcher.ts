/**
 * Where calls of one instance come together, are sent as one statement, and get their own answers. A pattern says how a batch
 * of its calls is built and read; this is all the rest. In the caller's transaction a call is sent by itself.
 */
import {
  type CallAbout,
  type CallOptions,
  type Sent,
  type CallPlace,
  placeOf,
  send,
  waitedInVain,
} from "./calls.ts";
import type { Connection } from "../seam/database.ts";
import { type InstanceContext, detached } from "../transaction/scope.ts";
import { Coalescer, Failed, type CoalesceTerms, Undone } from "./coalesce.ts";
import { type Repeats, foldRepeats } from "./repeats.ts";
import { sendTogether } from "./together.ts";

export interface Batching<Item, Answer, Prepared = void> {
  /** As errors about options name it. */
  readonly call: string;
  /** Batches at the same time. */
  readonly inFlight: number;
  /** Of one batch. */
  readonly most: number;
  /** So many go in one batch even if another could go at the same time. Without it: all. */
  readonly together?: number;
  /** What was applied cannot be found again: nothing is sent a second time that may have been. */
  readonly once?: boolean;
  /** What it needs for itself alone, and is known by. Those that need the same wait for each other, if one has to wait. */
  about(item: Item): CallAbout;
  /** Before there is a connection: what it needs may take another one. */
  prepare?(place: Pick<CallPlace, "scope">): Promise<Prepared>;
  /** Answers in the order of the calls. `joined`: of one call, in its caller's transaction. */
  decide(
    connection: Connection,
    items: readonly Item[],
    how: Sent & { readonly joined: boolean; readonly prepared: Prepared },
  ): Promise<readonly Answer[]>;
  /** Where several calls of one batch may have the same id, and the engine wants each once. */
  readonly repeats?: Repeats<Item, Answer>;
  /** A batch was committed. */
  done?(): void;
}

export class Batcher<Item, Answer, Prepared = void> {
  readonly #context: InstanceContext<unknown, Connection>;
  readonly #batching: Batching<Item, Answer, Prepared>;
  readonly #coalescer: Coalescer<Item, Answer>;

  constructor(context: InstanceContext<unknown, Connection>, batching: Batching<Item, Answer, Prepared>) {
    this.#context = context;
    this.#batching = batching;
    const { inFlight, most, together } = batching;
    this.#coalescer = new Coalescer({
      inFlight,
      most,
      ...(together !== undefined && { together }),
      names: (item) => batching.about(item).names,
      // A batch is of many callers, who are in different transactions, or in none.
      apart: (start) => detached(context, start),
      run: (items, terms) => this.#run(items, terms),
      late: (item, waitedMs, cause) => waitedInVain(context, batching.about(item), waitedMs, cause),
    });
  }

  async add(item: Item, options: CallOptions): Promise<Answer> {
    const { call, about, decide } = this.#batching;
    const place = placeOf(this.#context, options, call);
    if (!place.scope) {
      const { started, wrongConnection } = this.#context;
      started.begin(call);
      try {
        return await wrongConnection.beside(() => this.#coalescer.add(item, place.signal, place.waitMs));
      } finally {
        started.end();
      }
    }
    const prepared = await this.#prepare(place);
    const [answer] = await send(this.#context, place, about(item), (connection, how) =>
      decide(connection, [item], { ...how, joined: true, prepared }),
    );
    return answer as Answer;
  }

  async #prepare(place: Pick<CallPlace, "scope">): Promise<Prepared> {
    return (await this.#batching.prepare?.(place)) as Prepared;
  }

  async #run(items: readonly Item[], terms: CoalesceTerms): Promise<readonly (Answer | Failed)[]> {
    const { repeats, done } = this.#batching;
    const prepared = await this.#prepare({ scope: undefined });
    const sending = (some: readonly Item[], until: CoalesceTerms) => this.#send(some, until, prepared);
    const answers = repeats
      ? await foldRepeats(
          repeats,
          items,
          (some) => sending(some, terms),
          (one) => this.#after(one, terms, sending),
        )
      : await sending(items, terms);
    done?.();
    return answers;
  }

  #send(items: readonly Item[], terms: CoalesceTerms, prepared: Prepared): Promise<(Answer | Failed)[]> {
    const { about, once = false, decide } = this.#batching;
    const together = {
      about,
      once,
      decide: (connection: Connection, some: readonly Item[], how: Sent) =>
        decide(connection, some, { ...how, joined: false, prepared }),
    };
    return sendTogether(this.#context, together, items, terms);
  }

  /** One whose id was in the batch, which is done by now: it is not undone together with it. */
  async #after(
    item: Item,
    { until }: CoalesceTerms,
    sending: (items: readonly Item[], terms: CoalesceTerms) => Promise<(Answer | Failed)[]>,
  ): Promise<Answer | Failed> {
    const started = performance.now();
    try {
      const { signal } = new AbortController();
      const [answer] = await sending([item], { until, signal });
      return answer as Answer | Failed;
    } catch (error) {
      if (!(error instanceof Undone)) throw error;
      const waitedMs = performance.now() - started;
      return new Failed(waitedInVain(this.#context, this.#batching.about(item), waitedMs, error.cause));
    }
  }
}
