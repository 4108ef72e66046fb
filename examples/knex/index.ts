import { holdfast, key } from "holdfast";
import { fromKnex } from "holdfast/knex";
import makeKnex from "knex";
import { type Uploads, patient, quotaBytes, start } from "../uploads.ts";

interface UserImage {
  id: string;
  user_id: string;
  bytes: number;
}

export async function open(connection: string): Promise<Uploads> {
  const knex = makeKnex({ client: "pg", connection });
  const hf = holdfast(fromKnex(knex), patient);
  return {
    upload: (userId, bytes) =>
      hf.transaction({ lock: key("upload", userId) }, async ({ client: trx }) => {
        const images = trx<UserImage>("user_image").where({ user_id: userId });
        const found = await images.sum({ used: "bytes" }).first();
        if (Number(found?.used) + bytes > quotaBytes) return false;
        await trx<UserImage>("user_image").insert({ user_id: userId, bytes });
        return true;
      }),
    async close() {
      await hf.close();
      await knex.destroy();
    },
  };
}

await start(import.meta.url, open);
