import { UsageError } from "../seam/errors.ts";

/** A typo in an option is a lock, a limit or a level that is not there. */
export function checkNames(call: string, options: unknown, names: ReadonlySet<string>): void {
  if (typeof options !== "object" || options === null || Array.isArray(options))
    throw new UsageError(`${call}: its options must be an object`);
  for (const name of Object.keys(options)) {
    if (!names.has(name))
      throw new UsageError(`${call}: there is no option \`${name}\`; there are ${[...names].join(", ")}`);
  }
}

export function checkSignal(signal: unknown): void {
  if (signal !== undefined && !(signal instanceof AbortSignal))
    throw new UsageError("signal must be an AbortSignal");
}

/** `(body)` or `(options, body)`. */
export function checkCall<O extends object, B>(
  call: string,
  first: O | B,
  second: B | undefined,
  kind = "an async function",
): [O, B] {
  const [options, body] = typeof first === "function" ? [{} as O, first as B] : [first as O, second as B];
  if (typeof body !== "function") throw new UsageError(`${call}(options, body): the body must be ${kind}`);
  return [options, body];
}
