/** A connection to the database that a verb is about, whichever kind it is of. */
import { statSync } from "node:fs";
import { fileURLToPath } from "node:url";
import type { Holdfast, HoldfastOptions } from "holdfast";
import { describe } from "./describe.ts";
import { startPostgres } from "./embedded.ts";
import { Failure } from "./failure.ts";
import { remedyOfNoConnection } from "./no-connection.ts";
import { note } from "./terminal.ts";
import { type Given, defaultSchema, given, givenSchema, ownIn, withoutSecrets } from "./url.ts";
import { within } from "./within.ts";

export type Kind = "postgres" | "mysql" | "mariadb" | "sqlite";

export type Row = Record<string, unknown>;

/** One session of the server's, kept. */
export interface Session extends AsyncDisposable {
  /** In the transaction that it is in, if any. Every name in it is written in full. */
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
  /**
   * On any connection. Values are bound: $1 on PostgreSQL, ? elsewhere. In a transaction of its own on PostgreSQL, where names mean what
   * the server means by them: anybody may have made a function of the same name.
   */
  query(text: string, values?: readonly unknown[]): Promise<Row[]>;
  /** What cannot be in a transaction, or is about the session's own settings. Every name in it is written in full. */
  run(text: string, values?: readonly unknown[]): Promise<Row[]>;
  /** Keeps the connection of `query` for several statements, until it is disposed. */
  borrow(): Promise<Session>;
  /** A session of its own, for what has to be seen from two of them: one more connection. */
  session(): Promise<Session>;
  /** Drops all connections at once, whatever they do: those of `query` and `hf`, which open new ones, and all sessions. */
  reset(): Promise<void>;
}

