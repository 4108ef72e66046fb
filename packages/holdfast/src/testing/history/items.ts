/** What can be said of queues and bags without trying orders: by counting, and, of queues, item by item. */
import { type Calls, type Moved, type FifoSpan, beginnings, isFifo } from "./fifo.ts";
import type { ModelDecided, Refutation } from "./model.ts";
import { type Operation, textOf } from "./operation.ts";
import { type Clock, OutOfTime, clock } from "./search.ts";

interface Of {
  readonly operation: Operation;
}

/** The calls of a history, until a moment: what had not returned by then may have happened, or not. */
interface Sorted extends Calls {
  readonly brought: readonly (Moved & Of)[];
  readonly taken: readonly (Moved & Of)[];
  readonly lost: readonly (FifoSpan & Of)[];
  readonly empty: readonly (FifoSpan & Of)[];
}

/** So long is looked for a shorter story. */
const shrinkMs = 2000;

/** It took nothing: there was nothing. */
export function foundNothing({ call, outcome, output }: Operation): boolean {
  return call === "dequeue" && outcome === "returned" && (output === undefined || output === null);
}

/** What it brought or took; undefined if that is nothing, or nobody knows. */
function itemOf(operation: Operation): string | undefined {
  if (operation.call === "enqueue") return textOf(operation.input);
  return operation.outcome === "unknown" || foundNothing(operation) ? undefined : textOf(operation.output);
}

function sortedOut(operations: readonly Operation[], until = Infinity): Sorted {
  const numbers = new Map<string, number>();
  const sorted = {
    brought: [] as (Moved & Of)[],
    taken: [] as (Moved & Of)[],
    lost: [] as (FifoSpan & Of)[],
  };
  const empty: (FifoSpan & Of)[] = [];
  for (const operation of operations) {
    const { call, start, outcome } = operation;
    if (outcome === "failed" || start > until) continue;
    const end = outcome === "unknown" || operation.end > until ? Infinity : operation.end;
    const item = itemOf(operation);
    if (item === undefined) {
      if (outcome === "unknown") sorted.lost.push({ start, end, operation });
      else if (end !== Infinity) empty.push({ start, end, operation });
      continue;
    }
    const value = numbers.get(item) ?? numbers.size;
    numbers.set(item, value);
    (call === "enqueue" ? sorted.brought : sorted.taken).push({ start, end, value, operation });
  }
  return { ...sorted, empty };
}

/** In no order: each value by itself, and the moments at which nothing was there. */
export function decideBag(operations: readonly Operation[]): ModelDecided | undefined {
  if (!operations.every(isKnown)) return undefined;
  const refuted = tooOften(operations) ?? neverEmpty(operations);
  if (refuted) return refuted;
  // With every item brought at once, and taken at the last moment, all is well.
  return operations.some(foundNothing) ? undefined : "ok";
}

export function decideQueue(operations: readonly Operation[], time: Clock): ModelDecided | undefined {
  if (!operations.every(isKnown)) return undefined;
  const counted = tooOften(operations) ?? neverEmpty(operations);
  if (counted) return counted.operations.length > 40 ? shortened(counted.operations) : counted;
  return isFifo(sortedOut(operations), time) ? "ok" : shortened(operations);
}

function isKnown({ call }: Operation): boolean {
  return call === "enqueue" || call === "dequeue";
}

/** Taken more often than it can have been brought by then. */
function tooOften(operations: readonly Operation[]): Refutation | undefined {
  const { brought, taken } = sortedOut(operations);
  const bringers = Map.groupBy(
    brought.toSorted((a, b) => a.start - b.start),
    ({ value }) => value,
  );
  const takers = Map.groupBy(
    taken.toSorted((a, b) => a.end - b.end),
    ({ value }) => value,
  );
  let first: Refutation | undefined;
  for (const [value, takes] of takers) {
    const brings = bringers.get(value) ?? [];
    const at = takes.findIndex(({ end }, i) => (brings[i]?.start ?? Infinity) > end);
    const culprit = takes[at]?.operation;
    if (!culprit || (first && first.culprit.end <= culprit.end)) continue;
    const shown = [...brings.slice(0, at), ...takes.slice(0, at + 1)];
    first = { culprit, operations: shown.map(({ operation }) => operation) };
  }
  return first;
}

function neverEmpty(operations: readonly Operation[]): Refutation | undefined {
  const culprit = inVain(operations);
  if (!culprit) return undefined;
  let part: readonly Operation[] = operations.filter((operation) => {
    const { start, outcome } = operation;
    if (outcome === "failed") return false;
    return foundNothing(operation)
      ? operation === culprit
      : start <= culprit.end || itemOf(operation) !== undefined;
  });
  const broken = (some: readonly Operation[]) => inVain(some) === culprit;
  const time = clock(shrinkMs);
  try {
    part = withoutSome(part, broken, time, itemOf);
    part = withoutSome(part, broken, time, (operation) =>
      operation.outcome === "unknown" || operation.end > culprit.end ? nameOf(operation) : undefined,
    );
  } catch (error) {
    if (!(error instanceof OutOfTime)) throw error;
  }
  return { culprit, operations: part };
}

