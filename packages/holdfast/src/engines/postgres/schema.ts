import type { Migration, Migrations, Routines, SqlConnection } from "../../seam/database.ts";
import { type LockRequest, key, keyIn, schemaPart } from "../../seam/key.ts";
import { type Remade, makeStale } from "../../seam/routine.ts";
import { type Names, Own, type Statement, own, sql } from "../../seam/sql.ts";
import { sleep } from "../../waiting/wait.ts";
import { agreedTable } from "./agreements.ts";
import { auditTable } from "./audit.ts";
import { dialect, render, schemaOf } from "./dialect.ts";
import { waiting } from "./locks/keys.ts";
import { leaseRoutines, leaseTables } from "./leases/index.ts";
import { lockRowTable } from "./locks/lock-rows.ts";
import { isTrue } from "./probe.ts";
import { queueRoutines } from "./queue/functions.ts";
import { queueIndexes, queueTables } from "./queue/schema.ts";
import { quotaRoutines } from "./quota/functions.ts";
import { quotaHistory, quotaMoved, quotaTables } from "./quota/schema.ts";
import { replayTable } from "./replay.ts";
import { routineTable, routinesOf } from "./routines.ts";
import { scheduleRoutines, scheduleTables } from "./schedule/schema.ts";
import { stockRoutines } from "./stock/functions.ts";
import { stockHistory, stockTables } from "./stock/schema.ts";

/** What a schema that was chosen adds to what is hashed. */
const schemaKey = new Own(({ schema }) =>
  schema === dialect.names.schema ? "" : `'${schemaPart(schema)}' || `,
);

/** The same as key(…) in JavaScript: parts prefixed by their length in bytes, SHA-256, the first 8 bytes. */
const keyRoutine = sql`CREATE OR REPLACE FUNCTION ${own("key")}(VARIADIC parts text[]) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $function$
BEGIN
  IF coalesce(cardinality(parts), 0) = 0 OR array_position(parts, NULL) IS NOT NULL OR array_position(parts, '') IS NOT NULL THEN
    RAISE EXCEPTION 'holdfast.key: a part is missing or empty' USING ERRCODE = 'null_value_not_allowed',
      HINT = 'A missing id would lock everybody out, or lock the wrong thing.';
  END IF;
  RETURN (SELECT ('x' || encode(substring(sha256(convert_to(
    ${schemaKey}string_agg(octet_length(convert_to(part, 'UTF8'))::text || ':' || part, '' ORDER BY position), 'UTF8')) FROM 1 FOR 8), 'hex'))::bit(64)::bigint
    FROM unnest(parts) WITH ORDINALITY AS p (part, position));
END
$function$`;

const all: readonly Migration[] = [
  {
    id: 1,
    name: "keys",
    statements: [
      sql`CREATE SCHEMA IF NOT EXISTS ${new Own(schemaOf)}`,
      sql`CREATE TABLE IF NOT EXISTS ${own("migration")} (
  id integer PRIMARY KEY,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
)`,
    ],
  },
  { id: 2, name: "lock rows", statements: lockRowTable },
  { id: 3, name: "leases", statements: leaseTables },
  { id: 4, name: "once", statements: replayTable },
  { id: 5, name: "quota", statements: quotaTables },
  { id: 6, name: "stock", statements: stockTables },
  { id: 7, name: "schedule", statements: scheduleTables },
  { id: 8, name: "queue", statements: queueTables },
  { id: 9, name: "audit", statements: auditTable },
  { id: 10, name: "history", statements: [...quotaHistory, ...stockHistory] },
  { id: 11, name: "routines", statements: routineTable },
  { id: 12, name: "queue indexes", statements: queueIndexes },
  { id: 13, name: "agreed", statements: agreedTable },
  { id: 14, name: "quota moves", statements: quotaMoved },
];

const routines: readonly Statement[] = [
  keyRoutine,
  ...leaseRoutines,
  ...quotaRoutines,
  ...stockRoutines,
  ...scheduleRoutines,
  ...queueRoutines,
];

