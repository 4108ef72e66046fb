/**
 * Transactions whose body is over when it returns, on clients whose calls are too. Nothing else of this process runs meanwhile: no
 * context, no timer and no promise is needed, which is most of what a short transaction costs. The whole process waits with it.
 */
import type { Pinned, SyncCall, SyncInside } from "../../seam/database.ts";
import { FileBusyError, TransactionAbortedError, UsageError } from "../../seam/errors.ts";
import { Refused } from "../../waiting/refused.ts";
import { standStill } from "../../waiting/wait.ts";
import { assertWriter, commitMs, fileError, fileMs, inOwn, longestPauseMs } from "./begin.ts";
import { type SqliteConnection, render } from "./dialect.ts";
import { isBusy } from "./errors.ts";

/** A connection whose calls are over when they return. */
export interface SyncConnection extends SqliteConnection {
  atOnce: NonNullable<SqliteConnection["atOnce"]>;
  begin(mode: "deferred" | "immediate"): void;
  end(how: "commit" | "rollback"): void;
}

/** Tries again for as long as the file is busy and `goesOn`. Returns the last error if it stays so. */
function whileBusy(
  connection: SyncConnection,
  work: () => void,
  goesOn: () => boolean,
): { readonly error: unknown } | undefined {
  for (let pause = 1; ; pause = Math.min(pause * 1.5, longestPauseMs)) {
    try {
      return work() as undefined;
    } catch (error) {
      if (!isBusy(connection, error)) throw error;
      if (!goesOn()) return { error };
    }
    standStill(pause * (0.5 + Math.random()));
  }
}

function begin(connection: SyncConnection, { locks, wait, readOnly, names }: SyncCall): void {
  if (connection.inTransaction) throw new UsageError(inOwn);
  connection.file?.check();
  const ids = locks.map(({ key }) => key.id);
  const { writerQueue } = connection;
  const board = writerQueue?.board;
  const reads = readOnly && ids.length === 0;
  // Its owner goes on when this process does.
  if (!reads && writerQueue?.enterNow(connection) === false) throw FileBusyError.own(names());
  const started = performance.now();
  const until = started + (wait === "nowait" ? fileMs : wait);
  const isTaken = () => ids.length > 0 && board?.taken(ids) === true;
  const goesOn = () => performance.now() < until && !(wait === "nowait" && isTaken());
  const busy = whileBusy(connection, () => connection.begin(reads ? "deferred" : "immediate"), goesOn);
  if (busy) {
    const reason = isTaken() ? (wait === "nowait" ? "busy" : "timeout") : "file";
    throw new Refused(reason, Math.round(performance.now() - started), busy.error);
  }
  connection.begun = { readOnly };
  if (ids.length > 0) void assertWriter(connection);
  board?.publish(connection, ids);
  if (readOnly) connection.atOnce("PRAGMA query_only = 1", []);
}

function commit(connection: SyncConnection): void {
  const until = performance.now() + commitMs;
  // Without WAL a reader of another process can be in the way.
  const busy = whileBusy(
    connection,
    () => connection.end("commit"),
    () => performance.now() < until,
  );
  if (busy) throw busy.error;
}

/** Runs the body, and commits if it returns. */
export function atOnce<Native, T>(
  pinned: Pinned<Native, SyncConnection>,
  call: SyncCall,
  body: (inside: SyncInside<Native>) => T,
): T {
  const { connection } = pinned;
  let isOver = false;
  try {
    try {
      begin(connection, call);
    } catch (error) {
      throw fileError(connection, error);
    }
    const value = body({
      native: pinned.native,
      query(statement) {
        const { text, values } = render(statement);
        return connection.atOnce(text, values);
      },
    });
    void pinned.seal?.();
    if (call.readOnly) connection.atOnce("PRAGMA query_only = 0", []);
    if (!connection.inTransaction) throw TransactionAbortedError.early();
    commit(connection);
    isOver = true;
    return value;
  } finally {
    if (!isOver) isOver = rollBack(connection, call);
    connection.begun = undefined;
    void pinned.release(!isOver);
  }
}

/** False: an iterator is open on its handle, on which nothing else can be done until that is closed. */
function rollBack(connection: SyncConnection, { readOnly }: SyncCall): boolean {
  try {
    if (connection.begun === undefined) return true;
    if (readOnly) connection.atOnce("PRAGMA query_only = 0", []);
    connection.end("rollback");
    return true;
  } catch {
    return false;
  }
}
