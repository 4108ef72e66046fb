/** What `holdfast import` has to know of another library's tables. */
import type { Row } from "../server.ts";

export type Ask = (text: string, values?: readonly unknown[]) => Promise<Row[]>;

/** A queue of theirs, and how many of its jobs can be moved. */
export interface Standing {
  readonly name: string;
  /** Due, and never begun. */
  readonly waiting: number;
  /** Not due yet, and never begun. */
  readonly scheduled: number;
  /** Failed at least once, and will be run again. */
  readonly retrying: number;
  /** With a worker of theirs, which ends them. */
  readonly active: number;
  /** Tied to other jobs there, in a way that cannot be moved. */
  readonly tied: number;
  /** The queue, as it is written with Holdfast. */
  readonly code: string;
  /** What people should know before. */
  readonly remarks: readonly string[];
}

/** A schedule of theirs, as it is written with Holdfast. */
export interface Timetable {
  readonly name: string;
  readonly code: string;
}

export interface Found {
  readonly version: number;
  readonly queues: readonly Standing[];
  readonly schedules: readonly Timetable[];
}

/** A job of theirs, in words of Holdfast. */
export interface TheirJob {
  readonly id: string;
  readonly payload: unknown;
  readonly priority: number;
  readonly failures: number;
  /** Undefined: it is due. */
  readonly runAt: Date | undefined;
  readonly key: string | undefined;
  readonly group: string | undefined;
}

/** Jobs of one queue, in one transaction. */
export interface Taking {
  /**
   * The next ones that nobody has, in the order in which their workers would run them, but for `passed`. They are locked
   * by what their own workers go by, until the transaction ends: nobody else begins them.
   */
  next(most: number, passed: readonly string[]): Promise<TheirJob[]>;
  remove(ids: readonly string[]): Promise<void>;
}

export interface Peer {
  readonly name: string;
  /** Where its tables are, unless somebody says otherwise. */
  readonly schema: string;
  /** Throws a `Failure` if there are none, or of a version that is not known. */
  examine(ask: Ask, schema: string): Promise<Found>;
  take(ask: Ask, schema: string, queue: string): Promise<Taking>;
}

export const identifier = (name: string): string => `"${name.replaceAll('"', '""')}"`;

/** Not before: what JavaScript cannot say of a moment is rounded up. */
export const notBefore = (column: string): string =>
  `CASE WHEN ${column} > clock_timestamp() THEN date_trunc('milliseconds', ${column} + interval '999 microseconds') END`;

export const text = (value: unknown): string | undefined => (value === null ? undefined : String(value));

/** The name of a variable for something that has a name of its own. */
export function variable(name: string): string {
  const words = name.split(/[^\p{L}\p{N}]+/u).filter((word) => word !== "");
  const joined = words
    .map((word, i) => (i === 0 ? word : `${word.slice(0, 1).toUpperCase()}${word.slice(1)}`))
    .join("");
  return /^\p{L}/u.test(joined) ? joined : `queue${joined}`;
}
