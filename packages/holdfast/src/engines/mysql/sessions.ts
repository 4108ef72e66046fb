import type { Row, SqlConnection } from "../../core/database.ts";
import type { Holder } from "../../core/errors.ts";
import { sql } from "../../core/sql.ts";

/** What is known of a session besides. */
export interface Note {
  readonly name?: string;
  readonly since?: Date | undefined;
}

export interface SessionRow {
  readonly application: string;
  readonly state: string;
}

/** Of these connections, as far as this user may see them: its own, or all with the privilege PROCESS. */
export async function sessions(
  connection: SqlConnection,
  ids: readonly string[],
): Promise<ReadonlyMap<string, SessionRow>> {
  if (ids.length === 0) return new Map();
  const { rows } = await connection.query(
    sql`SELECT id AS id, user AS user, host AS host, command AS command, state AS state
      FROM information_schema.processlist WHERE id IN (${sql.join(ids.map(Number))})`,
  );
  return new Map(rows.map((row) => [String(row.id), shown(row)]));
}

function shown({ user, host, command, state }: Row): SessionRow {
  return {
    application: `${String(user)}@${String(host)}`,
    // "Sleep" is a session between two statements of its transaction.
    state: command === "Sleep" ? "idle" : String(state || command),
  };
}

export async function asHolders(
  connection: SqlConnection,
  found: ReadonlyMap<string, Note>,
): Promise<Holder[]> {
  const known = await sessions(connection, [...found.keys()]);
  return [...found].map(([id, { name, since }]) => {
    const { application = "", state = "unknown" } = known.get(id) ?? {};
    const label = name === undefined || name === "" ? "" : ` [hf:${name}]`;
    return { pid: Number(id), application: `${application}${label}`.trim(), state, since };
  });
}
