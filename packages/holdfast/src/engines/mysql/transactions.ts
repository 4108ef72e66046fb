/** How a transaction of our own begins, with its locks, and how it ends. */
import { isSupported } from "../../seam/capabilities.ts";
import type { Begun, LockGrant, Open, SqlConnection } from "../../seam/database.ts";
import {
  CommitUnknownError,
  ConnectionLostError,
  SchemaMissingError,
  TransactionAbortedError,
  UnsupportedError,
} from "../../seam/errors.ts";
import type { LockRequest } from "../../seam/key.ts";
import * as protection from "../../seam/protections.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import {
  counted,
  explain,
  heldName,
  isNamed,
  keepLocks as keepRows,
  readOnlyLock,
  session,
  takeRows,
} from "./locks.ts";
import {
  type Mark,
  forgettingUnless,
  identityOf,
  markOf,
  outcomeProcedures,
  writing,
  writingFirst,
} from "./outcome.ts";
import { byPrimary } from "./primary.ts";
import { type Procedure, procedure } from "./routines.ts";
import { beginning, commitText, failureOf, isMissing, rollbackText } from "./waits.ts";

/**
 * With autocommit off, not by START TRANSACTION: after a deadlock the server has ended the transaction, and if the
 * body swallows that error its next statements would be kept one by one. Now they begin another transaction, the
 * savepoint of the first is gone, and COMMIT is not sent.
 */
const begun = "holdfast_begun";

/**
 * A client waits for the answer to each statement: four that open and three that end a transaction with a lock are one
 * call each. With a body of one statement that is 3 round trips in place of 8, and twice the throughput. Only what is
 * there and free is had in this way; else everything but the lock is as it should be, and the statements below go on.
 *
 * SKIP LOCKED, as MariaDB has no NOWAIT in procedures. The answer is an error, not a number of rows: that of a call is
 * the last statement's on MySQL, and the sum of all on MariaDB. It has the number of NOWAIT's own.
 */
const opening = procedure(
  "begin",
  // What it has found free stays so: the row is locked by then.
  { tables: ["lock"], boundary: "begins", whole: true },
  sql`(p_id varbinary(64), p_idle int)
SQL SECURITY INVOKER
BEGIN
  DECLARE v_id varbinary(64);
  SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
  SET @holdfast_autocommit = @@autocommit, autocommit = 0;
  SET @holdfast_idle = @@SESSION.wait_timeout;
  IF p_idle IS NOT NULL THEN
    SET SESSION wait_timeout = p_idle;
  END IF;
  SAVEPOINT ${sql.raw(begun)};
  SELECT id INTO v_id FROM ${own("lock")} WHERE id = p_id FOR UPDATE SKIP LOCKED;
  UPDATE ${own("lock")} SET ${counted} WHERE id = v_id AND IS_USED_LOCK(${heldName(sql.raw("p_id"))}) IS NULL;
  IF ROW_COUNT() <> 1 THEN
    SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 3572, MESSAGE_TEXT = 'holdfast: the lock is not there, or not free';
  END IF;
END`,
);

// To turn autocommit on commits, and it is on only if that succeeded: should the call be ended half-way, it tells. The
// isolation level of this transaction is forgotten with COMMIT only, on MariaDB.
const committing = procedure(
  "commit",
  // The row that it writes is this session's own. It deletes only rows of a day ago, which nobody asks for any more.
  { tables: ["committed"], boundary: "commits", whole: true },
  sql`(p_id varbinary(32), p_number bigint)
SQL SECURITY INVOKER
BEGIN
  RELEASE SAVEPOINT ${sql.raw(begun)};
  SET SESSION wait_timeout = @holdfast_idle;
  ${writing}
  IF @holdfast_autocommit THEN
    SET autocommit = 1;
  END IF;
  COMMIT;
END`,
);

/** For those whose COMMIT comes in a message of its own. */
const settling = procedure(
  "settle",
  { tables: ["committed"], whole: true },
  sql`(p_id varbinary(32), p_number bigint, p_serializable tinyint)
SQL SECURITY INVOKER
BEGIN
  RELEASE SAVEPOINT ${sql.raw(begun)};
  ${writingFirst(sql.raw("p_id"), sql.raw("p_number"))};
  ${forgettingUnless("p_serializable")}
END`,
);

/**
 * After so many seconds without a word from its client the server ends the session, and with it the transaction: also if this
 * process is frozen, or the network is gone. It counts from each statement anew, so a client that goes on sending is not stopped by it,
 * but that one can keep its deadline by itself.
 */
function idleSeconds({ deadlineMs, capabilities }: Open): number | undefined {
  if (!protection.serverDeadline || !isSupported(capabilities.serverDeadline)) return undefined;
  return Math.min(Math.max(1, Math.ceil(deadlineMs / 1000)), longestIdle);
}

