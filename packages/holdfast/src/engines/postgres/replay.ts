import type { SqlConnection } from "../../seam/database.ts";
import { SchemaMissingError } from "../../seam/errors.ts";
import type { KeptRecord, Replay, ReplayCopies } from "../../seam/replay.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { shown, written } from "./hidden.ts";
import { onPrimary } from "./primary.ts";
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
const clock = sql`(SELECT pg_catalog.clock_timestamp() AS now OFFSET 0) c`;

const milliseconds = (value: number | null) =>
  sql`${value === null ? null : String(value)}::pg_catalog.text::pg_catalog.float8 OPERATOR(pg_catalog.*) interval '1 millisecond'`;

/**
 * Records that have run out, up to 40 with every eighth new one (with each it would cost 0.2 ms more, a third of what
 * the record costs): nobody need do it in the background. What others are at is passed over.
 * `statement_timestamp()`, since an index cannot be searched for `clock_timestamp()`. One hour late: should the clock
 * be set back, or a standby with another clock take over, the record is there again.
 */
const reaping = (
  id: string,
) => sql`WITH reaped AS (DELETE FROM ${own("once")} WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(
  SELECT id FROM ${own("once")} WHERE until OPERATOR(pg_catalog.<) (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.-) interval '1 hour') AND id OPERATOR(pg_catalog.<>) ${id}::pg_catalog.text
  ORDER BY until LIMIT 40 FOR UPDATE SKIP LOCKED)))`;
let records = 0;

/** As text, for an exact copy. */
const micros = (column: "at" | "until") =>
  sql`(extract(epoch FROM o.${sql.raw(column)}) OPERATOR(pg_catalog.*) 1000000)::bigint::pg_catalog.text AS ${sql.raw(column)}`;
const fromMicros = (text: string) =>
  sql`pg_catalog.timestamptz 'epoch' OPERATOR(pg_catalog.+) (${text}::pg_catalog.text::bigint OPERATOR(pg_catalog.*) interval '1 microsecond')`;

const copies: ReplayCopies<SqlConnection> = {
  async list(connection, after, most) {
    const next =
      after === undefined ? sql`` : sql` AND o.id OPERATOR(pg_catalog.>) ${after}::pg_catalog.text`;
    const { rows } = await connection.query(
      sql`SELECT o.id, o.fingerprint, o.result, ${micros("at")}, ${micros("until")}
  FROM ${clock}, ${own("once")} o WHERE o.until OPERATOR(pg_catalog.>) c.now${next} AND ${shown("once")} AND ${onPrimary}
  ORDER BY o.id LIMIT ${String(most)}::pg_catalog.text::bigint`,
    );
    return rows as unknown as readonly KeptRecord[];
  },

  async add(connection, records) {
    const rows = records.map(
      ({ id, fingerprint, result, at, until }) =>
        sql`(${id}::pg_catalog.text, ${fingerprint}::pg_catalog.text, ${result}::pg_catalog.text, ${fromMicros(at)}, ${fromMicros(until)})`,
    );
    await connection.query(sql`INSERT INTO ${own("once")} AS o (id, fingerprint, result, at, until) VALUES ${sql.join(rows)}
  ON CONFLICT (id) DO UPDATE SET fingerprint = excluded.fingerprint, result = excluded.result, at = excluded.at, until = excluded.until
  WHERE o.until OPERATOR(pg_catalog.<) excluded.until`);
  },
};

export const replay: Replay<SqlConnection> = {
  copies,

  async find(connection, id) {
    const statement = sql`SELECT o.fingerprint, o.result, (extract(epoch FROM o.at) OPERATOR(pg_catalog.*) 1000)::pg_catalog.float8 AS made,
  (extract(epoch FROM c.now) OPERATOR(pg_catalog.*) 1000)::pg_catalog.float8 AS now
  FROM ${clock} LEFT JOIN ${own("once")} o ON o.id OPERATOR(pg_catalog.=) ${id}::pg_catalog.text AND o.until OPERATOR(pg_catalog.>) c.now WHERE ${shown("once")} AND ${onPrimary}`;
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
    const issued = sql`pg_catalog.timestamptz 'epoch' OPERATOR(pg_catalog.+) (${milliseconds(issuedAt ? issuedAt.getTime() : null)})`;
    const first = records++ % 8 === 0 ? reaping(id) : sql``;
    const { rows } = await connection.query(sql`${first}
  INSERT INTO ${own("once")} AS o (id, fingerprint, result, at, until)
  SELECT ${id}::pg_catalog.text, ${fingerprint}::pg_catalog.text, ${result}::pg_catalog.text, c.now, greatest(c.now, ${issued}) OPERATOR(pg_catalog.+) (${milliseconds(keepMs)})
  FROM ${clock}
  ON CONFLICT (id) DO UPDATE
  SET fingerprint = excluded.fingerprint, result = excluded.result, at = excluded.at, until = excluded.until
  WHERE o.until OPERATOR(pg_catalog.<=) excluded.at
  RETURNING 1 AS kept`);
    if (rows.length > 0) return true;
    written(connection, (await replay.find(connection, id)).kept, "once");
    return false;
  },
};
