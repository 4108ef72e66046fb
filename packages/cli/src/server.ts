/** A connection to the database that a verb is about, whichever kind it is of. */
import { statSync } from "node:fs";
import { fileURLToPath } from "node:url";
import type { Holdfast, HoldfastOptions } from "holdfast";
import { describe } from "./describe.ts";
import { startPostgres } from "./embedded.ts";
import { Failure } from "./failure.ts";
import { note } from "./terminal.ts";
import { defaultSchema, given, givenSchema, ownIn, withoutSecrets } from "./url.ts";

export type Kind = "postgres" | "mysql" | "mariadb" | "sqlite";

export type Row = Record<string, unknown>;

/** One session of the server's, kept. */
export interface Session extends AsyncDisposable {
  query(text: string, values?: readonly unknown[]): Promise<Row[]>;
  /** Ends it at once, whatever it does. */
  destroy(): void;
}

export interface Server extends AsyncDisposable {
  readonly kind: Kind;
  /** As it may be shown. */
  readonly shown: string;
  readonly url: string;
  readonly hf: Holdfast<unknown>;
  /** Where Holdfast's own tables are. */
  readonly schema: string;
  /** One of them, as it is written in SQL. */
  own(name: string): string;
  /** On any connection. Values are bound: $1 on PostgreSQL, ? elsewhere. */
  query(text: string, values?: readonly unknown[]): Promise<Row[]>;
  /** A session of its own, for what has to be seen from two of them. */
  session(): Promise<Session>;
}

export interface ConnectOptions {
  readonly url?: string | undefined;
  /** Default: as HOLDFAST_SCHEMA says. */
  readonly schema?: string | undefined;
  /** The schema is to be given to one of the nodes of Citus. Found out, where it has been. */
  readonly spread?: boolean | undefined;
  /** A PostgreSQL of its own if none is named. */
  readonly embedded?: boolean;
  /** Kinds that the verb knows; default: all. */
  readonly kinds?: readonly Kind[];
  /** What to do with another kind: a sentence. */
  readonly instead?: string;
  readonly application?: string;
  readonly holdfast?: HoldfastOptions;
  /** Connections at the most. Default 4. */
  readonly most?: number;
}

type Chosen = ConnectOptions & { readonly schema: string };

const names: Record<Kind, string> = {
  postgres: "PostgreSQL",
  mysql: "MySQL",
  mariadb: "MariaDB",
  sqlite: "SQLite",
};

const forms =
  "postgres://user@host/database, mysql://user@host/database, mariadb://user@host/database or file:app.db";

/** The kind that a URL names. */
export function kindOf(url: string): Kind {
  const scheme = /^([a-z][a-z0-9+.-]*):/i.exec(url)?.[1]?.toLowerCase();
  if (scheme === "postgres" || scheme === "postgresql") return "postgres";
  if (scheme === "mysql" || scheme === "mariadb") return scheme;
  if (scheme === "file" || scheme === "sqlite") return "sqlite";
  throw new Failure(`${withoutSecrets(url)} is not the address of a database. It looks like ${forms}.`);
}

/** Throws a `Failure` that says in one line what is wrong. */
export async function connect(options: ConnectOptions): Promise<Server> {
  const found = given(options.url);
  if (!found && !options.embedded)
    throw new Failure(`Which database? Name it with --url, HOLDFAST_URL or DATABASE_URL: ${forms}.`);
  if (!found) {
    note("No --url, HOLDFAST_URL or DATABASE_URL: on a PostgreSQL of its own, which is gone afterwards.");
    const own = await startPostgres();
    const server = await open(own.url(), "postgres", options).catch(async (error: unknown) => {
      await own.stop();
      throw error;
    });
    return {
      ...server,
      async [Symbol.asyncDispose]() {
        await server[Symbol.asyncDispose]();
        await own.stop();
      },
    };
  }
  const { url, by } = found;
  const kind = kindOf(url);
  if (options.kinds && !options.kinds.includes(kind))
    throw new Failure(
      `${withoutSecrets(url)} (${by}) is ${names[kind]}; this works on ${options.kinds.map((each) => names[each]).join(", ")}.${options.instead === undefined ? "" : ` ${options.instead}`}`,
    );
  try {
    return await open(url, kind, options);
  } catch (error) {
    throw unreachable(error, url, by);
  }
}

