/** Days of a time zone's own calendar. */
import { UsageError } from "../core/errors.ts";

const day = 86_400_000;

const formats = new Map<string, Intl.DateTimeFormat>();

export function checkZone(timeZone: unknown): string {
  try {
    if (typeof timeZone === "string") return Intl.DateTimeFormat("en", { timeZone }) && timeZone;
  } catch {
    // Told below.
  }
  throw new UsageError(
    `schedule: there is no time zone ${JSON.stringify(timeZone)}. Use a name such as "Europe/Madrid" or "UTC"`,
  );
}

/** What clocks show there, as if it were UTC. */
export function wallClock(timeZone: string, at: number): number {
  let format = formats.get(timeZone);
  if (!format) {
    format = new Intl.DateTimeFormat("en-u-ca-gregory-nu-latn", {
      timeZone,
      hourCycle: "h23",
      year: "numeric",
      month: "numeric",
      day: "numeric",
      hour: "numeric",
      minute: "numeric",
      second: "numeric",
    });
    formats.set(timeZone, format);
  }
  const parts = new Map(format.formatToParts(at).map(({ type, value }) => [type, Number(value)]));
  const of = (type: Intl.DateTimeFormatPartTypes) => parts.get(type) ?? 0;
  return Date.UTC(of("year"), of("month") - 1, of("day"), of("hour"), of("minute"), of("second"));
}

/** Days since 1970-01-01, as the calendar there counts them. */
export function dayNumber(timeZone: string, at: number): number {
  return Math.floor(wallClock(timeZone, at) / day);
}

/** The first moment of a day: not midnight where the clocks are put forward then. */
export function dayStart(timeZone: string, number: number): number {
  const midnight = number * day;
  const candidates = [midnight - day, midnight, midnight + day].map(
    (guess) => midnight - (wallClock(timeZone, guess) - guess),
  );
  const fits = candidates.filter((at) => dayNumber(timeZone, at) === number);
  return Math.min(...(fits.length > 0 ? fits : candidates));
}
