/** What waits, or does not end. */
import Database from "better-sqlite3";
import { opened } from "./opened.ts";

const open = opened((file) => new Database(file));

function sell(db: Database.Database): boolean {
  const qty = db.prepare<[], number>("SELECT qty FROM stock WHERE id = 'pen'").pluck().get() ?? 0;
  if (qty >= 1) db.prepare("UPDATE stock SET qty = ? WHERE id = 'pen'").run(qty - 1);
  return qty >= 1;
}

export async function naive(file: string): Promise<boolean> {
  return sell(open(file));
}

export async function exact(file: string): Promise<boolean> {
  const db = open(file);
  return db.transaction(() => sell(db)).immediate();
}

export async function idle(): Promise<void> {
  await new Promise(() => {});
}

export async function leavesOpen(file: string): Promise<void> {
  open(file).exec("BEGIN IMMEDIATE; UPDATE stock SET qty = 0");
}
