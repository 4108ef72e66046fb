/** Calls of patterns: sent until they are answered, and if they are not, with the truth about what became of them. */
import { Failed, type Terms, Undone } from "./coalesce.ts";
import type { Connection, Failure, Wait } from "./database.ts";
import { Ended, errandMs, withConnection } from "./errand.ts";
import {
  ConnectionLostError,
  DeadlineExceededError,
  DeadlockError,
  HoldfastError,
  LockTimeoutError,
  NoConnectionError,
  OutcomeUnknownError,
  ReplicaError,
  SerializationError,
  UsageError,
} from "./errors.ts";
import { classify } from "./failure.ts";
import { graceMs } from "./interrupt.ts";
import { Queue } from "./queue.ts";
import { pause, retryPolicy } from "./retry.ts";
import { type Home, type Scope, scopeFor } from "./scope.ts";
import { checkSignal } from "./options.ts";
import { checkWait, sleep } from "./wait.ts";

/** Where a call belongs, and how long it may wait. */
export interface CallOptions {
  /** Takes part in this transaction: rolled back with it. Without it: in the one whose body calls, if there is one. */
  readonly tx?: unknown;
  /** Inside a transaction's body: apart from it, on a connection of its own. Kept also if that is rolled back. */
  readonly separate?: boolean;
  /** Milliseconds to wait while somebody's transaction has what the call needs. Default: the instance's (5 s). */
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
}

export const callNames = ["tx", "separate", "wait", "signal"] as const;

/** What an error says of a call. */
export interface About {
  /** What it may have to wait for, for people. */
  readonly names: readonly string[];
  /** What it is known by; `named`: the caller's own. Without one, a call that was lost cannot be repeated. */
  readonly id?: string | undefined;
  readonly named?: boolean;
  /** It locks what it names: only so many of the same name are sent at a time. */
  readonly locks?: boolean;
  /** In the caller's transaction what it names is locked until the end of that. */
  readonly keeps?: boolean;
}

/** In the caller's transaction, or undefined: outside of any. */
export interface Place {
  readonly scope: Scope<unknown, Connection> | undefined;
  readonly signal: AbortSignal | undefined;
  readonly waitMs: number;
}

export function placeOf(home: Home<unknown, Connection>, options: CallOptions, call: string): Place {
  const { wait, signal } = options;
  checkSignal(signal);
  const patience = wait === undefined ? home.wait : checkWait(wait, `${call}: wait`);
  return {
    scope: scopeFor(home, options, call),
    signal,
    // Of the server's settings 0 means for ever.
    waitMs: patience === "nowait" ? 1 : Math.max(1, patience),
  };
}

type Why = Failure | "late" | "aborted" | "no connection" | undefined;

/** Of what is between us and the server, or of others. Anything else is the server's refusal of what was sent. */
const troubles: ReadonlySet<Why> = new Set<Why>([
  "lost",
  "late",
  "aborted",
  "no connection",
  "canceled",
  "deadline",
  "lock-timeout",
  "deadlock",
  "serialization",
]);

/** Why there is no answer, and whether the call may have been applied all the same. */
class Unanswered extends Error {
  readonly why: Why;
  readonly perhaps: boolean;
  readonly attempts: number;
  readonly waitedMs: number;

  constructor(why: Why, perhaps: boolean, attempts: number, waitedMs: number, cause: unknown) {
    super("no answer", { cause });
    this.why = why;
    this.perhaps = perhaps;
    this.attempts = attempts;
    this.waitedMs = Math.round(waitedMs);
  }
}

interface Sending {
  /** Of locks, by the clock that never jumps. */
  readonly until: number;
  /** Of one attempt, besides. */
  readonly ms?: number | undefined;
  readonly signal?: AbortSignal | undefined;
  /** It was sent before, and may have been applied. */
  readonly perhaps?: boolean;
  /** What the server has done cannot be found again: it is sent once more only if that was nothing. */
  readonly once?: boolean;
}

/** How it is sent. */
export interface Sent {
  /** It may have been applied before. */
  readonly again: boolean;
  /** For locks of others. */
  readonly waitMs: number;
  /** The connection is in no transaction. */
  readonly free: boolean;
}

type Work<T> = (connection: Connection, how: Sent) => Promise<T>;

const policy = retryPolicy(undefined);

