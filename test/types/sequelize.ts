/** Compiled, never run: Sequelize still fits the structural types that stand for it. */
import { type Holdfast, holdfast, key } from "holdfast";
import { findAll, fromSequelize } from "holdfast/sequelize";
import { Pool } from "pg";
import {
  type InferAttributes,
  type InferCreationAttributes,
  Model,
  type ModelStatic,
  Sequelize,
  type Transaction,
} from "sequelize";

type IsAny<T> = 0 extends 1 & T ? true : false;
type Same<A, B> = true extends IsAny<A> | IsAny<B> ? false : [A, B] extends [B, A] ? true : false;
function same<A, B>(..._proof: Same<A, B> extends true ? [] : [never]): void {}
type NativeOf<H> = H extends Holdfast<infer Native> ? Native : never;

class Upload extends Model<InferAttributes<Upload>, InferCreationAttributes<Upload>> {
  declare id: string;
  declare bytes: number;
}

export async function sequelize(defined: ModelStatic<Upload>): Promise<void> {
  const client = new Sequelize("postgres://localhost/test");
  const hf = holdfast(fromSequelize(client));
  same<NativeOf<typeof hf>, Transaction>();
  await hf.transaction(async (tx) => {
    const upload = await Upload.findByPk("a", { transaction: tx.client });
    const bytes: number | undefined = upload?.bytes;
    const locked = await tx.rows(findAll(Upload, { where: { id: "a" }, limit: 1 }));
    same<typeof locked, Upload[]>();
    const others = await tx.rows(findAll(defined));
    same<typeof others, Upload[]>();
    // @ts-expect-error options are those of findAll
    findAll(Upload, { limitt: 1 });
    // @ts-expect-error a client is no model
    findAll(client);
    return bytes;
  });
  await client.transaction((t) => hf.join(t).tryLock(key("upload")));
  hf.join(await client.transaction());
  // @ts-expect-error the instance itself is no transaction
  hf.join(client);
  // @ts-expect-error nor is another package's
  hf.join(new Pool());
  // @ts-expect-error another package's client
  fromSequelize(new Pool());
}
