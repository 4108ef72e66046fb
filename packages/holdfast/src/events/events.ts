import { type TracingChannel, channel, tracingChannel } from "node:diagnostics_channel";
import type { Reason } from "../seam/database.ts";
import type { Migrated } from "../seam/routine.ts";
import type { HazardKind } from "../context/section.ts";

/** What has a name in this process. */
export interface Made {
  readonly kind: "leader" | "queue" | "quota" | "schedule" | "versioned";
  /** As figures show it; of what is `versioned`, the table's. */
  readonly name: string;
}

/** Whoever held the first has asked for the second. */
export interface OrderStep {
  /** "key order", "table stock". */
  readonly from: string;
  readonly to: string;
  /** Where they were locked. */
  readonly first: string | undefined;
  readonly second: string | undefined;
}

/**
 * What happens inside, for whoever subscribes through `node:diagnostics_channel`. Payloads carry names of keys
 * (as `names` shows them) and figures, never values of statements.
 */
export interface Events {
  "holdfast:transaction:begin": { attempt: number; locks: readonly string[]; isolation: string };
  "holdfast:transaction:end": {
    attempt: number;
    locks: readonly string[];
    outcome: "commit" | "rollback";
    durationMs: number;
    /** Since its locks were granted, if they were. */
    heldMs?: number;
    error?: unknown;
  };
  "holdfast:transaction:retry": {
    attempt: number;
    locks: readonly string[];
    failure: string;
    delayMs: number;
  };
  "holdfast:lock:granted": { locks: readonly string[]; waitedMs: number };
  "holdfast:lock:refused": { locks: readonly string[]; waitedMs: number; reason: Reason };
  "holdfast:commit:resolved": { outcome: string };
  /** `hold`: a number of this process, the same in what is told later of these locks. */
  "holdfast:session:held": { hold: number; locks: readonly string[]; waitedMs: number };
  "holdfast:session:refused": { locks: readonly string[]; waitedMs: number; reason: Reason };
  "holdfast:session:released": { hold: number; locks: readonly string[]; heldMs: number };
  "holdfast:session:lost": { hold: number; locks: readonly string[]; heldMs: number; error: unknown };
  "holdfast:rows:locked": { table: string; rows: number; waitedMs: number };
  "holdfast:rows:refused": { table: string; waitedMs: number; reason: Reason };
  "holdfast:table:locked": { table: string; mode: string; waitedMs: number };
  "holdfast:table:refused": { table: string; mode: string; waitedMs: number; reason: Reason };
  "holdfast:lease:granted": { hold: number; lease: string; fence: number; waitedMs: number };
  "holdfast:lease:refused": { lease: string; waitedMs: number; reason: Reason };
  "holdfast:lease:renewed": { hold: number; lease: string; fence: number };
  /** Without `heldMs`, if it had been lost before: that was told then. */
  "holdfast:lease:released": { hold: number; lease: string; fence: number; heldMs?: number };
  "holdfast:lease:lost": { hold: number; lease: string; fence: number; heldMs: number; error: unknown };
  "holdfast:version:stale": { table: string; attempt: number };
  "holdfast:once:replayed": { id: string };
  /** Something that should not be done under a lock was; places as `file:line:column`, of it and of its transaction. */
  "holdfast:hazard": {
    kind: HazardKind;
    locks: readonly string[];
    place: string | undefined;
    transaction: string | undefined;
  };
  /** A transaction that had locked something has ended. */
  "holdfast:section:end": {
    kind: "transaction" | "joined";
    locks: readonly string[];
    /** Whose rows, or which, were locked. */
    tables: readonly string[];
    heldMs: number;
    statements: number;
  };
  /**
   * The same of one that took too long. `statement`: the last one, without values; `slowest`: the one that took longest, as far
   * as the client tells when it was answered; `hazards`: how many of which kind.
   */
  "holdfast:section:slow": {
    level: "suspect" | "broken";
    kind: "transaction" | "joined";
    locks: readonly string[];
    tables: readonly string[];
    heldMs: number;
    place: string | undefined;
    statements: number;
    statement: string | undefined;
    slowest: { readonly statement: string; readonly durationMs: number } | undefined;
    hazards: Readonly<Partial<Record<HazardKind, number>>>;
  };
  /** Locks are taken in one order here, and in another order elsewhere in this process: `steps` lead round. */
  "holdfast:order:inverted": { steps: readonly OrderStep[] };
  /** The process waited for its own transaction; see `HF_STALLED`. */
  "holdfast:transaction:stalled": { stalledMs: number; transaction: string | undefined };
  "holdfast:connection:wrong": { query: string | undefined; transaction: string | undefined };
  /** Of several quotas asked at once: each that granted, or the one that refused. */
  "holdfast:quota:decided": { quota: string; granted: boolean; amount: number; replayed: boolean };
  "holdfast:quota:failed": { quotas: readonly string[]; failed: "closed" | "open"; error: unknown };
  "holdfast:leader:gained": { leader: string; fence: number };
  "holdfast:leader:lost": { leader: string; fence: number; error?: unknown };
  /** This process is no candidate any more. */
  "holdfast:leader:withdrawn": { leader: string };
  "holdfast:schedule:started": { schedule: string; tick: Date; fence: number; attempt: number };
  "holdfast:schedule:done": {
    schedule: string;
    tick: Date;
    fence: number;
    attempt: number;
    durationMs: number;
  };
  "holdfast:schedule:failed": {
    schedule: string;
    tick: Date;
    attempt: number;
    retryInMs: number | undefined;
    /** If it ran here. */
    durationMs?: number;
    error: unknown;
  };
  "holdfast:schedule:skipped": { schedule: string; tick: Date };
  "holdfast:schedule:missed": { schedule: string; first: Date; before: Date };
  "holdfast:schedule:lost": { schedule: string; tick: Date; fence: number; error: unknown };
  /** `waitedMs`: from when it was enqueued until it ran, by the clocks of the database and of this process. */
  "holdfast:queue:done": {
    queue: string;
    job: number;
    attempt: number;
    waitedMs: number;
    durationMs: number;
  };
  /** `again`: milliseconds until it runs again; undefined: it has failed for good. */
  "holdfast:queue:failed": {
    queue: string;
    job: number;
    attempt: number;
    /** Without, if it is not known: nobody was listening when it began. */
    waitedMs?: number;
    durationMs?: number;
    again: number | undefined;
    error: unknown;
  };
  /** A worker was given up for dead, and its jobs went to others. */
  "holdfast:queue:lost": { queue: string; worker: number };
  "holdfast:queue:recovered": { jobs: number; queues: readonly string[] };
  "holdfast:queue:trouble": { queue: string; error: unknown };
  /** Something that has a name was made in this process. What is counted of it begins with zero. */
  "holdfast:made": Made;
  "holdfast:migrated": Migrated;
}

