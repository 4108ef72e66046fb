/** What a thread and the explorer say to each other. */
import { isError, message, read } from "../../seam/thrown.ts";

/** What the thread that is held back may do. It sleeps until there is one. */
export const verdict = { none: 0, go: 1, again: 2, giveUp: 3, free: 4 } as const;
export type Verdict = (typeof verdict)[keyof typeof verdict];

/** Places in the memory that both see. `holding`: statements are held back. */
export const flag = { verdict: 0, holding: 1 } as const;
export const flags = 2;

export type Said =
  | { readonly kind: "ready"; readonly clients: readonly string[] }
  | { readonly kind: "failed"; readonly error: Thrown }
  | { readonly kind: "held"; readonly text: string; readonly place: string | undefined }
  /** It has nothing else to do. */
  | { readonly kind: "idle" }
  /** It would wait for a lock. */
  | { readonly kind: "locked" }
  | {
      readonly kind: "answered";
      readonly rows: readonly (readonly string[])[];
      readonly error?: string;
      /** The error says that somebody else has a lock. */
      readonly locked?: boolean;
      /** The thread is inside a transaction now. */
      readonly inside: boolean;
    }
  | {
      readonly kind: "done";
      readonly value?: unknown;
      readonly thrown?: Thrown;
      /** That have executed its statements so far. */
      readonly libraries: readonly string[];
    };

export type Asked = "run" | "idle?";

export interface Given {
  readonly name: string;
  readonly args: readonly unknown[];
  readonly flags: Int32Array<SharedArrayBuffer>;
}

/** An error without its class, which stays in its thread. */
export interface Thrown {
  readonly name: string;
  readonly message: string;
  readonly stack: string | undefined;
  /** `code` and the like. */
  readonly more: Readonly<Record<string, unknown>>;
  readonly cause?: Thrown;
}

export function thrown(error: unknown, depth = 0): Thrown {
  if (!isError(error)) return { name: "Error", message: message(error), stack: undefined, more: {} };
  const [name, stack, cause] = [read(error, "name"), read(error, "stack"), read(error, "cause")];
  // What can be read, and can go to another thread.
  const more = Object.keys(error)
    .filter((key) => !["name", "message", "stack", "cause"].includes(key))
    .map((key) => [key, read(error, key)] as const)
    .filter(([, value]) => Object(value) !== value && typeof value !== "symbol");
  return {
    name: typeof name === "string" ? name : "Error",
    message: message(error),
    stack: typeof stack === "string" ? stack : undefined,
    more: Object.fromEntries(more),
    ...(cause === undefined || depth > 4 ? {} : { cause: thrown(cause, depth + 1) }),
  };
}

export function revived({ name, message, stack, more, cause }: Thrown): Error {
  const error = new Error(message, cause ? { cause: revived(cause) } : undefined);
  Object.defineProperty(error, "name", { value: name, configurable: true, writable: true });
  if (stack !== undefined) error.stack = stack;
  return Object.assign(error, more);
}
