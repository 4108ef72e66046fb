import type { Capabilities } from "../../seam/capabilities.ts";
import type { Row, SqlConnection } from "../../seam/database.ts";
import type { LockView } from "../../seam/inspect.ts";
import { own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import { sleep } from "../../waiting/wait.ts";
import { lockName } from "./locks.ts";
import { heldBySessions, heldByTransactions, keysOf, ofHoldfast, orNone } from "./holders.ts";
import { type TableLock, fromMetadataLocks, fromProcesses } from "./metadata.ts";
import { onPrimary } from "./primary.ts";
import { type SessionList, type SessionRow, processes, sessionList, sessions } from "./sessions.ts";

export async function inspect(connection: SqlConnection, capabilities: Capabilities): Promise<LockView[]> {
  const list = sessionList(capabilities);
  const found =
    list === "performance_schema"
      ? await fromPerformanceSchema(connection)
      : await fromInnodb(connection, list);
  return withSessions(connection, found, list);
}

/** One lock or one wait, before its session is known. */
interface Sighting {
  readonly id: string;
  readonly kind: LockView["kind"];
  readonly name: string;
  readonly mode: string;
  readonly granted: boolean;
  readonly since: Date | undefined;
  readonly waitingMs: number | undefined;
  readonly blockedBy: readonly string[];
  /** The id of the key that it is a lock of. */
  readonly key?: string;
}

async function withSessions(
  connection: SqlConnection,
  found: readonly Sighting[],
  list: SessionList,
): Promise<LockView[]> {
  const ids = new Set(found.map(({ id }) => id));
  ids.delete(prepared);
  const known = await sessions(connection, [...ids], list);
  const unknown: SessionRow = { application: "", state: "unknown" };
  return found.map(({ id, since, kind, name, mode, granted, waitingMs, blockedBy }) => {
    const { application, state } =
      known.get(id) ?? (id === prepared ? { application: "", state: "prepared" } : unknown);
    return { kind, name, mode, granted, session: { id, application, state, since }, waitingMs, blockedBy };
  });
}

function time(value: unknown): Date | undefined {
  return value === null || value === undefined ? undefined : new Date(Number(value));
}

/**
 * Locks of rows (lock rows, and whatever is waited for), then those of GET_LOCK, which are metadata locks here. A lock of a
 * row that was written is made by whoever comes to wait for it, and bears that one's thread: that of a table, which every
 * writer has, is always the owner's own. How long a wait has lasted is told from the beginning of its statement: only
 * innodb_trx knows better, which is not always to be read (see sessionList).
 */
const ownerOf = (transaction: string) =>
  sql.raw(`(SELECT o.thread_id FROM performance_schema.data_locks o
      WHERE o.engine_transaction_id = ${transaction} AND o.lock_type = 'TABLE' LIMIT 1)`);
/** What has been prepared (XA) has no session any more, once that one has ended. */
const prepared = "prepared transaction";
const rowLocks = sql`SELECT t.processlist_id AS id, l.object_name AS tablename, l.index_name AS indexname, l.lock_mode AS mode,
    l.lock_status AS status, l.lock_data AS data,
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1000 - x.timer_wait / 1e9 AS since,
    s.timer_wait / 1e9 AS waiting,
    (SELECT GROUP_CONCAT(DISTINCT COALESCE(b.processlist_id, ${sql.raw(`'${prepared}'`)})) FROM performance_schema.data_lock_waits w
      LEFT JOIN performance_schema.threads b ON b.thread_id = ${ownerOf("w.blocking_engine_transaction_id")}
      WHERE w.requesting_engine_lock_id = l.engine_lock_id) AS blockers
  FROM performance_schema.data_locks l JOIN performance_schema.threads t ON t.thread_id = ${ownerOf("l.engine_transaction_id")}
  LEFT JOIN performance_schema.events_transactions_current x ON x.thread_id = t.thread_id AND x.state = 'ACTIVE'
  LEFT JOIN performance_schema.events_statements_current s ON s.thread_id = t.thread_id AND s.nesting_event_level = 0 AND s.end_event_id IS NULL
  WHERE ${onPrimary} AND l.object_schema = DATABASE() AND l.lock_type = 'RECORD' AND t.processlist_id <> CONNECTION_ID()
    AND (l.lock_status = 'WAITING' OR l.object_name = ${own.text("lock")}
      OR l.engine_lock_id IN (SELECT w.blocking_engine_lock_id FROM performance_schema.data_lock_waits w))`;

const namedLocks = sql`SELECT t.processlist_id AS id, m.object_name AS name, m.lock_status AS status,
    t.processlist_time AS seconds, t.processlist_db <=> DATABASE() AS here,
    (SELECT GROUP_CONCAT(DISTINCT b.processlist_id) FROM performance_schema.metadata_locks h
      JOIN performance_schema.threads b ON b.thread_id = h.owner_thread_id
      WHERE m.lock_status = 'PENDING' AND h.object_type = m.object_type AND h.object_name = m.object_name AND h.lock_status = 'GRANTED') AS blockers
  FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.thread_id = m.owner_thread_id
  WHERE ${onPrimary} AND m.object_type = 'USER LEVEL LOCK' AND t.processlist_id <> CONNECTION_ID()`;

const dirty = sql.raw("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED");

async function fromPerformanceSchema(connection: SqlConnection): Promise<Sighting[]> {
  const found = (await connection.query(rowLocks)).rows;
  const table = namesOf(connection).own("lock");
  const keys = await keyNames(
    connection,
    found.filter(({ tablename }) => tablename === table).map(({ data }) => String(data)),
  );
  const rows = found.map((row): Sighting => {
    const granted = row.status === "GRANTED";
    const lockRow = row.tablename === table;
    const data = String(row.data);
    return {
      id: String(row.id),
      kind: lockRow ? "lock row" : "row",
      name: (lockRow && keys.get(data)) || `${String(row.tablename)}[${data}]`,
      mode: String(row.mode),
      granted,
      since: time(row.since),
      waitingMs: granted || row.waiting === null ? undefined : Number(row.waiting),
      blockedBy: list(row.blockers),
      ...(lockRow && { key: idOf(data) }),
    };
  });
  const named = (await connection.query(namedLocks)).rows
    .filter(({ name, here }) => Number(here) === 1 || !ofHoldfast.test(String(name)))
    .map((row): Sighting => {
      const granted = row.status === "GRANTED";
      return {
        id: String(row.id),
        kind: "advisory",
        name: String(row.name),
        mode: "GET_LOCK",
        granted,
        since: undefined,
        waitingMs: granted ? undefined : Number(row.seconds) * 1000,
        blockedBy: list(row.blockers),
      };
    });
  const tables = (await fromMetadataLocks(connection)).map(ofTable);
  return behindSessions([...rows, ...tables, ...(await byKeys(connection, named))]);
}

function ofTable({ since, ...lock }: TableLock): Sighting {
  return { ...lock, kind: "table", since: time(since) };
}

/** Of the two locks of a key one is shown, for whoever has both: who has only the first waits for the row, as is told there. */
async function byKeys(connection: SqlConnection, named: readonly Sighting[]): Promise<Sighting[]> {
  const baseOf = ({ name }: Sighting) => ofHoldfast.exec(name)?.[1];
  const bases = [...new Set(named.map(baseOf).filter((base) => base !== undefined))];
  const keys = await keysOf(connection, bases);
  const held = new Set(
    named.filter(({ name }) => name.endsWith(":held")).map(({ id, name }) => `${id} ${name}`),
  );
  return named.flatMap((lock) => {
    const base = baseOf(lock);
    if (base === undefined) return [lock];
    const { id: key, name } = keys.get(base) ?? { id: "", name: base };
    const isOwners = held.has(`${lock.id} ${base}:held`);
    if (lock.granted && (lock.name !== base || !isOwners) && key !== "") return [];
    return [{ ...lock, name, key }];
  });
}

/** Whoever has locked the row of a key that a session has waits for that session, looking again and again. */
function behindSessions(locks: readonly Sighting[]): Sighting[] {
  const owners = new Map(
    locks
      .filter(({ kind, granted, key }) => kind === "advisory" && granted && key)
      .map(({ key, id }) => [key, id]),
  );
  return locks.map((lock) => {
    const owner = lock.kind === "lock row" && lock.granted ? owners.get(lock.key) : undefined;
    if (owner === undefined || owner === lock.id) return lock;
    return { ...lock, granted: false, blockedBy: [owner] };
  });
}

function list(value: unknown): string[] {
  return value === null || value === undefined || value === "" ? [] : String(value).split(",");
}

/**
 * Waits as information_schema has them, with who is in the way. Its tables are a copy that is renewed by whoever reads
 * it more than 100 ms after the last one did: so a wait that the server's status shows and the copy does not is
 * looked for once more.
 */
const waits = sql`SELECT r.trx_mysql_thread_id AS id, b.trx_mysql_thread_id AS blocker, l.lock_table AS tablename, l.lock_data AS data,
    l.lock_mode AS mode, h.lock_mode AS heldmode,
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', CONVERT_TZ(r.trx_started, @@session.time_zone, '+00:00')) / 1000 AS since,
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', CONVERT_TZ(b.trx_started, @@session.time_zone, '+00:00')) / 1000 AS heldsince,
    TIMESTAMPDIFF(MICROSECOND, r.trx_wait_started, SYSDATE(6)) / 1000 AS waiting
  FROM information_schema.innodb_lock_waits w
  JOIN information_schema.innodb_trx r ON r.trx_id = w.requesting_trx_id
  JOIN information_schema.innodb_trx b ON b.trx_id = w.blocking_trx_id
  JOIN information_schema.innodb_locks l ON l.lock_id = w.requested_lock_id
  JOIN information_schema.innodb_locks h ON h.lock_id = w.blocking_lock_id WHERE ${onPrimary}`;

const staleMs = 110;

const blockerOf = ({ blocker }: Row): string => (Number(blocker) === 0 ? prepared : String(blocker));

async function fromInnodb(connection: SqlConnection, list: SessionList): Promise<Sighting[]> {
  const { open, waiting: seen } = await transactionsNow(connection);
  // MySQL keeps such tables in performance_schema alone: when that is off, nobody knows who is in the way.
  const tells = list === "information_schema";
  let rows = seen.size === 0 || !tells ? [] : (await connection.query(waits)).rows;
  const unknown = () => [...seen.keys()].some((id) => !rows.some((row) => String(row.id) === id));
  if (tells && unknown()) {
    await sleep(staleMs);
    rows = (await connection.query(waits)).rows;
  }
  const [{ db } = { db: "" }] = (
    await connection.query(sql`SELECT DATABASE() AS db FROM DUAL WHERE ${onPrimary}`)
  ).rows;
  const prefix = `\`${String(db)}\`.`;
  const table = `${prefix}\`${namesOf(connection).own("lock")}\``;
  const waiting = rows.filter((row) => String(row.tablename).startsWith(prefix) && seen.has(String(row.id)));
  const keys = await keyNames(
    connection,
    waiting.filter((row) => row.tablename === table).map(({ data }) => String(data)),
  );
  const found: Sighting[] = [];
  for (const [id, group] of Map.groupBy(waiting, (row) => String(row.id))) {
    const row = group[0] as Row;
    const what = target(row, prefix, keys, row.tablename === table);
    const blockers = [...new Set(group.map(blockerOf))];
    found.push({
      ...what,
      id,
      mode: String(row.mode),
      granted: false,
      since: time(row.since),
      waitingMs: Number(row.waiting),
      blockedBy: blockers,
    });
    for (const each of group)
      if (!found.some((f) => f.granted && f.id === blockerOf(each) && f.name === what.name))
        found.push({
          ...what,
          id: blockerOf(each),
          mode: String(each.heldmode),
          granted: true,
          since: time(each.heldsince),
          waitingMs: undefined,
          blockedBy: [],
        });
  }
  // Of a wait that the copy has not got, only that it is there.
  for (const [id, lock] of seen)
    if (lock.table.startsWith(prefix) && !found.some((f) => !f.granted && f.id === id))
      found.push({
        id,
        kind: lock.table === table ? "lock row" : "row",
        name: lock.table.slice(prefix.length).replaceAll("`", ""),
        mode: lock.mode,
        granted: false,
        since: undefined,
        waitingMs: lock.waitingMs,
        blockedBy: [],
      });
  for (const { id: key, name, holder: id, since } of await heldByTransactions(connection, open))
    if (!found.some((f) => f.granted && f.id === id && f.name === name))
      found.push({
        id,
        kind: "lock row",
        name,
        mode: "X",
        granted: true,
        since,
        waitingMs: undefined,
        blockedBy: [],
        key,
      });
  const here = (await processes(connection, list)).filter((row) => row.db === db);
  const inside = found
    .filter(({ kind }) => kind === "row")
    .map(({ id, name }) => ({ id, table: name.replace(/\[.*$/s, "") }));
  const tables = (await fromProcesses(connection, here, inside)).map(ofTable);
  return [...found, ...tables, ...(await userLocks(connection, here))];
}

function target(
  row: Row,
  prefix: string,
  keys: ReadonlyMap<string, string>,
  lockRow: boolean,
): Pick<Sighting, "kind" | "name"> {
  const table = String(row.tablename).slice(prefix.length).replaceAll("`", "");
  const data = String(row.data);
  if (!lockRow) return { kind: "row", name: `${table}[${data}]` };
  return { kind: "lock row", name: keys.get(data) ?? `${table}[${data}]` };
}

/** Names of lock rows, by what the server writes of their ids. One that was locked for the first time ever is not committed yet. */
async function keyNames(
  connection: SqlConnection,
  written: readonly string[],
): Promise<ReadonlyMap<string, string>> {
  if (written.length === 0) return new Map();
  const ids = new Map(written.map((data) => [idOf(data), data]));
  await connection.query(dirty);
  const found = await orNone(
    connection,
    sql`SELECT id AS id, name AS name FROM ${own("lock")} WHERE ${onPrimary} AND id IN (${sql.join([...ids.keys()])})`,
  );
  return new Map(
    found.filter(({ name }) => name !== "").map(({ id, name }) => [ids.get(String(id)) ?? "", String(name)]),
  );
}

/** Bytes are written in hexadecimal. */
function idOf(data: string): string {
  return /^0x[0-9a-f]+$/i.test(data)
    ? Buffer.from(data.slice(2), "hex").toString()
    : data.replace(/^'|'$/g, "");
}

interface Wait {
  readonly table: string;
  readonly mode: string;
  readonly waitingMs: number | undefined;
}

interface Transactions {
  /** The connections that are in one. */
  readonly open: readonly string[];
  /** Waits for locks, by connection. */
  readonly waiting: ReadonlyMap<string, Wait>;
}

/** The transactions at this moment, from the report of InnoDB: the table innodb_trx may be an old copy. */
async function transactionsNow(connection: SqlConnection): Promise<Transactions> {
  const [row] = (await connection.query(sql.raw("SHOW ENGINE INNODB STATUS"))).rows;
  const report = String(row?.["Status"]);
  const open: string[] = [];
  const waiting = new Map<string, Wait>();
  for (const transaction of report.split(/^---TRANSACTION /m).slice(1)) {
    const id = /thread id (\d+)/.exec(transaction)?.[1];
    const wait =
      /TRX HAS BEEN WAITING (\d+) (us|SEC)[^\n]*\n[^\n]* of table (\S+) [^\n]*lock[_ ]mode ([^\n]*?) waiting/.exec(
        transaction,
      );
    if (id === undefined) continue;
    open.push(id);
    if (!wait) continue;
    const [, amount, unit, table, mode] = wait;
    waiting.set(id, {
      table: String(table),
      mode: String(mode),
      waitingMs: Number(amount) * (unit === "us" ? 0.001 : 1000),
    });
  }
  return { open, waiting };
}

/** A name that is written out, and a key of ours. */
const written = /\bGET_LOCK\s*\(\s*'([^'\\]*)'\s*,/i;
const ofKey = /\bGET_LOCK\s*\(.*\bSHA2\s*\(\s*CONCAT\s*\(\s*DATABASE\(\),\s*':',\s*'([^'\\]*)'/i;

/** The server does not say who has a lock of GET_LOCK, nor who waits for which: of our keys, and of a name, it can be asked. */
async function userLocks(connection: SqlConnection, here: readonly Row[]): Promise<Sighting[]> {
  const held = (await heldBySessions(connection)).map(({ id: key, name, holder: id }): Sighting => ({
    id,
    kind: "advisory",
    name,
    mode: "GET_LOCK",
    granted: true,
    since: undefined,
    waitingMs: undefined,
    blockedBy: [],
    key,
  }));
  for (const row of here) {
    if (row.state !== "User lock") continue;
    const info = String(row.info);
    const key = ofKey.exec(info)?.[1];
    const name = written.exec(info)?.[1];
    const asked = key === undefined ? name : lockName(key);
    const [found] =
      asked === undefined
        ? []
        : (await connection.query(sql`SELECT IS_USED_LOCK(${asked}) AS holder FROM DUAL WHERE ${onPrimary}`))
            .rows;
    const holder = found?.holder === null || found === undefined ? undefined : String(found.holder);
    const known = key === undefined ? undefined : await nameOfKey(connection, key);
    held.push({
      id: String(row.id),
      kind: "advisory",
      name: known ?? name ?? /GET_LOCK\((.*)/i.exec(info)?.[1]?.slice(0, 100) ?? "GET_LOCK",
      mode: "GET_LOCK",
      granted: false,
      since: undefined,
      waitingMs: Number(row.waited),
      blockedBy: holder === undefined ? [] : [holder],
      ...(key !== undefined && { key }),
    });
  }
  return held;
}

async function nameOfKey(connection: SqlConnection, id: string): Promise<string> {
  await connection.query(dirty);
  const [row] = await orNone(
    connection,
    sql`SELECT name AS name FROM ${own("lock")} WHERE ${onPrimary} AND id = ${id}`,
  );
  return String(row?.name || id);
}
