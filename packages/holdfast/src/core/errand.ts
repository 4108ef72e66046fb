import type { Beside } from "./beside.ts";
import type { Connection, Database, Purpose } from "./database.ts";
import { NoConnectionError } from "./errors.ts";
import { classify } from "./failure.ts";
import { runInClient } from "./in-client.ts";
import { Silence, within } from "./interrupt.ts";
import { pause, retryPolicy } from "./retry.ts";
import { sleep } from "./wait.ts";

const errandMs = 10_000;

/** A short errand on any connection, inside no transaction of ours. */
export function withConnection<Native, C extends Connection, T>(
  { database, beside }: { readonly database: Database<Native, C>; readonly beside?: Beside },
  errand: (connection: C) => Promise<T>,
  ms = errandMs,
): Promise<T> {
  const run = () => onConnection(database, errand, ms);
  return beside ? beside.ours(run) : run();
}

/**
 * Runs an errand again after a failure that may pass. What it did before its answer was lost must be found by the next
 * run, not done twice: ids make it so. Without them: only `undone`, what the server has rolled back.
 */
export async function again<T>(
  database: Database<unknown, Connection>,
  work: () => Promise<T>,
  on: typeof passes = passes,
): Promise<T> {
  const policy = retryPolicy(undefined);
  for (let attempt = 1; ; attempt++) {
    try {
      return await work();
    } catch (error) {
      if (!on(database, error) || attempt === policy.attempts) throw error;
      await sleep(pause(policy, attempt));
    }
  }
}

/** Whether the server has rolled it back for the sake of others: nothing of it was done. */
export function undone(database: Database<unknown, Connection>, error: unknown): boolean {
  const failure = classify(database, error);
  return failure === "deadlock" || failure === "serialization";
}

/** Whether an error means that the same may well succeed now. */
export function passes(database: Database<unknown, Connection>, error: unknown): boolean {
  const failure = classify(database, error);
  return failure !== undefined && retryPolicy(undefined).on.has(failure);
}

async function onConnection<Native, C extends Connection, T>(
  database: Database<Native, C>,
  errand: (connection: C) => Promise<T>,
  ms: number,
): Promise<T> {
  // Not AbortSignal.timeout, whose timer would outlive the errand: thousands of them at a thousand errands a second.
  const patience = new AbortController();
  const { signal } = patience;
  const timer = setTimeout(() => patience.abort(), errandMs);
  const purpose: Purpose = { use: "session", locks: [], wait: 5000, signal };
  if (database.connect) {
    const pinned = await database
      .connect(purpose)
      .catch((error: unknown) => {
        throw error === signal.reason ? new NoConnectionError(errandMs) : error;
      })
      .finally(() => clearTimeout(timer));
    const { connection } = pinned;
    let silent = false;
    try {
      return await within(ms, errand(connection));
    } catch (error) {
      silent = error instanceof Silence;
      throw error;
    } finally {
      await pinned.release(silent || connection.lost.aborted);
    }
  }
  let value: { result: T } | undefined;
  const endsAt = performance.now() + ms;
  await runInClient(
    database,
    {
      use: "session",
      locks: [],
      wait: 5000,
      isolation: "read committed",
      readOnly: false,
      deadlineMs: ms,
      isolationIsDefault: true,
    },
    { signal, leftMs: () => Math.max(0, endsAt - performance.now()) },
    async ({ connection }) => {
      clearTimeout(timer);
      value = { result: await within(ms, errand(connection)) };
    },
  )
    .catch((error: unknown) => {
      throw error === signal.reason ? new NoConnectionError(errandMs) : error;
    })
    .finally(() => clearTimeout(timer));
  return (value as unknown as { result: T }).result;
}
