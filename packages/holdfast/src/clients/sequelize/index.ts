import { AsyncLocalStorage } from "node:async_hooks";
import type {
  ClientTransaction,
  Database,
  DriverError,
  Engine,
  Isolation,
  QueryLock,
  SqlConnection,
} from "../../seam/database.ts";
import {
  NoConnectionError,
  NotInTransactionError,
  TransactionAbortedError,
  UnsupportedError,
  UsageError,
} from "../../seam/errors.ts";
import { observeHandles, observeMethod, observeOpenings } from "../observe.ts";
import { unlessAborted } from "../../waiting/turns.ts";
import { sql } from "../../seam/sql.ts";
import { type ViewOptions, view } from "../../context/revocable.ts";
import { endMysql2, mysql2View, mysql2Connection, unwrapMysql2 } from "../mysql2/connection.ts";
import {
  endPg,
  pgView,
  type PgClient,
  type PgFactory,
  heardFromBirth,
  listenPg,
  pgConnection,
  unwrapPg,
  withholdBegin,
} from "../pg/connection.ts";
import { killer } from "../../engines/mysql/client.ts";
import { mysql } from "../../engines/mysql/index.ts";
import { postgres } from "../../engines/postgres/index.ts";

/** The part of a Sequelize instance that is used here. */
export interface SequelizeLike {
  readonly connectionManager: object;
  transaction: (...args: never[]) => unknown;
  getDialect(): string;
}

/** What `sequelize.transaction(async (t) => …)` hands to its callback. */
export type TransactionOf<Client extends SequelizeLike> = Client["transaction"] extends (
  options?: never,
) => Promise<infer Tx>
  ? Tx
  : never;

/** A connection of the driver, as Sequelize's pool keeps it. */
type RawConnection = object;

type RawPg = PgClient & { end(): Promise<void> };

interface RawMysql {
  promise(): { query(text: string): Promise<unknown> };
  readonly stream: { destroy(error: Error): void };
}

interface Pool {
  readonly maxSize?: number;
  readonly size?: number;
  readonly available?: number;
  /** With replication there are two. */
  readonly write?: Pool;
}

interface Settings {
  readonly username?: string;
  readonly password?: string;
  readonly host?: string;
  readonly port?: number;
  readonly database?: string;
  readonly native?: boolean;
  readonly dialectOptions?: object;
  readonly pool?: { readonly acquire?: number };
  readonly replication?: { readonly write?: Settings } | false;
}

interface ConnectionManager {
  readonly pool: Pool;
  readonly config: Settings;
  lib?: { readonly Client?: PgFactory["Client"] };
  getConnection(options: { useMaster: boolean }): Promise<RawConnection>;
  releaseConnection(connection: RawConnection): void;
  destroyConnection(connection: RawConnection): Promise<void>;
  /** One that is not of the pool. */
  _connect(settings: Settings): Promise<RawConnection>;
  _disconnect(connection: RawConnection): Promise<unknown>;
}

interface SequelizeTransaction {
  connection?: RawConnection;
  readonly finished?: string;
  readonly parent?: SequelizeTransaction;
  _afterCommitHooks?: ((t: unknown) => unknown)[];
  /** Gives the connection back. */
  cleanup?(): void;
  /** Drops it. */
  forceCleanup?(): Promise<void>;
}

const levels: Readonly<Record<Isolation, string>> = {
  "read uncommitted": "READ UNCOMMITTED",
  "read committed": "READ COMMITTED",
  "repeatable read": "REPEATABLE READ",
  serializable: "SERIALIZABLE",
};

interface SequelizeError {
  readonly name?: string;
  /** The driver's error. */
  readonly parent?: unknown;
  readonly original?: unknown;
  /** Of bulkCreate: one for each record. */
  readonly errors?: unknown;
}

type Unwrap = (error: unknown) => DriverError | undefined;

function unwrapping(driver: Unwrap): Unwrap {
  const unwrap: Unwrap = (error) => {
    if (!(error instanceof Error)) return undefined;
    const { name, parent, original = parent, errors } = error as SequelizeError;
    if (original instanceof Error) {
      if ("code" in original) return original as DriverError;
      return name === "SequelizeConnectionTimedOutError"
        ? { lost: true, message: original.message }
        : driver(original);
    }
    if (name === "AggregateError" && Array.isArray(errors)) {
      for (const each of errors) {
        const found = unwrap((each as SequelizeError | null)?.errors ?? each);
        if (found) return found;
      }
    }
    return driver(error);
  };
  return unwrap;
}

