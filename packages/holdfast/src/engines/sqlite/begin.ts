/**
 * SQLite has one writer at a time. BEGIN IMMEDIATE makes a transaction that writer from its start, so while it
 * runs no other transaction on the file can check or write anything: every lock of every key is held by it.
 */
import type { Begun, Grant, LockCall, Open, Result } from "../../core/database.ts";
import { NotInTransactionError, UsageError } from "../../core/errors.ts";
import { type Statement, sql } from "../../core/sql.ts";
import { sleep } from "../../core/wait.ts";
import type { SqliteConnection } from "./dialect.ts";
import { failureOf, isBusy } from "./errors.ts";

export const granted = { granted: true } as const satisfies Grant;

/** Connections inside a transaction that we began, and whether it is read only: nobody else's is ours to roll back. */
const begun = new WeakMap<SqliteConnection, { readonly readOnly: boolean }>();

/** How long a statement of ours, outside of a transaction, waits for the writer: not as long as an errand may take. */
export const patienceMs = 8000;

/** How often to try: those whose work is a statement or two come before transactions, which last longer. */
const pauseMs = { transaction: 20, errand: 5 };

/** Those of this process that wait to become the writer, of whatever file. */
const waiting = new Set<() => void>();

/** Until the time is over, or a writer of this process has ended: it need not be found out by trying. */
function doze(ms: number, signal?: AbortSignal): Promise<void> {
  const woken = new AbortController();
  const wake = () => woken.abort();
  waiting.add(wake);
  return sleep(ms, signal ? AbortSignal.any([signal, woken.signal]) : woken.signal)
    .catch(() => signal?.throwIfAborted())
    .finally(() => waiting.delete(wake));
}

/** The one that has waited longest. Woken for nothing, it dozes off again. */
function wakeNext(): void {
  const [wake] = waiting;
  if (!wake) return;
  waiting.delete(wake);
  wake();
}

/**
 * Tries again every few milliseconds: SQLite's own busy handler would block the event loop for as long as it waits.
 * Resolves to the error that it saw last if the wait is over.
 */
async function whileBusy(
  connection: SqliteConnection,
  attempt: () => Promise<unknown>,
  waitMs: number,
  longestPauseMs: number = pauseMs.errand,
  signal?: AbortSignal,
): Promise<unknown> {
  const until = performance.now() + waitMs;
  for (let pause = 1; ; pause = Math.min(pause * 1.5, longestPauseMs)) {
    signal?.throwIfAborted();
    let busy: unknown;
    try {
      await attempt();
      return undefined;
    } catch (error) {
      if (!isBusy(connection, error)) throw error;
      busy = error;
    }
    const left = until - performance.now();
    if (left <= 0) return busy;
    await doze(Math.min(left, pause * (0.5 + Math.random())), signal);
  }
}

/** A question, in the transaction that is open or by itself. */
export async function ask(
  connection: SqliteConnection,
  statement: Statement,
  waitMs = patienceMs,
): Promise<Result> {
  let result: Result | undefined;
  const busy = await whileBusy(
    connection,
    async () => (result = await connection.query(statement)),
    connection.inTransaction ? 0 : waitMs,
  );
  if (!result) throw busy;
  return result;
}

async function start(connection: SqliteConnection, mode: "deferred" | "immediate"): Promise<void> {
  if (connection.begin) await connection.begin(mode);
  else await connection.query(sql.raw(`BEGIN ${mode.toUpperCase()}`));
}

async function finish(connection: SqliteConnection, how: "commit" | "rollback"): Promise<void> {
  try {
    await endIt(connection, how);
  } finally {
    wakeNext();
  }
}

async function endIt(connection: SqliteConnection, how: "commit" | "rollback"): Promise<void> {
  if (how === "rollback") {
    if (connection.end) await connection.end(how);
    else if (connection.inTransaction) await connection.query(sql.raw("ROLLBACK"));
    return;
  }
  // Without WAL a reader can be in the way of COMMIT; the transaction stays open meanwhile.
  const busy = await whileBusy(
    connection,
    () => (connection.end ? connection.end(how) : connection.query(sql.raw("COMMIT"))),
    10_000,
  );
  if (busy) throw busy;
}

const inOwn =
  "This client is inside a transaction of your own: end it first, use hf.join(…), or give Holdfast a function that opens another handle.";

/** Runs a body as the file's only writer. Throws what says "busy" if it could not become that in time. */
export async function asWriter<T>(
  connection: SqliteConnection,
  waitMs: number,
  body: () => Promise<T>,
): Promise<T> {
  if (connection.inTransaction) throw new UsageError(inOwn);
  const busy = await whileBusy(connection, () => start(connection, "immediate"), waitMs);
  if (busy) throw busy;
  try {
    const value = await body();
    await finish(connection, "commit");
    return value;
  } catch (error) {
    await finish(connection, "rollback").catch(() => {});
    throw error;
  }
}

