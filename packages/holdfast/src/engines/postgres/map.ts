/**
 * The epoch of the shard map, kept in a sequence. A transaction reads its current value even if its snapshot is older. Reading it
 * locks the sequence until the transaction ends, so `renumber()` finds the transactions that started with the old map.
 * docs/decisions/0048-map-epoch.md
 */
import type { MapEpoch } from "../../seam/agreements.ts";
import type { NamedEngine, SqlConnection } from "../../seam/database.ts";
import type { LockRequest } from "../../seam/key.ts";
import { key } from "../../seam/key.ts";
import { namedConnection } from "../../seam/names.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf, ownKey } from "./dialect.ts";
import { asHolder, sessionColumns } from "./locks/holders.ts";
import { failureOf } from "./locks/index.ts";
import { isLock } from "./locks/keys.ts";
import { onPrimary } from "./primary.ts";
import { isTrue } from "./probe.ts";
import { lookingAtNothing } from "./search-path.ts";

export const mapSequence = [sql`CREATE SEQUENCE IF NOT EXISTS ${own("map_epoch")} MINVALUE 0 START WITH 0`];

/** STABLE, so that it is computed once, and first, wherever it stands. Of a sequence there is one version for all snapshots. */
export const mapRoutine = sql`CREATE OR REPLACE FUNCTION ${own("at_map")}(expected bigint) RETURNS boolean
${lookingAtNothing} STABLE
AS $function$
DECLARE
  epoch bigint;
BEGIN
  SELECT e.last_value INTO epoch FROM ${own("map_epoch")} e;
  IF epoch = expected THEN
    RETURN true;
  END IF;
  RAISE EXCEPTION 'The map of shards has number % here, and this process goes by number %', epoch, expected USING ERRCODE = 'HF001';
END
$function$`;

/** What each session holds once more, shared, for each of its locks that belongs to a map: nobody waits for it. */
const inUse = key("holdfast", "map");

export function inUseOn(names: Names): LockRequest {
  return { key: ownKey(names, inUse), mode: "shared" };
}

/** The same connection, whose statements compare the number. */
export function checking(
  epoch: () => number | undefined,
  stale: () => void,
): Pick<NamedEngine<SqlConnection>, "on"> {
  const made = new WeakMap<Names, Names>();
  const namesWith = (base: Names): Names => {
    let names = made.get(base);
    if (!names) {
      names = {
        schema: base.schema,
        own: (name) => base.own(name),
        label: (name) => base.label(name),
        get check() {
          const number = epoch();
          return number === undefined ? undefined : `${base.own("at_map")}(${number})`;
        },
      };
      made.set(base, names);
    }
    return names;
  };
  const on = (connection: SqlConnection) => {
    const seen = <T>(answer: Promise<T>): Promise<T> => {
      answer.catch((error: unknown) => {
        if (failureOf(connection, error) === "map-changed") stale();
      });
      return answer;
    };
    const { script, sequence } = connection;
    return namedConnection(
      connection,
      namesWith(namesOf(connection)),
      {
        ...(script && { script: (text) => seen(script.call(connection, text)) }),
        ...(sequence && { sequence: (steps) => sequence.call(connection, steps).map((each) => seen(each)) }),
      },
      seen,
    );
  };
  return { on };
}

/** By transaction, or by session and key: a session's lock outlives its transactions. */
const usersBy = (which: Statement) => sql`SELECT ${sql.raw(sessionColumns)},
    CASE l.locktype WHEN 'advisory' THEN pg_catalog.concat_ws(' ', l.pid, l.classid, l.objid, l.objsubid) ELSE l.virtualtransaction END AS tx
  FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) l.pid
  WHERE l.granted AND (l.pid IS NULL OR l.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid())
    AND l.database OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database())
    AND ${which} AND ${onPrimary}`;

const usersByMap = usersBy(sql`l.locktype OPERATOR(pg_catalog.=) 'relation'
    AND l.relation OPERATOR(pg_catalog.=) pg_catalog.to_regclass(${own.text("map_epoch")})::pg_catalog.oid`);

