import type { Replay } from "../../seam/replay.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import type { DuckdbConnection } from "./dialect.ts";
import { explaining } from "./errors.ts";

/**
 * No key and no index: the id's lock keeps a second record out, and an index would refuse to insert again what a
 * transaction that is still open can see as deleted (https://duckdb.org/docs/stable/sql/indexes).
 */
export const replayTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("once")} (
  id varchar NOT NULL,
  fingerprint varchar NOT NULL,
  result varchar NOT NULL,
  made bigint NOT NULL,
  until bigint NOT NULL
)`,
];

/** Records that have run out, an hour late: should the clock be set back, the record is there again. */
const lateMs = 3_600_000;

/** The database is part of this process, so this is its clock. In SQL, time stands still within a transaction. */
const clock = () => Date.now();

export const replay: Replay<DuckdbConnection> = {
  async find(connection, id) {
    const now = clock();
    const { rows } = await explaining(
      connection.query(
        sql`SELECT fingerprint, result, made FROM ${own("once")} WHERE id = ${id} AND until > ${now} LIMIT 1`,
      ),
    );
    const [row] = rows;
    if (!row) return { kept: undefined, now: new Date(now) };
    const { fingerprint, result, made } = row;
    return {
      kept: { fingerprint: String(fingerprint), result: String(result), at: new Date(Number(made)) },
      now: new Date(now),
    };
  },

  async keep(connection, { id, fingerprint, result, keepMs, issuedAt }) {
    const now = clock();
    const there = await connection.query(
      sql`SELECT 1 AS kept FROM ${own("once")} WHERE id = ${id} AND until > ${now}`,
    );
    if (there.rows.length > 0) return false;
    // Deletions that meet do not exclude each other here, and need not.
    await connection.query(sql`DELETE FROM ${own("once")} WHERE id = ${id} OR until < ${now - lateMs}`);
    const until = Math.max(now, issuedAt ? issuedAt.getTime() : 0) + keepMs;
    await connection.query(
      sql`INSERT INTO ${own("once")} (id, fingerprint, result, made, until) VALUES (${id}, ${fingerprint}, ${result}, ${now}, ${until})`,
    );
    return true;
  },
};
