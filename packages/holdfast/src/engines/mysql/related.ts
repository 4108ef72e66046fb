/** Tables whose statements may reach each other's rows. */
import type { SqlConnection } from "../../seam/database.ts";
import { sql } from "../../seam/sql.ts";

/** By foreign keys; and those that may reach anything, as what a trigger does or a view reads is not looked at. */
const pairs =
  sql.raw(`SELECT DISTINCT LOWER(table_name) AS a, LOWER(referenced_table_name) AS b FROM information_schema.key_column_usage
    WHERE table_schema = DATABASE() AND referenced_table_name IS NOT NULL
  UNION SELECT LOWER(event_object_table) AS a, '*' AS b FROM information_schema.triggers
    WHERE event_object_schema = DATABASE()
  UNION SELECT LOWER(table_name) AS a, '*' AS b FROM information_schema.views WHERE table_schema = DATABASE()`);

export async function related(connection: SqlConnection): Promise<readonly (readonly string[])[]> {
  const { rows } = await connection.query(pairs);
  return rows.map(({ a, b }) => [String(a), String(b)]);
}
