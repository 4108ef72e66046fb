/** Processes that use quotas and locks over several databases, while a database is added. */
import { readFileSync, unlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { HoldfastError, ShardMapError, key, sharded } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { Pool } from "pg";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface ReshardArg {
  urls: readonly string[];
  prefix: string;
  subjects: number;
  limit: number;
  /** Nothing that a server keeps for it while it stands still: quotas and leases. */
  expires?: boolean;
  /** Where a file stands for each lock that somebody has. */
  folder: string;
}

export interface Resharded {
  /** Ids of what was granted, by subject. */
  granted: [subject: string, id: string][];
  /** Calls whose answer this process has not lived to see. */
  open: [subject: string, id: string][];
  /** Locks that somebody else had at the same time: by whom, by whom else, and when each of the two began, in Unix time. */
  twice: [lock: string, holder: string, other: string, at: number, otherAt: number][];
  /** Those who had a lock until they gave it back: no server has lost it meanwhile. */
  kept: string[];
  refused: boolean;
  errors: string[];
}

const locks = 12;

/** Nobody, if it has gone meanwhile. */
function ownerOf(file: string): [owner: string, since: number] {
  try {
    const [owner = "", since] = readFileSync(file, "utf8").split(" ");
    return [owner, Number(since)];
  } catch {
    return ["", 0];
  }
}

/** Goes on until it is told to stop, or is refused because its list is over. */
export default async function reshard(arg: ReshardArg, context: WorkerContext): Promise<Resharded> {
  const { urls, prefix, subjects, limit, folder, expires = false } = arg;
  const pools = urls.map((connectionString) => new Pool({ connectionString, max: 6 }));
  for (const pool of pools) pool.on("error", () => {});
  const shards = sharded(
    pools.map((pool) => fromPg(pool)),
    undefined,
    { hazards: "count" },
  );
  const uploads = quota(shards, { name: "uploads", limit });
  const done: Resharded = { granted: [], open: [], twice: [], kept: [], refused: false, errors: [] };
  let stopped = false;
  const stop = () => (stopped = true);
  void context.receive("stop").then(stop, stop);
  let told = false;

  /** What becomes of an error: gone on after, unless the list of this process is over. */
  const after = async (error: unknown): Promise<void> => {
    if (error instanceof ShardMapError && !error.retryable) {
      // One that begins with the new list is refused until it counts.
      if (told) {
        done.refused = true;
        stop();
      }
    } else if (!(error instanceof HoldfastError)) done.errors.push(String(error));
    await sleep(20);
  };

  const use = async (n: number): Promise<void> => {
    for (let i = 0; !stopped; i++) {
      await sleep(4);
      const subject = `s${Math.floor(Math.random() * subjects)}`;
      const id = `${prefix}:${n}:${i}`;
      for (;;) {
        try {
          const { granted } = await uploads.tryConsume(subject, 1, { id });
          if (granted) done.granted.push([subject, id]);
          if (!told) context.send("used");
          told = true;
          break;
        } catch (error) {
          await after(error);
          if (!stopped) continue;
          done.open.push([subject, id]);
          break;
        }
      }
    }
  };

  const within = async (name: string, holder: string): Promise<void> => {
    const file = join(folder, name);
    try {
      writeFileSync(file, `${holder} ${Date.now()}`, { flag: "wx" });
    } catch {
      const [owner, since] = ownerOf(file);
      done.twice.push([name, holder, owner, Date.now(), since]);
      return;
    }
    await sleep(3);
    unlinkSync(file);
  };

  const lock = async (kind: "transaction" | "hold" | "lease"): Promise<void> => {
    for (let i = 0; !stopped; i++) {
      const holder = `${prefix}:${kind}:${i}`;
      const name = `${kind}-${Math.floor(Math.random() * locks)}`;
      const held = key(kind, name);
      try {
        if (kind === "transaction")
          await shards.transaction({ lock: held, retry: false }, () => within(name, holder));
        else {
          await using one =
            kind === "hold" ? await shards.hold(held) : await shards.lease(held, { ttl: 3000 });
          if (one.signal.aborted) continue;
          await within(name, holder);
          await one.release();
          if (one.signal.aborted) continue;
        }
        done.kept.push(holder);
      } catch (error) {
        await after(error);
      }
      await sleep(5);
    }
  };

  const kinds = expires ? (["lease"] as const) : (["transaction", "hold", "lease"] as const);
  await Promise.all([0, 1, 2].map(use).concat(kinds.map(lock)));
  await shards.close();
  await Promise.all(pools.map((pool) => pool.end()));
  return done;
}
