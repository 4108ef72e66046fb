/**
 * SQLite as ORMs reach it: one connection for everybody in the process. They begin deferred, and block the process while
 * they wait. So the engine writes BEGIN and COMMIT itself, on the connection that the ORM lends for a transaction.
 */
import type { DriverError, Pinned, Purpose, Result, Row } from "../seam/database.ts";
import { NotInTransactionError, UsageError, message } from "../seam/errors.ts";
import { unlessAborted } from "../waiting/turns.ts";
import { OneConnection } from "../waiting/one-connection.ts";
import type { Statement } from "../seam/sql.ts";
import { GiveUp, type SqliteConnection, render } from "../engines/sqlite/index.ts";
import { OpenFile } from "../engines/sqlite/open-file.ts";
import { type WriterQueue, writerQueueOf } from "../engines/sqlite/writer-queue.ts";

/** Below whatever the ORM does to its queries. */
export type Send = (text: string, values: readonly unknown[]) => Promise<Result>;

/** A connection that nobody else uses until it is given back, in no transaction. */
export interface LentHandle<Native> {
  readonly native: Native;
  readonly send: Send;
  /** Refuses the native from then on. */
  giveBack(): void | Promise<void>;
}

export const lentTraits = {
  cancel: true,
  listen: false,
  embedded: true,
  single: true,
  pinned: false,
  begins: false,
} as const;

/** In the body of a transaction the one connection is out. */
export const lentRoom = { max: 1, out: 1 } as const;

/** The code of errors of node:sqlite is the same for all of them; SQLite's own is beside it. */
export function unwrapSqlite(error: unknown): DriverError | undefined {
  const { code, errcode } = (error ?? {}) as DriverError & { errcode?: unknown };
  return code === "ERR_SQLITE_ERROR" && typeof errcode === "number"
    ? { code: errcode, message: message(error) }
    : undefined;
}

/** The database is part of this process: there is no connection to lose. */
const never = new AbortController().signal;

class LentConnection implements SqliteConnection {
  readonly lost = never;
  readonly unwrap: (error: unknown) => DriverError | undefined;
  readonly writerQueue: WriterQueue | undefined;
  readonly file: OpenFile | undefined;
  readonly giveUp = new GiveUp();
  readonly opened: object;
  begun: SqliteConnection["begun"];
  inTransaction: boolean;
  #send: Send;

  constructor(
    send: Send,
    unwrap: (error: unknown) => DriverError | undefined,
    place: Place | undefined,
    joined: boolean,
    opened?: object,
  ) {
    this.opened = opened ?? this;
    this.#send = send;
    this.unwrap = unwrap;
    this.writerQueue = place?.writerQueue;
    this.file = place?.file;
    this.inTransaction = joined;
  }

  /** What still waits for a try was given up, and must not end a transaction of somebody else's. */
  revoke(): void {
    this.#send = () =>
      Promise.reject(new UsageError("It was given up, and its connection is somebody else's"));
  }

  async query(statement: Statement): Promise<Result> {
    const { text, values } = render(statement);
    // The writer has nobody to wait for.
    if (this.begun?.readOnly === false) return this.#send(text, values);
    return this.#quietly(text, values);
  }

  async begin(mode: "deferred" | "immediate"): Promise<void> {
    await this.#quietly(`BEGIN ${mode.toUpperCase()}`);
    this.inTransaction = true;
  }

  async end(how: "commit" | "rollback"): Promise<void> {
    if (how === "commit") await this.#quietly("COMMIT");
    else await rollBack(this.#send);
    this.inTransaction = false;
  }

  async cancel(): Promise<void> {
    this.giveUp.now();
  }

  /** A busy timeout makes the whole process wait inside one call, where ours wait in between. */
  async #quietly(text: string, values: readonly unknown[] = []): Promise<Result> {
    const { rows } = await this.#send("PRAGMA busy_timeout", []);
    const before = Number(rows[0]?.timeout);
    if (before === 0) return this.#send(text, values);
    await this.#send("PRAGMA busy_timeout = 0", []);
    try {
      return await this.#send(text, values);
    } finally {
      await this.#send(`PRAGMA busy_timeout = ${before}`, []);
    }
  }
}

