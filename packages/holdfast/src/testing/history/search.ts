/**
 * Looks for an order of one key's operations that the model allows and that agrees with their times.
 *
 * Calls and returns are gone through as they happened, with all the ways in which things may stand (Wing and Gong; Lowe's
 * just-in-time linearization). An operation is placed no sooner than it must be: when it, or one that needs it, returns.
 * What makes this fast enough for 10,000 operations:
 *
 * - A way is told by what is open, not by all that was done: so much of the past as still matters is small.
 * - A read is placed as soon as it fits; that can do no harm.
 * - Before an operation only those are placed that could not as well come after it (`mayWait`).
 * - A write that is overwritten at once is marked as one that may have been: one way instead of two.
 * - Calls whose outcome is unknown stay open for ever. Equal ones are counted, and of two ways to the same state the one
 *   that needs fewer of them is kept.
 * - A few ways are followed at first: one that gets to the end is enough. Only if these end, all are.
 */
import type { Model } from "./model.ts";
import { type Operation, textOf } from "./operation.ts";

interface State<S> {
  readonly value: S;
  readonly key: string;
}

/** An operation, as the search sees it. */
export interface HistoryEntry<S> {
  readonly index: number;
  readonly operation: Operation;
  readonly effect: "read" | "write" | undefined;
  /** Of one whose outcome is unknown: those that are like it. It need not be placed. */
  readonly group: Group<S> | undefined;
  readonly memo: Map<State<S>, readonly State<S>[]>;
}

/** Calls with unknown outcomes that are alike. */
interface Group<S> {
  readonly index: number;
  /** In the order of their calls. */
  readonly members: HistoryEntry<S>[];
  /** How many have been called. */
  called: number;
}

/** One way in which things may stand. */
export interface HistoryWay<S> {
  readonly state: State<S>;
  /** Placed, and not returned yet. Sorted indexes. */
  readonly early: readonly number[];
  /** Writes that are open, and may have been placed where they changed nothing that anybody saw. Sorted indexes. */
  readonly maybe: readonly number[];
  /** Groups of which one was placed, as often as that. Sorted. */
  readonly used: readonly number[];
}

interface Node<S> extends HistoryWay<S> {
  /** The last step towards it: what was placed, and from where. Undefined if reads came in between. */
  readonly last: { readonly entry: HistoryEntry<S>; readonly from: State<S> } | undefined;
}

interface Before<S> {
  readonly open: readonly HistoryEntry<S>[];
  readonly groups: readonly Group<S>[];
}

interface Event<S> {
  readonly kind: "call" | "return";
  readonly entry: HistoryEntry<S>;
  readonly at: number;
}

export interface Position<S> {
  /** The index of the next event. */
  readonly event: number;
  readonly ways: readonly HistoryWay<S>[];
}

export type HistoryFound<S> =
  | { readonly verdict: "ok" }
  | { readonly verdict: "unknown" }
  | {
      readonly verdict: "violation";
      readonly event: number;
      readonly culprit: HistoryEntry<S>;
      /** What the states could be while it was looked for a place. */
      readonly states: readonly S[];
      /** All that could be placed somewhere. */
      readonly placed: ReadonlySet<number>;
      /** Earlier places where little was possible: where a shorter story may begin. */
      readonly rests: readonly Position<S>[];
    };

export class OutOfTime extends Error {}

export interface Clock {
  /** Throws when it is over. Cheap: it looks now and then. */
  tick(): void;
  /** Throws when it is over. */
  check(): void;
}

export function clock(maxMs: number): Clock {
  const until = performance.now() + maxMs;
  let ticks = 0;
  const check = () => {
    if (performance.now() > until) throw new OutOfTime();
  };
  return {
    check,
    tick() {
      if (++ticks % 1024 === 0) check();
    },
  };
}

/** How many ways are followed at first, and how many where these end. */
const widths = [4, 64];
/** So many events are gone through before the place is marked, to come back to. */
const stretch = 128;
const rescues = 4;

