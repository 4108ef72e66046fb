/** Stock that changes by movements only: `stock(hf).apply([{ sku: "CAP", quantity: -2 }], { source: "ORDER" })`. */
import { randomBytes } from "node:crypto";
import { callNames } from "../batch/calls.ts";
import type { Connection, Wait } from "../seam/database.ts";
import { UnsupportedError, UsageError } from "../seam/errors.ts";
import {
  checkId,
  checkMoment,
  checkReference,
  checkRows,
  checkSpan,
  checkText as checkAnyText,
  checkWhole,
  longestName,
  optionalText,
} from "../input/values.ts";
import { merged } from "../shards/merged.ts";
import { checkNames } from "../input/options.ts";
import type { Transaction } from "../transaction/scope.ts";
import { type Instances, instancesOf } from "../shards/shards.ts";
import type {
  MovementAbout,
  StockBook,
  Facts,
  MovementFilter,
  StockOrder,
  OrderLine,
  OwnTable,
  Spot,
  StockOwnTables,
  StockStore,
  OrderVerdict,
} from "./store.ts";
import type { Transactor } from "../transaction/transaction.ts";
import { type Trust, checkTrust } from "../input/trust.ts";
import { type StockBatcher, stockBatcherOf, longMs } from "./batcher.ts";
import { type Finding, type Shortage, explain, shortage, splitOrder, spotName, sumLines } from "./domain.ts";
import { InsufficientStockError, StockConflictError, StockError, UnknownSkuError } from "./errors.ts";

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

interface CallOptions extends ReadOptions {
  /** Milliseconds to wait while somebody's transaction has the same SKU. Default: the instance's (5 s). */
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
}

/** Of calls that only look. */
interface ReadOptions {
  /**
   * Takes part in this transaction: rolled back with it. Others who want the same SKU wait for its end. Without it: in
   * the transaction of the same instance whose body calls, if there is one.
   */
  readonly tx?: Transaction<unknown> | undefined;
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
interface Where {
  readonly sku?: string;
}

interface AtLocation {
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

interface Span {
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

const optionNames = new Set(["name", "location", "levels"]);
const ownNames = new Set(["table", "sku", "onHand", "location", "minLevel"]);
const readNames = ["tx", "separate"];
const aboutNames = [...callNames, "source", "reference", "by", "note"];
const movementNames = new Set([...aboutNames, "externalId"]);
const atNames = new Set([...movementNames, "location"]);
const reserveNames = new Set([...aboutNames, "id", "ttl"]);
const transferNames = new Set([...movementNames, "from", "to"]);
const returnNames = new Set([...movementNames, "lines", "sku"]);
const commitNames = new Set([...aboutNames, "sku"]);
const historyNames = new Set([
  "sku",
  "location",
  "source",
  "reference",
  "from",
  "to",
  "limit",
  "after",
  ...readNames,
]);
const channelNames = new Set(["sku", "location", "from", "to", ...readNames]);

/** `hf`: an instance, or `sharded(databases, …)`: what is about a SKU goes to the shard of `key(name, sku)`. */
// `any`: who names words of their own need not name their client's transaction too.
export function stock<W extends StockWords = StockWords, Native = any>(
  hf: Transactor<Native>,
  options: StockOptions = {},
): Stock<W> {
  return new Stock<W>(hf, options);
}

export class Stock<W extends StockWords = StockWords> {
  readonly name: string;
  readonly #instances: Instances;
  readonly #batchers = new Map<object, StockBatcher>();
  readonly #book: StockBook;
  readonly #location: string;

  constructor(hf: unknown, options: StockOptions = {}) {
    checkNames("stock", options, optionNames);
    const { name = "stock", location = "main", levels } = options;
    checkText("name", name);
    checkText("location", location);
    this.name = name;
    this.#location = location;
    this.#book = { name, table: levels && ownTable(levels, location) };
    this.#instances = instancesOf(hf, "stock");
  }

  #batcher(instance: object): StockBatcher {
    let batcher = this.#batchers.get(instance);
    if (!batcher) this.#batchers.set(instance, (batcher = stockBatcherOf(instance, this.#book)));
    return batcher;
  }

