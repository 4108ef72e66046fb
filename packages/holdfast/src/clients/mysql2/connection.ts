/** Sessions of the package `mysql2`, whoever took them out of a pool: the adapter for it, or one for an ORM on it. */
import type {
  DriverError,
  Opening,
  Pinned,
  Purpose,
  Result,
  Room,
  Row,
  Seen,
  SqlConnection,
} from "../../seam/database.ts";
import { UsageError } from "../../seam/errors.ts";
import { observeMethod, observeStatements, takenByUs, whenEnded } from "../observe.ts";
import { Quiet } from "../../waiting/quiet.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { type ViewOptions, behind, endsTransaction, view } from "../../context/revocable.ts";
import { type Kill, isInTransaction, killable } from "../../engines/mysql/client.ts";
import { render } from "../../engines/mysql/index.ts";
import { literals } from "../../engines/mysql/text.ts";
import { type Address, reached } from "../peer.ts";

/** The part of a connection of `mysql2/promise` that is used here. */
export interface Mysql2Connection {
  query(sql: string | { sql: string }, values?: unknown[]): Promise<[unknown, unknown]>;
}

export interface Mysql2PoolConnection extends Mysql2Connection {
  release(): void;
  destroy(): void;
}

export interface Mysql2Pool<C extends Mysql2PoolConnection = Mysql2PoolConnection> {
  getConnection(): Promise<C>;
}

/** The connection inside the promise wrapper, with callbacks. */
interface Inner {
  /** The client calls it for each statement. */
  addCommand?(command: { once?(event: "end", then: () => void): unknown }): unknown;
  on?(event: string, listener: (error?: unknown) => void): unknown;
  threadId?: number | null;
  config?: { typeCast?: unknown; queryFormat?: unknown };
  query(sql: Options, values: unknown[], done: (error: unknown, outcome: unknown) => void): unknown;
}

interface Options {
  readonly sql: string;
  readonly rowsAsArray: false;
  readonly nestTables: false;
  readonly namedPlaceholders: false;
  readonly typeCast?: (field: unknown, next: () => unknown) => unknown;
}

/** Whatever the pool's options are: rows are objects, and values are a list; and what we read is what the server sent. */
function options(text: string, theirs: boolean | undefined, { config }: Pick<Inner, "config">): Options {
  if (typeof config?.queryFormat === "function")
    throw new UsageError(
      "mysql2's option `queryFormat` writes values into statements in a way of its own: give Holdfast a pool without it",
    );
  const plain = { sql: text, rowsAsArray: false, nestTables: false, namedPlaceholders: false } as const;
  return theirs || typeof config?.typeCast !== "function"
    ? plain
    : { ...plain, typeCast: (_field, next) => next() };
}

/** By the connection inside: the pool wraps it anew each time it is taken out. */
const connections = new WeakMap<object, SqlConnection>();

/** `native`: of either kind. `kill` runs a statement on another connection of the same server. */
export function mysql2Connection(given: object, kill: Kill): SqlConnection {
  const native = behind(given);
  const { connection: wrapped, promise } = native as { connection?: Inner; promise?: unknown };
  const inner = typeof promise === "function" ? (native as Inner) : wrapped;
  // The promise wrapper passes no events on; the connection inside it does.
  const emitter = (inner ?? native) as Omit<Inner, "query">;
  const known = connections.get(emitter);
  if (known) return known;
  const lost = new AbortController();
  emitter.on?.("error", (error) => lost.abort(error));
  emitter.on?.("end", () => lost.abort(new Error("the connection has ended")));
  const quiet = quietOf(emitter, lost.signal);
  const { send, cancel } = killable(
    async (text, values, theirs) => {
      const asked = options(text, theirs, emitter);
      if (inner) return ask(inner, asked, literals(values));
      const [first] = await (native as Mysql2Connection).query(asked, literals(values));
      return first;
    },
    () => emitter.threadId,
    kill,
  );
  const connection: SqlConnection = {
    get pid() {
      return emitter.threadId ?? undefined;
    },
    lost: lost.signal,
    quietMs: quiet.ms,
    unwrap: unwrapMysql2,
    async query(statement, theirs) {
      const { text, values } = render(statement);
      try {
        return result(await send(text, values, theirs));
      } catch (error) {
        // From here it leads to the caller; the client's own begins at the socket.
        if (error instanceof Error) Error.captureStackTrace(error);
        throw error;
      }
    },
    cancel,
    settled: (then) => whenEnded(emitter, ["query", "execute", "release"], then),
  };
  connections.set(emitter, connection);
  return connection;
}

function quietOf(inner: Pick<Inner, "addCommand">, lost: AbortSignal): Quiet {
  const quiet = new Quiet(lost);
  const { addCommand } = inner;
  if (addCommand)
    inner.addCommand = (command) => {
      quiet.begins();
      command.once?.("end", quiet.ends);
      return addCommand.call(inner, command);
    };
  return quiet;
}

/** Not by the promise wrapper, which takes a stack trace with each statement: 7 % of a short transaction's time. */
function ask(inner: Inner, asked: Options, values: unknown[]): Promise<unknown> {
  return new Promise((resolve, reject) => {
    inner.query(asked, values, (error, outcome) => (error ? reject(error) : resolve(outcome)));
  });
}

