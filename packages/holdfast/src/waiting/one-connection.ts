import type { Purpose } from "../seam/database.ts";
import { Turns } from "./turns.ts";
import { Refused } from "./refused.ts";

/**
 * The door to the one connection that a client has for everybody in this process. Whoever is inside excludes
 * all others, so waiting at the door can be waiting for a lock: then the lock's own patience counts.
 */
export class OneConnection {
  static readonly #doors = new WeakMap<object, OneConnection>();

  /** Several instances may be made of one client: they share its door. */
  static of(client: object): OneConnection {
    let door = OneConnection.#doors.get(client);
    if (!door) OneConnection.#doors.set(client, (door = new OneConnection()));
    return door;
  }

  readonly #queue = new Turns();
  /** Keys of those inside or in line. */
  readonly #keys = new Map<string, number>();

  /** For a call during which nobody else of this process runs. Undefined: somebody is inside. */
  enterNow(): (() => void) | undefined {
    return this.#queue.enterNow();
  }

  async enter({ locks, wait, signal }: Purpose): Promise<() => void> {
    const contended = locks.some(({ key }) => this.#keys.has(key.id));
    if (contended && wait === "nowait") throw new Refused("busy", 0);
    const patience = contended ? AbortSignal.timeout(wait as number) : undefined;
    this.#count(locks, 1);
    try {
      const leave = await this.#queue.enter(
        patience && signal ? AbortSignal.any([patience, signal]) : (patience ?? signal),
      );
      let left = false;
      return () => {
        if (left) return;
        left = true;
        this.#count(locks, -1);
        leave();
      };
    } catch (error) {
      this.#count(locks, -1);
      if (patience?.aborted && !signal?.aborted) throw new Refused("timeout", wait as number);
      throw error;
    }
  }

  #count(locks: Purpose["locks"], by: number): void {
    for (const { key } of locks) {
      const count = (this.#keys.get(key.id) ?? 0) + by;
      if (count === 0) this.#keys.delete(key.id);
      else this.#keys.set(key.id, count);
    }
  }
}
