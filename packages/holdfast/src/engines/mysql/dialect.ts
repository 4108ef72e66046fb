import type { SqlConnection } from "../../core/database.ts";
import { defaultSchema, prefixNames } from "../../core/names.ts";
import {
  type Dialect,
  type Names,
  type Rendered,
  type Statement,
  render as renderWith,
} from "../../core/sql.ts";

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
