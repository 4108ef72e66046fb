/**
 * One gate for what callers give to patterns: names, subjects, ids, amounts, moments, documents. What passes is kept exactly
 * as it was given, and two that differ are never kept as the same; what does not is refused by its name, before it is sent.
 */
import { hash } from "node:crypto";
import { UsageError } from "../seam/errors.ts";
import { shown } from "../seam/shown.ts";

/** Of what is found by an index, in bytes: its entries have their limits. */
export const longestName = 400;
/** The server's counts of rows. */
const mostRows = 2 ** 31 - 1;
/** A hundred years: more is a mistake, and more than the server's intervals take. */
const longestSpan = 100 * 365 * 86_400_000;
/** Of the calendars of all engines. */
const earliest = Date.UTC(1000, 0, 1);
const latest = Date.UTC(9999, 11, 31);

/** Why this cannot be kept as text; undefined: it can. NUL is not in the server's texts, halves of characters in nobody's. */
function unfit(value: string): string | undefined {
  if (value.includes("\0")) return "without NUL characters";
  if (!value.isWellFormed())
    return "well-formed Unicode, and it holds half of a character (a lone surrogate)";
  return undefined;
}

/** Text that is kept as it is. `most`: bytes; `empty`: it may be. */
export function checkText(
  call: string,
  name: string,
  value: unknown,
  {
    most = Infinity,
    empty = false,
    code = "HF_USAGE",
  }: { readonly most?: number; readonly empty?: boolean; readonly code?: string } = {},
): string {
  if (typeof value !== "string" || (value === "" && !empty))
    throw new UsageError(
      `${call}: ${name} must be text${empty ? "" : " that is not empty"}, not ${shown(value)}`,
      code,
    );
  const why = unfit(value);
  if (why) throw new UsageError(`${call}: ${name} must be text ${why}`, code);
  if (Buffer.byteLength(value) > most)
    throw new UsageError(`${call}: ${name} must be text of up to ${most} bytes`, code);
  return value;
}

/** The same, if there is one: of notes, sources and filters. */
export function optionalText(call: string, name: string, value: unknown): string | undefined {
  return value === undefined ? undefined : checkText(call, name, value, { empty: true });
}

/** A list of texts, if there is one: what is looked for. */
export function checkTexts(call: string, name: string, values: unknown): void {
  if (values === undefined) return;
  if (!Array.isArray(values)) throw new UsageError(`${call}: ${name} must be a list of texts`);
  for (const value of values) checkText(call, name, value, { empty: true });
}

/** A whole number that JavaScript and every server write the same way. */
export function checkWhole(
  call: string,
  name: string,
  value: unknown,
  least = -Number.MAX_SAFE_INTEGER,
  most = Number.MAX_SAFE_INTEGER,
): number {
  if (!Number.isSafeInteger(value) || (value as number) < least || (value as number) > most) {
    const from = least === -Number.MAX_SAFE_INTEGER ? "" : ` from ${least}`;
    const to = most === Number.MAX_SAFE_INTEGER ? "" : ` to ${most}`;
    throw new UsageError(`${call}: ${name} must be a whole number${from}${to}, not ${shown(value)}`);
  }
  return value as number;
}

/** How many rows to bring. */
export function checkRows(call: string, name: string, value: unknown, most = mostRows): number {
  return checkWhole(call, name, value, 1, most);
}

/** Milliseconds that something lasts. */
export function checkSpan(call: string, name: string, value: unknown, least = 1): number {
  return checkWhole(call, name, value, least, longestSpan);
}

/** A moment, in milliseconds. */
export function checkMoment(call: string, name: string, value: unknown): number {
  const ms = value instanceof Date ? value.getTime() : Number.NaN;
  if (!(ms >= earliest && ms <= latest))
    throw new UsageError(
      `${call}: ${name} must be a valid Date of the years from 1000 to 9999, not ${value instanceof Date && !Number.isNaN(ms) ? value.toISOString() : shown(value)}`,
    );
  return ms;
}

/** JSON, as `JSON.stringify` writes it, of what a database can hold, and of nothing that would come back as null. */
export function checkJson(call: string, name: string, value: unknown): string {
  let text: string | undefined;
  try {
    text = JSON.stringify(value) as string | undefined;
    // Only then can there be anything wrong with it: most documents are not gone through.
    if (text !== undefined && /null|\\u/.test(text))
      JSON.stringify(value, function (this: Record<string, unknown>, at: string, part: unknown) {
        const wrong = unfit(at) ?? (typeof part === "string" ? unfit(part) : undefined);
        if (wrong) throw new UsageError(`${call}: ${name} holds text that must be ${wrong}`);
        const kept = part !== null && (typeof part !== "number" || Number.isFinite(part));
        const lost = typeof part === "function" || typeof part === "symbol" || part === undefined;
        if ((!kept && this[at] !== null) || (lost && Array.isArray(this)))
          throw new UsageError(`${call}: ${name} holds ${shown(this[at])}, which JSON has no word for`);
        return part;
      });
  } catch (error) {
    if (error instanceof UsageError) throw error;
    // A bigint, or a part of itself.
    throw new UsageError(`${call}: ${name} must be something that JSON can hold`, "HF_USAGE", error);
  }
  if (text === undefined)
    throw new UsageError(`${call}: ${name} must be something that JSON can hold; for none, pass null`);
  return text;
}

