import { AsyncLocalStorage } from "node:async_hooks";
import type {
  Database,
  DriverError,
  Opening,
  Pinned,
  Purpose,
  QueryLock,
  Room,
  Seen,
  SqlConnection,
} from "../../seam/database.ts";
import {
  HoldfastError,
  NotInTransactionError,
  UnsupportedError,
  UsageError,
  message,
} from "../../seam/errors.ts";
import { graceMs } from "../../waiting/interrupt.ts";
import { observeHandles, observeMethod, observeOpenings } from "../observe.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { HeldConnection, holding, rawOf, revealRaws } from "../kysely/raw.ts";
import {
  type KyselyLike,
  isGoingOn,
  isSqlite,
  kyselyConnection,
  kyselyDialect,
} from "../kysely/connection.ts";
import { sendThrough } from "../kysely/sqlite.ts";
import { forkOf, pinMikroOrm, transactionOfMikroOrm } from "./sqlite.ts";
import {
  type Mysql2Pool,
  type Mysql2PoolConnection,
  checkOutMysql2,
  dropMysql2,
  mysql2Connection,
  roomOfMysql2,
  unwrapMysql2,
} from "../mysql2/connection.ts";
import {
  type PgFactory,
  type PgPool,
  type PgPooled,
  checkOutPg,
  listenPg,
  listenToClients,
  pgConnection,
  roomOfPg,
  unwrapPg,
  withholdBegin,
} from "../pg/connection.ts";
import { joinLent, lentRoom, lentTraits, unwrapSqlite } from "../sqlite-lent.ts";
import { type Kill, killer } from "../../engines/mysql/client.ts";
import { mysql } from "../../engines/mysql/index.ts";
import { postgres } from "../../engines/postgres/index.ts";
import { sqlite } from "../../engines/sqlite/index.ts";

/** The part of a MikroORM instance that is used here. */
export interface MikroOrmLike {
  em: object & { fork: (...args: never[]) => unknown; getTransactionContext: (...args: never[]) => unknown };
}

/** What `em.transactional(async (em) => …)` hands to its callback. */
export type ManagerOf<Client extends MikroOrmLike> = Client["em"];

interface Manager {
  fork(options?: { disableContextResolution: boolean }): Manager;
  flush(): Promise<void>;
  clear(): void;
  getDriver(): object;
  getPlatform(): Platform;
  getConnection(type: "write"): OrmConnection;
  getTransactionContext(): Trx | undefined;
  transactional<T>(
    body: (em: Manager) => Promise<T>,
    options: { isolationLevel?: string; readOnly?: boolean },
  ): Promise<T>;
}

interface Platform {
  supportsRowLevelSecurity?(): boolean;
  getDefaultCharset?(): string;
  getExceptionConverter(): Converter;
}

interface Converter {
  convertException(error: Error): Error;
}

interface OrmConnection {
  getClient(): KyselyLike;
  ensureConnection(): Promise<void>;
  /** The driver's own pool. */
  getNativeClient(): Promise<object>;
}

/** MikroORM begins and ends it by hand. */
interface Trx extends KyselyLike {
  readonly isCommitted: boolean;
  readonly isRolledBack: boolean;
}

/** What differs between the servers that MikroORM has drivers for. */
interface DriverBridge {
  readonly engine: Database<unknown, SqlConnection>["engine"];
  /** Whether the engine looks what isolation a transaction has that goes without saying. */
  readonly verified: boolean;
  /** The method by which the pool gives out connections. */
  readonly method: "connect" | "getConnection";
  connection(raw: object, pool: object): SqlConnection;
  /** From the moment at which the pool gives one out. */
  listenToClients?(pool: object): void;
  /** Keeps the next BEGIN from being sent, where the engine's own comes with the locks. */
  withhold?(raw: object): { readonly withheld: boolean; end(): void };
  connect(pool: object, purpose: Purpose): Promise<Pinned<unknown, SqlConnection>>;
  /** Takes a connection out of the pool for good. */
  drop(raw: object): void;
  room(pool: object): Room | undefined;
  listen?(pool: object, ...args: Parameters<NonNullable<Database["listen"]>>): Promise<void>;
  unwrap(error: unknown): DriverError | undefined;
}

const onPostgres: DriverBridge = {
  engine: postgres,
  verified: true,
  method: "connect",
  connection: (raw, pool) => pgConnection(raw as PgPooled, (pool as PgFactory).options),
  listenToClients: (pool) => listenToClients(pool as PgPool),
  withhold: (raw) => withholdBegin(raw as PgPooled),
  connect: (pool, purpose) => checkOutPg(pool as PgPool, (pool as PgFactory).options, purpose),
  drop: (raw) => (raw as PgPooled).release(true),
  room: (pool) => roomOfPg(pool as PgPool),
  listen: (pool, ...args) => listenPg(pool as PgFactory, ...args),
  unwrap: unwrapPg,
};

