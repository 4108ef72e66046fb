/** Where orders of one instance come together, are sent as one statement, and get their own answers. */
import { Batcher } from "../batch/batcher.ts";
import { Remembered } from "../batch/remembered.ts";
import type { Repeats } from "../batch/repeats.ts";
import { type CallAbout, type CallOptions, type Sent, placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { RowsHiddenError, UnsupportedError } from "../seam/errors.ts";
import { storeOf } from "../transaction/instance.ts";
import { type InstanceContext, contextOf } from "../transaction/scope.ts";
import type { How, Soon } from "../seam/store.ts";
import { sameLines, spotName } from "./domain.ts";
import type { StockBook, StockOrder, StockOwnTables, StockStore, OrderVerdict } from "./store.ts";

export interface StockCall extends StockOrder {
  /** The id, as the caller knows it. */
  readonly given: string;
  /** The caller gave the id: it may have been used before. */
  readonly named: boolean;
}

/** How often levels are made that are not there afterwards. */
const mostTurns = 10;

/** With more, the answers of a batch come so late that callers wait for each other. */
const most = 256;
/** While one batch is committed, the next is decided. */
const inFlight = 2;
/** So many go in one batch rather than in two at once: what a batch costs by itself is as much as 15 lines. */
const together = 64;
/** Of what reads whole histories: not short. */
export const longMs = 600_000;
const batchers = new WeakMap<object, Map<string, StockBatcher>>();

export function stockBatcherOf(hf: unknown, book: StockBook): StockBatcher {
  const context = contextOf(hf, "stock");
  let books = batchers.get(context);
  if (!books) batchers.set(context, (books = new Map()));
  const name = JSON.stringify(book);
  let batcher = books.get(name);
  if (!batcher) books.set(name, (batcher = new StockBatcher(context, book)));
  return batcher;
}

/** What is on hand in a table of the caller's: not every engine can. */
export function ownTablesOf({ ownTables }: StockStore<Connection>): StockOwnTables<Connection> {
  if (ownTables) return ownTables;
  throw new UnsupportedError(
    "stock: here what is on hand is kept in tables of Holdfast's own. Leave `levels` out; or keep your column under row locks, as examples/recipe-stock does (docs/stock.md#in-a-shop-that-is-there-already)",
  );
}

export class StockBatcher {
  readonly context: InstanceContext<unknown, Connection>;
  readonly book: StockBook;
  readonly #batcher: Batcher<StockCall, OrderVerdict>;
  readonly #known = new Remembered();

  constructor(context: InstanceContext<unknown, Connection>, book: StockBook) {
    this.context = context;
    this.book = book;
    this.#batcher = new Batcher(context, {
      call: "stock",
      inFlight,
      most,
      together,
      about: (call) => this.#aboutOf(call),
      decide: (connection, calls, how) => this.#decide(connection, calls, how),
      repeats,
    });
  }

  get store(): StockStore<Connection> {
    const store: StockStore<Connection> = storeOf(this.context, "stock", "stock");
    if (this.book.table) ownTablesOf(store);
    return store;
  }

  order(call: StockCall, options: CallOptions): Promise<OrderVerdict> {
    return this.#batcher.add(call, options);
  }

  /** A statement of its own, in the caller's transaction or outside of any. */
  async alone<T>(
    options: CallOptions | undefined,
    work: (connection: Connection, store: StockStore<Connection>, book: StockBook, how: How) => Soon<T>,
    ms?: number,
    about: CallAbout = { names: [`stock ${this.book.name}`] },
  ): Promise<T> {
    const place = placeOf(this.context, options, "stock");
    return send(this.context, place, { ...about, ...(ms !== undefined && { ms }) }, async (connection, how) =>
      work(connection, this.store, this.book, how),
    );
  }

  #aboutOf({ given, named, lines }: StockCall): CallAbout {
    return {
      names: lines.map(({ sku, location }) => `stock ${this.book.name}:${sku}:${location}`),
      id: given,
      named,
      keeps: true,
    };
  }

  /** `again`: ids may be there although nobody named them; levels are made before any is locked. */
  async #decide(
    connection: Connection,
    calls: readonly StockCall[],
    { again, ...how }: Sent,
  ): Promise<readonly OrderVerdict[]> {
    const names = new Set(calls.flatMap(({ lines }) => lines.map(spotName)));
    const look = again || calls.some(({ named }) => named);
    let make = again || !this.#known.hasAll(names);
    for (let turn = 1; turn <= mostTurns; turn++) {
      const verdicts = await this.store.decide(connection, this.book, calls, { make, look, ...how });
      if (verdicts) {
        for (const { outcome, lines } of verdicts)
          if (outcome === "done" || outcome === "before") this.#known.add(lines.map(spotName));
        return verdicts;
      }
      make = true;
    }
    throw new RowsHiddenError([...names].join(", "), { table: "stock_level", byPolicy: false });
  }
}

/** Those of a batch that have the same id: a reservation's is one of its own. */
const repeats: Repeats<StockCall, OrderVerdict> = {
  id: ({ kind, id, named }) => (named ? (kind === "reserve" ? `reserve ${id}` : id) : undefined),
  same: sameOrder,
  replayed: (verdict) => (verdict.outcome === "done" ? { ...verdict, outcome: "before" } : verdict),
};

function sameOrder(a: StockCall, b: StockCall): boolean {
  return (
    a.kind === b.kind &&
    a.about.source === b.about.source &&
    a.about.referenceType === b.about.referenceType &&
    a.about.referenceId === b.about.referenceId &&
    sameLines(a.lines, b.lines)
  );
}
