/**
 * Rows at which callers of this process have met. They take turns there instead of spoiling each other's attempts: of 64 that
 * want one row at the same time, 63 would read, decide and write in vain.
 */
import { Inside } from "../../context/inside.ts";

interface VersionLine {
  readonly waiting: (() => void)[];
  /** Ends the turn that somebody has. */
  end: () => void;
  /** When it was begun. */
  since: number;
}

/** One caller's turn, until it is left. */
export interface VersionTurn {
  run<T>(work: () => Promise<T>): Promise<T>;
  /** Lets the next one in. */
  leave(): void;
}

export class VersionTurns {
  readonly #lines = new Map<string, VersionLine>();
  /** Who is called in a turn stands in no line: it might be the same one, or one whose turn waits for this one. */
  readonly #inside = new Inside<true>();

  get inside(): boolean {
    return this.#inside.getStore() === true;
  }

  /** Whether callers have met there. */
  has(name: string): boolean {
    return this.#lines.has(name);
  }

  /** Undefined: the others take longer than that. */
  async take(name: string, ms: number, signal?: AbortSignal): Promise<VersionTurn | undefined> {
    signal?.throwIfAborted();
    const line = this.#lines.get(name);
    if (line && !(await isLetIn(line, ms, signal))) return undefined;
    const mine: VersionLine = line ?? { waiting: [], end: () => {}, since: 0 };
    if (!line) this.#lines.set(name, mine);
    return this.#begin(name, mine);
  }

  #begin(name: string, line: VersionLine): VersionTurn {
    let left = false;
    const leave = () => {
      if (left) return;
      left = true;
      const next = line.waiting.shift();
      if (next) next();
      else this.#lines.delete(name);
    };
    line.end = leave;
    line.since = performance.now();
    return { run: (work) => this.#inside.run(true, work), leave };
  }
}

function isLetIn(line: VersionLine, ms: number, signal: AbortSignal | undefined): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", onAbort);
    };
    const go = () => {
      stop();
      // Until it goes on nobody has the turn: it must not be taken for the one before, who has had it for long.
      line.since = performance.now();
      resolve(true);
    };
    const leave = () => {
      stop();
      line.waiting.splice(line.waiting.indexOf(go), 1);
    };
    const timer = setTimeout(() => {
      // Whoever has been at it for all that time may never end: the others go on.
      if (performance.now() - line.since >= ms) line.end();
      if (!line.waiting.includes(go)) return;
      leave();
      resolve(false);
    }, ms);
    const onAbort = () => {
      leave();
      reject(signal?.reason as Error);
    };
    signal?.addEventListener("abort", onAbort, { once: true });
    line.waiting.push(go);
  });
}

const known = new WeakMap<object, VersionTurns>();

/** Those of an instance. */
export function turnsOf(context: object): VersionTurns {
  let turns = known.get(context);
  if (!turns) known.set(context, (turns = new VersionTurns()));
  return turns;
}
