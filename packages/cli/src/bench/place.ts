/**
 * Where the benchmarks of `holdfast bench` run: a database of their own on somebody's server, or a schema of their own
 * where the user may not create one. Its name says what it is, and that it can go.
 */
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { failureOf } from "holdfast";
import type { Pool as MysqlPool } from "mysql2/promise";
import type { Pool } from "pg";
import { describe } from "../describe.ts";
import { Failure } from "../failure.ts";
import type { Server, Session } from "../server.ts";

const prefix = "holdfast_bench_";
const pattern = /^holdfast_bench_[0-9a-f]{12}$/;

export type PlaceKind = "database" | "schema";

interface Own {
  readonly what: PlaceKind;
  /** Nobody else has it: also what locks are named for, which others on the server could meet. */
  readonly name: string;
  readonly connections: number;
}

export interface PostgresPlace extends Own {
  readonly family: "postgres";
  pool(size?: number): Pool;
}

export interface MysqlPlace extends Own {
  readonly family: "mysql";
  pool(): MysqlPool;
}

export type Place = PostgresPlace | MysqlPlace;

/** What may be made on the server. */
export async function placeKind(server: Server): Promise<PlaceKind> {
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

function quoted(server: Server, name: string): string {
  return server.kind === "postgres" ? `"${name}"` : `\`${name}\``;
}

async function drop(server: Server, what: PlaceKind, name: string, force: boolean): Promise<void> {
  const id = quoted(server, name);
  if (what === "schema") await server.query(`DROP SCHEMA IF EXISTS ${id} CASCADE`);
  else
    await server.query(
      `DROP DATABASE IF EXISTS ${id}${force && server.kind === "postgres" ? " WITH (FORCE)" : ""}`,
    );
}

/** By hand. */
export function dropStatement(what: PlaceKind, name: string): string {
  return what === "schema" ? `DROP SCHEMA ${name} CASCADE` : `DROP DATABASE ${name}`;
}

/** For a server that is just starting again. */
const patienceMs = 15_000;

function isAway(error: unknown): boolean {
  const { code } = error as { code?: unknown };
  // Starting up, or nobody listens yet.
  return code === "57P03" || code === "ECONNREFUSED" || failureOf(error)?.kind === "lost";
}

/**
 * Made, and removed with the stack. `left` is told its name if it could not be removed, and is also what is said if the
 * process ends before it was.
 */
export async function makePlace(
  server: Server,
  what: PlaceKind,
  connections: number,
  cleanup: AsyncDisposableStack,
  left: (what: PlaceKind, name: string, why: string) => void,
): Promise<Place> {
  const name = `${prefix}${randomBytes(6).toString("hex")}`;
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
  // A second Ctrl-C ends the process at once.
  const onExit = (): void => left(what, name, "it was stopped before that");
  process.once("exit", onExit);
  cleanup.defer(async () => {
    for (const since = performance.now(); ;) {
      try {
        await drop(server, what, name, true);
        break;
      } catch (error) {
        if (isAway(error) && performance.now() - since < patienceMs) await sleep(500);
        else {
          left(what, name, describe(error));
          break;
        }
      }
    }
    process.off("exit", onExit);
  });
  try {
    return server.kind === "postgres"
      ? await makePostgres(server, what, name, url, connections, cleanup)
      : await makeMysql(server, name, url, connections, cleanup);
  } catch (error) {
    if (error instanceof Failure) throw error;
    throw new Failure(`Could not make a ${what} of its own on ${server.shown}: ${describe(error)}.`, {
      cause: error,
    });
  }
}

async function makePostgres(
  server: Server,
  what: PlaceKind,
  name: string,
  url: URL,
  connections: number,
  cleanup: AsyncDisposableStack,
): Promise<PostgresPlace> {
  const { Client, Pool } = await import("pg");
  const keeper = new Client({ connectionString: url.href, connectionTimeoutMillis: 10_000 });
  keeper.on("error", () => {});
  // template1 may be in use by somebody, which would be an error.
  if (what === "database") await server.query(`CREATE DATABASE "${name}" TEMPLATE template0`);
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
    await keeper.query(`CREATE SCHEMA "${name}"`);
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
  name: string,
  url: URL,
  connections: number,
  cleanup: AsyncDisposableStack,
): Promise<MysqlPlace> {
  const { createPool } = await import("mysql2/promise");
  const keeper: Session = await server.session();
  cleanup.use(keeper);
  // Kept: whoever finds the database sees by this lock that it is in use. It is the server's, and not one database's.
  await keeper.query("SELECT GET_LOCK(?, 0)", [name]);
  try {
    await keeper.query(`CREATE DATABASE \`${name}\``);
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
    pool: () =>
      createPool({
        uri: url.href.replace(/^mariadb:/i, "mysql:"),
        connectionLimit: connections,
        supportBigNumbers: true,
      }),
  };
}

export interface Leftover {
  readonly what: PlaceKind;
  readonly name: string;
}

/** Places of runs that were killed: those in which nobody is. */
export async function leftovers(server: Server): Promise<Leftover[]> {
  const first = await unused(server);
  if (first.length === 0 || server.kind !== "postgres") return first;
  // Between its making and the first session in it a database looks like one that was left.
  await sleep(300);
  const still = new Set((await unused(server)).map(({ name }) => name));
  return first.filter(({ name }) => still.has(name));
}

async function unused(server: Server): Promise<Leftover[]> {
  const rows =
    server.kind === "postgres"
      ? await server.query(
          `SELECT 'database' AS what, datname AS name FROM pg_database d
              WHERE datname LIKE $1 AND pg_has_role(datdba, 'MEMBER')
                AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.datid = d.oid)
            UNION ALL SELECT 'schema', nspname FROM pg_namespace
              WHERE nspname LIKE $1 AND pg_has_role(nspowner, 'MEMBER')
                AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.application_name = nspname)
            ORDER BY name`,
          [`${prefix}%`],
        )
      : await server.query(
          `SELECT 'database' AS what, schema_name AS name FROM information_schema.schemata
            WHERE schema_name LIKE ? AND IS_FREE_LOCK(schema_name) = 1 ORDER BY schema_name`,
          [`${prefix}%`],
        );
  return rows
    .map((row) => ({ what: row["what"] as PlaceKind, name: String(row["name"]) }))
    .filter(({ name }) => pattern.test(name));
}

/** Not by force: somebody who is in it after all keeps it. */
export async function removeLeftover(server: Server, { what, name }: Leftover): Promise<void> {
  await drop(server, what, name, false);
}
