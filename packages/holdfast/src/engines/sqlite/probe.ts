import { type LockSupport, type Probed, type Strategy, unsupported } from "../../seam/capabilities.ts";
import type { ClientTraits, Isolation } from "../../seam/database.ts";
import { ServerTooOldError, UnsupportedError } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import { rowStrengths, tableModes } from "../../seam/tables.ts";
import { ask } from "./begin.ts";
import type { SqliteConnection } from "./dialect.ts";

/** The writer of the file holds every lock. */
export const lockSupport: LockSupport = {
  transactionLocks: "database write lock",
  joinedLocks: "database write lock",
  sharedLocks: unsupported(
    "a transaction that takes a lock is the file's only writer, and writers do not share",
  ),
  foreignKeys: unsupported("key.hashtext and key.hashtextextended are hashes of PostgreSQL; use key(…)"),
  namedLocks: unsupported("key.getLock is the lock of GET_LOCK on MySQL and MariaDB; use key(…)"),
};

const levels: readonly Isolation[] = ["read committed", "repeatable read", "serializable"];

export async function probe(
  connection: SqliteConnection,
  { client, single, embedded, cancel }: ClientTraits,
  wish?: Strategy,
): Promise<Probed> {
  if (wish !== undefined && wish !== "database write lock")
    throw new UnsupportedError(`strategy "${wish}": here the lock of every key is the "database write lock"`);
  const [row] = (
    await ask(
      connection,
      sql`SELECT sqlite_version() AS version,
        EXISTS (SELECT 1 FROM pragma_function_list WHERE name = 'libsql_vector_idx') AS libsql`,
    )
  ).rows;
  const version = String(row?.version);
  const [major = 0, minor = 0] = version.split(".").map(Number);
  if (major < 3 || (major === 3 && minor < 38))
    throw new ServerTooOldError(
      `SQLite ${version}`,
      "SQLite 3.38",
      "UPDATE … RETURNING and its fixes are newer",
    );
  return {
    engine: "sqlite",
    flavour: Number(row?.libsql) === 1 ? "libsql" : "sqlite",
    version,
    client,
    ...lockSupport,
    sessionLocks: unsupported("a lock that outlives its transaction would keep every writer of the file out"),
    exclusion: "held",
    // The writer of the file holds them all. Nobody can share with it, which breaks none of their promises.
    rowLocks: rowStrengths,
    // But readers cannot be kept out, which the strongest of them promises.
    tableLocks: tableModes.filter((mode) => mode !== "access exclusive"),
    leases: true,
    wake: unsupported(
      "a file tells nobody that it has changed: those who wait look again, those of the same process at once",
    ),
    versions: true,
    once: true,
    savepoints: true,
    granularity: "database",
    // Whatever is asked for, transactions here are serializable, which is stricter.
    lockIsolation: levels,
    lockFirstIsolation: [],
    isolation: levels,
    defaultIsolation: "serializable",
    cancel: cancel || unsupported(`${client} does not cancel a statement that is under way`),
    serverDeadline: unsupported(
      embedded
        ? "the database is part of this process: nobody else can end its transactions"
        : "the server's limit of a transaction cannot be set by its client",
    ),
    commitOutcome: unsupported(
      embedded
        ? "there is no connection to lose between this process and the file"
        : "the server keeps no record of it to ask",
    ),
    holders: unsupported("the file does not say who writes to it"),
    inspect: true,
    currentReads: true,
    connections: single ? "one" : "many",
  };
}
