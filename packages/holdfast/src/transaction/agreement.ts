/** What an instance and all others have in common: found at its first use, and looked at again from time to time. */
import { type Agreed, type AgreedRead, type Agreements, trustMs } from "../seam/agreements.ts";
import {
  type Capabilities,
  type Strategy,
  type Unsupported,
  isSupported,
  withPatterns,
  withoutTransactions,
} from "../seam/capabilities.ts";
import type { Connection, Database } from "../seam/database.ts";
import {
  AccessDeniedError,
  NoConnectionError,
  ReplicaError,
  ShardMapError,
  StrategyError,
} from "../seam/errors.ts";
import { verifyReads, withConnection } from "./one-shot.ts";
import { Silence, within } from "../waiting/interrupt.ts";
import * as protection from "../seam/protections.ts";

/**
 * What an instance writes in place of a map if it uses its database alone. A map would be written to the same row, so one of the two
 * comes first, and the other finds it.
 */
const alone = JSON.stringify({ alone: true });

/** No map: one instance uses this database alone. */
export function isAlone({ value }: Pick<Agreed, "value">): boolean {
  return value === alone;
}

/** Writes that down. */
export function writeAlone(agreements: Agreements<Connection>, connection: Connection): Promise<boolean> {
  return agreements.write(connection, "shard", alone);
}

/** Which of several databases an instance takes its own for. */
export interface Placement {
  /** Throws if that is not what is written down. Returns the number of the map that it is in. */
  check(found: Agreed): number;
  /** Writes it down in all of them, on one connection at a time. False: it may not. */
  place(): Promise<boolean>;
}

/** How long a transaction waits for what is written down beside it. */
const besideMs = 300;
/** If that could not be done: the next one tries again. */
const briefMs = 1000;

/** Those of the instance. */
export interface CommonOptions {
  readonly strategy?: Strategy;
  readonly oneShard?: boolean;
  readonly acceptReplica?: boolean;
}

export class Common {
  readonly #database: Database<unknown, Connection>;
  readonly #options: CommonOptions;
  readonly #placement: Placement | undefined;
  /** As they were found, and as they are gone by. */
  #found: Capabilities | undefined;
  #facts: Capabilities | undefined;
  #gap: Unsupported | undefined;
  #noTransactions: Unsupported | undefined;
  /** Why no lock may be taken, if it may not. */
  #refusal: StrategyError | ShardMapError | AccessDeniedError | ReplicaError | undefined;
  /** Until when it goes by them, by the clock that never jumps. */
  #until = -Infinity;
  /** Nobody has written down yet which of several databases this is. */
  #unplaced = false;
  /** It cannot be written down, for lack of tables or rights: then it is gone on without. */
  #unplaceable = false;
  #epoch: number | undefined;
  /** It is to be written down that one instance uses this database alone. */
  #unmarked = false;
  /** Until when an instance that is not one of several need not look whether it should be. */
  #placeUntil = -Infinity;

  constructor(
    database: Database<unknown, Connection>,
    options: CommonOptions,
    placement: Placement | undefined,
  ) {
    this.#database = database;
    this.#options = options;
    this.#placement = placement;
  }

  /** What does not change while the server is the same. */
  get facts(): Capabilities | undefined {
    return this.#facts;
  }

  /** The same, while nobody can have changed how locks are kept. */
  get trusted(): Capabilities | undefined {
    return performance.now() < this.#until && !this.#unmarked ? this.#facts : undefined;
  }

  /** The number of the map of several databases that it goes by, if it is known. */
  get epoch(): number | undefined {
    return this.#epoch;
  }

