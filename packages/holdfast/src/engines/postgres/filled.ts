/** Places of Citus begin empty, and nothing goes there by itself: what a plain schema has counted would be counted again from 0. */
import type { Migration, SqlConnection } from "../../seam/database.ts";
import { UnsupportedError, some } from "../../seam/errors.ts";
import { tablesMade } from "../../seam/migrations.ts";
import { type Names, sql } from "../../seam/sql.ts";
import { namesIn, namesOf, render } from "./dialect.ts";
import { isTrue } from "./probe.ts";
import { arrayText } from "./values.ts";

/** No call decides by these. All others count, also those that come with later migrations. */
const stateless = ["migration", "routine", "agreed", "lock", "origin", "queue_worker", "audit"];

/** Throws if this is the first of the places that are used, `holdfast_0` and so on, and the schema that they are called after has data. */
export async function refuseFilled(connection: SqlConnection, all: readonly Migration[]): Promise<void> {
  const { schema } = namesOf(connection);
  const plain = schema.replace(/_\d+$/, "");
  if (plain === schema) return;
  const names = namesIn(plain);
  const without = new Set(stateless.map((name) => names.own(name)));
  const filled: string[] = [];
  for (const table of await there(connection, names, all))
    if (!without.has(table) && (await isFilled(connection, table))) filled.push(table);
  if (filled.length === 0 || (await isInUse(connection, plain))) return;
  throw new UnsupportedError(
    `The schema ${plain} has data (${some(filled)}), and the schemas of places(…) start empty: a user who has used 5 of 5 would get 5 more. ` +
      "Stay in that schema, without places; create the places in another database, or under another name (places(database, count, { schema })); " +
      "or empty the schema first, if you no longer need its data.",
  );
}

async function there(
  connection: SqlConnection,
  names: Names,
  all: readonly Migration[],
): Promise<readonly string[]> {
  const made = tablesMade(all, (statement) => render(statement, names).text);
  const { rows } = await connection.query(
    sql`SELECT t AS name FROM pg_catalog.unnest(${arrayText(made)}::pg_catalog.text::pg_catalog.text[]) t WHERE pg_catalog.to_regclass(t) IS NOT NULL`,
  );
  return rows.map(({ name }) => String(name));
}

/** Rows that a policy hides may be there. */
async function isFilled(connection: SqlConnection, table: string): Promise<boolean> {
  const { rows } = await connection.query(
    sql`SELECT pg_catalog.row_security_active(pg_catalog.to_regclass(${table}::pg_catalog.text)::pg_catalog.oid) OR EXISTS (SELECT FROM ${sql.raw(table)}) AS filled`,
  );
  return isTrue(rows[0]?.["filled"]);
}

/** Processes go by some of them already: then the data of the plain schema are of another use. */
async function isInUse(connection: SqlConnection, plain: string): Promise<boolean> {
  const { rows } = await connection.query(
    sql`SELECT pg_catalog.format('%I.agreed', n.nspname) AS agreed FROM pg_catalog.pg_namespace n
  WHERE pg_catalog.regexp_replace(n.nspname::pg_catalog.text, '_[0-9]+$', '') OPERATOR(pg_catalog.=) ${plain}::pg_catalog.text AND n.nspname OPERATOR(pg_catalog.<>) ${plain}::pg_catalog.text
    AND pg_catalog.to_regclass(pg_catalog.format('%I.agreed', n.nspname)) IS NOT NULL`,
  );
  for (const { agreed } of rows) {
    const found = await connection.query(
      sql`SELECT 1 AS one FROM ${sql.raw(String(agreed))} WHERE name OPERATOR(pg_catalog.=) 'shard'`,
    );
    if (found.rows.length > 0) return true;
  }
  return false;
}
