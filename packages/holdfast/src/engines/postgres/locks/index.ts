import type { DriverError, LockGrant, LockCall, Result, SqlConnection } from "../../../seam/database.ts";
import type { Capabilities } from "../../../seam/capabilities.ts";
import {
  type Holder,
  ReplicaError,
  RowsHiddenError,
  SchemaMissingError,
  UnsupportedError,
  UsageError,
} from "../../../seam/errors.ts";
import { classify as classifyError } from "../../../seam/failure.ts";
import type { LockRequest } from "../../../seam/key.ts";
import { sql } from "../../../seam/sql.ts";
import { namesOf } from "../dialect.ts";
import { classify } from "../errors.ts";
import { hiddenIn } from "../hidden.ts";
import { asHolder, sessionColumns } from "./holders.ts";
import { isLock, trying, waiting } from "./keys.ts";
import { left, rowHolders, takingRows } from "./lock-rows.ts";
import { atPrimary } from "../primary.ts";
import { isTrue } from "../probe.ts";
import { application, labelled, setLocal } from "../settings.ts";

export const granted: LockGrant = { granted: true };

function codeOf({ unwrap }: SqlConnection, error: unknown): unknown {
  return ((unwrap?.(error) ?? error) as { code?: unknown }).code;
}

export function failureOf({ unwrap }: SqlConnection, error: unknown) {
  return classifyError({ engine: { classify }, unwrap }, error);
}

/**
 * Whether a wait for a lock was ended by the server: by the time given for it, or by a `statement_timeout` that
 * is shorter. (A cancel of our own comes as the latter too, and then nobody asks any more.)
 */
export function waitIsOver(connection: SqlConnection, error: unknown): boolean {
  const failure = failureOf(connection, error);
  return failure === "lock-timeout" || failure === "canceled";
}

/** In one message where the client can, else one by one. */
export async function run(
  connection: SqlConnection,
  statements: readonly string[],
): Promise<readonly Result[]> {
  const { script, sequence } = connection;
  if (script) return script(statements.join("; "));
  if (sequence) return Promise.all(sequence(statements.map((text) => ({ text, values: [] }))));
  const results: Result[] = [];
  for (const text of statements) results.push(await connection.query(sql.raw(text)));
  return results;
}

/**
 * A replica's locks exclude nobody; a snapshot that outlives its statement is older than the end of the wait. READ UNCOMMITTED is READ
 * COMMITTED by another name here.
 */
const worthless =
  "pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.!~~) 'read %committed' OR pg_catalog.pg_is_in_recovery()";

export const standby = "pg_catalog.pg_is_in_recovery() AS standby";
export const isolationNow = "pg_catalog.current_setting('transaction_isolation') AS isolation";

/** Of one of several databases: fails if the map of them is another one by now. Before any lock is taken. */
export function checked(connection: SqlConnection): string[] {
  const { check } = namesOf(connection);
  return check === undefined ? [] : [`${check} AS map`];
}

/**
 * Timeout, locks, and the caller's timeout back: expressions of one SELECT, which are computed from left to right.
 * It reads no table, so its snapshot, taken before the wait, does no harm; the statement after it has a new one.
 * Flat on purpose: the old value kept in a subquery instead of a setting of our own costs 30 µs more.
 */
export function taking(
  locks: readonly LockRequest[],
  wait: LockCall["wait"],
  guarded: boolean,
  allOrError = false,
): string[] {
  const guard = (expression: string) =>
    guarded ? `CASE WHEN NOT (${worthless}) THEN ${expression} END` : expression;
  if (locks.length === 0) return [];
  if (wait === "nowait" && allOrError)
    return [`${guard(`1 OPERATOR(pg_catalog./) (${trying(locks, "xact")})::int`)} AS free`];
  if (wait === "nowait") return [`${guard(trying(locks, "xact"))} AS free`];
  const steps = [
    setLocal("holdfast.patience", "pg_catalog.current_setting('lock_timeout')"),
    ...waiting(locks, "xact").flatMap((expression, i) => [
      setLocal("lock_timeout", i === 0 ? `'${wait}'` : left(wait)),
      guard(expression),
    ]),
    setLocal("lock_timeout", "pg_catalog.current_setting('holdfast.patience')"),
  ];
  // A SELECT has at most 1,664 columns; an array's elements have no such limit, and are computed in order too.
  return [`ARRAY[${steps.join(", ")}] AS taken`];
}

const savepoint = {
  set: "SAVEPOINT holdfast_lock",
  release: "RELEASE SAVEPOINT holdfast_lock",
  undo: "ROLLBACK TO SAVEPOINT holdfast_lock",
};

