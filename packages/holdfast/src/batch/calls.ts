/** Calls of patterns: sent until they are answered, and if they are not, with the truth about what became of them. */
import type { Connection, Wait } from "../seam/database.ts";
import { oneShotMs, withConnection } from "../transaction/one-shot.ts";
import type { LockTimeoutError } from "../seam/errors.ts";
import { graceMs } from "../waiting/interrupt.ts";
import { checkSignal } from "../input/options.ts";
import type { How } from "../seam/store.ts";
import { type FailedCall, type Why, inVain, present, presenting, whyOf } from "../transaction/present.ts";
import { Turns } from "../waiting/turns.ts";
import { type RetryPolicy, passing, retrying } from "../transaction/retry.ts";
import { type InstanceContext, type Scope, scopeFor } from "../transaction/scope.ts";
import { checkWait } from "../waiting/wait.ts";

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
export interface CallAbout {
  /** What it may have to wait for, for people. */
  readonly names: readonly string[];
  /** What it is known by; `named`: the caller's own. Without one, a call that was lost cannot be repeated. */
  readonly id?: string | undefined;
  readonly named?: boolean;
  /** It locks what it names: only so many of the same name are sent at a time. */
  readonly locks?: boolean;
  /** In the caller's transaction what it names is locked until the end of that. */
  readonly keeps?: boolean;
  /** It is about what is here, whatever the map of several databases routes here by now. */
  readonly anyMap?: boolean;
}

/** In the caller's transaction, or undefined: outside of any. */
export interface CallPlace {
  readonly scope: Scope<unknown, Connection> | undefined;
  readonly signal: AbortSignal | undefined;
  readonly waitMs: number;
}

/** `options` are undefined if the call takes none. */
export function placeOf(
  context: InstanceContext<unknown, Connection>,
  options: CallOptions | undefined,
  call: string,
): CallPlace {
  const { wait, signal } = options ?? {};
  checkSignal(signal);
  const patience = wait === undefined ? context.wait : checkWait(wait, `${call}: wait`);
  return {
    scope: scopeFor(context, options, call),
    signal,
    // Of the server's settings 0 means for ever.
    waitMs: patience === "nowait" ? 1 : Math.max(1, patience),
  };
}

/** Why there is no answer, and whether the call may have been applied all the same. */
export class Unanswered extends Error {
  readonly why: Why | undefined;
  readonly perhaps: boolean;
  readonly attempts: number;
  readonly waitedMs: number;

  constructor(why: Why | undefined, perhaps: boolean, attempts: number, waitedMs: number, cause: unknown) {
    super("no answer", { cause });
    this.why = why;
    this.perhaps = perhaps;
    this.attempts = attempts;
    this.waitedMs = Math.round(waitedMs);
  }
}

export interface Sending {
  /** Of locks, by the clock that never jumps. */
  readonly until: number;
  /** Of one attempt, besides. */
  readonly ms?: number | undefined;
  readonly signal?: AbortSignal | undefined;
  /** It was sent before, and may have been applied. */
  readonly perhaps?: boolean;
  /** What the server has done cannot be found again: it is sent once more only if that was nothing. */
  readonly once?: boolean;
  /** Of these failures it is sent again. Default: all that pass. */
  readonly on?: ReadonlySet<string>;
  /** How often, and after which pauses. */
  readonly policy?: RetryPolicy;
  readonly anyMap?: boolean;
}

/** How it is sent. */
export interface Sent extends How {
  /** It may have been applied before. */
  readonly again: boolean;
}

type Work<T> = (connection: Connection, how: Sent) => Promise<T>;

/** Throws if this database, or the one of several, is not the one that it is taken for. `connection`: one that the caller holds; `free`: it is in no transaction. */
export async function known(
  context: InstanceContext<unknown, Connection>,
  connection?: Connection,
  free = false,
): Promise<void> {
  if (context.trusted()) return;
  if (context.guard) await context.renewed(connection, free);
  else if (connection) await context.placed(connection, free);
}

/** Before it is asked where something is: the map of several databases has been read not long ago. */
export async function mapRead(context: InstanceContext<unknown, Connection>, name: string): Promise<void> {
  if (context.trusted()) return;
  const policy = { why: (error: unknown) => whyOf(context.database, error), on: passing };
  await presenting(context.database, [name], () => retrying(() => known(context), policy));
}