const unwrapPostgres = unwrapping(unwrapPg);
const unwrapMysql = unwrapping(unwrapMysql2);

/** What differs between the dialects. */
interface DriverBridge {
  readonly engine: Engine<SqlConnection>;
  readonly unwrap: Unwrap;
  connectionOf(raw: RawConnection): SqlConnection;
  /** Ends the session at once, and what waits for an answer on it. */
  end(raw: RawConnection): void;
  /** What is sent on it once the body has ended. */
  readonly view: ViewOptions;
  /** Keeps the next BEGIN from being sent, where the engine's own comes with the locks. */
  withhold?(raw: RawConnection): { readonly withheld: boolean; end(): void };
  /** After BEGIN. */
  prepare?(connection: SqlConnection, options: ClientTransaction): Promise<void>;
  /** After the end, before others get the connection. */
  restore?(connection: SqlConnection): Promise<void>;
  readonly listen?: NonNullable<Database["listen"]>;
  /** Why what findAll finds cannot be locked in this way. */
  refuses(lock: QueryLock & { readonly of: unknown }): string | undefined;
}

function onPostgres(manager: ConnectionManager): DriverBridge {
  if (manager.config.native)
    throw new UnsupportedError(
      "fromSequelize: `native: true` is not reached; leave it out, so that it is pg",
    );
  listenFromBirth(manager);
  const factory = factoryOf(manager);
  return {
    engine: postgres,
    unwrap: unwrapPostgres,
    connectionOf: (raw) => ({ ...pgConnection(raw as RawPg, factory?.options), unwrap: unwrapPostgres }),
    end: (raw) => endPg(raw as RawPg),
    view: pgView,
    withhold: (raw) => withholdBegin(raw as RawPg),
    ...(factory && {
      listen: (channel, wake, signal) => listenPg(factory, channel, wake, signal),
    }),
    refuses: ({ wait }) =>
      wait === "nowait" ? 'Sequelize cannot say NOWAIT; use `wait: 1`, or "skip"' : undefined,
  };
}

const listening = new WeakSet<object>();

/** Sequelize makes clients itself, and listens to their errors only some turns after they have connected. */
function listenFromBirth(manager: ConnectionManager): void {
  const { lib } = manager;
  if (!lib?.Client || listening.has(lib)) return;
  manager.lib = Object.create(lib, { Client: { value: heardFromBirth(lib.Client) } }) as typeof lib;
  listening.add(manager.lib);
}

function onMysql(manager: ConnectionManager): DriverBridge {
  // Not of the pool: all of its connections may be taken by those who wait.
  const kill = killer({
    async getConnection() {
      const raw = await manager._connect(settingsOf(manager));
      return {
        query: (text) => (raw as RawMysql).promise().query(text),
        release: () => manager._disconnect(raw),
      };
    },
  });
  return {
    engine: mysql,
    unwrap: unwrapMysql,
    connectionOf: (raw) => ({ ...mysql2Connection(raw, kill), unwrap: unwrapMysql }),
    end: endMysql2,
    view: mysql2View,
    async prepare(connection, { isolation, readOnly }) {
      if (readOnly) {
        // It can be said only before, and Sequelize does not: so this is another transaction than the one it began.
        await connection.query(sql.raw("COMMIT"));
        await connection.query(sql.raw(`SET TRANSACTION ISOLATION LEVEL ${levels[isolation]}, READ ONLY`));
        await connection.query(sql.raw("START TRANSACTION"));
      }
      // After a deadlock the server has ended the transaction. If the body swallows that error, what it sends next
      // would be kept, statement by statement.
      await connection.query(sql.raw("SET @holdfast_autocommit = @@autocommit, autocommit = 0"));
    },
    async restore(connection) {
      await connection.query(sql.raw("SET autocommit = COALESCE(@holdfast_autocommit, @@autocommit)"));
    },
    refuses({ wait, of }) {
      if (of) return "Sequelize cannot lock one side of a join here";
      return wait === "bounded"
        ? undefined
        : `Sequelize cannot say "${wait}" here. Name a table: tx.rows("account", [1, 2], { wait: "${wait}" })`;
    },
  };
}

