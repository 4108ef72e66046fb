import type {
  Begun,
  Grant,
  LockCall,
  Open,
  Result,
  SessionLocks,
  SqlConnection,
} from "../../core/database.ts";
import {
  type Holder,
  NotInTransactionError,
  ReplicaError,
  TransactionAbortedError,
  UsageError,
} from "../../core/errors.ts";
import { classify as classifyError } from "../../core/failure.ts";
import type { LockRequest } from "../../core/key.ts";
import { sql } from "../../core/sql.ts";
import { hexText } from "./dialect.ts";
import { classify } from "./errors.ts";
import { identity, trying, unlocking, waiting } from "./keys.ts";
import { isTrue, lastRow, verifySessions } from "./probe.ts";

const granted: Grant = { granted: true };

function failureOf({ unwrap }: SqlConnection, error: unknown) {
  return classifyError({ engine: { classify }, unwrap }, error);
}

const setLocal = (name: string, value: string) => `set_config('${name}', ${value}, true)`;

/** The application's own name, without the label that we may have added. */
const application = "ltrim(split_part(' ' || current_setting('application_name'), ' [', 1))";

/** "api" becomes "api [image-upload:42]" until the transaction ends; the server keeps 63 bytes. */
function labelled(label: string, local = true): string[] {
  return label === ""
    ? []
    : [`set_config('application_name', ltrim(${application} || ' [' || ${hexText(label)} || ']'), ${local})`];
}

/** Keeps a stricter setting that is there already: settings read like '30s', which is an interval's spelling too. */
function bounded(name: string, ms: number): string {
  const current = `extract(epoch FROM current_setting('${name}')::interval) * 1000`;
  return setLocal(
    name,
    `CASE WHEN ${current} BETWEEN 1 AND ${ms} THEN current_setting('${name}') ELSE '${ms}' END`,
  );
}

/** A frozen client cannot end its transaction: only the server can. Before 17 two settings stand in for one. */
function deadline({ deadlineMs, capabilities }: Open): string[] {
  if (capabilities.details?.transactionTimeout) return [bounded("transaction_timeout", deadlineMs)];
  return [
    bounded("statement_timeout", deadlineMs),
    bounded("idle_in_transaction_session_timeout", deadlineMs),
  ];
}

/**
 * Timeout, locks, and the caller's timeout back, as one statement of its own. It reads no table, so its snapshot,
 * taken before the wait, does no harm; the statement after it has a new one. Nothing is locked where a lock would
 * be worthless (a replica, a snapshot that outlives the statement): the answer says so instead.
 */
function lockStatement(
  locks: readonly LockRequest[],
  wait: LockCall["wait"],
  extra: readonly string[],
  last: readonly string[],
): string {
  const guarded = (expression: string) => `CASE WHEN s.fit THEN ${expression} END`;
  const taking =
    locks.length === 0
      ? []
      : wait === "nowait"
        ? [`${guarded(trying(locks, "xact"))} AS free`]
        : [
            setLocal("lock_timeout", `'${wait}'`),
            ...waiting(locks, "xact").map(guarded),
            setLocal("lock_timeout", "s.patience"),
          ];
  const columns = ["s.isolation", "s.standby", "s.alone", ...extra, ...taking, ...last];
  return `SELECT ${columns.join(", ")} FROM (SELECT current_setting('lock_timeout') AS patience, i.isolation, i.standby,
    now() = statement_timestamp() AS alone, i.isolation = 'read committed' AND NOT i.standby AS fit
    FROM (SELECT current_setting('transaction_isolation') AS isolation, pg_is_in_recovery() AS standby OFFSET 0) i OFFSET 0) s`;
}

const isolationSql = {
  "read uncommitted": "READ UNCOMMITTED",
  "read committed": "READ COMMITTED",
  "repeatable read": "REPEATABLE READ",
  serializable: "SERIALIZABLE",
} as const;

/** Assigned after the wait, so that a waiter does not hold back what vacuum may clean. */
const xid = "CASE WHEN NOT s.standby THEN pg_current_xact_id()::text END AS xid";

