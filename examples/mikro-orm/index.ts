import { MikroORM, defineEntity, sql } from "@mikro-orm/postgresql";
import { holdfast, key } from "holdfast";
import { fromMikroOrm } from "holdfast/mikro-orm";
import { type Uploads, patient, quotaBytes, start } from "../uploads.ts";

const UserImage = defineEntity({
  name: "UserImage",
  tableName: "user_image",
  properties: (p) => ({
    id: p.bigint().primary(),
    userId: p.text(),
    bytes: p.integer(),
  }),
});

export async function open(clientUrl: string): Promise<Uploads> {
  const orm = await MikroORM.init({ clientUrl, entities: [UserImage] });
  const hf = holdfast(fromMikroOrm(orm), patient);
  return {
    upload: (userId, bytes) =>
      hf.transaction({ lock: key("upload", userId) }, async ({ client: em }) => {
        const { used } = await em
          .qb(UserImage)
          .select(sql`sum(bytes)`.as("used"))
          .where({ userId })
          .execute<{ used: string | null }>("get");
        if (Number(used) + bytes > quotaBytes) return false;
        // Written when the body has ended, before COMMIT.
        em.create(UserImage, { userId, bytes });
        return true;
      }),
    async close() {
      await hf.close();
      await orm.close();
    },
  };
}

await start(import.meta.url, open);
