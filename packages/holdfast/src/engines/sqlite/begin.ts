/**
 * SQLite has one writer at a time. BEGIN IMMEDIATE makes a transaction that writer from its start, so while it
 * runs no other transaction on the file can check or write anything: every lock of every key is held by it.
 */
import type { Begun, LockGrant, LockCall, Open, Result } from "../../seam/database.ts";
import { FileBusyError, NotInTransactionError, UsageError } from "../../seam/errors.ts";
import { type Statement, sql } from "../../seam/sql.ts";
import { sleep } from "../../waiting/wait.ts";
import type { Soon, SqliteConnection } from "./dialect.ts";
import { failureOf, isBusy } from "./errors.ts";
import type { WriterKind } from "./writer-queue.ts";

export const granted = { granted: true } as const satisfies LockGrant;

/** How long a statement of ours, outside of a transaction, waits for the writer: not as long as a one-shot statement may take. */
export const patienceMs = 8000;

/** How long the file is waited for by whoever is not to wait for a lock: that it is busy does not say that the lock is taken. */
export const fileMs = 2000;

/** How often those look meanwhile whether it is. */
const lookMs = 25;

/** How often to try. Of a process only the first in line does. */
const longestPauseMs = 5;

/** What says that the file is busy. */
type Busy = { readonly error: unknown } | undefined;

function attempt(connection: SqliteConnection, work: () => Soon<unknown>): Soon<Busy> {
  const busy = (error: unknown): Busy => {
    if (!isBusy(connection, error)) throw error;
    return { error };
  };
  try {
    const running = work();
    return running instanceof Promise ? running.then(() => undefined, busy) : undefined;
  } catch (error) {
    return busy(error);
  }
}

/**
 * Tries again every few milliseconds: SQLite's own busy handler would block the event loop for as long as it waits.
 * Brings the error that it saw last if the wait is over. Nobody is in the way as a rule, and then it is done at once.
 */
function whileBusy(
  connection: SqliteConnection,
  work: () => Soon<unknown>,
  waitMs: number,
  signal?: AbortSignal,
): Soon<Busy> {
  const first = attempt(connection, work);
  return first && waitMs > 0 ? tryAgain(connection, work, waitMs, signal, first) : first;
}

async function tryAgain(
  connection: SqliteConnection,
  work: () => Soon<unknown>,
  waitMs: number,
  signal: AbortSignal | undefined,
  first: Soon<Busy>,
): Promise<Busy> {
  const until = performance.now() + waitMs;
  let busy = await first;
  for (let pause = 1; busy; pause = Math.min(pause * 1.5, longestPauseMs)) {
    const left = until - performance.now();
    if (left <= 0) break;
    await sleep(Math.min(left, pause * (0.5 + Math.random())), signal);
    busy = await attempt(connection, work);
  }
  return busy;
}

/** BEGIN IMMEDIATE, when it is its turn among those of this process. */
function startWriting(
  connection: SqliteConnection,
  kind: WriterKind,
  waitMs: number,
  signal?: AbortSignal,
): Soon<Busy> {
  const work = () => connection.begin("immediate", kind === "one-shot");
  const { writerQueue } = connection;
  if (!writerQueue) return whileBusy(connection, work, waitMs, signal);
  if (writerQueue.enter(connection)) {
    const busy = orLeave(connection, () => whileBusy(connection, work, waitMs, signal));
    return busy && inTurn(connection, busy);
  }
  // Without patience, or out of it: SQLite has the last word.
  if (waitMs <= 0) return attempt(connection, work);
  const standing = writerQueue.stand(connection, kind, waitMs, signal);
  return (async () => {
    const leftMs = await standing;
    const busy = orLeave(connection, () => whileBusy(connection, work, leftMs, signal));
    return busy && inTurn(connection, busy);
  })();
}

/** A handle that was closed meanwhile throws at once: then nobody else would give the turn on. */
function orLeave<T>(connection: SqliteConnection, start: () => T): T {
  try {
    return start();
  } catch (error) {
    connection.writerQueue?.leave(connection);
    throw error;
  }
}

/** Who did not become the writer gives its turn to the next one. */
async function inTurn(connection: SqliteConnection, starting: Soon<Busy>): Promise<Busy> {
  let busy: Busy | true = true;
  try {
    return (busy = await starting);
  } finally {
    if (busy) connection.writerQueue?.leave(connection);
  }
}

/** BEGIN IMMEDIATE, or not for as long as one of the keys is taken. */
function unlessTaken(connection: SqliteConnection, ids: readonly string[], signal?: AbortSignal): Soon<Busy> {
  const first = startWriting(connection, "transaction", 0, signal);
  return first && watching(connection, ids, first, signal);
}

