/** Locks of sessions as the server shows them, GET_LOCK of a hash, told by the names of their keys. */
import type { SqlConnection } from "../../seam/database.ts";
import { own, sql } from "../../seam/sql.ts";
import { lockName, heldName } from "./locks.ts";
import { onPrimary } from "./primary.ts";
import { failureOf } from "./waits.ts";

export interface KnownKey {
  readonly id: string;
  readonly name: string;
}

/** A key's two locks: whoever queues up for it has the first one, whoever has it has both. */
export const ofHoldfast = /^(holdfast:[0-9a-f]{40})(:held)?$/;

/** A row keeps its name for ever, and to find it all of them have to be hashed. */
const known = new Map<string, KnownKey>();
const most = 10_000;

export async function keysOf(
  connection: SqlConnection,
  locks: readonly string[],
): Promise<ReadonlyMap<string, KnownKey>> {
  const missing = locks.filter((lock) => !known.has(lock));
  if (missing.length > 0) {
    const wanted = sql.join(missing);
    const rows = await orNone(
      connection,
      sql`SELECT ${lockName(sql.raw("id"))} AS lockname, id AS id, name AS name FROM ${own("lock")}
        WHERE ${onPrimary} AND ${lockName(sql.raw("id"))} IN (${wanted})`,
    );
    const [migrate] = await orNone(connection, sql`SELECT ${lockName("migrate")} AS lockname`);
    if (known.size > most) known.clear();
    if (migrate) known.set(String(migrate.lockname), { id: "", name: "migration of Holdfast's tables" });
    for (const row of rows)
      known.set(String(row.lockname), { id: String(row.id), name: String(row.name) || String(row.id) });
  }
  return new Map(locks.flatMap((lock) => (known.has(lock) ? [[lock, known.get(lock) as KnownKey]] : [])));
}

export interface HeldKey extends KnownKey {
  readonly holder: string;
  readonly since?: Date | undefined;
}

/** More rows than this are not looked through: then those are left out that nobody waits for. */
const mostRows = 200_000;

async function isSmall(connection: SqlConnection): Promise<boolean> {
  const { rows } = await connection.query(
    sql`SELECT table_rows AS n FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ${own.text("lock")} AND ${onPrimary}`,
  );
  return rows.length > 0 && Number(rows[0]?.n) <= mostRows;
}

/** Which sessions have which keys, where the server has no list of the locks of GET_LOCK: each key is asked for. */
export async function heldBySessions(connection: SqlConnection): Promise<HeldKey[]> {
  if (!(await isSmall(connection))) return [];
  const rows = await orNone(
    connection,
    sql`SELECT id AS id, name AS name, IS_USED_LOCK(${heldName(sql.raw("id"))}) AS holder FROM ${own("lock")} WHERE ${onPrimary} HAVING holder IS NOT NULL`,
  );
  return rows.map(({ id, name, holder }) => ({
    id: String(id),
    name: String(name) || String(id),
    holder: String(holder),
  }));
}

const dirty = sql.raw("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED");

/**
 * Returns which of the connections that are in a transaction hold which keys, on servers that list a lock only while
 * somebody waits for it. A count that is ahead of the committed one, which is read later, was written by an open transaction.
 * A row that was just inserted has no holder yet: its 0 is also the thread id that the server shows for transactions
 * without a session.
 */
export async function heldByTransactions(
  connection: SqlConnection,
  open: readonly string[],
): Promise<HeldKey[]> {
  if (open.length === 0 || !(await isSmall(connection))) return [];
  await connection.query(dirty);
  const there = await orNone(
    connection,
    sql`SELECT id AS id, name AS name, turn AS turn, holder AS holder, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', since) AS since
      FROM ${own("lock")} WHERE ${onPrimary} AND holder > 0 AND holder IN (${sql.join(open.map(Number))})`,
  );
  if (there.length === 0) return [];
  const committed = await connection.query(
    sql`SELECT id AS id, turn AS turn FROM ${own("lock")} WHERE ${onPrimary} AND id IN (${sql.join(there.map(({ id }) => String(id)))})`,
  );
  const turns = new Map(committed.rows.map(({ id, turn }) => [String(id), Number(turn)]));
  return there
    .filter(({ id, turn }) => Number(turn) > (turns.get(String(id)) ?? 0))
    .map(({ id, name, holder, since }) => ({
      id: String(id),
      name: String(name) || String(id),
      holder: String(holder),
      since: since === null ? undefined : new Date(Number(since) / 1000),
    }));
}

/** MySQL cannot always list its transactions, see sessionList; and the table, or a column of it, may be denied to this user. */
const unread = new Set([3854, 1142, 1143]);

/** A database that was not migrated has no such locks; and what they are called is not worth a failure. */
export async function orNone(connection: SqlConnection, statement: ReturnType<typeof sql>) {
  try {
    return (await connection.query(statement)).rows;
  } catch (error) {
    if (failureOf(connection, error) === "schema-missing") return [];
    const { errno } = (connection.unwrap?.(error) ?? error) as { errno?: unknown };
    if (unread.has(Number(errno))) return [];
    throw error;
  }
}
