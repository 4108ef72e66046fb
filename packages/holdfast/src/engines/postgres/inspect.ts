import type { Capabilities } from "../../seam/capabilities.ts";
import type { Row, SqlConnection } from "../../seam/database.ts";
import type { LockView } from "../../seam/inspect.ts";
import { type Key, key, keyIn } from "../../seam/key.ts";
import { own as ours, sql } from "../../seam/sql.ts";
import { dialect, namesOf } from "./dialect.ts";
import { isTrue } from "./probe.ts";

/**
 * One look at pg_locks: every advisory lock of this database, and whatever is waited for. pg_blocking_pids is asked
 * for waiters only, as it takes the lock manager's locks for each; their queue counts too, not only the holders. Who is
 * the first to wait for a row has a lock of its own that says which.
 */
const question =
  sql.raw(`WITH seen AS MATERIALIZED (SELECT * FROM pg_locks) SELECT l.locktype AS kind, l.mode AS mode, l.granted AS granted, l.pid::text AS pid,
  coalesce(a.application_name, '') AS application, coalesce(a.state, 'unknown') AS state,
  (extract(epoch FROM a.xact_start) * 1000)::float8 AS since,
  CASE WHEN NOT l.granted THEN (extract(epoch FROM clock_timestamp() - l.waitstart) * 1000)::float8 END AS waiting,
  CASE WHEN NOT l.granted THEN array_to_string(pg_blocking_pids(l.pid), ',') END AS blockers,
  CASE WHEN NOT l.granted AND l.transactionid IS NOT NULL THEN
    (SELECT p.gid FROM pg_prepared_xacts p WHERE p.transaction = l.transactionid) END AS prepared,
  CASE l.locktype WHEN 'advisory' THEN CASE l.objsubid WHEN 1
      THEN 'bigint ' || ((l.classid::bigint << 32) | l.objid::bigint)::text
      ELSE 'int ' || l.classid::int4::text || ',' || l.objid::int4::text END
    WHEN 'relation' THEN l.relation::regclass::text
    WHEN 'tuple' THEN l.relation::regclass::text || ' ' || format('(%s,%s)', l.page, l.tuple)
    WHEN 'transactionid' THEN coalesce((SELECT t.relation::regclass::text || ' ' || format('(%s,%s)', t.page, t.tuple) FROM seen t
      WHERE t.pid = l.pid AND t.locktype = 'tuple' AND t.granted LIMIT 1), 'a row of transaction ' || l.transactionid::text)
    ELSE l.locktype END AS name
  FROM seen l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  WHERE l.pid <> pg_backend_pid() AND a.datname = current_database()
    AND (l.locktype = 'advisory' OR NOT l.granted)`);

const kinds: Readonly<Record<string, LockView["kind"]>> = {
  advisory: "advisory",
  relation: "table",
  tuple: "row",
  transactionid: "row",
};

/** "api [hf:image-upload:42 +2]": the first of three keys. Without the bracket at its end the server has cut it. */
const label = / \[hf:(.*?)(?: \(shared\))?(?: \+\d+)?(\])?$/;

/** Names of locks: a session's own word for one of its locks, else what is known of the lock from anybody. */
interface Names {
  readonly own: ReadonlyMap<string, { readonly lock: string; readonly text: string }>;
  readonly all: ReadonlyMap<string, string>;
}

export async function inspect(connection: SqlConnection, _capabilities: Capabilities): Promise<LockView[]> {
  const { rows } = await connection.query(question);
  const advisory = rows.filter(({ kind }) => kind === "advisory");
  const ofHoldfast = new Map(advisory.length > 0 ? await ofQueues(connection) : []);
  const { schema } = namesOf(connection);
  const own = new Map<string, { lock: string; text: string }>();
  const guessed = new Map<string, string>();
  const sure = new Map<string, string>();
  for (const [pid, locks] of Map.groupBy(advisory, (row) => String(row.pid))) {
    const found = label.exec(String(locks[0]?.application));
    if (!found) continue;
    const [, text = "", end] = found;
    const ids = locks.map(({ name }) => String(name));
    const certain = end === undefined ? undefined : ids.find((lock) => isOf(text, lock, schema));
    // What was cut or changed hashes to nothing: then it is the lock's if there is no other.
    const lock = certain ?? (ids.length === 1 && (end === undefined || isVague(text)) ? ids[0] : undefined);
    if (lock === undefined) continue;
    own.set(pid, { lock, text });
    (certain === undefined ? guessed : sure).set(lock, text);
  }
  const names = { own, all: new Map([...guessed, ...sure, ...ofHoldfast]) };
  return rows.map((row) => view(row, names, ofHoldfast));
}

