import type { Connection, Database, Wait } from "./seam/database.ts";
import { ShardError, UsageError, some } from "./seam/errors.ts";
import { Inside } from "./context/inside.ts";
import { type Key, type LockRequest, type Lockable, canonical, isWorkersLock, keyNames } from "./seam/key.ts";
import { namedDatabase } from "./seam/names.ts";
import { asWritten } from "./seam/replay.ts";
import type { Transaction } from "./transaction/scope.ts";
import { byOwner } from "./shards/route.ts";
import { type Left, leavable } from "./shards/misplaced.ts";
import { type MapOptions, ShardMap } from "./shards/shard-map.ts";
import { rememberFamily, rememberShards } from "./shards/shards.ts";
import type { TransactionOptions } from "./transaction/transaction.ts";
import { Holdfast, type HoldfastOptions, type ShardOf, type TryLockResult } from "./holdfast.ts";
import type { Held } from "./locks/hold.ts";
import { settleRecords } from "./locks/once-settled.ts";
import type { Lease, LeaseOptions } from "./locks/lease.ts";
import type { Semaphore, SemaphoreOptions } from "./locks/semaphore.ts";
import { type MoveOptions, type Moved, homeOf, moveSubject, settleSubjects } from "./quota/move.ts";
import { checkNames, checkSignal } from "./input/options.ts";
import { checkWhole } from "./input/values.ts";
import type { Subject } from "./quota/types.ts";

type Body<Native, T> = (tx: Transaction<Native>) => Promise<T>;
type Locks = Lockable | readonly Lockable[];

/** The shard whose transaction the calling code is in, of one `sharded`. */
type InShard<Native> = Inside<Shard<Native>>;

/** One database of several: as any other, but it refuses transactions inside those of its siblings. */
class Shard<Native> extends Holdfast<Native> {
  readonly #inside: InShard<Native>;

  constructor(database: Database<Native>, options: HoldfastOptions, shard: ShardOf, inside: InShard<Native>) {
    super(database, options, shard);
    this.#inside = inside;
  }

  protected override async open<T>(
    options: TransactionOptions,
    body: Body<Native, T>,
    alone?: string,
  ): Promise<T> {
    const outer = this.#inside.getStore();
    if (outer !== undefined && outer !== this && options.separate !== true)
      throw new ShardError(
        "A transaction of one shard was opened inside a transaction of another: the second could be committed and the first not " +
          "(if that is meant, say `separate: true`).",
      );
    return this.#inside.run(this, () => super.open(options, body, alone));
  }

  override outside<T>(work: () => T): T {
    return this.#inside.leave(() => super.outside(work));
  }
}

export interface ShardedOptions extends HoldfastOptions {
  /**
   * Of the route: change it whenever the route changes. It is written down, and a process that has another one is refused. Samples of
   * keys are too, but they do not show a change that is about a few keys.
   */
  readonly version?: string | number;
}

/** Of the route that is taken where nobody says another one. */
const ownVersion = "holdfast: second part";

export interface RenumberOptions {
  /** Milliseconds to wait for transactions, locks and leases that the old list has granted. Default 60 s. */
  readonly wait?: number;
  /** All processes that use these databases are stopped. Needed where no statement compares the map (Citus). */
  readonly stopped?: boolean;
  /** Stock, or jobs with a key or a group, may stay where they are although the new route looks for them elsewhere. */
  readonly leave?: readonly Left[];
  readonly signal?: AbortSignal | undefined;
}

/** Several databases, each the home of some keys. Made by `sharded(databases, key => number)`. */
export class Sharded<Native> {
  readonly #route: (key: Key) => Database<Native>;
  /** Undefined: who made it did not say which ones there are. */
  readonly #databases: readonly Database<Native>[] | undefined;
  readonly #map: ShardMap | undefined;
  readonly #options: HoldfastOptions;
  readonly #show: (name: string) => string;
  readonly #shards = new Map<Database<Native>, Shard<Native>>();
  readonly #inside: InShard<Native> = new Inside();

  constructor(
    route: (key: Key) => Database<Native>,
    options: HoldfastOptions = {},
    databases?: readonly Database<Native>[],
    map: MapOptions = {},
  ) {
    this.#route = route;
    this.#options = options;
    this.#databases = databases;
    const { schema } = options ?? {};
    const named = databases?.map((each) => (schema === undefined ? each : namedDatabase(each, schema)));
    this.#map = named && new ShardMap(named, (lock) => databases?.indexOf(route(lock)) ?? 0, map);
    this.#show = typeof options?.names === "function" ? options.names : (name) => name;
    rememberShards(this, {
      at: (lock) => this.on(lock),
      all: () => this.all(),
      name: (instance) => `shard ${this.all().indexOf(instance as Holdfast<Native>)}`,
      show: this.#show,
      unsettled: () => this.#map?.unsettled ?? false,
      epoch: () => this.#map?.epoch ?? 0,
    });
  }

