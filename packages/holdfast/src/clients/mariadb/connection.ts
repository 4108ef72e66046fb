/** Sessions of the package `mariadb`, whoever took them out of a pool: the adapter for it, or one for an ORM on it. */
import type {
  DriverError,
  Opening,
  Pinned,
  Purpose,
  Result,
  Room,
  Row,
  SqlConnection,
} from "../../seam/database.ts";
import { observeStatements, takenByUs } from "../observe.ts";
import { NoConnectionError, message } from "../../seam/errors.ts";
import { Quiet } from "../../waiting/quiet.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { type ViewOptions, endsTransaction, view } from "../../context/revocable.ts";
import { type Kill, isInTransaction, killable } from "../../engines/mysql/client.ts";
import { render } from "../../engines/mysql/index.ts";

/** The part of a connection of `mariadb` (its promise API) that is used here. */
export interface MariadbConnection {
  readonly threadId: number | null;
  /** Stays the same object for as long as the session lives. */
  readonly info: object | null;
  query(sql: string | { sql: string }, values?: unknown): Promise<unknown>;
  on(event: string, listener: (error?: unknown) => void): unknown;
  isValid(): boolean;
}

export interface MariadbPoolConnection extends MariadbConnection {
  release(): Promise<void>;
  destroy(): void;
}

export interface MariadbPool<C extends MariadbPoolConnection = MariadbPoolConnection> {
  getConnection(): Promise<C>;
}

/** What the pool's options may have changed: here rows are objects, and values are a list. */
const plain = {
  rowsAsArray: false,
  metaAsArray: false,
  nestTables: false,
  namedPlaceholders: false,
} as const;

/** And how values are read. */
const defaults = {
  typeCast: (_column: unknown, next: () => unknown) => next(),
  dateStrings: false,
  bigIntAsNumber: false,
  decimalAsNumber: false,
} as const;

/** The package keeps its settings to itself, and tells of each connection that the pool makes. */
export function elsewhereMariadb(pool: MariadbPool): (native: MariadbConnection) => object | undefined {
  const own = new WeakSet<object>();
  (pool as Partial<NodeJS.EventEmitter>).on?.(
    "connection",
    ({ info }: MariadbConnection) => info && own.add(info),
  );
  return ({ info }) => (info && !own.has(info) ? info : undefined);
}

/** By the session: the pool wraps its connection anew each time it is taken out. */
const connections = new WeakMap<object, SqlConnection>();
const quiets = new WeakMap<SqlConnection, Quiet>();

export function mariadbConnection(native: MariadbConnection, kill: Kill): SqlConnection {
  const session = native.info ?? native;
  const known = connections.get(session);
  if (known) return known;
  const lost = new AbortController();
  native.on("error", (error) => lost.abort(error));
  native.on("end", () => lost.abort(new Error("the connection has ended")));
  const quiet = new Quiet(lost.signal);
  const { send, cancel } = killable(
    (text, values, theirs) => {
      quiet.begins();
      const answer = native.query({ sql: text, ...plain, ...(!theirs && defaults) }, values);
      return answer.finally(quiet.ends);
    },
    () => native.threadId,
    kill,
  );
  const connection: SqlConnection = {
    get pid() {
      return native.threadId ?? undefined;
    },
    lost: lost.signal,
    quietMs: quiet.ms,
    unwrap: unwrapMariadb,
    async query(statement, theirs) {
      const { text, values } = render(statement);
      try {
        return result(await send(text, values, theirs), native);
      } catch (error) {
        // It has ended by the time that this is known, and not every end is told by an event.
        if (unwrapMariadb(error)?.lost) lost.abort(error);
        throw error;
      }
    },
    cancel,
  };
  connections.set(session, connection);
  quiets.set(connection, quiet);
  return connection;
}

