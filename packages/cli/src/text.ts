/** Names come from anybody: what a terminal would take for an order is shown, and not sent. */

/** Control characters, marks that turn the direction of a line, and what has no glyph at all. */
const unseen = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}]/gu;

export function shown(text: string): string {
  return text.replace(unseen, (character) => {
    const code = character.codePointAt(0) ?? 0;
    return code > 0xffff ? `\\u{${code.toString(16)}}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** "1 row", "1,204 rows". */
export function plural(n: number, one: string, many = `${one}s`): string {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

/** "a, b, c", and of many "a, b, c, d, e and 12 more". */
export function listed(names: readonly string[], most = 5): string {
  const more = names.length - most;
  return more > 1 ? `${names.slice(0, most).join(", ")} and ${more} more` : names.join(", ");
}

/** Strings of SQL, also those that the server has cut off. Double quotes are strings on MySQL, and names elsewhere. */
const strings = /'(?:[^'\\]|\\.|'')*(?:'|\\?$)|\$(\w*)\$.*?(?:\$\1\$|$)/gs;
const doubleQuoted = /"(?:[^"\\]|\\.|"")*(?:"|\\?$)/gs;

/** A statement without what somebody wrote into it, such as a password: to be kept. */
export function withoutStrings(statement: string, doubleQuotes: boolean): string {
  const text = statement.replace(strings, "'…'");
  return doubleQuotes ? text.replace(doubleQuoted, '"…"') : text;
}
