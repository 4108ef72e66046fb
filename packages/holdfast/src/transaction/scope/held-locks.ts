import type { LockRequest } from "../../seam/key.ts";

/** The locks of a scope; what an outer scope took is asked for there. */
export class HeldLocks {
  /** Taken when the scope was made. */
  readonly #first: readonly LockRequest[];
  readonly #outer: HeldLocks | undefined;
  /** Made when it is first needed: a body that only uses its client does not need it. */
  #lazy: Map<string, LockRequest> | undefined;

  constructor(first: readonly LockRequest[], outer: HeldLocks | undefined) {
    this.#first = first;
    this.#outer = outer;
  }

  get #own(): Map<string, LockRequest> {
    if (this.#lazy) return this.#lazy;
    this.#lazy = new Map();
    this.add(this.#first);
    return this.#lazy;
  }

  add(locks: readonly LockRequest[]): void {
    for (const request of locks)
      if (this.#own.get(request.key.id)?.mode !== "exclusive") this.#own.set(request.key.id, request);
  }

  has({ key, mode }: LockRequest): boolean {
    const held = this.#own.get(key.id)?.mode;
    if (held === "exclusive" || (held !== undefined && held === mode)) return true;
    return this.#outer?.has({ key, mode }) ?? false;
  }

  /** Those that were taken here, or in savepoints that were released. */
  get taken(): readonly LockRequest[] {
    return this.#lazy ? [...this.#lazy.values()] : this.#first;
  }
}
