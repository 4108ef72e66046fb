/** What happened when, for a drawing: who waited until when, and which transactions were open. */
import type { Turn } from "holdfast/testing";

/** When a wait was over. */
export interface Release {
  /** The turn with which it ended. */
  readonly at: number;
  /** After that turn began to wait itself, and not with it: the server ended a deadlock. */
  readonly below: boolean;
  /** Whose turn it was that let it go; undefined: it was given up. */
  readonly by: string | undefined;
}

export interface Span {
  readonly actor: string;
  readonly from: number;
  readonly to: number;
}

const begins = (statement: string) => /^(?:begin|start\s+transaction)\b/i.test(statement);
const ends = (statement: string) =>
  /(?:^|;\s*)(?:commit|end|abort|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b))\b/i.test(statement);
const deadlock = ({ error }: Turn) => /deadlock/i.test(error ?? "");

/** The actor's next turn: by then the one before was answered. */
function nextOf(turns: readonly Turn[], at: number): number {
  const next = turns.findIndex(({ actor }, i) => i > at && actor === turns[at]?.actor);
  return next < 0 ? turns.length : next;
}

export function releaseOf(turns: readonly Turn[], at: number): Release | undefined {
  const turn = turns[at];
  if (!turn || turn.waitsFor.length === 0) return undefined;
  const next = nextOf(turns, at);
  const knot = knotOf(turns, at, next);
  if (knot) return knot;
  const theirs = turns.flatMap((other, i) =>
    i > at && i < next && turn.waitsFor.includes(other.actor) ? [i] : [],
  );
  // Of each the first, of all the last: it may wait for one after the other.
  const letGo = turn.waitsFor.flatMap(
    (actor) => theirs.find((i) => turns[i]?.actor === actor && ends(turns[i]?.statement ?? "")) ?? [],
  );
  const last = letGo.length > 0 ? Math.max(...letGo) : theirs.at(-1);
  if (last === undefined) return { at, below: true, by: undefined };
  return { at: last, below: false, by: turns[last]?.actor };
}

/** If it was part of a deadlock, and either was ended or let go by the one that was. */
function knotOf(turns: readonly Turn[], at: number, next: number): Release | undefined {
  const meanwhile = turns.flatMap((other, i) =>
    other.waitsFor.length > 0 && i < next && at < nextOf(turns, i) ? [i] : [],
  );
  const victim = meanwhile.find(
    (i) => deadlock(turns[i] as Turn) && (i === at || turns[at]?.waitsFor.includes(turns[i]?.actor ?? "")),
  );
  if (victim === undefined) return undefined;
  return { at: Math.max(...meanwhile), below: true, by: victim === at ? undefined : turns[victim]?.actor };
}

/** From BEGIN to COMMIT or ROLLBACK. */
export function transactions(turns: readonly Turn[]): Span[] {
  const open = new Map<string, number>();
  const spans: Span[] = [];
  for (const [i, { actor, statement }] of turns.entries()) {
    if (begins(statement)) open.set(actor, i);
    const from = open.get(actor);
    if (from === undefined || !ends(statement)) continue;
    spans.push({ actor, from, to: i });
    open.delete(actor);
  }
  // What was not ended: as far as it is seen.
  for (const [actor, from] of open)
    spans.push({ actor, from, to: turns.findLastIndex((turn) => turn.actor === actor) });
  return spans;
}
