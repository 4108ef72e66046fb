/** Locks of a transaction that stays open: where a session cannot be kept from one transaction to the next. */
import {
  type Holdfast,
  LockLostError,
  type LockRequest,
  LockTimeoutError,
  type Transaction,
  sql,
} from "holdfast";
import { setTimeout as sleep } from "node:timers/promises";
import { describe } from "../describe.ts";
import { soon } from "./soon.ts";

export interface OpenTransaction {
  readonly lost: AbortSignal;
  release(): Promise<void>;
}

/** The longest that servers and timers know, almost 25 days. */
const longestMs = 2 ** 31 - 1 - 60_000;
const heartbeatMs = 5000;

/**
 * How long to stand in the server's line, and to be away from it. Who waits has a connection of the pooler's, and the
 * command of whoever is waited for may need one: 20 who wait for ever would have all that there are.
 */
const lineMs = 1000;
const awayMs = 1000;

/** Throws as `hf.transaction` does if they are not to be had. */
export async function openTransaction(
  hf: Holdfast<unknown>,
  lock: readonly LockRequest[],
  waitMs: number,
  signal: AbortSignal,
): Promise<OpenTransaction> {
  const until = performance.now() + waitMs;
  for (;;) {
    try {
      const left = Math.ceil(until - performance.now());
      return await begin(hf, lock, waitMs === 0 ? "nowait" : Math.max(1, Math.min(lineMs, left)), signal);
    } catch (error) {
      const left = until - performance.now();
      if (!(error instanceof LockTimeoutError) || left <= 0) throw error;
      await sleep(Math.min(left, awayMs * (0.5 + Math.random())), undefined, { signal });
    }
  }
}

async function begin(
  hf: Holdfast<unknown>,
  lock: readonly LockRequest[],
  wait: number | "nowait",
  signal: AbortSignal,
): Promise<OpenTransaction> {
  const { engine, transactionLocks } = await hf.capabilities();
  const held = Promise.withResolvers<void>();
  const over = Promise.withResolvers<void>();
  const lost = new AbortController();
  // An abort ends the wait. Once it is open it ends when it is released.
  const stop = new AbortController();
  const onAbort = (): void => stop.abort(signal.reason);
  signal.throwIfAborted();
  signal.addEventListener("abort", onAbort, { once: true });
  const running = hf.transaction(
    {
      lock,
      wait,
      deadline: longestMs,
      retry: false,
      // Without an id of its own it is in nobody's way: vacuum would stop at it. Where a lock is a row, it is written to.
      readOnly: transactionLocks === "transaction advisory",
      signal: stop.signal,
    },
    async (tx) => {
      // How long a transaction may be is meant for those of applications.
      if (engine === "postgres")
        await tx.query(
          sql`SELECT pg_catalog.set_config(name, '0', true) FROM pg_catalog.pg_settings WHERE name OPERATOR(pg_catalog.=) 'transaction_timeout'`,
        );
      held.resolve();
      await untilOver(tx, over.promise);
    },
  );
  running.catch((error: unknown) => {
    const names = lock.map(({ key }) => key.name);
    lost.abort(new LockLostError(names, `its transaction is gone (${describe(error)})`, error));
  });
  try {
    await Promise.race([held.promise, running]);
  } finally {
    signal.removeEventListener("abort", onAbort);
  }
  return {
    lost: lost.signal,
    async release() {
      over.resolve();
      await running;
    },
  };
}

/** A cable pulled out says nothing: only a statement that is not answered shows it. And who says something is not idle. */
async function untilOver(tx: Transaction<unknown>, over: Promise<void>): Promise<void> {
  const { signal } = tx;
  let isOver = false;
  const ended = over.then(() => void (isOver = true));
  const gone = new Promise<never>((_, reject) => {
    const onGone = (): void => reject(signal.reason as Error);
    if (signal.aborted) onGone();
    else signal.addEventListener("abort", onGone, { once: true });
  });
  const beating = async (): Promise<void> => {
    while (!isOver) {
      await sleep(heartbeatMs, undefined, { ref: false });
      if (!isOver) await soon(tx.query(sql`SELECT 1 AS one`));
    }
  };
  await Promise.race([ended, gone, beating()]);
}
