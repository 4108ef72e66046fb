import type { SqlConnection } from "../../seam/database.ts";
import { defaultSchema, prefixNames } from "../../seam/names.ts";
import type { Lexis } from "../../seam/redact.ts";
import {
  type Dialect,
  type Names,
  type Rendered,
  type Statement,
  render as renderWith,
} from "../../seam/sql.ts";

const names = prefixNames(defaultSchema);

export const dialect: Dialect = {
  names,
  placeholder: () => "?",
  quote: (name) => `\`${name.replaceAll("`", "``")}\``,
};

export function render(statement: Statement, called: Names = names): Rendered {
  return renderWith(statement, dialect, called);
}

/** What our own things are called, on this connection. */
export function namesOf(connection: SqlConnection): Names {
  return connection.names ?? names;
}

/** ANSI_QUOTES and NO_BACKSLASH_ESCAPES are settings of the session. */
export const lexis: Lexis = {
  quotedNames: "never",
  otherNames: ["`"],
  backslashes: true,
  moreTexts: false,
  nestedComments: false,
  returns: false,
  unicodeBlanks: false,
  hashComments: true,
};
