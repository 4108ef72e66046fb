import type { Migration, Migrations, SqlConnection } from "../../core/database.ts";
import { key } from "../../core/key.ts";
import { sql } from "../../core/sql.ts";
import { render } from "./dialect.ts";
import { waiting } from "./keys.ts";
import { isTrue } from "./probe.ts";

const all: readonly Migration[] = [
  {
    id: 1,
    name: "keys",
    statements: [
      sql`CREATE SCHEMA IF NOT EXISTS holdfast`,
      sql`CREATE TABLE IF NOT EXISTS holdfast.migration (
  id integer PRIMARY KEY,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
)`,
      // The same as key(…) in JavaScript: parts prefixed by their length in bytes, SHA-256, the first 8 bytes.
      sql`CREATE OR REPLACE FUNCTION holdfast.key(VARIADIC parts text[]) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $function$
BEGIN
  IF coalesce(cardinality(parts), 0) = 0 OR array_position(parts, NULL) IS NOT NULL OR array_position(parts, '') IS NOT NULL THEN
    RAISE EXCEPTION 'holdfast.key: a part is missing or empty' USING ERRCODE = 'null_value_not_allowed',
      HINT = 'A missing id would lock everybody out, or lock the wrong thing.';
  END IF;
  RETURN (SELECT ('x' || encode(substring(sha256(convert_to(
    string_agg(octet_length(convert_to(part, 'UTF8'))::text || ':' || part, '' ORDER BY position), 'UTF8')) FROM 1 FOR 8), 'hex'))::bit(64)::bigint
    FROM unnest(parts) WITH ORDINALITY AS p (part, position));
END
$function$`,
    ],
  },
];

const one = [{ key: key("holdfast", "migrate"), mode: "exclusive" }] as const;

export const migrations: Migrations<SqlConnection> = {
  all,
  print: (statement) => `${render(statement).text};`,
  async apply(connection, begun) {
    if (!begun) await connection.query(sql.raw("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"));
    try {
      await connection.query(
        sql.raw(`SELECT set_config('lock_timeout', '60000', true), ${waiting(one, "xact").join()}`),
      );
      const applied = await done(connection);
      const missing = all.filter(({ id }) => !applied.has(id));
      for (const { id, name, statements } of missing) {
        for (const statement of statements) await connection.query(statement);
        await connection.query(sql`INSERT INTO holdfast.migration (id, name) VALUES (${id}, ${name})`);
      }
      if (!begun) await connection.query(sql.raw("COMMIT"));
      return missing;
    } catch (error) {
      if (!begun && !connection.lost.aborted) await connection.query(sql.raw("ROLLBACK")).catch(() => {});
      throw error;
    }
  },
};

async function done(connection: SqlConnection): Promise<Set<number>> {
  const [row] = (
    await connection.query(sql.raw("SELECT to_regclass('holdfast.migration') IS NOT NULL AS there"))
  ).rows;
  if (!isTrue(row?.there)) return new Set();
  const { rows } = await connection.query(sql.raw("SELECT id FROM holdfast.migration"));
  return new Set(rows.map(({ id }) => Number(id)));
}