/** Of one of several databases: throws if it is not the one that it is taken for. `free`: it is in no transaction. */
export async function known(
  home: Home<unknown, Connection>,
  connection: Connection,
  free: boolean,
): Promise<void> {
  if (home.guard && !home.trusted()) await home.renewed(connection, free);
}

async function attempts<T>(home: Home<unknown, Connection>, sending: Sending, work: Work<T>): Promise<T> {
  const { until, signal, once = false } = sending;
  const started = performance.now();
  let perhaps = sending.perhaps ?? false;
  for (let attempt = 1; ; attempt++) {
    const waitMs = Math.max(1, Math.ceil(until - performance.now()));
    let sent = false;
    try {
      return await withConnection(
        home,
        async (connection) => {
          // A client that hands out no connection runs it in a transaction of its own.
          const free = home.database.connect !== undefined;
          await known(home, connection, free);
          return work(connection, { again: perhaps || attempt > 1, waitMs, free });
        },
        sending.ms ?? Math.max(errandMs, waitMs + graceMs),
        // Once it may have been applied, the question is no longer whether it is wanted, but what became of it.
        { signal: perhaps ? undefined : signal, sent: () => (sent = true), certain: true },
      );
    } catch (error) {
      const why: Why =
        error instanceof Ended
          ? error.why
          : error instanceof NoConnectionError
            ? "no connection"
            : classify(home.database, error);
      if (why === "lost") perhaps ||= sent;
      const passes = why !== undefined && policy.on.has(why as Failure) && !(once && perhaps);
      if (!passes || attempt === policy.attempts || (signal?.aborted && !perhaps))
        throw new Unanswered(why, perhaps, attempt, performance.now() - started, error);
      await sleep(pause(policy, attempt));
    }
  }
}

/** Nothing was done: what it needed was not free in time. `usable`: a transaction that it was part of can go on. */
export function waitedInVain(
  home: Home<unknown, Connection>,
  { names }: About,
  waitedMs: number,
  cause: unknown,
  usable = true,
): LockTimeoutError {
  const keys = names.map((name) => home.show(name));
  return new LockTimeoutError({ keys, waitedMs: Math.round(waitedMs), holders: [] }, cause, usable);
}

/** What the caller is told. */
function explain(error: unknown, about: About, home: Home<unknown, Connection>): unknown {
  if (!(error instanceof Unanswered)) return error;
  const { why, perhaps, cause, waitedMs } = error;
  const { names, id, named = false } = about;
  if (perhaps && troubles.has(why))
    return new OutcomeUnknownError(names.map((name) => home.show(name)).join(", "), id, named, cause);
  switch (why) {
    case "lock-timeout":
      return waitedInVain(home, about, waitedMs, cause);
    case "lost":
      return new ConnectionLostError(error.attempts, cause);
    case "late":
    case "canceled":
    case "deadline":
      return new DeadlineExceededError(waitedMs, cause);
    case "deadlock":
      return new DeadlockError(error.attempts, cause);
    case "serialization":
      return SerializationError.after(error.attempts, cause);
    case "read-only":
      return new ReplicaError(cause);
    default:
      return cause;
  }
}

/** Of one name, by themselves: each that waits takes a connection, here and on the server. */
const atATime = 4;

/** Those who are under way, and those who wait for their turn, by what they lock. */
class Turns {
  readonly #lines = new Map<string, { readonly queue: Queue; count: number }>();

  async take<T>(
    name: string,
    until: number,
    signal: AbortSignal | undefined,
    work: () => Promise<T>,
  ): Promise<T> {
    let line = this.#lines.get(name);
    if (!line) this.#lines.set(name, (line = { queue: new Queue(atATime), count: 0 }));
    line.count++;
    try {
      if (line.count <= atATime) return await line.queue.run(work);
      const late = new AbortController();
      const onAbort = () => late.abort();
      const timer = setTimeout(onAbort, Math.max(1, until - performance.now()));
      signal?.addEventListener("abort", onAbort, { once: true });
      if (signal?.aborted) onAbort();
      const leave = await line.queue
        .enter(late.signal)
        .catch((error: unknown) => {
          throw new Unanswered(signal?.aborted ? "aborted" : "lock-timeout", false, 0, 0, error);
        })
        .finally(() => {
          clearTimeout(timer);
          signal?.removeEventListener("abort", onAbort);
        });
      return await work().finally(leave);
    } finally {
      if (--line.count === 0) this.#lines.delete(name);
    }
  }
}

