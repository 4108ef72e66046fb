/** What else clients do. */
import { DatabaseSync } from "node:sqlite";
import Database from "better-sqlite3";
import { opened } from "./opened.ts";

const open = opened((file) => new Database(file));
const openBuiltin = opened((file) => new DatabaseSync(file));

/** What it says of its timeout, at first and when it was changed, and whether it could write. */
export async function timeouts(file: string): Promise<unknown[]> {
  const db = new Database(file, { timeout: 1234 });
  try {
    const first = db.pragma("busy_timeout", { simple: true });
    db.pragma("busy_timeout = 77");
    db.exec("INSERT INTO entry VALUES ('timeouts')");
    return [first, db.pragma("busy_timeout", { simple: true }), db.prepare("PRAGMA busy_timeout").all()];
  } finally {
    db.close();
  }
}

/** Reads row by row, and leaves when it has seen enough. */
export async function rowByRow(file: string): Promise<string[]> {
  const db = open(file);
  const seen: string[] = [];
  for (const name of db.prepare<[], string>("SELECT name FROM entry ORDER BY name").pluck().iterate()) {
    seen.push(name);
    if (seen.length === 2) break;
  }
  db.prepare("INSERT INTO entry VALUES (:name)").run({ name: "row by row" });
  return seen;
}

export async function script(file: string): Promise<void> {
  open(file).exec(`
    BEGIN; -- not yet the writer; that comes
    INSERT INTO entry VALUES ('a; b');
    COMMIT;
  `);
}

export async function leavesOpen(file: string): Promise<void> {
  open(file).exec("BEGIN IMMEDIATE; INSERT INTO entry VALUES ('never')");
}

export async function refused(file: string): Promise<void> {
  open(file).exec("INSERT INTO entry VALUES (NULL)");
}

export async function notForOthers(file: string): Promise<unknown> {
  open(file).exec("INSERT INTO entry VALUES ('f')");
  return { call: () => file };
}

export async function builtin(file: string): Promise<void> {
  openBuiltin(file).exec("INSERT INTO entry VALUES ('builtin')");
}

export async function silent(): Promise<void> {}

/** By tags, which node:sqlite has since Node 24.9. */
export async function tagged(file: string, name: string): Promise<unknown> {
  const store = openBuiltin(file).createTagStore();
  const { changes } = store.run`INSERT INTO entry VALUES (${name})`;
  return [changes, store.get`SELECT count(*) AS n FROM entry`?.["n"]];
}

/** Tries again by itself, as applications do whose client does not wait. */
export async function insistent(file: string): Promise<void> {
  const db = openBuiltin(file);
  for (;;)
    try {
      db.exec("BEGIN IMMEDIATE");
      break;
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 3));
    }
  db.exec("INSERT INTO entry VALUES ('insistent')");
  db.exec("COMMIT");
}
