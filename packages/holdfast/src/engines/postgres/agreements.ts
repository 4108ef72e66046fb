import type { Agreed, AgreedName, Agreements } from "../../seam/agreements.ts";
import type { SqlConnection } from "../../seam/database.ts";
import { own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import { assertShown } from "./hidden.ts";
import { asHolder, sessionColumns } from "./locks/holders.ts";
import { mapEpoch } from "./map.ts";
import { onPrimary } from "./primary.ts";
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
const rights = sql`SELECT pg_catalog.has_schema_privilege(n.oid, 'USAGE') AS use, pg_catalog.has_table_privilege(c.oid, 'SELECT') AS read, pg_catalog.has_table_privilege(c.oid, 'INSERT') AS write,
  pg_catalog.row_security_active(c.oid) AS hidden
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
  WHERE n.nspname OPERATOR(pg_catalog.=) ${own.schema} AND c.relname OPERATOR(pg_catalog.=) 'agreed' AND ${onPrimary}`;

const columns = sql`name, value, next, since::pg_catalog.text AS mark`;

const agreedOf = (row: Record<string, unknown>): Agreed => ({
  value: String(row["value"]),
  next: typeof row["next"] === "string" ? row["next"] : undefined,
  mark: String(row["mark"]),
});

/** No right, or a session that may not write. */
const mayNot = new Set(["42501", "25006"]);

/** Everything that waits for, or has, a key's lock has inserted or updated: its table lock lasts as long as that of the row. */
const holdersOf = {
  "lock row": sql`l.locktype OPERATOR(pg_catalog.=) 'relation' AND l.mode OPERATOR(pg_catalog.=) 'RowExclusiveLock' AND l.relation OPERATOR(pg_catalog.=) (SELECT c.oid FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace WHERE n.nspname OPERATOR(pg_catalog.=) ${own.schema} AND c.relname OPERATOR(pg_catalog.=) 'lock')`,
  "transaction advisory": sql`l.locktype OPERATOR(pg_catalog.=) 'advisory'`,
} as const;

export const agreements: Agreements<SqlConnection> = {
  async read(connection) {
    const [may] = (await connection.query(rights)).rows;
    if (!may) return { there: undefined, writable: false };
    const { own: written, schema } = namesOf(connection);
    const lacking = [
      ...(isTrue(may["use"]) ? [] : [`USAGE on the schema ${schema}`]),
      ...(isTrue(may["read"]) ? [] : [`SELECT on ${written("agreed")}`]),
    ];
    if (lacking.length > 0) return { there: undefined, writable: false, lacking };
    assertShown(connection, isTrue(may["hidden"]), "agreed");
    const { rows } = await connection.query(sql`SELECT ${columns} FROM ${own("agreed")} WHERE ${onPrimary}`);
    const there = new Map(rows.map((row) => [String(row["name"]) as AgreedName, agreedOf(row)]));
    return { there, writable: isTrue(may["write"]) };
  },

  async write(connection, name, value) {
    try {
      await connection.query(
        sql`INSERT INTO ${own("agreed")} (name, value) VALUES (${name}::pg_catalog.text, ${value}::pg_catalog.text) ON CONFLICT (name) DO NOTHING`,
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
    // Asked for before: Citus returns nothing that depends on the session, such as a time as text.
    const [now] = (await connection.query(sql`SELECT pg_catalog.clock_timestamp()::pg_catalog.text AS mark`))
      .rows;
    const changedAt = String(now?.["mark"]);
    const { rows } = await connection.query(
      sql`UPDATE ${own("agreed")} SET value = ${value}::pg_catalog.text, next = ${next ?? null}::pg_catalog.text, since = ${changedAt}::pg_catalog.text::pg_catalog.timestamptz
  WHERE name OPERATOR(pg_catalog.=) ${name}::pg_catalog.text AND since OPERATOR(pg_catalog.=) ${mark}::pg_catalog.text::pg_catalog.timestamptz RETURNING name`,
    );
    return rows.length > 0 ? { value, next, mark: changedAt } : undefined;
  },

  async holders(connection, strategy) {
    const which = holdersOf[strategy as keyof typeof holdersOf];
    const { rows } = await connection.query(
      sql`SELECT DISTINCT ${sql.raw(sessionColumns)} FROM pg_catalog.pg_locks l
  LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) l.pid
  WHERE l.granted AND l.database OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database())
    AND (l.pid IS NULL OR l.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()) AND ${which} AND ${onPrimary}`,
    );
    return rows.map(asHolder);
  },

  map: mapEpoch,
};
