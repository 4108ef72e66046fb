/** What people type, made into values; or a line that says what it should look like. */
import { InvalidArgumentError } from "commander";
import type { Older } from "holdfast/queue";
import type { Subject } from "holdfast/quota";
import { whole } from "../options.ts";

const units: Readonly<Record<string, number>> = {
  s: 1000,
  m: 60_000,
  h: 3_600_000,
  d: 86_400_000,
  w: 604_800_000,
};

/** A hundred years, as the library has it. */
const longest = 36_500 * 86_400_000;

const notThat = "It is a date such as 2026-05-01, or a span such as 30d, 12h or 15m.";

function spanOf(text: string): number | undefined {
  const [, amount, unit] = /^(\d+)([smhdw])$/.exec(text) ?? [];
  if (amount === undefined) return undefined;
  const ms = Number(amount) * (units[unit ?? ""] ?? 0);
  if (ms > longest) throw new InvalidArgumentError(`A span is at most ${longest / 86_400_000}d.`);
  return ms;
}

/** A date, or how long ago: `30d`, `12h`. */
export function moment(sign: 1 | -1): (text: string) => Date {
  return (text) => {
    const span = spanOf(text);
    const at = new Date(span === undefined ? text : Date.now() + sign * span);
    if (Number.isNaN(at.getTime()) || (span === undefined && !/^\d{4}-\d\d-\d\d/.test(text)))
      throw new InvalidArgumentError(notThat);
    return at;
  };
}

/** The same for what is to go: how long ago, the database says. */
export function older(text: string): Older & { readonly typed: string } {
  const olderThanMs = spanOf(text);
  return olderThanMs === undefined ? { before: moment(-1)(text), typed: text } : { olderThanMs, typed: text };
}

/** A number, or "none". */
export function wholeOrNone(text: string): number | "none" {
  return text === "none" ? "none" : whole(0)(text);
}

export function ids(text: string, before: readonly number[] = []): number[] {
  return [...before, whole(1)(text)];
}

/** As `holdfast quota` shows them: of several dimensions in JSON, and in quotes where it could be taken for that. */
export function subjectOf(text: string): Subject {
  if (!/^[{"]/.test(text)) return text;
  try {
    const value: unknown = JSON.parse(text);
    if (typeof value === "string" || (typeof value === "object" && value !== null)) return value as Subject;
  } catch {
    // Text like any other.
  }
  return text;
}
