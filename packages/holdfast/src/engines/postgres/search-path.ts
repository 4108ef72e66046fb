/**
 * Names that mean what we mean. Whoever may create things in a schema of the search path can make a function, an operator or a
 * type that is taken for the server's own, and that then runs with the rights of whoever calls it: `public.cardinality(bigint[])` is
 * a better match than `pg_catalog.cardinality(anyarray)`. docs/decisions/0045-search-path.md
 *
 * - A routine has a path of its own ({@link plpgsql}).
 * - A statement that is sent often, or before there are routines, names every function, type and operator with its schema.
 * - Any other statement runs inside a routine ({@link safely}), or in a transaction whose path is set ({@link fixPath}).
 */
import type { Row, SqlConnection } from "../../seam/database.ts";
import { type Names, type Statement, own, render, sql } from "../../seam/sql.ts";
import { dialect, namesOf } from "./dialect.ts";
import { byPrimary } from "./primary.ts";
import { arrayText } from "./values.ts";

/** pg_temp last: if it is not named it comes first, and everybody may create types and tables there. */
export const safePath = "pg_catalog, pg_temp";

const fixed = `SET search_path = ${safePath}`;
/** A query that a policy would filter fails: see hidden.ts. */
const whole = "SET row_security = off";

/** Every function of ours has one of these; `routinesOf` refuses one that has not. */
export const plpgsql = sql.raw(`LANGUAGE plpgsql ${fixed} ${whole}`);
export const plainSql = sql.raw(`LANGUAGE sql ${fixed} ${whole}`);
/** For what looks at no table of ours. */
export const lookingAtNothing = sql.raw(`LANGUAGE plpgsql ${fixed}`);

/** A view's names are looked up when it is made; so are those of a body that is an expression (RETURN …). */
export function hasFixedPath(text: string): boolean {
  return text.startsWith("CREATE OR REPLACE VIEW") || text.includes(fixed) || text.includes("\nRETURN ");
}

/** Until the end of the transaction. Never for a session: a pooler lends sessions to others. */
export const fixPath = sql.raw(`SELECT pg_catalog.set_config('search_path', '${safePath}', true)`);

/** Runs `work` in a READ COMMITTED transaction. The connection is in none. */
export async function inTransaction<T>(connection: SqlConnection, work: () => Promise<T>): Promise<T> {
  await connection.query(sql.raw("BEGIN ISOLATION LEVEL READ COMMITTED"));
  try {
    const value = await work();
    await connection.query(sql.raw("COMMIT"));
    return value;
  } catch (error) {
    await connection.query(sql.raw("ROLLBACK"));
    throw error;
  }
}

/** The same, with a safe path: its statements need not qualify names. */
export function inSafeTransaction<T>(connection: SqlConnection, work: () => Promise<T>): Promise<T> {
  return inTransaction(connection, async () => {
    await connection.query(fixPath);
    return work();
  });
}

/**
 * Around what other tools run, which have statements of their own in the same transaction. Without a transaction nothing is set, and the
 * names would mean anything: it fails.
 */
export const pathFrame: readonly [before: Statement, after: Statement] = [
  sql.raw(`SELECT pg_catalog.set_config('holdfast.path', pg_catalog.current_setting('search_path'), true),
  pg_catalog.set_config('search_path', '${safePath}', true);
DO $check$ BEGIN
  IF pg_catalog.current_setting('search_path') OPERATOR(pg_catalog.<>) '${safePath}' THEN
    RAISE EXCEPTION 'Run all of this in one transaction' USING HINT = 'psql --single-transaction --set ON_ERROR_STOP=1';
  END IF;
END $check$`),
  sql.raw("SELECT pg_catalog.set_config('search_path', pg_catalog.current_setting('holdfast.path'), true)"),
];

/** Runs a statement of ours, whose values are texts, with the path of this function. Rows as JSON. `path`: the caller's. */
export const runStatement = sql`CREATE OR REPLACE FUNCTION ${own("run_statement")}(statement text, given text[], path text) RETURNS SETOF text
${plpgsql} AS $function$
DECLARE
  r record;
BEGIN
  FOR r IN EXECUTE statement USING given, path LOOP
    RETURN NEXT row_to_json(r)::text;
  END LOOP;
END
$function$`;

/** In a statement that is run {@link safely}: the path of the session that sends it. */
export const callersPath = sql.raw("$2");

const inArray = { ...dialect, placeholder: (index: number) => `($1)[${index}]` };

function wrapped(statement: Statement, names: Names): Statement {
  const { text, values } = render(statement, inArray, names);
  return sql`SELECT r AS row FROM ${own("run_statement")}(${byPrimary(sql`${text}::pg_catalog.text`)}, ${arrayText(values)}::pg_catalog.text::pg_catalog.text[],
  pg_catalog.current_setting('search_path')) r`;
}

/**
 * The rows of a statement that may use operators and functions as they are called, whatever the path of the session is. In one
 * round trip, inside of a transaction and outside of one. It returns rows, and its values are texts.
 */
export async function safely(connection: SqlConnection, statement: Statement): Promise<Row[]> {
  const call = wrapped(statement, namesOf(connection));
  const { rows } = await (connection.prepared?.(call) ?? connection.query(call));
  return rows.map(({ row }) => JSON.parse(String(row)) as Row);
}
