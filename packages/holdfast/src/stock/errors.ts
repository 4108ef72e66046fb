import { HoldfastError, some } from "../seam/errors.ts";
import type { Spot } from "./store.ts";
import type { Shortage } from "./domain.ts";

/** Of at least one line there is not enough. Nothing was taken. */
export class InsufficientStockError extends HoldfastError {
  /** Those that fell short, and by how much. */
  readonly lines: readonly Shortage[];

  constructor(lines: readonly Shortage[]) {
    const text = some(
      lines.map(
        ({ sku, location, requested, available, short }) =>
          `${sku} at ${location}: ${requested} wanted, ${available} available, ${short} short`,
      ),
      "; ",
    );
    super("HF_STOCK_INSUFFICIENT", `Not enough in stock, so nothing was taken: ${text}.`);
    this.lines = lines;
  }
}

/** There is no such SKU at that location: nobody has ever put anything there. Nothing was taken. */
export class UnknownSkuError extends HoldfastError {
  readonly lines: readonly Spot[];

  constructor(lines: readonly Spot[]) {
    const text = some(lines.map(({ sku, location }) => `${sku} at ${location}`));
    super(
      "HF_STOCK_UNKNOWN_SKU",
      `There is no stock of ${text}, and never was any: look at the spelling, or call increase or adjustTo first.`,
    );
    this.lines = lines;
  }
}

/** The id was used for something else. The same content again would have been answered again. */
export class StockConflictError extends HoldfastError {
  readonly id: string;

  constructor(id: string) {
    super(
      "HF_STOCK_ID_CONFLICT",
      `The id ${id} was used before with other content. One id stands for one change: give another change another id.`,
    );
    this.id = id;
  }
}

/** What a call is about is not there, is over, or is less than that. */
export class StockError extends HoldfastError {
  /** Of the sale or reservation. */
  readonly id: string;

  constructor(
    code: "HF_STOCK_UNKNOWN" | "HF_STOCK_TOO_MUCH" | "HF_STOCK_RESERVATION_ENDED",
    id: string,
    text: string,
  ) {
    super(code, text);
    this.id = id;
  }
}
