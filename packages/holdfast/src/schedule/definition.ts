/** What a schedule is told to be, checked. */
import { hostname } from "node:os";
import { UsageError } from "../seam/errors.ts";
import { shown } from "../seam/shown.ts";
import { checkText, longestName } from "../input/values.ts";
import { checkNames } from "../input/options.ts";
import { milliseconds } from "../waiting/wait.ts";
import type { ScheduleStep } from "./store.ts";
import { type Rhythm, checkWhen, rhythmOf } from "./ticks.ts";
import type { CommonOptions, Enqueue, Handler, ScheduleOptions } from "./types.ts";

export interface ScheduleDefinition<Native> {
  readonly name: string;
  /** Either of them. */
  readonly handler: Handler | undefined;
  readonly enqueue: Enqueue<Native> | undefined;
  /** Throws if its pattern cannot be read. */
  readonly rhythm: Rhythm;
  readonly terms: Pick<ScheduleStep, "schedule" | "holder" | "ttlMs" | "attempts" | "overlap" | "keep">;
  readonly catchUp: "none" | "last" | "all";
  /** Of "all": at most so many. */
  readonly limit: number;
  readonly graceMs: number;
  readonly backoff: (attempt: number) => number;
  readonly onError: CommonOptions["onError"];
}

const names = new Set([
  "cron",
  "every",
  "timeZone",
  "catchUp",
  "catchUpLimit",
  "grace",
  "overlap",
  "retries",
  "backoff",
  "ttl",
  "keep",
  "holder",
  "onError",
  "enqueue",
]);

const longestBackoff = 300_000;

export function definitionOf<Native>(
  name: string,
  options: ScheduleOptions & { readonly enqueue?: Enqueue<Native> },
  handler: Handler | undefined,
): ScheduleDefinition<Native> {
  checkText("schedule", "the name", name, { most: longestName });
  checkNames("schedule", options, names);
  checkWhen(options);
  const { catchUp = "last", retries = 2, backoff = 1000, keep = 100, enqueue, onError } = options;
  const { overlap = catchUp === "all" ? "queue" : "skip", catchUpLimit = 1000, grace = 60_000 } = options;
  const { ttl = 30_000, holder = `${hostname()}:${process.pid}` } = options;
  oneOf("catchUp", catchUp, ["none", "last", "all"]);
  oneOf("overlap", overlap, ["skip", "queue", "allow"]);
  if (catchUp === "all" && overlap === "skip")
    throw new UsageError(
      'schedule: catchUp "all" runs every tick, and overlap "skip" leaves some out. Use overlap "queue" or "allow"',
    );
  if ((handler === undefined) === (enqueue === undefined))
    throw new UsageError("schedule: say what to do: either a handler, or `enqueue` in the options");
  for (const [what, body] of Object.entries({ handler, enqueue, onError }))
    if (body !== undefined && typeof body !== "function")
      throw new UsageError(`schedule: ${what} must be a function`);
  checkText("schedule", "holder", holder);
  const pauses = backoffOf(backoff);
  const ttlMs = milliseconds(ttl, "ttl", 500);
  if (ttlMs > 86_400_000) throw new UsageError(`ttl must be a day at the most (86400000 ms), not ${ttlMs}`);
  let rhythm: Rhythm | undefined;
  return {
    name,
    handler,
    enqueue,
    onError,
    catchUp,
    get rhythm() {
      return (rhythm ??= rhythmOf(options));
    },
    limit: whole("catchUpLimit", catchUpLimit, 1, 100_000),
    graceMs: milliseconds(grace, "grace", 1000),
    backoff: pauses,
    terms: {
      schedule: name,
      holder: holder.slice(0, 200),
      ttlMs,
      attempts: whole("retries", retries, 0, 1_000_000) + 1,
      overlap: enqueue ? "allow" : overlap,
      keep: whole("keep", keep, 1, 1_000_000),
    },
  };
}

function backoffOf(backoff: NonNullable<CommonOptions["backoff"]>): (attempt: number) => number {
  if (typeof backoff !== "number" && typeof backoff !== "function")
    throw new UsageError("schedule: backoff must be a number of milliseconds or a function");
  if (typeof backoff === "function") return (attempt) => milliseconds(backoff(attempt), "backoff");
  const first = milliseconds(backoff, "backoff");
  return (attempt) => Math.min(longestBackoff, first * 2 ** Math.min(attempt - 1, 31));
}

function oneOf(what: string, value: unknown, words: readonly string[]): void {
  if (!words.includes(value as string))
    throw new UsageError(
      `schedule: ${what} must be ${words.map((word) => `"${word}"`).join(" or ")}, not ${shown(value)}`,
    );
}

export function whole(what: string, value: unknown, least: number, most: number): number {
  if (!Number.isSafeInteger(value) || (value as number) < least || (value as number) > most)
    throw new UsageError(
      `schedule: ${what} must be a whole number from ${least} to ${most}, not ${shown(value)}`,
    );
  return value as number;
}
