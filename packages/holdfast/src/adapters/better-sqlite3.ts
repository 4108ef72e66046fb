import type { Database, Pinned, Purpose, Row } from "../core/database.ts";
import { NotInTransactionError, UsageError } from "../core/errors.ts";
import { Queue } from "../core/queue.ts";
import { revocable } from "../core/revocable.ts";
import { Single } from "../core/single.ts";
import { type SqliteConnection, render, sqlite } from "../engines/sqlite/index.ts";

/** The part of a better-sqlite3 Database that is used here. */
export interface SqliteHandle {
  readonly inTransaction: boolean;
  readonly open: boolean;
  readonly name: string;
  readonly memory: boolean;
  prepare(text: string): {
    readonly reader: boolean;
    all(...values: unknown[]): unknown[];
    run(...values: unknown[]): { changes: number };
  };
  pragma(text: string, options?: { simple?: boolean }): unknown;
  close(): unknown;
}

/** The database is part of this process: there is no connection to lose. */
const never = new AbortController().signal;

function connectionOf(handle: SqliteHandle): SqliteConnection {
  return {
    lost: never,
    get inTransaction() {
      return handle.inTransaction;
    },
    async query(statement) {
      const { text, values } = render(statement);
      return withoutBlocking(handle, () => {
        const prepared = handle.prepare(text);
        if (prepared.reader) return { rows: prepared.all(...values) as Row[], affected: 0 };
        return { rows: [], affected: prepared.run(...values).changes };
      });
    },
    // Waits happen between statements here, and these look at the signal.
    cancel: async () => {},
    writerIsFree: () => writerIsFree(handle),
  };
}

/** A busy timeout makes the whole process wait inside one call; ours wait in between. */
function withoutBlocking<T>(handle: SqliteHandle, run: () => T): T {
  const before = Number(handle.pragma("busy_timeout", { simple: true }));
  if (before === 0) return run();
  handle.pragma("busy_timeout = 0");
  try {
    return run();
  } finally {
    handle.pragma(`busy_timeout = ${before}`);
  }
}

/** Tried from outside, since a handle does not tell whether its own transaction is the writer. */
function writerIsFree(handle: SqliteHandle): boolean | undefined {
  if (handle.memory || handle.name === "") return undefined;
  const Handle = handle.constructor as new (name: string, options: object) => SqliteHandle;
  const other = new Handle(handle.name, { fileMustExist: true, timeout: 0 });
  try {
    other.prepare("BEGIN IMMEDIATE").run();
    other.prepare("ROLLBACK").run();
    return true;
  } catch {
    return false;
  } finally {
    other.close();
  }
}

function isHandle(value: unknown): value is SqliteHandle {
  const handle = value as Partial<SqliteHandle> | null;
  return (
    typeof handle === "object" &&
    handle !== null &&
    typeof handle.prepare === "function" &&
    typeof handle.inTransaction === "boolean"
  );
}

/**
 * A better-sqlite3 Database, or a function that opens one. With a function every transaction gets a handle of its
 * own (up to `handles`, 4 by default); with one Database transactions queue up for it, and whatever else the
 * program runs on that handle meanwhile becomes part of the transaction.
 */
export function fromBetterSqlite3<Handle extends SqliteHandle>(
  source: Handle | (() => Handle),
  { handles = 4 } = {},
): Database<Handle, SqliteConnection> {
  const opener = typeof source === "function" ? source : undefined;
  if (!opener && !isHandle(source))
    throw new UsageError(
      "fromBetterSqlite3(db): this is neither a better-sqlite3 Database nor a function that opens one",
    );
  return {
    engine: sqlite,
    traits: {
      client: "better-sqlite3",
      cancel: true,
      embedded: true,
      single: !opener,
      pinned: opener !== undefined,
    },
    ...(opener ? fromHandles(opener, handles) : { connect: fromOne(source as Handle) }),
    join(native) {
      if (!isHandle(native)) throw new NotInTransactionError("this is no Database of better-sqlite3");
      return connectionOf(native);
    },
  };
}

type Connect<Handle> = (purpose: Purpose) => Promise<Pinned<Handle, SqliteConnection>>;

function fromOne<Handle extends SqliteHandle>(handle: Handle): Connect<Handle> {
  const door = Single.of(handle);
  const connection = connectionOf(handle);
  return async (purpose) => {
    const leave = await door.enter(purpose);
    if (leftover.has(handle)) undo(handle);
    const own = revocable(handle, ["prepare"]);
    return {
      connection,
      native: own.proxy,
      release(broken) {
        own.revoke();
        // There is no other handle to go on with: what this call has begun is undone, and the handle stays in use.
        if (broken) undo(handle);
        leave();
      },
    };
  };
}

/** Handles that still are inside a transaction that was given up. */
const leftover = new WeakSet<SqliteHandle>();

function undo(handle: SqliteHandle): void {
  leftover.delete(handle);
  if (!handle.inTransaction) return;
  try {
    handle.prepare("ROLLBACK").run();
  } catch {
    // An iterator was left open on it: the next transaction begins with another try.
    leftover.add(handle);
  }
}

/** A handle on which an iterator is open cannot be closed; closing is what gives its write lock back. */
function close(handle: SqliteHandle): void {
  try {
    handle.close();
  } catch {
    setTimeout(() => close(handle), 100).unref();
  }
}

function fromHandles<Handle extends SqliteHandle>(
  open: () => Handle,
  most: number,
): { connect: Connect<Handle>; close(): void } {
  const idle: Handle[] = [];
  const places = new Queue(most);
  const connect: Connect<Handle> = async ({ signal }) => {
    const leave = await places.enter(signal);
    try {
      const handle = idle.pop() ?? checked(open());
      return {
        connection: connectionOf(handle),
        native: handle,
        release(broken) {
          if (broken) close(handle);
          else idle.push(handle);
          leave();
        },
      };
    } catch (error) {
      leave();
      throw error;
    }
  };
  return {
    connect,
    close() {
      for (const handle of idle.splice(0)) close(handle);
    },
  };
}

function checked<Handle>(handle: Handle): Handle {
  if (isHandle(handle)) return handle;
  throw new UsageError("fromBetterSqlite3(open): the function did not return a better-sqlite3 Database");
}
