/** Clients whose handle is one connection to a file in this process, and whose calls are synchronous. */
import type { Database, DriverError, Pinned, Purpose, Row } from "../../core/database.ts";
import { NotInTransactionError, UsageError } from "../../core/errors.ts";
import { Queue } from "../../core/queue.ts";
import { revocable } from "../../core/revocable.ts";
import { Single } from "../../core/single.ts";
import { type SqliteConnection, render } from "./dialect.ts";
import { sqlite } from "./index.ts";

export type Prepared = (values: readonly unknown[]) => { rows: Row[]; affected: number };

/** How one client library does it. */
export interface Driver<Handle extends object> {
  readonly client: string;
  /** What people call with it, for errors. */
  readonly call: string;
  is(value: unknown): boolean;
  inTransaction(handle: Handle): boolean;
  prepare(handle: Handle, text: string): Prepared;
  /** The file's path; undefined for a database in memory, which no other handle can reach. */
  file(handle: Handle): string | undefined;
  /** Another handle on the file, which does not wait for anybody. */
  reopen(handle: Handle, file: string): Handle;
  close(handle: Handle): void;
  unwrap?(error: unknown): DriverError | undefined;
}

/** Preparing is most of the cost of these: 5 of them made a transaction four times as slow as without. */
const fixed = /^(?:BEGIN|COMMIT|ROLLBACK|PRAGMA busy_timeout)/;
const kept = new WeakMap<object, Map<string, Prepared>>();

function run<Handle extends object>(
  driver: Driver<Handle>,
  handle: Handle,
  text: string,
  values: readonly unknown[] = [],
): { rows: Row[]; affected: number } {
  if (!fixed.test(text)) return driver.prepare(handle, text)(values);
  let statements = kept.get(handle);
  if (!statements) kept.set(handle, (statements = new Map()));
  let statement = statements.get(text);
  if (!statement) statements.set(text, (statement = driver.prepare(handle, text)));
  return statement(values);
}

/** The database is part of this process: there is no connection to lose. */
const never = new AbortController().signal;

function connectionOf<Handle extends object>(driver: Driver<Handle>, handle: Handle): SqliteConnection {
  return {
    lost: never,
    unwrap: driver.unwrap,
    get inTransaction() {
      return driver.inTransaction(handle);
    },
    async query(statement) {
      const { text, values } = render(statement);
      return withoutBlocking(driver, handle, () => run(driver, handle, text, values));
    },
    // Waits happen between statements here, and these look at the signal.
    cancel: async () => {},
    writerIsFree: () => writerIsFree(driver, handle),
  };
}

/** A busy timeout makes the whole process wait inside one call; ours wait in between. */
function withoutBlocking<Handle extends object, T>(driver: Driver<Handle>, handle: Handle, work: () => T): T {
  const before = Number(run(driver, handle, "PRAGMA busy_timeout").rows[0]?.timeout);
  if (before === 0) return work();
  run(driver, handle, "PRAGMA busy_timeout = 0");
  try {
    return work();
  } finally {
    run(driver, handle, `PRAGMA busy_timeout = ${before}`);
  }
}

/** Tried from outside, since a handle does not tell whether its own transaction is the writer. */
function writerIsFree<Handle extends object>(driver: Driver<Handle>, handle: Handle): boolean | undefined {
  const file = driver.file(handle);
  if (file === undefined) return undefined;
  const other = driver.reopen(handle, file);
  try {
    run(driver, other, "BEGIN IMMEDIATE");
    run(driver, other, "ROLLBACK");
    return true;
  } catch {
    return false;
  } finally {
    driver.close(other);
  }
}

/**
 * A handle, or a function that opens one. With a function every transaction gets a handle of its own (up to `most`);
 * with one handle transactions queue up for it, and whatever else the program runs on that handle meanwhile becomes
 * part of the transaction.
 */
export function fromHandles<Handle extends object>(
  driver: Driver<Handle>,
  source: Handle | (() => Handle),
  most: number,
): Database<Handle, SqliteConnection> {
  const opener = typeof source === "function" ? source : undefined;
  if (!opener && !driver.is(source))
    throw new UsageError(
      `${driver.call}(db): this is neither a database of ${driver.client} nor a function that opens one`,
    );
  return {
    engine: sqlite,
    traits: {
      client: driver.client,
      cancel: true,
      listen: false,
      embedded: true,
      single: !opener,
      pinned: opener !== undefined,
    },
    ...(opener ? pool(driver, opener, most) : { connect: one(driver, source as Handle) }),
    join(native) {
      if (!driver.is(native)) throw new NotInTransactionError(`this is no database of ${driver.client}`);
      return connectionOf(driver, native);
    },
    ...(driver.unwrap && { unwrap: driver.unwrap }),
  };
}

type Connect<Handle> = (purpose: Purpose) => Promise<Pinned<Handle, SqliteConnection>>;

function one<Handle extends object>(driver: Driver<Handle>, handle: Handle): Connect<Handle> {
  const door = Single.of(handle);
  const connection = connectionOf(driver, handle);
  return async (purpose) => {
    const leave = await door.enter(purpose);
    if (leftover.has(handle)) undo(driver, handle);
    const own = revocable(handle, ["prepare"]);
    return {
      connection,
      native: own.proxy,
      release(broken) {
        own.revoke();
        // There is no other handle to go on with: what this call has begun is undone, and the handle stays in use.
        if (broken) undo(driver, handle);
        leave();
      },
    };
  };
}

/** Handles that still are inside a transaction that was given up. */
const leftover = new WeakSet<object>();

function undo<Handle extends object>(driver: Driver<Handle>, handle: Handle): void {
  leftover.delete(handle);
  if (!driver.inTransaction(handle)) return;
  try {
    run(driver, handle, "ROLLBACK");
  } catch {
    // An iterator was left open on it: the next transaction begins with another try.
    leftover.add(handle);
  }
}

/** A handle on which an iterator is open cannot be closed; closing is what gives its write lock back. */
function close<Handle extends object>(driver: Driver<Handle>, handle: Handle): void {
  try {
    driver.close(handle);
  } catch {
    setTimeout(() => close(driver, handle), 100).unref();
  }
}

function pool<Handle extends object>(
  driver: Driver<Handle>,
  open: () => Handle,
  most: number,
): { connect: Connect<Handle>; close(): void } {
  const idle: Handle[] = [];
  const places = new Queue(most);
  const checked = (handle: Handle): Handle => {
    if (driver.is(handle)) return handle;
    throw new UsageError(`${driver.call}(open): the function did not return a database of ${driver.client}`);
  };
  const connect: Connect<Handle> = async ({ signal }) => {
    const leave = await places.enter(signal);
    try {
      const handle = idle.pop() ?? checked(open());
      return {
        connection: connectionOf(driver, handle),
        native: handle,
        release(broken) {
          if (broken) close(driver, handle);
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
      for (const handle of idle.splice(0)) close(driver, handle);
    },
  };
}
