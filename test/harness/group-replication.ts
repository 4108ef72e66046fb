import { randomBytes, randomUUID } from "node:crypto";
import { join } from "node:path";
import mysql from "mysql2/promise";
import { type ServerProcess, freePort, startServer } from "../../packages/cli/src/server-process.ts";
import { commandOf, mysqlProgram } from "./mysql.ts";
import type { StartedCluster } from "./started-server.ts";
import { eventually } from "./wait.ts";

/** A group in which all take writes, and what they wrote is compared at COMMIT. */
export async function startGroup(nodes = 2): Promise<StartedCluster> {
  const command = commandOf(await mysqlProgram());
  const password = randomBytes(18).toString("base64url");
  const urlOf = (port: number): string => `mysql://holdfast:${password}@127.0.0.1:${port}/mysql`;
  const group = randomUUID();
  const talks = await Promise.all(Array.from({ length: nodes }, () => freePort()));
  const seeds = talks.map((port) => `127.0.0.1:${port}`).join(",");
  const started: ServerProcess[] = [];
  const stop = async () => void (await Promise.all(started.map((server) => server.stop())));
  try {
    for (const [i, talk] of talks.entries()) {
      const first = started[0];
      const server = await startServer({
        name: "mysql-group",
        stopSignal: "TERM",
        timeout: 120_000,
        async prepare(place) {
          const data = join(place.dir, "data");
          if (first) {
            await place.run({ file: "/bin/cp", args: ["-a", join(first.dir, "template"), data] });
          } else {
            await place.run(
              // In a shared one, a server that starts meanwhile deletes what it takes for leftovers.
              command(["--initialize-insecure", `--datadir=${data}`, `--tmpdir=${place.dir}`]),
            );
            await place.run({ file: "/bin/cp", args: ["-a", data, join(place.dir, "template")] });
          }
          // Each has a name of its own, which it makes if there is none.
          await place.run({ file: "/bin/rm", args: ["-f", join(data, "auto.cnf")] });
          // Read before the port opens, hence nobody meets the account that has no password. Each node has its own.
          await place.write(
            "init.sql",
            [
              "SET sql_log_bin = 0;",
              `CREATE USER IF NOT EXISTS 'holdfast'@'%' IDENTIFIED BY '${password}';`,
              "GRANT ALL PRIVILEGES ON *.* TO 'holdfast'@'%' WITH GRANT OPTION;",
              "DROP USER IF EXISTS 'root'@'localhost';",
            ].join("\n"),
          );
        },
        command: ({ dir }, port) =>
          command([
            `--datadir=${join(dir, "data")}`,
            `--tmpdir=${dir}`,
            `--port=${port}`,
            "--bind-address=127.0.0.1",
            "--mysqlx=OFF",
            "--secure-file-priv=NULL",
            "--socket=mysql.sock",
            `--pid-file=${join(dir, "mysqld.pid")}`,
            `--init-file=${join(dir, "init.sql")}`,
            "--skip-name-resolve",
            "--max-connections=100",
            "--innodb-flush-log-at-trx-commit=0",
            // Some disks take 20 ms for it, and a table that is made asks for it a dozen times.
            "--innodb-flush-method=nosync",
            "--sync-binlog=0",
            "--innodb-doublewrite=OFF",
            "--innodb-buffer-pool-size=64M",
            "--character-set-server=utf8mb4",
            `--server-id=${i + 1}`,
            // In their order: so it can be known what a node has not done yet.
            "--replica-parallel-workers=1",
            "--report-host=127.0.0.1",
            "--gtid-mode=ON",
            "--enforce-gtid-consistency=ON",
            "--plugin-load-add=group_replication.so",
            `--loose-group-replication-group-name=${group}`,
            "--loose-group-replication-start-on-boot=OFF",
            `--loose-group-replication-local-address=127.0.0.1:${talk}`,
            `--loose-group-replication-group-seeds=${seeds}`,
            "--loose-group-replication-single-primary-mode=OFF",
            "--loose-group-replication-enforce-update-everywhere-checks=ON",
            // A busy machine is not a dead node.
            "--loose-group-replication-member-expel-timeout=120",
            "--loose-group-replication-recovery-get-public-key=ON",
          ]),
        async ready(port) {
          const connection = await mysql.createConnection(urlOf(port));
          await connection.end();
        },
      });
      started.push(server);
      await enter(urlOf(server.port), i === 0, password);
    }
  } catch (error) {
    await stop();
    throw error;
  }
  return { urls: started.map(({ port }) => urlOf(port)), stop };
}

async function enter(url: string, first: boolean, password: string): Promise<void> {
  const connection = await mysql.createConnection(url);
  try {
    if (first) await connection.query("SET GLOBAL group_replication_bootstrap_group = ON");
    await connection.query(`START GROUP_REPLICATION USER='holdfast', PASSWORD='${password}'`);
    if (first) await connection.query("SET GLOBAL group_replication_bootstrap_group = OFF");
    await eventually(async () => {
      const [rows] = await connection.query<mysql.RowDataPacket[]>(
        "SELECT member_state AS state FROM performance_schema.replication_group_members WHERE member_id = @@server_uuid",
      );
      const state = String(rows[0]?.["state"]);
      if (state !== "ONLINE") throw new Error(`the node is ${state}`);
    });
  } finally {
    await connection.end();
  }
}
