import { hash } from "node:crypto";
import type { Routines, SqlConnection } from "./database.ts";
import type { Statement } from "./sql.ts";

/** A function, procedure or view: made again whenever its text is another one than that of what is there. */
export interface Routine {
  readonly name: string;
  /** Of its text. */
  readonly checksum: string;
  readonly statement: Statement;
}

/** "unknown": made by a newer version of Holdfast. */
export type RoutineState = "applied" | "missing" | "outdated" | "unknown";

/** What was made, and why. */
export interface Remade {
  readonly name: string;
  readonly was: "missing" | "outdated";
}

/** What `hf.migrate()` has done. */
export type Migrated =
  | { readonly kind: "migration"; readonly id: number; readonly name: string }
  | ({ readonly kind: "routine" } & Remade);

export function checksum(text: string): string {
  return hash("sha256", text, "hex").slice(0, 16);
}

/** Makes those that are not there, or not as they should be. */
export async function makeStale(
  connection: SqlConnection,
  routines: Routines<SqlConnection>,
): Promise<readonly Remade[]> {
  const states = await routines.states(connection);
  const made: Remade[] = [];
  for (const routine of routines.all) {
    const was = states.get(routine.name);
    if (was !== "missing" && was !== "outdated") continue;
    for (const statement of routines.make(routine)) await connection.query(statement);
    made.push({ name: routine.name, was });
  }
  return made;
}