const reaches: Readonly<Record<string, (manager: ConnectionManager) => DriverBridge>> = {
  postgres: onPostgres,
  mysql: onMysql,
};

function isPoolTimeout(error: unknown): boolean {
  return (error as Error | null)?.name === "SequelizeConnectionAcquireTimeoutError";
}

/** A Sequelize instance on PostgreSQL, MySQL or MariaDB. `tx.client` is Sequelize's own Transaction: `{ transaction: tx.client }`. */
export function fromSequelize<Client extends SequelizeLike>(
  sequelize: Client,
): Database<TransactionOf<Client>, SqlConnection> {
  if (
    typeof sequelize !== "object" ||
    sequelize === null ||
    typeof sequelize.getDialect !== "function" ||
    typeof sequelize.transaction !== "function"
  )
    throw new UsageError("fromSequelize(sequelize): this is not an instance of Sequelize");
  const { version } = sequelize.constructor as { version?: unknown };
  if (typeof version === "string" && Number.parseInt(version, 10) < 6)
    throw new UnsupportedError(`fromSequelize: Holdfast needs Sequelize 6 or newer, and this is ${version}`);
  const dialect = sequelize.getDialect();
  const manager = sequelize.connectionManager as ConnectionManager;
  const reach = reaches[dialect]?.(manager);
  if (!reach)
    throw new UnsupportedError(
      dialect === "mariadb"
        ? 'fromSequelize: MariaDB is reached through the dialect "mysql", with the package mysql2'
        : `fromSequelize: Holdfast reaches PostgreSQL, MySQL and MariaDB through Sequelize, not yet "${dialect}"`,
    );
  const { engine, connectionOf, unwrap, listen } = reach;
  revealTaken(manager);

  const noConnection = (error: unknown) =>
    isPoolTimeout(error) ? new NoConnectionError(manager.config.pool?.acquire ?? 0, error) : error;

  return {
    engine,
    traits: {
      client: "sequelize",
      cancel: true,
      listen: listen !== undefined,
      embedded: false,
      single: false,
      pinned: true,
      begins: true,
    },
    async connect({ signal }) {
      const waiting = manager.getConnection({ useMaster: true });
      const raw = await unlessAborted(waiting, signal, (late) => manager.releaseConnection(late)).catch(
        (error: unknown) => {
          throw noConnection(error);
        },
      );
      return {
        connection: connectionOf(raw),
        // Only sessions are pinned, and nothing of theirs is handed to a body.
        native: undefined as never,
        release(broken) {
          // Not waited for: a silent network would not tell when it has ended.
          if (broken) manager.destroyConnection(raw).catch(() => {});
          else manager.releaseConnection(raw);
        },
      };
    },
    async transaction(options, body) {
      const { isolation, isolationIsDefault, signal } = options;
      let after: (() => Promise<void>) | undefined;
      let restored: Promise<void> | undefined;
      let begun = false;
      const taking: Taking = {
        withhold: reach.withhold,
        taken: (raw) => options.taken(() => reach.end(raw)),
      };
      let begin!: () => void;
      const beginning = new Promise<void>((resolve) => (begin = resolve));
      const run = async (t: SequelizeTransaction) => {
        // Nobody waits for it any more.
        signal?.throwIfAborted();
        begun = true;
        begin();
        const raw = t.connection as RawConnection;
        const connection = connectionOf(raw);
        const seen = view(raw, reach.view);
        const { restore } = reach;
        beforeCleanup(t, raw, restore && (() => (restored = restore(connection))));
        t.connection = seen.proxy;
        await reach.prepare?.(connection, options);
        const own = whileOpen(t, connection, () => endedItself(t, engine));
        await body({
          connection: own,
          native: t as never,
          begun: !taking.withholding?.withheld,
          seal: seen.seal,
        });
        if (t.finished !== undefined) throw endedItself(t, engine);
        after = takeHooks(t);
      };
      // Said only where it is not the server's default: it is a round trip, and the engine verifies it.
      const unsaid = isolationIsDefault || reach.withhold !== undefined;
      const level = { isolationLevel: unsaid ? undefined : levels[isolation] };
      const open = sequelize.transaction.bind(sequelize) as (...args: unknown[]) => Promise<never>;
      const running = takings.run(taking, () => open(level, run));
      running.catch(() => {});
      try {
        await unlessAborted(Promise.race([beginning, running]), signal, () => {});
        await running;
        await after?.();
      } catch (error) {
        throw begun ? error : noConnection(error);
      } finally {
        taking.withholding?.end();
        await restored?.catch(() => {});
      }
    },
    forget: (native) => void (native as SequelizeTransaction)._afterCommitHooks?.splice(0),
    join(native) {
      const t = native as (SequelizeTransaction & Partial<SequelizeLike>) | null;
      if (typeof t !== "object" || t === null)
        throw new NotInTransactionError("this is no transaction of Sequelize");
      if (typeof t.getDialect === "function")
        throw new NotInTransactionError(
          "this is the Sequelize instance itself; pass the `t` that sequelize.transaction(async (t) => …) hands to its callback",
        );
      if (!t.connection) throw new NotInTransactionError("this is no transaction of Sequelize");
      const ended = () => new NotInTransactionError("this transaction of Sequelize has ended");
      return whileOpen(t, connectionOf(t.connection), ended);
    },
    ...(listen && { listen }),
    room() {
      const { maxSize, size, available } = manager.pool.write ?? manager.pool;
      if (maxSize === undefined || size === undefined || available === undefined) return undefined;
      return { max: maxSize, out: size - available };
    },
    observe: (seen) => observeMethod(manager, "getConnection", seen),
    openings(opening) {
      const ends = [
        observeOpenings(sequelize, "transaction", opening),
        observeHandles(
          sequelize,
          "transaction",
          opening,
          ({ finished }: SequelizeTransaction) => finished === undefined,
        ),
      ];
      return () => ends.forEach((end) => end());
    },
    locking: (native, query, lock) => locking(native, query, lock, reach),
    unwrap,
  };
}

