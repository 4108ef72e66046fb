/** What a statement locks, and what may be shown of it, as far as its text tells. It is not a parser. */
import { type CallSite, callSites } from "../context/call-site.ts";
import { type Wanted, wantedRows } from "./order.ts";

/** The function whose callers sent it. */
type Caller = (...args: never[]) => unknown;

export interface SeenStatement {
  readonly text: string;
  /** Tables whose rows it locks, without their schemas. */
  readonly locks: readonly { readonly name: string; readonly wanted: readonly Wanted[] }[];
  /** Where it was sent for the first time, if it locks anything. */
  readonly site: CallSite | undefined;
}

/** The texts of an application are few; those that have values in them are not. */
const most = 5000;
const byText = new Map<string, SeenStatement>();
const byStrings = new WeakMap<object, SeenStatement>();

/** Looked at once for each text: what comes again costs a look into a map. */
export function seenAs(statement: unknown, above: Caller): SeenStatement | undefined {
  if (typeof statement === "string") return ofText(statement, above);
  if (typeof statement !== "object" || statement === null) return undefined;
  const { text, sql, parts } = statement as Record<string, unknown>;
  if (typeof text === "string") return ofText(text, above);
  if (typeof sql === "string") return ofText(sql, above);
  // A template's strings are the same object each time; a statement of ours is another one.
  const strings = Array.isArray(statement) ? statement : parts;
  if (!Array.isArray(strings)) return undefined;
  let known = byStrings.get(strings);
  if (!known) byStrings.set(strings, (known = ofText(strings.map(String).join("?"), above)));
  return known;
}

function ofText(text: string, above: Caller): SeenStatement {
  const known = byText.get(text);
  if (known) return known;
  const locks = tablesOf(text).map((name) => ({ name, wanted: wantedRows(name, false) }));
  const found: SeenStatement = { text, locks, site: locks.length > 0 ? callSites.here(above) : undefined };
  if (byText.size >= most) byText.clear();
  byText.set(text, found);
  return found;
}

const value = /\/\*[\s\S]*?\*\/|--[^\n]*|'(?:[^'\\]|\\[\s\S]|'')*'|\$(\w*)\$[\s\S]*?\$\1\$/g;
const blank = (part: string) => (part.startsWith("/*") || part.startsWith("--") ? " " : "?");

/** Before a table's name, or a dot: elsewhere a server may take it for a text. */
const quoted = /(?<=\b(?:from|join|into|update|table|only)\s+|\.)"[^"]*"|"[^"]*"(?=\.)|"[^"]*"/gi;
const shownLength = 200;

/** Without values, comments and what is too long. */
export function shownStatement(text: string): string {
  let plain = text.replace(value, blank);
  // Whose quotes do not match was read in the wrong way.
  if (plain.includes("'")) plain = `${text.slice(0, text.indexOf("'"))}…`;
  plain = plain
    .replace(quoted, (part, at: number, all: string) => {
      const near = all[at - 1] === "." || all[at + part.length] === ".";
      return near || /\b(?:from|join|into|update|table|only)\s+$/i.test(all.slice(0, at)) ? part : '"…"';
    })
    .replaceAll(/(?<![\w$])\d[\d.]*/g, "?")
    .replaceAll(/\s+/g, " ")
    .trim();
  return plain.length > shownLength ? `${plain.slice(0, shownLength - 1)}…` : plain;
}

const name = String.raw`((?:[\w$]+\.){0,2}[\w$]+)`;
const all = (text: string, pattern: string): string[] =>
  [...text.matchAll(new RegExp(pattern, "g"))].map(([, path = ""]) => path.split(".").at(-1) ?? "");

/** Of UPDATE, DELETE, MERGE, SELECT … FOR UPDATE, and INSERT … ON CONFLICT DO UPDATE: not of a plain INSERT, whose rows are new. */
export function tablesOf(text: string): readonly string[] {
  const plain = text
    .replace(value, blank)
    .replaceAll(/["`[\]]/g, "")
    .replaceAll(/\s+/g, " ")
    .replaceAll(/\s*\.\s*/g, ".")
    .toLowerCase();
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