const turns = new WeakMap<object, Turns>();

/** One call, in the caller's transaction or by itself: sent again where that is safe, until it is answered. */
export async function send<T>(
  home: Home<unknown, Connection>,
  { scope, signal, waitMs }: Place,
  about: About & Pick<Sending, "ms" | "once">,
  work: Work<T>,
): Promise<T> {
  if (scope) {
    const started = performance.now();
    try {
      const answer = await scope.work(async ({ connection }) => {
        await known(home, connection, false);
        return work(connection, { again: true, waitMs, free: false });
      }, signal);
      if (about.keeps ?? about.locks)
        for (const name of about.names)
          scope.section?.took({ kind: "call", name: home.show(name) }, undefined);
      return answer;
    } catch (error) {
      if (classify(home.database, error) !== "lock-timeout" || error instanceof HoldfastError) throw error;
      throw waitedInVain(home, about, performance.now() - started, error, false);
    }
  }
  signal?.throwIfAborted();
  const { ms, once, locks = false, names } = about;
  const started = performance.now();
  const sending: Sending = { until: started + waitMs, signal, ms, ...(once && { once }) };
  const run = () => attempts(home, sending, work);
  try {
    if (!locks) return await run();
    let ours = turns.get(home);
    if (!ours) turns.set(home, (ours = new Turns()));
    return await ours.take(names.join(), sending.until, signal, run);
  } catch (error) {
    if (!(error instanceof Unanswered) || error.perhaps) throw explain(error, about, home);
    if (error.why === "aborted") throw signal?.reason;
    // The time in line is part of it.
    if (error.why === "lock-timeout")
      throw waitedInVain(home, about, performance.now() - started, error.cause);
    throw explain(error, about, home);
  }
}

/** What a batch needs to know of its calls. */
export interface Together<Item, Answer> {
  about(item: Item): About;
  /** What was applied cannot be found again: nothing is sent a second time that may have been. */
  readonly once?: boolean;
  decide(connection: Connection, items: readonly Item[], how: Sent): Promise<readonly Answer[]>;
}

/**
 * Several calls at once. What the server refuses may be the fault of one of them, and what is lost again and again too: they
 * are sent in halves then, one after the other. Throws `Undone` if nothing of any of them was done for now.
 */
export async function sendTogether<Item, Answer>(
  home: Home<unknown, Connection>,
  together: Together<Item, Answer>,
  items: readonly Item[],
  terms: Terms,
): Promise<(Answer | Failed)[]> {
  return halves(home, together, items, terms, { first: true, perhaps: false });
}

async function halves<Item, Answer>(
  home: Home<unknown, Connection>,
  together: Together<Item, Answer>,
  items: readonly Item[],
  terms: Terms,
  { first, perhaps }: { readonly first: boolean; readonly perhaps: boolean },
): Promise<(Answer | Failed)[]> {
  try {
    const sending = { ...terms, perhaps, once: together.once ?? false };
    const answers = await attempts(home, sending, (connection, how) =>
      together.decide(connection, items, how),
    );
    return [...answers];
  } catch (error) {
    const failed = (item: Item) => new Failed(explain(error, together.about(item), home));
    if (!(error instanceof Unanswered)) return items.map(failed);
    const { why, cause } = error;
    const several = items.length > 1 && new Set(items.flatMap((item) => together.about(item).names)).size > 1;
    const waited = why === "lock-timeout";
    if (first && !error.perhaps) {
      if (why === "aborted") throw new Undone("aborted", cause);
      if (waited) throw new Undone(several ? "crowded" : "waited", cause);
    }
    const faulty = !troubles.has(why) && (!(cause instanceof HoldfastError) || cause instanceof UsageError);
    const apart =
      faulty ||
      ((why === "lost" || why === "deadlock" || why === "serialization" || (waited && several)) &&
        performance.now() < terms.until);
    const never = together.once === true && error.perhaps;
    if (items.length === 1 || !apart || never || terms.signal.aborted) return items.map(failed);
    const middle = items.length >> 1;
    const answers: (Answer | Failed)[] = [];
    for (const half of [items.slice(0, middle), items.slice(middle)]) {
      // Whatever is in the way is in everybody's.
      const over = !faulty && performance.now() >= terms.until;
      const how = { first: false, perhaps: error.perhaps };
      answers.push(...(over ? half.map(failed) : await halves(home, together, half, terms, how)));
    }
    return answers;
  }
}
