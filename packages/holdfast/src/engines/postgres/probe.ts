import {
  type Capabilities,
  type Probed,
  type Strategy,
  type Unsupported,
  unsupported,
} from "../../seam/capabilities.ts";
import type {
  ClientTraits,
  DriverError,
  Isolation,
  Result,
  Row,
  SqlConnection,
} from "../../seam/database.ts";
import { ReplicaError, ServerTooOldError, UnsupportedError } from "../../seam/errors.ts";
import { Silence, within } from "../../waiting/interrupt.ts";
import { sleep } from "../../waiting/wait.ts";
import { own, sql } from "../../seam/sql.ts";
import { rowStrengths, tableModes } from "../../seam/tables.ts";
import { isDirect, lookBetween, seen } from "./pooler.ts";

/** As a client may have it of a server that goes down in the middle: no error, and no row. */
class NoAnswer extends Error {
  readonly lost = true;
  constructor() {
    super("the server ended the connection without an answer");
  }
}

const minimum = 140000;
/** From here on it costs nothing to ask when the server has last recovered from a crash; see outcome.ts. */
const witnessMinimum = 150000;

/** One question at first use. Aliases are single words: clients may rewrite the case of names with underscores. */
const question =
  sql.raw(`SELECT pg_catalog.current_setting('server_version_num') AS number, pg_catalog.version() AS version,
  pg_catalog.pg_is_in_recovery() AS standby, pg_catalog.pg_backend_pid() AS pid, pg_catalog.current_setting('default_transaction_isolation') AS isolation,
  pg_catalog.concat(pg_catalog.current_setting('transaction_timeout', true), pg_catalog.current_setting('statement_timeout'), pg_catalog.current_setting('idle_in_transaction_session_timeout')) AS timeouts,
  pg_catalog.current_setting('array_nulls') AS nulls, pg_catalog.current_setting('extra_float_digits') AS digits,
  ${seen},
  pg_catalog.has_function_privilege(pg_catalog.to_regprocedure('pg_catalog.pg_control_system()')::pg_catalog.oid, 'EXECUTE') AS cluster,
  pg_catalog.has_column_privilege(pg_catalog.to_regclass('pg_catalog.pg_subscription')::pg_catalog.oid, 'subenabled', 'SELECT') AS subscriptions,
  pg_catalog.to_regclass('pg_catalog.pg_dist_local_group') IS NOT NULL AS citus`);

export async function probe(
  connection: SqlConnection,
  traits: ClientTraits,
  wish?: Strategy,
): Promise<Probed> {
  const probed = await probeServer(connection, traits, wish);
  if (!probed.details?.["citus"]) return probed;
  await refuseNode(connection);
  return { ...probed, commitOutcome: nodesDecide };
}

