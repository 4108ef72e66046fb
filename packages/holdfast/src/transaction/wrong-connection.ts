/**
 * Two mistakes that look right in review, and in every test that runs alone. Both are reported with the place of the call and
 * the place of the transaction:
 *
 * - In the body of `hf.transaction`, a statement is sent through the outer client.
 * - In a transaction that the caller has opened by the client's own means, a call of ours does not name it (`{ tx }`).
 *
 * Neither is part of the transaction: it does not see what that has written, it is kept if that rolls back, and it takes a
 * second connection while the first is held.
 */
import type { Database, Opening, Seen } from "../seam/database.ts";
import {
  type HoldfastError,
  NoConnectionError,
  PoolExhaustedError,
  WrongConnectionError,
} from "../seam/errors.ts";
import { emit } from "../events/events.ts";
import { Inside } from "../context/inside.ts";
import { isOurs, notOurs, ours } from "../context/ours.ts";
import { sectionHere } from "../context/section.ts";
import { type CallSite, callSites } from "../context/call-site.ts";
import * as protection from "../seam/protections.ts";

type Client = Pick<Database, "observe" | "openings" | "room" | "takesPart">;

/** "error" is another word for "throw". */
export type WrongConnectionMode = "warn" | "throw" | "error" | "off";
export const wrongConnectionModes: readonly WrongConnectionMode[] = ["warn", "throw", "error", "off"];

/** What is asked of the scope that the calling code is in. */
interface Around {
  readonly open: boolean;
  readonly site: CallSite | undefined;
  readonly root: object;
}

/** A transaction that the caller has opened by the client's own means, with a function as its body. */
class Opened implements Around {
  readonly native: unknown;
  readonly site: CallSite | undefined;
  open = true;
  /** The caller has said `hf.join(native)`. */
  joined = false;
  /** A call that forgot it is reported. */
  reports = true;

  constructor(native: unknown, site: CallSite | undefined) {
    this.native = native;
    this.site = site;
  }

  get root(): object {
    return this;
  }

  close(): void {
    this.open = false;
  }

  reported(): void {}
}

/**
 * One that was begun by hand: nothing but the stack tells which code is inside of it. It counts where that is certain, and is reported
 * once, so that one that is never ended does not follow its process about.
 */
class Begun implements Omit<Opened, "close"> {
  readonly native = undefined;
  readonly joined = false;
  readonly site: CallSite;
  /** What it was begun inside of. */
  readonly outer: Opened | Begun | undefined;
  reports = true;
  readonly #isOpen: () => boolean;
  #certain: boolean | undefined;

  constructor(isOpen: () => boolean, site: CallSite, outer: Opened | Begun | undefined) {
    this.#isOpen = isOpen;
    this.site = site;
    this.outer = outer;
  }

  get open(): boolean {
    return this.#isOpen() && (this.#certain ??= this.site.resumed === true);
  }

  get root(): object {
    return this;
  }

  reported(): void {
    this.reports = false;
  }
}

/** The wrapper of the client's method, the client's own frames, and the caller. */
const openingFrames = 12;

/** The same pair of places is told once. */
const most = 1000;

