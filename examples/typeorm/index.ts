import { holdfast, key } from "holdfast";
import { fromTypeorm } from "holdfast/typeorm";
import { DataSource, EntitySchema } from "typeorm";
import { type Uploads, patient, quotaBytes, start } from "../uploads.ts";

interface UserImage {
  id: string;
  userId: string;
  bytes: number;
}

const UserImage = new EntitySchema<UserImage>({
  name: "UserImage",
  tableName: "user_image",
  columns: {
    id: { type: "bigint", primary: true, generated: "increment" },
    userId: { name: "user_id", type: "text" },
    bytes: { type: "integer" },
  },
});

export async function open(url: string): Promise<Uploads> {
  const dataSource = new DataSource({ type: "postgres", url, entities: [UserImage] });
  await dataSource.initialize();
  const hf = holdfast(fromTypeorm(dataSource), patient);
  return {
    upload: (userId, bytes) =>
      hf.transaction({ lock: key("upload", userId) }, async ({ client: manager }) => {
        const used = (await manager.sum(UserImage, "bytes", { userId })) ?? 0;
        if (used + bytes > quotaBytes) return false;
        await manager.insert(UserImage, { userId, bytes });
        return true;
      }),
    async close() {
      await hf.close();
      await dataSource.destroy();
    },
  };
}

await start(import.meta.url, open);
