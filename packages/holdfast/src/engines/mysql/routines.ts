import type { Routines, SqlConnection } from "../../core/database.ts";
import { type Routine, type RoutineState, checksum } from "../../core/routine.ts";
import { type Statement, sql } from "../../core/sql.ts";
import { render } from "./dialect.ts";

export interface Procedure extends Routine {
  /** The name that it has on the server: `CALL ${procedure.called}(…)`. */
  readonly called: Statement;
}

/**
 * MySQL cannot replace a procedure: between DROP and CREATE every call fails (1305). So the name has the checksum of the
 * text in it. Another text is another procedure, beside the one that processes of before go on calling.
 */
export function procedure(name: string, text: Statement): Procedure {
  const sum = checksum(render(text).text);
  const called = sql.raw(`${name}_${sum.slice(0, 8)}`);
  return {
    name,
    checksum: sum,
    called,
    statement: sql`CREATE PROCEDURE IF NOT EXISTS ${called}${text}`,
  };
}

/** By what is there, not by a record: dumps leave procedures out, unless they are told to (mysqldump --routines). */
async function states(
  connection: SqlConnection,
  all: readonly Procedure[],
): Promise<Map<string, RoutineState>> {
  const { rows } = await connection.query(
    sql`SELECT routine_name AS name FROM information_schema.routines WHERE routine_schema = DATABASE()`,
  );
  const found = rows.map((row) => String(row.name));
  const state = ({ name, called }: Procedure) => {
    if (found.includes(render(called).text)) return "applied";
    const older = new RegExp(`^${name}(_[0-9a-f]{8})?$`);
    return found.some((each) => older.test(each)) ? "outdated" : "missing";
  };
  return new Map(all.map((each) => [each.name, state(each)]));
}

export function routinesOf(all: readonly Procedure[]): Routines<SqlConnection> {
  return {
    all,
    make: ({ statement }) => [statement],
    states: (connection) => states(connection, all),
  };
}
