/**
 * Locks as rows of a table, one per key, for servers whose advisory locks are missing or lock nothing, and for those
 * who ask for them. Whoever holds a lock has its row locked until the end of the transaction.
 */
import type { SqlConnection, Wait } from "../../../seam/database.ts";
import type { Holder } from "../../../seam/errors.ts";
import type { LockRequest } from "../../../seam/key.ts";
import { type Names, type Statement, own, sql } from "../../../seam/sql.ts";
import { hexText } from "../dialect.ts";
import { allKept } from "../hidden.ts";
import { onPrimary } from "../primary.ts";
import { asHolder, sessionColumns } from "./holders.ts";
import { setLocal } from "../settings.ts";

export const lockRowTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("lock")} (
  id text PRIMARY KEY,
  name text NOT NULL,
  turn bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50)`,
];

/** What is left of a wait that began with the statement. */
export function left(wait: number): string {
  return `greatest(1, ${wait} OPERATOR(pg_catalog.-) (extract(epoch FROM pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) pg_catalog.statement_timestamp()) OPERATOR(pg_catalog.*) 1000)::int)::pg_catalog.text`;
}

/** Also covers the moments in which others make the table's file longer: with 1 ms 4 of 60 were refused for nothing. */
const nowaitMs = 20;

/**
 * One statement, whose rows are inserted (or, if they are there, locked by an update) in the order of the list. There
 * is no NOWAIT for an insert, which may meet another one that is not committed: the shortest timeout stands in for it.
 */
export function takingRows(
  locks: readonly LockRequest[],
  wait: Wait,
  names: readonly string[],
  called: Names,
): string {
  const patience = left(wait === "nowait" ? nowaitMs : wait);
  const values = locks.map(({ key }, i) => `(${hexText(key.id)}, ${hexText(names[i] ?? "")})`);
  return `WITH patience AS MATERIALIZED (SELECT pg_catalog.current_setting('lock_timeout') AS before),
  wanted AS (SELECT v.id, CASE WHEN ${setLocal("lock_timeout", patience)} IS NOT NULL THEN v.name END AS name
    FROM patience CROSS JOIN (VALUES ${values.join(", ")}) v (id, name)),
  taken AS (INSERT INTO ${called.own("lock")} AS l (id, name) SELECT id, name FROM wanted
    ON CONFLICT (id) DO UPDATE SET turn = l.turn OPERATOR(pg_catalog.+) 1 RETURNING id)
  SELECT ${setLocal("lock_timeout", "(SELECT before FROM patience)")} AS done FROM (SELECT pg_catalog.count(*) AS n FROM taken) c
  WHERE ${allKept("c.n", locks.length, called.own("lock"))}`;
}

/** Who has changed or locked a row has left a transaction's id on it. A row that is not committed yet says nothing. */
export async function rowHolders(
  connection: SqlConnection,
  locks: readonly LockRequest[],
): Promise<Holder[]> {
  const { rows } = await connection.query(
    sql`SELECT DISTINCT ${sql.raw(sessionColumns)} FROM ${own("lock")} r
      JOIN pg_catalog.pg_locks l ON l.locktype OPERATOR(pg_catalog.=) 'transactionid' AND l.granted AND l.transactionid OPERATOR(pg_catalog.=) r.xmax
      JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) l.pid
      WHERE l.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid() AND r.id OPERATOR(pg_catalog.=) ANY (ARRAY[${sql.raw(locks.map(({ key }) => hexText(key.id)).join(", "))}]) AND ${onPrimary}`,
  );
  return rows.map(asHolder);
}
