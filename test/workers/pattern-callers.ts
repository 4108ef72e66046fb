/** One process of several that asks for its share of something that there is not enough of. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, sql } from "holdfast";
import { quota } from "holdfast/quota";
import { InsufficientStockError, stock } from "holdfast/stock";
import { openNamed, ourTable } from "../harness/sites.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface PatternCallersArg {
  readonly backend: string;
  readonly url: string;
  /** Looks first, and writes then: must be found out. */
  readonly naive?: boolean;
  /** Tries again with the same id, whatever went wrong: the server is away now and then. */
  readonly again?: boolean;
  /** Each is asked for once, by a process that is not killed; one that takes its place asks for all of them again. */
  readonly ids: readonly string[];
}

export interface Share {
  readonly granted: readonly string[];
  readonly refused: number;
}

export interface PatternCallersResult {
  readonly quota: Share;
  readonly stock: Share;
  readonly errors: readonly string[];
}

export const limit = 100;
export const subject = "ann";

export const uploads = (hf: Holdfast<unknown>) => quota(hf, { name: "uploads", limit });
export const shop = (hf: Holdfast<unknown>) => stock(hf, { name: "shop" });

/** What people write who do not know better. */
function readThenWrite(
  hf: Holdfast<unknown>,
  backend: string,
  of: "used" | "on_hand",
): () => Promise<boolean> {
  const [table, step, left] =
    of === "used" ? ["quota_bucket", 1, (n: number) => limit - n] : ["stock_level", -1, (n: number) => n];
  const from = ourTable(backend, table);
  return async () => {
    const [row] = await hf.transaction((tx) => tx.query(sql`SELECT ${sql.id(of)} AS n FROM ${from}`));
    const found = Number(row?.["n"]);
    if (left(found) < 1) return false;
    await sleep(1);
    await hf.transaction((tx) => tx.query(sql`UPDATE ${from} SET ${sql.id(of)} = ${found + step}`));
    return true;
  };
}

type Ask = (id: string) => Promise<boolean>;

function asking(hf: Holdfast<unknown>): Readonly<Record<"quota" | "stock", Ask>> {
  const [some, sold] = [uploads(hf), shop(hf)];
  return {
    quota: async (id) => (await some.tryConsume(subject, 1, { id })).granted,
    async stock(id) {
      try {
        await sold.decrease("LAST", 1, { source: "ORDER", externalId: id });
        return true;
      } catch (error) {
        if (error instanceof InsufficientStockError) return false;
        throw error;
      }
    },
  };
}

export default async function patternCallers(
  { backend, url, naive, again, ids }: PatternCallersArg,
  context: WorkerContext,
): Promise<PatternCallersResult> {
  const site = await openNamed(backend, url);
  const { hf } = site;
  const ask = naive
    ? { quota: readThenWrite(hf, backend, "used"), stock: readThenWrite(hf, backend, "on_hand") }
    : asking(hf);
  const told = {
    quota: { granted: [] as string[], refused: 0 },
    stock: { granted: [] as string[], refused: 0 },
  };
  const errors: string[] = [];
  await hf.capabilities();
  context.send("ready");
  await context.receive("go");
  const caller = async (what: "quota" | "stock", left: string[]): Promise<void> => {
    for (let id = left.shift(); id !== undefined; id = left.shift()) {
      try {
        if (await ask[what](id)) told[what].granted.push(id);
        else told[what].refused++;
        context.send("asked");
      } catch (error) {
        if (again) left.push(id);
        else errors.push(String(error));
      }
      await sleep(Math.random() * 4);
    }
  };
  await Promise.all(
    (["quota", "stock"] as const).flatMap((what) => {
      const left = [...ids];
      return Array.from({ length: 3 }, () => caller(what, left));
    }),
  );
  await site.close();
  return { ...told, errors };
}
