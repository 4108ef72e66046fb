/** Who is in the way of whom. */
import type { Entry, Who } from "./entry.ts";

/** A session that is in the way, what of its locks is waited for, and those who wait. */
export interface Knot {
  readonly session: Who;
  readonly holds: readonly Entry[];
  /** What it waits for itself; none at the root, unless they wait for each other in a circle, or it is not known for whom. */
  readonly waits: readonly Entry[];
  readonly waiters: readonly Knot[];
}

/** Trees, from those who wait for nobody; a circle begins with any of its members. */
export function chains(entries: readonly Entry[], who: (id: string) => Who): Knot[] {
  const waits = entries.filter(({ granted }) => !granted);
  const waiting = new Set(waits.map(({ session }) => session.id));
  const inTheWay = new Set(waits.flatMap(({ blockedBy }) => blockedBy));
  const seen = new Set<string>();
  const knot = (id: string): Knot => {
    seen.add(id);
    const behind = waits.filter(({ blockedBy }) => blockedBy.includes(id));
    const names = new Set(behind.map(({ name }) => name));
    const next = [...new Set(behind.map(({ session }) => session.id))].filter((waiter) => !seen.has(waiter));
    // Marked before they are followed: one that waits for two of these is shown once, beside them.
    for (const waiter of next) seen.add(waiter);
    const held = entries.filter(
      ({ granted, session, name }) => granted && session.id === id && names.has(name),
    );
    for (const { name } of held) names.delete(name);
    // A lock of a row, and on MariaDB one of GET_LOCK, is seen by those who wait for it only.
    const unseen = [...names].flatMap((name) => behind.find((wait) => wait.name === name) ?? []);
    return {
      session: who(id),
      holds: [...held, ...unseen],
      waits: waits.filter(({ session }) => session.id === id),
      waiters: next.map(knot),
    };
  };
  const roots = [...inTheWay].filter((id) => !waiting.has(id)).map(knot);
  // Not known for whom, as MariaDB does not tell of every lock; then circles.
  const lost = waits.filter(({ blockedBy }) => blockedBy.length === 0).map(({ session }) => session.id);
  for (const id of [...lost, ...inTheWay]) if (!seen.has(id)) roots.push(knot(id));
  return roots;
}

/** Everybody who waits for it, directly or not. */
export function behind(entries: readonly Entry[], id: string): Entry[] {
  const found = new Set<Entry>();
  const ids = new Set([id]);
  for (let size = -1; size < found.size;) {
    size = found.size;
    for (const entry of entries) {
      if (entry.granted || found.has(entry) || entry.session.id === id) continue;
      if (!entry.blockedBy.some((other) => ids.has(other))) continue;
      found.add(entry);
      ids.add(entry.session.id);
    }
  }
  return [...found];
}
