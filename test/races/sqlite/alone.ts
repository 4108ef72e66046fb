/** One statement by itself, and two. */
import Database from "better-sqlite3";
import { opened } from "./opened.ts";

const open = opened((file) => new Database(file));

export async function send(file: string, text: string): Promise<number> {
  return open(file).prepare(text).run().changes;
}

export async function countThenSend(file: string, text: string): Promise<void> {
  const db = open(file);
  const count = db.prepare<[], number>("SELECT count(*) FROM seat WHERE event = 1").pluck().get() ?? 0;
  if (count < 1) db.prepare(text).run();
}
