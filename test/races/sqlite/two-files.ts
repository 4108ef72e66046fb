/** Goods go from the file of one warehouse to that of another, on better-sqlite3. */
import Database from "better-sqlite3";
import { opened } from "./opened.ts";

const open = opened((file) => new Database(file));

function writing<T>(db: Database.Database, body: () => T): T {
  return db.transaction(body).immediate();
}

function move(from: Database.Database, to: Database.Database): void {
  from.prepare("UPDATE warehouse SET qty = qty - 1").run();
  to.prepare("UPDATE warehouse SET qty = qty + 1").run();
}

/** Whoever sends is locked first. */
export async function naive(from: string, to: string): Promise<void> {
  writing(open(from), () => writing(open(to), () => move(open(from), open(to))));
}

/** Locked in the same order by everybody. */
export async function inOrder(from: string, to: string): Promise<void> {
  const [first, second] = [from, to].toSorted() as [string, string];
  writing(open(first), () => writing(open(second), () => move(open(from), open(to))));
}
