/** What `holdfast bench` runs on somebody's server. */
import { DeadlockError, SerializationError, failureOf, isLockTimeout } from "holdfast";
import { type Alternation, type Measured, type Timing, alternate } from "./measure.ts";
import type { MysqlPlace, PostgresPlace } from "./place.ts";

/** Names that all suites have: ratios are ours over what people write by hand. */
export const naive = "naive";
export const byHand = "by hand";
export const ours = "holdfast";

/** Callers. A service has more requests under way than connections: what comes at the same time can go together. */
export const perConnection = 8;

export interface Cell {
  readonly name: string;
  /** Contestants, in the order in which they are shown. */
  readonly contestants: readonly string[];
  measure(timing: Timing): Promise<Figures[]>;
}

export interface Figures extends Measured {
  /** Calls that had to be made again: a lock was not to be had in time, or there was a deadlock. */
  readonly again?: number;
}

/** A lock that was not granted, by hand. */
export class Busy extends Error {}

function wasInTheWay(error: unknown): boolean {
  if (error instanceof Busy || error instanceof DeadlockError || error instanceof SerializationError)
    return true;
  const kind = failureOf(error)?.kind;
  return isLockTimeout(error) || kind === "deadlock" || kind === "serialization";
}

/**
 * Made again if somebody was in the way, as its caller would: on a server that is far away many callers of one lock
 * wait for longer than its timeout, and that is no reason to end.
 */
export async function untilDone<T>(
  call: () => Promise<T>,
  signal: AbortSignal | undefined,
  onAgain: () => void = () => {},
): Promise<T> {
  for (;;) {
    try {
      return await call();
    } catch (error) {
      if (!wasInTheWay(error)) throw error;
      signal?.throwIfAborted();
      onAgain();
    }
  }
}

/** Whether what was granted, written or run is what should have been. */
export interface Trial {
  readonly expected: number;
  readonly counted: number;
  /** In a few words. */
  readonly text: string;
}

export interface Opened extends AsyncDisposable {
  readonly cells: readonly Cell[];
  /** By contestant. */
  readonly trials: Readonly<Record<string, (until: Until) => Promise<Trial>>>;
}

export interface Suite {
  readonly name: string;
  readonly about: string;
  /** What the contestants do, in the order in which they are shown. */
  readonly contestants: Readonly<Record<string, string>>;
  /** Those of Holdfast: they must be exact. */
  readonly own: readonly string[];
  /** Needs the tables of Holdfast, and so a database in which nobody else has them. */
  readonly needsDatabase: boolean;
  /** Of contestants, over all cells: for the time that it will take. */
  readonly measured: number;
  /**
   * Round trips that callers make one after the other when a round ends, about, of all contestants together: they stand
   * in line for one lock. What a server that is far away takes longer for.
   */
  readonly inLine: (connections: number) => number;
  /** Make its tables. */
  readonly postgres: (place: PostgresPlace) => Promise<Opened>;
  readonly mysql: (place: MysqlPlace) => Promise<Opened>;
}

/** Callers at a time, one after the other each, on the same data in every round. */
export function alternating(
  name: string,
  alternation: Pick<Alternation, "contestants" | "callers" | "reset">,
): Cell {
  return {
    name,
    contestants: alternation.contestants.map((contestant) => contestant.name),
    async measure(timing) {
      const again = new Map<string, number>();
      const contestants = alternation.contestants.map(({ name: contestant, call }) => ({
        name: contestant,
        call: (turn: number) =>
          untilDone(
            () => call(turn),
            timing.signal,
            () => again.set(contestant, (again.get(contestant) ?? 0) + 1),
          ),
      }));
      const measured = await alternate({ ...alternation, ...timing, contestants });
      return measured.map((figures) => ({ ...figures, again: again.get(figures.name) ?? 0 }));
    },
  };
}

/** When a trial has lasted long enough. */
export interface Until {
  readonly ms: number;
  readonly signal?: AbortSignal | undefined;
}

const mostTries = 20;

/**
 * Something of which there are few, wanted by all callers at the same time until each of them is refused; and again with
 * the next. Counted is what was granted.
 */
export async function scarce(
  { ms, signal }: Until,
  callers: number,
  few: number,
  take: (nth: number) => Promise<boolean>,
): Promise<Trial> {
  let [tries, counted] = [0, 0];
  for (const since = performance.now(); tries < mostTries && performance.now() - since < ms; tries++) {
    const nth = tries;
    const caller = async (): Promise<void> => {
      while (await untilDone(() => take(nth), signal)) {
        counted++;
        signal?.throwIfAborted();
      }
    };
    await Promise.all(Array.from({ length: callers }, caller));
    signal?.throwIfAborted();
  }
  const expected = tries * few;
  // "101 of 100".
  return { expected, counted, text: counted === expected ? "exact" : `${counted} of ${expected}` };
}
