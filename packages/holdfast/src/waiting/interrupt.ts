import type { Connection } from "../seam/database.ts";

/** How long a statement that was cancelled, or a clean-up, may still take before its connection counts as dead. */
export const graceMs = 5000;

/** The network is silent: nobody knows what becomes of the statement, and the connection must not be used again. */
export class Silence extends Error {
  readonly lost = true;
  constructor() {
    super(`the server did not answer for ${graceMs} ms`);
  }
}

/** Rejects with {@link Silence} if nothing has come `ms` after the call. */
export async function within<T>(ms: number, running: Promise<T>): Promise<T> {
  if (await isSettled(running)) return running;
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Silence()), ms);
    running.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}

/** Whether it was done at once, by a client that is synchronous: then nothing has to be watched. */
async function isSettled(running: Promise<unknown>): Promise<boolean> {
  let settled = false;
  const settle = () => (settled = true);
  running.then(settle, settle);
  await Promise.resolve();
  return settled;
}

/**
 * Asks the server to end what a connection is doing, and asks again until it has ended: a request that arrives before its
 * statement has begun finds nothing to end, and the server forgets it. The second one comes late enough (a round trip,
 * usually) not to hit what is sent to clean up after the first.
 */
export class Cancelling {
  readonly #connection: Connection;
  readonly #silence: NodeJS.Timeout;
  #asking: Promise<void> = Promise.resolve();
  #again: NodeJS.Timeout | undefined;
  #ended = false;

  constructor(connection: Connection, onSilence: (error: Silence) => void = () => {}) {
    this.#connection = connection;
    this.#silence = setTimeout(() => onSilence(new Silence()), graceMs);
    this.#ask(250);
  }

  #ask(againMs: number): void {
    // Caught at once: a request that fails must not end the process while the statement is still running.
    const asking = this.#connection.cancel?.().catch(() => {}) ?? Promise.resolve();
    this.#asking = asking.then(() => {
      if (this.#ended) return;
      this.#again = setTimeout(() => this.#ask(Math.min(2 * againMs, 1000)), againMs);
    });
  }

  /** It has ended: resolves when no request of ours can hit a later statement. {@link Silence} if none knows. */
  async end(): Promise<void> {
    this.#ended = true;
    clearTimeout(this.#silence);
    clearTimeout(this.#again);
    await within(graceMs, this.#asking);
  }
}

/**
 * Runs statements that an abort ends on the server. Returns only when the cancel request can no longer hit a
 * later statement, so the connection is clean for whatever comes next; unless the server falls silent, which is
 * told by `onSilence`.
 */
export async function interruptible<T>(
  connection: Connection,
  signal: AbortSignal | undefined,
  run: () => Promise<T>,
  onSilence: () => void = () => {},
): Promise<T> {
  if (!signal) return run();
  signal.throwIfAborted();
  const running = run();
  if (await isSettled(running)) {
    signal.throwIfAborted();
    return running;
  }
  let cancelling: Cancelling | undefined;
  let fallSilent!: (error: Silence) => void;
  const answer = new Promise<T>((resolve, reject) => {
    fallSilent = reject;
    running.then(resolve, reject);
  });
  const onAbort = () => {
    if (connection.cancel) cancelling = new Cancelling(connection, fallSilent);
  };
  if (signal.aborted) onAbort();
  else signal.addEventListener("abort", onAbort, { once: true });
  try {
    const value = await answer;
    // Granted at the very instant of the abort: the caller no longer wants it, and our caller rolls back.
    signal.throwIfAborted();
    return value;
  } catch (error) {
    if (error instanceof Silence) onSilence();
    throw signal.aborted ? signal.reason : error;
  } finally {
    signal.removeEventListener("abort", onAbort);
    await cancelling?.end().catch(onSilence);
  }
}

/**
 * Runs a statement that is ended on the server if it takes longer: then undefined, whatever it says. With a timer alone, as most
 * are done long before: an AbortController, its signal and their listeners are a tenth of what a short statement costs.
 */
export async function boundedBy<T>(
  connection: Connection,
  ms: number,
  run: () => Promise<T>,
): Promise<{ readonly value: T } | undefined> {
  let cancelling: Cancelling | undefined;
  let fallSilent!: (error: Silence) => void;
  const timer = setTimeout(() => (cancelling = new Cancelling(connection, fallSilent)), ms);
  try {
    const value = await new Promise<T>((resolve, reject) => {
      fallSilent = reject;
      run().then(resolve, reject);
    });
    // Answered at the very instant of the cancel request, or after it.
    return cancelling ? undefined : { value };
  } catch (error) {
    if (cancelling) return undefined;
    throw error;
  } finally {
    clearTimeout(timer);
    await cancelling?.end().catch(() => {});
  }
}
