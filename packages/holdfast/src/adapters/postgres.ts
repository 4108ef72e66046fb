import type { Database, DriverError, Pinned, Purpose, Result, SqlConnection } from "../core/database.ts";
import { ConnectionLostError, NotInTransactionError, UsageError } from "../core/errors.ts";
import { unlessAborted } from "../core/queue.ts";
import { postgres, render } from "../engines/postgres/index.ts";

interface Query extends PromiseLike<PostgresResult | PostgresResult[]> {
  simple(): Query;
  cancel(): unknown;
}

type PostgresResult = Record<string, unknown>[] & { count?: number | null; command?: string };

/** The part of a postgres.js `Sql` (or of its reserved or transaction kind) that is used here. */
export interface PostgresSql {
  (strings: TemplateStringsArray, ...values: never[]): PromiseLike<unknown>;
  unsafe(text: string, values?: never[], options?: object): unknown;
}

export interface PostgresPool<Reserved extends PostgresSql = PostgresSql> extends PostgresSql {
  reserve(): Promise<Reserved & { release(): void }>;
}

/** What postgres.js hands to `onexecute`, as its own `begin` uses it: the connection behind a query. */
interface Backend {
  onclose?: ((error: unknown) => void) | null;
}

function connectionOf(sql: PostgresSql): SqlConnection & { lose(error: unknown): void } {
  const lost = new AbortController();
  let running: Query | undefined;
  const send = async (text: string, values: unknown[], simple: boolean) => {
    // After a loss the object would quietly run what it is given on another connection, outside of the transaction.
    lost.signal.throwIfAborted();
    const query = sql.unsafe(text, values as never[], { simple, prepare: false, onexecute }) as Query;
    running = query;
    try {
      return await query;
    } catch (error) {
      if (unwrap(error)?.lost) lost.abort(error);
      throw error;
    } finally {
      if (running === query) running = undefined;
    }
  };
  let watched = false;
  function onexecute(backend: Backend): boolean {
    if (!watched) {
      watched = true;
      const before = backend.onclose;
      backend.onclose = (error) => {
        lost.abort(error);
        before?.(error);
      };
    }
    return true;
  }
  return {
    lost: lost.signal,
    unwrap,
    lose: (error) => lost.abort(error),
    async query(statement) {
      const { text, values } = render(statement);
      return result((await send(text, values, values.length === 0)) as PostgresResult);
    },
    async script(text) {
      const results = await send(text, [], true);
      return (Array.isArray(results[0]) ? (results as PostgresResult[]) : [results as PostgresResult]).map(
        result,
      );
    },
    async cancel() {
      // Resolves when the server has closed the socket of the request; from then on it cannot hit a later statement.
      await (running?.cancel() as Promise<unknown> | undefined);
    },
  };
}

function result(rows: PostgresResult): Result {
  return { rows, affected: rows.count ?? 0, ...(rows.command !== undefined && { command: rows.command }) };
}

const lostCodes = new Set([
  "CONNECTION_CLOSED",
  "CONNECTION_ENDED",
  "CONNECTION_DESTROYED",
  "CONNECT_TIMEOUT",
]);

function unwrap(error: unknown): DriverError | undefined {
  const code = (error as { code?: unknown } | null)?.code;
  return typeof code === "string" && lostCodes.has(code) && code !== "CONNECTION_ENDED"
    ? { lost: true, code }
    : undefined;
}

/** The caller's own handle for the transaction, which stops working when the connection is lost. */
function guarded<Sql extends PostgresSql>(sql: Sql, lost: AbortSignal): Sql {
  const refuse = () => {
    if (lost.aborted) throw new ConnectionLostError(1, lost.reason);
  };
  return new Proxy(sql, {
    apply(target, self, args) {
      refuse();
      return Reflect.apply(target as unknown as (...a: unknown[]) => unknown, self, args);
    },
    get(target, name) {
      const value: unknown = Reflect.get(target, name);
      if (name !== "unsafe" && name !== "file") return value;
      return (...args: unknown[]) => {
        refuse();
        return (value as (...a: unknown[]) => unknown)(...args);
      };
    },
  });
}

/** A postgres.js instance: `holdfast(fromPostgres(postgres(url)))`. */
export function fromPostgres<Reserved extends PostgresSql>(
  sql: PostgresPool<Reserved>,
): Database<Reserved, SqlConnection> {
  if (typeof sql !== "function" || typeof sql.reserve !== "function") {
    throw new UsageError("fromPostgres(sql): this is not what postgres(url) of the package postgres returns");
  }
  return {
    engine: postgres,
    traits: { client: "postgres", cancel: true, script: true, embedded: false, single: false, pinned: true },
    connect: ({ signal }) => reserve(sql, signal),
    join(native) {
      if (typeof native !== "function" || typeof native.unsafe !== "function")
        throw new NotInTransactionError("this is no Sql of the package postgres");
      if (typeof (native as Partial<PostgresPool>).reserve === "function") {
        throw new NotInTransactionError(
          "this is the pool; pass the `sql` that sql.begin(…) hands to its callback",
        );
      }
      return connectionOf(native);
    },
    unwrap,
  };
}

async function reserve<Reserved extends PostgresSql>(
  sql: PostgresPool<Reserved>,
  signal: Purpose["signal"],
): Promise<Pinned<Reserved, SqlConnection>> {
  const reserved = await unlessAborted(sql.reserve(), signal, (late) => late.release());
  const connection = connectionOf(reserved);
  return {
    connection,
    native: guarded(reserved, connection.lost),
    async release(broken) {
      if (connection.lost.aborted) return;
      // There is no public way to throw a reserved connection away: the server is asked to end the session.
      if (broken)
        await Promise.resolve(reserved.unsafe("SELECT pg_terminate_backend(pg_backend_pid())")).catch(
          () => {},
        );
      connection.lose(new Error("the connection was given back"));
      if (!broken) reserved.release();
    },
  };
}
