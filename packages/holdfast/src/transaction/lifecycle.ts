import { UsageError } from "../seam/errors.ts";

/** Ends something that goes on in the background, within the time that it is given. */
type End = (patienceMs: number) => Promise<unknown>;

/** How long what runs may go on after `close`; then it is told to end, and after as long again nobody waits for it. */
const closeMs = 5000;

/**
 * What an instance has begun and not ended, in the order in which it is ended: workers, schedules and leaders, whose handlers
 * may call it until they are done; calls that are under way; and what all of them share (leases, sessions, who listens).
 */
export class Started {
  readonly #ends = new Set<End>();
  readonly #last = new Set<() => Promise<unknown>>();
  /** Nothing more is started. */
  #closing: Promise<void> | undefined;
  /** Nothing more is called. */
  #closed = false;
  #calls = 0;
  #idle: (() => void) | undefined;

  /** Returns what forgets it. Throws once the instance is being closed. */
  add(what: string, end: End): () => void {
    if (this.#closing) throw closed(what);
    this.#ends.add(end);
    return () => this.#ends.delete(end);
  }

  /** What they share, ended after them. */
  finally(end: () => Promise<unknown>): void {
    this.#last.add(end);
  }

  /** Throws once the instance is closed. */
  check(call: string): void {
    if (this.#closed) throw closed(call);
  }

  /** A call, which `close` waits for. Throws once the instance is closed. */
  async during<T>(call: string, work: () => Promise<T>): Promise<T> {
    this.begin(call);
    try {
      return await work();
    } finally {
      this.end();
    }
  }

  /** The same, of one that is ended by whoever has begun it. */
  begin(call: string): void {
    this.check(call);
    this.#calls++;
  }

  end(): void {
    if (--this.#calls === 0) this.#idle?.();
  }

  /** Ends everything, and waits for it as long as is stated. `inside`: of a call that is under way, which it cannot wait for. */
  close(inside: boolean): Promise<void> {
    return (this.#closing ??= this.#close(inside));
  }

  async #close(inside: boolean): Promise<void> {
    // Who gives up by itself after the same time comes first.
    await atMost(
      2 * closeMs + 1000,
      [...this.#ends].map((end) => end(closeMs)),
    );
    this.#closed = true;
    if (this.#calls > 0 && !inside) await atMost(closeMs, [new Promise<void>((idle) => (this.#idle = idle))]);
    await atMost(
      2 * closeMs,
      [...this.#last].map((end) => end()),
    );
  }
}

function closed(call: string): UsageError {
  return new UsageError(
    `${call}: this instance of Holdfast was closed. Make another one, or close it after its last call.`,
    "HF_CLOSED",
  );
}

async function atMost(ms: number, ends: readonly Promise<unknown>[]): Promise<void> {
  if (ends.length === 0) return;
  let timer: NodeJS.Timeout | undefined;
  const enough = new Promise<void>((resolve) => (timer = setTimeout(resolve, ms)));
  await Promise.race([Promise.allSettled(ends), enough]);
  clearTimeout(timer);
}
