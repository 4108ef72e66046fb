import type {
  Database,
  DriverError,
  Opening,
  Pinned,
  Purpose,
  QueryLock,
  Room,
  SqlConnection,
} from "../../seam/database.ts";
import { NotInTransactionError, UnsupportedError, UsageError, message } from "../../seam/errors.ts";
import { observeMethod, observeOpenings, tellManual } from "../observe.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { sql } from "../../seam/sql.ts";
import { type ViewOptions, view } from "../../context/revocable.ts";
import {
  type Mysql2PoolConnection,
  checkOutMysql2,
  dropMysql2,
  endMysql2,
  mysql2Connection,
  mysql2View,
  roomOfMysql2,
  unwrapMysql2,
} from "../mysql2/connection.ts";
import {
  type PgClient,
  type PgFactory,
  type PgPool,
  checkOutPg,
  endPg,
  listenPg,
  listenToClients,
  pgConnection,
  pgView,
  roomOfPg,
  unwrapPg,
  withholdBegin,
} from "../pg/connection.ts";
import { connectLent, joinLent, lentRoom, lentTraits, sendOn } from "../sqlite-lent.ts";
import { TypeormSqlite } from "./sqlite.ts";
import { killer } from "../../engines/mysql/client.ts";
import { mysql } from "../../engines/mysql/index.ts";
import { postgres } from "../../engines/postgres/index.ts";
import { sqlite } from "../../engines/sqlite/index.ts";

/** The part of a DataSource that is used here. */
export interface TypeormDataSource {
  readonly options: { readonly type: string; readonly isolationLevel?: string };
  readonly manager: object;
  driver: object;
  createQueryRunner(mode?: "master" | "slave"): object;
}

/** What `dataSource.transaction(async (manager) => …)` hands to its callback. */
export type ManagerOf<Client extends TypeormDataSource> = Client["manager"];

interface Runner {
  readonly manager: object;
  readonly isReleased: boolean;
  readonly isTransactionActive: boolean;
  /** The driver's own, once it is connected. */
  databaseConnection?: object;
  connect(): Promise<object>;
  startTransaction(level?: string): Promise<void>;
  commitTransaction(): Promise<void>;
  rollbackTransaction(): Promise<void>;
  release(): Promise<void>;
}

/** What differs between the drivers that TypeORM has for its servers. */
interface DriverBridge {
  readonly engine: Database<unknown, SqlConnection>["engine"];
  readonly strengths: readonly QueryLock["strength"][];
  /** Whether the engine looks what isolation a transaction has that goes without saying. */
  readonly verified: boolean;
  connection(raw: object): SqlConnection;
  /** From the moment at which its pool gives one out. */
  listenToClients?(): void;
  /** Before BEGIN: what TypeORM cannot say, and nobody can say later. */
  prepare?(connection: SqlConnection, readOnly: boolean): Promise<void>;
  /** Keeps the next BEGIN from being sent, where the engine's own comes with the locks. */
  withhold?(raw: object): { readonly withheld: boolean; end(): void };
  connect(purpose: Purpose): Promise<Pinned<unknown, SqlConnection>>;
  /** Ends the session at once, and what waits for an answer on it. */
  end(raw: object): void;
  /** What is sent on it once the body has ended. */
  readonly view: ViewOptions;
  /** Takes the connection out of the pool for good. */
  drop(runner: Runner, raw: object): Promise<void>;
  room(): Room | undefined;
  readonly listen?: NonNullable<Database["listen"]>;
  unwrap(error: unknown): DriverError | undefined;
}

/** Made when the DataSource is initialized, and anew when it is initialized again. */
function pooled<Pool>(pool: Pool | undefined): Pool {
  if (pool) return pool;
  throw new UsageError(
    "fromTypeorm: the DataSource is not connected; call `await dataSource.initialize()` first",
  );
}

function onPostgres(dataSource: TypeormDataSource): DriverBridge {
  const driver = () => dataSource.driver as { master?: PgPool & PgFactory; isReplicated?: boolean };
  const pool = () => pooled(driver().master);
  return {
    engine: postgres,
    strengths: ["update", "no key update", "share", "key share"],
    verified: true,
    withhold: (raw) => withholdBegin(raw as PgClient),
    listenToClients: () => listenToClients(pool()),
    connection: (raw) => pgConnection(raw as PgClient, driver().master?.options),
    connect: async (purpose) => checkOutPg(pool(), pool().options, purpose),
    end: (raw) => endPg(raw as PgClient),
    view: pgView,
    async drop(runner) {
      const { releasePostgresConnection } = runner as {
        releasePostgresConnection?: (e: Error) => Promise<void>;
      };
      await releasePostgresConnection?.call(runner, new Error("its state is not known"));
    },
    room: () => {
      const { master, isReplicated } = driver();
      // A replica's pool is another one, and we are not told which.
      return master && !isReplicated ? roomOfPg(master) : undefined;
    },
    listen: async (channel, wake, signal) => listenPg(pool(), channel, wake, signal),
    unwrap: unwrapPostgres,
  };
}

