import { type Capabilities, unsupported } from "../../core/capabilities.ts";
import type { ClientTraits, Isolation, SqlConnection } from "../../core/database.ts";
import { ReplicaError, ServerTooOldError, UnsupportedError } from "../../core/errors.ts";
import { sql } from "../../core/sql.ts";

const isolation: readonly Isolation[] = ["read committed", "repeatable read", "serializable"];

export async function probe(connection: SqlConnection, traits: ClientTraits): Promise<Capabilities> {
  const [row] = (
    await connection.query(sql`SELECT VERSION() AS version, @@read_only AS readonly, DATABASE() AS db`)
  ).rows;
  const version = String(row?.version);
  const maria = /mariadb/i.test(version);
  const [major = 0, minor = 0] = version.split(".").map(Number);
  if (maria ? major < 10 || (major === 10 && minor < 6) : major < 8 || (major === 8 && minor < 4)) {
    throw new ServerTooOldError(
      `${maria ? "MariaDB" : "MySQL"} ${version}`,
      maria ? "MariaDB 10.6" : "MySQL 8.4",
      "SKIP LOCKED, NOWAIT or long-term support is missing before",
    );
  }
  if (row?.db === null)
    throw new UnsupportedError("No database is selected: put its name into the connection's URL or options");
  if (Number(row?.readonly) === 1) throw new ReplicaError();
  return {
    engine: "mysql",
    flavour: maria ? "mariadb" : "mysql",
    version,
    client: traits.client,
    transactionLocks: "lock row",
    joinedLocks: "lock row",
    sessionLocks: "session advisory",
    sharedLocks: unsupported("lock rows are taken exclusively here"),
    granularity: "key",
    lockIsolation: isolation,
    lockFirstIsolation: [],
    isolation,
    defaultIsolation: "repeatable read",
    cancel:
      traits.cancel ||
      unsupported(
        `${traits.client} cannot cancel a running statement: an abort takes effect when the wait ends`,
      ),
    serverDeadline: unsupported(
      "the server has no limit for a whole transaction: a deadline is enforced by this process, which must be running for it",
    ),
    commitOutcome: unsupported("the server keeps no record of a transaction's end that could be asked for"),
    holders: unsupported("the holder of a lock row is not looked up on this engine"),
    foreignKeys: unsupported("key.hashtext and key.hashtextextended are hashes of PostgreSQL; use key(…)"),
    connections: "many",
  };
}
