import type { Routines, SqlConnection } from "../../seam/database.ts";
import { type Routine, type RoutineState, checksum } from "../../seam/routine.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import { onPrimary } from "./primary.ts";
import { isTrue } from "./probe.ts";
import { namesOf, render } from "./dialect.ts";
import { assertShown } from "./hidden.ts";
import { hasFixedPath } from "./search-path.ts";

/**
 * Grows by one with each release whose routines are not those of the release before. Processes of the older one, which
 * migrate too when they start, leave alone what a newer one has made.
 */
const revision = 1;

export const routineTable: readonly Statement[] = [
  sql`CREATE TABLE IF NOT EXISTS ${own("routine")} (
  name text PRIMARY KEY,
  checksum text NOT NULL,
  revision integer NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
)`,
];

/** By the schema and the plain name, whatever has to be quoted. */
function routine(statement: Statement, names: Names): Routine {
  const { text } = render(statement, names);
  const name = /^CREATE OR REPLACE (?:FUNCTION|VIEW) .*?\.(\w+)/.exec(text)?.[1];
  if (name === undefined) throw new Error(`no routine: ${text.slice(0, 80)}`);
  if (!hasFixedPath(text)) throw new Error(`${name} runs with the search path of whoever calls it`);
  return { name: `${names.schema}.${name}`, checksum: checksum(text), statement };
}

async function states(
  connection: SqlConnection,
  all: readonly Routine[],
): Promise<Map<string, RoutineState>> {
  const { rows: there } = await connection.query(
    sql`WITH ours AS (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname OPERATOR(pg_catalog.=) ${own.schema} AND ${onPrimary})
SELECT p.proname::pg_catalog.text AS name, false AS hidden FROM pg_catalog.pg_proc p JOIN ours o ON o.oid OPERATOR(pg_catalog.=) p.pronamespace
UNION ALL SELECT c.relname::pg_catalog.text, pg_catalog.row_security_active(c.oid) FROM pg_catalog.pg_class c JOIN ours o ON o.oid OPERATOR(pg_catalog.=) c.relnamespace
  WHERE c.relkind OPERATOR(pg_catalog.=) 'v' OR c.relname OPERATOR(pg_catalog.=) 'routine'`,
  );
  assertShown(
    connection,
    there.some(({ hidden }) => isTrue(hidden)),
    "routine",
  );
  const { schema } = namesOf(connection);
  const found = new Set(there.map(({ name }) => `${schema}.${String(name)}`));
  const { rows } = found.has(`${schema}.routine`)
    ? await connection.query(sql`SELECT name, checksum, revision FROM ${own("routine")} WHERE ${onPrimary}`)
    : { rows: [] };
  const made = new Map(
    rows.map((row) => [String(row.name), { sum: String(row.checksum), revision: Number(row.revision) }]),
  );
  const isNewer = (name: string) => (made.get(name)?.revision ?? 0) > revision;
  const state = ({ name, checksum: sum }: Routine): RoutineState => {
    if (!found.has(name)) return "missing";
    if (made.get(name)?.sum === sum) return "applied";
    return isNewer(name) ? "unknown" : "outdated";
  };
  const others = [...made.keys()].filter((name) => isNewer(name) && found.has(name));
  return new Map([
    ...others.map((name): [string, RoutineState] => [name, "unknown"]),
    ...all.map((each): [string, RoutineState] => [each.name, state(each)]),
  ]);
}

/** Replaced as they are: calls that run go on with the old text, the next ones have the new one. */
export function routinesOf(statements: readonly Statement[], names: Names): Routines<SqlConnection> {
  const all = statements.map((each) => routine(each, names));
  return {
    all,
    make: ({ name, checksum: sum, statement }) => [
      statement,
      sql`INSERT INTO ${own("routine")} (name, checksum, revision) VALUES (${sql.raw(`'${name}', '${sum}', ${revision}`)})
ON CONFLICT (name) DO UPDATE SET checksum = excluded.checksum, revision = excluded.revision, applied_at = excluded.applied_at`,
    ],
    states: (connection) => states(connection, all),
  };
}
