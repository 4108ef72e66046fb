/**
 * What became of a transaction whose COMMIT was never answered.
 *
 * The server knows transactions by their id, but an id is not enough. After a failover it may be another transaction's,
 * hence the timeline. And after a crash the ids whose WAL had not been flushed are handed out again, on the same
 * timeline, also if a single backend was killed and the postmaster stayed: asked about ours, the server then speaks of
 * somebody else's. (Seen: 6 of 6 on 15, 3 of 4 on 18.) Crash recovery throws the statistics away, and an orderly restart
 * keeps them, so the moment at which they began tells of a crash in between.
 */
import type { Capabilities } from "../../../seam/capabilities.ts";
import type { Outcome, SqlConnection } from "../../../seam/database.ts";
import { sql } from "../../../seam/sql.ts";
import { isTrue, systemOf } from "../probe.ts";

/** The part of a WAL file's name that changes with a failover. */
const timeline = "pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8)";

/** No privilege is needed, and it costs 0.4 µs; but before 15 a file is read for it. NULL is no witness. */
const witness = "extract(epoch FROM pg_catalog.pg_stat_get_bgwriter_stat_reset_time())";

const naming = (...more: string[]) =>
  `CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN pg_catalog.concat_ws('/', pg_catalog.pg_current_xact_id()::pg_catalog.text, ${[timeline, ...more].join(", ")}) END AS xid`;

/**
 * Names the transaction, for whoever must ask later what became of it. The id is assigned after the wait, so that a
 * waiter does not hold back what vacuum may clean. A replica has none to give.
 */
export const xid = naming(witness);
const xidAlone = naming();

export function xidOn({ details }: Capabilities): string {
  return details?.["witness"] ? xid : xidAlone;
}

/** Of sessions: none lives through a crash, so that once is enough. */
const witnesses = new WeakMap<object, string>();

/** Before 15, where the session is known to be our own: what the transaction's own statement did not say. */
async function witnessOf(connection: SqlConnection, { details }: Capabilities): Promise<string | undefined> {
  const { session } = connection;
  if (!session || !details?.["direct"]) return undefined;
  const known = witnesses.get(session);
  if (known !== undefined) return known;
  const [row] = (await connection.query(sql.raw(`SELECT ${witness}::pg_catalog.text AS witness`))).rows;
  if (typeof row?.witness !== "string") return undefined;
  witnesses.set(session, row.witness);
  return row.witness;
}

/** From what the opening brought. Undefined: nobody could tell what became of it. */
export async function identityOf(
  connection: SqlConnection,
  found: unknown,
  capabilities: Capabilities,
): Promise<string | undefined> {
  if (typeof found !== "string") return undefined;
  const { details } = capabilities;
  // A node of Citus may have committed what the coordinator has not.
  if (details?.["citus"]) return undefined;
  const [id, line, inStatement] = found.split("/");
  const seen = details?.["witness"] ? inStatement : await witnessOf(connection, capabilities);
  return seen === undefined ? undefined : [id, line, seen, details?.["system"] ?? ""].join("/");
}

/**
 * Nothing of a standby. The id that the question itself is given is above all that were given before: what is not below
 * it has not been used, in the history that the server went on with. (pg_xact_status would throw.)
 */
const question = (
  id: string | undefined,
) => sql`SELECT ${sql.raw(timeline)} AS line, ${sql.raw(witness)}::pg_catalog.text AS witness,
  CASE WHEN ${id}::pg_catalog.text::pg_catalog.xid8 OPERATOR(pg_catalog.>=) pg_catalog.pg_current_xact_id() THEN 'unused' ELSE pg_catalog.pg_xact_status(${id}::pg_catalog.text::pg_catalog.xid8) END AS status`;

export async function outcome(connection: SqlConnection, identity: string): Promise<Outcome> {
  const [id, line = "", seen, system] = identity.split("/");
  const [where] = (await connection.query(sql.raw("SELECT pg_catalog.pg_is_in_recovery() AS standby"))).rows;
  if (isTrue(where?.standby)) return "unknown";
  const [row] = (await connection.query(question(id))).rows;
  const { line: lineNow, witness: seenNow, status } = (row ?? {}) as Record<string, unknown>;
  const said =
    status === "committed" || status === "aborted" || status === "in progress" ? status : undefined;
  if (lineNow === line && seenNow === seen) return said ?? "unknown";
  // Statistics can be reset by hand, too: this may still be our own.
  if (said === "in progress") return said;
  if (typeof seenNow !== "string" || system === "" || (await systemOf(connection)) !== system)
    return "unknown";
  // An old primary that is still there knows nothing of what came after it.
  if (lineNow !== line) return String(lineNow) > line ? "ended" : "unknown";
  // Had ours been kept, nobody else could have been given its id.
  return said === "committed" ? "ended" : "aborted";
}
