/** What a shop checks before it writes, on node:sqlite: store credit, a cart's total, locks that are rows. */
import { DatabaseSync } from "node:sqlite";
import { opened } from "./opened.ts";

const open = opened((file) => new DatabaseSync(file, { timeout: 5000 }));

function number(db: DatabaseSync, sql: string, ...values: (string | number)[]): number {
  return Number(Object.values(db.prepare(sql).get(...values) ?? {})[0]);
}

function alone<T>(db: DatabaseSync, body: () => T): T {
  db.exec("BEGIN IMMEDIATE");
  try {
    const value = body();
    db.exec("COMMIT");
    return value;
  } catch (error) {
    db.exec("ROLLBACK");
    throw error;
  }
}

const left = (db: DatabaseSync) => number(db, "SELECT amount - used FROM store_credit");

function pay(db: DatabaseSync, order: number, amount: number): void {
  db.prepare("UPDATE store_credit SET used = used + ?").run(amount);
  db.prepare("INSERT INTO credit_payment VALUES (?, ?)").run(order, amount);
}

/** The transaction is there, but what it should protect is decided before it. */
export async function payNaively(file: string, order: number, amount: number): Promise<void> {
  const db = open(file);
  if (left(db) < amount) throw new Error("Not enough");
  alone(db, () => pay(db, order, amount));
}

export async function payExactly(file: string, order: number, amount: number): Promise<void> {
  const db = open(file);
  alone(db, () => {
    if (left(db) < amount) throw new Error("Not enough");
    pay(db, order, amount);
  });
}

function total(db: DatabaseSync): void {
  const sum = number(db, "SELECT sum(price) FROM cart_item");
  db.prepare("INSERT INTO checkout (total, items) SELECT ?, count(*) FROM cart_item").run(sum);
}

export async function checkOutNaively(file: string): Promise<void> {
  total(open(file));
}

export async function checkOut(file: string): Promise<void> {
  const db = open(file);
  alone(db, () => total(db));
}

export async function addItem(file: string, price: number): Promise<void> {
  open(file).prepare("INSERT INTO cart_item VALUES (?)").run(price);
}

/** Its time is over as soon as it is taken: some day the work takes longer than any. */
function acquire(db: DatabaseSync, owner: string): void {
  db.prepare(
    "INSERT INTO lease VALUES ('status', ?) ON CONFLICT (name) DO UPDATE SET owner = excluded.owner",
  ).run(owner);
}

function fetchStatus(db: DatabaseSync, owner: string): void {
  if (number(db, "SELECT count(*) FROM status") === 0) db.prepare("INSERT INTO status VALUES (?)").run(owner);
}

export async function fetchNaively(file: string, owner: string): Promise<void> {
  const db = open(file);
  acquire(db, owner);
  fetchStatus(db, owner);
}

/** The write counts only while the lease is ours. */
export async function fetchFenced(file: string, owner: string): Promise<void> {
  const db = open(file);
  acquire(db, owner);
  alone(db, () => {
    if (db.prepare("SELECT owner FROM lease").get()?.["owner"] !== owner)
      throw new Error("The lease was lost");
    fetchStatus(db, owner);
  });
}

function lockOf(db: DatabaseSync, name: string, body: () => void): void {
  db.prepare("INSERT INTO held VALUES (?)").run(name);
  try {
    body();
  } finally {
    db.prepare("DELETE FROM held WHERE name = ?").run(name);
  }
}

function spend(db: DatabaseSync, price: number): void {
  const before = number(db, "SELECT total FROM customer_order");
  db.prepare("UPDATE customer_order SET total = ?").run(before + price);
}

/** Two sessions of one customer are two locks. */
export async function addForSession(file: string, session: string, price: number): Promise<void> {
  const db = open(file);
  lockOf(db, session, () => spend(db, price));
}

export async function addForCustomer(file: string, _: string, price: number): Promise<void> {
  const db = open(file);
  lockOf(db, "ada", () => spend(db, price));
}
