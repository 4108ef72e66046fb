/** What an actor on SQLite does in its thread. */
import Database from "better-sqlite3";
import { type ActorProgram, type Answer, type RefusalKind, Refused, actAtOnce } from "./program.ts";

const kinds: Readonly<Record<string, RefusalKind>> = {
  SQLITE_BUSY: "busy",
  SQLITE_BUSY_SNAPSHOT: "busy",
  SQLITE_CONSTRAINT_PRIMARYKEY: "duplicate",
  SQLITE_CONSTRAINT_FOREIGNKEY: "violation",
};

export function refusal(error: unknown): Refused {
  const { code = "", message } = error as { code?: string; message: string };
  return new Refused(kinds[code] ?? "other", `${code} ${message}`);
}

export function sendTo(db: Database.Database, text: string): Answer {
  try {
    const statement = db.prepare(text);
    if (!statement.reader) return { rows: [], changed: statement.run().changes };
    const rows = statement.raw().all() as unknown[][];
    return {
      rows: rows.map((row) => row.map((value) => (value === null ? null : String(value)))),
      changed: 0,
    };
  } catch (error) {
    throw refusal(error);
  }
}

let opened: Database.Database | undefined;

export function run(file: string, program: ActorProgram): unknown {
  const db = (opened ??= new Database(file));
  return actAtOnce(program, (text) => sendTo(db, text));
}
