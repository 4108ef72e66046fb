/**
 * What a statement touches, as far as its text tells. It is not a parser: what it does not know counts as touching
 * everything, so that nothing is left out on account of it.
 */
import type { RoutineEffect } from "../../seam/protocol-reader.ts";
import { StatementReader, type TablePath, type Token, tokensOf } from "./statement-reader.ts";

export interface Footprint {
  readonly kind: "begin" | "commit" | "rollback" | "setting" | "read" | "write" | "insert" | "other";
  readonly reads: ReadonlySet<string>;
  readonly writes: ReadonlySet<string>;
  /** It may touch anything. */
  readonly any: boolean;
  /** It asks what time it is. */
  readonly clock: boolean;
  /** What it reads may be compared, or put into an order. */
  readonly compares: boolean;
}

const clock =
  /\b(now|current_timestamp|current_time|localtimestamp|localtime|clock_timestamp|statement_timestamp|transaction_timestamp|sysdate|unix_timestamp|utc_timestamp)\b/;
const compares = /[<>]|\border by\b|\bbetween\b|\b(?:max|min|greatest|least) \(/;

/** Functions that depend on nothing but their arguments, the rows that are read, or the clock. */
const pure = new Set(
  (
    "abs,array,array_agg,avg,cast,ceil,char_length,coalesce,concat,count,current_timestamp,date,date_trunc,exists," +
    "extract,floor,greatest,ifnull,in,int,interval,json,json_agg,json_array,json_arrayagg,json_build_array," +
    "json_build_object,json_extract,json_object,json_objectagg,json_value,jsonb,jsonb_agg,jsonb_build_array," +
    "jsonb_build_object,jsonb_set,least,length,lower,make_interval,max,md5,min,mod,not,now,nullif,octet_length,on," +
    "or,and,position,power,replace,round,row,row_number,row_to_json,sqrt,string_agg,substr,substring,sum,timestamp,to_char," +
    "to_json,to_jsonb,tstzrange,tsrange,daterange,int4range,trim,unnest,upper,values,varchar,char,numeric,decimal,any,all,some," +
    "union,except,intersect,distinct,between,having,lateral,as,set,select,where,from,join,by,into,then,else,when,returning,key,using,filter,over,conflict,unix_timestamp,strftime,datetime,generate_series"
  ).split(","),
);

/** Comments and values away, quotes of names away, in lower case. */
function plain(text: string): string {
  return text
    .replaceAll(/\/\*[\s\S]*?\*\/|--[^\n]*|'(?:[^']|'')*'/g, (part) => (part.startsWith("'") ? "?" : " "))
    .replaceAll(/["`[\]]/g, "")
    .replaceAll(/\s+/g, " ")
    .replaceAll(/\s*([().])\s*/g, "$1")
    .replaceAll("(", " (")
    .trim()
    .toLowerCase();
}

/** The statement without its values, which differ from run to run. `own`: names that may be random, in the order they were made. */
export function labelOf(text: string, own: readonly string[] = []): string {
  const named = own.reduce(
    (shown, each, i) =>
      shown.replaceAll(new RegExp(`(?<![\\w$])${escaped(each)}(?![\\w$])`, "g"), "*".repeat(i + 1)),
    plain(text),
  );
  return named.replaceAll(/\$?\b\d+(?:\.\d+)?\b/g, "?");
}

const escaped = (text: string) => text.replaceAll(/[.*+?^${}()|[\]\\]/g, String.raw`\$&`);

const made = new RegExp(
  [
    String.raw`^savepoint`,
    String.raw`^create(?: or replace)?(?: (?:global|local))?(?: (?:temp|temporary|unlogged))? (?:table|view|sequence)(?: if not exists)?`,
    String.raw`\binto (?:temp|temporary|unlogged)(?: table)?`,
    String.raw`^declare`,
    String.raw`^prepare(?! transaction)`,
  ]
    .map((start) => String.raw`(?:${start}) (?:\w+\.)?([^\s();,]+)`)
    .join("|"),
);

/** What the statement makes and names: clients draw such names by lot. */
export function namesMade(text: string): string[] {
  const found = made.exec(plain(text));
  return found ? found.slice(1).filter((each) => each !== undefined) : [];
}

/** Whether it can be the same one: of one that was prepared before anybody read along, only the number is known. */
export function sameLabel(a: string, b: string): boolean {
  return a === b || a.startsWith("execute #") || b.startsWith("execute #");
}

/** Without its schema: two that are called the same count as one. */
const tableOf = (path: TablePath): string => path.at(-1) ?? "";

/** The function has a schema of its own, or what the server has by itself. */
const isPure = (path: TablePath): boolean => pure.has(path.join(".").replace(/^pg_catalog\./, ""));

const footprints = new Map<string, Footprint>();

/** Those of the library, which are the same on every server that has them: their names tell what is in them. */
const routines = new Map<string, RoutineEffect>();

export function learnRoutines(found: ReadonlyMap<string, RoutineEffect>): void {
  for (const [name, effect] of found) routines.set(name, effect);
  footprints.clear();
}

/** The procedure that it calls, and does nothing else. */
export function calledRoutine(text: string): RoutineEffect | undefined {
  const tokens = tokensOf(text) ?? [];
  const [call, name] = tokens;
  if (tokens.slice(0, -1).some(({ kind, text: mark }) => kind === "mark" && mark === ";")) return undefined;
  return call?.kind === "word" && call.text === "call" ? routines.get(name?.text ?? "") : undefined;
}

/** Of one statement by itself. */
export function footprint(text: string): Footprint {
  let known = footprints.get(text);
  if (!known) {
    if (footprints.size > 10_000) footprints.clear();
    const routine = calledRoutine(text);
    known = routine ? ofRoutine(routine) : read(plain(text), tokensOf(text));
    footprints.set(text, known);
  }
  return known;
}

/** The clock: for what has run out. */
function ofRoutine({ tables, boundary }: RoutineEffect): Footprint {
  return {
    kind: boundary === "begins" ? "begin" : boundary === "commits" ? "commit" : "other",
    reads: new Set(),
    writes: new Set(tables),
    any: tables.includes("*"),
    clock: true,
    compares: true,
  };
}

/** By the first word, of those that are understood. */
const kinds: Readonly<Record<string, Footprint["kind"]>> = {
  select: "read",
  values: "read",
  table: "read",
  with: "read",
  insert: "insert",
  replace: "insert",
  update: "write",
  delete: "write",
  merge: "write",
};

/** `tokens`: absent where it cannot be cut into words for sure. */
function read(text: string, tokens: readonly Token[] | undefined): Footprint {
  const nothing = {
    reads: new Set<string>(),
    writes: new Set<string>(),
    any: false,
    clock: !tokens || clock.test(text),
    compares: !tokens || compares.test(text),
  };
  const end = tokens?.findIndex((token) => token.kind === "mark" && token.text === ";") ?? -1;
  const several = end >= 0 && end < (tokens?.length ?? 0) - 1;
  if (several || text.startsWith("rollback to")) return { ...nothing, kind: "other", any: true };
  if (/^(begin|start transaction|xa (start|begin)|set (session )?autocommit ?= ?0)\b/.test(text))
    return { ...nothing, kind: "begin" };
  if (/^(xa commit|commit|end)\b/.test(text)) return { ...nothing, kind: "commit" };
  if (/^(xa rollback|rollback|abort)\b/.test(text)) return { ...nothing, kind: "rollback" };
  if (/^xa end\b/.test(text)) return { ...nothing, kind: "setting" };
  if (tokens && /^(set|show|savepoint|release)\b[^(]*$/.test(text) && !/\bautocommit\b/.test(text))
    return { ...nothing, kind: "setting" };
  const first = kinds[/^[( ]*(\w+)/.exec(text)?.[1] ?? ""];
  if (!tokens) return { ...nothing, kind: first ?? "other", any: true };
  const reader = new StatementReader(tokens);
  const reads = new Set(reader.reads.map(tableOf));
  const writes = new Set(reader.writes.map(tableOf));
  if (reader.locks) for (const table of reads) writes.add(table);
  const kind = reader.changes ? "write" : reader.inserts ? "insert" : "read";
  return {
    kind: first === undefined ? "other" : kind,
    ...nothing,
    reads,
    writes,
    any: first === undefined || reader.unclear.reads || !reader.calls.every(isPure),
  };
}

/** First half of a two-phase commit, after which the transaction may belong to no session, or the second half. */
export function twoPhase(text: string): { readonly name: string; readonly prepares: boolean } | undefined {
  const found =
    /^\s*(?:(prepare transaction|xa prepare)|(?:commit|rollback) prepared|xa (?:commit|rollback))\s+('[^']*')/i.exec(
      text,
    );
  return found ? { name: found[2] ?? "", prepares: found[1] !== undefined } : undefined;
}

/** Locks rows that it reads. */
export const locksRows = (text: string): boolean =>
  /\bfor (?:no key )?(?:update|share|key share)\b|\block in share mode\b/i.test(text);

/** The table whose rows it locks: that of the statement itself, and not of one within. */
export function lockedTable(text: string): string | undefined {
  return [...footprint(text).reads][0];
}

/** A table as statements write it: in quotes, if these matter. */
export function asWritten(texts: readonly string[], table: string): string {
  const after = String.raw`\b(?:from|join|into|update|only|table|using)\s+(?:["\`]?[\w$]+["\`]?\.)*`;
  const pattern = new RegExp(`${after}(["\`]?)(${escaped(table)})\\1(?![\\w$"\`])`, "i");
  for (const text of texts) {
    const [, quote = "", name] = pattern.exec(text) ?? [];
    if (name !== undefined) return name === table ? name : quote + name + quote;
  }
  return table;
}

/** The same as calls take it. */
export const bare = (table: string): string => table.replaceAll(/["`]/g, "");