interface CallbackPool {
  getConnection(done: (error: unknown, raw: Raw) => void): void;
}
interface Cluster {
  getConnection(name: string, done: (error: unknown, raw: Raw) => void): void;
}
type Raw = object & { promise(): Mysql2PoolConnection; destroy(): void };

function onMysql(dataSource: TypeormDataSource): DriverBridge {
  const driver = () => dataSource.driver as { pool?: CallbackPool; poolCluster?: Cluster };
  // Not by the driver's own method, which is watched: we also take one to end what runs on another.
  const pool = {
    getConnection: () =>
      new Promise<Mysql2PoolConnection>((resolve, reject) => {
        const done = (error: unknown, raw: Raw) => (error ? reject(error) : resolve(raw.promise()));
        const { poolCluster, pool: single } = driver();
        if (poolCluster) poolCluster.getConnection("MASTER", done);
        else pooled(single).getConnection(done);
      }),
  };
  const kill = killer(pool);
  return {
    engine: mysql,
    strengths: ["update", "share"],
    verified: false,
    connection: (raw) => mysql2Connection(raw, kill),
    async prepare(connection, readOnly) {
      if (readOnly) await connection.query(sql.raw("SET TRANSACTION READ ONLY"));
    },
    connect: (purpose) => checkOutMysql2(pool, kill, purpose),
    end: endMysql2,
    view: mysql2View,
    async drop(runner, raw) {
      dropMysql2(raw as Raw);
      await runner.release();
    },
    room: () => {
      const { pool: single } = driver();
      return single && roomOfMysql2(single);
    },
    unwrap: unwrapMysql,
  };
}

function onSqlite<Native>(dataSource: TypeormDataSource): Database<Native, SqlConnection> {
  const reach = new TypeormSqlite(dataSource);
  return {
    engine: sqlite,
    traits: { client: "typeorm", ...lentTraits },
    connect: (purpose) =>
      connectLent(dataSource.driver, () => reach.lend(purpose), unwrapSqlite, purpose) as Promise<never>,
    join(native) {
      if (runnerOf(native, dataSource).isReleased)
        throw new NotInTransactionError("its QueryRunner has been released");
      return joinLent(sendOn(reach.handle), unwrapSqlite);
    },
    room: () => lentRoom,
    observe: (seen) => reach.observe(seen),
    openings: (opening) => openings(dataSource, opening),
    locking: (native, query) => locking(dataSource, runnerOf(native, dataSource), query, undefined),
    unwrap: unwrapSqlite,
  };
}

const runners = new WeakMap<object, Set<Opening>>();

function openings(dataSource: TypeormDataSource, opening: Opening): () => void {
  const end = observeOpenings(dataSource.manager, "transaction", opening);
  const known = runners.get(dataSource);
  const all = known ?? new Set();
  all.add(opening);
  if (!known) {
    runners.set(dataSource, all);
    const create = dataSource.createQueryRunner;
    dataSource.createQueryRunner = function (this: TypeormDataSource, ...args) {
      const runner = create.apply(this, args) as Runner;
      const { startTransaction } = runner;
      runner.startTransaction = function (this: Runner, ...given) {
        const started = startTransaction.apply(this, given);
        const isOpen = () => runner.isTransactionActive && !runner.isReleased;
        tellManual(all, isOpen, runner.startTransaction);
        return started;
      };
      return runner;
    };
  }
  return () => {
    end();
    all.delete(opening);
  };
}

const reaches: Readonly<Record<string, (dataSource: TypeormDataSource) => DriverBridge>> = {
  postgres: onPostgres,
  mysql: onMysql,
  mariadb: onMysql,
};

/** A QueryFailedError has the driver's error inside, and its code, but not its words. */
function unwrapPostgres(error: unknown): DriverError | undefined {
  const { driverError } = (error ?? {}) as { driverError?: unknown };
  return released(error) ?? unwrapPg(driverError ?? error);
}

function unwrapMysql(error: unknown): DriverError | undefined {
  const { driverError } = (error ?? {}) as { driverError?: unknown };
  return released(error) ?? unwrapMysql2(driverError ?? error);
}

/**
 * A runner whose connection has died is released by TypeORM, and what is sent on it from then on fails with that. As a
 * socket's code: if the connection is alive, it is somebody else's runner.
 */
function released(error: unknown): DriverError | undefined {
  const { name, message: text = "" } = (error ?? {}) as Partial<Error>;
  return name === "QueryRunnerAlreadyReleasedError" || name === "QueryRunnerProviderAlreadyReleasedError"
    ? { code: "ECONNRESET", message: text }
    : undefined;
}