function result(outcome: unknown, { info }: MariadbConnection): Result {
  const { status } = (info ?? {}) as { status?: unknown };
  const told = typeof status === "number" ? { inTransaction: isInTransaction(status) } : {};
  // A procedure answers with a list of results, the last of which says how it ended.
  if (Array.isArray(outcome))
    return { rows: (Array.isArray(outcome[0]) ? outcome[0] : outcome) as Row[], affected: 0, ...told };
  const { affectedRows = 0, insertId } = (outcome ?? {}) as { affectedRows?: number; insertId?: unknown };
  const given = typeof insertId === "bigint" ? { insertId: Number(insertId) } : {};
  return { rows: [], affected: affectedRows, ...given, ...told };
}

/** Numbers that the client gives to errors of its own, of those that mean that the connection is gone. */
const ends = new Set([45001, 45004, 45009, 45011, 45013, 45019, 45026]);

export function unwrapMariadb(error: unknown): DriverError | undefined {
  if (typeof error !== "object" || error === null) return undefined;
  const { errno, fatal, code } = error as { errno?: unknown; fatal?: unknown; code?: unknown };
  if (typeof errno !== "number" || (!ends.has(errno) && !(fatal === true && errno < 0))) return undefined;
  return { code: typeof code === "string" ? code : errno, lost: true };
}

/** What a body may send through a connection once it has ended: nothing but the end that an ORM writes. */
export const mariadbView: ViewOptions = {
  makers: ["prepare"],
  tracked: true,
  senders: [
    "query",
    "queryStream",
    "execute",
    "prepare",
    "batch",
    "importFile",
    "beginTransaction",
    "commit",
    "rollback",
    "changeUser",
    "reset",
  ],
  ends: (name, [first]) => name === "commit" || name === "rollback" || endsTransaction(first),
};

/** Its pool does not tell where it leads to. A server of MySQL's protocol speaks first; others wait, and so does this client. */
function silent(error: unknown): unknown {
  const { code, cause } = error as { code?: unknown; cause?: { code?: unknown } };
  if (code === "ER_GET_CONNECTION_TIMEOUT" && !cause) return NoConnectionError.refused(error, false);
  if (code !== "ER_GET_CONNECTION_TIMEOUT" || cause?.code !== "ER_CONNECTION_TIMEOUT") return error;
  return new NoConnectionError(
    undefined,
    error,
    `No connection could be had: nobody at the pool's address spoke the protocol of MySQL in time. Is it a PostgreSQL, or is a firewall in the way? (${message(cause)})`,
  );
}

export async function checkOutMariadb<C extends MariadbPoolConnection>(
  pool: MariadbPool<C>,
  kill: Kill,
  { signal }: Purpose,
): Promise<Pinned<C, SqlConnection>> {
  const native = await unlessAborted(
    pool.getConnection().catch((error: unknown) => {
      throw silent(error);
    }),
    signal,
    (late) => void late.release(),
  );
  const connection = mariadbConnection(native, kill);
  const give = takenByUs(native.info ?? native);
  const seen = view(native, { ...mariadbView, watch: quiets.get(connection) });
  return {
    connection,
    native: seen.proxy,
    async seal() {
      seen.seal();
      // It prepares first, and executes when that is answered.
      await seen.idle();
    },
    async release(broken) {
      seen.revoke();
      give();
      if (broken) native.destroy();
      else await native.release();
    },
  };
}

/** Below the promises: what the pool's events are about. */
interface Base {
  readonly info?: { readonly status?: unknown } | null;
}

/** Transactions that are begun by a statement on a connection of this pool: `beginTransaction` sends one too. */
export function observeMariadbStatements(pool: object, opening: Opening): () => void {
  return observeStatements(pool, opening, (connection) => {
    const { info } = connection as Base;
    return {
      connection,
      senders: ["query", "execute"],
      session: info ?? undefined,
      isInTransaction: () => typeof info?.status !== "number" || isInTransaction(info.status),
    };
  });
}

/** Its pool keeps its limit to itself. */
export function roomOfMariadb(pool: object): Room | undefined {
  const { activeConnections } = pool as { activeConnections?(): number };
  return activeConnections && { max: undefined, out: activeConnections.call(pool) };
}
