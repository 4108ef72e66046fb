/** A process that makes its list of databases the one that counts. */
import { sharded } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";

export default async function renumber(urls: readonly string[]): Promise<void> {
  const pools = urls.map((connectionString) => new Pool({ connectionString, max: 4 }));
  const shards = sharded(pools.map((pool) => fromPg(pool)));
  await shards.renumber();
  await shards.close();
  await Promise.all(pools.map((pool) => pool.end()));
}
