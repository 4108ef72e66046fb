import { AsyncLocalStorage } from "node:async_hooks";
import { type Capabilities, isSupported } from "./core/capabilities.ts";
import type { Connection, Database, Failure, Isolation, Migration, Wait } from "./core/database.ts";
import { emit } from "./core/events.ts";
import { HoldfastError, type Holder, LockNotAvailableError, UsageError, keyNames } from "./core/errors.ts";
import { classify, remember } from "./core/failure.ts";
import { type LockRequest, type Lockable, canonical, wanted } from "./core/key.ts";
import { type RetryOptions, type RetryPolicy, retryPolicy } from "./core/retry.ts";
import { type Home, Scope, type Transaction } from "./core/scope.ts";
import { withConnection } from "./core/errand.ts";
import { type Plan, type TransactionOptions, runTransaction } from "./core/transaction.ts";
import { checkCall, checkNames, checkSignal } from "./core/options.ts";
import { checkWait, milliseconds } from "./core/wait.ts";
import { type Held, Sessions } from "./locks/hold.ts";

export interface HoldfastOptions {
  /** How long calls wait for locks unless they say otherwise. Default 5,000 ms. */
  readonly wait?: Wait;
  /** How long transactions may take unless they say otherwise. Default 60,000 ms. */
  readonly deadline?: number;
  readonly isolation?: Isolation;
  readonly retry?: RetryOptions | false;
  /**
   * Names of keys as the server's list of sessions, errors and events show them. `false`: not shown on the
   * server; a function: what to show instead, e.g. without user ids. Default: the names as they are.
   */
  readonly names?: false | ((name: string) => string);
}

export type TryLockResult<T> = { readonly acquired: true; readonly value: T } | { readonly acquired: false };

type Body<Native, T> = (tx: Transaction<Native>) => Promise<T>;

const isolations: readonly Isolation[] = [
  "read uncommitted",
  "read committed",
  "repeatable read",
  "serializable",
];
const optionNames = new Set([
  "lock",
  "wait",
  "isolation",
  "readOnly",
  "deadline",
  "signal",
  "retry",
  "separate",
]);

/** Another process may be at it, and an index takes its time. */
const migrateMs = 300_000;

/** Exact transactions and locks on one database. Make it once per pool or client, with `holdfast(from…(client))`. */
export class Holdfast<Native> {
  readonly #database: Database<Native, Connection>;
  readonly #home: Home<Native, Connection>;
  readonly #current = new AsyncLocalStorage<Scope<Native, Connection>>();
  readonly #sessions: Sessions<Native, Connection>;
  readonly #defaults: { wait: Wait; deadlineMs: number; isolation: Isolation; retry: RetryPolicy };
  #known: Capabilities | undefined;
  #asking: Promise<Capabilities> | undefined;

