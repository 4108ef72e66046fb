/** Where buckets are, of several databases: where the key is routed to, or where they were moved to since. */
import { type CallOptions, type CallPlace, mapRead, placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { ShardError, ShardMapError } from "../seam/errors.ts";
import type { How, Soon } from "../seam/store.ts";
import { type Instances, instancesOf } from "../shards/shards.ts";
import { storeOf } from "../transaction/instance.ts";
import { type InstanceContext, contextOf } from "../transaction/scope.ts";
import type { BucketMove, BucketName, Elsewhere, QuotaMoves, Whereabouts } from "./store.ts";

/** So many that were moved are remembered, then all are forgotten: they are found again by asking where they were. */
const mostKnown = 100_000;
/** From one to the next, while it is being moved on and on. */
const mostHops = 32;

const nameOf = ({ quota, subject }: BucketName) => `${quota}\0${subject}`;

export const isAway = (where: Whereabouts | undefined): boolean =>
  where?.to !== undefined || where?.from !== undefined;

const isElsewhere = (answer: object): answer is Elsewhere => "elsewhere" in answer;

type Question<T> = (moves: QuotaMoves<Connection>, connection: Connection, how: How) => Soon<T>;

export class Homes {
  readonly #instances: Instances;
  #moved = new Map<string, object>();
  /** Those that are known to be where they are routed to, or to be nowhere else, by the map of this number. */
  #searched = new Set<string>();
  #epoch = 0;

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
      if (this.#instances.family) await this.#find(call, buckets, options, this.#instances.family);
      const instance = this.together(call, buckets);
      const answer = await work(instance);
      if (!isElsewhere(answer)) return answer;
      await this.#follow(call, instance, buckets, options, hops);
    }
  }

  /** Where it counts; `made`: it is there already. */
  async locate(
    call: string,
    bucket: BucketName,
  ): Promise<{ readonly instance: object; readonly made: boolean }> {
    for (let hops = 0; ; hops++) {
      if (this.#instances.family)
        await this.#find(call, [bucket], { separate: true }, this.#instances.family);
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
    work: Question<T>,
    options: Pick<CallOptions, "wait" | "signal"> = {},
  ): Promise<T> {
    const context = contextOf(instance, "quota");
    return this.#send(context, placeOf(context, { ...options, separate: true }, "quota"), about, work);
  }

  #send<T>(
    context: InstanceContext<unknown, Connection>,
    place: CallPlace,
    about: readonly BucketName[],
    work: Question<T>,
  ): Promise<T> {
    const names = about.map(({ quota, subject }) => `quota ${quota}:${subject}`);
    return send(context, place, { names }, async (connection, how) =>
      work(storeOf(context, "quotas", "quota").moves, connection, how),
    );
  }

  /** Of calls that ask several databases: in a transaction they would wait for a connection while they hold one. */
  refuseInside(call: string): void {
    if (this.all.length === 1) return;
    const context = contextOf(this.all[0], call);
    if (context.current.getStore() !== undefined || context.elsewhere?.() === true)
      throw new ShardError(
        `${call}: it asks all shards, and the transaction that calls it holds a connection. Call it before the transaction, or after.`,
      );
  }

  /** By itself: whether it is here, or where it went from here. */
  async find(instance: object, bucket: BucketName): Promise<Whereabouts | undefined> {
    const [found] = await this.ask(instance, [bucket], (moves, connection, how) =>
      moves.find(connection, [bucket], how),
    );
    return found;
  }

  /** Of its last move: whether the database that it went to has it, in words. */
  async lost(bucket: BucketName): Promise<readonly string[]> {
    if (this.all.length === 1) return [];
    const found = await Promise.all(this.all.map((instance) => this.find(instance, bucket)));
    const newest = Math.max(0, ...found.map((where) => where?.move ?? 0));
    const from = found.findIndex((where) => where?.to !== undefined && where.move === newest);
    const to = found[from]?.to;
    if (to === undefined || (found[to]?.move ?? 0) >= newest) return [];
    // The copy is there before the other side says that it left: who asks after that finds it, however many move it meanwhile.
    if (((await this.find(this.all[to] as object, bucket))?.move ?? 0) >= newest) return [];
    return [
      `quota ${bucket.quota} of ${this.#instances.show(bucket.subject)} was moved from shard ${from} to shard ${to} (move ${newest}), and shard ${to} has lost what was written there.`,
    ];
  }

  /**
   * While something may still be where another map had it: what is not where it is routed to is looked for on all others, before it
   * begins there. Nobody can begin it anywhere else meanwhile: each statement is refused that goes by another map.
   */
  async #find(
    call: string,
    buckets: readonly BucketName[],
    options: CallOptions,
    family: object,
  ): Promise<void> {
    for (const bucket of buckets) {
      if (this.#moved.has(nameOf(bucket))) continue;
      const home = this.at(bucket);
      const context = contextOf(home, "quota");
      const place = placeOf(context, options, call);
      // It is read here at the latest which map counts.
      if (place.scope) await this.#send(context, place, [bucket], () => {});
      else await mapRead(context, `quota ${bucket.quota}:${bucket.subject}`);
      if (!this.#instances.unsettled) continue;
      const homes = homesOf(instancesOf(family, call));
      await homes.#findOne(call, bucket, home, place);
      if (homes !== this && homes.at(bucket) !== home)
        throw this.#unsettled(call, bucket, "Go by all shards: quota(sharded(databases, …), …)");
    }
  }

  async #findOne(call: string, bucket: BucketName, home: object, place: CallPlace): Promise<void> {
    const name = nameOf(bucket);
    if (this.#epoch !== this.#instances.epoch || this.#searched.size > mostKnown) this.#searched = new Set();
    const epoch = (this.#epoch = this.#instances.epoch);
    if (this.#searched.has(name) || this.#moved.has(name)) return;
    const [here] = await this.#send(contextOf(home, "quota"), place, [bucket], (moves, connection, how) =>
      moves.find(connection, [bucket], how),
    );
    // No other connection is waited for while the transaction holds one.
    if (!here && place.scope)
      throw this.#unsettled(call, bucket, "Ask shards.home(quota, subject) before the transaction");
    const found = here ? undefined : await this.#search(bucket, home);
    if (found) this.#remember(bucket, found);
    else if (epoch === this.#instances.epoch) this.#searched.add(name);
  }

  #unsettled(call: string, { quota, subject }: BucketName, advice: string): ShardMapError {
    return ShardMapError.unsettled(call, `quota ${quota} of ${this.#instances.show(subject)}`, advice);
  }

  async #search(bucket: BucketName, home: object): Promise<object | undefined> {
    const others = this.all.filter((instance) => instance !== home);
    const found = await Promise.all(
      others.map(async (instance) => ({ instance, where: await this.find(instance, bucket) })),
    );
    const there = found.filter(({ where }) => where !== undefined);
    const [counts, another] = there.filter(({ where }) => !isAway(where));
    if (counts && another)
      throw new ShardError(
        `quota ${bucket.quota} of ${this.#instances.show(bucket.subject)} counts on two shards. Its entries are for people to look at first.`,
      );
    // Or to be followed from where it went.
    return (counts ?? there[0])?.instance;
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
    if (to !== undefined) {
      const target = this.#numbered(bucket, to);
      await this.settle(target, [{ ...bucket, move }]);
      const [lost] = await this.lost(bucket);
      if (lost !== undefined) throw new ShardError(`${lost} Nothing is granted until it is restored.`);
      return;
    }
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

const made = new WeakMap<Instances, Homes>();

/** Of one `sharded`, or of one instance, there is one, whoever asks. */
export function homesOf(instances: Instances): Homes {
  let found = made.get(instances);
  if (!found) made.set(instances, (found = new Homes(instances)));
  return found;
}
