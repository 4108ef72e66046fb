import type { Database, DriverError, Pinned, Purpose, Result, Row, SqlConnection } from "../core/database.ts";
import { NotInTransactionError, UsageError } from "../core/errors.ts";
import { unlessAborted } from "../core/queue.ts";
import { type Kill, isInTransaction, killable, killer } from "../engines/mysql/client.ts";
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
  const { send, cancel } = killable(
    (text, values) => native.query(text, values),
    () => emitter.threadId,
    kill,
  );
  const connection: SqlConnection = {
    lost: lost.signal,
    unwrap,
    async query(statement) {
      const { text, values } = render(statement);
      const [outcome] = await send(text, values);
      return result(outcome);
    },
    cancel,
  };
  connections.set(emitter, connection);
  return connection;
}

function result(outcome: unknown): Result {
  // A procedure answers with a list of results, the last of which says how it ended.
  if (Array.isArray(outcome))
    return { rows: (Array.isArray(outcome[0]) ? outcome[0] : outcome) as Row[], affected: 0 };
  const { affectedRows = 0, serverStatus } = (outcome ?? {}) as {
    affectedRows?: number;
    serverStatus?: number;
  };
  return {
    rows: [],
    affected: affectedRows,
    ...(serverStatus !== undefined && { inTransaction: isInTransaction(serverStatus) }),
  };
}

/** A connection that has ended refuses statements without a code. */
function unwrap(error: unknown): DriverError | undefined {
  if (typeof error !== "object" || error === null) return undefined;
  const { fatal, code } = error as { fatal?: unknown; code?: unknown };
  return fatal === true && code === undefined ? { lost: true } : undefined;
}

/** A pool of `mysql2` (of its promise kind, or of the other). */
export function fromMysql2<C extends Mysql2PoolConnection>(
  pool: Mysql2Pool<C> | { promise(): Mysql2Pool<C> },
): Database<C, SqlConnection> {
  const promised = toPromisePool<C>(pool);
  const kill = killer(promised);
  return {
    engine: mysql,
    traits: { client: "mysql2", cancel: true, listen: false, embedded: false, single: false, pinned: true },
    unwrap,
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
