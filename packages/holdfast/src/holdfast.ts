import { type Capabilities, isSupported, require } from "./seam/capabilities.ts";
import type { Connection, Database, Failure, Wait } from "./seam/database.ts";
import { WrongConnectionGuard } from "./transaction/wrong-connection.ts";
import { Common, type Placement } from "./transaction/agreement.ts";
import { emit } from "./events/events.ts";
import { LockNotAvailableError, NotInTransactionError, UsageError } from "./seam/errors.ts";
import { classify, remember, waited } from "./seam/failure.ts";
import { Home } from "./transaction/home.ts";
import { Facts } from "./transaction/facts.ts";
import { askedQuickly } from "./transaction/holders.ts";
import { Inside } from "./context/inside.ts";
import { type Key, type LockRequest, type Lockable, canonical, keyNames } from "./seam/key.ts";
import { type OwnRetryOptions, retried } from "./transaction/retry.ts";
import { checkedDatabase, namedDatabase } from "./seam/names.ts";
import { redacted } from "./seam/redact.ts";
import type { Migrated } from "./seam/routine.ts";
import { checkRuntime } from "./context/runtime.ts";
import type { LeaseInfo } from "./seam/leases.ts";
import {
  type InstanceContext,
  Scope,
  type Transaction,
  remember as rememberHome,
} from "./transaction/scope.ts";
import { sections } from "./context/section.ts";
import { callSites } from "./context/call-site.ts";
import { Started } from "./transaction/lifecycle.ts";
import type { Turns } from "./waiting/turns.ts";
import {
  type MigrationState,
  applyMigrations,
  grantSql,
  migrationSql,
  migrationStates,
} from "./migrations.ts";
import { withConnection } from "./transaction/one-shot.ts";
import { type HoldfastOptions, checkDefaults, checkOptions } from "./options.ts";
import { type Defaults, planOf } from "./transaction/plan.ts";
import { type SyncBody, type SyncOptions, SyncTransactions } from "./transaction/sync.ts";
import { presenting } from "./transaction/present.ts";
import { type TransactionOptions, runTransaction } from "./transaction/transaction.ts";
import type { Body } from "./transaction/types.ts";
import { checkCall, checkNames, checkSignal } from "./input/options.ts";
import { checkWait } from "./waiting/wait.ts";
import { type Inspection, inspection } from "./watch/inspect.ts";
import { watching } from "./watch/options.ts";
import { watch } from "./watch/watch.ts";
import { type Held, Sessions } from "./locks/hold.ts";
import { type Lease, LeaseManager, type LeaseFilter, type LeaseOptions } from "./locks/lease.ts";
import { Rows } from "./locks/rows.ts";
import { Semaphore, type SemaphoreOptions } from "./locks/semaphore.ts";

export type { MigrationState } from "./migrations.ts";
export type { HoldfastOptions } from "./options.ts";

/** What one of several databases is told of the others. */
export interface ShardOf {
  /** Refuses what belongs on another one. */
  guard(locks: readonly LockRequest[]): void;
  /** Whether the calling code is in a transaction of another one. */
  elsewhere(): boolean;
  /** Undefined: the list of all of them is not known. */
  readonly placement: Placement | undefined;
}

export type TryLockResult<T> = { readonly acquired: true; readonly value: T } | { readonly acquired: false };

/** Our own `lock` or `tryLock`, an extension's `$exact`, and the caller. Each frame costs more than a microsecond. */
const siteFrames = 4;

/** Exact transactions and locks on one database. Make it once per pool or client, with `holdfast(from…(client))`. */
export class Holdfast<Native> {
  readonly #database: Database<Native, Connection>;
  readonly #context: InstanceContext<Native, Connection>;
  readonly #current = new Inside<Scope<Native, Connection>>();
  readonly #sync: SyncTransactions<Native, Connection>;
  readonly #sessions: Sessions<Native, Connection>;
  readonly #leases: LeaseManager<Native, Connection>;
  readonly #common: Common;
  readonly #facts: Facts;
  readonly #defaults: Defaults;

