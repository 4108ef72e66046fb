/**
 * SQLite has one writer at a time. BEGIN IMMEDIATE makes a transaction that writer from its start, so while it
 * runs no other transaction on the file can check or write anything: every lock of every key is held by it.
 */
import { type Capabilities, unsupported } from "../../core/capabilities.ts";
import type {
  Begun,
  DriverError,
  Engine,
  Failure,
  Grant,
  Isolation,
  Migration,
  SqlConnection,
} from "../../core/database.ts";
import { NotInTransactionError, ServerTooOldError, UsageError } from "../../core/errors.ts";
import { type Dialect, type Rendered, type Statement, render as renderWith, sql } from "../../core/sql.ts";
import { sleep } from "../../core/wait.ts";

export interface SqliteConnection extends SqlConnection {
  /** Whether the handle is inside BEGIN … COMMIT. */
  readonly inTransaction: boolean;
  /** Whether another connection could begin writing now: then this one has not begun to. Undefined: no way to tell. */
  writerIsFree?(): boolean | undefined;
}

const dialect: Dialect = {
  placeholder: () => "?",
  quote: (name) => `"${name.replaceAll('"', '""')}"`,
};

export function render(statement: Statement): Rendered {
  return renderWith(statement, dialect);
}

const failures: Readonly<Record<string, Failure>> = {
  SQLITE_BUSY: "lock-timeout",
  SQLITE_BUSY_TIMEOUT: "lock-timeout",
  SQLITE_BUSY_RECOVERY: "lock-timeout",
  SQLITE_LOCKED: "lock-timeout",
  // Another connection has written since this one's snapshot: no waiting helps, only the whole transaction again.
  SQLITE_BUSY_SNAPSHOT: "serialization",
  SQLITE_CONSTRAINT_UNIQUE: "unique",
  SQLITE_CONSTRAINT_PRIMARYKEY: "unique",
  SQLITE_CONSTRAINT_ROWID: "unique",
  SQLITE_CONSTRAINT_FOREIGNKEY: "foreign-key",
  SQLITE_CONSTRAINT_CHECK: "check",
  SQLITE_READONLY: "read-only",
  SQLITE_INTERRUPT: "canceled",
};

function classify({ code }: DriverError): Failure | undefined {
  return typeof code === "string" && Object.hasOwn(failures, code) ? failures[code] : undefined;
}

const isBusy = (error: unknown) => classify(error as DriverError) === "lock-timeout";

const granted: Grant = { granted: true };
/** Connections inside a transaction that we began: nobody else's is ours to roll back. */
const begun = new WeakSet<SqliteConnection>();
const levels: readonly Isolation[] = ["read committed", "repeatable read", "serializable"];

async function probe(
  connection: SqliteConnection,
  { client, single }: { client: string; single: boolean },
): Promise<Capabilities> {
  const version = String((await connection.query(sql`SELECT sqlite_version() AS version`)).rows[0]?.version);
  const [major = 0, minor = 0] = version.split(".").map(Number);
  if (major < 3 || (major === 3 && minor < 38))
    throw new ServerTooOldError(
      `SQLite ${version}`,
      "SQLite 3.38",
      "UPDATE … RETURNING and its fixes are newer",
    );
  return {
    engine: "sqlite",
    flavour: "sqlite",
    version,
    client,
    transactionLocks: "database write lock",
    joinedLocks: "database write lock",
    sessionLocks: unsupported("a lock that outlives its transaction would keep every writer of the file out"),
    sharedLocks: unsupported(
      "a transaction that takes a lock is the file's only writer, and writers do not share",
    ),
    granularity: "database",
    // Whatever is asked for, transactions here are serializable, which is stricter.
    lockIsolation: levels,
    lockFirstIsolation: [],
    isolation: levels,
    defaultIsolation: "serializable",
    cancel: true,
    serverDeadline: unsupported("the database is part of this process: nobody else can end its transactions"),
    commitOutcome: unsupported("there is no connection to lose between this process and the file"),
    holders: unsupported("the file does not say who writes to it"),
    foreignKeys: unsupported("key.hashtext and key.hashtextextended are hashes of PostgreSQL; use key(…)"),
    connections: single ? "one" : "many",
  };
}

/** Tries again every few milliseconds: SQLite's own busy handler would block the event loop for as long as it waits. */
async function whileBusy(
  attempt: () => Promise<unknown>,
  waitMs: number,
  signal?: AbortSignal,
): Promise<boolean> {
  const until = performance.now() + waitMs;
  for (let pause = 1; ; pause = Math.min(pause * 1.5, 20)) {
    signal?.throwIfAborted();
    try {
      await attempt();
      return true;
    } catch (error) {
      if (!isBusy(error)) throw error;
    }
    const left = until - performance.now();
    if (left <= 0) return false;
    await sleep(Math.min(left, pause * (0.5 + Math.random())), signal);
  }
}