  constructor(database: Database<Native, Connection>, options: HoldfastOptions = {}) {
    if (typeof database !== "object" || database === null || typeof database.engine?.begin !== "function") {
      throw new UsageError(
        "holdfast(…) takes what an adapter returns, e.g. holdfast(fromPg(pool)) with fromPg of holdfast/pg",
      );
    }
    checkNames("holdfast", options, new Set(["wait", "deadline", "isolation", "retry", "names"]));
    const { names } = options;
    if (names !== undefined && names !== false && typeof names !== "function")
      throw new UsageError("names must be false or a function");
    this.#database = database;
    this.#defaults = {
      wait: options.wait === undefined ? 5000 : checkWait(options.wait),
      deadlineMs: options.deadline === undefined ? 60_000 : milliseconds(options.deadline, "deadline", 1),
      isolation: checkIsolation(options.isolation ?? "read committed"),
      retry: retryPolicy(options.retry),
    };
    const show = typeof names === "function" ? names : (name: string) => name;
    this.#home = {
      database,
      current: this.#current,
      wait: this.#defaults.wait,
      names: (locks) => keyNames(locks, show),
      shown: (locks) => (names === false ? [] : keyNames(locks, show)),
      capabilities: (connection) => this.#probe(connection),
      known: () => this.#known,
      holders: (locks, connection) => this.#holders(locks, connection),
      sessionSupport: () => this.#sessions.support(),
    };
    this.#sessions = new Sessions(this.#home);
    remember(database);
  }

  /**
   * Runs a body in a transaction: COMMIT if it returns, ROLLBACK if it throws, and again from the start after a
   * deadlock, a serialization failure or a connection lost before COMMIT. Inside another transaction of this
   * instance it is a savepoint of that one.
   */
  transaction<T>(body: Body<Native, T>): Promise<T>;
  transaction<T>(options: TransactionOptions, body: Body<Native, T>): Promise<T>;
  async transaction<T>(first: TransactionOptions | Body<Native, T>, second?: Body<Native, T>): Promise<T> {
    const [options, body] = checkCall<TransactionOptions, Body<Native, T>>("hf.transaction", first, second);
    const plan = this.#plan(options);
    const outer = options.separate ? undefined : this.#current.getStore();
    if (outer) return outer.here().nest(options, body);
    return runTransaction(this.#home, plan, body);
  }

  /** `hf.transaction({ lock }, body)` for the common case. */
  async lock<T>(
    locks: Lockable | readonly Lockable[],
    body: Body<Native, T>,
    options: Omit<TransactionOptions, "lock"> = {},
  ): Promise<T> {
    return this.transaction({ ...options, lock: canonical(locks) }, body);
  }

  /** Runs the body if the locks are free, and says so if they are not. Waits for nobody. */
  async tryLock<T>(
    locks: Lockable | readonly Lockable[],
    body: Body<Native, T>,
    options: Omit<TransactionOptions, "lock" | "wait"> = {},
  ): Promise<TryLockResult<T>> {
    const requests = canonical(locks);
    checkCall("hf.tryLock", options, body);
    const outer = options.separate ? undefined : this.#current.getStore();
    if (outer) {
      this.#plan(options);
      return outer.here().nest({ ...options }, async (tx) => {
        if (!(await tx.tryLock(requests))) return { acquired: false };
        return { acquired: true, value: await body(tx) };
      });
    }
    let entered = false;
    try {
      const value = await this.transaction({ ...options, lock: requests, wait: "nowait" }, (tx) => {
        entered = true;
        return body(tx);
      });
      return { acquired: true, value };
    } catch (error) {
      if (!entered && error instanceof LockNotAvailableError) return { acquired: false };
      throw error;
    }
  }

  /** Takes part in a transaction that you opened and will end: `await hf.join(tx).lock(key(…))`. */
  join(native: Native): Transaction<Native> {
    const connection = this.#database.join(native);
    return new Scope(this.#home, { connection, native, signal: connection.lost, attempt: 1, joined: true });
  }

  /**
   * Takes locks of a session, for work that is not one transaction: `await using held = await hf.hold(key(…))`.
   * They end with `release()`, with the connection, or with the process; `held.signal` tells of the second.
   */
  async hold(
    locks: Lockable | readonly Lockable[],
    options: { wait?: Wait; signal?: AbortSignal | undefined } = {},
  ): Promise<Held> {
    const requests = canonical(locks);
    checkNames("hf.hold", options, new Set(["wait", "signal"]));
    checkSignal(options.signal);
    const wait = options.wait === undefined ? this.#defaults.wait : checkWait(options.wait);
    options.signal?.throwIfAborted();
    return this.#sessions.hold(requests, wait, options.signal);
  }

  /** What this database, reached through this client, can promise. */
  async capabilities(): Promise<Capabilities> {
    const probed = await this.#probe();
    const sessionLocks = await this.#sessions.support();
    return {
      ...probed,
      sessionLocks,
      lockFirstIsolation: isSupported(sessionLocks) ? probed.lockFirstIsolation : [],
    };
  }

  /** What kind of failure an error of the driver or the ORM is, if it is one that Holdfast knows. */
  classify(error: unknown): Failure | undefined {
    return classify(this.#database, error);
  }

  /** Creates or updates Holdfast's own tables and functions, one process at a time. Returns what was applied. */
  async migrate(): Promise<{ id: number; name: string }[]> {
    const { engine, connect } = this.#database;
    const applied = await withConnection(
      this.#home,
      (connection) => engine.migrations.apply(connection, connect === undefined),
      migrateMs,
    );
    for (const { id, name } of applied) emit("holdfast:migrated", () => ({ id, name }));
    return applied.map(({ id, name }) => ({ id, name }));
  }

  /** The same as SQL text, for your own migration tool. */
  migrationSql(): string {
    const { all, print } = this.#database.engine.migrations;
    return all
      .map(
        (migration: Migration) =>
          `-- holdfast ${migration.id}: ${migration.name}\n${migration.statements.map(print).join("\n")}\n`,
      )
      .join("\n");
  }

  /** Gives back what is still held. The client stays open: it is yours. */
  async close(): Promise<void> {
    await this.#sessions.close();
    await this.#database.close?.();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #plan(options: TransactionOptions): Plan {
    checkNames("hf.transaction", options, optionNames);
    const { wait, deadlineMs, isolation, retry } = this.#defaults;
    checkSignal(options.signal);
    return {
      locks: wanted(options),
      wait: options.wait === undefined ? wait : checkWait(options.wait),
      isolation: checkIsolation(options.isolation ?? isolation),
      readOnly: options.readOnly ?? false,
      deadlineMs: options.deadline === undefined ? deadlineMs : milliseconds(options.deadline, "deadline", 1),
      signal: options.signal,
      retry: retryPolicy(options.retry, retry),
    };
  }

  /** Asked once; whoever comes meanwhile waits for the answer, or asks again if the first one was cut off. */
  async #probe(connection?: Connection): Promise<Capabilities> {
    if (this.#known) return this.#known;
    const asking = this.#asking;
    if (asking) {
      try {
        return await asking;
      } catch (error) {
        if (error instanceof HoldfastError) throw error;
      }
    }
    const { engine, traits } = this.#database;
    this.#asking = connection
      ? engine.probe(connection, traits)
      : withConnection(this.#home, (c) => engine.probe(c, traits));
    try {
      this.#known = await this.#asking;
      return this.#known;
    } finally {
      this.#asking = undefined;
    }
  }

  /** Who is in the way: told if it can be found out quickly, never at the cost of the error itself. */
  async #holders(locks: readonly LockRequest[], connection?: Connection): Promise<readonly Holder[]> {
    const { engine, traits } = this.#database;
    // With one connection the holder is somebody in this process, and the question would wait for it.
    if (!engine.holders || traits.single) return [];
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<readonly Holder[]>((resolve) => {
      timer = setTimeout(() => resolve([]), 1000);
    });
    const ask = (c: Connection) => (engine.holders as NonNullable<typeof engine.holders>)(c, locks);
    try {
      const found = (connection ? ask(connection) : withConnection(this.#home, ask)).catch(() => []);
      return await Promise.race([found, late]);
    } finally {
      clearTimeout(timer);
    }
  }
}

function checkIsolation(value: unknown): Isolation {
  if (isolations.includes(value as Isolation)) return value as Isolation;
  throw new UsageError(
    `isolation must be one of ${isolations.map((i) => `"${i}"`).join(", ")}, not ${JSON.stringify(value)}`,
  );
}

/** `holdfast(fromPg(pool))`, `holdfast(fromPrisma(prisma))`, … */
export function holdfast<Native, C extends Connection>(
  database: Database<Native, C>,
  options?: HoldfastOptions,
): Holdfast<Native> {
  return new Holdfast(database, options);
}
