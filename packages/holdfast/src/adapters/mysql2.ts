import type { Database, Pinned, Purpose, Result, Row, SqlConnection } from "../core/database.ts";
import { NotInTransactionError, UsageError } from "../core/errors.ts";
import { unlessAborted } from "../core/queue.ts";
import { mysql, render } from "../engines/mysql/index.ts";

/** The part of a connection of `mysql2/promise` that is used here. */
export interface Mysql2Connection {
  query(sql: string, values?: unknown[]): Promise<[unknown, unknown]>;
}

export interface Mysql2PoolConnection extends Mysql2Connection {
  release(): void;
  destroy(): void;
}

export interface Mysql2Pool<C extends Mysql2PoolConnection = Mysql2PoolConnection> {
  getConnection(): Promise<C>;
}

/** SERVER_STATUS_IN_TRANS of the protocol's status flags. */
const inTransactionFlag = 1;

interface Emitter {
  on?(event: string, listener: (error?: unknown) => void): unknown;
  threadId?: number | null;
}

/** By the connection inside: the pool wraps it anew each time it is taken out. */
const connections = new WeakMap<object, SqlConnection>();

/** `kill` runs a statement on another connection of the same server. */
function connectionOf(native: Mysql2Connection, kill: Kill): SqlConnection {
  // The promise wrapper passes no events on; the connection inside it does.
  const emitter = ((native as { connection?: Emitter }).connection ?? native) as Emitter;
  const known = connections.get(emitter);
  if (known) return known;
  const lost = new AbortController();
  emitter.on?.("error", (error) => lost.abort(error));
  emitter.on?.("end", () => lost.abort(new Error("the connection has ended")));
  let killed: Promise<void> | undefined;
  let running: AbortController | undefined;
  const send = async (text: string, values: unknown[]) => {
    if (killed) {
      // A KILL QUERY that comes too late hits the next statement: let it be one that matters to nobody.
      await killed;
      killed = undefined;
      await native.query("DO 0").catch(() => {});
    }
    running = new AbortController();
    try {
      return await native.query(text, values);
    } finally {
      running.abort();
      running = undefined;
    }
  };
  const connection: SqlConnection = {
    lost: lost.signal,
    async query(statement) {
      const { text, values } = render(statement);
      const [outcome] = await send(text, values);
      return result(outcome);
    },
    async cancel() {
      const id = emitter.threadId;
      if (typeof id !== "number") return;
      // A pool that has no other connection to give would make us wait for what waits for us. What runs may also be
      // a statement of the caller's own, whose end we do not see.
      killed = kill(`KILL QUERY ${id}`, running?.signal ?? AbortSignal.timeout(1000)).catch(() => {});
      await killed;
    },
  };
  connections.set(emitter, connection);
  return connection;
}

function result(outcome: unknown): Result {
  if (Array.isArray(outcome)) return { rows: outcome as Row[], affected: 0 };
  const { affectedRows = 0, serverStatus } = (outcome ?? {}) as {
    affectedRows?: number;
    serverStatus?: number;
  };
  return {
    rows: [],
    affected: affectedRows,
    ...(serverStatus !== undefined && { inTransaction: (serverStatus & inTransactionFlag) !== 0 }),
  };
}

/** A pool of `mysql2` (of its promise kind, or of the other). */
export function fromMysql2<C extends Mysql2PoolConnection>(
  pool: Mysql2Pool<C> | { promise(): Mysql2Pool<C> },
): Database<C, SqlConnection> {
  const promised = toPromisePool<C>(pool);
  const kill = killer(promised);
  return {
    engine: mysql,
    traits: { client: "mysql2", cancel: true, embedded: false, single: false, pinned: true },
    connect: (purpose) => checkOut(promised, kill, purpose),
    join(native) {
      const candidate = native as Partial<Mysql2PoolConnection & Mysql2Pool> | null;
      if (typeof candidate !== "object" || candidate === null || typeof candidate.query !== "function")
        throw new NotInTransactionError("this is no connection of mysql2");
      if (typeof candidate.getConnection === "function") {
        throw new NotInTransactionError(
          "a pool runs every statement on another connection; pass the connection that you began the transaction on",
        );
      }
      return connectionOf(native, kill);
    },
  };
}

function toPromisePool<C extends Mysql2PoolConnection>(pool: unknown): Mysql2Pool<C> {
  const candidate = pool as { promise?: () => Mysql2Pool<C>; getConnection?: unknown } | null;
  if (typeof candidate === "object" && candidate !== null) {
    if (typeof candidate.promise === "function") return candidate.promise();
    if (typeof candidate.getConnection === "function") return candidate as Mysql2Pool<C>;
  }
  throw new UsageError("fromMysql2(pool): this is not a pool of the package mysql2");
}

/** Gives up when the statement that it is to end has ended by itself. */
type Kill = (text: string, ended: AbortSignal) => Promise<void>;

function killer(pool: Mysql2Pool): Kill {
  return async (text, ended) => {
    const other = await unlessAborted(pool.getConnection(), ended, (late) => late.release());
    try {
      if (!ended.aborted) await other.query(text);
    } finally {
      other.release();
    }
  };
}

async function checkOut<C extends Mysql2PoolConnection>(
  pool: Mysql2Pool<C>,
  kill: Kill,
  { signal }: Purpose,
): Promise<Pinned<C, SqlConnection>> {
  const native = await unlessAborted(pool.getConnection(), signal, (late) => late.release());
  return {
    connection: connectionOf(native, kill),
    native,
    release(broken) {
      if (broken) native.destroy();
      else native.release();
    },
  };
}
