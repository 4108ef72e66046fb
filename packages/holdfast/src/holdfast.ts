import { type Capabilities, type Strategy, isSupported, require, strategies } from "./seam/capabilities.ts";
import type { Connection, Database, Failure, Isolation, Wait } from "./seam/database.ts";
import {
  WrongConnectionGuard,
  type WrongConnectionMode,
  wrongConnectionModes,
} from "./transaction/wrong-connection.ts";
import { Common, type Placement } from "./transaction/agreement.ts";
import { emit } from "./events/events.ts";
import { HoldfastError, type Holder, LockNotAvailableError, UsageError } from "./seam/errors.ts";
import { classify, remember, waited } from "./seam/failure.ts";
import { Inside } from "./context/inside.ts";
import { type Key, type LockRequest, type Lockable, canonical, keyNames, wanted } from "./seam/key.ts";
import {
  type OwnRetryOptions,
  type RetryOptions,
  type RetryPolicy,
  retried,
  retryPolicy,
} from "./transaction/retry.ts";
import { namedDatabase } from "./seam/names.ts";
import type { Migrated, RoutineState } from "./seam/routine.ts";
import { checkRuntime } from "./context/runtime.ts";
import type { LeaseInfo } from "./seam/leases.ts";
import {
  type InstanceContext,
  Scope,
  type Transaction,
  remember as rememberHome,
} from "./transaction/scope.ts";
import { sections } from "./context/section.ts";
import { type CallSite, callSites } from "./context/call-site.ts";
import { Started } from "./transaction/lifecycle.ts";
import { withConnection } from "./transaction/one-shot.ts";
import { presenting } from "./transaction/present.ts";
import { type Plan, type TransactionOptions, runTransaction } from "./transaction/transaction.ts";
import type { Body } from "./transaction/types.ts";
import type { Statement } from "./seam/sql.ts";
import { checkCall, checkNames, checkSignal } from "./input/options.ts";
import { checkWait, milliseconds } from "./waiting/wait.ts";
import { type Inspection, inspection } from "./watch/inspect.ts";
import { type HazardMode, type SlowOptions, watching } from "./watch/options.ts";
import { watch } from "./watch/watch.ts";
import { type Held, Sessions } from "./locks/hold.ts";
import { type Lease, LeaseManager, type LeaseFilter, type LeaseOptions } from "./locks/lease.ts";
import { Rows } from "./locks/rows.ts";
import { Semaphore, type SemaphoreOptions } from "./locks/semaphore.ts";

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
  /**
   * How locks of transactions are kept, where the server has a choice: "lock row" keeps them as rows of a table
   * instead of advisory locks. It is written down in the database, where its tables are (`hf.migrate()`), and an instance
   * that was told otherwise is refused (`StrategyError`). Default: what is written down; else what the server is found to hold.
   */
  readonly strategy?: Strategy;
  /**
   * What to do about a statement that goes through the outer client inside of a transaction's body, where the client
   * lets it be seen: "warn" (once per place), "throw" (for tests), or nothing. Default "warn".
   */
  readonly wrongConnection?: WrongConnectionMode;
  /**
   * What to do about a request, a timer, a process, … that a transaction waits for while it holds locks, and about locks that
   * are taken in different orders: "warn" (once per place), "throw" (for tests: the transaction fails), "count" (events and
   * metrics only), or nothing. Default "warn", and "count" if NODE_ENV is "production".
   */
  readonly hazards?: HazardMode;
  /** After how many milliseconds a transaction that holds locks is told of as slow. `false`: never. */
  readonly slow?: SlowOptions | false;
  /**
   * Where Holdfast keeps its own tables: a schema of PostgreSQL, elsewhere what their names begin with. Applications that share a
   * database and have different ones share no locks either. Everybody who works together has the same. Default "holdfast".
   */
  readonly schema?: string;
  /** A file to which the order of locks is added, for `holdfast order`. Default: what HOLDFAST_ORDER says. */
  readonly orderFile?: string;
}

/** What one of several databases is told of the others. */
export interface ShardOf {
  /** Refuses what belongs on another one. */
  guard(locks: readonly LockRequest[]): void;
  /** Whether the calling code is in a transaction of another one. */
  elsewhere(): boolean;
  /** Undefined: the list of all of them is not known. */
  readonly placement: Placement | undefined;
}

export type MigrationState =
  | {
      readonly kind: "migration";
      readonly id: number;
      readonly name: string;
      readonly state: "applied" | "missing" | "unknown";
    }
  | { readonly kind: "routine"; readonly name: string; readonly state: RoutineState };

export type TryLockResult<T> = { readonly acquired: true; readonly value: T } | { readonly acquired: false };

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

/** Our own `lock` or `tryLock`, an extension's `$exact`, and the caller. Each frame costs more than a microsecond. */
const siteFrames = 4;

/** Another process may be at it, and an index takes its time. */
const migrateMs = 300_000;

