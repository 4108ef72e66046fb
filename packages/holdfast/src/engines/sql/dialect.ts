/**
 * What the generic stores need of an engine: with this alone it has quotas, stock, queues and schedules, decided in this
 * process by the same rules as everywhere. An engine that can do better (one function on the server, one round trip) has a
 * store of its own, on the same tables.
 */
import type { Failure, Row, SqlConnection } from "../../seam/database.ts";
import type { Key } from "../../seam/key.ts";
import type { Statement } from "../../seam/sql.ts";
import type { ColumnKind, Table } from "./table.ts";

/**
 * `update`: nobody else changes these rows until the end of the transaction; waited for. `skip`: the same, and those that
 * somebody has are left out. `share`: nobody changes them, but several may have them at once. `current`: as they are now, and not
 * as they were when the transaction's snapshot was taken.
 */
export type Locking = "update" | "skip" | "share" | "current";

/** Whose numbers they are. */
export const numberSequences = [
  "fence",
  "audit",
  "queue",
  "queue_job",
  "queue_lease",
  "queue_worker",
] as const;
export type NumberSequence = (typeof numberSequences)[number];

/** A value for each row. */
export interface GivenColumn {
  readonly name: string;
  readonly kind: ColumnKind;
  readonly values: readonly unknown[];
}

/** What is there inside of a transaction that waits for nothing. */
export interface AtOnce {
  /** `statement`: the same object each time, whose values are in the places of these. */
  ask(statement: Statement, values: readonly unknown[]): readonly Row[];
  /** Later than what others were given before. */
  now(): number;
}

/** What was decided of rows that are still as they were read, as statements that are sent as one. */
export interface CallStatements {
  /** Finds the rows that are as they were, of these. */
  readonly found: Statement;
  readonly ids: readonly number[];
  readonly until: number | undefined;
  readonly writes: readonly Statement[];
}

export interface OneCall<C extends SqlConnection> {
  /** Selected with what is read: 1 if that was a transaction by itself, on this connection, and shows what was committed. */
  readonly alone: Statement;
  /** It was not: ends the one that it has begun. */
  leave(connection: C): Promise<void>;
  /** So many statements at the most, besides the first. */
  readonly most: number;
  /**
   * The numbers of rows that were in the way, since somebody has them or they are not as they were, or of all of them if it is not known, or was
   * too late. None: it is done; else nothing is.
   */
  apply(connection: C, statements: CallStatements): Promise<readonly number[]>;
}

