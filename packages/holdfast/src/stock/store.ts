/** What an engine keeps of stock: the contract behind `stock`. What is decided is said in `decide/`. */
import type { Connection } from "../seam/database.ts";
import type { How, Soon } from "../seam/store.ts";
import type { Trust } from "../input/trust.ts";

export interface Spot {
  readonly sku: string;
  readonly location: string;
}

/** Where levels are kept: with us, or on-hand quantities in a table of the caller's. */
export interface StockBook {
  readonly name: string;
  readonly table: OwnTable | undefined;
}

/** Names as the catalog has them, to be quoted. Without a column for it there is one location, or no minimum but ours. */
export interface OwnTable {
  readonly table: readonly string[];
  readonly sku: string;
  readonly onHand: string;
  readonly location: string | undefined;
  /** What the rows' location is called where the table has no column for it. */
  readonly only: string;
  readonly minLevel: string | undefined;
}

/** `quantity`: signed for "apply"; what is counted for "adjust"; above 0 for "reserve". Each spot once, in order. */
export interface OrderLine extends Spot {
  readonly quantity: number;
}

export interface StockOrder {
  readonly kind: "apply" | "adjust" | "transfer" | "reserve";
  /** Applied once per spot. Of "reserve": the reservation's. */
  readonly id: string;
  readonly lines: readonly OrderLine[];
  readonly about: MovementAbout;
  /** Of "reserve": for how many milliseconds. */
  readonly ttlMs: number | undefined;
}

export interface MovementAbout {
  readonly source: string;
  readonly referenceType: string | undefined;
  readonly referenceId: string | undefined;
  readonly by: string | undefined;
  readonly note: string | undefined;
}

/** Of what was there before: `of` is the id of a reservation, or of what was sold. */
export interface Sequel {
  readonly kind: "commit" | "release" | "return";
  readonly id: string;
  readonly of: string;
  readonly about: MovementAbout;
  /** Of "return": which of its lines; undefined: all that is left of all. */
  readonly lines: readonly OrderLine[] | undefined;
}

/**
 * `before`: this id was applied earlier. `conflict`: for something else. `short`: at least one line, and nothing was
 * done. `unknown level`: a spot that nobody has ever put anything in. `unknown`: no such sale or reservation.
 * `too much`: more than is left of the sale. `ended`: the reservation is over, see `state`.
 */
export type StockOutcome =
  "done" | "before" | "conflict" | "short" | "unknown level" | "unknown" | "too much" | "ended";

export interface LineVerdict extends Spot {
  /** What was moved or reserved. */
  readonly quantity: number;
  readonly onHand: number;
  readonly version: number;
  /** What could be taken, when it was refused; of a return, what is left to return; undefined: the spot is not known. */
  readonly room: number | undefined;
}

export interface OrderVerdict {
  readonly outcome: StockOutcome;
  readonly at: number;
  readonly lines: readonly LineVerdict[];
  /** Of reservations: until when, and what has become of it. */
  readonly until: number | undefined;
  readonly state: string | undefined;
}

export interface StockLevel extends Spot {
  readonly onHand: number;
  /** Without what has run out. */
  readonly reserved: number;
  readonly min: number;
  readonly version: number;
}

export interface StockMovement extends Spot {
  readonly version: number;
  readonly kind: string;
  readonly quantity: number;
  readonly balance: number;
  readonly at: number;
  readonly source: string;
  readonly referenceType: string | undefined;
  readonly referenceId: string | undefined;
  readonly id: string;
  readonly by: string | undefined;
  readonly note: string | undefined;
  /** Of a return: what was sold under this id. */
  readonly of: string | undefined;
  /** Names its place in the order of history. */
  readonly cursor: string;
}

export interface MovementFilter {
  readonly sku: string | undefined;
  readonly location: string | undefined;
  readonly source: string | undefined;
  readonly referenceType: string | undefined;
  readonly referenceId: string | undefined;
  /** Milliseconds; from this one on, to before that one. */
  readonly from: number | undefined;
  readonly to: number | undefined;
}

export interface Channel {
  readonly source: string;
  readonly movements: number;
  readonly increased: number;
  readonly decreased: number;
}

