import type { LockView, Session } from "../seam/inspect.ts";

/** Somebody who is in the way of others, and those who wait for it, and those who wait for them in turn. */
export interface WaitChain {
  readonly session: Session;
  /** Names of the locks that it holds and others wait for. */
  readonly holds: readonly string[];
  readonly waiters: readonly WaitChain[];
}

export interface Inspection {
  readonly holders: readonly LockView[];
  readonly waiters: readonly LockView[];
  /** From those who wait for nobody; a circle of waiters begins with any of them. */
  readonly chains: readonly WaitChain[];
}

export function inspection(locks: readonly LockView[]): Inspection {
  const holders = locks.filter(({ granted }) => granted);
  const waiters = locks.filter(({ granted }) => !granted);
  const sessions = new Map(locks.map(({ session }) => [session.id, session]));
  /** Who waits for whom: the waits of each session that is in the way. */
  const behind = new Map<string, LockView[]>();
  for (const wait of waiters)
    for (const id of wait.blockedBy) behind.set(id, [...(behind.get(id) ?? []), wait]);
  const waiting = new Set(waiters.map(({ session }) => session.id));
  const seen = new Set<string>();
  const chain = (id: string): WaitChain => {
    seen.add(id);
    const waits = behind.get(id) ?? [];
    const next = [...new Set(waits.map(({ session }) => session.id))].filter((waiter) => !seen.has(waiter));
    return {
      session: sessions.get(id) ?? { id, application: "", state: "unknown", since: undefined },
      holds: [...new Set(waits.map(({ name }) => name))],
      waiters: next.map((waiter) => chain(waiter)),
    };
  };
  const roots = [...behind.keys()].filter((id) => !waiting.has(id));
  const chains = roots.map((id) => chain(id));
  for (const id of behind.keys()) if (!seen.has(id)) chains.push(chain(id));
  return { holders, waiters, chains };
}
