/**
 * A lock of a transaction is a row of `holdfast_lock`, locked until COMMIT by the server itself, in our own
 * transactions and in joined ones alike, so that these exclude each other. A lock of a session is GET_LOCK, which
 * lasts beyond transactions; a second one, taken while the row is locked, says that it is held, so that transactions
 * wait for it too.
 *
 * GET_LOCK is not used for transactions: released before COMMIT is acknowledged it lets 101 of 100 through, and
 * nobody but the caller knows when a joined transaction has been committed.
 */
import type { Begun, Grant, LockCall, Open, SessionLocks, SqlConnection, Wait } from "../../core/database.ts";
import {
  ConnectionLostError,
  NotInTransactionError,
  SchemaMissingError,
  SerializationError,
  TransactionAbortedError,
  UnsupportedError,
} from "../../core/errors.ts";
import { classify as classifyError } from "../../core/failure.ts";
import type { LockRequest } from "../../core/key.ts";
import { type Statement, sql } from "../../core/sql.ts";
import { sleep } from "../../core/wait.ts";
import { classify } from "./errors.ts";

const granted: Grant = { granted: true };

function failureOf({ unwrap }: SqlConnection, error: unknown) {
  return classifyError({ engine: { classify }, unwrap }, error);
}

function explain(connection: SqlConnection, error: unknown): unknown {
  const failure = failureOf(connection, error);
  if (failure === "schema-missing") return new SchemaMissingError("The table holdfast_lock", error);
  return failure === "read-only" ? new UnsupportedError(readOnlyLock, error) : error;
}

const readOnlyLock =
  "A lock in a read-only transaction: here a lock is a row, and is written to. Leave `readOnly` out.";

const levels = {
  "read uncommitted": "READ UNCOMMITTED",
  "read committed": "READ COMMITTED",
  "repeatable read": "REPEATABLE READ",
  serializable: "SERIALIZABLE",
} as const;

/**
 * With autocommit off, not by START TRANSACTION: after a deadlock the server has ended the transaction, and if the
 * body swallows that error its next statements would be kept one by one. Now they begin another transaction, the
 * savepoint of the first is gone, and COMMIT is not sent.
 */
const begun = "holdfast_begun";

export async function begin(connection: SqlConnection, open: Open): Promise<Grant & { begun?: Begun }> {
  const { isolation, readOnly, locks } = open;
  if (readOnly && locks.length > 0) {
    throw new UnsupportedError(readOnlyLock);
  }
  if (!open.begun) {
    await connection.query(
      sql.raw(
        `SET TRANSACTION ISOLATION LEVEL ${levels[isolation]}, ${readOnly ? "READ ONLY" : "READ WRITE"}`,
      ),
    );
    await connection.query(sql.raw("SET @holdfast_autocommit = @@autocommit, autocommit = 0"));
    await connection.query(sql.raw(`SAVEPOINT ${begun}`));
  }
  // The lock comes before any read, so no snapshot can be older than it, whatever the isolation level.
  const grant = await takeRows(connection, { ...open, joined: false }, true);
  return { ...grant, begun: {} };
}

export async function end(connection: SqlConnection, how: "commit" | "rollback"): Promise<boolean> {
  const kept = how === "commit" && (await stillOpen(connection));
  await connection.query(sql.raw(kept ? "COMMIT" : "ROLLBACK"));
  // What this answers says nothing of the COMMIT any more, only whether the connection is fit for others.
  const restored = await connection
    .query(sql.raw("SET autocommit = COALESCE(@holdfast_autocommit, @@autocommit)"))
    .then(() => true)
    .catch(() => false);
  if (how === "commit" && !kept) {
    throw new TransactionAbortedError(
      undefined,
      "The server ended this transaction before its end (a deadlock whose error was swallowed, or a statement such as CREATE TABLE, which commits). What came after was rolled back.",
    );
  }
  return restored;
}

