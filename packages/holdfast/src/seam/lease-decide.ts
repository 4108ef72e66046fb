/** Who gets a lease, for engines that decide in this process rather than in SQL. */
import type { LeaseClaim } from "./leases.ts";

/** A lease that was granted, or a place in line. */
export interface LeaseEntry {
  readonly fence: number;
  readonly token: string;
  readonly weight: number;
  readonly waiting: boolean;
  /** Milliseconds since 1970, by the database's clock. */
  readonly since: number;
  readonly until: number;
}

/** Everything about a resource, and the time at which it was so. */
export interface LeaseView {
  readonly now: number;
  readonly entries: readonly LeaseEntry[];
}

export interface LeaseDecision {
  /** What the claim has got already. */
  readonly mine: LeaseEntry | undefined;
  readonly fits: boolean;
  /** When the first of those in the way runs out. */
  readonly freeInMs: number | undefined;
  /** It is to stand in line. */
  readonly inLine: boolean;
}

export function decide(
  { token, weight, capacity, lineMs }: LeaseClaim,
  { now, entries }: LeaseView,
): LeaseDecision {
  const mine = entries.find((entry) => entry.token === token);
  const before = entries.filter(
    (entry) =>
      entry !== mine && entry.until > now && (!entry.waiting || !mine?.waiting || entry.fence < mine.fence),
  );
  const taken = before.reduce((sum, entry) => sum + entry.weight, 0);
  const fits = taken + weight <= capacity;
  const first = Math.min(...before.map(({ until }) => until));
  return {
    mine,
    fits,
    freeInMs: before.length === 0 ? undefined : Math.max(0, first - now),
    inLine: !fits && lineMs > 0 && (mine !== undefined || before.some((entry) => entry.weight !== weight)),
  };
}
