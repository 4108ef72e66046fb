/** What a statement locks, and what may be shown of it, as far as its text tells. It is not a parser. */
import { type CallSite, callSites } from "../context/call-site.ts";
import { type LockCall, lockCalls, valueIn } from "../seam/lock-calls.ts";
import { type Wanted, sortable, wantedRows } from "./order.ts";

/** The function whose callers sent it. */
type Caller = (...args: never[]) => unknown;

/** Leaves the values and comments of a statement out. */
export type Redact = (statement: string) => string;

export interface SeenStatement {
  /** Without values and comments. */
  readonly plain: string;
  /** Tables whose rows it locks, without their schemas. */
  readonly locks: readonly { readonly name: string; readonly wanted: readonly Wanted[] }[];
  /** It waits for these, if it has to: unlike SKIP LOCKED and NOWAIT. */
  readonly waits: boolean;
  /** Of one table that it locks rows of: which row, if its condition tells. */
  readonly row: Row | undefined;
  /** Tables that it adds rows to: nobody else waits for these. */
  readonly adds: readonly string[];
  /** Locks by name that it takes or gives back. */
  readonly calls: readonly LockCall[];
  readonly savepoint: Savepoint | undefined;
  /** Where it was sent for the first time, if it locks anything. */
  readonly site: CallSite | undefined;
}

/** `UPDATE … WHERE column = value`. */
interface Row {
  readonly by: string;
  /** Undefined: it is not known, or cannot be brought into an order. */
  id(values: readonly unknown[]): string | undefined;
}

export interface Savepoint {
  readonly action: "set" | "release" | "rollback";
  readonly name: string;
}

/** The texts of an application are few; those that have values in them are not. */
const most = 5000;
/** What a statement does stands before the rows of a bulk insert. */
const longest = 20_000;
/** Instances on different engines read the same text differently. */
const known = new WeakMap<
  Redact,
  { readonly byText: Map<string, SeenStatement>; readonly byStrings: WeakMap<object, SeenStatement> }
>();

function knownTo(redact: Redact) {
  let found = known.get(redact);
  if (!found) known.set(redact, (found = { byText: new Map(), byStrings: new WeakMap() }));
  return found;
}

/** Looked at once for each text: what comes again costs a look into a map. */
export function seenAs(statement: unknown, redact: Redact, above: Caller): SeenStatement | undefined {
  if (typeof statement === "string") return ofText(statement, redact, above);
  if (typeof statement !== "object" || statement === null) return undefined;
  const { text, sql, parts } = statement as Record<string, unknown>;
  if (typeof text === "string") return ofText(text, redact, above);
  if (typeof sql === "string") return ofText(sql, redact, above);
  // A template's strings are the same object each time; a statement of ours is another one.
  const strings = Array.isArray(statement) ? statement : parts;
  if (!Array.isArray(strings)) return undefined;
  const { byStrings } = knownTo(redact);
  let seen = byStrings.get(strings);
  if (!seen) byStrings.set(strings, (seen = ofText(strings.map(String).join("?"), redact, above)));
  return seen;
}

