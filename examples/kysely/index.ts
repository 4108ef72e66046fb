import { holdfast, key } from "holdfast";
import { fromKysely } from "holdfast/kysely";
import { type Generated, Kysely, PostgresDialect } from "kysely";
import { Pool } from "pg";
import { type Uploads, patient, quotaBytes, start } from "../uploads.ts";

interface Tables {
  user_image: { id: Generated<string>; user_id: string; bytes: number };
}

export async function open(connectionString: string): Promise<Uploads> {
  const db = new Kysely<Tables>({ dialect: new PostgresDialect({ pool: new Pool({ connectionString }) }) });
  const hf = holdfast(fromKysely(db), patient);
  return {
    upload: (userId, bytes) =>
      hf.transaction({ lock: key("upload", userId) }, async ({ client: trx }) => {
        const { used } = await trx
          .selectFrom("user_image")
          .select((eb) => eb.fn.sum<string | null>("bytes").as("used"))
          .where("user_id", "=", userId)
          .executeTakeFirstOrThrow();
        if (Number(used) + bytes > quotaBytes) return false;
        await trx.insertInto("user_image").values({ user_id: userId, bytes }).execute();
        return true;
      }),
    async close() {
      await hf.close();
      await db.destroy();
    },
  };
}

await start(import.meta.url, open);
