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

/** Whether other nodes may take writes, too. */
export async function isCluster(connection: SqlConnection): Promise<boolean> {
  return clusterOf(await settingsOf(connection)) !== undefined;
}

async function settingsOf(connection: SqlConnection): Promise<ReadonlyMap<string, string>> {
  const { rows } = await connection.query(settings);
  return new Map(rows.map((each) => [String(each["Variable_name"]), String(each["Value"])]));
}

const isOn = (value: string | undefined) => value === "ON" || value === "1";

/** "8.0.45-1", "10.11.6-MariaDB-1": what follows the three numbers is the distribution's. */
function isBefore(version: string, oldest: readonly number[]): boolean {
  const numbers = version.split(/[.-]/, 3).map(Number);
  for (const [place, least] of oldest.entries()) {
    const number = numbers[place] ?? 0;
    if (number !== least) return !(number > least);
  }
  return false;
}

/**
 * They speak the protocol, but not all that they understand is carried out: TiDB parses SKIP LOCKED and waits all the
 * same, and `GET_LOCK` of no patience waits a second there (docs/certify.md). Their numbers are those of the MySQL they
 * are like, or what their owner wrote into a setting, so they are told by their names.
 */
function refuseLookAlikes(version: string): void {
  const found = /TiDB|SingleStore|MemSQL|OceanBase|StarRocks|Doris/i.exec(version);
  if (found)
    throw new UnsupportedError(
      `${found[0]} answers like MySQL, but locks otherwise; Holdfast does not lock there yet`,
    );
}

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
  const found = await settingsOf(connection);
  refuseLookAlikes(`${version} ${found.get("version_comment") ?? ""}`);
  const oldest = maria ? [10, 6, 0] : [8, 0, 36];
  if (isBefore(version, oldest))
    throw new ServerTooOldError(
      `${maria ? "MariaDB" : "MySQL"} ${version}`,
      maria ? "MariaDB 10.6" : "MySQL 8.0.36",
      maria
        ? "SKIP LOCKED is missing before"
        : "what is older was never tried, and has not been mended for years",
    );
  if (row.db === null)
    throw new UnsupportedError("No database is selected: put its name into the connection's URL or options");
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
    currentReads: true,
    namedLocks: !isSupported(sessionLocks) ? sessionLocks : traits.begins ? "by hf.hold" : true,
    connections: "many",
    details: {
      rollbackOnTimeout: on("innodb_rollback_on_timeout"),
      performanceSchema: on("performance_schema"),
      server: serverOf(found),
    },
  };
}
