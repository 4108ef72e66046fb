/** Uploads within a quota, on better-sqlite3. */
import Database from "better-sqlite3";
import { opened } from "./opened.ts";

const open = opened((file) => {
  const db = new Database(file);
  db.pragma("foreign_keys = ON");
  return db;
});

const used = (db: Database.Database, user: string) =>
  db
    .prepare<[string], number>("SELECT coalesce(sum(bytes), 0) FROM upload WHERE user_id = ?")
    .pluck()
    .get(user) ?? 0;

function checkThenInsert(db: Database.Database, user: string, bytes: number): void {
  if (used(db, user) + bytes > 100) throw new Error("The quota is used up");
  db.prepare("INSERT INTO upload (user_id, bytes) VALUES (@user, @bytes)").run({ user, bytes });
}

export async function naive(file: string, user: string, bytes: number): Promise<void> {
  checkThenInsert(open(file), user, bytes);
}

/** In a transaction that becomes the writer only when it writes. */
export async function deferred(file: string, user: string, bytes: number): Promise<void> {
  const db = open(file);
  db.transaction(() => checkThenInsert(db, user, bytes))();
}

export async function immediate(file: string, user: string, bytes: number): Promise<void> {
  const db = open(file);
  db.transaction(() => checkThenInsert(db, user, bytes)).immediate();
}

export async function byHand(file: string, user: string, bytes: number): Promise<void> {
  const db = open(file);
  db.exec("BEGIN IMMEDIATE");
  try {
    checkThenInsert(db, user, bytes);
    db.exec("COMMIT");
  } catch (error) {
    db.exec("ROLLBACK");
    throw error;
  }
}
