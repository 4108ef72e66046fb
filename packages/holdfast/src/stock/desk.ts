/** Where orders of one instance come together, are sent as one statement, and get their own answers. */
import {
  type About,
  type CallOptions,
  type Together,
  placeOf,
  send,
  sendTogether,
  waitedInVain,
} from "../core/calls.ts";
import { Coalescer, Failed, type Terms, Undone } from "../core/coalesce.ts";
import type { Connection } from "../core/database.ts";
import { UnsupportedError } from "../core/errors.ts";
import { type Home, detached, homeOf } from "../core/scope.ts";
import type { How, Soon } from "../core/store.ts";
import { sameLines, spotName } from "./domain.ts";
import type { Book, Order, StockStore, Verdict } from "./store.ts";

export interface Call extends Order {
  /** The id, as the caller knows it. */
  readonly given: string;
  /** The caller gave the id: it may have been used before. */
  readonly named: boolean;
}

/** With more, the answers of a batch come so late that callers wait for each other. */
const most = 256;
/** While one batch is committed, the next is decided. */
const inFlight = 2;
/** So many go in one batch rather than in two at once: what a batch costs by itself is as much as 15 lines. */
const together = 64;
/** Of what reads whole histories: not a short errand. */
export const longMs = 600_000;
/** Levels that are known to be there. */
const mostKnown = 100_000;

const desks = new WeakMap<object, Map<string, Desk>>();

export function deskOf(hf: unknown, book: Book): Desk {
  const home = homeOf(hf, "stock");
  let books = desks.get(home);
  if (!books) desks.set(home, (books = new Map()));
  const name = JSON.stringify(book);
  let desk = books.get(name);
  if (!desk) books.set(name, (desk = new Desk(home, book)));
  return desk;
}

export class Desk {
  readonly home: Home<unknown, Connection>;
  readonly book: Book;
  readonly #coalescer: Coalescer<Call, Verdict>;
  readonly #sending: Together<Call, Verdict> = {
    about: (call) => this.#aboutOf(call),
    decide: (connection, calls, { again, ...how }) => this.#decide(connection, calls, again, how),
  };
  #known = new Set<string>();

  constructor(home: Home<unknown, Connection>, book: Book) {
    this.home = home;
    this.book = book;
    this.#coalescer = new Coalescer({
      inFlight,
      most,
      together,
      names: ({ lines }) => lines.map(spotName),
      run: (calls, terms) => this.#together(calls, terms),
      late: (call, waitedMs, cause) => waitedInVain(this.home, this.#aboutOf(call), waitedMs, cause),
    });
  }

  get store(): StockStore<Connection> {
    const { engine } = this.home.database;
    if (!engine.stocks) throw new UnsupportedError(`stock: ${engine.name} does not have stock yet`);
    return engine.stocks;
  }

  async order(call: Call, options: CallOptions): Promise<Verdict> {
    const place = placeOf(this.home, options, "stock");
    if (!place.scope)
      // A batch is of many callers, who are in different transactions, or in none.
      return detached(this.home, () => this.#coalescer.add(call, place.signal, place.waitMs));
    const [verdict] = await send(this.home, place, this.#aboutOf(call), (connection, { again, ...how }) =>
      this.#decide(connection, [call], again, how),
    );
    return verdict as Verdict;
  }

  /** A statement of its own, in the caller's transaction or outside of any. */
  async alone<T>(
    options: CallOptions | undefined,
    work: (connection: Connection, store: StockStore<Connection>, book: Book, how: How) => Soon<T>,
    ms?: number,
    about: About = { names: [`stock ${this.book.name}`] },
  ): Promise<T> {
    const place = placeOf(this.home, options ?? {}, "stock");
    return send(this.home, place, { ...about, ...(ms !== undefined && { ms }) }, async (connection, how) =>
      work(connection, this.store, this.book, how),
    );
  }

  #aboutOf({ given, named, lines }: Call): About {
    return {
      names: lines.map(({ sku, location }) => `stock ${this.book.name}:${sku}:${location}`),
      id: given,
      named,
      keeps: true,
    };
  }

  /** The same id twice in a batch: the same content has the same answer, and other content comes after it. */
  async #together(calls: readonly Call[], terms: Terms): Promise<readonly (Verdict | Failed)[]> {
    const first = new Map<string, number>();
    const now: Call[] = [];
    /** Places in `now`; undefined: later. */
    const places = calls.map((call) => {
      const name = call.kind === "reserve" ? `reserve ${call.id}` : call.id;
      const at = call.named ? first.get(name) : undefined;
      if (at !== undefined) {
        const other = now[at] as Call;
        return sameOrder(call, other) ? at : undefined;
      }
      if (call.named) first.set(name, now.length);
      return now.push(call) - 1;
    });
    const answers = await sendTogether(this.home, this.#sending, now, terms);
    const seen = new Set<number>();
    const others: (Verdict | Failed)[] = [];
    for (const [i, call] of calls.entries())
      if (places[i] === undefined) others.push(...(await this.#after(call, terms)));
    return places.map((at) => {
      if (at === undefined) return others.shift() as Verdict | Failed;
      const answer = answers[at] as Verdict | Failed;
      if (!seen.has(at)) {
        seen.add(at);
        return answer;
      }
      return answer instanceof Failed || answer.outcome !== "done"
        ? answer
        : { ...answer, outcome: "before" };
    });
  }

  /** One whose id was in the batch, which is done by now: it is not undone together with it. */
  async #after(call: Call, { until }: Terms): Promise<readonly (Verdict | Failed)[]> {
    const started = performance.now();
    try {
      const { signal } = new AbortController();
      return await sendTogether(this.home, this.#sending, [call], { until, signal });
    } catch (error) {
      if (!(error instanceof Undone)) throw error;
      const waitedMs = performance.now() - started;
      return [new Failed(waitedInVain(this.home, this.#aboutOf(call), waitedMs, error.cause))];
    }
  }

  /** `careful`: ids may be there although nobody named them; levels are made before any is locked. */
  async #decide(
    connection: Connection,
    calls: readonly Call[],
    careful: boolean,
    how: How,
  ): Promise<readonly Verdict[]> {
    const names = new Set(calls.flatMap(({ lines }) => lines.map(spotName)));
    const look = careful || calls.some(({ named }) => named);
    let make = careful;
    for (const name of names) make ||= !this.#known.has(name);
    for (;;) {
      const verdicts = await this.store.decide(connection, this.book, calls, { make, look, ...how });
      if (verdicts) {
        for (const { outcome, lines } of verdicts)
          if (outcome === "done" || outcome === "before") this.#remember(lines.map(spotName));
        return verdicts;
      }
      make = true;
    }
  }

  #remember(names: readonly string[]): void {
    if (this.#known.size > mostKnown) this.#known = new Set();
    for (const name of names) this.#known.add(name);
  }
}

function sameOrder(a: Call, b: Call): boolean {
  return (
    a.kind === b.kind &&
    a.about.source === b.about.source &&
    a.about.referenceType === b.about.referenceType &&
    a.about.referenceId === b.about.referenceId &&
    sameLines(a.lines, b.lines)
  );
}
