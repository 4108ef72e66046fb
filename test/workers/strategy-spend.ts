/** One process of several: spends of one limit, under a lock that is kept as it is told, or as the database says. */
import { HoldfastError, type Strategy, holdfast, key, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

export interface StrategyArg {
  url: string;
  strategy?: Strategy;
  calls: number;
  limit: number;
}

export interface Spent {
  spent: number;
  refused: string[];
}

export default async function spend({ url, strategy, calls, limit }: StrategyArg): Promise<Spent> {
  const pool = new Pool({ connectionString: url, max: 8 });
  const hf = holdfast(fromPg(pool), { wait: 60_000, ...(strategy && { strategy }) });
  const answer: Spent = { spent: 0, refused: [] };
  const one = async () => {
    try {
      await hf.lock(key("spend"), async (tx) => {
        const [row] = await tx.query(sql`SELECT count(*) AS n FROM spent`);
        if (Number(row?.["n"]) >= limit) return;
        await tx.query(sql`INSERT INTO spent SELECT FROM pg_sleep(0.01)`);
        answer.spent++;
      });
    } catch (error) {
      answer.refused.push(error instanceof HoldfastError ? error.code : String(error));
    }
  };
  await Promise.all(Array.from({ length: calls }, one));
  await hf.close();
  await pool.end();
  return answer;
}
