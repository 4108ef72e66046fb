/** The place in the caller's own code that a call came from. */
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { self } from "./self.ts";

export interface CallSite {
  /** `file:line:column` of the nearest frame that is neither ours nor a package's, if the stack shows one. */
  readonly place: string | undefined;
  /** Whether that frame is the one that made the call, with no package in between. */
  readonly near?: boolean;
  /**
   * Whether the call was made by an async function that goes on after an `await`, with no other function below it on the stack.
   * What is entered there by `AsyncLocalStorage.enterWith` stays in that function and what it calls. Anywhere else the caller's
   * caller goes on in it too, and whatever else that one starts. Undefined: not known.
   */
  readonly resumed?: boolean;
  /** Inside of something that we run, as a body: the place where it was handed to us, as far as the stack goes back. */
  readonly around?: string | undefined;
}

/** Ours; in a bundle, where everything is one file, nothing can be told apart. */
const own = self && /[\\/]context[\\/]self\.[jt]s$/.test(self) ? dirname(dirname(self)) : undefined;
/** The sources that it was built from: stacks name these where source maps are on, as they are in Jest. */
const source = own && basename(own) === "dist" ? join(dirname(own), "src") : undefined;
/** Frames of a client library between the call and us. */
const depth = 60;

class Captured implements CallSite {
  readonly #trace: { stack?: string };
  readonly #frames: number;

  constructor(trace: { stack?: string }, frames: number) {
    this.#trace = trace;
    this.#frames = frames;
  }

  /** Written out only when it is asked for: capturing costs 2 µs, the text 20. */
  get place(): string | undefined {
    for (const place of this.#places()) if (isTheirs(place)) return place;
    return undefined;
  }

  get near(): boolean {
    for (const place of this.#places()) return isTheirs(place);
    return false;
  }

  get resumed(): boolean {
    const lines = this.#trace.stack?.split("\n").slice(1) ?? [];
    const caller = lines.findIndex((line) => {
      const place = placeIn(line);
      return isAwaiting.test(line) || (place !== undefined && isTheirs(place));
    });
    if (caller < 0 || isAwaiting.test(lines[caller] as string)) return false;
    const below = lines[caller + 1];
    return below === undefined ? lines.length < this.#frames : isAwaiting.test(below) || isQueue.test(below);
  }

  get around(): string | undefined {
    let where: "before" | "theirs" | "ours" = "before";
    for (const place of this.#places()) {
      const theirs = isTheirs(place);
      if (theirs && where === "ours") return place;
      if (theirs) where = "theirs";
      else if (where === "theirs" && isOurs(place)) where = "ours";
    }
    return undefined;
  }

  *#places(): Generator<string> {
    for (const line of this.#trace.stack?.split("\n") ?? []) {
      const found = placeIn(line);
      if (found) yield found;
    }
  }
}

/** Not on the stack: a function that waits for the one above it. */
const isAwaiting = /^\s*at async /;
/** Runs what goes on after an `await`. */
const isQueue = /^\s*at (?:process\.)?(?:processTicksAndRejections|runMicrotasks|runNextTicks) \(/;

function placeIn(line: string): string | undefined {
  const found = /(?:\(|at (?:async )?)((?:file:\/\/|\/|[A-Za-z]:\\)[^()]*:\d+:\d+)\)?$/.exec(line)?.[1];
  return found?.startsWith("file://") ? pathOf(found) : found;
}

function isOurs(place: string): boolean {
  return [own, source].some((folder) => folder && place.startsWith(folder));
}

function isTheirs(place: string): boolean {
  return !isOurs(place) && !/[\\/]node_modules[\\/]/.test(place);
}

function pathOf(url: string): string {
  const [, file, position] = /^(.*?)((?::\d+){2})$/.exec(url) ?? [];
  return file ? fileURLToPath(file) + position : url;
}

export const callSites = {
  /** Whether ours and theirs can be told apart. */
  known: own !== undefined,
  /** `above`: the function whose callers count. */
  here(above: (...args: never[]) => unknown, frames = depth): CallSite {
    const limit = Error.stackTraceLimit;
    // It cannot be set where intrinsics are frozen: then the stack has as many frames as it has.
    const most = Reflect.set(Error, "stackTraceLimit", frames) ? frames : limit;
    const trace: { stack?: string } = {};
    Error.captureStackTrace(trace, above);
    Reflect.set(Error, "stackTraceLimit", limit);
    return new Captured(trace, most);
  },
};
