import type {
  ClientTransaction,
  Database,
  DriverError,
  Engine,
  Opening,
  QueryLock,
  Room,
  Seen,
  SqlConnection,
} from "../../seam/database.ts";
import { NoConnectionError, NotInTransactionError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { observeHandles, observeMethod, observeOpenings } from "../observe.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { type CallSite, callSites } from "../../context/call-site.ts";
import { sql } from "../../seam/sql.ts";
import { type ViewOptions, view } from "../../context/revocable.ts";
import { endedItself, lendKnex, sendInKnex } from "./sqlite.ts";
import { endMysql2, mysql2Connection, mysql2View, roomOfMysql2, unwrapMysql2 } from "../mysql2/connection.ts";
import {
  type PgClient,
  type PgFactory,
  type PgPool,
  endPg,
  isPgPool,
  listenPg,
  pgConnection,
  pgView,
  roomOfPg,
  unwrapPg,
  withholdBegin,
} from "../pg/connection.ts";
import { connectLent, joinLent, lentTraits } from "../sqlite-lent.ts";
import { killer } from "../../engines/mysql/client.ts";
import { mysql } from "../../engines/mysql/index.ts";
import { beginning } from "../../engines/mysql/waits.ts";
import { postgres } from "../../engines/postgres/index.ts";
import { sqlite } from "../../engines/sqlite/index.ts";

/** The part of a Knex instance that is used here. */
export interface KnexLike {
  readonly client: unknown;
  readonly isTransaction?: boolean;
  transaction: (...args: never[]) => unknown;
  raw: (...args: never[]) => unknown;
}

/** What `knex.transaction(async (trx) => …)` hands to its callback. */
export type TransactionOf<Client extends KnexLike> = Client["transaction"] extends (
  body: (trx: infer Tx) => never,
  config?: never,
) => unknown
  ? Tx
  : never;

/** A connection of the driver, as Knex's pool keeps it. */
interface RawConnection {
  __knex__disposed?: unknown;
  __knexTxId?: unknown;
}

type RawPg = RawConnection & PgClient & { end(): Promise<void>; readonly readyForQuery?: boolean };

type RawMysql = RawConnection & {
  readonly stream: { destroy(error: Error): void };
  promise(): { query(text: string): Promise<unknown> };
  readonly _command?: unknown;
};

interface TarnPool {
  readonly max: number;
  readonly acquireTimeoutMillis: number;
  numUsed(): number;
  numPendingCreates(): number;
  acquire(): { readonly promise: Promise<RawConnection> };
}

interface KnexClient {
  readonly driverName?: string;
  readonly driver?: { Client?: PgFactory["Client"] };
  readonly config: { readonly connectionPool?: object };
  readonly connectionSettings?: object;
  readonly pool?: Partial<TarnPool>;
  acquireConnection(): Promise<RawConnection>;
  releaseConnection(connection: RawConnection): Promise<void>;
  /** One that is not of the pool. */
  acquireRawConnection(): Promise<RawConnection>;
  destroyRawConnection(connection: RawConnection): Promise<void>;
}

interface KnexTransaction {
  readonly client: Pick<KnexClient, "acquireConnection">;
  readonly isTransaction?: boolean;
  readonly executionPromise?: Promise<unknown>;
  isCompleted?(): boolean;
}

interface TransactionConfig {
  readonly isolationLevel?: string;
  readonly readOnly?: boolean;
}

/** What differs between the drivers that Knex uses. */
interface DriverBridge {
  readonly engine: Engine<SqlConnection>;
  connectionOf(raw: RawConnection): SqlConnection;
  unwrap(error: unknown): DriverError | undefined;
  /** Before BEGIN. Resolves to what is left for Knex to say. */
  prepare(connection: SqlConnection, options: ClientTransaction): Promise<TransactionConfig>;
  /** Keeps the next BEGIN from being sent, where the engine's own comes with the locks. */
  withhold?(raw: RawConnection): { readonly withheld: boolean; end(): void };
  /** After the end. */
  restore?(connection: SqlConnection): Promise<void>;
  /** Whether a statement is under way, so that nobody else can use it. */
  isBusy(raw: RawConnection): boolean;
  /** Ends the session at once. */
  end(raw: RawConnection): void;
  /** What is sent on it once the body has ended. */
  readonly view: ViewOptions;
  /** Of a pool that Knex was given. */
  roomOf(pool: object): Room | undefined;
  readonly listen?: NonNullable<Database["listen"]>;
  /** Why a query cannot be locked in this way. */
  refuses?(lock: QueryLock): string | undefined;
}

function onPostgres(client: KnexClient): DriverBridge {
  const factory = factoryOf(client);
  return {
    engine: postgres,
    connectionOf: (raw) => ({ ...pgConnection(raw as RawPg, factory()?.options), unwrap: unwrapPostgres }),
    unwrap: unwrapPostgres,
    // Nothing is left for Knex to say: BEGIN is the engine's own, with the locks.
    prepare: async () => ({}),
    withhold: (raw) => withholdBegin(raw as RawPg),
    isBusy: (raw) => (raw as RawPg).readyForQuery === false,
    end: (raw) => endPg(raw as RawPg),
    view: pgView,
    roomOf: (pool) => (isPgPool(pool) ? roomOfPg(pool) : undefined),
    ...(factory() && {
      listen: (channel, wake, signal) => listenPg(factory() as PgFactory, channel, wake, signal),
    }),
  };
}

/** Knex writes the statement before the driver's message. */
function unwrapPostgres(error: unknown): DriverError | undefined {
  if (!(error instanceof Error) || "code" in error) return undefined;
  return unwrapPg(new Error(error.message.slice(error.message.lastIndexOf(" - ") + 3))) ?? unwrapPg(error);
}

function onMysql(client: KnexClient): DriverBridge {
  const given = client.config.connectionPool !== undefined;
  // Not of the pool, unless Knex was given one: all of its connections may be taken by those who wait.
  const kill = killer({
    async getConnection() {
      // And not by the client's own method, which is watched.
      const raw = (await (given
        ? client.pool?.acquire?.().promise
        : client.acquireRawConnection())) as RawMysql;
      return {
        query: (text) => raw.promise().query(text),
        release: () => (given ? client.releaseConnection(raw) : client.destroyRawConnection(raw)),
      };
    },
  });
  return {
    engine: mysql,
    connectionOf: (raw) => mysql2Connection(raw, kill),
    unwrap: unwrapMysql2,
    async prepare(connection, { isolation, isolationIsDefault, readOnly }) {
      // Not by Knex, which forgets the comma between the two.
      const modes = [
        ...(isolationIsDefault ? [] : [`ISOLATION LEVEL ${isolation.toUpperCase()}`]),
        ...(readOnly ? ["READ ONLY"] : []),
      ];
      const set = sql.raw(`SET TRANSACTION ${modes.join(", ")}`);
      if (modes.length > 0) await beginning(connection, () => connection.query(set));
      // After a deadlock the server has ended the transaction. If the body swallows that error, what it sends next
      // would be kept, statement by statement.
      await connection.query(sql.raw("SET @holdfast_autocommit = @@autocommit, autocommit = 0"));
      return {};
    },
    async restore(connection) {
      await connection.query(sql.raw("SET autocommit = COALESCE(@holdfast_autocommit, @@autocommit)"));
    },
    isBusy: (raw) => Boolean((raw as RawMysql)._command),
    end: endMysql2,
    view: mysql2View,
    roomOf: roomOfMysql2,
    refuses: ({ strength, wait }) =>
      strength !== "update" && (strength !== "share" || wait !== "bounded")
        ? `Knex cannot say "${wait}" of a lock for "${strength}" here. Name a table: tx.rows("account", [1, 2], { for: "${strength}", wait: … })`
        : undefined,
  };
}

const reaches: Readonly<Record<string, (client: KnexClient) => DriverBridge>> = {
  pg: onPostgres,
  mysql2: onMysql,
};

function transactionOf(native: unknown): KnexTransaction {
  const trx = native as KnexTransaction | null;
  if ((typeof trx !== "function" && typeof trx !== "object") || trx === null || !trx.client)
    throw new NotInTransactionError("this is no transaction of Knex");
  if (!trx.isTransaction) {
    throw new NotInTransactionError(
      "this is the Knex instance itself; pass the `trx` that knex.transaction(async (trx) => …) hands to its callback",
    );
  }
  return trx;
}

function roomOf({ pool }: KnexClient): Room | undefined {
  if (typeof pool?.max !== "number" || !pool.numUsed || !pool.numPendingCreates) return undefined;
  return { max: pool.max, out: pool.numUsed() + pool.numPendingCreates() };
}

const plain = () => undefined;

function onSqlite<Native>(knex: KnexLike, client: KnexClient): Database<Native, SqlConnection> {
  const open = (body: (trx: KnexTransaction) => Promise<void>, connection: object) =>
    (knex.transaction as unknown as Open)(body, { connection });
  const lend = () => lendKnex(client, open).catch((error: unknown) => noConnection(client, error));
  return {
    engine: sqlite,
    traits: { client: "knex", ...lentTraits },
    connect: (purpose) => connectLent(client, lend, plain, purpose) as Promise<never>,
    join: (native) => joinLent(sendInKnex(transactionOf(native)), plain),
    room: () => roomOf(client),
    observe: (seen, inside) => observe(client, seen, inside),
    openings: (opening) => openings(knex, client, opening),
    locking: (native, query) => locking(native, query, undefined, undefined),
  };
}

function openings(knex: KnexLike, client: KnexClient, opening: Opening): () => void {
  const ends = [
    observeOpenings(client, "transaction", opening),
    // It gives that method the function which settles its promise.
    observeHandles(knex, "transaction", opening, (trx: KnexTransaction) => trx.isCompleted?.() === false),
  ];
  return () => ends.forEach((end) => end());
}

type Open = (body: (trx: KnexTransaction) => Promise<void>, config: object) => Promise<unknown>;

/** A Knex instance on PostgreSQL, MySQL, MariaDB or SQLite. `tx.client` is Knex's own `trx`. */
export function fromKnex<Client extends KnexLike>(
  knex: Client,
): Database<TransactionOf<Client>, SqlConnection> {
  if (typeof (knex as unknown) !== "function" || typeof knex.raw !== "function")
    throw new UsageError("fromKnex(knex): this is not an instance of Knex");
  if (knex.isTransaction)
    throw new UsageError("fromKnex(knex): this is a transaction; make Holdfast once, of the instance itself");
  const client = knex.client as KnexClient;
  if (client.driverName === "better-sqlite3") return onSqlite(knex, client);
  const reach = reaches[String(client.driverName)]?.(client);
  if (!reach)
    throw new UnsupportedError(
      `fromKnex: Holdfast reaches PostgreSQL through Knex's client "pg", MySQL and MariaDB through "mysql2", and SQLite through "better-sqlite3", not "${client.driverName}"`,
    );
  const { engine, connectionOf, unwrap, listen } = reach;

  const checkOut = async (signal: AbortSignal | undefined) => {
    const raw = await unlessAborted(client.acquireConnection(), signal, (late) => {
      void client.releaseConnection(late);
    }).catch((error: unknown) => noConnection(client, error));
    return { raw, connection: connectionOf(raw) };
  };

  const giveBack = async (raw: RawConnection, broken: boolean) => {
    if (broken) {
      // The pool throws it away when it is next asked for one; whatever it still holds on the server must end now.
      raw.__knex__disposed ??= "it was left in a state that nobody knows";
      reach.end(raw);
    }
    await client.releaseConnection(raw);
  };

  return {
    engine,
    traits: {
      client: "knex",
      cancel: true,
      listen: listen !== undefined,
      embedded: false,
      single: false,
      pinned: true,
      begins: true,
    },
    async connect({ signal }) {
      const { raw, connection } = await checkOut(signal);
      return {
        connection,
        // Only sessions are pinned, and nothing of theirs is handed to a body.
        native: undefined as never,
        release: (broken) => giveBack(raw, broken === true),
      };
    },
    async transaction(options, body) {
      // Taken by ourselves and lent to Knex: so it can be dropped if it is not fit for others, and an abort ends the wait.
      const { raw, connection } = await checkOut(options.signal);
      options.taken(() => reach.end(raw));
      const seen = view(raw, reach.view);
      let running: Promise<unknown> | undefined;
      let begin: ReturnType<NonNullable<DriverBridge["withhold"]>> | undefined;
      const run = (trx: KnexTransaction) => {
        const whole = body({
          connection,
          native: trx as never,
          begun: !begin?.withheld,
          seal: seen.seal,
        });
        running = whole.then(() => {
          if (trx.isCompleted?.()) throw endedItself();
        });
        return running;
      };
      try {
        const config = await reach.prepare(connection, options);
        const open = knex.transaction.bind(knex) as (...args: unknown[]) => Promise<never>;
        begin = reach.withhold?.(raw);
        await open(run, { ...config, connection: seen.proxy });
        // Knex is content once the body has called trx.rollback(), even while it goes on.
        await running;
      } catch (error) {
        await running;
        throw error;
      } finally {
        seen.revoke();
        begin?.end();
        delete raw.__knexTxId;
        let broken = connection.lost.aborted || reach.isBusy(raw);
        if (!broken && reach.restore) await reach.restore(connection).catch(() => (broken = true));
        await giveBack(raw, broken);
      }
    },
    join: (native) => joined(transactionOf(native), reach),
    ...(listen && { listen }),
    room() {
      const { pool, config } = client;
      if (config.connectionPool && !pool?.numUsed) return reach.roomOf(config.connectionPool);
      return roomOf(client);
    },
    observe: (seen, inside) => observe(client, seen, inside),
    openings: (opening) => openings(knex, client, opening),
    locking: (native, query, lock) => locking(native, query, lock, reach.refuses?.(lock)),
    unwrap,
  };
}

/** What clients are made with; undefined: the pool was made elsewhere, and does not say. */
function factoryOf(client: KnexClient): () => PgFactory | undefined {
  return () => {
    const { config, driver, connectionSettings } = client;
    if (isPgPool(config.connectionPool)) return config.connectionPool as PgPool & PgFactory;
    if (config.connectionPool || !driver?.Client) return undefined;
    return { Client: driver.Client, options: connectionSettings ?? {} };
  };
}

/** Throws the error; a word of our own if there was no connection in time. */
function noConnection({ pool }: KnexClient, error: unknown): never {
  const { name, cause } = (error ?? {}) as { name?: unknown; cause?: unknown };
  if (name === "KnexTimeoutError" && cause !== undefined)
    throw new NoConnectionError(pool?.acquireTimeoutMillis ?? 0, error);
  throw error;
}

const joinedConnections = new WeakMap<object, SqlConnection>();

/** Knex hands out the connection of a transaction only by a promise. */
function joined(trx: KnexTransaction, { connectionOf, unwrap, engine }: DriverBridge): SqlConnection {
  const known = joinedConnections.get(trx.client);
  if (known) return known;
  const lost = new AbortController();
  const connecting = trx.client.acquireConnection().then((raw) => {
    const connection = connectionOf(raw);
    const pass = () => lost.abort(connection.lost.reason);
    connection.lost.addEventListener("abort", pass, { once: true });
    const over = () => connection.lost.removeEventListener("abort", pass);
    trx.executionPromise?.then(over, over);
    return connection;
  });
  connecting.catch(() => {});
  const current = () => {
    // From then on the connection may be somebody else's.
    if (trx.isCompleted?.()) throw new NotInTransactionError("this transaction of Knex has ended");
    return connecting;
  };
  const connection: SqlConnection = {
    lost: lost.signal,
    unwrap,
    query: async (...args) => (await current()).query(...args),
    ...(engine === postgres && {
      script: async (text: string) => (await (await current()).script?.(text)) ?? [],
    }),
    cancel: async () => (await connecting).cancel?.(),
  };
  joinedConnections.set(trx.client, connection);
  return connection;
}

type Method = (this: unknown, ...args: unknown[]) => object;

interface Watched {
  readonly asked: Set<() => boolean>;
  /** Where the query was made that takes a connection just now. */
  made: CallSite | undefined;
}

const watchedClients = new WeakMap<object, Watched>();

/** A query of Knex runs when it is awaited, where the stack shows nobody's code: so it is remembered where it was made. */
function observe(client: KnexClient, seen: Seen, inside: () => boolean): () => void {
  let watched = watchedClients.get(client);
  if (!watched) watchedClients.set(client, (watched = remember(client as never)));
  const { asked } = watched;
  asked.add(inside);
  const place = () => watched.made?.place;
  const end = observeMethod(client, "acquireConnection", seen, { place });
  return () => {
    asked.delete(inside);
    end();
  };
}

function remember(client: Record<string, Method>): Watched {
  const watched: Watched = { asked: new Set(), made: undefined };
  const places = new WeakMap<object, CallSite>();
  const after = (name: string, then: (made: object, args: unknown[]) => void): Method => {
    const original = client[name] as Method;
    const method: Method = function (...args) {
      const result = original.apply(this, args);
      then(result, args);
      return result;
    };
    client[name] = method;
    return method;
  };
  const noting = (name: string, note: (made: object, site: CallSite) => void) => {
    const method: Method = after(name, (made) => {
      if ([...watched.asked].some((inside) => inside())) note(made, callSites.here(method));
    });
  };
  /** It takes its connection before it waits for anything, so the place is right while it does. */
  const taking = (taker: object, name: string, site: CallSite) => {
    const methods = taker as Record<string, Method>;
    const original = methods[name] as Method;
    methods[name] = (...args) => {
      watched.made = site;
      try {
        return original.apply(taker, args);
      } finally {
        watched.made = undefined;
      }
    };
  };
  for (const name of ["queryBuilder", "raw", "schemaBuilder"])
    noting(name, (query, site) => places.set(query, site));
  after("runner", (runner, [query]) => {
    const site = places.get(query as object);
    if (site) taking(runner, "ensureConnection", site);
  });
  noting("transaction", (transaction, site) => taking(transaction, "acquireConnection", site));
  return watched;
}

/** A query of Knex's builder. */
interface SelectQuery extends PromiseLike<unknown> {
  readonly _method: string;
  readonly _single: { readonly waitMode?: unknown; readonly lockTables?: readonly string[] };
  readonly _connection?: unknown;
  clone(): SelectQuery;
  transacting(trx: unknown): SelectQuery;
  forUpdate(...tables: string[]): SelectQuery;
  forNoKeyUpdate(...tables: string[]): SelectQuery;
  forShare(...tables: string[]): SelectQuery;
  forKeyShare(...tables: string[]): SelectQuery;
  noWait(): SelectQuery;
  skipLocked(): SelectQuery;
}

const clauses = {
  update: "forUpdate",
  "no key update": "forNoKeyUpdate",
  share: "forShare",
  "key share": "forKeyShare",
} as const;

const selects = new Set(["select", "first", "pluck"]);

/** `lock`: undefined where everything that a transaction reads is locked. */
function locking(
  native: unknown,
  query: unknown,
  lock: QueryLock | undefined,
  refusal: string | undefined,
): (() => PromiseLike<unknown>) | undefined {
  const { clone, toSQL, isRawInstance } = (query ?? {}) as Record<string, unknown>;
  if (isRawInstance === true)
    throw new UsageError(
      "tx.rows(query): a raw statement stays as it is. Write FOR UPDATE into it, or use Knex's query builder.",
    );
  if (typeof clone !== "function" || typeof toSQL !== "function") return undefined;
  const select = query as SelectQuery;
  if (!selects.has(select._method))
    throw new UsageError(`tx.rows(query): only a SELECT can lock what it finds, not ${select._method}`);
  if (refusal !== undefined) throw new UnsupportedError(`tx.rows(query): ${refusal}`);
  const { waitMode, lockTables = [] } = select._single;
  if (waitMode !== undefined)
    throw new UsageError("tx.rows(query, { wait }) says how to wait: leave out .noWait() and .skipLocked()");
  if (select._connection !== undefined)
    throw new UsageError("tx.rows(query): this query has a connection of its own; leave out .connection(…)");
  // Of a copy, as these methods change the query itself; and in this transaction, wherever it was built.
  const copy = select.clone().transacting(native);
  if (!lock) return () => copy;
  const locked = copy[clauses[lock.strength]](...lockTables);
  if (lock.wait === "nowait") locked.noWait();
  if (lock.wait === "skip") locked.skipLocked();
  return () => locked;
}
