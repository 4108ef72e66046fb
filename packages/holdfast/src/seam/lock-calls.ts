/** Locks by name that statements take or give back, as far as their texts tell. */
import { type Key, key } from "./key.ts";

export interface LockCall {
  /** Until the transaction ends, until it is given back, or giving it back. */
  readonly lasts: "transaction" | "session" | "given back";
  readonly called: string;
  /** What is locked, as it is written. */
  readonly name: string;
  readonly shared: boolean;
  /** It waits for it, if it has to. */
  readonly waits: boolean;
}

const lockCall =
  /\b(?:(pg_(?:try_)?advisory_xact_lock(?:_shared)?)|(pg_(?:try_)?advisory_lock(?:_shared)?|get_lock)|(pg_advisory_unlock(?:_shared)?|release_lock))\s*\(/gi;

export function lockCalls(text: string): LockCall[] {
  return [...text.matchAll(lockCall)].map((found) => {
    const [whole, transaction, session, back] = found;
    const from = found.index + whole.length;
    const args = text.slice(from, closing(text, from)).replaceAll(/\s+/g, " ").trim();
    const called = transaction ?? session ?? back ?? "";
    // The second argument of GET_LOCK is how long it may take.
    const name = /^get_lock$/i.test(called) ? args.replace(/,[^,]*$/, "") : args;
    return {
      lasts: transaction ? "transaction" : session ? "session" : "given back",
      called,
      name,
      shared: /_shared$/i.test(called),
      waits: !/^pg_try/i.test(called) && (name === args || !/,\s*0\s*$/.test(args)),
    };
  });
}

/** Where what was opened before ends. */
function closing(text: string, from: number): number {
  let depth = 1;
  for (let at = from; at < text.length; at++) {
    depth += text[at] === "(" ? 1 : text[at] === ")" ? -1 : 0;
    if (depth === 0) return at;
  }
  return text.length;
}

/** What stands in its place, if it is a value: a literal, a parameter, or texts that are put together of these. */
export function valueIn(written: string, values: readonly unknown[]): string | undefined {
  const expression = written
    .trim()
    .replace(/(?:\s*::\s*\w+)+$/, "")
    .replace(/^concat\s*\(([^()]*)\)$/i, (_, parts: string) => parts.replaceAll(",", "||"));
  const parts = (expression.match(/'(?:[^']|'')*'|\|\||[^'|]+/g) ?? []).filter((part) => part.trim() !== "");
  if (parts.includes("||")) {
    const texts = parts.filter((part) => part !== "||").map((part) => valueIn(part, values));
    return texts.includes(undefined) ? undefined : texts.join("");
  }
  if (/^-?\d+$/.test(expression)) return expression;
  if (/^'(?:[^'\\]|'')*'$/.test(expression)) return expression.slice(1, -1).replaceAll("''", "'");
  const value = values[Number(/^\$(\d+)$/.exec(expression)?.[1] ?? 0) - 1];
  return typeof value === "string" || typeof value === "number" || typeof value === "bigint"
    ? String(value)
    : undefined;
}

/** The key that is the same lock; undefined: not all of it is known. */
export function keyOfCall({ called, name }: LockCall, values: readonly unknown[]): Key | undefined {
  const number = (text: string) => {
    const value = valueIn(text, values);
    return value !== undefined && /^-?\d{1,18}$/.test(value) ? BigInt(value) : undefined;
  };
  const hashed = (text: string) => {
    const found = /^hashtext(extended)?\s*\((.*)\)$/i.exec(text.trim().replace(/(?:::\w+)+$/, ""));
    const [, extended, inside = ""] = found ?? [];
    const value = valueIn(extended ? inside.replace(/,\s*0\s*$/, "") : inside, values);
    return value ? { extended: extended !== undefined, value } : undefined;
  };
  try {
    if (/^(?:get|release)_lock$/i.test(called)) {
      const lock = valueIn(name, values);
      return lock === undefined ? undefined : key.getLock(lock);
    }
    const text = hashed(name);
    if (text) return text.extended ? key.hashtextextended(text.value) : key.hashtext(text.value);
    const one = number(name);
    if (one !== undefined) return key.bigint(one);
    const [first = "", second = "", ...more] = name.split(",");
    if (more.length > 0) return undefined;
    const [a, b] = [number(first), number(second)];
    if (a !== undefined && b !== undefined) return key.int(Number(a), Number(b));
    const [left, right] = [hashed(first), hashed(second)];
    return left && right ? key.hashtext(left.value, right.value) : undefined;
  } catch {
    // The server refuses it too.
    return undefined;
  }
}
