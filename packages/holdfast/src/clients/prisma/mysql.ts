/**
 * Prisma on MySQL and MariaDB, through @prisma/adapter-mariadb. Our own statements go to the connection of `mariadb` that
 * Prisma's transaction is on: Prisma prepares each raw statement, which MySQL refuses of SAVEPOINT, and does not name the
 * columns of what a procedure brings.
 */
import { AsyncLocalStorage } from "node:async_hooks";
import type {
  ClientTransaction,
  Database,
  DriverError,
  Isolation,
  Pinned,
  Purpose,
  SqlConnection,
} from "../../seam/database.ts";
import { NotInTransactionError, UnsupportedError, UsageError } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import { killer } from "../../engines/mysql/client.ts";
import { mysql } from "../../engines/mysql/index.ts";
import { view } from "../../context/revocable.ts";
import {
  type MariadbPool,
  type MariadbPoolConnection,
  checkOutMariadb,
  mariadbConnection,
  mariadbView,
  unwrapMariadb,
} from "../mariadb/connection.ts";

/** Prisma's client, as far as it is the same whatever the schema. */
interface Client {
  $connect?(): Promise<void>;
  $transaction: (...args: never[]) => unknown;
  readonly _engineConfig?: { readonly adapter?: Factory };
  readonly _engine?: PrismaEngine;
}

interface Factory {
  readonly adapterName?: string;
  connect(): Promise<Adapter>;
}

interface Adapter {
  underlyingDriver(): MariadbPool;
  getConnectionInfo?(): { readonly schemaName?: string | undefined };
  startTransaction(level?: string): Promise<{ readonly conn: MariadbPoolConnection; client: object }>;
  dispose(): Promise<void>;
}

interface PrismaEngine {
  transaction(action: string, headers: unknown, options: unknown): Promise<{ id: string } | undefined>;
}

/** An interactive transaction of Prisma's. */
interface PrismaSession {
  readonly connection: SqlConnection;
  /** As it was begun; undefined: the server's default. */
  readonly level: string | undefined;
  /** Where Prisma looks for its tables, if not in the connection's own database. */
  readonly database: string | undefined;
  /** Prisma's BEGIN was not sent. */
  readonly withheld: boolean;
  /** Autocommit may have been turned off, and must be on again for whoever gets the connection next. */
  restore: boolean;
  /** Nothing more is sent for Prisma than the end of the transaction. */
  seal(): Promise<void>;
  /** Ends the connection: nobody answers on it. */
  drop(): void;
}

/** A transaction that begins, and what became of it. */
interface Opening {
  /** Of a transaction of ours: then BEGIN is left to the engine, whose own comes with the locks. */
  readonly isolation: Isolation | undefined;
  begun?: Begun;
}

interface Begun {
  readonly native: MariadbPoolConnection;
  readonly seal: () => Promise<void>;
  readonly fail: (error: Error) => void;
  readonly adapter: Adapter;
  readonly level: string | undefined;
  readonly withheld: boolean;
}

const openings = new AsyncLocalStorage<Opening>();
/** Of ours: the first transaction that begins in here is meant. */
const wishes = new AsyncLocalStorage<{ readonly isolation: Isolation; taken: boolean }>();

/** The adapters that a factory has made, of those that were not disposed of: one for each connected client. */
const adapters = new WeakMap<Factory, Set<Adapter>>();
/** By Prisma's id of the transaction. */
const sessions = new WeakMap<PrismaEngine, Map<string, PrismaSession>>();

const adapterName = "@prisma/adapter-mariadb";

/**
 * Sees connections from now on. Prisma gives nobody the adapter that it is connected by, so this has to come before the
 * client's first statement.
 */
export function seePrismaMysql(client: object): void {
  const { _engineConfig, _engine } = client as Client;
  const factory = _engineConfig?.adapter;
  if (factory?.adapterName !== adapterName || !_engine) return;
  if (!adapters.has(factory)) watchFactory(factory);
  if (!sessions.has(_engine)) watchEngine(_engine);
}

function watchFactory(factory: Factory): void {
  const made = new Set<Adapter>();
  adapters.set(factory, made);
  const connect = factory.connect.bind(factory);
  factory.connect = async () => {
    const adapter = await connect();
    const start = adapter.startTransaction;
    const dispose = adapter.dispose.bind(adapter);
    made.add(adapter);
    adapter.startTransaction = async (level) => {
      const opening = openings.getStore();
      const ours = opening?.isolation ? withoutBegin(adapter) : undefined;
      const transaction = await start.call(ours?.adapter ?? adapter, ours ? undefined : level);
      if (opening) {
        const seen = view(transaction.conn, mariadbView);
        // What Prisma had accepted before it closed the transaction, it would send after its end.
        transaction.client = seen.proxy;
        opening.begun = {
          native: transaction.conn,
          async seal() {
            seen.seal();
            // The driver prepares first, and executes when that is answered.
            await seen.idle();
          },
          fail: seen.fail,
          adapter,
          level: opening.isolation ?? level,
          withheld: ours?.withheld() === true,
        };
      }
      return transaction;
    };
    adapter.dispose = () => {
      made.delete(adapter);
      return dispose();
    };
    return adapter;
  };
}

