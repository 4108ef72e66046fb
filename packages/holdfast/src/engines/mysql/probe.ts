import { type Probed, type Strategy, isSupported, unsupported } from "../../seam/capabilities.ts";
import type { ClientTraits, Isolation, SqlConnection } from "../../seam/database.ts";
import { ReplicaError, ServerTooOldError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import {
  type ClusterGaps,
  galera,
  group,
  noForeignKeys,
  noOutcome,
  noServerDeadline,
  noSharedLocks,
  noTableLocks,
  noWake,
  vitess,
  vitessSilence,
} from "./gaps.ts";
import { serverOf, serverSettings } from "./outcome.ts";

const isolation: readonly Isolation[] = ["read committed", "repeatable read", "serializable"];
/** What was only read is compared with nothing at COMMIT: of 20 pairs on two nodes, 10 did what no order of them could have. */
const clusterIsolation = isolation.filter((level) => level !== "serializable");

/**
 * Settings that not every member of the family has are asked for by name: `@@name` would be an error. Everybody may see
 * them, which is not so of the tables that tell of a cluster. Of the server, as a session may have its own.
 */
const settings = sql.raw(
  `SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wsrep_on', 'group_replication_single_primary_mode', 'version_comment', 'innodb_rollback_on_timeout', 'innodb_read_only', 'performance_schema', ${serverSettings})`,
);

/**
 * That is how the server is set up, not how many nodes there are now: another one can join at any time, and a group can
 * begin. Only a group can have several primaries, and only with this setting off; without the plugin it is not there.
 */
function clusterOf(found: ReadonlyMap<string, string>): ClusterGaps | undefined {
  if (isOn(found.get("wsrep_on"))) return galera;
  const single = found.get("group_replication_single_primary_mode");
  return single === undefined || isOn(single) ? undefined : group;
}

const isOn = (value: string | undefined) => value === "ON" || value === "1";

export async function probe(
  connection: SqlConnection,
  traits: ClientTraits,
  wish?: Strategy,
): Promise<Probed> {
  if (wish !== undefined && wish !== "lock row")
    throw new UnsupportedError(`strategy "${wish}": here locks of a transaction are "lock row"`);
  const [row] = (
    await connection.query(sql`SELECT VERSION() AS version, @@read_only AS readonly, DATABASE() AS db`)
  ).rows;
  // Every check here compares what it has read by name: without names it would compare nothing.
  if (row?.version === undefined)
    throw new UsageError(
      "This client's rows have no names of columns: turn the option off that makes arrays of them (`rowsAsArray`)",
    );
  const version = String(row.version);
  const maria = /mariadb/i.test(version);
  const [major = 0, minor = 0] = version.split(".").map(Number);
  if (maria ? major < 10 || (major === 10 && minor < 6) : major < 8 || (major === 8 && minor < 4)) {
    throw new ServerTooOldError(
      `${maria ? "MariaDB" : "MySQL"} ${version}`,
      maria ? "MariaDB 10.6" : "MySQL 8.4",
      "SKIP LOCKED, NOWAIT or long-term support is missing before",
    );
  }
  if (row.db === null)
    throw new UnsupportedError("No database is selected: put its name into the connection's URL or options");
  const found = new Map(
    (await connection.query(settings)).rows.map((each) => [
      String(each["Variable_name"]),
      String(each["Value"]),
    ]),
  );
  const on = (name: string) => isOn(found.get(name));
  if (Number(row.readonly) === 1 || on("innodb_read_only")) throw new ReplicaError();
  const cluster = clusterOf(found);
  const levels = cluster ? clusterIsolation : isolation;
  const isVitess = /vitess/i.test(`${version} ${found.get("version_comment") ?? ""}`);
  const sessionLocks = cluster ? cluster.session : isVitess ? vitess : ("session advisory" as const);
  return {
    engine: "mysql",
    flavour: maria ? "mariadb" : "mysql",
    version,
    client: traits.client,
    transactionLocks: cluster?.locks ?? "lock row",
    joinedLocks: cluster?.locks ?? "lock row",
    sessionLocks,
    exclusion: cluster ? "at commit" : "held",
    sharedLocks: noSharedLocks,
    rowLocks: cluster ? cluster.rows : ["update", "share"],
    tableLocks: noTableLocks,
    leases: cluster ? cluster.leases : true,
    wake: noWake,
    versions: true,
    once: cluster?.locks ?? true,
    ...(cluster && {
      quotas: cluster.patterns,
      stock: cluster.patterns,
      queues: cluster.patterns,
      schedules: cluster.patterns,
      audit: cluster.patterns,
    }),
    savepoints: true,
    granularity: "key",
    lockIsolation: levels,
    lockFirstIsolation: [],
    isolation: levels,
    defaultIsolation: "repeatable read",
    cancel:
      traits.cancel ||
      unsupported(
        `${traits.client} cannot cancel a running statement: an abort takes effect when the wait ends`,
      ),
    serverDeadline: isVitess ? vitessSilence : traits.begins ? noServerDeadline : true,
    commitOutcome: cluster || isVitess ? noOutcome : "with a lock",
    holders: true,
    inspect: true,
    foreignKeys: noForeignKeys,
    namedLocks: !isSupported(sessionLocks) ? sessionLocks : traits.begins ? "by hf.hold" : true,
    connections: "many",
    details: {
      rollbackOnTimeout: on("innodb_rollback_on_timeout"),
      performanceSchema: on("performance_schema"),
      server: serverOf(found),
    },
  };
}
