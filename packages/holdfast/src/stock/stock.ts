/** Stock that changes by movements only: `stock(hf).apply([{ sku: "CAP", quantity: -2 }], { source: "ORDER" })`. */
import { checkNames } from "../input/options.ts";
import { checkReference } from "../input/values.ts";
import { UsageError } from "../seam/errors.ts";
import { instancesOf } from "../shards/shards.ts";
import type { Transactor } from "../transaction/transaction.ts";
import { above, aboutNames, aboutOf, checkText, ownTable, signedQuantity, whole } from "./checks.ts";
import { type Shortage, sumLines } from "./domain.ts";
import { History } from "./history.ts";
import { givenOr, idOf } from "./ids.ts";
import { Levels } from "./levels.ts";
import { applied, follow, move } from "./orders.ts";
import { Places } from "./places.ts";
import { Reservations } from "./reservations.ts";
import type { OrderLine } from "./store.ts";
import type {
  Applied,
  AtLocation,
  CallOptions,
  ChannelOptions,
  ChannelSum,
  CurrentLevel,
  HistoryOptions,
  LevelsOptions,
  Line,
  Movement,
  MovementOptions,
  ReadOptions,
  ReconcileOptions,
  Reconciliation,
  ReferenceOf,
  Reservation,
  ReserveOptions,
  ReturnOptions,
  StockOptions,
  StockWords,
  TransferOptions,
  Where,
} from "./types.ts";
import { Upkeep } from "./upkeep.ts";

