/** What a race of the demo is, and what its code needs: the same for the process that tells and for those that run it. */
import { setTimeout as sleep } from "node:timers/promises";
import type { Holdfast } from "holdfast";
import type { ClientBase, Pool } from "pg";
import type { RaceName, WayName } from "./names.ts";
import type { Setting, Tally } from "./protocol.ts";

export { type RaceName, type WayName, isOurs, raceNames } from "./names.ts";

export type Size = Pick<Setting, "processes" | "callers">;

/** A database that holds the demo's tables and nothing else. */
export interface Place {
  readonly pool: Pool;
  readonly hf: Holdfast<ClientBase>;
}

/** One of the processes. */
export interface Stage extends Place {
  readonly setting: Setting;
  /** One call: how it ends is kept, and thrown to nobody. False: it failed. */
  call(work: () => Promise<unknown>): Promise<boolean>;
  /** How far it has come, for a race that is `shared`; the calls of others are counted anyway. */
  progress(finished: number): void;
}

export interface Way {
  readonly name: WayName;
  /** The lines that decide. They are lines of the code below, which a test compares. */
  readonly code: readonly string[];
  /** Why it comes out as it does. */
  readonly why: string;
  /** Its part in one process. */
  run(stage: Stage): Promise<void>;
}

/** What the tables say. */
export interface Finding {
  readonly counted: number;
  readonly expected: number;
  readonly right: boolean;
  /** In one line, for people: "122 uploads of 100 allowed: 22 too many". */
  readonly text: string;
  /** Whatever else was looked at. */
  readonly facts: Readonly<Record<string, number>>;
  /** How long each took, in milliseconds, where the calls do not say. */
  readonly took?: readonly number[];
}

export interface Race {
  readonly name: RaceName;
  readonly title: string;
  /** What happens, and what the code does about it. */
  what(size: Size): string;
  /** What `counted` is a number of. */
  readonly counts: string;
  /** What is done, and how often. */
  total(size: Size): number;
  readonly does: string;
  /** Whether it makes sense to say how many of them there were in a second. */
  readonly timed: boolean;
  /** Each process tells how far all of them are, not its own share. */
  readonly shared: boolean;
  /** Statements that make its tables. */
  readonly tables: string;
  /** As it is before a way begins. */
  reset(place: Place, way: WayName, size: Size): Promise<void>;
  readonly ways: readonly Way[];
  /** What came of it. `right` is whether it is what it should be. */
  find(place: Place, way: WayName, tally: Tally, size: Size): Promise<Finding>;
}

/** What the rules of the race say no to: the quota is full, the item is sold. Not a failure. */
export class Refused extends Error {}

/**
 * What real code does between the check and the write (look at the file, ask another table). It makes races show on a
 * machine of any speed, but does not make them.
 */
export const workMs = 1;
export const work = (): Promise<void> => sleep(workMs);

/** Each caller of this process does so many, one after the other. */
export async function callers(
  { setting, call }: Stage,
  each: number,
  attempt: (caller: number, i: number) => Promise<unknown>,
): Promise<void> {
  const caller = async (_: unknown, own: number): Promise<void> => {
    const number = setting.index * setting.callers + own;
    for (let i = 0; i < each; i++) await call(() => attempt(number, i));
  };
  await Promise.all(Array.from({ length: setting.callers }, caller));
}

/** A transaction as it is written by hand. */
export async function byHand(
  pool: Pool,
  body: (client: ClientBase) => Promise<unknown>,
  isolation: "READ COMMITTED" | "SERIALIZABLE" = "READ COMMITTED",
): Promise<void> {
  const client = await pool.connect();
  try {
    await client.query(`BEGIN ISOLATION LEVEL ${isolation}`);
    await body(client);
    await client.query("COMMIT");
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}

type Queryable = Pick<Pool, "query"> | Pick<ClientBase, "query">;

/** The only row, or the first. */
export async function one<Row extends object>(
  db: Queryable,
  text: string,
  values: readonly unknown[] = [],
): Promise<Row> {
  const { rows } = await (db as Pool).query<Row>(text, [...values]);
  const [row] = rows;
  if (!row) throw new Error(`no row: ${text}`);
  return row;
}

export const failures = ({ failed }: Tally): number => Object.values(failed).reduce((sum, n) => sum + n, 0);

/** "12 failed (40001)", or nothing. */
export function failureText(tally: Tally): string | undefined {
  const [most] = Object.entries(tally.failed).toSorted(([, a], [, b]) => b - a);
  return most && `${failures(tally)} failed (${most[0]})`;
}

/** "122 uploads of 100 allowed: 22 too many, 3 failed (53300)" */
export function sentence(fact: string, ...notes: readonly (string | false | undefined)[]): string {
  const said = notes.filter(Boolean);
  return said.length === 0 ? fact : `${fact}: ${said.join(", ")}`;
}
