import { setTimeout as sleep } from "node:timers/promises";

/** A server that has fallen silent must not keep us: what was held ends with its session, or with its ttl. */
const patienceMs = 5000;

/** What the work comes to, or an error if that takes too long. */
export async function soon<T>(work: Promise<T>): Promise<T> {
  const timer = new AbortController();
  const late = sleep(patienceMs, undefined, { signal: timer.signal }).then(() => {
    throw new Error(`the server did not answer for ${patienceMs} ms`);
  });
  // Ended by the abort, when nobody waits for it.
  late.catch(() => {});
  try {
    return await Promise.race([work, late]);
  } finally {
    timer.abort();
    work.catch(() => {});
  }
}

/** Closes what is open; whatever does not close ends with the process. */
export async function leave(server: AsyncDisposable): Promise<void> {
  await soon(Promise.resolve(server[Symbol.asyncDispose]())).catch(() => {});
}
