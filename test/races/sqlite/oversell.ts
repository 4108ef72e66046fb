/** The last pen in stock, on @libsql/client. */
import { createClient } from "@libsql/client";
import { opened } from "./opened.ts";

const open = opened((file) => createClient({ url: `file:${file}`, timeout: 5000 }));

export async function naive(file: string, item: string): Promise<void> {
  const db = open(file);
  const { rows } = await db.execute({ sql: "SELECT qty FROM stock WHERE item = ?", args: [item] });
  const qty = Number(rows[0]?.["qty"]);
  if (qty < 1) throw new Error("Sold out");
  await db.execute({ sql: "UPDATE stock SET qty = ? WHERE item = ?", args: [qty - 1, item] });
  await db.execute({ sql: "INSERT INTO sale (item) VALUES (:item)", args: { item } });
}

/** In a transaction that becomes the writer when it first writes. */
export async function deferred(file: string, item: string): Promise<void> {
  const tx = await open(file).transaction("deferred");
  try {
    const { rows } = await tx.execute({ sql: "SELECT qty FROM stock WHERE item = ?", args: [item] });
    if (Number(rows[0]?.["qty"]) < 1) throw new Error("Sold out");
    await tx.execute({ sql: "UPDATE stock SET qty = qty - 1 WHERE item = ?", args: [item] });
    await tx.execute({ sql: "INSERT INTO sale (item) VALUES (?)", args: [item] });
    await tx.commit();
  } finally {
    tx.close();
  }
}

export async function guarded(file: string, item: string): Promise<void> {
  const tx = await open(file).transaction("write");
  try {
    const { rowsAffected } = await tx.execute({
      sql: "UPDATE stock SET qty = qty - 1 WHERE item = ? AND qty >= 1",
      args: [item],
    });
    if (rowsAffected === 0) throw new Error("Sold out");
    await tx.execute({ sql: "INSERT INTO sale (item) VALUES (?)", args: [item] });
    await tx.commit();
  } finally {
    tx.close();
  }
}