type Raw = Mysql2PoolConnection & { destroy(): void };
type CallbackPool = object & { promise(): Mysql2Pool };

function onMysql(): DriverBridge {
  const kills = new WeakMap<object, Kill>();
  const killOf = (pool: object) => {
    const known = kills.get(pool);
    if (known) return known;
    const kill = killer((pool as CallbackPool).promise());
    kills.set(pool, kill);
    return kill;
  };
  return {
    engine: mysql,
    verified: false,
    method: "getConnection",
    connection: (raw, pool) => mysql2Connection(raw, killOf(pool)),
    connect: (pool, purpose) => checkOutMysql2((pool as CallbackPool).promise(), killOf(pool), purpose),
    drop: (raw) => dropMysql2(raw as Raw),
    room: roomOfMysql2,
    unwrap: unwrapMysql2,
  };
}

/** By what only they can do, or have: names of classes may be others in a bundle. */
function reachOf(platform: Platform): DriverBridge {
  if (platform.supportsRowLevelSecurity?.()) return onPostgres;
  if (platform.getDefaultCharset?.() === "utf8mb4") return onMysql();
  throw new UnsupportedError(
    "fromMikroOrm: Holdfast reaches PostgreSQL, MySQL, MariaDB and SQLite through MikroORM 7 or newer",
  );
}

const modes: Readonly<Partial<Record<QueryLock["strength"], Record<QueryLock["wait"], number>>>> = {
  // Values of the enumeration LockMode.
  update: { bounded: 3, skip: 4, nowait: 5 },
  share: { bounded: 2, skip: 6, nowait: 7 },
};

interface SelectQuery {
  readonly type: string;
  readonly driver: unknown;
  readonly state: { readonly lockTables?: readonly string[] };
  clone(): SelectQuery;
  cache(config: boolean): SelectQuery;
  setLockMode(mode: number, tables?: string[]): SelectQuery;
  getResultList(): Promise<unknown[]>;
}

/** `lock`: undefined where everything that a transaction reads is locked. */
function locking(
  em: Manager,
  query: unknown,
  lock: QueryLock | undefined,
): (() => Promise<unknown>) | undefined {
  const { getResultList, setLockMode, type, driver } = (query ?? {}) as Partial<SelectQuery>;
  if (typeof getResultList !== "function" || typeof setLockMode !== "function") return undefined;
  if (type !== "SELECT") throw new UsageError("tx.rows(query): only a SELECT can lock what it finds");
  if (driver !== em.getDriver())
    throw new UsageError("tx.rows(query): this query belongs to another MikroORM");
  const mode = lock && modeOf(lock);
  const select = query as SelectQuery;
  // One that was made outside is of another EntityManager, and in no transaction.
  const copy = Object.assign(select.clone(), { em, context: em.getTransactionContext() });
  const { lockTables } = select.state;
  // What is answered from a cache locks nothing.
  copy.cache(false);
  if (mode !== undefined) copy.setLockMode(mode, lockTables && [...lockTables]);
  return () => copy.getResultList();
}

function modeOf({ strength, wait }: QueryLock): number {
  const mode = modes[strength]?.[wait];
  if (mode !== undefined) return mode;
  throw new UnsupportedError(
    `tx.rows(query): MikroORM's builder has no words for "${strength}". Use "update" or "share", or name a table: tx.rows("account", [1, 2], { for: "${strength}" }).`,
  );
}

function contextOf(native: unknown, root: Manager): Trx {
  const em = native as Partial<Manager> | null;
  if (typeof em?.getTransactionContext !== "function" || typeof em.getDriver !== "function")
    throw new NotInTransactionError("this is no EntityManager of MikroORM");
  if (em.getDriver() !== root.getDriver())
    throw new NotInTransactionError("this EntityManager belongs to another MikroORM");
  const trx = em.getTransactionContext();
  if (!trx || trx.isCommitted || trx.isRolledBack)
    throw new NotInTransactionError(
      trx
        ? "the transaction of this EntityManager has ended"
        : "this EntityManager is in no transaction; pass the one that em.transactional(async (em) => …) hands to its callback",
    );
  return trx;
}

/** Those with pools are known by their platform, and not all of them have a client before they are connected. */
function isOnSqlite(root: Manager): boolean {
  const platform = root.getPlatform();
  if (platform.supportsRowLevelSecurity?.() || platform.getDefaultCharset?.() === "utf8mb4") return false;
  try {
    return isSqlite(root.getConnection("write").getClient());
  } catch {
    return false;
  }
}

