import type { SqlConnection } from "../../seam/database.ts";
import { SchemaMissingError } from "../../seam/errors.ts";
import type { Replay } from "../../seam/replay.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import { failureOf } from "./locks/index.ts";

export const replayTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("once")} (
  id text PRIMARY KEY,
  fingerprint text NOT NULL,
  result text NOT NULL,
  at timestamptz NOT NULL,
  until timestamptz NOT NULL
)`,
  sql`CREATE INDEX IF NOT EXISTS once_until ON ${own("once")} (until)`,
];

/** One reading of the clock for the whole statement; OFFSET keeps the planner from copying the call. */
const clock = sql`(SELECT clock_timestamp() AS now OFFSET 0) c`;

const milliseconds = (value: number | null) =>
  sql`${value === null ? null : String(value)}::text::float8 * interval '1 millisecond'`;

/**
 * Records that have run out, up to 40 with every eighth new one (with each it would cost 0.2 ms more, a third of what
 * the record costs): nobody need do it in the background. What others are at is passed over.
 * `statement_timestamp()`, since an index cannot be searched for `clock_timestamp()`. One hour late: should the clock
 * be set back, or a standby with another clock take over, the record is there again.
 */
const reaping = (id: string) => sql`WITH reaped AS (DELETE FROM ${own("once")} WHERE id = ANY (ARRAY(
  SELECT id FROM ${own("once")} WHERE until < statement_timestamp() - interval '1 hour' AND id <> ${id}::text
  ORDER BY until LIMIT 40 FOR UPDATE SKIP LOCKED)))`;
let records = 0;

export const replay: Replay<SqlConnection> = {
  async find(connection, id) {
    const statement = sql`SELECT o.fingerprint, o.result, (extract(epoch FROM o.at) * 1000)::float8 AS made,
  (extract(epoch FROM c.now) * 1000)::float8 AS now
  FROM ${clock} LEFT JOIN ${own("once")} o ON o.id = ${id}::text AND o.until > c.now`;
    const { rows } = await connection.query(statement).catch((error: unknown) => {
      throw failureOf(connection, error) === "schema-missing"
        ? new SchemaMissingError(`The table ${namesOf(connection).own("once")}`, error)
        : error;
    });
    const [row] = rows;
    const now = new Date(Number(row?.now));
    if (typeof row?.result !== "string") return { kept: undefined, now };
    const { fingerprint, result, made } = row;
    return { kept: { fingerprint: String(fingerprint), result, at: new Date(Number(made)) }, now };
  },

  async keep(connection, { id, fingerprint, result, keepMs, issuedAt }) {
    const issued = sql`timestamptz 'epoch' + ${milliseconds(issuedAt ? issuedAt.getTime() : null)}`;
    const first = records++ % 8 === 0 ? reaping(id) : sql``;
    const { rows } = await connection.query(sql`${first}
  INSERT INTO ${own("once")} AS o (id, fingerprint, result, at, until)
  SELECT ${id}::text, ${fingerprint}::text, ${result}::text, c.now, greatest(c.now, ${issued}) + ${milliseconds(keepMs)}
  FROM ${clock}
  ON CONFLICT (id) DO UPDATE
  SET fingerprint = excluded.fingerprint, result = excluded.result, at = excluded.at, until = excluded.until
  WHERE o.until <= excluded.at
  RETURNING 1 AS kept`);
    return rows.length > 0;
  },
};