export class HistorySearch<S> {
  readonly entries: readonly HistoryEntry<S>[];
  readonly events: readonly Event<S>[];
  readonly #model: Model<S>;
  readonly #start: HistoryWay<S>;
  readonly #groups: readonly Group<S>[];
  #states = new Map<string, State<S>>();
  #rests: Position<S>[] = [];
  /** No way has been left out so far. */
  #exact = true;
  #placed = new Set<number>();
  #open = new Map<number, HistoryEntry<S>>();
  /** The event that `#open` is right for, if there is one. */
  #at = -1;

  constructor(model: Model<S>, key: string, operations: readonly Operation[]) {
    this.#model = model;
    this.#start = { state: this.#intern(model.initial(key, operations)), early: [], maybe: [], used: [] };
    const groups = new Map<string, Group<S>>();
    this.entries = operations
      .filter((operation) => !isIdle(model, operation))
      .toSorted((a, b) => a.start - b.start)
      .map((operation, index) => {
        const group = operation.outcome === "unknown" ? groupOf(groups, model, operation) : undefined;
        const effect = model.effect?.(operation);
        const entry: HistoryEntry<S> = { index, operation, effect, group, memo: new Map() };
        group?.members.push(entry);
        return entry;
      });
    this.#groups = [...groups.values()];
    this.events = eventsOf(this.entries);
  }

  run(time: Clock): HistoryFound<S> {
    try {
      const lossless = this.#narrow(time);
      this.#exact = true;
      return lossless === undefined ? { verdict: "ok" } : this.from(lossless, Infinity, time).found;
    } catch (error) {
      if (!(error instanceof OutOfTime)) throw error;
      return { verdict: "unknown" };
    }
  }