export class WrongConnectionGuard {
  readonly #database: Client;
  readonly #current: Inside<Around>;
  readonly #mode: WrongConnectionMode;
  readonly #opened = new Inside<Opened | Begun>();
  readonly #told = new Set<string>();
  /** Transactions that wait for a second connection while they hold their own. */
  readonly #waiting = new Map<object, number>();
  readonly #inProduction = globalThis.process?.env["NODE_ENV"] === "production";
  #mistaken = false;
  readonly #end: (() => void) | undefined;
  readonly #endOpenings: (() => void) | undefined;

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
    const opening: Opening = Object.assign(() => (isOurs() ? undefined : this.#around(opening)), {
      manual: (isOpen: () => boolean, above: (...args: never[]) => unknown) => this.#begun(isOpen, above),
    });
    this.#endOpenings = database.openings?.(opening);
  }

  /**
   * Whether the place of a transaction is noted when it is opened. That is a fourth of what we add to a short one, and few make this
   * mistake: in production it is noted once one was made. The report of that one looks for the place on its own stack.
   */
  get notesPlaces(): boolean {
    return this.#end !== undefined && this.#mode !== "off" && (!this.#inProduction || this.#mistaken);
  }

  close(): void {
    this.#end?.();
    this.#endOpenings?.();
  }

  /**
   * Of a call that names no transaction and is in no body of ours: what the client calls the transaction that it takes part in
   * all the same. Undefined: none. Reports it if the caller has one open.
   */
  unnamed(call: string): unknown {
    const opened = this.#openedHere();
    if (!opened) return undefined;
    if (opened.native !== undefined && (this.#database.takesPart || opened.joined)) return opened.native;
    if (!opened.reports) return undefined;
    opened.reported();
    this.#tell(opened, (at, of) => WrongConnectionError.forgotten(call, at, of));
    return undefined;
  }

  /** The caller has named the transaction that it is in: what it calls there is part of that. */
  join(native: unknown): void {
    const opened = this.#openedHere();
    if (opened instanceof Opened && opened.native === native) opened.joined = true;
  }

  /** What is to be apart from the transaction that the caller has opened. */
  outside<R>(work: () => R): R {
    return this.#opened.leave(work);
  }

  /** A call that takes a connection of its own. Throws at once if none would ever come. */
  beside<T>(work: () => Promise<T>): Promise<T> {
    const around = this.#inside() ?? this.#openedHere();
    if (!around) return work();
    let over!: () => void;
    const answered = new Promise<void>((resolve) => (over = resolve));
    this.#queue(around, () => answered);
    return this.#waited(around, work()).finally(over);
  }

  /** For connections that we take ourselves, on purpose, while the caller holds one. */
  taking<T>(take: (granted: () => void) => Promise<T>): Promise<T> {
    const inside = this.#inside() ?? this.#openedHere();
    // In a transaction that the caller has joined, too, what we open is no mistake.
    // And what we open by the client's own means is not the caller's.
    if (!inside) return sectionHere() || this.#endOpenings ? this.ours(() => take(() => {})) : take(() => {});
    let grant!: () => void;
    const granted = new Promise<void>((resolve) => (grant = resolve));
    this.#queue(inside, () => granted);
    return this.#waited(
      inside,
      this.ours(() => take(grant)),
    ).finally(grant);
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

  #openedHere(): Opened | Begun | undefined {
    let opened = this.#opened.getStore();
    if (!opened || isOurs()) return undefined;
    while (opened && !opened.open) opened = opened instanceof Begun ? opened.outer : undefined;
    return opened;
  }

  #begun(isOpen: () => boolean, above: (...args: never[]) => unknown): void {
    if (isOurs() || this.#inside()) return;
    this.#opened.enter(new Begun(isOpen, callSites.here(above, openingFrames), this.#openedHere()));
  }

  #around(above: Opening): ReturnType<Opening> {
    const site = this.#mode === "off" ? undefined : callSites.here(above, openingFrames);
    return (native, body) => {
      const opened = new Opened(native, site);
      const close = () => opened.close();
      return this.#opened.run(opened, () => {
        const value = body();
        Promise.resolve(value).then(close, close);
        return value;
      });
    };
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

  #report(around: Around, place?: () => string | undefined): void {
    this.#tell(around, (at, of) => new WrongConnectionError(at, of), place);
  }

  #tell(
    { site }: Around,
    made: (at: string | undefined, of: string | undefined) => HoldfastError,
    place?: () => string | undefined,
  ): void {
    if (this.#mode === "off" || !protection.wrongConnection) return;
    const here = callSites.here(this.#tell);
    const at = here.place ?? place?.();
    const of = (site ?? { place: here.around }).place;
    this.#mistaken = true;
    const error = made(at, of);
    emit("holdfast:connection:wrong", () => ({ query: at, transaction: of }));
    if (this.#mode !== "warn") throw error;
    const pair = `${at}\n${of}`;
    if (this.#told.has(pair) || this.#told.size >= most) return;
    this.#told.add(pair);
    process.emitWarning(error.message, { type: error.name, code: error.code });
  }

  /** Everybody who has a connection waits for another one: nobody will ever get it. */
  #queue({ root, site }: Around, granted: () => Promise<void>, place?: () => string | undefined): void {
    const room = this.#database.room?.();
    if (room?.out === undefined) return;
    const { max = Infinity } = room;
    if (room.out >= max) sectionHere()?.saw("pool", this.#site(place));
    const waiting = this.#waiting.has(root) ? this.#waiting.size : this.#waiting.size + 1;
    if (room.out >= max && waiting >= max) {
      const here = callSites.here(this.#queue);
      this.#mistaken = true;
      throw new PoolExhaustedError(max, here.place ?? place?.(), (site ?? { place: here.around }).place);
    }
    this.#waiting.set(root, (this.#waiting.get(root) ?? 0) + 1);
    void granted().then(() => {
      const count = (this.#waiting.get(root) ?? 1) - 1;
      if (count === 0) this.#waiting.delete(root);
      else this.#waiting.set(root, count);
    });
  }

  /** Of a pool that does not say how many connections it can have, it is known only once none has come. */
  async #waited<T>({ site }: Around, answer: Promise<T>): Promise<T> {
    const room = this.#database.room?.();
    if (!room || room.max !== undefined) return answer;
    try {
      return await answer;
    } catch (error) {
      const { out } = this.#database.room?.() ?? {};
      if (!(error instanceof NoConnectionError) || !out || this.#waiting.size < out) throw error;
      throw new PoolExhaustedError(out, callSites.here(this.#waited).place, site?.place);
    }
  }
}
