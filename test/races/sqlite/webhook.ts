/** The payment provider calls a webhook while the customer comes back to the shop: both say "paid". With Kysely. */
import Database from "better-sqlite3";
import { type Generated, Kysely, SqliteDialect } from "kysely";
import { opened } from "./opened.ts";

interface Tables {
  payment: { id: number; status: string };
  receipt: { id: Generated<number>; payment: number; by: string };
}

const open = opened(
  (file) => new Kysely<Tables>({ dialect: new SqliteDialect({ database: new Database(file) }) }),
);

const receipt = (db: Kysely<Tables>, payment: number, by: string) =>
  db.insertInto("receipt").values({ payment, by }).execute();

async function checkThenPay(file: string, id: number, by: string): Promise<void> {
  const db = open(file);
  const { status } = await db
    .selectFrom("payment")
    .select("status")
    .where("id", "=", id)
    .executeTakeFirstOrThrow();
  if (status === "paid") return;
  await db.updateTable("payment").set({ status: "paid" }).where("id", "=", id).execute();
  await receipt(db, id, by);
}

export const naiveWebhook = (file: string, id: number) => checkThenPay(file, id, "webhook");
export const naiveReturn = (file: string, id: number) => checkThenPay(file, id, "customer");

async function payOnce(file: string, id: number, by: string): Promise<void> {
  await open(file)
    .transaction()
    .execute(async (tx) => {
      const { numUpdatedRows } = await tx
        .updateTable("payment")
        .set({ status: "paid" })
        .where("id", "=", id)
        .where("status", "=", "pending")
        .executeTakeFirst();
      if (numUpdatedRows > 0n) await receipt(tx, id, by);
    });
}

export const webhook = (file: string, id: number) => payOnce(file, id, "webhook");
export const customerReturn = (file: string, id: number) => payOnce(file, id, "customer");
