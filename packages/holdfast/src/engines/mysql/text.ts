/**
 * Text that a client writes into the statement itself. It escapes with backslashes, which mean themselves under
 * NO_BACKSLASH_ESCAPES: then a quote ends the literal, and what follows is SQL. A session may set that at any time.
 */

/** What clients escape, and more. */
const special = /['"\\]|\p{Cc}/u;

/** Understood by mysql2, and whatever formats statements for it: written as it stands. */
class Literal {
  readonly #text: string;
  constructor(text: string) {
    this.#text = text;
  }
  toSqlString(): string {
    return this.#text;
  }
}

/** The values, with texts in a form that means the same in every mode. */
export function literals(values: readonly unknown[]): unknown[] {
  return values.map((value) =>
    Array.isArray(value)
      ? literals(value)
      : typeof value === "string" && special.test(value)
        ? new Literal(literal(value))
        : value,
  );
}

/**
 * Quotes are doubled. Of a backslash, which cannot be written alone in one mode and is two characters in the other, the first
 * character is taken. Hexadecimal digits would have another collation than the connection's.
 */
function literal(text: string): string {
  const parts = text.split("\\").map((part) => `'${part.replaceAll("'", "''")}'`);
  return parts.length === 1 ? (parts[0] as string) : `CONCAT(${parts.join(", LEFT('\\\\', 1), ")})`;
}
