/**
 * What became of a transaction whose COMMIT was never answered.
 *
 * The server keeps no record of it, so a transaction with a lock writes one: each session has a row, and the last thing that
 * a transaction does is to write its number there, in the call that commits. So it costs no round trip, and no row that
 * others want. Transactions without a lock need none of our tables, and write nothing.
 *
 * That the number is not there does not mean that it will not come: the call may still be on its way. So whoever asks
 * writes it too, with the word that it was undone, and waits for a session that has the row; a call that comes after
 * that finds the number taken, and fails.
 */
import { randomBytes } from "node:crypto";
import type { Capabilities } from "../../seam/capabilities.ts";
import type { Outcome, Row, SqlConnection } from "../../seam/database.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { onPrimary } from "./primary.ts";
import { type Procedure, procedure } from "./routines.ts";
import { commitText, isIdle, patiently } from "./waits.ts";

// `used` is an hour, not a moment: its index is written to once an hour.
export const outcomeTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("committed")} (
  id varbinary(32) NOT NULL PRIMARY KEY,
  last bigint NOT NULL,
  undone tinyint NOT NULL DEFAULT 0,
  used int NOT NULL,
  KEY ${own("committed_used")} (used)
) ENGINE=InnoDB`,
];

const hour = sql.raw("FLOOR(UNIX_TIMESTAMP() / 3600)");

/**
 * Two rows of sessions that have been quiet for a day, for each row that is new. Looked for without a lock, so that no gap is
 * locked, and not always the first one, so that sessions that begin together do not all want the same. Under the lock it is
 * asked again: the session may have woken up.
 */
const forgetting = procedure(
  "forget",
  { tables: ["committed"], whole: true },
  sql`()
SQL SECURITY INVOKER
BEGIN
  DECLARE v_old, v_free varbinary(32);
  DECLARE v_until, v_skip, v_turn int DEFAULT 0;
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  SET v_until = ${hour} - 24;
  WHILE v_turn < 2 DO
    SET v_turn = v_turn + 1, v_skip = FLOOR(RAND() * 8), v_old = NULL, v_free = NULL;
    SELECT id INTO v_old FROM ${own("committed")} WHERE used < v_until ORDER BY used LIMIT v_skip, 1;
    IF v_old IS NOT NULL THEN
      SELECT id INTO v_free FROM ${own("committed")} WHERE id = v_old AND used < v_until FOR UPDATE SKIP LOCKED;
      DELETE FROM ${own("committed")} WHERE id = v_free;
    END IF;
  END WHILE;
END`,
);

/**
 * For the call that commits, in READ COMMITTED: an UPDATE that finds no row locks nothing. `p_id` and `p_number` are its
 * parameters. Fails (1062) if somebody who asked was told that it was undone.
 */
export const writing = sql`UPDATE ${own("committed")} SET last = p_number, undone = 0, used = ${hour} WHERE id = p_id AND last < p_number;
  IF ROW_COUNT() = 0 THEN
    INSERT INTO ${own("committed")} (id, last, used) VALUES (p_id, p_number, ${hour});
    CALL ${forgetting.called}();
  END IF;`;

/** For a COMMIT that comes in a message of its own: until then the row is locked. No gap is, at any level. */
export function writingFirst(id: Statement, number: Statement): Statement {
  return sql`INSERT INTO ${own("committed")} (id, last, used) VALUES (${id}, ${number}, ${hour})
    ON DUPLICATE KEY UPDATE last = ${number}, undone = 0, used = ${hour}`;
}

/** What is locked by a plain read under SERIALIZABLE is not worth it. */
export const forgettingUnless = (
  serializable: string,
) => sql`IF ROW_COUNT() = 1 AND NOT ${sql.raw(serializable)} THEN
    CALL ${forgetting.called}();
  END IF;`;

export const outcomeProcedures: readonly Procedure[] = [forgetting];

/** A transaction's number, and its session's id. */
export interface Mark {
  readonly id: string;
  readonly number: number;
}

/** By the connection, not by the server's id of it, which comes back after a restart, and on other servers. */
const sessions = new WeakMap<SqlConnection, Mark>();

/** The next one of this session. */
export function markOf(connection: SqlConnection): Mark {
  const { id, number } = sessions.get(connection) ?? { id: randomBytes(12).toString("hex"), number: 0 };
  const mark = { id, number: number + 1 };
  sessions.set(connection, mark);
  return mark;
}

export function identityOf({ id, number }: Mark, { details }: Capabilities): string {
  return `${id}/${number}/${String(details?.["server"])}`;
}

const identifying = ["server_uuid", "server_id", "hostname"];
export const serverSettings = identifying.map((name) => `'${name}'`).join(", ");

/** MariaDB has no uuid; servers that replicate from each other differ by their id. */
export function serverOf(found: ReadonlyMap<string, string>): string {
  return identifying.map((name) => found.get(name) ?? "").join(":");
}

/** How long a session that has the row is waited for, before it is said to go on. */
const waitMs = 1000;

export async function outcome(connection: SqlConnection, identity: string): Promise<Outcome> {
  const [id = "", numeral, server] = identity.split("/");
  const number = Number(numeral);
  const idle = await isIdle(connection);
  const isKept = (row: Row | undefined) => Number(row?.last) >= number && Number(row?.undone) === 0;
  const reading = sql`SELECT last AS last, undone AS undone FROM ${own("committed")} WHERE ${onPrimary} AND id = ${id}`;
  if (isKept((await connection.query(reading)).rows[0])) return "committed";
  const settings = await connection.query(
    sql.raw(`SHOW GLOBAL VARIABLES WHERE Variable_name IN (${serverSettings})`),
  );
  const found = settings.rows.map((row) => [String(row["Variable_name"]), String(row["Value"])] as const);
  // One that has taken its place may still be applying what it was sent before, and would stumble over a row of ours.
  if (serverOf(new Map(found)) !== server) return "unknown";
  const undoing = sql`INSERT INTO ${own("committed")} (id, last, undone, used) VALUES (${id}, ${number}, 1, ${hour})
    ON DUPLICATE KEY UPDATE undone = IF(last < ${number}, 1, undone), last = GREATEST(last, ${number}), used = ${hour}`;
  const waited = await patiently(connection, waitMs, () => connection.query(undoing));
  if (waited.over) return "in progress";
  const [row] = (await connection.query(sql`${reading} FOR UPDATE`)).rows;
  // In a session without autocommit the row would be gone with the connection.
  if (idle) await connection.query(sql.raw(commitText));
  return isKept(row) ? "committed" : "aborted";
}
