/** When windows begin: by the calendar of a time zone, or counted from 1970. */
import { UsageError } from "../seam/errors.ts";
import { shown } from "../seam/shown.ts";
import { checkSpan } from "../input/values.ts";
import { type Unit, lengths, monday, periodOf } from "./units.ts";
import { day, dayStart, wallClock } from "./zone.ts";

/** "day", "1 day", "15 minutes", or a number of milliseconds. */
export type Period = Unit | `${number} ${Unit}` | `${number} ${Unit}s` | number;

export interface Span {
  readonly unit: Unit;
  readonly count: number;
  /** As long as it is, or on average for months and years. */
  readonly ms: number;
}

const calendar = new Set<Unit>(["day", "week", "month", "year"]);

export function spanOf(call: string, period: Period): Span {
  if (typeof period === "number") {
    checkSpan(call, "per", period);
    return { unit: "second", count: period / 1000, ms: period };
  }
  const { unit, count } = periodOf(period) ?? {};
  if (unit === undefined || count === undefined || count < 1)
    throw new UsageError(
      `${call}: per must be a unit of time, e.g. "day", "15 minutes" or a number of milliseconds, not ${shown(period)}`,
    );
  return { unit, count, ms: checkSpan(call, "per, in milliseconds,", count * lengths[unit]) };
}

/** Beginnings of the windows around a moment: one before, its own, and two after that, or after the window of a later moment. */
export function startsAround(span: Span, timeZone: string, now: number, until = now): number[] {
  const byCalendar = calendar.has(span.unit);
  const number = (at: number) => (byCalendar ? windowNumber(span, timeZone, at) : Math.floor(at / span.ms));
  const first = number(now) - 1;
  return Array.from({ length: number(until) + 3 - first }, (_, i) =>
    byCalendar ? windowStart(span, timeZone, first + i) : (first + i) * span.ms,
  );
}

/** Windows are numbered: by years, by months or by days since 1970, on the wall. */
function windowNumber({ unit, count }: Span, timeZone: string, at: number): number {
  const wall = wallClock(timeZone, at);
  const date = new Date(wall);
  if (unit === "year") return Math.floor(date.getUTCFullYear() / count);
  if (unit === "month") return Math.floor((date.getUTCFullYear() * 12 + date.getUTCMonth()) / count);
  const days = Math.floor(wall / day);
  return unit === "week" ? Math.floor((days - monday) / (7 * count)) : Math.floor(days / count);
}

function windowStart({ unit, count }: Span, timeZone: string, number: number): number {
  const first = number * count;
  if (unit === "year") return dayStart(timeZone, Date.UTC(first, 0));
  if (unit === "month") return dayStart(timeZone, Date.UTC(Math.floor(first / 12), first % 12));
  return dayStart(timeZone, (unit === "week" ? first * 7 + monday : first) * day);
}