  /** Throws if it was found, when it was asked last, that others take this database for another one. */
  refuseShard(): void {
    if (this.#refusal instanceof ShardMapError || this.#refusal instanceof AccessDeniedError)
      throw this.#refusal;
    if (this.#unplaced && !this.#unplaceable)
      throw new ShardMapError(
        "It is not known yet which one of several databases this is: that is looked for in all of them, and there was no connection to be had. Try again.",
        { retryable: true },
      );
  }

  /** Its instance knows of the others. */
  get isOneOfSeveral(): boolean {
    return this.#placement !== undefined;
  }

  /** It was looked at not long ago whether this database is one of several, and it is no replica. Of an instance that uses it alone. */
  get isPlaced(): boolean {
    if (this.#refusal instanceof ReplicaError || this.#unmarked) return false;
    return !this.#database.engine.agreements || performance.now() < this.#placeUntil;
  }

  /** Throws if this is a replica, or if this database is one of several, and this instance knows of no other. */
  async checkPlace(connection: Connection): Promise<void> {
    const asked = performance.now();
    // It may have been promoted since.
    if (this.#refusal instanceof ReplicaError) await this.ask(connection, false);
    if (this.#refusal instanceof ReplicaError) throw this.#refusal;
    const { agreements } = this.#database.engine;
    if (agreements) this.#checkShard(await this.#read(agreements, connection));
    this.#placeUntil = asked + trustMs;
  }

  /** Before a lock or a pattern is used, and not if somebody only looks: `mark` is to be called. */
  get unmarked(): boolean {
    return this.#unmarked;
  }

  /** Writes down that one instance uses this database alone. Throws if it has become one of several meanwhile. */
  async mark(connection: Connection, free: boolean): Promise<void> {
    const { agreements } = this.#database.engine;
    if (!agreements || !this.#unmarked) return;
    const asked = performance.now();
    const written = await this.#write(agreements, connection, free, (on) => writeAlone(agreements, on));
    this.#unmarked = false;
    if (!written) {
      this.#until = Math.min(this.#until, asked + briefMs);
      this.#placeUntil = Math.min(this.#placeUntil, asked + briefMs);
      return;
    }
    try {
      this.#checkShard(written);
    } catch (error) {
      this.#refusal = error as ShardMapError;
      this.#until = this.#placeUntil = -Infinity;
      throw error;
    }
  }

  /** What it has found when it was asked last. Throws if this instance and the others do not agree. */
  agreed(): Capabilities {
    if (this.#refusal) throw this.#refusal;
    this.refuseShard();
    return this.#facts as Capabilities;
  }

  /** Locks were tried out, and keep nobody out: none is given from now on. */
  distrust(gap: Unsupported): void {
    this.#gap = gap;
    if (this.#found) this.#facts = this.#without(this.#found);
  }

  /** No transaction can be opened: what needs one is refused from now on. */
  refuseTransactions(gap: Unsupported): void {
    this.#noTransactions = gap;
    if (this.#found) this.#facts = this.#without(this.#found);
  }

  #without(found: Capabilities): Capabilities {
    if (this.#noTransactions) return withoutTransactions(found, this.#noTransactions);
    const gap = this.#gap;
    return gap ? { ...found, transactionLocks: gap, joinedLocks: gap, sharedLocks: gap } : found;
  }

  /** The next call asks again. */
  doubt(): void {
    this.#until = -Infinity;
  }

  /**
   * Writes down which of several databases this is, if nobody has. That needs a connection to each of them, so only a call
   * that holds none may do it. False: nothing was written.
   */
  async place(): Promise<boolean> {
    if (!this.#unplaced || !this.#placement) return false;
    try {
      const placed = await this.#placement.place();
      this.#placed(placed);
      if (!placed) this.#until = performance.now() + (this.#epoch === undefined ? trustMs : briefMs);
      return placed;
    } catch (error) {
      if (!(error instanceof ShardMapError)) throw error;
      this.#refusal = error;
      this.#until = -Infinity;
      return false;
    }
  }

  /** Undefined: that is not known. */
  #placed(placed: boolean | undefined): void {
    if (placed) this.#unplaced = false;
    if (placed !== undefined) this.#unplaceable = !placed;
  }

  /** `free`: the connection is in no transaction, so that what is written on it is there for others. */
  async ask(connection: Connection, free: boolean): Promise<Capabilities> {
    const { engine, traits } = this.#database;
    const { agreements } = engine;
    const asked = performance.now();
    let facts =
      this.#found ?? withPatterns(await engine.probe(connection, traits, this.#options.strategy), engine);
    if (free) await verifyReads(this.#database, connection, facts);
    let until = Infinity;
    const { primary } = facts;
    let refusal: StrategyError | ShardMapError | AccessDeniedError | ReplicaError | undefined =
      isSupported(primary) || this.#options.acceptReplica ? undefined : ReplicaError.writable(primary.why);
    if (refusal) until = -Infinity;
    else if (agreements) {
      until = asked + trustMs;
      try {
        const read = await this.#read(agreements, connection);
        facts = await this.#check(connection, read, facts);
        const { there, writable } = read;
        const { transactionLocks } = facts;
        this.#unplaced = this.#placement !== undefined && (there ? writable && !there.has("shard") : true);
        // Nobody goes by it before it is known what the others say.
        if (this.#unplaced) until = this.#unplaceable ? asked + (there ? briefMs : trustMs) : -Infinity;
        // What is granted before it is written down is seen by whoever changes it then.
        if (this.#unplaced && there) this.#epoch ??= await agreements.map?.read(connection);
        // An instance that cannot lock here has nothing to say about how others do.
        if (there && writable && !there.has("strategy") && isSupported(transactionLocks)) {
          const written = await this.#write(agreements, connection, free, (on) =>
            agreements.write(on, "strategy", transactionLocks),
          );
          // Somebody else may have come first.
          if (written) facts = await this.#check(connection, written, facts);
          else until = Math.min(until, asked + briefMs);
        }
        if (this.#unplaced && !free && this.#placement)
          this.#placed(await this.#beside(this.#placement.place()));
        if (!this.#unplaced) until = Math.max(until, asked + briefMs);
      } catch (error) {
        // Whoever only looks is not kept from it.
        if (!(
          error instanceof StrategyError ||
          error instanceof ShardMapError ||
          error instanceof AccessDeniedError
        ))
          throw error;
        refusal = error;
        until = -Infinity;
      }
    }
    // A replica may be promoted: it is asked again.
    this.#found = refusal instanceof ReplicaError ? undefined : facts;
    this.#facts = this.#without(facts);
    this.#refusal = refusal;
    this.#until = until;
    return this.#facts;
  }

  /** If it may not be read, all rights that this user lacks are named, not only those to it. */
  async #read(agreements: Agreements<Connection>, connection: Connection): Promise<AgreedRead> {
    const read = await agreements.read(connection);
    const { rights } = this.#database.engine.migrations;
    return read.lacking && rights ? { ...read, lacking: await rights.lacking(connection) } : read;
  }

  #checkShard({ there, lacking, writable }: AgreedRead): void {
    const shard = there?.get("shard");
    if (!protection.shardAgreed || this.#options.oneShard) return;
    this.#unmarked = !this.#placement && there !== undefined && writable && !shard;
    if (lacking)
      throw new AccessDeniedError(
        undefined,
        "it is not known whether this database is one of several, and which one",
        lacking,
      );
    if (this.#placement && shard) this.#epoch = this.#placement.check(shard);
    else if (shard?.next !== undefined)
      throw new ShardMapError(
        "This database is being made one of several: nothing is granted until that is done.",
        {
          retryable: true,
        },
      );
    else if (shard && !isAlone(shard))
      throw new ShardMapError(
        "This database is one of several, and this instance knows of no other: it would begin anew what is counted elsewhere. Go by all of them: " +
          "sharded(databases, …). For a tool that is about this one alone: holdfast(database, { oneShard: true }).",
      );
  }

  async #check(connection: Connection, read: AgreedRead, facts: Capabilities): Promise<Capabilities> {
    const { there } = read;
    this.#checkShard(read);
    const strategy = there?.get("strategy");
    if (!strategy || !protection.strategyAgreed) return facts;
    this.#refuse(strategy);
    if (strategy.value === facts.transactionLocks || !isSupported(facts.transactionLocks)) return facts;
    // As everybody does, unless it was told otherwise.
    const { engine, traits } = this.#database;
    return withPatterns(await engine.probe(connection, traits, strategy.value as Strategy), engine);
  }

  #refuse({ value, next }: Agreed): void {
    if (next !== undefined)
      throw new StrategyError(
        `Locks of this database were "${value}", and are being changed to "${next}": no lock is given until that is done. ` +
          "It takes about half a minute. If the process that changes it was stopped, `holdfast strategy` says how to go on or back.",
        true,
      );
    const { strategy: wish } = this.#options;
    if (wish === undefined || wish === value) return;
    throw new StrategyError(
      `Locks of this database are "${value}", and this instance was told to keep them as "${wish}": kept in two ways, ` +
        "they exclude nobody. Leave `strategy` out, and they are kept as the database says; or change that for everybody: " +
        `holdfast strategy set "${wish}".`,
    );
  }

  /**
   * Writes something down, if nobody has. Undefined: it cannot be written now. In somebody's transaction it would be
   * gone with that, and whoever wrote the same would wait for its end: so it is written on another connection, if one is to be
   * had at once. A client with one connection waits for nobody else.
   */
  async #write(
    agreements: Agreements<Connection>,
    connection: Connection,
    free: boolean,
    put: (on: Connection) => Promise<boolean>,
  ): Promise<AgreedRead | undefined> {
    const write = async (on: Connection) => ((await put(on)) ? agreements.read(on) : undefined);
    if (free || this.#database.traits.single) return write(connection);
    const room = this.#database.room?.();
    if (room?.out !== undefined && room.max !== undefined && room.out >= room.max) return undefined;
    return this.#beside(withConnection({ database: this.#database }, write));
  }

  /** What is done on another connection while the caller holds one. It is not waited for long, and need not succeed. */
  async #beside<T>(work: Promise<T>): Promise<T | undefined> {
    try {
      return await within(besideMs, work);
    } catch (error) {
      if (error instanceof Silence || error instanceof NoConnectionError) return undefined;
      throw error;
    }
  }
}
