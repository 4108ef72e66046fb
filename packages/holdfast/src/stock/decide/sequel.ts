/** Which lines a commit, a release or a return is about: pure, as `decide.ts`, which decides about them. */
import type { StockCall } from "./index.ts";
import { compareSpots } from "../domain.ts";
import type { ReservationRow } from "./rows.ts";
import type { StockOutcome, Sequel, Spot } from "../store.ts";

/** Its lines as they were when it was made; what is not said again is as it was then. Undefined: there is none. */
export function ofReservation(
  sequel: Sequel,
  row: ReservationRow | undefined,
  spots: ReadonlyMap<number, Spot>,
): StockCall | undefined {
  if (!row) return undefined;
  const { kind, id, of, about } = sequel;
  const lines = row.levels.flatMap((level, i) => {
    const spot = spots.get(level);
    return spot ? [{ sku: spot.sku, location: spot.location, quantity: row.quantities[i] }] : [];
  });
  if (lines.length === 0) return undefined;
  const reference = about.referenceId === undefined ? row : undefined;
  return {
    kind,
    id,
    of,
    lines,
    about: {
      source: about.source || row.source,
      referenceType: reference ? reference.reference_type : about.referenceType,
      referenceId: reference ? reference.reference_id : about.referenceId,
      by: about.by ?? row.user_id,
      note: about.note ?? row.note,
    },
    ttlMs: undefined,
  };
}

/** A line of a sale: what was taken, and what came back of it under other ids than the return's own. */
export interface Sold extends Spot {
  readonly sold: number;
  readonly back: number;
}

/** The lines that are named, or all of which something is left. */
export function ofSale(sequel: Sequel, sales: readonly Sold[]): StockCall | StockOutcome {
  const { kind, id, of, about, lines } = sequel;
  const call = { kind, id, of, about, ttlMs: undefined };
  if (lines) return { ...call, lines };
  if (sales.length === 0) return "unknown";
  const left = sales.filter(({ sold, back }) => back < sold).toSorted(compareSpots);
  if (left.length === 0) return "too much";
  return { ...call, lines: left.map(({ sku, location }) => ({ sku, location, quantity: undefined })) };
}
