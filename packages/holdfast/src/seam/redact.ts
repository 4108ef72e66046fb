/** Statements without the values that somebody wrote into them: for logs, events and screens. */

/** How an engine reads the text of a statement: where texts, names and comments begin and end. */
export interface Lexis {
  /** Whether "…" is a name: always, at least where a table must stand, or never for sure. Elsewhere it may be a text. */
  readonly quotedNames: "always" | "tables" | "never";
  /** Names stand between these too. */
  readonly otherNames: readonly ("`" | "[")[];
  /** A session's settings decide whether a backslash keeps the next quote from ending a text. */
  readonly backslashes: boolean;
  /** E'…', in which a backslash always does that, and $tag$…$tag$. */
  readonly moreTexts: boolean;
  readonly nestedComments: boolean;
  /** A carriage return ends a comment of one line. A line feed does everywhere. */
  readonly returns: boolean;
  /** Blanks past ASCII are blanks. Elsewhere they are letters. */
  readonly unicodeBlanks: boolean;
  /** "#" begins a comment, "--" only before a blank, and a server may execute what stands in a comment that begins with "!". */
  readonly hashComments: boolean;
}

/** Where something ends, and what is shown of it. Undefined: that depends on settings, or the text was cut off. */
type Token = { readonly end: number; readonly shown: string } | undefined;

/** Stands for a value. */
const value = "?";
/** Stands for what cannot be told apart. */
const rest = "…";

/** To a server everything past ASCII is a letter, also a sign or a blank. */
const word = /[A-Za-z_\u{80}-\u{10ffff}][\w$\u{80}-\u{10ffff}]*/uy;
const number = /\.?\d(?:[eE][+-]\d|[\w.\u{80}-\u{10ffff}])*/uy;
const parameter = /[$?:@]\d+/y;
const dollars = /\$(?:[A-Za-z_\u{80}-\u{10ffff}][\w\u{80}-\u{10ffff}]*)?\$/uy;
const letter = /^[A-Za-z_\u{80}-\u{10ffff}"]/u;
/** What comes next is the value of a setting. */
const setting =
  /^\s*(?:(?:alter\s+(?:role|user|database|system)\s.*?\s)?set|pragma)\s[^=]*?(?:=|\sto\s|\()/is;

function match(pattern: RegExp, text: string, at: number): string | undefined {
  pattern.lastIndex = at;
  return pattern.exec(text)?.[0];
}

/**
 * Returns a statement without its literal values and comments. The rest is left out where a text that was cut off, or a
 * setting of the session, leaves open what is a value.
 */
export function redacted(text: string, lexis: Lexis | undefined): string {
  if (!lexis) return rest;
  const read = lexis.unicodeBlanks ? text.replaceAll(/\p{Zs}/gu, " ") : text;
  let shown = "";
  let statement = 0;
  for (let at = 0; at < read.length;) {
    const token = next(read, at, lexis, shown);
    if (!token) return shown + rest;
    // SET app.token = abc123, which needs no quotes. MySQL wants them, and has subqueries there.
    const set = !lexis.hashComments && letter.test(token.shown) && setting.test(shown.slice(statement));
    shown += set ? value : token.shown;
    at = token.end;
    if (token.shown === ";") statement = shown.length;
  }
  return shown;
}

function next(text: string, at: number, lexis: Lexis, before: string): Token {
  const first = text[at] ?? "";
  const two = text.slice(at, at + 2);
  const backslash = lexis.backslashes ? "open" : "plain";
  if (first === "'") return quoted(text, at, backslash, value);
  if (first === '"') return doubleQuoted(text, at, lexis, before);
  if ((lexis.otherNames as readonly string[]).includes(first)) return quoted(text, at, "plain");
  if (two === "/*") return comment(text, at, lexis);
  if (two === "--" && (!lexis.hashComments || /^(?:[\s\p{Cc}]|$)/u.test(text.slice(at + 2, at + 3))))
    return line(text, at, lexis);
  if (first === "#" && lexis.hashComments) return line(text, at, lexis);
  if (lexis.moreTexts && /^e'/i.test(two)) return quoted(text, at + 1, "escaped", value);
  const tag = lexis.moreTexts || lexis.hashComments ? match(dollars, text, at) : undefined;
  // Since MySQL 9 it may be a program in another language.
  if (tag !== undefined && !lexis.moreTexts) return undefined;
  if (tag !== undefined) {
    const end = text.indexOf(tag, at + tag.length);
    return end < 0 ? undefined : { end: end + tag.length, shown: value };
  }
  const kept = match(parameter, text, at) ?? match(word, text, at);
  if (kept !== undefined) return { end: at + kept.length, shown: kept };
  const digits = match(number, text, at);
  if (digits !== undefined) return { end: at + digits.length, shown: value };
  return { end: at + 1, shown: first };
}

const beforeTable = /(?:\b(?:from|join|into|update|table|only)\s+|\.\s*)$/i;

function doubleQuoted(text: string, at: number, { quotedNames, backslashes }: Lexis, before: string): Token {
  const name = quoted(text, at, "plain");
  if (quotedNames === "always") return name;
  if (quotedNames === "tables" && name && (beforeTable.test(before.slice(-20)) || text[name.end] === "."))
    return name;
  return quoted(text, at, backslashes ? "open" : "plain", '"…"');
}

/** `open`: whether a backslash escapes is not known. */
function quoted(text: string, from: number, how: "plain" | "escaped" | "open", instead?: string): Token {
  const close = text[from] === "[" ? "]" : (text[from] ?? "");
  for (let at = from + 1; at < text.length; at++) {
    if (text[at] === "\\" && how !== "plain") {
      at++;
      // Both readings agree on a pair of backslashes.
      if (how === "open" && text[at] === close) return undefined;
    } else if (text[at] === close && text[at + 1] === close && close !== "]") at++;
    else if (text[at] === close) return { end: at + 1, shown: instead ?? text.slice(from, at + 1) };
  }
  return undefined;
}

function line(text: string, at: number, { returns }: Lexis): Token {
  const length = text.slice(at).search(returns ? /[\n\r]/ : /\n/);
  return { end: length < 0 ? text.length : at + length, shown: " " };
}

function comment(text: string, from: number, { nestedComments, hashComments }: Lexis): Token {
  let depth = 0;
  for (let at = from; at < text.length; at++) {
    const two = text.slice(at, at + 2);
    if (two === "/*" && (nestedComments || depth === 0)) depth++;
    else if (two === "*/" && at > from + 1) depth--;
    else continue;
    at++;
    if (depth > 0) continue;
    const inside = text.slice(from + 2, at - 1);
    // The server may read it as a part of the statement, where a quote or another comment ends elsewhere.
    const executed = hashComments && /^M?!/.test(inside) && /['"`#]|--|\/\*/.test(inside);
    return executed ? undefined : { end: at + 1, shown: " " };
  }
  return undefined;
}