/** What each message of a trace has besides. */
export interface Traced {
  /**
   * For subscribers of `start`: what is traced is run by this, e.g. in a context of theirs. It calls `run` once and
   * returns its answer. (Stores that are bound to `start` are entered, too.)
   */
  wrap(around: <T>(run: () => T) => T): void;
  /** Once it has failed. */
  error?: unknown;
}

/**
 * What takes time, for whoever subscribes through `tracingChannel(name)`: `start` runs before it, in its context, and
 * `asyncEnd` after it, with the same message. There is no `result`: it may be anything.
 */
export interface Traces {
  /** A call, with all its attempts. */
  "holdfast:transaction": { locks: readonly string[]; isolation: string; attempts: number };
  /** An attempt that is not the first. */
  "holdfast:retry": {
    attempt: number;
    locks: readonly string[];
    failure: string;
    delayMs: number;
  };
  /** A wait for locks, whether it was long or not. Of rows and tables, `locks` is the name of the table. */
  "holdfast:lock": {
    kind: "transaction" | "session" | "lease" | "rows" | "table";
    locks: readonly string[];
    /** When it has ended, unless by an error of another kind. */
    outcome?: "granted" | Reason;
  };
  /** A handler of a queue. */
  "holdfast:job": { queue: string; job: number; attempt: number; transactional: boolean };
  /** A handler of a schedule. */
  "holdfast:schedule": {
    schedule: string;
    tick: Date;
    fence: number;
    attempt: number;
    manual: boolean;
  };
}

const channels = new Map<string, ReturnType<typeof channel>>();
const tracings = new Map<string, TracingChannel>();

function channelOf(name: keyof Events): ReturnType<typeof channel> {
  let found = channels.get(name);
  if (!found) channels.set(name, (found = channel(name)));
  return found;
}

export function emit<K extends keyof Events>(name: K, payload: () => Events[K]): void {
  const found = channelOf(name);
  // The payload is built only for somebody.
  if (found.hasSubscribers) found.publish(payload());
}

/** For what must be measured before it can be told. */
export function heard(name: keyof Events): boolean {
  return channelOf(name).hasSubscribers;
}

let holds = 0;

/** Another number for each lock of a session and each lease. */
export function nextHold(): number {
  return ++holds;
}

/** Runs the work as it is if nobody has subscribed, and that costs a look at five channels. */
export function traced<K extends keyof Traces, T>(
  name: K,
  message: () => Traces[K],
  work: (told?: Traces[K]) => Promise<T>,
): Promise<T> {
  let found = tracings.get(name);
  if (!found) tracings.set(name, (found = tracingChannel(name)));
  return found.hasSubscribers ? told(found, message, work) : work();
}

async function told<K extends keyof Traces, T>(
  channels: TracingChannel,
  message: () => Traces[K],
  work: (told: Traces[K]) => Promise<T>,
): Promise<T> {
  const arounds: (<R>(run: () => R) => R)[] = [];
  const whole: Traces[K] & Traced = Object.assign(message(), {
    wrap: (around: <R>(run: () => R) => R) => void arounds.push(around),
  });
  let value!: T;
  await channels.tracePromise(async () => {
    let run = () => work(whole);
    for (const around of arounds) {
      const inner = run;
      run = () => around(inner);
    }
    // Not as the result of what is traced: that would be told to everybody.
    value = await run();
  }, whole);
  return value;
}
