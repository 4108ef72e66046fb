/** Who waits for whom at this moment. */
import type { Row, SqlConnection } from "../../seam/database.ts";
import { UsageError } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import { sleep } from "../../waiting/wait.ts";
import { processes } from "./sessions.ts";

interface Client {
  readonly id: string;
  readonly state: string;
  readonly info: string;
}

/** Ids of those that wait, and of those they wait for. */
type Waits = ReadonlyMap<string, ReadonlySet<string>>;

const server = sql.raw("SELECT VERSION() AS version, @@performance_schema AS listed");

export async function waiting(
  connection: SqlConnection,
  ids: readonly string[],
): Promise<ReadonlyMap<string, readonly string[]>> {
  const from = await listOf(connection);
  const all = (await processes(connection, from)).map(clientOf);
  const asked = all.filter(({ id }) => ids.includes(id));
  if (asked.length === 0) return new Map();
  const found =
    from === "information_schema"
      ? await fromStatus(connection, all, asked)
      : await fromPerformanceSchema(connection);
  return new Map(
    asked.flatMap(({ id }) => {
      const blockers = [...(found.get(id) ?? [])].filter((each) => each !== id);
      return blockers.length > 0 ? [[id, blockers] as const] : [];
    }),
  );
}

async function listOf(connection: SqlConnection): Promise<"information_schema" | "performance_schema"> {
  const [row] = (await connection.query(server)).rows;
  if (/mariadb/i.test(String(row?.["version"]))) return "information_schema";
  if (Number(row?.["listed"]) === 1) return "performance_schema";
  throw new UsageError(
    "explore: MySQL shows who waits for whom in performance_schema alone, which is OFF: set performance_schema = ON in my.cnf",
  );
}

/** Sessions as people know them. */
export async function describe(connection: SqlConnection, ids: readonly string[]): Promise<string[]> {
  const rows = await processes(connection, await listOf(connection), ids);
  return rows.map(({ id, user, host, command, state, info }) =>
    [
      `session ${String(id)} of ${String(user)}@${String(host)}`,
      String(state || command),
      ...(info ? [`its statement: ${String(info).replaceAll(/\s+/g, " ").slice(0, 200)}`] : []),
    ].join(", "),
  );
}

function clientOf({ id, state, info }: Row): Client {
  return { id: String(id), state: String(state ?? ""), info: String(info ?? "") };
}

/**
 * Locks of rows; locks of GET_LOCK and of definitions, where those that wait are in the way of later ones as well. A lock of a
 * row that was written is made by whoever comes to wait for it, and bears its thread: that of a table is always the
 * owner's own.
 */
const edges =
  sql.raw(`SELECT r.processlist_id AS id, b.processlist_id AS blocker FROM performance_schema.data_lock_waits w
    JOIN performance_schema.threads r ON r.thread_id = w.requesting_thread_id
    JOIN performance_schema.data_locks l ON l.engine_transaction_id = w.blocking_engine_transaction_id AND l.lock_type = 'TABLE'
    JOIN performance_schema.threads b ON b.thread_id = l.thread_id
  UNION SELECT r.processlist_id AS id, b.processlist_id AS blocker FROM performance_schema.metadata_locks m
    JOIN performance_schema.metadata_locks h ON h.object_type = m.object_type AND h.object_schema <=> m.object_schema
      AND h.object_name <=> m.object_name AND h.owner_thread_id <> m.owner_thread_id
      AND (h.lock_status = 'GRANTED' OR m.object_type <> 'USER LEVEL LOCK')
    JOIN performance_schema.threads r ON r.thread_id = m.owner_thread_id
    JOIN performance_schema.threads b ON b.thread_id = h.owner_thread_id
  WHERE m.lock_status = 'PENDING'`);

async function fromPerformanceSchema(connection: SqlConnection): Promise<Waits> {
  const { rows } = await connection.query(edges);
  const found = new Map<string, Set<string>>();
  for (const { id, blocker } of rows)
    found.set(String(id), (found.get(String(id)) ?? new Set()).add(String(blocker)));
  return found;
}

/**
 * MariaDB's tables of locks are a copy that is not renewed as long as it is read more often than every 100 ms. Its
 * report of InnoDB shows a wait at once (measured: within 3 ms, for 0.5 ms), but not for whom: it is taken to be everybody
 * who has locked something.
 */
async function fromStatus(
  connection: SqlConnection,
  all: readonly Client[],
  asked: readonly Client[],
): Promise<Waits> {
  const [row] = (await connection.query(sql.raw("SHOW ENGINE INNODB STATUS"))).rows;
  const { waiters, holders } = transactions(String(row?.["Status"]));
  const found = new Map<string, ReadonlySet<string>>(waiters.map((id) => [id, holders]));
  for (const client of asked)
    if (waitsForServer(client)) found.set(client.id, await holdersOf(connection, client, all));
  return found;
}

function transactions(report: string): { waiters: string[]; holders: ReadonlySet<string> } {
  const waiters: string[] = [];
  const holders = new Set<string>();
  for (const transaction of report.split(/^---TRANSACTION /m).slice(1)) {
    const id = /thread id (\d+)/.exec(transaction)?.[1];
    if (id === undefined) continue;
    if (/^-+ TRX HAS BEEN WAITING /m.test(transaction)) waiters.push(id);
    if (/\b[1-9]\d* lock struct/.test(transaction)) holders.add(id);
  }
  return { waiters, holders };
}

/** For GET_LOCK, or for a lock of a definition or of the whole server. */
function waitsForServer({ state }: Client): boolean {
  return state === "User lock" || /^Waiting for .*\b(lock|flush)$/.test(state);
}

/** A name that is written out. */
const namedLock = /\bGET_LOCK\s*\(\s*'([^'\\]*)'\s*,/gi;

/** The server does not say who has it. It can be asked for a lock of GET_LOCK, if its name is known. */
async function holdersOf(
  connection: SqlConnection,
  client: Client,
  all: readonly Client[],
): Promise<ReadonlySet<string>> {
  const names = client.state === "User lock" ? [...client.info.matchAll(namedLock)] : [];
  if (names.length === 1) {
    const asking = sql`SELECT IS_USED_LOCK(${names[0]?.[1]}) AS holder`;
    const holder = (await connection.query(asking)).rows[0]?.["holder"];
    return new Set(holder === null || holder === undefined ? [] : [String(holder)]);
  }
  // Else it is anybody; but whoever has just been given it may not have woken up yet.
  await sleep(wakeMs);
  const again = (await processes(connection, "information_schema")).map(clientOf);
  const still = again.some(({ id, state }) => id === client.id && state === client.state);
  return new Set(still ? all.map(({ id }) => id) : []);
}

const wakeMs = 3;
