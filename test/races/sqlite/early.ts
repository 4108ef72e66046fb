/** One more of what was there, with something else in between. */
import Database from "better-sqlite3";
import { opened } from "./opened.ts";

const open = opened((file) => new Database(file));

export async function add(file: string, id: number): Promise<void> {
  const db = open(file);
  const qty = db.prepare<[number], number>("SELECT qty FROM stock WHERE id = ?").pluck().get(id) ?? 0;
  db.prepare("INSERT INTO seen VALUES (?)").run(id);
  db.prepare("UPDATE stock SET qty = ? WHERE id = ?").run(qty + 1, id);
}
