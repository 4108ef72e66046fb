import type { Connection } from "./database.ts";

/**
 * Runs statements that an abort ends on the server. Returns only when the cancel request can no longer hit a
 * later statement, so the connection is clean for whatever comes next.
 */
export async function interruptible<T>(
  connection: Connection,
  signal: AbortSignal | undefined,
  run: () => Promise<T>,
): Promise<T> {
  if (!signal) return run();
  signal.throwIfAborted();
  let cancelling: Promise<void> | undefined;
  const onAbort = () => {
    cancelling = connection.cancel?.();
  };
  signal.addEventListener("abort", onAbort, { once: true });
  try {
    const value = await run();
    // Granted at the very instant of the abort: the caller no longer wants it, and our caller rolls back.
    signal.throwIfAborted();
    return value;
  } catch (error) {
    throw signal.aborted ? signal.reason : error;
  } finally {
    signal.removeEventListener("abort", onAbort);
    await cancelling?.catch(() => {});
  }
}
