import type { Routines, SqlConnection } from "../../seam/database.ts";
import { type Routine, type RoutineState, checksum } from "../../seam/routine.ts";
import type { RoutineEffect } from "../../seam/protocol-reader.ts";
import { type Names, type Statement, own, sql } from "../../seam/sql.ts";
import { namesOf, render } from "./dialect.ts";
import { onPrimary } from "./primary.ts";

export interface Procedure extends Routine {
  /** The name that it has on the server: `CALL ${procedure.called}(…)`. */
  readonly called: Statement;
  /** The same without what its schema adds. */
  readonly plain: string;
  /** For tests that try the orders of statements. Tables as `own` takes them. */
  readonly effect: RoutineEffect;
}

/**
 * MySQL cannot replace a procedure: between DROP and CREATE every call fails (1305). So the name has the checksum of the
 * text in it. Another text is another procedure, beside the one that processes of before go on calling.
 */
export function procedure(name: string, effect: RoutineEffect, text: Statement): Procedure {
  const sum = checksum(render(text).text);
  // Where they have chosen another schema, its text is another one only by that.
  const called = `${name}_${sum.slice(0, 8)}`;
  return {
    name,
    checksum: sum,
    called: sql`${own(called)}`,
    plain: called,
    effect,
    statement: sql`CREATE PROCEDURE IF NOT EXISTS ${own(called)}${text}`,
  };
}

/** By what is there, not by a record: dumps leave procedures out, unless they are told to (mysqldump --routines). */
async function states(
  connection: SqlConnection,
  all: readonly Procedure[],
): Promise<Map<string, RoutineState>> {
  const { rows } = await connection.query(
    sql`SELECT routine_name AS name FROM information_schema.routines WHERE routine_schema = DATABASE() AND ${onPrimary}`,
  );
  const found = rows.map((row) => String(row.name));
  const state = ({ name, plain }: Procedure) => {
    if (found.includes(namesOf(connection).own(plain))) return "applied";
    const older = new RegExp(`^${name}(_[0-9a-f]{8})?$`);
    return found.some((each) => older.test(each)) ? "outdated" : "missing";
  };
  return new Map(all.map((each) => [each.name, state(each)]));
}

export function routinesOf(procedures: readonly Procedure[], names: Names): Routines<SqlConnection> {
  const all = procedures.map((each) => ({ ...each, name: names.own(each.name) }));
  return {
    all,
    make: ({ statement }) => [statement],
    states: (connection) => states(connection, all),
  };
}
