/** What stands between this client and the server, as far as it decides where statements go. */
import { randomUUID } from "node:crypto";
import type { Capabilities, Unsupported } from "../../seam/capabilities.ts";
import type { Failure, SqlConnection } from "../../seam/database.ts";
import { ReplicaError, UnsupportedError } from "../../seam/errors.ts";
import { classify as classifyError, explained } from "../../seam/failure.ts";
import { sql } from "../../seam/sql.ts";
import { within } from "../../waiting/interrupt.ts";
import { classify, hopeless, noTransactions } from "./errors.ts";

/**
 * For the first question: how the server sees the other end of the connection, and whether the question is a transaction of
 * its own. (In a block the statement begins later than the transaction did: BEGIN was another message.)
 */
export const seen =
  "pg_catalog.concat(pg_catalog.host(pg_catalog.inet_client_addr()), ' ', pg_catalog.inet_client_port()) AS peer, pg_catalog.now() OPERATOR(pg_catalog.=) pg_catalog.statement_timestamp() AS alone";

/** Whether the server sees the very end of the socket that this client has: then nobody is in between. */
export const isDirect = ({ socket }: SqlConnection, peer: unknown) => socket !== undefined && socket === peer;

interface Seen {
  readonly peer: unknown;
  /** It may be inside of a transaction. */
  readonly inside: boolean;
}

/**
 * pgpool-II sends what only reads to a standby, also inside of a transaction, unless it has seen a write in it; of several
 * statements in one message it judges the first. A body under a lock then reads what was true before: 50 of 50 accepted with a
 * limit of 10. So does everything that is done under a lease, statement by statement, and nothing here could prevent that.
 * It chooses a standby per session, or per statement, so that no experiment on one connection shows it: it is asked by name.
 *
 * The server's own answer is an error, in its log. It is spared where the server sees the very end of the socket that this
 * client has: then nobody is in between.
 */
export async function lookBetween(connection: SqlConnection, { peer, inside }: Seen): Promise<string> {
  if (isDirect(connection, peer)) return "";
  const version = inside ? await askedInside(connection) : await asked(connection, "SHOW pool_version");
  // "4.3.5 (tamahomeboshi)".
  if (version !== untold && !/^\d+\.\d/.test(version ?? "")) return "";
  const pgpool = version === untold ? "pgpool-II" : `pgpool-II ${version?.split(" ")[0]}`;
  const found: string[] = [];
  for (const [name, wanted] of wantedSettings) {
    const value = await asked(connection, `PGPOOL SHOW ${name}`);
    if (value === undefined || !wanted.test(value)) found.push(`${name} = ${value ?? untold}`);
  }
  if (found.length === 0) return pgpool;
  throw new UnsupportedError(
    `${pgpool} stands between this client and the server, and may answer from elsewhere than from the primary ` +
      `(${found.join(", ")}), also inside of a transaction: a check under a lock would read what was true before. Give ` +
      `Holdfast an address that leads to the primary itself, or restart pgpool-II with load_balance_mode = off, ` +
      `memory_cache_enabled = off and backend_clustering_mode = streaming_replication`,
  );
}

const wantedSettings: readonly (readonly [name: string, wanted: RegExp])[] = [
  ["load_balance_mode", /^off$/],
  ["memory_cache_enabled", /^off$/],
  // The others repeat writes, and locks, on every server.
  ["backend_clustering_mode", /^(?:streaming_replication|raw)$/],
];

function failureOf({ unwrap }: SqlConnection, error: unknown): Failure | undefined {
  return classifyError({ engine: { classify }, unwrap }, error);
}

/** It has no such setting, or no such statement; pgpool-II says so of its own settings by the last one. */
const unknown = new Set(["42704", "42601", "0A000", "XX000"]);
const untold = "(not told)";

/** The one value of the answer; undefined if the server does not know what is meant. */
async function asked(connection: SqlConnection, question: string): Promise<string | undefined> {
  try {
    const { rows } = await (connection.untyped?.(question) ?? connection.query(sql.raw(question)));
    return String(Object.values(rows[0] ?? {})[0]);
  } catch (error) {
    const { code } = (connection.unwrap?.(error) ?? error) as { code?: unknown };
    if (unknown.has(String(code))) return undefined;
    // Prisma can make nothing of the types of pgpool-II's columns: then there was an answer.
    if (failureOf(connection, error) === undefined && !/^(?!P\d)[0-9A-Z]{5}$/.test(String(code)))
      return untold;
    throw error;
  }
}

/** The same inside of a transaction, which an error must not end. */
async function askedInside(connection: SqlConnection): Promise<string | undefined> {
  const say = (text: string) => connection.query(sql.raw(text));
  try {
    await say("SAVEPOINT holdfast_between");
  } catch (error) {
    if (failureOf(connection, error) !== "not-in-transaction") throw error;
    return asked(connection, "SHOW pool_version");
  }
  const version = await asked(connection, "SHOW pool_version");
  await say("ROLLBACK TO SAVEPOINT holdfast_between");
  await say("RELEASE SAVEPOINT holdfast_between");
  return version;
}

/** A cache gives the same answer to the same question. The first one was asked by nobody before. */
export async function verifyReads(
  connection: SqlConnection,
  { details }: Pick<Capabilities, "details">,
): Promise<void> {
  if (details?.["between"] === false) return;
  const question = sql`SELECT ${randomUUID()}::pg_catalog.text AS id, pg_catalog.clock_timestamp()::pg_catalog.text AS clock`;
  const ask = async () => (await connection.query(question)).rows[0]?.["clock"];
  const first = await ask();
  if (first !== undefined && first === (await ask())) throw ReplicaError.cache();
}

/**
 * A pooler in statement mode ends the session that sends BEGIN, and not every client passes its words on. Where the connection has
 * just answered, its end at BEGIN is taken for them.
 */
export async function verifyTransactions(
  connection: SqlConnection,
  { details }: Capabilities,
): Promise<Unsupported | undefined> {
  if (details?.["direct"] === true) return undefined;
  await connection.query(sql.raw("SELECT 1 AS one"));
  try {
    await connection.query(sql.raw("BEGIN"));
  } catch (error) {
    const { unwrap } = connection;
    const refused = explained({ engine: { classify, hopeless }, unwrap }, error) instanceof UnsupportedError;
    if (!refused && failureOf(connection, error) !== "lost") throw error;
    await ended(connection);
    return noTransactions;
  }
  await connection.query(sql.raw("ROLLBACK"));
  return undefined;
}

const endMs = 1000;

/** It comes after the error that tells of it, and until then a pool takes the connection back. */
async function ended({ lost }: SqlConnection): Promise<void> {
  const end = new Promise<void>((resolve) => lost.addEventListener("abort", () => resolve(), { once: true }));
  if (!lost.aborted) await within(endMs, end).catch(() => {});
}
