/** One process of many: consumes a quota by check-then-write, with or without the lock. */
import { holdfast, key, sql } from "holdfast";
import { backendNamed } from "../backends.ts";

export interface ConsumeArg {
  backend: string;
  url: string;
  calls: number;
  callers: number;
  limit: number;
  /** Without the lock: what people write who do not know better. */
  naive?: boolean;
}

export interface ConsumeResult {
  granted: number;
  refused: number;
  errors: string[];
}

export default async function consume({
  backend,
  url,
  calls,
  callers,
  limit,
  naive,
}: ConsumeArg): Promise<ConsumeResult> {
  const site = await backendNamed(backend).open(url);
  const hf = holdfast(site.database, { wait: 110_000, deadline: 120_000 });
  const result: ConsumeResult = { granted: 0, refused: 0, errors: [] };
  let left = calls;
  const caller = async (): Promise<void> => {
    while (left-- > 0) {
      try {
        const granted = await hf.transaction(naive ? {} : { lock: key("upload", "u1") }, async (tx) => {
          const [row] = await tx.query(sql`SELECT count(*) AS n FROM upload WHERE user_id = ${"u1"}`);
          if (Number(row?.n) >= limit) return false;
          await tx.query(sql`INSERT INTO upload (user_id, bytes) VALUES (${"u1"}, ${1})`);
          return true;
        });
        if (granted) result.granted++;
        else result.refused++;
      } catch (error) {
        result.errors.push(String(error));
      }
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  await hf.close();
  await site.close();
  return result;
}
