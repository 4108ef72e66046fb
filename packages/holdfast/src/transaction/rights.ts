/** Which rights are missing: one refusal names one of them, and people want to know all. */
import type { Connection, Database } from "../seam/database.ts";
import { classify } from "../seam/failure.ts";

/** Of refusals, as they were thrown. */
const lacking = new WeakMap<object, readonly string[]>();

/** After a statement of ours was refused: finds out what else would be. `ask` gets an answer on another connection, or none. */
export async function findRights<C extends Connection>(
  database: Pick<Database<unknown, C>, "engine" | "unwrap">,
  error: unknown,
  ask: (question: (connection: C) => Promise<readonly string[]>) => Promise<readonly string[]>,
): Promise<void> {
  const { rights } = database.engine.migrations;
  if (!rights || typeof error !== "object" || error === null || classify(database, error) !== "denied")
    return;
  lacking.set(error, await ask((connection) => rights.lacking(connection)).catch(() => []));
}

/** What was found out. */
export function rightsLacking(error: unknown): readonly string[] {
  return lacking.get(error as object) ?? [];
}
