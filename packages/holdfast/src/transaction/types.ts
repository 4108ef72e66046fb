/** What callers write and get: a transaction, and its options. */
import type { Isolation, Row, Wait } from "../seam/database.ts";
import type { Lockable } from "../seam/key.ts";
import type { RetryOptions } from "./retry.ts";
import type {
  AllOptions,
  AllResults,
  Items,
  LockedRows,
  QueryOptions,
  QueryRows,
  RowKeys,
  RowOptions,
  TableName,
  TableOptions,
} from "../seam/row-options.ts";
import type { Statement } from "../seam/sql.ts";
import type { TableMode, Where } from "../seam/tables.ts";

/** What a body works with: a transaction, or a savepoint inside one. */
export interface Transaction<Native> {
  /** The client's own transaction: write with it as you always do. */
  readonly client: Native;
  /** Aborts when the transaction is lost, past its deadline, or no longer wanted. Pass it on to slow calls. */
  readonly signal: AbortSignal;
  /** 1 on the first run, 2 on the first retry, … */
  readonly attempt: number;
  /**
   * Takes locks until the end of the transaction (or until a rollback of this savepoint). With `wait: "skip"` it
   * resolves to false if any of them is taken.
   */
  lock(locks: Lockable | readonly Lockable[], options?: LockOptions & { wait?: Wait }): Promise<void>;
  lock(locks: Lockable | readonly Lockable[], options: LockOptions & { wait: "skip" }): Promise<boolean>;
  /** The same without waiting: false if any of them is taken, and then none is held. */
  tryLock(locks: Lockable | readonly Lockable[]): Promise<boolean>;
  /**
   * Locks rows until the end of the transaction and returns them as they are under the lock: those named by a list of
   * keys, or those that a condition holds for. They are locked in the order of their primary key, whatever order
   * they are asked for in, so that two callers cannot deadlock on them.
   */
  rows<R extends object = Row, C extends keyof R & string = keyof R & string>(
    table: TableName,
    which: RowKeys<NoInfer<R>> | Where,
    options?: RowOptions<C>,
  ): Promise<LockedRows<Pick<R, C>>>;
  /**
   * The same for a query made with the builder of your ORM: it gets the lock's clause and wait, runs in this
   * transaction, and brings what it would bring by itself. Rows are locked in the order of its ORDER BY, if it has one.
   */
  rows<Q extends object>(query: Q, options?: QueryOptions): Promise<QueryRows<Q>>;
  /** One row by its key. Throws `RowsMissingError` if there is none; with `wait: "skip"`, undefined if it is locked. */
  row<R extends object = Row, C extends keyof R & string = keyof R & string>(
    table: TableName,
    key: RowKeys<NoInfer<R>>[number],
    options?: RowOptions<C> & { wait?: Wait },
  ): Promise<Pick<R, C>>;
  row<R extends object = Row, C extends keyof R & string = keyof R & string>(
    table: TableName,
    key: RowKeys<NoInfer<R>>[number],
    options: RowOptions<C> & { wait: "skip" },
  ): Promise<Pick<R, C> | undefined>;
  /**
   * Locks keys and rows of several tables in one order that is the same for everybody:
   * `tx.lockAll([key("report", id), rows("account", [a, b]), rows("stock", skus)])`. Resolves to the rows of each.
   */
  lockAll<const I extends Items>(items: I, options?: AllOptions): Promise<AllResults<I>>;
  /** Locks a whole table, for maintenance. With `wait: "skip"` it resolves to false if it is not free. */
  table(name: TableName, mode: TableMode, options?: TableOptions & { wait?: Wait }): Promise<void>;
  table(name: TableName, mode: TableMode, options: TableOptions & { wait: "skip" }): Promise<boolean>;
  /** Whether this transaction took the lock through Holdfast and still has it. */
  holds(lock: Lockable): boolean;
  /** Runs a statement built with `sql`; the same on every engine that speaks SQL. */
  query<R extends Row = Row>(statement: Statement): Promise<R[]>;
  /** A savepoint: if the body throws, only its work is undone, locks included. */
  transaction<T>(body: (tx: Transaction<Native>) => Promise<T>): Promise<T>;
  transaction<T>(options: NestedOptions, body: (tx: Transaction<Native>) => Promise<T>): Promise<T>;
}

export type Body<Native, T> = (tx: Transaction<Native>) => Promise<T>;

export interface LockOptions {
  /** Milliseconds, or "nowait" to throw at once. Default: the instance's `wait` (5 s). */
  readonly wait?: Wait | "skip";
  readonly signal?: AbortSignal | undefined;
}

export interface NestedOptions {
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
  readonly lock?: Lockable | readonly Lockable[];
  readonly isolation?: Isolation;
  readonly readOnly?: boolean;
}

export interface TransactionOptions {
  /** Taken before the body runs, in one canonical order, held until the transaction has ended. */
  readonly lock?: Lockable | readonly Lockable[];
  /** How long to wait for the locks: milliseconds, or "nowait". Default: the instance's, 5 s. */
  readonly wait?: Wait;
  /** Default "read committed". */
  readonly isolation?: Isolation;
  readonly readOnly?: boolean;
  /** Milliseconds for the whole call, retries and waits included. Enforced by the server too. Default 60 s. */
  readonly deadline?: number;
  /** Gives up: cancels what runs on the server, rolls back, rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
  /** `false`: never run the body twice. */
  readonly retry?: RetryOptions | false;
  /** Inside another transaction of this instance: a connection of its own instead of a savepoint. */
  readonly separate?: boolean;
}

/** Whatever opens transactions: an instance of Holdfast. */
export interface Transactor<Native> {
  transaction<T>(options: TransactionOptions, body: (tx: Transaction<Native>) => Promise<T>): Promise<T>;
}
