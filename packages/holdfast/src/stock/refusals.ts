/** What was not done, and why, in words. */
import { shortage } from "./domain.ts";
import { InsufficientStockError, StockConflictError, StockError, UnknownSkuError } from "./errors.ts";
import type { OrderVerdict, Sequel } from "./store.ts";

/** `of`: the reservation or sale that it is about, if it is about one. */
export function refuse(
  { id, of = id }: { readonly id: string; readonly of?: string },
  { outcome, lines, state }: OrderVerdict,
): void {
  if (outcome === "unknown level")
    throw new UnknownSkuError(
      lines.filter(({ room }) => room === undefined).map(({ sku, location }) => ({ sku, location })),
    );
  if (outcome === "conflict") throw new StockConflictError(id);
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
      of,
      state === "expired"
        ? `The reservation ${of} ran out: others may have what it kept. Reserve again, or take it with apply.`
        : `The reservation ${of} was ${state} already.`,
    );
}

export function refuseSequel(sequel: Sequel, verdict: OrderVerdict): void {
  const { kind, of, lines } = sequel;
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
  refuse(sequel, verdict);
}
