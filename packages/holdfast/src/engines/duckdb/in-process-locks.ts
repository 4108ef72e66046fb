/**
 * What the connections of one instance know of each other. One process at a time can have the file open, so whoever
 * could be in the way is in this process too: waits need no polling, and are served in the order in which they came.
 */
import type { LockGrant, Wait } from "../../seam/database.ts";
import type { LockRequest } from "../../seam/key.ts";
import { Turns } from "../../waiting/turns.ts";
import { WaitInCircle } from "./errors.ts";

interface KeyLine {
  readonly queue: Turns;
  users: number;
  holder: KeyHolding | undefined;
}

export interface KeyHolding {
  readonly session: object;
  readonly id: string;
  readonly name: string;
  readonly since: Date;
}

export class InProcessLocks {
  static readonly #files = new Map<string, WeakRef<InProcessLocks>>();
  static readonly #byInstance = new WeakMap<object, InProcessLocks>();

  /** `file`: undefined for a database in memory, which is the instance's own. */
  static of(instance: object, file: string | undefined): InProcessLocks {
    const known = file === undefined ? undefined : InProcessLocks.#files.get(file)?.deref();
    const inProcess = known ?? InProcessLocks.#byInstance.get(instance) ?? new InProcessLocks();
    InProcessLocks.#byInstance.set(instance, inProcess);
    if (file !== undefined) InProcessLocks.#files.set(file, new WeakRef(inProcess));
    return inProcess;
  }

  /** Whatever writes tables of our own does so one at a time: two that meet there would both fail. */
  readonly oneAtATime = new Turns();
  readonly #lines = new Map<string, KeyLine>();
  readonly #held = new Map<object, Map<string, () => void>>();
  /** Fences of leases that transactions of ours rely on until they end. */
  readonly #pins = new Map<object, Set<number>>();
  readonly #numbers = new WeakMap<object, number>();
  #sessions = 0;
  /** Of those who wait for a lock. */
  readonly #waits = new Map<object, AbortController>();
  readonly #known = new Set<string>();
  readonly waiting = new Set<KeyHolding>();

  /** Whether the key has a row. */
  knows(id: string): boolean {
    return this.#known.has(id);
  }

  /** Not for ever: there may be as many keys as users. */
  learn(id: string): void {
    if (this.#known.size >= 10_000) this.#known.clear();
    this.#known.add(id);
  }

  forget(id: string): void {
    this.#known.delete(id);
  }

  holds(session: object, id: string): boolean {
    return this.#held.get(session)?.has(id) ?? false;
  }

  get holdings(): KeyHolding[] {
    return [...this.#lines.values()].flatMap(({ holder }) => (holder ? [holder] : []));
  }

  /** For people. */
  number(session: object): number {
    let number = this.#numbers.get(session);
    if (number === undefined) this.#numbers.set(session, (number = ++this.#sessions));
    return number;
  }

  holderOf(id: string): KeyHolding | undefined {
    return this.#lines.get(id)?.holder;
  }

  /** Work of the session's that waits for others: with a signal that `cancel` aborts, too. */
  async cancellable<T>(
    session: object,
    signal: AbortSignal | undefined,
    work: (signal: AbortSignal) => Promise<T>,
  ): Promise<T> {
    const stop = new AbortController();
    this.#waits.set(session, stop);
    try {
      return await work(signal ? AbortSignal.any([stop.signal, signal]) : stop.signal);
    } finally {
      this.#waits.delete(session);
    }
  }

  /** Ends it, in the words of a statement that is interrupted. */
  cancel(session: object): void {
    this.#waits.get(session)?.abort(new Error("INTERRUPT Error: the wait for a lock was interrupted"));
  }

  /** Takes a turn at each of the keys, which come in the order that everybody takes them in. */
  async take(
    session: object,
    locks: readonly LockRequest[],
    names: readonly string[],
    wait: Wait,
    signal?: AbortSignal,
  ): Promise<LockGrant & { taken?: readonly string[] }> {
    const wanted = locks
      .map(({ key }, i) => ({ id: key.id, name: names[i] ?? "" }))
      .filter(({ id }) => !this.holds(session, id));
    if (wait === "nowait" && wanted.some(({ id }) => this.#lines.has(id)))
      return { granted: false, reason: "busy", usable: true };
    const patience = AbortSignal.timeout(wait === "nowait" ? 60_000 : wait);
    const until = signal ? AbortSignal.any([patience, signal]) : patience;
    const taken: string[] = [];
    try {
      for (const { id, name } of wanted) {
        // Somebody may have come between two of them.
        if (wait === "nowait" && this.#lines.has(id)) {
          this.give(session, taken);
          return { granted: false, reason: "busy", usable: true };
        }
        await this.#enter(session, id, name, until);
        taken.push(id);
      }
      return { granted: true, taken };
    } catch (error) {
      this.give(session, taken);
      if (error === patience.reason || (patience.aborted && !signal?.aborted))
        return { granted: false, reason: "timeout", usable: true, cause: error };
      throw error;
    }
  }

  async #enter(session: object, id: string, name: string, signal: AbortSignal): Promise<void> {
    let line = this.#lines.get(id);
    if (!line) this.#lines.set(id, (line = { queue: new Turns(), users: 0, holder: undefined }));
    const place = line;
    if (this.#waitsFor(session, place.holder)) throw new WaitInCircle(name);
    place.users++;
    const waiter: KeyHolding = { session, id, name, since: new Date() };
    this.waiting.add(waiter);
    const forget = () => {
      if (--place.users === 0) this.#lines.delete(id);
    };
    try {
      const leave = await place.queue.enter(signal);
      place.holder = { session, id, name, since: new Date() };
      const held = this.#held.get(session) ?? new Map<string, () => void>();
      this.#held.set(session, held);
      held.set(id, () => {
        place.holder = undefined;
        leave();
        forget();
      });
    } catch (error) {
      forget();
      throw error;
    } finally {
      this.waiting.delete(waiter);
    }
  }

  /**
   * Whether a holder waits, by way of others or not, for this session. Asked whenever somebody begins to wait: who comes to hold a key
   * waits for nothing then, so that no circle is closed otherwise.
   */
  #waitsFor(session: object, holder: KeyHolding | undefined): boolean {
    const seen = new Set<object>();
    for (let next = holder; next && !seen.has(next.session);) {
      if (next.session === session) return true;
      seen.add(next.session);
      const of = next.session;
      const wanted = [...this.waiting].find((waiter) => waiter.session === of);
      next = wanted && this.#lines.get(wanted.id)?.holder;
    }
    return false;
  }

  give(session: object, ids: readonly string[]): void {
    const held = this.#held.get(session);
    for (const id of ids) {
      held?.get(id)?.();
      held?.delete(id);
    }
    if (held?.size === 0) this.#held.delete(session);
  }

  pin(session: object, fence: number): void {
    const pins = this.#pins.get(session) ?? new Set();
    this.#pins.set(session, pins.add(fence));
  }

  isPinned(fence: number): boolean {
    return [...this.#pins.values()].some((pins) => pins.has(fence));
  }

  /** The session's transaction is over. */
  leave(session: object): void {
    this.#pins.delete(session);
    this.give(session, [...(this.#held.get(session)?.keys() ?? [])]);
  }
}
