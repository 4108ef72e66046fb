import { randomBytes } from "node:crypto";
import { existsSync } from "node:fs";
import { join } from "node:path";
import mysql from "mysql2/promise";
import { startServer } from "../../packages/cli/src/server-process.ts";
import type { DebianPackage } from "./debian.ts";
import type { RestartableServer } from "./started-server.ts";

const SERVER = "/usr/sbin/mariadbd";
const INSTALL = "/usr/bin/mariadb-install-db";

export const mariadbPackage: DebianPackage = {
  name: "mariadb-server",
  installed: () => existsSync(SERVER) && existsSync(INSTALL),
};

/** With further settings, as arguments of the server. */
export async function startMariadb(settings: readonly string[] = []): Promise<RestartableServer> {
  if (!mariadbPackage.installed()) throw new Error(`${SERVER} is not installed`);
  const password = randomBytes(18).toString("base64url");
  const urlOf = (port: number): string => `mysql://holdfast:${password}@127.0.0.1:${port}/mysql`;
  const server = await startServer({
    name: "mariadb",
    stopSignal: "TERM",
    async prepare(place) {
      await place.run({
        file: INSTALL,
        args: [
          "--no-defaults",
          `--datadir=${join(place.dir, "data")}`,
          // In a shared one, a server that starts meanwhile deletes what it takes for leftovers.
          `--tmpdir=${place.dir}`,
          "--auth-root-authentication-method=normal",
          "--skip-test-db",
        ],
      });
      // Read before the port opens, hence nobody meets the accounts that have no password.
      await place.write(
        "init.sql",
        [
          `CREATE OR REPLACE USER 'holdfast'@'%' IDENTIFIED BY '${password}';`,
          "GRANT ALL PRIVILEGES ON *.* TO 'holdfast'@'%' WITH GRANT OPTION;",
          "DELETE FROM mysql.global_priv WHERE user IN ('', 'root');",
          "FLUSH PRIVILEGES;",
        ].join("\n"),
      );
    },
    command: ({ dir }, port) => ({
      file: SERVER,
      args: [
        "--no-defaults",
        `--datadir=${join(dir, "data")}`,
        `--tmpdir=${dir}`,
        `--port=${port}`,
        "--bind-address=127.0.0.1",
        // Relative to the data directory: a path to a socket must not be longer than some hundred bytes.
        "--socket=mariadb.sock",
        `--init-file=${join(dir, "init.sql")}`,
        "--skip-name-resolve",
        "--max-connections=300",
        "--innodb-flush-log-at-trx-commit=0",
        // Some disks take 20 ms for it, and a table that is made asks for it a dozen times.
        "--innodb-flush-method=nosync",
        "--innodb-buffer-pool-size=128M",
        "--character-set-server=utf8mb4",
        ...settings,
      ],
    }),
    async ready(port) {
      const connection = await mysql.createConnection(urlOf(port));
      await connection.end();
    },
  });
  return { url: urlOf(server.port), stop: server.stop, restart: server.restart };
}
