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

/** Undefined: there is none (any more), or this user may not see it. */
export async function sessionOf(server: Server, id: string): Promise<ServerSession | undefined> {
  return server.kind === "postgres" ? postgresSession(server, id) : mysqlSession(server, id);
}

async function postgresSession({ query }: Server, id: string): Promise<ServerSession | undefined> {
  const [row] = await query(
    `SELECT application_name AS application, state, datname AS database, backend_type = 'client backend' AS client,
      datname = current_database() AS here, pid = pg_backend_pid() OR application_name = current_setting('application_name') AS own
    FROM pg_stat_activity WHERE pid = $1::int`,
    [Number(id)],
  );
  if (!row) return undefined;
  const state = String(row["state"] ?? "unknown");
  return {
    id,
    application: String(row["application"] ?? ""),
    state,
    active: state === "active" || state === "fastpath function call",
    database: row["database"] === null ? undefined : String(row["database"]),
    here: row["here"] === true,
    own: row["own"] === true,
    client: row["client"] === true,
  };
}

/** Shown, not selected: MySQL cannot read information_schema's list while a statement with an emoji in it runs. */
async function mysqlSession({ query }: Server, id: string): Promise<ServerSession | undefined> {
  const [me] = await query("SELECT DATABASE() AS db, CONNECTION_ID() AS id");
  const row = (await query("SHOW PROCESSLIST")).find((each) => String(each["Id"]) === id);
  if (!row) return undefined;
  const command = String(row["Command"]);
  const database = row["db"] === null ? undefined : String(row["db"]);
  return {
    id,
    application: `${String(row["User"])}@${String(row["Host"])}`,
    state: command === "Sleep" ? "idle" : String(row["State"] || command),
    active: command === "Query" || command === "Execute",
    database,
    here: row["db"] === me?.["db"],
    own: String(me?.["id"]) === id,
    client: !/^(?:Daemon|Binlog Dump|Slave)/.test(command),
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
