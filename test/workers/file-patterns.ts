/** One process of several on one SQLite file, which asks for its share of something that there is not enough of. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast, sql } from "holdfast";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { InsufficientStockError, stock } from "holdfast/stock";
import type { ConformanceSite } from "holdfast/testing";
import { backendNamed } from "../backends.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface FilePatternArg {
  /** A backend, or "without WAL". */
  readonly backend: string;
  readonly url: string;
  readonly what: "quota" | "stock" | "naive quota" | "naive stock";
  /** Each is asked for once, by a process that is not killed; one that takes its place asks for all of them again. */
  readonly ids: readonly string[];
}

export interface FilePatternResult {
  readonly granted: readonly string[];
  readonly refused: number;
  readonly errors: readonly string[];
}

export const limit = 100;
export const subject = "ann";

/** Many wait for each other here, and the machine may be busy. */
export const patience = { wait: 60_000 };

type Site = Pick<ConformanceSite, "database" | "close">;

export async function openFile(backend: string, url: string): Promise<Site> {
  if (backend !== "without WAL") return backendNamed(backend).open(url);
  const [{ default: Database }, { fromBetterSqlite3 }] = await Promise.all([
    import("better-sqlite3"),
    import("holdfast/better-sqlite3"),
  ]);
  return { database: fromBetterSqlite3(() => new Database(url)), close: async () => {} };
}

export const uploads = (hf: Holdfast<unknown>) => quota(hf, { name: "uploads", limit });
export const shop = (hf: Holdfast<unknown>) => stock(hf, { name: "shop" });
export const errands = (hf: Holdfast<unknown>) => queue<string>(hf, "errands", { retries: 1000 });

/** What people write who do not know better. */
function readThenWrite(hf: Holdfast<unknown>, of: "used" | "on_hand"): () => Promise<boolean> {
  const [table, step, left] =
    of === "used"
      ? ["holdfast_quota_bucket", 1, (n: number) => limit - n]
      : ["holdfast_stock_level", -1, (n: number) => n];
  return async () => {
    const [row] = await hf.transaction((tx) =>
      tx.query(sql`SELECT ${sql.id(of)} AS n FROM ${sql.id(table)}`),
    );
    const found = Number(row?.["n"]);
    if (left(found) < 1) return false;
    await sleep(1);
    await hf.transaction((tx) => tx.query(sql`UPDATE ${sql.id(table)} SET ${sql.id(of)} = ${found + step}`));
    return true;
  };
}

function asking(hf: Holdfast<unknown>, what: FilePatternArg["what"]): (id: string) => Promise<boolean> {
  switch (what) {
    case "quota": {
      const some = uploads(hf);
      return async (id) => (await some.tryConsume(subject, 1, { id })).granted;
    }
    case "stock": {
      const some = shop(hf);
      return async (id) => {
        try {
          await some.decrease("LAST", 1, { source: "ORDER", externalId: id });
          return true;
        } catch (error) {
          if (error instanceof InsufficientStockError) return false;
          throw error;
        }
      };
    }
    default:
      return readThenWrite(hf, what === "naive quota" ? "used" : "on_hand");
  }
}

export default async function filePatterns(
  { backend, url, what, ids }: FilePatternArg,
  context: WorkerContext,
): Promise<FilePatternResult> {
  const site = await openFile(backend, url);
  const hf: Holdfast<unknown> = holdfast(site.database, patience);
  const ask = asking(hf, what);
  const granted: string[] = [];
  const errors: string[] = [];
  let refused = 0;
  const left = [...ids];
  await hf.capabilities();
  context.send("ready");
  await context.receive("go");
  const caller = async (): Promise<void> => {
    for (let id = left.shift(); id !== undefined; id = left.shift()) {
      try {
        if (await ask(id)) granted.push(id);
        else refused++;
        context.send("asked");
      } catch (error) {
        errors.push(String(error));
      }
      await sleep(Math.random() * 4);
    }
  };
  await Promise.all(Array.from({ length: 4 }, caller));
  await hf.close();
  await site.close();
  return { granted, refused, errors };
}
