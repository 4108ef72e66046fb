/** What a command runs under: the lock of its keys, and their leases if it is asked for. */
import {
  type Holdfast,
  HoldfastError,
  type Key,
  type Lease,
  FileBusyError,
  LeaseLostError,
  LockNotAvailableError,
  type LockRequest,
  LockTimeoutError,
  isRetryable,
  shared,
} from "holdfast";
import { setTimeout as sleep } from "node:timers/promises";
import { describe } from "../describe.ts";
import { Failure, serversOwn } from "../failure.ts";
import { note } from "../terminal.ts";
import { shown } from "../text.ts";
import { openTransaction } from "./open-transaction.ts";
import { soon } from "./soon.ts";

export interface Grip {
  /** Aborts as soon as one of them can no longer be relied on. */
  readonly lost: AbortSignal;
  /** Of leases, in the order in which the keys were given. */
  readonly fences: readonly number[];
  /** How long the command may take to end, by why it was lost, before somebody else can have it. */
  graceMs(reason: unknown): number;
  /** Throws if the server says that it was no longer ours. */
  release(): Promise<void>;
}

export interface LockWish {
  readonly of: "session" | "transaction";
  readonly shared: boolean;
}

export interface LeaseWish {
  readonly ttl: number;
  readonly shared: boolean;
}

/** Whoever has the lock excludes everybody else, in whatever way they come. A lease alone is for where no lock lasts. */
export type Wish = { readonly keys: readonly Key[] } & (
  | { readonly lock: LockWish; readonly lease: LeaseWish | undefined }
  | { readonly lock: undefined; readonly lease: LeaseWish }
);

/** How long a wait that has no end is left to the server in one go. Whoever asks again stands at the end of the line. */
const stretchMs = 600_000;

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
  const until = performance.now() + waitMs;
  const left = () => (waitMs === 0 ? 0 : Math.max(1, Math.ceil(until - performance.now())));
  try {
    if (!wish.lock) return await takeLeases(hf, wish.keys, wish.lease, left, signal);
    // The lock comes last: transactions take it for a moment, and who waits for a lease is not to keep it from them.
    const leases = wish.lease && (await takeLeases(hf, wish.keys, wish.lease, left, signal));
    try {
      return both(leases, await takeLocks(hf, wish.keys, wish.lock, left(), signal));
    } catch (error) {
      await leases?.release().catch(() => {});
      throw error;
    }
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
  const { code } = serversOwn(error) as { code?: unknown };
  // 57P03: it is starting up.
  return hf.classify(error) === "lost" || isRetryable(error) || code === "ECONNREFUSED" || code === "57P03";
}

async function takeLocks(
  hf: Holdfast<unknown>,
  keys: readonly Key[],
  lock: LockWish,
  waitMs: number,
  signal: AbortSignal,
): Promise<Pick<Grip, "lost" | "release">> {
  const requests = keys.map((key): LockRequest => (lock.shared ? shared(key) : { key, mode: "exclusive" }));
  if (lock.of === "transaction") {
    const { lost, release } = await openTransaction(hf, requests, waitMs, signal);
    return { lost, release: () => soon(release()) };
  }
  const held = await hf.hold(requests, { wait: waitMs === 0 ? "nowait" : waitMs, signal });
  return { lost: held.signal, release: () => soon(held.release()) };
}

/** One after the other, in the order that `hf.hold` takes keys in. */
async function takeLeases(
  hf: Holdfast<unknown>,
  keys: readonly Key[],
  { ttl, shared: share }: LeaseWish,
  left: () => number,
  signal: AbortSignal,
): Promise<Grip> {
  const leases = new Map<string, Lease>();
  const giveBack = async () => {
    const results = await Promise.allSettled([...leases.values()].map((lease) => lease.release()));
    for (const result of results) if (result.status === "rejected") throw result.reason;
  };
  try {
    for (const each of keys.toSorted((a, b) => (a.id < b.id ? -1 : 1))) {
      if (leases.has(each.id)) continue;
      const waitMs = left();
      const wait = waitMs === 0 ? "nowait" : waitMs;
      leases.set(each.id, await hf.lease(share ? shared(each) : each, { ttl, wait, signal }));
    }
  } catch (error) {
    await giveBack().catch(() => {});
    throw error;
  }
  return {
    lost: anyOf([...leases.values()].map((lease) => lease.signal)),
    fences: keys.map(({ id }) => leases.get(id)?.fence ?? 0),
    // It is told that it is lost a tenth of its ttl before it runs out. Half of that is left for SIGKILL to take effect.
    graceMs: () => ttl / 20,
    release: () => soon(giveBack()),
  };
}

function both(leases: Grip | undefined, lock: Pick<Grip, "lost" | "release">): Grip {
  if (!leases) return { ...lock, fences: [], graceMs: () => Infinity };
  return {
    lost: anyOf([leases.lost, lock.lost]),
    fences: leases.fences,
    // A lock that is lost is somebody else's at once: there is no time that it leaves.
    graceMs: (reason) => (reason instanceof LeaseLostError ? leases.graceMs(reason) : Infinity),
    async release() {
      const results = await Promise.allSettled([lock.release(), leases.release()]);
      for (const result of results) if (result.status === "rejected") throw result.reason;
    },
  };
}

/** Aborts with the first of them. */
function anyOf(signals: readonly AbortSignal[]): AbortSignal {
  const first = new AbortController();
  for (const signal of signals) {
    const onAbort = () => first.abort(signal.reason);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort, { once: true });
  }
  return first.signal;
}
