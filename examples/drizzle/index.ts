import { eq, sum } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import { bigint, integer, pgTable, text } from "drizzle-orm/pg-core";
import { holdfast, key } from "holdfast";
import { fromDrizzle } from "holdfast/drizzle";
import { Pool } from "pg";
import { type Uploads, patient, quotaBytes, start } from "../uploads.ts";

const userImage = pgTable("user_image", {
  id: bigint({ mode: "bigint" }).primaryKey().generatedAlwaysAsIdentity(),
  userId: text("user_id").notNull(),
  bytes: integer().notNull(),
});

export async function open(connectionString: string): Promise<Uploads> {
  const pool = new Pool({ connectionString });
  const hf = holdfast(fromDrizzle(drizzle(pool)), patient);
  return {
    upload: (userId, bytes) =>
      hf.transaction({ lock: key("upload", userId) }, async ({ client: tx }) => {
        const [row] = await tx
          .select({ used: sum(userImage.bytes) })
          .from(userImage)
          .where(eq(userImage.userId, userId));
        if (Number(row?.used) + bytes > quotaBytes) return false;
        await tx.insert(userImage).values({ userId, bytes });
        return true;
      }),
    async close() {
      await hf.close();
      await pool.end();
    },
  };
}

await start(import.meta.url, open);
