/** The place in the caller's own code that a call came from. */
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { self } from "./self.ts";

export interface CallSite {
  /** `file:line:column` of the nearest frame that is neither ours nor a package's, if the stack shows one. */
  readonly place: string | undefined;
  /** Whether that frame is the one that made the call, with no package in between. */
  readonly near?: boolean;
}

/** Ours; in a bundle, where everything is one file, nothing can be told apart. */
const own = self && /[\\/]context[\\/]self\.[jt]s$/.test(self) ? dirname(dirname(self)) : undefined;
/** The sources that it was built from: stacks name these where source maps are on, as they are in Jest. */
const source = own && basename(own) === "dist" ? join(dirname(own), "src") : undefined;
/** Frames of a client library between the call and us. */
const depth = 60;

class Captured implements CallSite {
  readonly #trace: { stack?: string };

  constructor(trace: { stack?: string }) {
    this.#trace = trace;
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

  *#places(): Generator<string> {
    for (const line of this.#trace.stack?.split("\n") ?? []) {
      const found = /(?:\(|at (?:async )?)((?:file:\/\/|\/|[A-Za-z]:\\)[^()]*:\d+:\d+)\)?$/.exec(line)?.[1];
      if (found) yield found.startsWith("file://") ? pathOf(found) : found;
    }
  }
}

function isTheirs(place: string): boolean {
  const ours = [own, source].some((folder) => folder && place.startsWith(folder));
  return !ours && !/[\\/]node_modules[\\/]/.test(place);
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
    Error.stackTraceLimit = frames;
    const trace: { stack?: string } = {};
    Error.captureStackTrace(trace, above);
    Error.stackTraceLimit = limit;
    return new Captured(trace);
  },
};
