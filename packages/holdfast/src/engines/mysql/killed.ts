/**
 * The note that `holdfast kill` leaves while it watches: a lock of GET_LOCK, so that it needs no table, and is gone with whoever left
 * it. The command takes it (`locks/note.ts`).
 */
import type { LostTransaction, SqlConnection } from "../../seam/database.ts";
import { sql } from "../../seam/sql.ts";

export async function wasKilled(
  connection: SqlConnection,
  { connection: { pid } }: LostTransaction<SqlConnection>,
): Promise<boolean> {
  if (pid === undefined) return false;
  const { rows } = await connection.query(sql`SELECT IS_USED_LOCK(${`holdfast:killed:${pid}`}) AS killer`);
  return rows[0]?.["killer"] !== null && rows[0]?.["killer"] !== undefined;
}