export async function begin(connection: SqlConnection, open: Open): Promise<Grant & { begun?: Begun }> {
  const { begun, isolation, readOnly, wait, label } = open;
  const [before, locks] = open.lockFirst ? [open.locks, []] : [[], open.locks];
  if (before.length > 0) {
    const grant = await session.take(connection, {
      locks: before,
      wait,
      label: "",
      joined: false,
      capabilities: open.capabilities,
    });
    if (!grant.granted) return grant;
  }
  const readOnlyLate = begun && readOnly ? [setLocal("transaction_read_only", "'on'")] : [];
  const statement = lockStatement(
    locks,
    wait,
    [...labelled(label), ...deadline(open), ...readOnlyLate],
    readOnly ? [] : [xid],
  );
  let row: Result["rows"][number] | undefined;
  try {
    if (begun) row = (await connection.query(sql.raw(statement))).rows[0];
    else {
      const start = `BEGIN ISOLATION LEVEL ${isolationSql[isolation]}${readOnly ? " READ ONLY" : ""}`;
      row = lastRow(await run(connection, [start, statement]));
    }
  } catch (error) {
    if (before.length > 0) await session.clear(connection, before).catch(() => {});
    if (locks.length === 0 || failureOf(connection, error) !== "lock-timeout") throw error;
    return { granted: false, reason: "timeout", usable: false, cause: error };
  }
  if (isTrue(row?.standby) && (open.locks.length > 0 || !readOnly)) throw new ReplicaError();
  if (begun && row?.isolation !== isolation) {
    throw new UsageError(
      `The client opened the transaction as ${String(row?.isolation)}, not as ${isolation}`,
      "HF_ISOLATION",
    );
  }
  if (locks.length > 0 && wait === "nowait" && !isTrue(row?.free))
    return { granted: false, reason: "busy", usable: false };
  return { granted: true, begun: { identity: row?.xid as string | undefined, sessionLocks: before } };
}

/** In one message where the client can, else one by one. */
async function run(connection: SqlConnection, statements: readonly string[]): Promise<readonly Result[]> {
  if (connection.script) return connection.script(statements.join("; "));
  const results: Result[] = [];
  for (const text of statements) results.push(await connection.query(sql.raw(text)));
  return results;
}

const savepoint = {
  set: "SAVEPOINT holdfast_lock",
  release: "RELEASE SAVEPOINT holdfast_lock",
  undo: "ROLLBACK TO SAVEPOINT holdfast_lock",
};

/**
 * Locks in the middle of a transaction. The savepoint keeps a timeout from ruining the transaction, drops a lock
 * that was granted in the same instant, and fails outside of a transaction, where a lock would be gone at once.
 * A client that sends one statement at a time would pay two round trips for it, and goes without.
 */
