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
  let cancelling: Promise<void> | undefined;
  let timer: NodeJS.Timeout | undefined;
  let fallSilent!: (error: Silence) => void;
  const answer = new Promise<T>((resolve, reject) => {
    fallSilent = reject;
    running.then(resolve, reject);
  });
  const onAbort = () => {
    // Caught at once: a request that fails must not end the process while the statement is still running.
    cancelling = connection.cancel?.().catch(() => {});
    if (connection.cancel) timer = setTimeout(() => fallSilent(new Silence()), graceMs);
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
    clearTimeout(timer);
    signal.removeEventListener("abort", onAbort);
    if (cancelling) await within(graceMs, cancelling).catch(onSilence);
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
  let cancelling: Promise<void> | undefined;
  let fallSilent!: (error: Silence) => void;
  let timer = setTimeout(() => {
    cancelling = connection.cancel?.().catch(() => {});
    timer = setTimeout(() => fallSilent(new Silence()), graceMs);
  }, ms);
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
    if (cancelling) await within(graceMs, cancelling).catch(() => {});
  }
}
