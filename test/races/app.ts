/** What applications on a bare driver write for themselves. */
import type { Pool, PoolClient } from "pg";

export async function withTransaction<T>(pool: Pool, body: (client: PoolClient) => Promise<T>): Promise<T> {
  const client = await pool.connect();
  try {
    await client.query("BEGIN");
    const value = await body(client);
    await client.query("COMMIT");
    return value;
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}

/** The SQLSTATE of an error, also of one that an ORM wrapped. */
export function sqlState(error: unknown): string | undefined {
  for (let at = error; at instanceof Error; at = at.cause) {
    const code = (at as { code?: unknown }).code;
    if (typeof code === "string") return code;
  }
  return undefined;
}

/** Runs a transaction again that the server ended for the sake of another one. */
export async function retrying<T>(transaction: () => Promise<T>, attempts = 6): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await transaction();
    } catch (error) {
      const state = sqlState(error);
      if (attempt === attempts || (state !== "40001" && state !== "40P01")) throw error;
    }
  }
}
