/**
 * Those of this process that want to be the writer of a file, one after the other. SQLite itself keeps everybody else
 * out; this saves them finding that out by trying, where a refusal costs an error with its stack, a pause and a timer.
 * Without it, and with a handle for each, a transaction took 555 µs with four callers, and 256 with one.
 */
import { realpathSync } from "node:fs";
import { standStill } from "../../waiting/wait.ts";
import { Board } from "./board.ts";

/** The work of a one-shot statement is a statement or two, and a lease may depend on it. */
export type WriterKind = "one-shot" | "transaction";

interface Waiter {
  readonly owner: object;
  readonly until: number;
  readonly end: (granted: boolean) => void;
}

/** After this long in which the file was free for instants only, others get a real chance: processes look every few ms. */
const turnMs = 100;
const gapMs = 2;
/** Shorter transactions leave the file free for a good part of the time by themselves, between COMMIT and BEGIN. */
const shortMs = 1;

export class WriterQueue {
  /** Of the file; absent where it is not known. */
  readonly board: Board | undefined;
  #owner: object | undefined;
  /** When the turn began, or the last one ended. */
  #since = 0;
  /** How long turns have lasted since others had a chance. */
  #heldMs = 0;
  /** Each in the order of arrival; the two take turns, so that a one-shot statement waits for one transaction at the most. */
  readonly #waiting: Record<WriterKind, Waiter[]> = { "one-shot": [], transaction: [] };
  #last: WriterKind = "transaction";
  /** One for all, since hardly anybody waits that long: set for whoever's patience ends first. */
  #timer: NodeJS.Timeout | undefined;
  /** Ends the pause in which the file is free for other processes. */
  #gap: NodeJS.Timeout | undefined;
  #timerAt = Infinity;

  constructor(file?: string) {
    if (file !== undefined) this.board = new Board(file);
  }

  /** Whether it is the owner's turn, which lasts until it leaves. */
  enter(owner: object): boolean {
    if (this.#owner) return false;
    const left = this.#since;
    this.#take(owner);
    if (this.#since - left > gapMs) this.#heldMs = 0;
    return true;
  }

  /** The same for somebody with whom the whole process waits: the pause for other processes is made here, if it is due. */
  enterNow(owner: object): boolean {
    if (this.#owner !== this) return this.enter(owner);
    clearTimeout(this.#gap);
    standStill(gapMs);
    this.#take(owner);
    return true;
  }

  /** Resolves to how much of the patience is left: 0 means that it is not the owner's turn. */
  stand(owner: object, kind: WriterKind, waitMs: number, signal?: AbortSignal): Promise<number> {
    return new Promise((resolve, reject) => {
      const until = performance.now() + waitMs;
      const writerQueue = this.#waiting[kind];
      const onAbort = () => {
        writerQueue.splice(writerQueue.indexOf(waiter), 1);
        this.#watch();
        reject(signal?.reason as Error);
      };
      const waiter: Waiter = {
        owner,
        until,
        end(granted) {
          signal?.removeEventListener("abort", onAbort);
          resolve(granted ? Math.max(1, until - performance.now()) : 0);
        },
      };
      if (signal?.aborted) return reject(signal.reason as Error);
      signal?.addEventListener("abort", onAbort, { once: true });
      writerQueue.push(waiter);
      if (until < this.#timerAt) this.#watch();
    });
  }

  /** Holds nothing any more. If it is the owner's turn, the next one's begins. */
  leave(owner: object): void {
    this.board?.clear(owner);
    if (this.#owner !== owner) return;
    const now = performance.now();
    const held = now - this.#since;
    this.#since = now;
    if (held > shortMs) this.#heldMs += held;
    if (this.#heldMs < turnMs) return this.#next();
    this.#heldMs = 0;
    // Nobody's turn: those who come meanwhile stand in line.
    this.#owner = this;
    this.#gap = setTimeout(() => this.#next(), gapMs);
  }

  get #empty(): boolean {
    return this.#waiting["one-shot"].length + this.#waiting.transaction.length === 0;
  }

  #take(owner: object): void {
    this.#owner = owner;
    this.#since = performance.now();
  }

  #next(): void {
    const other: WriterKind = this.#last === "one-shot" ? "transaction" : "one-shot";
    const kind = this.#waiting[other].length > 0 ? other : this.#last;
    const waiter = this.#waiting[kind].shift();
    this.#owner = undefined;
    if (!waiter) return;
    this.#last = kind;
    this.#take(waiter.owner);
    waiter.end(true);
    if (this.#empty) this.#watch();
  }

  /** Ends the wait of those who are out of patience, and sets the timer for the next one. */
  #watch(): void {
    const now = performance.now();
    let first = Infinity;
    for (const kind of ["one-shot", "transaction"] as const) {
      const late = this.#waiting[kind].filter(({ until }) => until <= now);
      if (late.length > 0)
        this.#waiting[kind].splice(
          0,
          Infinity,
          ...this.#waiting[kind].filter((each) => !late.includes(each)),
        );
      for (const { until } of this.#waiting[kind]) first = Math.min(first, until);
      for (const { end } of late) end(false);
    }
    clearTimeout(this.#timer);
    this.#timerAt = first;
    this.#timer = first === Infinity ? undefined : setTimeout(() => this.#watch(), Math.ceil(first - now));
  }
}

const writerQueues = new Map<string, WeakRef<WriterQueue>>();
const unused = new FinalizationRegistry<string>((path) => {
  if (!writerQueues.get(path)?.deref()) writerQueues.delete(path);
});

/** Of a file, by whatever path it was opened. */
export function writerQueueOf(file: string): WriterQueue {
  let path = file;
  try {
    path = realpathSync(file);
  } catch {
    // Not a path as the file system knows it: the same words mean the same file all the same.
  }
  let writerQueue = writerQueues.get(path)?.deref();
  if (!writerQueue) {
    writerQueues.set(path, new WeakRef((writerQueue = new WriterQueue(path))));
    unused.register(writerQueue, path);
  }
  return writerQueue;
}
