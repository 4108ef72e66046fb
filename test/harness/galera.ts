import { randomBytes, randomUUID } from "node:crypto";
import { existsSync } from "node:fs";
import { join } from "node:path";
import mysql from "mysql2/promise";
import { type ServerProcess, freePort, startServer } from "../../packages/cli/src/server-process.ts";
import { mariadbPackage } from "./mariadb.ts";
import type { StartedCluster } from "./started-server.ts";

const SERVER = "/usr/sbin/mariadbd";
const INSTALL = "/usr/bin/mariadb-install-db";
/** Of the package galera-4, which mariadb-server depends on. */
const PROVIDER = "/usr/lib/galera/libgalera_smm.so";

/** Why there can be none on this machine; undefined if there can. */
export function noGalera(): string | undefined {
  if (mariadbPackage.installed() && existsSync(PROVIDER)) return undefined;
  return `Galera is not available: ${existsSync(SERVER) ? PROVIDER : SERVER} is not installed`;
}

/**
 * Nodes that all begin with the same files, so that nobody's have to be sent to those who join: one that joins takes what
 * it has for the beginning of what the others have, and is sent what was written since.
 */
export async function startGalera(nodes = 3): Promise<StartedCluster> {
  const password = randomBytes(18).toString("base64url");
  const urlOf = (port: number): string => `mysql://holdfast:${password}@127.0.0.1:${port}/mysql`;
  const history = randomUUID();
  const started: ServerProcess[] = [];
  const addresses: string[] = [];
  const stop = async () => void (await Promise.all(started.map((server) => server.stop())));
  try {
    for (let node = 1; node <= nodes; node++) {
      const [talk, transfer] = [await freePort(), await freePort()];
      const first = started[0];
      const members = addresses.join(",");
      started.push(
        await startServer({
          name: "galera",
          stopSignal: "TERM",
          timeout: 120_000,
          async prepare(place) {
            const data = join(place.dir, "data");
            if (first) {
              await place.run({ file: "/bin/cp", args: ["-a", join(first.dir, "template"), data] });
              return;
            }
            const accounts = await place.write(
              "accounts.sql",
              [
                "USE mysql;",
                // Accounts are not known before, while the tables are made.
                "FLUSH PRIVILEGES;",
                `CREATE OR REPLACE USER 'holdfast'@'%' IDENTIFIED BY '${password}';`,
                "GRANT ALL PRIVILEGES ON *.* TO 'holdfast'@'%' WITH GRANT OPTION;",
                "DELETE FROM mysql.global_priv WHERE user IN ('', 'root');",
                "FLUSH PRIVILEGES;",
              ].join("\n"),
            );
            const install = [
              "--no-defaults",
              `--datadir=${data}`,
              // In a shared one, a server that starts meanwhile deletes what it takes for leftovers.
              `--tmpdir=${place.dir}`,
              "--auth-root-authentication-method=normal",
              "--skip-test-db",
              `--extra-file=${accounts}`,
            ];
            await place.run({ file: INSTALL, args: install });
            await place.run({ file: "/bin/cp", args: ["-a", data, join(place.dir, "template")] });
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
              "--skip-name-resolve",
              "--max-connections=100",
              "--innodb-flush-log-at-trx-commit=0",
              // Some disks take 20 ms for it, and a table that is made asks for it a dozen times.
              "--innodb-flush-method=nosync",
              "--innodb-buffer-pool-size=32M",
              "--character-set-server=utf8mb4",
              "--binlog-format=ROW",
              "--innodb-autoinc-lock-mode=2",
              "--wsrep-on=ON",
              `--wsrep-provider=${PROVIDER}`,
              "--wsrep-cluster-name=holdfast",
              `--wsrep-cluster-address=gcomm://${members}`,
              `--wsrep-node-name=node${node}`,
              "--wsrep-node-address=127.0.0.1",
              `--wsrep-start-position=${history}:0`,
              // In their order: so it can be known what a node has not done yet.
              "--wsrep-slave-threads=1",
              `--wsrep-provider-options=${[
                `gmcast.listen_addr=tcp://127.0.0.1:${talk}`,
                `ist.recv_addr=127.0.0.1:${transfer}`,
                "gcache.size=32M",
                // A busy machine is not a dead node.
                "evs.keepalive_period=PT2S",
                "evs.suspect_timeout=PT60S",
                "evs.inactive_timeout=PT120S",
                "evs.install_timeout=PT60S",
                "pc.announce_timeout=PT10S",
              ].join(";")}`,
              ...(members === "" ? ["--wsrep-new-cluster"] : []),
            ],
          }),
          async ready(port) {
            const connection = await mysql.createConnection(urlOf(port));
            try {
              const [rows] = await connection.query<mysql.RowDataPacket[]>(
                "SHOW STATUS WHERE Variable_name IN ('wsrep_ready', 'wsrep_cluster_size')",
              );
              const found = Object.fromEntries(rows.map((row) => [row["Variable_name"], row["Value"]]));
              if (found["wsrep_ready"] !== "ON" || found["wsrep_cluster_size"] !== String(node))
                throw new Error(`not a part of the cluster: ${JSON.stringify(found)}`);
            } finally {
              await connection.end();
            }
          },
        }),
      );
      addresses.push(`127.0.0.1:${talk}`);
    }
  } catch (error) {
    await stop();
    throw error;
  }
  return { urls: started.map(({ port }) => urlOf(port)), stop };
}
