/** What an engine does with the caller's own tables: the contract behind row locks, table locks and versions. */
import type { Capabilities, RowStrength, TableMode } from "./capabilities.ts";
import type { Connection, LockGrant, Row, Wait } from "./database.ts";
import type { Holder } from "./errors.ts";
import type { Identifier, Statement } from "./sql.ts";

export { type RowStrength, type TableMode, rowStrengths, tableModes } from "./capabilities.ts";

/** What the catalog says of a table. */
export interface TableShape {
  /** As the catalog names it: rows of several tables are locked in the order of these. */
  readonly name: string;
  /** The primary key's columns; none if there is no primary key. */
  readonly key: readonly string[];
  /** Every column, and its type as the engine writes it. */
  readonly columns: ReadonlyMap<string, string>;
  /** Operators that compare columns of these, where it is not the engine's own `=`. */
  readonly equals?: ReadonlyMap<string, string>;
}

/** A condition of equalities (a list: any of these; null: IS NULL), or the caller's own SQL. */
export type Where = Readonly<Record<string, unknown>> | Statement;

/** Rows named by their keys, each a list of values in the order of `key`; or those that a condition holds for. */
export type Which = { readonly keys: readonly (readonly unknown[])[] } | { readonly where: Where };

export interface RowOrder {
  readonly column: string;
  readonly descending: boolean;
}

export interface RowCall {
  readonly table: Identifier;
  readonly shape: TableShape;
  /** The columns that name a row, and in whose order rows are locked. */
  readonly key: readonly string[];
  readonly which: Which;
  /** Undefined: read without a lock. */
  readonly strength: RowStrength | undefined;
  readonly wait: Wait | "skip";
  /** Undefined: all of them. */
  readonly columns: readonly string[] | undefined;
  readonly orderBy: readonly RowOrder[];
  readonly limit: number | undefined;
  /** The transaction belongs to the caller: it may turn out not to exist. */
  readonly joined: boolean;
  readonly capabilities: Capabilities;
  readonly signal?: AbortSignal | undefined;
}

/** Rows named by keys: one entry per key, in the order of these, undefined for what is not there or was skipped. */
export type RowSelection =
  { readonly granted: true; readonly rows: readonly (Row | undefined)[] } | RowRefusal;

type RowRefusal = Extract<LockGrant, { granted: false }>;

export interface TableCall {
  readonly table: Identifier;
  readonly mode: TableMode;
  readonly wait: Wait;
  readonly joined: boolean;
  readonly capabilities: Capabilities;
  readonly signal?: AbortSignal | undefined;
}

/** Compare and set: the row is written only if its version still is the one that was read. */
export interface VersionedWrite {
  readonly table: Identifier;
  readonly shape: TableShape;
  readonly key: readonly string[];
  readonly id: readonly unknown[];
  readonly version: string;
  readonly expected: unknown;
  readonly changes: Readonly<Record<string, unknown>>;
  /** How long somebody else's lock on the row may be waited for. */
  readonly waitMs: number;
  /** It is not part of a transaction: it is one. */
  readonly alone: boolean;
}

/** A query that somebody else sends, and that waits for row locks. */
export interface QueryCall {
  readonly wait: Wait | "skip";
  readonly joined: boolean;
  readonly capabilities: Capabilities;
}

export interface Tables<C extends Connection> {
  /** Undefined: there is no such table. */
  describe(connection: C, table: Identifier): Promise<TableShape | undefined>;
  /** Locks rows in the order of their keys, whatever order they are returned in. */
  select(connection: C, call: RowCall): Promise<RowSelection>;
  /** Positions of those of the keys that name a row, locked by somebody or not. */
  present(connection: C, call: RowCall): Promise<ReadonlySet<number>>;
  /** Locks the whole table until the end of the transaction. */
  lock(connection: C, call: TableCall): Promise<LockGrant>;
  /** The row as it is now, or none if the version was another one. The version counts up by one. */
  write(connection: C, write: VersionedWrite): Promise<RowSelection>;
  /** Bounds the waits of a query of the caller's, sent by `run` on the same connection. Absent: cannot be done here. */
  around?<T>(
    connection: C,
    call: QueryCall,
    run: () => PromiseLike<T>,
  ): Promise<{ readonly granted: true; readonly value: T } | RowRefusal>;
  /** Who holds rows that somebody waited for in vain. */
  holders?(connection: C, call: RowCall): Promise<readonly Holder[]>;
}
