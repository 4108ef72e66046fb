import { AsyncLocalStorage } from "node:async_hooks";
import type { Database, DriverError, Isolation, Row, SqlConnection, Violated } from "../../seam/database.ts";
import { NotInTransactionError, UnsupportedError, UsageError, message } from "../../seam/errors.ts";
import { observeMethod } from "../observe.ts";
import type { Lockable } from "../../seam/key.ts";
import { type LockOptions, scopeOf } from "../../transaction/scope.ts";
import { sql } from "../../seam/sql.ts";
import type { TransactionOptions } from "../../transaction/transaction.ts";
import {
  type Delegate,
  type FindArgs,
  type PrismaLock,
  type Schema,
  findManyLocked,
  findOneLocked,
} from "./find.ts";
import type { PrismaArgs, PrismaFound, PrismaSelecting } from "./types.ts";
import { seeTransactions, settledHere } from "./end.ts";
import { prismaOnMysql, readsOf, seePrismaMysql } from "./mysql.ts";
import { Lending, lendingTo, seePrismaPg } from "./pg.ts";
import { Holdfast, type HoldfastOptions } from "../../holdfast.ts";
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
function connectionOf(tx: PrismaTransaction, doubtful?: () => boolean, below?: SqlConnection): SqlConnection {
  const lost = new AbortController();
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

/** The same client, seen through: an extension is told of every statement, of models and raw ones alike. */
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

function partsOf(client: PrismaClientLike): Parts {
  const provider = (client as { _activeProvider?: unknown })._activeProvider;
  if (isPostgres(provider)) return onPostgres(client);
  if (provider === "mysql") return prismaOnMysql(client);
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
  const parts = partsOf(client);
  const database: Database<object, SqlConnection> = {
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
  return database as unknown as Database<TransactionOf<Client>, SqlConnection>;
}

function onPostgres(client: PrismaClientLike): Parts {
  seePrismaPg(client);
  const watched = watching(client);
  return {
    engine: postgres,
    traits: {
      client: "prisma",
      cancel: false,
      listen: false,
      embedded: false,
      single: false,
      pinned: false,
      begins: true,
    },
    transaction({ isolation, isolationIsDefault, deadlineMs, timeoutMs, taken }, body) {
      // Said only where it is not the server's default: Prisma would spend a round trip on it, and the engine verifies it.
      const level = isolationIsDefault ? {} : { isolationLevel: levels[isolation] };
      const state = { failed: false };
      const lending = new Lending(taken);
      let thrown: unknown;
      const run = async (tx: PrismaTransaction) => {
        const connection = connectionOf(tx, () => state.failed, lending.connection);
        const seal = () => lending.seal();
        return body({ connection, native: tx, seal }).catch((error: unknown) => {
          thrown = error;
          throw error;
        });
      };
      const options = { ...level, timeout: timeoutMs, maxWait: deadlineMs };
      const running = statements.run(state, () =>
        lendingTo(lending, () => watched.$transaction(run as never, options as never)),
      );
      return (running as Promise<never>)
        .catch((error: unknown) => {
          // Of BEGIN, COMMIT or ROLLBACK, whose connection it was; the body may speak to others.
          throw error !== thrown && deadConnection.test(message(error)) ? new Lost(error) : error;
        })
        .finally(() => lending.end());
    },
    join: (tx) => connectionOf(tx as PrismaTransaction),
    unwrap,
  };
}

/** A transaction's client nests, so `$transaction` tells nothing; but it cannot disconnect. */
function isTransaction(client: unknown): boolean {
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

type FindName = "findMany" | "findFirst" | "findUnique";

/** The arguments of Prisma's own, and the lock; nothing else. */
type Locked<T, A, Name extends FindName> = A &
  PrismaArgs<T, Name> & { readonly lock?: PrismaLock } & {
    readonly [K in Exclude<keyof A, keyof PrismaArgs<T, Name> | "lock">]?: never;
  };

/** What `prisma.$extends(holdfast())` adds. */
export interface PrismaExtension {
  readonly name: "holdfast";
  readonly client: {
    /** Takes locks until the end of the transaction that this is the client of. */
    $lock(locks: Lockable | readonly Lockable[], options?: LockOptions): Promise<void>;
    /** Runs what is meant to be apart from the transaction whose body calls it; see `hf.outside`. */
    $outside<R>(work: () => R): R;
    /** `$transaction` with locks, deadline and retries: `prisma.$exact({ lock: key("upload", id) }, async (tx) => …)`. */
    $exact<T extends PrismaClientLike, R>(
      this: T,
      options: TransactionOptions,
      body: (tx: TransactionOf<T>) => Promise<R>,
    ): Promise<R>;
  };
  readonly model: {
    readonly $allModels: {
      /** As `findUnique`, with the row locked until the end of the transaction. */
      findUniqueForUpdate<T, A extends PrismaSelecting>(
        this: T,
        args: Locked<T, A, "findUnique">,
      ): Promise<PrismaFound<T, A> | null>;
      /** As `findFirst`, with the row locked until the end of the transaction. */
      findFirstForUpdate<T, A extends PrismaSelecting>(
        this: T,
        args?: Locked<T, A, "findFirst">,
      ): Promise<PrismaFound<T, A> | null>;
      /** As `findMany`, with the rows locked, in the order of their primary key, until the end of the transaction. */
      findManyForUpdate<T, A extends PrismaSelecting>(
        this: T,
        args?: Locked<T, A, "findMany">,
      ): Promise<PrismaFound<T, A>[]>;
    };
  };
}

/** Prisma's client as its extensions see it. */
type Extended = PrismaClientLike & Schema & { readonly _originalClient?: object };

/** For Prisma's own way: `const prisma = new PrismaClient({ adapter }).$extends(holdfast())`. */
export function holdfast(options: HoldfastOptions = {}): PrismaExtension {
  const instances = new WeakMap<object, Holdfast<unknown>>();
  /** One for each client that transactions are opened on, since these shall have what that client has. */
  const instance = (client: Extended, id: object = client): Holdfast<unknown> => {
    let hf = instances.get(id);
    if (!hf) instances.set(id, (hf = new Holdfast(fromPrisma(client), options)));
    return hf;
  };
  const joined = (tx: Extended, call: string) => {
    if (!isTransaction(tx))
      throw new NotInTransactionError(
        `${call} outside of a transaction: the lock would be gone at once. Use prisma.$exact(…) or prisma.$transaction(async (tx) => …), and the \`tx\` of it.`,
      );
    const original = (tx._originalClient ?? tx) as Extended;
    return instance(original, original).join(tx);
  };
  const find = (delegate: Delegate & { $parent: Extended }, name: FindName, args?: FindArgs) => {
    const tx = delegate.$parent;
    const scope = scopeOf(joined(tx, `${delegate.$name}.${name}ForUpdate`), name);
    const model = { scope, schema: tx, delegate, ...readsOf(tx) };
    return name === "findMany" ? findManyLocked(model, args) : findOneLocked(model, name, args);
  };
  type Model = Delegate & { $parent: Extended };
  const extension = {
    name: "holdfast",
    client: {
      async $lock(this: Extended, locks: Lockable | readonly Lockable[], how?: LockOptions) {
        await joined(this, "$lock").lock(locks, how as never);
      },
      $outside(this: Extended, work: () => unknown) {
        return instance(this).outside(work);
      },
      $exact(this: Extended, how: TransactionOptions, body: (tx: unknown) => Promise<unknown>) {
        return instance(this).transaction(how, (tx) => body(tx.client));
      },
    },
    model: {
      $allModels: {
        async findUniqueForUpdate(this: Model, args: FindArgs) {
          return find(this, "findUnique", args);
        },
        async findFirstForUpdate(this: Model, args?: FindArgs) {
          return find(this, "findFirst", args);
        },
        async findManyForUpdate(this: Model, args?: FindArgs) {
          return find(this, "findMany", args);
        },
      },
    },
  };
  // $extends calls it with the client, whose connections must be seen from the first one on.
  const extend = (client: { $extends(extension: object): unknown }) => {
    seePrismaMysql(client);
    seePrismaPg(client);
    seeTransactions(client);
    return client.$extends(extension);
  };
  return extend as unknown as PrismaExtension;
}
