/** What calls of stock take, and what they answer. */
import type { Trust } from "../input/trust.ts";
import type { Wait } from "../seam/database.ts";
import type { Finding } from "./domain.ts";

/** Words of the caller's own: `stock<{ source: "POS" | "AMAZON"; reference: "order" | "count" }>(hf)`. */
export interface StockWords {
  readonly source?: string;
  readonly reference?: string;
}
/** Where a change came from. The caller's own come on top of these. */
export type SourceOf<W extends StockWords> =
  | "ORDER"
  | "MANUAL"
  | "RETURN"
  | "ML_SALE"
  | (W extends { readonly source: infer S extends string } ? S : never);
/** What a change is about; any text, unless the caller has named them. */
export type ReferenceOf<W extends StockWords> = W extends { readonly reference: infer R extends string }
  ? R | "TRANSFER"
  : string;

export interface StockOptions {
  /** Levels and movements are kept under this name. Default "stock". */
  readonly name?: string;
  /** Of lines that do not say. Default "main". */
  readonly location?: string;
  /** What is on hand is a column of your own table, and stays there; movements and reservations are ours. */
  readonly levels?: OwnLevels;
}

export interface OwnLevels {
  /** `"product_variants"`, or `["shop", "product_variants"]` with its schema. */
  readonly table: string | readonly string[];
  readonly sku: string;
  readonly onHand: string;
  /** Without it all of them are at the default location. */
  readonly location?: string;
  /** Without it the minimum is what `setMinimum` says, or 0. */
  readonly minLevel?: string;
}

/** `quantity`: below 0 is taken, above 0 is added. */
export interface Line {
  readonly sku: string;
  readonly quantity: number;
  readonly location?: string;
}

export interface CallOptions extends ReadOptions {
  /** Milliseconds to wait while somebody's transaction has the same SKU. Default: the instance's (5 s). */
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
}

/** Of calls that only look. */
export interface ReadOptions {
  /**
   * Takes part in this transaction: rolled back with it. Others who want the same SKU wait for its end. Without it: in
   * the transaction of the same instance whose body calls, if there is one.
   */
  readonly tx?: object | undefined;
  /** Inside a transaction's body: apart from it. What was moved stays moved also if it is rolled back. */
  readonly separate?: boolean;
}

export interface MovementOptions<W extends StockWords = StockWords> extends CallOptions {
  /** Default "MANUAL". */
  readonly source?: SourceOf<W>;
  readonly reference?: { readonly type: ReferenceOf<W>; readonly id: string };
  /** Of the notification or request that this comes from: the same one counts once. */
  readonly externalId?: string;
  /** Who did it. */
  readonly by?: string;
  /** Why. */
  readonly note?: string;
}

/** Of a stock on several databases: any SKU of what it is about, which says where that is. */
export interface Where {
  readonly sku?: string;
}

export interface AtLocation {
  readonly location?: string;
}

export interface ReserveOptions<W extends StockWords = StockWords> extends Omit<
  MovementOptions<W>,
  "externalId"
> {
  /** Of the cart or checkout: the same one is reserved once. Default: another one each time. */
  readonly id?: string;
  /** Milliseconds after which others may have it. Default 15 minutes. */
  readonly ttl?: number;
}

export interface TransferOptions<W extends StockWords = StockWords> extends MovementOptions<W> {
  readonly from: string;
  readonly to: string;
}

export interface ReturnOptions<W extends StockWords = StockWords> extends MovementOptions<W>, Where {
  /** Which of them, above 0. Default: all that has not come back yet. */
  readonly lines?: readonly Line[];
}

export interface AppliedLine {
  readonly sku: string;
  readonly location: string;
  readonly quantity: number;
  /** After it. */
  readonly onHand: number;
  readonly version: number;
}

export interface Applied {
  /** The one that was given, or one of its own: what `return` refers to. */
  readonly externalId: string;
  /** It had been applied before: this is the answer of then. */
  readonly replayed: boolean;
  /** By the database's clock. */
  readonly at: Date;
  readonly lines: readonly AppliedLine[];
}

/** What is kept apart until it is taken (`commit`), given back (`release`), or over. */
export interface Reservation<W extends StockWords = StockWords> {
  readonly id: string;
  readonly until: Date;
  readonly state: "open" | "committed";
  readonly replayed: boolean;
  readonly lines: readonly { readonly sku: string; readonly location: string; readonly quantity: number }[];
  commit(options?: Omit<MovementOptions<W>, "externalId">): Promise<Applied>;
  release(options?: CallOptions): Promise<void>;
}

export interface CurrentLevel {
  readonly sku: string;
  readonly location: string;
  readonly onHand: number;
  /** Kept apart by reservations that are not over. */
  readonly reserved: number;
  /** What can be taken: on hand, without what is reserved and what has to stay. */
  readonly available: number;
  readonly min: number;
  readonly version: number;
}

export interface LevelsOptions extends AtLocation, ReadOptions {
  readonly skus?: readonly string[];
  /** At most so many, by SKU and location; and the last one of the page before. */
  readonly limit?: number;
  readonly after?: { readonly sku: string; readonly location: string };
}

export interface Movement<W extends StockWords = StockWords> {
  readonly sku: string;
  readonly location: string;
  readonly version: number;
  readonly kind: "apply" | "adjust" | "transfer" | "commit" | "return" | "repair" | "opening";
  readonly quantity: number;
  /** On hand after it. */
  readonly balance: number;
  readonly at: Date;
  readonly source: SourceOf<W>;
  readonly reference: { readonly type: ReferenceOf<W>; readonly id: string } | undefined;
  readonly externalId: string;
  readonly by: string | undefined;
  readonly note: string | undefined;
  /** Of a return: what was sold under this id. */
  readonly of: string | undefined;
}

export interface Span {
  readonly from?: Date;
  /** Not included. */
  readonly to?: Date;
}

export interface HistoryOptions<W extends StockWords = StockWords> extends Span, ReadOptions {
  readonly sku?: string;
  readonly location?: string;
  readonly source?: SourceOf<W>;
  readonly reference?: { readonly type?: ReferenceOf<W>; readonly id?: string };
  /** Of a page. Default 100. */
  readonly limit?: number;
  /** `next` of the page before. */
  readonly after?: string | undefined;
}

export interface ChannelOptions extends AtLocation, Span, ReadOptions {
  readonly sku?: string;
}

export interface ChannelSum<W extends StockWords = StockWords> {
  readonly source: SourceOf<W>;
  readonly movements: number;
  readonly increased: number;
  readonly decreased: number;
  /** What it came to. */
  readonly net: number;
}

export interface ReconcileOptions {
  readonly sku?: string;
  readonly location?: string;
  /** Makes both agree, and writes a movement that says so. */
  readonly repair?: boolean;
  /**
   * Which of both is right. "ledger" (default): what is on hand becomes what the movements come to. "levels": what is on
   * hand stays, as if it had been counted.
   */
  readonly trust?: Trust;
  readonly by?: string;
  readonly note?: string;
}

export interface Reconciliation {
  readonly ok: boolean;
  /** How many were looked at. */
  readonly levels: number;
  readonly movements: number;
  readonly findings: readonly Finding[];
  readonly repaired: boolean;
}
