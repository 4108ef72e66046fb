/**
 * What clocks show in a time zone, and when they first get to a time: the one place that knows of zones. Times on the wall
 * are numbers as well: the moment at which a clock in UTC shows the same.
 */
import { UsageError } from "../seam/errors.ts";
import { shown } from "../seam/shown.ts";

const second = 1000;
export const day = 86_400_000;

const formats = new Map<string, Intl.DateTimeFormat>();

/** `call`: on whose behalf. */
export function checkZone(call: string, timeZone: unknown): string {
  let cause: unknown;
  try {
    if (typeof timeZone === "string") return Intl.DateTimeFormat("en", { timeZone }) && timeZone;
  } catch (error) {
    cause = error;
  }
  throw new UsageError(
    `${call}: there is no time zone ${shown(timeZone)}. Use a name such as "Europe/Madrid" or "UTC"`,
    "HF_USAGE",
    cause,
  );
}

/** What clocks show there, to the second. */
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

/** The clocks are put forward or back: how far they are ahead of UTC before, and from that moment on. */
interface Change {
  readonly at: number;
  readonly before: number;
  readonly after: number;
}

/** How far clocks there are ahead of UTC. */
export function aheadOf(timeZone: string, at: number): number {
  const whole = Math.floor(at / second) * second;
  return wallClock(timeZone, whole) - whole;
}

/** The first change after a moment and until another, which counts too. */
function nextChange(timeZone: string, from: number, until: number): Change | undefined {
  const before = aheadOf(timeZone, from);
  // In no zone have clocks ever been changed and changed back within three days (in Freetown, 1939, within four).
  for (let known = from, at = from; at < until; known = at) {
    at = Math.min(at + 3 * day, until);
    if (aheadOf(timeZone, at) === before) continue;
    while (at - known > 1) {
      const middle = Math.floor((known + at) / 2);
      if (aheadOf(timeZone, middle) === before) known = middle;
      else at = middle;
    }
    return { at, before, after: aheadOf(timeZone, at) };
  }
  return undefined;
}

/** The first time on the wall after that one which is wanted; undefined: there is none. */
export type WantedTime = (wall: number) => number | undefined;

/**
 * The first moment after that at which clocks show a time that is wanted. What they leave out when they are put forward
 * does not come, and what they show twice when they are put back comes twice.
 */
export function nextShown(timeZone: string, moment: number, wanted: WantedTime): number | undefined {
  let from = moment;
  let ahead = aheadOf(timeZone, from);
  let wall = wanted(from + ahead);
  for (;;) {
    // If nothing more is wanted: clocks that are put back show some of the day again.
    const at = wall === undefined ? undefined : wall - ahead;
    const change = nextChange(timeZone, from, at ?? from + 2 * day);
    if (!change) return at;
    from = change.at;
    ahead = change.after;
    wall = wanted(from + ahead - second);
  }
}

/**
 * The first moment after that at which clocks get to a time that is wanted, for the first time: a time that they leave out
 * comes when they have been put forward past it, and one that they show twice comes once.
 */
export function nextReached(timeZone: string, moment: number, wanted: WantedTime): number | undefined {
  let from = moment;
  let ahead = aheadOf(timeZone, from);
  // They may have been put back since: up to there, everything has come. By a day at the most, over the date line.
  const back = nextChange(timeZone, from - 2 * day, from);
  const wall = wanted(Math.max(from + ahead, back ? back.at + back.before - second : -Infinity));
  if (wall === undefined) return undefined;
  for (;;) {
    const at = wall - ahead;
    if (at <= from) return from;
    const change = nextChange(timeZone, from, at);
    if (!change) return at;
    from = change.at;
    ahead = change.after;
  }
}

/**
 * The first moment of a day, which is given by its midnight on the wall: later than that where clocks are put forward then,
 * and the first time where they are put back past it. A day that was left out, over the date line, begins with the one before.
 */
export function dayStart(timeZone: string, midnight: number): number {
  const candidates = [midnight - day, midnight, midnight + day].map(
    (guess) => midnight - aheadOf(timeZone, guess),
  );
  const fits = candidates.filter((at) => Math.floor(wallClock(timeZone, at) / day) * day === midnight);
  return Math.min(...(fits.length > 0 ? fits : candidates));
}
