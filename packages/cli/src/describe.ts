import { inspect, types } from "node:util";
import { withoutPasswords } from "./text.ts";

/** An error as people read it; `DEBUG=1` adds where it came from. Whatever was thrown, it does not throw. */
export function describe(error: unknown): string {
  try {
    return withoutPasswords(words(error));
  } catch {
    // By a getter, or a proxy, or for the want of a prototype.
    return withoutPasswords(inspect(error, { depth: 2, customInspect: false }));
  }
}

function words(error: unknown): string {
  // Also one that a sandbox of somebody's tests has made.
  if (!types.isNativeError(error) && !(error instanceof Error))
    return typeof error === "object" && error !== null ? inspect(error, { depth: 2 }) : String(error);
  const { stack, message } = error as { stack?: unknown; message: unknown };
  if (process.env["DEBUG"] && typeof stack === "string") return stack;
  // A host with several addresses fails with one error for each, and no message over them.
  if (error instanceof AggregateError && message === "") return error.errors.map(describe).join("; ");
  return String(message);
}
