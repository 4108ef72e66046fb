/**
 * A lock of a transaction is a row of `holdfast_lock`, locked until COMMIT by the server itself, in our own
 * transactions and in joined ones alike, so that these exclude each other. A lock of a session is GET_LOCK, which
 * lasts beyond transactions; a second one, taken while the row is locked, says that it is held, so that transactions
 * wait for it too.
 *
 * GET_LOCK is not used for transactions: released before COMMIT is acknowledged it lets 101 of 100 through, and
 * nobody but the caller knows when a joined transaction has been committed.
 */
import { type Capabilities, isSupported } from "../../seam/capabilities.ts";
import type { LockGrant, LockCall, Open, SessionLocks, SqlConnection, Wait } from "../../seam/database.ts";
import {
  DeadlockError,
  type Holder,
  NotInTransactionError,
  ReplicaError,
  SchemaMissingError,
  SerializationError,
  UnsupportedError,
} from "../../seam/errors.ts";
import type { LockRequest } from "../../seam/key.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import { sleep } from "../../waiting/wait.ts";
import { isReplica } from "./errors.ts";
import { onPrimary } from "./primary.ts";
import { type Note, asHolders } from "./sessions.ts";
import { bounded, briefly, failureOf, isIdle, isMissing, patiently } from "./waits.ts";

const granted: LockGrant = { granted: true };

export function explain(connection: SqlConnection, error: unknown): unknown {
  const failure = failureOf(connection, error);
  if (failure === "schema-missing")
    return new SchemaMissingError(`The table ${namesOf(connection).own("lock")}`, error);
  if (failure !== "read-only") return error;
  // Another one than was asked first, behind the same address, or one that has been a primary until now.
  return isReplica(connection.unwrap?.(error) ?? (error as object))
    ? new ReplicaError(error)
    : new UnsupportedError(readOnlyLock, error);
}

export const readOnlyLock =
  "A lock in a read-only transaction: here a lock is a row, and is written to. Leave `readOnly` out.";

export function lock(connection: SqlConnection, call: LockCall): Promise<LockGrant> {
  return takeRows(connection, call);
}

/** `opening`: the isolation of a transaction in which nothing has been read yet. */
export async function takeRows(
  connection: SqlConnection,
  { locks, wait, names, capabilities, joined, signal }: LockCall,
  opening?: Open["isolation"],
): Promise<LockGrant> {
  const patience = patienceOf(wait);
  // 1205 undoes the statement only (innodb_rollback_on_timeout=0): the transaction, and what it locked, is still there.
  const usable = capabilities.details?.["rollbackOnTimeout"] !== true;
  for (const [i, request] of locks.entries()) {
    try {
      const refusal =
        (await lockRow(connection, request, names[i] ?? "", patience, opening)) ??
        (await waitForSession(connection, request, patience, capabilities, joined, signal));
      if (refusal)
        return { granted: false, reason: patience.nowait ? "busy" : "timeout", usable, ...refusal };
    } catch (error) {
      throw explain(connection, error);
    }
  }
  return granted;
}

interface Patience {
  readonly nowait: boolean;
  left(): number;
}

function patienceOf(wait: Wait): Patience {
  const until = performance.now() + (wait === "nowait" ? 0 : wait);
  return { nowait: wait === "nowait", left: () => until - performance.now() };
}

type Refusal = { readonly cause?: unknown } | undefined;

/**
 * Locks the row, which may have to be made. What is free, and there, is had without a bounded wait, which costs two
 * round trips more; but only where a row that is missing leaves no gap locked: others that miss their rows in the
 * same gap could not insert them.
 */
