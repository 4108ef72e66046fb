import { type Capabilities, type Unsupported, unsupported } from "../../core/capabilities.ts";
import type { ClientTraits, Isolation, Result, SqlConnection } from "../../core/database.ts";
import { ReplicaError, ServerTooOldError, UnsupportedError } from "../../core/errors.ts";
import { sql } from "../../core/sql.ts";
import { sleep } from "../../core/wait.ts";

const minimum = 140000;

/** One question at first use. Aliases are single words: clients may rewrite the case of names with underscores. */
const question = sql.raw(`SELECT current_setting('server_version_num') AS number, version() AS version,
  pg_is_in_recovery() AS standby, current_setting('default_transaction_isolation') AS isolation,
  concat(current_setting('transaction_timeout', true), current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout')) AS timeouts`);

export async function probe(connection: SqlConnection, traits: ClientTraits): Promise<Capabilities> {
  const [row] = (await connection.query(question)).rows;
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
  const one = traits.single
    ? unsupported(`${traits.client} has one connection for everybody: a session lock would exclude nobody`)
    : undefined;
  const noSession: Unsupported | undefined =
    one ??
    (traits.pinned
      ? undefined
      : unsupported(`${traits.client} gives no connection of one's own outside of a transaction`));
  return {
    engine: "postgres",
    flavour: traits.client === "pglite" ? "pglite" : "postgres",
    version: full.split(" ")[1] ?? String(number),
    client: traits.client,
    transactionLocks: "transaction advisory",
    joinedLocks: "transaction advisory",
    sessionLocks: noSession ?? "session advisory",
    sharedLocks: true,
    granularity: traits.embedded ? "database" : "key",
    lockIsolation: ["read committed"],
    lockFirstIsolation: noSession ? [] : ["serializable"],
    isolation: ["read committed", "repeatable read", "serializable"],
    defaultIsolation: String(row?.isolation) as Isolation,
    cancel:
      traits.cancel ||
      unsupported(
        `${traits.client} cannot cancel a running statement: an abort takes effect when the wait ends`,
      ),
    serverDeadline: traits.embedded ? unsupported("the server runs in this process") : true,
    commitOutcome: true,
    holders: one ? unsupported("with one connection the holder is somebody in this process") : true,
    foreignKeys: true,
    connections: traits.single ? "one" : "many",
    details: { transactionTimeout: number >= 170000, timeouts: !/^0*$/.test(String(row?.timeouts)) },
  };
}

/** They speak the protocol, but their advisory locks are missing or lock nothing: https://github.com/cockroachdb/cockroach/issues/13546 */
function refuseLookAlikes(version: string): void {
  const found = /CockroachDB|Aurora DSQL|Spanner|Materialize|Redshift/i.exec(version);
  if (found)
    throw new UnsupportedError(
      `${found[0]} answers like PostgreSQL, but its advisory locks are missing or lock nothing; Holdfast does not lock there yet`,
    );
}

export function isTrue(value: unknown): boolean {
  return value === true || value === "t" || value === "true";
}

const lent =
  "a pooler in transaction mode stands between this client and the server, so a session lock would be left behind on a " +
  "connection that others use. Connect to the server directly for these, or use locks of a transaction.";

async function backend(connection: SqlConnection): Promise<string> {
  return String((await connection.query(sql.raw("SELECT pg_backend_pid() AS pid"))).rows[0]?.pid);
}

/**
 * Whether two connections keep their own sessions. A pooler in transaction mode lends a session out per
 * transaction: while B is inside one, A's next statement must run elsewhere, or wait for one. An idle pooler shows
 * nothing, and on a busy one a single try can miss it, hence the repetition.
 */
export async function verifySessions(a: SqlConnection, b: SqlConnection): Promise<void> {
  for (let round = 0; round < 5; round++) {
    const before = await backend(a);
    await b.query(sql.raw("BEGIN"));
    let inside: string;
    let after: string | undefined;
    const asked = backend(a);
    try {
      inside = await backend(b);
      after = await Promise.race([asked, sleep(2000).then(() => undefined)]);
    } finally {
      await b.query(sql.raw("ROLLBACK"));
    }
    await asked;
    if (before !== after || inside === before) throw new UnsupportedError(lent);
  }
}

export function lastRow(results: readonly Result[]): Result["rows"][number] | undefined {
  return results.at(-1)?.rows[0];
}
