/**
 * What was decided, compared and written by one procedure: of the five messages that a batch takes with its locks, two are left, and
 * the locks are there only while the server works. docs/decisions/0036-patterns-on-mysql.md
 */
import type { SqlConnection } from "../../seam/database.ts";
import { type Statement, render as renderWith, sql } from "../../seam/sql.ts";
import type { CallStatements, OneCall } from "../sql/dialect.ts";
import { dialect, namesOf } from "./dialect.ts";
import { type Procedure, procedure } from "./routines.ts";
import { asBefore, failureOf, insistOn, isMissing, rollbackText } from "./waits.ts";

const run = (parameter: string) =>
  sql.raw(
    `SET @holdfast_text = ${parameter}; PREPARE holdfast_apply FROM @holdfast_text; EXECUTE holdfast_apply;`,
  );

/**
 * Rows that somebody has are left out, and so are those that have changed: nobody is waited for, but for a second if what is added is next to
 * somebody's. Whatever the error, the caller ends the transaction: no handler runs if the call is ended from outside. Turning autocommit
 * on commits, in one breath with the note that it did; the level of the transaction is forgotten with COMMIT only, on MariaDB.
 *
 * As texts: with rows as JSON a call took 172 µs where five statements took 122 (MariaDB, one run of each on a busy machine), as JSON_TABLE reads
 * each list from its beginning for each of its columns; as texts 98 where they took 123.
 */
const applying = procedure(
  "apply",
  // It executes what it is given, and adds rows after it has compared others.
  { tables: ["*"], whole: false },
  sql`(p_call bigint, p_found longtext CHARACTER SET utf8mb4, p_count int, p_until bigint, p_first longtext CHARACTER SET utf8mb4, p_second longtext CHARACTER SET utf8mb4)
SQL SECURITY INVOKER
BEGIN
  SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
  SET @holdfast_autocommit = @@autocommit, @holdfast_wait = @@innodb_lock_wait_timeout, @holdfast_committed = 0,
    SESSION innodb_lock_wait_timeout = 1, autocommit = 0;
  ${run("p_found")}
  IF @holdfast_found < p_count OR TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) >= p_until THEN
    ROLLBACK;
    SET autocommit = @holdfast_autocommit;
  ELSE
    ${run("p_first")}
    IF p_second IS NOT NULL THEN
      ${run("p_second")}
    END IF;
    SET autocommit = 1, @holdfast_committed = p_call, autocommit = @holdfast_autocommit;
    COMMIT;
  END IF;
  DEALLOCATE PREPARE holdfast_apply;
  SET SESSION innodb_lock_wait_timeout = @holdfast_wait, @holdfast_text = NULL;
  SELECT @holdfast_committed AS committed, IF(@holdfast_committed = p_call, NULL, @holdfast_ids) AS found;
END`,
);

export const oneCallProcedures: readonly Procedure[] = [applying];

/** Texts are bytes here, and written in digits: nothing in them can be taken for a part of the statement. */
function literal(value: unknown): string {
  if (value === null) return "NULL";
  if (typeof value === "number" && Number.isFinite(value)) return String(value);
  const bytes = typeof value === "string" ? Buffer.from(value) : value;
  if (!Buffer.isBuffer(bytes)) throw new TypeError(`a value of type ${typeof value} cannot be written out`);
  return bytes.length === 0 ? "''" : `0x${bytes.toString("hex")}`;
}

function written(connection: SqlConnection, statement: Statement): string {
  const names = namesOf(connection);
  const { values } = renderWith(statement, dialect, names);
  const placeholder = (number: number) => literal(values[number - 1]);
  return renderWith(statement, { ...dialect, placeholder }, names).text;
}

/** Whoever has not migrated is not asked about it with every call. */
const missingMs = 10_000;
let missingUntil = 0;

/** By which a call is known: one that is ended before it has begun leaves the note of the last one as it is. */
const mostCalls = 2 ** 48;

const isCommitted = (call: number, [row]: readonly { readonly committed?: unknown }[]) =>
  Number(row?.committed) === call;

async function apply(
  connection: SqlConnection,
  { found, ids, until, writes: [first, second] }: CallStatements,
): Promise<readonly number[]> {
  const texts = [
    sql`SELECT COUNT(*), JSON_ARRAYAGG(id) INTO @holdfast_found, @holdfast_ids FROM ${found} FOR UPDATE SKIP LOCKED`,
    first as Statement,
    second,
  ].map((each) => (each ? written(connection, each) : null));
  const call = 1 + Math.floor(Math.random() * mostCalls);
  try {
    const { rows } = await connection.query(
      sql`CALL ${applying.called}(${call}, ${texts[0]}, ${ids.length}, ${until ?? null}, ${texts[1]}, ${texts[2]})`,
    );
    return isCommitted(call, rows) ? [] : lacking(ids, rows[0]?.["found"]);
  } catch (error) {
    if (isMissing(connection, error)) {
      missingUntil = performance.now() + missingMs;
      return ids;
    }
    if (connection.lost.aborted) throw error;
    const committed = await endOf(connection, call);
    const failure = failureOf(connection, error);
    // Ended from outside, it may have been too late for that.
    if (failure === "canceled" && committed) return [];
    if (failure === "lock-timeout") return ids;
    throw error;
  }
}

function lacking(ids: readonly number[], list: unknown): readonly number[] {
  // Some clients read it by themselves.
  const isRead = typeof list === "object" && !Buffer.isBuffer(list);
  const found = new Set((isRead ? list : JSON.parse(String(list))) as number[] | null);
  const rest = ids.filter((each) => !found.has(each));
  return rest.length > 0 ? rest : ids;
}

/** Whether it was committed. The session is as before, or it ends: whoever had it next would never commit. */
async function endOf(connection: SqlConnection, call: number): Promise<boolean> {
  try {
    await insistOn(connection, rollbackText);
    const { rows } = await insistOn(connection, "SELECT @holdfast_committed AS committed");
    await insistOn(connection, `SET ${asBefore}`);
    return isCommitted(call, rows);
  } catch (unheard) {
    await connection.query(sql.raw("KILL CONNECTION_ID()")).catch(() => {});
    throw unheard;
  }
}

/** Of what a session reads without a lock. Each server reads the name that is meant for it. */
export const committed = sql.raw(
  "/*!80000 @@transaction_isolation *//*M! @@tx_isolation */ <> 'READ-UNCOMMITTED'",
);

const oneCall: OneCall<SqlConnection> = {
  // What is not committed must not be what somebody is refused for.
  alone: sql`(@@autocommit AND ${committed})`,
  leave: async (connection) => void (await connection.query(sql.raw(rollbackText))),
  most: 2,
  apply,
};

export const oneCallNow = (): OneCall<SqlConnection> | undefined =>
  performance.now() < missingUntil ? undefined : oneCall;