  /** `shard`: of which this is one; see `sharded`. */
  constructor(given: Database<Native, Connection>, options: HoldfastOptions = {}, shard?: ShardOf) {
    checkRuntime();
    if (typeof given !== "object" || given === null || typeof given.engine?.begin !== "function") {
      throw new UsageError(
        "holdfast(…) takes what an adapter returns, e.g. holdfast(fromPg(pool)) with fromPg of holdfast/pg",
      );
    }
    checkOptions(options);
    const { names, wrongConnection: mode = "warn" } = options;
    const called = options.schema === undefined ? given : namedDatabase(given, options.schema);
    const database = shard?.placement
      ? checkedDatabase(
          called,
          () => this.#common.epoch,
          () => this.#common.doubt(),
        )
      : called;
    this.#database = database;
    this.#common = new Common(database, options, shard?.placement);
    this.#defaults = checkDefaults(options);
    const show = typeof names === "function" ? names : (name: string) => name;
    const watched = watching(options);
    const wrongConnection = new WrongConnectionGuard(database, this.#current, mode);
    this.#facts = new Facts(this.#common, database, wrongConnection);
    this.#context = {
      database,
      current: this.#current,
      wait: this.#defaults.wait,
      isolation: this.#defaults.isolation,
      wrongConnection,
      watch: watch(
        watched,
        show,
        (statement) => this.redacted(statement),
        database.engine.keepsUndoneLocks === true,
      ),
      rows: new Rows(() => this.#context),
      join: (native, turns) => this.#join(native, turns),
      started: new Started(),
      ...(shard && { guard: shard.guard, elsewhere: shard.elsewhere }),
      names: (locks) => keyNames(locks, show),
      shown: (locks) => (names === false ? [] : keyNames(locks, show)),
      capabilities: (connection, free) => this.#facts.probe(connection, free),
      known: () => this.#common.facts,
      trusted: () => this.#common.trusted,
      renewed: (connection, free) => this.#facts.renew(connection, free),
      placed: (connection, free) => this.#facts.place(connection, free),
      show,
      holders: async (locks, connection) => {
        const ask = database.engine.holders?.bind(database.engine);
        const known = this.#common.facts;
        return ask && known ? askedQuickly(this.#context, (c) => ask(c, locks, known), connection) : [];
      },
      look: (ask, connection) => askedQuickly(this.#context, ask, connection),
      home: (native, connection) => home.check(native, connection),
      sessionSupport: () => this.#sessions.support(),
      noTransactions: () => this.#facts.noTransactions(),
      distrust: (gap) => {
        this.#common.distrust(gap);
      },
    };
    const home = new Home(this.#context);
    this.#sessions = new Sessions(this.#context);
    this.#sync = new SyncTransactions(this.#context);
    this.#leases = new LeaseManager(this.#context);
    this.#context.started.finally(() => Promise.all([this.#sessions.close(), this.#leases.close()]));
    remember(given);
    rememberHome(this, this.#context);
  }

  /**
   * Runs a body in a transaction: COMMIT if it returns, ROLLBACK if it throws, and again from the start after a
   * deadlock, a serialization failure or a connection lost before COMMIT. Inside another transaction of this
   * instance it is a savepoint of that one.
   */
  transaction<T>(body: Body<Native, T>): Promise<T>;
  transaction<T>(options: TransactionOptions, body: Body<Native, T>): Promise<T>;
  transaction<T>(first: TransactionOptions | Body<Native, T>, second?: Body<Native, T>): Promise<T> {
    // Not an async function: each one on the way costs every transaction some promises.
    try {
      const [options, body] = checkCall<TransactionOptions, Body<Native, T>>("hf.transaction", first, second);
      return this.open(options, body);
    } catch (error) {
      return Promise.reject(error);
    }
  }

  /** Every transaction, however it was asked for. `alone`: the call, if it means that nobody else is at it while its body runs. */
  protected open<T>(options: TransactionOptions, body: Body<Native, T>, alone?: string): Promise<T> {
    const { wrongConnection, watch: watched } = this.#context;
    const plan = planOf(
      options,
      this.#defaults,
      wrongConnection.notesPlaces || watched?.wantsPlaces
        ? callSites.here(alone ? this.tryLock : this.transaction, siteFrames)
        : undefined,
    );
    const outer = options.separate ? undefined : this.#current.getStore();
    if (outer) return outer.here().nest(options, body);
    if (!options.separate) wrongConnection.unnamed(alone ?? "hf.transaction");
    return this.#context.started.during(alone ?? "hf.transaction", () =>
      runTransaction(this.#context, { ...plan, alone }, body),
    );
  }

  /**
   * The same for a client whose calls are over when they return (better-sqlite3, node:sqlite), and a body that is: it costs a
   * fraction of `hf.transaction`. The whole process stands still meanwhile, also while it waits for the locks.
   */
  transactionSync<T>(body: SyncBody<Native, T>): T;
  transactionSync<T>(options: SyncOptions, body: SyncBody<Native, T>): T;
  transactionSync<T>(first: SyncOptions | SyncBody<Native, T>, second?: SyncBody<Native, T>): T {
    const [options, body] = checkCall<SyncOptions, SyncBody<Native, T>>(
      "hf.transactionSync",
      first,
      second,
      "a function",
    );
    return this.#sync.run(options, body);
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
      planOf(options, this.#defaults);
      return outer.here().nest({ ...options }, async (tx) => {
        if (!(await tx.tryLock(requests))) return { acquired: false };
        return { acquired: true, value: await body(tx) };
      });
    }
    let entered = false;
    try {
      const nowait = { ...options, lock: requests, wait: "nowait" } as const;
      const run: Body<Native, T> = (tx) => {
        entered = true;
        return body(tx);
      };
      const value = await this.open(nowait, run, "hf.tryLock");
      return { acquired: true, value };
    } catch (error) {
      if (!entered && error instanceof LockNotAvailableError) return { acquired: false };
      throw error;
    }
  }

  /**
   * Runs work that opens a transaction of its own, by the client's own means, again after a deadlock or a serialization
   * failure: `hf.retry(() => prisma.$transaction(async (tx) => …))`. Inside a transaction of this instance it runs once:
   * only the outermost one can be run again.
   */
  async retry<T>(work: (attempt: number) => Promise<T>, options: OwnRetryOptions = {}): Promise<T> {
    if (typeof (work as unknown) !== "function")
      throw new UsageError("hf.retry(work): the work must be an async function");
    checkNames("hf.retry", options, new Set(["attempts", "baseMs", "maxMs", "on", "signal"]));
    checkSignal(options.signal);
    if (this.#current.getStore()?.open) return work(1);
    const failureOf = (error: unknown) => {
      const failure = classify(this.#database, error);
      const late =
        failure === "lock-timeout" && waited(this.#database, error, this.#common.facts?.flavour) !== true;
      return late ? undefined : failure;
    };
    return retried(work, options, failureOf, () => this.#common.facts?.exclusion === "at commit");
  }

  /** Takes part in a transaction that you opened and will end: `await hf.join(tx).lock(key(…))`. */
  join(native: Native): Transaction<Native> {
    const joined = this.#join(native);
    this.#context.wrongConnection.join(native);
    return joined;
  }

  #join(native: Native, turns?: Turns): Scope<Native, Connection> {
    if (native instanceof Scope)
      throw new NotInTransactionError(
        "this is a transaction of Holdfast's already, and not the client's own: call tx.lock(…), or pass it as `{ tx }`",
      );
    const connection = this.#database.join(native);
    const { watch: watched } = this.#context;
    const site = watched?.wantsPlaces ? callSites.here(this.join, siteFrames) : undefined;
    const section = watched?.joined(native as object, connection.settled?.bind(connection), site);
    return new Scope(this.#context, {
      connection,
      native,
      signal: connection.lost,
      attempt: 1,
      joined: true,
      section,
      turns,
    });
  }

  /**
   * Runs work that is meant to be apart from the transaction whose body calls it: statements through the outer client
   * are not reported, and `hf.transaction` opens another one.
   */
  outside<T>(work: () => T): T {
    const apart = () => {
      const value = work();
      const { then } = (value ?? {}) as Partial<PromiseLike<unknown>>;
      // A lazy promise, as Prisma's and Knex's are, does its work when it is asked for, which must be here.
      if (typeof then !== "function" || value instanceof Promise) return value;
      return new Promise((resolve, reject) => void then.call(value, resolve, reject)) as T;
    };
    return this.#current.leave(() => sections.leave(() => this.#context.wrongConnection.outside(apart)));
  }

  /**
   * Takes locks of a session, for work that is not one transaction: `await using held = await hf.hold(key(…))`.
   * They end with `release()`, with the connection, or with the process; `held.signal` tells of the second.
   */
  hold(
    locks: Lockable | readonly Lockable[],
    options?: { wait?: Wait; signal?: AbortSignal | undefined },
  ): Promise<Held>;
  hold(
    locks: Lockable | readonly Lockable[],
    options: { wait: "skip"; signal?: AbortSignal | undefined },
  ): Promise<Held | undefined>;
  async hold(
    locks: Lockable | readonly Lockable[],
    options: { wait?: Wait | "skip"; signal?: AbortSignal | undefined } = {},
  ): Promise<Held | undefined> {
    const requests = canonical(locks);
    checkNames("hf.hold", options, new Set(["wait", "signal"]));
    checkSignal(options.signal);
    options.signal?.throwIfAborted();
    this.#context.started.check("hf.hold");
    if (options.wait !== "skip") {
      const wait = options.wait === undefined ? this.#defaults.wait : checkWait(options.wait);
      return this.#sessions.hold(requests, wait, options.signal);
    }
    try {
      return await this.#sessions.hold(requests, "nowait", options.signal);
    } catch (error) {
      if (error instanceof LockNotAvailableError) return undefined;
      throw error;
    }
  }

  /**
   * Takes a lease, for work that is longer than a transaction: `await using lease = await hf.lease(key(…))`. It is
   * renewed until it is released, and runs out by the database's clock if this process dies. Its `signal` aborts
   * before anybody else can get it, and `fenced(tx, lease)` keeps a late write out. `shared(key)` leases exclude
   * exclusive ones only. With `wait: "skip"` it resolves to undefined if it is not free.
   */
  lease(lock: Lockable, options?: LeaseOptions & { wait?: Wait }): Promise<Lease>;
  lease(lock: Lockable, options: LeaseOptions & { wait: "skip" }): Promise<Lease | undefined>;
  async lease(lock: Lockable, options: LeaseOptions = {}): Promise<Lease | undefined> {
    return this.#leases.lease(lock, options);
  }

  /**
   * Who holds, and who waits for, leases and permits: of one key, or all of them. `over`: those too that ran out and were
   * never given back.
   */
  async leases(of?: Lockable, options?: LeaseFilter): Promise<readonly LeaseInfo[]> {
    return this.#leases.list(of, options);
  }

  /**
   * Takes a lease, a permit or a place in line away from whoever has it, by its fence. Its holder learns of it with the
   * next renewal; `fenced(tx, lease)` refuses it at once. Undefined: there is none (any more).
   */
  async endLease(fence: number): Promise<LeaseInfo | undefined> {
    return this.#leases.end(fence);
  }

  /** At most `permits` holders at a time, in all processes together, each for as long as its lease lasts. */
  semaphore(name: Key, options: SemaphoreOptions): Semaphore {
    return new Semaphore(this.#leases, name, options);
  }

  /** What this database, reached through this client, can promise. */
  capabilities(): Promise<Capabilities> {
    return this.#call("hf.capabilities", () => this.#capabilities());
  }

  async #capabilities(): Promise<Capabilities> {
    // Inside of one of ours it is known, and the pool may have no other connection.
    if (!this.#current.getStore()) await this.#facts.noTransactions();
    const sessionLocks = await this.#sessions.support();
    // After the experiment, which may have shown more.
    const probed = await this.#facts.probe();
    return {
      ...probed,
      sessionLocks,
      lockFirstIsolation: isSupported(sessionLocks) ? probed.lockFirstIsolation : [],
      // A pooler that lends sessions out swallows their messages too.
      wake: isSupported(sessionLocks) || !isSupported(probed.wake) ? probed.wake : sessionLocks,
    };
  }

  /** Who holds what, and who waits for whom: locks of this database that Holdfast takes, and what else is waited for. */
  async inspect(): Promise<Inspection> {
    const { engine } = this.#database;
    const locks = await this.#call("hf.inspect", async () => {
      const capabilities = await this.#facts.probe();
      require(capabilities.inspect, "hf.inspect");
      return withConnection(
        this.#context,
        async (connection) => (await engine.inspect?.(connection, capabilities)) ?? [],
      );
    });
    return inspection(locks);
  }

  /**
   * Returns a statement without its literal values and comments, so that it can be logged. What cannot be told apart, such as
   * a text that was cut off, ends it with "…".
   */
  redacted(statement: string): string {
    return redacted(statement, this.#database.engine.lexis);
  }

  /** What kind of failure an error of the driver or the ORM is, if it is one that Holdfast knows. */
  classify(error: unknown): Failure | undefined {
    return classify(this.#database, error);
  }

  /**
   * Creates or updates Holdfast's own tables, then its routines (functions, procedures, views) whose text has changed,
   * one process at a time. Returns what was applied, and what was made.
   */
  async migrate(): Promise<Migrated[]> {
    const migrated = await this.#call("hf.migrate", () => applyMigrations(this.#context));
    for (const each of migrated) emit("holdfast:migrated", () => each);
    // What could not be written down before can be now.
    this.#common.doubt();
    return migrated;
  }

  /**
   * What `migrate` has applied here, and what it would apply or make again ("outdated"). "unknown": applied by a newer
   * version of Holdfast. Changes nothing.
   */
  async migrations(): Promise<readonly MigrationState[]> {
    return this.#call("hf.migrations", () => migrationStates(this.#context));
  }

  /**
   * The same as SQL text, for your own migration tool: all of it, or the tables from this migration on. Routines can be
   * run again and again; tools that know such files (Flyway's `R__…`) may take them apart from the tables with `only`.
   */
  migrationSql(options: { readonly from?: number; readonly only?: "tables" | "routines" } = {}): string {
    return migrationSql(this.#database.engine.migrations, options);
  }

  /**
   * GRANT statements for a role that uses every pattern and lock, and cannot migrate. Run them as the owner of Holdfast's
   * tables, and again after each `hf.migrate()` that has made something. On MySQL and MariaDB a role is `"app"` or `"app@host"`.
   */
  grantSql(options: { readonly role: string }): string {
    return grantSql(this.#database.engine.migrations, options);
  }

  /**
   * Ends what this instance has started (workers, schedules, leaders), waits for calls that are under way, and gives back
   * what is still held. What runs may go on for 5 s, is told to end, and is waited for 5 s more; then calls have 5 s, and new
   * ones are refused (`HF_CLOSED`). The client stays open: it is yours.
   */
  async close(): Promise<void> {
    await this.#context.started.close(this.#current.getStore() !== undefined);
    this.#context.wrongConnection.close();
    this.#context.watch?.close();
    await this.#database.close?.();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** A call of its own that is told of by its name, and waited for by `close`. */
  #call<T>(call: string, work: () => Promise<T>): Promise<T> {
    return this.#context.started.during(call, () => presenting(this.#database, [call], work));
  }
}

/** `holdfast(fromPg(pool))`, `holdfast(fromPrisma(prisma))`, … */
export function holdfast<Native, C extends Connection>(
  database: Database<Native, C>,
  options?: HoldfastOptions,
): Holdfast<Native> {
  return new Holdfast(database, options);
}
