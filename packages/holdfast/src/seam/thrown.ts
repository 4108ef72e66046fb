/**
 * What was thrown may be anything: nothing at all, an object without a prototype, one whose getters throw, a proxy that was
 * revoked. Whoever caught it has something else to finish, so nothing here throws.
 */
import { inspect, types } from "node:util";

/** So much of one that is no error is shown. */
const longest = 2000;
/** Of causes, and of the errors that one stands for. */
const deepest = 5;
const widest = 5;
const mostParts = 8;

/** Whether a look at what it is throws already: `instanceof` must not be asked of it. */
export function isOpaque(thrown: unknown): boolean {
  return tried(() => !(thrown instanceof Object), undefined) === undefined;
}

/** Also one of another realm, as in a sandbox of a test runner. */
export function isError(thrown: unknown): thrown is Error {
  return types.isNativeError(thrown) || tried(() => thrown instanceof Error, false);
}

/** What it has by this name; undefined, too, if it does not tell. */
export function read(thrown: unknown, name: string): unknown {
  if (thrown === null || (typeof thrown !== "object" && typeof thrown !== "function")) return undefined;
  return tried(() => (thrown as Record<string, unknown>)[name], undefined);
}

/** In a few words, without where it came from. */
export function message(thrown: unknown): string {
  if (!isError(thrown)) return shown(thrown);
  const text = textOf(read(thrown, "message"));
  if (text !== "") return text;
  // A host with several addresses fails with one error for each, and no message over them.
  const errors = read(thrown, "errors");
  if (Array.isArray(errors) && errors.length > 0)
    return errors
      .slice(0, widest)
      .map((each) => (isError(each) ? textOf(read(each, "message")) || nameOf(each) : shown(each)))
      .join("; ");
  return nameOf(thrown);
}

/** For whoever looks for the reason later: what it says, where it came from unless `stack` is false, and its causes. */
export function described(thrown: unknown, most: number, { stack = true } = {}): string {
  const parts: string[] = [];
  const seen = new Set<unknown>();
  const add = (what: string, each: unknown, depth: number) => {
    if (parts.length >= mostParts || seen.has(each)) return;
    if (Object(each) === each) seen.add(each);
    parts.push(what + (isError(each) ? errorText(each, stack) : shown(each)));
    if (depth >= deepest) return;
    const cause = read(each, "cause");
    if (cause !== undefined) add("caused by: ", cause, depth + 1);
    const errors = isError(each) ? read(each, "errors") : undefined;
    if (!Array.isArray(errors)) return;
    for (const [i, one] of errors.slice(0, widest).entries())
      add(`${i + 1} of ${errors.length}: `, one, depth + 1);
  };
  add("", thrown, 0);
  // One that is very long does not hide the others.
  const share = Math.floor(most / parts.length);
  const text = parts.map((part) => (part.length > share ? `${part.slice(0, share - 2)}…` : part)).join("\n");
  // What databases keep as text has no NUL, and no half of a character.
  return text.replaceAll("\0", "").slice(0, most).toWellFormed();
}

/** As V8 writes it, and with the message that it has now: the stack has that of the beginning. */
function errorText(error: Error, withStack: boolean): string {
  const words = message(error);
  const name = nameOf(error);
  const short = words === name || words.startsWith(`${name}: `) ? words : `${name}: ${words}`;
  const stack = withStack ? read(error, "stack") : undefined;
  if (typeof stack !== "string" || stack === "") return short;
  return stack.includes(words) ? stack : `${short}\n${stack}`;
}

function nameOf(error: Error): string {
  return textOf(read(error, "name")) || "Error";
}

function textOf(value: unknown): string {
  return value === undefined || value === null ? "" : typeof value === "string" ? value : shown(value);
}

/** A value that is no error. */
function shown(value: unknown): string {
  if (typeof value === "string") return value === "" ? '""' : value;
  if (Object(value) !== value) return String(value);
  const said = read(value, "message");
  const text = tried(() => ownWords(value as object), undefined) ?? looked(value as object);
  // The message first, for whoever reads the beginning only.
  const whole = typeof said === "string" && said !== "" && !text.startsWith(said) ? `${said} ${text}` : text;
  return whole.length > longest ? `${whole.slice(0, longest - 1)}…` : whole;
}

/** If it has a way of its own to be text. */
function ownWords(value: object): string | undefined {
  if (Array.isArray(value) || typeof value === "function") return undefined;
  if (value.toString === Object.prototype.toString) return undefined;
  const text: unknown = value.toString();
  return typeof text === "string" && text !== "" ? text : undefined;
}

function looked(value: object): string {
  const options = { depth: 3, breakLength: Infinity, maxArrayLength: 20, maxStringLength: 500 };
  return (
    tried(() => inspect(value, options), undefined) ??
    tried(() => inspect(value, { ...options, customInspect: false }), undefined) ??
    `${typeof value === "function" ? "a function" : "an object"} that cannot be shown`
  );
}

function tried<T, F>(look: () => T, otherwise: F): T | F {
  try {
    return look();
  } catch {
    return otherwise;
  }
}
