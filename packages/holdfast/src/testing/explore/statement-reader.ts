/**
 * Reads the text of a statement: which tables it names where, and what it calls. It is not a parser: it looks at each word that a
 * table can follow, on any server, and says so where it does not understand what follows.
 */

export interface Token {
  readonly kind: "word" | "quoted" | "string" | "number" | "mark";
  /** Names in lower case and without their quotes. */
  readonly text: string;
}

/** To a server everything past ASCII is a letter. */
const patternWith = (text: string, name: string) =>
  new RegExp(
    String.raw`[\t-\r ]+|--(?=[\t-\r ]|$)[^\n]*|(?<comment>/\*[^]*?\*/)|(?<string>${text})|(?<quoted>${name}|${"`(?:[^`]|``)*`"})` +
      String.raw`|(?<word>[A-Za-z_\u{80}-\u{10ffff}][\w$\u{80}-\u{10ffff}]*)|(?<number>\$?\d[\w.\u{80}-\u{10ffff}]*)|(?<mark>--|[^])`,
    "gu",
  );

/** Settings of a session decide whether a backslash keeps the next quote from ending a text. */
const plain = patternWith(String.raw`'(?:[^']|'')*'`, String.raw`"(?:[^"]|"")*"`);
const escaping = patternWith(String.raw`'(?:[^'\\]|''|\\[^])*'`, String.raw`"(?:[^"\\]|""|\\[^])*"`);

/**
 * Undefined: it cannot be cut into words for sure. A text that only one of both ways of reading backslashes can cut is one that
 * the server has read in that way, or refused.
 */
export function tokensOf(text: string): Token[] | undefined {
  const found = cutBy(plain, text);
  if (!text.includes("\\")) return found;
  const other = cutBy(escaping, text);
  if (!found || !other) return found ?? other;
  const isSame = JSON.stringify(shapes(found)) === JSON.stringify(shapes(other));
  return isSame ? found : undefined;
}

const shapes = (tokens: readonly Token[]) =>
  tokens.map(({ kind, text }) => (kind === "string" ? kind : text));

function cutBy(pattern: RegExp, text: string): Token[] | undefined {
  const tokens: Token[] = [];
  for (const match of text.matchAll(pattern)) {
    const { comment, string, quoted, word, number, mark } = match.groups as Record<
      string,
      string | undefined
    >;
    // Comments that some servers execute, or end later; what begins a comment on some; quotes that have no end; texts between dollars.
    if (/^\/\*M?!|^\/\*[^]*\/\*/.test(comment ?? "")) return undefined;
    if (mark !== undefined && /^(?:--|['"`$\\])$/.test(mark)) return undefined;
    if (mark === "#" && text[match.index + 1] !== ">") return undefined;
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
    else if (number !== undefined) tokens.push({ kind: "number", text: number });
    else if (mark !== undefined) tokens.push({ kind: "mark", text: mark });
  }
  return tokens;
}

/** A name, with its schema before it if that was there. */
export type TablePath = readonly string[];

const queries = new Set("select,with,values,table".split(","));
/** What follows names no more tables of the same list. */
const endsOfList = new Set(
  "where,set,from,group,having,order,limit,union,intersect,except,into,select,returning,when,conflict,duplicate,values".split(
    ",",
  ),
);
const joins = new Set(["join", "straight_join"]);
const locking = new Set(["update", "share", "no", "key"]);
/** In these, FROM and USING stand before something else than a table. */
const argued = new Set("extract,substring,substr,trim,overlay,convert,char".split(","));
const modifiers = new Set("low_priority,high_priority,delayed,quick,ignore".split(","));
/** In these, TABLE does not stand for SELECT * FROM. */
const locksWhole = new Set("lock,truncate,create,drop,alter".split(","));
const beforeTable = new Set(["only", "lateral"]);
const reserved = new Set([...endsOfList, ...queries, ...joins, "on", "using", "as", "default"]);

/** One statement. */
export class StatementReader {
  readonly tokens: readonly Token[];
  /** The outermost ones first. */
  readonly reads: TablePath[] = [];
  readonly writes: TablePath[] = [];
  /** Functions, and words that a bracket follows. */
  readonly calls: TablePath[] = [];
  inserts = false;
  changes = false;
  locks = false;
  /** It reads, or writes, something that was not understood. */
  unclear = { reads: false, writes: false };
  /** Where the bracket ends that is opened here. */
  readonly #closing = new Map<number, number>();
  /** The word before the bracket that it stands in. */
  readonly #within: string[] = [];
  readonly #depths: number[] = [];
  readonly #inner: TablePath[] = [];
  /** Tokens that belong to what was looked at before. */
  readonly #done = new Set<number>();

  constructor(tokens: readonly Token[]) {
    this.tokens = tokens;
    this.#match();
    for (let i = 0; i < tokens.length; i++) this.#look(i);
    this.reads.push(...this.#inner);
  }

  #match(): void {
    const open: number[] = [];
    for (let i = 0; i < this.tokens.length; i++) {
      const before = open.at(-1);
      this.#within.push(before === undefined ? "" : (this.word(before - 1) ?? ""));
      this.#depths.push(open.length);
      if (this.word(i) === "(") open.push(i);
      else if (this.word(i) === ")" && before !== undefined) this.#closing.set(open.pop() as number, i);
    }
  }

  /** Undefined: there is none, or it is a value. A name in quotes is no word of the language. */
  word(i: number): string | undefined {
    const token = this.tokens[i];
    return token?.kind === "word" || token?.kind === "mark" ? token.text : undefined;
  }

  #look(i: number): void {
    const token = this.tokens[i] as Token;
    const before = this.word(i - 1) ?? "";
    const next = this.word(i + 1);
    if (next === "(" && (token.kind === "word" || token.kind === "quoted")) this.#call(i);
    // After a dot, or in quotes, it is a name.
    if (token.kind !== "word" || before === ".") return;
    switch (token.text) {
      case "from":
        if (
          !argued.has(this.#within[i] ?? "") &&
          !(before === "distinct" && /^(?:is|not)$/.test(this.word(i - 2) ?? ""))
        )
          this.#list(i + 1, this.#done.has(i) ? "both" : "reads");
        return;
      case "join":
      case "straight_join":
        // USE INDEX FOR JOIN (…).
        return before === "for" ? undefined : this.#list(i + 1, "reads");
      case "using":
        return this.#using(i);
      case "table":
        if (next !== "(" && !locksWhole.has(this.word(0) ?? "")) this.#take(i + 1, "reads");
        return;
      case "into":
        // A table is made of what is read; but for variables.
        if (!this.#done.has(i) && next !== "@") this.unclear = { reads: true, writes: true };
        return;
      case "next":
        if (next === "value") this.unclear = { reads: true, writes: true };
        return;
      case "for":
        this.locks ||= locking.has(next ?? "");
        return;
      case "lock":
        this.locks ||= next === "in";
        return;
      case "insert":
      case "replace":
      case "merge":
        return this.#adds(i, before);
      case "update":
        return this.#updates(i, before);
      case "delete":
        return this.#deletes(i, before);
      default:
    }
  }

  #call(i: number): void {
    if (this.#done.has(i)) return;
    const path = [(this.tokens[i] as Token).text];
    for (let at = i; this.word(at - 1) === "."; at -= 2) path.unshift(this.tokens[at - 2]?.text ?? "");
    this.calls.push(path);
  }

  /** After two tables that are joined, columns follow in brackets; else tables. */
  #using(i: number): void {
    if (argued.has(this.#within[i] ?? "")) return;
    const since = (word: string) =>
      this.tokens.findLastIndex(
        (_, at) => at < i && this.#depths[at] === this.#depths[i] && this.word(at) === word,
      );
    const isColumns = Math.max(...[...joins].map(since)) > since("from");
    const deletes = this.tokens.some((_, at) => this.word(at) === "delete");
    if (!isColumns || this.word(i + 1) !== "(") this.#list(i + 1, deletes ? "both" : "reads");
  }

  #adds(i: number, before: string): void {
    const what = this.word(i);
    if (this.word(i + 1) === "(" || before === "then" || (what === "replace" && before === "or")) return;
    let at = this.word(i + 1) === "or" ? i + 3 : i + 1;
    while (modifiers.has(this.word(at) ?? "")) at++;
    if (this.word(at) === "into") this.#done.add(at++);
    while (what === "merge" && this.word(at) === "only") at++;
    if (what === "merge") this.changes = true;
    else this.inserts = true;
    const end = this.#take(at, "writes");
    // What follows are its columns.
    if (end !== undefined) this.#done.add(end);
  }

  #updates(i: number, before: string): void {
    // FOR UPDATE, FOR NO KEY UPDATE, DO UPDATE, ON DUPLICATE KEY UPDATE, WHEN MATCHED THEN UPDATE.
    if (["for", "key", "do"].includes(before) || (before === "then" && this.word(i + 1) === "set")) return;
    this.changes = true;
    this.#list(this.#past(this.word(i + 1) === "or" ? i + 3 : i + 1), "writes");
  }

  /** Some servers delete from several tables at once, by names that they may have only in this statement: all count that are joined. */
  #deletes(i: number, before: string): void {
    if (before === "then") return;
    this.changes = true;
    const at = this.#past(i + 1);
    if (this.word(at) !== "from") this.#list(at, "writes");
    const depth = this.#depths[i];
    const from = this.tokens.findIndex(
      (_, j) => j >= at && this.word(j) === "from" && this.#depths[j] === depth,
    );
    if (from >= 0) this.#done.add(from);
    else this.unclear.writes = true;
  }

  #past(at: number): number {
    let i = at;
    while (modifiers.has(this.word(i) ?? "") && this.word(i + 1) !== "set") i++;
    return i;
  }

  /** Tables that follow each other, by commas and joins, in brackets or not. */
  #list(from: number, how: "reads" | "writes" | "both"): void {
    let wanted = true;
    for (let i = from; ; i++) {
      const word = this.word(i);
      const next = this.tokens[i + 1];
      if (wanted) {
        const goesOn =
          next?.kind === "quoted" ||
          next?.text === "(" ||
          (next?.kind === "word" && !reserved.has(next.text));
        if (beforeTable.has(word ?? "") && goesOn) continue;
        wanted = false;
        if (word === "(") {
          if (!queries.has(this.word(i + 1) ?? "")) this.#list(i + 1, how);
          i = this.#closing.get(i) ?? this.tokens.length;
        } else i = this.#take(i, how) ?? i - 1;
      } else if (i >= this.tokens.length || word === ")" || word === ";") return;
      else if (endsOfList.has(word ?? "") && next?.text !== ",") return;
      else if (word === "(") i = this.#closing.get(i) ?? this.tokens.length;
      else wanted = word === "," || (joins.has(word ?? "") && this.word(i - 1) !== "for");
    }
  }

  /** The table that must be named here: where its name ends. A function is one of the calls. */
  #take(from: number, how: "reads" | "writes" | "both"): number | undefined {
    const path: string[] = [];
    let i = from;
    for (; ; i += 2) {
      const token = this.tokens[i];
      const isName =
        token?.kind === "quoted" || (token?.kind === "word" && (i > from || !reserved.has(token.text)));
      if (!isName) {
        if (how !== "reads") this.unclear.writes = true;
        this.unclear.reads = true;
        return undefined;
      }
      path.push(token.text);
      if (this.word(i + 1) !== "." || this.word(i + 2) === "*") break;
    }
    // What goes on otherwise is no name as it is known here.
    const after = this.tokens[i + 1];
    const known =
      after === undefined ||
      after.kind === "word" ||
      after.kind === "quoted" ||
      [",", "(", ")", ";", "*", "."].includes(after.text);
    if (!known) {
      this.unclear.reads = true;
      if (how !== "reads") this.unclear.writes = true;
    }
    const into = this.word(from - 1) === "into" || this.#adding(from);
    if (after?.text === "(" && !into) return i;
    if (how !== "reads") this.writes.push(path);
    if (how !== "writes") (this.#depths[from] === 0 ? this.reads : this.#inner).push(path);
    return i;
  }

  /** INSERT t (a) VALUES …, without INTO. */
  #adding(at: number): boolean {
    let i = at - 1;
    while (modifiers.has(this.word(i) ?? "")) i--;
    return this.word(i) === "insert" || this.word(i) === "replace" || this.word(i) === "merge";
  }
}