/** Everything that could be read as a name was tried; these were never names of a hash, or have lost characters. */
function isVague(text: string): boolean {
  return (
    text.includes("?") || text.endsWith("...") || text.startsWith("hashtext") || colons(text) > mostColons
  );
}

const mostColons = 8;

function colons(text: string): number {
  return text.split(":").length - 1;
}

/**
 * Whether the label's text is the name of this lock. Parts are joined by colons and may hold some: each way to read it
 * is tried, 256 hashes at the most: of those who share our schema, and of those who have chosen none.
 */
function isOf(text: string, name: string, schema: string): boolean {
  if (text === name) return true;
  const count = colons(text);
  if (count > mostColons) return false;
  const pieces = text.split(":");
  for (let joints = 0; joints < 2 ** count; joints++) {
    const parts = [pieces[0] ?? ""];
    for (const [i, piece] of pieces.slice(1).entries()) {
      if ((joints >> i) & 1) parts.push(`${parts.pop()}:${piece}`);
      else parts.push(piece);
    }
    if (parts.includes("")) continue;
    const named = key(...(parts as [string, ...string[]]));
    if (isHash(named, name)) return true;
    if (schema !== dialect.names.schema && isHash(keyIn(schema, named), name)) return true;
  }
  return false;
}

function isHash({ form }: Key, name: string): boolean {
  return form.kind === "name" && name === `bigint ${form.hash}`;
}

/** Not while somebody has them for itself, or wants to: who looks at locks must not wait for one. */
const queuesThere = sql`SELECT CASE WHEN has_schema_privilege(oid, 'USAGE') THEN
      coalesce(has_table_privilege(to_regclass(${ours.text("queue")}), 'SELECT')
        AND has_table_privilege(to_regclass(${ours.text("queue_worker")}), 'SELECT')
        AND NOT EXISTS (SELECT FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE l.mode = 'AccessExclusiveLock'
          AND c.relnamespace = n.oid AND c.relname IN ('queue', 'queue_worker')), false) END AS there
  FROM pg_namespace n WHERE nspname = ${ours.schema}`;

/** A worker's session says that it lives; a queue with a limit counts its jobs under a lock. */
const queueLocks = sql`SELECT 'bigint ' || w.lock::text AS lock, 'queue ' || q.name || ': worker ' || w.id::text AS name
    FROM ${ours("queue_worker")} w JOIN ${ours("queue")} q ON q.id = w.queue WHERE w.lock IS NOT NULL
  UNION ALL SELECT 'bigint ' || hashtextextended(${ours.label("queue ")} || q.id, 0)::text, 'queue ' || q.name || ': claims'
    FROM ${ours("queue")} q WHERE q.most IS NOT NULL`;

async function ofQueues(connection: SqlConnection): Promise<[string, string][]> {
  const [row] = (await connection.query(queuesThere)).rows;
  if (!isTrue(row?.there)) return [];
  const { rows } = await connection.query(queueLocks);
  return rows.map(({ lock, name }) => [String(lock), String(name)]);
}

function view(row: Row, { own, all }: Names, ofHoldfast: ReadonlyMap<string, string>): LockView {
  const application = String(row.application);
  const kind = kinds[String(row.kind)] ?? "row";
  const name = String(row.name);
  const mine = own.get(String(row.pid));
  const named =
    kind === "advisory"
      ? (ofHoldfast.get(name) ?? (mine?.lock === name ? mine.text : all.get(name)))
      : undefined;
  // A transaction that was prepared (two-phase commit) has no session any more.
  const blocker = (pid: string) => (pid === "0" ? `prepared ${String(row.prepared ?? "transaction")}` : pid);
  return {
    kind,
    name: named === undefined || named === name ? name : `${named} (${name})`,
    mode: String(row.mode),
    granted: isTrue(row.granted),
    session: {
      id: String(row.pid),
      // A label that is on none of the session's locks is still worth reading.
      application: mine ? application.replace(label, "") : application,
      state: String(row.state),
      since: row.since === null ? undefined : new Date(Number(row.since)),
    },
    waitingMs: row.waiting === null ? undefined : Number(row.waiting),
    blockedBy: row.blockers ? String(row.blockers).split(",").map(blocker) : [],
  };
}