/** Whatever node of Citus it is. */
export async function probeServer(
  connection: SqlConnection,
  traits: ClientTraits,
  wish?: Strategy,
): Promise<Probed> {
  if (wish !== undefined && wish !== "transaction advisory" && wish !== "lock row")
    throw new UnsupportedError(`strategy "${wish}": here locks are "transaction advisory" or "lock row"`);
  const [row] = (await connection.query(question)).rows;
  if (!row) throw new NoAnswer();
  if (!("number" in row))
    throw new UnsupportedError(
      `This client renames columns (number became ${Object.keys(row)[0]}), so what the server answers cannot be read. Leave out the transform of result names for Holdfast's client`,
    );
  const number = Number(row?.number);
  const full = String(row?.version);
  refuseLookAlikes(full);
  if (!(number >= minimum)) {
    throw new ServerTooOldError(
      `PostgreSQL ${Math.floor(number / 10000)}`,
      "PostgreSQL 14",
      "older ones no longer get fixes from their makers",
    );
  }
  if (isTrue(row?.standby)) throw new ReplicaError();
  refuseSettings(row);
  const pooler = traits.embedded
    ? ""
    : await lookBetween(connection, { peer: row?.peer, inside: !isTrue(row?.alone) });
  const { holds, subscription } = await look(connection, wish !== "lock row", isTrue(row?.subscriptions));
  const empty = wish !== "lock row" && !holds;
  if (empty && wish === "transaction advisory")
    throw new UnsupportedError(
      `strategy "${wish}": advisory locks are missing on this server, or lock nothing`,
    );
  const byRows =
    empty || wish === "lock row"
      ? unsupported(
          empty
            ? "advisory locks are missing on this server, or lock nothing; locks of transactions are rows instead"
            : 'with the strategy "lock row" locks last as long as the transaction; use a lease for longer ones',
        )
      : undefined;
  const strategy = byRows ? "lock row" : "transaction advisory";
  const one = traits.single
    ? unsupported(`${traits.client} has one connection for everybody: a session lock would exclude nobody`)
    : undefined;
  const noSession: Unsupported | undefined =
    one ??
    byRows ??
    (traits.pinned
      ? undefined
      : unsupported(`${traits.client} gives no connection of one's own outside of a transaction`));
  return {
    engine: "postgres",
    flavour: traits.client === "pglite" ? "pglite" : "postgres",
    version: full.split(" ")[1] ?? String(number),
    client: traits.client,
    transactionLocks: strategy,
    joinedLocks: strategy,
    sessionLocks: noSession ?? "session advisory",
    exclusion: "held",
    sharedLocks: byRows ? unsupported("lock rows are taken exclusively; use a shared lease") : true,
    rowLocks: rowStrengths,
    tableLocks: tableModes,
    leases: true,
    wake:
      traits.listen ||
      unsupported(
        `${traits.client} does not tell of messages of the server: a wait for a lease looks again and again`,
      ),
    versions: true,
    once: true,
    savepoints: true,
    granularity: traits.embedded ? "database" : "key",
    lockIsolation: ["read committed"],
    lockFirstIsolation: noSession || traits.begins ? [] : ["serializable"],
    isolation: ["read committed", "repeatable read", "serializable"],
    defaultIsolation: String(row?.isolation) as Isolation,
    cancel:
      traits.cancel ||
      unsupported(
        `${traits.client} cannot cancel a running statement: an abort takes effect when the wait ends`,
      ),
    serverDeadline: traits.embedded ? unsupported("the server runs in this process") : true,
    commitOutcome: true,
    holders: byRows
      ? unsupported("a lock row that is locked for the first time does not say by whom")
      : one
        ? unsupported("with one connection the holder is somebody in this process")
        : true,
    inspect: true,
    currentReads: true,
    namedLocks: unsupported("key.getLock is the lock of GET_LOCK on MySQL and MariaDB; use key(…)"),
    foreignKeys: byRows
      ? unsupported("key.hashtext and key.hashtextextended are advisory locks, which are not used here")
      : true,
    connections: traits.single ? "one" : "many",
    ...(subscription !== undefined && {
      primary: unsupported(
        `it subscribes to tables of Holdfast's own on another server (subscription ${JSON.stringify(subscription)})`,
      ),
    }),
    details: {
      transactionTimeout: number >= 170000,
      witness: number >= witnessMinimum,
      system: isTrue(row?.cluster) ? await systemOf(connection) : "",
      timeouts: !/^0*$/.test(String(row?.timeouts)),
      ...(isTrue(row?.citus) && { citus: true }),
      // Its name, where it tells.
      ...(pooler !== "" && { pooler }),
      ...((traits.embedded || isDirect(connection, row?.peer)) && { between: false }),
      // A pooler hands out ids of its own; pgpool-II that of a session that it lends again.
      direct: pooler === "" && connection.pid !== undefined && String(connection.pid) === String(row?.pid),
    },
  };
}

/** Takes an advisory lock and looks whether it is held. Shared: several processes may be asking. The server drops it by itself. */
const experiment =
  sql.raw(`(SELECT s.taken AND EXISTS (SELECT FROM pg_catalog.pg_locks l WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.granted
  AND l.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() AND l.classid OPERATOR(pg_catalog.=) 1751936868::pg_catalog.oid AND l.objid OPERATOR(pg_catalog.=) 1718186867::pg_catalog.oid)
  FROM (SELECT pg_catalog.pg_try_advisory_xact_lock_shared(((1751936868::bigint OPERATOR(pg_catalog.<<) 32) OPERATOR(pg_catalog.|) 1718186867)) AS taken OFFSET 0) s)`);