/**
 * Locks in the middle of a transaction. The savepoint keeps a timeout from ruining the transaction, drops locks
 * that were granted all the same (in the same instant, or the first of several), and fails outside of a
 * transaction, where a lock would be gone at once.
 */
export async function lock(
  connection: SqlConnection,
  { locks, wait, names, capabilities }: LockCall,
): Promise<LockGrant> {
  if (capabilities.transactionLocks === "lock row") return lockRows(connection, locks, wait, names);
  // Several tries may succeed in part, and must then be undone. That they failed is an error (1 / 0), so that the
  // savepoint ends in the same message: a statement that the caller sends meanwhile fails with it, loudly, instead of
  // being undone behind its back.
  const partial = wait === "nowait" && locks.length > 1;
  const columns = [
    ...labelled(names, application),
    isolationNow,
    standby,
    ...checked(connection),
    ...taking(locks, wait, true, partial),
  ];
  const statement = `SELECT ${columns.join(", ")}`;
  let row: Result["rows"][number] | undefined;
  try {
    row = (await run(connection, [savepoint.set, statement, savepoint.release]))[1]?.rows[0];
  } catch (error) {
    const someTaken = partial && codeOf(connection, error) === "22012";
    if (!someTaken && !waitIsOver(connection, error)) throw error;
    await run(connection, [savepoint.undo, savepoint.release]);
    return someTaken
      ? { granted: false, reason: "busy", usable: true }
      : { granted: false, reason: "timeout", usable: true, cause: error };
  }
  const busy = wait === "nowait" && !partial && !isTrue(row?.free);
  if (isTrue(row?.standby)) throw new ReplicaError();
  assertReadCommitted(row?.isolation);
  return busy ? { granted: false, reason: "busy", usable: true } : granted;
}

function assertReadCommitted(isolation: unknown): void {
  if (isolation === "read committed" || isolation === "read uncommitted") return;
  throw new UsageError(
    `A lock in a ${String(isolation)} transaction protects nothing: its snapshot is older than the end of the wait, so ` +
      `the check would read what was true before. Open the transaction as READ COMMITTED, or use hf.transaction({ lock, isolation }).`,
    "HF_ISOLATION",
  );
}

/** The same by rows. A savepoint's end gives those back that were locked in it. */
async function lockRows(
  connection: SqlConnection,
  locks: readonly LockRequest[],
  wait: LockCall["wait"],
  names: readonly string[],
): Promise<LockGrant> {
  const settings = `SELECT ${[...labelled(names, application), isolationNow, ...checked(connection)].join(", ")}`;
  try {
    // One message where the client can: a neighbour's statement that came in between would be undone with it.
    const [, found] = await run(connection, [
      savepoint.set,
      settings,
      takingRows(locks, wait, names, namesOf(connection)),
      savepoint.release,
    ]);
    assertReadCommitted(found?.rows[0]?.isolation);
    return granted;
  } catch (error) {
    if (!waitIsOver(connection, error)) throw explain(connection, error);
    await run(connection, [savepoint.undo, savepoint.release]);
    return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: true, cause: error };
  }
}

/** A table of ours that is not there needs a migration, not a look at SQL that the caller never wrote. */
export function explain(connection: SqlConnection, error: unknown): unknown {
  const failure = failureOf(connection, error);
  if (failure === "schema-missing")
    return new SchemaMissingError(`The table ${namesOf(connection).own("lock")}`, error);
  const rows = hiddenIn(namesOf(connection))((connection.unwrap?.(error) ?? error) as DriverError);
  if (rows) return new RowsHiddenError(undefined, rows, error);
  return failure === "read-only"
    ? new UnsupportedError(
        "A lock in a read-only transaction: here a lock is a row, and is written to. Leave `readOnly` out.",
        error,
      )
    : error;
}

export async function holders(
  connection: SqlConnection,
  locks: readonly LockRequest[],
  capabilities: Capabilities,
): Promise<Holder[]> {
  if (capabilities.transactionLocks === "lock row") return rowHolders(connection, locks);
  const { rows } = await connection.query(
    sql.raw(`SELECT DISTINCT ${sessionColumns.replace("a.pid", "l.pid")}
      FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) l.pid
      WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.granted AND l.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()
        AND l.database OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database())
        AND (${locks.map((each) => isLock("l.", each)).join(" OR ")}) AND (SELECT ${atPrimary})`),
  );
  return rows.map(asHolder);
}
