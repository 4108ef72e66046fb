import type { Agreed, AgreedName, Agreements } from "../../seam/agreements.ts";
import type { SqlConnection } from "../../seam/database.ts";
import { own, sql } from "../../seam/sql.ts";
import { asHolder, sessionColumns } from "./locks/holders.ts";
import { isTrue } from "./probe.ts";

export const agreedTable = [
  sql`CREATE TABLE IF NOT EXISTS ${own("agreed")} (
  name text PRIMARY KEY,
  value text NOT NULL,
  next text,
  since timestamptz NOT NULL DEFAULT clock_timestamp()
)`,
];

/** By the catalogs, which everybody may read: a table that is missing, or not for this user, would end the transaction. */
const rights = sql`SELECT has_table_privilege(c.oid, 'SELECT') AS read, has_table_privilege(c.oid, 'INSERT') AS write
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = ${own.schema} AND c.relname = 'agreed' AND has_schema_privilege(n.oid, 'USAGE')`;

const columns = sql`name, value, next, since::text AS mark`;

const agreedOf = (row: Record<string, unknown>): Agreed => ({
  value: String(row["value"]),
  next: typeof row["next"] === "string" ? row["next"] : undefined,
  mark: String(row["mark"]),
});

/** No right, or a session that may not write. */
const mayNot = new Set(["42501", "25006"]);

/** Everything that waits for, or has, a key's lock has inserted or updated: its table lock lasts as long as that of the row. */
const holdersOf = {
  "lock row": sql`l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.relation = (SELECT c.oid FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ${own.schema} AND c.relname = 'lock')`,
  "transaction advisory": sql`l.locktype = 'advisory'`,
} as const;

export const agreements: Agreements<SqlConnection> = {
  async read(connection) {
    const [may] = (await connection.query(rights)).rows;
    if (!isTrue(may?.["read"])) return { there: undefined, writable: false };
    const { rows } = await connection.query(sql`SELECT ${columns} FROM ${own("agreed")}`);
    const there = new Map(rows.map((row) => [String(row["name"]) as AgreedName, agreedOf(row)]));
    return { there, writable: isTrue(may?.["write"]) };
  },

  async write(connection, name, value) {
    try {
      await connection.query(
        sql`INSERT INTO ${own("agreed")} (name, value) VALUES (${name}::text, ${value}::text) ON CONFLICT (name) DO NOTHING`,
      );
      return true;
    } catch (error) {
      const { code } = (connection.unwrap?.(error) ?? error) as { code?: unknown };
      if (mayNot.has(String(code))) return false;
      // Where the default is a snapshot that lasts: somebody else has written it since.
      if (code === "40001") return true;
      throw error;
    }
  },

  async change(connection, name, { mark }, { value, next }) {
    const [row] = (
      await connection.query(
        sql`UPDATE ${own("agreed")} SET value = ${value}::text, next = ${next ?? null}::text, since = clock_timestamp()
  WHERE name = ${name}::text AND since = ${mark}::text::timestamptz RETURNING ${columns}`,
      )
    ).rows;
    return row && agreedOf(row);
  },

  async holders(connection, strategy) {
    const which = holdersOf[strategy as keyof typeof holdersOf];
    const { rows } = await connection.query(
      sql`SELECT DISTINCT ${sql.raw(sessionColumns)} FROM pg_catalog.pg_locks l
  LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
  WHERE l.granted AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
    AND l.pid IS DISTINCT FROM pg_backend_pid() AND ${which}`,
    );
    return rows.map(asHolder);
  },
};