const optionNames = new Set(["name", "location", "levels"]);
const movementNames = new Set([...aboutNames, "externalId"]);
const atNames = new Set([...movementNames, "location"]);
const transferNames = new Set([...movementNames, "from", "to"]);
const returnNames = new Set([...movementNames, "lines", "sku"]);

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
  readonly #places: Places;
  readonly #reservations: Reservations<W>;
  readonly #levels: Levels;
  readonly #history: History<W>;
  readonly #upkeep: Upkeep;

  constructor(hf: unknown, options: StockOptions = {}) {
    checkNames("stock", options, optionNames);
    const { name = "stock", location = "main", levels } = options;
    checkText("name", name);
    checkText("location", location);
    this.name = name;
    const book = { name, table: levels && ownTable(levels, location) };
    this.#places = new Places(instancesOf(hf, "stock"), book, location);
    this.#reservations = new Reservations(this.#places);
    this.#levels = new Levels(this.#places);
    this.#history = new History(this.#places);
    this.#upkeep = new Upkeep(this.#places);
  }

  /** Takes and adds, all lines or none, in one round trip; or throws `InsufficientStockError`. */
  apply(lines: readonly Line[], options: MovementOptions<W> = {}): Promise<Applied> {
    checkNames("apply", options, movementNames);
    return move(this.#places, "apply", this.#places.lines("apply", lines, signedQuantity), options);
  }

  decrease(sku: string, quantity: number, options: MovementOptions<W> & AtLocation = {}): Promise<Applied> {
    checkNames("decrease", options, atNames);
    return move(
      this.#places,
      "apply",
      [{ ...this.#places.spot(sku, options), quantity: -above(quantity) }],
      options,
    );
  }

  /** Makes the level if it is the first of that SKU at that location. */
  increase(sku: string, quantity: number, options: MovementOptions<W> & AtLocation = {}): Promise<Applied> {
    checkNames("increase", options, atNames);
    return move(
      this.#places,
      "apply",
      [{ ...this.#places.spot(sku, options), quantity: above(quantity) }],
      options,
    );
  }

  /** What was counted: a movement of the difference to what was on hand. */
  adjustTo(sku: string, count: number, options: MovementOptions<W> & AtLocation = {}): Promise<Applied> {
    checkNames("adjustTo", options, atNames);
    return move(
      this.#places,
      "adjust",
      [{ ...this.#places.spot(sku, options), quantity: whole(count) }],
      options,
    );
  }

  /** From one location to another: two movements, of one reference. */
  transfer(sku: string, quantity: number, options: TransferOptions<W>): Promise<Applied> {
    checkNames("transfer", options, transferNames);
    const { from, to } = options;
    if (from === to) throw new UsageError("transfer: from and to are the same location");
    const given = givenOr(options.externalId);
    const id = idOf("externalId", given, options.externalId);
    const lines = sumLines([
      { ...this.#places.spot(sku, { location: from }), quantity: -above(quantity) },
      { ...this.#places.spot(sku, { location: to }), quantity: above(quantity) },
    ]);
    const reference = options.reference ?? { type: "TRANSFER" as ReferenceOf<W>, id };
    return move(this.#places, "transfer", lines, { ...options, reference }, given);
  }

  /** Of what was sold under this id (that of `apply` or `decrease`, or `commit:<reservation>`): never more than that. */
  async return(sale: string, options: ReturnOptions<W> = {}): Promise<Applied> {
    checkNames("return", options, returnNames);
    const of = checkReference("return", "sale", sale, ["commit:"]);
    const lines = options.lines && this.#places.lines("return", options.lines, above);
    const given = !lines && options.externalId === undefined ? `return:${sale}` : givenOr(options.externalId);
    const id =
      options.externalId === undefined && !lines
        ? `return:${of}`
        : idOf("externalId", given, options.externalId);
    const sequel = { kind: "return", id, of, about: aboutOf(options, "RETURN"), lines } as const;
    const verdict = await follow(this.#places, sequel, options, given);
    return applied(given, verdict);
  }

  /** Keeps some apart for a while: nobody else can take or reserve it until then. */
  reserve(lines: readonly Line[], options: ReserveOptions<W> = {}): Promise<Reservation<W>> {
    return this.#reservations.reserve(lines, options);
  }

  /** Takes what was reserved, also in another process than the one that did. */
  commit(
    reservation: string,
    options: Omit<MovementOptions<W>, "externalId"> & Where = {},
  ): Promise<Applied> {
    return this.#reservations.commit(reservation, options);
  }

  release(reservation: string, options: CallOptions & Where = {}): Promise<void> {
    return this.#reservations.release(reservation, options);
  }

  level(sku: string, options: AtLocation & ReadOptions = {}): Promise<CurrentLevel> {
    return this.#levels.one(sku, options);
  }

  /** Of these SKUs, or of all, at one location or at all of them. SKUs that are not known are not among them. */
  levels(options: LevelsOptions = {}): Promise<CurrentLevel[]> {
    return this.#levels.some(options);
  }

  /** Never below this. Negative: so many may be sold that are not there yet. */
  setMinimum(sku: string, min: number, options: AtLocation & ReadOptions = {}): Promise<void> {
    return this.#levels.setMinimum(sku, min, options);
  }

  /** Spreads an order over locations, by what they have now: lines for `apply` or `reserve`, which decide. */
  split(
    wanted: readonly { readonly sku: string; readonly quantity: number }[],
    options: { readonly locations: readonly string[] } & ReadOptions,
  ): Promise<{ readonly lines: readonly OrderLine[]; readonly short: readonly Shortage[] }> {
    return this.#levels.split(wanted, options);
  }

  /** Movements, newest first: a page, and where the next one begins. */
  history(
    options: HistoryOptions<W> = {},
  ): Promise<{ readonly movements: readonly Movement<W>[]; readonly next: string | undefined }> {
    return this.#history.page(options);
  }

  /** What was on hand at that time, as the movements say; 0 before the first one. */
  levelAt(sku: string, time: Date, options: AtLocation & ReadOptions = {}): Promise<number> {
    return this.#history.levelAt(sku, time, options);
  }

  /** What came from where, to be compared with what a marketplace or a till says. */
  byChannel(options: ChannelOptions = {}): Promise<ChannelSum<W>[]> {
    return this.#history.byChannel(options);
  }

  /** Whether movements add up to what is on hand, and open reservations to what is reserved. */
  reconcile(options: ReconcileOptions = {}): Promise<Reconciliation> {
    return this.#upkeep.reconcile(options);
  }

  /** Takes over what is in your own table (`levels`): a movement of what is there now, each. Resolves to how many. */
  adopt(): Promise<number> {
    return this.#upkeep.adopt();
  }

  /** SQL, for a migration of yours: a trigger that refuses changes of your column that are not movements. */
  guardSql(): readonly string[] {
    return this.#upkeep.guardSql();
  }
}