/** The same adapter, which keeps the next BEGIN to itself. */
function withoutBegin(adapter: Adapter): { readonly adapter: Adapter; withheld(): boolean } {
  let withheld = false;
  const pool = adapter.underlyingDriver();
  const client = {
    async getConnection() {
      const native = await pool.getConnection();
      const { query } = native;
      native.query = async (what, values) => {
        native.query = query;
        withheld = /^BEGIN$/i.test(typeof what === "string" ? what : what.sql);
        return withheld ? undefined : native.query(what, values);
      };
      return native;
    },
  };
  return {
    adapter: Object.create(adapter, { client: { value: client } }) as Adapter,
    withheld: () => withheld,
  };
}

function watchEngine(engine: PrismaEngine): void {
  const known = new Map<string, PrismaSession>();
  sessions.set(engine, known);
  const original = engine.transaction.bind(engine);
  engine.transaction = async (action, headers, options) => {
    if (action !== "start") return original(action, headers, options);
    const wish = wishes.getStore();
    const opening: Opening = { isolation: wish?.taken === false ? wish.isolation : undefined };
    if (wish) wish.taken = true;
    const started = await openings.run(opening, () => original(action, headers, options));
    // A nested one is a savepoint, and has the id of the outer one.
    if (started && opening.begun) known.set(started.id, track(known, started.id, opening.begun));
    return started;
  };
}

/** Prisma gives the connection back as soon as it has sent COMMIT or ROLLBACK: from then on it is somebody else's. */
function track(
  known: Map<string, PrismaSession>,
  id: string,
  { native, seal, fail, adapter, level, withheld }: Begun,
): PrismaSession {
  const whole = mariadbConnection(native, killer(adapter.underlyingDriver()));
  let ended = false;
  const end = () => {
    ended = true;
    known.delete(id);
  };
  const connection: SqlConnection = {
    ...whole,
    unwrap: unwrapPrismaMysql,
    async query(...args) {
      if (ended) throw new NotInTransactionError("this transaction of Prisma's has ended");
      return whole.query(...args);
    },
    async cancel() {
      if (!ended) await whole.cancel?.();
    },
  };
  const session: PrismaSession = {
    connection,
    level,
    withheld,
    database: adapter.getConnectionInfo?.().schemaName,
    restore: false,
    seal,
    drop() {
      end();
      // It asks the server to end the session, and tells nobody if it cannot reach it.
      native.destroy();
      fail(new Error("it was given up"));
    },
  };
  const { release } = native;
  native.release = async () => {
    end();
    native.release = release;
    try {
      if (session.restore) await whole.query(autocommitAsBefore);
    } catch {
      native.destroy();
      return;
    }
    await native.release();
  };
  return session;
}

/** The engine turns it off, so that nothing is kept of what a body sends after a deadlock that it swallowed. */
const autocommitAsBefore = sql.raw("SET autocommit = COALESCE(@holdfast_autocommit, @@autocommit)");

function find(engine: PrismaEngine | undefined, tx: object): PrismaSession | undefined {
  return engine && sessions.get(engine)?.get(idOf(tx) ?? "");
}

/** How Prisma's own reads in this transaction are. */
export function readsOf(tx: object): { readonly snapshot: boolean; readonly database?: string | undefined } {
  const session = find((tx as Client)._engine, tx);
  if (!session) return { snapshot: false };
  return { snapshot: !/^(read|serializable)/i.test(session.level ?? ""), database: session.database };
}

/** Prisma's id of the transaction that this is the client of. */
function idOf(tx: object): string | undefined {
  const scope = (tx as Record<symbol, { txId?: unknown } | undefined>)[
    Symbol.for("prisma.client.transaction.scope_context")
  ];
  return typeof scope?.txId === "string" ? scope.txId : undefined;
}

const late =
  "Holdfast sees the connections of Prisma that are opened after it was made: call fromPrisma(prisma), or prisma.$extends(holdfast()), right after new PrismaClient(…), before the first statement";

type Parts = Pick<Database<object, SqlConnection>, "engine" | "traits" | "unwrap" | "join"> &
  Required<Pick<Database<object, SqlConnection>, "connect" | "transaction">>;

