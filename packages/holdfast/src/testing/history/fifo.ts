/**
 * Whether calls of a first-in-first-out queue can be explained, without trying the orders of all calls.
 *
 * The first item that came is the first one that goes, the second the second, and so on. So items are gone through, and not
 * time: the k-th item is one of the calls that may have brought the k-th, and one of those that may have taken it, with the
 * same value. A way is told by the calls that are gone through so far, and by the earliest moment at which the last one of
 * both can have been: how long the queue was meanwhile does not matter. Of equal items that may come next, the one whose
 * call ends first is taken: the others can still come later. A call that found nothing fits between two items.
 *
 * Exact, with values that repeat and with calls whose outcome is unknown.
 */
import type { Clock } from "./search.ts";

export interface FifoSpan {
  readonly start: number;
  /** Infinity: it need not have happened. */
  readonly end: number;
}

export interface Moved extends FifoSpan {
  /** Equal values have equal numbers: 0, 1, 2, … */
  readonly value: number;
}

export interface Calls {
  readonly brought: readonly Moved[];
  readonly taken: readonly Moved[];
  /** Nobody knows what they took, if anything. */
  readonly lost: readonly FifoSpan[];
  /** They found nothing. */
  readonly empty: readonly FifoSpan[];
}

/** Of calls in the order of their start, those that are gone through: all before `next`, but for `left`. */
interface Part {
  readonly next: number;
  readonly left: readonly number[];
}

interface Way {
  readonly brought: Part;
  readonly taken: Part;
  readonly empty: Part;
  readonly lost: number;
  /** The earliest moment at which the next item can have been brought. */
  readonly in: number;
  /** The earliest moment at which the last one can have been taken. */
  readonly out: number;
}

/** How many ways are followed at first: one that gets to the end is enough. */
const width = 48;

export function isFifo(calls: Calls, time: Clock): boolean {
  const search = new Fifo(calls, time);
  // Where ways were left out for the first time, all are followed.
  let exact: readonly Way[] | undefined;
  let ways: readonly Way[] = [search.first];
  while (ways.length > 0) {
    if (ways.some((way) => search.isEnd(way))) return true;
    const next = search.next(ways);
    if (next.length > width) exact ??= next;
    ways = next.length > width ? search.best(next, width) : next;
  }
  if (exact === undefined) return false;
  for (ways = exact; ways.length > 0; ways = search.next(ways))
    if (ways.some((way) => search.isEnd(way))) return true;
  return false;
}

/**
 * The calls that every explanation begins with, item by item, where there is but one way to begin: the longest first. For
 * those that have no explanation.
 */
export function* beginnings(calls: Calls, time: Clock): Iterable<ReadonlySet<FifoSpan>> {
  const search = new Fifo(calls, time);
  const alone: Way[] = [];
  for (let ways: readonly Way[] = [search.first]; ways.length > 0; ways = search.next(ways))
    if (new Set(ways.map(movesOf)).size === 1) alone.push(ways[0] as Way);
  for (const way of alone.toReversed().slice(0, 64)) yield search.gone(way);
}

function movesOf({ brought, taken, lost }: Way): string {
  return `${nameOf(brought)}|${nameOf(taken)}|${lost}`;
}

const none: Part = { next: 0, left: [] };

function byStart<T extends FifoSpan>(calls: readonly T[]): T[] {
  return calls.toSorted((a, b) => a.start - b.start);
}

/** Calls in the order of their start, and what is left of them. */
class FifoLine<T extends FifoSpan> {
  readonly calls: readonly T[];
  /** Of all from there on: when the first one ends. */
  readonly #firstEnd: number[];

  constructor(calls: readonly T[]) {
    this.calls = byStart(calls);
    this.#firstEnd = Array.from({ length: calls.length + 1 }, () => Infinity);
    for (let i = calls.length - 1; i >= 0; i--)
      this.#firstEnd[i] = Math.min(this.#firstEnd[i + 1] as number, this.at(i).end);
  }

