/** Sessions as Kysely keeps them: for the adapter for Kysely itself, and for those of ORMs that are built on it. */
import type {
  DriverError,
  Engine,
  Opening,
  Pinned,
  Purpose,
  Result,
  Row,
  Seen,
  SqlConnection,
} from "../../seam/database.ts";
import { UnsupportedError } from "../../seam/errors.ts";
import { asBody, observeMethod, tellPromised } from "../observe.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import type { Statement } from "../../seam/sql.ts";
import { mysql, render as renderMysql } from "../../engines/mysql/index.ts";
import { literals } from "../../engines/mysql/text.ts";
import { postgres, render as renderPostgres } from "../../engines/postgres/index.ts";
import { unwrapMysql2 } from "../mysql2/connection.ts";
import { unwrapPg } from "../pg/connection.ts";

interface KyselyResult {
  readonly rows: unknown[];
  readonly numAffectedRows?: bigint | undefined;
}

/** One of Kysely's connections, below its plugins: a CamelCasePlugin would rename the columns of our own statements. */
export interface KyselyConnection {
  executeQuery: (query: never) => Promise<KyselyResult>;
}

interface KyselyExecutor {
  readonly adapter: object;
  provideConnection<T>(consumer: (connection: KyselyConnection) => Promise<T>): Promise<T>;
}

/** The part of a Kysely instance, or of its transaction, that is used here. */
export interface KyselyLike {
  readonly isTransaction: boolean;
  getExecutor(): { readonly adapter: object; provideConnection: (...args: never[]) => unknown };
}

export function executorOf(db: KyselyLike): KyselyExecutor {
  return db.getExecutor() as unknown as KyselyExecutor;
}

/** What differs between the servers that Kysely reaches. */
export interface KyselyDialect {
  readonly engine: Engine<SqlConnection>;
  render(statement: Statement): { text: string; values: unknown[] };
  unwrap(error: unknown): DriverError | undefined;
  /** Ends the session that it is sent on. */
  readonly endSession: string;
}

const dialects: Readonly<Record<string, KyselyDialect>> = {
  postgres: {
    engine: postgres,
    render: renderPostgres,
    unwrap: (error) => (isAborted(error) ? { code: "25P02" } : unwrapPg(error)),
    endSession: "SELECT pg_terminate_backend(pg_backend_pid())",
  },
  mysql: {
    engine: mysql,
    render(statement) {
      const { text, values } = renderMysql(statement);
      return { text, values: literals(values) };
    },
    unwrap: unwrapMysql2,
    endSession: "KILL CONNECTION_ID()",
  },
};

/** COMMIT was answered with ROLLBACK; Kysely looks. */
function isAborted(error: unknown): boolean {
  return (error as { name?: unknown } | null)?.name === "AbortedTransactionError";
}

interface AdapterTraits {
  readonly supportsTransactionalDdl?: boolean;
  readonly supportsReturning?: boolean;
  readonly supportsOutput?: boolean;
  readonly supportsMultipleConnections?: boolean;
}

/** By what the dialect says of its database: the name of its class may be another one in a bundle, or in a dialect of one's own. */
export function kyselyDialect(db: KyselyLike, call: string): KyselyDialect {
  const traits = db.getExecutor().adapter as AdapterTraits;
  if (traits.supportsMultipleConnections === false)
    throw new UnsupportedError(
      `${call}: Holdfast does not reach PGlite through Kysely. Use fromPglite of holdfast/pglite on the PGlite itself.`,
    );
  if (traits.supportsTransactionalDdl && traits.supportsReturning) return dialects.postgres as KyselyDialect;
  if (!traits.supportsTransactionalDdl && !traits.supportsReturning && !traits.supportsOutput)
    return dialects.mysql as KyselyDialect;
  throw new UnsupportedError(
    `${call}: Holdfast reaches PostgreSQL, MySQL, MariaDB and SQLite through Kysely`,
  );
}

export function isSqlite(db: KyselyLike): boolean {
  const traits = db.getExecutor().adapter as AdapterTraits;
  return (
    traits.supportsMultipleConnections === false &&
    traits.supportsTransactionalDdl === false &&
    traits.supportsReturning === true
  );
}

let queries = 0;

/** What `CompiledQuery.raw` makes. */
export function compiled(text: string, values: readonly unknown[]): never {
  return {
    sql: text,
    parameters: values,
    query: { kind: "RawNode", sqlFragments: [text], parameters: [] },
    queryId: { queryId: `holdfast-${++queries}` },
  } as never;
}

