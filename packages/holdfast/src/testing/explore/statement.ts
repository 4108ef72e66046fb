/**
 * What a statement touches, as far as its text tells. It is not a parser: what it does not know counts as touching
 * everything, so that nothing is left out on account of it.
 */
export interface Footprint {
  readonly kind: "begin" | "commit" | "rollback" | "setting" | "read" | "write" | "insert" | "other";
  readonly reads: ReadonlySet<string>;
  readonly writes: ReadonlySet<string>;
  /** It may touch anything. */
  readonly any: boolean;
}

/** Functions that depend on nothing but their arguments, the rows that are read, or the clock. */
const pure = new Set(
  (
    "abs,array,array_agg,avg,cast,ceil,char_length,coalesce,concat,count,current_timestamp,date,date_trunc,exists," +
    "extract,floor,greatest,ifnull,in,int,interval,json,json_agg,json_array,json_arrayagg,json_build_array," +
    "json_build_object,json_extract,json_object,json_objectagg,json_value,jsonb,jsonb_agg,jsonb_build_array," +
    "jsonb_build_object,jsonb_set,least,length,lower,make_interval,max,md5,min,mod,not,now,nullif,octet_length,on," +
    "or,and,position,power,replace,round,row,row_number,row_to_json,sqrt,string_agg,substr,substring,sum,timestamp,to_char," +
    "to_json,to_jsonb,tstzrange,tsrange,daterange,int4range,trim,unnest,upper,values,varchar,char,numeric,decimal,any,all,some," +
    "as,set,select,where,from,join,by,into,then,else,when,returning,key,using,filter,over,conflict,unix_timestamp,strftime,datetime"
  ).split(","),
);

const name = String.raw`((?:[\w$]+\.){0,2}[\w$]+)`;
const tables = {
  reads: new RegExp(String.raw`\b(?:from|join|using)\s+(?:only\s+|lateral\s+)?${name}`, "g"),
  inserts: new RegExp(String.raw`\b(?:insert|replace)\s+(?:ignore\s+|or\s+\w+\s+)?into\s+${name}`, "g"),
  updates: new RegExp(
    String.raw`(?<!\bfor\s)(?<!\bkey\s)(?<!\bdo\s)\bupdate\s+(?:only\s+|ignore\s+)?${name}`,
    "g",
  ),
  deletes: new RegExp(String.raw`\bdelete\s+from\s+(?:only\s+)?${name}`, "g"),
};

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

/** The statement without its values, which differ from run to run. */
export function labelOf(text: string): string {
  return plain(text).replaceAll(/\$?\b\d+(?:\.\d+)?\b/g, "?");
}

/** Whether it can be the same one: of one that was prepared before anybody read along, only the number is known. */
export function sameLabel(a: string, b: string): boolean {
  return a === b || a.startsWith("execute #") || b.startsWith("execute #");
}

const found = (text: string, pattern: RegExp): string[] =>
  [...text.matchAll(pattern)].map(([, table = ""]) => table.split(".").at(-1) ?? "");

const footprints = new Map<string, Footprint>();

/** Of one statement by itself. */
export function footprint(text: string): Footprint {
  let known = footprints.get(text);
  if (!known) {
    if (footprints.size > 10_000) footprints.clear();
    known = read(plain(text));
    footprints.set(text, known);
  }
  return known;
}

function read(text: string): Footprint {
  const nothing = { reads: new Set<string>(), writes: new Set<string>(), any: false };
  const several = text.replace(/;$/, "").includes(";");
  if (several || text.startsWith("rollback to")) return { ...nothing, kind: "other", any: true };
  if (/^(begin|start transaction|set (session )?autocommit ?= ?0)\b/.test(text))
    return { ...nothing, kind: "begin" };
  if (/^(commit|end)\b/.test(text)) return { ...nothing, kind: "commit" };
  if (/^(rollback|abort)\b/.test(text)) return { ...nothing, kind: "rollback" };
  if (/^(set|show|savepoint|release)\b[^(]*$/.test(text)) return { ...nothing, kind: "setting" };
  const inserts = found(text, tables.inserts);
  const changed = [...found(text, tables.updates), ...found(text, tables.deletes)];
  const writes = new Set([...inserts, ...changed]);
  const reads = new Set(found(text, tables.reads));
  const locking = locksRows(text);
  if (locking) for (const table of reads) writes.add(table);
  const calls = [...text.matchAll(/([\w$]+) \(/g)].map(([, called = ""]) => called);
  const unknown = calls.some((called) => !pure.has(called) && !reads.has(called) && !writes.has(called));
  const known = /^(with|select|insert|replace|update|delete|values)\b/.test(text);
  // "FROM a, b": what comes after the comma is not seen.
  const list = new RegExp(String.raw`\bfrom ${name}(?: (?:as )?\w+)?,`).test(text);
  return {
    kind: !known ? "other" : inserts.length > 0 ? "insert" : changed.length > 0 ? "write" : "read",
    reads,
    writes,
    any: !known || unknown || list,
  };
}

/** A lock by name that a statement takes or gives back. */
export interface SeenLockCall {
  /** Until the transaction ends, until it is given back, or giving it back. */
  readonly lasts: "transaction" | "session" | "given back";
  readonly called: string;
  /** What is locked, as it is written. */
  readonly name: string;
}

const lockCall =
  /\b(?:(pg_(?:try_)?advisory_xact_lock(?:_shared)?)|(pg_(?:try_)?advisory_lock(?:_shared)?|get_lock)|(pg_advisory_unlock(?:_shared)?|release_lock))\s*\(/gi;

export function lockCalls(text: string): SeenLockCall[] {
  return [...text.matchAll(lockCall)].map((found) => {
    const [whole, transaction, session, back] = found;
    const from = found.index + whole.length;
    let depth = 1;
    let at = from;
    for (; at < text.length && depth > 0; at++) depth += text[at] === "(" ? 1 : text[at] === ")" ? -1 : 0;
    const args = text
      .slice(from, depth === 0 ? at - 1 : at)
      .replaceAll(/\s+/g, " ")
      .trim();
    return {
      lasts: transaction ? "transaction" : session ? "session" : "given back",
      called: transaction ?? session ?? back ?? "",
      // The second argument of GET_LOCK is how long it may take.
      name: /^get_lock$/i.test(session ?? "") ? args.replace(/,[^,]*$/, "") : args,
    };
  });
}

/** Locks rows that it reads. */
export const locksRows = (text: string): boolean =>
  /\bfor (?:no key )?(?:update|share|key share)\b|\block in share mode\b/i.test(text);

/** The table whose rows it locks: that of the statement itself, and not of one within. */
export function lockedTable(text: string): string | undefined {
  let flat = plain(text);
  for (let before = ""; before !== flat;) {
    before = flat;
    flat = flat.replaceAll(/\([^()]*\)/g, " ");
  }
  return found(flat, tables.reads)[0] ?? [...footprint(text).reads][0];
}
