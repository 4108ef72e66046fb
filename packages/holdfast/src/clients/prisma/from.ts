/** A client of Prisma as a database, and what is the same of it on PostgreSQL. */
import { AsyncLocalStorage } from "node:async_hooks";
import type { Database, DriverError, Isolation, Row, SqlConnection, Violated } from "../../seam/database.ts";
import { NotInTransactionError, UnsupportedError, UsageError, message } from "../../seam/errors.ts";
import { observeMethod } from "../observe.ts";
import { sql } from "../../seam/sql.ts";
import { type PgFactory, type PgPool, checkOutPg, listenPg, roomOfPg, unwrapPg } from "../pg/connection.ts";
import { seeOpenings, seeTransactions, settledHere } from "./end.ts";
import { prismaOnMysql } from "./mysql.ts";
import { Lending, knownPool, lendingTo, poolOf, seePrismaPg } from "./pg.ts";
import { postgres, render } from "../../engines/postgres/index.ts";

/** The part of Prisma's transaction client that is used here. */
export interface PrismaTransaction {
  $queryRawUnsafe<T = unknown>(text: string, ...values: unknown[]): PromiseLike<T>;
}

export interface PrismaClientLike extends PrismaTransaction {
  $transaction: (...args: never[]) => unknown;
}

/** The transaction client of a PrismaClient: models and all, as its own `$transaction` callback gets it. */
export type TransactionOf<Client extends PrismaClientLike> = Client["$transaction"] extends (
  body: (tx: infer Tx) => never,
  options?: never,
) => unknown
  ? Tx
  : never;

const levels: Readonly<Record<Isolation, string>> = {
  "read uncommitted": "ReadUncommitted",
  "read committed": "ReadCommitted",
  "repeatable read": "RepeatableRead",
  serializable: "Serializable",
};

/** `doubtful`: whether a statement of the transaction has failed, as far as that is watched. `below`: the driver's own connection, if it is seen. */
function connectionOf(
  tx: PrismaTransaction,
  doubtful?: () => boolean,
  below?: SqlConnection,
  lost = new AbortController(),
): SqlConnection {
  return {
    lost: lost.signal,
    socket: below?.socket,
    ...(below && { untyped: (text) => below.query(sql.raw(text)) }),
    unwrap,
    ...(doubtful && { doubtful }),
    async query(statement) {
      const { text, values } = render(statement);
      try {
        const rows = await tx.$queryRawUnsafe<Row[]>(text, ...values);
        return { rows: Array.isArray(rows) ? rows : [], affected: 0 };
      } catch (error) {
        // Prisma has no event for a dead connection: a failed statement is the first to know.
        if (unwrap(error)?.lost) lost.abort(error);
        throw error;
      }
    },
  };
}

interface PrismaError {
  code?: unknown;
  message?: string;
  meta?: { code?: unknown; modelName?: string; driverAdapterError?: { cause?: DriverCause } };
  cause?: DriverCause;
}

interface DriverCause {
  kind?: string;
  originalCode?: unknown;
  constraint?: { fields?: string[]; index?: string };
}

function ruleOf(meta: PrismaError["meta"], driver?: DriverCause): Violated | undefined {
  if (!driver?.constraint) return undefined;
  const { fields, index } = driver.constraint;
  return {
    constraint: index,
    table: meta?.modelName,
    columns: fields?.map((name) => name.replaceAll('"', "")),
  };
}

/** Prisma's own codes, where it does not say the server's: https://www.prisma.io/docs/orm/reference/error-reference */
const prismaCodes: Readonly<Record<string, string>> = {
  P2002: "23505",
  P2003: "23503",
  P2034: "40001",
  P1008: "25P04",
};
const lostKinds = new Set(["ConnectionClosed", "SocketTimeout", "DatabaseNotReachable"]);
const lostPrisma = new Set(["P1001", "P1002", "P1017"]);

const deadConnection =
  /Connection terminated|connection error and is not queryable|ECONNRESET|ECONNREFUSED|Server has closed the connection|due to administrator command|the database system is (?:starting up|shutting down)/;

/** The driver's own words, which reach us as they are when a transaction cannot begin, or end. */
class Lost extends Error {
  readonly lost = true;
  constructor(cause: unknown) {
    super(message(cause), { cause });
  }
}

