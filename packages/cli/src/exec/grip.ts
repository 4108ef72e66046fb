/** What a command runs under: locks of a session, or leases where a session cannot be kept. */
import {
  type Held,
  type Holdfast,
  HoldfastError,
  type Key,
  type Lease,
  FileBusyError,
  LockNotAvailableError,
  LockTimeoutError,
  isRetryable,
  shared,
} from "holdfast";
import { setTimeout as sleep } from "node:timers/promises";
import { describe } from "../describe.ts";
import { Failure } from "../failure.ts";
import { note } from "../terminal.ts";
import { shown } from "../text.ts";

export interface Grip {
  /** Aborts as soon as one of them can no longer be relied on. */
  readonly lost: AbortSignal;
  /** Of leases, in the order in which the keys were given. */
  readonly fences: readonly number[];
  /** Throws if the server says that it was no longer ours. */
  release(): Promise<void>;
}

export interface Wish {
  readonly keys: readonly Key[];
  readonly shared: boolean;
  /** Undefined: locks of a session. */
  readonly lease: { readonly ttl: number } | undefined;
}

/** How long a wait that has no end is left to the server in one go. Whoever asks again stands at the end of the line. */
const stretchMs = 600_000;

/** Why locks of a session cannot be had here; undefined: they can. */
export async function noSessions(hf: Holdfast<unknown>): Promise<string | undefined> {
  const { sessionLocks } = await hf.capabilities();
  return typeof sessionLocks === "object" ? sessionLocks.why : undefined;
}

/** Undefined: somebody has it. A file that is busy is asked again, unless it is to be told. */
export async function tryTake(
  hf: Holdfast<unknown>,
  wish: Wish,
  signal: AbortSignal,
  tell = false,
): Promise<Grip | undefined> {
  for (;;) {
    try {
      return await take(hf, wish, 0, signal);
    } catch (error) {
      if (error instanceof LockNotAvailableError) return undefined;
      if (tell || !(error instanceof FileBusyError)) throw error;
    }
  }
}

/** Whether it was not to be had in time. */
export function isRefusal(error: unknown): boolean {
  return (
    error instanceof LockTimeoutError ||
    error instanceof LockNotAvailableError ||
    error instanceof FileBusyError
  );
}

/** Throws a `LockTimeoutError` if it was not to be had. */
export async function take(
  hf: Holdfast<unknown>,
  wish: Wish,
  waitMs: number,
  signal: AbortSignal,
): Promise<Grip> {
  try {
    if (!wish.lease) return await takeSession(hf, wish, waitMs, signal);
    return await takeLeases(hf, wish, wish.lease.ttl, waitMs, signal);
  } catch (error) {
    if (!(error instanceof HoldfastError) || error.code !== "HF_SCHEMA_MISSING") throw error;
    throw new Failure(
      `Holdfast's tables are not in this database, and ${wish.lease ? "a lease is a row of one" : "a lock here is a row of one"}: holdfast migrate makes them.`,
      { cause: error },
    );
  }
}

/** For ever: a server that was restarted is asked again. */
export async function takeAtLast(hf: Holdfast<unknown>, wish: Wish, signal: AbortSignal): Promise<Grip> {
  for (let failures = 0; ;) {
    try {
      return await take(hf, wish, stretchMs, signal);
    } catch (error) {
      signal.throwIfAborted();
      if (error instanceof LockTimeoutError || error instanceof FileBusyError) continue;
      if (!isLost(hf, error) || failures++ > 60) throw error;
      note(`${shown(describe(error))}; it is tried again.`);
      await sleep(1000, undefined, { signal });
    }
  }
}

function isLost(hf: Holdfast<unknown>, error: unknown): boolean {
  const { code } = error as { code?: unknown };
  // 57P03: it is starting up.
  return hf.classify(error) === "lost" || isRetryable(error) || code === "ECONNREFUSED" || code === "57P03";
}

const lockables = ({ keys, shared: share }: Wish) => keys.map((each) => (share ? shared(each) : each));

async function takeSession(
  hf: Holdfast<unknown>,
  wish: Wish,
  waitMs: number,
  signal: AbortSignal,
): Promise<Grip> {
  const held: Held = await hf.hold(lockables(wish), { wait: waitMs === 0 ? "nowait" : waitMs, signal });
  return { lost: held.signal, fences: [], release: () => soon(held.release()) };
}

/** One after the other, in the order that `hf.hold` takes keys in. */
async function takeLeases(
  hf: Holdfast<unknown>,
  wish: Wish,
  ttl: number,
  waitMs: number,
  signal: AbortSignal,
): Promise<Grip> {
  const until = performance.now() + waitMs;
  const leases = new Map<string, Lease>();
  const giveBack = async () => {
    const results = await Promise.allSettled([...leases.values()].map((lease) => lease.release()));
    for (const result of results) if (result.status === "rejected") throw result.reason;
  };
  try {
    for (const each of wish.keys.toSorted((a, b) => (a.id < b.id ? -1 : 1))) {
      if (leases.has(each.id)) continue;
      const left = Math.ceil(until - performance.now());
      const wait = waitMs === 0 ? "nowait" : Math.max(1, left);
      leases.set(each.id, await hf.lease(wish.shared ? shared(each) : each, { ttl, wait, signal }));
    }
  } catch (error) {
    await giveBack().catch(() => {});
    throw error;
  }
  const lost = new AbortController();
  for (const lease of leases.values()) {
    const onLost = () => lost.abort(lease.signal.reason);
    if (lease.signal.aborted) onLost();
    else lease.signal.addEventListener("abort", onLost, { once: true });
  }
  return {
    lost: lost.signal,
    fences: wish.keys.map(({ id }) => leases.get(id)?.fence ?? 0),
    release: () => soon(giveBack()),
  };
}

/** A server that has fallen silent must not keep us: what was held ends with its session, or with its ttl. */
const patienceMs = 5000;

async function soon(work: Promise<void>): Promise<void> {
  const timer = new AbortController();
  const late = sleep(patienceMs, undefined, { signal: timer.signal }).then(() => {
    throw new Error(`the server did not answer for ${patienceMs} ms`);
  });
  // Ended by the abort, when nobody waits for it.
  late.catch(() => {});
  try {
    await Promise.race([work, late]);
  } finally {
    timer.abort();
    work.catch(() => {});
  }
}

/** Closes what is open; whatever does not close ends with the process. */
export async function leave(server: AsyncDisposable): Promise<void> {
  await soon(Promise.resolve(server[Symbol.asyncDispose]())).catch(() => {});
}