/** Refuses what would come back from JSON as something else than it was: a Date as text, a Map as `{}`. */
export function checkUnchanged(call: string, name: string, value: unknown): void {
  if (typeof value !== "object" || value === null) return;
  if (Array.isArray(value)) {
    for (const [i, part] of value.entries()) checkUnchanged(call, `${name}[${i}]`, part);
    return;
  }
  const kind = Object.prototype.toString.call(value).slice(8, -1);
  if (kind !== "Object" || typeof (value as { toJSON?: unknown }).toJSON === "function")
    throw new UsageError(
      `${call}: ${name} is a ${kind === "Object" ? (value.constructor?.name ?? kind) : kind}, which would come back as something else: pass what JSON can hold, or give the queue a \`schema\``,
    );
  for (const [key, part] of Object.entries(value)) checkUnchanged(call, `${name}.${key}`, part);
}

/**
 * Text of any length and with any character, as an index can hold it. What could be taken for something else is written as JSON
 * writes it, with quotes: what begins as these do, and what looks like a hash.
 */
function indexed(text: string): string {
  const plain = /^(?:[[{"]|sha256:)|\0/.test(text) ? JSON.stringify(text) : text;
  return bounded(plain);
}

function bounded(text: string): string {
  return Buffer.byteLength(text) <= longestName ? text : `sha256:${hash("sha256", text, "hex")}`;
}

/** Whom something is for: text, a whole number (the same as its digits), or an object of these. */
export function subjectText(call: string, subject: unknown): string {
  const bad = (what: string) => new UsageError(`${call}: ${what}`, "HF_BAD_KEY");
  if (typeof subject === "bigint") return String(subject);
  if (typeof subject === "number") return String(checkWhole(call, "a subject that is a number", subject));
  if (typeof subject === "string") {
    if (subject === "") throw bad("the subject is empty: everybody without an id would share it");
    if (!subject.isWellFormed()) throw bad("the subject holds half of a character (a lone surrogate)");
    return indexed(subject);
  }
  const plain = typeof subject === "object" && subject !== null && !Array.isArray(subject);
  const prototype: unknown = plain ? Object.getPrototypeOf(subject) : undefined;
  if (
    !plain ||
    (prototype !== null && Object.getPrototypeOf(prototype) !== null) ||
    Object.keys(subject).length === 0
  )
    throw bad(`the subject must be text, a whole number or an object of these, not ${shown(subject)}`);
  const parts = Object.entries(subject).toSorted(([a], [b]) => (a < b ? -1 : 1));
  for (const part of parts as [string, unknown][]) {
    const [name, value] = part;
    if (!name.isWellFormed()) throw bad("a name in the subject holds half of a character (a lone surrogate)");
    // A number is the same subject as its digits, as it is where it stands alone.
    if (typeof value === "bigint") part[1] = String(value);
    else if (typeof value === "number") part[1] = String(checkWhole(call, `${name} of the subject`, value));
    else if (typeof value !== "string" || value === "")
      throw bad(`${name} of the subject is ${value === "" ? "empty" : shown(value)}`);
    else if (!value.isWellFormed())
      throw bad(`${name} of the subject holds half of a character (a lone surrogate)`);
  }
  return bounded(
    `{${parts.map(([name, value]) => `${JSON.stringify(name)}:${JSON.stringify(value)}`).join()}}`,
  );
}

/** What something is known by. `ours`: ids that begin like this are made by us, and nobody else's. */
export function checkId(call: string, name: string, id: unknown, ours: readonly string[] = []): string {
  if (typeof id !== "string" || id === "")
    throw new UsageError(`${call}: ${name} must be text that is not empty, not ${shown(id)}`);
  if (!id.isWellFormed())
    throw new UsageError(`${call}: ${name} holds half of a character (a lone surrogate)`);
  const taken = ours.find((prefix) => id.startsWith(prefix));
  if (taken !== undefined)
    throw new UsageError(
      `${call}: ${name} must not begin with "${taken}": such ids are made by Holdfast itself`,
    );
  return /^(?:"|sha256:)|\0/.test(id) ? bounded(JSON.stringify(id)) : bounded(id);
}

/** What was made under an id: one of the caller's, or one that we have made of such a one, which begins like this. */
export function checkReference(call: string, name: string, id: unknown, ours: readonly string[]): string {
  const prefix = typeof id === "string" ? ours.find((each) => id.startsWith(each) && id !== each) : undefined;
  if (prefix === undefined) return checkId(call, name, id);
  return `${prefix}${checkId(call, name, (id as string).slice(prefix.length))}`;
}
