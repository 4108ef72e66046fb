import type { Migration, Migrations, Routines, SqlConnection } from "../../seam/database.ts";
import { SchemaTakenError, message, some } from "../../seam/errors.ts";
import { type LockRequest, key, schemaPart } from "../../seam/key.ts";
import { recorded, tablesMade } from "../../seam/migrations.ts";
import { type Remade, makeStale } from "../../seam/routine.ts";
import { type Names, Own, type Statement, own, sql } from "../../seam/sql.ts";
import { sleep } from "../../waiting/wait.ts";
import { execTable } from "../sql/exec.ts";
import { agreedTable } from "./agreements.ts";
import { auditTable } from "./audit.ts";
import { dialect, namesOf, ownKey, render, schemaOf } from "./dialect.ts";
import { waiting } from "./locks/keys.ts";
import { assertShown, rowsShown } from "./hidden.ts";
import { leaseRoutines, leaseTables } from "./leases/index.ts";
import { lockRowTable } from "./locks/lock-rows.ts";
import { mapRoutine, mapSequence } from "./map.ts";
import { onPrimary } from "./primary.ts";
import { isTrue } from "./probe.ts";
import { queueRoutines } from "./queue/functions.ts";
import { queueIndexes, queueTables } from "./queue/schema.ts";
import { quotaRoutines } from "./quota/functions.ts";
import { quotaHistory, quotaMoved, quotaTables } from "./quota/schema.ts";
import { replayTable } from "./replay.ts";
import { rightsIn, tableRights } from "./rights.ts";
import { routineTable, routinesOf } from "./routines.ts";
import { scheduleRoutines, scheduleTables } from "./schedule/schema.ts";
import { fixPath, pathFrame, plpgsql, runStatement } from "./search-path.ts";
import { stockRoutines } from "./stock/functions.ts";
import { stockHistory, stockTables } from "./stock/schema.ts";
import { arrayText } from "./values.ts";

/** What a schema that was chosen adds to what is hashed. */
const schemaKey = new Own(({ schema }) =>
  schema === dialect.names.schema ? "" : `'${schemaPart(schema)}' || `,
);

/** The same as key(…) in JavaScript: parts prefixed by their length in bytes, SHA-256, the first 8 bytes. */
const keyRoutine = sql`CREATE OR REPLACE FUNCTION ${own("key")}(VARIADIC parts text[]) RETURNS bigint
${plpgsql} IMMUTABLE PARALLEL SAFE
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
  { id: 15, name: "exec", statements: execTable({ id: "text", text: "text" }) },
  { id: 16, name: "map epoch", statements: mapSequence },
];

const routines: readonly Statement[] = [
  keyRoutine,
  runStatement,
  rowsShown,
  mapRoutine,
  ...leaseRoutines,
  ...quotaRoutines,
  ...stockRoutines,
  ...scheduleRoutines,
  ...queueRoutines,
];

const one = key("holdfast", "migrate");

/**
 * An index takes longer than a statement of the application may, so lower limits are raised until the end of the transaction.
 * Set to 0 first: a timer that runs already is not set anew. PostgreSQL before 17 has no limit of transactions.
 */
const limits =
  sql.raw(`SELECT pg_catalog.set_config(name, '0', true), pg_catalog.set_config(name, least, true)
FROM (VALUES ('statement_timeout', '5min'), ('transaction_timeout', '5min'), ('idle_in_transaction_session_timeout', '1min'))
  AS l (name, least)
