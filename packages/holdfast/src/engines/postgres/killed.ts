/**
 * The note that `holdfast kill` leaves while it watches: an advisory lock, so that it needs no table, and is gone with whoever left it.
 * The command takes it (`locks/note.ts`). The first number says what the second one is: a transaction's id ("hfkx") or a session's
 * ("hfkp"). Both are the same in all databases of the server.
 */
import type { LostTransaction, SqlConnection } from "../../seam/database.ts";
import { sql } from "../../seam/sql.ts";
import { isTrue } from "./probe.ts";

const transactions = 0x68666b78;
const sessions = 0x68666b70;

export async function wasKilled(
  connection: SqlConnection,
  { connection: { pid }, begun, capabilities }: LostTransaction<SqlConnection>,
): Promise<boolean> {
  const notes: (readonly [number, bigint | number])[] = [];
  // Locks know the lower 32 bits of an id.
  if (begun?.number !== undefined) notes.push([transactions, BigInt.asUintN(32, BigInt(begun.number))]);
  // A pooler tells its clients numbers of its own.
  if (pid !== undefined && capabilities?.details?.["direct"] === true) notes.push([sessions, pid]);
  if (notes.length === 0) return false;
  const equal = "OPERATOR(pg_catalog.=)";
  const named = notes.map(
    ([kind, id]) => `classid::bigint ${equal} ${kind} AND objid::bigint ${equal} ${id}`,
  );
  const { rows } = await connection.query(
    sql.raw(`SELECT EXISTS (SELECT FROM pg_catalog.pg_locks WHERE locktype ${equal} 'advisory' AND granted AND objsubid ${equal} 2
      AND (${named.join(" OR ")})) AS killed`),
  );
  return isTrue(rows[0]?.["killed"]);
}
