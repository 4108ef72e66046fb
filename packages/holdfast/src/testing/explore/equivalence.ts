/**
 * Which orders come to the same: those in which only statements that do not touch each other have changed places
 * (Mazurkiewicz traces). Of these one is enough.
 */
import { type Footprint, footprint } from "./statement.ts";

export interface SentStatement {
  readonly actor: number;
  /** Absent: the actor has only one. */
  readonly connection?: number;
  readonly text: string;
  /** A transaction by itself, which is kept open until a COMMIT follows. */
  readonly opens?: boolean;
  /** It is sent inside of a transaction, as the server has said. */
  readonly inside?: boolean;
  /** After it something befalls the actor, which may undo or change anything. */
  readonly fault?: boolean;
}

/** What a statement touches where it stands, between BEGIN and COMMIT. */
interface Touch {
  readonly reads: ReadonlySet<string>;
  readonly writes: ReadonlySet<string>;
  readonly any: boolean;
  /** A snapshot may be taken here: of everything that is committed. */
  readonly snapshot: boolean;
  /** Makes something visible, or gives locks back. */
  readonly ends: boolean;
}

const none: ReadonlySet<string> = new Set();
const nothing: Touch = { reads: none, writes: none, any: false, snapshot: false, ends: false };
const everything: ReadonlySet<string> = new Set(["*"]);
/** Nobody's table is called so. */
const clock: ReadonlySet<string> = new Set(["what time it is"]);

interface EquivalenceOptions {
  /** Who writes anything locks all of the database. */
  readonly whole?: boolean;
  /** A snapshot is taken by the first statement that reads without a lock. */
  readonly lateSnapshot?: boolean;
  readonly times?: { readonly timed: boolean; clocked(text: string): boolean };
}

export class Equivalence {
  /** Tables that are touched together have one name; undefined: any. */
  readonly #names = new Map<string, string>();

  /** Every order is another one. */
  all: boolean;
  readonly #options: EquivalenceOptions;

  /** Without knowing what is related, every order is another one. */
  constructor(related: readonly (readonly string[])[] | undefined, options: EquivalenceOptions = {}) {
    this.all = related === undefined;
    this.#options = options;
    for (const group of related ?? []) this.#join(group);
  }

  #join(group: readonly string[]): void {
    const all = new Set(group);
    for (const [table, name] of this.#names) if (all.has(name)) all.add(table);
    const known = group.flatMap((table) => this.#names.get(table) ?? []);
    for (const [table, name] of this.#names) if (known.includes(name)) all.add(table);
    const name = all.has("*") || known.includes("*") ? "*" : (group[0] ?? "*");
    for (const table of all) this.#names.set(table, name);
  }

  /** The same for orders that come to the same (Foata's normal form). */
  key(order: readonly SentStatement[]): string {
    const touches = this.#touches(order);
    const levels: number[] = [];
    const counts = new Map<number, number>();
    const layers: string[][] = [];
    for (const [i, { actor }] of order.entries()) {
      let level = 0;
      for (let j = 0; j < i; j++)
        if ((levels[j] as number) >= level && this.#depend(order, touches, j, i))
          level = (levels[j] as number) + 1;
      levels.push(level);
      const nth = counts.get(actor) ?? 0;
      counts.set(actor, nth + 1);
      (layers[level] ??= []).push(`${actor}.${nth}`);
    }
    return layers.map((layer) => layer.toSorted().join(",")).join(";");
  }

  #depend(order: readonly SentStatement[], touches: readonly Touch[], i: number, j: number): boolean {
    if (this.all || order[i]?.actor === order[j]?.actor) return true;
    const a = touches[i] as Touch;
    const b = touches[j] as Touch;
    if (a.any && (b.any || touchesSomething(b))) return true;
    if (b.any && touchesSomething(a)) return true;
    if ((a.snapshot && b.ends) || (b.snapshot && a.ends)) return true;
    return meet(a.writes, b.writes) || meet(a.writes, b.reads) || meet(a.reads, b.writes);
  }

  #touches(order: readonly SentStatement[]): Touch[] {
    const { whole, lateSnapshot, times } = this.#options;
    if (whole) return order.map(({ text, fault }) => (fault ? { ...nothing, any: true } : ofTheWhole(text)));
    /** By connection: what its open transaction has touched; absent outside of one. */
    const open = new Map<number, { touched: Set<string>; any: boolean; fresh: boolean }>();
    return order.map(({ actor, connection = actor, text, opens, inside, fault }) => {
      if (fault) {
        open.delete(connection);
        return { ...nothing, any: true, ends: true };
      }
      const print = footprint(text);
      if (opens) open.set(connection, { touched: new Set(), any: false, fresh: false });
      // Begun where it was not recognised: with several statements in one message, or by a session without autocommit.
      else if (inside && !open.has(connection))
        open.set(connection, { touched: new Set(), any: true, fresh: true });
      const transaction = open.get(connection);
      if (print.kind === "begin") {
        // Some servers end one that is open when another one is begun. A procedure may do more than that.
        const { touched: earlier = none, any = false } = transaction ?? {};
        const touched = new Set([...earlier, ...this.#named(print.writes)]);
        open.set(connection, { touched: new Set(touched), any, fresh: true });
        // The time of a transaction may be that of its BEGIN.
        const writes = times?.timed ? new Set([...touched, ...clock]) : touched;
        const snapshot = /\bsnapshot\b/i.test(text);
        return { reads: none, writes, any: any || print.any, snapshot, ends: any || touched.size > 0 };
      }
      if (print.kind === "commit" || print.kind === "rollback") {
        open.delete(connection);
        // One whose beginning was not recognised may have done anything.
        const { touched, any } = transaction ?? { touched: none, any: true };
        // What was read counts too: a serializable transaction is judged by it at its end.
        const writes = new Set([...touched, ...this.#named(print.writes)]);
        return { reads: none, writes, any, snapshot: false, ends: any || writes.size > 0 };
      }
      if (print.kind === "setting")
        return { reads: none, writes: none, any: false, snapshot: false, ends: false };
      const reads = this.#named(print.reads);
      const written = this.#named(print.writes);
      const any = print.any || reads.has("*") || written.has("*");
      const writes = times?.timed && times.clocked(text) ? new Set([...written, ...clock]) : written;
      const snapshot = transaction?.fresh ?? false;
      if (transaction) {
        // LOCK TABLE takes none.
        transaction.fresh &&=
          print.kind === "other" ||
          (lateSnapshot === true && (print.kind !== "read" || writes.size > 0 || any));
        transaction.any ||= any;
        for (const table of [...reads, ...written]) transaction.touched.add(table);
      }
      return { reads, writes, any, snapshot, ends: !transaction && (any || written.size > 0) };
    });
  }

  #named(names: Footprint["reads"]): ReadonlySet<string> {
    return new Set([...names].map((each) => this.#names.get(each) ?? each));
  }
}

/** Reads come to the same in any order, and so does a BEGIN that takes no lock. */
function ofTheWhole(text: string): Touch {
  const { kind, any } = footprint(text);
  if (kind === "begin" && !/\b(immediate|exclusive)\b/i.test(text)) return nothing;
  return kind === "read" && !any ? { ...nothing, reads: everything } : { ...nothing, any: true };
}

function touchesSomething({ any, reads, writes }: Touch): boolean {
  return any || reads.size > 0 || writes.size > 0;
}

function meet(a: ReadonlySet<string>, b: ReadonlySet<string>): boolean {
  for (const each of a) if (b.has(each)) return true;
  return false;
}