  /**
   * With few ways at a time, and more of them where these come to an end. Resolves to where ways were left out for the
   * first time, and undefined if it got to the end all the same.
   */
  #narrow(time: Clock): Position<S> | undefined {
    const marks: Position<S>[] = [this.beginning];
    let lossless: Position<S> | undefined;
    let again = 0;
    let died = -1;
    for (;;) {
      const back = marks.at(-1) as Position<S>;
      const width = (again === 0 ? widths[0] : widths[1]) as number;
      const { found, exactUntil, end } = this.from(back, width, time, new Set(), back.event + stretch);
      if (lossless === undefined) lossless = exactUntil;
      this.#exact = lossless === undefined;
      if (found.verdict === "ok") {
        if (end.event >= this.events.length) return undefined;
        marks.push(end);
        if (end.event > died) again = 0;
        continue;
      }
      if (found.verdict === "violation" && exactUntil === undefined && lossless === undefined) return back;
      died = Math.max(died, found.verdict === "violation" ? found.event : 0);
      if (++again > rescues) return lossless ?? back;
      // Two stretches for the first time, four for the second.
      marks.splice(Math.max(1, marks.length - 2 * again));
    }
  }

  /** `exactUntil`: where ways were left out for the first time. `skip`: reads that are left out. */
  from(
    position: Position<S>,
    width: number,
    time: Clock,
    skip: ReadonlySet<number> = new Set(),
    until = Infinity,
  ): { found: HistoryFound<S>; exactUntil: Position<S> | undefined; end: Position<S> } {
    let exactUntil: Position<S> | undefined;
    this.#placed = new Set();
    this.#openAt(position.event, skip);
    let ways: readonly HistoryWay<S>[] = position.ways.map((way) => ({
      ...way,
      early: way.early.filter((index) => !skip.has(index)),
    }));
    const last = Math.min(until, this.events.length);
    for (let event = position.event; event < last; event++) {
      const { kind, entry } = this.events[event] as Event<S>;
      if (skip.has(entry.index)) continue;
      if (event % 512 === 511) this.#forget(ways);
      if (kind === "call") {
        ways = this.#called(entry, ways, time);
        continue;
      }
      const { next, left, states } = this.#returned(entry, ways, width, time);
      if (left) exactUntil ??= { event, ways };
      if (next.length === 0) {
        const rests = this.#rests.filter((rest) => rest.event <= event);
        const found = {
          verdict: "violation",
          event,
          culprit: entry,
          states,
          placed: this.#placed,
          rests,
        } as const;
        return { found, exactUntil, end: { event, ways } };
      }
      ways = next;
      if (this.#exact && exactUntil === undefined && skip.size === 0) this.#rest({ event: event + 1, ways });
    }
    if (skip.size === 0) this.#at = last;
    return { found: { verdict: "ok" }, exactUntil, end: { event: last, ways } };
  }

  get beginning(): Position<S> {
    return { event: 0, ways: [this.#start] };
  }

  #openAt(event: number, skip: ReadonlySet<number>): void {
    const onward = skip.size === 0 && event === this.#at;
    this.#at = -1;
    if (onward) return;
    this.#open = new Map();
    for (const group of this.#groups) group.called = 0;
    for (let i = 0; i < event; i++) {
      const { kind, entry } = this.events[i] as Event<S>;
      if (kind === "return") this.#open.delete(entry.index);
      else if (entry.group) entry.group.called++;
      else if (!skip.has(entry.index)) this.#open.set(entry.index, entry);
    }
  }

  /** A few of the last places where there was but one state, or two. */
  #rest(position: Position<S>): void {
    const states = new Set(position.ways.map(({ state }) => state));
    if (states.size > 2 || position.ways.length > 16) return;
    this.#rests.push(position);
    if (this.#rests.length > 256) this.#rests = this.#rests.slice(-128);
  }

  #called(entry: HistoryEntry<S>, ways: readonly HistoryWay<S>[], time: Clock): readonly HistoryWay<S>[] {
    if (entry.group) {
      entry.group.called++;
      return ways;
    }
    this.#open.set(entry.index, entry);
    if (entry.effect !== "read") return ways;
    return ways.map((way) => {
      time.tick();
      return this.#step(way.state, entry).length > 0
        ? { ...way, early: including(way.early, entry.index) }
        : way;
    });
  }

  #returned(entry: HistoryEntry<S>, ways: readonly HistoryWay<S>[], width: number, time: Clock) {
    const next = new Ways<S>(this.#isRead);
    const seen = new Ways<S>(this.#isRead);
    const nodes = new Cheapest<Node<S>>();
    const done = (way: HistoryWay<S>) =>
      next.add({ ...way, early: without(way.early, entry.index), maybe: without(way.maybe, entry.index) });
    for (const way of ways) {
      if (way.early.includes(entry.index)) {
        done(way);
        continue;
      }
      if (way.maybe.includes(entry.index)) done(way);
      const node = { ...way, last: undefined };
      if (seen.add(node)) nodes.push(node, 0);
    }
    const before = this.#before(entry, nodes.all);
    let left = false;
    let looked = 0;
    for (let node = nodes.shift(); node; node = nodes.shift()) {
      time.tick();
      for (const placed of this.#place(node, entry)) if (!this.#couldWait(node, entry, placed)) done(placed);
      // Enough to go on with: while nothing is found, it is looked farther.
      if (++looked > (next.size > 0 ? 2 : 512) * width || next.size >= 2 * width) {
        left = nodes.size > 0;
        if (left) break;
      }
      for (const other of this.#candidates(node, before))
        for (const placed of this.#place(node, other)) {
          // A read that is the one that returns has found its place.
          if (placed.early.includes(entry.index)) done(placed);
          else if (seen.add(placed)) nodes.push(placed, other.group ? 3 : 1);
        }
    }
    this.#open.delete(entry.index);
    entry.memo.clear();
    const all = next.list();
    const states =
      all.length === 0 ? [...new Set(nodes.all.map(({ state }) => state))].map(({ value }) => value) : [];
    if (all.length <= width) return { next: all, left, states };
    const best = all
      .map((way) => ({ way, weight: this.#weight(way) }))
      .toSorted((a, b) => a.weight - b.weight);
    return { next: best.slice(0, width).map(({ way }) => way), left: true, states };
  }

  readonly #isRead = (index: number): boolean => this.entries[index]?.effect === "read";

  /** The lightest has the most before it: reads that have found a place cannot fail, others cannot help any more. */
  #weight({ early, used }: HistoryWay<S>): number {
    let weight = 3 * used.length;
    for (const index of early) weight += this.#isRead(index) ? -2 : 1;
    return weight;
  }

  /** Those that may have to come before it: the others can as well come after it, and after all of these. */
  #before(entry: HistoryEntry<S>, nodes: readonly Node<S>[]): Before<S> {
    const open = [...this.#open.values()].filter(
      (other) => other !== entry && nodes.some(({ early }) => !early.includes(other.index)),
    );
    const groups = this.#groups.filter(({ called }) => called > 0);
    const { mayWait } = this.#model;
    if (!mayWait) return { open, groups };
    const chosen: HistoryEntry<S>[] = [entry];
    let rest = [...open, ...groups.map(({ members }) => members[0] as HistoryEntry<S>)];
    for (let i = 0; i < chosen.length; i++) {
      const second = (chosen[i] as HistoryEntry<S>).operation;
      const must = rest.filter((first) => !mayWait.call(this.#model, first.operation, second));
      if (must.length === 0) continue;
      chosen.push(...must);
      rest = rest.filter((each) => !must.includes(each));
    }
    const needed = new Set(chosen);
    return {
      open: open.filter((each) => needed.has(each)),
      groups: groups.filter(({ members }) => needed.has(members[0] as HistoryEntry<S>)),
    };
  }

  *#candidates(node: Node<S>, before: Before<S>): Iterable<HistoryEntry<S>> {
    // Reads are placed wherever they fit, without being asked.
    for (const entry of before.open)
      if (entry.effect !== "read" && !node.early.includes(entry.index)) yield entry;
    for (const { index, members, called } of before.groups) {
      let used = 0;
      for (const each of node.used) if (each === index) used++;
      // They are alike, but for their time: the first to be called has the fewest before it.
      if (used < called) yield members[used] as HistoryEntry<S>;
    }
  }

  #place(node: Node<S>, entry: HistoryEntry<S>): Node<S>[] {
    // The first of two writes in a row is seen by nobody: `maybe`, or not placed at all.
    if (entry.effect === "write" && node.last?.entry.effect === "write") return [];
    return this.#step(node.state, entry).map((state) => {
      this.#placed.add(entry.index);
      const { group, index } = entry;
      const early = group ? node.early : including(node.early, index);
      const used = group ? inserted(node.used, group.index) : node.used;
      let maybe = without(node.maybe, index);
      if (entry.effect === "write")
        for (const other of this.#open.values())
          if (other.effect === "write" && other !== entry && !early.includes(other.index))
            maybe = including(maybe, other.index);
      const reads = this.#reads(state, early);
      const last = reads === early ? { entry, from: node.state } : undefined;
      return { state, early: reads, maybe, used, last };
    });
  }

  /** Those that fit now are placed now. */
  #reads(state: State<S>, early: readonly number[]): readonly number[] {
    let all = early;
    for (const entry of this.#open.values()) {
      if (entry.effect !== "read" || all.includes(entry.index)) continue;
      if (this.#step(state, entry).length === 0) continue;
      this.#placed.add(entry.index);
      all = including(all, entry.index);
    }
    return all;
  }

  /** Whether what was placed just before could be placed after it, to the same end: then it will be, when it must. */
  #couldWait(node: Node<S>, entry: HistoryEntry<S>, placed: Node<S>): boolean {
    if (!node.last || !placed.last || node.last.entry.effect || entry.effect) return false;
    const { from, entry: previous } = node.last;
    return this.#step(from, entry).some((between) => this.#step(between, previous).includes(placed.state));
  }

  #step(state: State<S>, entry: HistoryEntry<S>): readonly State<S>[] {
    const known = entry.memo.get(state);
    if (known) return known;
    const next = this.#model.step(state.value, entry.operation).map((value) => this.#intern(value));
    entry.memo.set(state, next);
    return next;
  }

  #intern(value: S): State<S> {
    const key = this.#model.key ? this.#model.key(value) : textOf(value);
    const known = this.#states.get(key);
    if (known) return known;
    const state = { value, key };
    this.#states.set(key, state);
    return state;
  }

  /** States are long, of a queue for instance, and most of them will not come again. */
  #forget(ways: readonly HistoryWay<S>[]): void {
    const kept = [this.#start, ...ways, ...this.#rests.flatMap((rest) => rest.ways)].map(
      ({ state }) => state,
    );
    this.#states = new Map(kept.map((state) => [state.key, state]));
    for (const { memo } of this.#open.values()) memo.clear();
    for (const { members } of this.#groups) for (const { memo } of members) memo.clear();
  }
}

/** It changes nothing, and nobody knows what it saw; or it did nothing at all. */
function isIdle<S>(model: Model<S>, operation: Operation): boolean {
  if (operation.outcome === "failed") return true;
  return operation.outcome === "unknown" && model.effect?.(operation) === "read";
}

function groupOf<S>(groups: Map<string, Group<S>>, model: Model<S>, operation: Operation): Group<S> {
  const { call, input, process } = operation;
  const name = textOf([call, input ?? null, model.anyProcess ? null : process]);
  const group = groups.get(name) ?? { index: groups.size, members: [], called: 0 };
  groups.set(name, group);
  return group;
}

function eventsOf<S>(entries: readonly HistoryEntry<S>[]): Event<S>[] {
  const calls = entries.map((entry): Event<S> => ({ kind: "call", entry, at: entry.operation.start }));
  const returns = entries
    .filter(({ group }) => !group)
    .map((entry): Event<S> => ({ kind: "return", entry, at: entry.operation.end }));
  // Of two at the same time the call comes first: they overlap.
  return [...calls, ...returns].toSorted(
    (a, b) => a.at - b.at || (a.kind < b.kind ? -1 : a.kind > b.kind ? 1 : 0),
  );
}

/** Ways without those that another one makes needless. */
class Ways<S> {
  readonly #isRead: (index: number) => boolean;
  readonly #byState = new Map<State<S>, Map<string, HistoryWay<S>>>();
  size = 0;

  constructor(isRead: (index: number) => boolean) {
    this.#isRead = isRead;
  }

  add(way: HistoryWay<S>): boolean {
    const same = this.#byState.get(way.state) ?? new Map<string, HistoryWay<S>>();
    const name = `${way.early.join()}|${way.maybe.join()}|${way.used.join()}`;
    if (same.has(name)) return false;
    // With many it takes longer than it saves.
    if (same.size <= 32) {
      for (const other of same.values()) if (covers(other, way, this.#isRead)) return false;
      for (const [key, other] of same)
        if (covers(way, other, this.#isRead)) this.size -= Number(same.delete(key));
    }
    same.set(name, way);
    this.#byState.set(way.state, same);
    this.size++;
    return true;
  }

  list(): HistoryWay<S>[] {
    return [...this.#byState.values()].flatMap((same) =>
      [...same.values()].map(({ state, early, maybe, used }) => ({ state, early, maybe, used })),
    );
  }
}

/** Whatever can be done from the second can be done from the first; both are at the same state. */
function covers<S>(first: HistoryWay<S>, second: HistoryWay<S>, isRead: (index: number) => boolean): boolean {
  return (
    within(first.used, second.used) &&
    first.early.every((index) => second.early.includes(index) || isRead(index)) &&
    second.maybe.every((index) => first.maybe.includes(index)) &&
    second.early.every((index) => first.early.includes(index) || first.maybe.includes(index))
  );
}

/** Those that cost the least first, each added on top of what the last one that came out had cost. */
class Cheapest<T> {
  /** All that ever were in it. */
  readonly all: T[] = [];
  readonly #buckets: T[][] = [[]];
  #cost = 0;
  size = 0;

  push(item: T, more: number): void {
    this.all.push(item);
    while (this.#buckets.length <= this.#cost + more) this.#buckets.push([]);
    this.#buckets[this.#cost + more]?.push(item);
    this.size++;
  }

  shift(): T | undefined {
    while (this.#cost < this.#buckets.length - 1 && this.#buckets[this.#cost]?.length === 0) this.#cost++;
    const item = this.#buckets[this.#cost]?.pop();
    if (item !== undefined) this.size--;
    return item;
  }
}

/** Sorted lists, with repetitions. */
function within(small: readonly number[], large: readonly number[]): boolean {
  let at = 0;
  for (const each of large) if (at < small.length && small[at] === each) at++;
  return at === small.length;
}

function inserted(list: readonly number[], value: number): readonly number[] {
  let at = list.length;
  while (at > 0 && (list[at - 1] as number) > value) at--;
  return list.toSpliced(at, 0, value);
}

function including(list: readonly number[], value: number): readonly number[] {
  return list.includes(value) ? list : inserted(list, value);
}

function without(list: readonly number[], value: number): readonly number[] {
  return list.includes(value) ? list.filter((each) => each !== value) : list;
}
