/** A voucher that is good for one order, on node:sqlite. */
import { DatabaseSync } from "node:sqlite";
import { opened } from "./opened.ts";

const open = opened((file) => new DatabaseSync(file, { timeout: 5000 }));
/** As node:sqlite is by default: it does not wait for anybody. */
const openImpatient = opened((file) => new DatabaseSync(file));

export async function naive(file: string, order: number, code: string): Promise<void> {
  const db = open(file);
  const voucher = db.prepare("SELECT discount, used_by FROM voucher WHERE code = ?").get(code);
  if (!voucher || voucher["used_by"] !== null) throw new Error("The voucher is not valid");
  db.prepare("UPDATE voucher SET used_by = ? WHERE code = ?").run(order, code);
  db.prepare("INSERT INTO purchase (id, code) VALUES ($order, $code)").run({ order, code });
}

/** The same in a transaction that becomes the writer when it first writes. */
export async function deferred(file: string, order: number, code: string): Promise<void> {
  const db = open(file);
  db.exec("BEGIN");
  try {
    await naive(file, order, code);
    db.exec("COMMIT");
  } catch (error) {
    if (db.isTransaction) db.exec("ROLLBACK");
    throw error;
  }
}

export async function conditional(file: string, order: number, code: string): Promise<void> {
  use(open(file), order, code);
}

export async function impatient(file: string, order: number, code: string): Promise<void> {
  use(openImpatient(file), order, code);
}

function use(db: DatabaseSync, order: number, code: string): void {
  db.exec("BEGIN IMMEDIATE");
  try {
    const { changes } = db
      .prepare("UPDATE voucher SET used_by = ? WHERE code = ? AND used_by IS NULL")
      .run(order, code);
    if (changes === 0) throw new Error("The voucher is not valid");
    db.prepare("INSERT INTO purchase (id, code) VALUES ($order, $code)").run({ order, code });
    db.exec("COMMIT");
  } catch (error) {
    db.exec("ROLLBACK");
    throw error;
  }
}