/** Exact transactions and locks on one database. Make it once per pool or client, with `holdfast(from…(client))`. */
export class Holdfast<Native> {
  readonly #database: Database<Native, Connection>;
  readonly #context: InstanceContext<Native, Connection>;
  readonly #current = new Inside<Scope<Native, Connection>>();
  readonly #sessions: Sessions<Native, Connection>;
  readonly #leases: LeaseManager<Native, Connection>;
  readonly #common: Common;
  readonly #defaults: { wait: Wait; deadlineMs: number; isolation: Isolation; retry: RetryPolicy };
  #asking: Promise<Capabilities> | undefined;

  /** `shard`: of which this is one; see `sharded`. */
  constructor(given: Database<Native, Connection>, options: HoldfastOptions = {}, shard?: ShardOf) {
    checkRuntime();
    if (typeof given !== "object" || given === null || typeof given.engine?.begin !== "function") {
      throw new UsageError(
        "holdfast(…) takes what an adapter returns, e.g. holdfast(fromPg(pool)) with fromPg of holdfast/pg",
      );
    }
    checkNames(
      "holdfast",
      options,
      new Set([
        "wait",
        "deadline",
        "isolation",
        "retry",
        "names",
        "strategy",
        "wrongConnection",
        "hazards",
        "slow",
        "schema",
        "orderFile",
      ]),
    );
    const { names } = options;
    if (names !== undefined && names !== false && typeof names !== "function")
      throw new UsageError("names must be false or a function");
    if (options.strategy !== undefined && !strategies.includes(options.strategy))
      throw new UsageError(`strategy must be one of ${strategies.map((each) => `"${each}"`).join(", ")}`);
    const { wrongConnection = "warn" } = options;
    if (!wrongConnectionModes.includes(wrongConnection))
      throw new UsageError(
        `wrongConnection must be one of ${wrongConnectionModes.map((each) => `"${each}"`).join(", ")}`,
      );
    const database = options.schema === undefined ? given : namedDatabase(given, options.schema);
    this.#database = database;
    this.#common = new Common(database, options.strategy, shard?.placement);
    this.#defaults = {
      wait: options.wait === undefined ? 5000 : checkWait(options.wait),
      deadlineMs: options.deadline === undefined ? 60_000 : milliseconds(options.deadline, "deadline", 1),
      isolation: checkIsolation(options.isolation ?? "read committed"),
      retry: retryPolicy(options.retry),
    };
    const show = typeof names === "function" ? names : (name: string) => name;
    const watched = watching(options);
    this.#context = {
      database,
      current: this.#current,
      wait: this.#defaults.wait,
      wrongConnection: new WrongConnectionGuard(database, this.#current, wrongConnection),
      watch: watch(watched, show),
      rows: new Rows(() => this.#context),
      started: new Started(),
      ...(shard && { guard: shard.guard, elsewhere: shard.elsewhere }),
      names: (locks) => keyNames(locks, show),
      shown: (locks) => (names === false ? [] : keyNames(locks, show)),
      capabilities: (connection, free) => this.#probe(connection, free),
      known: () => this.#common.facts,
      trusted: () => this.#common.trusted,
      renewed: (connection, free) => this.#renew(connection, free),
      show,
      holders: async (locks, connection) => {
        const ask = database.engine.holders?.bind(database.engine);
        const known = this.#common.facts;
        return ask && known ? this.#look((c) => ask(c, locks, known), connection) : [];
      },
      look: (ask, connection) => this.#look(ask, connection),
      sessionSupport: () => this.#sessions.support(),
      distrust: (gap) => {
        this.#common.distrust(gap);
      },
    };
    this.#sessions = new Sessions(this.#context);
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
  async transaction<T>(first: TransactionOptions | Body<Native, T>, second?: Body<Native, T>): Promise<T> {
    const [options, body] = checkCall<TransactionOptions, Body<Native, T>>("hf.transaction", first, second);
    return this.open(options, body);
  }

  /** Every transaction, however it was asked for. `alone`: the call, if it means that nobody else is at it while its body runs. */
  protected async open<T>(options: TransactionOptions, body: Body<Native, T>, alone?: string): Promise<T> {
    const { wrongConnection, watch: watched } = this.#context;
    const plan = this.#plan(
      options,
      wrongConnection.watches || watched?.wantsPlaces
        ? callSites.here(alone ? this.tryLock : this.transaction, siteFrames)
        : undefined,
    );
    const outer = options.separate ? undefined : this.#current.getStore();
    if (outer) return outer.here().nest(options, body);
    return this.#context.started.during(alone ?? "hf.transaction", () =>
      runTransaction(this.#context, { ...plan, alone }, body),
    );
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
    });
  }

  /**
   * Runs work that is meant to be apart from the transaction whose body calls it: statements through the outer client
   * are not reported, and `hf.transaction` opens another one.
   */
  outside<T>(work: () => T): T {
    return this.#current.leave(() =>
      sections.leave(() => {
        const value = work();
        const { then } = (value ?? {}) as Partial<PromiseLike<unknown>>;
        // A lazy promise, as Prisma's and Knex's are, does its work when it is asked for, which must be here.
        if (typeof then !== "function" || value instanceof Promise) return value;
        return new Promise((resolve, reject) => void then.call(value, resolve, reject)) as T;
      }),
    );
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
    const sessionLocks = await this.#sessions.support();
    // After the experiment, which may have shown more.
    const probed = await this.#probe();
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
      const capabilities = await this.#probe();
      require(capabilities.inspect, "hf.inspect");
      return withConnection(
        this.#context,
        async (connection) => (await engine.inspect?.(connection, capabilities)) ?? [],
      );
    });
    return inspection(locks);
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
    const { engine, connect } = this.#database;
    const applied = await this.#call("hf.migrate", () =>
      withConnection(
        this.#context,
        (connection) => engine.migrations.apply(connection, connect === undefined),
        migrateMs,
      ),
    );
    const migrated = applied.map((each): Migrated =>
      "was" in each
        ? { kind: "routine", name: each.name, was: each.was }
        : { kind: "migration", id: each.id, name: each.name },
    );
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
    const { all, applied, routines } = this.#database.engine.migrations;
    const [there, made] = await this.#call("hf.migrations", () =>
      withConnection(this.#context, async (connection) => [
        await applied(connection),
        (await routines?.states(connection)) ?? new Map<string, RoutineState>(),
      ]),
    );
    const found = new Map(there.map(({ id, name }) => [id, name]));
    const kind = "migration";
    const known = all.map(({ id, name }): MigrationState => {
      const state = found.delete(id) ? "applied" : "missing";
      return { kind, id, name, state };
    });
    return [
      ...known,
      ...[...found].map(([id, name]): MigrationState => ({ kind, id, name, state: "unknown" })),
      ...[...made].map(([name, state]): MigrationState => ({ kind: "routine", name, state })),
    ];
  }

  /**
   * The same as SQL text, for your own migration tool: all of it, or the tables from this migration on. Routines can be
   * run again and again; tools that know such files (Flyway's `R__…`) may take them apart from the tables with `only`.
   */
  migrationSql(options: { readonly from?: number; readonly only?: "tables" | "routines" } = {}): string {
    checkNames("hf.migrationSql", options, new Set(["from", "only"]));
    const { from = 1, only } = options;
    if (!Number.isSafeInteger(from)) throw new UsageError("hf.migrationSql: from must be a whole number");
    if (only !== undefined && only !== "tables" && only !== "routines")
      throw new UsageError('hf.migrationSql: only must be "tables" or "routines"');
    const { migrations } = this.#database.engine;
    const { all, routines } = migrations;
    const part = (title: string, statements: readonly Statement[]) =>
      `-- holdfast ${title}\n${statements.map(migrations.print).join("\n")}\n`;
    const tables = all
      .filter(({ id }) => id >= from && only !== "routines")
      .map((each) => part(`${each.id}: ${each.name}`, [...each.statements, migrations.record(each)]));
    const made = (only !== "tables" && routines?.all) || [];
    return [...tables, ...made.map((each) => part(`routine: ${each.name}`, routines?.make(each) ?? []))].join(
      "\n",
    );
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

  #plan(options: TransactionOptions, site?: CallSite): Plan {
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
      site,
    };
  }

  async #probe(connection?: Connection, free = false): Promise<Capabilities> {
    return this.#common.facts ?? this.#ask(connection, free);
  }

  async #renew(connection?: Connection, free = false): Promise<Capabilities> {
    const trusted = this.#common.trusted;
    if (trusted) return trusted;
    await this.#ask(connection, free);
    return this.#common.agreed();
  }

  /** One asks; whoever comes meanwhile waits for the answer, or asks again if the first one was cut off. */
  async #ask(connection: Connection | undefined, free: boolean): Promise<Capabilities> {
    const asking = this.#asking;
    if (asking) {
      try {
        return await asking;
      } catch (error) {
        if (error instanceof HoldfastError) throw error;
      }
    }
    this.#asking = connection
      ? this.#common.ask(connection, free)
      : withConnection({ database: this.#database, wrongConnection: this.#context.wrongConnection }, (c) =>
          this.#common.ask(c, true),
        );
    try {
      return await this.#asking;
    } finally {
      this.#asking = undefined;
    }
  }

  /** Who is in the way: told if it can be found out quickly, never at the cost of the error itself. */
  async #look(
    ask: (connection: Connection) => Promise<readonly Holder[]>,
    connection?: Connection,
  ): Promise<readonly Holder[]> {
    // With one connection the holder is somebody in this process, and the question would wait for it.
    if (this.#database.traits.single) return [];
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<readonly Holder[]>((resolve) => {
      timer = setTimeout(() => resolve([]), 1000);
    });
    try {
      const found = (connection ? ask(connection) : withConnection(this.#context, ask)).catch(() => []);
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
