/** pgpool-II in front of a primary and its standby, as Debian's package sets it up: what only reads may go to the standby. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { freePort, startServer } from "../../packages/cli/src/server-process.ts";
import type { DebianPackage } from "./debian.ts";
import { type StartedServer, answersPg } from "./started-server.ts";

const PROGRAM = "/usr/sbin/pgpool";

export const pgpoolPackage: DebianPackage = { name: "pgpool2", installed: () => existsSync(PROGRAM) };

/** Why it is not here; undefined: it is. */
export function noPgpool(): string | undefined {
  return pgpoolPackage.installed() ? undefined : `pgpool-II is not available: there is no ${PROGRAM}`;
}

export interface PgpoolOptions {
  readonly password: string;
  readonly primary: number;
  readonly standby: number;
  /** How many sessions read from which: by default as many from the one as from the other. */
  readonly weights?: readonly [primary: number, standby: number];
  /** More lines of its settings. */
  readonly more?: readonly string[];
}

export async function startPgpool({
  password,
  primary,
  standby,
  weights = [1, 1],
  more = [],
}: PgpoolOptions): Promise<StartedServer> {
  if (!pgpoolPackage.installed()) throw new Error(`${PROGRAM} is not installed`);
  const urlOf = (port: number): string => `postgres://postgres:${password}@127.0.0.1:${port}/postgres`;
  const server = await startServer({
    name: "pgpool",
    stopSignal: "INT",
    async command(place, port) {
      const { dir } = place;
      const backend = (i: number, at: number, flag: string) => [
        `backend_hostname${i} = '127.0.0.1'`,
        `backend_port${i} = ${at}`,
        `backend_weight${i} = ${weights[i]}`,
        `backend_flag${i} = '${flag}'`,
      ];
      const config = [
        "backend_clustering_mode = 'streaming_replication'",
        "listen_addresses = '127.0.0.1'",
        `port = ${port}`,
        ...["socket_dir", "pcp_socket_dir", "wd_ipc_socket_dir"].map((name) => `${name} = '${dir}'`),
        "pcp_listen_addresses = '127.0.0.1'",
        `pcp_port = ${await freePort()}`,
        `pid_file_name = '${join(dir, "pgpool.pid")}'`,
        `logdir = '${dir}'`,
        ...backend(0, primary, "ALWAYS_PRIMARY|DISALLOW_TO_FAILOVER"),
        ...backend(1, standby, "DISALLOW_TO_FAILOVER"),
        "num_init_children = 64",
        "enable_pool_hba = on",
        `pool_passwd = '${await place.write("pool_passwd", `postgres:TEXT${password}\n`)}'`,
        "sr_check_user = 'postgres'",
        `sr_check_password = '${password}'`,
        "health_check_period = 0",
        ...more,
      ];
      const file = await place.write("pgpool.conf", `${config.join("\n")}\n`);
      const hba = await place.write("pool_hba.conf", "host all all 127.0.0.1/32 scram-sha-256\n");
      const pcp = await place.write("pcp.conf", "");
      return { file: PROGRAM, args: ["-n", "-f", file, "-a", hba, "-F", pcp] };
    },
    ready: (port) => answersPg(urlOf(port)),
  });
  return { url: urlOf(server.port), stop: server.stop };
}
