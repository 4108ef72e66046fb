/** Where stock is: in which database a SKU has its levels, and at which location what does not say. */
import { UsageError } from "../seam/errors.ts";
import type { Instances } from "../shards/shards.ts";
import { type StockBatcher, stockBatcherOf } from "./batcher.ts";
import { checkText, whole } from "./checks.ts";
import { sumLines } from "./domain.ts";
import type { OrderLine, Spot, StockBook } from "./store.ts";
import type { AtLocation, Line, Where } from "./types.ts";

export class Places {
  readonly book: StockBook;
  /** Of lines that do not say. */
  readonly location: string;
  readonly #instances: Instances;
  readonly #batchers = new Map<object, StockBatcher>();

  constructor(instances: Instances, book: StockBook, location: string) {
    this.#instances = instances;
    this.book = book;
    this.location = location;
  }

  /** Where a SKU is. */
  at(sku: string): StockBatcher {
    return this.#batcher(this.#instances.at(this.book.name, sku));
  }

  /** Where all of them are. */
  together(call: string, lines: readonly Spot[]): StockBatcher {
    const addresses = lines.map(({ sku }) => [this.book.name, sku] as const);
    return this.#batcher(this.#instances.together(call, addresses));
  }

  get everywhere(): readonly StockBatcher[] {
    return this.#instances.all.map((instance) => this.#batcher(instance));
  }

  /** Of one SKU if it is named, else of all shards. */
  those(sku: string | undefined): readonly StockBatcher[] {
    return sku === undefined ? this.everywhere : [this.at(sku)];
  }

  /** Who is to be asked for which of these SKUs; undefined: for all that it has. */
  spread(
    skus: readonly string[] | undefined,
  ): { readonly batcher: StockBatcher; readonly of: readonly string[] | undefined }[] {
    if (!skus) return this.everywhere.map((batcher) => ({ batcher, of: undefined }));
    const found = new Map<StockBatcher, string[]>(
      this.#instances.sharded ? [] : [[this.everywhere[0] as StockBatcher, []]],
    );
    for (const sku of skus) {
      const batcher = this.at(sku);
      const of = found.get(batcher);
      if (of) of.push(sku);
      else found.set(batcher, [sku]);
    }
    return [...found].map(([batcher, of]) => ({ batcher, of }));
  }

  /** An id does not say where it is: the SKU of a line does. */
  whereabouts(kind: string, lines: readonly Spot[] | undefined, { sku }: Where): StockBatcher {
    if (sku !== undefined) checkText("sku", sku);
    const known = [...(sku === undefined ? [] : [{ sku, location: this.location }]), ...(lines ?? [])];
    if (known.length > 0) return this.together(kind, known);
    return this.#batcher(
      this.#instances.only(
        `${kind}: of several databases, where is it? Name any SKU of it: stock.${kind}(id, { sku })`,
      ),
    );
  }

  spot(sku: string, { location = this.location }: AtLocation): Spot {
    checkText("sku", sku);
    checkText("location", location);
    return { sku, location };
  }

  /** Each spot once, in order. */
  lines(call: string, lines: readonly Line[], check: (quantity: number) => number): OrderLine[] {
    if (!Array.isArray(lines) || lines.length === 0 || lines.length > 10_000)
      throw new UsageError(`${call}: a list of at least one line, { sku, quantity }, and of up to 10,000`);
    const summed = sumLines(
      lines.map((line: Line) => ({ ...this.spot(line.sku, line), quantity: check(line.quantity) })),
    );
    for (const { quantity } of summed) whole(quantity);
    return summed;
  }

  #batcher(instance: object): StockBatcher {
    let batcher = this.#batchers.get(instance);
    if (!batcher) this.#batchers.set(instance, (batcher = stockBatcherOf(instance, this.book)));
    return batcher;
  }
}
