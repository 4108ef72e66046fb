import type { Wait } from "../../seam/database.ts";

export interface LeaseOptions {
  /**
   * How long it lasts unless it is renewed, by the database's clock, in milliseconds from 100 to 86,400,000 (a day).
   * After a crash of its holder nobody gets it sooner. Default 30,000.
   */
  readonly ttl?: number;
  /** How long to wait for it: milliseconds, "nowait" to throw at once, "skip" to get undefined at once. Default: the instance's. */
  readonly wait?: Wait | "skip";
  /** Gives up the wait. It has no effect on a lease that was granted. */
  readonly signal?: AbortSignal | undefined;
  /** After a release too, nobody else gets it before this many milliseconds since it was granted. Default 0. */
  readonly atLeastFor?: number;
  /** `false`: it is not renewed unless `renew()` is called. Default true. */
  readonly renew?: boolean;
  /** Who holds it, for people. Default: host name and process id. */
  readonly holder?: string;
}

/** Which leases are listed. */
export interface LeaseFilter {
  /** Those too that ran out and were never given back. */
  readonly over?: boolean;
  /** As it is shown; a key is known by more than that. */
  readonly name?: string;
  readonly fence?: number;
  /** How many at the most. */
  readonly limit?: number;
}

/** Held until it is released, or runs out: by the database's clock, whatever becomes of this process. */
export interface Lease extends AsyncDisposable {
  readonly name: string;
  /** Grows from grant to grant, and never goes back. Pass it to systems that can refuse an older one. */
  readonly fence: number;
  /** When it was granted, by the database's clock. */
  readonly since: Date;
  /** Until when it lasts if it is not renewed again, by the database's clock. */
  readonly until: Date;
  /** Aborts before anybody else can get the lease. Pass it to whatever the lease protects. */
  readonly signal: AbortSignal;
  /** Makes it last for `ttl` from now on, and for as long with every later renewal. Never makes it shorter. */
  renew(ttl?: number): Promise<void>;
  /** Throws if it can no longer be relied on, or was released. */
  throwIfLost(): void;
  /** Gives it back. Throws `LeaseLostError` if the server says that it was no longer ours. */
  release(): Promise<void>;
}