async function lockRow(
  connection: SqlConnection,
  { key: { id } }: LockRequest,
  name: string,
  patience: Patience,
  opening?: Open["isolation"],
): Promise<Refusal> {
  let there = false;
  if (patience.nowait || opening === "read committed") {
    const locking = sql`SELECT turn FROM ${own("lock")} WHERE id = ${id} FOR UPDATE`;
    try {
      there = (await connection.query(sql`${locking} NOWAIT`)).rows.length > 0;
    } catch (error) {
      if (failureOf(connection, error) !== "lock-timeout") throw error;
      if (patience.nowait) return { cause: error };
      // Not by INSERT: if somebody has just made the row and takes it back, each of those keeps the gap, and two are a deadlock.
      const waited = await patiently(connection, Math.max(1, patience.left()), () =>
        connection.query(locking),
      );
      if (waited.over) return { cause: waited.cause };
      there = waited.result.rows.length > 0;
    }
  }
  if (!there) {
    // Takes an exclusive lock on the row whether it was there or not, with nothing read before: no gap is locked.
    const insert = sql`INSERT INTO ${own("lock")} (id, name) VALUES (${id}, ${name}) ON DUPLICATE KEY UPDATE turn = turn`;
    const left = patience.nowait ? 0 : Math.max(1, patience.left());
    const waited = await patiently(connection, left, () => connection.query(insert));
    if (waited.over) return { cause: waited.cause };
  }
  if (opening === undefined) await assertFresh(connection, id, name);
  return undefined;
}

/**
 * A REPEATABLE READ transaction that has read something sees the world of that read. Whoever held the lock before
 * us has counted `turn` up: if our snapshot shows an older count than the row itself, it also hides what they wrote.
 * `@@transaction_isolation` would be no proof, as it does not show what SET TRANSACTION chose.
 */
async function assertFresh(connection: SqlConnection, id: string, name: string): Promise<void> {
  const seen = (await connection.query(sql`SELECT turn FROM ${own("lock")} WHERE id = ${id}`)).rows[0]?.turn;
  const current = (await connection.query(sql`SELECT turn FROM ${own("lock")} WHERE id = ${id} FOR UPDATE`))
    .rows[0]?.turn;
  if (String(seen) === String(current)) return;
  throw new SerializationError(
    `The transaction had read something before it took lock ${name || id}, and its snapshot does not show what the last ` +
      `holder wrote. Take the lock first, or open the transaction as READ COMMITTED; then run it again.`,
  );
}

/** Hashed: at most 64 characters are allowed, case is ignored, and names are shared by all databases of the server. */
export function lockName(id: string | Statement): Statement {
  return sql`CONCAT('holdfast:', LEFT(SHA2(CONCAT(DATABASE(), ':', ${id}), 256), 40))`;
}

/** Held by a session that has not only queued up for the lock, but has it: no transaction held the row then. */
export function heldName(id: string | Statement): Statement {
  return sql`CONCAT(${lockName(id)}, ':held')`;
}

/** A lock that others take by a name of their own: there is no row for it. */
export const isNamed = ({ key }: LockRequest): boolean => key.form.kind === "getLock";

/** What a session has of a lock, the last first: of one that others take by this very name, that alone. */
function sessionNames({ key: { form, id } }: LockRequest): readonly Statement[] {
  return form.kind === "getLock" ? [sql`${form.lock}`] : [heldName(id), lockName(id)];
}

/** Counts the turn, and says who has it. */
export const counted = sql.raw("turn = turn + 1, holder = CONNECTION_ID(), since = UTC_TIMESTAMP(3)");

/**
 * With the row locked, so that no session can become the holder meanwhile. The same statement counts the turn, as it
 * is the last one.
 */
async function waitForSession(
  connection: SqlConnection,
  request: LockRequest,
  patience: Patience,
  { sessionLocks }: Capabilities,
  joined: boolean,
  signal?: AbortSignal,
): Promise<Refusal> {
  // Where sessions cannot have it, nobody is asked.
  const free = isSupported(sessionLocks)
    ? sql` AND IS_USED_LOCK(${heldName(request.key.id)}) IS NULL`
    : sql.raw("");
  const take = sql`UPDATE ${own("lock")} SET ${counted} WHERE ${onPrimary} AND id = ${request.key.id}${free}`;
  for (;;) {
    const { affected, inTransaction } = await connection.query(take);
    if (inTransaction === false || (inTransaction === undefined && joined && (await isIdle(connection)))) {
      throw new NotInTransactionError(
        "this connection is in no transaction, so the lock was gone at once. START TRANSACTION first, or use hf.transaction(…).",
      );
    }
    if (affected > 0) return undefined;
    const left = patience.left();
    if (left <= 0) return {};
    await sleep(Math.min(left, 50), signal);
  }
}

