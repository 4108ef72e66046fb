/** A hot standby of a PostgreSQL that runs already: for tests of poolers that read from it, of replicas, of promotions. */
import { join } from "node:path";
import { Client } from "pg";
import type { EmbeddedPostgres } from "../../packages/cli/src/embedded.ts";
import { embeddedBinaries } from "../../packages/cli/src/postgres-binaries.ts";
import { startServer } from "../../packages/cli/src/server-process.ts";
import { eventually } from "./wait.ts";

/** What a server needs to have one. */
export const primarySettings = {
  fsync: "off",
  max_connections: "400",
  max_prepared_transactions: "10",
  max_wal_senders: "20",
  // For one that is not listening for a while.
  wal_keep_size: "256MB",
};

export interface Standby {
  readonly port: number;
  url(database?: string): string;
  /** Until it is resumed it shows what was there before. */
  pause(): Promise<void>;
  resume(): Promise<void>;
  /** Resolves when it shows everything that the primary has committed by now. */
  caughtUp(): Promise<void>;
  /** It becomes a primary; the other one knows nothing of it. */
  promote(): Promise<void>;
  readonly stop: () => Promise<void>;
}

export interface StandbyOptions {
  /** As in postgresql.conf. */
  settings?: Record<string, string>;
  /** The primary's programs, if they are not those of the embedded PostgreSQL 18. */
  binDir?: string;
}

/**
 * A copy of the primary's files, taken as it runs, which follows it from then on. Without pg_basebackup, which the embedded
 * PostgreSQL does not have.
 */
export async function startStandby(
  primary: EmbeddedPostgres,
  options: StandbyOptions = {},
): Promise<Standby> {
  const binDir = options.binDir ?? (await embeddedBinaries());
  const settings = {
    listen_addresses: "127.0.0.1",
    unix_socket_directories: "",
    // Not below the primary's.
    ...primarySettings,
    primary_conninfo: `host=127.0.0.1 port=${primary.port} user=postgres password=${primary.password} application_name=standby`,
    ...options.settings,
  };
  const urlOf = (port: number, database = "postgres") =>
    `postgres://postgres:${primary.password}@127.0.0.1:${port}/${database}`;
  const server = await startServer({
    name: "standby",
    stopSignal: "INT",
    async prepare(place) {
      const data = join(place.dir, "data");
      await asking(primary.url(), async (client) => {
        const [{ data_directory: from }] = (await client.query("SHOW data_directory")).rows;
        await client.query("SELECT pg_backup_start('standby', true)");
        await place.run({ file: "/bin/cp", args: ["-a", from, data] });
        const { rows } = await client.query("SELECT labelfile FROM pg_backup_stop(false)");
        await place.run({ file: "/bin/rm", args: ["-f", join(data, "postmaster.pid")] });
        await place.write("data/backup_label", rows[0].labelfile);
        await place.write("data/standby.signal", "");
      });
    },
    command: ({ dir }, port) => ({
      file: join(binDir, "postgres"),
      args: [
        "-D",
        join(dir, "data"),
        "-p",
        String(port),
        ...Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}=${value}`]),
      ],
    }),
    ready: (port) => asking(urlOf(port), (client) => client.query("SELECT 1")).then(() => {}),
  });
  const url = (database?: string) => urlOf(server.port, database);
  const tell = (sql: string) => asking(url(), (client) => client.query(sql)).then(() => {});
  return {
    port: server.port,
    url,
    pause: () => tell("SELECT pg_wal_replay_pause()"),
    resume: () => tell("SELECT pg_wal_replay_resume()"),
    async caughtUp() {
      const lsn = await asking(
        primary.url(),
        async (client) => (await client.query("SELECT pg_current_wal_flush_lsn()::text AS lsn")).rows[0].lsn,
      );
      await asking(url(), (client) =>
        eventually(async () => {
          const { rows } = await client.query("SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn AS there", [
            lsn,
          ]);
          return rows[0].there === true;
        }),
      );
    },
    promote: () => tell("SELECT pg_promote()"),
    stop: server.stop,
  };
}

async function asking<T>(connectionString: string, work: (client: Client) => Promise<T>): Promise<T> {
  const client = new Client({ connectionString, connectionTimeoutMillis: 10_000 });
  client.on("error", () => {});
  await client.connect();
  try {
    return await work(client);
  } finally {
    await client.end();
  }
}