/** A transaction of ours that is about to take its connection. */
interface Taking {
  withhold: DriverBridge["withhold"];
  /** Told of it, once. */
  taken: ((raw: RawConnection) => void) | undefined;
  withholding?: ReturnType<NonNullable<DriverBridge["withhold"]>>;
}

const takings = new AsyncLocalStorage<Taking>();
const revealed = new WeakSet<ConnectionManager>();

/** Sequelize sends BEGIN as soon as it has a connection: what it gets is seen before that. */
function revealTaken(manager: ConnectionManager): void {
  if (revealed.has(manager)) return;
  revealed.add(manager);
  const get = manager.getConnection.bind(manager);
  manager.getConnection = async (options) => {
    const taking = takings.getStore();
    const raw = await get(options);
    const { withhold, taken } = taking ?? {};
    if (taking && taken) {
      // The body's own come later, in the same context.
      taking.taken = undefined;
      taken(raw);
      if (withhold) taking.withholding = withhold(raw);
    }
    return raw;
  };
}

function endedItself({ finished }: SequelizeTransaction, engine: Engine<SqlConnection>): Error {
  // Sequelize rolls back by itself after a deadlock on MySQL.
  return engine === mysql && finished === "rollback"
    ? new TransactionAbortedError(
        undefined,
        "The transaction was rolled back before its body ended: by t.rollback(), or after a deadlock whose error was swallowed.",
      )
    : new UsageError(
        "The body has ended the transaction by t.commit() or t.rollback(). It ends when the body does: return to commit, throw to roll back.",
      );
}

/** Sequelize gives the connection back by itself, as soon as COMMIT or ROLLBACK is answered. */
function beforeCleanup(
  t: SequelizeTransaction,
  raw: RawConnection,
  restore: (() => Promise<void>) | undefined,
): void {
  const { cleanup, forceCleanup } = t;
  // The pool knows the connection itself only.
  t.forceCleanup = async () => {
    t.connection = raw;
    await forceCleanup?.call(t);
  };
  t.cleanup = () => {
    t.connection = raw;
    if (!restore) return cleanup?.call(t);
    restore()
      .then(() => cleanup?.call(t))
      .catch(() => t.forceCleanup?.())
      .catch(() => {});
  };
}

