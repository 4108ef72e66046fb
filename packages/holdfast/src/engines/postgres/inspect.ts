import type { Capabilities } from "../../seam/capabilities.ts";
import type { Row, SqlConnection } from "../../seam/database.ts";
import type { LockView } from "../../seam/inspect.ts";
import { type Key, key, keyIn } from "../../seam/key.ts";
import { own as ours, sql } from "../../seam/sql.ts";
import { dialect, namesOf } from "./dialect.ts";
import { atPrimary, onPrimary } from "./primary.ts";
import { isTrue } from "./probe.ts";
import { safely } from "./search-path.ts";

/**
 * One look at pg_locks: every advisory lock of this database, and whatever is waited for. pg_blocking_pids is asked
 * for waiters only, as it takes the lock manager's locks for each; their queue counts too, not only the holders. Who is
 * the first to wait for a row has a lock of its own that says which.
 */
const question =
  sql.raw(`WITH seen AS MATERIALIZED (SELECT * FROM pg_catalog.pg_locks) SELECT l.locktype AS kind, l.mode AS mode, l.granted AS granted, l.pid::pg_catalog.text AS pid,
  coalesce(a.application_name, '') AS application, coalesce(a.state, 'unknown') AS state,
  (extract(epoch FROM a.xact_start) OPERATOR(pg_catalog.*) 1000)::pg_catalog.float8 AS since,
  CASE WHEN NOT l.granted THEN (extract(epoch FROM pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) l.waitstart) OPERATOR(pg_catalog.*) 1000)::pg_catalog.float8 END AS waiting,
  CASE WHEN NOT l.granted THEN pg_catalog.array_to_string(pg_catalog.pg_blocking_pids(l.pid), ',') END AS blockers,
  CASE WHEN NOT l.granted AND l.transactionid IS NOT NULL THEN
    (SELECT p.gid FROM pg_catalog.pg_prepared_xacts p WHERE p.transaction OPERATOR(pg_catalog.=) l.transactionid) END AS prepared,
  CASE WHEN l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.objsubid OPERATOR(pg_catalog.=) 1::smallint
      THEN pg_catalog.format('bigint %s', (l.classid::bigint OPERATOR(pg_catalog.<<) 32) OPERATOR(pg_catalog.|) l.objid::bigint)
    WHEN l.locktype OPERATOR(pg_catalog.=) 'advisory' THEN pg_catalog.format('int %s,%s', l.classid::int, l.objid::int)
    WHEN l.locktype OPERATOR(pg_catalog.=) 'relation' THEN l.relation::pg_catalog.regclass::pg_catalog.text
    WHEN l.locktype OPERATOR(pg_catalog.=) 'tuple' THEN pg_catalog.format('%s (%s,%s)', l.relation::pg_catalog.regclass, l.page, l.tuple)
    WHEN l.locktype OPERATOR(pg_catalog.=) 'transactionid' THEN coalesce((SELECT pg_catalog.format('%s (%s,%s)', t.relation::pg_catalog.regclass, t.page, t.tuple) FROM seen t
      WHERE t.pid OPERATOR(pg_catalog.=) l.pid AND t.locktype OPERATOR(pg_catalog.=) 'tuple' AND t.granted LIMIT 1), pg_catalog.format('a row of transaction %s', l.transactionid))
    ELSE l.locktype END AS name
  FROM seen l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) l.pid
  WHERE l.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid() AND a.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
    AND (l.locktype OPERATOR(pg_catalog.=) 'advisory' OR NOT l.granted) AND (SELECT ${atPrimary})`);

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
const queuesThere = sql`SELECT CASE WHEN pg_catalog.has_schema_privilege(oid, 'USAGE') THEN
      coalesce(pg_catalog.has_table_privilege(pg_catalog.to_regclass(${ours.text("queue")}), 'SELECT')
        AND pg_catalog.has_table_privilege(pg_catalog.to_regclass(${ours.text("queue_worker")}), 'SELECT')
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) l.relation WHERE l.mode OPERATOR(pg_catalog.=) 'AccessExclusiveLock'
          AND c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) ANY ('{queue,queue_worker}'::pg_catalog.name[])), false) END AS there
  FROM pg_catalog.pg_namespace n WHERE nspname OPERATOR(pg_catalog.=) ${ours.schema} AND ${onPrimary}`;

/** A worker's session says that it lives; a queue with a limit counts its jobs under a lock. */
const queueLocks = sql`SELECT 'bigint ' || w.lock::pg_catalog.text AS lock, 'queue ' || q.name || ': worker ' || w.id::pg_catalog.text AS name
    FROM ${ours("queue_worker")} w JOIN ${ours("queue")} q ON q.id = w.queue WHERE w.lock IS NOT NULL
  UNION ALL SELECT 'bigint ' || pg_catalog.hashtextextended(${ours.label("queue ")} || q.id, 0)::pg_catalog.text, 'queue ' || q.name || ': claims'
    FROM ${ours("queue")} q WHERE q.most IS NOT NULL`;

async function ofQueues(connection: SqlConnection): Promise<[string, string][]> {
  const [row] = (await connection.query(queuesThere)).rows;
  if (!isTrue(row?.there)) return [];
  const rows = await safely(connection, queueLocks);
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
