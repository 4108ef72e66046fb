/** One account for each address, with Kysely. */
import Database from "better-sqlite3";
import { type Generated, Kysely, SqliteDialect } from "kysely";
import { opened } from "./opened.ts";

interface Tables {
  account: { id: Generated<number>; email: string };
  member: { id: Generated<number>; email: string };
}

const open = opened(
  (file) => new Kysely<Tables>({ dialect: new SqliteDialect({ database: new Database(file) }) }),
);

export async function naive(file: string, email: string): Promise<void> {
  const db = open(file);
  const taken = await db.selectFrom("account").select("id").where("email", "=", email).executeTakeFirst();
  if (taken) throw new Error("There is an account already");
  await db.insertInto("account").values({ email }).execute();
}

/** In a table whose addresses are UNIQUE. */
export async function unique(file: string, email: string): Promise<void> {
  const { numInsertedOrUpdatedRows } = await open(file)
    .insertInto("member")
    .values({ email })
    .onConflict((conflict) => conflict.doNothing())
    .executeTakeFirstOrThrow();
  if (numInsertedOrUpdatedRows === 0n) throw new Error("There is an account already");
}