export async function lock(connection: SqlConnection, { locks, wait, label }: LockCall): Promise<Grant> {
  const statement = lockStatement(locks, wait, labelled(label), []);
  // Several tries may succeed in part, and only a savepoint gives back what they took.
  const partial = wait === "nowait" && locks.length > 1;
  const protectedBy = connection.script !== undefined || partial;
  const undo = () => run(connection, [savepoint.undo, savepoint.release]);
  let row: Result["rows"][number] | undefined;
  try {
    if (protectedBy) {
      row = (await run(connection, [savepoint.set, statement, ...(partial ? [] : [savepoint.release])]))[1]
        ?.rows[0];
    } else {
      row = (await connection.query(sql.raw(statement))).rows[0];
      if (isTrue(row?.alone)) await assertInTransaction(connection);
    }
  } catch (error) {
    const failure = failureOf(connection, error);
    const inSavepoint = protectedBy && (failure === "lock-timeout" || failure === "canceled");
    if (inSavepoint) await undo();
    if (failure !== "lock-timeout") throw error;
    return { granted: false, reason: "timeout", usable: inSavepoint, cause: error };
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

/** `now()` stands still inside a transaction: equal to the statement's time, this may be no transaction at all. */
async function assertInTransaction(connection: SqlConnection): Promise<void> {
  try {
    await connection.query(sql.raw("SAVEPOINT holdfast_probe"));
    await connection.query(sql.raw("RELEASE SAVEPOINT holdfast_probe"));
  } catch (error) {
    if (failureOf(connection, error) !== "not-in-transaction") throw error;
    throw new NotInTransactionError(
      "this client is in no transaction, so the lock was gone at once. BEGIN first, or use hf.transaction(…).",
      error,
    );
  }
}

export async function end(
  connection: SqlConnection,
  how: "commit" | "rollback",
  { sessionLocks = [] }: Begun,
): Promise<boolean> {
  const { command } = await connection.query(sql.raw(how === "commit" ? "COMMIT" : "ROLLBACK"));
  const given =
    sessionLocks.length === 0 || (await session.give(connection, sessionLocks).catch(() => false));
  if (how === "commit" && command === "ROLLBACK") throw new TransactionAbortedError();
  return given;
}

const held = (request: LockRequest) =>
  `EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted AND (classid, objid, objsubid) = ${identity(request)})`;

export const session: SessionLocks<SqlConnection> = {
  async take(connection, { locks, wait, label }) {
    const until = performance.now() + (wait === "nowait" ? 0 : wait);
    for (const [i, request] of locks.entries()) {
      try {
        if (wait === "nowait") {
          const [row] = (await connection.query(sql.raw(`SELECT ${trying([request], "session")} AS free`)))
            .rows;
          if (isTrue(row?.free)) continue;
          await session.clear(connection, locks.slice(0, i));
          return { granted: false, reason: "busy", usable: true };
        }
        // Local to the statement's own transaction, so it ends with it.
        const patience = setLocal("lock_timeout", `'${Math.max(1, Math.ceil(until - performance.now()))}'`);
        await connection.query(sql.raw(`SELECT ${patience}, ${waiting([request], "session").join()}`));
      } catch (error) {
        if (failureOf(connection, error) !== "lock-timeout") throw error;
        await session.clear(connection, locks.slice(0, i + 1));
        return { granted: false, reason: "timeout", usable: true, cause: error };
      }
    }
    if (label !== "") await connection.query(sql.raw(`SELECT ${labelled(label, false).join(", ")}`));
    return granted;
  },
  async give(connection, locks) {
    // pg_advisory_unlock answers false where it did not hold the lock, and warns where nobody looks.
    const given = locks.map((request, i) => `${unlocking(request)} AS given${i}`);
    given.push(`set_config('application_name', ${application}, false)`);
    const [row] = (await connection.query(sql.raw(`SELECT ${given.join(", ")}`))).rows;
    return locks.every((_, i) => isTrue(row?.[`given${i}`]));
  },
  async clear(connection, locks) {
    // A timeout or a cancel can arrive although the lock was granted at that instant, and a session lock stays then.
    if (locks.length === 0) return;
    const given = locks.map((request) => `CASE WHEN ${held(request)} THEN ${unlocking(request)} END`);
    await connection.query(sql.raw(`SELECT ${given.join(", ")}`));
  },
  verify: verifySessions,
  async ping(connection) {
    await connection.query(sql.raw("SELECT 1 AS one"));
  },
};

export async function holders(connection: SqlConnection, locks: readonly LockRequest[]): Promise<Holder[]> {
  const { rows } = await connection.query(
    sql.raw(`SELECT DISTINCT l.pid::text AS pid, coalesce(a.application_name, '') AS application, coalesce(a.state, 'unknown') AS state,
      (extract(epoch FROM coalesce(a.xact_start, a.backend_start)) * 1000)::float8 AS since
      FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
      WHERE l.locktype = 'advisory' AND l.granted AND l.pid <> pg_backend_pid()
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (l.classid, l.objid, l.objsubid) IN (${locks.map(identity).join(", ")})`),
  );
  return rows.map((row) => ({
    pid: Number(row.pid),
    application: String(row.application),
    state: String(row.state),
    since: new Date(Number(row.since)),
  }));
}

export async function outcome(connection: SqlConnection, identity: string) {
  const [row] = (await connection.query(sql`SELECT pg_xact_status(${identity}::text::xid8) AS status`)).rows;
  const status = row?.status as string | null | undefined;
  return status === "committed" || status === "aborted" || status === "in progress" ? status : "unknown";
}
