/** Where a page ends, in the columns of the index that it was read by, as text that callers pass on. */
import { UsageError } from "../../seam/errors.ts";

export type PagePlace = readonly (string | number)[];

export function nextOf(place: PagePlace): string {
  return Buffer.from(JSON.stringify(place)).toString("base64url");
}

/** It came from a page before, and may have been typed. */
export function placeOf(after: string | undefined): PagePlace {
  if (after === undefined) return [];
  try {
    const place: unknown = JSON.parse(Buffer.from(after, "base64url").toString());
    if (Array.isArray(place)) return place as PagePlace;
  } catch {
    // None of ours.
  }
  throw new UsageError(`jobs: after must be the \`next\` of a page before, not ${JSON.stringify(after)}`);
}
