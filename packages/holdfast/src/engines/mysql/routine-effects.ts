/** What our procedures do, in whatever schema they are. */
import type { SqlConnection } from "../../seam/database.ts";
import type { RoutineEffect } from "../../seam/protocol-reader.ts";
import { sql } from "../../seam/sql.ts";
import { leaseProcedures } from "./leases.ts";
import { oneCallProcedures } from "./one-call.ts";
import { transactionProcedures } from "./transactions.ts";

export const procedures = [...leaseProcedures, ...transactionProcedures, ...oneCallProcedures];

/** By their names, which have the checksums of their bodies in them: another version is another procedure, and not known. */
export async function routineEffects(connection: SqlConnection): Promise<ReadonlyMap<string, RoutineEffect>> {
  const { rows } = await connection.query(
    sql`SELECT LOWER(routine_name) AS name FROM information_schema.routines
      WHERE routine_schema = DATABASE() AND routine_type = 'PROCEDURE'`,
  );
  const found = new Map<string, RoutineEffect>();
  for (const { name } of rows)
    for (const { plain, effect } of procedures) {
      const called = String(name);
      if (!called.endsWith(plain)) continue;
      const prefix = called.slice(0, -plain.length);
      const tables = effect.tables.map((table) => (table === "*" ? table : `${prefix}${table}`));
      found.set(called, { ...effect, tables });
    }
  return found;
}