  at(index: number): T {
    return this.calls[index] as T;
  }

  /** When the first of those that are left ends: all that comes next has been by then. */
  firstEnd({ next, left }: Part): number {
    let end = this.#firstEnd[next] as number;
    for (const index of left) end = Math.min(end, this.at(index).end);
    return end;
  }

  /** Those that are left and have begun by then. */
  *begun({ next, left }: Part, by: number): Iterable<number> {
    for (const index of left) if (this.at(index).start <= by) yield index;
    for (let i = next; i < this.calls.length && this.at(i).start <= by; i++) yield i;
  }

  without({ next, left }: Part, index: number): Part {
    if (index < next) return { next, left: left.filter((each) => each !== index) };
    if (index === next) return { next: next + 1, left };
    const more = [...left];
    for (let i = next; i < index; i++) more.push(i);
    return { next: index + 1, left: more };
  }
}

/** How many there are of each value, from each place on. */
class Counts {
  readonly #places: number[][] = [];
  readonly #values: readonly number[];

  constructor(calls: readonly Moved[], counts: (call: Moved) => boolean) {
    this.#values = calls.map((call) => (counts(call) ? call.value : -1));
    for (const [i, value] of this.#values.entries()) if (value >= 0) (this.#places[value] ??= []).push(i);
  }

  left(value: number, { next, left }: Part): number {
    const places = this.#places[value] ?? [];
    let [low, high] = [0, places.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((places[middle] as number) < next) low = middle + 1;
      else high = middle;
    }
    let count = places.length - low;
    for (const index of left) if (this.#values[index] === value) count++;
    return count;
  }
}

class Fifo {
  readonly #brought: FifoLine<Moved>;
  readonly #taken: FifoLine<Moved>;
  readonly #lost: readonly FifoSpan[];
  readonly #empty: FifoLine<FifoSpan>;
  readonly #bringers: Counts;
  readonly #takers: Counts;
  readonly #time: Clock;

  constructor({ brought, taken, lost, empty }: Calls, time: Clock) {
    this.#brought = new FifoLine(brought);
    this.#taken = new FifoLine(taken);
    this.#lost = byStart(lost);
    this.#empty = new FifoLine(empty);
    this.#bringers = new Counts(this.#brought.calls, () => true);
    this.#takers = new Counts(this.#taken.calls, ({ end }) => end !== Infinity);
    this.#time = time;
  }

  get first(): Way {
    return { brought: none, taken: none, empty: none, lost: 0, in: -Infinity, out: -Infinity };
  }

  /** The calls that brought and took the items so far. */
  gone({ brought, taken, lost }: Way): Set<FifoSpan> {
    const before = ({ next, left }: Part, line: FifoLine<Moved>) =>
      line.calls.slice(0, next).filter((_, i) => !left.includes(i));
    return new Set([
      ...before(brought, this.#brought),
      ...before(taken, this.#taken),
      ...this.#lost.slice(0, lost),
    ]);
  }

  /** Nothing more has to be taken, and whoever found nothing can have done so now. */
  isEnd({ brought, taken, empty, out }: Way): boolean {
    if (this.#taken.firstEnd(taken) !== Infinity) return false;
    const until = this.#brought.firstEnd(brought);
    for (const index of this.#empty.begun(empty, Infinity)) {
      const { start, end } = this.#empty.at(index);
      if (end !== Infinity && (end < out || start > until)) return false;
    }
    return true;
  }

  /** All ways in which one more item can have come and gone. */
  next(ways: readonly Way[]): Way[] {
    const found = new Found();
    for (const way of ways)
      for (const rested of this.#rests(way)) {
        this.#time.tick();
        for (const one of this.#bring(rested)) for (const two of this.#take(...one)) found.add(two);
      }
    return found.list();
  }

  /** Those who need the fewest that nobody knows of, and are the earliest. */
  best(ways: readonly Way[], count: number): Way[] {
    const weight = (way: Way) => {
      let unknown = way.lost;
      const { next, left } = way.brought;
      for (const index of left) if (this.#brought.at(index).end === Infinity) unknown--;
      return { way, unknown, late: way.in + way.out, next };
    };
    return ways
      .map(weight)
      .toSorted((a, b) => a.unknown - b.unknown || a.late - b.late || a.next - b.next)
      .slice(0, count)
      .map(({ way }) => way);
  }

  /** Before the next item: some of those that find nothing, or none of them. */
  *#rests(way: Way): Iterable<Way> {
    yield way;
    const until = this.#brought.firstEnd(way.brought);
    const open = [...this.#empty.begun(way.empty, until)];
    if (open.length === 0 || way.out > until) return;
    const moments = new Set(open.map((index) => Math.max(way.out, this.#empty.at(index).start)));
    for (const moment of moments) {
      let { empty } = way;
      for (const index of this.#empty.begun(way.empty, moment)) empty = this.#empty.without(empty, index);
      yield { ...way, empty, in: Math.max(way.in, moment) };
    }
  }

  *#bring(way: Way): Iterable<[way: Way, value: number, known: boolean]> {
    for (const [index, moment] of this.#firsts(this.#brought, way.brought, way.in)) {
      const { value, end } = this.#brought.at(index);
      const brought = this.#brought.without(way.brought, index);
      yield [{ ...way, brought, in: moment }, value, end !== Infinity];
    }
  }

  *#take(way: Way, value: number, known: boolean): Iterable<Way> {
    const from = Math.max(way.in, way.out);
    const over = this.#empty.firstEnd(way.empty);
    for (const [index, moment] of this.#firsts(this.#taken, way.taken, from, value))
      if (moment <= over) yield { ...way, taken: this.#taken.without(way.taken, index), out: moment };
    // What nobody is known to have brought and nobody is known to have taken can as well not have been.
    const lost = this.#lost[way.lost];
    if (!lost || !known) return;
    const out = Math.max(from, lost.start);
    if (out > over || out > this.#taken.firstEnd(way.taken)) return;
    if (this.#bringers.left(value, way.brought) < this.#takers.left(value, way.taken)) return;
    yield { ...way, lost: way.lost + 1, out };
  }

  /** Those that may be next, from that moment on, and when. Of equal ones that have begun, the one that ends first. */
  *#firsts(line: FifoLine<Moved>, part: Part, from: number, value?: number): Iterable<[number, number]> {
    const until = line.firstEnd(part);
    if (from > until) return;
    const open = [...line.begun(part, until)];
    for (const index of open) {
      const one = line.at(index);
      if (value !== undefined && one.value !== value) continue;
      const moment = Math.max(from, one.start);
      const another = open.some((each) => {
        const other = line.at(each);
        if (each === index || other.value !== one.value || other.start > moment) return false;
        return other.end < one.end || (other.end === one.end && each < index);
      });
      if (!another) yield [index, moment];
    }
  }
}

/** Ways without those that another one makes needless: the same calls, and later. */
class Found {
  readonly #ways = new Map<string, Way[]>();

  add(way: Way): void {
    const name = `${nameOf(way.brought)}|${nameOf(way.taken)}|${nameOf(way.empty)}|${way.lost}`;
    const same = this.#ways.get(name);
    if (!same) {
      this.#ways.set(name, [way]);
      return;
    }
    if (same.some((other) => other.in <= way.in && other.out <= way.out)) return;
    const rest = same.filter((other) => way.in > other.in || way.out > other.out);
    rest.push(way);
    this.#ways.set(name, rest);
  }

  list(): Way[] {
    return [...this.#ways.values()].flat();
  }
}

function nameOf({ next, left }: Part): string {
  return left.length === 0 ? `${next}` : `${next}:${left.join()}`;
}
