/** What callers of stock give, checked. */
import { callNames } from "../batch/calls.ts";
import { checkNames } from "../input/options.ts";
import {
  checkMoment,
  checkText as checkAnyText,
  checkWhole,
  longestName,
  optionalText,
} from "../input/values.ts";
import { UsageError } from "../seam/errors.ts";
import type { MovementAbout, MovementFilter, OwnTable } from "./store.ts";
import type { OwnLevels, Span } from "./types.ts";

const ownNames = new Set(["table", "sku", "onHand", "location", "minLevel"]);
/** Of calls that only look. */
export const readNames = ["tx", "separate"];
export const aboutNames = [...callNames, "source", "reference", "by", "note"];
export const spotNames = new Set(["location", ...readNames]);

export function checkText(name: string, value: string): void {
  checkAnyText("stock", name, value, { most: longestName, code: "HF_BAD_KEY" });
}

export function whole(quantity: number): number {
  return checkWhole("stock", "a quantity", quantity);
}

export function signedQuantity(quantity: number): number {
  if (whole(quantity) === 0) throw new UsageError("stock: a quantity of 0 moves nothing");
  return quantity;
}

export function above(quantity: number): number {
  return checkWhole("stock", "a quantity", quantity, 1);
}

export function timeOf(name: string, time: Date): number {
  return checkMoment("stock", name, time);
}

/** What a movement is written down with. */
export interface AboutOptions {
  readonly source?: string;
  readonly reference?: { readonly type: string; readonly id: string };
  readonly by?: string;
  readonly note?: string;
}

export function aboutOf(options: AboutOptions, otherwise: string): MovementAbout {
  const { source = otherwise, reference, by, note } = options;
  for (const [name, value] of Object.entries({ source, by, note, type: reference?.type, id: reference?.id }))
    optionalText("stock", name, value);
  if (reference && (!reference.id || !reference.type || Buffer.byteLength(reference.id) > longestName))
    throw new UsageError(`stock: a reference has a type and an id, of up to ${longestName} bytes`);
  return { source, referenceType: reference?.type, referenceId: reference?.id, by, note };
}

export function filterOf(
  options: { readonly sku?: string; readonly location?: string } & Span,
): MovementFilter {
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

/** `only`: where its rows are, if it has no column for that. */
export function ownTable(levels: OwnLevels, only: string): OwnTable {
  checkNames("stock: levels", levels, ownNames);
  const table = typeof levels.table === "string" ? [levels.table] : levels.table;
  const { sku, onHand, location, minLevel } = levels;
  for (const name of [...table, sku, onHand, location ?? "x", minLevel ?? "x"])
    checkAnyText("stock", "the name of a table or column", name);
  return { table, sku, onHand, location, only, minLevel };
}
