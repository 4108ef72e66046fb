import { existsSync } from "node:fs";
import { join } from "node:path";
import type { EmbeddedPostgres } from "../../packages/cli/src/embedded.ts";
import { startServer } from "../../packages/cli/src/server-process.ts";
import type { DebianPackage } from "./debian.ts";
import { type StartedServer, answersPg } from "./started-server.ts";

const PROGRAM = "/usr/sbin/pgbouncer";

export const pgbouncerPackage: DebianPackage = { name: "pgbouncer", installed: () => existsSync(PROGRAM) };

/** PgBouncer, in front of every database of a server. */
export async function startPgbouncer(
  postgres: Pick<EmbeddedPostgres, "port" | "password">,
  mode: "session" | "transaction" | "statement" = "transaction",
  /** More lines of its settings. */
  more: readonly string[] = [],
): Promise<StartedServer> {
  if (!pgbouncerPackage.installed()) throw new Error(`${PROGRAM} is not installed`);
  const urlOf = (port: number): string =>
    `postgres://postgres:${postgres.password}@127.0.0.1:${port}/postgres`;
  const server = await startServer({
    name: "pgbouncer",
    stopSignal: "TERM",
    async prepare(place) {
      await place.write("users.txt", `"postgres" "${postgres.password}"\n`);
    },
    async command(place, port) {
      const config = [
        "[databases]",
        `* = host=127.0.0.1 port=${postgres.port}`,
        "[pgbouncer]",
        "listen_addr = 127.0.0.1",
        `listen_port = ${port}`,
        "unix_socket_dir =",
        `pool_mode = ${mode}`,
        "auth_type = scram-sha-256",
        `auth_file = ${join(place.dir, "users.txt")}`,
        // Users a test creates are looked up in the database.
        "auth_user = postgres",
        "admin_users = postgres",
        "max_client_conn = 500",
        "default_pool_size = 20",
        "ignore_startup_parameters = extra_float_digits",
        ...more,
      ];
      const file = await place.write("pgbouncer.ini", `${config.join("\n")}\n`);
      return { file: PROGRAM, args: [file] };
    },
    ready: (port) => answersPg(urlOf(port)),
  });
  return { url: urlOf(server.port), stop: server.stop };
}