/** The first subscription that writes to tables of ours. */
const subscribed = sql`(SELECT pg_catalog.min(s.subname::pg_catalog.text) FROM pg_catalog.pg_subscription s
  JOIN pg_catalog.pg_subscription_rel r ON r.srsubid OPERATOR(pg_catalog.=) s.oid JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) r.srrelid
  JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace WHERE s.subenabled AND n.nspname OPERATOR(pg_catalog.=) ${own.schema})`;

/** Tells whether advisory locks hold, and which subscription feeds our tables, in one statement. Asks only for what is wanted, and allowed. */
async function look(
  connection: SqlConnection,
  locks: boolean,
  subscriptions: boolean,
): Promise<{ readonly holds: boolean; readonly subscription?: string }> {
  try {
    const { rows } = await connection.query(
      sql`SELECT ${locks ? experiment : sql`false`} AS holds, ${subscriptions ? subscribed : sql`NULL`} AS subscription`,
    );
    const { holds, subscription } = rows[0] ?? {};
    return { holds: isTrue(holds), ...(typeof subscription === "string" && { subscription }) };
  } catch (error) {
    const { code } = (connection.unwrap?.(error) ?? error) as { code?: unknown };
    // No such function, not built in, or not for this user.
    if (code === "42883" || code === "0A000" || code === "42501") return { holds: false };
    throw error;
  }
}

/** Refuses settings of the session, by name, under which values arrive as others. */
function refuseSettings({ nulls, digits }: Row): void {
  const refuse = (what: string, why: string, fix: string) => {
    throw new UnsupportedError(
      `${what} in this session, so ${why}. ${fix}, for the role, or in the options of the connection`,
    );
  };
  if (nulls === "off")
    refuse("array_nulls is off", "a missing value in a list becomes the text NULL", "Set it to on");
  if (Number(digits) < 0)
    refuse(`extra_float_digits is ${String(digits)}`, "the server rounds points in time", "Set it to 1");
}

/** They speak the protocol, but their advisory locks are missing or lock nothing: https://github.com/cockroachdb/cockroach/issues/13546 */
function refuseLookAlikes(version: string): void {
  const found = /CockroachDB|Aurora DSQL|Spanner|Materialize|Redshift/i.exec(version);
  if (found)
    throw new UnsupportedError(
      `${found[0]} answers like PostgreSQL, but its advisory locks are missing or lock nothing; Holdfast does not lock there yet`,
    );
}

/** Of Citus. The node that was asked may have nothing to commit itself, or may fail after another one has. */
export const nodesDecide = unsupported(
  "this is Citus: what another node has committed is not to be seen in the transaction of the node that was asked",
);

/** No refusal of the statement: the node that was asked has got into trouble, or says no more than that another one has. */
const inTrouble = /^(?:08|53|57P|58|XX)/;

export function mayBeKept({ code }: DriverError, { commitOutcome }: Capabilities): boolean {
  return commitOutcome === nodesDecide && inTrouble.test(String(code));
}

/** The number of the node's group in Citus. 0: the coordinator. */
export async function groupOf(connection: SqlConnection): Promise<number> {
  const { rows } = await connection.query(
    sql.raw("SELECT groupid AS number FROM pg_catalog.pg_dist_local_group"),
  );
  return Number(rows[0]?.number ?? 0);
}

/** Whether Citus keeps our schema on one of its nodes. Undefined: there is none, or one before 12, which keeps no schemas. */
export async function isSpread(connection: SqlConnection): Promise<boolean | undefined> {
  const [known] = (
    await connection.query(
      sql.raw("SELECT pg_catalog.to_regclass('pg_catalog.pg_dist_schema') IS NOT NULL AS known"),
    )
  ).rows;
  if (!isTrue(known?.known)) return undefined;
  const { rows } = await connection.query(
    sql`SELECT 1 AS one FROM pg_catalog.pg_dist_schema s JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) s.schemaid WHERE n.nspname OPERATOR(pg_catalog.=) ${own.schema}`,
  );
  return rows.length > 0;
}

