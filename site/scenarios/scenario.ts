import type { ClientBase, Pool, QueryResultRow } from "pg";

/** Code as it is written first, two calls of it at the same time, and the rule that they break. */
export interface Scenario {
  readonly title: string;
  /** Made once. */
  readonly tables: string;
  /** Before each run. */
  readonly rows: string;
  actors(pool: Pool): Record<string, () => Promise<unknown>>;
  invariant(pool: Pool, failures: readonly string[]): Promise<void>;
}

/** BEGIN, COMMIT or ROLLBACK around it. */
export async function inTransaction<T>(pool: Pool, body: (client: ClientBase) => Promise<T>): Promise<T> {
  const client = await pool.connect();
  try {
    await client.query("BEGIN");
    const result = await body(client);
    await client.query("COMMIT");
    return result;
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}

export async function one<Row extends QueryResultRow>(
  client: ClientBase | Pool,
  sql: string,
  values: unknown[] = [],
): Promise<Row> {
  const { rows } = await client.query<Row>(sql, values);
  const [row] = rows;
  if (row === undefined) throw new Error(`No row: ${sql}`);
  return row;
}