async function rollBack(send: Send): Promise<void> {
  try {
    await send("ROLLBACK", []);
  } catch (error) {
    // SQLite has rolled it back by itself, or the body has.
    if (!/no transaction is active/.test(message(error))) throw error;
  }
}

const iteratorMs = 100;

/** Rolls back what was given up, then `next`. A handle on which an iterator is open refuses everything until that ends. */
export async function undone(send: Send, next: () => unknown): Promise<void> {
  try {
    await rollBack(send);
  } catch (error) {
    if (/busy executing/.test(message(error))) {
      setTimeout(() => void undone(send, next), iteratorMs).unref();
      return;
    }
  }
  await next();
}

interface Place {
  readonly writerQueue: WriterQueue;
  readonly file: OpenFile;
}

/** Of each client: undefined for a database in memory, which no other process can reach. */
const places = new WeakMap<object, Place | undefined>();

async function placeOf(client: object, send: Send): Promise<Place | undefined> {
  if (!places.has(client)) {
    const { rows } = await send("PRAGMA database_list", []);
    const path = rows.find(({ name }) => name === "main")?.file;
    const known = typeof path === "string" && path !== "";
    places.set(client, known ? { writerQueue: writerQueueOf(path), file: new OpenFile(path) } : undefined);
  }
  return places.get(client);
}

/** A connection of `client`, in no transaction. */
export async function lentConnection(
  client: object,
  send: Send,
  unwrap: (error: unknown) => DriverError | undefined,
): Promise<SqliteConnection & { revoke(): void }> {
  return new LentConnection(send, unwrap, await placeOf(client, send), false, client);
}

/** `client`: what has the one connection; transactions queue up for it. */
export async function connectLent<Native>(
  client: object,
  lend: () => Promise<LentHandle<Native>>,
  unwrap: (error: unknown) => DriverError | undefined,
  purpose: Purpose,
): Promise<Pinned<Native, SqliteConnection>> {
  const leave = await OneConnection.of(client).enter(purpose);
  let lent: LentHandle<Native> | undefined;
  try {
    lent = await unlessAborted(lend(), purpose.signal, (late) => void ended(late));
    const { native, send } = lent;
    const connection = await lentConnection(client, send, unwrap);
    const back = async () => {
      await ended(lent);
      connection.writerQueue?.leave(connection);
      leave();
    };
    return {
      connection,
      native,
      release(broken) {
        connection.revoke();
        return broken || connection.inTransaction ? undone(send, back) : back();
      },
    };
  } catch (error) {
    await ended(lent);
    leave();
    throw error;
  }
}

/** What was committed is committed, even if the ORM cannot go on, as when it has been closed meanwhile. */
async function ended(lent: LentHandle<unknown> | undefined): Promise<void> {
  try {
    await lent?.giveBack();
  } catch {
    // Whoever uses the ORM next is told.
  }
}

/** The connection of a transaction that the caller opened. Nothing but SQLite knows whether there is one. */
export function joinLent(send: Send, unwrap: (error: unknown) => DriverError | undefined): SqliteConnection {
  const inside: Send = async (text, values) => {
    try {
      await send("BEGIN", []);
    } catch (error) {
      if (!/within a transaction/.test(message(error))) throw error;
      return send(text, values);
    }
    await send("ROLLBACK", []);
    throw new NotInTransactionError("its connection is in no transaction");
  };
  return new LentConnection(inside, unwrap, undefined, true);
}

/** For an ORM that has written BEGIN, so that what it hands out counts as a transaction. */
export async function takeOver(send: Send): Promise<void> {
  await send("ROLLBACK", []);
}

/** And for its COMMIT. */
export async function handOver(send: Send): Promise<void> {
  await send("BEGIN", []);
}

/** The part of a better-sqlite3 Database that is used here. */
export interface SqliteStatements {
  prepare(text: string): {
    readonly reader: boolean;
    all(...values: unknown[]): unknown[];
    run(...values: unknown[]): { changes: number };
  };
}

export function sendOn(handle: SqliteStatements): Send {
  return async (text, values) => {
    const prepared = handle.prepare(text);
    if (prepared.reader) return { rows: prepared.all(...values) as Row[], affected: 0 };
    return { rows: [], affected: prepared.run(...values).changes };
  };
}
