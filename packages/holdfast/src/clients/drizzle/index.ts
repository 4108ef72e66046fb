import type {
  ClientTransaction,
  Database,
  DriverError,
  Engine,
  Isolation,
  QueryLock,
  SqlConnection,
} from "../../seam/database.ts";
import { NotInTransactionError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { ours } from "../../context/ours.ts";
import { observeMakers, observeMethod, placeMade, observeOpenings } from "../observe.ts";
import { OneConnection } from "../../waiting/one-connection.ts";
import {
  type PgClient,
  type PgFactory,
  type PgPool,
  checkOutPg,
  endPg,
  isPgPool,
  listenPg,
  observePg,
  pgConnection,
  roomOfPg,
  unwrapPg,
  withholdBegin,
} from "../pg/connection.ts";
import { over as ended } from "../../context/revocable.ts";
import {
  type LibsqlClient,
  type LibsqlTransaction,
  libsqlDatabase,
  unwrapLibsql,
} from "../libsql/connection.ts";
import { type PgliteTransaction, pgliteConnection } from "../pglite/connection.ts";
import {
  type PostgresListening,
  PostgresPin,
  type PostgresPool,
  type PostgresSql,
  joinedPostgres,
  listenPostgres,
  pinnedPostgres,
  roomOfPostgres,
  unwrapPostgres,
} from "../postgres/connection.ts";
import {
  type Mysql2Pool,
  checkOutMysql2,
  endMysql2,
  mysql2Connection,
  observeMysql2,
  promisedMysql2,
  roomOfMysql2,
  unwrapMysql2,
} from "../mysql2/connection.ts";
import { killer } from "../../engines/mysql/client.ts";
import { mysql } from "../../engines/mysql/index.ts";
import { beginning } from "../../engines/mysql/waits.ts";
import { postgres } from "../../engines/postgres/index.ts";
import { sqlite } from "../../engines/sqlite/index.ts";

/** The part of a Drizzle database that is used here. */
export interface DrizzleClient {
  readonly $client: unknown;
  transaction: (...args: never[]) => unknown;
}

/** What `db.transaction(async (tx) => …)` hands to its callback. */
export type TransactionOf<Client extends DrizzleClient> = Client["transaction"] extends (
  body: (tx: infer Tx) => never,
  ...rest: never[]
) => unknown
  ? Tx
  : never;

interface Config {
  readonly isolationLevel?: Isolation;
  readonly accessMode?: "read only";
}

type Body = (
  tx: DrizzleTransaction,
  lent?: { begun?: boolean; seal?(): void | Promise<void> },
) => Promise<void>;

/** What Drizzle keeps its driver's client in. */
interface DrizzleSession {
  readonly client: unknown;
  readonly schema: unknown;
  readonly options: unknown;
  /** Of libSQL, whose transactions are objects beside the client. */
  readonly tx?: unknown;
  transaction(body: (tx: DrizzleTransaction) => Promise<unknown>, config?: Config): Promise<unknown>;
}

interface DrizzleTransaction {
  readonly session: DrizzleSession;
}

/** How one of the drivers below Drizzle is dealt with. */
interface Driver extends Pick<
  Database<never, SqlConnection>,
  "connect" | "room" | "observe" | "listen" | "unwrap"
> {
  readonly engine?: Engine<SqlConnection>;
  readonly traits: Omit<Database["traits"], "client">;
  transaction?(options: ClientTransaction, config: Config | undefined, body: Body): Promise<unknown>;
  /** Of the client that a transaction's session has. */
  connection(client: unknown, session: DrizzleSession): SqlConnection;
  /** Whatever a transaction reads is locked, and its builder has no words for it. */
  readonly locksAll?: boolean;
}

type Internals = { readonly session: DrizzleSession; readonly dialect: unknown };

/** A session of the same kind on a connection of our own choosing. */
function sessionOn({ session, dialect }: Internals, client: unknown): DrizzleSession {
  const Sessions = session.constructor as new (...args: unknown[]) => DrizzleSession;
  return new Sessions(client, dialect, session.schema, session.options);
}

/** What queries are made with. */
const makers = [
  "select",
  "selectDistinct",
  "selectDistinctOn",
  "insert",
  "update",
  "delete",
  "execute",
  "$count",
];

function onPg(db: Internals, pool: PgPool): Driver {
  const { options } = pool as { options?: object };
  const checkOut: Driver["connect"] = (purpose) => checkOutPg(pool, options, purpose) as Promise<never>;
  return {
    traits: { cancel: true, listen: true, embedded: false, single: false, pinned: true, begins: true },
    connect: checkOut,
    async transaction(purpose, _config, body) {
      // Drizzle's own would lose the connection to the pool if BEGIN fails, and give back one that is broken.
      const pinned = await checkOutPg(pool, options, purpose);
      const { connection, native, seal } = pinned;
      purpose.taken(() => endPg(native));
      const begin = withholdBegin(native);
      try {
        return await sessionOn(db, native).transaction((tx) =>
          body(tx, { begun: !begin.withheld, ...(seal && { seal }) }),
        );
      } finally {
        begin.end();
        await pinned.release(connection.lost.aborted);
      }
    },
    connection: (client) => pgConnection(client as PgClient, options),
    listen: (channel, wake, signal) => listenPg(pool as PgPool & PgFactory, channel, wake, signal),
    room: () => roomOfPg(pool),
    observe(seen, inside) {
      const ends = [observePg(pool, seen, placeMade), observeMakers(db, makers, inside)];
      return () => ends.forEach((end) => end());
    },
    unwrap: unwrapPg,
  };
}

/**
 * On a connection that we take and begin on ourselves: `sql.begin` rejects once a statement has failed, also if that was
 * undone by a savepoint, as our own are.
 */
function onPostgres(db: Internals, sql: PostgresPool): Driver {
  return {
    traits: { cancel: true, listen: true, embedded: false, single: false, pinned: true, begins: false },
    async connect({ use, signal }) {
      const pin = new PostgresPin(sql, use);
      if (use === "session") await pin.acquire(signal);
      const pinned = pinnedPostgres(pin);
      return {
        connection: pinned.connection,
        get native() {
          return transactionOn(db, pinned.native) as never;
        },
        seal: () => pinned.seal?.(),
        release: (broken) => pinned.release(broken),
      };
    },
    connection: (client) => joinedPostgres(client as PostgresSql, sql),
    room: () => roomOfPostgres(sql),
    listen: (channel, wake, signal) =>
      listenPostgres(sql as unknown as PostgresListening, channel, wake, signal),
    unwrap: unwrapPostgres,
  };
}

/** Drizzle's transaction on a connection that has begun one already. */
function transactionOn(db: Internals, client: unknown): DrizzleTransaction {
  let found: DrizzleTransaction | undefined;
  const begun = { begin: (body: (client: unknown) => unknown) => body(client) };
  void sessionOn(db, begun).transaction(async (tx) => (found = tx));
  if (!found)
    throw new UnsupportedError(
      "This version of drizzle-orm begins transactions in a way that Holdfast does not know",
    );
  return found;
}

function onPglite(db: Internals, client: object): Driver {
  const door = OneConnection.of(client);
  return {
    traits: { cancel: false, listen: false, embedded: true, single: true, pinned: false, begins: true },
    async transaction(purpose, config, body) {
      const leave = await door.enter(purpose);
      try {
        return await db.session.transaction(body, config);
      } finally {
        leave();
      }
    },
    connection: (tx) => pgliteConnection(tx as PgliteTransaction),
    room: () => ({ max: 1, out: 1 }),
    observe(seen, inside) {
      const ends = ["query", "exec", "transaction"].map((name) =>
        observeMethod(client, name, seen, { place: placeMade }),
      );
      ends.push(observeMakers(db, makers, inside));
      return () => ends.forEach((end) => end());
    },
  };
}

function onMysql2(db: Internals, pool: Mysql2Pool): Driver {
  const kill = killer(pool);
  return {
    engine: mysql,
    traits: { cancel: true, listen: false, embedded: false, single: false, pinned: true, begins: true },
    connect: (purpose) => checkOutMysql2(pool, kill, purpose) as Promise<never>,
    async transaction(purpose, config, body) {
      const pinned = await checkOutMysql2(pool, kill, purpose);
      const { connection, native, seal } = pinned;
      purpose.taken(() => endMysql2(native));
      let entered = false;
      const begin = () =>
        sessionOn(db, native).transaction((tx) => {
          entered = true;
          return body(tx, seal && { seal });
        }, config);
      try {
        return await beginning(connection, begin, () => entered);
      } finally {
        await pinned.release(connection.lost.aborted);
      }
    },
    connection: (client) => mysql2Connection(client as object, kill),
    room: () => roomOfMysql2(pool),
    observe(seen, inside) {
      const ends = [observeMysql2(pool, seen, placeMade), observeMakers(db, makers, inside)];
      return () => ends.forEach((end) => end());
    },
    unwrap: unwrapMysql2,
  };
}

/** The same, with calls that are no mistake inside of a transaction's body. */
function ourOwn(client: LibsqlClient): LibsqlClient {
  return {
    protocol: client.protocol,
    execute: (statement) => ours(() => client.execute(statement)),
    executeMultiple: (text) => ours(() => client.executeMultiple(text)),
    transaction: (mode) => ours(() => client.transaction(mode)),
  };
}

function onLibsql(db: Internals, client: LibsqlClient, connections: number): Driver {
  const base = libsqlDatabase<LibsqlTransaction>(ourOwn(client), connections, client);
  const connect = base.connect as NonNullable<typeof base.connect>;
  return {
    engine: sqlite,
    traits: base.traits,
    async connect(purpose) {
      const pinned = await connect(purpose);
      let over = false;
      const current = () => {
        if (!over) return pinned.native;
        throw ended();
      };
      try {
        return {
          connection: pinned.connection,
          native: (await onLibsqlTransaction(db, current)) as never,
          seal: () => void (over = true),
          release(broken) {
            over = true;
            return pinned.release(broken);
          },
        };
      } catch (error) {
        await pinned.release();
        throw error;
      }
    },
    connection: (_, { tx }) => base.join(tx as LibsqlTransaction),
    locksAll: true,
    observe(seen, inside) {
      const ends = ["execute", "batch", "transaction", "executeMultiple", "migrate"].map((name) =>
        observeMethod(client, name, seen, { place: placeMade }),
      );
      ends.push(observeMakers(db, [...makers, "run", "all", "get", "values"], inside));
      return () => ends.forEach((end) => end());
    },
    unwrap: unwrapLibsql,
  };
}

/** Drizzle's transaction on one that begins later. */
async function onLibsqlTransaction(
  db: Internals,
  current: () => LibsqlTransaction,
): Promise<DrizzleTransaction> {
  const later: LibsqlTransaction = {
    get closed() {
      return current().closed;
    },
    execute: async (statement) => current().execute(statement),
    executeMultiple: async (text) => current().executeMultiple(text),
    // By Drizzle, at the end of the callback in which it is seen.
    async commit() {},
    async rollback() {},
    close() {},
  };
  let found: DrizzleTransaction | undefined;
  await sessionOn(db, { transaction: async () => later }).transaction(async (tx) => (found = tx));
  if (found?.session.tx === later) return found;
  throw new UnsupportedError(
    "This version of drizzle-orm begins transactions in a way that Holdfast does not know",
  );
}

function driverOf(db: Internals & DrizzleClient, connections: number): Driver {
  const { $client: client } = db;
  if (isPgPool(client)) return onPg(db, client);
  if (typeof client === "function" && has(client, "begin", "unsafe"))
    return onPostgres(db, client as unknown as PostgresPool);
  if (has(client, "query", "exec", "transaction") && has(client, "execProtocol"))
    return onPglite(db, client as object);
  const mysqlPool = promisedMysql2(client);
  if (mysqlPool) return onMysql2(db, mysqlPool);
  if (has(client, "execute", "executeMultiple", "transaction") && "protocol" in (client as object))
    return onLibsql(db, client as LibsqlClient, connections);
  if (has(client, "prepare", "exec", "pragma"))
    throw new UnsupportedError(
      "fromDrizzle: drizzle-orm/better-sqlite3 has synchronous transactions only, which cannot wait. " +
        "Make Holdfast of the handle, fromBetterSqlite3(db.$client) of holdfast/better-sqlite3, and Drizzle of what a transaction gets: drizzle(tx.client).",
    );
  throw new UnsupportedError(
    "fromDrizzle: Holdfast reaches PostgreSQL through Drizzle on a Pool of pg, on postgres.js and on PGlite, MySQL and MariaDB on a pool of mysql2, SQLite on @libsql/client. " +
      "On another driver make it of the driver's own client, and Drizzle of what a transaction gets: drizzle(tx.client).",
  );
}

function has(value: unknown, ...names: string[]): boolean {
  return (
    value !== null &&
    (typeof value === "object" || typeof value === "function") &&
    names.every((name) => typeof (value as Record<string, unknown>)[name] === "function")
  );
}

function isTransaction(value: unknown): value is DrizzleTransaction {
  return has(value, "rollback", "transaction") && "session" in (value as object);
}

/** A SELECT made with `db.select()`. */
interface Select extends PromiseLike<unknown[]> {
  session?: DrizzleSession;
  for(strength: string, config: { noWait?: boolean; skipLocked?: boolean }): Select;
  toSQL(): { sql: string };
}

/** `lock`: undefined where everything that a transaction reads is locked. */
function locking(tx: DrizzleTransaction, query: unknown, lock: QueryLock | undefined) {
  if (!has(query, "toSQL", "then")) return undefined;
  const select = query as Select;
  if ((lock && !has(query, "for")) || !/^\s*(?:\(|with\b|select\b)/i.test(select.toSQL().sql))
    throw new UsageError("tx.rows(query): only db.select() can lock what it finds");
  if (select.session !== tx.session)
    throw new UsageError(
      "tx.rows(query): this query was made with the outer `db`, not with the transaction. Make it with tx.client.select().",
    );
  if (!lock) return () => select;
  const { strength, wait } = lock;
  const config = { ...(wait === "nowait" && { noWait: true }), ...(wait === "skip" && { skipLocked: true }) };
  return () => select.for(strength, config);
}

/** Drizzle wraps the driver's errors, and says in which statement. */
function unwrapping(unwrap: Driver["unwrap"]) {
  return (error: unknown): DriverError | undefined => {
    const { cause, code } = (error ?? {}) as { cause?: unknown; code?: unknown };
    // One that has a code speaks for itself.
    const driver = typeof cause === "object" && cause !== null && code === undefined ? cause : error;
    return unwrap?.(driver) ?? (driver === error ? undefined : (driver as DriverError));
  };
}

/**
 * A database of Drizzle: `drizzle(pool)` of pg or mysql2, `drizzle(postgres(url))`, `drizzle(pglite)`, or `drizzle(client)`
 * of libSQL, with as many `connections` as for fromLibsql.
 */
export function fromDrizzle<Client extends DrizzleClient>(
  db: Client,
  { connections = 4 } = {},
): Database<TransactionOf<Client>, SqlConnection> {
  const internals = db as Client & Internals;
  if (!has(db, "transaction", "select") || !("$client" in (db as object)))
    throw new UsageError(
      "fromDrizzle(db): this is not what drizzle(…) of the package drizzle-orm, 0.44 or newer, returns",
    );
  const driver = driverOf(internals, connections);
  const unwrap = unwrapping(driver.unwrap);
  const connectionOf = (tx: DrizzleTransaction) => driver.connection(tx.session.client, tx.session);
  const { connect, transaction, listen, room, observe } = driver;
  return {
    engine: driver.engine ?? postgres,
    traits: { client: "drizzle", ...driver.traits },
    ...(connect && { connect }),
    ...(listen && { listen }),
    ...(room && { room }),
    ...(observe && { observe }),
    openings: (opening) => observeOpenings(db, "transaction", opening),
    ...(transaction && {
      transaction(options, body) {
        const { isolation, isolationIsDefault, readOnly } = options;
        // Said only where it is not the server's default: elsewhere it may be a round trip, and the engine verifies it.
        const config: Config = {
          ...(!isolationIsDefault && { isolationLevel: isolation }),
          ...(readOnly && { accessMode: "read only" }),
        };
        const said = Object.keys(config).length > 0 ? config : undefined;
        return transaction(options, said, (tx, lent) =>
          body({ ...lent, connection: connectionOf(tx), native: tx as never }),
        );
      },
    }),
    join(native) {
      if (isTransaction(native)) return connectionOf(native);
      if (has(native, "transaction", "select"))
        throw new NotInTransactionError(
          "this is the database itself; pass the `tx` that db.transaction(async (tx) => …) hands to its callback",
        );
      throw new NotInTransactionError("this is no transaction of Drizzle");
    },
    locking: (native, query, lock) =>
      locking(native as DrizzleTransaction, query, driver.locksAll ? undefined : lock),
    unwrap,
  };
}