/**
 * A row that was updated stays locked when that is undone, one that was inserted does not: somebody may have come between.
 * Whoever had the lock has counted its turn, so ours is written again only if it is still the next one.
 */
export async function keepLocks(
  connection: SqlConnection,
  locks: readonly LockRequest[],
  names: readonly string[],
  savepoint: string,
): Promise<void> {
  const ids = sql.join(locks.map(({ key }) => key.id));
  const { rows } = await connection.query(
    sql`SELECT id AS id, turn AS turn FROM ${own("lock")} WHERE id IN (${ids})`,
  );
  const turns = new Map(rows.map(({ id, turn }) => [String(id), Number(turn)]));
  try {
    await connection.query(sql.raw(`ROLLBACK TO SAVEPOINT ${savepoint}`));
  } catch (error) {
    // The server has ended the transaction, with an error that the body has swallowed.
    throw isMissing(connection, error) ? conflict(error) : error;
  }
  for (const [i, { key }] of locks.entries()) {
    const turn = turns.get(key.id);
    if (turn === undefined) throw conflict();
    const again = sql`UPDATE ${own("lock")} SET ${counted} WHERE id = ${key.id} AND turn = ${turn - 1}`;
    if ((await connection.query(again)).affected > 0) continue;
    if (turn !== 1) throw conflict();
    const insert = sql`INSERT INTO ${own("lock")} SET id = ${key.id}, name = ${names[i] ?? ""}, ${counted}`;
    try {
      const waited = await patiently(connection, remakeMs, () => connection.query(insert));
      if (waited.over) throw conflict(waited.cause);
    } catch (error) {
      throw failureOf(connection, error) === "unique" ? conflict(error) : error;
    }
  }
}

/** For whoever waited for the row that we had made, and has it now. */
const remakeMs = 5000;

const conflict = (cause?: unknown) =>
  new SerializationError("Another transaction took the lock before this one could be committed.", cause);

export const session: SessionLocks<SqlConnection> = {
  async take(connection, { locks, wait, names }) {
    const patience = patienceOf(wait);
    const refused: LockGrant = { granted: false, reason: patience.nowait ? "busy" : "timeout", usable: true };
    for (const [i, request] of locks.entries()) {
      const left = patience.nowait ? 0 : Math.max(1, patience.left());
      // Whole seconds: MySQL takes 0.4 for 0, and does not wait at all.
      const seconds = Math.ceil(left / 1000);
      const name = sessionNames(request).at(-1) as Statement;
      const asking = sql`SELECT GET_LOCK(${name}, ${seconds}) AS granted FROM DUAL WHERE ${onPrimary}`;
      const waited = await bounded(connection, left, seconds, () => connection.query(asking)).catch(
        (error: unknown) => {
          // Sessions that hold some and wait for others, each in another call. The lock that was asked for is not held.
          throw failureOf(connection, error) === "deadlock"
            ? new DeadlockError(1, error)
            : explain(connection, error);
        },
      );
      // 1 granted, 0 timed out, NULL an error such as a statement that was ended, on MariaDB: only 1 is a lock.
      const taken =
        !waited.over &&
        String(waited.result.rows[0]?.granted) === "1" &&
        (isNamed(request) || (await mark(connection, request, names[i] ?? "", patience)));
      if (taken) continue;
      await session.clear(connection, locks.slice(0, i + 1));
      return waited.over ? { ...refused, cause: waited.cause } : refused;
    }
    return granted;
  },
  async give(connection, locks) {
    let given = true;
    for (const request of locks) {
      for (const name of sessionNames(request)) {
        const [row] = (await connection.query(sql`SELECT RELEASE_LOCK(${name}) AS given`)).rows;
        given &&= String(row?.given) === "1";
      }
    }
    return given;
  },
  async clear(connection, locks) {
    for (const request of locks) {
      for (const name of sessionNames(request)) {
        // Granted twice it must be released twice.
        for (let given = "1"; given === "1";) {
          const [row] = (
            await connection.query(
              sql`SELECT IF(IS_USED_LOCK(${name}) = CONNECTION_ID(), RELEASE_LOCK(${name}), 0) AS given`,
            )
          ).rows;
          given = String(row?.given);
        }
      }
    }
  },
  async verify(a, b) {
    const id = async (c: SqlConnection) =>
      String((await c.query(sql`SELECT CONNECTION_ID() AS id`)).rows[0]?.id);
    const first = await id(a);
    if (first === (await id(b)) || first !== (await id(a))) {
      throw new UnsupportedError(
        "a proxy shares sessions between connections, so a lock would belong to nobody. Connect to the server directly.",
      );
    }
  },
  async ping(connection) {
    await connection.query(sql`SELECT 1`);
  },
};

