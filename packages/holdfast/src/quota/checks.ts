/** What callers of quotas give, checked. */
import { shown } from "../seam/shown.ts";
import { randomUUID } from "node:crypto";
import { callNames } from "../batch/calls.ts";
import { checkId, checkJson, checkWhole, optionalText, subjectText } from "../input/values.ts";
import { UsageError } from "../seam/errors.ts";
import { ownPrefixes } from "./decide/own-id.ts";
import type { EntryOptions, Subject } from "./types.ts";

const entryNames = ["id", ...callNames, "by", "source", "reference", "metadata"];
export const readNames = ["tx", "separate"];

/** Names of options, by who takes them. */
export const readOptions = new Set(readNames);
export const entryOptions = new Set(entryNames);
export const holdOptions = new Set([...entryNames, "holdFor"]);
export const grantOptions = new Set([...entryNames, "expiresAt", "priority"]);
export const refundOptions = new Set([...entryNames, "amount"]);
/** Of what has an id that follows from what it is about. */
export const unnamedOptions = new Set(entryNames.filter((each) => each !== "id"));

export function checkAmount(amount: number, least = 1): void {
  checkWhole("quota", "an amount", amount, least);
}

export function checkLimit(limit: number): void {
  if (limit !== Infinity && (!Number.isSafeInteger(limit) || limit < 0))
    throw new UsageError(`quota: a limit must be a whole number from 0, or Infinity, not ${shown(limit)}`);
}

export function textOf(subject: Subject): string {
  return subjectText("quota", subject);
}

export function idOf(id: string): string {
  return checkId("quota", "id", id, ownPrefixes);
}

/** The caller's, or one of its own. */
export function idFor({ id }: Pick<EntryOptions, "id">): string {
  return id === undefined ? randomUUID() : idOf(id);
}

export function detailsOf({ by, source, reference, metadata }: EntryOptions): string | undefined {
  if (by === undefined && source === undefined && reference === undefined && metadata === undefined)
    return undefined;
  for (const [name, value] of Object.entries({ by, source, reference })) optionalText("quota", name, value);
  return checkJson("quota", "metadata", { by, source, reference, metadata });
}