export interface ConnectOptions {
  readonly url?: string | undefined;
  /** The option that the URL was given by. Default: --url. */
  readonly by?: string;
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

/** The kind that a URL names. Nothing of another text is shown: it may be, or hold, a password. */
export function kindOf({ url, by }: Given): Kind {
  const [, scheme = "", slashes] = /^([a-z][a-z0-9+.-]*):(\/\/)?/i.exec(url) ?? [];
  const named = scheme.toLowerCase();
  const kind = kinds[named];
  if (kind === "sqlite") return kind;
  if (kind && slashes) {
    if (/^[^/?#]*,/.test(url.slice(named.length + 3).replace(/^[^/?#]*@/, "")))
      throw new Failure(`${withoutSecrets(url)} (${by}) names several hosts. Name the one to look at.`);
    return kind;
  }
  const wrong = kind
    ? `has no "//" after ${named}:`
    : slashes
      ? `begins with ${named}://`
      : /^\s*\w+\s*=/.test(url)
        ? "consists of keywords and values"
        : "does not begin with a scheme";
  throw new Failure(`The address of the database in ${by} ${wrong}. It looks like ${forms}.`);
}

const kinds: Readonly<Record<string, Kind>> = {
  postgres: "postgres",
  postgresql: "postgres",
  mysql: "mysql",
  mariadb: "mariadb",
  file: "sqlite",
  sqlite: "sqlite",
};

/** Throws a `Failure` that says in one line what is wrong. */
export async function connect(options: ConnectOptions): Promise<Server> {
  const found = given(options.url, options.by);
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
  const kind = kindOf(found);
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
  const short = remedyOfNoConnection(error);
  if (short !== undefined) return ` ${short}`;
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

/** From the first packet to the first answer: a pooler without a free server connection lets clients in, and is silent. */
const connectMs = 10_000;
/** For connections to end in order. A statement that gets no answer would keep the process. */
const closeMs = 5000;

async function closed(work: Promise<unknown>, reset: () => Promise<void>): Promise<void> {
  await within(closeMs, work).catch(reset);
}

/** What pg has no public way to: `end` waits for what is under way. */
interface Innards {
  once(event: "end", listener: () => void): unknown;
  readonly connection: { readonly stream: { destroy(): void } };
}

/** Of several statements in one message, the last one's. */
function rowsOf(result: { readonly rows: Row[] } | readonly { readonly rows: Row[] }[]): Row[] {
  return (Array.isArray(result) ? result.at(-1) : (result as { readonly rows: Row[] }))?.rows ?? [];
}

/** Citus keeps the schema on one of its nodes. */
async function isSpread(ask: Server["query"], schema: string): Promise<boolean> {
  const [found] = await ask(
    "SELECT pg_catalog.to_regclass('pg_catalog.pg_dist_schema') IS NOT NULL AS citus",
  );
  if (found?.["citus"] !== true) return false;
  const there = await ask(
    "SELECT FROM pg_catalog.pg_dist_schema s JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) s.schemaid WHERE n.nspname OPERATOR(pg_catalog.=) $1::pg_catalog.name",
    [schema],
  );
  return there.length > 0;
}

/** A server that has said nothing for so long may be of another kind, and wait for words that it understands. */
const silentMs = 1000;
/** How long the library may take to find that out: it waits for words, too, before it asks. */
const peerMs = 8000;

/** The first answer of a server. If one of another kind is there, says so, and does not wait until the client gives up. */
async function firstAnswer<T>(hf: Holdfast<never>, asked: Promise<T>): Promise<T> {
  const other = Promise.withResolvers<never>();
  const timer = setTimeout(() => {
    void otherServer(hf).then((told) => told && other.reject(told));
  }, silentMs);
  try {
    return await Promise.race([within(connectMs, asked), other.promise]);
  } catch (error) {
    const { code, errno } = error as { code?: unknown; errno?: unknown };
    // The server has spoken, there is none, or it was told already.
    const known = /^[0-9A-Z]{5}$|^ECONNREFUSED$|^ENOTFOUND$|^EAI_|^HF_/.test(String(code));
    throw known || Number(errno) > 1000 ? error : ((await otherServer(hf)) ?? error);
  } finally {
    clearTimeout(timer);
  }
}

/** The library's error that names a server of another kind. What else it says of a failure is the driver's. */
async function otherServer(hf: Holdfast<never>): Promise<Error | undefined> {
  try {
    await within(peerMs, hf.capabilities());
  } catch (told) {
    const { code, message } = told as Error & { code?: unknown };
    if (code === "HF_UNSUPPORTED" && message.includes(" answers at ")) return told as Error;
  }
  return undefined;
}

/** Of a transaction only: through a pooler, what a session sets stays for the next client. */
export const safePath = "SET LOCAL search_path = pg_catalog, pg_temp";

/** On a session that is in no transaction. */
export async function inSafePath(
  query: (text: string, values: unknown[]) => Promise<Row[]>,
  text: string,
  values: readonly unknown[] = [],
): Promise<Row[]> {
  await query(`BEGIN; ${safePath}`, []);
  try {
    const rows = await query(text, [...values]);
    await query("COMMIT", []);
    return rows;
  } catch (error) {
    await query("ROLLBACK", []).catch(() => {});
    throw error;
  }
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
  const open = new Set<Innards>();
  pool.on("connect", (client) => open.add(client as unknown as Innards));
  pool.on("remove", (client) => open.delete(client as unknown as Innards));
  const reset = async (): Promise<void> => {
    const ends = [...open].map((client) => new Promise<void>((resolve) => client.once("end", resolve)));
    for (const { connection } of open) connection.stream.destroy();
    // The pool lends out whatever it does not know to be dead.
    await within(closeMs, Promise.all(ends)).catch(() => {});
  };
  const run = async (text: string, values: readonly unknown[] = []) =>
    rowsOf(await pool.query<Row>(text, [...values]));
  let database = fromPg(pool);
  try {
    const answered = firstAnswer(holdfast(database) as Holdfast<never>, isSpread(run, schema));
    if ((await answered) || spread) database = fromCitus(database);
  } catch (error) {
    // A statement that gets no answer would keep it waiting.
    await reset();
    await closed(pool.end(), reset);
    throw error;
  }
  // The user has named this database, so it is meant even if it is one shard of several.
  const hf = holdfast(database, { ...settings, oneShard: true });
  return {
    kind: "postgres",
    shown: withoutSecrets(url),
    url,
    hf,
    schema,
    own: ownIn("postgres", schema),
    query: async (text, values = []) => {
      const client = await pool.connect();
      let failed: unknown;
      try {
        return await inSafePath(
          async (each, bound) => rowsOf(await client.query<Row>(each, bound)),
          text,
          values,
        );
      } catch (error) {
        failed = error;
        throw error;
      } finally {
        // After an error of the server's the connection is as good as before; after any other it is not kept.
        client.release(failed !== undefined && !(failed as { severity?: unknown }).severity);
      }
    },
    run,
    async borrow() {
      const client = await pool.connect();
      let broken = false;
      return {
        query: async (text, values = []) => rowsOf(await client.query<Row>(text, [...values])),
        destroy() {
          broken = true;
          (client as unknown as Innards).connection.stream.destroy();
        },
        [Symbol.asyncDispose]: () => Promise.resolve(client.release(broken)),
      };
    },
    reset,
    async session() {
      const client = new Client(config);
      client.on("error", () => {});
      await client.connect();
      const inside = client as unknown as Innards;
      open.add(inside);
      inside.once("end", () => open.delete(inside));
      return {
        query: async (text, values = []) => rowsOf(await client.query<Row>(text, [...values])),
        destroy: () => inside.connection.stream.destroy(),
        [Symbol.asyncDispose]: () => client.end(),
      };
    },
    [Symbol.asyncDispose]: () =>
      closed(
        hf.close().then(() => pool.end()),
        reset,
      ),
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
  const hf = holdfast(fromMysql2(pool), settings);
  const open = new Set<{ destroy(): void }>();
  pool.on("connection", (connection) => open.add(connection));
  const reset = async (): Promise<void> => {
    for (const connection of open) connection.destroy();
    open.clear();
  };
  let version: string;
  try {
    const [rows] = await firstAnswer(hf as Holdfast<never>, pool.query("SELECT VERSION() AS version"));
    version = String((rows as Row[])[0]?.["version"]);
  } catch (error) {
    // A statement that gets no answer would keep it waiting.
    await reset();
    await closed(pool.end(), reset);
    throw error;
  }
  return {
    kind: /mariadb/i.test(version) ? "mariadb" : "mysql",
    shown: withoutSecrets(url),
    url,
    hf,
    schema,
    own: ownIn("mysql", schema),
    query: async (text, values = []) => (await pool.query(text, [...values]))[0] as Row[],
    run: async (text, values = []) => (await pool.query(text, [...values]))[0] as Row[],
    async borrow() {
      const connection = await pool.getConnection();
      return {
        query: async (text, values = []) => (await connection.query(text, [...values]))[0] as Row[],
        destroy: () => connection.destroy(),
        [Symbol.asyncDispose]: () => Promise.resolve(connection.release()),
      };
    },
    reset,
    async session() {
      const connection = await mysql.createConnection(config);
      connection.on("error", () => {});
      open.add(connection);
      return {
        query: async (text, values = []) => (await connection.query(text, [...values]))[0] as Row[],
        destroy: () => connection.destroy(),
        [Symbol.asyncDispose]: () => connection.end().finally(() => open.delete(connection)),
      };
    },
    [Symbol.asyncDispose]: () =>
      closed(
        hf.close().then(() => pool.end()),
        reset,
      ),
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
  const session = (): Promise<Session> => {
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
  };
  return {
    kind: "sqlite",
    shown: withoutSecrets(url),
    url,
    hf,
    schema,
    own: ownIn("sqlite", schema),
    query: (text, values = []) => Promise.resolve(all(db, text, values)),
    run: (text, values = []) => Promise.resolve(all(db, text, values)),
    borrow: session,
    session,
    // Every statement has ended before the next one begins.
    reset: () => Promise.resolve(),
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
