/** What all processes must have in common, written down in the database: the contract behind strategies and shards. */
import type { Strategy } from "./capabilities.ts";
import type { Connection } from "./database.ts";
import type { Holder } from "./errors.ts";

/** `strategy`: how locks are kept. `shard`: which one of several this database is. `self`: what tells it from the others. */
export type AgreedName = "strategy" | "shard" | "self";

export interface Agreed {
  readonly value: string;
  /** It is being changed to this. Nobody may rely on either, from the moment at which they read it. */
  readonly next: string | undefined;
  /** Of this change: another one has another. */
  readonly mark: string;
}

/** `there`: undefined if there is no table for it, or no right to read it; `writable`: what is missing may be added. */
export interface AgreedRead {
  /** There is a table, and this user may not read it: the rights that are missing. */
  readonly lacking?: readonly string[];
  readonly there: ReadonlyMap<AgreedName, Agreed> | undefined;
  readonly writable: boolean;
}

export interface Agreements<C extends Connection> {
  /** Never fails for a lack of tables or rights: it may be asked in somebody's transaction. */
  read(connection: C): Promise<AgreedRead>;
  /** Unless something is there. Outside of transactions. False: it may not, here. */
  write(connection: C, name: AgreedName, value: string): Promise<boolean>;
  /** If it is still what was read. Committed when it resolves, unless it is part of a transaction. */
  change(
    connection: C,
    name: AgreedName,
    from: Agreed,
    to: Pick<Agreed, "value" | "next">,
  ): Promise<Agreed | undefined>;
  /** Whoever has locks of this kind, or has written in a way that only their holders do. */
  holders(connection: C, strategy: Strategy): Promise<readonly Holder[]>;
  /** Absent: statements check no number, and whoever changes the map waits until everybody has read it again. */
  readonly map?: MapEpoch<C>;
}

/** The number of the map of several databases, that each statement which goes by it compares, whatever its snapshot is. */
export interface MapEpoch<C extends Connection> {
  read(connection: C): Promise<number>;
  /**
   * From now on statements that go by another number are refused. `since`: only while that is what is written down, so that a process
   * which died has no effect on whoever goes on after it.
   */
  write(connection: C, epoch: number, since?: Agreed): Promise<void>;
  /** Those that were let in before. `alone`: also by an instance that compares no number. */
  users(connection: C, alone?: boolean): Promise<MapUsers>;
  /** Fences that are given here are larger than this from now on. Returns the newest. */
  fence(connection: C, least: number): Promise<number>;
}

export interface MapUsers {
  /** Transactions that have compared the number, also those that have begun since; of `alone`: all that have touched our tables, and advisory locks. */
  readonly transactions: ReadonlyMap<string, Holder>;
  /** Sessions that hold locks. */
  readonly sessions: readonly Holder[];
  /** Until the last lease is over. */
  readonly leasedMs: number;
  /** Buckets say by its place in the list where they went. */
  readonly moved: boolean;
  /** The last place in the list that a bucket says it went to; undefined: none. */
  readonly farthest: number | undefined;
  /** A pattern has written something here already. */
  readonly filled: boolean;
}

/**
 * How long an instance goes by what it has read, from the moment before it asked. Whoever changes it waits for longer: by
 * then everybody has read it again, or has not relied on it since. A read every 30 s is nothing next to the transactions of
 * a process; shorter would make no change safer, only sooner.
 */
export const trustMs = 30_000;