function unwrap(error: unknown): DriverError | undefined {
  if (typeof error !== "object" || error === null) return undefined;
  const { code, message: text = "", meta, cause } = error as PrismaError;
  const driver = meta?.driverAdapterError?.cause ?? cause;
  if ((driver?.kind && lostKinds.has(driver.kind)) || lostPrisma.has(String(code)))
    return { lost: true, message: text };
  const prismas = "clientVersion" in error || (error as Error).name === "DriverAdapterError";
  // A dead connection reaches us as the driver's words inside Prisma's.
  if (prismas && deadConnection.test(text)) return { lost: true, message: text };
  const original = driver?.originalCode ?? meta?.code;
  const violated = ruleOf(meta, driver);
  if (typeof original === "string") return { code: original, message: text, violated };
  // The transaction was closed by Prisma's own timeout.
  if (code === "P2028" && /expired|timeout|already closed|given time/i.test(text))
    return { code: "25P04", message: text };
  return typeof code === "string" && prismaCodes[code]
    ? { code: prismaCodes[code], message: text, violated }
    : undefined;
}

/** Whether a statement of the transaction that the calling code is in has failed. */
const statements = new AsyncLocalStorage<{ failed: boolean }>();

const watchedClients = new WeakMap<object, PrismaClientLike>();

/** The same client, seen through: an extension is told of every statement, of models and raw ones alike. */
function watched(client: PrismaClientLike): PrismaClientLike {
  let seen = watchedClients.get(client);
  if (!seen) watchedClients.set(client, (seen = watching(client)));
  return seen;
}

function watching<Client extends PrismaClientLike>(client: Client): Client {
  const { $extends } = client as { $extends?: (extension: object) => Client };
  if (typeof $extends !== "function") return client;
  return $extends.call(client, {
    name: "holdfast",
    query: {
      async $allOperations({ args, query }: { args: unknown; query: (args: unknown) => Promise<unknown> }) {
        try {
          return await query(args);
        } catch (error) {
          const state = statements.getStore();
          if (state) state.failed = true;
          throw error;
        }
      },
    },
  });
}

type Parts = Omit<Database<object, SqlConnection>, "observe">;

const isPostgres = (provider: unknown) =>
  provider === undefined || provider === "postgresql" || provider === "postgres";

/** The client to open a transaction on: one's own, or what it was extended to. */
type Opener = () => PrismaClientLike;

function partsOf(client: PrismaClientLike, opener: Opener): Parts {
  const provider = (client as { _activeProvider?: unknown })._activeProvider;
  if (isPostgres(provider)) return onPostgres(client, opener);
  if (provider === "mysql") return prismaOnMysql(client, opener);
  if (provider === "sqlite") throw new UnsupportedError(noSqlite);
  throw new UnsupportedError(
    `fromPrisma: Holdfast reaches PostgreSQL, MySQL and MariaDB through Prisma, not yet ${String(provider)}`,
  );
}

const noSqlite =
  "fromPrisma: on SQLite Prisma has one connection for everybody. Whatever the process sends through the client while a " +
  "transaction is open becomes a part of that transaction: it is told that its write was kept, and it is gone if the " +
  "transaction rolls back. A check under a lock would see, and be seen by, what others have not committed. Open the file " +
  "by holdfast/better-sqlite3, holdfast/node-sqlite or holdfast/libsql for what must be exact; Prisma can stay for the rest.";

/** What a client of Prisma says of itself. */
interface Told {
  readonly _activeProvider?: unknown;
  readonly _clientVersion?: unknown;
  readonly _engineConfig?: { readonly adapter?: unknown };
}

function checkVersion({
  _clientVersion: version,
  _engineConfig: config,
  _activeProvider: provider,
}: Told): void {
  const major = typeof version === "string" ? Number.parseInt(version, 10) : Infinity;
  if (major >= 7) return;
  const why =
    major < 6
      ? "Holdfast needs Prisma 6 or newer"
      : !config?.adapter
        ? "Prisma 6 without a driver adapter has an engine of its own, with which Holdfast was not tried. Give it one: " +
          "new PrismaClient({ adapter: new PrismaPg({ connectionString }) }), of @prisma/adapter-pg"
        : !isPostgres(provider)
          ? "on MySQL and MariaDB Holdfast needs Prisma 7: the adapter of 6 does not show the connection of a transaction"
          : undefined;
  if (why !== undefined) throw new UnsupportedError(`fromPrisma: this is Prisma ${String(version)}; ${why}`);
}

/** A PrismaClient of version 7 on PostgreSQL, MySQL or MariaDB, or of version 6 with a driver adapter on PostgreSQL. `tx.client` is Prisma's own typed transaction. */
export function fromPrisma<Client extends PrismaClientLike>(
  client: Client,
): Database<TransactionOf<Client>, SqlConnection> {
  return databaseOf(client, () => client) as unknown as Database<TransactionOf<Client>, SqlConnection>;
}

