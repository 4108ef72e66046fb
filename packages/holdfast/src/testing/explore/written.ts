/**
 * Which tables a statement may have written, as far as its text tells. It is not a parser: where it cannot be sure, it says
 * that it may have been anything. What triggers and functions do, the engine has to know.
 */
import type { WrittenTables } from "../../seam/protocol-reader.ts";
import { calledRoutine, footprint } from "./statement.ts";
import { StatementReader, type Token, tokensOf } from "./statement-reader.ts";

/** Of these, what follows is looked at. */
const looked = new Set(
  "select,with,insert,replace,update,delete,merge,values,table,set,declare,fetch,do,(".split(","),
);
/** These write nothing. */
const harmless = new Set(
  "begin,start,commit,end,rollback,abort,savepoint,release,show,reset,lock,unlock,close,move,listen,unlisten,notify,deallocate,xa".split(
    ",",
  ),
);
/** By one statement. */
class Reader implements WrittenTables {
  readonly tables = new Set<string>();
  readonly calls = new Set<string>();
  readonly sequences = new Set<string>();
  anything = false;

  constructor(tokens: readonly Token[]) {
    const read = new StatementReader(tokens);
    const first = read.word(0);
    if (first === undefined || harmless.has(first)) return;
    // A block of statements.
    const block = first === "do" && tokens[2]?.text !== "(";
    // From then on names mean something else.
    const setsPath = first === "set" && tokens.some(({ text }) => text === "search_path");
    this.anything = !looked.has(first) || block || setsPath || read.unclear.writes;
    if (!looked.has(first) || block || setsPath) return;
    for (const path of read.writes) this.#wrote(path);
    for (const [i, { text, kind }] of tokens.entries())
      if (kind !== "mark" && kind !== "string" && read.word(i + 1) === "(") this.#call(tokens, i, text);
  }

  /** A dot that is a part of a name would be taken for one between two. */
  #wrote(path: readonly string[]): void {
    if (path.some((part) => part.includes("."))) this.anything = true;
    else this.tables.add(path.slice(-2).join("."));
  }

  #call(tokens: readonly Token[], i: number, name: string): void {
    this.calls.add(name);
    const asked = tokens[i + 2];
    if (name === "set_config" && asked?.text === "search_path") this.anything = true;
    if (name !== "nextval" && name !== "setval") return;
    if (asked?.kind === "string") this.sequences.add(asked.text.replaceAll('"', "").toLowerCase());
    else this.anything = true;
  }
}

export const nothing: WrittenTables = {
  anything: false,
  tables: new Set(),
  calls: new Set(),
  sequences: new Set(),
};
const unknown: WrittenTables = { ...nothing, anything: true };

/** Those that a text consists of; undefined: it cannot be cut for sure. */
function cut(text: string): Token[][] | undefined {
  const statements: Token[][] = [[]];
  for (const token of tokensOf(text) ?? [])
    if (token.kind === "mark" && token.text === ";") statements.push([]);
    else statements.at(-1)?.push(token);
  // An empty one was prepared before anybody read along.
  return text.trim() === "" || !tokensOf(text) ? undefined : statements.filter(({ length }) => length > 0);
}

function readAll(text: string): WrittenTables {
  const statements = cut(text);
  return statements ? together(statements.map((each) => new Reader(each))) : unknown;
}

/** What a message is that is sent outside of any transaction. */
export interface Alone {
  /** It begins one, and leaves it open. */
  readonly begins: boolean;
  /** It may be sent inside of one, and comes to the same. */
  readonly fits: boolean;
  /** It may write: others can come after what it has read and before its COMMIT. */
  readonly writes: boolean;
  /** Others can come in between where it cannot be held back. */
  readonly unseen: boolean;
}

const fitting = new Set("select,with,insert,replace,update,delete,merge,values,table,truncate,(".split(","));
const ending = new Set(["commit", "end", "rollback", "abort"]);

export interface Surroundings {
  /** Several statements in one message are one transaction. */
  readonly whole: boolean;
  /** Functions that may write. */
  readonly writers: ReadonlySet<string>;
  readonly tables: TableEffects;
}

