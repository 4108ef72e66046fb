/** When a schedule is due. */
import { setImmediate as breathe } from "node:timers/promises";
import { UsageError } from "../seam/errors.ts";
import { shown } from "../seam/shown.ts";
import { checkMoment } from "../input/values.ts";
import { lengths, monday, periodOf } from "../time/units.ts";
import { checkZone, day, nextReached, nextShown } from "../time/zone.ts";
import { installed, readPattern } from "./cron.ts";
import { ScheduleError } from "./errors.ts";

export type Unit = "second" | "minute" | "hour" | "day" | "week";
/** "minute", "15 minutes", "1 day", or a number of milliseconds. */
export type Every = Unit | `${number} ${Unit}` | `${number} ${Unit}s` | number;

/** Any parser of cron patterns that can tell the next time, e.g. `new Cron("0 3 * * *", { timezone })` of croner. */
export interface CronLike {
  nextRun(after: Date): Date | null | undefined;
}

export type When = (
  | {
      /** A pattern of 5 fields, or 6 with seconds first. Needs the package croner. Or what another parser makes of one. */
      readonly cron: string | CronLike;
      readonly every?: never;
    }
  | {
      /**
       * Seconds, minutes, hours and milliseconds are counted from 1970 in UTC; days and weeks (from Monday) begin when
       * they begin in `timeZone`.
       */
      readonly every: Every;
      readonly cron?: never;
    }
) & {
  /** Default "UTC". */
  readonly timeZone?: string;
};

/** Moments in milliseconds. */
export interface Rhythm {
  /** The first tick after that; undefined: there is none. */
  after(moment: number): number | undefined;
  /** The least that there is between two ticks. */
  readonly leastMs: number;
}

const units: ReadonlySet<string> = new Set<Unit>(["second", "minute", "hour", "day", "week"]);

/** What is wrong with it is told at once, except of a pattern: that takes its parser. */
export function checkWhen({ cron, every, timeZone }: When): void {
  if ((cron === undefined) === (every === undefined))
    throw new UsageError('schedule: say either `cron` ("0 3 * * *") or `every` ("15 minutes")');
  if (timeZone !== undefined) checkZone("schedule", timeZone);
  if (every !== undefined) everyOf(every, timeZone);
  else if (typeof cron === "object" && cron !== null) {
    if (typeof cron.nextRun !== "function")
      throw new UsageError("schedule: cron must be a pattern, or have a method nextRun(after)");
    if (timeZone !== undefined)
      throw new UsageError("schedule: give the time zone to the parser of your own, not to schedule");
  } else if (typeof cron !== "string" || cron.trim() === "")
    throw new UsageError(`schedule: cron must be a pattern such as "0 3 * * *", not ${shown(cron)}`);
}

export function rhythmOf({ cron, every, timeZone }: When): Rhythm {
  if (every !== undefined) return everyOf(every, timeZone);
  return typeof cron === "object" ? ownOf(cron) : cronOf(installed(), cron, timeZone);
}

function everyOf(every: unknown, timeZone = "UTC"): Rhythm {
  const period = periodOf(every);
  const unit = period && units.has(period.unit) && period.count < 1e9 ? period.unit : undefined;
  const ms = typeof every === "number" ? every : unit ? (period?.count ?? 1) * lengths[unit] : Number.NaN;
  if (!Number.isSafeInteger(ms) || ms < 1)
    throw new UsageError(
      `schedule: every must be e.g. "15 minutes", "1 day" or a whole number of milliseconds from 1, not ${shown(every)}`,
    );
  if (unit !== "day" && unit !== "week")
    return { after: (moment) => (Math.floor(moment / ms) + 1) * ms, leastMs: ms };
  const days = ms / day;
  const first = unit === "week" ? monday : 0;
  const next = (wall: number) => ((Math.floor((wall / day - first) / days) + 1) * days + first) * day;
  return {
    // A day begins when its midnight is reached: later, if the clocks are put forward then.
    after: (moment) => nextReached(timeZone, moment, next),
    // The longest that clocks were ever put forward at once, but for that line, is less than half a day.
    leastMs: ms - day / 2,
  };
}

/** What croner, the module, makes of a pattern there. */
export function cronOf(croner: object, cron: string, timeZone = "UTC"): Rhythm {
  const { next, fixed } = readPattern(croner, cron);
  const search = fixed ? nextReached : nextShown;
  return { after: (moment) => search(timeZone, moment, next), leastMs: 1000 };
}

function ownOf(cron: CronLike): Rhythm {
  return {
    after(moment) {
      // Patterns know whole seconds.
      const from = Math.floor(moment / 1000) * 1000;
      for (let more = 0; more <= 3; more++) {
        const next = cron.nextRun(new Date(from + more * 1000))?.getTime();
        if (next === undefined || next > moment) return next;
      }
      throw new ScheduleError(
        "HF_SCHEDULE_CRON",
        `The parser of the pattern says that a time before ${new Date(moment).toISOString()} comes after it.`,
      );
    },
    leastMs: 1000,
  };
}

/** The newest ticks, up to `limit` of them, after one moment and until another, in order. */
export async function due(rhythm: Rhythm, after: number, until: number, limit: number): Promise<number[]> {
  // From the end backwards, in steps that grow: years may have passed, and a parser takes half a millisecond per tick.
  for (let span = limit * rhythm.leastMs; ; span *= 4) {
    const from = Math.max(after, until - span);
    const ticks: number[] = [];
    for (let tick = rhythm.after(from); tick !== undefined && tick <= until; tick = rhythm.after(tick)) {
      if (ticks.push(tick) % 64 === 0) await breathe();
    }
    if (from === after || ticks.length >= limit) return ticks.slice(-limit);
  }
}

/** The next times of a schedule, without a database: `await nextRuns({ cron: "0 3 * * *", timeZone }, 5)`. */
export async function nextRuns(when: When, count = 1, from: Date = new Date()): Promise<Date[]> {
  checkWhen(when);
  return following(rhythmOf(when), count, checkMoment("nextRuns", "from", from));
}

export function following(rhythm: Rhythm, count: number, from: number): Date[] {
  if (!Number.isSafeInteger(count) || count < 0 || count > 10_000)
    throw new UsageError(`nextRuns: the count must be a whole number up to 10,000, not ${shown(count)}`);
  const found: Date[] = [];
  for (let tick = rhythm.after(from); tick !== undefined && found.length < count; tick = rhythm.after(tick))
    found.push(new Date(tick));
  return found;
}
