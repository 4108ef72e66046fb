import { type Dialect, type Rendered, type Statement, render as renderWith } from "../../core/sql.ts";

export const dialect: Dialect = {
  placeholder: (index) => `$${index}`,
  quote: (name) => `"${name.replaceAll('"', '""')}"`,
};

export function render(statement: Statement): Rendered {
  return renderWith(statement, dialect);
}

/**
 * A text literal for the one-message open, which cannot bind values: hexadecimal digits only, so nothing in the
 * text can end the literal whatever the server's quoting settings are.
 */
export function hexText(text: string): string {
  return `convert_from(decode('${Buffer.from(text, "utf8").toString("hex")}', 'hex'), 'UTF8')`;
}