function result(outcome: unknown): Result {
  // A procedure answers with a list of results, the last of which says how it ended.
  if (Array.isArray(outcome))
    return { rows: (Array.isArray(outcome[0]) ? outcome[0] : outcome) as Row[], affected: 0 };
  const {
    affectedRows = 0,
    insertId,
    serverStatus,
  } = (outcome ?? {}) as {
    affectedRows?: number;
    insertId?: unknown;
    serverStatus?: number;
  };
  return {
    rows: [],
    affected: affectedRows,
    ...(typeof insertId === "number" && insertId > 0 && { insertId }),
    ...(serverStatus !== undefined && { inTransaction: isInTransaction(serverStatus) }),
  };
}

/** A connection that has ended refuses statements without a code. */
export function unwrapMysql2(error: unknown): DriverError | undefined {
  if (typeof error !== "object" || error === null) return undefined;
  const { fatal, code } = error as { fatal?: unknown; code?: unknown };
  return fatal === true && code === undefined ? { lost: true } : undefined;
}

/** What a body may send through a connection once it has ended: nothing but the end that an ORM writes. */
export const mysql2View: ViewOptions = {
  makers: ["promise", "prepare"],
  senders: ["query", "execute", "prepare", "beginTransaction", "commit", "rollback", "changeUser"],
  ends: (name, [first]) => name === "commit" || name === "rollback" || endsTransaction(first),
};

/** Whatever it is doing. Its own destroy() would leave whoever waits for an answer without one. */
export function endMysql2(native: object): void {
  const { connection = native } = native as { connection?: object };
  const { stream } = connection as { stream?: { destroy(error: Error): void } };
  stream?.destroy(new Error("it was given up"));
}

/** The same for one of a pool, which is to forget it. */
export function dropMysql2(native: { destroy(): void }): void {
  endMysql2(native);
  native.destroy();
}

/** Not public: undefined where it is somewhere else. */
function addressOf(pool: object): Address | undefined {
  const { pool: inner } = pool as {
    pool?: { config?: { connectionConfig?: Partial<Address> & { socketPath?: string } } };
  };
  const { host, port, socketPath } = inner?.config?.connectionConfig ?? {};
  return host !== undefined && port !== undefined && !socketPath ? { host, port } : undefined;
}

interface Settings {
  readonly host?: string;
  readonly port?: number;
  readonly socketPath?: string;
  readonly database?: string;
}

/** By where the connections of the pool connect to. */
export function elsewhereMysql2(pool: object, native: object): object | undefined {
  const { connection: inner = behind(native) } = behind(native) as { connection?: { config?: Settings } };
  const { pool: own = pool } = pool as { pool?: object };
  const { config } = own as { config?: { connectionConfig?: Settings } };
  const ours = config?.connectionConfig;
  const theirs = (inner as { config?: Settings }).config;
  const same = (["host", "port", "socketPath", "database"] as const).every(
    (name) => ours?.[name] === theirs?.[name],
  );
  return same ? undefined : inner;
}

export async function checkOutMysql2<C extends Mysql2PoolConnection>(
  pool: Mysql2Pool<C>,
  kill: Kill,
  { signal }: Purpose,
): Promise<Pinned<C, SqlConnection>> {
  const connecting = unlessAborted(pool.getConnection(), signal, (late) => late.release());
  const native = await reached(pool, connecting, "MySQL", () => addressOf(pool));
  const seen = view(native, mysql2View);
  const { connection: inner = native } = native as { connection?: object };
  const give = takenByUs(inner);
  return {
    connection: mysql2Connection(native, kill),
    native: seen.proxy,
    seal: seen.seal,
    release(broken) {
      seen.revoke();
      give();
      if (broken) dropMysql2(native);
      else native.release();
    },
  };
}

/** Of the kind with callbacks, or of the other, which has that one inside. */
export function roomOfMysql2(pool: object): Room | undefined {
  const { pool: inner = pool } = pool as { pool?: object };
  const {
    config,
    _allConnections: all,
    _freeConnections: free,
  } = inner as {
    config?: { connectionLimit?: number };
    _allConnections?: { length: number };
    _freeConnections?: { length: number };
  };
  // 0: without a limit.
  if (!config?.connectionLimit || !all || !free) return undefined;
  return { max: config.connectionLimit, out: all.length - free.length };
}

/** `pool.query`, of either kind, takes its connection by this too, with a callback. */
export function observeMysql2(pool: object, seen: Seen, place?: () => string | undefined): () => void {
  const { pool: inner = pool } = pool as { pool?: object };
  return observeMethod(inner, "getConnection", seen, place && { place });
}

/** Transactions that are begun by a statement on a connection of this pool: `beginTransaction` sends one too. */
export function observeMysql2Statements(pool: object, opening: Opening): () => void {
  const { pool: inner = pool } = pool as { pool?: object };
  return observeStatements(inner, opening, (connection) => ({
    connection,
    senders: ["query", "execute"],
    // Of one that is handed on to who waits for it, the pool does not tell.
    release: "release",
  }));
}

/** A pool of the promise kind, of either. */
export function promisedMysql2<C extends Mysql2PoolConnection>(pool: unknown): Mysql2Pool<C> | undefined {
  const candidate = pool as { promise?: () => Mysql2Pool<C>; getConnection?: unknown } | null;
  if (typeof candidate !== "object" || candidate === null || typeof candidate.getConnection !== "function")
    return undefined;
  return typeof candidate.promise === "function" ? candidate.promise() : (candidate as Mysql2Pool<C>);
}