/**
 * Waits for transactions that hold the row, then says for those that come that the lock is held. Those who wait for a
 * row that nobody had locked before, and whose first holder rolls back, deadlock on the gap that it leaves: all of this
 * is a transaction of our own, so it is begun again.
 */
async function mark(
  connection: SqlConnection,
  request: LockRequest,
  name: string,
  patience: Patience,
): Promise<boolean> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await briefly(connection, async () => {
        if (await lockRow(connection, request, name, patience, "read committed")) return false;
        // Nothing is written here, hence a replica would not refuse.
        const [row] = (
          await connection.query(
            sql`SELECT GET_LOCK(${heldName(request.key.id)}, 0) AS granted FROM DUAL WHERE ${onPrimary}`,
          )
        ).rows;
        if (String(row?.granted) !== "1")
          throw new UnsupportedError("GET_LOCK was not granted although nobody can hold it");
        return true;
      });
    } catch (error) {
      if (attempt === 10 || failureOf(connection, error) !== "deadlock") throw explain(connection, error);
    }
  }
}

/**
 * The rows themselves tell who has locked them, uncommitted. Their counts are read twice: uncommitted, then committed. Where the
 * second is lower, the transaction that counted was open. (InnoDB's own tables tell only of those somebody waits for, on
 * MariaDB, and need privileges.) Inside a transaction nothing uncommitted can be read.
 */
export async function holders(
  connection: SqlConnection,
  locks: readonly LockRequest[],
  capabilities: Capabilities,
): Promise<Holder[]> {
  if (!(await isIdle(connection))) return [];
  const ids = sql.join(locks.map(({ key }) => key.id));
  await connection.query(sql.raw("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED"));
  const there = await connection.query(
    sql`SELECT id AS id, name AS name, turn AS turn, holder AS holder, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', since) AS since
      FROM ${own("lock")} WHERE ${onPrimary} AND id IN (${ids})`,
  );
  const committed = await connection.query(
    sql`SELECT id AS id, turn AS turn FROM ${own("lock")} WHERE ${onPrimary} AND id IN (${ids})`,
  );
  const turns = new Map(committed.rows.map(({ id, turn }) => [String(id), Number(turn)]));
  const found = new Map<string, Note>();
  for (const { id, name, turn, holder, since } of there.rows)
    if (Number(turn) > (turns.get(String(id)) ?? 0) && Number(holder) > 0)
      found.set(String(holder), { name: String(name), since: new Date(Number(since) / 1000) });
  for (const request of locks) {
    const [name] = sessionNames(request);
    const [row] = (
      await connection.query(sql`SELECT IS_USED_LOCK(${name}) AS holder FROM DUAL WHERE ${onPrimary}`)
    ).rows;
    if (row?.holder !== null && row?.holder !== undefined) found.set(String(row.holder), {});
  }
  return asHolders(connection, found, capabilities);
}