function onSqlite<Native>(root: Manager): Database<Native, SqlConnection> {
  const watching = new Set<Seen>();
  let known: KyselyLike | undefined;
  const connected = async () => {
    const connection = root.getConnection("write");
    await connection.ensureConnection();
    const client = connection.getClient();
    if (client !== known) observeKysely(client, watching);
    known = client;
    return { connection, client };
  };
  return {
    engine: sqlite,
    traits: { client: "mikro-orm", ...lentTraits, begins: true },
    async connect(purpose) {
      const { connection, client } = await connected();
      return pinMikroOrm(connection, client, unwrapSqlite, purpose) as Promise<never>;
    },
    async transaction(options, body) {
      const { connection } = await connected();
      return transactionOfMikroOrm(connection, root, unwrapSqlite, options, (own, em) =>
        body({ connection: own, native: em as Native }),
      );
    },
    flush: (native) => (native as unknown as Manager).flush(),
    join: (native) => joinLent(sendThrough(contextOf(native, root)), unwrapSqlite),
    room: () => lentRoom,
    observe: (seen) => observing(root, watching, seen),
    openings: (opening) => openings(root.getConnection("write"), opening),
    locking: (native, query) => locking(native as unknown as Manager, query, undefined),
    unwrap: unwrapSqlite,
  };
}

function observing(root: Manager, watching: Set<Seen>, seen: Seen): () => void {
  const end = observe(root.getConnection("write"), seen);
  watching.add(seen);
  return () => {
    end();
    watching.delete(seen);
  };
}

/** A MikroORM instance on PostgreSQL, MySQL, MariaDB or SQLite. `tx.client` is the EntityManager of the transaction. */
export function fromMikroOrm<Client extends MikroOrmLike>(
  orm: Client,
): Database<ManagerOf<Client>, SqlConnection> {
  const root = (orm as { em?: unknown } | null)?.em as Manager | undefined;
  if (typeof root?.transactional !== "function" || typeof root.fork !== "function")
    throw new UsageError("fromMikroOrm(orm): this is not an instance of MikroORM");
  spareOurs(root.getPlatform().getExceptionConverter());
  if (isOnSqlite(root)) return onSqlite(root);
  const reach = reachOf(root.getPlatform());
  const watching = new Set<Seen>();
  let pool: object | undefined;
  const connected = async () => {
    const connection = root.getConnection("write");
    const now = await connection.getNativeClient();
    if (now === pool) return now;
    if (typeof (now as Record<string, unknown>)[reach.method] !== "function")
      throw new UnsupportedError(
        "fromMikroOrm: what MikroORM connects with here is no pool of pg or of mysql2",
      );
    const client = connection.getClient();
    reach.listenToClients?.(now);
    revealRaws(client, now, reach.method);
    observeKysely(client, watching);
    return (pool = now);
  };
  const { listen } = reach;
  return {
    engine: reach.engine,
    traits: {
      client: "mikro-orm",
      cancel: true,
      listen: listen !== undefined,
      embedded: false,
      single: false,
      pinned: true,
      begins: true,
    },
    // Only sessions are pinned, and nothing of theirs is handed to a body.
    connect: async (purpose) =>
      reach.connect(await connected(), purpose) as Promise<Pinned<never, SqlConnection>>,
    async transaction({ isolation, isolationIsDefault, readOnly, signal, taken }, body) {
      const from = await connected();
      const unsaid = isolationIsDefault && reach.verified;
      const held = new HeldConnection();
      let trx: Trx | undefined;
      let raw: object | undefined;
      let begin!: () => void;
      const begun = new Promise<void>((resolve) => (begin = resolve));
      // A fork for each attempt: what another one has read or changed must not be found in the identity map.
      const fork = forkOf(root);
      const { withhold } = reach;
      let withholding: ReturnType<NonNullable<typeof withhold>> | undefined;
      held.taken = (first) => {
        // A silent network would keep BEGIN, COMMIT or ROLLBACK waiting for ever: then it is taken away from them.
        taken(() => void (held.raws.delete(first) && reach.drop(first)));
        withholding = withhold?.(first);
      };
      const running = holding(held, () =>
        fork.transactional(
          async (em) => {
            begin();
            signal?.throwIfAborted();
            trx = em.getTransactionContext();
            if (!trx)
              throw new UsageError(
                "fromMikroOrm: transactions are disabled in the configuration of MikroORM",
              );
            raw = await rawOf(trx);
            held.closed = true;
            if (!raw)
              throw new UnsupportedError(
                "fromMikroOrm: this version of MikroORM takes its connections in a way that Holdfast does not know",
              );
            const connection = reach.connection(raw, from);
            withholding?.end();
            await body({
              connection,
              native: em,
              begun: !withholding?.withheld,
              seal: () => held.seen?.seal(),
            });
            if (trx.isCommitted || trx.isRolledBack)
              throw new UsageError(
                "The body has ended the transaction by itself; Holdfast commits when the body returns",
              );
          },
          // Said by the engine where it begins.
          withhold ? {} : { ...(!unsaid && { isolationLevel: isolation }), ...(readOnly && { readOnly }) },
        ),
      );
      try {
        // The pool cannot take a request back: what comes too late is rolled back at once.
        await unlessAborted(Promise.race([begun, running]), signal, () => {});
        return await running;
      } catch (error) {
        if (signal?.aborted && !trx) {
          // BEGIN may never be answered.
          const late = setTimeout(() => void free(reach, held), graceMs);
          void running.catch(() => free(reach, held)).finally(() => clearTimeout(late));
          throw error;
        }
        await free(reach, held);
        if (trx?.isCommitted)
          // Not to be retried, whatever it is.
          throw new UsageError(
            `Committed, but a subscriber failed after that: ${message(error)}`,
            "HF_USAGE",
            error,
          );
        throw error;
      } finally {
        withholding?.end();
      }
    },
    flush: (native) => (native as unknown as Manager).flush(),
    forget: (native) => (native as unknown as Manager).clear(),
    // Without a way to cancel: which of the pool's connections it is may not have been seen.
    join(native) {
      const trx = contextOf(native, root);
      return kyselyConnection(trx, kyselyDialect(trx, "fromMikroOrm"));
    },
    ...(listen && { listen: async (...args) => listen(await connected(), ...args) }),
    room: () => pool && reach.room(pool),
    observe: (seen) => observing(root, watching, seen),
    openings: (opening) => openings(root.getConnection("write"), opening),
    locking: (native, query, lock) => locking(native as unknown as Manager, query, lock),
    unwrap: reach.unwrap,
  };
}

