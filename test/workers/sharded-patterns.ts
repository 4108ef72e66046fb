/** One process of several: wants one each of subjects, SKUs and jobs that are on two databases, and of which there is one. */
import { HoldfastError, sharded } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Pool } from "pg";

export interface WantArg {
  urls: readonly string[];
  /** So many subjects, and so many SKUs. */
  each: number;
  /** Added to the number by which a database is chosen: who does not agree on it looks in another place. */
  offset: number;
}

export interface Got {
  quota: number;
  stock: number;
  jobs: number;
  /** Codes of errors, other than that there was none left. */
  refused: string[];
}

export default async function want({ urls, each, offset }: WantArg): Promise<Got> {
  const pools = urls.map((connectionString) => new Pool({ connectionString, max: 5 }));
  const shards = sharded(
    pools.map((pool) => fromPg(pool)),
    ({ parts }) => (Number(parts[1]) + offset) % pools.length,
  );
  const uploads = quota(shards, { name: "uploads", limit: 1 });
  const shop = stock(shards);
  const mails = queue<{ to: number }>(shards, "mails");
  const got: Got = { quota: 0, stock: 0, jobs: 0, refused: [] };
  const one = async (what: "quota" | "stock" | "jobs", take: () => Promise<boolean>) => {
    try {
      if (await take()) got[what]++;
    } catch (error) {
      const code = error instanceof HoldfastError ? error.code : String(error);
      if (code !== "HF_STOCK_INSUFFICIENT") got.refused.push(code);
    }
  };
  await Promise.all(
    Array.from({ length: each * 3 }, async (_, i) => {
      const n = i % each;
      await one("quota", async () => (await uploads.tryConsume(n)).granted);
      await one("stock", async () => (await shop.decrease(String(n), 1)).lines.length === 1);
      await one("jobs", async () => (await mails.enqueue({ to: n }, { key: String(n) })).added);
    }),
  );
  await shards.close();
  await Promise.all(pools.map((pool) => pool.end()));
  return got;
}