/** What every server takes. */
const longestIdle = 2_147_483;

export const transactionProcedures: readonly Procedure[] = [
  ...outcomeProcedures,
  opening,
  committing,
  settling,
];

const levels = {
  "read uncommitted": "READ-UNCOMMITTED",
  "read committed": "READ-COMMITTED",
  "repeatable read": "REPEATABLE-READ",
  serializable: "SERIALIZABLE",
} as const;

interface Opened extends Begun {
  /** Begun by the procedure, hence ended by the other: those without locks need none of our schema. */
  readonly called: boolean;
  /** The server ends it if its client is silent for too long. */
  readonly limited: boolean;
  readonly isolation: Open["isolation"];
  /** What it writes so that it can be looked up; undefined: it cannot. */
  readonly mark?: Mark;
}

/**
 * Locks that others take by a name of their own are locks of the session: taken before the transaction begins, and given back
 * when COMMIT has been answered. They come first in the order of all keys.
 */
export async function begin(connection: SqlConnection, open: Open): Promise<LockGrant & { begun?: Begun }> {
  const named = open.locks.filter(isNamed);
  if (named.length === 0) return beginWithRows(connection, open);
  if (open.capabilities.namedLocks === "by hf.hold")
    throw new UnsupportedError(
      "A lock of GET_LOCK must be given back after COMMIT, which this client writes by itself. Take it with hf.hold, around the transaction.",
    );
  const until = performance.now() + (open.wait === "nowait" ? 0 : open.wait);
  const pick = <T>(of: readonly T[], keep: boolean) =>
    of.filter((_, i) => isNamed(open.locks[i] as LockRequest) === keep);
  const part = (keep: boolean) => ({ locks: pick(open.locks, keep), names: pick(open.names, keep) });
  try {
    const grant = await session.take(connection, { ...open, ...part(true), joined: false });
    if (!grant.granted) return grant;
    const wait = open.wait === "nowait" ? open.wait : Math.max(1, until - performance.now());
    const opened = await beginWithRows(connection, { ...open, ...part(false), wait });
    return { ...opened, begun: { ...opened.begun, sessionLocks: named } };
  } catch (error) {
    if (!connection.lost.aborted) await session.clear(connection, named);
    throw error;
  }
}

async function beginWithRows(connection: SqlConnection, open: Open): Promise<LockGrant & { begun?: Begun }> {
  const { isolation, readOnly, locks, names, capabilities } = open;
  const [first] = locks;
  if (readOnly && first) {
    throw new UnsupportedError(readOnlyLock);
  }
  // At higher levels a row that is missing would leave a gap locked. Neither a cluster nor Vitess has locks of
  // sessions to ask for, and the latter allows no procedure to begin a transaction.
  // Its COMMIT says nothing of what comes after it.
  const call =
    first &&
    !open.begun &&
    isolation === "read committed" &&
    isSupported(capabilities.sessionLocks) &&
    capabilities.details?.["chains"] !== true;
  const mark = first && isSupported(capabilities.commitOutcome) ? markOf(connection) : undefined;
  const taken = call ? ((await beginWith(connection, first, open)) ? 1 : 0) : 0;
  if (!call && !open.begun) {
    // Without SESSION these are settings of the next transaction only.
    const tx = capabilities.flavour === "mariadb" ? "tx" : "transaction";
    const idle = idleSeconds(open);
    const limit =
      idle === undefined ? "" : `, @holdfast_idle = @@SESSION.wait_timeout, @@SESSION.wait_timeout = ${idle}`;
    const settings = sql.raw(
      `SET @holdfast_autocommit = @@autocommit, @@${tx}_isolation = '${levels[isolation]}', @@${tx}_read_only = ${readOnly ? 1 : 0}, autocommit = 0${limit}`,
    );
    await beginning(connection, () => connection.query(settings));
  }
  if (!call) await connection.query(sql.raw(`SAVEPOINT ${begun}`));
  // The lock comes before any read, so no snapshot can be older than it, whatever the isolation level.
  const rest = { ...open, joined: false, locks: locks.slice(taken), names: names.slice(taken) };
  const opened: Opened = {
    called: call === true,
    limited: idleSeconds(open) !== undefined,
    isolation,
    ...(mark && { mark, identity: identityOf(mark, capabilities) }),
  };
  return { ...(await takeRows(connection, rest, isolation)), begun: opened };
}

/** Our own savepoint comes before the locks. */
export function keepLocks(
  connection: SqlConnection,
  locks: readonly LockRequest[],
  names: readonly string[],
  savepoint = begun,
): Promise<void> {
  return keepRows(connection, locks, names, savepoint);
}

