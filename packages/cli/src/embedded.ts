import { randomBytes } from "node:crypto";
import { chown, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { Client, escapeIdentifier } from "pg";
import { embeddedBinaries } from "./postgres-binaries.ts";
import { type Identity, type ServerPlace, startServer } from "./server-process.ts";

export interface StartPostgresOptions {
  /** Without it a free port is picked. */
  port?: number;
  /** Where the data lives. Without it, in a temporary directory. */
  dataDir?: string;
  /** Whether the data survives `stop`. By default it does if `dataDir` is given. */
  persistent?: boolean;
  /** Server settings, as in postgresql.conf. */
  settings?: Record<string, string>;
  /** The directory of another PostgreSQL's programs, to run it in place of the embedded PostgreSQL 18. */
  binDir?: string;
}

export interface EmbeddedPostgres {
  readonly port: number;
  /** The postmaster's; it changes with a restart. */
  readonly pid: number;
  /** The password of the superuser `postgres`. */
  readonly password: string;
  /** The address of a database (by default `postgres`) for a user (by default the superuser). */
  url(database?: string, login?: { user?: string; password?: string }): string;
  readonly stop: () => Promise<void>;
  /** "fast" ends the sessions in order, "immediate" is a crash with recovery. */
  restart(mode?: "fast" | "immediate"): Promise<void>;
  createDatabase(name: string, template?: string): Promise<void>;
  dropDatabase(name: string): Promise<void>;
}

/**
 * Starts a PostgreSQL server on this machine's loopback interface. It ends with `stop`, or when this process
 * does, even if that is killed.
 */
export async function startPostgres(options: StartPostgresOptions = {}): Promise<EmbeddedPostgres> {
  const binDir = options.binDir ?? (await embeddedBinaries());
  const persistent = options.persistent ?? options.dataDir !== undefined;
  const settings = {
    listen_addresses: "127.0.0.1",
    unix_socket_directories: "",
    max_connections: "400",
    ...options.settings,
  };
  let password = "";
  const dataOf = (dir: string): string => options.dataDir ?? dir;

  const url: EmbeddedPostgres["url"] = (database = "postgres", login = {}) =>
    urlOf(server.port, login.user ?? "postgres", login.password ?? password, database);
  const server = await startServer({
    name: "postgres",
    stopSignal: "INT",
    ...(options.port === undefined ? {} : { port: options.port }),
    async prepare(place) {
      password = await prepareData(binDir, dataOf(place.dir), place);
    },
    command: ({ dir }, port) => ({
      file: join(binDir, "postgres"),
      args: [
        "-D",
        join(dataOf(dir), "data"),
        "-p",
        String(port),
        ...Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}=${value}`]),
      ],
    }),
    ready: (port) => ask(urlOf(port, "postgres", password, "postgres"), "SELECT 1"),
  });

  const admin = (sql: string): Promise<void> => ask(url(), sql);
  return {
    get port() {
      return server.port;
    },
    get pid() {
      return server.pid;
    },
    password,
    url,
    async stop() {
      await server.stop();
      if (options.dataDir !== undefined && !persistent) {
        await rm(options.dataDir, { recursive: true, force: true });
      }
    },
    restart: (mode = "fast") => server.restart(mode === "fast" ? "SIGINT" : "SIGQUIT"),
    createDatabase: (name, template) =>
      admin(
        `CREATE DATABASE ${escapeIdentifier(name)}` +
          (template === undefined ? "" : ` TEMPLATE ${escapeIdentifier(template)}`),
      ),
    dropDatabase: (name) => admin(`DROP DATABASE IF EXISTS ${escapeIdentifier(name)} WITH (FORCE)`),
  };
}

/** Returns the superuser's password: a new one, or that of a data directory which exists already. */
async function prepareData(binDir: string, home: string, place: ServerPlace): Promise<string> {
  const passwordFile = join(home, "password");
  await makeOwned(home, place.identity);
  const known = await readFile(passwordFile, "utf8").catch(() => undefined);
  if (known !== undefined) return known;
  const password = randomBytes(18).toString("base64url");
  // Under another name until initdb is through, since its presence says that the data is complete.
  const draft = await place.write("password.new", password);
  const data = join(home, "data");
  await rm(data, { recursive: true, force: true });
  await place.run({
    file: join(binDir, "initdb"),
    args: [
      `--pgdata=${data}`,
      "--username=postgres",
      "--auth=scram-sha-256",
      `--pwfile=${draft}`,
      "--encoding=UTF8",
      "--locale=C",
      "--no-sync",
      "--no-instructions",
    ],
  });
  await writeFile(passwordFile, password, { mode: 0o600 });
  return password;
}

async function makeOwned(dir: string, identity: Identity): Promise<void> {
  await mkdir(dir, { recursive: true, mode: 0o700 });
  if (identity) await chown(dir, identity.uid, identity.gid);
}

function urlOf(port: number, user: string, password: string, database: string): string {
  return `postgres://${encodeURIComponent(user)}:${password}@127.0.0.1:${port}/${encodeURIComponent(database)}`;
}

async function ask(connectionString: string, sql: string): Promise<void> {
  const client = new Client({ connectionString, connectionTimeoutMillis: 10_000 });
  // The end of the server is no news here: the query reports it.
  client.on("error", () => {});
  await client.connect();
  try {
    await client.query(sql);
  } finally {
    await client.end();
  }
}
