/** Statements that may wait for a lock of InnoDB, and for how long. */
import type { Capabilities } from "../../seam/capabilities.ts";
import type { Result, SqlConnection } from "../../seam/database.ts";
import { NotInTransactionError } from "../../seam/errors.ts";
import { chain, classify as classifyError } from "../../seam/failure.ts";
import { sql } from "../../seam/sql.ts";
import { classify } from "./errors.ts";
import { atPrimary } from "./primary.ts";

export function failureOf({ unwrap }: SqlConnection, error: unknown) {
  return classifyError({ engine: { classify }, unwrap }, error);
}

/** What a statement brought, or the error that its wait ended with. */
export type Waited<T = Result> =
  { readonly over: false; readonly result: T } | { readonly over: true; readonly cause: unknown };

/**
 * The server counts whole seconds; for what is left of one it is ended from another connection, if the pool has one
 * to give. Measured: a second takes 1,001 ms, and a KILL QUERY after 200 ms ends the wait after 202 ms.
 */
const worthKillingMs = 50;

export function patiently<T>(
  connection: SqlConnection,
  waitMs: number,
  run: () => PromiseLike<T>,
): Promise<Waited<T>> {
  const seconds = Math.ceil(waitMs / 1000);
  return lasting(connection, seconds, () => bounded(connection, waitMs, seconds, run));
}

/**
 * The least is 0 on MariaDB and 1 on MySQL, which takes 0 for 1, and refuses it in strict mode (TRADITIONAL). Each server reads what is
 * meant for it.
 */
const lockWait = (seconds: number): string => (seconds === 0 ? "/*!80000 1 *//*M! 0 */" : String(seconds));

/** Whatever `completion_type` is: neither begins the next transaction, nor ends the session. */
export const commitText = "COMMIT AND NO CHAIN NO RELEASE";
export const rollbackText = "ROLLBACK AND NO CHAIN NO RELEASE";

/**
 * Nothing that is sent in here waits longer for a row, and a DELETE that finds its rows by a join is not refused. Both settings last for
 * the session, so they are put back whatever happens.
 */
export async function lasting<T>(
  connection: SqlConnection,
  seconds: number,
  run: () => Promise<T>,
): Promise<T> {
  await connection.query(
    sql.raw(
      `SET @holdfast_wait = @@innodb_lock_wait_timeout, @holdfast_safe = @@sql_safe_updates, SESSION innodb_lock_wait_timeout = ${lockWait(seconds)}, SESSION sql_safe_updates = 0`,
    ),
  );
  try {
    return await run();
  } finally {
    if (!connection.lost.aborted)
      await insistOn(
        connection,
        "SET SESSION innodb_lock_wait_timeout = @holdfast_wait, SESSION sql_safe_updates = @holdfast_safe",
      );
  }
}

/** The same for a statement that brings its own limit, `seconds`. */
export async function bounded<T>(
  connection: SqlConnection,
  waitMs: number,
  seconds: number,
  run: () => PromiseLike<T>,
): Promise<Waited<T>> {
  let ended = false;
  const end = () => {
    ended = true;
    void connection.cancel?.().catch(() => {});
  };
  const timer = seconds * 1000 - waitMs > worthKillingMs ? setTimeout(end, waitMs) : undefined;
  try {
    return { over: false, result: await run() };
  } catch (error) {
    const failure = failureOf(connection, error);
    if (failure === "lock-timeout" || (failure === "canceled" && ended)) return { over: true, cause: error };
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** An abort may end this very statement; the next one comes after it. */
export async function insistOn(connection: SqlConnection, text: string): Promise<Result> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await connection.query(sql.raw(text));
    } catch (error) {
      if (attempt === 3 || failureOf(connection, error) !== "canceled") throw error;
    }
  }
}

/**
 * Whether the connection is in a transaction; a statement that does nothing is answered with that. Not every client
 * passes it on: then a savepoint tells, which is gone at once where there is no transaction.
 */
export async function isIdle(connection: SqlConnection): Promise<boolean> {
  const { inTransaction } = await connection.query(sql.raw("DO 0"));
  if (inTransaction !== undefined) return !inTransaction;
  await connection.query(sql.raw("SAVEPOINT holdfast_here"));
  try {
    await connection.query(sql.raw("RELEASE SAVEPOINT holdfast_here"));
    return false;
  } catch (error) {
    if (isMissing(connection, error)) return true;
    throw error;
  }
}

/** ER_SP_DOES_NOT_EXIST: said of procedures, and of savepoints. */
export function isMissing({ unwrap }: SqlConnection, error: unknown): boolean {
  const { errno, code } = (unwrap?.(error) ?? error) as { errno?: unknown; code?: unknown };
  return errno === 1305 || code === "ER_SP_DOES_NOT_EXIST";
}

export async function assertTransaction(connection: SqlConnection): Promise<void> {
  if (!(await isIdle(connection))) return;
  throw new NotInTransactionError(
    "this connection is in no transaction: a lock would be gone at once, and what is written would be kept whatever comes later. START TRANSACTION first, or use hf.transaction(…).",
  );
}

