/** A MySQL or MariaDB with a replica that is read only, and that can be made to stop: it then shows what was there before. */
import mysql from "mysql2/promise";
import { startMariadb } from "./mariadb.ts";
import { startMysql } from "./mysql.ts";
import type { RestartableServer } from "./started-server.ts";
import { eventually } from "./wait.ts";

export interface ReplicatedPair {
  /** By a user of this name, on a database of this name. */
  primary(user: PairUser, database: string): string;
  replica(user: PairUser, database: string): string;
  /** On the primary. */
  readonly admin: mysql.Connection;
  /** On the replica. */
  readonly replicaAdmin: mysql.Connection;
  pause(): Promise<void>;
  resume(): Promise<void>;
  /** Resolves when it shows everything that the primary has committed by now. */
  caughtUp(): Promise<void>;
  stop(): Promise<void>;
}

/** `plain`: one for whom the replica is read only; it is not for those who may do anything. */
export type PairUser = "plain" | "admin";

const words = {
  mysql: {
    start: startMysql,
    status: "SHOW BINARY LOG STATUS",
    follow: "CHANGE REPLICATION SOURCE TO",
    source: "SOURCE",
    more: ", GET_SOURCE_PUBLIC_KEY = 1",
    replica: "REPLICA",
  },
  mariadb: {
    start: startMariadb,
    status: "SHOW MASTER STATUS",
    follow: "CHANGE MASTER TO",
    source: "MASTER",
    more: "",
    replica: "SLAVE",
  },
} as const;

export async function startPair(server: keyof typeof words): Promise<ReplicatedPair> {
  const { start, status, follow, source, more, replica: word } = words[server];
  const [primary, replica] = (await Promise.all(
    [1, 2].map((id) => start(["--log-bin=changes", `--server-id=${id}`])),
  )) as [RestartableServer, RestartableServer];
  const [admin, replicaAdmin] = (await Promise.all(
    [primary, replica].map(({ url }) => mysql.createConnection(url)),
  )) as [mysql.Connection, mysql.Connection];
  const { hostname, port, username, password } = new URL(primary.url);
  // Not from the start, where each server makes its own user.
  const [[at]] = await admin.query<mysql.RowDataPacket[]>(status);
  const to = {
    HOST: `'${hostname}'`,
    PORT: port,
    USER: `'${username}'`,
    PASSWORD: `'${password}'`,
    LOG_FILE: `'${at?.["File"]}'`,
    LOG_POS: at?.["Position"],
  };
  const all = Object.entries(to).map(([name, value]) => `${source}_${name} = ${value}`);
  await replicaAdmin.query(`${follow} ${all.join(", ")}${more}`);
  await replicaAdmin.query("SET GLOBAL read_only = 1");
  await replicaAdmin.query(`START ${word}`);
  await admin.query("CREATE DATABASE marks");
  await admin.query("CREATE TABLE marks.mark (n int AUTO_INCREMENT PRIMARY KEY)");
  for (const [user, rights] of [
    ["plain", ["ALL ON `shop%`.*", "PROCESS ON *.*", "SELECT ON performance_schema.*"]],
    ["admin", ["ALL ON *.*"]],
  ] as const) {
    await admin.query(`CREATE USER '${user}'@'%' IDENTIFIED BY '${password}'`);
    for (const right of rights) await admin.query(`GRANT ${right} TO '${user}'@'%'`);
  }
  const urlOf = (of: RestartableServer) => (user: PairUser, database: string) =>
    Object.assign(new URL(of.url), { username: user, password, pathname: `/${database}` }).href;
  const pair: ReplicatedPair = {
    primary: urlOf(primary),
    replica: urlOf(replica),
    admin,
    replicaAdmin,
    pause: async () => void (await replicaAdmin.query(`STOP ${word} SQL_THREAD`)),
    resume: async () => void (await replicaAdmin.query(`START ${word}`)),
    async caughtUp() {
      const [{ insertId }] = await admin.query<mysql.ResultSetHeader>("INSERT INTO marks.mark VALUES ()");
      await eventually(async () => {
        const [[row]] = await replicaAdmin.query<mysql.RowDataPacket[]>("SELECT MAX(n) AS n FROM marks.mark");
        return Number(row?.["n"]) >= insertId;
      });
    },
    async stop() {
      await Promise.all([admin.end(), replicaAdmin.end()]);
      await Promise.all([primary.stop(), replica.stop()]);
    },
  };
  await eventually(() => pair.caughtUp());
  // Then a server asks for no more than a proof of the password.
  for (const address of [pair.primary, pair.replica])
    for (const user of ["plain", "admin"] as const)
      await (await mysql.createConnection(address(user, "information_schema"))).end();
  return pair;
}
