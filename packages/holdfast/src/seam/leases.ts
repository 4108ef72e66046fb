/** What an engine keeps of leases: the contract behind leases, semaphores and reader-writer leases. */
import type { Connection } from "./database.ts";

export type LeaseMode = "exclusive" | "shared" | "permit";

/**
 * A wish for a share of a resource. It is granted while the weights of all that are held, and of those that have
 * stood in line for longer, leave room within the capacity: 1 of N for a semaphore, all of it for an exclusive lease.
 */
export interface LeaseClaim {
  readonly resource: string;
  /** For people; empty if it is not to be seen there. */
  readonly name: string;
  /** For people. */
  readonly mode: LeaseMode;
  /**
   * Random, one per claim: a name such as the host's would let two processes release each other's. A claim that is
   * made again with the same token gets what it got before, so an answer that was lost leaves nothing behind.
   */
  readonly token: string;
  /** Who asks, for people. */
  readonly holder: string;
  readonly weight: number;
  readonly capacity: number;
  readonly ttlMs: number;
  /**
   * If it is not granted, and what is in its way has another weight, stand in line for this long, to be said again
   * before that: those who come later wait behind it. Equals need no line, as none of them can be passed over for
   * ever by the others' being smaller. 0: do not.
   */
  readonly lineMs: number;
}

/** What identifies a lease that was granted. */
export interface Grip {
  readonly resource: string;
  readonly name: string;
  readonly mode: LeaseMode;
  readonly token: string;
  readonly fence: number;
  /** Stands for the database that keeps it: elsewhere a lease that is not there need not be over. */
  readonly origin: string;
}

export type ClaimResult =
  | {
      readonly granted: true;
      readonly fence: number;
      readonly since: Date;
      readonly until: Date;
      readonly origin: string;
    }
  | {
      readonly granted: false;
      /** When the first of those in the way runs out, by the database's clock; undefined: not known. */
      readonly freeInMs: number | undefined;
      /** It stands in line now. */
      readonly inLine: boolean;
    };

/** A lease as anybody can read it. */
export interface LeaseInfo {
  readonly name: string;
  readonly holder: string;
  readonly fence: number;
  readonly mode: LeaseMode;
  /** Not granted: standing in line. */
  readonly waiting: boolean;
  readonly since: Date;
  readonly until: Date;
  /** It has run out, and was never given back: whoever wants it gets it. */
  readonly over: boolean;
}

/** The same with what identifies it to the store. */
export type KeptLease = LeaseInfo & Pick<Grip, "resource" | "token">;

/** Times are the database's, read after any wait. Every call but `fence` is a transaction of its own. */
export interface Leases<C extends Connection> {
  take(connection: C, claim: LeaseClaim): Promise<ClaimResult>;
  /** Never makes it shorter: a late answer to an earlier call must not. Undefined: it is no longer ours. */
  renew(connection: C, grip: Grip, ttlMs: number): Promise<Date | undefined>;
  /**
   * Gives back what was granted, or a place in line. False: it was no longer ours. `atLeastMs`: nobody else gets it
   * before this long after it was granted. Never waits for a transaction that has called `fence`.
   */
  release(connection: C, grip: Pick<Grip, "resource" | "token">, atLeastMs: number): Promise<boolean>;
  /**
   * Inside a transaction: keeps the lease from being given to anybody else until its end. Resolves to the newest
   * fence that is known if the lease is over. Of a lease that another database keeps, the newest fence that was seen
   * here counts; that says nothing about leases that are not exclusive, which are refused. `joined`: the transaction
   * is the caller's, and may turn out not to exist.
   */
  fence(connection: C, grip: Grip, joined: boolean): Promise<number | undefined>;
  /** Of these resources, with this fence or this name, or all of them. `over`: those too that ran out and were never given back. */
  list(
    connection: C,
    which: {
      readonly resources?: readonly string[] | undefined;
      readonly fence?: number | undefined;
      readonly name?: string | undefined;
      readonly over?: boolean;
      readonly most?: number | undefined;
    },
  ): Promise<readonly KeptLease[]>;
  /** The channel on which releases are told, for clients that can listen; the payload is the resource. */
  readonly channel?: string;
  /** Sends a payload on the channel, as a release does. */
  notify?(connection: C, payload: string): Promise<void>;
}
