/** What statements do besides: by defaults, and by what views call. Triggers are in `related`. */
import type { SqlConnection } from "../../seam/database.ts";
import type { TableEffect } from "../../seam/protocol-reader.ts";
import { sql } from "../../seam/sql.ts";

const columns = sql`SELECT LOWER(table_name) AS name, LOWER(CONCAT_WS(' ', extra, column_default)) AS said
  FROM information_schema.columns WHERE table_schema = DATABASE()`;
const views = sql`SELECT LOWER(table_name) AS name, LOWER(view_definition) AS definition
  FROM information_schema.views WHERE table_schema = DATABASE()`;
const functions = sql`SELECT LOWER(routine_name) AS name FROM information_schema.routines
  WHERE routine_schema = DATABASE() AND routine_type = 'FUNCTION'`;

export async function effects(connection: SqlConnection): Promise<readonly TableEffect[]> {
  const read = async (statement: typeof columns) => (await connection.query(statement)).rows;
  const said = (await read(columns)).map(({ name, said: text }) => [String(name), String(text)] as const);
  const of = (kind: TableEffect["kind"], pattern: RegExp): TableEffect[] =>
    [...new Set(said.filter(([, text]) => pattern.test(text)).map(([table]) => table))].map((table) => ({
      table,
      kind,
    }));
  const known = (await read(views)).map(
    ({ name, definition }) => [String(name), String(definition)] as const,
  );
  // A view that names one, or another view that does. What may not be read is empty.
  const acting = (await read(functions)).map(({ name }) => String(name));
  const found = new Set<string>();
  for (let before = -1; before < found.size;) {
    before = found.size;
    for (const [name, definition] of known)
      if (definition === "" || [...acting, ...found].some((each) => definition.includes(each)))
        found.add(name);
  }
  return [
    ...of("numbers", /auto_increment|\bnextval|uuid_short/),
    ...of("clock", /current_timestamp|\bnow\b|localtime|curdate|curtime|sysdate|utc_|uuid_v7/),
    ...[...found].map((table) => ({ table, kind: "acts when read" as const })),
  ];
}
