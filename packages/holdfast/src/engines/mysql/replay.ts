import type { SqlConnection } from "../../seam/database.ts";
import { SchemaMissingError } from "../../seam/errors.ts";
import type { Replay } from "../../seam/replay.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import { onPrimary } from "./primary.ts";
import { failureOf } from "./waits.ts";

export const replayTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("once")} (
  id varbinary(400) NOT NULL PRIMARY KEY,
  fingerprint varchar(64) CHARACTER SET ascii NOT NULL,
  result longtext CHARACTER SET utf8mb4 NOT NULL,
  at datetime(6) NOT NULL,
  until datetime(6) NOT NULL,
  KEY ${own("once_until")} (until)
) ENGINE=InnoDB`,
];

/** As a number: clients read times, and zones, each in its own way. */
export const milliseconds = (time: string) =>
  sql.raw(`TIMESTAMPDIFF(MICROSECOND, '1970-01-01', ${time}) / 1000`);

export const microseconds = (ms: number) => sql`INTERVAL ${Math.round(ms * 1000)} MICROSECOND`;

export const replay: Replay<SqlConnection> = {
  async find(connection, id) {
    // As bytes, here and below: the connection's character set need not have all of the text's.
    const statement = sql`SELECT o.fingerprint AS fingerprint, CAST(o.result AS BINARY) AS result, ${milliseconds("o.at")} AS made,
      ${milliseconds("UTC_TIMESTAMP(6)")} AS now
      FROM (SELECT 1 AS one) c LEFT JOIN ${own("once")} o ON o.id = ${Buffer.from(id)} AND o.until > UTC_TIMESTAMP(6)
      WHERE ${onPrimary}`;
    const { rows } = await connection.query(statement).catch((error: unknown) => {
      throw failureOf(connection, error) === "schema-missing"
        ? new SchemaMissingError(`The table ${namesOf(connection).own("once")}`, error)
        : error;
    });
    const [row] = rows;
    const now = new Date(Number(row?.now));
    if (row?.result === null || row?.result === undefined) return { kept: undefined, now };
    const { fingerprint, result, made } = row;
    return {
      kept: { fingerprint: String(fingerprint), result: String(result), at: new Date(Number(made)) },
      now,
    };
  },

  async keep(connection, { id, fingerprint, result, keepMs, issuedAt }) {
    const bytes = Buffer.from(id);
    await reap(connection, bytes);
    const issued = issuedAt
      ? sql`GREATEST(UTC_TIMESTAMP(6), TIMESTAMP'1970-01-01 00:00:00' + ${microseconds(issuedAt.getTime())})`
      : sql.raw("UTC_TIMESTAMP(6)");
    const insert = sql`INSERT INTO ${own("once")} (id, fingerprint, result, at, until)
      VALUES (${bytes}, ${fingerprint}, CONVERT(${Buffer.from(result)} USING utf8mb4), UTC_TIMESTAMP(6), ${issued} + ${microseconds(keepMs)})`;
    try {
      await connection.query(insert);
      return true;
    } catch (error) {
      if (failureOf(connection, error) !== "unique") throw error;
    }
    // Not before it is known to be there: to delete what is not would lock a gap in REPEATABLE READ.
    const gone = await connection.query(
      sql`DELETE FROM ${own("once")} WHERE id = ${bytes} AND until <= UTC_TIMESTAMP(6)`,
    );
    if (gone.affected === 0) return false;
    await connection.query(insert);
    return true;
  },
};

/**
 * Records that have run out, a few with each new one, so that there is never more than a few to do and nobody need
 * do it in the background. Looked for without a lock, and locked by their ids, so that no gap is; what others are at is
 * passed over. One hour late: should the clock be set back, or a replica with another clock take over, the record is
 * there again.
 */
async function reap(connection: SqlConnection, id: Buffer): Promise<void> {
  const old = await connection.query(
    sql`SELECT id AS id FROM ${own("once")} WHERE until < UTC_TIMESTAMP(6) - INTERVAL 1 HOUR AND id <> ${id} ORDER BY until LIMIT 10`,
  );
  if (old.rows.length === 0) return;
  const among = (rows: readonly { id?: unknown }[]) => sql.join(rows.map((row) => row.id));
  const free = await connection.query(
    sql`SELECT id AS id FROM ${own("once")} FORCE INDEX (PRIMARY) WHERE id IN (${among(old.rows)}) FOR UPDATE SKIP LOCKED`,
  );
  if (free.rows.length === 0) return;
  await connection.query(sql`DELETE FROM ${own("once")} WHERE id IN (${among(free.rows)})`);
}
