/** What movements say: which there were, what was on hand at a time, and what came from where. */
import { checkNames } from "../input/options.ts";
import { checkRows, optionalText } from "../input/values.ts";
import { UsageError } from "../seam/errors.ts";
import { merged } from "../shards/merged.ts";
import { type StockBatcher, longMs } from "./batcher.ts";
import { filterOf, readNames, spotNames, timeOf } from "./checks.ts";
import type { Places } from "./places.ts";
import type { StockMovement } from "./store.ts";
import type {
  AtLocation,
  ChannelOptions,
  ChannelSum,
  HistoryOptions,
  Movement,
  ReadOptions,
  ReferenceOf,
  SourceOf,
  StockWords,
} from "./types.ts";

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

export class History<W extends StockWords> {
  readonly #places: Places;

  constructor(places: Places) {
    this.#places = places;
  }

  async page(
    options: HistoryOptions<W>,
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
    const batchers = this.#places.those(options.sku);
    if (batchers.length > 1)
      throw new UsageError(
        "history: on several databases pages are of one SKU each: name it, or ask each shard, stock(shards.all()[i])",
      );
    const [batcher] = batchers as [StockBatcher];
    const found = await batcher.alone(options, (connection, store, book, how) =>
      store.lists.history(connection, book, filter, { after, most: limit }, how),
    );
    return {
      movements: found.map((each) => shown<W>(each)),
      next: found.length === limit ? found.at(-1)?.cursor : undefined,
    };
  }

  async levelAt(sku: string, time: Date, options: AtLocation & ReadOptions): Promise<number> {
    checkNames("levelAt", options, spotNames);
    const spot = this.#places.spot(sku, options);
    const at = timeOf("time", time);
    return (
      (await this.#places
        .at(spot.sku)
        .alone(options, (connection, store, book, how) =>
          store.lists.levelAt(connection, book, spot, at, how),
        )) ?? 0
    );
  }

  async byChannel(options: ChannelOptions): Promise<ChannelSum<W>[]> {
    checkNames("byChannel", options, channelNames);
    const filter = filterOf(options);
    const found = await Promise.all(
      this.#places
        .those(options.sku)
        .map((batcher) =>
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
}

function shown<W extends StockWords>(each: StockMovement): Movement<W> {
  return {
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
  };
}
