/** Where orders of one instance come together, are sent as one statement, and get their own answers. */
import { Coalescer, Crowded, Failed } from "../core/coalesce.ts";
import type { Connection } from "../core/database.ts";
import { again, withConnection } from "../core/errand.ts";
import { UnsupportedError } from "../core/errors.ts";
import { classify } from "../core/failure.ts";
import { type Home, type Scope, homeOf } from "../core/scope.ts";
import type { Book, Order, Stocks, Verdict } from "../core/stocks.ts";
import { sameLines, spotName } from "./domain.ts";

export interface Call extends Order {
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
  #known = new Set<string>();

  constructor(home: Home<unknown, Connection>, book: Book) {
    this.home = home;
    this.book = book;
    this.#coalescer = new Coalescer({
      inFlight,
      most,
      together,
      names: ({ lines }) => lines.map(spotName),
      run: (calls) => this.#together(calls),
    });
  }

  get store(): Stocks<Connection> {
    const { engine } = this.home.database;
    if (!engine.stocks) throw new UnsupportedError(`stock: ${engine.name} does not have stock yet`);
    return engine.stocks;
  }

  async order(
    call: Call,
    scope: Scope<unknown, Connection> | undefined,
    signal: AbortSignal | undefined,
  ): Promise<Verdict> {
    if (!scope) return this.#coalescer.add(call, signal);
    return scope.work(async ({ connection }) => {
      const [verdict] = await this.#decide(connection, [call], true);
      return verdict as Verdict;
    }, signal);
  }

  /** A statement of its own, in the caller's transaction or outside of any. */
  async alone<T>(
    scope: Scope<unknown, Connection> | undefined,
    work: (connection: Connection, store: Stocks<Connection>, book: Book) => Promise<T>,
    ms?: number,
  ): Promise<T> {
    const run = (connection: Connection) => work(connection, this.store, this.book);
    if (scope) return scope.work(({ connection }) => run(connection));
    return again(this.home.database, () => withConnection(this.home, run, ms));
  }

  /** The same id twice in a batch: the same content has the same answer, and other content comes after it. */
  async #together(calls: readonly Call[]): Promise<readonly (Verdict | Failed)[]> {
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
    const answers = await this.#send(now);
    const seen = new Set<number>();
    const others: (Verdict | Failed)[] = [];
    for (const [i, call] of calls.entries())
      if (places[i] === undefined) others.push(...(await this.#send([call])));
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

  /** `sent`: how often they were before, and may have been done. */
  async #send(calls: readonly Call[], sent = 0): Promise<readonly (Verdict | Failed)[]> {
    let attempt = sent;
    try {
      return await again(this.home.database, () =>
        withConnection(this.home, (connection) => this.#decide(connection, calls, attempt++ > 0)),
      );
    } catch (error) {
      if (calls.length === 1) return [new Failed(error)];
      if (attempt === 1 && crowded(calls) && classify(this.home.database, error) === "lock-timeout")
        throw new Crowded();
      // It may be the fault of one of them.
      return Promise.all(
        calls.map(async (call) => (await this.#send([call], attempt))[0] as Verdict | Failed),
      );
    }
  }

  /** `careful`: ids may be there although nobody named them; levels are made before any is locked. */
  async #decide(
    connection: Connection,
    calls: readonly Call[],
    careful: boolean,
  ): Promise<readonly Verdict[]> {
    const names = new Set(calls.flatMap(({ lines }) => lines.map(spotName)));
    const look = careful || calls.some(({ named }) => named);
    let make = careful;
    for (const name of names) make ||= !this.#known.has(name);
    for (;;) {
      const verdicts = await this.store.decide(connection, this.book, calls, { make, look });
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

const crowded = (calls: readonly Call[]) =>
  new Set(calls.flatMap(({ lines }) => lines.map(spotName))).size > 1;

function sameOrder(a: Call, b: Call): boolean {
  return (
    a.kind === b.kind &&
    a.about.source === b.about.source &&
    a.about.referenceType === b.about.referenceType &&
    a.about.referenceId === b.about.referenceId &&
    sameLines(a.lines, b.lines)
  );
}
