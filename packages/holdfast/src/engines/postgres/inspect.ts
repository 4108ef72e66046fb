import type { Capabilities } from "../../core/capabilities.ts";
import type { Row, SqlConnection } from "../../core/database.ts";
import type { LockView } from "../../core/inspect.ts";
import { sql } from "../../core/sql.ts";
import { isTrue } from "./probe.ts";

/**
 * One look at pg_locks: every advisory lock of this database, and whatever is waited for. pg_blocking_pids is asked
 * for waiters only, as it takes the lock manager's locks for each; their queue counts too, not only the holders.
 */
const question = sql.raw(`SELECT l.locktype AS kind, l.mode AS mode, l.granted AS granted, l.pid::text AS pid,
  coalesce(a.application_name, '') AS application, coalesce(a.state, 'unknown') AS state,
  (extract(epoch FROM a.xact_start) * 1000)::float8 AS since,
  CASE WHEN NOT l.granted THEN (extract(epoch FROM clock_timestamp() - l.waitstart) * 1000)::float8 END AS waiting,
  CASE WHEN NOT l.granted THEN array_to_string(pg_blocking_pids(l.pid), ',') END AS blockers,
  CASE l.locktype WHEN 'advisory' THEN CASE l.objsubid WHEN 1
      THEN 'bigint ' || ((l.classid::bigint << 32) | l.objid::bigint)::text
      ELSE 'int ' || l.classid::int4::text || ',' || l.objid::int4::text END
    WHEN 'relation' THEN l.relation::regclass::text
    WHEN 'tuple' THEN l.relation::regclass::text || ' ' || format('(%s,%s)', l.page, l.tuple)
    WHEN 'transactionid' THEN 'a row of transaction ' || l.transactionid::text ELSE l.locktype END AS name
  FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  WHERE l.pid <> pg_backend_pid() AND a.datname = current_database()
    AND (l.locktype = 'advisory' OR NOT l.granted)`);

const kinds: Readonly<Record<string, LockView["kind"]>> = {
  advisory: "advisory",
  relation: "table",
  tuple: "row",
  transactionid: "row",
};

/** "api [hf:image-upload:42]" says which key the session's lock is, if it has no more than one. */
const label = / \[hf:(.*?)(?: \+\d+)?\]?$/;

export async function inspect(connection: SqlConnection, _capabilities: Capabilities): Promise<LockView[]> {
  const { rows } = await connection.query(question);
  const advisory = Map.groupBy(
    rows.filter(({ kind }) => kind === "advisory"),
    ({ pid }) => String(pid),
  );
  return rows.map((row) => view(row, advisory.get(String(row.pid))?.length === 1));
}

/** `only`: its session has no other advisory lock, nor waits for one. */
function view(row: Row, only: boolean): LockView {
  const application = String(row.application);
  const kind = kinds[String(row.kind)] ?? "row";
  const named = kind === "advisory" && only ? label.exec(application)?.[1] : undefined;
  return {
    kind,
    name: named === undefined ? String(row.name) : `${named} (${String(row.name)})`,
    mode: String(row.mode),
    granted: isTrue(row.granted),
    session: {
      id: String(row.pid),
      application: application.replace(label, ""),
      state: String(row.state),
      since: row.since === null ? undefined : new Date(Number(row.since)),
    },
    waitingMs: row.waiting === null ? undefined : Number(row.waiting),
    blockedBy: row.blockers ? String(row.blockers).split(",") : [],
  };
}
