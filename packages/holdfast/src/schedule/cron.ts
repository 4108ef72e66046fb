/**
 * Cron patterns. croner reads them, and is asked in UTC only: which times a pattern names. When these times come where
 * clocks are changed is our own business (time/zone.ts), so that it is the same with every version of croner, and as documented.
 */
import { createRequire } from "node:module";
import { isAbsolute } from "node:path";
import { UsageError, message } from "../seam/errors.ts";
import { self } from "../context/self.ts";
import { ScheduleError } from "./errors.ts";
import type { WantedTime } from "../time/zone.ts";

export interface CronPattern {
  readonly next: WantedTime;
  /**
   * Times of the day are named one by one, and each of them is to come once. Otherwise there is a star in the seconds, the
   * minutes or the hours: it goes on whenever the clock shows such a time.
   */
  readonly fixed: boolean;
}

interface Croner {
  readonly Cron: new (
    pattern: string,
    options: { utcOffset: number; paused: boolean },
  ) => { nextRun(after: Date): Date | null };
}

/** From here, of each of these: the times that every version that will do agrees upon. A Monday. */
const probedFrom = "2026-01-05T10:17:00.000Z";
const probed: readonly [pattern: string, ...times: (string | undefined)[]][] = [
  ["0 3 * * *", "2026-01-06T03:00:00.000Z", "2026-01-07T03:00:00.000Z"],
  ["*/40 5-9/2 * * MON-FRI", "2026-01-06T05:00:00.000Z", "2026-01-06T05:40:00.000Z"],
  ["15 30 4 L 2 *", "2026-02-28T04:30:15.000Z", "2027-02-28T04:30:15.000Z"],
  ["0 0 29 2 *", "2028-02-29T00:00:00.000Z"],
  ["0 0 30 2 *", undefined],
  ["0 0 13 * 5", "2026-01-09T00:00:00.000Z", "2026-01-13T00:00:00.000Z"],
  ["0 0 * * 5#L", "2026-01-30T00:00:00.000Z"],
  ["0 12 * * 7", "2026-01-11T12:00:00.000Z"],
];

/** By identity: a process may have several. */
const fit = new WeakSet<object>();

/** What croner, the module, makes of a pattern. */
export function readPattern(croner: object, pattern: string): CronPattern {
  if (!fit.has(croner)) {
    const wrong = unfit(croner as Croner);
    if (wrong) {
      const text = `schedule: the package croner that is installed${version()} does not read patterns as it should: ${wrong}.`;
      throw new ScheduleError("HF_CRONER_UNFIT", `${text} Versions 9 to 11 do: npm install croner@11`);
    }
    fit.add(croner);
  }
  const fields = pattern.trim().split(/\s+/);
  const nickname = fields.length === 1 && pattern.includes("@");
  try {
    // croner would take a date, too: of whatever zone.
    if (!nickname && (fields.length < 5 || fields.length > 7))
      throw new Error(`it has ${fields.length} fields, and not 5, 6 or 7`);
    const next = nextOf(croner as Croner, nickname ? pattern : spelled(fields));
    const times = fields.length === 5 ? fields.slice(0, 2) : fields.slice(0, 3);
    const fixed = nickname ? !/@hourly/i.test(pattern) : !times.some((field) => /[*?]/.test(field));
    return { next, fixed };
  } catch (error) {
    throw new UsageError(
      `schedule: ${JSON.stringify(pattern)} is no cron pattern: ${message(error)}`,
      "HF_USAGE",
      error,
    );
  }
}

/** As every version of croner understands it: to version 9 `?` is the time of now, and `5L` is every Friday. */
function spelled(fields: readonly string[]): string {
  return fields
    .map((field, i) => (i === (fields.length === 5 ? 4 : 5) ? field.replace(/(?<!#)L/gi, "#L") : field))
    .map((field) => field.replaceAll("?", "*"))
    .join(" ");
}

function nextOf({ Cron }: Croner, pattern: string): WantedTime {
  // Not `timezone: "UTC"`, which is the same and takes versions before 11 ten times as long.
  const cron = new Cron(pattern, { utcOffset: 0, paused: true });
  return (wall) => cron.nextRun(new Date(wall))?.getTime();
}

function unfit(croner: Croner): string | undefined {
  for (const [pattern, ...times] of probed) {
    let at = Date.parse(probedFrom);
    for (const expected of times) {
      let found: string;
      try {
        const next = nextOf(croner, pattern)(at);
        if (next === (expected === undefined ? undefined : Date.parse(expected))) {
          at = next ?? at;
          continue;
        }
        found = `it says ${next === undefined ? "never" : new Date(next).toISOString()}`;
      } catch (error) {
        found = `it says: ${message(error)}`;
      }
      return `asked for ${JSON.stringify(pattern)} after ${new Date(at).toISOString()}, ${found}, and not ${expected ?? "never"}`;
    }
  }
  return undefined;
}

/** Required when it is first needed, and only then: whoever uses `every` need not have it. */
export function installed(): object {
  try {
    return load("croner");
  } catch (error) {
    throw new ScheduleError(
      "HF_CRONER_MISSING",
      "schedule: `cron` needs the package croner, which is not to be found: npm install croner. " +
        "(Or use `every`. If your program is bundled: leave holdfast and croner out of the bundle, or pass a parser's own " +
        "object, `cron: new Cron(pattern, { timezone })`.)",
      error,
    );
  }
}

/** From here, or from where the program is: bundlers (that of Next.js) may say of this file that it is where there is none. */
function load(name: string): object {
  try {
    return createRequire(self ?? "/")(name) as object;
  } catch (error) {
    const program = process.argv[1];
    if (program === undefined || !isAbsolute(program)) throw error;
    return createRequire(program)(name) as object;
  }
}

function version(): string {
  try {
    return ` (${(load("croner/package.json") as { version: string }).version})`;
  } catch {
    return "";
  }
}
