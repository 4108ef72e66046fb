/** Sessions of a server: who they are, what they do, and how they are ended. */
import { Failure } from "../failure.ts";
import type { Server } from "../server.ts";
import { shown } from "../text.ts";

export interface ServerSession {
  readonly id: string;
  /** What it says of itself. */
  readonly application: string;
  readonly user: string;
  /** Its address; behind a pooler, the pooler's. */
  readonly client: string;
  readonly state: string;
  /** What it runs, or ran last, without values. Empty: the server does not tell. */
  readonly statement: string;
  /** What it does is hidden from this user: `state` and `statement` say nothing. */
  readonly hidden: boolean;
  /** A statement runs, so there is something to cancel. */
  readonly active: boolean;
  /** In its transaction since; undefined: it is in none, or the server does not tell. */
  readonly since: Date | undefined;
  /** The database it is in; undefined: in none. */
  readonly database: string | undefined;
  /** It is in the same one as we are. */
  readonly here: boolean;
  /** Ours. */
  readonly own: boolean;
  /** A worker of the server's, and nobody's connection. */
  readonly worker: boolean;
}

export type Sessions = ReadonlyMap<string, ServerSession>;

/** Those of these that are there; of MySQL and MariaDB, those that this user may see. */
export async function sessionsOf(server: Server, ids: readonly string[]): Promise<Sessions> {
  const numbers = [...new Set(ids)].filter((id) => /^\d{1,10}$/.test(id));
  if (numbers.length === 0 || server.kind === "sqlite") return new Map();
  return server.kind === "postgres" ? postgresSessions(server, numbers) : mysqlSessions(server, numbers);
}

/**
 * Whether those that are missing may be there all the same: MySQL and MariaDB show no other user's session to those who
 * may not see it.
 */
export async function hides({ kind, query }: Server): Promise<boolean> {
  if (kind === "postgres" || kind === "sqlite") return false;
  const grants = await query("SHOW GRANTS");
  return !grants.some((grant) =>
    /\b(?:ALL PRIVILEGES|PROCESS)\b.* ON \*\.\*/.test(String(Object.values(grant)[0])),
  );
}

/** As much of a statement as anybody reads. */
const most = 2000;

async function postgresSessions({ query, hf }: Server, ids: readonly string[]): Promise<Sessions> {
  const rows = await query(
    `SELECT pid::text AS id, application_name AS application, usename AS role, coalesce(host(client_addr), 'local') AS client,
      state, left(query, ${most}) AS statement, query = '<insufficient privilege>' AS hidden, xact_start AS since,
      datname AS database, datname = current_database() AS here, backend_type <> 'client backend' AS worker,
      pid = pg_backend_pid() OR application_name = current_setting('application_name') AS own
    FROM pg_stat_activity WHERE pid = ANY ($1::int[])`,
    // A larger one is nobody's: the server's are of 32 bits.
    [ids.map(Number).filter((id) => id < 2 ** 31)],
  );
  return new Map(
    rows.map((row) => {
      const hidden = row["hidden"] === true;
      const state = hidden ? "hidden" : String(row["state"] ?? "unknown");
      const session: ServerSession = {
        id: String(row["id"]),
        application: String(row["application"] ?? ""),
        user: String(row["role"] ?? ""),
        client: hidden ? "" : String(row["client"]),
        state,
        statement: hidden ? "" : hf.redacted(String(row["statement"] ?? "")),
        hidden,
        active: state === "active" || state === "fastpath function call",
        since: row["since"] instanceof Date ? row["since"] : undefined,
        database: row["database"] === null ? undefined : String(row["database"]),
        here: row["here"] === true,
        own: row["own"] === true,
        // Whose session it is, is hidden too.
        worker: row["worker"] === true,
      };
      return [session.id, session];
    }),
  );
}

/** Shown, not selected: MySQL cannot read information_schema's list while a statement with an emoji in it runs. */
async function mysqlSessions(server: Server, ids: readonly string[]): Promise<Sessions> {
  const { query, hf } = server;
  const [me] = await query("SELECT DATABASE() AS db, CONNECTION_ID() AS id");
  const rows = (await query("SHOW FULL PROCESSLIST")).filter((row) => ids.includes(String(row["Id"])));
  const idle = rows.filter((row) => row["Command"] === "Sleep").map((row) => String(row["Id"]));
  const last = await lastStatements(server, idle);
  return new Map(
    rows.map((row) => {
      const [id, command] = [String(row["Id"]), String(row["Command"])];
      const session: ServerSession = {
        id,
        application: "",
        user: String(row["User"]),
        client: String(row["Host"]).replace(/:\d+$/, ""),
        state: command === "Sleep" ? "idle" : String(row["State"] || command),
        statement: hf.redacted(String(row["Info"] ?? last.get(id) ?? "").slice(0, most)),
        hidden: false,
        active: command === "Query" || command === "Execute",
        since: undefined,
        database: row["db"] === null ? undefined : String(row["db"]),
        here: row["db"] === me?.["db"],
        own: String(me?.["id"]) === id,
        worker:
          /^(?:Daemon|Binlog Dump|Slave)/.test(command) ||
          /^(?:system user|event_scheduler)$/.test(String(row["User"])),
      };
      return [id, session];
    }),
  );
}

/** Of sessions that run none. Only performance_schema keeps them, which is off on MariaDB, and not for everybody. */
async function lastStatements({ kind, query }: Server, ids: readonly string[]): Promise<Map<string, string>> {
  if (kind !== "mysql" || ids.length === 0) return new Map();
  const rows = await query(
    `SELECT t.processlist_id AS id, LEFT(s.sql_text, ${most}) AS statement FROM performance_schema.events_statements_current s
      JOIN performance_schema.threads t ON t.thread_id = s.thread_id WHERE t.processlist_id IN (?)`,
    [ids.map(Number)],
  ).catch(() => []);
  return new Map(rows.map((row) => [String(row["id"]), String(row["statement"] ?? "")]));
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
