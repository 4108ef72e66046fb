/**
 * A statement sent through the outer client, inside the body of a transaction, is not part of that transaction: it
 * sees nothing of it, is kept if it rolls back, and takes a second connection while the first is held. It looks
 * right in review and in every test that runs alone, so it is reported, with the place of both.
 */
import type { Database, Seen } from "../seam/database.ts";
import { PoolExhaustedError, WrongConnectionError } from "../seam/errors.ts";
import { emit } from "../events/events.ts";
import type { Inside } from "../context/inside.ts";
import { isOurs, notOurs, ours } from "../context/ours.ts";
import { sectionHere } from "../context/section.ts";
import { type CallSite, callSites } from "../context/call-site.ts";
import * as protection from "../seam/protections.ts";

type Client = Pick<Database, "observe" | "room">;

export type WrongConnectionMode = "warn" | "throw" | "off";
export const wrongConnectionModes: readonly WrongConnectionMode[] = ["warn", "throw", "off"];

/** What is asked of the scope that the calling code is in. */
interface Around {
  readonly open: boolean;
  readonly site: CallSite | undefined;
  readonly root: object;
}

/** The same pair of places is told once. */
const most = 1000;

export class WrongConnectionGuard {
  readonly #database: Client;
  readonly #current: Inside<Around>;
  readonly #mode: WrongConnectionMode;
  readonly #told = new Set<string>();
  /** Transactions that wait for a second connection while they hold their own. */
  readonly #waiting = new Map<object, number>();
  readonly #end: (() => void) | undefined;

  constructor(database: Client, current: Inside<Around>, mode: WrongConnectionMode) {
    this.#database = database;
    this.#current = current;
    this.#mode = mode;
    const seen: Seen = (granted, place) => {
      const inside = this.#inside();
      if (!inside) return;
      sectionHere()?.saw("connection", this.#site(place));
      this.#report(inside, place);
      this.#queue(inside, granted, place);
    };
    this.#end = database.observe?.(seen, () => this.#inside() !== undefined);
  }

  /** Whether anybody will ask where a transaction was opened. */
  get watches(): boolean {
    return this.#end !== undefined && this.#mode !== "off";
  }

  close(): void {
    this.#end?.();
  }

  /** For connections that we take ourselves, on purpose, while the caller holds one. */
  async taking<T>(take: (granted: () => void) => Promise<T>): Promise<T> {
    const inside = this.#inside();
    // In a transaction that the caller has opened, too, what we open is no mistake.
    if (!inside) return sectionHere() ? this.ours(() => take(() => {})) : take(() => {});
    let grant!: () => void;
    const granted = new Promise<void>((resolve) => (grant = resolve));
    this.#queue(inside, () => granted);
    return this.ours(() => take(grant)).finally(grant);
  }

  /** What we send ourselves, through whatever is watched, is no mistake. */
  ours<T>(work: () => T): T {
    return ours(work);
  }

  /** A body that we run is the caller's again. */
  theirs<T>(work: () => T): T {
    return notOurs(work);
  }

  #inside(): Around | undefined {
    const inside = this.#current.getStore();
    return inside?.open && !isOurs() ? inside : undefined;
  }

  /** Of who asks, where the client knows better than the stack. */
  #site(place?: () => string | undefined): CallSite {
    const here = callSites.here(this.#site);
    return {
      get place() {
        return here.place ?? place?.();
      },
    };
  }

  #report({ site }: Around, place?: () => string | undefined): void {
    if (this.#mode === "off" || !protection.wrongConnection) return;
    const at = callSites.here(this.#report).place ?? place?.();
    const error = new WrongConnectionError(at, site?.place);
    emit("holdfast:connection:wrong", () => ({ query: at, transaction: site?.place }));
    if (this.#mode === "throw") throw error;
    const pair = `${at}\n${site?.place}`;
    if (this.#told.has(pair) || this.#told.size >= most) return;
    this.#told.add(pair);
    process.emitWarning(error.message, { type: error.name, code: error.code });
  }

  /** Everybody who has a connection waits for another one: nobody will ever get it. */
  #queue({ root, site }: Around, granted: () => Promise<void>, place?: () => string | undefined): void {
    const room = this.#database.room?.();
    if (room?.out === undefined) return;
    if (room.out >= room.max) sectionHere()?.saw("pool", this.#site(place));
    const waiting = this.#waiting.has(root) ? this.#waiting.size : this.#waiting.size + 1;
    if (room.out >= room.max && waiting >= room.max)
      throw new PoolExhaustedError(room.max, callSites.here(this.#queue).place ?? place?.(), site?.place);
    this.#waiting.set(root, (this.#waiting.get(root) ?? 0) + 1);
    void granted().then(() => {
      const count = (this.#waiting.get(root) ?? 1) - 1;
      if (count === 0) this.#waiting.delete(root);
      else this.#waiting.set(root, count);
    });
  }
}