  /** The instances of all shards, in the order of the list that `sharded(databases, …)` was given. */
  all(): readonly Holdfast<Native>[] {
    if (!this.#databases)
      throw new UsageError(
        "sharded(key => database) does not say which databases there are. For patterns, and for what is asked of all of them, write " +
          "sharded(databases, key => number): the list, and the place in it that a key belongs to.",
      );
    return this.#databases.map((database) => this.#shard(database));
  }

  /**
   * Makes this list and this route the ones that count. Who goes by another one is refused from then on, by the databases themselves.
   * What is held by the old one is waited for first: transactions, locks, leases. `settle()` then moves quotas.
   */
  async renumber(options: RenumberOptions = {}): Promise<void> {
    checkNames("shards.renumber", options, new Set(["wait", "stopped", "leave", "signal"]));
    const { wait = 60_000, stopped = false, leave = [], signal } = options;
    checkWhole("shards.renumber", "wait", wait, 0);
    if (typeof stopped !== "boolean") throw new UsageError("shards.renumber: stopped must be true or false");
    if (!Array.isArray(leave) || !leave.every((each: unknown) => leavable.includes(each)))
      throw new UsageError(`shards.renumber: leave must be a list of ${leavable.join(", ")}`);
    checkSignal(signal);
    this.all();
    await this.#map?.renumber({ waitMs: wait, stopped, leave, show: this.#show, signal });
  }

  /**
   * After `renumber()`: moves all quotas to where their keys are routed to by now, while they are used, copies records of `once`, and writes
   * down that this is done. Resolves to how many were moved. It can be repeated, and be called by several processes.
   */
  async settle(options: Omit<MoveOptions, "to" | "quotas"> = {}): Promise<number> {
    const moved = await settleSubjects(this, options);
    await settleRecords(this, options.signal);
    await this.#map?.settled();
    return moved;
  }

  /**
   * Moves what a subject has of its quotas to another shard, while it is used: at every moment it counts on one of the two, and
   * callers find it wherever it is. Resolves to what was moved. Locks and other patterns stay where their keys are routed to.
   */
  async move(subject: Subject, options: MoveOptions): Promise<readonly Moved[]> {
    return moveSubject(this, subject, options);
  }

  /** The shard that a subject's quota counts on: where its key is routed to, or where it was moved to. */
  async home(quota: string, subject: Subject): Promise<Holdfast<Native>> {
    return (await homeOf(this, quota, subject)) as Holdfast<Native>;
  }

  /**
   * The one shard that these keys are routed to, for whatever `Holdfast` can do: `join`, `migrate`, `once(shards.on(key), …)`.
   * It refuses locks that belong elsewhere.
   */
  on(locks: Locks): Holdfast<Native> {
    const requests = canonical(locks);
    const [first, ...rest] = requests.map(({ key }) => this.#database(key));
    if (rest.some((database) => database !== first))
      throw new ShardError(`The locks ${this.#names(requests)} are not all of one shard.`);
    return this.#shard(first as Database<Native>);
  }

  /** As `hf.transaction`, on the shard that `lock` is routed to. */
  async transaction<T>(
    options: TransactionOptions & { readonly lock: Locks },
    body: Body<Native, T>,
  ): Promise<T> {
    if (typeof options !== "object" || options === null || options.lock === undefined)
      throw new UsageError(
        "shards.transaction needs `lock`: its key chooses the shard. For a transaction without a lock: shards.on(key).transaction(…).",
      );
    return this.on(options.lock).transaction(options, body);
  }

  /** As `hf.lock`. */
  async lock<T>(
    locks: Locks,
    body: Body<Native, T>,
    options: Omit<TransactionOptions, "lock"> = {},
  ): Promise<T> {
    return this.on(locks).lock(locks, body, options);
  }

  /** As `hf.tryLock`. */
  async tryLock<T>(
    locks: Locks,
    body: Body<Native, T>,
    options: Omit<TransactionOptions, "lock" | "wait"> = {},
  ): Promise<TryLockResult<T>> {
    return this.on(locks).tryLock(locks, body, options);
  }

  /** As `hf.hold`. */
  hold(locks: Locks, options?: { wait?: Wait; signal?: AbortSignal | undefined }): Promise<Held>;
  hold(locks: Locks, options: { wait: "skip"; signal?: AbortSignal | undefined }): Promise<Held | undefined>;
  async hold(locks: Locks, options?: object): Promise<Held | undefined> {
    return this.on(locks).hold(locks, options);
  }

  /** As `hf.lease`. */
  lease(lock: Lockable, options?: LeaseOptions & { wait?: Wait }): Promise<Lease>;
  lease(lock: Lockable, options: LeaseOptions & { wait: "skip" }): Promise<Lease | undefined>;
  async lease(lock: Lockable, options?: object): Promise<Lease | undefined> {
    return this.on(lock).lease(lock, options);
  }

  /** As `hf.semaphore`. */
  semaphore(name: Key, options: SemaphoreOptions): Semaphore {
    return this.on(name).semaphore(name, options);
  }

  /** Gives back what is still held, on all shards. The clients stay open: they are yours. */
  async close(): Promise<void> {
    await Promise.all([...this.#shards.values()].map((shard) => shard.close()));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #names(requests: readonly LockRequest[]): string {
    return some(keyNames(requests, this.#show));
  }

  /**
   * Asked twice: a route that makes a database with each call, or that throws dice, would give one key two homes, and
   * nobody would exclude anybody.
   */
  #database(lock: Key): Database<Native> {
    const written = asWritten(lock);
    const [database, again]: unknown[] = [this.#route(written), this.#route(written)];
    const of = `sharded: the route of ${this.#show(written.name)}`;
    if (typeof (database as Partial<Database> | undefined | null)?.engine?.begin !== "function")
      throw new UsageError(
        `${of} is no database. It must return what an adapter returns, e.g. fromPg(pool), and not a promise of it.`,
      );
    if (database !== again)
      throw new UsageError(
        `${of} is one database now and another one then. Make each database once, outside of the function, and choose among them by the key alone.`,
      );
    return database as Database<Native>;
  }

  #shard(database: Database<Native>): Shard<Native> {
    let shard = this.#shards.get(database);
    if (!shard) {
      const guard = (locks: readonly LockRequest[]) => {
        const astray = locks.filter(({ key }) => !isWorkersLock(key) && this.#database(key) !== database);
        if (astray.length > 0)
          throw new ShardError(
            `Of another shard than the one that this call runs on: ${this.#names(astray)}.`,
          );
      };
      const number = this.#databases?.indexOf(database);
      const elsewhere = () => {
        const outer = this.#inside.getStore();
        return outer !== undefined && outer !== shard;
      };
      const placement = number === undefined ? undefined : this.#map?.placement(number);
      shard = new Shard(database, this.#options, { guard, elsewhere, placement }, this.#inside);
      this.#shards.set(database, shard);
      rememberFamily(shard, this);
    }
    return shard;
  }
}

/**
 * Keys spread over several databases. `route`: which of them a key is on, `(key) => number`; left out, that is found by the key's
 * second part, whatever the first one is. A call that would need two of them throws `ShardError`. Each database keeps which one
 * it is, of how many: another list, or another way from keys to it, is refused (`ShardMapError`).
 */
export function sharded<Native, C extends Connection>(
  databases: readonly Database<Native, C>[],
  route?: (key: Key) => number,
  options?: ShardedOptions,
): Sharded<Native>;
/** The same for locks alone, where the databases are not known beforehand: nothing is written down about them. */
export function sharded<Native, C extends Connection>(
  route: (key: Key) => Database<Native, C>,
  options?: HoldfastOptions,
): Sharded<Native>;
export function sharded<Native>(
  first: readonly Database<Native>[] | ((key: Key) => Database<Native>),
  second?: ((key: Key) => number) | HoldfastOptions,
  third: ShardedOptions = {},
): Sharded<Native> {
  if (typeof first === "function") return new Sharded(first, second as HoldfastOptions | undefined);
  if (!Array.isArray(first) || first.length === 0)
    throw new UsageError(
      "sharded(databases, route): a list of databases, and a function, key => number; or sharded(route): key => database",
    );
  if (second !== undefined && typeof second !== "function")
    throw new UsageError("sharded(databases, route): route must be a function, key => number");
  const numberOf = second ?? byOwner(first.length);
  if (
    !first.every((each: unknown) => typeof (each as Partial<Database> | null)?.engine?.begin === "function")
  )
    throw new UsageError(
      "sharded(databases, route): each must be what an adapter returns, e.g. fromPg(pool)",
    );
  if (new Set(first).size < first.length)
    throw new UsageError("sharded(databases, route): a database is there twice");
  const { version: given, ...options } = third;
  if (given !== undefined && typeof given !== "string" && !Number.isFinite(given))
    throw new UsageError("sharded(databases, route, { version }): version must be a text or a number");
  const databases = [...(first as readonly Database<Native>[])];
  const route = (lock: Key): Database<Native> => {
    const number: unknown = numberOf(lock);
    const found = Number.isSafeInteger(number) ? databases[number as number] : undefined;
    if (found) return found;
    throw new UsageError(
      `sharded: the route of ${lock.name} is ${String(number)}: it must be a whole number from 0 to ${databases.length - 1}, and not a promise of it.`,
    );
  };
  const unnamed = second ? undefined : ownVersion;
  const version = given === undefined ? unnamed : String(given);
  return new Sharded(route, options, databases, { version, isOurs: !second });
}
