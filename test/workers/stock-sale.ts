/** One process of many that buy the last pieces of one SKU. */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { InsufficientStockError, stock } from "holdfast/stock";
import { Pool } from "pg";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface SaleArg {
  url: string;
  name: string;
  attempts: number;
  callers: number;
  /** Reads, then writes: what people write who do not know better. */
  naive: boolean;
}

export interface SaleResult {
  sold: number;
  short: number;
  errors: string[];
}

export default async function sale(
  { url, name, attempts, callers, naive }: SaleArg,
  context: WorkerContext,
): Promise<SaleResult> {
  const pool = new Pool({ connectionString: url, max: 2 });
  // Many wait for each other here, and the machine may be busy.
  const hf = holdfast(fromPg(pool), { wait: 60_000 });
  const shop = stock(hf, { name });
  const result: SaleResult = { sold: 0, short: 0, errors: [] };
  let left = attempts;
  await pool.query("SELECT");
  context.send("ready");
  await context.receive("go");
  const caller = async (): Promise<void> => {
    while (left-- > 0) {
      try {
        if (naive) await readThenWrite(pool, name);
        else await shop.decrease("LAST", 1, { source: "ORDER" });
        result.sold++;
      } catch (error) {
        if (error instanceof InsufficientStockError) result.short++;
        else result.errors.push(String(error));
      }
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  await hf.close();
  await pool.end();
  return result;
}

async function readThenWrite(pool: Pool, name: string): Promise<void> {
  const { rows } = await pool.query(
    "SELECT id, on_hand::int, version::int FROM holdfast.stock_level WHERE book = $1 AND sku = 'LAST'",
    [name],
  );
  const { id, on_hand: onHand } = rows[0];
  if (onHand < 1)
    throw new InsufficientStockError([
      { sku: "LAST", location: "main", requested: 1, available: onHand, short: 1 - onHand },
    ]);
  await pool.query("UPDATE holdfast.stock_level SET on_hand = $2 WHERE id = $1", [id, onHand - 1]);
}
