import type { Replay } from "../../seam/replay.ts";
import { type Statement, own, sql } from "../../seam/sql.ts";
import { ask, write } from "./begin.ts";
import { clock, date } from "./clock.ts";
import type { SqliteConnection } from "./dialect.ts";
import { explained } from "./errors.ts";

export const replayTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("once")} (
  id text NOT NULL PRIMARY KEY,
  fingerprint text NOT NULL,
  result text NOT NULL,
  at integer NOT NULL,
  until integer NOT NULL
)`,
  sql`CREATE INDEX IF NOT EXISTS ${own("once_until")} ON ${own("once")} (until)`,
];

/**
 * Records that have run out, a few with each new one, so that there is never more than a few to do and nobody need
 * do it in the background. One hour late: should the clock be set back, the record is there again.
 */
const reaped = (id: string) => sql`DELETE FROM ${own("once")} WHERE id IN (
  SELECT id FROM ${own("once")} WHERE until < ${clock} - 3600000 AND id <> ${id} ORDER BY until LIMIT 10)`;

export const replay: Replay<SqliteConnection> = {
  async find(connection, id) {
    const { rows } = await ask(
      connection,
      sql`SELECT o.fingerprint, o.result, o.at AS made, c.now FROM (SELECT ${clock} AS now) c
        LEFT JOIN ${own("once")} o ON o.id = ${id} AND o.until > c.now`,
    ).catch((error: unknown) => {
      throw explained(error);
    });
    const [row] = rows;
    const now = date(row?.now);
    if (typeof row?.result !== "string") return { kept: undefined, now };
    const { fingerprint, result, made } = row;
    return { kept: { fingerprint: String(fingerprint), result, at: date(made) }, now };
  },

  async keep(connection, { id, fingerprint, result, keepMs, issuedAt }) {
    await write(connection, reaped(id));
    // WHERE true: without it the parser takes ON CONFLICT for a join's.
    const { rows } = await write(
      connection,
      sql`INSERT INTO ${own("once")} AS o (id, fingerprint, result, at, until)
        SELECT ${id}, ${fingerprint}, ${result}, c.now, max(c.now, ${issuedAt ? issuedAt.getTime() : 0}) + ${keepMs}
        FROM (SELECT ${clock} AS now) c WHERE true
        ON CONFLICT (id) DO UPDATE
        SET fingerprint = excluded.fingerprint, result = excluded.result, at = excluded.at, until = excluded.until
        WHERE o.until <= excluded.at
        RETURNING 1 AS kept`,
    );
    return rows.length > 0;
  },
};