function unwrapSqlite(error: unknown): DriverError | undefined {
  return ((error ?? {}) as { driverError?: DriverError }).driverError;
}

/** Resolves to whether the connection is fit for others. */
async function undo(runner: Runner, { lost }: SqlConnection): Promise<boolean> {
  if (lost.aborted) return false;
  try {
    // The body may have left transactions open inside of ours, which TypeORM counts.
    while (runner.isTransactionActive) await runner.rollbackTransaction();
    return true;
  } catch {
    return false;
  }
}

/** What a manager, a runner or a query belongs to: TypeORM 0.3 calls it `connection`. */
function sourceOf(thing: unknown): unknown {
  const { dataSource, connection } = (thing ?? {}) as { dataSource?: unknown; connection?: unknown };
  return dataSource ?? connection;
}

/** Of an EntityManager, or the QueryRunner itself. */
function runnerOf(native: unknown, dataSource: TypeormDataSource): Runner {
  const candidate = native as {
    queryRunner?: Runner;
    startTransaction?: unknown;
    createQueryRunner?: unknown;
  } | null;
  if (candidate === dataSource || candidate === dataSource.manager) {
    throw new NotInTransactionError(
      `this is the ${candidate === dataSource ? "DataSource" : "DataSource's own manager"}; pass the manager that dataSource.transaction(async (manager) => …) hands to its callback, or that of a QueryRunner`,
    );
  }
  const source = sourceOf(candidate);
  if (typeof candidate !== "object" || candidate === null || !source)
    throw new NotInTransactionError("this is no EntityManager of TypeORM");
  if (source !== dataSource)
    throw new NotInTransactionError("this EntityManager belongs to another DataSource");
  const runner =
    typeof candidate.startTransaction === "function" ? (native as Runner) : candidate.queryRunner;
  if (!runner)
    throw new NotInTransactionError(
      "this EntityManager takes another connection for every statement; pass the one that dataSource.transaction(async (manager) => …) hands to its callback",
    );
  return runner;
}

const modes = {
  update: "pessimistic_write",
  "no key update": "for_no_key_update",
  share: "pessimistic_read",
  "key share": "for_key_share",
} as const;
const onLocked = { nowait: "nowait", skip: "skip_locked", bounded: undefined } as const;

interface SelectQuery {
  readonly expressionMap: {
    readonly queryType: string;
    readonly lockTables?: string[];
    readonly mainAlias?: { readonly hasMetadata: boolean };
  };
  clone(): SelectQuery;
  setQueryRunner(runner: Runner): SelectQuery;
  setLock(mode: string, version?: undefined, tables?: string[]): SelectQuery;
  setOnLocked(word: string | undefined): SelectQuery;
  cache(enabled: boolean): SelectQuery;
  getMany(): Promise<unknown[]>;
  getRawMany(): Promise<unknown[]>;
}

/** `lock`: undefined where everything that a transaction reads is locked. */
function locking(
  dataSource: TypeormDataSource,
  runner: Runner,
  query: unknown,
  lock: (QueryLock & Pick<DriverBridge, "strengths">) | undefined,
): (() => Promise<unknown>) | undefined {
  const { expressionMap, getMany } = (query ?? {}) as Partial<SelectQuery>;
  if (typeof expressionMap?.queryType !== "string") return undefined;
  if (expressionMap.queryType !== "select" || typeof getMany !== "function")
    throw new UsageError("tx.rows(query): only a SELECT can lock what it finds");
  if (sourceOf(query) !== dataSource)
    throw new UsageError("tx.rows(query): this query belongs to another DataSource");
  const select = query as SelectQuery;
  const copy = select.clone();
  // A clone forgets what find options say of relations that are loaded by statements of their own.
  Object.assign(copy, { ...select, expressionMap: copy.expressionMap });
  // What is answered from a cache locks nothing.
  copy.setQueryRunner(runner).cache(false);
  if (lock) bind(dataSource, copy, lock, expressionMap.lockTables);
  return () => (expressionMap.mainAlias?.hasMetadata ? copy.getMany() : copy.getRawMany());
}

function bind(
  { options: { type } }: TypeormDataSource,
  copy: SelectQuery,
  { strength, wait, strengths }: QueryLock & Pick<DriverBridge, "strengths">,
  tables: string[] | undefined,
): void {
  if (!strengths.includes(strength))
    throw new UnsupportedError(
      `tx.rows(query): TypeORM has no words for "${strength}" on ${type}, only for ${strengths.join(" and ")}`,
    );
  // It would leave the word out, and wait.
  if (type === "mariadb" && strength === "share" && wait !== "bounded")
    throw new UnsupportedError(
      `tx.rows(query): TypeORM cannot say "${wait}" of a shared lock on MariaDB. Name a table: tx.rows("account", [1, 2], { for: "share", wait: "${wait}" }).`,
    );
  copy.setLock(modes[strength], undefined, tables).setOnLocked(onLocked[wait]);
}