/** What is found of a level in one snapshot. Movements before the last repair are summed, not looked at one by one. */
export interface Facts extends Spot {
  readonly onHand: number;
  readonly reserved: number;
  readonly version: number;
  /** Of lines of reservations that are open. */
  readonly open: number;
  readonly sum: number;
  readonly movements: number;
  readonly newest: { readonly version: number; readonly balance: number } | undefined;
  /** Movements that do not follow from the one before. */
  readonly breaks: readonly Break[];
}

export interface Break {
  readonly version: number;
  readonly quantity: number;
  readonly balance: number;
  /** Of the movement before; undefined: it is the first one that is there. */
  readonly before: { readonly version: number; readonly balance: number } | undefined;
  readonly at: number;
}

export interface BookInfo {
  readonly name: string;
  /** Counted up to a hundred thousand. */
  readonly levels: number;
  /** What is on hand is kept in a table of the caller's. */
  readonly elsewhere: boolean;
}

export interface MovementPage {
  /** The last one of the page before, by its `cursor`. */
  readonly after: string | undefined;
  readonly most: number;
}

export interface LevelPage {
  readonly skus: readonly string[] | undefined;
  readonly location: string | undefined;
  /** The last one of the page before; and how many, if not all. */
  readonly after: Spot | undefined;
  readonly most: number | undefined;
}

export interface FactsPage {
  readonly sku: string | undefined;
  readonly location: string | undefined;
  /** The last one of the page before. */
  readonly after: Spot | undefined;
  readonly most: number;
}

export interface StockRepair {
  readonly id: string;
  readonly trust: Trust;
  readonly about: MovementAbout;
}

/** The work itself. */
export interface StockStore<C extends Connection> {
  /**
   * Decides in the order in which they came, each all or nothing; an id comes once in a batch. `make`: spots that something
   * is put into may not be there yet. `look`: ids may have been used before. Undefined: spots are missing that would have to
   * be made.
   */
  decide(
    connection: C,
    book: StockBook,
    orders: readonly StockOrder[],
    how: How & { readonly make: boolean; readonly look: boolean },
  ): Soon<readonly OrderVerdict[] | undefined>;
  follow(connection: C, book: StockBook, sequel: Sequel, how: How): Soon<OrderVerdict>;
  /** Never below this. "short": what is there is below it already. */
  minimum(connection: C, book: StockBook, spot: Spot, min: number, how: How): Soon<OrderVerdict>;
  readonly lists: StockLists<C>;
  readonly upkeep: StockUpkeep<C>;
  /** On-hand quantities in a table of the caller's. Absent: this engine keeps them itself, always. */
  readonly ownTables?: StockOwnTables<C>;
}

/** What only looks. */
export interface StockLists<C extends Connection> {
  levels(connection: C, book: StockBook, which: LevelPage, how: How): Soon<readonly StockLevel[]>;
  /** Of those that have a level. */
  books(connection: C, how: How): Soon<readonly BookInfo[]>;
  /** Newest first. */
  history(
    connection: C,
    book: StockBook,
    filter: MovementFilter,
    page: MovementPage,
    how: How,
  ): Soon<readonly StockMovement[]>;
  /** What was on hand at that moment; undefined: there was nothing yet. */
  levelAt(connection: C, book: StockBook, spot: Spot, at: number, how: How): Soon<number | undefined>;
  channels(connection: C, book: StockBook, filter: MovementFilter, how: How): Soon<readonly Channel[]>;
}

/** Whether it adds up, and what to do if not. */
export interface StockUpkeep<C extends Connection> {
  facts(connection: C, book: StockBook, which: FactsPage, how: How): Soon<readonly Facts[]>;
  /**
   * Makes what is on hand what the movements come to, or leaves it, as `trust` says; writes a movement of what they lack;
   * and reserves what is open. The same id again changes nothing.
   */
  repair(connection: C, book: StockBook, spot: Spot, repair: StockRepair, how: How): Soon<void>;
}

export interface StockOwnTables<C extends Connection> {
  /** Takes over what is in the caller's table and not in ours yet; how many spots. */
  adopt(connection: C, book: StockBook, how: How): Soon<number>;
  /** SQL of a trigger that refuses changes of the caller's table that are not ours. */
  guard(book: StockBook): readonly string[];
}
