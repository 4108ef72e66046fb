/** Sessions of a server, and how they are ended. */
import { Failure } from "../failure.ts";
import type { Server } from "../server.ts";
import { shown } from "../text.ts";

export interface ServerSession {
  readonly id: string;
  readonly application: string;
  readonly state: string;
  /** A statement runs, so there is something to cancel. */
  readonly active: boolean;
  /** The database it is in; undefined: in none. */
  readonly database: string | undefined;
  /** It is in the same one as we are. */
  readonly here: boolean;
  /** Ours. */
  readonly own: boolean;
  /** Somebody's connection, and not a worker of the server's. */
  readonly client: boolean;
}

const questions = {
  postgres: `SELECT pid::text AS id, application_name AS application, state, datname AS database, backend_type = 'client backend' AS client,
      datname = current_database() AS here, pid = pg_backend_pid() OR application_name = current_setting('application_name') AS own
    FROM pg_stat_activity WHERE pid = $1::int`,
  mysql: `SELECT id AS id, CONCAT(user, '@', host) AS application, command, COALESCE(state, '') AS state, db AS \`database\`,
      db <=> DATABASE() AS here, id = CONNECTION_ID() AS own FROM information_schema.processlist WHERE id = ?`,
};

/** Undefined: there is none (any more), or this user may not see it. */
export async function sessionOf({ kind, query }: Server, id: string): Promise<ServerSession | undefined> {
  const postgres = kind === "postgres";
  const [row] = await query(postgres ? questions.postgres : questions.mysql, [Number(id)]);
  if (!row) return undefined;
  const command = String(row["command"]);
  const state = postgres
    ? String(row["state"] ?? "unknown")
    : command === "Sleep"
      ? "idle"
      : String(row["state"] || command);
  return {
    id,
    application: String(row["application"] ?? ""),
    state,
    active: postgres
      ? state === "active" || state === "fastpath function call"
      : command === "Query" || command === "Execute",
    database: row["database"] === null ? undefined : String(row["database"]),
    here: row["here"] === true || Number(row["here"]) === 1,
    own: row["own"] === true || Number(row["own"]) === 1,
    client: postgres ? row["client"] === true : !/^(?:Daemon|Binlog Dump|Slave)/.test(command),
  };
}

export async function cancel(server: Server, id: string): Promise<void> {
  await signal(server, id, "pg_cancel_backend", "KILL QUERY");
}

export async function terminate(server: Server, id: string): Promise<void> {
  await signal(server, id, "pg_terminate_backend", "KILL");
}

async function signal({ kind, query }: Server, id: string, postgres: string, mysql: string): Promise<void> {
  try {
    if (kind === "postgres") await query(`SELECT ${postgres}($1::int)`, [Number(id)]);
    // KILL takes no parameter.
    else await query(`${mysql} ${Number(id)}`);
  } catch (error) {
    const { code, errno } = error as { code?: unknown; errno?: unknown };
    // ER_NO_SUCH_THREAD: it was faster.
    if (errno === 1094) return;
    if (code === "42501" || errno === 1095)
      throw new Failure(
        `This user may not end session ${shown(id)}. It takes ${kind === "postgres" ? "the same role, or pg_signal_backend (for a superuser's session, a superuser)" : "the same user, or the privilege CONNECTION_ADMIN"}.`,
        { cause: error },
      );
    throw error;
  }
}
