/** What belongs to tables and does something by itself, and what actors make of numbers and times. */
import type { TableEffect } from "../../seam/protocol-reader.ts";
import { footprint } from "./statement.ts";
import type { TableEffects } from "./written.ts";

/**
 * Numbers of sequences, and times, are given out before a COMMIT, and in another order than that of the COMMITs: who reads rows in
 * their order can overlook one. That does not matter where nobody reads them, and is known only when somebody does.
 */
export class SeenTables implements TableEffects {
  readonly active: ReadonlySet<string>;
  readonly activeWhenRead: ReadonlySet<string>;
  readonly open: ReadonlySet<string>;
  readonly #lateSnapshot: boolean;
  readonly #numbered: ReadonlySet<string>;
  /** Those that are written with a time. */
  readonly #stamped: Set<string>;
  /** By actors; "*": nobody knows what. */
  readonly #read = new Set<string>();
  /** The same, in an order or by comparing. */
  readonly #compared = new Set<string>();
  /** Those with rows that were added by actors. */
  readonly #inserted = new Set<string>();
  /** Read by a statement that writes as well. */
  readonly #decidesBy = new Set<string>();
  /** A transaction keeps the snapshot with which it has begun. */
  #keepsSnapshot = false;
  #asked = false;
  #timed = false;
  learned = 0;

  /** `related`: with "*" those that may reach anything, by triggers. */
  constructor(
    effects: readonly TableEffect[],
    related: readonly (readonly string[])[],
    { lateSnapshot = false }: { readonly lateSnapshot?: boolean } = {},
  ) {
    this.#lateSnapshot = lateSnapshot;
    const of = (...kinds: TableEffect["kind"][]) =>
      effects.filter(({ kind }) => kinds.includes(kind)).map(({ table }) => table);
    this.active = new Set([...related.filter((group) => group.includes("*")).flat(), ...of("acts")]);
    this.activeWhenRead = new Set(of("acts when read"));
    this.open = new Set(of("decides"));
    this.#numbered = new Set(of("numbers"));
    this.#stamped = new Set(of("clock"));
  }

  ordered(table: string): boolean {
    return (
      (this.#numbered.has(table) && (this.#read.has(table) || this.#read.has("*"))) ||
      (this.#timed && this.#stamped.has(table))
    );
  }

  overtaken(table: string): boolean {
    return this.#keepsSnapshot || this.#decidesBy.has(table) || this.#decidesBy.has("*");
  }

  /** Transactions of actors have this level. */
  runsAt(level: string): void {
    this.#keepsSnapshot ||= !this.#lateSnapshot && /\b(repeatable read|serializable)\b/i.test(level);
  }

  get timed(): boolean {
    return this.#timed;
  }

  /** It asks what time it is, or writes it. */
  clocked(text: string): boolean {
    const { clock, writes } = footprint(text);
    return clock || [...writes].some((table) => this.#stamped.has(table));
  }

  /** An actor has sent it. */
  saw(text: string): void {
    const before = this.#known;
    for (const part of text.replaceAll(/'(?:[^']|'')*'/g, "''").split(";")) this.#saw(part);
    if (this.#known !== before) this.learned++;
  }

  #saw(text: string): void {
    const { kind, reads, writes, any, clock, compares } = footprint(text);
    if (kind === "begin" || kind === "setting") this.runsAt(text);
    if (neither.has(kind) || text.trim() === "" || (any && reads.size === 0 && ofLocks(text))) return;
    if (kind === "insert") for (const table of writes) this.#inserted.add(table);
    for (const table of any ? [...reads, "*"] : reads) {
      this.#read.add(table);
      if (compares || any) this.#compared.add(table);
    }
    if ((kind !== "read" || writes.size > 0) && !definition.test(text))
      for (const table of any ? [...readBesides(text), "*"] : readBesides(text)) this.#decidesBy.add(table);
    if (clock && kind !== "read") for (const table of writes) this.#stamped.add(table);
    // With a time in its condition, and not only as a value.
    this.#asked ||= clock && (kind === "read" || /\bwhere\b/i.test(text));
    this.#timed ||=
      this.#asked ||
      (this.#stamped.size > 0 && this.#compared.has("*")) ||
      meet(this.#stamped, this.#compared);
  }

  get #known(): string {
    const numbered = [...this.#numbered].filter((table) => this.ordered(table));
    const stamped = this.#timed ? [...this.#stamped] : [];
    // Where all are, one that comes later is known to be: its name may be another one in each run.
    const overtaken = this.overtaken("*") || [...this.#inserted].filter((table) => this.overtaken(table));
    return JSON.stringify([numbered, this.#timed, stamped, overtaken]);
  }
}

const neither: ReadonlySet<string> = new Set(["begin", "commit", "rollback", "setting"]);

/** It makes or drops something, and reads no rows for it. */
const definition = /^\s*(?:create|drop|alter)\b(?![^]*\b(?:select|values|execute)\b)/i;

/** Not the table that a DELETE empties. */
const readBesides = (text: string) => footprint(text.replaceAll(/\bdelete\s+from\b/gi, "update")).reads;

/** It calls only what takes locks, or sets something: no table is read. */
function ofLocks(text: string): boolean {
  const calls = [...text.matchAll(/([\w$.]+)\s*\(/g)].map(([, called = ""]) => called.toLowerCase());
  const known =
    /^(?:pg_catalog\.)?(?:pg_\w*lock\w*|set_config|current_setting|hashtext\w*|get_lock|release_\w+lock\w*)$/;
  return /^\s*(?:select|do)\b/i.test(text) && calls.length > 0 && calls.every((called) => known.test(called));
}

function meet(a: ReadonlySet<string>, b: ReadonlySet<string>): boolean {
  for (const each of a) if (b.has(each)) return true;
  return false;
}