/** Sequelize would run them after a COMMIT that failed, too; and what they throw would look like an error of COMMIT. */
function takeHooks(t: SequelizeTransaction): () => Promise<void> {
  const hooks = t._afterCommitHooks?.splice(0) ?? [];
  return async () => {
    try {
      for (const hook of hooks) await hook.call(t, t);
    } catch (error) {
      throw new UsageError(
        "The transaction is committed, but a hook of t.afterCommit(…) has failed",
        "HF_USAGE",
        error,
      );
    }
  };
}

/** Of the server that is written to. */
function settingsOf({ config }: ConnectionManager): Settings {
  return (config.replication && config.replication.write) || config;
}

/** What clients of pg are made with. */
function factoryOf(manager: ConnectionManager): PgFactory | undefined {
  const { Client } = manager.lib ?? {};
  if (!Client) return undefined;
  const { username: user, password, host, port, database, dialectOptions } = settingsOf(manager);
  return { Client, options: { user, password, host, port, database, ...dialectOptions } };
}

/** Once the transaction has ended, its connection may be somebody else's. */
function whileOpen(t: SequelizeTransaction, connection: SqlConnection, ended: () => Error): SqlConnection {
  const assertOpen = () => {
    for (let each: SequelizeTransaction | undefined = t; each; each = each.parent)
      if (each.finished !== undefined) throw ended();
  };
  const { script } = connection;
  return {
    ...connection,
    async query(...args) {
      assertOpen();
      return connection.query(...args);
    },
    ...(script && {
      async script(text: string) {
        assertOpen();
        return script(text);
      },
    }),
  };
}

/** A model of Sequelize. */
export interface ModelLike<Instance> {
  new (...args: never[]): Instance;
  findAll: (...args: never[]) => unknown;
}

/** What a model's `findAll` takes. */
export type FindOptionsOf<Model extends ModelLike<unknown>> = Parameters<Model["findAll"]>[0];

class Find<Instance> {
  readonly #model: ModelLike<Instance>;
  readonly #options: FindOptions;

  constructor(model: ModelLike<Instance>, options: FindOptions) {
    this.#model = model;
    this.#options = options;
  }

  execute(): Promise<Instance[]> {
    return this.#model.findAll(this.#options as never) as Promise<Instance[]>;
  }

  locked(transaction: unknown, { strength, wait }: QueryLock, { refuses }: DriverBridge): Find<Instance> {
    const { lock, transaction: own, skipLocked } = this.#options;
    const { of } = (lock ?? {}) as { of?: unknown };
    if (own !== undefined && own !== transaction)
      throw new UsageError("tx.rows(findAll(…)): its `transaction` is another one; leave it out");
    if (skipLocked !== undefined)
      throw new UsageError("tx.rows(query, { wait }) says how to wait: leave out `skipLocked`");
    const refusal = refuses({ strength, wait, of });
    if (refusal !== undefined) throw new UnsupportedError(`tx.rows(findAll(…)): ${refusal}`);
    return new Find(this.#model, {
      ...this.#options,
      transaction,
      lock: { level: strength.toUpperCase(), of },
      skipLocked: wait === "skip",
    });
  }
}

interface FindOptions {
  readonly transaction?: unknown;
  readonly lock?: unknown;
  readonly skipLocked?: unknown;
}

/**
 * What `model.findAll(options)` would find, to be locked: `tx.rows(findAll(Job, { limit: 10 }), { wait: "skip" })`.
 * Sequelize has no queries that are not yet sent, so this stands for one.
 */
export function findAll<Model extends ModelLike<unknown>>(
  model: Model,
  options?: FindOptionsOf<Model>,
): { execute(): Promise<InstanceType<Model>[]> } {
  if (typeof (model as unknown) !== "function" || typeof model.findAll !== "function")
    throw new UsageError("findAll(model): this is no model of Sequelize");
  return new Find(model as ModelLike<InstanceType<Model>>, options ?? {});
}

function locking(
  native: unknown,
  query: unknown,
  lock: QueryLock,
  reach: DriverBridge,
): (() => PromiseLike<unknown>) | undefined {
  if (!(query instanceof Find)) return undefined;
  const locked = query.locked(native, lock, reach);
  return () => locked.execute();
}