function openings(connection: OrmConnection, opening: Opening): () => void {
  const ends = [
    observeOpenings(connection, "transactional", opening),
    // `em.begin()` calls it before it waits for anything.
    observeHandles(connection, "begin", opening, isGoingOn),
  ];
  return () => ends.forEach((end) => end());
}

/** Inside of a statement, or BEGIN, that MikroORM itself sends. */
const sending = new AsyncLocalStorage<true>();
const marked = new WeakSet<OrmConnection>();

/** Whether a call of a method of MikroORM's connection is for a connection of its own, not for one in a transaction. */
const takes = {
  execute: { counts: ([, , , trx]: readonly unknown[]) => trx === undefined },
  begin: { counts: ([options]: readonly unknown[]) => !(options as { ctx?: unknown } | undefined)?.ctx },
};

/** At MikroORM's own methods, where the stack still leads to the caller. */
function observe(connection: OrmConnection, seen: Seen): () => void {
  if (!marked.has(connection)) {
    marked.add(connection);
    for (const name of ["execute", "begin"] as const) {
      const methods = connection as unknown as Record<string, (...args: unknown[]) => unknown>;
      const send = methods[name]?.bind(connection);
      if (send) methods[name] = (...args) => sending.run(true, () => send(...args));
    }
  }
  const ends = [
    observeMethod(connection, "execute", seen, takes.execute),
    observeMethod(connection, "begin", seen, takes.begin),
  ];
  return () => ends.forEach((end) => end());
}

/** What is sent with its Kysely, and not by MikroORM itself. */
function observeKysely(client: KyselyLike, watching: ReadonlySet<Seen>): void {
  const tell: Seen = (...args) => watching.forEach((seen) => seen(...args));
  observeMethod(client.getExecutor(), "provideConnection", tell, { counts: () => !sending.getStore() });
}

const sparing = new WeakSet<Converter>();

/** MikroORM takes whatever is thrown on the way to the server for an error of the driver, and makes one of its own of it. */
function spareOurs(converter: Converter): void {
  if (sparing.has(converter)) return;
  sparing.add(converter);
  const convert = converter.convertException.bind(converter);
  converter.convertException = (error) => (error instanceof HoldfastError ? error : convert(error));
}

/** Kysely gives a connection back after COMMIT or ROLLBACK only: if BEGIN fails, or ROLLBACK does too, it stays out for ever. */
async function free(reach: DriverBridge, { raws }: HeldConnection): Promise<void> {
  // One that is on its way back arrives within the current turn.
  await new Promise((resolve) => setImmediate(resolve));
  for (const raw of raws) if (raws.delete(raw)) reach.drop(raw);
}
