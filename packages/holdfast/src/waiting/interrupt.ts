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

/** A tick later: what a synchronous client has done at once is settled by then, and nothing has to be watched. */
const soon = Promise.resolve();

// These run several times in each transaction: with callbacks, since each `await` costs three promises.

/** Rejects with {@link Silence} if nothing has come `ms` after the call. */
export function within<T>(ms: number, running: Promise<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    let settled = false;
    let timer: NodeJS.Timeout | undefined;
    const settle = () => {
      settled = true;
      clearTimeout(timer);
    };
    running.then(
      (value) => {
        settle();
        resolve(value);
      },
      (error: unknown) => {
        settle();
        reject(error);
      },
    );
    void soon.then(() => {
      if (!settled) timer = setTimeout(() => reject(new Silence()), ms);
    });
  });
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
export function interruptible<T>(
  connection: Connection,
  signal: AbortSignal | undefined,
  run: () => Promise<T>,
  onSilence: () => void = () => {},
): Promise<T> {
  if (!signal) return run();
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    let settled = false;
    let listens = false;
    let cancelling: Cancelling | undefined;
    const settle = (then: () => void) => {
      if (settled) return;
      settled = true;
      if (listens) signal.removeEventListener("abort", onAbort);
      if (cancelling) void cancelling.end().catch(onSilence).then(then);
      else then();
    };
    const failed = (error: unknown) => {
      if (error instanceof Silence) onSilence();
      settle(() => reject(signal.aborted ? signal.reason : error));
    };
    const onAbort = () => {
      if (connection.cancel) cancelling = new Cancelling(connection, failed);
    };
    run().then((value) => {
      // Granted at the very instant of the abort: the caller no longer wants it, and our caller rolls back.
      settle(() => (signal.aborted ? reject(signal.reason) : resolve(value)));
    }, failed);
    void soon.then(() => {
      if (settled) return;
      if (signal.aborted) return onAbort();
      listens = true;
      signal.addEventListener("abort", onAbort, { once: true });
    });
  });
}

/**
 * Runs a statement that is ended on the server if it takes longer: then undefined, whatever it says. With a timer alone, as most
 * are done long before: an AbortController, its signal and their listeners are a tenth of what a short statement costs.
 */
export function boundedBy<T>(
  connection: Connection,
  ms: number,
  run: () => Promise<T>,
): Promise<{ readonly value: T } | undefined> {
  return new Promise((resolve, reject) => {
    let cancelling: Cancelling | undefined;
    // Answered at the very instant of the cancel request, or after it, or never: it took too long.
    const late = () =>
      void cancelling?.end().then(
        () => resolve(undefined),
        () => resolve(undefined),
      );
    const running = run();
    const timer = setTimeout(() => (cancelling = new Cancelling(connection, late)), ms);
    running.then(
      (value) => {
        clearTimeout(timer);
        if (cancelling) late();
        else resolve({ value });
      },
      (error: unknown) => {
        clearTimeout(timer);
        if (cancelling) late();
        else reject(error);
      },
    );
  });
}
