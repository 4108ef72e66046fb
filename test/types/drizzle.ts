/** Compiled, never run: Drizzle still fits the structural types that stand for it. */
import { PGlite } from "@electric-sql/pglite";
import { drizzle as onMysql } from "drizzle-orm/mysql2";
import { drizzle } from "drizzle-orm/node-postgres";
import { integer, pgTable, text } from "drizzle-orm/pg-core";
import { drizzle as onPglite } from "drizzle-orm/pglite";
import { drizzle as onPostgres } from "drizzle-orm/postgres-js";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromDrizzle } from "holdfast/drizzle";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import postgres from "postgres";

type IsAny<T> = 0 extends 1 & T ? true : false;
type Same<A, B> = true extends IsAny<A> | IsAny<B> ? false : [A, B] extends [B, A] ? true : false;
function same<A, B>(..._proof: Same<A, B> extends true ? [] : [never]): void {}
type NativeOf<H> = H extends Holdfast<infer Native> ? Native : never;
type TxOf<Db extends { transaction: (...args: never[]) => unknown }> = Db["transaction"] extends (
  body: (tx: infer Tx) => never,
  ...rest: never[]
) => unknown
  ? Tx
  : never;

const upload = pgTable("upload", { id: text().primaryKey(), bytes: integer().notNull() });

export async function drizzles(): Promise<void> {
  const db = drizzle(new Pool(), { schema: { upload } });
  const hf = holdfast(fromDrizzle(db));
  same<NativeOf<typeof hf>, TxOf<typeof db>>();
  await hf.transaction(async (tx) => {
    const locked = await tx.rows(tx.client.select().from(upload));
    same<typeof locked, { id: string; bytes: number }[]>();
    const one = await tx.client.query.upload.findFirst();
    same<typeof one, { id: string; bytes: number } | undefined>();
    // @ts-expect-error there is no such table
    await tx.client.query.uplaod.findFirst();
  });
  await db.transaction((tx) => hf.join(tx).tryLock(key("upload")));
  // @ts-expect-error the database itself is no transaction
  hf.join(db);
  // @ts-expect-error another package's client
  fromDrizzle(new Pool());
}

export function others(): void {
  const js = onPostgres(postgres("postgres://"));
  const hfJs = holdfast(fromDrizzle(js));
  same<NativeOf<typeof hfJs>, TxOf<typeof js>>();
  const lite = onPglite(new PGlite());
  const hfLite = holdfast(fromDrizzle(lite));
  same<NativeOf<typeof hfLite>, TxOf<typeof lite>>();
  const my = onMysql(createPool("mysql://"));
  const hfMy = holdfast(fromDrizzle(my));
  same<NativeOf<typeof hfMy>, TxOf<typeof my>>();
}