/** A statement that writes: part of the transaction that is open, or one of its own. */
export async function write(
  connection: SqliteConnection,
  statement: Statement,
  waitMs = patienceMs,
): Promise<Result> {
  if (connection.inTransaction || !connection.begin) return ask(connection, statement, waitMs);
  return asWriter(connection, waitMs, () => connection.query(statement));
}

/**
 * A grant that a power failure undoes would give its fence a second time. In WAL mode SQLite does not flush each
 * commit unless `synchronous` is FULL (https://sqlite.org/pragma.html#pragma_synchronous), and many clients set NORMAL.
 */
export async function flushed<T>(connection: SqliteConnection, body: () => Promise<T>): Promise<T> {
  // Where a transaction gets its connection with BEGIN there is none before it whose setting would count.
  if (connection.begin || connection.inTransaction) return body();
  const level = Number((await connection.query(sql.raw("PRAGMA synchronous"))).rows[0]?.synchronous);
  if (!(level < 2)) return body();
  await connection.query(sql.raw("PRAGMA synchronous = 2"));
  try {
    return await body();
  } finally {
    await connection.query(sql.raw(`PRAGMA synchronous = ${level}`));
  }
}

export async function begin(
  connection: SqliteConnection,
  { locks, wait, readOnly, signal }: Open,
): Promise<Grant & { begun?: Begun }> {
  if (connection.inTransaction) throw new UsageError(inOwn);
  const busy = await whileBusy(
    connection,
    () => start(connection, readOnly && locks.length === 0 ? "deferred" : "immediate"),
    wait === "nowait" ? 0 : wait,
    pauseMs.transaction,
    signal,
  );
  if (busy) {
    if (locks.length === 0) throw busy;
    return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: false, cause: busy };
  }
  begun.set(connection, { readOnly });
  if (readOnly) await connection.query(sql.raw("PRAGMA query_only = 1"));
  return { granted: true, begun: {} };
}

export async function end(connection: SqliteConnection, how: "commit" | "rollback"): Promise<boolean> {
  const open = begun.get(connection);
  if (!open) return true;
  if (open.readOnly) await connection.query(sql.raw("PRAGMA query_only = 0"));
  await finish(connection, how);
  begun.delete(connection);
  return true;
}

/** Outside of a transaction a savepoint would begin one, deferred, and its release would commit it. */
export async function savepoint(
  connection: SqliteConnection,
  name: string,
  action: "set" | "release" | "rollback",
): Promise<void> {
  if (action === "set") {
    if (!connection.inTransaction) throw notInTransaction();
    await connection.query(sql.raw(`SAVEPOINT ${name}`));
  }
  if (action === "rollback") await connection.query(sql.raw(`ROLLBACK TO ${name}`));
  if (action !== "set") await connection.query(sql.raw(`RELEASE ${name}`));
}

function notInTransaction(): NotInTransactionError {
  return new NotInTransactionError(
    "this database handle is in no transaction. BEGIN IMMEDIATE first, or use hf.transaction(…).",
  );
}

/**
 * Inside a transaction that is the writer everything is locked already. A transaction of ours is, unless it is read
 * only; a caller's own may turn out not to be.
 */
export async function insist(connection: SqliteConnection, joined: boolean): Promise<void> {
  const own = begun.get(connection);
  if (own && !own.readOnly) return;
  if (joined && !connection.inTransaction) throw notInTransaction();
  const [mode] = (await connection.query(sql.raw("PRAGMA query_only"))).rows;
  if (Number(mode?.query_only) === 1) {
    throw new UsageError(
      "A lock in a read-only transaction: it would have to be the writer. Ask for the lock when the transaction begins.",
    );
  }
  if (joined) await refuseDeferred(connection);
}

export async function lock(connection: SqliteConnection, { joined }: LockCall): Promise<Grant> {
  await insist(connection, joined);
  return granted;
}

async function refuseDeferred(connection: SqliteConnection): Promise<void> {
  const deferred = () =>
    new NotInTransactionError(
      "this transaction was begun as BEGIN (deferred), which reads without being the writer: under load it dies with " +
        "SQLITE_BUSY_SNAPSHOT when it first writes. Begin it with BEGIN IMMEDIATE.",
    );
  if (await connection.writerIsFree?.()) throw deferred();
  try {
    // Becomes the writer if it is not: fails at once if another one is, or has been since this transaction's first read.
    const [row] = (await connection.query(sql.raw("PRAGMA user_version"))).rows;
    const same = `PRAGMA user_version = ${Number(row?.user_version)}`;
    if (connection.script) await connection.script(same);
    else await connection.query(sql.raw(same));
  } catch (error) {
    const failure = failureOf(connection, error);
    if (failure === "lock-timeout" || failure === "serialization") throw deferred();
    throw error;
  }
}