async function stillOpen(connection: SqlConnection): Promise<boolean> {
  try {
    await connection.query(sql.raw(`RELEASE SAVEPOINT ${begun}`));
    return true;
  } catch (error) {
    // COMMIT has not been sent: nothing can have been kept.
    if (failureOf(connection, error) === "lost") throw new ConnectionLostError(1, error);
    if ((error as { errno?: unknown }).errno !== noSuchSavepoint) throw error;
    return false;
  }
}

const noSuchSavepoint = 1305;

export function lock(connection: SqlConnection, call: LockCall): Promise<Grant> {
  return takeRows(connection, call, false);
}

/** `first`: nothing has been read in this transaction yet. */
async function takeRows(
  connection: SqlConnection,
  { locks, wait, names, signal }: LockCall,
  first: boolean,
): Promise<Grant> {
  const until = performance.now() + (wait === "nowait" ? 0 : wait);
  const refused: Grant = { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: true };
  for (const [i, request] of locks.entries()) {
    const left: Wait = wait === "nowait" ? wait : Math.max(1, until - performance.now());
    try {
      await lockRow(connection, request, names[i] ?? "", left, first);
      if (!(await waitForSession(connection, request, until, signal))) return refused;
    } catch (error) {
      if (failureOf(connection, error) !== "lock-timeout") throw explain(connection, error);
      // 1205 undoes the statement only (innodb_rollback_on_timeout=0): the transaction, and what it locked, is still there.
      return { ...refused, cause: error };
    }
  }
  return granted;
}

async function lockRow(
  connection: SqlConnection,
  { key: { id } }: LockRequest,
  name: string,
  wait: Wait,
  first: boolean,
): Promise<void> {
  let there = false;
  if (wait === "nowait") {
    there =
      (await connection.query(sql`SELECT turn FROM holdfast_lock WHERE id = ${id} FOR UPDATE NOWAIT`)).rows
        .length > 0;
  }
  if (!there) {
    // Takes an exclusive lock on the row whether it was there or not, with nothing read before: no gap is locked.
    const insert = sql`INSERT INTO holdfast_lock (id, name) VALUES (${id}, ${name}) ON DUPLICATE KEY UPDATE turn = turn`;
    await patiently(connection, wait === "nowait" ? 0 : wait, insert);
  }
  if (!first) await assertFresh(connection, id, name);
  const { inTransaction } = await connection.query(
    sql`UPDATE holdfast_lock SET turn = turn + 1 WHERE id = ${id}`,
  );
  if (inTransaction === false) {
    throw new NotInTransactionError(
      "this connection is in no transaction, so the lock was gone at once. START TRANSACTION first, or use hf.transaction(…).",
    );
  }
}

/** The setting counts whole seconds, lasts for the session, and is put back. */
async function patiently(connection: SqlConnection, wait: number, statement: Statement) {
  // The least is 0 on MariaDB and 1 on MySQL, which takes 0 for 1.
  const seconds = Math.ceil(wait / 1000);
  await connection.query(
    sql.raw(`SET @holdfast_wait = @@innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = ${seconds}`),
  );
  try {
    return await connection.query(statement);
  } finally {
    if (!connection.lost.aborted)
      await connection.query(sql.raw("SET SESSION innodb_lock_wait_timeout = @holdfast_wait"));
  }
}

/**
 * A REPEATABLE READ transaction that has read something sees the world of that read. Whoever held the lock before
 * us has counted `turn` up: if our snapshot shows an older count than the row itself, it also hides what they wrote.
 * `@@transaction_isolation` would be no proof, as it does not show what SET TRANSACTION chose.
 */