async function watching(
  connection: SqliteConnection,
  ids: readonly string[],
  first: Soon<Busy>,
  signal?: AbortSignal,
): Promise<Busy> {
  const busy = await first;
  const board = connection.writerQueue?.board;
  if (!busy || board?.taken(ids)) return busy;
  const stop = new AbortController();
  const timer = board && setInterval(() => board.taken(ids) && stop.abort(), lookMs);
  try {
    const either = signal ? AbortSignal.any([signal, stop.signal]) : stop.signal;
    return await startWriting(connection, "transaction", fileMs, either);
  } catch (error) {
    if (error === stop.signal.reason) return busy;
    throw error;
  } finally {
    clearInterval(timer);
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
  if (!result) throw fileBusy(connection.inTransaction ? 0 : waitMs, busy);
  return result;
}

/** Without WAL a reader can be in the way of COMMIT; the transaction stays open meanwhile. */
const commitMs = 10_000;

function finish(connection: SqliteConnection, how: "commit" | "rollback"): Soon<void> {
  const ending =
    how === "rollback" ? connection.end(how) : whileBusy(connection, () => connection.end(how), commitMs);
  if (ending) return finished(connection, ending);
  connection.writerQueue?.leave(connection);
}

async function finished(connection: SqliteConnection, ending: Promise<void> | Soon<Busy>): Promise<void> {
  const busy = await ending;
  if (busy) throw busy.error;
  connection.writerQueue?.leave(connection);
}

function fileBusy(waitedMs: number, busy: Busy): FileBusyError {
  return new FileBusyError([], Math.round(waitedMs), busy?.error);
}

const inOwn =
  "This client is inside a transaction of your own: end it first, use hf.join(…), or give Holdfast a function that opens another handle.";

/**
 * Runs a body as the file's only writer. Throws `FileBusyError` if it could not become that in time. What is there at once is not waited
 * for: others wait as long as this is the writer.
 */
export async function asWriter<T>(
  connection: SqliteConnection,
  waitMs: number,
  body: () => Soon<T>,
  ending: (value: T) => "commit" | "rollback" = () => "commit",
): Promise<T> {
  if (connection.inTransaction) throw new UsageError(inOwn);
  const starting = startWriting(connection, "one-shot", waitMs, connection.giveUp?.signal);
  const busy = starting && (await starting);
  if (busy) throw fileBusy(waitMs, busy);
  try {
    const running = body();
    const value = running instanceof Promise ? await running : running;
    const finishing = finish(connection, ending(value));
    if (finishing) await finishing;
    return value;
  } catch (error) {
    try {
      await finish(connection, "rollback");
    } catch {
      // What went wrong before is what counts.
    }
    throw error;
  }
}

/** A statement that writes: part of the transaction that is open, or one of its own. */
export async function write(
  connection: SqliteConnection,
  statement: Statement,
  waitMs = patienceMs,
): Promise<Result> {
  if (connection.inTransaction || !connection.switches) return ask(connection, statement, waitMs);
  return asWriter(connection, waitMs, () => connection.query(statement));
}

/**
 * A grant that a power failure undoes would give its fence a second time. In WAL mode SQLite does not flush each
 * commit unless `synchronous` is FULL (https://sqlite.org/pragma.html#pragma_synchronous), and many clients set NORMAL.
 */
export async function flushed<T>(connection: SqliteConnection, body: () => Promise<T>): Promise<T> {
  // Where a transaction gets its connection with BEGIN there is none before it whose setting would count.
  if (connection.switches || connection.inTransaction) return body();
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
): Promise<LockGrant & { begun?: Begun }> {
  if (connection.inTransaction) throw new UsageError(inOwn);
  const ids = locks.map(({ key }) => key.id);
  const waitMs = wait === "nowait" ? fileMs : wait;
  const starting =
    readOnly && ids.length === 0
      ? whileBusy(connection, () => connection.begin("deferred"), waitMs, signal)
      : wait === "nowait" && ids.length > 0
        ? unlessTaken(connection, ids, signal)
        : startWriting(connection, "transaction", waitMs, signal);
  const busy = starting && (await starting);
  if (busy) {
    const taken = ids.length > 0 && connection.writerQueue?.board?.taken(ids);
    const reason = taken ? (wait === "nowait" ? "busy" : "timeout") : "file";
    return { granted: false, reason, usable: false, cause: busy.error };
  }
  connection.writerQueue?.board?.publish(connection, ids);
  connection.begun = { readOnly };
  if (readOnly) await connection.query(sql.raw("PRAGMA query_only = 1"));
  return { granted: true, begun: {} };
}

export async function end(connection: SqliteConnection, how: "commit" | "rollback"): Promise<boolean> {
  const { begun } = connection;
  if (!begun) return true;
  if (begun.readOnly) await connection.query(sql.raw("PRAGMA query_only = 0"));
  const ending = finish(connection, how);
  if (ending) await ending;
  connection.begun = undefined;
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
  if (connection.begun?.readOnly === false) return;
  if (joined && !connection.inTransaction) throw notInTransaction();
  const [mode] = (await connection.query(sql.raw("PRAGMA query_only"))).rows;
  if (Number(mode?.query_only) === 1) {
    throw new UsageError(
      "A lock in a read-only transaction: it would have to be the writer. Ask for the lock when the transaction begins.",
    );
  }
  if (joined) await refuseDeferred(connection);
}

export async function lock(connection: SqliteConnection, { locks, joined }: LockCall): Promise<LockGrant> {
  await insist(connection, joined);
  await tell(
    connection,
    locks.map(({ key }) => key.id),
    joined,
  );
  return granted;
}

/** What the writer holds, for those who are refused meanwhile. */
export async function tell(
  connection: SqliteConnection,
  ids: readonly string[],
  joined: boolean,
): Promise<void> {
  if (joined) await connection.locate?.();
  connection.writerQueue?.board?.publish(connection, ids, joined ? () => isIn(connection) : undefined);
}

/** A handle that the caller has closed is in no transaction, and says so by throwing. */
function isIn(connection: SqliteConnection): boolean {
  try {
    return connection.inTransaction;
  } catch {
    return false;
  }
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
