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
}

/**
 * How long an instance goes by what it has read, from the moment before it asked. Whoever changes it waits for longer: by
 * then everybody has read it again, or has not relied on it since. A read every 30 s is nothing next to the transactions of
 * a process; shorter would make no change safer, only sooner.
 */
export const trustMs = 30_000;
