/** Nothing that the doctor asks may keep it, or the server, for long. */

/** Of one statement, on the server. */
export const statementMs = 5_000;
/** Of a wait for a lock, on the server. */
export const lockMs = 2_000;
/** Of a whole check, here: a pooler without a free connection, or a frozen server, never answers. */
export const checkMs = 30_000;

export class NoAnswer extends Error {}

export async function within<T>(ms: number, work: Promise<T>): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new NoAnswer(`no answer within ${ms / 1000} s`)), ms);
  });
  // It may fail when nobody waits for it any more.
  work.catch(() => {});
  try {
    return await Promise.race([work, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** Computed when it is first asked for. */
export function lazy<T>(make: () => Promise<T>): () => Promise<T> {
  let made: Promise<T> | undefined;
  return () => (made ??= make());
}
