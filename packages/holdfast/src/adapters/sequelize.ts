import type { Database, DriverError, Isolation, QueryLock, SqlConnection } from "../core/database.ts";
import { NoConnectionError, NotInTransactionError, UnsupportedError, UsageError } from "../core/errors.ts";
import { graceMs } from "../core/interrupt.ts";
import { observeMethod } from "../core/observe.ts";
import { unlessAborted } from "../core/queue.ts";
import { type PgClient, type PgFactory, listenPg, pgConnection, unwrapPg } from "../drivers/pg.ts";
import { postgres } from "../engines/postgres/index.ts";

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
type RawConnection = PgClient & { end(): Promise<void> };

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
  readonly lib?: { readonly Client?: PgFactory["Client"] };
  getConnection(options: { useMaster: boolean }): Promise<RawConnection>;
  releaseConnection(connection: RawConnection): void;
  destroyConnection(connection: RawConnection): Promise<void>;
}

interface SequelizeTransaction {
  readonly connection?: RawConnection;
  readonly finished?: string;
  readonly parent?: SequelizeTransaction;
  _afterCommitHooks?: ((t: unknown) => unknown)[];
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

function unwrap(error: unknown): DriverError | undefined {
  if (!(error instanceof Error)) return undefined;
  const { name, parent, original = parent, errors } = error as SequelizeError;
  if (original instanceof Error) {
    if ("code" in original) return original as DriverError;
    return name === "SequelizeConnectionTimedOutError"
      ? { lost: true, message: original.message }
      : unwrapPg(original);
  }
  if (name === "AggregateError" && Array.isArray(errors)) {
    for (const each of errors) {
      const found = unwrap((each as SequelizeError | null)?.errors ?? each);
      if (found) return found;
    }
  }
  return unwrapPg(error);
}

function isPoolTimeout(error: unknown): boolean {
  return (error as Error | null)?.name === "SequelizeConnectionAcquireTimeoutError";
}

/** A Sequelize instance on PostgreSQL. `tx.client` is Sequelize's own Transaction: `{ transaction: tx.client }`. */
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
  const dialect = sequelize.getDialect();
  if (dialect !== "postgres")
    throw new UnsupportedError(
      `fromSequelize: Holdfast reaches PostgreSQL through Sequelize, not yet "${dialect}"`,
    );
  const manager = sequelize.connectionManager as ConnectionManager;
  if (manager.config.native)
    throw new UnsupportedError(
      "fromSequelize: `native: true` is not reached; leave it out, so that it is pg",
    );
  const factory = factoryOf(manager);
  const connectionOf = (raw: PgClient) => ({ ...pgConnection(raw, factory?.options), unwrap });

  const noConnection = (error: unknown) =>
    isPoolTimeout(error) ? new NoConnectionError(manager.config.pool?.acquire ?? 0, error) : error;

  return {
    engine: postgres,
    traits: {
      client: "sequelize",
      cancel: true,
      listen: factory !== undefined,
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
    async transaction({ isolation, isolationIsDefault, signal, deadlineMs }, body) {
      let timer: NodeJS.Timeout | undefined;
      let after: (() => Promise<void>) | undefined;
      let begun = false;
      let begin!: () => void;
      const beginning = new Promise<void>((resolve) => (begin = resolve));
      const run = async (t: SequelizeTransaction) => {
        // Nobody waits for it any more.
        signal?.throwIfAborted();
        begun = true;
        begin();
        const raw = t.connection as RawConnection;
        // Sequelize waits for COMMIT and ROLLBACK as long as the network is silent.
        const endWithin = (ms: number) => (timer = setTimeout(() => void raw.end().catch(() => {}), ms));
        try {
          const value = await body(connectionOf(raw), t as never);
          if (t.finished !== undefined) throw endedItself();
          after = takeHooks(t);
          endWithin(deadlineMs + graceMs);
          return value;
        } catch (error) {
          endWithin(graceMs);
          throw error;
        }
      };
      // Said only where it is not the server's default: it is a round trip, and the engine verifies it.
      const options = { isolationLevel: isolationIsDefault ? undefined : levels[isolation] };
      const open = sequelize.transaction.bind(sequelize) as (...args: unknown[]) => Promise<never>;
      const running = open(options, run);
      running.catch(() => {});
      try {
        await unlessAborted(Promise.race([beginning, running]), signal, () => {});
        const value = await running;
        await after?.();
        return value;
      } catch (error) {
        throw begun ? error : noConnection(error);
      } finally {
        clearTimeout(timer);
      }
    },
    join(native) {
      const t = native as (SequelizeTransaction & Partial<SequelizeLike>) | null;
      if (typeof t !== "object" || t === null)
        throw new NotInTransactionError("this is no transaction of Sequelize");
      if (typeof t.getDialect === "function")
        throw new NotInTransactionError(
          "this is the Sequelize instance itself; pass the `t` that sequelize.transaction(async (t) => …) hands to its callback",
        );
      if (!t.connection) throw new NotInTransactionError("this is no transaction of Sequelize");
      return joined(t, connectionOf(t.connection));
    },
    ...(factory && {
      listen: (channel, wake, signal) => listenPg(factory, channel, wake, signal),
    }),
    room() {
      const { maxSize, size, available } = manager.pool.write ?? manager.pool;
      if (maxSize === undefined || size === undefined || available === undefined) return undefined;
      return { max: maxSize, out: size - available };
    },
    observe: (seen) => observeMethod(manager, "getConnection", seen),
    locking,
    unwrap,
  };
}

function endedItself(): UsageError {
  return new UsageError(
    "The body has ended the transaction by t.commit() or t.rollback(). It ends when the body does: return to commit, throw to roll back.",
  );
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

/** What clients are made with, on the server that is written to. */
function factoryOf({ lib, config }: ConnectionManager): PgFactory | undefined {
  if (!lib?.Client) return undefined;
  const { username, password, host, port, database, dialectOptions } =
    (config.replication && config.replication.write) || config;
  return {
    Client: lib.Client,
    options: { user: username, password, host, port, database, ...dialectOptions },
  };
}

function joined(t: SequelizeTransaction, connection: SqlConnection): SqlConnection {
  const assertOpen = () => {
    // From then on the connection may be somebody else's.
    for (let each: SequelizeTransaction | undefined = t; each; each = each.parent)
      if (each.finished !== undefined)
        throw new NotInTransactionError("this transaction of Sequelize has ended");
  };
  const { script } = connection;
  return {
    ...connection,
    async query(statement) {
      assertOpen();
      return connection.query(statement);
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

  locked(transaction: unknown, { strength, wait }: QueryLock): Find<Instance> {
    const { lock, transaction: own, skipLocked } = this.#options;
    if (own !== undefined && own !== transaction)
      throw new UsageError("tx.rows(findAll(…)): its `transaction` is another one; leave it out");
    if (skipLocked !== undefined)
      throw new UsageError("tx.rows(query, { wait }) says how to wait: leave out `skipLocked`");
    if (wait === "nowait")
      throw new UnsupportedError(
        'tx.rows(findAll(…)): Sequelize cannot say NOWAIT; use `wait: 1`, or "skip"',
      );
    const { of } = (lock ?? {}) as { of?: unknown };
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

function locking(native: unknown, query: unknown, lock: QueryLock): (() => PromiseLike<unknown>) | undefined {
  if (!(query instanceof Find)) return undefined;
  const locked = query.locked(native, lock);
  return () => locked.execute();
}
