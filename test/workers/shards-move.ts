/** Processes that use one limit over two databases, and processes that move it to and fro meanwhile. */
import { type Key, sharded } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { Pool } from "pg";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface MoveArg {
  urls: readonly string[];
  role: "use" | "move";
  limit: number;
  /** Of the calls of one process: each is made until it is answered, under the same id. */
  prefix: string;
}

export const route = ({ parts }: Key) => (parts[1] === "other" ? 1 : 0);

/** Resolves to the ids that were granted, once nothing is left; who moves goes on until it is killed. */
export default async function shardsMove(
  { urls, role, limit, prefix }: MoveArg,
  context: WorkerContext,
): Promise<string[]> {
  const pools = urls.map((connectionString) => new Pool({ connectionString, max: 4 }));
  const databases = pools.map((pool) => fromPg(pool));
  const shards = sharded(databases, route);
  const credits = quota(shards, { name: "credits", limit });
  if (role === "move") {
    let to = 1;
    for (;;) {
      try {
        if ((await shards.move("u", { to, wait: 30_000 })).length > 0) context.send("moved", to);
        to = 1 - to;
      } catch (error) {
        context.send("failed", String(error));
      }
    }
  }
  const granted: string[] = [];
  const caller = async (n: number): Promise<void> => {
    for (let i = 0; ; i++) {
      const id = `${prefix}:${n}:${i}`;
      const answer = await credits.tryConsume("u", 1, { id, wait: 60_000 });
      if (!answer.granted) return;
      granted.push(id);
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  };
  await Promise.all([0, 1, 2, 3].map(caller));
  await shards.close();
  await Promise.all(pools.map((pool) => pool.end()));
  return granted;
}
