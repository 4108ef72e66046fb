import { type Dialect, type Rendered, type Statement, render as renderWith } from "../../core/sql.ts";

export const dialect: Dialect = {
  placeholder: () => "?",
  quote: (name) => `\`${name.replaceAll("`", "``")}\``,
};

export function render(statement: Statement): Rendered {
  return renderWith(statement, dialect);
}
