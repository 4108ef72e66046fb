/** Compiled, never run: MikroORM still fits the structural types that stand for it. */
import { MikroORM as MysqlOrm } from "@mikro-orm/mysql";
import { MikroORM, type SqlEntityManager, defineEntity } from "@mikro-orm/postgresql";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromMikroOrm } from "holdfast/mikro-orm";
import { Pool } from "pg";

type IsAny<T> = 0 extends 1 & T ? true : false;
type Same<A, B> = true extends IsAny<A> | IsAny<B> ? false : [A, B] extends [B, A] ? true : false;
function same<A, B>(..._proof: Same<A, B> extends true ? [] : [never]): void {}
type NativeOf<H> = H extends Holdfast<infer Native> ? Native : never;

const Upload = defineEntity({
  name: "Upload",
  properties: (p) => ({ id: p.text().primary(), bytes: p.integer() }),
});

export async function mikroOrm(): Promise<void> {
  const orm = await MikroORM.init({ entities: [Upload] });
  const hf = holdfast(fromMikroOrm(orm));
  same<NativeOf<typeof hf>, typeof orm.em>();
  await hf.transaction(async (tx) => {
    const em: SqlEntityManager = tx.client;
    const [upload] = await tx.client.find(Upload, { id: "a" });
    const bytes: number | undefined = upload?.bytes;
    // @ts-expect-error entities are typed
    const text: string | undefined = upload?.bytes;
    // @ts-expect-error and so are conditions
    await tx.client.find(Upload, { size: 1 });
    const [locked] = await tx.rows(tx.client.qb(Upload));
    const size: number | undefined = locked?.bytes;
    // @ts-expect-error what is locked is an entity too
    const name: string | undefined = locked?.bytes;
    return [em, bytes, text, size, name];
  });
  await orm.em.transactional((em) => hf.join(em).tryLock(key("upload")));
  // @ts-expect-error the instance is no transaction
  hf.join(orm);
  // @ts-expect-error another package's client
  fromMikroOrm(new Pool());
  // @ts-expect-error an EntityManager is no MikroORM
  fromMikroOrm(orm.em);
}

export async function onMysql(): Promise<void> {
  const orm = await MysqlOrm.init({ entities: [Upload] });
  const hf = holdfast(fromMikroOrm(orm));
  same<NativeOf<typeof hf>, typeof orm.em>();
  await orm.em.transactional((em) => hf.join(em).tryLock(key("upload")));
}
