/**
 * SQLite has one writer at a time. BEGIN IMMEDIATE makes a transaction that writer from its start, so while it
 * runs no other transaction on the file can check or write anything: every lock of every key is held by it.
 */
import type { Begun, LockCall, LockGrant, Open, Result, Row } from "../../seam/database.ts";
import {
  FileBusyError,
  NotInTransactionError,
  ReplicaError,
  TransactionAbortedError,
  UnsupportedError,
  UsageError,
} from "../../seam/errors.ts";
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
export const longestPauseMs = 5;

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

/**
 * Starts a new turn of the event loop. Until the caller awaits I/O, no other code of this process runs in that turn.
 */
function ownTurn(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}

/** BEGIN IMMEDIATE, when it is its turn among those of this process. `alone`: in a turn of the event loop of its own. */
function startWriting(
  connection: SqliteConnection,
  kind: WriterKind,
  waitMs: number,
  signal?: AbortSignal,
  alone = false,
): Soon<Busy> {
  connection.file?.check();
  const begin = () => connection.begin("immediate", kind === "one-shot");
  const work = alone ? () => ownTurn().then(begin) : begin;
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
  if (!connection.inTransaction) connection.file?.check();
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
export const commitMs = 10_000;

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

export const inOwn =
  "This client is inside a transaction of your own: end it first, use hf.join(…), or give Holdfast a function that opens another handle.";

/** How a body is run as the writer. */
interface Writing<T> {
  readonly ending?: (value: T) => "commit" | "rollback";
  /** The body returns its value, and no promise of it. */
  readonly atOnce?: boolean;
}

/**
 * Runs a body of ours as the file's only writer. Throws `FileBusyError` if it could not become that in time.
 *
 * Others in this process may write with handles of their own, and a call of a synchronous client waits for the writer inside SQLite, where
 * the whole process waits with it. So on such a client nobody else gets a turn while the body runs: it is run at once, or in a turn
 * of the event loop of its own, and awaits nothing but statements, whose answers are there.
 */
export async function asWriter<T>(
  connection: SqliteConnection,
  waitMs: number,
  body: () => Soon<T>,
  { ending = () => "commit", atOnce = false }: Writing<T> = {},
): Promise<T> {
  if (connection.inTransaction) throw new UsageError(inOwn);
  const alone = connection.atOnce !== undefined && !atOnce;
  const starting = startWriting(connection, "one-shot", waitMs, connection.giveUp?.signal, alone);
  const busy = starting && (await starting);
  if (busy) throw fileBusy(waitMs, busy);
  try {
    const asserting = assertWriter(connection);
    if (asserting) await asserting;
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
    // Without WAL, SQLite says of a file that is not at its path any more that it cannot be written.
    if (failureOf(connection, error) === "read-only") connection.file?.check(true);
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
  if (readOnly) connection.file?.check();
  const busy = await (async () =>
    readOnly && ids.length === 0
      ? whileBusy(connection, () => connection.begin("deferred"), waitMs, signal)
      : wait === "nowait" && ids.length > 0
        ? unlessTaken(connection, ids, signal)
        : startWriting(connection, "transaction", waitMs, signal))().catch((error: unknown) => {
    throw fileError(connection, error);
  });
  if (busy) {
    const taken = ids.length > 0 && connection.writerQueue?.board?.taken(ids);
    const reason = taken ? (wait === "nowait" ? "busy" : "timeout") : "file";
    return { granted: false, reason, usable: false, cause: busy.error };
  }
  if (ids.length > 0)
    try {
      await assertWriter(connection);
    } catch (error) {
      await finish(connection, "rollback");
      throw error;
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
  const early = isEnded(connection);
  const ending = finish(connection, early ? "rollback" : how);
  if (ending) await ending;
  connection.begun = undefined;
  if (early && how === "commit") throw TransactionAbortedError.early();
  return true;
}

/** The handle itself says so: its body has sent COMMIT or ROLLBACK, or an error has rolled it back. */
export function isEnded(connection: SqliteConnection): boolean {
  return connection.begun !== undefined && !connection.inTransaction;
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

export async function assertTransaction(connection: SqliteConnection): Promise<void> {
  if (!connection.inTransaction) throw notInTransaction();
}

/**
 * Inside a transaction that is the writer everything is locked already. A transaction of ours is, unless it is read
 * only; a caller's own may turn out not to be.
 */
export async function insist(connection: SqliteConnection, joined: boolean): Promise<void> {
  if (joined) connection.file?.check();
  if (connection.begun?.readOnly === false) return assertWriter(connection);
  if (joined && !connection.inTransaction) throw notInTransaction();
  const [mode] = (await connection.query(sql.raw("PRAGMA query_only"))).rows;
  if (Number(mode?.query_only) === 1) {
    throw new UsageError(
      "A lock in a read-only transaction: it would have to be the writer. Ask for the lock when the transaction begins.",
    );
  }
  if (joined) await refuseDeferred(connection);
}

/** Handles that were seen to write. */
const writable = new WeakSet<object>();

/**
 * On a handle that cannot write, BEGIN IMMEDIATE begins a transaction that only reads, and says nothing: any number of them
 * run at a time. So each handle is made to write once: what is written there is there already.
 */
export function assertWriter(connection: SqliteConnection): Soon<void> {
  if (writable.has(connection.opened)) return;
  const written = rewrite(connection);
  const seen = () => {
    // A URI can switch the locks of the file off (`nolock=1`).
    const free = connection.writerIsFree?.();
    return free instanceof Promise ? free.then(checked) : checked(free);
  };
  const checked = (free: boolean | undefined) => {
    if (free)
      throw new UnsupportedError(
        "Locks: another connection could begin to write to this file at the same time. It was opened without locks (`nolock=1`), or its file system has none",
      );
    writable.add(connection.opened);
  };
  return written ? written.then(seen) : seen();
}

const version = "PRAGMA user_version";
const sameVersion = ([row]: readonly Row[]) => `${version} = ${Number(row?.user_version)}`;

/** Writes what is there already. Becomes the writer if it is not: fails at once if another one is, or has been since the snapshot. */
function rewrite(connection: SqliteConnection): Soon<void> {
  if (!connection.atOnce) return rewriteLater(connection);
  try {
    connection.atOnce(sameVersion(connection.atOnce(version, [])), []);
  } catch (error) {
    throw fileError(connection, error);
  }
}

async function rewriteLater(connection: SqliteConnection): Promise<void> {
  try {
    const same = sameVersion((await connection.query(sql.raw(version))).rows);
    if (connection.script) await connection.script(same);
    else await connection.query(sql.raw(same));
  } catch (error) {
    throw fileError(connection, error);
  }
}

export function fileError(connection: SqliteConnection, error: unknown): unknown {
  if (failureOf(connection, error) !== "read-only") return error;
  connection.file?.check(true);
  return ReplicaError.file(error);
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
      "this transaction reads without being the writer. Either it was begun as BEGIN (deferred), and under load it dies with " +
        "SQLITE_BUSY_SNAPSHOT when it first writes: begin it with BEGIN IMMEDIATE. Or the file was opened read-only: open it for writing.",
    );
  if (await connection.writerIsFree?.()) throw deferred();
  try {
    await rewrite(connection);
  } catch (error) {
    const failure = failureOf(connection, error);
    if (failure === "lock-timeout" || failure === "serialization") throw deferred();
    throw error;
  }
}
