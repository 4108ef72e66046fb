/** What an instance and all others have in common: found at its first use, and looked at again from time to time. */
import { type Agreed, type AgreedRead, type Agreements, trustMs } from "../seam/agreements.ts";
import {
  type Capabilities,
  type Strategy,
  type Unsupported,
  isSupported,
  withPatterns,
} from "../seam/capabilities.ts";
import type { Connection, Database } from "../seam/database.ts";
import { NoConnectionError, ShardMapError, StrategyError } from "../seam/errors.ts";
import { withConnection } from "./one-shot.ts";
import { Silence, within } from "../waiting/interrupt.ts";
import * as protection from "../seam/protections.ts";

/** Which of several databases an instance takes its own for. */
export interface Placement {
  /** Throws if that is not what is written down. */
  check(found: string): void;
  /** Writes it down, in all of them, on this connection where it is this one. False: it may not. */
  place(connection: Connection | undefined): Promise<boolean>;
}

/** How long a transaction waits for what is written down beside it. */
const besideMs = 300;
/** If that could not be done: the next one tries again. */
const briefMs = 1000;

export class Common {
  readonly #database: Database<unknown, Connection>;
  readonly #wish: Strategy | undefined;
  readonly #placement: Placement | undefined;
  /** As they were found, and as they are gone by. */
  #found: Capabilities | undefined;
  #facts: Capabilities | undefined;
  #gap: Unsupported | undefined;
  /** Why no lock may be taken, if it may not. */
  #refusal: StrategyError | ShardMapError | undefined;
  /** Until when it goes by them, by the clock that never jumps. */
  #until = -Infinity;

  constructor(
    database: Database<unknown, Connection>,
    wish: Strategy | undefined,
    placement: Placement | undefined,
  ) {
    this.#database = database;
    this.#wish = wish;
    this.#placement = placement;
  }

  /** What does not change while the server is the same. */
  get facts(): Capabilities | undefined {
    return this.#facts;
  }

  /** The same, while nobody can have changed how locks are kept. */
  get trusted(): Capabilities | undefined {
    return performance.now() < this.#until ? this.#facts : undefined;
  }

  /** What it has found when it was asked last. Throws if this instance and the others do not agree. */
  agreed(): Capabilities {
    if (this.#refusal) throw this.#refusal;
    return this.#facts as Capabilities;
  }

  /** Locks were tried out, and keep nobody out: none is given from now on. */
  distrust(gap: Unsupported): void {
    this.#gap = gap;
    if (this.#found) this.#facts = this.#without(this.#found);
  }

  #without(found: Capabilities): Capabilities {
    const gap = this.#gap;
    return gap ? { ...found, transactionLocks: gap, joinedLocks: gap, sharedLocks: gap } : found;
  }

  /** The next call asks again. */
  doubt(): void {
    this.#until = -Infinity;
  }

  /** `free`: the connection is in no transaction, so that what is written on it is there for others. */
  async ask(connection: Connection, free: boolean): Promise<Capabilities> {
    const { engine, traits } = this.#database;
    const { agreements } = engine;
    const asked = performance.now();
    let facts = this.#found ?? withPatterns(await engine.probe(connection, traits, this.#wish), engine);
    let until = Infinity;
    let refusal: StrategyError | ShardMapError | undefined;
    if (agreements) {
      until = asked + trustMs;
      try {
        const read = await agreements.read(connection);
        facts = await this.#check(connection, read, facts);
        const { there, writable } = read;
        const { transactionLocks } = facts;
        const missing = {
          // Who cannot lock here has nothing to say about how others do.
          strategy: there?.has("strategy") || !isSupported(transactionLocks) ? undefined : transactionLocks,
          placement: there?.has("shard") ? undefined : this.#placement,
        };
        if (there && writable && (missing.strategy !== undefined || missing.placement)) {
          const written = await this.#write(agreements, connection, free, missing);
          // Somebody else may have come first.
          if (written) facts = await this.#check(connection, written, facts);
          else until = asked + briefMs;
        }
      } catch (error) {
        // Whoever only looks is not kept from it.
        if (!(error instanceof StrategyError || error instanceof ShardMapError)) throw error;
        refusal = error;
        until = -Infinity;
      }
    }
    this.#found = facts;
    this.#facts = this.#without(facts);
    this.#refusal = refusal;
    this.#until = until;
    return this.#facts;
  }

  async #check(connection: Connection, { there }: AgreedRead, facts: Capabilities): Promise<Capabilities> {
    const shard = there?.get("shard");
    if (shard && protection.shardAgreed) this.#placement?.check(shard.value);
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
          "It takes about half a minute. If whoever did it was stopped: `holdfast strategy` says how to go on, or back.",
        true,
      );
    if (this.#wish === undefined || this.#wish === value) return;
    throw new StrategyError(
      `Locks of this database are "${value}", and this instance was told to keep them as "${this.#wish}": kept in two ways, ` +
        "they exclude nobody. Leave `strategy` out, and they are kept as the database says; or change that for everybody: " +
        `holdfast strategy set "${this.#wish}".`,
    );
  }

  /**
   * What nobody has written down yet. Undefined: it cannot be, now. In somebody's transaction it would be gone with that, and
   * whoever wrote the same would wait for its end: so it is written beside it, if there is a connection to be had. Those of a
   * client with one connection wait for nobody else.
   */
  async #write(
    agreements: Agreements<Connection>,
    connection: Connection,
    free: boolean,
    missing: Missing,
  ): Promise<AgreedRead | undefined> {
    const own = free || this.#database.traits.single;
    const write = async (on: Connection) => {
      const written =
        (!missing.strategy || (await agreements.write(on, "strategy", missing.strategy))) &&
        (await (missing.placement?.place(own ? on : undefined) ?? true));
      return written ? agreements.read(on) : undefined;
    };
    if (own) return write(connection);
    try {
      return await within(besideMs, withConnection({ database: this.#database }, write));
    } catch (error) {
      if (error instanceof Silence || error instanceof NoConnectionError) return undefined;
      throw error;
    }
  }
}

interface Missing {
  readonly strategy: string | undefined;
  readonly placement: Placement | undefined;
}