/** Resolves to whether the lock was there, and free. */
async function beginWith(connection: SqlConnection, { key }: LockRequest, open: Open): Promise<boolean> {
  try {
    const call = sql`CALL ${opening.called}(${byPrimary(key.id)}, ${idleSeconds(open) ?? null})`;
    await beginning(connection, () => connection.query(call));
    return true;
  } catch (error) {
    if (isMissing(connection, error))
      throw new SchemaMissingError(`The procedure ${namesOf(connection).own("begin")}`, error);
    if (failureOf(connection, error) !== "lock-timeout") throw explain(connection, error);
    return false;
  }
}

export async function end(
  connection: SqlConnection,
  how: "commit" | "rollback",
  transaction: Begun,
): Promise<boolean> {
  const { sessionLocks: named } = transaction;
  if (!named) return endRows(connection, how, transaction);
  try {
    const clean = await endRows(connection, how, transaction);
    return (await session.give(connection, named)) && clean;
  } catch (error) {
    // It may not be ended again, as where the server has ended it already. Nothing of it is kept.
    if (!connection.lost.aborted) await session.clear(connection, named).catch(() => {});
    throw error;
  }
}

async function endRows(
  connection: SqlConnection,
  how: "commit" | "rollback",
  transaction: Begun,
): Promise<boolean> {
  const { called = false, limited = true, mark } = transaction as Partial<Opened>;
  if (how === "commit" && called && mark) {
    const ended = await endByCall(connection, mark);
    if (ended !== "not committed") return ended === "clean";
  }
  const kept = how === "commit" && (await stillOpen(connection, transaction));
  await connection.query(sql.raw(kept ? commitText : rollbackText));
  // Of one whose beginning has failed it is not known.
  const unlimited = limited
    ? ", SESSION wait_timeout = COALESCE(@holdfast_idle, @@SESSION.wait_timeout)"
    : "";
  // What this answers says nothing of the COMMIT any more, only whether the connection is fit for others.
  const restored = await connection
    .query(sql.raw(`SET autocommit = COALESCE(@holdfast_autocommit, @@autocommit)${unlimited}`))
    .then(() => true)
    .catch(() => false);
  if (how === "commit" && !kept) {
    throw new TransactionAbortedError(
      undefined,
      "The server ended this transaction before its end (a deadlock whose error was swallowed, or a statement such as CREATE TABLE, which commits). What came after was rolled back.",
    );
  }
  return restored;
}

/**
 * "not committed": the statements will tell why. "committed": but the session is not as it was. A connection that is
 * lost here is lost during COMMIT.
 */
async function endByCall(
  connection: SqlConnection,
  { id, number }: Mark,
): Promise<"clean" | "committed" | "not committed"> {
  try {
    await connection.query(sql`CALL ${committing.called}(${id}, ${number})`);
    return "clean";
  } catch (error) {
    // The savepoint, or the procedure itself.
    if (isMissing(connection, error)) return "not committed";
    if (failureOf(connection, error) !== "canceled") throw error;
    // By somebody's KILL QUERY, or a limit of the server's, before the commit or after it.
    const asking = sql`SELECT @@autocommit AS now, @holdfast_autocommit AS earlier`;
    const { now, earlier } = (await connection.query(asking)).rows[0] ?? {};
    if (String(now) === "1") return "committed";
    if (String(earlier) === "1") throw error;
    // Never on in this session, so it does not tell.
    throw new CommitUnknownError("the server cannot tell what became of it", error);
  }
}

/** Says so, and that it is about to be committed. */
async function stillOpen(connection: SqlConnection, { mark, isolation }: Partial<Opened>): Promise<boolean> {
  const released = sql.raw(`RELEASE SAVEPOINT ${begun}`);
  const done = async (statement: Statement) => {
    try {
      await connection.query(statement);
      return true;
    } catch (error) {
      // COMMIT has not been sent: nothing can have been kept.
      if (failureOf(connection, error) === "lost") throw new ConnectionLostError(1, error);
      if (isMissing(connection, error)) return false;
      throw failureOf(connection, error) === "schema-missing"
        ? new SchemaMissingError(`The table ${namesOf(connection).own("committed")}`, error)
        : error;
    }
  };
  if (!mark) return done(released);
  const { id, number } = mark;
  if (await done(sql`CALL ${settling.called}(${id}, ${number}, ${isolation === "serializable" ? 1 : 0})`))
    return true;
  // The savepoint was missing, or the procedure.
  return (await done(released)) && done(writingFirst(sql`${id}`, sql`${number}`));
}

/** Of a transaction that a client began, with autocommit on: after a deadlock each statement is kept by itself. */
export async function settle(connection: SqlConnection, transaction: Begun): Promise<void> {
  if (await stillOpen(connection, transaction)) return;
  throw new TransactionAbortedError(
    undefined,
    "The server ended this transaction before its end (a deadlock whose error was swallowed, or a statement such as CREATE TABLE, which commits). What came before was undone or committed by that; what came after was kept, statement by statement.",
  );
}
