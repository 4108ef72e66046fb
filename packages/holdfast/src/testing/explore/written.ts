/**
 * Which tables a statement may have written, as far as its text tells. It is not a parser: where it cannot be sure, it says
 * that it may have been anything. What triggers and functions do, the engine has to know.
 */
import type { WrittenTables } from "../../seam/protocol-reader.ts";
import { footprint } from "./statement.ts";

interface Token {
  readonly kind: "word" | "quoted" | "string" | "mark";
  /** Names in lower case and without their quotes. */
  readonly text: string;
}

const pattern =
  /\s+|--[^\n]*|\/\*[\s\S]*?\*\/|(?<string>'(?:[^']|'')*')|(?<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`)|(?<word>[\p{L}_][\p{L}\p{N}_$]*)|\$?\d[\w.]*|(?<mark>[^])/gu;

/** Undefined: it cannot be cut into words for sure. */
function tokensOf(text: string): Token[] | undefined {
  const tokens: Token[] = [];
  for (const match of text.matchAll(pattern)) {
    const { string, quoted, word, mark } = match.groups as Record<string, string | undefined>;
    // Comments that some servers execute; quotes that end where somebody else's go on; texts between dollars.
    if (match[0].startsWith("/*!") || string?.includes("\\'") || /^['"`$]$/.test(mark ?? ""))
      return undefined;
    if (string !== undefined) tokens.push({ kind: "string", text: string.slice(1, -1) });
    else if (quoted !== undefined)
      tokens.push({
        kind: "quoted",
        text: quoted
          .slice(1, -1)
          .replaceAll(/""|``/g, (two) => two[0] as string)
          .toLowerCase(),
      });
    else if (word !== undefined) tokens.push({ kind: "word", text: word.toLowerCase() });
    else if (mark !== undefined) tokens.push({ kind: "mark", text: mark });
  }
  return tokens;
}

/** Of these, what follows is looked at. */
const looked = new Set(
  "select,with,insert,replace,update,delete,merge,values,table,set,declare,fetch,do,(".split(","),
);
/** These write nothing. */
const harmless = new Set(
  "begin,start,commit,end,rollback,abort,savepoint,release,show,reset,lock,unlock,close,move,listen,unlisten,notify,deallocate".split(
    ",",
  ),
);
/** Before the name of the table. */
const modifiers = new Set("low_priority,high_priority,delayed,quick,ignore,only,into,from".split(","));

class Reader {
  readonly tables = new Set<string>();
  readonly calls = new Set<string>();
  readonly sequences = new Set<string>();
  anything = false;
  readonly #tokens: readonly Token[];

  constructor(tokens: readonly Token[]) {
    this.#tokens = tokens;
    const first = this.#word(0);
    if (first === undefined || harmless.has(first)) return;
    // A block of statements.
    const block = first === "do" && tokens[2]?.text !== "(";
    if (!looked.has(first) || block || this.#setsPath(first)) this.anything = true;
    else for (let i = 0; i < tokens.length; i++) this.#look(i);
  }

  /** Undefined: there is none, or it is a value. A name in quotes is no word of the language. */
  #word(i: number): string | undefined {
    const token = this.#tokens[i];
    return token?.kind === "word" || token?.kind === "mark" ? token.text : undefined;
  }

  /** From then on names mean something else. */
  #setsPath(first: string): boolean {
    return first === "set" && this.#tokens.some(({ text }) => text === "search_path");
  }

  #look(i: number): void {
    const token = this.#tokens[i] as Token;
    const called = this.#word(i + 1) === "(";
    if (called && token.kind !== "mark" && token.kind !== "string") return this.#call(i, token.text);
    const before = this.#word(i - 1) ?? "";
    switch (token.kind === "word" ? token.text : "") {
      case "insert":
      case "replace":
      case "merge":
        return this.#name(i + 1);
      case "update":
        // FOR UPDATE, FOR NO KEY UPDATE, DO UPDATE, ON DUPLICATE KEY UPDATE.
        return ["for", "key", "do"].includes(before) ? undefined : this.#names(i + 1, "set");
      case "delete":
        return this.#names(i + 1, "where");
      default:
    }
  }

  #call(i: number, name: string): void {
    this.calls.add(name);
    if (name === "set_config" && this.#tokens[i + 2]?.text === "search_path") this.anything = true;
    if (name !== "nextval" && name !== "setval") return;
    const asked = this.#tokens[i + 2];
    if (asked?.kind === "string") this.sequences.add(asked.text.replaceAll('"', "").toLowerCase());
    else this.anything = true;
  }

  /** All tables up to a word: some servers write to several at once. Those that are only joined count too. */
  #names(from: number, end: string): void {
    this.#name(from);
    let depth = 0;
    for (let i = from; i < this.#tokens.length && depth >= 0; i++) {
      const word = this.#word(i);
      if (word === "(") depth++;
      else if (word === ")") depth--;
      else if (depth === 0 && (word === end || word === "returning" || word === ";")) return;
      else if (depth === 0 && [",", "join", "using", "from"].includes(word ?? "")) this.#name(i + 1);
    }
  }

  #name(from: number): void {
    let i = from;
    while (modifiers.has(this.#word(i) ?? "")) i++;
    const parts: string[] = [];
    for (; ; i += 2) {
      const token = this.#tokens[i];
      if (token?.kind !== "word" && token?.kind !== "quoted") break;
      parts.push(token.text);
      if (this.#word(i + 1) !== ".") break;
    }
    // A dot that is a part of a name would be taken for one between two.
    if (parts.length > 0 && !parts.some((part) => part.includes(".")))
      this.tables.add(parts.slice(-2).join("."));
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
  /** Tables that may do anything when they are written to: they have triggers. */
  readonly active: ReadonlySet<string>;
}

/** It decides by nothing that it has read: whether others come before it or before its COMMIT comes to the same. */
function blind(text: string, active: ReadonlySet<string>): boolean {
  const { kind, reads, writes, any } = footprint(text);
  return kind === "insert" && reads.size === 0 && !any && ![...writes].some((table) => active.has(table));
}

export function alone(text: string, { whole, writers, active }: Surroundings): Alone {
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
    !blind(text, active) &&
    acting.some(
      ({ first, written }) =>
        written.anything ||
        first === "truncate" ||
        first === "call" ||
        written.tables.size > 0 ||
        [...written.calls].some((call) => writers.has(call)),
    );
  const unseen = !begins && (acting.length > 1 || (acting.length > 0 && !fits));
  return { begins, fits, writes, unseen };
}

/**
 * Statements are executed within it, by a function, a procedure or a trigger, of which each may see what others have done since
 * the one before: nobody can be let in between these.
 */
export function hasOthersWithin(text: string, { writers, active }: Omit<Surroundings, "whole">): boolean {
  return (cut(text) ?? []).some((tokens) => {
    const { calls, tables } = new Reader(tokens);
    return (
      (tokens[0]?.kind === "word" && tokens[0].text === "call") ||
      [...calls].some((call) => writers.has(call)) ||
      [...tables].some((table) => active.has(table) || active.has(table.split(".").at(-1) ?? ""))
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
