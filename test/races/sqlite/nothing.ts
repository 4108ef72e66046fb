/** What comes to nothing when it is tried. */
import { setTimeout as sleep } from "node:timers/promises";
import Database from "better-sqlite3";
import { opened } from "./opened.ts";

const open = opened((file) => new Database(file));

export async function misspelt(file: string): Promise<unknown> {
  return open(file).prepare("SELECT qty FROM stok").get();
}

export async function refused(file: string): Promise<unknown> {
  return open(file).prepare("UPDATE stock SET qty = NULL").run();
}

export async function buy(file: string): Promise<boolean> {
  const db = open(file);
  const qty = db.prepare<[], number>("SELECT qty FROM stock").pluck().get() ?? 0;
  if (qty >= 1) db.prepare("UPDATE stock SET qty = ?").run(qty - 1);
  return qty >= 1;
}

export async function atomic(file: string): Promise<boolean> {
  return open(file).prepare("UPDATE stock SET qty = qty - 1 WHERE qty >= 1").run().changes === 1;
}

export async function late(file: string): Promise<boolean> {
  await sleep(300);
  return atomic(file);
}

export async function many(file: string): Promise<void> {
  for (let i = 0; i < 12; i++) open(file).prepare("UPDATE stock SET qty = qty + ?").run(i);
}

export async function idle(): Promise<boolean> {
  return true;
}
