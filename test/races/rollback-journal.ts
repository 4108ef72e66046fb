/** Buys the last one; a transaction that finds the file locked is rolled back and run again. */
import Database from "better-sqlite3";

export async function buy(file: string, timeout: number): Promise<boolean> {
  const db = new Database(file, { timeout });
  try {
    for (let left = 8; ; left--)
      try {
        db.exec("BEGIN");
        const qty = db.prepare("SELECT qty FROM stock").pluck().get() as number;
        if (qty >= 1) db.prepare("UPDATE stock SET qty = ?").run(qty - 1);
        db.exec("COMMIT");
        return qty >= 1;
      } catch (error) {
        if (db.inTransaction) db.exec("ROLLBACK");
        if (left <= 1 || !(error as { code: string }).code.startsWith("SQLITE_BUSY")) throw error;
      }
  } finally {
    db.close();
  }
}