function ofText(text: string, redact: Redact, above: Caller): SeenStatement {
  const { byText } = knownTo(redact);
  const seen = byText.get(text);
  if (seen) return seen;
  const plain = redact(text.slice(0, longest));
  const shared =
    /\b(?:for\s+(?:key\s+)?share|lock\s+in\s+share\s+mode)\b/i.test(plain) && !writing.test(plain);
  const locks = tablesOf(plain).map((name) => ({ name, wanted: wantedRows(name, shared) }));
  const written = numbered(text.slice(0, longest));
  const calls = lockCalls(plain).length > 0 ? lockCalls(written) : [];
  const found: SeenStatement = {
    plain,
    locks,
    waits: !/\b(?:skip\s+locked|nowait)\b/i.test(plain),
    row: locks.length === 1 ? rowOf(written, plain) : undefined,
    adds: all(
      plain.replaceAll(/["`]/g, "").toLowerCase(),
      String.raw`\binsert\s+(?:ignore\s+)?into\s+${name}`,
    ),
    calls,
    savepoint: savepointOf(plain),
    site: locks.length + calls.length > 0 ? callSites.here(above) : undefined,
  };
  if (byText.size >= most) byText.clear();
  byText.set(text, found);
  return found;
}

const shownLength = 200;

/** On one line, and not too long. */
export function shownStatement(plain: string): string {
  const flat = plain.replaceAll(/\s+/g, " ").trim();
  return flat.length > shownLength ? `${flat.slice(0, shownLength - 1)}…` : flat;
}

const writing = /\b(?:for\s+(?:no\s+key\s+)?update|update\s+[\w"`]|delete|merge|insert|replace)\b/i;

/** All parameters as $1, $2, …: where they are marks alone, the server counts them too. */
function numbered(text: string): string {
  let n = 0;
  return /\$\d/.test(text) ? text : text.replaceAll("?", () => `$${++n}`);
}

const condition = new RegExp(
  String.raw`\bwhere\s+\(?(?:[\w"\`]+\.)*["\`]?(\w+)["\`]?\s*=\s*(\$\d+|-?\d+|'(?:[^'\\]|'')*')(?:::\w+)?\)?(?=\s|;|$)([^]*)$`,
  "i",
);

function rowOf(text: string, plain: string): Row | undefined {
  const [, column = "", value = "", rest = ""] = condition.exec(text) ?? [];
  const words = (word: RegExp) => plain.match(word)?.length ?? 0;
  // A condition of something within is not that of the statement.
  if (value === "" || words(/\bwhere\b/gi) !== 1 || words(/\bselect\b/gi) > 1) return undefined;
  if (/^\s*(?:update|delete)\b/i.test(plain) ? words(/\bselect\b/gi) > 0 : /\b(?:or|union)\b/i.test(rest))
    return undefined;
  if (/\bor\b/i.test(rest)) return undefined;
  const marks = new Set(text.match(/\$\d+/g)).size;
  return {
    by: column.toLowerCase(),
    id(values) {
      const found = marks === values.length ? valueIn(value, values) : undefined;
      return found === undefined ? undefined : sortable(found);
    },
  };
}

function savepointOf(plain: string): Savepoint | undefined {
  const found =
    /^\s*(savepoint|release(?:\s+savepoint)?|rollback\s+(?:work\s+|transaction\s+)?to(?:\s+savepoint)?)\s+["`]?([\w$-]+)/i.exec(
      plain,
    );
  if (!found) return undefined;
  const [, what = "", point = ""] = found;
  const action = /^s/i.test(what) ? "set" : /^re/i.test(what) ? "release" : "rollback";
  return { action, name: point.toLowerCase() };
}

const name = String.raw`((?:[\w$]+\.){0,2}[\w$]+)`;
const all = (text: string, pattern: string): string[] =>
  [...text.matchAll(new RegExp(pattern, "g"))].map(([, path = ""]) => path.split(".").at(-1) ?? "");

/** Of LOCK TABLE, UPDATE, DELETE, MERGE, SELECT … FOR UPDATE, and INSERT … ON CONFLICT DO UPDATE: not of a plain INSERT, whose rows are new. */
export function tablesOf(redacted: string): readonly string[] {
  const plain = redacted
    .replaceAll(/["`[\]]/g, "")
    .replaceAll(/\s+/g, " ")
    .replaceAll(/\s*\.\s*/g, ".")
    .toLowerCase();
  const whole =
    /(?:^|; ?)lock (?:table )?(.+?)(?: in (?!(?:access|row) share )[\w ]+ mode)?(?: nowait)?(?:;|$)/.exec(
      plain,
    )?.[1];
  if (whole !== undefined && !/^(?:tables|instance) | mode$/.test(whole))
    return [...new Set(all(whole, String.raw`(?:^|,) ?(?:only )?${name}`))];
  if (!/\b(?:update|delete|merge|replace|for (?:no key |key )?share|lock in share mode)\b/.test(plain))
    return [];
  const found = [
    // Not that of FOR UPDATE, DO UPDATE, KEY UPDATE and ON UPDATE.
    ...all(
      plain,
      String.raw`(?<!\b(?:for|do|key|on) )\bupdate (?:only |ignore |low_priority |or \w+ )*(?!set\b)${name} `,
    ),
    ...all(plain, String.raw`\bdelete (?:ignore |low_priority |quick )*from (?:only )?${name}`),
    ...all(plain, String.raw`\bmerge into (?:only )?${name}`),
    ...all(plain, String.raw`(?:^|; ?)replace (?:low_priority )?(?:into )?${name}`),
  ];
  if (/\bon conflict\b.*\bdo update\b|\bon duplicate key update\b|\binsert or replace\b/.test(plain))
    found.push(...all(plain, String.raw`\binsert (?:ignore |or \w+ )?into ${name}`));
  if (/\bfor (?:no key )?update\b|\bfor (?:key )?share\b|\block in share mode\b/.test(plain))
    found.push(...all(plain, String.raw`\b(?:from|join) (?:only |lateral )?${name}`));
  return [...new Set(found)];
}