/** A TypeORM DataSource on PostgreSQL, MySQL, MariaDB or SQLite. `tx.client` is the EntityManager of the transaction. */
export function fromTypeorm<Client extends TypeormDataSource>(
  dataSource: Client,
): Database<ManagerOf<Client>, SqlConnection> {
  if (
    typeof dataSource !== "object" ||
    dataSource === null ||
    typeof dataSource.createQueryRunner !== "function"
  )
    throw new UsageError("fromTypeorm(dataSource): this is not a DataSource of TypeORM");
  const { type } = dataSource.options;
  if (type === "better-sqlite3") return onSqlite(dataSource);
  const reached = Object.hasOwn(reaches, type) ? reaches[type] : undefined;
  if (!reached)
    throw new UnsupportedError(
      `fromTypeorm: Holdfast reaches ${Object.keys(reaches).join(", ")} and better-sqlite3 through TypeORM, not ${type}`,
    );
  const reach = reached(dataSource);
  const { listen } = reach;
  return {
    engine: reach.engine,
    traits: {
      client: "typeorm",
      cancel: true,
      listen: listen !== undefined,
      embedded: false,
      single: false,
      pinned: true,
      begins: true,
    },
    // Only sessions are pinned, and nothing of theirs is handed to a body.
    connect: (purpose) => reach.connect(purpose) as Promise<Pinned<never, SqlConnection>>,
    async transaction({ isolation, isolationIsDefault, readOnly, signal, taken }, body) {
      reach.listenToClients?.();
      const runner = dataSource.createQueryRunner("master") as Runner;
      const raw = await unlessAborted(runner.connect(), signal, () => void runner.release());
      taken(() => reach.end(raw));
      const connection = reach.connection(raw);
      const seen = view(raw, reach.view);
      // What the manager sends goes through the runner, and by way of this.
      runner.databaseConnection = seen.proxy;
      // Said only where it would not be so anyway: TypeORM spends a round trip on it, and the engine verifies it.
      const free = dataSource.options.isolationLevel === undefined;
      const begin = free ? reach.withhold?.(raw) : undefined;
      const unsaid = begin !== undefined || (isolationIsDefault && reach.verified && free);
      let clean = false;
      try {
        const start = async () => {
          await reach.prepare?.(connection, readOnly);
          await runner.startTransaction(unsaid ? undefined : isolation.toUpperCase());
        };
        await unlessAborted(start(), signal, () => {}).finally(() => begin?.end());
        await body({
          connection,
          native: runner.manager,
          begun: !begin?.withheld,
          seal: seen.seal,
        });
        await commit(runner);
        clean = true;
      } catch (error) {
        clean = await undo(runner, connection);
        throw error;
      } finally {
        runner.databaseConnection = raw;
        await (clean ? runner.release() : reach.drop(runner, raw));
        seen.revoke();
      }
    },
    join(native) {
      const { isReleased: gone, databaseConnection } = runnerOf(native, dataSource);
      // Whether BEGIN was sent is asked of the server: it may have been sent by hand.
      if (gone || !databaseConnection)
        throw new NotInTransactionError(
          gone
            ? "its QueryRunner has been released"
            : "its QueryRunner is not connected; begin a transaction on it first",
        );
      return reach.connection(databaseConnection);
    },
    ...(listen && { listen }),
    room: () => reach.room(),
    openings: (opening) => openings(dataSource, opening),
    observe(seen) {
      const ends = ["obtainMasterConnection", "obtainSlaveConnection"].map((name) =>
        observeMethod(dataSource.driver, name, seen),
      );
      return () => ends.forEach((end) => end());
    },
    locking: (native, query, lock) =>
      locking(dataSource, runnerOf(native, dataSource), query, { ...lock, strengths: reach.strengths }),
    unwrap: reach.unwrap,
  };
}

async function commit(runner: Runner): Promise<void> {
  if (!runner.isTransactionActive)
    throw new UsageError(
      "The body has ended the transaction by itself; Holdfast commits when the body returns",
    );
  try {
    await runner.commitTransaction();
  } catch (error) {
    if (runner.isTransactionActive) throw error;
    // Not to be retried, whatever it is.
    throw new UsageError(
      `Committed, but a subscriber failed after that: ${message(error)}`,
      "HF_USAGE",
      error,
    );
  }
  if (runner.isTransactionActive)
    throw new UsageError("The body has left a transaction open inside of this one, so nothing was committed");
}
