import type { Connection, Pinned } from "../../seam/database.ts";
import { NoConnectionError } from "../../seam/errors.ts";
import { graceMs, within } from "../../waiting/interrupt.ts";
import { notConnected } from "../../transaction/one-shot.ts";
import type { Instance } from "../../transaction/instance.ts";

/** How long a pool may take to give a connection, whatever the wait for the lock is. */
export const poolMs = 10_000;

/** A connection that stays the same session. */
export async function connectSession<Native, C extends Connection>(
  { database, wrongConnection }: Pick<Instance<Native, C>, "database" | "wrongConnection">,
  { signal, ms = poolMs }: { readonly signal?: AbortSignal | undefined; readonly ms?: number } = {},
): Promise<Pinned<Native, C>> {
  const patience = AbortSignal.timeout(ms);
  const connect = database.connect as NonNullable<typeof database.connect>;
  try {
    return await wrongConnection.taking(() =>
      connect({
        use: "session",
        locks: [],
        wait: "nowait",
        signal: signal ? AbortSignal.any([patience, signal]) : patience,
      }),
    );
  } catch (error) {
    if (patience.aborted && !signal?.aborted) throw new NoConnectionError(ms);
    throw signal?.aborted ? error : notConnected(database, error);
  }
}

/**
 * What the server says, if it says so in time and the connection lives for so long: a client may forget whom it owes an
 * answer when its connection ends, and whoever comes next on the same connection would wait, too.
 */
export async function answered<T>(connection: Connection, running: Promise<T>, ms = graceMs): Promise<T> {
  const { lost } = connection;
  let onLost: (() => void) | undefined;
  const gone = new Promise<never>((_, reject) => {
    onLost = () => reject(lost.reason as Error);
    if (lost.aborted) onLost();
    else lost.addEventListener("abort", onLost, { once: true });
  });
  running.catch(() => {});
  try {
    return await within(ms, Promise.race([running, gone]));
  } finally {
    if (onLost) lost.removeEventListener("abort", onLost);
  }
}
