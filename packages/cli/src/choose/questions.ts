/** What is asked. Nothing is imported here, so that a page can ask the same. */

export interface Choice<Name extends string> {
  readonly name: Name;
  /** For whoever chooses. */
  readonly text: string;
}

/** What the code looks at before it writes. */
export const whats = [
  { name: "limit", text: "a limit per user, key or tenant, also per hour or per day" },
  { name: "credits", text: "credits that are bought and spent" },
  { name: "stock", text: "stock, seats, rooms: so many, and not one more" },
  { name: "jobs", text: "jobs that run later, each once" },
  { name: "time", text: "whether something is due, on several instances (cron)" },
  { name: "row", text: "a row that several people, or programs, edit" },
  { name: "rows", text: "several rows that are there: accounts of a transfer" },
  { name: "sum", text: "a count, a sum, a gap: rows that may not be there yet" },
  { name: "unique", text: "that there is no other row like it" },
  { name: "message", text: "whether this message came before: a webhook, a form" },
  { name: "running", text: "whether somebody else is at it right now" },
  { name: "nothing", text: "nothing that others write, or a wrong answer does no harm" },
] as const satisfies readonly Choice<string>[];
export type What = (typeof whats)[number]["name"];

/** How long it takes from the check to the write. */
export const longs = [
  { name: "statements", text: "milliseconds: a few statements of this database" },
  { name: "seconds", text: "seconds: another service is asked, a file is read" },
  { name: "minutes", text: "minutes or more: a person decides, an export, an import" },
] as const satisfies readonly Choice<string>[];
export type Long = (typeof longs)[number]["name"];

export const databases = [
  { name: "postgres", text: "PostgreSQL" },
  { name: "mysql", text: "MySQL" },
  { name: "mariadb", text: "MariaDB" },
  { name: "sqlite", text: "SQLite" },
  { name: "libsql", text: "libSQL" },
  { name: "duckdb", text: "DuckDB" },
] as const satisfies readonly Choice<string>[];
export type Database = (typeof databases)[number]["name"];

export interface Question<Name extends string = string> {
  readonly name: "what" | "long" | "database";
  readonly text: string;
  readonly choices: readonly Choice<Name>[];
}

/** In the order in which they are asked. */
export const questions = [
  { name: "what", text: "What is checked before it is written?", choices: whats },
  { name: "long", text: "How long does it take from the check to the write?", choices: longs },
  { name: "database", text: "Which database?", choices: databases },
] as const satisfies readonly Question[];