  /** Where a SKU is. */
  #at(sku: string): StockBatcher {
    return this.#batcher(this.#instances.at(this.name, sku));
  }

  /** Where all of them are. */
  #together(call: string, lines: readonly Spot[]): StockBatcher {
    const addresses = lines.map(({ sku }) => [this.name, sku] as const);
    return this.#batcher(this.#instances.together(call, addresses));
  }

  get #everywhere(): readonly StockBatcher[] {
    return this.#instances.all.map((instance) => this.#batcher(instance));
  }

  /** Of one SKU if it is named, else of all shards. */
  #those(sku: string | undefined): readonly StockBatcher[] {
    return sku === undefined ? this.#everywhere : [this.#at(sku)];
  }

  /** Takes and adds, all lines or none, in one round trip; or throws `InsufficientStockError`. */
  apply(lines: readonly Line[], options: MovementOptions<W> = {}): Promise<Applied> {
    checkNames("apply", options, movementNames);
    return this.#move("apply", this.#lines("apply", lines, signedQuantity), options);
  }

  decrease(sku: string, quantity: number, options: MovementOptions<W> & AtLocation = {}): Promise<Applied> {
    checkNames("decrease", options, atNames);
    return this.#move("apply", [{ ...this.#spot(sku, options), quantity: -above(quantity) }], options);
  }

  /** Makes the level if it is the first of that SKU at that location. */
  increase(sku: string, quantity: number, options: MovementOptions<W> & AtLocation = {}): Promise<Applied> {
    checkNames("increase", options, atNames);
    return this.#move("apply", [{ ...this.#spot(sku, options), quantity: above(quantity) }], options);
  }

  /** What was counted: a movement of the difference to what was on hand. */
  adjustTo(sku: string, count: number, options: MovementOptions<W> & AtLocation = {}): Promise<Applied> {
    checkNames("adjustTo", options, atNames);
    return this.#move("adjust", [{ ...this.#spot(sku, options), quantity: whole(count) }], options);
  }

  /** From one location to another: two movements, of one reference. */
  transfer(sku: string, quantity: number, options: TransferOptions<W>): Promise<Applied> {
    checkNames("transfer", options, transferNames);
    const { from, to } = options;
    if (from === to) throw new UsageError("transfer: from and to are the same location");
    const given = givenOr(options.externalId);
    const id = idOf("externalId", given, options.externalId);
    const lines = sumLines([
      { ...this.#spot(sku, { location: from }), quantity: -above(quantity) },
      { ...this.#spot(sku, { location: to }), quantity: above(quantity) },
    ]);
    const reference = options.reference ?? { type: "TRANSFER" as ReferenceOf<W>, id };
    return this.#move("transfer", lines, { ...options, reference }, given);
  }

  /** Keeps some apart for a while: nobody else can take or reserve it until then. */
  async reserve(lines: readonly Line[], options: ReserveOptions<W> = {}): Promise<Reservation<W>> {
    checkNames("reserve", options, reserveNames);
    const { ttl = 900_000 } = options;
    checkSpan("reserve", "ttl", ttl);
    const given = givenOr(options.id);
    const id = idOf("id", given, options.id);
    const order: StockOrder = {
      kind: "reserve",
      id,
      lines: this.#lines("reserve", lines, above),
      about: aboutOf(options, "ORDER"),
      ttlMs: ttl,
    };
    const batcher = this.#together("reserve", order.lines);
    const verdict = await batcher.order({ ...order, given, named: options.id !== undefined }, options);
    this.#refuse(order, verdict);
    const [{ sku }] = order.lines as [OrderLine];
    return {
      id: given,
      until: new Date(verdict.until ?? Number.NaN),
      state: verdict.state as "open" | "committed",
      replayed: verdict.outcome === "before",
      lines: order.lines,
      commit: (more) => this.commit(given, { sku, ...more }),
      release: (more) => this.release(given, { sku, ...more }),
    };
  }

  /** Takes what was reserved, also in another process than the one that did. */
  async commit(
    reservation: string,
    options: Omit<MovementOptions<W>, "externalId"> & Where = {},
  ): Promise<Applied> {
    checkNames("commit", options, commitNames);
    const of = checkId("commit", "reservation", reservation);
    const verdict = await this.#follow(
      "commit",
      `commit:${of}`,
      of,
      aboutOf(options, ""),
      undefined,
      options,
    );
    return applied(`commit:${reservation}`, verdict);
  }

  async release(reservation: string, options: CallOptions & Where = {}): Promise<void> {
    checkNames("release", options, new Set([...callNames, "sku"]));
    const of = checkId("release", "reservation", reservation);
    await this.#follow("release", `release:${of}`, of, aboutOf({}, ""), undefined, options);
  }

  /** Of what was sold under this id (that of `apply` or `decrease`, or `commit:<reservation>`): never more than that. */
  async return(sale: string, options: ReturnOptions<W> = {}): Promise<Applied> {
    checkNames("return", options, returnNames);
    const of = checkReference("return", "sale", sale, ["commit:"]);
    const lines = options.lines && this.#lines("return", options.lines, above);
    const given = !lines && options.externalId === undefined ? `return:${sale}` : givenOr(options.externalId);
    const id =
      options.externalId === undefined && !lines
        ? `return:${of}`
        : idOf("externalId", given, options.externalId);
    const verdict = await this.#follow("return", id, of, aboutOf(options, "RETURN"), lines, options, given);
    return applied(given, verdict);
  }

  async level(sku: string, options: AtLocation & ReadOptions = {}): Promise<CurrentLevel> {
    checkNames("level", options, new Set(["location", ...readNames]));
    const spot = this.#spot(sku, options);
    const [found] = await this.#levels([spot.sku], spot.location, options);
    if (!found) throw new UnknownSkuError([spot]);
    return found;
  }

  /** Of these SKUs, or of all, at one location or at all of them. SKUs that are not known are not among them. */
  levels(
    options: {
      readonly skus?: readonly string[];
      readonly location?: string;
      /** At most so many, by SKU and location; and the last one of the page before. */
      readonly limit?: number;
      readonly after?: { readonly sku: string; readonly location: string };
    } & ReadOptions = {},
  ): Promise<CurrentLevel[]> {
    checkNames("levels", options, new Set(["skus", "location", "limit", "after", ...readNames]));
    const { skus, location, limit, after } = options;
    if (skus !== undefined && !Array.isArray(skus))
      throw new UsageError("levels: skus must be a list of texts");
    for (const sku of skus ?? []) checkText("sku", sku);
    optionalText("levels", "location", location);
    if (limit !== undefined) checkRows("levels", "limit", limit);
    const from = after && this.#spot(after.sku, after);
    return this.#levels(skus, location, options, { most: limit, after: from });
  }

  /** Never below this. Negative: so many may be sold that are not there yet. */
  async setMinimum(sku: string, min: number, options: AtLocation & ReadOptions = {}): Promise<void> {
    checkNames("setMinimum", options, new Set(["location", ...readNames]));
    const spot = this.#spot(sku, options);
    whole(min);
    const { table } = this.#book;
    if (table?.minLevel !== undefined)
      throw new UsageError(
        `setMinimum: the minimum is kept in your column ${table.minLevel}: change it there`,
      );
    const { outcome, lines } = await this.#at(spot.sku).alone(
      options,
      (connection, store, book, how) => store.minimum(connection, book, spot, min, how),
      undefined,
      { names: [`stock ${this.name}:${spot.sku}:${spot.location}`], locks: true },
    );
    if (outcome === "short") throw new InsufficientStockError([shortage(spot, min, lines[0]?.room ?? 0)]);
  }

  /** Spreads an order over locations, by what they have now: lines for `apply` or `reserve`, which decide. */
  async split(
    wanted: readonly { readonly sku: string; readonly quantity: number }[],
    options: { readonly locations: readonly string[] } & ReadOptions,
  ): Promise<{ readonly lines: readonly OrderLine[]; readonly short: readonly Shortage[] }> {
    checkNames("split", options, new Set(["locations", ...readNames]));
    const { locations } = options;
    if (!Array.isArray(locations) || !Array.isArray(wanted))
      throw new UsageError("split: a list of { sku, quantity }, and `locations`, a list of texts");
    for (const location of locations as readonly string[]) checkText("location", location);
    for (const { sku, quantity } of wanted) {
      checkText("sku", sku);
      above(quantity);
    }
    const levels = await this.#levels([...new Set(wanted.map(({ sku }) => sku))], undefined, options);
    return splitOrder(wanted, levels, locations);
  }

  /** Movements, newest first: a page, and where the next one begins. */
  async history(
    options: HistoryOptions<W> = {},
  ): Promise<{ readonly movements: readonly Movement<W>[]; readonly next: string | undefined }> {
    checkNames("history", options, historyNames);
    const { limit = 100, after, source, reference } = options;
    checkRows("history", "limit", limit, 10_000);
    optionalText("history", "source", source);
    optionalText("history", "reference.type", reference?.type);
    optionalText("history", "reference.id", reference?.id);
    if (after !== undefined && !(typeof after === "string" && /^-?\d{1,17}\.\d{1,17}\.\d{1,17}$/.test(after)))
      throw new UsageError("history: after must be `next` of the page before");
    const filter = {
      ...filterOf(options),
      source,
      referenceType: reference?.type,
      referenceId: reference?.id,
    };
    const batchers = this.#those(options.sku);
    if (batchers.length > 1)
      throw new UsageError(
        "history: on several databases pages are of one SKU each: name it, or ask each shard, stock(shards.all()[i])",
      );
    const [batcher] = batchers as [StockBatcher];
    const found = await batcher.alone(options, (connection, store, book, how) =>
      store.lists.history(connection, book, filter, { after, most: limit }, how),
    );
    return {
      movements: found.map((each) => ({
        sku: each.sku,
        location: each.location,
        version: each.version,
        kind: each.kind as Movement["kind"],
        quantity: each.quantity,
        balance: each.balance,
        at: new Date(each.at),
        source: each.source as SourceOf<W>,
        reference:
          each.referenceId === undefined
            ? undefined
            : { type: (each.referenceType ?? "") as ReferenceOf<W>, id: each.referenceId },
        externalId: each.id,
        by: each.by,
        note: each.note,
        of: each.of,
      })),
      next: found.length === limit ? found.at(-1)?.cursor : undefined,
    };
  }

  /** What was on hand at that time, as the movements say; 0 before the first one. */
  async levelAt(sku: string, time: Date, options: AtLocation & ReadOptions = {}): Promise<number> {
    checkNames("levelAt", options, new Set(["location", ...readNames]));
    const spot = this.#spot(sku, options);
    const at = timeOf("time", time);
    return (
      (await this.#at(spot.sku).alone(options, (connection, store, book, how) =>
        store.lists.levelAt(connection, book, spot, at, how),
      )) ?? 0
    );
  }

  /** What came from where, to be compared with what a marketplace or a till says. */
  async byChannel(
    options: { readonly sku?: string; readonly location?: string } & Span & ReadOptions = {},
  ): Promise<ChannelSum<W>[]> {
    checkNames("byChannel", options, channelNames);
    const filter = filterOf(options);
    const found = await Promise.all(
      this.#those(options.sku).map((batcher) =>
        batcher.alone(
          options,
          (connection, store, book, how) => store.lists.channels(connection, book, filter, how),
          longMs,
        ),
      ),
    );
    const sums = merged(
      found,
      ({ source }) => source,
      (a, b) => ({
        source: a.source,
        movements: a.movements + b.movements,
        increased: a.increased + b.increased,
        decreased: a.decreased + b.decreased,
      }),
    );
    return sums.map(({ source, movements, increased, decreased }) => ({
      source: source as SourceOf<W>,
      movements,
      increased,
      decreased,
      net: increased - decreased,
    }));
  }

  /** Whether movements add up to what is on hand, and open reservations to what is reserved. */
  async reconcile(options: ReconcileOptions = {}): Promise<Reconciliation> {
    checkNames("reconcile", options, new Set(["sku", "location", "repair", "trust", "by", "note"]));
    const { sku, location, repair = false, by } = options;
    const trust = checkTrust("reconcile", options.trust);
    for (const [name, value] of Object.entries({ sku, location, by, note: options.note }))
      optionalText("reconcile", name, value);
    const findings: Finding[] = [];
    let [levels, movements] = [0, 0];
    for (const batcher of this.#those(sku))
      for await (const each of factsOf(batcher, sku, location)) {
        const wrong = explain(each);
        levels++;
        movements += each.movements;
        findings.push(...wrong);
        if (!repair || wrong.length === 0) continue;
        const note = options.note ?? wrong.map(({ text }) => text).join("; ");
        const mending = { id: ownId(), trust, about: { ...aboutOf({}, "MANUAL"), by, note } };
        await batcher.alone(
          undefined,
          (connection, store, book, how) => store.upkeep.repair(connection, book, each, mending, how),
          longMs,
        );
      }
    return {
      ok: findings.length === 0,
      levels,
      movements,
      findings,
      repaired: repair && findings.length > 0,
    };
  }

  /** Takes over what is in your own table (`levels`): a movement of what is there now, each. Resolves to how many. */
  async adopt(): Promise<number> {
    if (!this.#book.table) throw new UsageError("adopt: there is no table of yours, see `levels`");
    const counts = await Promise.all(
      this.#everywhere.map((batcher) =>
        batcher.alone(
          undefined,
          (connection, store, book, how) => ownTables(store).adopt(connection, book, how),
          longMs,
        ),
      ),
    );
    return counts.reduce((a, b) => a + b, 0);
  }

  /** SQL, for a migration of yours: a trigger that refuses changes of your column that are not movements. */
  guardSql(): readonly string[] {
    if (!this.#book.table) throw new UsageError("guardSql: there is no table of yours, see `levels`");
    const [batcher] = this.#everywhere as readonly [StockBatcher];
    return ownTables(batcher.store).guard(this.#book);
  }

  async #move(
    kind: "apply" | "adjust" | "transfer",
    lines: readonly OrderLine[],
    options: MovementOptions<W>,
    given = givenOr(options.externalId),
  ): Promise<Applied> {
    const id = idOf("externalId", given, options.externalId);
    const order: StockOrder = { kind, id, lines, about: aboutOf(options, "MANUAL"), ttlMs: undefined };
    const named = options.externalId !== undefined;
    const verdict = await this.#together(kind, lines).order({ ...order, given, named }, options);
    this.#refuse(order, verdict);
    return applied(given, verdict);
  }

  async #follow(
    kind: "commit" | "release" | "return",
    id: string,
    of: string,
    about: MovementAbout,
    lines: readonly OrderLine[] | undefined,
    options: CallOptions & Where & { readonly externalId?: string },
    given = id,
  ): Promise<OrderVerdict> {
    options.signal?.throwIfAborted();
    const verdict = await this.#whereabouts(kind, lines, options).alone(
      options,
      (connection, store, book, how) => store.follow(connection, book, { kind, id, of, about, lines }, how),
      undefined,
      {
        names: [`stock ${this.name}: ${kind} of ${of}`],
        id: given,
        // Without lines the id follows from what it is about.
        named: lines === undefined || options.externalId !== undefined,
        locks: true,
      },
    );
    const { outcome } = verdict;
    if (outcome === "unknown")
      throw new StockError(
        "HF_STOCK_UNKNOWN",
        of,
        kind === "return"
          ? `Nothing was sold under the id ${of}${lines ? ", or not these" : ""}: there is nothing to return.`
          : `There is no reservation ${of}.`,
      );
    if (outcome === "too much") {
      const left = verdict.lines
        .filter(({ quantity, room = 0 }) => quantity > room || room === 0)
        .map(({ sku, location, room = 0 }) => `${room} of ${sku} at ${location}`);
      throw new StockError(
        "HF_STOCK_TOO_MUCH",
        of,
        left.length > 0
          ? `Of what was sold under the id ${of}, only ${left.join(" and ")} can still come back.`
          : `All that was sold under the id ${of} has come back already.`,
      );
    }
    this.#refuse({ kind, id, of, lines: verdict.lines }, verdict);
    return verdict;
  }

  /** An id does not say where it is: the SKU of a line does. */
  #whereabouts(kind: string, lines: readonly OrderLine[] | undefined, { sku }: Where): StockBatcher {
    if (sku !== undefined) checkText("sku", sku);
    const known = [...(sku === undefined ? [] : [{ sku, location: this.#location }]), ...(lines ?? [])];
    if (known.length > 0) return this.#together(kind, known);
    return this.#batcher(
      this.#instances.only(
        `${kind}: of several databases, where is it? Name any SKU of it: stock.${kind}(id, { sku })`,
      ),
    );
  }

  #refuse(
    order: { kind: string; id: string; of?: string; lines: readonly OrderLine[] },
    { outcome, lines, state }: OrderVerdict,
  ): void {
    if (outcome === "unknown level")
      throw new UnknownSkuError(
        lines.filter(({ room }) => room === undefined).map(({ sku, location }) => ({ sku, location })),
      );
    if (outcome === "conflict") throw new StockConflictError(order.id);
    if (outcome === "short")
      throw new InsufficientStockError(
        lines.flatMap((line) => {
          const { quantity, room = 0 } = line;
          return quantity < 0 && room + quantity < 0 ? [shortage(line, -quantity, room)] : [];
        }),
      );
    if (outcome === "ended")
      throw new StockError(
        "HF_STOCK_RESERVATION_ENDED",
        order.of ?? order.id,
        state === "expired"
          ? `The reservation ${order.of ?? order.id} ran out: others may have what it kept. Reserve again, or take it with apply.`
          : `The reservation ${order.of ?? order.id} was ${state} already.`,
      );
  }

  async #levels(
    skus: readonly string[] | undefined,
    location: string | undefined,
    options: ReadOptions,
    page: { readonly most: number | undefined; readonly after: Spot | undefined } = {
      most: undefined,
      after: undefined,
    },
  ): Promise<CurrentLevel[]> {
    const found = await Promise.all(
      this.#spread(skus).map(({ batcher, of }) =>
        batcher.alone(options, (connection, store, book, how) =>
          store.lists.levels(connection, book, { skus: of, location, ...page }, how),
        ),
      ),
    );
    const levels = merged(found, spotName);
    return (page.most === undefined ? levels : levels.slice(0, page.most)).map((level) => ({
      ...level,
      available: level.onHand - level.reserved - level.min,
    }));
  }

  /** Who is to be asked for which of these SKUs; undefined: for all that it has. */
  #spread(
    skus: readonly string[] | undefined,
  ): { batcher: StockBatcher; of: readonly string[] | undefined }[] {
    if (!skus) return this.#everywhere.map((batcher) => ({ batcher, of: undefined }));
    const found = new Map<StockBatcher, string[]>(
      this.#instances.sharded ? [] : [[this.#everywhere[0] as StockBatcher, []]],
    );
    for (const sku of skus) {
      const batcher = this.#at(sku);
      const of = found.get(batcher);
      if (of) of.push(sku);
      else found.set(batcher, [sku]);
    }
    return [...found].map(([batcher, of]) => ({ batcher, of }));
  }

  #spot(sku: string, { location = this.#location }: AtLocation) {
    checkText("sku", sku);
    checkText("location", location);
    return { sku, location };
  }

  #lines(call: string, lines: readonly Line[], check: (quantity: number) => number): OrderLine[] {
    if (!Array.isArray(lines) || lines.length === 0 || lines.length > 10_000)
      throw new UsageError(`${call}: a list of at least one line, { sku, quantity }, and of up to 10,000`);
    const summed = sumLines(
      lines.map((line: Line) => ({ ...this.#spot(line.sku, line), quantity: check(line.quantity) })),
    );
    for (const { quantity } of summed) whole(quantity);
    return summed;
  }
}

async function* factsOf(
  batcher: StockBatcher,
  sku: string | undefined,
  location: string | undefined,
): AsyncGenerator<Facts> {
  const most = 500;
  for (let after: Facts | undefined; ;) {
    const facts = await batcher.alone(
      undefined,
      (connection, store, book, how) =>
        store.upkeep.facts(connection, book, { sku, location, after, most }, how),
      longMs,
    );
    yield* facts;
    after = facts.at(-1);
    if (facts.length < most) return;
  }
}

function applied(externalId: string, { outcome, at, lines }: OrderVerdict): Applied {
  return {
    externalId,
    replayed: outcome === "before",
    at: new Date(at),
    lines: lines.map(({ sku, location, quantity, onHand, version }) => ({
      sku,
      location,
      quantity,
      onHand,
      version,
    })),
  };
}

function aboutOf(
  options: {
    readonly source?: string;
    readonly reference?: { readonly type: string; readonly id: string };
    readonly by?: string;
    readonly note?: string;
  },
  otherwise: string,
): MovementAbout {
  const { source = otherwise, reference, by, note } = options;
  for (const [name, value] of Object.entries({ source, by, note, type: reference?.type, id: reference?.id }))
    optionalText("stock", name, value);
  if (reference && (!reference.id || !reference.type || Buffer.byteLength(reference.id) > longestName))
    throw new UsageError(`stock: a reference has a type and an id, of up to ${longestName} bytes`);
  return { source, referenceType: reference?.type, referenceId: reference?.id, by, note };
}

function filterOf(options: { readonly sku?: string; readonly location?: string } & Span): MovementFilter {
  const { sku, location, from, to } = options;
  optionalText("stock", "sku", sku);
  optionalText("stock", "location", location);
  return {
    sku,
    location,
    source: undefined,
    referenceType: undefined,
    referenceId: undefined,
    from: from === undefined ? undefined : timeOf("from", from),
    to: to === undefined ? undefined : timeOf("to", to),
  };
}

function timeOf(name: string, time: Date): number {
  return checkMoment("stock", name, time);
}

function whole(quantity: number): number {
  return checkWhole("stock", "a quantity", quantity);
}

function signedQuantity(quantity: number): number {
  if (whole(quantity) === 0) throw new UsageError("stock: a quantity of 0 moves nothing");
  return quantity;
}

function above(quantity: number): number {
  return checkWhole("stock", "a quantity", quantity, 1);
}

function checkText(name: string, value: string): void {
  checkAnyText("stock", name, value, { most: longestName, code: "HF_BAD_KEY" });
}

/** Ids that follow from others. */
const ownPrefixes = ["commit:", "release:", "return:"];

function givenOr(id: string | undefined): string {
  return id === undefined ? ownId() : id;
}

/** As it is kept: ours, if the caller named none. */
function idOf(name: string, given: string, named: string | undefined): string {
  return named === undefined ? given : checkId("stock", name, given, ownPrefixes);
}

/** Made with the first id: workerd gives nothing random while modules are loaded. */
let ours: string | undefined;
let made = 0;
/** In the order of time, so that the index on them grows at one end. */
function ownId(): string {
  ours ??= randomBytes(9).toString("base64url");
  return `${Date.now().toString(36)}-${ours}-${(++made).toString(36)}`;
}

function ownTables(store: StockStore<Connection>): StockOwnTables<Connection> {
  if (!store.ownTables)
    throw new UnsupportedError("stock: this engine keeps what is on hand itself: leave `levels` out");
  return store.ownTables;
}

function ownTable(levels: OwnLevels, only: string): OwnTable {
  checkNames("stock: levels", levels, ownNames);
  const table = typeof levels.table === "string" ? [levels.table] : levels.table;
  const { sku, onHand, location, minLevel } = levels;
  for (const name of [...table, sku, onHand, location ?? "x", minLevel ?? "x"])
    checkAnyText("stock", "the name of a table or column", name);
  return { table, sku, onHand, location, only, minLevel };
}
