/** Where buckets are, of several databases: where the key is routed to, or where they were moved to since. */
import { type CallOptions, placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { ShardError } from "../seam/errors.ts";
import type { How, Soon } from "../seam/store.ts";
import type { Instances } from "../shards/shards.ts";
import { storeOf } from "../transaction/instance.ts";
import { contextOf } from "../transaction/scope.ts";
import type { BucketMove, BucketName, Elsewhere, QuotaMoves, Whereabouts } from "./store.ts";

/** So many that were moved are remembered, then all are forgotten: they are found again by asking where they were. */
const mostKnown = 100_000;
/** From one to the next, while it is being moved on and on. */
const mostHops = 32;

const nameOf = ({ quota, subject }: BucketName) => `${quota}\0${subject}`;

export const isAway = (where: Whereabouts | undefined): boolean =>
  where?.to !== undefined || where?.from !== undefined;

const isElsewhere = (answer: object): answer is Elsewhere => "elsewhere" in answer;

export class Homes {
  readonly #instances: Instances;
  #moved = new Map<string, object>();

  constructor(instances: Instances) {
    this.#instances = instances;
  }

  get all(): readonly object[] {
    return this.#instances.all;
  }

  /** All quotas, by name. */
  async quotas(options: Pick<CallOptions, "wait" | "signal">): Promise<readonly string[]> {
    const found = await Promise.all(
      this.all.map((instance) =>
        this.ask(instance, [], (moves, connection, how) => moves.quotas(connection, how), options),
      ),
    );
    return [...new Set(found.flat())].toSorted();
  }

  at(bucket: BucketName): object {
    return this.#moved.get(nameOf(bucket)) ?? this.#instances.at(bucket.quota, bucket.subject);
  }

  /** The one that all of them are on. */
  together(call: string, buckets: readonly BucketName[]): object {
    return this.#instances.together(
      call,
      buckets.map(({ quota, subject }) => [quota, subject]),
      ([quota, subject]) => this.at({ quota, subject: String(subject) }),
    );
  }

  /**
   * A call about some buckets that are decided together, on the database where they count: again, if that is another one by now.
   * In a transaction, which cannot go there, it is refused.
   */
  async run<T extends object>(
    call: string,
    buckets: readonly BucketName[],
    options: CallOptions,
    work: (instance: object) => Promise<T | Elsewhere>,
  ): Promise<T> {
    for (let hops = 0; ; hops++) {
      const instance = this.together(call, buckets);
      const answer = await work(instance);
      if (!isElsewhere(answer)) return answer;
      await this.#follow(call, instance, buckets, options, hops);
    }
  }

  /** Where it counts; `made`: it is there already. */
  async locate(bucket: BucketName): Promise<{ readonly instance: object; readonly made: boolean }> {
    for (let hops = 0; ; hops++) {
      const instance = this.at(bucket);
      const [found] = await this.ask(instance, [bucket], (moves, connection, how) =>
        moves.find(connection, [bucket], how),
      );
      if (!found || !isAway(found)) return { instance, made: found !== undefined };
      if (hops === mostHops) throw this.#restless(bucket);
      await this.#next(bucket, instance, found);
    }
  }

  /** It counts there from now on, as its move says. Whoever comes to know tells the database that it came to. */
  async settle(instance: object, moves: readonly BucketMove[]): Promise<void> {
    await this.ask(instance, moves, (store, connection, how) => store.settle(connection, moves, how));
    for (const move of moves) this.#remember(move, instance);
  }

  /** Apart from whatever transaction the caller is in. */
  async ask<T>(
    instance: object,
    about: readonly BucketName[],
    work: (moves: QuotaMoves<Connection>, connection: Connection, how: How) => Soon<T>,
    options: Pick<CallOptions, "wait" | "signal"> = {},
  ): Promise<T> {
    const context = contextOf(instance, "quota");
    const names = about.map(({ quota, subject }) => `quota ${quota}:${subject}`);
    return send(
      context,
      placeOf(context, { ...options, separate: true }, "quota"),
      { names },
      async (connection, how) => work(storeOf(context, "quotas", "quota").moves, connection, how),
    );
  }

  async #follow(
    call: string,
    instance: object,
    buckets: readonly BucketName[],
    options: CallOptions,
    hops: number,
  ): Promise<void> {
    const [first] = buckets as [BucketName];
    if (!this.#instances.sharded)
      throw new ShardError(
        `${call}: quota ${first.quota} of ${this.#instances.show(first.subject)} was moved to another shard. Go by all of them: quota(sharded(databases, …), …).`,
      );
    if (placeOf(contextOf(instance, "quota"), options, "quota").scope)
      throw new ShardError(
        `${call}: quota ${first.quota} of ${this.#instances.show(first.subject)} was moved to another shard than the one that this transaction is on. ` +
          "(await shards.home(quota, subject)).transaction(…) is on the right one.",
      );
    if (hops >= mostHops) throw this.#restless(first);
    const found = await this.ask(
      instance,
      buckets,
      (moves, connection, how) => moves.find(connection, buckets, how),
      options,
    );
    for (const [i, bucket] of buckets.entries()) {
      const where = found[i];
      if (where && isAway(where)) await this.#next(bucket, instance, where);
    }
  }

  /** One step: to where it went, or to where it comes from. */
  async #next(bucket: BucketName, instance: object, { move, to, from }: Whereabouts): Promise<void> {
    if (to !== undefined) return this.settle(this.#numbered(bucket, to), [{ ...bucket, move }]);
    const origin = this.#numbered(bucket, from as number);
    const [there] = await this.ask(origin, [bucket], (moves, connection, how) =>
      moves.find(connection, [bucket], how),
    );
    // Who moved it has died before it could tell.
    if (there?.move === move && there.to !== undefined && this.all[there.to] === instance)
      return this.settle(instance, [{ ...bucket, move }]);
    this.#remember(bucket, origin);
  }

  #remember(bucket: BucketName, instance: object): void {
    if (this.#moved.size > mostKnown) this.#moved = new Map();
    this.#moved.set(nameOf(bucket), instance);
  }

  #numbered({ quota, subject }: BucketName, number: number): object {
    const found = this.all[number];
    if (found) return found;
    throw new ShardError(
      `quota ${quota} of ${this.#instances.show(subject)} was moved to shard ${number}, and there are ${this.all.length} here.`,
    );
  }

  #restless({ quota, subject }: BucketName): ShardError {
    return new ShardError(
      `quota ${quota} of ${this.#instances.show(subject)} is moved from shard to shard again and again.`,
    );
  }
}

const known = new WeakMap<Instances, Homes>();

/** Of one `sharded`, or of one instance, there is one, whoever asks. */
export function homesOf(instances: Instances): Homes {
  let found = known.get(instances);
  if (!found) known.set(instances, (found = new Homes(instances)));
  return found;
}
