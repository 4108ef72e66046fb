/** Compiled, never run: Knex still fits the structural types that stand for it. */
import { type Holdfast, holdfast, key } from "holdfast";
import { fromKnex } from "holdfast/knex";
import makeKnex, { type Knex } from "knex";
import { Pool } from "pg";

type IsAny<T> = 0 extends 1 & T ? true : false;
type Same<A, B> = true extends IsAny<A> | IsAny<B> ? false : [A, B] extends [B, A] ? true : false;
function same<A, B>(..._proof: Same<A, B> extends true ? [] : [never]): void {}
type NativeOf<H> = H extends Holdfast<infer Native> ? Native : never;

interface Upload {
  id: string;
  bytes: number;
}

export async function knex(): Promise<void> {
  const client = makeKnex({ client: "pg" });
  const hf = holdfast(fromKnex(client));
  same<NativeOf<typeof hf>, Knex.Transaction>();
  await hf.transaction(async (tx) => {
    const upload = await tx.client<Upload>("upload").where({ id: "a" }).first();
    const bytes: number | undefined = upload?.bytes;
    // @ts-expect-error rows are typed
    const text: string | undefined = upload?.bytes;
    const locked = await tx.rows(tx.client<Upload>("upload").select("id"));
    same<typeof locked, Pick<Upload, "id">[]>();
    const one = await tx.rows(tx.client<Upload>("upload").first());
    same<typeof one, Upload | undefined>();
    return [bytes, text];
  });
  await client.transaction((trx) => hf.join(trx).tryLock(key("upload")));
  hf.join(await client.transaction());
  // @ts-expect-error the instance itself is no transaction
  hf.join(client);
  // @ts-expect-error nor is another package's
  hf.join(new Pool());
  // @ts-expect-error another package's client
  fromKnex(new Pool());
  // @ts-expect-error a configuration is no instance
  fromKnex({ client: "pg" });
}

export function knexTyped(): void {
  const hf = holdfast(fromKnex(makeKnex<Upload, Upload[]>({ client: "pg" })));
  same<NativeOf<typeof hf>, Knex.Transaction>();
}
