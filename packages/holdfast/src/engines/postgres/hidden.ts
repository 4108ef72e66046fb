/**
 * Rows of ours that cannot be seen. A decision that is made without them is wrong, so nothing is decided: functions run with
 * `row_security = off`, under which a query that a policy would filter fails; the few statements outside of functions ask `shown`; and a row that
 * was written and is not there (a trigger returned NULL, a rule sent it elsewhere) is `vanished`.
 */
import type { DriverError, SqlConnection } from "../../seam/database.ts";
import { type HiddenRows, RowsHiddenError } from "../../seam/errors.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf } from "./dialect.ts";
import { lookingAtNothing } from "./search-path.ts";

/** The SQLSTATE of `vanished`. */
const vanishedState = "HF404";

/** What these errors say, before and after the table's name: some clients pass on the words only. */
const policy = ["holdfast: row-level security hides rows of ", " from "] as const;
const gone = ["holdfast: a row is not in ", " where it was written"] as const;

/** How often a function makes a row and looks for it: more often than others delete it in between. */
export const mostTurns = sql.raw("10");

/** In the body of a function: a row that was written to this table, or to one of these, is not there. */
export function vanished(...tables: readonly string[]): Statement {
  const names = sql.join(
    tables.map((table) => sql`${own.text(table)}`),
    " || ', ' || ",
  );
  return sql`RAISE EXCEPTION '${sql.raw(gone.join("%"))}', ${names} USING ERRCODE = '${sql.raw(vanishedState)}'`;
}

/** After an INSERT of one row, in the body of a function. */
export function kept(table: string): Statement {
  return sql`IF NOT FOUND THEN
      ${vanished(table)};
    END IF`;
}

/**
 * Fails if a policy hides rows of one of these tables from this role. Declared immutable, though it is not: the planner then computes it
 * when it makes a plan. (As a filter it would never run: a policy that shows nothing makes an empty plan.) A plan is made anew when
 * policies, or the role, have changed.
 */
export const rowsShown: Statement = sql`CREATE OR REPLACE FUNCTION ${own("rows_shown")}(VARIADIC tables text[]) RETURNS boolean
${lookingAtNothing} IMMUTABLE PARALLEL SAFE
AS $function$
DECLARE
  name text;
BEGIN
  FOREACH name IN ARRAY tables LOOP
    IF row_security_active(name) THEN
      RAISE EXCEPTION '${sql.raw(policy.join("%"))}%', name, current_user USING ERRCODE = 'insufficient_privilege';
    END IF;
  END LOOP;
  RETURN true;
END
$function$`;

/** A condition for statements outside of functions, which holds, or fails with the table's name. */
export function shown(...tables: readonly string[]): Statement {
  return sql`${own("rows_shown")}(${sql.join(tables.map((table) => own.text(table)))})`;
}

/** A condition that holds if all rows were written: `count` is an SQL expression. As text, for messages that bind nothing. */
export function allKept(count: string, expected: number, table: string): string {
  return `(CASE WHEN ${count} OPERATOR(pg_catalog.<) ${expected} THEN '${gone.join(table.replaceAll("'", "''"))}' ELSE 'true' END)::boolean`;
}

/** The same for tables that are read before our functions are there. The catalogs say whether it is hidden. */
export function assertShown(connection: SqlConnection, isHidden: boolean, table: string): void {
  if (isHidden)
    throw new RowsHiddenError(undefined, { table: namesOf(connection).own(table), byPolicy: true });
}

/** What an INSERT returned. */
export function written<T>(connection: SqlConnection, row: T | undefined, table: string): T {
  if (row === undefined)
    throw new RowsHiddenError(undefined, { table: namesOf(connection).own(table), byPolicy: false });
  return row;
}

/** Where the server checks policies: the same in every language. Some clients pass on the words only. */
const checks = new Set(["check_enable_rls", "ExecWithCheckOptions"]);
const quoted = /["«»„“]\s*([^"«»„“”]+?)\s*["«»“”]/;

export const hiddenIn =
  (names: Names) =>
  (error: DriverError): HiddenRows | undefined => {
    const { code, message = "", routine } = error as DriverError & { readonly routine?: unknown };
    const named = ([before, after]: readonly [string, string]) =>
      message.includes(before) ? message.split(before)[1]?.split(after)[0] : undefined;
    const vanishedFrom = named(gone);
    if (vanishedFrom !== undefined) return { table: vanishedFrom, byPolicy: false };
    const hiddenBy = named(policy);
    if (hiddenBy !== undefined) return { table: hiddenBy, byPolicy: true };
    if (String(code) !== "42501" || !(checks.has(String(routine)) || /row-level security/.test(message)))
      return undefined;
    const table = quoted.exec(message)?.[1];
    // A table of the caller's has a policy of the caller's.
    return table !== undefined && own.has(table) ? { table: names.own(table), byPolicy: true } : undefined;
  };