/** `use`: runs a consumer with the connection, one after the other. */
function connectionOf(
  use: <T>(consumer: (connection: KyselyConnection) => Promise<T>) => Promise<T>,
  { render, unwrap, engine }: KyselyDialect,
  session?: object,
): SqlConnection {
  const lost = new AbortController();
  return {
    lost: lost.signal,
    ...(session && { session }),
    unwrap,
    async query(statement) {
      const { text, values } = render(statement);
      try {
        return result(await use((connection) => connection.executeQuery(compiled(text, values))));
      } catch (error) {
        // There is no event for a dead connection: a failed statement is the first to know.
        if (unwrap(error)?.lost || engine.classify(error as DriverError) === "lost") lost.abort(error);
        throw error;
      }
    },
    // Kysely itself looks how COMMIT was answered.
    doubtful: () => false,
  };
}

export function result({ rows, numAffectedRows }: KyselyResult): Result {
  // A procedure answers with a list of results, the last of which says how it ended.
  const list = (Array.isArray(rows[0]) ? rows[0] : rows) as Row[];
  return { rows: list, affected: Number(numAffectedRows ?? 0) };
}

/** The connection of a transaction, or of an instance bound to one. */
export function kyselyConnection(db: KyselyLike, dialect: KyselyDialect): SqlConnection {
  const executor = executorOf(db);
  return connectionOf((consumer) => executor.provideConnection(consumer), dialect);
}

/** A connection taken out of the pool until it is released. */
export function pinKysely<Native>(
  db: KyselyLike,
  dialect: KyselyDialect,
  { signal }: Purpose,
): Promise<Pinned<Native, SqlConnection>> {
  const executor = executorOf(db);
  const waiting = new Promise<Pinned<Native, SqlConnection>>((resolve, reject) => {
    const consumer = (raw: KyselyConnection) =>
      new Promise<void>((done) => {
        const connection = connectionOf((use) => use(raw), dialect, raw);
        resolve({
          connection,
          // Only sessions are pinned, and nothing of theirs is handed to a body.
          native: undefined as Native,
          async release(broken) {
            // Kysely cannot be told to drop a connection; the pool notices when it has died.
            if (broken && !connection.lost.aborted)
              await raw.executeQuery(compiled(dialect.endSession, [])).catch(() => {});
            done();
          },
        });
      });
    executor.provideConnection(consumer).catch(reject);
  });
  return unlessAborted(waiting, signal, (late) => void late.release());
}

export function observeKysely(db: KyselyLike, seen: Seen): () => void {
  return observeMethod(db.getExecutor(), "provideConnection", seen);
}

/** What `db.transaction()` and `db.startTransaction()` return: each of its settings makes another one. */
interface Builder {
  execute: (body?: (...args: unknown[]) => unknown) => unknown;
  [setting: string]: (...args: never[]) => unknown;
}

const openings = new WeakMap<object, Set<Opening>>();

export function observeKyselyOpenings(db: object, opening: Opening): () => void {
  const known = openings.get(db);
  const all = known ?? new Set();
  all.add(opening);
  if (!known) {
    openings.set(db, all);
    const methods = db as { transaction: () => Builder; startTransaction?: () => Builder };
    const begin = methods.transaction.bind(db);
    methods.transaction = () => watchedBuilder(begin(), all);
    // Older ones have none.
    const start = methods.startTransaction?.bind(db);
    if (start) methods.startTransaction = () => watchedBuilder(start(), all);
  }
  return () => all.delete(opening);
}

interface ControlledTransaction {
  readonly isCommitted: boolean;
  readonly isRolledBack: boolean;
}

export function isGoingOn({ isCommitted, isRolledBack }: ControlledTransaction): boolean {
  return !isCommitted && !isRolledBack;
}

function watchedBuilder(builder: Builder, all: ReadonlySet<Opening>): Builder {
  const { execute } = builder;
  builder.execute = (body) => {
    if (body) return execute.call(builder, asBody(all, body));
    const result = execute.call(builder) as Promise<ControlledTransaction>;
    tellPromised(all, result, isGoingOn, builder.execute);
    return result;
  };
  for (const name of ["setAccessMode", "setIsolationLevel"]) {
    const set = builder[name] as ((...args: unknown[]) => Builder) | undefined;
    if (set) builder[name] = (...args) => watchedBuilder(set.apply(builder, args), all);
  }
  return builder;
}