function unreachable(error: unknown, url: string, by: string): Failure {
  if (error instanceof Failure) return error;
  const where = `${withoutSecrets(url)} (${by})`;
  return new Failure(`Could not connect to ${where}: ${describe(error)}.${remedy(error)}`, { cause: error });
}

/** What people can do about it, by the code that the driver or the server gave. */
function remedy(error: unknown): string {
  const { code } = (error instanceof AggregateError ? (error.errors[0] as object) : (error as object)) as {
    code?: unknown;
  };
  switch (code) {
    case "ECONNREFUSED":
      return " Nothing listens there: is the server running, and is it that port?";
    case "ENOTFOUND":
    case "EAI_AGAIN":
      return " There is no host of that name.";
    case "ETIMEDOUT":
    case "HF_CLI_TIMEOUT":
      return " A firewall may be in the way.";
    case "28P01":
    case "28000":
    case "ER_ACCESS_DENIED_ERROR":
      return " Check the user and the password.";
    case "3D000":
    case "ER_BAD_DB_ERROR":
    case "ER_DBACCESS_DENIED_ERROR":
      return " Check the name of the database.";
    default:
      return "";
  }
}

async function open(url: string, kind: Kind, given: ConnectOptions): Promise<Server> {
  const schema = givenSchema(given.schema);
  const options = { ...given, schema, holdfast: { ...given.holdfast, schema } };
  if (kind === "postgres") return openPostgres(url, options);
  if (kind === "sqlite") return openSqlite(url, options);
  return openMysql(url, options);
}

const connectMs = 10_000;

/** What pg has no public way to: `end` waits for what is under way. */
interface Innards {
  readonly connection: { readonly stream: { destroy(): void } };
}

/** Of several statements in one message, the last one's. */
function rowsOf(result: { readonly rows: Row[] } | readonly { readonly rows: Row[] }[]): Row[] {
  return (Array.isArray(result) ? result.at(-1) : (result as { readonly rows: Row[] }))?.rows ?? [];
}

/** Citus keeps the schema on one of its nodes. */
async function isSpread(ask: Server["query"], schema: string): Promise<boolean> {
  const [found] = await ask("SELECT to_regclass('pg_catalog.pg_dist_schema') IS NOT NULL AS citus");
  if (found?.["citus"] !== true) return false;
  const there = await ask(
    "SELECT FROM pg_catalog.pg_dist_schema s JOIN pg_catalog.pg_namespace n ON n.oid = s.schemaid WHERE n.nspname = $1",
    [schema],
  );
  return there.length > 0;
}

async function openPostgres(
  url: string,
  { application = "holdfast", holdfast: settings, schema, spread, most = 4 }: Chosen,
): Promise<Server> {
  const [{ Client, Pool }, { holdfast }, { fromPg }, { fromCitus }] = await Promise.all([
    import("pg"),
    import("holdfast"),
    import("holdfast/pg"),
    import("holdfast/citus"),
  ]);
  const config = { connectionString: url, application_name: application, connectionTimeoutMillis: connectMs };
  const pool = new Pool({ ...config, max: most });
  // A lost connection is reported by the next query.
  pool.on("error", () => {});
  const ask = async (text: string, values: readonly unknown[] = []) =>
    rowsOf(await pool.query<Row>(text, [...values]));
  let database = fromPg(pool);
  try {
    if (spread || (await isSpread(ask, schema))) database = fromCitus(database);
  } catch (error) {
    await pool.end();
    throw error;
  }
  const hf = holdfast(database, settings);
  return {
    kind: "postgres",
    shown: withoutSecrets(url),
    url,
    hf,
    schema,
    own: ownIn("postgres", schema),
    query: ask,
    async session() {
      const client = new Client(config);
      client.on("error", () => {});
      await client.connect();
      return {
        query: async (text, values = []) => rowsOf(await client.query<Row>(text, [...values])),
        destroy: () => (client as unknown as Innards).connection.stream.destroy(),
        [Symbol.asyncDispose]: () => client.end(),
      };
    },
    async [Symbol.asyncDispose]() {
      await hf.close();
      await pool.end();
    },
  };
}

