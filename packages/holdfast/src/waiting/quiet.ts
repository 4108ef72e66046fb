/**
 * For how long a session had nothing to do when it was lost. Not every server says why it ends one that was idle for too long, and not every
 * client passes on what it says.
 */
export class Quiet {
  #since = performance.now();
  #running = 0;
  #ms: number | undefined;

  constructor(lost: AbortSignal) {
    const onLost = () => {
      if (this.#running === 0) this.#ms = performance.now() - this.#since;
    };
    lost.addEventListener("abort", onLost, { once: true });
  }

  /** Undefined: it was not lost, or in the middle of something. */
  readonly ms = (): number | undefined => this.#ms;

  /** A statement is sent. */
  readonly begins = (): void => {
    this.#running++;
  };

  /** It is answered. */
  readonly ends = (): void => {
    this.#running--;
    this.#since = performance.now();
  };
}
