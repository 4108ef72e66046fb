import { shown } from "../seam/shown.ts";
import { UsageError } from "../seam/errors.ts";

/** What is old enough to go: by a moment, or by its age. Either way the database's clock says what time it is. */
export type Older =
  | { readonly before: Date; readonly olderThanMs?: undefined }
  | { readonly olderThanMs: number; readonly before?: undefined };

/** A hundred years: more is a mistake, and more than a server's calendar takes. */
const longestMs = 100 * 365 * 86_400_000;

/** As stores take it: whichever is first, the moment or so many milliseconds ago. */
export function olderThan(
  call: string,
  { before, olderThanMs }: Older,
): { readonly before: number | undefined; readonly ageMs: number } {
  if ((before === undefined) === (olderThanMs === undefined))
    throw new UsageError(`${call}: either before or olderThanMs`);
  if (before !== undefined) {
    if (!(before instanceof Date) || Number.isNaN(before.getTime()))
      throw new UsageError(`${call}: before must be a Date`);
    return { before: Math.max(0, before.getTime()), ageMs: 0 };
  }
  if (!(typeof olderThanMs === "number" && olderThanMs >= 0 && olderThanMs <= longestMs))
    throw new UsageError(
      `${call}: olderThanMs must be a number of milliseconds from 0 to ${longestMs}, not ${shown(olderThanMs)}`,
    );
  return { before: undefined, ageMs: olderThanMs };
}
