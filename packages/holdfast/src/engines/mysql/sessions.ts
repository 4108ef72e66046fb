import type { Capabilities } from "../../seam/capabilities.ts";
import type { Row, SqlConnection } from "../../seam/database.ts";
import type { Holder } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import { atPrimary } from "./primary.ts";

/** What is known of a session besides. */
export interface Note {
  readonly name?: string;
  readonly since?: Date | undefined;
}

export interface SessionRow {
  readonly application: string;
  readonly state: string;
}

/** Where this server lists its sessions. */
export type SessionList = "information_schema" | "performance_schema" | "SHOW";

/**
 * MySQL cannot read information_schema's list, nor that of its transactions, not even count its rows, while any session
 * runs a statement with a character of four bytes, as an emoji is (3854, by 9.7). MariaDB has no other table of them.
 */
export function sessionList({ flavour, details }: Capabilities): SessionList {
  if (flavour !== "mysql") return "information_schema";
  return details?.["performanceSchema"] === true ? "performance_schema" : "SHOW";
}

const columns =
  "id AS id, user AS user, host AS host, db AS db, command AS command, state AS state, info AS info";
const lists = {
  information_schema: sql.raw(
    `SELECT ${columns}, time_ms AS waited FROM information_schema.processlist WHERE ${atPrimary}`,
  ),
  performance_schema: sql.raw(
    `SELECT ${columns}, time * 1000 AS waited FROM performance_schema.processlist WHERE ${atPrimary}`,
  ),
};

/** The server's sessions, as far as this user may see them: its own, or all with the privilege PROCESS. */
export async function processes(
  connection: SqlConnection,
  from: SessionList,
  ids?: readonly string[],
): Promise<readonly Row[]> {
  if (from !== "SHOW") {
    const these = ids ? sql`AND id IN (${sql.join(ids.map(Number))})` : sql.raw("");
    return (await connection.query(sql`${lists[from]} ${these}`)).rows;
  }
  const { rows } = await connection.query(sql.raw("SHOW FULL PROCESSLIST"));
  return rows
    .map((row) => Object.fromEntries(Object.entries(row).map(([name, value]) => [name.toLowerCase(), value])))
    .filter(({ id }) => ids?.includes(String(id)) ?? true)
    .map((row): Row => ({ ...row, waited: Number(row["time"]) * 1000 }));
}

export async function sessions(
  connection: SqlConnection,
  ids: readonly string[],
  from: SessionList,
): Promise<ReadonlyMap<string, SessionRow>> {
  if (ids.length === 0) return new Map();
  return new Map((await processes(connection, from, ids)).map((row) => [String(row.id), shown(row)]));
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
  capabilities: Capabilities,
): Promise<Holder[]> {
  const known = await sessions(connection, [...found.keys()], sessionList(capabilities));
  return [...found].map(([id, { name, since }]) => {
    const { application = "", state = "unknown" } = known.get(id) ?? {};
    const label = name === undefined || name === "" ? "" : ` [hf:${name}]`;
    return { pid: Number(id), application: `${application}${label}`.trim(), state, since };
  });
}