WHERE pg_catalog.current_setting(name, true)::interval > '0'::interval
  AND pg_catalog.current_setting(name, true)::interval < least::interval`);

/** `first`: what comes before the tables, in the same transaction. `rights`: of those who use them. */
export function migrationsIn(
  names: Names,
  first?: (connection: SqlConnection) => Promise<void>,
  rights = tableRights,
): Migrations<SqlConnection> {
  const made = routinesOf(routines, names);
  return {
    all,
    routines: made,
    rights: rightsIn(names, rights, made.all),
    print: (statement) => `${render(statement, names).text};`,
    frame: pathFrame,
    record,
    applied: async (connection) => {
      try {
        return await done(connection);
      } catch (error) {
        throw await explained(connection, error);
      }
    },
    async apply(connection, begun) {
      for (let attempt = 1; ; attempt++) {
        try {
          return await applyOnce(connection, made, begun, first);
        } catch (error) {
          const { code } = (connection.unwrap?.(error) ?? error) as { code?: unknown };
          // Where advisory locks lock nothing, two may create the same thing: whoever comes second finds it done.
          if (begun) throw error;
          if (attempt === 5 || !collisions.has(String(code))) throw await explained(connection, error);
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
    // What is made here keeps what its names mean now: types, defaults, conditions of tables, views.
    await connection.query(fixPath);
    await connection.query(limits);
    await connection.query(sql.raw("SELECT pg_catalog.set_config('lock_timeout', '60000', true)"));
    if (await mayLock(connection))
      await connection.query(sql.raw(`SELECT ${waiting([lockOf(connection)], "xact").join()}`));
    await first?.(connection);
    let applied = idsOf(await done(connection));
    if (applied.size > 0) {
      await connection.query(sql`LOCK TABLE ${own("migration")} IN SHARE ROW EXCLUSIVE MODE`);
      applied = idsOf(await done(connection));
    }
    const missing = all.filter(({ id }) => !applied.has(id));
    // Once some of it is ours, all of it is: a record of a migration may have been lost.
    if (applied.size === 0) await refuseOthers(connection, missing);
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
function lockOf(connection: SqlConnection): LockRequest {
  return { key: ownKey(namesOf(connection), one), mode: "exclusive" };
}

/** Some servers have no advisory locks, and some users no right to them. Collisions are dealt with all the same. */
async function mayLock(connection: SqlConnection): Promise<boolean> {
  const [row] = (
    await connection.query(
      sql.raw(
        "SELECT coalesce(pg_catalog.has_function_privilege(pg_catalog.to_regprocedure('pg_catalog.pg_advisory_xact_lock(bigint)')::pg_catalog.oid, 'EXECUTE'), false) AS may",
      ),
    )
  ).rows;
  return isTrue(row?.may);
}

const idsOf = (found: readonly Pick<Migration, "id">[]) => new Set(found.map(({ id }) => id));

async function done(connection: SqlConnection): Promise<Pick<Migration, "id" | "name">[]> {
  const [row] = (
    await connection.query(sql`SELECT pg_catalog.to_regclass(${own.text("migration")}) IS NOT NULL AS there,
  pg_catalog.row_security_active(pg_catalog.to_regclass(${own.text("migration")})::pg_catalog.oid) AS hidden WHERE ${onPrimary}`)
  ).rows;
  if (!isTrue(row?.there)) return [];
  assertShown(connection, isTrue(row?.hidden), "migration");
  return recorded(
    connection,
    all,
    tableIn(connection),
    (error) => codeOf(connection, error) === "42703",
    onPrimary,
  );
}

const tableIn = (connection: SqlConnection) => namesOf(connection).own("migration");

function codeOf(connection: SqlConnection, error: unknown): unknown {
  return ((connection.unwrap?.(error) ?? error) as { code?: unknown } | undefined)?.code;
}

/** Tables that are there before the migration that makes them: it would leave them as they are. */
async function refuseOthers(connection: SqlConnection, missing: readonly Migration[]): Promise<void> {
  const names = namesOf(connection);
  const made = tablesMade(missing, (statement) => render(statement, names).text);
  const { rows } = await connection.query(
    sql`SELECT t AS name FROM pg_catalog.unnest(${arrayText(made)}::pg_catalog.text::pg_catalog.text[]) t WHERE pg_catalog.to_regclass(t) IS NOT NULL`,
  );
  if (rows.length > 0)
    throw new SchemaTakenError(
      `The schema ${names.schema} holds ${some(rows.map(({ name }) => String(name)))}, which Holdfast has not made`,
    );
}

/** A schema of somebody else's, in which this role can do nothing. */
async function explained(connection: SqlConnection, error: unknown): Promise<unknown> {
  if (codeOf(connection, error) !== "42501" || connection.lost.aborted) return error;
  const { schema } = namesOf(connection);
  const [row] = (
    await connection.query(
      sql`SELECT pg_catalog.pg_get_userbyid(nspowner)::pg_catalog.text AS owner, current_user::pg_catalog.text AS me,
          pg_catalog.quote_ident(current_user) AS quoted, pg_catalog.quote_ident(nspname) AS schema
        FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) ${schema}
          AND NOT (pg_catalog.has_schema_privilege(oid, 'USAGE') AND pg_catalog.has_schema_privilege(oid, 'CREATE'))`,
    )
  ).rows;
  if (!row) return error;
  return new SchemaTakenError(
    `The schema ${schema} belongs to the role ${String(row.owner)}, and ${String(row.me)} may not make tables in it (${message(error)}). ` +
      `If it is Holdfast's, migrate as that role, or GRANT USAGE, CREATE ON SCHEMA ${String(row.schema)} TO ${String(row.quoted)}`,
    error,
  );
}
