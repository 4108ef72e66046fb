/**
 * The same by hand, without Holdfast: SERIALIZABLE, SELECT … FOR UPDATE, and a row per movement. Exact, as long as nobody
 * forgets one of its parts: the sum per SKU, the order of the locks, the retry, the id. docs/stock.md has what it costs.
 */
import { setTimeout as sleep } from "node:timers/promises";
import type { Pool, PoolClient } from "pg";

export interface Item {
  readonly sku: string;
  readonly quantity: number;
}

export interface Tables {
  readonly variants: string;
  readonly movements: string;
}

/** Whether it was sold, now or before: the id counts once. */
export async function sell(pool: Pool, tables: Tables, id: string, items: readonly Item[]): Promise<boolean> {
  for (let attempt = 1; ; attempt++) {
    const client = await pool.connect();
    try {
      await client.query("BEGIN ISOLATION LEVEL SERIALIZABLE");
      const sold = await attemptToSell(client, tables, id, items);
      await client.query(sold ? "COMMIT" : "ROLLBACK");
      return sold;
    } catch (error) {
      await client.query("ROLLBACK");
      // Whoever read what another one wrote starts again; of two with one id, the second finds the first.
      if (!retryable.has(String((error as { code?: unknown }).code)) || attempt === 100) throw error;
    } finally {
      client.release();
    }
    await sleep(Math.random() * Math.min(100, 2 ** attempt));
  }
}

const retryable = new Set(["40001", "40P01", "23505"]);

async function attemptToSell(
  client: PoolClient,
  { variants, movements }: Tables,
  id: string,
  items: readonly Item[],
): Promise<boolean> {
  const known = await client.query(`SELECT FROM ${movements} WHERE external_id = $1 LIMIT 1`, [id]);
  if (known.rowCount) return true;
  const wanted = new Map<string, number>();
  for (const { sku, quantity } of items) wanted.set(sku, (wanted.get(sku) ?? 0) + quantity);
  // In one order, or two orders wait for each other.
  const { rows } = await client.query<{ sku: string; stock: number }>(
    `SELECT sku, stock FROM ${variants} WHERE sku = ANY ($1) ORDER BY sku FOR UPDATE`,
    [[...wanted.keys()]],
  );
  if (rows.length < wanted.size || rows.some(({ sku, stock }) => stock < (wanted.get(sku) ?? 0)))
    return false;
  for (const { sku, stock } of rows) {
    const quantity = wanted.get(sku) ?? 0;
    await client.query(`UPDATE ${variants} SET stock = stock - $2 WHERE sku = $1`, [sku, quantity]);
    await client.query(
      `INSERT INTO ${movements} (external_id, sku, quantity, balance_after) VALUES ($1, $2, $3, $4)`,
      [id, sku, -quantity, stock - quantity],
    );
  }
  return true;
}
