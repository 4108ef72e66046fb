/**
 * Which orders come to the same: those in which only statements that do not touch each other have changed places
 * (Mazurkiewicz traces). Of these one is enough.
 */
import { type Footprint, footprint } from "./statement.ts";

export interface SentStatement {
  readonly actor: number;
  readonly text: string;
  /** A transaction by itself, which is kept open until a COMMIT follows. */
  readonly opens?: boolean;
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

export class Equivalence {
  /** Tables that are touched together have one name; undefined: any. */
  readonly #names = new Map<string, string>();

  /** Every order is another one. */
  all: boolean;
  readonly #whole: boolean;

  /**
   * Without knowing what is related, every order is another one. `whole`: who writes anything locks all of the database.
   */
  constructor(related: readonly (readonly string[])[] | undefined, { whole = false } = {}) {
    this.all = related === undefined;
    this.#whole = whole;
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
    if (this.#whole) return order.map(({ text }) => ofTheWhole(text));
    /** By actor: what its open transaction has touched; absent outside of one. */
    const open = new Map<number, { touched: Set<string>; any: boolean; fresh: boolean }>();
    return order.map(({ actor, text, opens }) => {
      const print = footprint(text);
      if (opens) open.set(actor, { touched: new Set(), any: false, fresh: false });
      const transaction = open.get(actor);
      if (print.kind === "begin") {
        open.set(actor, { touched: new Set(), any: false, fresh: true });
        return { reads: none, writes: none, any: print.any, snapshot: false, ends: false };
      }
      if (print.kind === "commit" || print.kind === "rollback") {
        open.delete(actor);
        // One whose beginning was not recognised may have done anything.
        const { touched, any } = transaction ?? { touched: none, any: true };
        // What was read counts too: a serializable transaction is judged by it at its end.
        return { reads: none, writes: touched, any, snapshot: false, ends: any || touched.size > 0 };
      }
      if (print.kind === "setting")
        return { reads: none, writes: none, any: false, snapshot: false, ends: false };
      const reads = this.#named(print.reads);
      const writes = this.#named(print.writes);
      const any = print.any || reads.has("*") || writes.has("*");
      const snapshot = transaction?.fresh ?? false;
      if (transaction) {
        transaction.fresh = false;
        transaction.any ||= any;
        for (const table of [...reads, ...writes]) transaction.touched.add(table);
      }
      return { reads, writes, any, snapshot, ends: !transaction && (any || writes.size > 0) };
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
