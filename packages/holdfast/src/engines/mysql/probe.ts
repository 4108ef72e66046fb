import { type Probed, type Strategy, isSupported, unsupported } from "../../seam/capabilities.ts";
import type { ClientTraits, Isolation, Row, SqlConnection } from "../../seam/database.ts";
import { ReplicaError, ServerTooOldError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { own, sql } from "../../seam/sql.ts";
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
import { tableNames } from "./rights.ts";
import { refuseUnsafe, unsafeTable } from "./storage.ts";

const isolation: readonly Isolation[] = ["read committed", "repeatable read", "serializable"];
/** What was only read is compared with nothing at COMMIT: of 20 pairs on two nodes, 10 did what no order of them could have. */
const clusterIsolation = isolation.filter((level) => level !== "serializable");

/**
 * Settings that not every member of the family has are asked for by name: `@@name` would be an error. Everybody may see
 * them, which is not so of the tables that tell of a cluster. Of the server, as a session may have its own.
 */
const settings = `SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wsrep_on', 'group_replication_single_primary_mode', 'version_comment', 'innodb_rollback_on_timeout', 'innodb_read_only', 'performance_schema', ${serverSettings})`;

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

async function settingsOf(connection: SqlConnection, show = settings): Promise<ReadonlyMap<string, string>> {
  const { rows } = await connection.query(sql.raw(show));
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

/** Modes in which statements of ours mean something else. */
const otherMeanings: readonly (readonly [RegExp, string])[] = [
  [/\bORACLE\b/, "routines are written in another language"],
  [/\bEMPTY_STRING_IS_NULL\b/, "an empty text is stored as NULL"],
  [/\bSIMULTANEOUS_ASSIGNMENT\b/, "an UPDATE computes each column from the row as it was"],
];

/**
 * Settings of a session that statements of ours rest on, and what each of them must be while one is sent by itself. A transaction
 * says by itself what it needs. MariaDB's names for the last two are its own: each server reads what is meant for it. The isolation is last.
 */
const needs: readonly (readonly [variable: string, must: string, isFine: (value: string) => boolean])[] = [
  ["@@SESSION.autocommit", "1", (value) => value === "1"],
  ["@@SESSION.completion_type", "'NO_CHAIN'", (value) => value === "NO_CHAIN"],
  ["@@SESSION.sql_safe_updates", "0", (value) => value === "0"],
  [
    "/*!80000 @@SESSION.transaction_read_only *//*M! @@SESSION.tx_read_only */",
    "0",
    (value) => value === "0",
  ],
  [
    "/*!80000 @@SESSION.transaction_isolation *//*M! @@SESSION.tx_isolation */",
    "'READ-COMMITTED'",
    (value) => value !== "READ-UNCOMMITTED",
  ],
];

/** For `SET`: what they must be, and what they are. Undefined: nothing needs to be changed. */
function sessionOf(row: Row): { readonly needed: string; readonly found: string } | undefined {
  const odd = needs
    .map(([variable, must, isFine], i) => ({ variable, must, isFine, is: String(row[`setting${i}`]) }))
    .filter(({ is, isFine }) => !isFine(is));
  if (odd.length === 0) return undefined;
  const written = (is: string) => (/^\d+$/.test(is) ? is : `'${is}'`);
  return {
    needed: odd.map(({ variable, must }) => `${variable} = ${must}`).join(", "),
    found: odd.map(({ variable, is }) => `${variable} = ${written(is)}`).join(", "),
  };
}

/** Shorter than that, lists that the server makes would be cut. */
const shortestList = 1024;

/** Rows that the server guesses it has to look at. */
const leastJoined = 1_000_000;

/** Refuses settings of the session, by name, that cut or change what statements of ours read and write. */
export async function refuseSettings(connection: SqlConnection): Promise<void> {
  const { rows } = await connection.query(
    sql.raw(
      `SELECT @@SESSION.sql_mode AS mode, CAST(@@SESSION.sql_select_limit AS CHAR) AS cut, CAST(@@SESSION.group_concat_max_len AS CHAR) AS list,
  @@SESSION.character_set_results AS charset, IF(@@SESSION.sql_big_selects, 'DEFAULT', CAST(@@SESSION.max_join_size AS CHAR)) AS joined,
  TIMESTAMPDIFF(SECOND, NOW(), SYSDATE()) AS late`,
    ),
  );
  // Not even this answer has a row if the limit is 0.
  const {
    mode: modes = "",
    cut: most = Infinity,
    list: longest = Infinity,
    charset,
    joined,
    late,
  } = rows[0] ?? { cut: 0 };
  const refuse = (what: string, why: string, fix: string) => {
    throw new UnsupportedError(
      `${what} in this session, so ${why}. ${fix}, in the server's settings or in what the pool sends first`,
    );
  };
  const mode = String(modes);
  const [name, why] = otherMeanings.find(([pattern]) => pattern.test(mode)) ?? [];
  if (name && why !== undefined)
    refuse(`sql_mode has ${name.exec(mode)?.[0]}`, why, "Take it out of sql_mode");
  // None at all (0), too.
  const cut = Number(most);
  if (cut < 2 ** 32)
    refuse(`sql_select_limit is ${cut}`, "the server leaves rows out of every answer", "Set it to DEFAULT");
  const list = Number(longest);
  if (list < shortestList)
    refuse(
      `group_concat_max_len is ${list}`,
      "the server cuts lists that it makes",
      `Set it to ${shortestList} or more`,
    );
  if (String(charset) === "binary")
    refuse("character_set_results is binary", "texts come as bytes", "Set it to utf8mb4");
  if (Number(joined) < leastJoined)
    refuse(
      `max_join_size is ${Number(joined)}`,
      "the server refuses to join tables that are not small",
      "Set it to DEFAULT",
    );
  // NOW() is the time that the session was told, SYSDATE() the clock's.
  if (Math.abs(Number(late ?? 0)) > 60)
    refuse("timestamp is set", "its clock stands still", "Set it to DEFAULT");
}

const ownTables = sql`table_schema = DATABASE() AND table_name IN (${sql.join(tableNames.map(own.text))})`;

/** How many channels of replication run and are connected, as MariaDB tells everybody. MySQL tells nobody. */
const channels =
  "/*!80000 0 *//*M! (SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'SLAVES_RUNNING') */";

/**
 * Returns the server that this one replicates our database from, if it is seen to. `some`: a channel is known to run, for users who may
 * not see which. The channels of a group do not count: by these its members agree.
 */
async function sourceOf(
  connection: SqlConnection,
  database: string,
  maria: boolean,
  some: boolean,
): Promise<string | undefined> {
  const show = maria ? "SHOW ALL SLAVES STATUS" : "SHOW REPLICA STATUS";
  const asked = await connection.query(sql.raw(show)).catch((error: unknown) => {
    if (connection.lost.aborted) throw error;
    return undefined;
  });
  if (!asked) return some ? "another server" : undefined;
  const isFed = (row: Row) => {
    const isStopped = (what: string) =>
      (row[`Replica_${what}_Running`] ?? row[`Slave_${what}_Running`]) === "No";
    const lists = (name: string) =>
      String(row[name] ?? "")
        .split(",")
        .includes(database);
    if (String(row["Channel_Name"] ?? "").startsWith("group_replication_")) return false;
    if (isStopped("IO") && isStopped("SQL")) return false;
    return (!row["Replicate_Do_DB"] || lists("Replicate_Do_DB")) && !lists("Replicate_Ignore_DB");
  };
  const found = asked.rows.find(isFed);
  return found && String(found["Source_Host"] ?? found["Master_Host"]);
}

export async function probe(
  connection: SqlConnection,
  traits: ClientTraits,
  wish?: Strategy,
): Promise<Probed> {
  if (wish !== undefined && wish !== "lock row")
    throw new UnsupportedError(`strategy "${wish}": here locks of a transaction are "lock row"`);
  await refuseSettings(connection);
  const [row] = (
    await connection.query(
      sql`${sql.raw(
        `SELECT VERSION() AS version, @@read_only AS readonly, DATABASE() AS db, ${channels} AS channels, ${needs.map(([variable], i) => `${variable} AS setting${i}`).join(", ")}, `,
      )}${unsafeTable(ownTables)} AS unsafe`,
    )
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
  refuseUnsafe(row.unsafe);
  const on = (name: string) => isOn(found.get(name));
  if (Number(row.readonly) === 1 || on("innodb_read_only")) throw new ReplicaError();
  const source = await sourceOf(connection, String(row.db), maria, Number(row.channels) > 0);
  const cluster = clusterOf(found);
  const levels = cluster ? clusterIsolation : isolation;
  const isVitess = /vitess/i.test(`${version} ${found.get("version_comment") ?? ""}`);
  const session = sessionOf(row);
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
    defaultIsolation: String(row[`setting${needs.length - 1}`])
      .toLowerCase()
      .replace("-", " ") as Isolation,
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
    ...(source !== undefined && { primary: unsupported(`it replicates from ${source}`) }),
    details: {
      rollbackOnTimeout: on("innodb_rollback_on_timeout"),
      performanceSchema: on("performance_schema"),
      server: serverOf(found),
      ...session,
      chains: session?.needed.includes("completion_type") === true,
    },
  };
}