/**
 * The first that found nothing while something was there at every moment: more of an item had certainly been brought than
 * can have been taken. Those of which nobody knows what they took cannot have taken what others did, nor more than one each.
 */
function inVain(operations: readonly Operation[]): Operation | undefined {
  const { brought, taken, lost, empty } = sortedOut(operations);
  const spare = new Map<number, number>();
  const there = new Map<number, number>();
  const add = (to: Map<number, number>, value: number, by: number) =>
    to.set(value, (to.get(value) ?? 0) + by);
  for (const { value } of brought) add(spare, value, 1);
  for (const { value } of taken) add(spare, value, -1);
  /** How many items there are at least, those of which there are more than can have been taken unseen, and by how many. */
  const [all, beyond, takers] = [{ count: 0 }, { count: 0 }, { count: 0 }];
  const weigh = (value: number, sign: number) => {
    const count = Math.max(0, there.get(value) ?? 0);
    all.count += sign * count;
    if (count > Math.max(0, spare.get(value) ?? 0)) beyond.count += sign;
  };
  const move = (value: number, by: number) => {
    weigh(value, -1);
    add(there, value, by);
    weigh(value, 1);
  };
  // What makes it emptier comes first: of two at the same moment either may be.
  const events = [
    ...lost.map(({ start: at }) => ({ at, rank: 0, apply: () => void takers.count++ })),
    ...taken.map(({ start: at, value }) => ({ at, rank: 0, apply: () => move(value, -1) })),
    ...empty.map((call) => ({ at: call.start, rank: 1, apply: () => void open.add(call.operation) })),
    ...empty.map((call) => ({ at: call.end, rank: 2, returns: call.operation })),
    ...brought
      .filter(({ end }) => end !== Infinity)
      .map(({ end: at, value }) => ({ at, rank: 3, apply: () => move(value, 1) })),
  ].toSorted((a, b) => a.at - b.at || a.rank - b.rank);
  const open = new Set<Operation>();
  for (const event of events) {
    if ("apply" in event) event.apply();
    else if (open.has(event.returns)) return event.returns;
    if (beyond.count === 0 && all.count <= takers.count) open.clear();
  }
  return undefined;
}

function nameOf({ process, start }: Operation): string {
  return `${process} ${start}`;
}

/** A part of the operations that has no explanation by itself, whatever the others did. */
function shortened(operations: readonly Operation[]): Refutation {
  const time = clock(shrinkMs);
  const ends = operations
    .filter(({ outcome }) => outcome === "returned")
    .map(({ end }) => end)
    .toSorted((a, b) => a - b);
  let [low, high] = [0, ends.length - 1];
  let part = operations;
  const until = () => ends[high] as number;
  const broken = (some: readonly Operation[]) => !isFifo(sortedOut(some, until()), time);
  try {
    // What has no explanation early has none later.
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isFifo(sortedOut(operations, ends[middle]), time)) low = middle + 1;
      else high = middle;
    }
    part = operations.filter(({ start, outcome }) => start <= until() && outcome !== "failed");
    const culprit = part.find(({ end }) => end === until()) as Operation;
    // Without all that has to do with some of the items, the others still come in their order.
    part = withoutSome(part, broken, time, (operation) => {
      const item = itemOf(operation);
      return item === undefined || item === itemOf(culprit) ? undefined : item;
    });
    part = withoutSome(part, broken, time, (operation) =>
      foundNothing(operation) && operation !== culprit ? nameOf(operation) : undefined,
    );
    // What came and went before, in every explanation.
    for (const gone of beginnings(sortedOut(part, until()), time)) {
      const calls = new Set([...gone].map((call) => (call as FifoSpan & Of).operation));
      const rest = part.filter((operation) => !calls.has(operation));
      if (!broken(rest)) continue;
      part = rest;
      break;
    }
    part = withoutSome(part, broken, time, (operation) =>
      operation.outcome === "unknown" || operation.end > until() ? nameOf(operation) : undefined,
    );
  } catch (error) {
    if (!(error instanceof OutOfTime)) throw error;
  }
  return { operations: part, culprit: operations.find(({ end }) => end === until()) as Operation };
}

/** Leaves out as many as it can of those with a name, those of the same name together. */
function withoutSome(
  operations: readonly Operation[],
  broken: (some: readonly Operation[]) => boolean,
  time: Clock,
  name: (operation: Operation) => string | undefined,
): readonly Operation[] {
  let names = [...new Set(operations.map(name))].filter((each) => each !== undefined);
  let part = operations;
  for (let size = names.length; size >= 1; size = Math.floor(size / 2)) {
    for (let at = 0; at < names.length;) {
      time.check();
      const some = new Set<string | undefined>(names.slice(at, at + size));
      const rest = part.filter((operation) => !some.has(name(operation)));
      if (broken(rest)) {
        part = rest;
        names = names.toSpliced(at, size);
      } else at += size;
    }
  }
  return part;
}
