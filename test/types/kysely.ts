/** Compiled, never run: Kysely still fits the structural types that stand for it. */
import { type Holdfast, holdfast, key } from "holdfast";
import { fromKysely } from "holdfast/kysely";
import { type Generated, Kysely, PostgresDialect, type Transaction } from "kysely";
import { Pool } from "pg";

type IsAny<T> = 0 extends 1 & T ? true : false;
type Same<A, B> = true extends IsAny<A> | IsAny<B> ? false : [A, B] extends [B, A] ? true : false;
function same<A, B>(..._proof: Same<A, B> extends true ? [] : [never]): void {}
type NativeOf<H> = H extends Holdfast<infer Native> ? Native : never;

interface Tables {
  upload: { id: Generated<string>; bytes: number };
}

export async function kysely(): Promise<void> {
  const pool = new Pool();
  const db = new Kysely<Tables>({ dialect: new PostgresDialect({ pool }) });
  const hf = holdfast(fromKysely(db, { pool }));
  same<NativeOf<typeof hf>, Transaction<Tables>>();
  await hf.transaction(async (tx) => {
    const locked = await tx.rows(tx.client.selectFrom("upload").select(["id", "bytes"]));
    same<typeof locked, { id: string; bytes: number }[]>();
    // @ts-expect-error there is no such table
    tx.client.selectFrom("uplaod");
  });
  await db.transaction().execute((trx) => hf.join(trx).tryLock(key("upload")));
  // @ts-expect-error the instance itself is no transaction
  hf.join(db);
  // @ts-expect-error another package's client
  fromKysely(pool);
  // @ts-expect-error this is no pool
  fromKysely(db, { pool: db });
}
