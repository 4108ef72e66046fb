import { UsageError } from "./errors.ts";

/** Ends something that goes on in the background, within the time that it is given. */
type End = (patienceMs: number) => Promise<unknown>;

/** How long what runs may go on after `close`; then it is told to end, and after as long again nobody waits for it. */
const closeMs = 5000;

/** What an instance has begun and not ended: workers, schedules, leaders. */
export class Started {
  readonly #ends = new Set<End>();
  readonly #last = new Set<() => Promise<unknown>>();
  #closed = false;

  /** Returns what forgets it. Throws once the instance is closed. */
  add(what: string, end: End): () => void {
    if (this.#closed) throw new UsageError(`${what}: this instance of Holdfast was closed`);
    this.#ends.add(end);
    return () => this.#ends.delete(end);
  }

  /** What they share, ended after them. */
  finally(end: () => Promise<unknown>): void {
    this.#last.add(end);
  }

  /** Ends everything, and waits for it as long as is stated. */
  async close(): Promise<void> {
    this.#closed = true;
    // Who gives up by itself after the same time comes first.
    await atMost(
      2 * closeMs + 1000,
      [...this.#ends].map((end) => end(closeMs)),
    );
    await atMost(
      closeMs,
      [...this.#last].map((end) => end()),
    );
  }
}

async function atMost(ms: number, ends: readonly Promise<unknown>[]): Promise<void> {
  if (ends.length === 0) return;
  let timer: NodeJS.Timeout | undefined;
  const enough = new Promise<void>((resolve) => (timer = setTimeout(resolve, ms)));
  await Promise.race([Promise.allSettled(ends), enough]);
  clearTimeout(timer);
}
