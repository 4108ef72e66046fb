/** Who is in a database: this process, and others. */
import { Socket } from "node:net";
import type { Row, Session } from "../server.ts";

export interface Seen {
  readonly id: string;
  /** As people know it. */
  readonly who: string;
  /** Of the client, as the server sees it; undefined: hidden, or no TCP. */
  readonly port: number | undefined;
  /** The session that asks. */
  readonly self: boolean;
}

/** Who is in a database, asked by any session of the server. */
export async function sessionsIn(
  { query }: Pick<Session, "query">,
  family: "postgres" | "mysql",
  name: string,
): Promise<Seen[]> {
  const rows =
    family === "postgres"
      ? await query(
          // Neither its own workers nor readers of the log.
          `SELECT pid AS id, usename || coalesce(' (' || nullif(application_name, '') || ')', '') AS who, client_port AS port,
            pid = pg_backend_pid() AS self FROM pg_stat_activity WHERE datname = $1 AND usename IS NOT NULL
            AND (backend_type IS NULL OR backend_type = 'client backend' OR backend_type LIKE 'logical replication%')
          ORDER BY pid`,
          [name],
        )
      : await processes(query, name);
  return rows.map((row) => ({
    id: String(row["id"]),
    who: String(row["who"]),
    port: row["port"] == null ? undefined : Number(row["port"]),
    self: row["self"] === true,
  }));
}

async function processes(query: Session["query"], name: string): Promise<Row[]> {
  const [own] = await query("SELECT CONNECTION_ID() AS id");
  const rows = await query("SHOW FULL PROCESSLIST");
  return rows
    .filter((row) => row["db"] === name && row["Command"] !== "Daemon")
    .map((row) => ({
      id: row["Id"],
      who: `${String(row["User"])}@${String(row["Host"])}`,
      port: /:(\d+)$/.exec(String(row["Host"]))?.[1],
      self: String(row["Id"]) === String(own?.["id"]),
    }));
}

export function listOf(seen: readonly Seen[]): string {
  const named = seen.slice(0, 3).map(({ id, who }) => `session ${id} of ${who}`);
  return `${named.join(", ")}${seen.length > 3 ? ` and ${seen.length - 3} more` : ""}`;
}

type Connect = (this: Socket, ...args: unknown[]) => Socket;

/** Connections of this process, from when it is made: whoever opens them. */
export class OwnConnections implements Disposable {
  readonly #sockets = new Set<Socket>();
  readonly #connect: Connect;

  constructor() {
    // The channel net.client.socket does not hear of those that are made first and connected then, as pg does.
    const prototype = Socket.prototype as unknown as { connect: Connect };
    const connect = (this.#connect = prototype.connect);
    const sockets = this.#sockets;
    prototype.connect = function (...args) {
      sockets.add(this);
      return connect.apply(this, args);
    };
  }

  /** Whether one of them is at this port here. */
  has(port: number | undefined): boolean {
    for (const socket of this.#sockets) if (socket.destroyed) this.#sockets.delete(socket);
    return port !== undefined && [...this.#sockets].some(({ localPort }) => localPort === port);
  }

  [Symbol.dispose](): void {
    (Socket.prototype as unknown as { connect: Connect }).connect = this.#connect;
  }
}
