/** An item is added to an order while the order is finalized, on better-sqlite3, and with Holdfast. */
import Database from "better-sqlite3";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { opened } from "./opened.ts";

type Handle = Database.Database;

const open = opened((file) => new Database(file));
const locks = opened((file): Holdfast<Handle> => holdfast(fromBetterSqlite3(() => new Database(file))));

function addTo(db: Handle, order: number, price: number): void {
  const { status } = db.prepare("SELECT status FROM purchase_order WHERE id = ?").get(order) as {
    status: string;
  };
  if (status !== "open") throw new Error("The order is final");
  db.prepare("INSERT INTO order_item (order_id, price) VALUES (?, ?)").run(order, price);
}

function close(db: Handle, order: number): void {
  const total = db
    .prepare("SELECT coalesce(sum(price), 0) FROM order_item WHERE order_id = ?")
    .pluck()
    .get(order);
  db.prepare("UPDATE purchase_order SET status = 'final', total = ? WHERE id = ?").run(total, order);
}

export async function naiveAdd(file: string, order: number, price: number): Promise<void> {
  addTo(open(file), order, price);
}

export async function naiveFinalize(file: string, order: number): Promise<void> {
  close(open(file), order);
}

export async function add(file: string, order: number, price: number): Promise<void> {
  await locks(file).transaction({ lock: key("order", order) }, async ({ client }) =>
    addTo(client, order, price),
  );
}

export async function finalize(file: string, order: number): Promise<void> {
  await locks(file).transaction({ lock: key("order", order) }, async ({ client }) => close(client, order));
}
