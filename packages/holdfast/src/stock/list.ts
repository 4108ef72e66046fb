import { merged } from "../shards/merged.ts";
import { instancesOf } from "../shards/shards.ts";
import type { BookInfo } from "./store.ts";
import { stockBatcherOf } from "./batcher.ts";

/** All stocks that have a level, by name. */
export async function stocks(hf: object): Promise<readonly BookInfo[]> {
  const found = await Promise.all(
    instancesOf(hf, "stock").all.map((instance) => {
      const batcher = stockBatcherOf(instance, { name: "stock", table: undefined });
      return batcher.alone(undefined, (connection, store, _, how) => store.lists.books(connection, how));
    }),
  );
  return merged(
    found,
    ({ name }) => name,
    (a, b) => ({ ...a, levels: a.levels + b.levels }),
  );
}