async function refuseDeferred(connection: SqliteConnection): Promise<void> {
  const deferred = () =>
    new NotInTransactionError(
      "this transaction was begun as BEGIN (deferred), which reads without being the writer: under load it dies with " +
        "SQLITE_BUSY_SNAPSHOT when it first writes. Begin it with BEGIN IMMEDIATE.",
    );
  if (connection.writerIsFree?.()) throw deferred();
  try {
    // Becomes the writer if it is not: fails at once if another one is, or has been since this transaction's first read.
    const [row] = (await connection.query(sql`PRAGMA user_version`)).rows;
    await connection.query(sql.raw(`PRAGMA user_version = ${Number(row?.user_version)}`));
  } catch (error) {
    if (isBusy(error) || classify(error as DriverError) === "serialization") throw deferred();
    throw error;
  }
}

const migrationTable = sql`CREATE TABLE IF NOT EXISTS holdfast_migration (
  id integer NOT NULL PRIMARY KEY,
  name text NOT NULL,
  applied_at text NOT NULL DEFAULT CURRENT_TIMESTAMP
)`;
const migrations: readonly Migration[] = [{ id: 1, name: "migrations", statements: [migrationTable] }];

export const sqlite: Engine<SqliteConnection> = {
  name: "sqlite",
  probe,
  async begin(connection, { locks, wait, readOnly, signal }): Promise<Grant & { begun?: Begun }> {
    if (connection.inTransaction) {
      throw new UsageError(
        "This Database is inside a transaction of your own: end it first, use hf.join(db), or give Holdfast a function that opens another handle.",
      );
    }
    const begin = readOnly && locks.length === 0 ? "BEGIN DEFERRED" : "BEGIN IMMEDIATE";
    let busy: unknown;
    const done = await whileBusy(
      () =>
        connection.query(sql.raw(begin)).catch((error: unknown) => {
          busy = error;
          throw error;
        }),
      wait === "nowait" ? 0 : wait,
      signal,
    );
    if (done) {
      begun.add(connection);
      if (readOnly) await connection.query(sql`PRAGMA query_only = 1`);
      return { granted: true, begun: {} };
    }
    if (locks.length === 0) throw busy;
    return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: false, cause: busy };
  },
  async end(connection, how) {
    if (!begun.has(connection)) return true;
    await connection.query(sql`PRAGMA query_only = 0`);
    if (how === "rollback") {
      if (connection.inTransaction) await connection.query(sql`ROLLBACK`);
      begun.delete(connection);
      return true;
    }
    // Without WAL a reader can be in the way of COMMIT; the transaction stays open meanwhile.
    if (!(await whileBusy(() => connection.query(sql`COMMIT`), 10_000))) await connection.query(sql`COMMIT`);
    begun.delete(connection);
    return true;
  },
  async savepoint(connection, name, action) {
    if (action === "set") await connection.query(sql.raw(`SAVEPOINT ${name}`));
    if (action === "rollback") await connection.query(sql.raw(`ROLLBACK TO ${name}`));
    if (action !== "set") await connection.query(sql.raw(`RELEASE ${name}`));
  },
  async lock(connection, { joined }) {
    const [mode] = (await connection.query(sql`PRAGMA query_only`)).rows;
    if (Number(mode?.query_only) === 1) {
      throw new UsageError(
        "A lock in a read-only transaction: it would have to be the writer. Ask for the lock when the transaction begins.",
      );
    }
    if (joined) {
      if (!connection.inTransaction)
        throw new NotInTransactionError(
          "this database handle is in no transaction. BEGIN IMMEDIATE first, or use hf.transaction(…).",
        );
      await refuseDeferred(connection);
    }
    return granted;
  },
  query: (connection, statement) => connection.query(statement),
  classify,
  migrations: {
    all: migrations,
    print: (statement) => `${render(statement).text};`,
    async apply(connection) {
      if (!(await whileBusy(() => connection.query(sql`BEGIN IMMEDIATE`), 60_000)))
        await connection.query(sql`BEGIN IMMEDIATE`);
      try {
        await connection.query(migrationTable);
        const { rows } = await connection.query(sql`SELECT id FROM holdfast_migration`);
        const applied = new Set(rows.map(({ id }) => Number(id)));
        const missing = migrations.filter(({ id }) => !applied.has(id));
        for (const { id, name, statements } of missing) {
          for (const statement of statements) await connection.query(statement);
          await connection.query(sql`INSERT INTO holdfast_migration (id, name) VALUES (${id}, ${name})`);
        }
        await connection.query(sql`COMMIT`);
        return missing;
      } catch (error) {
        await connection.query(sql`ROLLBACK`).catch(() => {});
        throw error;
      }
    },
  },
};
