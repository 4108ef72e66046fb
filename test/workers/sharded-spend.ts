/** One process of two: spends credits of users who live on two databases. */
import { key, sharded, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

export interface SpendArg {
  urls: readonly string[];
  users: number;
  calls: number;
  limit: number;
  /** Added to the user's number: processes that do not agree on it look for a user in different places. */
  offset: number;
}

export default async function spend({ urls, users, calls, limit, offset }: SpendArg): Promise<number> {
  const pools = urls.map((connectionString) => new Pool({ connectionString, max: 5 }));
  const databases = pools.map((pool) => fromPg(pool));
  const shards = sharded((k) => {
    const index = (Number(k.parts[1]) + offset) % databases.length;
    return databases[index] as (typeof databases)[number];
  });
  let granted = 0;
  const caller = async (user: number): Promise<void> => {
    for (let i = 0; i < calls; i++) {
      const done = await shards.transaction({ lock: key("credits", user), wait: 60_000 }, async (tx) => {
        const [row] = await tx.query(sql`SELECT count(*) AS n FROM spent WHERE user_id = ${user}`);
        if (Number(row?.["n"]) >= limit) return false;
        await tx.query(sql`INSERT INTO spent (user_id) VALUES (${user})`);
        return true;
      });
      if (done) granted++;
    }
  };
  await Promise.all(Array.from({ length: users }, (_, user) => caller(user)));
  await shards.close();
  await Promise.all(pools.map((pool) => pool.end()));
  return granted;
}
