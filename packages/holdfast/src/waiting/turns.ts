/** First come, first served: for what only so many can use at a time in this process. */
export class Turns {
  #free: number;
  readonly #line: (() => void)[] = [];

  constructor(places = 1) {
    this.#free = places;
  }

  /** Resolves to a function that lets the next one in. */
  async enter(signal?: AbortSignal): Promise<() => void> {
    signal?.throwIfAborted();
    if (this.#free > 0) this.#free--;
    else await this.#stand(signal);
    return this.#leaving();
  }

  /** The same without waiting. Undefined: no place is free. */
  enterNow(): (() => void) | undefined {
    if (this.#free === 0) return undefined;
    this.#free--;
    return this.#leaving();
  }

  #leaving(): () => void {
    let left = false;
    return () => {
      if (left) return;
      left = true;
      const next = this.#line.shift();
      if (next) next();
      else this.#free++;
    };
  }

  #stand(signal?: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      const go = () => {
        signal?.removeEventListener("abort", onAbort);
        resolve();
      };
      const onAbort = () => {
        this.#line.splice(this.#line.indexOf(go), 1);
        reject(signal?.reason as Error);
      };
      this.#line.push(go);
      signal?.addEventListener("abort", onAbort, { once: true });
    });
  }

  async run<T>(body: () => Promise<T>, signal?: AbortSignal): Promise<T> {
    const leave = await this.enter(signal);
    try {
      return await body();
    } finally {
      leave();
    }
  }
}

/**
 * What `waiting` brings, unless the signal aborts first. Pools cannot take a request back: what they bring too
 * late is handed straight on to `giveBack`.
 */
export function unlessAborted<T>(
  waiting: Promise<T>,
  signal: AbortSignal | undefined,
  giveBack: (late: T) => void,
): Promise<T> {
  if (!signal) return waiting;
  return new Promise((resolve, reject) => {
    let isLate = false;
    const onAbort = () => {
      isLate = true;
      void waiting.then(giveBack).catch(() => {});
      reject(signal.reason as Error);
    };
    if (signal.aborted) return onAbort();
    signal.addEventListener("abort", onAbort, { once: true });
    const settled = () => {
      if (!isLate) signal.removeEventListener("abort", onAbort);
    };
    waiting.then(
      (value) => {
        settled();
        resolve(value);
      },
      (error: unknown) => {
        settled();
        reject(error);
      },
    );
  });
}
