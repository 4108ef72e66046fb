/** Compiled, never run: TypeORM still fits the structural types that stand for it. */
import { type Holdfast, holdfast, key } from "holdfast";
import { fromTypeorm } from "holdfast/typeorm";
import { Pool } from "pg";
import { DataSource, type EntityManager, EntitySchema } from "typeorm";

type IsAny<T> = 0 extends 1 & T ? true : false;
type Same<A, B> = true extends IsAny<A> | IsAny<B> ? false : [A, B] extends [B, A] ? true : false;
function same<A, B>(..._proof: Same<A, B> extends true ? [] : [never]): void {}
type NativeOf<H> = H extends Holdfast<infer Native> ? Native : never;

interface Upload {
  id: string;
  bytes: number;
}
const Upload = new EntitySchema<Upload>({
  name: "Upload",
  columns: { id: { type: "text", primary: true }, bytes: { type: "int" } },
});

export async function typeorm(): Promise<void> {
  const dataSource = new DataSource({ type: "postgres" });
  const hf = holdfast(fromTypeorm(dataSource));
  same<NativeOf<typeof hf>, EntityManager>();
  await hf.transaction(async (tx) => {
    const [upload] = await tx.client.find(Upload);
    const bytes: number | undefined = upload?.bytes;
    // @ts-expect-error entities are typed
    const text: string | undefined = upload?.bytes;
    const locked = await tx.rows(tx.client.createQueryBuilder(Upload, "u"));
    same<typeof locked, Upload[]>();
    return [bytes, text];
  });
  await dataSource.transaction((manager) => hf.join(manager).tryLock(key("upload")));
  hf.join(dataSource.createQueryRunner().manager);
  // @ts-expect-error the DataSource is no transaction
  hf.join(dataSource);
  // @ts-expect-error a QueryRunner has a manager
  hf.join(dataSource.createQueryRunner());
  // @ts-expect-error another package's client
  fromTypeorm(new Pool());
  // @ts-expect-error a manager is no DataSource
  fromTypeorm(dataSource.manager);
}