async function assertFresh(connection: SqlConnection, id: string, name: string): Promise<void> {
  const seen = (await connection.query(sql`SELECT turn FROM holdfast_lock WHERE id = ${id}`)).rows[0]?.turn;
  const current = (await connection.query(sql`SELECT turn FROM holdfast_lock WHERE id = ${id} FOR UPDATE`))
    .rows[0]?.turn;
  if (String(seen) === String(current)) return;
  throw new SerializationError(
    `The transaction had read something before it took lock ${name || id}, and its snapshot does not show what the last ` +
      `holder wrote. Take the lock first, or open the transaction as READ COMMITTED; then run it again.`,
  );
}

/** Hashed: at most 64 characters are allowed, case is ignored, and names are shared by all databases of the server. */
function lockName({ key }: LockRequest): Statement {
  return sql`CONCAT('holdfast:', LEFT(SHA2(CONCAT(DATABASE(), ':', ${key.id}), 256), 40))`;
}

/** Held by a session that has not only queued up for the lock, but has it: no transaction held the row then. */
function heldName(request: LockRequest): Statement {
  return sql`CONCAT(${lockName(request)}, ':held')`;
}

/** With the row locked, so that no session can become the holder meanwhile. */
async function waitForSession(
  connection: SqlConnection,
  request: LockRequest,
  until: number,
  signal?: AbortSignal,
): Promise<boolean> {
  for (;;) {
    const [row] = (await connection.query(sql`SELECT IS_USED_LOCK(${heldName(request)}) AS holder`)).rows;
    if (row?.holder === null || row?.holder === undefined) return true;
    const left = until - performance.now();
    if (left <= 0) return false;
    await sleep(Math.min(left, 50), signal);
  }
}

export const session: SessionLocks<SqlConnection> = {
  async take(connection, { locks, wait, names }) {
    const until = performance.now() + (wait === "nowait" ? 0 : wait);
    const refused: Grant = { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: true };
    for (const [i, request] of locks.entries()) {
      const seconds = wait === "nowait" ? 0 : Math.max(1, Math.ceil((until - performance.now()) / 1000));
      const [row] = (
        await connection.query(sql`SELECT GET_LOCK(${lockName(request)}, ${seconds}) AS granted`)
      ).rows;
      // 1 granted, 0 timed out, NULL an error such as a killed or out-of-memory server: only 1 is a lock.
      const taken =
        String(row?.granted) === "1" &&
        (await mark(
          connection,
          request,
          names[i] ?? "",
          wait === "nowait" ? wait : Math.max(1, until - performance.now()),
        ));
      if (taken) continue;
      await session.clear(connection, locks.slice(0, i + 1));
      return refused;
    }
    return granted;
  },
  async give(connection, locks) {
    let given = true;
    for (const request of locks) {
      for (const name of [heldName(request), lockName(request)]) {
        const [row] = (await connection.query(sql`SELECT RELEASE_LOCK(${name}) AS given`)).rows;
        given &&= String(row?.given) === "1";
      }
    }
    return given;
  },
  async clear(connection, locks) {
    for (const request of locks) {
      for (const name of [heldName(request), lockName(request)]) {
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

/** Waits for transactions that hold the row, then says for those that come that the lock is held. */
async function mark(
  connection: SqlConnection,
  request: LockRequest,
  name: string,
  wait: Wait,
): Promise<boolean> {
  await connection.query(sql.raw("SET TRANSACTION ISOLATION LEVEL READ COMMITTED"));
  await connection.query(sql.raw("START TRANSACTION READ WRITE"));
  try {
    await lockRow(connection, request, name, wait, true);
    const [row] = (await connection.query(sql`SELECT GET_LOCK(${heldName(request)}, 0) AS granted`)).rows;
    if (String(row?.granted) !== "1")
      throw new UnsupportedError("GET_LOCK was not granted although nobody can hold it");
    await connection.query(sql.raw("COMMIT"));
    return true;
  } catch (error) {
    if (!connection.lost.aborted) await connection.query(sql.raw("ROLLBACK"));
    if (failureOf(connection, error) !== "lock-timeout") throw explain(connection, error);
    return false;
  }
}
