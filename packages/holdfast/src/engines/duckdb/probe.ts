import { type Probed, type Strategy, unsupported } from "../../seam/capabilities.ts";
import type { ClientTraits } from "../../seam/database.ts";
import { ServerTooOldError, UnsupportedError } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import type { DuckdbConnection } from "./dialect.ts";
import { noSavepoints } from "./locks.ts";

export async function probe(
  connection: DuckdbConnection,
  { client }: ClientTraits,
  wish?: Strategy,
): Promise<Probed> {
  if (wish !== undefined && wish !== "lock row")
    throw new UnsupportedError(`strategy "${wish}": here locks are "lock row"`);
  const [row] = (await connection.query(sql`SELECT version() AS version`)).rows;
  const version = String(row?.version).replace(/^v/, "");
  const [major = 0, minor = 0] = version.split(".").map(Number);
  if (major < 1 || (major === 1 && minor < 2))
    throw new ServerTooOldError(`DuckDB ${version}`, "DuckDB 1.2", "older ones were never tried");
  const noRows = unsupported(
    "DuckDB has no row locks: a change that meets another one fails instead of waiting. Lock a key, or use versions",
  );
  return {
    engine: "duckdb",
    flavour: "duckdb",
    version,
    client,
    transactionLocks: "lock row",
    joinedLocks: "lock row",
    sessionLocks: unsupported("locks here end with their transaction; use a lease for longer ones"),
    exclusion: "held",
    sharedLocks: unsupported("a lock is a change of its row, and two changes of one row exclude each other"),
    granularity: "key",
    rowLocks: noRows,
    tableLocks: unsupported("DuckDB has no table locks"),
    leases: true,
    wake: unsupported("nothing needs to be told: those who wait are all in this process, and woken there"),
    versions: true,
    once: true,
    savepoints: unsupported(noSavepoints),
    // Whichever is asked for, it is a snapshot; a lock that is granted is not newer than it.
    lockIsolation: ["read committed", "repeatable read"],
    lockFirstIsolation: [],
    isolation: ["read committed", "repeatable read"],
    defaultIsolation: "repeatable read",
    cancel: true,
    serverDeadline: unsupported("the database is part of this process: nobody else can end its transactions"),
    commitOutcome: unsupported("there is no connection to lose between this process and the file"),
    holders: true,
    inspect: true,
    foreignKeys: unsupported("key.hashtext and key.hashtextextended are hashes of PostgreSQL; use key(…)"),
    currentReads: unsupported(
      "a transaction sees what there was at its first statement: a call that finds something newer throws, and the transaction is run again. Call the pattern before anything else in it",
    ),
    namedLocks: unsupported("key.getLock is the lock of GET_LOCK on MySQL and MariaDB; use key(…)"),
    connections: "many",
  };
}