/** What statements do besides, by what belongs to a table. */
export interface TableEffects {
  /** Tables that may do anything when they are written to: they have triggers. */
  readonly active: ReadonlySet<string>;
  /** The same when they are read: views that call a function. */
  readonly activeWhenRead: ReadonlySet<string>;
  /** What an INSERT comes to depends on other rows: by a default, a check or a policy. */
  readonly open: ReadonlySet<string>;
  /** Whether a row gets a number, or a time, by which somebody else may order it. */
  ordered(table: string): boolean;
  /**
   * A statement of somebody else's may look at the table before the row is there, and then meet it as it writes: by a unique index, or
   * a foreign key.
   */
  overtaken(table: string): boolean;
  /** Somebody looks at times. */
  readonly timed: boolean;
}

/** It decides by nothing that it has read: whether others come before it or before its COMMIT comes to the same. */
function blind(text: string, tables: TableEffects): boolean {
  const { active, open } = tables;
  const { kind, reads, writes, any, clock } = footprint(text);
  return (
    kind === "insert" &&
    reads.size === 0 &&
    !any &&
    !(clock && tables.timed) &&
    ![...writes].some(
      (table) => active.has(table) || open.has(table) || tables.ordered(table) || tables.overtaken(table),
    )
  );
}

export function alone(text: string, { whole, writers, tables }: Surroundings): Alone {
  const routine = calledRoutine(text);
  if (routine?.whole)
    return { begins: routine.boundary === "begins", fits: false, writes: true, unseen: false };
  const statements = cut(text)?.map((tokens) => ({
    first: tokens[0]?.kind === "word" || tokens[0]?.kind === "mark" ? tokens[0].text : "",
    second: tokens[1]?.text ?? "",
    written: new Reader(tokens),
  })) ?? [{ first: /^\s*(\w+)/.exec(text)?.[1]?.toLowerCase() ?? "", second: "", written: unknown }];
  const acting = statements.filter(({ first }) => !harmless.has(first) && first !== "set");
  const opening = statements.findIndex(({ first }) => first === "begin" || first === "start");
  const closing = statements.some(({ first }) => ending.has(first));
  const begins = opening >= 0 && !closing;
  const fits =
    opening < 0 &&
    !closing &&
    acting.length > 0 &&
    (whole || statements.length === 1) &&
    acting.every(
      ({ first, second, written }) =>
        fitting.has(first) ||
        (first === "call" && writers.has(second)) ||
        // A function's result is thrown away; a block may end transactions.
        (first === "do" && !written.anything),
    );
  const writes =
    !blind(text, tables) &&
    ([...footprint(text).reads].some((table) => tables.activeWhenRead.has(table)) ||
      acting.some(
        ({ first, written }) =>
          written.anything ||
          first === "truncate" ||
          first === "call" ||
          written.tables.size > 0 ||
          [...written.calls].some((call) => writers.has(call)),
      ));
  const unseen = !begins && (acting.length > 1 || (acting.length > 0 && !fits));
  return { begins, fits, writes, unseen };
}

/**
 * Statements are executed within it, by a function, a procedure or a trigger, of which each may see what others have done since
 * the one before: nobody can be let in between these.
 */
export function hasOthersWithin(text: string, { writers, tables }: Omit<Surroundings, "whole">): boolean {
  const { active, activeWhenRead } = tables;
  if (calledRoutine(text)?.whole) return false;
  if ([...footprint(text).reads].some((table) => activeWhenRead.has(table))) return true;
  return (cut(text) ?? []).some((tokens) => {
    const written = new Reader(tokens);
    return (
      (tokens[0]?.kind === "word" && tokens[0].text === "call") ||
      [...written.calls].some((call) => writers.has(call)) ||
      [...written.tables].some((table) => active.has(table) || active.has(table.split(".").at(-1) ?? ""))
    );
  });
}

export function together(all: readonly WrittenTables[]): WrittenTables {
  const of = (set: "tables" | "calls" | "sequences") => new Set(all.flatMap((each) => [...each[set]]));
  return {
    anything: all.some(({ anything }) => anything),
    tables: of("tables"),
    calls: of("calls"),
    sequences: of("sequences"),
  };
}

const known = new Map<string, WrittenTables>();

/** By all of these statements. */
export function writtenBy(texts: Iterable<string>): WrittenTables {
  if (known.size > 10_000) known.clear();
  return together(
    [...new Set(texts)].map((text) => {
      const found = known.get(text) ?? readAll(text);
      known.set(text, found);
      return found;
    }),
  );
}
