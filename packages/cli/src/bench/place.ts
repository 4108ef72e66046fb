/** Where the benchmarks of `holdfast bench` run. */
import type { Pool as MysqlPool } from "mysql2/promise";
import type { Pool } from "pg";
import { describe } from "../describe.ts";
import { within } from "../within.ts";
import { Failure } from "../failure.ts";
import { type Own, type OwnDatabase, type OwnKind, createEmpty } from "../own-database.ts";
import type { Server, Session } from "../server.ts";

interface Common extends Own {
  /** Nobody else has it: also what locks are named for, which others on the server could meet. */
  readonly name: string;
  readonly connections: number;
}

export interface PostgresPlace extends Common {
  readonly family: "postgres";
  pool(size?: number): Pool;
}

export interface MysqlPlace extends Common {
  readonly family: "mysql";
  pool(): MysqlPool;
}

export type Place = PostgresPlace | MysqlPlace;

/** What may be made on the server. */
export async function placeKind(server: Server): Promise<OwnKind> {
  // MySQL and MariaDB have no schemas apart from databases.
  if (server.kind !== "postgres") return "database";
  const [rights] = await server.query(
    `SELECT rolsuper OR rolcreatedb AS database, has_database_privilege(current_database(), 'CREATE') AS schema
      FROM pg_roles WHERE rolname = current_user`,
  );
  if (rights?.["database"]) return "database";
  if (rights?.["schema"]) return "schema";
  throw new Failure(
    `${server.shown}: this user may create neither a database nor a schema. The benchmarks need one of their own, and remove it again: give the user that right (ALTER ROLE … CREATEDB, or GRANT CREATE ON DATABASE …), or name no database, and they run on a server of their own.`,
  );
}

/** For connections that do not end by themselves. */
const endMs = 3000;

/** Connections besides those of the benchmarks: ours, and those that a queue's worker keeps. */
const spare = 5;
/** Of those that are free: others need some too. */
const share = 0.5;

/** Throws if it would take more connections than the server can miss. */
export async function checkRoom(server: Server, connections: number): Promise<void> {
  const free = await freeConnections(server);
  const most = Math.floor(free * share) - spare;
  if (connections <= most) return;
  throw new Failure(
    `${server.shown} has ${free} connections left, and ${connections} with ${spare} around them are more than half of those: ${
      most >= 2 ? `use --connections ${most}` : "let some of the others end"
    }.`,
  );
}

async function freeConnections(server: Server): Promise<number> {
  if (server.kind === "postgres") {
    const [row] = await server.query(
      `SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
          - coalesce(current_setting('reserved_connections', true)::int, 0)
          - (SELECT count(*)::int FROM pg_stat_activity WHERE datid IS NOT NULL) AS free,
        (SELECT rolconnlimit - (SELECT count(*)::int FROM pg_stat_activity WHERE usename = current_user)
          FROM pg_roles WHERE rolname = current_user AND rolconnlimit >= 0) AS own`,
    );
    return Math.min(Number(row?.["free"]), row?.["own"] == null ? Infinity : Number(row["own"]));
  }
  const [limits] = await server.query("SELECT @@max_connections AS most, @@max_user_connections AS own");
  const [used] = await server.query("SHOW GLOBAL STATUS LIKE 'Threads_connected'");
  const connected = Number(used?.["Value"]);
  const own = Number(limits?.["own"]) || Infinity;
  return Math.min(Number(limits?.["most"]) - connected, own);
}

/** Made, and removed with the stack. */
export async function makePlace(
  server: Server,
  own: OwnDatabase,
  connections: number,
  cleanup: AsyncDisposableStack,
): Promise<Place> {
  const { what, name } = own;
  const url = new URL(server.url);
  if (what === "database") url.pathname = `/${name}`;
  if (server.kind === "postgres") {
    url.searchParams.set("application_name", name);
    if (what === "schema")
      url.searchParams.set(
        "options",
        `${url.searchParams.get("options") ?? ""} -c search_path=${name}`.trim(),
      );
  }
  cleanup.use(own);
  try {
    return server.kind === "postgres"
      ? await makePostgres(server, own, url, connections, cleanup)
      : await makeMysql(server, own, url, connections, cleanup);
  } catch (error) {
    if (error instanceof Failure) throw error;
    throw new Failure(`Could not make a ${what} of its own on ${server.shown}: ${describe(error)}.`, {
      cause: error,
    });
  }
}

async function makePostgres(
  server: Server,
  own: OwnDatabase,
  url: URL,
  connections: number,
  cleanup: AsyncDisposableStack,
): Promise<PostgresPlace> {
  const { what, name } = own;
  const { Client, Pool } = await import("pg");
  const keeper = new Client({ connectionString: url.href, connectionTimeoutMillis: 10_000 });
  keeper.on("error", () => {});
  if (what === "database") await own.make(() => createEmpty(server, name));
  // Kept: whoever finds the place sees by this session that it is in use.
  try {
    await keeper.connect();
  } catch (error) {
    // "unsupported startup parameter: options"
    if (what === "schema" && (error as { code?: unknown }).code === "08P01") throw pooler(server, error);
    throw error;
  }
  cleanup.defer(() => keeper.end());
  if (what === "schema") {
    await own.make(() => keeper.query(`CREATE SCHEMA "${name}"`));
    const { rows } = await keeper.query<{ here: string | null }>("SELECT current_schema() AS here");
    // A pooler may take the setting, and leave it at that: then tables would be made among somebody's own.
    if (rows[0]?.here !== name) throw pooler(server);
  }
  return {
    family: "postgres",
    what,
    name,
    connections,
    pool(size = connections) {
      const pool = new Pool({ connectionString: url.href, max: size });
      // Dropping the database ends its sessions.
      pool.on("error", () => {});
      pool.on("connect", (client) => client.on("error", () => {}));
      return pool;
    },
  };
}

function pooler(server: Server, cause?: unknown): Failure {
  return new Failure(
    `${server.shown} does not take a search_path with the connection, as poolers don't: name the server itself with --url, or a user that may create a database.`,
    { cause },
  );
}

async function makeMysql(
  server: Server,
  own: OwnDatabase,
  url: URL,
  connections: number,
  cleanup: AsyncDisposableStack,
): Promise<MysqlPlace> {
  const { name } = own;
  const { createPool } = await import("mysql2/promise");
  const keeper: Session = await server.session();
  cleanup.use(keeper);
  // Kept: whoever finds the database sees by this lock that it is in use. It is the server's, and not one database's.
  await keeper.query("SELECT GET_LOCK(?, 0)", [name]);
  try {
    await own.make(() => keeper.query(`CREATE DATABASE \`${name}\``));
  } catch (error) {
    const { code } = error as { code?: unknown };
    if (code !== "ER_DBACCESS_DENIED_ERROR" && code !== "ER_ACCESS_DENIED_ERROR") throw error;
    throw new Failure(
      `${server.shown}: this user may not create a database. The benchmarks make one of their own, and drop it again: GRANT ALL ON \`holdfast\\_bench\\_%\`.* TO …`,
      { cause: error },
    );
  }
  return {
    family: "mysql",
    what: "database",
    name,
    connections,
    pool() {
      const pool = createPool({
        uri: url.href.replace(/^mariadb:/i, "mysql:"),
        connectionLimit: connections,
        supportBigNumbers: true,
      });
      // Also if its suite could not be opened: what is left of it would keep the process from ending.
      cleanup.defer(() => within(endMs, pool.end()).catch(() => {}));
      return pool;
    },
  };
}