export function prismaOnMysql(client: object, opener: () => object): Parts {
  const { _engineConfig, _engine, $connect } = client as Client;
  const factory = _engineConfig?.adapter;
  if (factory?.adapterName !== adapterName || !_engine)
    throw new UnsupportedError(
      `fromPrisma: Holdfast reaches MySQL and MariaDB through ${adapterName}, not through ${String(factory?.adapterName)}`,
    );
  seePrismaMysql(client);
  const sessionOf = (tx: object): PrismaSession => {
    const session = find(_engine, tx);
    if (session) return session;
    if (adapters.get(factory)?.size === 0) throw new UsageError(late);
    throw new NotInTransactionError("this transaction of Prisma's has ended, or is one of another client");
  };
  const pool = async (): Promise<MariadbPool> => {
    await $connect?.call(client);
    const [adapter] = [...(adapters.get(factory) ?? [])].slice(-1);
    if (!adapter) throw new UsageError(late);
    return adapter.underlyingDriver();
  };
  return {
    engine: mysql,
    traits: {
      client: "prisma",
      cancel: true,
      listen: false,
      embedded: false,
      single: false,
      pinned: true,
      begins: true,
    },
    async connect(purpose: Purpose): Promise<Pinned<object, SqlConnection>> {
      const given = await pool();
      return checkOutMariadb(given, killer(given), purpose);
    },
    async transaction({ isolation, deadlineMs, timeoutMs, signal, taken }: ClientTransaction, body) {
      const run = async (tx: object) => {
        const session = find(_engine, tx);
        if (!session) throw new UsageError(late);
        taken(() => session.drop());
        session.restore = true;
        // Another version of the adapter may begin in a way that is not seen.
        if (!session.withheld) await session.connection.query(sql.raw("ROLLBACK"));
        const { connection, seal } = session;
        return body({ connection, native: tx, begun: false, seal });
      };
      const options = { timeout: timeoutMs, maxWait: deadlineMs };
      try {
        return await wishes.run({ isolation, taken: false }, () => transactionOn(opener(), run, options));
      } catch (error) {
        // Prisma's own word for a pool that had none to give until the deadline.
        if ((error as { code?: unknown } | null)?.code === "P2028") signal?.throwIfAborted();
        throw error;
      }
    },
    join: (tx) => sessionOf(tx).connection,
    unwrap: unwrapPrismaMysql,
  };
}

/** Its methods are of a proxy, and need it. */
function transactionOn<T>(client: object, body: (tx: object) => Promise<T>, options: object): Promise<T> {
  return (client as Client).$transaction(body as never, options as never) as Promise<T>;
}

interface PrismaError {
  readonly code?: unknown;
  readonly name?: string;
  readonly message?: string;
  readonly meta?: { readonly driverAdapterError?: { readonly cause?: DriverCause } };
  readonly cause?: unknown;
}

interface DriverCause {
  readonly originalCode?: unknown;
  readonly originalMessage?: string;
  /** In words: what the driver's error was caused by. */
  readonly cause?: unknown;
}

/** Prisma's own codes, where it does not say the server's: https://www.prisma.io/docs/orm/reference/error-reference */
const prismaCodes: Readonly<Record<string, number>> = { P2002: 1062, P2003: 1452, P2034: 1213, P2021: 1146 };
const lostPrisma = new Set(["P1001", "P1002", "P1017"]);
const socket = /ECONNREFUSED|ECONNRESET|EPIPE|ETIMEDOUT|EHOSTUNREACH|socket has unexpectedly been closed/;

/** Those of our own statements are the driver's; the caller's come through Prisma, with the server's number inside. */
function unwrapPrismaMysql(error: unknown): DriverError | undefined {
  const drivers = unwrapMariadb(error);
  if (drivers || typeof error !== "object" || error === null) return drivers;
  const { code, name, message = "", meta, cause } = error as PrismaError;
  const driver =
    meta?.driverAdapterError?.cause ?? (name === "DriverAdapterError" ? (cause as DriverCause) : undefined);
  if (driver?.originalCode !== undefined) {
    const errno = Number(driver.originalCode);
    const text = driver.originalMessage ?? message;
    const lost =
      unwrapMariadb({ errno, fatal: true }) ?? socket.test(`${text} ${String(driver.cause ?? "")}`);
    return { ...numbered(errno, text), ...(lost && { lost: true }) };
  }
  if (lostPrisma.has(String(code))) return { lost: true, message };
  const known = typeof code === "string" ? prismaCodes[code] : undefined;
  return known === undefined ? undefined : numbered(known, message);
}

/** As the drivers of this engine have it. */
function numbered(errno: number, text: string): DriverError & { errno: number; sqlMessage: string } {
  return { errno, sqlMessage: text, message: text };
}