async function openMysql(url: string, { holdfast: settings, schema, most = 4 }: Chosen): Promise<Server> {
  const [mysql, { holdfast }, { fromMysql2 }] = await Promise.all([
    import("mysql2/promise"),
    import("holdfast"),
    import("holdfast/mysql2"),
  ]);
  // It knows one name of the protocol.
  const uri = url.replace(/^mariadb:/i, "mysql:");
  const config = { uri, connectTimeout: connectMs, supportBigNumbers: true };
  const pool = mysql.createPool({ ...config, connectionLimit: most });
  let version: string;
  try {
    const [rows] = await pool.query("SELECT VERSION() AS version");
    version = String((rows as Row[])[0]?.["version"]);
  } catch (error) {
    await pool.end();
    throw error;
  }
  const hf = holdfast(fromMysql2(pool), settings);
  return {
    kind: /mariadb/i.test(version) ? "mariadb" : "mysql",
    shown: withoutSecrets(url),
    url,
    hf,
    schema,
    own: ownIn("mysql", schema),
    query: async (text, values = []) => (await pool.query(text, [...values]))[0] as Row[],
    async session() {
      const connection = await mysql.createConnection(config);
      connection.on("error", () => {});
      return {
        query: async (text, values = []) => (await connection.query(text, [...values]))[0] as Row[],
        destroy: () => connection.destroy(),
        [Symbol.asyncDispose]: () => connection.end(),
      };
    },
    async [Symbol.asyncDispose]() {
      await hf.close();
      await pool.end();
    },
  };
}

async function openSqlite(url: string, { holdfast: settings, schema }: Chosen): Promise<Server> {
  const path = fileOf(url);
  // A verb that looks must not make the file that is not there.
  if (!statSync(path, { throwIfNoEntry: false })?.isFile()) throw new Failure(`There is no file ${path}.`);
  const [{ DatabaseSync }, { holdfast }, { fromNodeSqlite }] = await Promise.all([
    import("node:sqlite"),
    import("holdfast"),
    import("holdfast/node-sqlite"),
  ]);
  const handle = () => {
    const made = new DatabaseSync(path);
    // Without WAL nobody can read while somebody commits.
    made.exec("PRAGMA busy_timeout = 5000");
    return made;
  };
  const all = (db: InstanceType<typeof DatabaseSync>, text: string, values: readonly unknown[]): Row[] =>
    db
      .prepare(text)
      .all(...(values as never[]))
      .map((row) => ({ ...row }));
  const db = handle();
  try {
    all(db, "SELECT count(*) FROM sqlite_schema", []);
  } catch (error) {
    db.close();
    throw error;
  }
  const hf = holdfast(fromNodeSqlite(handle), settings);
  return {
    kind: "sqlite",
    shown: url,
    url,
    hf,
    schema,
    own: ownIn("sqlite", schema),
    query: (text, values = []) => Promise.resolve(all(db, text, values)),
    session() {
      const own = handle();
      return Promise.resolve({
        // A statement that fails is a promise that does, as with the others.
        query: async (text: string, values: readonly unknown[] = []) => all(own, text, values),
        destroy: () => own.close(),
        [Symbol.asyncDispose]() {
          own.close();
          return Promise.resolve();
        },
      });
    },
    async [Symbol.asyncDispose]() {
      await hf.close();
      db.close();
    },
  };
}

/** `file:app.db` is beside, as with Prisma and libSQL; `file:///app.db` is a URL. */
export function fileOf(url: string): string {
  const rest = url.replace(/^(?:file|sqlite):/i, "").replace(/\?.*$/, "");
  return rest.startsWith("//") ? fileURLToPath(`file:${rest}`) : decodeURIComponent(rest);
}

/** The schema on PostgreSQL, as it is written in SQL. */
export function schemaIn({ schema }: Server): string {
  return schema === defaultSchema ? schema : `"${schema}"`;
}