export async function attempts<T>(
  context: InstanceContext<unknown, Connection>,
  sending: Sending,
  work: Work<T>,
): Promise<T> {
  const { until, signal, once = false, on = passing, anyMap = false } = sending;
  const started = performance.now();
  return retrying(
    async ({ attempt, perhaps, sent }) => {
      // Before a connection is ours: it may have to ask, or write, in all of several databases.
      if (context.guard && !anyMap) await known(context);
      const waitMs = Math.max(1, Math.ceil(until - performance.now()));
      return withConnection(
        context,
        async (connection) => {
          // A client that hands out no connection runs it in a transaction of its own.
          const free = context.database.connect !== undefined;
          if (!anyMap) await known(context, connection, free);
          const call = () => work(connection, { again: perhaps || attempt > 1, waitMs, free });
          const capabilities = context.known();
          const { engine } = context.database;
          return free && capabilities && engine.apart ? engine.apart(connection, capabilities, call) : call();
        },
        sending.ms ?? Math.max(oneShotMs, waitMs + graceMs),
        // Once it may have been applied, the question is no longer whether it is wanted, but what became of it.
        { signal: perhaps ? undefined : signal, sent, certain: true },
      );
    },
    {
      why: (error) => whyOf(context.database, error),
      on,
      once,
      ...(sending.policy && { policy: sending.policy }),
      perhaps: sending.perhaps ?? false,
      wanted: (perhaps) => perhaps || !signal?.aborted,
      failed(error, { why, perhaps, attempts: count }) {
        throw new Unanswered(why, perhaps, count, performance.now() - started, error);
      },
    },
  );
}

/** What is told of a call. */
function toldOf(context: InstanceContext<unknown, Connection>, { names }: CallAbout): FailedCall {
  return {
    names: names.map((name) => context.show(name)),
    atCommit: context.known()?.exclusion === "at commit",
  };
}

/** Nothing was done: what it needed was not free in time. */
export function waitedInVain(
  context: InstanceContext<unknown, Connection>,
  about: CallAbout,
  waitedMs: number,
  cause: unknown,
): LockTimeoutError {
  return inVain({ ...toldOf(context, about), waitedMs }, cause);
}

/** What the caller is told. */
export function explain(
  error: unknown,
  about: CallAbout,
  context: InstanceContext<unknown, Connection>,
): unknown {
  const told = toldOf(context, about);
  if (!(error instanceof Unanswered)) return present(context.database, error, told);
  const { why, perhaps, cause, waitedMs, attempts: count } = error;
  const { id, named } = about;
  return present(
    context.database,
    cause,
    { ...told, attempts: count, waitedMs, ...(perhaps && { perhaps: { id, named } }) },
    why,
  );
}

/** Of one name, by themselves: each that waits takes a connection, here and on the server. */
const atATime = 4;

/** Those who are under way, and those who wait for their turn, by what they lock. */
class TurnsByName {
  readonly #lines = new Map<string, { readonly queue: Turns; count: number }>();

  async take<T>(
    name: string,
    until: number,
    signal: AbortSignal | undefined,
    work: () => Promise<T>,
  ): Promise<T> {
    let line = this.#lines.get(name);
    if (!line) this.#lines.set(name, (line = { queue: new Turns(atATime), count: 0 }));
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

const turns = new WeakMap<object, TurnsByName>();

/** One call, in the caller's transaction or by itself: sent again where that is safe, until it is answered. */
export async function send<T>(
  context: InstanceContext<unknown, Connection>,
  { scope, signal, waitMs }: CallPlace,
  about: CallAbout & Pick<Sending, "ms" | "once" | "on" | "policy">,
  work: Work<T>,
): Promise<T> {
  if (scope) {
    const answer = await scope.work(
      async ({ connection }) => {
        await known(context, connection);
        return work(connection, { again: true, waitMs, free: false });
      },
      signal,
      about.names,
    );
    if (about.keeps ?? about.locks)
      for (const name of about.names)
        scope.section?.took({ kind: "call", name: context.show(name) }, undefined);
    return answer;
  }
  return context.started.during(about.names[0] ?? "Holdfast", () =>
    context.wrongConnection.beside(() => sendApart(context, { signal, waitMs }, about, work)),
  );
}

async function sendApart<T>(
  context: InstanceContext<unknown, Connection>,
  { signal, waitMs }: Omit<CallPlace, "scope">,
  about: CallAbout & Pick<Sending, "ms" | "once" | "on" | "policy">,
  work: Work<T>,
): Promise<T> {
  signal?.throwIfAborted();
  const { locks = false, names, ms, once, on, policy, anyMap = false } = about;
  const started = performance.now();
  const sending: Sending = {
    until: started + waitMs,
    signal,
    ms,
    ...(once && { once }),
    ...(on && { on }),
    ...(policy && { policy }),
    anyMap,
  };
  const run = () => attempts(context, sending, work);
  try {
    if (!locks) return await run();
    let ours = turns.get(context);
    if (!ours) turns.set(context, (ours = new TurnsByName()));
    return await ours.take(names.join(), sending.until, signal, run);
  } catch (error) {
    if (!(error instanceof Unanswered) || error.perhaps) throw explain(error, about, context);
    if (error.why === "aborted") throw signal?.reason;
    // The time in line is part of it.
    if (error.why === "lock-timeout")
      throw waitedInVain(context, about, performance.now() - started, error.cause);
    throw explain(error, about, context);
  }
}