export interface StoreDialect<C extends SqlConnection = SqlConnection> {
  /** One of our tables, by its bare name: "quota_bucket". */
  table(name: string): Statement;
  /** The database's clock at this statement, not at the beginning of the transaction: whole microseconds since 1970. */
  readonly clock: Statement;
  /**
   * The same when a row that is being locked is read, after whoever had it. NULL: it cannot be told. Absent: it never can, and is asked
   * for afterwards.
   */
  readonly lockedClock?: Statement;
  /** The same, where the clock is coarse: for whoever writes, later than what others were given before. Absent: as it is. */
  now?(connection: C): Promise<number>;
  /** A column in a list of what is selected, as something that `table.ts` makes a value of its kind of. */
  read(kind: ColumnKind, column: Statement): Statement;
  /** A value, as it is compared with a column of its kind or written into one. Undefined: NULL. */
  write(kind: ColumnKind, value: unknown): Statement;
  /** The value that `write` binds, where it is one and nothing else: then statements of many are made without it. */
  plain?(kind: ColumnKind, value: unknown): unknown;
  /** Selected with what is read without a lock: whether that was committed. Absent: it always was. */
  readonly committed?: Statement;
  /** A condition of each statement that reads: true, or it fails, where the server shows what was there a while ago. Absent: none does. */
  readonly onPrimary?: Statement;
  /** Behind a SELECT. Empty where that holds without it: there is one writer, and this is it. */
  locking(how: Locking, connection: C): Statement;
  /**
   * Behind the name of a table whose rows are locked or changed: they are to be found by one of its indexes. Absent where a statement
   * locks no more than it is about, however it gets there.
   */
  indexed?(table: Table): Statement;
  /** The same of DELETE: of the rows that have these values in these columns, with which an index begins. */
  removing?(table: Table, columns: readonly string[], rows: readonly (readonly unknown[])[]): Statement;
  /**
   * INSERT that leaves alone what is there, by the table's key, and does not fail for it. `counted`: the rows that it has affected are
   * those that were not there.
   */
  insertMissing(table: Table, columns: Statement, values: Statement, counted: boolean): Statement;
  /**
   * Rows of values, to be joined with: `(SELECT …) given`, with one list bound for each column. Absent where a server reads no
   * lists: the values are written out one by one.
   */
  given?(columns: readonly GivenColumn[]): Statement;
  /** False: they cannot be inserted from there so that a violated key is told to be one, and are written out for that. */
  readonly insertsGiven?: false;
  /**
   * Runs work in a transaction of its own, READ COMMITTED or better, that can write; commits when it resolves, rolls back when
   * it throws. Nobody's row is waited for longer than this, which is classified "lock-timeout". The connection is in none.
   */
  transaction<T>(connection: C, waitMs: number, work: () => Promise<T>): Promise<T>;
  /**
   * Of work in such a transaction that may wait for rows: it is ended after so long, with an error that is classified "lock-timeout". Absent
   * where it is the whole database that somebody has.
   */
  briefly?<T>(connection: C, ms: number, work: () => Promise<T>): Promise<T>;
  /**
   * The same of work that waits for nothing, where statements are answered at once. Undefined, of the work: it is rolled back. Absent, or
   * undefined itself, where they are not: by this engine, or on this connection.
   */
  atOnce?<T>(
    connection: C,
    waitMs: number,
    work: (at: AtOnce) => T | undefined,
  ): Promise<T | undefined> | undefined;
  /** How what was decided is compared and written in one message. Absent, or undefined: it is not, at least not now. */
  oneCall?(connection: C): OneCall<C> | undefined;
  /** The same inside of the caller's transaction: only its settings. Afterwards they are as they were. */
  inside<T>(connection: C, waitMs: number, work: () => Promise<T>): Promise<T>;
  /**
   * Reads, inside of such a transaction or not, with names that mean what they mean to the server itself. Absent where a session cannot
   * make them mean anything else.
   */
  look?(connection: C, statement: Statement): Promise<readonly Row[]>;
  /**
   * It is worth trying without locks first: readers keep nobody out, and an UPDATE tells how many rows it has changed. Not
   * where there is one writer, who decides alone anyway.
   */
  readonly optimistic: boolean;
  /** So many characters of text in one statement, and in one value. Absent: as many as there may be. */
  readonly largest?: number;
  failure(connection: C, error: unknown): Failure | undefined;
  /** False: nothing keeps out a second row with the same key, so what may be there is looked for before it is written. */
  readonly uniqueKeys?: false;
  /** False: there are none, so a transaction is kept or undone as a whole. */
  readonly savepoints?: false;
  /**
   * So many numbers of a sequence, by its name, each larger than all that it has given before, in their order. Nobody waits for a
   * transaction that has taken some.
   */
  numbers(connection: C, sequence: NumberSequence, count: number): Promise<readonly number[]>;
  /**
   * A lock by a name until the end of the transaction, shared or not, where there is something cheaper than a row for it. Absent: a
   * row is locked.
   */
  exclude?(name: string, shared: boolean): Statement;
  /**
   * Locks of sessions, by a number: the server gives them back when their process is gone, and whether one is free can be asked for many at
   * once. Absent: processes are known by their signs of life alone.
   */
  readonly sessionLocks?: { key(number: number): Key; isFree(number: Statement): Statement };
  /** CREATE TABLE and its indexes, for engines whose migrations do not have them written out. */
  create(table: Table): readonly Statement[];
}