/**
 * Citus: each node has its own advisory locks, and a lock row may be on another node than the data, whose COMMIT comes later.
 * (Seen from a worker: a counter at 474 after 800 commits.) And our functions are not for tables on another node.
 */
async function refuseNode(connection: SqlConnection): Promise<void> {
  const group = await groupOf(connection);
  if (group !== 0)
    throw new UnsupportedError(
      `This is a worker node of Citus (group ${group}): a lock that is taken here excludes nobody who is connected to the coordinator or to another node. Connect to the coordinator`,
    );
  if (await isSpread(connection))
    throw new UnsupportedError(
      "Citus keeps this schema of Holdfast's on one of its nodes: open it with fromCitus of holdfast/citus, e.g. holdfast(fromCitus(fromPg(pool)), { schema })",
    );
}

/** Names the cluster, which a failover leaves as it is. */
export async function systemOf(connection: SqlConnection): Promise<string> {
  const [row] = (
    await connection.query(
      sql.raw("SELECT system_identifier::pg_catalog.text AS system FROM pg_catalog.pg_control_system()"),
    )
  ).rows;
  return String(row?.system ?? "");
}

export function isTrue(value: unknown): boolean {
  return value === true || value === "t" || value === "true";
}

const lent =
  "a pooler in transaction mode stands between this client and the server, so a session lock would be left behind on a " +
  "connection that others use. Connect to the server directly for these, or use locks of a transaction.";

interface Backend {
  readonly pid: string;
  /** Nobody is in between. */
  readonly direct: boolean;
}

async function backend(connection: SqlConnection): Promise<Backend> {
  const [row] = (await connection.query(sql.raw(`SELECT pg_catalog.pg_backend_pid() AS pid, ${seen}`))).rows;
  return { pid: String(row?.pid), direct: isDirect(connection, row?.["peer"]) };
}

/** A pooler on a busy machine needs a moment until it can lend again what has come back. */
const pausesMs = [0, 1, 4, 16, 32];

/**
 * Whether two connections keep their own sessions, each one from the first statement to the last. A pooler in transaction mode
 * lends a session out per transaction: while B is inside one, A's next statement must run elsewhere, or wait for one; and what
 * one of them has used, the other may get next. An idle pooler shows little, and on a busy one a single try can miss it, hence
 * the repetition. One that lends its sessions in turn (`server_round_robin` of PgBouncer, Odyssey) gives each its old one again
 * if they ask in step, so they ask in an order that is left to chance. (Asked in the same order each time: 11 of 40 believed to
 * have one of their own behind Odyssey.) One that lends first what came back last gives each its old one again if they ask faster than
 * it takes sessions back, so there are pauses. (Without them: 1 of 40, once in a full run of the tests.)
 */
export async function verifySessions(a: SqlConnection, b: SqlConnection): Promise<void> {
  const own = new Map([
    [a, await backend(a)],
    [b, await backend(b)],
  ]);
  if (own.get(a)?.pid === own.get(b)?.pid) throw new UnsupportedError(lent);
  const ask = async (connection: SqlConnection): Promise<void> => {
    if ((await backend(connection)).pid !== own.get(connection)?.pid) throw new UnsupportedError(lent);
  };
  const direct = [...own.values()].every((each) => each.direct);
  for (const pauseMs of pausesMs) {
    for (const each of direct ? [] : [a, b]) {
      await sleep(pauseMs);
      await ask(each);
    }
    for (let i = 0; i < 6; i++) await ask(Math.random() < 0.5 ? a : b);
    await b.query(sql.raw("BEGIN"));
    const asked = ask(a).then(() => ask(a));
    // It may fail while the others are waited for.
    asked.catch(() => {});
    try {
      await ask(b);
      // With a timer that goes with the answer: one that is left behind keeps the process.
      await within(2000, asked).catch((error: unknown) => {
        throw error instanceof Silence ? new UnsupportedError(lent) : error;
      });
    } finally {
      await b.query(sql.raw("ROLLBACK"));
      // Whoever gets A next must not wait for it.
      await asked.catch(() => {});
    }
  }
}

export function lastRow(results: readonly Result[]): Result["rows"][number] | undefined {
  return results.at(-1)?.rows[0];
}
