/** What is in the tables, kept in temporary ones, for tests that begin many times at the same place. */
import type { SqlConnection } from "../../core/database.ts";
import { UsageError } from "../../core/errors.ts";
import { sql } from "../../core/sql.ts";
import type { Kept } from "../../core/wire.ts";

/** Test data, not a copy of production. */
const mostRows = 50_000;

interface Table {
  readonly name: string;
  readonly copy: string;
  readonly columns: string;
}

export async function keep(connection: SqlConnection): Promise<Kept> {
  const tables = await tablesOf(connection);
  let rows = 0;
  for (const { name, copy } of tables) {
    await connection.query(sql.raw(`CREATE TEMPORARY TABLE ${copy} AS TABLE ${name}`));
    const counted = await connection.query(sql.raw(`SELECT count(*)::int AS n FROM ${copy}`));
    rows += Number(counted.rows[0]?.["n"]);
    if (rows > mostRows)
      throw new UsageError(
        `explore: more than ${mostRows.toLocaleString("en")} rows in this database; say with \`reset\` how the data is brought back`,
      );
  }
  const restore = sql.raw(await restoring(connection, tables));
  return {
    restore: async () => void (await connection.query(restore)),
    async forget() {
      for (const { copy } of tables) await connection.query(sql.raw(`DROP TABLE IF EXISTS ${copy}`));
    },
  };
}

/** Those that others refer to first. */
async function tablesOf(connection: SqlConnection): Promise<Table[]> {
  const { rows } = await connection.query(sql`
    SELECT c.oid::text AS oid, format('%I.%I', n.nspname, c.relname) AS name,
      (SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '') AS columns,
      ARRAY(SELECT DISTINCT f.confrelid::text FROM pg_constraint f
        WHERE f.contype = 'f' AND f.conrelid = c.oid AND f.confrelid <> c.oid)::text AS parents
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind = 'r' AND c.relpersistence <> 't' AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
    ORDER BY c.oid`);
  const left = new Map(rows.map((row) => [String(row["oid"]), row]));
  const sorted: Table[] = [];
  while (left.size > 0) {
    const free = [...left].find(([, row]) => !parentsOf(row).some((parent) => left.has(parent)));
    // Tables that refer to each other are taken as they come.
    const [oid, row] = free ?? [...left][0] ?? ["", {}];
    left.delete(oid);
    if (row["columns"] === null) continue;
    sorted.push({
      name: String(row["name"]),
      copy: `pg_temp.holdfast_kept_${oid}`,
      columns: String(row["columns"]),
    });
  }
  return sorted;
}

function parentsOf(row: Record<string, unknown>): string[] {
  return String(row["parents"]).slice(1, -1).split(",").filter(Boolean);
}

/** One statement, so one round trip and one transaction. */
async function restoring(connection: SqlConnection, tables: readonly Table[]): Promise<string> {
  const { rows } = await connection.query(sql`
    SELECT format('SELECT setval(%L, %s, %L)', format('%I.%I', schemaname, sequencename),
      coalesce(last_value, start_value), last_value IS NOT NULL) AS text
    FROM pg_sequences WHERE schemaname !~ '^pg_'`);
  const deletes = tables.toReversed().map(({ name }) => `DELETE FROM ${name};`);
  const inserts = tables.map(
    ({ name, copy, columns }) =>
      `INSERT INTO ${name} (${columns}) OVERRIDING SYSTEM VALUE SELECT ${columns} FROM ${copy};`,
  );
  const sequences = rows.map(({ text }) => `PERFORM ${String(text).slice("SELECT ".length)};`);
  // Neither triggers nor foreign keys, for those who may; and an actor that left its transaction open is told.
  return `DO $holdfast$ BEGIN
    BEGIN SET LOCAL session_replication_role = replica; EXCEPTION WHEN insufficient_privilege THEN NULL; END;
    SET LOCAL lock_timeout = '10s';
    ${[...deletes, ...inserts, ...sequences].join("\n    ")}
  END $holdfast$`;
}