/** Advisory locks do not say whose they are: those of other programs are waited for too. */
const usersAlone =
  usersBy(sql`(l.locktype OPERATOR(pg_catalog.=) 'advisory' OR (l.locktype OPERATOR(pg_catalog.=) 'relation'
    AND l.relation OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n
      ON n.oid OPERATOR(pg_catalog.=) c.relnamespace WHERE n.nspname OPERATOR(pg_catalog.=) ${own.schema}))))`);

/** Patterns leave a row in one of these. */
const filled = sql.join(
  ["quota_bucket", "once", "stock_level", "queue", "schedule"].map(
    (table) => sql`EXISTS (SELECT FROM ${own(table)})`,
  ),
  " OR ",
);

export const mapEpoch: MapEpoch<SqlConnection> = {
  async read(connection) {
    const { rows } = await connection.query(
      sql`SELECT last_value::pg_catalog.text AS epoch FROM ${own("map_epoch")} WHERE ${onPrimary}`,
    );
    return Number(rows[0]?.["epoch"]);
  },

  async write(connection, epoch, since) {
    const still = since
      ? sql` FROM ${own("agreed")} a WHERE a.name OPERATOR(pg_catalog.=) 'shard' AND a.since OPERATOR(pg_catalog.=) ${since.mark}::pg_catalog.text::pg_catalog.timestamptz`
      : sql``;
    await connection.query(
      sql`SELECT pg_catalog.setval(${own.text("map_epoch")}, ${String(epoch)}::pg_catalog.text::bigint)${still}`,
    );
  },

  async users(connection, alone = false) {
    const { rows: found } = await connection.query(alone ? usersAlone : usersByMap);
    const { rows: sessions } = await connection.query(
      sql`SELECT ${sql.raw(sessionColumns)} FROM pg_catalog.pg_locks l
  LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) l.pid
  WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.granted
    AND l.database OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database())
    AND ${sql.raw(isLock("l.", inUseOn(namesOf(connection))))} AND ${onPrimary}`,
    );
    const { rows: rest } = await connection.query(
      sql`SELECT (extract(epoch FROM (SELECT pg_catalog.max(l.until) FROM ${own("lease")} l
    WHERE NOT l.waiting AND l.until OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.-) pg_catalog.clock_timestamp())
    OPERATOR(pg_catalog.*) 1000)::pg_catalog.float8 AS leased,
  EXISTS (SELECT FROM ${own("quota_bucket")} b WHERE b.moved_to IS NOT NULL OR b.moved_from IS NOT NULL) AS moved,
  (SELECT pg_catalog.max(b.moved_to) FROM ${own("quota_bucket")} b)::pg_catalog.text AS farthest,
  ${filled} AS filled WHERE ${onPrimary}`,
    );
    const farthest = rest[0]?.["farthest"] ?? undefined;
    return {
      transactions: new Map(found.map((row) => [String(row["tx"]), asHolder(row)])),
      sessions: sessions.map(asHolder),
      leasedMs: Math.max(0, Number(rest[0]?.["leased"] ?? 0)),
      moved: isTrue(rest[0]?.["moved"]),
      farthest: farthest === undefined ? undefined : Number(farthest),
      filled: isTrue(rest[0]?.["filled"]),
    };
  },

  async fence(connection, least) {
    const { rows } = await connection.query(
      sql`SELECT (b.base OPERATOR(pg_catalog.+) CASE WHEN b.base OPERATOR(pg_catalog.+) s.last_value OPERATOR(pg_catalog.<) ${String(least)}::pg_catalog.text::bigint
    THEN pg_catalog.setval(${own.text("fence")}, ${String(least)}::pg_catalog.text::bigint OPERATOR(pg_catalog.-) b.base) ELSE s.last_value END)::pg_catalog.text AS newest
  FROM ${own("fence")} s, (SELECT ${own("fence_base")}(true) AS base OFFSET 0) b WHERE ${onPrimary}`,
    );
    return Number(rows[0]?.["newest"]);
  },
};