export function databaseOf(client: PrismaClientLike, opener: Opener): Database<object, SqlConnection> {
  if (
    typeof client !== "object" ||
    client === null ||
    typeof client.$transaction !== "function" ||
    typeof client.$queryRawUnsafe !== "function"
  ) {
    throw new UsageError("fromPrisma(client): this is not a PrismaClient");
  }
  const original = (client as { _originalClient?: object })._originalClient ?? client;
  checkVersion(original);
  seeTransactions(original);
  const parts = partsOf(client, opener);
  return {
    ...parts,
    join(native) {
      const tx = native as Partial<PrismaClientLike> | null;
      if (typeof tx !== "object" || tx === null || typeof tx.$queryRawUnsafe !== "function")
        throw new NotInTransactionError("this is no transaction of Prisma");
      if (!isTransaction(tx)) {
        throw new NotInTransactionError(
          "this is the PrismaClient itself; pass the `tx` that $transaction(async (tx) => …) hands to its callback",
        );
      }
      const connection = parts.join(tx);
      const settled = settledHere();
      if (settled) connection.settled ??= settled;
      return connection;
    },
    openings: (opening) => seeOpenings(original, opening),
    observe(seen) {
      const ends = [
        // Every statement, of models and raw ones; those of an interactive transaction carry it.
        observeMethod(original, "_request", seen, {
          counts: ([request]) => !isInteractive(request),
          place: ([request]) => placeOf(request),
        }),
        observeMethod(original, "_transactionWithCallback", seen, {
          counts: (_, client) => !isTransaction(client),
        }),
      ];
      return () => ends.forEach((end) => end());
    },
  };
}

function onPostgres(client: PrismaClientLike, opener: Opener): Parts {
  const pinned = seePrismaPg(client);
  return {
    engine: postgres,
    traits: {
      client: "prisma",
      cancel: false,
      listen: pinned,
      embedded: false,
      single: false,
      pinned,
      begins: true,
    },
    ...(pinned && {
      connect: async (purpose) => {
        const pool = await poolOf(client);
        return checkOutPg(pool, (pool as { options?: object }).options, purpose);
      },
      listen: async (channel, wake, signal) =>
        listenPg((await poolOf(client)) as PgPool & PgFactory, channel, wake, signal),
      room: () => {
        const pool = knownPool(client);
        return pool && roomOfPg(pool);
      },
    }),
    transaction({ isolation, isolationIsDefault, deadlineMs, timeoutMs, taken }, body) {
      // Said only where it is not the server's default: Prisma would spend a round trip on it, and the engine verifies it.
      const level = isolationIsDefault ? {} : { isolationLevel: levels[isolation] };
      const state = { failed: false };
      const lending = new Lending(taken);
      let thrown: unknown;
      const run = async (tx: PrismaTransaction) => {
        const below = lending.connection;
        const lost = new AbortController();
        const pass = () => lost.abort(below?.lost.reason);
        below?.lost.addEventListener("abort", pass, { once: true });
        const connection = connectionOf(tx, () => state.failed, below, lost);
        const seal = () => lending.seal();
        return body({ connection, native: tx, seal })
          .catch((error: unknown) => {
            thrown = error;
            throw error;
          })
          .finally(() => below?.lost.removeEventListener("abort", pass));
      };
      const options = { ...level, timeout: timeoutMs, maxWait: deadlineMs };
      const running = statements.run(state, () =>
        lendingTo(lending, () => watched(opener()).$transaction(run as never, options as never)),
      );
      return (running as Promise<never>)
        .catch((error: unknown) => {
          // Of BEGIN, COMMIT or ROLLBACK, whose connection it was; the body may speak to others.
          throw error !== thrown && deadConnection.test(message(error)) ? new Lost(error) : error;
        })
        .finally(() => lending.end());
    },
    join: (tx) => connectionOf(tx as PrismaTransaction),
    // Of Prisma's, or of the driver's, whose connections are ours too.
    unwrap: (error) => unwrap(error) ?? unwrapPg(error),
  };
}

/** A transaction's client nests, so `$transaction` tells nothing; but it cannot disconnect. */
export function isTransaction(client: unknown): boolean {
  return typeof (client as { $disconnect?: unknown }).$disconnect !== "function";
}

/** Its promises are lazy, so a stack may not show who made one; Prisma notes it for its own errors. */
function placeOf(request: unknown): string | undefined {
  const { callsite } = (request ?? {}) as { callsite?: { getLocation?(): Location | null } };
  const { fileName, lineNumber, columnNumber } = callsite?.getLocation?.() ?? {};
  return fileName ? `${fileName}:${lineNumber}:${columnNumber}` : undefined;
}

interface Location {
  readonly fileName?: string;
  readonly lineNumber?: number;
  readonly columnNumber?: number;
}

function isInteractive(request: unknown): boolean {
  return (request as { transaction?: { kind?: unknown } } | undefined)?.transaction?.kind === "itx";
}
