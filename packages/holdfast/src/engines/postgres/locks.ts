import type { Grant, LockCall, Result, SqlConnection } from "../../core/database.ts";
import { type Holder, ReplicaError, UsageError } from "../../core/errors.ts";
import { classify as classifyError } from "../../core/failure.ts";
import type { LockRequest } from "../../core/key.ts";
import { sql } from "../../core/sql.ts";
import { classify } from "./errors.ts";
import { identity, trying, waiting } from "./keys.ts";
import { isTrue } from "./probe.ts";
import { application, labelled, setLocal } from "./settings.ts";

export const granted: Grant = { granted: true };

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
  if (connection.script) return connection.script(statements.join("; "));
  const results: Result[] = [];
  for (const text of statements) results.push(await connection.query(sql.raw(text)));
  return results;
}

/** A replica's locks exclude nobody; a snapshot that outlives its statement is older than the end of the wait. */
const worthless = "current_setting('transaction_isolation') <> 'read committed' OR pg_is_in_recovery()";

export const standby = "pg_is_in_recovery() AS standby";
export const isolationNow = "current_setting('transaction_isolation') AS isolation";

/** What is left of a wait that began with the statement. */
function left(wait: number): string {
  return `greatest(1, ${wait} - (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000)::int)::text`;
}

/**
 * Timeout, locks, and the caller's timeout back: expressions of one SELECT, which are computed from left to right.
 * It reads no table, so its snapshot, taken before the wait, does no harm; the statement after it has a new one.
 * Flat on purpose: the old value kept in a subquery instead of a setting of our own costs 30 µs more.
 */
export function taking(locks: readonly LockRequest[], wait: LockCall["wait"], guarded: boolean): string[] {
  const guard = (expression: string) =>
    guarded ? `CASE WHEN NOT (${worthless}) THEN ${expression} END` : expression;
  if (locks.length === 0) return [];
  if (wait === "nowait") return [`${guard(trying(locks, "xact"))} AS free`];
  const steps = [
    setLocal("holdfast.patience", "current_setting('lock_timeout')"),
    ...waiting(locks, "xact").flatMap((expression, i) => [
      setLocal("lock_timeout", i === 0 ? `'${wait}'` : left(wait)),
      guard(expression),
    ]),
    setLocal("lock_timeout", "current_setting('holdfast.patience')"),
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
export async function lock(connection: SqlConnection, { locks, wait, names }: LockCall): Promise<Grant> {
  const columns = [...labelled(names, application), isolationNow, standby, ...taking(locks, wait, true)];
  const statement = `SELECT ${columns.join(", ")}`;
  // Several tries may succeed in part: only the answer tells what becomes of the savepoint.
  const partial = wait === "nowait" && locks.length > 1;
  const undo = () => run(connection, [savepoint.undo, savepoint.release]);
  let row: Result["rows"][number] | undefined;
  try {
    row = (await run(connection, [savepoint.set, statement, ...(partial ? [] : [savepoint.release])]))[1]
      ?.rows[0];
  } catch (error) {
    if (!waitIsOver(connection, error)) throw error;
    await undo();
    return { granted: false, reason: "timeout", usable: true, cause: error };
  }
  const busy = wait === "nowait" && !isTrue(row?.free);
  if (partial) await (busy ? undo() : connection.query(sql.raw(savepoint.release)));
  if (isTrue(row?.standby)) throw new ReplicaError();
  if (row?.isolation !== "read committed") {
    throw new UsageError(
      `A lock in a ${String(row?.isolation)} transaction protects nothing: its snapshot is older than the end of the wait, so ` +
        `the check would read what was true before. Open the transaction as READ COMMITTED, or use hf.transaction({ lock, isolation }).`,
      "HF_ISOLATION",
    );
  }
  return busy ? { granted: false, reason: "busy", usable: true } : granted;
}

export async function holders(connection: SqlConnection, locks: readonly LockRequest[]): Promise<Holder[]> {
  const { rows } = await connection.query(
    sql.raw(`SELECT DISTINCT l.pid::text AS pid, coalesce(a.application_name, '') AS application, coalesce(a.state, 'unknown') AS state,
      (extract(epoch FROM coalesce(a.xact_start, a.backend_start)) * 1000)::float8 AS since
      FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
      WHERE l.locktype = 'advisory' AND l.granted AND l.pid <> pg_backend_pid()
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (l.classid, l.objid, l.objsubid) IN (${locks.map(identity).join(", ")})`),
  );
  return rows.map(({ pid, application: name, state, since }) => ({
    pid: Number(pid),
    application: String(name),
    state: String(state),
    since: since === null || since === undefined ? undefined : new Date(Number(since)),
  }));
}
