/**
 * Transactions of clients that write BEGIN and COMMIT themselves, as most ORMs do. Such a client waits for as long as
 * the network is silent, and gives its connection back while the body may still be at work. So all of them are run from
 * here: every wait ends, a body that was given up sends nothing more, and a session that does not answer is ended.
 */
import type { ClientTransaction, Connection, Database, Lent } from "../seam/database.ts";
import { Silence, graceMs } from "../waiting/interrupt.ts";
import { isError } from "../seam/thrown.ts";

/** So long a client may take to notice that its session was ended, and to give back what it had. */
const noticeMs = 1000;

/** Resolves to what the body returned, once the client has committed it. */
export async function runInClient<Native, C extends Connection, T>(
  database: Database<Native, C>,
  options: Omit<ClientTransaction, "signal" | "taken" | "timeoutMs">,
  { signal, leftMs }: { readonly signal: AbortSignal; leftMs(): number },
  body: (lent: Lent<Native, C>) => Promise<T>,
): Promise<T> {
  const transaction = database.transaction as NonNullable<typeof database.transaction>;
  let drop: (() => void) | undefined;
  let entered = false;
  /** Nobody waits any more. */
  let left: { readonly error: unknown } | undefined;
  let returned: { readonly value: T } | undefined;
  let thrown: { readonly error: unknown } | undefined;
  let timer: NodeJS.Timeout | undefined;
  let leave!: (error: unknown) => void;
  const leaving = new Promise<never>((_, reject) => (leave = reject));
  const atMost = (ms: number, error: unknown) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      drop?.();
      timer = setTimeout(
        () => {
          left = { error };
          leave(error);
        },
        drop ? noticeMs : 0,
      );
    }, ms);
  };
  // For a connection that does not come, or a BEGIN that is not answered.
  const onAbort = () => {
    if (!entered) atMost(noticeMs, signal.reason);
  };
  if (signal.aborted) throw signal.reason;
  signal.addEventListener("abort", onAbort, { once: true });
  const running = transaction.call(
    database,
    {
      ...options,
      signal,
      timeoutMs: options.deadlineMs + 2 * graceMs,
      taken(end) {
        drop = end;
        if (left) end();
      },
    },
    async (lent) => {
      // Too late: the client rolls back, and gives back what it had.
      if (left) throw left.error;
      signal.throwIfAborted();
      entered = true;
      clearTimeout(timer);
      try {
        returned = { value: await body(lent) };
        atMost(leftMs() + graceMs, new Silence());
      } catch (error) {
        thrown = { error };
        atMost(graceMs, error);
        // Clients look at what is thrown, some before they roll back: one that is no error may keep them from it.
        throw isError(error) ? error : new Error("The body of the transaction threw what is no error");
      } finally {
        await lent.seal?.();
      }
    },
  );
  running.catch(() => {});
  try {
    await Promise.race([running, leaving]);
    return (returned as unknown as { readonly value: T }).value;
  } catch (error) {
    // If ROLLBACK fails too, or a client has words of its own, it is still the body's error that there is to tell.
    throw thrown ? thrown.error : error;
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", onAbort);
  }
}
