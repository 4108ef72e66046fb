/** Names come from anybody: what a terminal would take for an order is shown, and not sent. */

/** Control characters, marks that turn the direction of a line, and what has no glyph at all. */
const unseen = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}]/gu;

export function shown(text: string): string {
  return text.replace(unseen, (character) => {
    const code = character.codePointAt(0) ?? 0;
    return code > 0xffff ? `\\u{${code.toString(16)}}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** A message may have several lines; what is quoted in it may be of any length. */
export function shownLines(text: string, most = 4000): string {
  const cut = text.length <= most ? text : `${text.slice(0, most)}…`;
  return cut.split("\n").map(shown).join("\n");
}

/** What may quote somebody's address, without the password in it. */
export function withoutPasswords(text: string): string {
  return text
    .replaceAll(/(:\/\/[^\s:@/'"]*):[^\s'"]*@/g, "$1:…@")
    .replaceAll(/(\b\w*(?:password|pwd|token|secret)=)[^\s'"&;]+/gi, "$1…");
}

/** How a name is given to a shell. */
export function word(text: string): string {
  return /^[\w.:@/][\w.:@/-]*$/.test(text) ? text : `'${shown(text).replaceAll("'", "'\\''")}'`;
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
