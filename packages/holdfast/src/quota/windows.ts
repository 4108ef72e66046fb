/** When windows begin: by the calendar of a time zone, or counted from 1970. */
import { UsageError } from "../core/errors.ts";
import { checkSpan, shown } from "../core/input.ts";

export type Unit = "second" | "minute" | "hour" | "day" | "week" | "month" | "year";
/** "day", "1 day", "15 minutes", or a number of milliseconds. */
export type Period = Unit | `${number} ${Unit}` | `${number} ${Unit}s` | number;

export interface Span {
  readonly unit: Unit;
  readonly count: number;
  /** As long as it is, or on average for months and years. */
  readonly ms: number;
}

const lengths: Readonly<Record<Unit, number>> = {
  second: 1000,
  minute: 60_000,
  hour: 3_600_000,
  day: 86_400_000,
  week: 604_800_000,
  month: 2_629_746_000,
  year: 31_556_952_000,
};

const calendar = new Set<Unit>(["day", "week", "month", "year"]);

export function spanOf(period: Period): Span {
  if (typeof period === "number") {
    checkSpan("quota", "per", period);
    return { unit: "second", count: period / 1000, ms: period };
  }
  const [, count = "1", unit = ""] =
    (typeof period === "string" && /^(?:(\d+) )?(second|minute|hour|day|week|month|year)s?$/.exec(period)) ||
    [];
  const length = lengths[unit as Unit];
  if (length === undefined || Number(count) < 1)
    throw new UsageError(
      `quota: per must be a unit of time, e.g. "day", "15 minutes" or a number of milliseconds, not ${shown(period)}`,
    );
  const ms = checkSpan("quota", "per, in milliseconds,", Number(count) * length);
  return { unit: unit as Unit, count: Number(count), ms };
}

export function checkZone(timeZone: string): void {
  try {
    Intl.DateTimeFormat("en", { timeZone });
  } catch (error) {
    throw new UsageError(`quota: there is no time zone ${shown(timeZone)}`, "HF_USAGE", error);
  }
}

/** Beginnings of the windows around a moment: one before, its own, and two after. */
export function startsAround(span: Span, timeZone: string, now: number): number[] {
  if (!calendar.has(span.unit)) {
    const own = Math.floor(now / span.ms) * span.ms;
    return [own - span.ms, own, own + span.ms, own + 2 * span.ms];
  }
  const own = windowNumber(span, timeZone, now);
  return [-1, 0, 1, 2].map((more) => windowStart(span, timeZone, own + more));
}

interface Day {
  readonly year: number;
  readonly month: number;
  readonly day: number;
}

const formats = new Map<string, Intl.DateTimeFormat>();

function local(timeZone: string, at: number): number[] {
  let format = formats.get(timeZone);
  if (!format) {
    format = new Intl.DateTimeFormat("en-u-ca-gregory-nu-latn", {
      timeZone,
      hourCycle: "h23",
      era: "short",
      year: "numeric",
      month: "numeric",
      day: "numeric",
      hour: "numeric",
      minute: "numeric",
      second: "numeric",
    });
    formats.set(timeZone, format);
  }
  const parts = Object.fromEntries(format.formatToParts(at).map(({ type, value }) => [type, value]));
  return ["year", "month", "day", "hour", "minute", "second"].map((part) => Number(parts[part]));
}

/** How far the zone is ahead of UTC. */
function offset(timeZone: string, at: number): number {
  const [year = 0, month = 1, day = 1, hour = 0, minute = 0, second = 0] = local(timeZone, at);
  return Date.UTC(year, month - 1, day, hour, minute, second) - Math.floor(at / 1000) * 1000;
}

/** The first moment of a day: not midnight where the clocks are put forward then. */
function dayStart(timeZone: string, { year, month, day }: Day): number {
  const midnight = Date.UTC(year, month - 1, day);
  const candidates = [midnight - 86_400_000, midnight, midnight + 86_400_000].map(
    (guess) => midnight - offset(timeZone, guess),
  );
  const fits = candidates.filter((at) => {
    const [y, m, d] = local(timeZone, at);
    return Date.UTC(y ?? 0, (m ?? 1) - 1, d) === midnight;
  });
  return Math.min(...(fits.length > 0 ? fits : candidates));
}

/** Days since 1970-01-01 of the zone's own calendar. */
function dayNumber(timeZone: string, at: number): number {
  const [year = 0, month = 1, day = 1] = local(timeZone, at);
  return Date.UTC(year, month - 1, day) / 86_400_000;
}

function windowNumber({ unit, count }: Span, timeZone: string, at: number): number {
  const [year = 0, month = 1] = local(timeZone, at);
  if (unit === "year") return Math.floor(year / count);
  if (unit === "month") return Math.floor((year * 12 + month - 1) / count);
  const days = dayNumber(timeZone, at);
  // 1970-01-01 was a Thursday: weeks begin on Monday.
  return unit === "week" ? Math.floor((days + 3) / (7 * count)) : Math.floor(days / count);
}

function windowStart({ unit, count }: Span, timeZone: string, number: number): number {
  if (unit === "year") return dayStart(timeZone, { year: number * count, month: 1, day: 1 });
  if (unit === "month") {
    const months = number * count;
    return dayStart(timeZone, { year: Math.floor(months / 12), month: (months % 12) + 1, day: 1 });
  }
  const days = unit === "week" ? number * 7 * count - 3 : number * count;
  const date = new Date(days * 86_400_000);
  return dayStart(timeZone, {
    year: date.getUTCFullYear(),
    month: date.getUTCMonth() + 1,
    day: date.getUTCDate(),
  });
}
