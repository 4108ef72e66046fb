/** Tables whose storage engine has no transactions (MyISAM, Aria, MEMORY): no row is locked there, and nothing is rolled back. */
import { UnsupportedError } from "../../seam/errors.ts";
import { type Statement, sql } from "../../seam/sql.ts";

/** For a SELECT: the first one, and its engine. By their names, which keeps MariaDB from opening all others. */
export const unsafeTable = (tables: Statement): Statement =>
  sql`(SELECT MIN(CONCAT(table_name, ' is stored by ', engine)) FROM information_schema.tables WHERE ${tables}
    AND engine NOT IN (SELECT e.engine FROM information_schema.engines e WHERE e.transactions = 'YES'))`;

export function refuseUnsafe(found: unknown): void {
  if (found !== null && found !== undefined)
    throw new UnsupportedError(
      `${String(found)}, which has no transactions: no row is locked there, and nothing is rolled back. ` +
        "Change it: ALTER TABLE … ENGINE = InnoDB",
    );
}
