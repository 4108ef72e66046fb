/** What a stress run did: one entry for every call. */

export type Outcome =
  /** It came back with `output`. */
  | "returned"
  /** It threw, and certainly had no effect. */
  | "failed"
  /** It threw, or never came back: it may have taken effect at any time after its call, or never. */
  | "unknown";

export interface Operation<Input = unknown, Output = unknown> {
  /** Who called: a process, or one of its callers. A row of the drawing. */
  readonly process: string;
  /** What it is about. Keys are checked apart from each other. */
  readonly key: string;
  /** Its name: "read", "take". */
  readonly call: string;
  readonly input: Input;
  readonly outcome: Outcome;
  /** Of one that returned. */
  readonly output: Output;
  /** What was thrown, for people. */
  readonly error?: string;
  /** Nanoseconds of the machine's monotonic clock. */
  readonly start: number;
  /** Infinity, if it never came back. */
  readonly end: number;
}

export type History = readonly Operation[];

/** Equal values have equal texts, whatever the order of their keys. */
export function textOf(value: unknown): string {
  if (value === undefined) return "undefined";
  if (typeof value !== "object" || value === null) return JSON.stringify(plain("", value));
  return JSON.stringify(value, (name, each: unknown) => sorted(plain(name, each)));
}

/** What a value is after it has been through a file. */
export function recorded(value: unknown): unknown {
  const text = JSON.stringify(value, plain) as string | undefined;
  return text === undefined ? undefined : JSON.parse(text);
}

/** Drivers give whole numbers as bigint or not, depending on their size. */
export function plain(_: string, value: unknown): unknown {
  if (typeof value !== "bigint") return value;
  return Number.isSafeInteger(Number(value)) ? Number(value) : String(value);
}

function sorted(value: unknown): unknown {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return value;
  return Object.fromEntries(Object.entries(value).toSorted(([a], [b]) => (a < b ? -1 : 1)));
}