const one = key("holdfast", "migrate");

/** `first`: what comes before the tables, in the same transaction. */
export function migrationsIn(
  names: Names,
  first?: (connection: SqlConnection) => Promise<void>,
): Migrations<SqlConnection> {
  const made = routinesOf(routines, names);
  return {
    all,
    routines: made,
    print: (statement) => `${render(statement, names).text};`,
    record,
    applied: done,
    async apply(connection, begun) {
      for (let attempt = 1; ; attempt++) {
        try {
          return await applyOnce(connection, made, begun, first);
        } catch (error) {
          const { code } = (connection.unwrap?.(error) ?? error) as { code?: unknown };
          // Where advisory locks lock nothing, two may create the same thing: whoever comes second finds it done.
          if (begun || attempt === 5 || !collisions.has(String(code))) throw error;
          await sleep(50 * attempt);
        }
      }
    },
  };
}

function record({ id, name }: Pick<Migration, "id" | "name">): Statement {
  return sql`INSERT INTO ${own("migration")} (id, name) VALUES (${sql.raw(String(id))}, ${sql.raw(`'${name}'`)}) ON CONFLICT (id) DO NOTHING`;
}

/** Something of that name is there already, or came meanwhile. */
const collisions = new Set(["23505", "42P06", "42P07", "42710", "42723", "XX000", "40P01"]);

async function applyOnce(
  connection: SqlConnection,
  made: Routines<SqlConnection>,
  begun: boolean,
  first?: (connection: SqlConnection) => Promise<void>,
): Promise<readonly (Migration | Remade)[]> {
  if (!begun) await connection.query(sql.raw("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"));
  try {
    await connection.query(sql.raw("SELECT set_config('lock_timeout', '60000', true)"));
    if (await mayLock(connection))
      await connection.query(sql.raw(`SELECT ${waiting([lockOf(connection)], "xact").join()}`));
    await first?.(connection);
    let applied = idsOf(await done(connection));
    if (applied.size > 0) {
      await connection.query(sql`LOCK TABLE ${own("migration")} IN SHARE ROW EXCLUSIVE MODE`);
      applied = idsOf(await done(connection));
    }
    const missing = all.filter(({ id }) => !applied.has(id));
    for (const migration of missing) {
      for (const statement of migration.statements) await connection.query(statement);
      await connection.query(record(migration));
    }
    const remade = await makeStale(connection, made);
    if (!begun) await connection.query(sql.raw("COMMIT"));
    return [...missing, ...remade];
  } catch (error) {
    if (!begun && !connection.lost.aborted) await connection.query(sql.raw("ROLLBACK")).catch(() => {});
    throw error;
  }
}

/** Who migrates one schema need not wait for who migrates another. */
function lockOf({ names }: SqlConnection): LockRequest {
  return { key: names ? keyIn(names.schema, one) : one, mode: "exclusive" };
}

/** Some servers have no advisory locks, and some users no right to them. Collisions are dealt with all the same. */
async function mayLock(connection: SqlConnection): Promise<boolean> {
  const [row] = (
    await connection.query(
      sql.raw(
        "SELECT coalesce(has_function_privilege(to_regprocedure('pg_advisory_xact_lock(bigint)')::oid, 'EXECUTE'), false) AS may",
      ),
    )
  ).rows;
  return isTrue(row?.may);
}

const idsOf = (found: readonly Pick<Migration, "id">[]) => new Set(found.map(({ id }) => id));

async function done(connection: SqlConnection): Promise<Pick<Migration, "id" | "name">[]> {
  const [row] = (
    await connection.query(sql`SELECT to_regclass(${own.text("migration")}) IS NOT NULL AS there`)
  ).rows;
  if (!isTrue(row?.there)) return [];
  const { rows } = await connection.query(sql`SELECT id, name FROM ${own("migration")} ORDER BY id`);
  return rows.map(({ id, name }) => ({ id: Number(id), name: String(name) }));
}
