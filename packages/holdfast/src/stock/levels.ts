/** What there is now, and the least that has to stay. */
import { checkNames } from "../input/options.ts";
import { checkRows, optionalText } from "../input/values.ts";
import { UsageError } from "../seam/errors.ts";
import { merged } from "../shards/merged.ts";
import { above, checkText, readNames, spotNames, whole } from "./checks.ts";
import { type Shortage, shortage, splitOrder, spotName } from "./domain.ts";
import { InsufficientStockError, UnknownSkuError } from "./errors.ts";
import type { Places } from "./places.ts";
import type { OrderLine, Spot } from "./store.ts";
import type { AtLocation, CurrentLevel, LevelsOptions, ReadOptions } from "./types.ts";

const levelsNames = new Set(["skus", "location", "limit", "after", ...readNames]);
const splitNames = new Set(["locations", ...readNames]);

export class Levels {
  readonly #places: Places;

  constructor(places: Places) {
    this.#places = places;
  }

  async one(sku: string, options: AtLocation & ReadOptions): Promise<CurrentLevel> {
    checkNames("level", options, spotNames);
    const spot = this.#places.spot(sku, options);
    const [found] = await this.#read([spot.sku], spot.location, options);
    if (!found) throw new UnknownSkuError([spot]);
    return found;
  }

  some(options: LevelsOptions): Promise<CurrentLevel[]> {
    checkNames("levels", options, levelsNames);
    const { skus, location, limit, after } = options;
    if (skus !== undefined && !Array.isArray(skus))
      throw new UsageError("levels: skus must be a list of texts");
    for (const sku of skus ?? []) checkText("sku", sku);
    optionalText("levels", "location", location);
    if (limit !== undefined) checkRows("levels", "limit", limit);
    const from = after && this.#places.spot(after.sku, after);
    return this.#read(skus, location, options, { most: limit, after: from });
  }

  async setMinimum(sku: string, min: number, options: AtLocation & ReadOptions): Promise<void> {
    checkNames("setMinimum", options, spotNames);
    const spot = this.#places.spot(sku, options);
    whole(min);
    const { name, table } = this.#places.book;
    if (table?.minLevel !== undefined)
      throw new UsageError(
        `setMinimum: the minimum is kept in your column ${table.minLevel}: change it there`,
      );
    const { outcome, lines } = await this.#places
      .at(spot.sku)
      .alone(
        options,
        (connection, store, book, how) => store.minimum(connection, book, spot, min, how),
        undefined,
        { names: [`stock ${name}:${spot.sku}:${spot.location}`], locks: true },
      );
    if (outcome === "short") throw new InsufficientStockError([shortage(spot, min, lines[0]?.room ?? 0)]);
  }

  async split(
    wanted: readonly { readonly sku: string; readonly quantity: number }[],
    options: { readonly locations: readonly string[] } & ReadOptions,
  ): Promise<{ readonly lines: readonly OrderLine[]; readonly short: readonly Shortage[] }> {
    checkNames("split", options, splitNames);
    const { locations } = options;
    if (!Array.isArray(locations) || !Array.isArray(wanted))
      throw new UsageError("split: a list of { sku, quantity }, and `locations`, a list of texts");
    for (const location of locations as readonly string[]) checkText("location", location);
    for (const { sku, quantity } of wanted) {
      checkText("sku", sku);
      above(quantity);
    }
    const levels = await this.#read([...new Set(wanted.map(({ sku }) => sku))], undefined, options);
    return splitOrder(wanted, levels, locations);
  }

  async #read(
    skus: readonly string[] | undefined,
    location: string | undefined,
    options: ReadOptions,
    page: { readonly most: number | undefined; readonly after: Spot | undefined } = {
      most: undefined,
      after: undefined,
    },
  ): Promise<CurrentLevel[]> {
    const found = await Promise.all(
      this.#places
        .spread(skus)
        .map(({ batcher, of }) =>
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
}