/** A small transaction of our own. READ COMMITTED: its statements see what was committed while it waited, and lock no gaps. */
export async function briefly<T>(connection: SqlConnection, body: () => Promise<T>): Promise<T> {
  await beginning(connection, () =>
    connection.query(sql.raw("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")),
  );
  await connection.query(sql.raw("START TRANSACTION READ WRITE"));
  try {
    const value = await body();
    await connection.query(sql.raw(commitText));
    return value;
  } catch (error) {
    if (!connection.lost.aborted) await connection.query(sql.raw(rollbackText)).catch(() => {});
    throw error;
  }
}

/** ER_CANT_CHANGE_TX_CHARACTERISTICS. */
const stillInside = 1568;

/**
 * Runs `begin`, and commits a transaction that the session has left open first if it stands in the way. Without autocommit, a plain
 * SELECT leaves one open. With `completion_type = CHAIN`, each COMMIT does. START TRANSACTION would commit it as well, but the isolation
 * level has to be set before, and the server refuses that (1568). `hasBegun`: says whether `begin` has passed that point.
 */
export async function beginning<T>(
  connection: SqlConnection,
  begin: () => Promise<T>,
  hasBegun = () => false,
): Promise<T> {
  try {
    return await begin();
  } catch (error) {
    const isInside = [...chain(error)].some((each) => (each as { errno?: unknown }).errno === stillInside);
    if (!isInside || hasBegun()) throw error;
    const { rows } = await connection.query(
      sql.raw("SELECT @@autocommit AND @@completion_type = 'NO_CHAIN' AS alone"),
    );
    // Somebody has begun it, and not ended it.
    if (Number(rows[0]?.["alone"]) === 1) throw error;
    await connection.query(sql.raw(commitText));
    return begin();
  }
}

/**
 * Runs work on a connection in no transaction, with the settings of its session that our statements rest on as `probe.ts` has found that
 * they must be. They are put back whatever happens, or the session ends: its owner relies on them.
 */
export async function withSettings<T>(
  connection: SqlConnection,
  { details }: Capabilities,
  work: () => Promise<T>,
): Promise<T> {
  const [needed, found] = [details?.["needed"], details?.["found"]];
  if (typeof needed !== "string" || typeof found !== "string") return work();
  // What COMMIT has begun, and nobody has ended.
  if (details?.["chains"]) await connection.query(sql.raw(commitText));
  await connection.query(sql.raw(`SET ${needed}`));
  try {
    return await work();
  } finally {
    if (!connection.lost.aborted) await insistOrEnd(connection, [`SET ${found}`]);
  }
}

/**
 * Of the next transaction only. MariaDB's names for these, before 11.1, are not MySQL's: each server reads what is meant for it.
 */
const readCommitted =
  "/*!80000 @@transaction_isolation *//*M! @@tx_isolation */ = 'READ-COMMITTED', /*!80000 @@transaction_read_only *//*M! @@tx_read_only */ = 0";

/** As they were. Where that is not known, the beginning has failed before it changed anything. */
export const asBefore =
  "SESSION autocommit = COALESCE(@holdfast_autocommit, @@autocommit), SESSION innodb_lock_wait_timeout = COALESCE(@holdfast_wait, @@innodb_lock_wait_timeout)";

/**
 * The same that waits for no row longer than this, begun with one message and ended with one: without autocommit the next
 * statement begins a transaction, and to turn it on is to commit. What was changed is put back whatever happens, or the session ends:
 * whoever had it next would never commit.
 */
export async function brieflyLasting<T>(
  connection: SqlConnection,
  seconds: number,
  body: () => Promise<T>,
): Promise<T> {
  try {
    await connection.query(
      sql.raw(
        `SET @holdfast_wait = @@innodb_lock_wait_timeout, @holdfast_autocommit = @@autocommit, @holdfast_committed = 0, @holdfast_here = ${atPrimary}, SESSION innodb_lock_wait_timeout = ${lockWait(seconds)}, ${readCommitted}, SESSION autocommit = 0`,
      ),
    );
    const value = await body();
    await commit(connection);
    return value;
  } catch (error) {
    await undo(connection);
    throw error;
  }
}

async function commit(connection: SqlConnection): Promise<void> {
  try {
    await connection.query(sql.raw(`SET SESSION autocommit = 1, @holdfast_committed = 1, ${asBefore}`));
  } catch (error) {
    if (failureOf(connection, error) !== "canceled") throw error;
    // It may have been too late for that.
    const { rows } = await insistOn(connection, "SELECT @holdfast_committed AS committed");
    if (Number(rows[0]?.["committed"]) !== 1) throw error;
    await insistOn(connection, `SET ${asBefore}`);
  }
}

const undo = (connection: SqlConnection) => insistOrEnd(connection, [rollbackText, `SET ${asBefore}`]);

async function insistOrEnd(connection: SqlConnection, texts: readonly string[]): Promise<void> {
  try {
    for (const text of texts) if (!connection.lost.aborted) await insistOn(connection, text);
  } catch {
    await connection.query(sql.raw("KILL CONNECTION_ID()")).catch(() => {});
  }
}
